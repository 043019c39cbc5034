"""The trio shell on a fake device, under trio's MockClock: no real time passes."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing

from caltrio.config import ExecutorConfig
from caltrio.core.lifecycle import LifecycleState
from caltrio.core.request import Outcome
from caltrio.errors import (
    DeadlineExceeded,
    DeviceFailed,
    InputMismatch,
    InvalidArgument,
    JobCancelled,
    ResourceExhausted,
    SequenceUnknown,
    Unavailable,
)
from caltrio.events import BufferQuarantined, JobEnded, LifecycleChanged, RequestEnded
from caltrio.executor import open_executor
from caltrio.manifest import load_manifest
from caltrio.testing import FakeDevice
from caltrio.tokens import ReferenceSequence

MS = 1_000_000


@pytest.fixture
def clock():
    return trio.testing.MockClock(autojump_threshold=0)


@asynccontextmanager
async def opened(device=None, **limits):
    events = []
    device = device or FakeDevice()
    config = ExecutorConfig(**limits)
    async with open_executor(device, load_manifest(), config, listeners=[events.append]) as executor:
        executor.events = events
        yield executor
    assert not executor.core.open
    kv = executor.core.kv  # what the device may still write to stays out of use
    assert not kv.holders
    assert kv.reserved_tokens == sum(held.reserved_tokens for held in kv.quarantined.values())
    if executor.core.lifecycle is LifecycleState.CLOSED:
        assert executor.core.pool.leased == 0


def outcomes(executor):
    return [e.request.outcome for e in executor.events if isinstance(e, RequestEnded)]


def ended_jobs(executor):
    return [e.job for e in executor.events if isinstance(e, JobEnded)]


async def until(condition):
    while not condition():
        await trio.sleep(1e-6)


async def test_a_request_from_prefill_to_end(clock):
    async with opened() as executor:
        async with executor.sequence(10, 3) as sequence:
            first = await sequence.prefill(10)
            await sequence.emit_token()
            await sequence.decode()
            await sequence.decode()
        assert first.job_id == 0
        assert first.timings.waited_ns - first.timings.infer_ns == pytest.approx(MS, abs=2)
        assert outcomes(executor) == [Outcome.COMPLETED]
        assert [job.past_len for job in ended_jobs(executor)] == [0, 10, 11]


async def test_one_in_flight_means_one(clock):
    device = FakeDevice()
    async with opened(device) as executor, trio.open_nursery() as nursery:

        async def one():
            async with executor.sequence(1, 1) as sequence:
                await sequence.prefill(1)

        for _ in range(4):
            nursery.start_soon(one)
        begin = trio.current_time()
        await until(lambda: len(device.waited) == 4)
        assert trio.current_time() - begin == pytest.approx(4e-3, rel=0.01)


async def test_cancel_before_submit_never_reaches_the_device(clock):
    device = FakeDevice()
    async with opened(device) as executor, trio.open_nursery() as nursery:

        async def one():
            async with executor.sequence(1, 1) as sequence:
                await sequence.prefill(1)

        nursery.start_soon(one)
        await until(lambda: device.inferred == [0])
        with trio.move_on_after(1e-4):
            await one()
        assert ended_jobs(executor)[0].job_id == 1
        assert isinstance(ended_jobs(executor)[0].error, JobCancelled)
    assert device.inferred == [0]
    assert outcomes(executor) == [Outcome.CANCELLED, Outcome.COMPLETED]


async def test_cancel_after_submit_leaves_at_once_and_the_device_finishes(clock):
    device = FakeDevice()
    async with opened(device) as executor:
        begin = trio.current_time()
        with trio.move_on_after(1e-4):
            async with executor.sequence(1, 1) as sequence:
                await sequence.prefill(1)
        assert trio.current_time() - begin == pytest.approx(1e-4)
        assert executor.core.pool.leased == 1
        assert executor.core.kv.reserved_tokens == 1  # the device is still writing there
        await until(lambda: device.waited == [0])
        await trio.testing.wait_all_tasks_blocked()
        assert executor.core.pool.leased == 0
        assert executor.core.kv.reserved_tokens == 0
    assert outcomes(executor) == [Outcome.CANCELLED]


class SlowCompleter(FakeDevice):
    """Its host work takes time, as in simulation: a job can be given up while it is converted."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        self.timer.work = self.convert

    async def convert(self, stage, job):
        await trio.sleep(0.01)


async def test_cancel_while_the_output_is_converted_then_shut_down(clock):
    async with opened(SlowCompleter()) as executor:
        with trio.move_on_after(5e-3):
            async with executor.sequence(1, 1) as sequence:
                await sequence.prefill(1)
        (job,) = [request.job for request in executor.core.open.values()]
        executor.core.cancel(job, executor._timer.now_ns())  # again: it is given up already
    assert outcomes(executor) == [Outcome.CANCELLED]
    assert len(ended_jobs(executor)) == 1


async def test_cancel_while_waiting_for_admission(clock):
    async with opened(max_active_sequences=1) as executor, executor.sequence(1, 1):
        with trio.move_on_after(1):
            async with executor.sequence(1, 1):
                raise AssertionError("must not be admitted")
        assert not executor.core.waiting
    assert outcomes(executor) == [Outcome.CANCELLED, Outcome.COMPLETED]


@pytest.mark.parametrize(
    ("prompt", "output", "error"),
    [(0, 1, InvalidArgument), (1, -1, InvalidArgument), (40961, 0, InvalidArgument),
     (40960, 2, InvalidArgument), (101, 0, ResourceExhausted)],
)  # fmt: skip
async def test_refused(clock, prompt, output, error):
    async with opened(kv_capacity_tokens=100 if error is ResourceExhausted else 10**6) as executor:
        with pytest.raises(error) as caught:
            async with executor.sequence(prompt, output):
                raise AssertionError("must not be admitted")
        assert str(prompt) in str(caught.value)
    assert outcomes(executor) == [Outcome.REFUSED]


async def test_the_last_position_can_be_used_but_not_passed(clock):
    async with opened() as executor:
        async with executor.sequence(40960, 1) as sequence:
            await sequence.prefill(40960)
            with pytest.raises(InvalidArgument, match="40960"):
                await sequence.decode()
        async with executor.sequence(40959, 2) as sequence:
            await sequence.prefill(40959)
            await sequence.decode()


async def test_a_full_queue_refuses(clock):
    async with opened(max_active_sequences=1, max_queue=0) as executor, executor.sequence(1, 1):
        with pytest.raises(ResourceExhausted, match="queue full"):
            async with executor.sequence(1, 1):
                pass
    assert outcomes(executor) == [Outcome.REFUSED, Outcome.COMPLETED]


async def test_admission_is_fifo_even_if_a_later_one_would_fit(clock):
    async with opened(kv_capacity_tokens=100) as executor, trio.open_nursery() as nursery:
        order = []

        async def one(name, tokens):
            async with executor.sequence(tokens, 0):
                order.append(name)
                await trio.sleep(1)

        async with executor.sequence(60, 0):
            nursery.start_soon(one, "large", 80)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(one, "small", 30)
            await trio.testing.wait_all_tasks_blocked()
            assert order == []  # the small one would fit beside the 60, and may not overtake
        await trio.sleep(0.5)
        assert order == ["large"]
    assert order == ["large", "small"]


async def test_admission_deadline(clock):
    async with opened(max_active_sequences=1, admission_timeout_ns=5 * MS) as executor:
        async with executor.sequence(1, 1):
            begin = trio.current_time()
            with pytest.raises(DeadlineExceeded, match="admission_timeout"):
                async with executor.sequence(1, 1):
                    pass
            assert trio.current_time() - begin == pytest.approx(5e-3)
    assert outcomes(executor) == [Outcome.EXPIRED, Outcome.COMPLETED]


async def test_admission_deadline_covers_the_wait_for_a_buffer(clock):
    async with opened(FakeDevice(busy_ns=50 * MS), admission_timeout_ns=5 * MS) as executor:
        async with executor.sequence(1, 1) as first, executor.sequence(1, 1) as second:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(first.prefill, 1)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(DeadlineExceeded):
                    await second.prefill(1)
    assert sorted(outcomes(executor)) == [Outcome.COMPLETED, Outcome.EXPIRED]


class SlowSubmit(FakeDevice):
    async def infer(self, job):
        await trio.sleep(0.01)
        return await super().infer(job)


async def test_queue_deadline_answers_at_once_and_the_device_finishes(clock):
    device = SlowSubmit()
    async with opened(device, queue_timeout_ns=2 * MS) as executor:
        begin = trio.current_time()
        with pytest.raises(DeadlineExceeded, match="queue deadline"):
            async with executor.sequence(1, 1) as sequence:
                await sequence.prefill(1)
        assert trio.current_time() - begin == pytest.approx(2e-3)
        assert executor.core.pool.leased == 1
        await until(lambda: device.waited == [0])
    assert outcomes(executor) == [Outcome.EXPIRED]


async def test_execution_deadline_stops_the_service_and_keeps_the_memory(clock):
    device = FakeDevice(lost={0})
    async with opened(device, execution_timeout_ns=5 * MS, grace_ns=20 * MS) as executor:
        begin = trio.current_time()
        with pytest.raises(DeadlineExceeded, match="execute deadline"):
            async with executor.sequence(1, 1) as sequence:
                await sequence.prefill(1)
        assert trio.current_time() - begin == pytest.approx(5e-3)
        assert executor.core.lifecycle is LifecycleState.RECOVERING
        with pytest.raises(Unavailable, match="recovering"):
            async with executor.sequence(1, 1):
                pass
        await trio.sleep(0.021)
        assert executor.core.lifecycle is LifecycleState.FAILED
        assert executor.core.pool.leased == 1  # nobody may touch what the device owns
    assert [e.new for e in executor.events if isinstance(e, LifecycleChanged)][2:] == [
        LifecycleState.DRAINING,
        LifecycleState.RECOVERING,
        LifecycleState.FAILED,
    ]
    assert executor.core.pool.leased == 0
    assert len(executor.core.pool.quarantined) == 1
    assert outcomes(executor) == [Outcome.EXPIRED, Outcome.REFUSED] or outcomes(executor) == [
        Outcome.REFUSED,
        Outcome.EXPIRED,
    ]


async def test_busy_at_submit_fails_the_job_and_nothing_else(clock):
    device = FakeDevice(submit_codes={0: 17})
    async with opened(device) as executor, executor.sequence(1, 1) as sequence:
        with pytest.raises(Unavailable) as caught:
            await sequence.prefill(1)
        assert caught.value.code == 17
        assert executor.core.pool.leased == 0
        await sequence.prefill(1)  # nothing was lost: the device never had it
    assert device.waited == [1]
    assert executor.core.lifecycle is LifecycleState.CLOSED


async def test_unavailable_at_submit_stops_the_service(clock):
    async with opened(FakeDevice(submit_codes={0: 18})) as executor:
        with pytest.raises(Unavailable):
            async with executor.sequence(1, 1) as sequence:
                await sequence.prefill(1)
        assert executor.core.lifecycle is LifecycleState.FAILED


@pytest.mark.parametrize("fault", [{"wait_codes": {0: 13}}, {"exceptions": {0}}])
async def test_a_failed_wait_quarantines_and_makes_the_sequence_unknown(clock, fault):
    async with opened(FakeDevice(**fault)) as executor:
        async with executor.sequence(1, 2) as sequence:
            with pytest.raises((DeviceFailed, DeadlineExceeded)):
                await sequence.prefill(1)
            with pytest.raises((SequenceUnknown, Unavailable)):
                await sequence.prefill(1)
        assert len([e for e in executor.events if isinstance(e, BufferQuarantined)]) == 1
        fatal = "exceptions" in fault
        expected = LifecycleState.FAILED if fatal else LifecycleState.READY
        assert executor.core.lifecycle is expected
    assert Outcome.COMPLETED not in outcomes(executor)


async def test_no_buffers_left_ends_the_service_instead_of_waiting_for_ever(clock):
    device = FakeDevice(wait_codes={0: 13, 1: 13})
    async with opened(device) as executor:
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                async with executor.sequence(1, 1) as sequence:
                    await sequence.prefill(1)
        with pytest.raises(Unavailable, match="quarantined"):
            async with executor.sequence(1, 1) as sequence:
                await sequence.prefill(1)


async def test_shutdown_cancels_the_queued_and_drains_the_submitted(clock):
    """FI13: one queued, one submitted."""
    device = FakeDevice(busy_ns=50 * MS)
    seen = []

    async def one(executor, name):
        try:
            async with executor.sequence(1, 1) as sequence:
                await sequence.prefill(1)
                seen.append((name, "done"))
        except JobCancelled:
            seen.append((name, "cancelled"))

    async with trio.open_nursery() as nursery, opened(device) as executor:
        for name in ("submitted", "queued"):
            nursery.start_soon(one, executor, name)
            await trio.testing.wait_all_tasks_blocked()
    assert seen == [("queued", "cancelled"), ("submitted", "done")]
    assert device.inferred == device.waited == [0]
    assert executor.core.lifecycle is LifecycleState.CLOSED


async def test_a_cancelled_scope_around_everything_still_drains(clock):
    device = FakeDevice(busy_ns=50 * MS)
    with trio.move_on_after(0.01) as scope:
        async with opened(device) as executor, executor.sequence(1, 1) as sequence:
            await sequence.prefill(1)
    assert scope.cancelled_caught
    assert device.waited == [0]
    assert executor.core.lifecycle is LifecycleState.CLOSED
    assert outcomes(executor) == [Outcome.CANCELLED]


async def test_a_device_that_never_returns_cannot_hold_up_the_shutdown_for_ever(clock):
    with trio.move_on_after(0.01):
        async with opened(FakeDevice(lost={0}), grace_ns=30 * MS) as executor:
            async with executor.sequence(1, 1) as sequence:
                await sequence.prefill(1)
    assert executor.core.lifecycle is LifecycleState.FAILED
    assert len(executor.core.pool.quarantined) == 1
    assert outcomes(executor) == [Outcome.CANCELLED]


async def test_an_error_in_the_block_comes_out_plain_after_the_drain(clock):
    with pytest.raises(KeyError, match="mine"):
        async with opened() as executor, executor.sequence(1, 1) as sequence:
            await sequence.prefill(1)
            raise KeyError("mine")
    assert outcomes(executor) == [Outcome.CANCELLED]


class Exploding(FakeDevice):
    async def infer(self, job):
        raise ZeroDivisionError("a defect of the device's")


async def test_a_defect_of_the_device_is_not_swallowed_and_does_not_hang(clock):
    with pytest.raises(BaseExceptionGroup) as caught:
        async with opened(Exploding()) as executor, executor.sequence(1, 1) as sequence:
            await sequence.prefill(1)
    assert caught.group_contains(ZeroDivisionError)


async def test_two_steps_of_one_sequence_at_once_are_refused(clock):
    async with opened() as executor, executor.sequence(1, 5) as sequence:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sequence.prefill, 1)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(InvalidArgument, match="under way"):
                await sequence.decode()


async def test_decode_before_prefill_and_use_after_close(clock):
    async with opened() as executor:
        async with executor.sequence(1, 5) as sequence:
            with pytest.raises(InvalidArgument, match="prefill"):
                await sequence.decode()
            with pytest.raises(InvalidArgument, match="no result"):
                await sequence.emit_token()
        with pytest.raises(InvalidArgument, match="no open sequence"):
            await sequence.prefill(1)


async def test_too_many_in_flight_for_the_semantics(clock):
    from caltrio.semantics import EngineSemantics

    with pytest.raises(ValueError, match="code 17"):
        async with opened(FakeDevice(semantics=EngineSemantics()), max_inflight=3):
            pass


def raising_at(kind):
    def listener(event):
        if isinstance(event, kind):
            raise ZeroDivisionError("a listener's own fault")

    return listener


async def test_a_listener_that_raises_while_its_caller_leaves_breaks_nothing(clock):
    """Its error comes out of the executor, never out of the middle of trio."""
    device = FakeDevice(busy_ns=50 * MS)
    executor = None
    with pytest.raises(BaseExceptionGroup) as caught:
        async with open_executor(
            device, load_manifest(), ExecutorConfig(), listeners=[raising_at(RequestEnded)]
        ) as executor:
            async with trio.open_nursery() as nursery:
                for _ in range(2):

                    async def leaves():
                        with trio.move_on_after(0.01):
                            async with executor.sequence(1, 1) as sequence:
                                await sequence.prefill(1)

                    nursery.start_soon(leaves)
            await trio.sleep(1)
    assert caught.group_contains(ZeroDivisionError)
    assert not caught.group_contains(trio.TrioInternalError)
    assert not executor.core.open
    assert executor.core.pool.leased == 0


async def test_a_listener_that_raises_at_the_very_end_is_told_too(clock):
    with pytest.raises((ZeroDivisionError, BaseExceptionGroup)):
        async with (
            open_executor(
                FakeDevice(), load_manifest(), ExecutorConfig(), listeners=[raising_at(RequestEnded)]
            ) as executor,
            executor.sequence(1, 1),
        ):
            pass


@pytest.mark.parametrize("base", [1.5, "x", None, True])
async def test_a_base_that_is_no_whole_number_is_the_callers_error_alone(clock, base):
    async with opened() as executor, executor.sequence(2, 1) as sequence:
        for out in (None, np.zeros(10, np.float32)):
            with pytest.raises(InputMismatch, match="base is"):
                await sequence.prefill([1, 2], out=out, base=base)
        assert executor.core.health.ready
        await sequence.prefill([1, 2])


async def test_an_array_that_is_frozen_in_flight_is_the_callers_error_alone(clock):
    async with opened() as executor, executor.sequence(2, 3) as sequence:
        out = np.full(10, -1, np.float32)

        async def freezes():
            with pytest.raises(InvalidArgument, match="read-only"):
                await sequence.prefill([1, 2], out=out)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(freezes)
            await trio.testing.wait_all_tasks_blocked()
            out.flags.writeable = False
        assert (out == -1).all()
        assert executor.core.health.ready
        assert not executor.core.pool.quarantined
        await sequence.decode(3)  # the device did its work: the KV grew


async def test_what_a_caller_does_to_his_tokens_later_does_not_matter(clock):
    async with (
        opened() as executor,
        executor.sequence(1, 1) as first,
        executor.sequence(2, 3) as queued,
    ):
        tokens = np.array([1, 2], np.int64)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.prefill, 1)
            await until(lambda: executor.core.in_flight)
            nursery.start_soon(queued.prefill, tokens)
            await until(lambda: executor.core._ready)
            tokens[:] = 2**40
        result = await queued.decode(3)
        assert int(result.logits.argmax()) == ReferenceSequence(151936, [1, 2, 3]).next_token()


@pytest.mark.parametrize("sizes", [(1.5, 2), ("a", 1), (None, 1), (1, float("nan"))])
async def test_sizes_that_are_no_whole_numbers(clock, sizes):
    async with opened() as executor:
        with pytest.raises(InvalidArgument, match="whole number"):
            async with executor.sequence(*sizes):
                pass
        with pytest.raises(ValueError, match="request_id"):
            await executor.admit(1, 1, request_id=-1)
        async with executor.sequence(np.int8(100), np.int8(100)) as sequence:
            assert sequence.request.kv_tokens == 199
