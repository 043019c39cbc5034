"""Every error that caltrio raises, one class per category, all under :class:`CaltrioError`.

Arguments are positional, so that an error survives pickling and SimPy's habit of rebuilding
exceptions from ``.args``.
"""

from __future__ import annotations

from typing import ClassVar

from .units import format_ns


class Phase:
    """Where in a job's life an error happened; plain strings, so that records stay readable."""

    START = "start"
    ADMISSION = "admission"
    PREPARE = "prepare"
    QUEUE = "queue"
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


class EmptyJob(InvalidArgument):
    """Check 1 of §6.3: a job has no tokens, or decodes before anything was prefilled."""


class SequenceTooLong(InvalidArgument):
    """Check 2 of §6.3: past length and new tokens exceed ``max_seq``, or what was reserved."""


class BatchTooLarge(InvalidArgument):
    """Check 3 of §6.3: more sequences in one job than the graph's ``max_batch``."""


class InputMismatch(InvalidArgument):
    """Check 4 of §6.3: tokens and positions are missing, of the wrong type, or differ in length."""


class ResourceExhausted(RequestError):
    """The queue is full, or the KV cache does not hold what the request needs."""

    grpc, http = "RESOURCE_EXHAUSTED", 429


class DeadlineExceeded(RequestError):
    """One of the three deadlines of §9.1 passed, or the device reported a timeout."""

    grpc, http = "DEADLINE_EXCEEDED", 504


class Unavailable(RequestError):
    """The executor does not take work now: backing off, draining, recovering, failed or closed.

    ``retry_after_ns`` is a hint when to try again; -1 where it would not help.
    """

    grpc, http = "UNAVAILABLE", 503

    def __init__(
        self,
        message: str,
        phase: str = Phase.ADMISSION,
        code: int = 0,
        job_id: int = -1,
        sequence_id: int = -1,
        generation_id: int = -1,
        retry_after_ns: int = -1,
    ) -> None:
        super().__init__(message, phase, code, job_id, sequence_id, generation_id)
        self.args = (*self.args, retry_after_ns)
        self.retry_after_ns = retry_after_ns

    def __str__(self) -> str:
        if self.retry_after_ns < 0:
            return super().__str__()
        return f"{super().__str__()[:-1]}; retry after {format_ns(self.retry_after_ns)}]"


class JobCancelled(RequestError):
    """The caller, or the shutdown, gave the job up."""

    grpc, http = "CANCELLED", 499


class SequenceUnknown(RequestError):
    """The KV of this sequence is not known after a failed job (§7); close it and start anew."""

    grpc, http = "FAILED_PRECONDITION", 400


class Unsupported(RequestError):
    """The runtime, or this executor, does not do this; nothing was attempted."""

    grpc, http = "UNIMPLEMENTED", 501


class DeviceFailed(RequestError):
    """The device reported a failure of a job (§8, category Device)."""

    grpc, http = "INTERNAL", 500


class ArtifactError(DeviceFailed):
    """The compiled model and the manifest do not agree (§8, categories Artifact and Request)."""


class TensorMismatch(ArtifactError):
    """Check 5 of §6.3: a tensor's name, dtype, rank, shape or size is not the manifest's."""


class SliceOutOfRange(ArtifactError):
    """Check 6 of §6.3: an input, or a slice of it, is larger than its tensor."""


class CsrRejected(ArtifactError):
    """Check 7 of §6.3: ``SetCsrByName()`` did not succeed."""


class MapRejected(ArtifactError):
    """Check 8 of §6.3: ``MapBuf()`` or ``SliceTensor()`` did not succeed."""


class OutputRejected(DeviceFailed):
    """§6.5: the output has the wrong size, or holds NaN or infinity; it was not delivered."""


class NotConfigured(DeviceFailed):
    """The runtime is not in the state that the executor took it to be in (§8, Lifecycle)."""


class Incompatible(DeviceFailed):
    """Driver, runtime or a dependency does not fit (§8, Compatibility); a person must mend it."""


class DeviceUnknown(DeviceFailed):
    """A code that §8 calls unknown, or does not name; the generation is not trusted any more."""

    grpc, http = "UNKNOWN", 500


class ServiceFailed(CaltrioError):
    """The executor ended as ``Failed``: the process is to be restarted (§9.1).

    Args:
        reason: why.
        exit_code: 75 asks a supervisor to restart; 78 says that only a person can help.
    """

    def __init__(self, reason: str, exit_code: int = 75) -> None:
        super().__init__(reason, exit_code)
        self.reason, self.exit_code = reason, exit_code

    def __str__(self) -> str:
        remedy = "restart the process" if self.exit_code == 75 else "mend it; a restart will not help"
        return f"the executor has failed: {self.reason}; {remedy}"
