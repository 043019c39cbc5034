"""How fast the compiled twin simulates, against the executor in the loop in the same run.

A step is one job on the device. Rates are the best of several alternated rounds: absolute times vary
from machine to machine and from minute to minute, their ratio much less.

    python benchmarks/twin.py [--trace AzureLLMInferenceTrace_conv.csv] [--steps 4000000]

Without a trace it takes lognormal lengths of about the same mean.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np
from attrs import evolve

from caltrio.config import ExecutorConfig
from caltrio.scenario import Scenario
from caltrio.semantics import PRESETS
from caltrio.timing import Jitter
from caltrio.workload.requests import Request
from caltrio.workload.spec import Arrivals, Lengths, Workload
from caltrio.workload.traces import read_trace
from sim.fast import request_array, run_twin
from sim.run import simulate

TRACE_REQUESTS = 500


def lengths(trace: Path | None) -> tuple[np.ndarray, str]:
    """The requests to repeat, and what they are."""
    if trace is not None and trace.exists():
        rows = read_trace(trace, "auto", TRACE_REQUESTS)
        return request_array(rows), f"the first {TRACE_REQUESTS} requests of {trace.name}"
    made = Workload(
        arrivals=Arrivals(clients=1),
        lengths=Lengths("lognormal", prompt_tokens=1155, output_tokens=211),
        requests=TRACE_REQUESTS,
    )
    return request_array(made.build(1)), f"{TRACE_REQUESTS} requests of lognormal lengths"


def steps_of(requests: np.ndarray) -> int:
    """Jobs that they take: a prefill each, and a decode step for each token but the first."""
    return int((1 + np.maximum(requests[:, 2] - 1, 0)).sum())


def repeated(requests: np.ndarray, steps: int) -> np.ndarray:
    """As many times as it takes for so many steps."""
    return np.tile(requests, (-(-steps // steps_of(requests)), 1))


def scenario(preset: str, sequences: int, *, jitter: bool, max_inflight: int = 2) -> Scenario:
    """Closed: so many sequences never rest."""
    one = Scenario(
        semantics=PRESETS[preset].semantics,
        workload=Workload(arrivals=Arrivals(clients=sequences)),
        executor=ExecutorConfig(
            max_inflight=max_inflight, max_active_sequences=sequences, kv_capacity_tokens=10**9
        ),
    )
    return one if jitter else evolve(one, timing=evolve(one.timing, jitter=Jitter()))


def twin_rate(one: Scenario, requests: np.ndarray, *, tables: bool = False) -> float:
    """Steps per second, everything that a caller waits for included."""
    begin = time.perf_counter()
    run = run_twin(one, requests, tables=tables)
    assert run.executor_because is None
    return run.summary.jobs / (time.perf_counter() - begin)


def executor_rate(one: Scenario, requests: np.ndarray) -> float:
    """Steps per second of the executor itself in virtual time."""
    records = [Request(index, *row) for index, row in enumerate(requests.tolist())]
    begin = time.perf_counter()
    run = simulate(one, requests=records)
    return run.summary.jobs / (time.perf_counter() - begin)


def _work(steps: int) -> float:
    requests, _ = lengths(None)
    return twin_rate(scenario("full-duplex", 8, jitter=False), repeated(requests, steps))


def million(requests: int) -> None:
    """A run of so many requests; prints its seconds and the most memory that the process took."""
    rows = np.zeros((requests, 3), np.int64)
    rows[:, 1], rows[:, 2] = 500, 8
    begin = time.perf_counter()
    run = run_twin(scenario("full-duplex", 8, jitter=True), rows)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    jobs = run.summary.jobs
    print(f"  {requests:,} requests, {jobs:,} steps: {seconds:.1f} s, {peak:,.0f} MiB at most")


@click.command()
@click.option("--trace", type=click.Path(path_type=Path), help="A request trace.")
@click.option("--steps", default=4_000_000, show_default=True)
@click.option("--rounds", default=12, show_default=True)
@click.option("--million", "count", type=int, hidden=True)
def main(trace: Path | None, steps: int, rounds: int, count: int | None) -> None:
    """Print steps per second of the twin, and how many times the executor's that is."""
    if count is not None:
        million(count)
        return
    once, what = lengths(trace)
    many, few = repeated(once, steps), once[:12]
    begin = time.perf_counter()
    run_twin(scenario("serial", 1, jitter=True), once[:2])
    print(f"compiling or loading the twin: {time.perf_counter() - begin:.1f} s")
    print(f"{what}, repeated to {steps_of(many):,} steps; summary mode; best of {rounds} rounds")

    main_one = scenario("full-duplex", 8, jitter=False)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(twin_rate(main_one, many))
        theirs.append(executor_rate(main_one, few))
    best, slow = max(ours), max(theirs)
    print(
        f"full-duplex, 8 sequences, 2 in flight: twin {best:,.0f} steps/s (at least 10,000,000), "
        f"executor in the loop {slow:,.0f} steps/s; ratio {best / slow:,.0f} (at least 500)"
    )
    table = max(twin_rate(main_one, repeated(once, steps // 8), tables=True) for _ in range(2))
    print(f"the same with both tables in memory: {table:,.0f} steps/s")

    print("million steps/s by preset and sequences, without and with the profile's jitter:")
    for preset in PRESETS:
        cells = []
        for sequences in (1, 8, 64):
            plain, jittered = (
                max(
                    twin_rate(scenario(preset, sequences, jitter=jitter), repeated(once, steps // 4))
                    for _ in range(max(rounds // 4, 1))
                )
                for jitter in (False, True)
            )
            cells.append(f"{sequences:3}: {plain / 1e6:5.1f} {jittered / 1e6:5.1f}")
        print(f"  {preset:15} {'   '.join(cells)}")

    print("memory of one run, in a process of its own:")
    for size in (100_000, 1_000_000):
        subprocess.run([sys.executable, __file__, "--million", str(size)], check=True)

    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(_work, [10_000] * 4))  # both have loaded the kernel
        begin = time.perf_counter()
        _work(steps)
        _work(steps)
        one_by_one = time.perf_counter() - begin
        begin = time.perf_counter()
        list(pool.map(_work, [steps] * 2))
        together = time.perf_counter() - begin
    ratio = one_by_one / together
    print(f"two runs in two processes: {ratio:.2f} times as fast as one after the other")


if __name__ == "__main__":
    main()
