"""One job more than the limit: the ring holds it back, submits it by itself, or gives it back."""

import random
import time

import pytest
import trio
from attrs import evolve
from emulated import MANIFEST, driven, ended_jobs, held_back, most_at_once, on_card, say, until
from support import CLOSED, ENDED, MS, STARTED, US, S, card, needs_emulator, path, profile

from caltrio.core.job import JobState
from caltrio.core.kv import KvTxnState
from caltrio.errors import DeadlineExceeded, JobCancelled, RequestError
from caltrio.events import DeviceFault, InflightLimited
from caltrio.semantics import EngineSemantics, SubmitWhenFull
from caltrio.timing import Jitter
from caltrio.tomlfile import Ns

pytestmark = needs_emulator

FULL = EngineSemantics()
SLOW = profile(h2d=MS, compute=150 * MS, decode=2 * MS, d2h=MS)
QUICK = profile(submit=10 * US, h2d=30 * US, compute=400 * US, d2h=30 * US, interrupt=5 * US)
RESETTABLE = EngineSemantics(reset_scope="device")


def slow(folder, **facts):
    return card(folder, FULL, SLOW, MANIFEST, **facts)


async def held(executor):
    """The first job on the card, and a second one held back."""
    await until(lambda: on_card(executor) and held_back(executor) is not None)
    (first,) = on_card(executor)
    return first, held_back(executor)


def assert_never_submitted(job):
    times = job.timings
    assert times.queued_ns is not None  # it was prepared
    assert times.infer_ns is times.submitted_ns is times.waited_ns is None
    assert job.stages is None
    assert job.state is JobState.FAILED
    assert job.kv.state is KvTxnState.ROLLED_BACK
    assert not job.lease.alive
    assert not job.holds_permit


def block():
    """The event loop does nothing for longer than a job takes."""
    time.sleep(0.35)


async def ends(executor, errors, index=0, tokens=1):
    """A request; its error, or ``None``, goes into ``errors``."""
    try:
        await say(executor, index, tokens)
    except RequestError as error:
        errors[index] = error
    else:
        errors[index] = None


# --- held back, and submitted ---------------------------------------------------------------------


async def test_the_next_job_goes_to_the_card_without_python(tmp_path):
    """The event loop is blocked all the while in which one job ends and the next one begins."""
    async with driven(slow(tmp_path)) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say, executor, 0, 1)
            await until(lambda: on_card(executor))
            nursery.start_soon(say, executor, 1, 1)
            first, second = await held(executor)
            block()
            resumed_ns = executor.timer.now_ns()
            assert not first.final
    assert first.timings.waited_ns <= second.timings.infer_ns < resumed_ns
    assert most_at_once([first, second]) == 1


async def test_a_process_that_stalls_is_no_fault_of_the_card(tmp_path):
    """The job was back by its deadline; that nobody had looked by then is another matter."""
    limits = {"execution_timeout_ns": Ns(400 * MS), "grace_ns": Ns(50 * MS)}
    async with driven(slow(tmp_path), **limits) as executor:
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(say, executor, 0, 1)
                await until(lambda: on_card(executor))
                block()
                block()
    assert path(executor) == [*STARTED, *CLOSED]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
async def test_records_of_busy_clients(tmp_path, in_flight):
    timing = evolve(QUICK, jitter=Jitter("lognormal", 0.5, 1, ("compute", "h2d", "interrupt")))
    semantics = EngineSemantics(submit_when_full=SubmitWhenFull.BLOCK)
    async with driven(card(tmp_path, semantics, timing, MANIFEST), max_inflight=in_flight) as executor:
        async with trio.open_nursery() as nursery:
            for index in range(6):
                nursery.start_soon(say, executor, index, 12)
    jobs = ended_jobs(executor).values()
    assert len(jobs) == 6 * 12
    for job in jobs:
        times, stages = job.timings, job.stages
        calls = (times.accepted_ns, times.admitted_ns, times.queued_ns, times.infer_ns,
                 times.submitted_ns, times.waited_ns, times.ended_ns, times.answered_ns)  # fmt: skip
        assert list(calls) == sorted(calls)
        card_had_it = (times.infer_ns, stages.h2d_start_ns, stages.h2d_end_ns, *stages.die_start_ns,
                       *stages.die_end_ns, stages.d2h_start_ns, stages.d2h_end_ns,
                       times.waited_ns)  # fmt: skip
        assert list(card_had_it) == sorted(card_had_it)
    assert most_at_once(jobs) == in_flight
    by_infer = sorted(jobs, key=lambda job: job.timings.infer_ns)
    assert by_infer == sorted(jobs, key=lambda job: job.timings.waited_ns)  # Wait() in that order


# --- given up before the card has it ---------------------------------------------------------------


async def test_a_caller_leaves_a_job_that_is_held_back(tmp_path):
    async with driven(slow(tmp_path)) as executor:
        core = executor.core
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say, executor, 0, 3)
            await until(lambda: on_card(executor))
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    inner.start_soon(say, executor, 1, 1)
                    first, second = await held(executor)
                    kv = core.kv.reserved_tokens
                    scope.cancel()
            await until(lambda: second.final)
            assert_never_submitted(second)
            assert isinstance(second.error, JobCancelled)
            assert not first.final
            assert core.pool.leased == len(core.in_flight) == 1
            assert core.kv.reserved_tokens < kv
            nursery.start_soon(say, executor, 2, 2)  # and its place is free for another
    assert most_at_once(ended_jobs(executor).values()) == 1
    assert path(executor) == [*STARTED, *CLOSED]


async def test_a_caller_leaves_a_job_that_was_held_back_and_is_submitted(tmp_path):
    async with driven(slow(tmp_path)) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say, executor, 0, 1)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    await until(lambda: on_card(executor))
                    inner.start_soon(say, executor, 1, 1)
                    _, second = await held(executor)
                    await until(lambda: second.timings.submitted_ns is not None)
                    scope.cancel()
            assert not second.final
            assert executor.core.pool.leased == 1  # the card has it
            nursery.start_soon(say, executor, 2, 2)
    assert isinstance(second.error, JobCancelled)
    assert second.timings.waited_ns is not None
    assert second.kv.state is KvTxnState.COMMITTED


async def test_leaving_at_any_moment(tmp_path):
    """Withdrawn in time or not: it is one of the two, and nothing is lost between them."""
    moments = random.Random(5)
    withdrawn = ran = 0
    async with driven(card(tmp_path, FULL, QUICK, MANIFEST)) as executor:
        for _ in range(200):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(say, executor, 0, 2)
                with trio.move_on_after(moments.uniform(0, 0.0015)):
                    await say(executor, 1, 3)
            assert executor.core.pool.leased <= 1
        await until(lambda: executor.core.drained)
    for job in ended_jobs(executor).values():
        if job.error is None:
            continue
        assert isinstance(job.error, JobCancelled)
        if job.timings.queued_ns is None:
            continue
        if job.timings.infer_ns is None:
            withdrawn += 1
            assert_never_submitted(job)
        else:
            ran += 1
            assert job.timings.infer_ns < job.timings.submitted_ns < job.timings.waited_ns
            assert job.kv.state is KvTxnState.COMMITTED
    assert withdrawn + ran > 20
    assert most_at_once(ended_jobs(executor).values()) == 1
    assert not executor.device._jobs


async def test_the_queue_deadline_of_a_job_that_is_held_back(tmp_path):
    """It is answered and withdrawn; the card has done nothing wrong, and goes on."""
    limits = {"queue_timeout_ns": Ns(30 * MS), "grace_ns": Ns(30 * MS)}
    async with driven(slow(tmp_path), **limits) as executor:
        errors = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(say, executor, 0, 3)
            await until(lambda: on_card(executor))
            nursery.start_soon(ends, executor, errors, 1)
            first, second = await held(executor)
            await until(lambda: second.final)
            assert_never_submitted(second)
            assert not first.final
            await trio.sleep(0.08)  # past the grace, after which an infer() hangs
        assert isinstance(errors[1], DeadlineExceeded)
        assert executor.core.health.ready
    assert path(executor) == [*STARTED, *CLOSED]


# --- the end ----------------------------------------------------------------------------------------


async def test_shutdown_with_one_submitted_one_held_back_and_some_queued(tmp_path):
    """FI13."""
    errors, answers = {}, []
    async with trio.open_nursery() as nursery:  # the callers outlive the executor
        async with driven(slow(tmp_path), max_active_sequences=3) as executor:
            nursery.start_soon(say, executor, 0, 1, answers)
            await until(lambda: on_card(executor))
            nursery.start_soon(ends, executor, errors, 1)
            first, second = await held(executor)
            for index in (2, 3):  # one has KV and waits for its turn, one waits for KV
                nursery.start_soon(ends, executor, errors, index)
            await until(lambda: executor.core._ready and executor.core.waiting)
        assert first.timings.waited_ns is not None
    assert answers == [0]
    assert set(errors) == {1, 2, 3}
    assert all(isinstance(error, JobCancelled) for error in errors.values())
    assert_never_submitted(second)
    submitted = [job for job in ended_jobs(executor).values() if job.timings.infer_ns is not None]
    assert submitted == [first]
    assert path(executor) == [*STARTED, *CLOSED]


# --- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
async def test_a_card_that_is_not_trusted_any_more_gets_nothing(tmp_path, in_flight):
    """The ring waits for the judgement, also while the event loop is busy with something else."""
    errors = {}
    async with driven(slow(tmp_path, faults=["wait code=28 at=0"]), max_inflight=in_flight,
                      grace_ns=Ns(2_000 * MS)) as executor:  # fmt: skip
        async with trio.open_nursery() as nursery:
            for index in range(in_flight):
                nursery.start_soon(ends, executor, errors, index)
                await until(lambda: len(on_card(executor)) == index + 1)  # noqa: B023
            nursery.start_soon(ends, executor, errors, in_flight)
            await until(lambda: held_back(executor) is not None)
            last = held_back(executor)
            block()  # all that is on the card ends meanwhile
            assert not last.final
        await until(lambda: executor.core.lifecycle is S.FAILED)
    assert_never_submitted(last)
    assert errors[0].code == 28
    assert len(errors) == in_flight + 1
    assert all(errors.values()) or in_flight == 2  # the other in flight came back well
    assert path(executor) == [*STARTED, *ENDED]
    faults = [event for event in executor.events if isinstance(event, DeviceFault)]
    assert len(faults) == 1


async def test_a_fault_that_the_service_survives_lets_the_next_one_go_after_the_judgement(tmp_path):
    errors = {}
    async with driven(slow(tmp_path, faults=["wait code=13 at=0"])) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends, executor, errors, 0)
            await until(lambda: on_card(executor))
            nursery.start_soon(say, executor, 1, 2)
            first, second = await held(executor)
            block()
            blocked_ns = executor.timer.now_ns()
    assert isinstance(errors[0], DeadlineExceeded)
    assert second.timings.infer_ns > blocked_ns > first.timings.waited_ns
    assert second.timings.infer_ns > first.timings.ended_ns
    assert second.error is None
    assert path(executor) == [*STARTED, *CLOSED]


async def test_each_failure_is_looked_at_before_the_next_job_goes(tmp_path):
    """Two fail while nobody looks; the first would be survived, but the second is not."""
    errors = {}
    lines = ["wait code=13 at=0", "wait code=28 at=1"]
    async with driven(slow(tmp_path, faults=lines), max_inflight=2) as executor:
        async with trio.open_nursery() as nursery:
            for index in range(2):
                nursery.start_soon(ends, executor, errors, index)
                await until(lambda: len(on_card(executor)) == index + 1)  # noqa: B023
            nursery.start_soon(ends, executor, errors, 2)
            await until(lambda: held_back(executor) is not None)
            last = held_back(executor)
            block()
            block()
        await until(lambda: executor.core.lifecycle is S.FAILED)
    assert sorted(error.code for error in errors.values()) == [0, 13, 28]
    assert_never_submitted(last)


@pytest.mark.parametrize("code", [13, 17])
async def test_after_the_fall_back_there_is_one_at_a_time(tmp_path, code):
    errors = {}
    timing = evolve(QUICK, jitter=Jitter("lognormal", 0.5, 1, ("compute",)))
    open_device = card(tmp_path, FULL, timing, MANIFEST, faults=[f"wait code={code} at=20"])
    async with driven(open_device, max_inflight=2) as executor:
        async with trio.open_nursery() as nursery:
            for index in range(6):
                nursery.start_soon(ends, executor, errors, index, 12)
        assert executor.core.health.limit == 1
    (limited,) = [event for event in executor.events if isinstance(event, InflightLimited)]
    jobs = ended_jobs(executor).values()
    before = [job for job in jobs if job.timings.waited_ns <= limited.now_ns]
    after = [job for job in jobs if job.timings.waited_ns > limited.now_ns]
    assert most_at_once(before) == 2
    assert most_at_once(after) == 1
    assert len(after) > 20
    assert sorted(error is None for error in errors.values()) == [False] + [True] * 5


async def test_a_job_held_back_over_a_reset_does_not_reach_the_new_generation(tmp_path):
    errors = {}
    open_device = card(tmp_path, RESETTABLE, SLOW, MANIFEST, faults=["wait code=28 at=0"],
                       reset_ns=MS)  # fmt: skip
    async with driven(open_device) as executor:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends, executor, errors, 0)
            await until(lambda: on_card(executor))
            nursery.start_soon(ends, executor, errors, 1)
            _, second = await held(executor)
        await until(lambda: second.final)  # its caller has its answer before the ring gives it back
        assert_never_submitted(second)
        await until(lambda: executor.core.health.ready and executor.generation.generation_id == 2)
        await say(executor, 1, 3)
    assert set(errors) == {0, 1}
    assert all(errors.values())
