"""The twelve defects of §2, S01 to S12: one test each, and a broken executor that it catches."""

import json
import os
import subprocess
import sys
import tracemalloc
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from attrs import evolve

from caltrio import logits
from caltrio.codes import CalrtCode
from caltrio.config import ExecutorConfig, KvPolicy
from caltrio.core import scheduler
from caltrio.core.buffers import BufferLease, BufferPool
from caltrio.core.job import JobTimings
from caltrio.core.kv import KvCoordinator, KvTxnState
from caltrio.core.lifecycle import LifecycleState
from caltrio.core.scheduler import Core
from caltrio.errors import (
    CsrRejected,
    DeadlineExceeded,
    DeviceFailed,
    JobCancelled,
    RequestError,
    ResourceExhausted,
    Unavailable,
)
from caltrio.events import BufferQuarantined, JobEnded
from caltrio.executor import open_executor
from caltrio.manifest import Manifest, ManifestMismatch, device_models, load_manifest
from caltrio.observe.prometheus import PrometheusMetrics
from caltrio.prepare import HostMemory, host_memory
from caltrio.semantics import EngineSemantics, SubmitWhenFull
from caltrio.testing import FakeDevice
from caltrio.tokens import ReferenceSequence, generate

MS = 1_000_000
VOCAB = 128
ROOT = Path(__file__).parents[1]


def small(rows=1, **names):
    """The shipped manifest with a small vocabulary, and perhaps other names of its graphs."""
    graphs = []
    for graph in load_manifest().submodels:
        tensor = evolve(graph.logits, shape=(1, rows, VOCAB), byte_size=2 * rows * VOCAB)
        name = names.get(graph.exact_name, graph.exact_name)
        graphs.append(evolve(graph, logits=tensor, exact_name=name))
    return evolve(load_manifest(), submodels=tuple(graphs))


SMALL = small()
ONE_ENGINE = EngineSemantics(engines=1, submit_when_full=SubmitWhenFull.BLOCK)


@pytest.fixture
def clock():
    return trio.testing.MockClock(autojump_threshold=0)


class Manager:
    """A runtime's ``KvManager`` that counts ``Apply()``, and refuses whom it is told to."""

    def __init__(self, *refused):
        self.refused = set(refused)
        self.applied = 0

    def can_allocate(self, sequences):
        return True

    def apply(self, sequence_id, target_tokens):
        self.applied += 1
        return sequence_id not in self.refused

    def release(self, sequence_id):
        pass


@asynccontextmanager
async def opened(device, *, listeners=(), **limits):
    events = []
    with trio.fail_after(10_000):  # virtual
        async with open_executor(
            device, device.manifest, ExecutorConfig(**limits), listeners=[events.append, *listeners]
        ) as executor:
            executor.events = events
            yield executor
    assert not executor.core.open
    assert executor.core.pool.leased == 0


async def greedy(executor, prompt, count):
    """So many tokens after ``prompt``, as the device says."""
    async with executor.sequence(len(prompt), count) as sequence:
        result = await sequence.prefill(prompt)
        tokens = [int(result.logits.argmax())]
        while len(tokens) < count:
            tokens.append(int((await sequence.decode(tokens[-1])).logits.argmax()))
    return tokens


def ended_jobs(executor):
    return [event.job for event in executor.events if isinstance(event, JobEnded)]


# --- S01: Apply() was retried in a loop without sleep, deadline or cancellation ---------------------


class Steps(trio.abc.Instrument):
    count = 0

    def before_task_step(self, task):
        self.count += 1


async def starve():
    """A request for which ``Apply()`` never succeeds: (seconds until its end, calls, task steps)."""
    manager, steps = Manager(0), Steps()
    async with opened(
        FakeDevice(manifest=SMALL, kv=manager), admission_timeout_ns=500 * MS
    ) as executor:
        begin = trio.current_time()
        trio.lowlevel.add_instrument(steps)
        with pytest.raises(DeadlineExceeded):
            await greedy(executor, [1, 2], 2)
        trio.lowlevel.remove_instrument(steps)
        return trio.current_time() - begin, manager.applied, steps.count


async def test_s01_a_refusal_of_kv_is_waited_out_without_a_loop(clock, monkeypatch):
    waited_s, applied, steps = await starve()
    assert waited_s == pytest.approx(0.5)
    assert applied == 1
    assert steps < 50

    # It can be cancelled, and the shutdown ends it.
    ended = []
    device = FakeDevice(manifest=SMALL, kv=Manager(0))

    async def waits(executor):
        try:
            await greedy(executor, [1, 2], 2)
        except JobCancelled as error:
            ended.append(error)

    async with trio.open_nursery() as nursery:
        async with opened(device, admission_timeout_ns=10_000 * MS) as executor:
            with trio.move_on_after(0.1) as scope:
                await greedy(executor, [1, 2], 2)
            assert scope.cancelled_caught
            nursery.start_soon(waits, executor)
            await trio.sleep(0.1)
    assert len(ended) == 1
    assert trio.current_time() < 1

    real = KvCoordinator.reserve

    def loops(self, sequence_id, target_tokens):
        return any(real(self, sequence_id, target_tokens) for _ in range(1000))

    monkeypatch.setattr(KvCoordinator, "reserve", loops)
    assert (await starve())[1] == 1000


# --- S02: a second Apply() after infer() that failed ended the process ------------------------------


async def refused_once_on_the_device():
    """From the first ``infer()`` on the runtime gives no more KV."""
    manager = Manager()

    class Device(FakeDevice):
        async def infer(self, job):
            manager.refused = {0}
            return await super().infer(job)

    async with opened(Device(manifest=SMALL, kv=manager)) as executor:
        return await greedy(executor, [1, 2], 4)


async def test_s02_a_second_refusal_of_kv_aborts_nothing(clock, monkeypatch):
    assert await refused_once_on_the_device() == generate(VOCAB, [1, 2], 4)

    # Where there is a second Apply(), its refusal is an error of that request alone.
    manager = Manager()
    said = []

    async def goes_on(sequence):
        await trio.sleep(0.05)  # behind the step that waits, and with a later deadline
        said.append(int((await sequence.prefill([5, 6, 7])).logits.argmax()))
        while len(said) < 6:
            said.append(int((await sequence.decode(said[-1])).logits.argmax()))

    async with opened(
        FakeDevice(manifest=SMALL, kv=manager),
        kv_policy=KvPolicy.GROW, admission_timeout_ns=100 * MS, max_inflight=2,
    ) as executor:  # fmt: skip
        async with trio.open_nursery() as nursery, executor.sequence(3, 6) as other:
            with pytest.raises(ResourceExhausted) as caught:
                async with executor.sequence(2, 3) as sequence:
                    await sequence.prefill([1, 2])
                    manager.refused = {sequence.request.sequence_id}
                    nursery.start_soon(goes_on, other)
                    await sequence.decode(3)
            assert caught.value.http == 429
            assert executor.core.lifecycle is LifecycleState.READY
            while len(said) < 6:
                await trio.sleep(0.001)
        assert said == generate(VOCAB, [5, 6, 7], 6)
        manager.refused = set()
        assert await greedy(executor, [1, 2], 3) == generate(VOCAB, [1, 2], 3)

    real = KvCoordinator.commit

    def applies_again(self, txn):
        assert self._manager.apply(txn.sequence_id, txn.target_len), "abort()"
        real(self, txn)

    monkeypatch.setattr(KvCoordinator, "commit", applies_again)
    aborted = pytest.RaisesExc(AssertionError, match="abort")
    with pytest.RaisesGroup(aborted, flatten_subgroups=True):
        await refused_once_on_the_device()


# --- S03: the return code of SetCsrByName() was not looked at ---------------------------------------


class NoCsr(FakeDevice):
    def __init__(self, wrong):
        super().__init__(manifest=SMALL)
        self.wrong = wrong

    def set_csr(self, graph, name, value):
        return CalrtCode.OUT_OF_RANGE if name == self.wrong else super().set_csr(graph, name, value)


async def without_csr(wrong):
    """(error, jobs that the device was given) where one CSR is not there."""
    device = NoCsr(wrong)
    async with opened(device) as executor:
        error = None
        try:
            await greedy(executor, [1, 2], 1)
        except RequestError as caught:
            error = caught
        assert executor.core.kv.reserved_tokens == 0
        assert not executor.core.pool.quarantined
    return error, device.inferred


@pytest.mark.parametrize("wrong", ["cur_seq", "total_seq"])
async def test_s03_a_csr_that_cannot_be_set_stops_the_job_before_submit(clock, monkeypatch, wrong):
    error, inferred = await without_csr(wrong)
    assert type(error) is CsrRejected
    assert (error.code, error.phase) == (CalrtCode.OUT_OF_RANGE, "prepare")
    assert inferred == []

    real = HostMemory.load

    def unchecked(self, device, job):
        with suppress(CsrRejected):
            real(self, device, job)

    monkeypatch.setattr(HostMemory, "load", unchecked)
    assert await without_csr(wrong) == (None, [0])


# --- S04: the return code of infer() was not looked at ----------------------------------------------


async def refused_by_infer(code):
    """(error, jobs that Wait() returned, KV, quarantined slots); error ``None``: no answer in 1 s."""
    device = FakeDevice(manifest=SMALL, submit_codes={0: code})
    async with opened(device) as executor:
        error = None
        with trio.move_on_after(1):
            try:
                await greedy(executor, [1, 2], 1)
            except RequestError as caught:
                error = caught
    (job,) = ended_jobs(executor)
    return error, device.waited, job.kv.state, len(executor.core.pool.quarantined)


@pytest.mark.parametrize(("code", "kind"), [(17, Unavailable), (18, Unavailable), (28, DeviceFailed)])
async def test_s04_a_job_that_infer_refused_is_never_waited_for(clock, monkeypatch, code, kind):
    error, waited, kv, quarantined = await refused_by_infer(code)
    assert type(error) is kind
    assert (error.code, error.phase) == (code, "submit")
    assert (waited, kv, quarantined) == ([], KvTxnState.ROLLED_BACK, 0)

    real = Core.submit_returned
    monkeypatch.setattr(
        Core, "submit_returned", lambda self, job, rc, now_ns: real(self, job, 0, now_ns)
    )
    assert (await refused_by_infer(code))[0] is None


# --- S05: the return code of Wait() was not looked at -----------------------------------------------


async def failed_on_the_device(**script):
    """(error, was the caller's array written to, KV, quarantined slots)."""
    out = np.full(VOCAB, -7, np.float32)
    error = None
    async with opened(FakeDevice(manifest=SMALL, **script)) as executor:
        try:
            async with executor.sequence(2, 1) as sequence:
                await sequence.prefill([1, 2], out=out)
        except RequestError as caught:
            error = caught
    (job,) = ended_jobs(executor)
    lost = [event for event in executor.events if isinstance(event, BufferQuarantined)]
    return error, bool((out != -7).any()), job.kv.state, len(lost)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ({"wait_codes": {0: 13}}, DeadlineExceeded),
        ({"wait_codes": {0: 18}}, Unavailable),
        ({"exceptions": {0}}, DeviceFailed),  # though Wait() returned 0
    ],
)
async def test_s05_a_failed_wait_is_no_success(clock, monkeypatch, script, kind):
    error, written, kv, lost = await failed_on_the_device(**script)
    assert type(error) is kind
    assert error.phase == "execute"
    assert (written, kv, lost) == (False, KvTxnState.UNKNOWN, 1)

    real = Core.wait_returned
    monkeypatch.setattr(
        Core,
        "wait_returned",
        lambda self, job, rc, now_ns, *, exception, calls: real(self, job, 0, now_ns, exception=False),
    )
    assert (await failed_on_the_device(**script))[:3] == (None, True, KvTxnState.COMMITTED)


# --- S06: one set of buffers for all jobs ------------------------------------------------------------

PROMPTS = [[1, 2, 3], [9], [70, 80, 90, 100], [33, 44]]


async def side_by_side():
    """(tokens by prompt, the most jobs at once, did two of them share a byte of host memory)."""
    now, most, shared = {}, 0, False

    class Device(FakeDevice):
        async def infer(self, job):
            nonlocal most, shared
            memory = host_memory(job)
            ours = (memory.tokens, memory.positions, memory.logits)
            shared |= any(
                np.may_share_memory(mine, theirs)
                for other in now.values() for mine in ours for theirs in other
            )  # fmt: skip
            now[job.job_id] = ours
            most = max(most, len(now))
            return await super().infer(job)

        async def wait(self):
            done = await super().wait()
            del now[done.job.job_id]
            return done

    said = {}
    device = Device(manifest=SMALL, semantics=ONE_ENGINE)
    async with opened(device, max_inflight=2) as executor, trio.open_nursery() as nursery:

        async def one(index):
            said[index] = await greedy(executor, PROMPTS[index], 20)

        for index in range(len(PROMPTS)):
            nursery.start_soon(one, index)
    return [said[index] for index in range(len(PROMPTS))], most, shared


async def test_s06_each_job_in_flight_has_memory_of_its_own(clock, monkeypatch):
    golden = [generate(VOCAB, prompt, 20) for prompt in PROMPTS]
    assert await side_by_side() == (golden, 2, False)

    def in_use(self, kind, engine):
        self.leased += 1
        return BufferLease(self, self._free[kind, engine][0])  # and there it stays

    monkeypatch.setattr(BufferPool, "acquire", in_use)
    tokens, most, shared = await side_by_side()
    assert shared
    assert most == 2
    assert tokens != golden


# --- S07: buffers were made for each job -------------------------------------------------------------


class Counting(FakeDevice):
    made = 0

    def buffers(self, contract, engine):
        self.made += 1
        return super().buffers(contract, engine)


async def test_s07_buffers_are_made_once_a_generation(clock, monkeypatch):
    semantics = EngineSemantics(engines=2, submit_when_full="block", reset_scope="device")
    device = Counting(manifest=SMALL, semantics=semantics, exceptions={200})
    async with opened(device, max_inflight=2) as executor:
        total = executor.core.pool.total
        assert device.made == total > 0
        for _ in range(20):
            await greedy(executor, [1, 2], 10)
        assert len(ended_jobs(executor)) == 200
        assert device.made == total
        with pytest.raises(DeviceFailed):
            await greedy(executor, [1], 1)
        while not executor.core.health.ready:
            await trio.sleep(0.001)
        assert executor.generation.generation_id == 2
        assert device.made == total + executor.core.pool.total

    real = BufferPool.acquire

    def anew(self, kind, engine):
        lease = real(self, kind, engine)
        old = lease.slot.memory
        buffers = device.buffers(old.contract, engine)
        lease.slot.memory = HostMemory(old.contract, old.tile_d0, buffers)
        return lease

    monkeypatch.setattr(BufferPool, "acquire", anew)
    device = Counting(manifest=SMALL)
    async with opened(device) as executor:
        await greedy(executor, [1, 2], 10)
        assert device.made == executor.core.pool.total + 10


# --- S08: a graph was chosen by a part of its name, and the last one won -----------------------------


class Held(FakeDevice):
    """Holds graphs of other names than the manifest's; knows for which one it was given CSRs."""

    def __init__(self, manifest, *names):
        super().__init__(manifest=manifest)
        graphs = device_models(manifest, 16)
        self.held = [evolve(graphs[index], name=name) for index, name in names]
        self.graphs = []

    def models(self):
        return self.held

    def set_csr(self, graph, name, value):
        self.graphs.append(graph)
        return super().set_csr(graph, name, value)


@pytest.mark.parametrize(
    "names",
    [
        [(0, "prefill"), (1, "decode"), (0, "prefill_v2")],  # a surplus one that contains the right one
        [(0, "prefill_v2"), (1, "decode")],  # only that
        [(0, "pre"), (1, "decode")],  # only a part
        [(0, "prefill"), (1, "decode"), (1, "decode")],  # twice
    ],
)
async def test_s08_names_of_graphs_are_exact_or_nothing_starts(clock, names):
    device = Held(SMALL, *names)
    with pytest.raises(ManifestMismatch):
        async with opened(device):
            pass
    assert device.configured == []


@pytest.mark.parametrize("order", [1, -1])
async def test_s08_a_name_that_contains_another_one_is_not_taken_for_it(clock, monkeypatch, order):
    manifest = small(prefill="qwen", decode="qwen_decode")
    names = [(0, "qwen"), (1, "qwen_decode")][::order]
    device = Held(manifest, *names)
    async with opened(device) as executor:
        assert await greedy(executor, [1], 2) == generate(VOCAB, [1], 2)
    assert device.graphs == ["qwen"] * 2 + ["qwen_decode"] * 2

    def by_substring(self):
        return {
            one.kind: [graph for graph in self.submodels if one.exact_name in graph.exact_name][-1]
            for one in self.submodels
        }

    monkeypatch.setattr(Manifest, "by_kind", property(by_substring))
    manifest = small(prefill="qwen", decode="qwen_decode")
    with pytest.raises(RequestError):
        async with opened(Held(manifest, *names)) as executor:
            await greedy(executor, [1], 2)


# --- S09: D0 = 16 stood in the code ------------------------------------------------------------------


class Tiled(FakeDevice):
    """Logits ``[1, 4, vocab]`` in tiles ``[vocab / d0][4][d0]``; the last row is the answer."""

    def __init__(self, d0):
        super().__init__(manifest=small(rows=4))
        self.d0 = d0

    def models(self):
        return device_models(self.manifest, self.d0)

    def _compute(self, job):
        memory = host_memory(job)
        cells = self._cells.setdefault(job.sequence_id, [])
        cells += memory.tokens[: job.token_count].tolist()
        matrix = np.stack([
            np.frombuffer(ReferenceSequence(VOCAB, [*cells, *[7] * more]).logits(), np.uint16)
            for more in (3, 2, 1, 0)
        ])  # fmt: skip
        memory.logits[:] = matrix.reshape(4, VOCAB // self.d0, self.d0).swapaxes(0, 1).ravel()


async def untiled(d0):
    """Three greedy tokens, and the whole last row of each."""
    rows = []
    async with opened(Tiled(d0)) as executor, executor.sequence(2, 3) as sequence:
        result = await sequence.prefill([1, 2])
        for _ in range(2):
            rows.append(result.logits.tolist())
            result = await sequence.decode(int(result.logits.argmax()))
        rows.append(result.logits.tolist())
    return rows


@pytest.mark.parametrize("d0", [1, 8, 16, 64, VOCAB])
async def test_s09_the_tile_size_is_that_of_the_graph(clock, monkeypatch, d0):
    sequence, golden = ReferenceSequence(VOCAB, [1, 2]), []
    for _ in range(3):
        bits = np.frombuffer(sequence.logits(), np.uint16).astype(np.uint32) << 16
        golden.append(bits.view(np.float32).tolist())
        sequence.feed(sequence.next_token())
    assert await untiled(d0) == golden

    real = HostMemory.__init__
    monkeypatch.setattr(
        HostMemory,
        "__init__",
        lambda self, contract, _d0, buffers: real(self, contract, 16, buffers),
    )
    assert (await untiled(d0) == golden) == (d0 == 16)


# --- S10: the whole vocabulary went through a temporary array ----------------------------------------


class Ramp(FakeDevice):
    def _compute(self, job):
        words = host_memory(job).logits
        words[:] = np.arange(words.size) % 0x7F00  # all finite


async def region(monkeypatch, base, count):
    """(bytes that the delivery allocated at the most, the array with a guard on each side)."""
    peaks = []
    real = HostMemory.deliver

    def traced(self, job):
        tracemalloc.start()
        try:
            return real(self, job)
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    with monkeypatch.context() as patch:
        patch.setattr(HostMemory, "deliver", traced)
        async with opened(Ramp()) as executor, executor.sequence(2, 3) as sequence:
            whole = np.full(count + 2, -7, np.float32)
            await sequence.prefill([1, 2])
            for _ in range(2):  # the first one makes what stays
                await sequence.decode(3, out=whole[1:-1], base=base)
    return peaks[-1], whole


async def test_s10_only_the_region_is_written_and_nothing_is_allocated_for_it(clock, monkeypatch):
    vocab = load_manifest().submodels[0].logits.shape[-1]
    for base, count in ((0, vocab), (70_001, 1000), (vocab - 1, 1)):
        peak, whole = await region(monkeypatch, base, count)
        assert peak < 8192
        assert whole[0] == whole[-1] == -7
        words = np.arange(base, base + count) % 0x7F00
        assert (whole[1:-1].view(np.uint32) == words.astype(np.uint32) << 16).all()

    real = logits.convert

    def by_copy(source, layout, row, base, out):
        temporary = np.empty(layout.vocab, np.float32)
        bad = real(source, layout, row, 0, temporary)
        out[:] = temporary[base : base + out.size]
        return bad

    monkeypatch.setattr(logits, "convert", by_copy)
    assert (await region(monkeypatch, 70_001, 1000))[0] > 4 * vocab


# --- S11: timings stood in maps by sequence id -------------------------------------------------------


def sums(metrics, stage):
    """(count, sum in s) of a stage of the prefills."""
    labels = f'{{kind="prefill_ids",stage="{stage}"}}'
    lines = dict(line.rsplit(" ", 1) for line in metrics.text().splitlines() if line[0] != "#")
    return tuple(
        float(lines.get(f"caltrio_job_seconds_{part}{labels}", 0)) for part in ("count", "sum")
    )


async def one_id_three_times():
    """A slow request, a fast one, and one that is refused, all in sequence 0."""
    metrics = PrometheusMetrics()
    device = FakeDevice(7 * MS, manifest=SMALL, submit_codes={2: 14})
    waits = []
    async with opened(device, listeners=[metrics], max_active_sequences=1) as executor:
        for busy_ms in (7, 1):
            device.busy_ns = busy_ms * MS
            async with executor.sequence(2, 1) as sequence:
                waits.append((await sequence.prefill([1, 2])).timings)
        with pytest.raises(RequestError):
            await greedy(executor, [1, 2], 1)
    jobs = ended_jobs(executor)
    assert {job.sequence_id for job in jobs} == {0}
    assert [job.timings for job in jobs[:2]] == waits
    spans = [(one.waited_ns or 0) - (one.submitted_ns or 0) for one in (job.timings for job in jobs)]
    return [round(ns / MS) for ns in spans], sums(metrics, "device_wait"), sums(metrics, "queued")[0]


async def test_s11_a_sequence_id_that_is_used_again_has_no_past(clock, monkeypatch):
    spans, (count, total_s), queued = await one_id_three_times()
    assert spans == [7, 1, 0]  # the third one never had a device to wait for
    assert count == 2
    assert total_s == pytest.approx(0.008, rel=1e-3)
    assert queued == 3

    by_sequence = JobTimings(0)
    monkeypatch.setattr(scheduler, "JobTimings", lambda _accepted_ns: by_sequence)
    with pytest.raises(AssertionError):
        assert (await one_id_three_times())[0] == [7, 1, 0]


# --- S12: inputs and outputs were dumped into a folder of somebody's ---------------------------------

WATCHED = """
import json, sys
from pathlib import Path
import numpy as np
import caltrio.logits
from attrs import evolve
from caltrio.config import ExecutorConfig
from caltrio.errors import RequestError
from caltrio.executor import open_executor
from caltrio.faults import Fault, FaultPlan, FaultyDevice
from caltrio.manifest import load_manifest
from caltrio.prepare import HostMemory
from caltrio.semantics import PRESETS
from caltrio.costs import Costs, stage_ns
from caltrio.timing import load_timing
from sim.clock import run_virtual
from sim.device import SimDevice

written = []

def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        if args[2] & 3 or str(args[1] or "r")[0] in "wax":
            written.append(str(args[0]))
    elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink"):
        written.append(str(args[0]))

sys.addaudithook(hook)

async def main(clock):
    # A good job, one whose output is NaN, and a failed one: a failure is what people dump for.
    plan = FaultPlan([Fault("nan_output", job_id=2)])
    semantics = evolve(PRESETS["full-duplex"].semantics, reset_scope="device")
    device = FaultyDevice(SimDevice(clock, semantics, tokens=True), plan)
    async with open_executor(device, load_manifest(), ExecutorConfig()) as executor:
        async with executor.sequence(2, 4) as sequence:
            token = int((await sequence.prefill([1, 2])).logits.argmax())
            await sequence.decode(token)
            try:
                await sequence.decode(token)
            except RequestError:
                return "failed"

def run():
    written.clear()
    ended = run_virtual(main, Costs(load_timing("qwen3-8b"), load_manifest(), 0))
    return ended, list(written), sorted(map(str, Path.cwd().rglob("*")))

stage_ns(Costs(load_timing("qwen3-8b"), load_manifest(), 0).table, 0, 2, 1, 1, 1, 0, 0)
clean = run()
real = HostMemory.deliver

def dumping(self, job):
    np.save(Path.home() / f"dump-{job.job_id}.npy", self.logits)
    return real(self, job)

HostMemory.deliver = dumping
print(json.dumps([clean, run()]))
"""


def test_s12_nothing_of_a_request_is_written_anywhere(tmp_path):
    home, cache = tmp_path / "home", tmp_path / "cache"
    home.mkdir()
    places = {name: str(home) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED],
        cwd=home,
        env={
            **os.environ,
            **places,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NUMBA_CACHE_DIR": str(cache),  # machine code, made on first use
            "MPLCONFIGDIR": str(cache),  # a list of fonts, likewise
        },
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    clean, dumping = json.loads(done.stdout)
    assert clean == ["failed", [], []]
    assert len(dumping[1]) == len(dumping[2]) == 3  # the watch sees it
