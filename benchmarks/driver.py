"""What driving a device costs: our executor on the emulated card against simpler ways.

All in one run, in turns, so that the figures compare. "Beyond" is the time of a job less what the
card takes for it. Prints the targets and whether this run met them; `--rounds` for more turns.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import trio
from attrs import evolve
from rich.console import Console
from rich.table import Table

from caltrio.config import ExecutorConfig
from caltrio.core.job import Job
from caltrio.device import DeviceOptions, StageTimes
from caltrio.events import JobEnded
from caltrio.executor import open_executor
from caltrio.logits import LogitsLayout, convert
from caltrio.manifest import Manifest, TaskKind, load_manifest
from caltrio.semantics import PRESETS
from caltrio.timing import Compute, ComputeByKind, Figure, Fixed, Source, TimingProfile, Transfer
from hw.bindings import ffi, load
from hw.build import LIBRARIES, SHIM_ON_EMULATOR
from hw.emulator import KIND, write_card

try:
    import openvino as ov
    from openvino import opset13 as ops
except ImportError:
    ov = None

SEMANTICS = PRESETS["full-duplex"].semantics
LENGTHS_US = (0, 100, 5_000, 30_000)
SEQUENCES = 4  # that keep a limit of 1 or 2 filled


def timing(compute_us: int) -> TimingProfile:
    """A card that computes for so long, and does nothing else that takes time."""

    def figure(value: int) -> Figure:
        return Figure(value, Source.ASSUMED, "set by the benchmark")

    compute = Compute(figure(compute_us * 1000), figure(0), figure(0))
    transfer = Transfer(figure(0), figure(10**18))
    nothing = Fixed(figure(0))
    return TimingProfile(
        1, "benchmark", "one length", nothing, transfer, ComputeByKind(compute, compute),
        transfer, nothing, nothing, nothing,
    )  # fmt: skip


def with_vocab(vocab: int) -> Manifest:
    """The product's graphs with another vocabulary."""
    shipped = load_manifest()
    size = {"shape": (1, 1, vocab), "byte_size": 2 * vocab}
    graphs = (evolve(graph, logits=evolve(graph.logits, **size)) for graph in shipped.submodels)
    return evolve(shipped, submodels=tuple(graphs))


SMALL = with_vocab(16)


def steps_for(us: int) -> int:
    """How many jobs make a figure of about half a second, within reason."""
    return max(40, min(3_000, 500_000 // (us + 150)))


# --- the ways --------------------------------------------------------------------------------------


class Direct:
    """The vendor's calls by cffi in one thread: prepare, infer(), Wait(), convert, sample."""

    def __init__(self, manifest: Manifest, us: int, folder: Path) -> None:
        self.lib = load(LIBRARIES / SHIM_ON_EMULATOR)
        calbin = write_card(folder, manifest, timing(us), SEMANTICS)
        self.device = self.lib.caltrio_open(str(calbin).encode(), ffi().new("int32_t *"))
        assert self.lib.caltrio_configure(self.device, 0) == 0
        self.graph = manifest.by_kind[TaskKind.DECODE]
        self.name = self.graph.exact_name.encode()
        self.buffers = self.lib.caltrio_buffers_new(self.device, self.name)
        self.tokens, self.position = np.zeros(1, np.int32), np.zeros(1, np.int32)
        vocab = self.graph.logits.shape[-1]
        self.logits = np.zeros(vocab, np.uint16)
        self.layout, self.out = LogitsLayout(1, vocab, 1), np.empty(vocab, np.float32)
        for tensor, host, call in (
            (self.graph.tokens, self.tokens, self.lib.caltrio_map_input),
            (self.graph.position, self.position, self.lib.caltrio_map_input),
            (self.graph.logits, self.logits, self.lib.caltrio_map_output),
        ):
            memory = ffi().from_buffer(host)
            assert call(self.buffers, tensor.name.encode(), memory, host.nbytes) == 0
        self.length = 0
        self.csrs = self.graph.csr_cur_seq.encode(), self.graph.csr_total_seq.encode()
        self.inputs = self.graph.tokens.name.encode(), self.graph.position.name.encode()

    def step(self, token: int) -> int:
        lib = self.lib
        self.length = self.length % 30_000 + 1
        lib.caltrio_kv_apply(self.device, 0, self.length)
        self.tokens[0], self.position[0] = token, self.length - 1
        lib.caltrio_set_csr(self.device, self.name, self.csrs[0], self.length - 1)
        lib.caltrio_set_csr(self.device, self.name, self.csrs[1], self.length)
        for name in self.inputs:
            lib.caltrio_slice(self.buffers, name, 0, 4)
        assert lib.caltrio_direct_infer(self.device, self.buffers, -1, 0) == 0
        assert lib.caltrio_direct_wait(self.buffers) == 0
        lib.caltrio_undo_slices(self.buffers)
        assert convert(self.logits, self.layout, 0, 0, self.out) == 0
        return int(self.out.argmax())

    def close(self) -> None:
        self.lib.caltrio_stop(self.device)
        while not self.lib.caltrio_stopped(self.device):
            time.sleep(0.001)
        self.lib.caltrio_buffers_free(self.buffers)
        self.lib.caltrio_free(self.device)


@contextmanager
def direct(manifest: Manifest, us: int):
    with TemporaryDirectory() as folder:
        way = Direct(manifest, us, Path(folder))
        try:
            yield way
        finally:
            way.close()


def direct_steps(manifest: Manifest, us: int, count: int) -> list[int]:
    """Nanoseconds of each step, one after another."""
    with direct(manifest, us) as way:
        token, times = 1, []
        for _ in range(count + 20):
            begin = time.perf_counter_ns()
            token = way.step(token)
            times.append(time.perf_counter_ns() - begin)
    return times[20:]


def executor_steps(
    manifest: Manifest, us: int, count: int, limit: int, sequences: int
) -> tuple[float, list[int], list[Job]]:
    """(ns a job, ns of each step as its caller sees it, the jobs)."""
    jobs: list[Job] = []
    times: list[int] = []

    def listen(event: object) -> None:
        if isinstance(event, JobEnded):
            jobs.append(event.job)

    async def client(executor, steps: int, note: list[int]) -> None:
        async with executor.sequence(1, steps) as sequence:
            result = await sequence.prefill([1])
            for _ in range(steps - 1):
                begin = time.perf_counter_ns()  # to sample is part of a step, as in the direct loop
                result = await sequence.decode(int(result.logits.argmax()))
                note.append(time.perf_counter_ns() - begin)

    async def together(executor, steps: int, note: list[int]) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(sequences):
                nursery.start_soon(client, executor, steps, note)

    async def main(opened) -> float:
        config = ExecutorConfig(max_inflight=limit)
        async with (
            opened() as device,
            open_executor(device, manifest, config, listeners=[listen]) as executor,
        ):
            await together(executor, 20, [])
            jobs.clear()
            begin = time.perf_counter_ns()
            await together(executor, max(count // sequences, 10), times)
            return (time.perf_counter_ns() - begin) / (max(count // sequences, 10) * sequences)

    each = KIND.run(main, DeviceOptions(SEMANTICS, timing(us), model=manifest))
    return each, times, jobs


def to_thread_steps(us: int, count: int) -> float:
    """ns a job of the simplest trio executor: each job in a worker thread, one at a time."""

    async def main(way: Direct) -> float:
        one = trio.CapacityLimiter(1)
        begin = 0
        for index in range(count + 20):
            if index == 20:
                begin = time.perf_counter_ns()
            await trio.to_thread.run_sync(way.step, 1, limiter=one)
        return (time.perf_counter_ns() - begin) / count

    with direct(SMALL, us) as way:
        return trio.run(main, way)


def openvino_steps(count: int, requests: int) -> float | None:
    """ns a job of AsyncInferQueue, dictionary inputs, a model of one element; None without it."""
    if ov is None:
        return None
    x = ops.parameter([1], np.float32, name="x")
    model = ov.Model([ops.add(x, ops.constant(np.ones(1, np.float32)))], [x], "one")
    settings = {"NUM_STREAMS": requests, "INFERENCE_NUM_THREADS": 1}
    queue = ov.AsyncInferQueue(ov.Core().compile_model(model, "CPU", settings), requests)
    done: list[int] = []
    queue.set_callback(lambda _request, index: done.append(index))
    value = np.zeros(1, np.float32)

    def jobs(number: int) -> None:
        for index in range(number):
            queue.start_async({0: value}, index)
        queue.wait_all()

    jobs(200)
    begin = time.perf_counter_ns()
    jobs(count)
    return (time.perf_counter_ns() - begin) / count


# --- figures ---------------------------------------------------------------------------------------


def idle_gap(jobs: list[Job]) -> float:
    """Median ns between the end of a compute and the start of the next one on the card."""
    stages = [job.stages for job in jobs if isinstance(job.stages, StageTimes)]
    spans = sorted((s.die_start_ns[0], s.die_end_ns[-1]) for s in stages if s.die_start_ns)
    gaps = [max(begin - end, 0) for (_, end), (begin, _) in pairwise(spans)]
    return float(np.median(gaps))


@contextmanager
def cpu_bound_thread():
    """A Python thread that computes without end, as a tokenizer or a sampler beside us might."""
    stop = threading.Event()

    def spin() -> None:
        number = 0
        while not stop.is_set():
            number = (number * 3 + 1) % 1_000_003

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


Figures = dict[tuple[str, int], list[float]]


def measure(figures: Figures, lengths: tuple[int, ...], note: Callable[[str], None]) -> None:
    """One turn of every way, in microseconds a job beyond the card's time."""

    def add(name: str, us: int, ns: float) -> None:
        figures.setdefault((name, us), []).append(ns / 1000 - us)

    for us in lengths:
        count = steps_for(us)
        note(f"jobs of {us} us")
        add("direct cffi loop", us, float(np.mean(direct_steps(SMALL, us, count))))
        for limit, sequences in ((1, 1), (1, SEQUENCES), (2, SEQUENCES)):
            each, _, jobs = executor_steps(SMALL, us, count, limit, sequences)
            name = f"executor, {limit} in flight, {sequences} sequence{'s' * (sequences > 1)}"
            add(name, us, each)
            if limit == 2:
                figures.setdefault(("gap", us), []).append(idle_gap(jobs) / 1000)
        add("trio.to_thread.run_sync", us, to_thread_steps(us, count))
        if us == 0:
            for requests in (1, 2):
                each = openvino_steps(steps_for(0), requests)
                if each is not None:
                    add(f"OpenVINO AsyncInferQueue({requests})", us, each)


def table(figures: Figures, lengths: tuple[int, ...], title: str) -> Table:
    made = Table(title=title)
    made.add_column("us a job beyond the card's time")
    for us in lengths:
        made.add_column(f"{us:,} us jobs", justify="right")
    for name in dict.fromkeys(name for name, _ in figures if name != "gap"):
        cells = [figures.get((name, us)) for us in lengths]
        made.add_row(name, *(f"{np.median(c):.1f}" if c else "-" for c in cells))
    return made


def tpot(screen: Console, rounds: int) -> list[str]:
    """One request's TPOT against the direct loop's, with the product's vocabulary (13.3)."""
    product = load_manifest()
    verdicts = []
    for us in (5_000, 30_000):
        ours: list[int] = []
        theirs: list[int] = []
        count = 4 * steps_for(us)
        for _ in range(rounds):
            theirs += direct_steps(product, us, count)
            ours += executor_steps(product, us, count, 1, 1)[1]
        for percentile, allowed in ((50, 0.03), (99, 0.05)):
            mine, base = np.percentile(ours, percentile), np.percentile(theirs, percentile)
            above = mine / base - 1
            verdicts.append(
                f"TPOT P{percentile} of one request at {us / 1000:g} ms: {mine / 1e6:.3f} ms, "
                f"direct loop {base / 1e6:.3f} ms, {above:+.1%} (target {allowed:+.0%}): "
                f"{'met' if above <= allowed else 'MISSED'}"
            )
    for verdict in verdicts:
        screen.print(verdict)
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    screen = Console(width=120)

    def note(text: str) -> None:
        screen.print(f"  {text}", style="dim", highlight=False)

    figures: Figures = {}
    for turn in range(options.rounds):
        note(f"turn {turn + 1} of {options.rounds}")
        measure(figures, LENGTHS_US, note)
    screen.print(table(figures, LENGTHS_US, f"Alone; median of {options.rounds} turns"))
    ours = np.median(figures["executor, 1 in flight, 4 sequences", 0])
    theirs = figures.get(("OpenVINO AsyncInferQueue(1)", 0))
    if theirs:
        ratio = ours / np.median(theirs)
        met = "met" if ratio <= 1.25 else "MISSED"
        screen.print(f"1 in flight / OpenVINO, 0 us jobs: {ratio:.2f} (target at most 1.25): {met}")
    else:
        screen.print("OpenVINO is not installed: pip install openvino")
    gap = np.median(figures["gap", 5_000]) / 5_000
    met = "met" if gap < 0.01 else "MISSED"
    screen.print(f"idle gap of the card at 5 ms, 2 in flight: {gap:.2%} of a job (target < 1%): {met}")
    tpot(screen, options.rounds)
    beside: Figures = {}
    with cpu_bound_thread():
        measure(beside, (0, 5_000), note)
    screen.print(table(beside, (0, 5_000), "Beside a CPU-bound Python thread; one turn"))


if __name__ == "__main__":
    main()
