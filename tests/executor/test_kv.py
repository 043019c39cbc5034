"""KV policies (§7): who reserves what, when; bounded waits, one attempt each, nothing polled."""

from contextlib import asynccontextmanager

import pytest
import trio
import trio.lowlevel
import trio.testing

from caltrio.config import ExecutorConfig, KvPolicy
from caltrio.core.kv import KvCoordinator, KvTxnState
from caltrio.core.lifecycle import LifecycleState
from caltrio.core.request import Outcome
from caltrio.errors import (
    DeadlineExceeded,
    DeviceFailed,
    IllegalTransition,
    JobCancelled,
    RequestError,
    ResourceExhausted,
    SequenceUnknown,
    Unavailable,
)
from caltrio.events import JobEnded, RequestEnded
from caltrio.executor import open_executor
from caltrio.manifest import load_manifest
from caltrio.semantics import EngineSemantics, SubmitWhenFull
from caltrio.testing import FakeDevice

MS = 1_000_000
RESETTABLE = EngineSemantics(
    engines=4, submit_when_full=SubmitWhenFull.BLOCK, reset_scope="device"
)  # fmt: skip


@pytest.fixture
def clock():
    return trio.testing.MockClock(autojump_threshold=0)


class Manager:
    """A runtime's ``KvManager``: writes each call down, and refuses when it is told to."""

    def __init__(self, tokens=10**9):
        self.tokens = tokens
        self.held = {}
        self.calls = []
        self.allocates = True
        self.applies = True

    def can_allocate(self, sequences):
        self.calls.append(("can", sequences))
        return self.allocates

    def apply(self, sequence_id, target_tokens):
        self.calls.append(("apply", sequence_id, target_tokens))
        others = sum(held for one, held in self.held.items() if one != sequence_id)
        if not self.applies or others + target_tokens > self.tokens:
            return False
        self.held[sequence_id] = target_tokens
        return True

    def release(self, sequence_id):
        self.calls.append(("release", sequence_id))
        del self.held[sequence_id]

    def taken(self):
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls

    def count(self, name):
        return sum(1 for call in self.calls if call[0] == name)


@asynccontextmanager
async def opened(device=None, manager=None, **limits):
    events = []
    device = device or FakeDevice()
    if manager is not None:
        device.kv = manager
    config = ExecutorConfig(**limits)
    with trio.fail_after(1000):
        async with open_executor(
            device, load_manifest(), config, listeners=[events.append]
        ) as executor:
            executor.events = events
            yield executor
    assert not executor.core.open
    assert not executor.core.kv.holders
    assert not executor.core.admission.growing
    assert not executor.core.waiting
    assert executor.core.pool.leased == 0


GROW = {"kv_policy": KvPolicy.GROW, "admission_timeout_ns": 100 * MS}


def outcome_of(executor):
    return {
        event.request.request_id: event.request.outcome
        for event in executor.events
        if isinstance(event, RequestEnded)
    }


def ended_jobs(executor):
    return [event.job for event in executor.events if isinstance(event, JobEnded)]


async def settled():
    await trio.testing.wait_all_tasks_blocked()


# --- full ------------------------------------------------------------------------------------------


async def test_full_reserves_everything_at_admission_and_decode_never_asks_again(clock):
    manager = Manager()
    async with opened(manager=manager) as executor:
        async with executor.sequence(3, 4) as sequence:
            assert manager.taken() == [("can", 1), ("apply", 0, 6)]  # the last token takes no place
            await sequence.prefill(3)
            for _ in range(3):
                await sequence.decode()
            assert manager.taken() == []
            assert executor.core.kv.holders[0].committed_tokens == 6
        assert manager.taken() == [("release", 0)]


async def test_full_a_step_never_waits_for_kv_however_full_it_is(clock):
    manager = Manager()
    async with opened(manager=manager, kv_capacity_tokens=12) as executor:
        async with executor.sequence(3, 4) as one, executor.sequence(3, 4) as two:
            manager.allocates = manager.applies = False
            begin = trio.current_time()
            for sequence in (one, two):
                await sequence.prefill(3)
                for _ in range(3):
                    await sequence.decode()
            assert trio.current_time() - begin == pytest.approx(8e-3, rel=1e-3)
            assert not executor.core.admission.growing


async def test_a_second_apply_that_would_fail_cannot_abort_anything(clock):
    """S02: after ``infer()`` nothing is applied, so nothing can fail there."""
    manager = Manager()

    class Device(FakeDevice):
        async def infer(self, job):
            manager.applies = False
            return await super().infer(job)

    async with opened(Device(), manager) as executor, executor.sequence(3, 4) as sequence:
        await sequence.prefill(3)
        for _ in range(3):
            await sequence.decode()
        assert manager.count("apply") == 1
        assert sequence.past_len == 6
    assert outcome_of(executor) == {0: Outcome.COMPLETED}


async def test_grow_a_second_apply_that_fails_is_an_error_of_its_request_alone(clock):
    """S02, where there is a second one."""
    manager = Manager()
    async with opened(manager=manager, **GROW) as executor:
        with pytest.raises(ResourceExhausted) as caught:
            async with executor.sequence(3, 2) as sequence:
                await sequence.prefill(3)
                manager.applies = False
                await sequence.decode()
        assert caught.value.http == 429
        assert executor.core.lifecycle is LifecycleState.READY
        manager.applies = True
        async with executor.sequence(3, 2) as sequence:
            await sequence.prefill(3)
            await sequence.decode()
    assert outcome_of(executor) == {0: Outcome.FAILED, 1: Outcome.COMPLETED}


# --- grow ------------------------------------------------------------------------------------------


def test_grow_needs_an_admission_timeout():
    with pytest.raises(ValueError, match="admission_timeout"):
        ExecutorConfig(kv_policy="grow")
    assert ExecutorConfig(kv_policy="grow", admission_timeout_ns=1).kv_policy is KvPolicy.GROW
    assert ExecutorConfig().kv_policy is KvPolicy.FULL


async def test_grow_reserves_the_prompt_and_then_what_each_step_adds(clock):
    manager = Manager()
    async with opened(manager=manager, **GROW) as executor:
        async with executor.sequence(3, 4) as sequence:
            assert manager.taken() == [("can", 1), ("apply", 0, 3)]
            await sequence.prefill(3)
            assert manager.taken() == []
            for target in (4, 5, 6):
                await sequence.decode()
                assert manager.taken() == [("can", 1), ("apply", 0, target)]
                assert executor.core.kv.reserved_tokens == target
        assert manager.taken() == [("release", 0)]
        assert executor.core.kv.reserved_tokens == 0


async def test_grow_admits_more_sequences_than_full_would(clock):
    async with opened(kv_capacity_tokens=12, **GROW) as executor:
        async with executor.sequence(3, 9), executor.sequence(3, 9), executor.sequence(3, 9):
            assert executor.core.kv.reserved_tokens == 9


async def test_a_request_that_could_never_end_is_refused_though_its_prompt_fits(clock):
    async with opened(kv_capacity_tokens=12, **GROW) as executor:
        with pytest.raises(ResourceExhausted, match="13 tokens"):
            async with executor.sequence(3, 11):
                pass


@pytest.mark.parametrize("refusal", ["allocates", "applies"])
async def test_growth_is_tried_once_each_time_something_changes_and_never_in_between(clock, refusal):
    manager = Manager()
    async with opened(manager=manager, **GROW) as executor, trio.open_nursery() as nursery:
        other = await executor.admit(3, 0)
        async with executor.sequence(3, 2) as sequence:
            await sequence.prefill(3)
            setattr(manager, refusal, False)
            manager.taken()
            nursery.start_soon(sequence.decode)
            await settled()
            once = [("can", 1)] + [("apply", 1, 4)] * (refusal == "applies")
            assert manager.taken() == once
            await trio.sleep(0.09)  # nothing changes
            assert manager.taken() == []
            other.close()  # something does
            await settled()
            assert manager.taken() == [("release", 0), *once]
            setattr(manager, refusal, True)
            assert manager.taken() == []  # no wake-up told of it
            another = await executor.admit(1, 0)
            another.close()
            await settled()
            assert ("apply", 1, 4) in manager.taken()
            await trio.sleep(0.01)
            assert sequence.past_len == 4


async def test_a_newcomer_is_one_attempt_for_the_head_at_the_most_and_none_for_itself(clock):
    """§7: one attempt for each wake-up, however long the queue."""
    manager = Manager()
    async with opened(manager=manager, admission_timeout_ns=100 * MS) as executor:
        async with executor.sequence(3, 0), trio.open_nursery() as nursery:
            manager.applies = False
            manager.taken()

            async def waits():
                with pytest.raises(DeadlineExceeded):
                    await executor.admit(3, 0)

            nursery.start_soon(waits)
            await settled()
            assert manager.count("apply") == 1
            for _ in range(10):
                nursery.start_soon(waits)
            await settled()
            assert len(executor.core.waiting) == 11
            assert manager.count("apply") <= 11
            assert {call for call in manager.calls if call[0] == "apply"} == {("apply", 1, 3)}


async def test_room_that_the_executor_itself_has_not_is_not_asked_of_the_runtime(clock):
    manager = Manager()
    async with opened(manager=manager, kv_capacity_tokens=6, **GROW) as executor:
        async with executor.sequence(3, 2) as sequence, executor.sequence(3, 0):
            await sequence.prefill(3)
            manager.taken()
            with pytest.raises(ResourceExhausted):
                await sequence.decode()
            assert manager.taken() == [("release", 0)]


async def test_growth_is_fifo(clock):
    order = []
    async with opened(kv_capacity_tokens=12, **GROW) as executor, trio.open_nursery() as nursery:

        async def grows(name, sequence, tokens):
            await sequence.prefill(tokens)
            order.append(name)

        filler = await executor.admit(6, 0)
        first, second = await executor.admit(2, 5), await executor.admit(2, 5)
        await first.prefill(2)
        await second.prefill(2)
        nursery.start_soon(grows, "first", first, 3)
        await settled()
        nursery.start_soon(grows, "second", second, 2)  # would fit; may not overtake
        await trio.sleep(0.01)
        assert order == []
        filler.close()
        await trio.sleep(0.01)
        assert order == ["first", "second"]
        first.close()
        second.close()


async def test_growth_goes_before_admission(clock):
    async with opened(kv_capacity_tokens=9, **GROW) as executor, trio.open_nursery() as nursery:
        order = []
        filler = await executor.admit(4, 0)
        holder = await executor.admit(5, 4)
        await holder.prefill(5)

        async def enters():
            entering = await executor.admit(3, 0)
            order.append("entered")
            entering.close()

        async def grows():
            await holder.prefill(3)
            order.append("grown")

        nursery.start_soon(enters)  # came first, and would fit
        await settled()
        nursery.start_soon(grows)
        await settled()
        assert order == []
        filler.close()
        await trio.sleep(0.01)
        assert order == ["grown"]
        assert len(executor.core.waiting) == 1
        holder.close()
        await settled()
        assert order == ["grown", "entered"]


async def test_nobody_enters_past_a_step_that_waits_for_growth(clock):
    async with opened(kv_capacity_tokens=9, **GROW) as executor, trio.open_nursery() as nursery:
        filler = await executor.admit(4, 0)
        holder = await executor.admit(3, 7)
        await holder.prefill(3)
        nursery.start_soon(holder.prefill, 6)
        await settled()
        entered = []

        async def enters():
            async with executor.sequence(1, 0):  # would fit
                entered.append(trio.current_time())

        nursery.start_soon(enters)
        await trio.sleep(0.01)
        assert entered == []
        filler.close()
        await trio.sleep(0.01)
        assert holder.past_len == 9
        assert entered == []
        holder.close()
        await settled()
        assert len(entered) == 1


async def test_two_that_wait_for_each_other_end_and_a_third_is_served(clock):
    async with opened(kv_capacity_tokens=10, **GROW) as executor, trio.open_nursery() as nursery:
        ended = {}

        async def runs(name, delay, more):
            await trio.sleep(delay)
            try:
                async with executor.sequence(5, 6) as sequence:
                    await sequence.prefill(5)
                    await sequence.prefill(more)
                ended[name] = "done"
            except ResourceExhausted:
                ended[name] = trio.current_time() - begin

        begin = trio.current_time()
        nursery.start_soon(runs, "one", 0.0, 5)
        nursery.start_soon(runs, "two", 1e-4, 5)
        await trio.sleep(0.05)
        assert len(executor.core.admission.growing) == 2
        nursery.start_soon(runs, "third", 0.0, 5)
        await trio.sleep(0.04)
        assert ended == {}
        assert executor.core.kv.reserved_tokens == 10
        await trio.sleep(0.09)
        # One of the two ended at its deadline; with what it held the others could go on.
        assert len(ended) == 3
        failed = {name: at for name, at in ended.items() if at != "done"}
        assert len(failed) == 1
        assert failed.keys() <= {"one", "two"}
        assert 0.1 <= min(failed.values()) <= 0.103
        assert ended["third"] == "done"
        assert executor.core.kv.reserved_tokens == 0


async def test_all_who_wait_end_by_their_deadlines_and_free_what_they_hold(clock):
    manager = Manager()
    async with opened(manager=manager, **GROW) as executor, trio.open_nursery() as nursery:
        failed = []
        served = []

        async def holds(sequence):
            with pytest.raises(ResourceExhausted) as caught:
                await sequence.decode()
            failed.append((trio.current_time() - begin, caught.value.sequence_id))
            with pytest.raises(ResourceExhausted):  # the sequence is over, and says why
                await sequence.decode()
            sequence.close()

        sequences = [await executor.admit(5, 2) for _ in range(2)]
        for sequence in sequences:
            await sequence.prefill(5)
        manager.allocates = False
        begin = trio.current_time()
        for sequence in sequences:
            nursery.start_soon(holds, sequence)
            await trio.sleep(0.01)

        async def third():
            sequence = await executor.admit(5, 0)
            served.append(trio.current_time() - begin)
            await sequence.prefill(5)
            sequence.close()

        await trio.sleep(0.03)
        nursery.start_soon(third)
        await trio.sleep(0.055)
        assert [at for at, _ in failed] == [pytest.approx(0.1, abs=1e-5)]
        assert manager.held == {1: 5}  # what the first held is free at once
        assert served == []
        manager.allocates = True  # told to nobody: the end of the second wakes the third
        await trio.sleep(0.02)
        assert [at for at, _ in failed] == [pytest.approx(0.1, abs=1e-5), pytest.approx(0.11, abs=1e-5)]
        assert [who for _, who in failed] == [0, 1]
        assert served == [pytest.approx(0.11, abs=1e-5)]
    assert outcome_of(executor) == {0: Outcome.FAILED, 1: Outcome.FAILED, 2: Outcome.COMPLETED}


async def test_cancelling_a_wait_for_growth(clock):
    manager = Manager()
    device = FakeDevice()
    async with opened(device, manager, **GROW) as executor, executor.sequence(3, 3) as sequence:
        await sequence.prefill(3)
        manager.allocates = False
        begin = trio.current_time()
        with trio.move_on_after(0.01) as scope:
            await sequence.decode()
        assert scope.cancelled_caught
        assert trio.current_time() - begin == pytest.approx(0.01)
        assert not executor.core.admission.growing
        assert executor.core.kv.reserved_tokens == 3
        job = ended_jobs(executor)[-1]
        assert isinstance(job.error, JobCancelled)
        assert job.kv.state is KvTxnState.ROLLED_BACK
        assert job.lease is None
        manager.allocates = True
        await sequence.decode()  # the sequence itself lost nothing
        assert sequence.past_len == 4
    assert device.inferred == [0, 2]


async def test_cancelling_the_first_wait_lets_the_next_be_tried(clock):
    async with opened(kv_capacity_tokens=10, **GROW) as executor, trio.open_nursery() as nursery:
        first, second = await executor.admit(4, 6), await executor.admit(4, 3)
        await first.prefill(4)
        await second.prefill(4)
        done = []

        async def grows():
            await second.prefill(2)
            done.append(trio.current_time())

        scope = trio.CancelScope()

        async def blocked():
            with scope:
                await first.prefill(5)

        nursery.start_soon(blocked)
        await settled()
        nursery.start_soon(grows)
        await trio.sleep(0.01)
        assert not done
        scope.cancel()
        await trio.sleep(0.01)
        assert done
        first.close()
        second.close()


async def test_shutdown_while_a_step_waits_for_growth(clock):
    manager = Manager()
    device = FakeDevice()
    seen = []
    async with trio.open_nursery() as nursery:
        async with opened(device, manager, **GROW) as executor:
            sequence = await executor.admit(3, 2)
            await sequence.prefill(3)
            manager.applies = False

            async def grows():
                with pytest.raises(JobCancelled, match="shutting down"):
                    await sequence.decode()
                seen.append(trio.current_time() - begin)

            begin = trio.current_time()
            nursery.start_soon(grows)
            await trio.sleep(0.01)
    assert seen == [pytest.approx(0.01)]
    assert device.inferred == [0]
    assert executor.core.lifecycle is LifecycleState.CLOSED
    assert manager.held == {}


async def test_a_fault_while_a_step_waits_for_growth_tells_it(clock):
    manager = Manager()
    device = FakeDevice(semantics=RESETTABLE, wait_codes={2: 28})
    async with opened(device, manager, **GROW) as executor, trio.open_nursery() as nursery:
        sequence = await executor.admit(3, 2)
        await sequence.prefill(3)
        other = await executor.admit(3, 2)
        manager.applies = False

        async def grows():
            with pytest.raises(Unavailable, match="recovering"):
                await sequence.decode()

        nursery.start_soon(grows)
        await settled()
        with pytest.raises(RequestError):
            await other.prefill(3)
        await trio.sleep(0.01)
        assert executor.generation.generation_id == 2
        with pytest.raises(SequenceUnknown):
            await sequence.decode()


# --- the runtime has no room (FI04) ----------------------------------------------------------------


async def test_no_room_with_a_deadline_waits_until_the_deadline(clock):
    manager = Manager()
    manager.allocates = False
    async with opened(manager=manager, admission_timeout_ns=5 * MS) as executor:
        begin = trio.current_time()
        with pytest.raises(DeadlineExceeded) as caught:
            async with executor.sequence(1, 1):
                raise AssertionError("must not be admitted")
        assert trio.current_time() - begin == pytest.approx(5e-3)
        assert caught.value.http == 504
        assert manager.count("apply") == 0
        assert manager.count("can") == 1  # nothing polled
        assert executor.core.lifecycle is LifecycleState.READY
    assert outcome_of(executor) == {0: Outcome.EXPIRED}


async def test_no_room_without_a_deadline_and_nobody_who_could_make_any_is_refused_at_once(clock):
    manager = Manager()
    manager.allocates = False
    async with opened(manager=manager) as executor:
        begin = trio.current_time()
        with pytest.raises(ResourceExhausted, match="none is in use"):
            async with executor.sequence(1, 1):
                raise AssertionError("must not be admitted")
        assert trio.current_time() == begin
        manager.allocates = True
        async with executor.sequence(1, 1) as sequence:
            await sequence.prefill(1)
    assert outcome_of(executor) == {0: Outcome.REFUSED, 1: Outcome.COMPLETED}


async def test_no_room_without_a_deadline_waits_while_somebody_holds_some(clock):
    manager = Manager(tokens=5)
    async with opened(manager=manager) as executor, trio.open_nursery() as nursery:
        admitted = []

        async def enters():
            async with executor.sequence(5, 0):
                admitted.append(trio.current_time())

        async with executor.sequence(5, 0):
            nursery.start_soon(enters)
            await trio.sleep(1)
            assert admitted == []
        await settled()
        assert len(admitted) == 1


async def test_the_wait_ends_too_if_the_last_holder_leaves_and_there_is_still_no_room(clock):
    manager = Manager()
    async with opened(manager=manager) as executor, trio.open_nursery() as nursery:
        holder = await executor.admit(1, 0)
        manager.applies = False
        refused = []

        async def enters():
            with pytest.raises(ResourceExhausted):
                await executor.admit(1, 0)
            refused.append(True)

        for _ in range(3):
            nursery.start_soon(enters)
        await settled()
        assert refused == []
        holder.close()
        await settled()
        assert refused == [True] * 3


# --- unknown KV ------------------------------------------------------------------------------------


async def test_unknown_kv_stays_out_of_use_until_the_generation_ends(clock):
    manager = Manager()
    device = FakeDevice(semantics=RESETTABLE, wait_codes={0: 13})
    async with opened(
        device, manager, max_active_sequences=3, kv_capacity_tokens=20, admission_timeout_ns=5 * MS
    ) as executor:
        with pytest.raises(DeadlineExceeded):
            async with executor.sequence(8, 1) as sequence:
                assert sequence.request.sequence_id == 0
                await sequence.prefill(8)
        kv = executor.core.kv
        assert list(kv.quarantined) == [0]
        assert kv.reserved_tokens == 8
        assert manager.held == {0: 8}  # nor did the runtime get it back
        async with executor.sequence(1, 0):  # 11 are left
            with pytest.raises(DeadlineExceeded):
                async with executor.sequence(12, 0):
                    pass
        async with executor.sequence(6, 0) as one, executor.sequence(6, 0) as two:
            assert {one.request.sequence_id, two.request.sequence_id} == {1, 2}
            await one.prefill(6)
            await two.prefill(6)
        async with executor.sequence(1, 0) as sequence:
            assert sequence.request.sequence_id != 0

        device.submit_codes[device.inferred[-1] + 1] = 28  # the generation ends
        with pytest.raises(DeviceFailed):
            async with executor.sequence(1, 0) as sequence:
                await sequence.prefill(1)
        manager.held.clear()
        await trio.sleep(0.01)
        assert executor.generation.generation_id == 2
        assert executor.core.kv is not kv
        assert executor.core.kv.quarantined == {}
        async with executor.sequence(20, 0) as sequence:
            assert sequence.request.sequence_id == 0
            await sequence.prefill(20)


async def test_a_sequence_of_unknown_kv_takes_no_more_steps(clock):
    device = FakeDevice(wait_codes={0: 13})
    async with opened(device) as executor, executor.sequence(2, 3) as sequence:
        with pytest.raises(DeadlineExceeded):
            await sequence.prefill(2)
        with pytest.raises(SequenceUnknown) as caught:
            await sequence.prefill(2)
        assert caught.value.grpc == "FAILED_PRECONDITION"
        assert device.inferred == [0]
        assert ended_jobs(executor)[0].kv.state is KvTxnState.UNKNOWN


async def test_unknown_kv_that_takes_everything_leads_to_recovery_not_to_an_endless_wait(clock):
    device = FakeDevice(semantics=RESETTABLE, wait_codes={0: 13})
    async with opened(device, max_active_sequences=1) as executor:
        with pytest.raises(DeadlineExceeded):
            async with executor.sequence(2, 0) as sequence:
                await sequence.prefill(2)
        with pytest.raises(Unavailable, match="unknown KV"):
            async with executor.sequence(2, 0):
                pass
        await trio.sleep(0.01)
        assert executor.generation.generation_id == 2
        async with executor.sequence(2, 0) as sequence:
            await sequence.prefill(2)


async def test_a_step_that_the_runtime_refused_leaves_the_kv_as_it_was(clock):
    device = FakeDevice(submit_codes={1: 17})
    async with opened(device, **GROW) as executor, executor.sequence(3, 3) as sequence:
        await sequence.prefill(3)
        with pytest.raises(Unavailable):
            await sequence.decode()
        assert sequence.past_len == 3
        assert ended_jobs(executor)[-1].kv.state is KvTxnState.ROLLED_BACK
        await sequence.decode()
        assert sequence.past_len == 4


async def test_a_cancelled_step_that_the_device_did_is_committed(clock):
    async with opened(FakeDevice()) as executor:
        sequence = await executor.admit(3, 3)
        with trio.move_on_after(5e-4):
            await sequence.prefill(3)
        assert sequence.past_len == 0  # reserved, submitted: not committed
        await trio.sleep(0.01)
        assert sequence.past_len == 3
        await sequence.decode()
        assert ended_jobs(executor)[-1].past_len == 3
        sequence.close()


# --- the coordinator by itself ---------------------------------------------------------------------


def coordinator(capacity=10, manager=None):
    return KvCoordinator(capacity, manager or Manager(), 1)


def test_commit_checks_generation_length_and_reservation():
    kv = coordinator()
    assert kv.reserve(0, 4)
    first, same = kv.begin(0, 2), kv.begin(0, 2)
    for txn in (first, same):
        txn.to(KvTxnState.SUBMITTED)
    kv.commit(first)
    with pytest.raises(ValueError, match="holds 2 tokens"):
        kv.commit(same)
    late = kv.begin(0, 1)
    late.to(KvTxnState.SUBMITTED)
    late.generation_id = 2
    with pytest.raises(ValueError, match="generation 2"):
        kv.commit(late)
    above = kv.begin(0, 3)
    above.to(KvTxnState.SUBMITTED)
    assert not kv.covers(above)
    with pytest.raises(ValueError, match="above its reservation"):
        kv.commit(above)
    assert kv.holders[0].committed_tokens == 2


def test_a_transaction_takes_legal_steps_only():
    kv = coordinator()
    kv.reserve(0, 4)
    txn = kv.begin(0, 2)
    with pytest.raises(IllegalTransition):
        kv.commit(txn)  # not submitted
    assert kv.holders[0].committed_tokens == 0
    txn.to(KvTxnState.SUBMITTED)
    kv.mark_unknown(txn, "lost")
    for state in KvTxnState:
        with pytest.raises(IllegalTransition):
            txn.to(state)
    assert not kv.release(0)
    assert kv.reserved_tokens == 4
    assert kv.quarantined[0].unknown == "lost"


def test_a_reservation_that_failed_takes_nothing():
    manager = Manager(tokens=6)
    kv = coordinator(10, manager)
    assert kv.reserve(0, 5)
    assert not kv.reserve(0, 7)
    assert not kv.reserve(1, 2)
    assert kv.reserved_tokens == 5
    assert list(kv.holders) == [0]
    assert kv.reserve(0, 6)
    assert kv.reserved_tokens == 6
    manager.taken()
    assert kv.reserve(0, 3)  # holds it already: nothing is asked
    assert manager.taken() == []
    assert kv.release(0)
    assert kv.reserved_tokens == 0
