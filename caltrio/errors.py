"""Every error that caltrio raises, one class per category, all under :class:`CaltrioError`.

Arguments are positional, so that an error survives pickling and SimPy's habit of rebuilding
exceptions from ``.args``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class CalrtCode(IntEnum):
    """The CalRT return codes that the executor names itself (specification §8)."""

    SUCCESS = 0
    TIMEOUT = 13
    BUSY = 17
    UNAVAILABLE = 18


class Phase:
    """Where in a job's life an error happened; plain strings, so that records stay readable."""

    ADMISSION = "admission"
    PREPARE = "prepare"
    SUBMIT = "submit"
    EXECUTE = "execute"
    COMPLETE = "complete"


class CaltrioError(Exception):
    """Base of all errors of caltrio."""


class InputError(CaltrioError):
    """A file, an option or a value that a person gave cannot be used.

    Args:
        where: the file or the option.
        place: the row, column or key inside it; may be empty.
        problem: what is wrong, with the value.
        remedy: what to do; may be empty.
    """

    def __init__(self, where: str, place: str, problem: str, remedy: str = "") -> None:
        super().__init__(where, place, problem, remedy)
        self.where, self.place, self.problem, self.remedy = where, place, problem, remedy

    def __str__(self) -> str:
        head = ": ".join(part for part in (self.where, self.place, self.problem) if part)
        text = f"{head}; {self.remedy}" if self.remedy else head
        return " ".join(text.split())  # one line, whatever the value held


class IllegalTransition(CaltrioError):
    """A job was told to take a step that its state does not allow: a defect of the caller's."""


class LeaseError(CaltrioError):
    """A buffer lease was used against its rules (§4.2): after release, twice, or while in flight."""


class RequestError(CaltrioError):
    """A request or a job ended without its result.

    Args:
        message: what was wrong, with the value, and what to do.
        phase: one of :class:`Phase`.
        code: the CalRT return code, where the device gave one.
        job_id: the job; -1 before there is one.
        sequence_id: the KV sequence slot; -1 before there is one.
        generation_id: the model generation; -1 where it does not matter.
    """

    grpc: ClassVar[str] = "UNKNOWN"
    http: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        phase: str = Phase.ADMISSION,
        code: int = 0,
        job_id: int = -1,
        sequence_id: int = -1,
        generation_id: int = -1,
    ) -> None:
        super().__init__(message, phase, code, job_id, sequence_id, generation_id)
        self.message = message
        self.phase = phase
        self.code = code
        self.job_id = job_id
        self.sequence_id = sequence_id
        self.generation_id = generation_id

    def __str__(self) -> str:
        facts = [f"phase {self.phase}"]
        if self.code:
            facts.append(f"CalRT code {self.code}")
        for name in ("job_id", "sequence_id", "generation_id"):
            value = getattr(self, name)
            if value >= 0:
                facts.append(f"{name.removesuffix('_id')} {value}")
        return f"{self.message} [{self.grpc}; {', '.join(facts)}]"


class InvalidArgument(RequestError):
    """The request can never be served as it stands (out of bounds, wrong shape)."""

    grpc, http = "INVALID_ARGUMENT", 400


class ResourceExhausted(RequestError):
    """The queue is full or the KV cache can never hold the request."""

    grpc, http = "RESOURCE_EXHAUSTED", 429


class DeadlineExceeded(RequestError):
    """One of the three deadlines of §9.1 passed."""

    grpc, http = "DEADLINE_EXCEEDED", 504


class Unavailable(RequestError):
    """The executor does not take work now: draining, recovering, failed or closed."""

    grpc, http = "UNAVAILABLE", 503


class JobCancelled(RequestError):
    """The caller, or the shutdown, gave the job up before it reached the device."""

    grpc, http = "CANCELLED", 499


class DeviceFailed(RequestError):
    """The device reported a failure of a job."""

    grpc, http = "INTERNAL", 500


class SequenceUnknown(RequestError):
    """The KV of this sequence is not known after a failed job (§7); close it and start anew."""

    grpc, http = "FAILED_PRECONDITION", 400
