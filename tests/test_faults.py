"""Injected faults strike where they say; drills pass, and differ for executors that are broken."""

from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import trio.testing
from attrs import evolve
from support import small_manifest

import caltrio.executor
from caltrio.config import ExecutorConfig
from caltrio.core import buffers, health, kv, scheduler
from caltrio.core.lifecycle import LifecycleState
from caltrio.device import DeviceOptions
from caltrio.drills import BEYOND, DRILLS, MS, Setup, run_drill
from caltrio.errors import RequestError, ServiceFailed
from caltrio.events import BufferQuarantined, LifecycleChanged, StaleCompletion
from caltrio.executor import open_executor
from caltrio.faults import ALWAYS, CODES, Fault, FaultPlan, FaultyDevice, Point
from caltrio.golden import check, reference_golden
from caltrio.manifest import ManifestMismatch, ModelGeneration
from caltrio.prepare import HostMemory
from caltrio.semantics import EngineSemantics, ResetScope
from caltrio.soak import NS_PER_HOUR, Soak, SoakSpec
from caltrio.testing import FakeDevice
from caltrio.timing import load_timing
from caltrio.tokens import generate
from sim.device import KIND

VOCAB = 64
SMALL = small_manifest(VOCAB)
TIMING = load_timing("qwen3-8b")
GOLDEN = reference_golden("small", VOCAB, 6, lengths=False)
ALL = {drill.name: drill for drill in (*DRILLS, *BEYOND)}


@pytest.fixture
def clock():
    return trio.testing.MockClock(autojump_threshold=0)


# --- the plan -------------------------------------------------------------------------------------


def a_job(job_id):
    return SimpleNamespace(job_id=job_id)


def struck(plan, point, count, job_id=None):
    """Which of so many calls were struck."""
    made = None if job_id is None else a_job(job_id)
    return [call for call in range(count) if plan.strikes(point, made) is not None]


def test_nothing_strikes_without_a_fault():
    plan = FaultPlan([])
    for point in Point:
        assert struck(plan, point, 5) == []
        assert plan.calls[point] == 5
    assert plan.injected == []


@pytest.mark.parametrize("point", Point)
def test_a_fault_strikes_at_its_own_point_once(point):
    plan = FaultPlan([Fault(point)])
    for other in Point:
        if other is not point:
            assert struck(plan, other, 3) == []
    assert struck(plan, point, 5) == [0]
    assert plan.injected == [(point, -1)]


def test_a_fault_may_be_named_by_text():
    assert Fault("wait").point is Point.WAIT
    with pytest.raises(ValueError, match="bogus"):
        Fault("bogus")


def test_a_fault_strikes_only_the_call_of_its_number():
    plan = FaultPlan([Fault(Point.CSR, call=3, times=ALWAYS)])
    assert struck(plan, Point.SLICE, 10) == []
    assert struck(plan, Point.CSR, 10) == [3]


def test_a_fault_strikes_only_its_job():
    plan = FaultPlan([Fault(Point.WAIT, job_id=7)])
    assert struck(plan, Point.WAIT, 3, job_id=6) == []
    assert struck(plan, Point.WAIT, 3) == []
    assert struck(plan, Point.WAIT, 3, job_id=7) == [0]
    assert plan.injected == [(Point.WAIT, 7)]


@pytest.mark.parametrize("times", [0, 1, 3, ALWAYS])
def test_a_fault_strikes_at_most_so_often(times):
    plan = FaultPlan([Fault(Point.WAIT, times=times)])
    assert struck(plan, Point.WAIT, 10) == list(range(10))[: int(min(times, 10))]


def test_faults_of_one_point_strike_one_after_another():
    plan = FaultPlan([Fault(Point.WAIT, code=28), Fault(Point.WAIT, code=13)])
    assert [plan.strikes(Point.WAIT).code for _ in range(2)] == [28, 13]
    assert plan.strikes(Point.WAIT) is None
    plan.add(Fault(Point.WAIT, code=5))
    assert plan.strikes(Point.WAIT).code == 5


def test_a_plan_that_is_not_active_counts_and_spares():
    plan = FaultPlan([Fault(Point.WAIT)])
    plan.active = False
    assert struck(plan, Point.WAIT, 3) == []
    assert plan.calls[Point.WAIT] == 3
    plan.active = True
    assert struck(plan, Point.WAIT, 3) == [0]


def test_the_same_seed_strikes_the_same_calls():
    def calls(seed, probability=0.3):
        plan = FaultPlan([Fault(Point.WAIT, times=ALWAYS, probability=probability)], seed)
        return struck(plan, Point.WAIT, 400)

    assert calls(1) == calls(1)
    assert calls(1) != calls(2)
    assert 80 < len(calls(1)) < 160
    assert len(calls(1, 0.9)) > 330
    assert calls(1, 0.0) == []
    assert calls(1, 1.0) == list(range(400))


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_a_probability_is_one(probability):
    with pytest.raises(ValueError, match="give 0 to 1"):
        Fault(Point.WAIT, probability=probability)


# --- each point, in an executor -------------------------------------------------------------------


def fake(scope="device"):
    semantics = EngineSemantics(engines=4, submit_when_full="block", reset_scope=scope)
    return FakeDevice(semantics=semantics, manifest=SMALL)


class World:
    def __init__(self, executor, device, events):
        self.executor, self.device, self.events = executor, device, events

    async def request(self, prompt=(1, 2, 3), steps=2):
        """What a caller sees: tokens, or the error."""
        tokens = []
        try:
            async with self.executor.sequence(len(prompt), steps) as sequence:
                result = await sequence.prefill(np.array(prompt))
                tokens.append(int(result.logits.argmax()))
                while len(tokens) < steps:
                    result = await sequence.decode(tokens[-1])
                    tokens.append(int(result.logits.argmax()))
        except RequestError as error:
            return type(error).__name__, error.code, len(tokens)
        assert tokens == generate(VOCAB, prompt, steps)
        return "right tokens"

    async def settle(self):
        core = self.executor.core
        with trio.fail_after(200):
            while not (core.lifecycle is LifecycleState.FAILED or (core.health.ready and core.drained)):
                await trio.sleep(0.01)

    @property
    def path(self):
        return [event.new.value for event in self.events if isinstance(event, LifecycleChanged)][2:]


@asynccontextmanager
async def world(*faults, device=None, **limits):
    events = []
    faulty = FaultyDevice(device or fake(), FaultPlan(faults))
    config = {
        "execution_timeout_ns": 1000 * MS, "admission_timeout_ns": 1000 * MS, "grace_ns": 1000 * MS,
        **limits,
    }  # fmt: skip
    async with open_executor(
        faulty, SMALL, ExecutorConfig(**config), listeners=[events.append]
    ) as executor:
        yield World(executor, faulty, events)


RECOVERED = ["draining", "recovering", "configuring", "warming", "ready"]
SEEN = {  # by the caller whose first job meets the fault; and what the service does
    Fault(Point.CSR): (("CsrRejected", 14, 0), []),
    Fault(Point.CSR, call=1): (("CsrRejected", 14, 0), []),
    Fault(Point.CSR, call=2): (("CsrRejected", 14, 1), []),
    Fault(Point.SLICE): (("SliceOutOfRange", 0, 0), []),
    Fault(Point.SLICE, call=3): (("SliceOutOfRange", 0, 1), []),
    Fault(Point.MAP): (("MapRejected", 24, 0), RECOVERED),
    Fault(Point.MAP, code=14): (("MapRejected", 14, 0), []),
    Fault(Point.SUBMIT, job_id=0): (("Unavailable", 17, 0), []),
    Fault(Point.SUBMIT, job_id=1): (("Unavailable", 17, 1), []),
    Fault(Point.SUBMIT, job_id=0, code=14): (("InvalidArgument", 14, 0), []),
    Fault(Point.WAIT, job_id=0): (("DeadlineExceeded", 13, 0), []),
    Fault(Point.WAIT, job_id=1): (("DeadlineExceeded", 13, 1), []),
    Fault(Point.WAIT, job_id=0, code=28): (("DeviceFailed", 28, 0), RECOVERED),
    Fault(Point.STATUS, job_id=0): (("DeviceFailed", 0, 0), RECOVERED),
    Fault(Point.SHORT_OUTPUT, job_id=0): (("OutputRejected", 0, 0), RECOVERED),
    Fault(Point.NAN_OUTPUT, job_id=1): (("OutputRejected", 0, 1), RECOVERED),
    Fault(Point.HOLD, job_id=0): (("DeadlineExceeded", 0, 0), RECOVERED),
    Fault(Point.LOSE, job_id=0): (("DeadlineExceeded", 0, 0), RECOVERED),
    Fault(Point.UNDO): ("right tokens", []),
    Fault(Point.KV): (("DeadlineExceeded", 0, 0), []),
}


@pytest.mark.parametrize("max_inflight", [1, 2])
@pytest.mark.parametrize(
    "fault", SEEN, ids=lambda f: f"{f.point}-{f.call}-{f.job_id}-{f.code}".replace("None", "any")
)
async def test_each_point_strikes_where_it_says(clock, fault, max_inflight):
    seen, path = SEEN[fault]
    async with world(fault, max_inflight=max_inflight) as here:
        assert await here.request() == seen
        await here.settle()
        assert here.path == path
        at = -1 if fault.job_id is None else fault.job_id
        assert here.device.plan.injected == [(fault.point, at)]
        # Once, and never again; the KV and the buffers are right for those who come after.
        for prompt in ([1, 2, 3], [5] * 40, [9]):
            assert await here.request(prompt, 4) == "right tokens"
        assert here.path == path
        quarantined = [e.reason for e in here.events if isinstance(e, BufferQuarantined)]
        if fault.point is Point.UNDO:
            assert quarantined == ["returned with its slices not undone"]
        stale = sum(isinstance(event, StaleCompletion) for event in here.events)
        assert stale == (fault.point is Point.HOLD)


async def test_without_a_fault_the_device_is_as_it_was(clock):
    device = fake()
    async with world(device=device) as here:
        assert await here.request(steps=5) == "right tokens"
        assert here.device.inferred == here.device.waited == device.inferred == [0, 1, 2, 3, 4]
        assert here.device.configured == device.configured == [1]
        assert here.device.timer is device.timer
        assert here.device.semantics is device.semantics
        assert here.device.capabilities is device.capabilities
        calls = here.device.plan.calls
        assert calls[Point.SUBMIT] == calls[Point.WAIT] == calls[Point.NAN_OUTPUT] == 5
        assert calls[Point.CSR] == calls[Point.SLICE] == 10
        assert calls[Point.MODELS] == calls[Point.CONFIGURE] == calls[Point.KV] == 1
        assert calls[Point.RESET] == 0


async def test_a_refused_submit_never_reaches_the_device(clock):
    device = fake()
    async with world(Fault(Point.SUBMIT, job_id=0), device=device) as here:
        await here.request()
        assert device.inferred == here.device.inferred == []


async def test_a_wrong_model_is_no_generation(clock):
    faulty = FaultyDevice(fake(), FaultPlan([Fault(Point.MODELS)]))
    with pytest.raises(ManifestMismatch, match="prefil_"):
        async with open_executor(faulty, SMALL, ExecutorConfig()):
            pytest.fail("it opened")
    assert faulty.configured == []
    async with open_executor(faulty, SMALL, ExecutorConfig()):
        assert faulty.configured == [1]


@pytest.mark.parametrize(
    ("fault", "code"), [(Fault(Point.CONFIGURE), 19), (Fault(Point.CONFIGURE, code=8), 8)]
)
async def test_a_model_that_cannot_be_loaded(clock, fault, code):
    device = fake()
    faulty = FaultyDevice(device, FaultPlan([fault]))
    with pytest.raises(ServiceFailed, match=f"returned {code} ") as caught:
        async with open_executor(faulty, SMALL, ExecutorConfig()):
            pytest.fail("it opened")
    assert caught.value.exit_code == 78
    assert device.configured == []


async def test_a_reset_that_fails(clock):
    async with world(Fault(Point.RESET), Fault(Point.STATUS, job_id=0)) as here:
        await here.request()
        await here.settle()
        assert here.path == ["draining", "recovering", "failed"]
        assert here.device.inner.resets == 0
        with pytest.raises(ServiceFailed, match="the reset returned 25"):
            here.executor.check()


async def test_what_is_held_back_comes_out_before_what_is_new(clock):
    """Also where the job after it is struck: everything that came back is written down, in order."""
    async with world(Fault(Point.HOLD, job_id=0), Fault(Point.WAIT, job_id=1), max_inflight=1) as here:
        await here.request()
        await here.settle()
        assert await here.request() == ("DeadlineExceeded", 13, 0)
        assert await here.request() == "right tokens"
        assert here.device.waited[-3:] == [1, 2, 3]


def test_each_point_with_a_code_has_one():
    assert set(CODES) == {Point.MAP, Point.SUBMIT, Point.WAIT, Point.CONFIGURE, Point.RESET}
    assert all(code != 0 for code in CODES.values())


# --- the drills -----------------------------------------------------------------------------------


def on_sim(main, scope="device"):
    semantics = EngineSemantics(reset_scope=scope)
    return KIND.run(main, DeviceOptions(semantics, TIMING, 0, SMALL))


def drilled(name, max_inflight=1, scope="device"):
    return on_sim(
        lambda open_device: run_drill(ALL[name], Setup(open_device, SMALL, GOLDEN, max_inflight)), scope
    )


@pytest.mark.parametrize("max_inflight", [1, 2])
@pytest.mark.parametrize("scope", [ResetScope.DEVICE, ResetScope.NONE])
@pytest.mark.parametrize("name", ALL)
def test_drills_on_the_simulated_card(name, scope, max_inflight):
    result = drilled(name, max_inflight, scope)
    assert result.differences == []
    assert result.passed
    assert "drill" not in result.observed
    assert result.expected


@pytest.mark.parametrize("scope", [ResetScope.JOB, ResetScope.ENGINE])
def test_a_smaller_reset_is_no_reset(scope):
    assert drilled("FI08", scope=scope).observed["service"] == "draining recovering failed"
    assert drilled("FI08", scope=scope).passed


@pytest.mark.parametrize("scope", [ResetScope.DEVICE, ResetScope.NONE])
@pytest.mark.parametrize("name", ALL)
async def test_drills_on_the_fake_device(clock, name, scope):
    @asynccontextmanager
    async def open_device():
        yield fake(scope)

    result = await run_drill(ALL[name], Setup(open_device, SMALL, GOLDEN, 2))
    assert result.differences == []


def test_the_table_is_whole():
    assert [drill.name for drill in DRILLS] == [f"FI{number:02}" for number in range(1, 16)]
    assert len({*ALL}) == len(DRILLS) + len(BEYOND)
    for drill in ALL.values():
        for can_reset in (True, False):
            facts = drill.expected(can_reset)
            assert "afterwards" in facts or drill.name in ("FI01", "FI13")


# --- broken executors -----------------------------------------------------------------------------


def patch(monkeypatch, owner, name, make):
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def commits_what_was_rejected(monkeypatch):
    def make(_original):
        return lambda self, job, why, now_ns: self.completed(job, now_ns)

    patch(monkeypatch, scheduler.Core, "output_rejected", make)


def releases_instead_of_quarantine(monkeypatch):
    """The job says that it is quarantined; its buffer is free again."""

    def spoil(self, job, error, now_ns):
        self._mark_unknown(job, error.message)
        self._retire(job, scheduler.JobState.QUARANTINED, error, now_ns)

    monkeypatch.setattr(scheduler.Core, "_spoil", spoil)


def never_pauses(monkeypatch):
    def make(original):
        def strike(self, now_ns):
            over = original(self, now_ns)
            self.pause_until_ns = 0
            return over

        return strike

    patch(monkeypatch, health.Health, "strike", make)


def never_counts_strikes(monkeypatch):
    patch(monkeypatch, health.Health, "strike", lambda _: lambda self, now_ns: False)


def takes_slots_back_unlooked(monkeypatch):
    def release(self):
        slot = self.slot
        self._slot = None
        self._pool._give_back(slot)

    monkeypatch.setattr(buffers.BufferLease, "release", release)


def cancels_at_once(monkeypatch):
    """The job ends, and its buffer is free, while the device has it."""

    def make(original):
        def cancel(self, job, now_ns):
            if job.on_device and not job.final:
                job.lease.mark_returned()
                self._release_permit(job)
                job.to(scheduler.JobState.CANCEL_REQUESTED)
                self._retire(job, scheduler.JobState.FAILED, RequestError("gone"), now_ns)
                return
            original(self, job, now_ns)

        return cancel

    patch(monkeypatch, scheduler.Core, "cancel", make)


def keeps_what_was_cancelled(monkeypatch):
    """The caller leaves; its job stays in the queue, and runs."""

    def make(original):
        def cancel(self, job, now_ns):
            if job.on_device:
                original(self, job, now_ns)
            else:
                job.answered = True

        return cancel

    patch(monkeypatch, scheduler.Core, "cancel", make)


def trusts_the_kv(monkeypatch):
    monkeypatch.setattr(scheduler.Core, "_mark_unknown", lambda self, job, why: None)


def ignores_codes_of_wait(monkeypatch):
    def make(original):
        return lambda self, job, rc, now_ns, *, exception, calls: original(
            self, job, 0, now_ns, exception=exception
        )

    patch(monkeypatch, scheduler.Core, "wait_returned", make)


def ignores_the_status(monkeypatch):
    def make(original):
        return lambda self, job, rc, now_ns, *, exception, calls: original(
            self, job, rc, now_ns, exception=False
        )

    patch(monkeypatch, scheduler.Core, "wait_returned", make)


def ignores_codes_of_infer(monkeypatch):
    patch(
        monkeypatch, scheduler.Core, "submit_returned",
        lambda original: lambda self, job, rc, now_ns: original(self, job, 0, now_ns),
    )  # fmt: skip


def ignores_csr_codes(monkeypatch):
    def make(original):
        def load(self, device, job):
            class Deaf:
                def set_csr(self, graph, name, value):
                    device.set_csr(graph, name, value)
                    return 0

            original(self, Deaf(), job)

        return load

    patch(monkeypatch, HostMemory, "load", make)


def leaves_slices_unchecked(monkeypatch):
    """A slice that is too long goes on to the runtime."""

    def make(original):
        def load(self, device, job):
            self._inputs = tuple((*entry[:-1], 10**9) for entry in self._inputs)
            original(self, device, job)

        return load

    patch(monkeypatch, HostMemory, "load", make)


def polls_for_kv(monkeypatch):
    def make(original):
        def reserve(self, sequence_id, tokens):
            return any(original(self, sequence_id, tokens) for _ in range(2))

        return reserve

    patch(monkeypatch, kv.KvCoordinator, "reserve", make)


def trusts_the_device(monkeypatch):
    monkeypatch.setattr(scheduler.Core, "_distrust", lambda self, why, row, now_ns: None)


def overlooks_the_output(monkeypatch):
    def make(original):
        def deliver(self, job):
            original(self, job)

        return deliver

    patch(monkeypatch, HostMemory, "deliver", make)


def binds_anything(monkeypatch):
    def bind(manifest, models, generation_id):
        return ModelGeneration(generation_id, manifest, dict.fromkeys(manifest.by_kind, 16))

    monkeypatch.setattr(caltrio.executor, "bind", bind)


def forgets_what_was_stale(monkeypatch):
    monkeypatch.setattr(scheduler.Core, "_stale", lambda self, job, now_ns: None)


def keeps_the_old_generation(monkeypatch):
    """A reset without a new generation: buffers of before go on."""
    patch(
        monkeypatch, scheduler.Core, "reset_returned",
        lambda original: lambda self, rc, now_ns: original(self, 25, now_ns),
    )  # fmt: skip


def delivers_late(monkeypatch):
    """The caller who has left still gets the logits written into his array."""

    def make(original):
        def deliver(self, job):
            job.answered, was = False, job.answered
            try:
                return original(self, job)
            finally:
                job.answered = was

        return deliver

    patch(monkeypatch, HostMemory, "deliver", make)


def loses_leases(monkeypatch):
    """A job that fails before submit keeps its slot leased."""

    def make(original):
        def release(self):
            self._slot = None

        return release

    patch(monkeypatch, buffers.BufferLease, "release", make)


def waits_for_cancelled_jobs(monkeypatch):
    """A caller that is cancelled is let go only once its job has come back."""

    def make(original):
        async def run(self, request, kind, tokens, data):
            with trio.CancelScope(shield=True):
                return await original(self, request, kind, tokens, data)

        return run

    patch(monkeypatch, caltrio.executor.Executor, "_run", make)


BROKEN = [
    (commits_what_was_rejected, ["FI09", "FI10", "both-nan"]),
    (releases_instead_of_quarantine, ["FI07", "FI08", "FI09", "FI10"]),
    (never_pauses, ["busy"]),
    (never_counts_strikes, ["busy"]),
    (takes_slots_back_unlooked, ["FI15"]),
    (cancels_at_once, ["FI12"]),
    (waits_for_cancelled_jobs, ["FI12"]),
    (delivers_late, ["FI12"]),
    (keeps_what_was_cancelled, ["FI11"]),
    (trusts_the_kv, ["FI07", "FI08", "FI09", "FI10"]),
    (ignores_codes_of_wait, ["FI07"]),
    (ignores_the_status, ["FI08", "both", "twice", "reset-fails", "golden-fails", "load-fails"]),
    (ignores_codes_of_infer, ["FI05", "FI06", "busy"]),
    (ignores_csr_codes, ["FI02"]),
    (leaves_slices_unchecked, ["FI03"]),
    (polls_for_kv, ["FI04"]),
    (trusts_the_device, ["FI06", "FI08", "FI09", "FI10", "both", "both-nan"]),
    (overlooks_the_output, ["FI09", "FI10"]),
    (binds_anything, ["FI01"]),
    (forgets_what_was_stale, ["FI14"]),
    (keeps_the_old_generation, ["FI06", "FI08", "FI14", "twice", "busy", "lost+nan"]),
    (loses_leases, ["FI02", "FI05", "FI13"]),
]


@pytest.mark.parametrize(
    ("broken", "name"),
    [(broken, name) for broken, names in BROKEN for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_executor_makes_its_drill_differ(monkeypatch, broken, name):
    broken(monkeypatch)
    result = drilled(name, 2)
    assert not result.passed
    assert result.differences


def test_every_drill_can_differ():
    covered = {name for _, names in BROKEN for name in names}
    assert covered == set(ALL)


# --- many -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [ResetScope.DEVICE, ResetScope.NONE])
def test_a_hundred_random_faults_end_with_the_golden_equal(monkeypatch, scope):
    monkeypatch.setattr("caltrio.soak.gc", SimpleNamespace(collect=lambda: 0))
    spec = SoakSpec(
        1000 * NS_PER_HOUR, seed=5, faults_per_hour=3600, think_ns=500 * MS, most_faults=100
    )

    async def main(open_device):
        soak = Soak(spec, open_device, SMALL, GOLDEN)
        await soak.run()
        async with (
            open_device() as device,
            open_executor(device, SMALL, ExecutorConfig(max_inflight=2)) as executor,
        ):
            return soak.evidence, await check(executor, GOLDEN)

    evidence, report = on_sim(main, scope)
    assert evidence.complaints == []
    assert sum(evidence.injected.values()) >= 100
    assert len(evidence.injected) >= 8
    assert evidence.leased == 0
    assert report.passed
    assert Counter(evidence.endings)["answered"] > 0


def test_an_interrupt_of_a_drill_is_no_observation():
    """A drill that is cancelled ends; it does not report what it then did not see."""
    ran = []

    async def main(open_device):
        async def hangs(setup):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)

        drill = evolve(ALL["FI02"], run=hangs)
        with trio.move_on_after(1) as scope:
            ran.append(await run_drill(drill, Setup(open_device, SMALL, GOLDEN, 1)))
        return scope.cancelled_caught

    assert KIND.run(main, DeviceOptions(EngineSemantics(), TIMING, model=SMALL))
    assert ran == []
