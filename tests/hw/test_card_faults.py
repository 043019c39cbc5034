"""Faults of the card itself, by lines of its card file: from the native call to the verdict of §8.

The golden run before traffic is three jobs; a fault ``at=3`` of infer() or Wait() so strikes the
first job of a caller, the target.
"""

import numpy as np
import pytest
import trio
from attrs import evolve
from emulated import GOLDEN, MANIFEST, driven, ended_jobs, in_state, most_at_once, say, until
from support import CLOSED, ENDED, MS, RECOVERED, STARTED, US, S, card, needs_emulator, path, profile

import caltrio.drills
import hw.device
from caltrio.capabilities import Capabilities
from caltrio.codes import Action, CalrtCode, verdict
from caltrio.core.job import JobState
from caltrio.core.kv import KvTxnState
from caltrio.drills import BEYOND, DRILLS, Setup, drill_config, run_drill
from caltrio.errors import (
    CsrRejected,
    DeadlineExceeded,
    DeviceFailed,
    DeviceUnknown,
    MapRejected,
    OutputRejected,
    RequestError,
    ResourceExhausted,
    SequenceUnknown,
    ServiceFailed,
    Unavailable,
)
from caltrio.events import DeviceFault
from caltrio.golden import check
from caltrio.semantics import EngineSemantics, KvAfterFailedWait, SubmitWhenFull
from caltrio.tomlfile import Ns

pytestmark = needs_emulator

QUICK = profile(submit=5 * US, h2d=40 * US, compute=300 * US, d2h=30 * US, interrupt=5 * US)
RESETTABLE = EngineSemantics(reset_scope="device")
NO_RESET = EngineSemantics()

CODES = [*(code for code in CalrtCode if code), 99]
TO_RECOVERY = (Action.RECONFIGURE, Action.RECOVER, Action.DISTRUST)
TO_THE_END = (Action.ROLL_BACK, Action.STOP)
BOTH = pytest.mark.parametrize("in_flight", [1, 2])


@pytest.fixture
def faulty(tmp_path):
    """Opens an executor on a card with these faults, with a golden run before traffic."""

    def faulty(*faults, semantics=RESETTABLE, facts=None, **limits):
        open_device = card(
            tmp_path, semantics, QUICK, MANIFEST, faults=faults, reset_ns=MS, **(facts or {})
        )
        return driven(open_device, warm_up=GOLDEN.warm_up, **limits)

    return faulty


@pytest.fixture
def quick_end(monkeypatch):
    """A driver that waits less for threads that never end."""
    monkeypatch.setattr(hw.device, "_CLOSE_S", 0.2)
    monkeypatch.setattr(hw.device, "_SETTLE_NS", 200 * MS)


async def asks(executor, index=0, tokens=2):
    """A request; its error, or ``None``. A wrong token is no RequestError, and comes out."""
    try:
        await say(executor, index, tokens)
    except RequestError as error:
        return error
    return None


async def strike(executor, others=2):
    """The target meets the fault while others are served; its error."""
    errors = []

    async def other(index):
        await asks(executor, index, 6)

    async with trio.open_nursery() as nursery:

        async def target():
            errors.append(await asks(executor))

        nursery.start_soon(target)
        first = executor.core._next_job_id
        await until(lambda: executor.core._next_job_id > first or errors)
        for index in range(others):
            nursery.start_soon(other, index + 1)
    await until(
        lambda: (
            executor.core.lifecycle is S.FAILED
            or (executor.core.health.ready and executor.core.drained)
        )
    )
    return errors[0]


async def assert_golden(executor):
    report = await check(executor, GOLDEN)
    assert report.first_difference is None
    assert report.passed


def faults(executor):
    return [event for event in executor.events if isinstance(event, DeviceFault)]


def exit_code(executor):
    with pytest.raises(ServiceFailed) as caught:
        executor.check()
    return caught.value.exit_code


# --- codes of infer() and Wait() --------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("call", ["infer", "wait"])
@pytest.mark.parametrize("code", CODES)
async def test_each_code_has_its_verdict(faulty, call, code, in_flight):
    row = verdict(code)
    async with faulty(f"{call} code={code} at=3", max_inflight=in_flight) as executor:
        error = await strike(executor)
        assert type(error) is row.error
        assert error.code == code
        assert error.phase == {"infer": "submit", "wait": "execute"}[call]
        job = ended_jobs(executor)[error.job_id]
        if call == "infer":
            assert job.kv.state is KvTxnState.ROLLED_BACK
            assert job.timings.waited_ns is None
        else:
            assert job.kv.state is KvTxnState.UNKNOWN
            assert job.state is JobState.QUARANTINED
        if row.action in TO_RECOVERY:
            assert path(executor) == [*STARTED, *RECOVERED]
            assert executor.generation.generation_id == 2
            await assert_golden(executor)
        elif row.action in TO_THE_END:
            assert path(executor) == [*STARTED, *ENDED]
            assert exit_code(executor) == 78
        else:
            assert path(executor) == STARTED
            # With two in flight, binding a job to an engine may be what is not there.
            if row.action is Action.CLOSE_FEATURE and in_flight == 1:
                assert set(executor.core.health.disabled) == {job.kind}
            else:
                await assert_golden(executor)
        assert len(faults(executor)) == 1


@pytest.mark.parametrize("call", ["infer", "wait"])
async def test_without_a_reset_the_service_ends_and_asks_for_a_restart(faulty, call):
    async with faulty(f"{call} code=28 at=3", semantics=NO_RESET) as executor:
        assert isinstance(await strike(executor), DeviceFailed)
        assert exit_code(executor) == 75
        assert path(executor) == [*STARTED, *ENDED]


# --- preparation --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("fault", "kind", "code", "recovers"),
    [
        ("csr at=6", CsrRejected, 14, False),  # two of each job
        ("csr code=24 at=6", CsrRejected, 24, True),
        ("slice at=6", MapRejected, 24, True),
        ("slice code=14 at=7", MapRejected, 14, False),
        ("map at=9", MapRejected, 24, True),  # three of each slot, once
        ("map code=21 at=10", MapRejected, 21, False),
    ],
)
async def test_preparation(faulty, fault, kind, code, recovers, in_flight):
    async with faulty(fault, max_inflight=in_flight) as executor:
        error = await strike(executor)
        assert type(error) is kind
        assert error.code == code
        job = ended_jobs(executor)[error.job_id]
        assert job.timings.infer_ns is None
        assert job.kv.state is KvTxnState.ROLLED_BACK
        assert path(executor) == [*STARTED, *RECOVERED] if recovers else STARTED
        await assert_golden(executor)


# --- what is on the card ------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("fault", "kind", "phase"),
    [
        ("exception at=3", DeviceFailed, "execute"),
        ("nan at=3", OutputRejected, "complete"),
        ("throw at=3", DeviceUnknown, "submit"),  # a C++ exception out of the vendor's infer()
    ],
)
async def test_exceptions_of_both_kinds_and_nan(faulty, fault, kind, phase, in_flight):
    async with faulty(fault, max_inflight=in_flight) as executor:
        error = await strike(executor)
        assert type(error) is kind
        assert error.phase == phase
        assert error.code == (15 if kind is DeviceUnknown else 0)
        assert path(executor) == [*STARTED, *RECOVERED]
        await assert_golden(executor)
        if in_flight == 2:  # and one at a time from the fault on, where the card had the job
            after = [job for job in ended_jobs(executor).values() if job.generation_id == 2]
            assert most_at_once(after) == 1


HANGS = {"execution_timeout_ns": Ns(150 * MS), "queue_timeout_ns": Ns(150 * MS),
         "grace_ns": Ns(50 * MS)}  # fmt: skip


@BOTH
async def test_a_wait_that_hangs_until_a_reset(faulty, in_flight):
    async with faulty("hang at=3", max_inflight=in_flight, **HANGS) as executor:
        error = await strike(executor)
        assert isinstance(error, DeadlineExceeded)
        assert error.phase == "execute"
        assert path(executor) == [*STARTED, *RECOVERED]
        await assert_golden(executor)
        job = ended_jobs(executor)[error.job_id]
        assert job.state is JobState.QUARANTINED
        assert job.kv.state is KvTxnState.UNKNOWN


@BOTH
async def test_an_infer_that_hangs_until_a_reset(faulty, in_flight):
    async with faulty("hang_infer at=3", max_inflight=in_flight, **HANGS) as executor:
        error = await strike(executor)
        assert isinstance(error, DeadlineExceeded)
        assert error.phase == "queue"
        assert path(executor) == [*STARTED, *RECOVERED]
        assert "has not returned" in executor.core.health.why or executor.core.health.ready
        await assert_golden(executor)


@BOTH
@pytest.mark.parametrize("fault", ["hang at=3", "hang_infer at=3"])
async def test_without_a_reset_what_hangs_ends_the_service(faulty, quick_end, fault, in_flight):
    async with faulty(fault, max_inflight=in_flight, semantics=NO_RESET, **HANGS) as executor:
        assert isinstance(await strike(executor), DeadlineExceeded)
        assert exit_code(executor) == 75
        begin_ns = executor.timer.now_ns()
    assert executor.timer.now_ns() - begin_ns < 20_000 * MS  # and is left in bounded time
    assert path(executor) == [*STARTED, *ENDED]


async def test_a_wait_that_no_reset_ends(faulty, quick_end):
    """The reset is no success then, whatever the card says: memory is still in its hands."""
    async with faulty("hang_for_ever at=3", **HANGS) as executor:
        assert isinstance(await strike(executor, 0), DeadlineExceeded)
        assert "the reset returned 25" in executor.core.health.why
        assert exit_code(executor) == 75


# --- recovery itself ----------------------------------------------------------------------------------


async def test_a_load_that_fails_at_the_start(faulty):
    with pytest.raises(ServiceFailed, match="returned 19") as caught:
        async with faulty("configure"):
            raise AssertionError("must not become ready")
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(("code", "wanted"), [(19, 78), (28, 75), (8, 78)])
async def test_a_load_that_fails_after_a_reset(faulty, code, wanted):
    async with faulty("wait code=28 at=3", f"configure code={code} at=1") as executor:
        assert isinstance(await strike(executor), DeviceFailed)
        assert path(executor) == [*STARTED, S.DRAINING, S.RECOVERING, S.CONFIGURING, S.FAILED]
        assert exit_code(executor) == wanted


async def test_a_reset_that_fails(faulty):
    async with faulty("wait code=28 at=3", "reset") as executor:
        assert isinstance(await strike(executor), DeviceFailed)
        assert "the reset returned 25" in executor.core.health.why
        assert exit_code(executor) == 75


async def test_a_golden_run_that_fails_after_a_reset(faulty):
    async with faulty("wait code=28 at=3", "wait code=28 at=5") as executor:
        assert isinstance(await strike(executor, 0), DeviceFailed)
        assert executor.core.lifecycle is S.FAILED
        assert path(executor)[-2:] == [S.WARMING, S.FAILED]


@pytest.mark.parametrize("scope", ["job", "engine"])
async def test_a_reset_of_less_than_the_card_is_not_used(faulty, scope):
    async with faulty("wait code=28 at=3", semantics=EngineSemantics(reset_scope=scope)) as executor:
        assert isinstance(await strike(executor), DeviceFailed)
        assert exit_code(executor) == 75


@pytest.mark.parametrize("scope", ["none", "job", "engine"])
async def test_a_card_that_resets_less_than_was_believed(tmp_path, scope):
    """The program trusts a confirmed reset of the whole card; this card refuses it."""
    open_device = card(tmp_path, EngineSemantics(reset_scope=scope), QUICK, MANIFEST,
                       faults=["wait code=28 at=0"],
                       believed=Capabilities.assumed(RESETTABLE))  # fmt: skip
    async with driven(open_device) as executor:
        assert isinstance(await asks(executor), DeviceFailed)
        await in_state(executor, S.FAILED)
        assert "the reset returned 27" in executor.core.health.why


async def test_one_fault_after_the_other(faulty):
    """Each in a new generation, until there are no more."""
    lines = ["wait code=28 at=3", "exception at=8", "infer code=18 at=13", "throw at=18", "nan at=22"]
    async with faulty(*lines) as executor:
        for number in range(2, 7):
            while await asks(executor) is None:
                pass
            await until(lambda: executor.generation.generation_id == number  # noqa: B023
                        and executor.core.health.ready)  # fmt: skip
        await assert_golden(executor)
    assert path(executor) == [*STARTED, *(5 * RECOVERED), *CLOSED]


# --- KV -----------------------------------------------------------------------------------------------


async def test_the_card_gives_no_kv_for_a_while(faulty):
    async with faulty("kv at=1") as executor:  # the golden run asked first
        error = await asks(executor)
        assert isinstance(error, ResourceExhausted)
        await assert_golden(executor)
    assert path(executor) == [*STARTED, *CLOSED]


async def test_the_card_gives_no_kv_at_all(faulty):
    """FI04: waited for up to the deadline."""
    async with faulty("kv times=0 every=2", admission_timeout_ns=Ns(80 * MS)) as executor:
        begin_ns = executor.timer.now_ns()
        assert isinstance(await asks(executor), DeadlineExceeded)
        assert executor.timer.now_ns() - begin_ns >= 80 * MS
    assert path(executor) == [*STARTED, *CLOSED]


@BOTH
@pytest.mark.parametrize("after", KvAfterFailedWait)
async def test_whatever_a_failed_wait_left_in_the_kv(faulty, after, in_flight):
    """The executor relies on none of it: the sequence is lost, and nobody else's answer is wrong."""
    semantics = evolve(RESETTABLE, kv_after_failed_wait=after)
    lines = ["wait code=13 at=5", "wait code=1 at=9", "wait code=13 at=14"]  # in decode steps, mostly
    async with faulty(*lines, semantics=semantics, max_inflight=in_flight) as executor:
        errors = []
        async with trio.open_nursery() as nursery:

            async def client(index):
                errors.append(await asks(executor, index, 12))

            for index in range(6):
                nursery.start_soon(client, index)
        assert len([error for error in errors if error is not None]) == 3
        async with executor.sequence(3, 2) as sequence:
            await sequence.prefill(np.array([1, 2, 3]))
        assert len(executor.core.kv.quarantined) == 3
        assert len({*executor.core.kv.quarantined} & {*executor.core.kv.holders}) == 0
        await assert_golden(executor)
    assert path(executor) == [*STARTED, *CLOSED]


async def test_a_sequence_whose_step_failed_takes_no_further_step(faulty):
    async with faulty("wait code=13 at=4") as executor:
        async with executor.sequence(3, 4) as sequence:
            result = await sequence.prefill(np.array([1, 2, 3]))
            with pytest.raises(DeadlineExceeded):
                await sequence.decode(int(result.logits.argmax()))
            with pytest.raises(SequenceUnknown):
                await sequence.decode(1)
        await assert_golden(executor)


# --- a card that is not what was believed -------------------------------------------------------------


async def test_a_card_that_is_busy_where_it_was_believed_to_block(tmp_path):
    """Code 17 to the one who comes too many, a pause, and right answers to the others."""
    busy = EngineSemantics(submit_when_full=SubmitWhenFull.BUSY)
    block = evolve(busy, submit_when_full=SubmitWhenFull.BLOCK)
    long = profile(compute=20 * MS, decode=MS)  # so that a third comes while two are there
    open_device = card(tmp_path, busy, long, MANIFEST, believed_semantics=block)
    async with driven(open_device, max_inflight=3, backoff_threshold=1000) as executor:
        errors = {}
        async with trio.open_nursery() as nursery:

            async def client(index):
                errors[index] = await asks(executor, index, 6)

            for index in range(6):
                nursery.start_soon(client, index)
        failed = [error for error in errors.values() if error is not None]
        assert failed
        assert {type(error) for error in failed} == {Unavailable}
        assert {error.code for error in failed} == {17}
        assert await asks(executor) is None
    assert path(executor) == [*STARTED, *CLOSED]


# --- the drills ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("drill", [*DRILLS, *BEYOND], ids=lambda drill: drill.name)
def test_drills(tmp_path, monkeypatch, drill, in_flight):
    """What is injected above the driver is told and mended as in simulation."""

    def quick(max_inflight):
        return evolve(drill_config(max_inflight), execution_timeout_ns=Ns(1_000 * MS),
                      queue_timeout_ns=Ns(1_000 * MS), grace_ns=Ns(300 * MS))  # fmt: skip

    monkeypatch.setattr(caltrio.drills, "drill_config", quick)
    # Prefills are what the drills meet on the card, also on a busy machine.
    timing = profile(submit=5 * US, h2d=40 * US, compute=30 * MS, decode=MS, d2h=30 * US)
    open_device = card(tmp_path, RESETTABLE, timing, MANIFEST, reset_ns=MS)
    result = trio.run(run_drill, drill, Setup(open_device, MANIFEST, GOLDEN, in_flight))
    assert result.differences == []
