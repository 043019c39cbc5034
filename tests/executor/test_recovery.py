"""From a fault to the next generation, or to the end (§8, §9): in virtual time, on a fake device."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing
from attrs import evolve
from support import CLOSED, ENDED, MS, RECOVERED, STARTED, S, assert_at_rest, path

from caltrio.config import ExecutorConfig
from caltrio.core.job import EngineSlot, JobState
from caltrio.core.kv import KvTxnState
from caltrio.errors import (
    ArtifactError,
    DeadlineExceeded,
    DeviceFailed,
    DeviceUnknown,
    Incompatible,
    InvalidArgument,
    JobCancelled,
    NotConfigured,
    OutputRejected,
    RequestError,
    ResourceExhausted,
    SequenceUnknown,
    ServiceFailed,
    Unavailable,
    Unsupported,
)
from caltrio.events import (
    DeviceFault,
    InflightLimited,
    JobEnded,
    StaleCompletion,
)
from caltrio.executor import open_executor
from caltrio.manifest import TaskKind, load_manifest
from caltrio.prepare import host_memory
from caltrio.semantics import EngineSemantics, SubmitWhenFull
from caltrio.testing import FakeDevice

RESETTABLE = EngineSemantics(engines=4, submit_when_full=SubmitWhenFull.BLOCK, reset_scope="device")

BASE = load_manifest()
SMALL = evolve(
    BASE,
    submodels=tuple(
        evolve(graph, logits=evolve(graph.logits, shape=(1, 1, 64), byte_size=128))
        for graph in BASE.submodels
    ),
)


@pytest.fixture
def clock():
    return trio.testing.MockClock(autojump_threshold=0)


class Device(FakeDevice):
    """Can be reset; knows when it was called, and how many jobs it had at once."""

    def __init__(self, busy_ns=MS, semantics=RESETTABLE, manifest=SMALL, **scripted):
        super().__init__(busy_ns, semantics=semantics, manifest=manifest, **scripted)
        self.times = []
        self.engines = []
        self.now = self.most = 0
        self.reset_s = 0.0
        self.configure_s = 0.0
        self.configure_codes = {}

    async def infer(self, job):
        self.times.append(trio.current_time())
        self.engines.append(job.engine)
        rc = await super().infer(job)
        self.now += rc == 0
        self.most = max(self.most, self.now)
        return rc

    async def wait(self):
        done = await super().wait()
        self.now -= 1
        return done

    async def reset(self):
        await trio.sleep(self.reset_s)
        self.now = 0
        return await super().reset()

    async def configure(self, generation):
        if self.configured:
            await trio.sleep(self.configure_s)
        await super().configure(generation)
        return self.configure_codes.get(generation.generation_id, 0)


@asynccontextmanager
async def opened(device, *, warm_up=None, **limits):
    events = []
    config = ExecutorConfig(**limits)
    with trio.fail_after(3000):  # virtual: nothing hangs
        async with open_executor(
            device, device.manifest, config, listeners=[events.append], warm_up=warm_up
        ) as executor:
            executor.events = events
            yield executor
    assert_at_rest(executor.core)


def faults(executor):
    return [event for event in executor.events if isinstance(event, DeviceFault)]


def ended_jobs(executor):
    return [event.job for event in executor.events if isinstance(event, JobEnded)]


async def until(condition):
    while not condition():
        await trio.sleep(1e-5)


async def in_state(executor, state):
    await until(lambda: executor.core.lifecycle is state)


async def generation(executor, number):
    await until(lambda: executor.generation.generation_id == number and executor.core.health.ready)


async def one(executor, steps=1):
    """One request with as many steps; the error of the first that fails comes out."""
    with trio.fail_after(100):
        async with executor.sequence(2, steps) as sequence:
            result = await sequence.prefill(2)
            for _ in range(steps - 1):
                result = await sequence.decode()
            return result


async def fails(executor, kind=RequestError):
    with pytest.raises(kind) as caught:
        await one(executor)
    return caught.value


# --- each category, at submit and at Wait ----------------------------------------------------------

TO_RECOVERY = [
    (18, Unavailable), (24, DeviceFailed), (25, DeviceFailed), (28, DeviceFailed),
    (2, NotConfigured), (7, NotConfigured), (16, NotConfigured),
    (15, DeviceUnknown), (20, DeviceUnknown), (99, DeviceUnknown),
]  # fmt: skip
GOES_ON = [
    (1, ResourceExhausted), (14, InvalidArgument), (21, ArtifactError), (22, ArtifactError),
    (13, DeadlineExceeded), (17, Unavailable),
]  # fmt: skip
TO_THE_END = [
    (4, ArtifactError), (5, ArtifactError), (19, ArtifactError), (10, ArtifactError),
    (11, ArtifactError), (12, ArtifactError),
    (8, Incompatible), (9, Incompatible), (23, Incompatible),
]  # fmt: skip
BY = pytest.mark.parametrize("call", ["submit", "wait"])


def scripted(call, code, job_id=0, **more):
    return Device(**{f"{call}_codes": {job_id: code}}, **more)


@BY
@pytest.mark.parametrize(("code", "kind"), TO_RECOVERY)
async def test_a_fault_of_the_device_leads_to_a_new_generation(clock, call, code, kind):
    device = scripted(call, code)
    async with opened(device) as executor:
        pool, kv = executor.core.pool, executor.core.kv
        error = await fails(executor)
        assert type(error) is kind
        assert error.code == code
        assert error.phase == {"submit": "submit", "wait": "execute"}[call]
        assert (error.job_id, error.generation_id) == (0, 1)
        await generation(executor, 2)
        assert device.resets == 1
        assert device.configured == [1, 2]
        assert executor.core.pool is not pool
        assert executor.core.kv is not kv
        assert (pool.free, pool.leased, len(pool.quarantined)) == (0, 0, pool.total)
        result = await one(executor, steps=3)
        assert result.generation_id == 2
        assert not executor.core.pool.quarantined
        (fault,) = faults(executor)
        assert (fault.code, fault.job.job_id) == (code, 0)
    assert path(executor) == STARTED + RECOVERED + CLOSED
    assert device.waited == {"submit": [1, 2, 3], "wait": [0, 1, 2, 3]}[call]


async def test_a_ccu_exception_counts_though_wait_succeeded(clock):
    """FI08."""
    device = Device(exceptions={0})
    async with opened(device) as executor:
        error = await fails(executor)
        assert type(error) is DeviceFailed
        assert error.code == 0
        assert "DONE_CCU_EXCEPTION" in str(error)
        await generation(executor, 2)
        await one(executor)
        assert ended_jobs(executor)[0].state is JobState.QUARANTINED
    assert path(executor) == STARTED + RECOVERED + CLOSED


@BY
@pytest.mark.parametrize(("code", "kind"), GOES_ON)
async def test_a_fault_that_the_generation_survives(clock, call, code, kind):
    device = scripted(call, code)
    async with opened(device) as executor:
        error = await fails(executor)
        assert type(error) is kind
        assert error.code == code
        await one(executor, steps=2)
        assert (device.resets, device.configured) == (0, [1])
        lost = len(executor.core.pool.quarantined)
        assert lost == (call == "wait")  # after submit nobody knows what the device did
        assert len(executor.core.kv.quarantined) == lost
        assert len(faults(executor)) == 1
    assert path(executor) == STARTED + CLOSED


@BY
@pytest.mark.parametrize(("code", "kind"), TO_THE_END)
async def test_a_fault_that_no_reset_mends_ends_the_service(clock, call, code, kind):
    device = scripted(call, code)
    async with opened(device) as executor:
        error = await fails(executor)
        assert type(error) is kind
        await in_state(executor, S.FAILED)
        assert device.resets == 0
        with pytest.raises(ServiceFailed) as caught:
            executor.check()
        assert caught.value.exit_code == 78
        assert str(code) in caught.value.reason
        refused = await fails(executor, Unavailable)
        assert refused.retry_after_ns == -1  # it would not help
    assert path(executor) == STARTED + ENDED


@BY
@pytest.mark.parametrize("code", [27, 29])
async def test_a_programming_error_closes_its_kind_and_nothing_else(clock, call, code):
    device = scripted(call, code, job_id=1)
    async with opened(device) as executor:
        async with executor.sequence(2, 3) as sequence:
            await sequence.prefill(2)
            with pytest.raises(Unsupported) as caught:
                await sequence.decode()
            assert caught.value.code == code
        inferred = list(device.inferred)
        async with executor.sequence(2, 3) as sequence:
            await sequence.prefill(2)  # the other kind works
            with pytest.raises(Unsupported, match="closed") as caught:
                await sequence.decode()
            assert str(code) in str(caught.value)
        assert device.inferred == [*inferred, 2]  # the closed one was not tried again
        assert set(executor.core.health.disabled) == {TaskKind.DECODE}
        assert device.resets == 0
    assert path(executor) == STARTED + CLOSED


async def test_a_closed_kind_stays_closed_in_the_next_generation(clock):
    device = Device(submit_codes={1: 27, 2: 28})
    async with opened(device) as executor:
        with pytest.raises(Unsupported):
            await one(executor, steps=2)
        await fails(executor)
        await generation(executor, 2)
        with pytest.raises(Unsupported, match="closed"):
            await one(executor, steps=2)


# --- no reset --------------------------------------------------------------------------------------


async def test_without_a_reset_the_service_fails_and_asks_for_a_restart(clock):
    device = Device(wait_codes={0: 28}, semantics=evolve(RESETTABLE, reset_scope="none"))
    async with opened(device) as executor, trio.open_nursery() as nursery:
        told = []

        async def supervisor():
            with pytest.raises(ServiceFailed) as caught:
                await executor.failed()
            told.append(caught.value.exit_code)

        nursery.start_soon(supervisor)
        await fails(executor)
        await trio.testing.wait_all_tasks_blocked()
        assert executor.core.lifecycle is S.FAILED
        assert told == [75]
        with pytest.raises(ServiceFailed, match="restart the process") as caught:
            executor.check()
        assert caught.value.exit_code == 75
        assert "28" in caught.value.reason
        assert device.resets == 0
    assert path(executor) == STARTED + ENDED


async def test_a_healthy_executor_passes_the_check(clock):
    async with opened(Device()) as executor:
        executor.check()
        with trio.move_on_after(1) as scope:
            await executor.failed()
        assert scope.cancelled_caught


# --- what others see -------------------------------------------------------------------------------


async def test_what_becomes_of_everybody_else(clock):
    device = Device(busy_ns=10 * MS, wait_codes={1: 28})
    device.reset_s = 0.05
    async with opened(device, max_active_sequences=4, retry_after_ns=7 * MS) as executor:
        seen = {}

        async def step(name, sequence):
            with pytest.raises(RequestError) as caught:
                await sequence.prefill(1)
            seen[name] = caught.value

        async def waiting():
            with pytest.raises(RequestError) as caught:
                await executor.admit(1, 0)
            seen["waiting"] = caught.value

        async with trio.open_nursery() as nursery:
            idle = await executor.admit(2, 3)
            await idle.prefill(1)
            fresh = await executor.admit(2, 3)
            failing, queued = await executor.admit(1, 0), await executor.admit(1, 0)
            nursery.start_soon(step, "failing", failing)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(step, "queued", queued)
            nursery.start_soon(waiting)
            await in_state(executor, S.RECOVERING)
            await trio.testing.wait_all_tasks_blocked()
            assert type(seen["failing"]) is DeviceFailed
            for name in ("queued", "waiting"):
                assert type(seen[name]) is Unavailable
                assert seen[name].retry_after_ns == 7 * MS
                assert seen[name].http == 503
            # Meanwhile: newcomers, and steps of those who are in.
            for attempt in (
                lambda: executor.admit(1, 0), idle.decode, lambda: fresh.prefill(1)
            ):  # fmt: skip
                with pytest.raises(Unavailable, match="recovering") as caught:
                    await attempt()
                assert caught.value.retry_after_ns == 7 * MS
            assert device.resets == 0
            await generation(executor, 2)
        assert device.inferred == [0, 1]
        for sequence in (idle, fresh):
            for attempt in (lambda s=sequence: s.prefill(1), lambda s=sequence: s.decode()):
                with pytest.raises(SequenceUnknown) as caught:
                    await attempt()
                assert caught.value.grpc == "FAILED_PRECONDITION"
            sequence.close()
        failing.close()
        queued.close()
        await one(executor, steps=3)
    assert path(executor) == STARTED + RECOVERED + CLOSED


@pytest.mark.parametrize("who", ["failing", "queued"])
async def test_a_sequence_whose_step_was_told_of_the_fault_is_unknown_afterwards_too(clock, who):
    """§7: not "retry later" for ever, nor the old failure again: close it and start anew."""
    device = Device(wait_codes={0: 28})
    async with opened(device) as executor:
        sequences = {"failing": await executor.admit(1, 2), "queued": await executor.admit(1, 2)}
        async with trio.open_nursery() as nursery:
            for sequence in sequences.values():

                async def step(sequence=sequence):
                    with pytest.raises(RequestError):
                        await sequence.prefill(1)

                nursery.start_soon(step)
                await trio.testing.wait_all_tasks_blocked()
        await generation(executor, 2)
        with pytest.raises(RequestError) as caught:
            await sequences[who].prefill(1)
        for sequence in sequences.values():
            sequence.close()
        assert type(caught.value) is SequenceUnknown


async def test_a_sequence_that_was_once_told_busy_is_unknown_after_a_reset_too(clock):
    device = Device(submit_codes={0: 17}, wait_codes={2: 28})
    async with opened(device) as executor:
        sequence = await executor.admit(1, 2)
        with pytest.raises(Unavailable):
            await sequence.prefill(1)
        await sequence.prefill(1)
        await fails(executor, DeviceFailed)
        await generation(executor, 2)
        with pytest.raises(RequestError) as caught:
            await sequence.decode()
        sequence.close()
        assert type(caught.value) is SequenceUnknown


async def test_ids_go_on_and_generations_do_not_mix(clock):
    device = Device(wait_codes={0: 28, 3: 28})
    async with opened(device) as executor:
        await fails(executor)
        await generation(executor, 2)
        await one(executor, steps=2)
        await fails(executor)
        await generation(executor, 3)
        result = await one(executor)
        assert (result.job_id, result.generation_id) == (4, 3)
        assert device.configured == [1, 2, 3]
        assert [job.generation_id for job in ended_jobs(executor)] == [1, 2, 2, 2, 3]
    assert path(executor) == STARTED + RECOVERED + RECOVERED + CLOSED


# --- execution timeouts ----------------------------------------------------------------------------


async def test_a_job_that_never_comes_back_is_lost_after_the_grace_and_then_the_device_is_reset(clock):
    device = Device(lost={0})
    device.reset_s = 0.01
    async with opened(device, execution_timeout_ns=5 * MS, grace_ns=20 * MS) as executor:
        begin = trio.current_time()
        await fails(executor, DeadlineExceeded)
        assert trio.current_time() - begin == pytest.approx(5e-3)
        await trio.sleep(0.019)
        pool = executor.core.pool
        assert pool.leased == 1  # the device owns it
        assert device.resets == 0
        await trio.sleep(0.002)
        assert pool.leased == 1  # until the reset has returned
        await in_state(executor, S.READY)
        assert trio.current_time() - begin == pytest.approx(0.035, abs=1e-4)
        assert pool.leased == 0
        assert len(pool.quarantined) == pool.total
        await one(executor)


async def test_a_job_that_comes_back_in_the_grace_ends_it(clock):
    device = Device(busy_ns=10 * MS)
    async with opened(device, execution_timeout_ns=5 * MS, grace_ns=1000 * MS) as executor:
        begin = trio.current_time()
        await fails(executor, DeadlineExceeded)
        await generation(executor, 2)
        assert trio.current_time() - begin == pytest.approx(10e-3, abs=1e-4)
        assert device.waited == [0]


async def test_the_grace_of_one_recovery_does_not_cut_short_that_of_the_next(clock):
    device = Device(busy_ns=10 * MS, wait_codes={0: 28}, lost={2})
    limits = {"execution_timeout_ns": 15 * MS, "grace_ns": 50 * MS, "max_inflight": 2}
    async with opened(device, **limits) as executor:
        begin = trio.current_time()
        await fails(executor)  # its grace would end at 60 ms, but nothing was on the device
        await generation(executor, 2)
        await one(executor)
        assert trio.current_time() - begin == pytest.approx(20e-3, abs=1e-4)
        await trio.sleep(0.02)
        await fails(executor, DeadlineExceeded)  # at 55 ms: the grace is over at 105 ms
        assert trio.current_time() - begin == pytest.approx(55e-3, abs=1e-4)
        await generation(executor, 3)
        assert trio.current_time() - begin == pytest.approx(105e-3, abs=1e-4)


# --- warm-up ---------------------------------------------------------------------------------------


async def test_each_generation_is_warmed_up_and_nobody_else_is_let_in(clock):
    device = Device(wait_codes={2: 28})
    calls = []

    async def warm_up(executor):
        calls.append((executor.generation.generation_id, executor.core.lifecycle))
        with pytest.raises(Unavailable, match="warming"):
            await executor.admit(1, 0)
        async with executor.sequence(2, 2, warmup=True) as sequence:
            await sequence.prefill(2)
            with pytest.raises(Unavailable):
                await executor.admit(1, 0)
            await sequence.decode()
        assert executor.core.lifecycle is S.WARMING

    async with opened(device, warm_up=warm_up) as executor:
        assert calls == [(1, S.WARMING)]
        assert device.inferred == [0, 1]
        await fails(executor)
        await in_state(executor, S.WARMING)
        await fails(executor, Unavailable)
        await generation(executor, 2)
        assert calls == [(1, S.WARMING), (2, S.WARMING)]
        await one(executor)
        with pytest.raises(Unavailable):  # the door for warm-up is shut again
            async with executor.sequence(1, 0, warmup=True):
                pass
    assert device.inferred == [0, 1, 2, 3, 4, 5]
    assert path(executor) == STARTED + RECOVERED + CLOSED
    requests = {job.job_id: job.request.warmup for job in ended_jobs(executor)}
    assert requests == {0: True, 1: True, 2: False, 3: True, 4: True, 5: False}


async def test_a_golden_run_that_is_wrong_at_the_start(clock):
    device = Device()

    async def warm_up(executor):
        return "token 3 is 17, not 4"

    with pytest.raises(ServiceFailed, match="token 3 is 17, not 4") as caught:
        async with opened(device, warm_up=warm_up):
            raise AssertionError("must not become ready")
    assert caught.value.exit_code == 75


@pytest.mark.parametrize("how", ["wrong", "error", "fault", "artifact"])
async def test_a_golden_run_that_is_wrong_after_a_recovery(clock, how):
    device = Device(wait_codes={0: 28})

    async def warm_up(executor):
        if executor.generation.generation_id == 1:
            return None
        if how == "wrong":
            return "token 3 is 17, not 4"
        if how == "error":
            raise ResourceExhausted("no room for the golden prompt")
        device.wait_codes[1] = {"fault": 28, "artifact": 19}[how]
        async with executor.sequence(1, 0, warmup=True) as sequence:
            await sequence.prefill(1)
        return None

    async with opened(device, warm_up=warm_up) as executor:
        await fails(executor)
        await in_state(executor, S.FAILED)
        assert device.resets == 1  # no second attempt
        with pytest.raises(ServiceFailed) as caught:
            executor.check()
        assert caught.value.exit_code == (78 if how == "artifact" else 75)
        part = {"wrong": "token 3", "error": "no room", "fault": "28", "artifact": "19"}[how]
        assert part in caught.value.reason
        await fails(executor, Unavailable)
    assert path(executor) == [*STARTED, *RECOVERED[:-1], S.FAILED]


async def test_a_new_generation_is_not_held_back_by_a_pause_of_the_one_before(clock):
    """The last strike set a pause, and led to the recovery: nothing is left that would end it."""
    codes = dict.fromkeys(range(3), 17)
    device = Device(submit_codes=codes)
    limits = {"backoff_ns": 40 * MS, "backoff_threshold": 3}
    async with opened(device, **limits) as executor:
        for _ in range(3):
            await fails(executor, Unavailable)
        await generation(executor, 2)
        await one(executor)


# --- the reset, the load ---------------------------------------------------------------------------


async def test_a_reset_that_fails(clock):
    device = Device(wait_codes={0: 28}, reset_code=25)
    async with opened(device) as executor:
        await fails(executor)
        await in_state(executor, S.FAILED)
        assert "the reset returned 25" in executor.core.health.why
        assert "28" in executor.core.health.why  # and what came first
        assert device.configured == [1]
        with pytest.raises(ServiceFailed) as caught:
            executor.check()
        assert caught.value.exit_code == 75
    assert path(executor) == STARTED + ENDED


async def test_a_reset_that_never_returns(clock):
    device = Device(wait_codes={0: 28})
    device.reset_s = 10**9
    async with opened(device, reset_timeout_ns=30 * MS) as executor:
        begin = trio.current_time()
        await fails(executor)
        await in_state(executor, S.FAILED)
        assert trio.current_time() - begin == pytest.approx(0.031, abs=1e-4)
        assert "did not return in time" in executor.core.health.why
        assert device.configured == [1]
    assert path(executor) == STARTED + ENDED


async def test_a_reset_that_takes_all_its_time_but_no_more(clock):
    device = Device(wait_codes={0: 28})
    device.reset_s = 0.029
    async with opened(device, reset_timeout_ns=30 * MS) as executor:
        await fails(executor)
        await generation(executor, 2)


@pytest.mark.parametrize(("code", "exit_code"), [(28, 75), (15, 75), (8, 78), (19, 78), (27, 78)])
async def test_a_load_that_fails_at_the_start(clock, code, exit_code):
    """§8: against an artifact or a version a restart does not help, wherever it shows."""
    device = Device()
    device.configure_codes = {1: code}
    with pytest.raises(ServiceFailed, match=f"returned {code} ") as caught:
        async with opened(device):
            raise AssertionError("must not become ready")
    assert device.inferred == []
    assert caught.value.exit_code == exit_code


@pytest.mark.parametrize(("code", "exit_code"), [(28, 75), (23, 78), (12, 78)])
async def test_a_load_that_fails_after_a_reset(clock, code, exit_code):
    device = Device(wait_codes={0: 28})
    device.configure_codes = {2: code}
    async with opened(device) as executor:
        await fails(executor)
        await in_state(executor, S.FAILED)
        assert f"returned {code} " in executor.core.health.why
        with pytest.raises(ServiceFailed) as caught:
            executor.check()
    assert path(executor) == [*STARTED, S.DRAINING, S.RECOVERING, S.CONFIGURING, S.FAILED]
    assert caught.value.exit_code == exit_code


async def test_a_load_that_never_ends(clock):
    device = Device(wait_codes={0: 28})
    device.configure_s = 10**9
    async with opened(device, reset_timeout_ns=30 * MS) as executor:
        await fails(executor)
        await in_state(executor, S.FAILED)
        assert "did not end in time" in executor.core.health.why


async def test_a_device_that_holds_another_model_after_the_reset(clock):
    """§10.2: the generation never becomes ready; §9.2: the executor fails, and says so."""

    class Changed(Device):
        def models(self):
            found = super().models()
            return found[1:] if self.resets else found

    device = Changed(wait_codes={0: 28})
    async with opened(device) as executor:
        await fails(executor)
        await in_state(executor, S.FAILED)
        assert device.configured == [1]
        with pytest.raises(ServiceFailed, match="'prefill' is missing") as caught:
            executor.check()
        assert caught.value.exit_code == 78


# --- back-off --------------------------------------------------------------------------------------


def gaps(device):
    return [later - earlier for earlier, later in zip(device.times, device.times[1:], strict=False)]


@BY
@pytest.mark.parametrize("code", [13, 17])
async def test_a_transient_fault_holds_the_next_job_back(clock, call, code):
    device = scripted(call, code)
    async with opened(device, backoff_ns=10 * MS) as executor:
        await fails(executor)
        failed = trio.current_time()
        await one(executor)
        assert device.times[1] - failed == pytest.approx(10e-3, abs=1e-6)


async def test_the_pause_doubles_up_to_its_most_and_a_success_ends_that(clock):
    codes = dict.fromkeys([0, 1, 2, 3, 5, 6], 17)
    device = Device(submit_codes=codes)
    limits = {"backoff_ns": 10 * MS, "backoff_most_ns": 25 * MS, "backoff_threshold": 6}
    async with opened(device, **limits) as executor:
        for job in range(8):
            if job in codes:
                await fails(executor, Unavailable)
            else:
                await one(executor)
        expected = [10, 20, 25, 25, 1, 10, 20]  # job 4 took 1 ms and was well
        assert [1e3 * gap for gap in gaps(device)] == pytest.approx(expected, abs=0.01)
    assert path(executor) == STARTED + CLOSED


async def test_jobs_that_were_queued_before_the_fault_wait_too(clock):
    device = Device(submit_codes={0: 17})
    async with opened(device, backoff_ns=10 * MS) as executor, trio.open_nursery() as nursery:

        async def first():
            await fails(executor, Unavailable)

        nursery.start_soon(first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(one, executor)
        nursery.start_soon(one, executor)
        await until(lambda: len(device.waited) == 2)
        assert gaps(device)[0] == pytest.approx(10e-3, abs=1e-5)
        assert gaps(device)[1] == pytest.approx(1e-3, abs=1e-5)


async def test_too_many_transient_faults_in_a_row_lead_to_a_recovery(clock):
    device = Device(submit_codes=dict.fromkeys(range(3), 17))
    async with opened(device, backoff_ns=1, backoff_threshold=3) as executor:
        for count in range(3):
            assert path(executor) == STARTED, count
            error = await fails(executor)
            assert type(error) is Unavailable
            assert error.code == 17
        await generation(executor, 2)
        assert device.resets == 1
    assert path(executor) == STARTED + RECOVERED + CLOSED


async def test_a_success_between_them_means_no_recovery(clock):
    codes = dict.fromkeys([0, 1, 3, 4, 6, 7], 17)
    device = Device(submit_codes=codes)
    async with opened(device, backoff_ns=1, backoff_threshold=3) as executor:
        for job in range(9):
            if job in codes:
                await fails(executor, Unavailable)
            else:
                await one(executor)
    assert path(executor) == STARTED + CLOSED


async def test_a_new_generation_begins_without_the_strikes_of_the_old_one(clock):
    device = Device(submit_codes=dict.fromkeys(range(4), 17))
    limits = {"backoff_ns": 10 * MS, "backoff_threshold": 3}
    async with opened(device, **limits) as executor:
        for _ in range(3):
            await fails(executor, Unavailable)
        await generation(executor, 2)
        await trio.sleep(1)
        await fails(executor, Unavailable)  # one of a kind
        await trio.sleep(1)
        assert executor.generation.generation_id == 2
        await one(executor)
    assert path(executor) == STARTED + RECOVERED + CLOSED


# --- two in flight ---------------------------------------------------------------------------------


async def test_a_fault_with_two_in_flight_means_one_in_flight_from_then_on(clock):
    device = Device(wait_codes={0: 28})
    async with opened(device, max_inflight=2) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, executor)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(one, executor)
        assert device.most == 2
        assert device.waited == [0, 1]  # the other one was let finish
        assert set(device.engines) == {EngineSlot.PING, EngineSlot.PONG}
        await generation(executor, 2)
        device.engines.clear()
        device.most = 0
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(one, executor, 3)
        assert device.most == 1
        assert set(device.engines) == {EngineSlot.AUTO}
        health = executor.core.health
        assert health.limit == 1
        assert "fell back" in health.limit_reason
        assert "28" in health.limit_reason
        (event,) = [e for e in executor.events if isinstance(e, InflightLimited)]
        assert (event.limit, event.reason) == (1, health.limit_reason)


async def test_a_failed_wait_that_the_generation_survives_still_means_one_in_flight(clock):
    device = Device(wait_codes={0: 13})
    async with opened(device, max_inflight=2, backoff_ns=1) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, executor)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(one, executor)
        assert device.most == 2
        device.most = 0
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one, executor, 2)
        assert device.most == 1
        assert executor.generation.generation_id == 1
        assert "13" in executor.core.health.limit_reason


async def test_busy_with_two_in_flight_is_no_reason_to_fall_back(clock):
    device = Device(submit_codes={0: 17})
    async with opened(device, max_inflight=2, backoff_ns=1) as executor:
        await fails(executor)
        assert executor.core.health.limit == 2
        assert executor.core.health.limit_reason is None


@pytest.mark.parametrize("code", [27, 29])
async def test_a_runtime_that_cannot_bind_jobs_to_engines_is_used_without(clock, code):
    """§6.4, §8: the feature that is closed is the fixed engine; the kind goes on with ``AUTO``."""

    class Unbound(Device):
        async def infer(self, job):
            rc = await super().infer(job)
            if job.engine == EngineSlot.AUTO:
                return rc
            self._due.clear()
            self.now = 0
            return code

    device = Unbound()
    async with opened(device, max_inflight=2) as executor:
        await fails(executor, Unsupported)
        assert executor.core.health.limit == 1
        assert str(code) in executor.core.health.limit_reason
        assert not executor.core.health.disabled
        await one(executor, steps=2)
        assert not executor.core.health.disabled


# --- what comes late -------------------------------------------------------------------------------


class HoldsBack(Device):
    """Job 0 comes back when the test says so, whatever happens in between."""

    held = None

    async def infer(self, job):
        if job.job_id != 0:
            return await super().infer(job)
        self.held = job
        self.inferred.append(0)
        return 0

    def give(self):
        self._due.append((0, self.held))
        self.now += 1
        self._more.set()


@pytest.mark.parametrize("code", [0, 28, 8])
async def test_a_completion_of_an_old_generation_touches_nothing(clock, code):
    """FI14."""
    device = HoldsBack(wait_codes={0: code})
    async with opened(device, execution_timeout_ns=5 * MS, grace_ns=5 * MS) as executor:
        await fails(executor, DeadlineExceeded)
        await generation(executor, 2)
        core = executor.core
        async with executor.sequence(2, 3) as sequence:
            await sequence.prefill(2)
            free, jobs = core.pool.free, len(ended_jobs(executor))
            held = core.kv.holders[0].committed_tokens, core.kv.reserved_tokens
            device.give()
            await until(lambda: 0 in device.waited)
            await trio.testing.wait_all_tasks_blocked()
            assert core.stale_completions == 1
            (event,) = [e for e in executor.events if isinstance(e, StaleCompletion)]
            assert (event.job.job_id, event.job.generation_id) == (0, 1)
            assert (core.pool.free, core.pool.leased) == (free, 0)
            assert (core.kv.holders[0].committed_tokens, core.kv.reserved_tokens) == held
            assert len(ended_jobs(executor)) == jobs
            assert not core.pool.quarantined
            await sequence.decode()
        assert device.resets == 1
    assert path(executor) == STARTED + RECOVERED + CLOSED


async def test_a_late_completion_does_not_write_into_the_callers_array(clock):
    device = HoldsBack()
    out = np.full(64, 7, np.float32)
    async with opened(device, execution_timeout_ns=5 * MS, grace_ns=5 * MS) as executor:
        with pytest.raises(DeadlineExceeded):
            async with executor.sequence(2, 3) as sequence:
                await sequence.prefill([1, 2], out=out)
        await generation(executor, 2)
        device.give()
        await until(lambda: 0 in device.waited)
        await trio.testing.wait_all_tasks_blocked()
        assert (out == 7).all()


async def test_a_reset_while_an_output_is_converted(clock):
    device = Device(wait_codes={1: 28})
    out = np.full(64, 7, np.float32)

    async def work(stage, job):
        await trio.sleep(0.02 if job.job_id == 0 else 0)

    device.timer.work = work
    async with opened(device, max_inflight=2, grace_ns=5 * MS, execution_timeout_ns=8 * MS) as executor:
        async with trio.open_nursery() as nursery:

            async def converted():
                with pytest.raises(Unavailable, match="lost"):
                    async with executor.sequence(2, 0) as sequence:
                        await sequence.prefill([1, 2], out=out)

            nursery.start_soon(converted)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(fails, executor)  # its Wait() is not called before its deadline
        await generation(executor, 2)
        assert trio.current_time() < 0.02
        await trio.sleep(0.02)
        assert (out == 7).all()
        job = next(job for job in ended_jobs(executor) if job.job_id == 0)
        assert job.state is JobState.QUARANTINED
        assert job.kv.state is KvTxnState.UNKNOWN
        await one(executor)
    assert path(executor) == STARTED + RECOVERED + CLOSED


@pytest.mark.parametrize("code", [0, 18])
async def test_an_infer_that_returns_after_the_reset(clock, code):
    class Hangs(Device):
        async def infer(self, job):
            if job.job_id == 1:
                await until(lambda: self.resets == 1)
                await trio.sleep(0.01)
                if code:
                    return code
            return await super().infer(job)

    device = Hangs(wait_codes={0: 28})
    async with opened(device, max_inflight=2, grace_ns=5 * MS) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, executor, DeviceFailed)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(fails, executor, Unavailable)
        await generation(executor, 2)
        await one(executor, steps=2)
        assert executor.core.stale_completions >= 1
        assert executor.core.pool.leased == 0
        assert device.resets == 1


# --- faults on the way -----------------------------------------------------------------------------


async def test_a_second_fault_during_the_recovery_is_no_second_recovery(clock):
    class Apart(Device):
        async def wait(self):
            done = await super().wait()
            if done.job.job_id == 1:
                await trio.sleep(0.01)
            return done

    device = Apart(wait_codes={0: 28, 1: 28})
    async with opened(device, max_inflight=2) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, executor, DeviceFailed)
            nursery.start_soon(fails, executor, DeviceFailed)
        assert len(faults(executor)) == 2
        await generation(executor, 2)
        assert device.resets == 1
        await one(executor)
    assert path(executor) == STARTED + RECOVERED + CLOSED


@pytest.mark.parametrize("when", ["grace", "reset"])
async def test_a_fault_that_no_reset_mends_during_the_recovery_ends_it(clock, when):
    class Apart(Device):
        async def wait(self):
            done = await super().wait()
            if done.job.job_id == 1:
                await trio.sleep(0.01)
            return done

    device = Apart(wait_codes={0: 28, 1: 8})
    device.reset_s = 1
    grace_ns = {"grace": 100 * MS, "reset": 5 * MS}[when]
    async with opened(device, max_inflight=2, grace_ns=grace_ns) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, executor)
            nursery.start_soon(fails, executor)
        await in_state(executor, S.FAILED)
        assert device.configured == [1]
        with pytest.raises(ServiceFailed) as caught:
            executor.check()
        assert caught.value.exit_code == 78
    assert path(executor) == STARTED + ENDED


# --- shutdown on the way ---------------------------------------------------------------------------


@pytest.mark.parametrize("state", [S.RECOVERING, S.CONFIGURING, S.WARMING])
async def test_a_shutdown_in_any_state_ends(clock, state):
    device = Device(wait_codes={0: 28})
    device.reset_s = device.configure_s = 0.04
    ended = []

    async def warm_up(executor):
        if executor.generation.generation_id == 2:
            try:
                await trio.sleep(0.04)
            finally:
                ended.append(executor.core.lifecycle)

    limits = {"grace_ns": 10 * MS, "reset_timeout_ns": 2000 * MS}
    async with opened(device, warm_up=warm_up, **limits) as executor:
        sequence = await executor.admit(1, 0)
        await fails(executor)
        await in_state(executor, state)
        await trio.sleep(0.02)
        assert executor.core.lifecycle is state
        begin = trio.current_time()
    assert trio.current_time() - begin <= 0.01 + 1e-6
    assert executor.core.lifecycle is S.FAILED
    assert S.READY not in path(executor)[2:]
    assert sequence.request.outcome is not None
    assert len(ended) == (state is S.WARMING)


async def test_a_shutdown_while_a_recovery_waits_for_the_device(clock):
    device = Device(wait_codes={0: 28}, lost={1})
    async with opened(device, max_inflight=2, grace_ns=50 * MS) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, executor, DeviceFailed)
            await trio.testing.wait_all_tasks_blocked()

            async def lost():
                with trio.move_on_after(0.01):
                    await one(executor)

            nursery.start_soon(lost)
        assert executor.core.lifecycle is S.RECOVERING
        begin = trio.current_time()
    assert trio.current_time() - begin <= 0.05 + 1e-6
    assert executor.core.lifecycle is S.FAILED
    assert device.resets == 0
    assert len(executor.core.pool.quarantined) == 2


async def test_a_generation_that_warms_while_the_executor_shuts_down_is_not_opened(clock):
    device = Device(busy_ns=10 * MS, wait_codes={0: 28})

    async def warm_up(executor):
        if executor.generation.generation_id == 2:
            async with executor.sequence(1, 0, warmup=True) as sequence:
                await sequence.prefill(1)

    async with opened(device, warm_up=warm_up) as executor:
        await fails(executor)
        await in_state(executor, S.WARMING)
        await trio.sleep(5e-3)
        assert executor.core.in_flight
    assert S.READY not in path(executor)[2:]
    assert executor.core.lifecycle in (S.CLOSED, S.FAILED)


async def test_a_golden_run_that_ends_after_the_shutdown_began_opens_nothing(clock):
    """The same decision, of the core alone: no traffic once the shutdown has begun."""
    async with opened(Device()) as executor:
        pass
    from caltrio.capabilities import Capabilities
    from caltrio.core.scheduler import Core
    from caltrio.manifest import bind

    core = Core(ExecutorConfig(), 2, lambda event: None, Capabilities())
    core.configured(bind(SMALL, Device().models(), 1), 0)
    core.begin_shutdown(1)
    core.warmed(2)
    assert core.submit_request(0, 1, 0, 3).outcome is not None
    assert executor.core.lifecycle is S.CLOSED


async def test_shutdown_before_the_first_generation_is_ready(clock):
    device = Device()

    async def warm_up(executor):
        await trio.sleep_forever()

    with trio.move_on_after(0.01) as scope:
        async with open_executor(device, SMALL, ExecutorConfig(), warm_up=warm_up):
            raise AssertionError("must not become ready")
    assert scope.cancelled_caught


# --- outputs (FI10) --------------------------------------------------------------------------------


class Bad(Device):
    """Writes a bad value over one logit of job 0."""

    bits = 0x7FC0

    def _compute(self, job):
        super()._compute(job)
        if job.job_id == 0:
            host_memory(job).logits[41] = self.bits


@pytest.mark.parametrize("bits", [0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x7F81])
async def test_an_output_with_nan_or_infinity_is_not_delivered(clock, bits):
    device = Bad()
    device.bits = bits
    async with opened(device) as executor:
        sequence = await executor.admit(2, 3)
        with pytest.raises(OutputRejected) as caught:
            await sequence.prefill([1, 2])
        error = caught.value
        assert (error.phase, error.code, error.http) == ("complete", 0, 500)
        assert "1 of 64 logits" in str(error)
        (job,) = ended_jobs(executor)
        assert job.state is JobState.QUARANTINED
        assert job.kv.state is KvTxnState.UNKNOWN
        assert sequence.past_len == 0
        await generation(executor, 2)
        assert device.resets == 1
        sequence.close()
        async with executor.sequence(2, 3) as again:
            result = await again.prefill([1, 2])
            assert np.isfinite(result.logits).all()
    assert path(executor) == STARTED + RECOVERED + CLOSED


async def test_the_largest_finite_value_is_fine(clock):
    device = Bad()
    device.bits = 0xFF7F
    async with opened(device) as executor, executor.sequence(2, 3) as sequence:
        result = await sequence.prefill([1, 2])
        assert result.logits.argmin() == 41
        assert executor.core.lifecycle is S.READY


async def test_a_cancelled_job_of_the_recovery_is_told_once(clock):
    device = Device(busy_ns=10 * MS, wait_codes={0: 28})
    async with opened(device) as executor:
        with trio.move_on_after(5e-3):
            await one(executor)
        await generation(executor, 2)
        (job,) = ended_jobs(executor)
        assert isinstance(job.error, JobCancelled)
        assert job.state is JobState.QUARANTINED
        await one(executor)
