import copy
import gc
import pickle

import pytest

from caltrio.core.buffers import BufferPool
from caltrio.errors import LeaseError
from caltrio.manifest import TaskKind

DECODE = TaskKind.DECODE


@pytest.fixture
def lost():
    return []


@pytest.fixture
def pool(lost):
    kinds = [DECODE, TaskKind.PREFILL_IDS]
    return BufferPool(
        1, kinds, [0, 1], 2, lambda kind, engine: None, lambda slot, why: lost.append((slot, why))
    )


def conserved(pool):
    return pool.leased + pool.free + len(pool.quarantined) == pool.total == 8


def test_a_slot_has_one_owner_at_a_time(pool):
    first, second = pool.acquire(DECODE, 0), pool.acquire(DECODE, 0)
    assert first.slot is not second.slot
    assert pool.acquire(DECODE, 0) is None
    assert not pool.available(DECODE, 0)
    assert pool.available(DECODE, 1)
    slot = first.slot
    first.release()
    third = pool.acquire(DECODE, 0)
    assert third.slot is slot
    second.release()
    third.release()
    assert conserved(pool)
    assert pool.leased == 0


def test_use_after_the_end_raises(pool):
    lease = pool.acquire(DECODE, 0)
    lease.release()
    for use in (lease.release, lease.mark_submitted, lease.move, lambda: lease.slot):
        with pytest.raises(LeaseError, match="has ended or was moved"):
            use()
    assert conserved(pool)
    assert pool.free == 8


def test_moving_kills_the_old_lease_and_keeps_the_flight(pool, lost):
    old = pool.acquire(DECODE, 0)
    old.mark_submitted()
    new = old.move()
    assert not old.alive
    with pytest.raises(LeaseError, match="while the device owned it"):
        new.release()
    assert len(lost) == 1
    assert conserved(pool)


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_lease_cannot_be_copied(pool, copying):
    lease = pool.acquire(DECODE, 0)
    with pytest.raises(LeaseError, match="one owner"):
        copying(lease)
    lease.release()


def test_releasing_in_flight_raises_and_quarantines(pool, lost):
    lease = pool.acquire(DECODE, 0)
    slot = lease.slot
    lease.mark_submitted()
    with pytest.raises(LeaseError, match="quarantined"):
        lease.release()
    assert [entry[0] for entry in lost] == [slot]
    assert conserved(pool)
    other = pool.acquire(DECODE, 0)
    assert other.slot is not slot
    assert pool.acquire(DECODE, 0) is None
    other.release()


def test_a_lost_lease_warns_and_quarantines(pool, lost):
    lease = pool.acquire(DECODE, 0)
    with pytest.warns(ResourceWarning, match="never released"):
        del lease
        gc.collect()
    assert len(lost) == 1
    assert conserved(pool)


def test_a_pair_without_slots_left_is_not_usable(pool):
    for _ in range(2):
        assert pool.usable(DECODE, 0)
        pool.acquire(DECODE, 0).quarantine("test")
    assert not pool.usable(DECODE, 0)
    assert pool.usable(DECODE, 1)
