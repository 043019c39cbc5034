"""One job: a prefill or a decode step of one sequence, and the states of specification §4.2."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from attrs import define, field

from ..errors import IllegalTransition, RequestError
from ..manifest import TaskKind

if TYPE_CHECKING:
    from ..stepdata import StepData
    from .buffers import BufferLease
    from .kv import KvReservation
    from .request import RequestState


class JobState(Enum):
    """The states of §4.2, in the order of a job's life."""

    CREATED = "created"  # checked; waits for KV if it must grow
    ADMITTED = "admitted"  # KV reserved; waits for its turn and a buffer
    PREPARING = "preparing"  # holds a buffer lease; inputs are being copied, slices and CSRs set
    QUEUED = "queued"  # prepared; the submitter calls infer()
    SUBMITTED = "submitted"  # infer() succeeded: the device owns the buffers
    COMPLETING = "completing"  # Wait() returned well; output is being checked and converted
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCEL_REQUESTED = "cancel_requested"  # given up while the device owns it; Wait() is still due
    QUARANTINED = "quarantined"  # ended, and its buffers are never used again

    # Identity, as for every Enum; said here because hashing by name costs on the hot path.
    __hash__ = object.__hash__


_S = JobState

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = MappingProxyType(
    {
        _S.CREATED: frozenset({_S.ADMITTED, _S.FAILED}),
        _S.ADMITTED: frozenset({_S.PREPARING, _S.FAILED}),
        _S.PREPARING: frozenset({_S.QUEUED, _S.FAILED}),
        _S.QUEUED: frozenset({_S.SUBMITTED, _S.CANCEL_REQUESTED, _S.FAILED, _S.QUARANTINED}),
        _S.SUBMITTED: frozenset({_S.COMPLETING, _S.CANCEL_REQUESTED, _S.QUARANTINED}),
        _S.COMPLETING: frozenset({_S.SUCCEEDED, _S.FAILED, _S.CANCEL_REQUESTED, _S.QUARANTINED}),
        _S.CANCEL_REQUESTED: frozenset({_S.FAILED, _S.QUARANTINED}),
        _S.SUCCEEDED: frozenset(),
        _S.FAILED: frozenset(),
        _S.QUARANTINED: frozenset(),
    }
)


class EngineSlot(IntEnum):
    """Which engine a job is bound to (§4.2); further engines of a what-if are 2, 3, …"""

    AUTO = -1
    PING = 0
    PONG = 1


def engine_name(engine: int) -> str:
    """``auto``, ``ping``, ``pong``, ``engine2``, …"""
    return EngineSlot(engine).name.lower() if engine <= 1 else f"engine{engine}"


class CallTimes(NamedTuple):
    """When a device's own threads made the calls of a job, in ns of the executor's clock."""

    infer_ns: int
    submitted_ns: int
    waited_ns: int


@define(slots=True, eq=False)
class JobTimings:
    """When each step of a job happened, in ns of the executor's clock; ``None`` until it has."""

    accepted_ns: int
    admitted_ns: int | None = None
    queued_ns: int | None = None  # prepared: inputs copied, slices and CSRs set
    infer_ns: int | None = None  # infer() called
    submitted_ns: int | None = None  # infer() returned well
    waited_ns: int | None = None  # Wait() returned
    ended_ns: int | None = None  # resources given back
    answered_ns: int | None = None  # the caller has its result or its error


@define(slots=True, eq=False)
class Job:
    """One job. Only :class:`~caltrio.core.scheduler.Core` changes it.

    Three things end separately: the caller's wait (``answered``), the device's use of the buffers,
    and the job itself (a final state), which needs both.
    """

    job_id: int
    request: RequestState
    request_id: int
    sequence_id: int
    generation_id: int
    kind: TaskKind
    token_count: int
    past_len: int
    step: int
    timings: JobTimings
    data: StepData | None = None
    kv: KvReservation | None = None
    engine: int = EngineSlot.AUTO  # that infer() is to use
    share: int = EngineSlot.AUTO  # the engine whose buffers and share of the limit it takes
    state: JobState = JobState.CREATED
    cancel_requested: bool = False
    answered: bool = False
    error: RequestError | None = None
    lease: BufferLease | None = None
    holds_permit: bool = False
    admission_deadline_ns: int | None = None
    queue_deadline_ns: int | None = None
    execution_deadline_ns: int | None = None
    # What the device reports (a StageTimes) and who waits (a trio task): opaque here.
    stages: object = None
    waiter: object = field(default=None, repr=False)

    def to(self, state: JobState) -> None:
        """Take one legal step. Raises :class:`IllegalTransition`."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(
                f"job {self.job_id} cannot go from {self.state.value} to {state.value}"
            )
        self.state = state

    @property
    def on_device(self) -> bool:
        """May the device be reading or writing this job's buffers?"""
        return self.holds_permit and self.timings.infer_ns is not None

    @property
    def final(self) -> bool:
        """Has the job ended?"""
        return not TRANSITIONS[self.state]
