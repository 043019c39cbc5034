import pytest

from caltrio.core.job import TRANSITIONS, Job, JobState, JobTimings, engine_name
from caltrio.core.kv import KvReservation, KvTxnState
from caltrio.core.lifecycle import LIFECYCLE, LifecycleState, check_lifecycle
from caltrio.errors import IllegalTransition
from caltrio.manifest import TaskKind


def job(state: JobState) -> Job:
    return Job(7, None, 0, 0, 1, TaskKind.DECODE, 1, 1, 0, JobTimings(0), state=state)


def test_the_table_covers_every_state():
    assert set(TRANSITIONS) == set(JobState)
    assert set(LIFECYCLE) == set(LifecycleState)


@pytest.mark.parametrize("old", JobState)
@pytest.mark.parametrize("new", JobState)
def test_a_step_is_legal_or_an_error(old, new):
    subject = job(old)
    if new in TRANSITIONS[old]:
        subject.to(new)
        assert subject.state is new
    else:
        with pytest.raises(IllegalTransition, match=f"job 7 cannot go from {old.value}"):
            subject.to(new)
        assert subject.state is old


def test_final_states_are_those_of_the_specification():
    final = {state for state in JobState if job(state).final}
    assert final == {JobState.SUCCEEDED, JobState.FAILED, JobState.QUARANTINED}


@pytest.mark.parametrize("old", LifecycleState)
@pytest.mark.parametrize("new", LifecycleState)
def test_lifecycle(old, new):
    if new in LIFECYCLE[old]:
        check_lifecycle(old, new)
    else:
        with pytest.raises(IllegalTransition):
            check_lifecycle(old, new)


def test_engine_names():
    assert [engine_name(engine) for engine in range(-1, 3)] == ["auto", "ping", "pong", "engine2"]


@pytest.mark.parametrize("old", KvTxnState)
@pytest.mark.parametrize("new", KvTxnState)
def test_kv_transactions_take_legal_steps_only(old, new):
    """§7: once committed, rolled back or unknown, a transaction is over."""
    legal = {
        (KvTxnState.RESERVED, KvTxnState.SUBMITTED),
        (KvTxnState.RESERVED, KvTxnState.ROLLED_BACK),
        (KvTxnState.SUBMITTED, KvTxnState.COMMITTED),
        (KvTxnState.SUBMITTED, KvTxnState.ROLLED_BACK),
        (KvTxnState.SUBMITTED, KvTxnState.UNKNOWN),
    }
    txn = KvReservation(0, 0, 1, 1, old)
    if (old, new) in legal:
        txn.to(new)
        assert txn.state is new
    else:
        with pytest.raises(IllegalTransition, match=f"{old.value} to {new.value}"):
            txn.to(new)
        assert txn.state is old
