"""The CalRT return codes and the one table of specification §8: what each of them leads to."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType

from attrs import frozen

from .errors import (
    ArtifactError,
    DeadlineExceeded,
    DeviceFailed,
    DeviceUnknown,
    Incompatible,
    InvalidArgument,
    NotConfigured,
    RequestError,
    ResourceExhausted,
    Unavailable,
    Unsupported,
)


class CalrtCode(IntEnum):
    """The codes that §8 names; the numbers are the specification's, the names are ours."""

    SUCCESS = 0
    OUT_OF_MEMORY = 1
    ALREADY_REGISTERED = 2
    ILLEGAL_VALUE = 4
    ILLEGAL_CONFIG = 5
    ALREADY_CONFIGURED = 7
    DRIVER_INCOMPATIBLE = 8
    RUNTIME_TOO_OLD = 9
    FILE_MISSING = 10
    FILE_UNREADABLE = 11
    FILE_DAMAGED = 12
    TIMEOUT = 13
    OUT_OF_RANGE = 14
    UNEXPECTED = 15
    NOT_CONFIGURED = 16
    BUSY = 17
    UNAVAILABLE = 18
    ILLEGAL_CALBIN = 19
    UNKNOWN = 20
    WRONG_DTYPE = 21
    WRONG_SHAPE = 22
    DEPENDENCY_ERROR = 23
    MAP_BROKEN = 24
    SOFT_RESET_FAILED = 25
    UNSUPPORTED = 27
    CRASHED = 28
    WRONG_DIRECTION = 29


class Category(StrEnum):
    """The categories of §8."""

    REQUEST = "Request/Artifact"
    LIFECYCLE = "Lifecycle"
    ARTIFACT = "Artifact"
    COMPATIBILITY = "Compatibility"
    TRANSIENT = "Transient/Unknown"
    DEVICE = "Device"
    PROGRAMMING = "Programming"
    UNKNOWN = "Unknown"


class Admission(StrEnum):
    """What becomes of new requests after such a failure."""

    CONTINUE = "the same model goes on"
    PAUSE = "paused"
    REFUSE_GENERATION = "this generation is refused"
    STOP = "stopped"
    REDUCE = "reduced"
    CLOSE_FEATURE = "the feature is closed"


class Action(StrEnum):
    """What the executor does by itself."""

    RECORD = "record the difference to the manifest; no reset"
    RECONFIGURE = "drain, then check generation and configuration"
    ROLL_BACK = "roll back to the last model known to be good"
    STOP = "stop for repair by a person; no retry"
    BACK_OFF = "bounded back-off; drain at the threshold"
    RECOVER = "quarantine, then reset, restart or escalate"
    CLOSE_FEATURE = "no reset; close the feature until code or configuration is mended"
    DISTRUST = "treat the device generation as contaminated"


@frozen
class Verdict:
    """One row of §8. The current job fails in each of them; ``error`` is how its caller sees it."""

    category: Category
    admission: Admission
    action: Action
    error: type[RequestError]

    @property
    def grpc(self) -> str:
        """The gRPC status."""
        return self.error.grpc

    @property
    def http(self) -> int:
        """The HTTP status."""
        return self.error.http


_C = CalrtCode

_GROUPS: tuple[tuple[Category, Admission, Action, dict[CalrtCode, type[RequestError]]], ...] = (
    (
        Category.REQUEST, Admission.CONTINUE, Action.RECORD,
        {_C.OUT_OF_MEMORY: ResourceExhausted, _C.OUT_OF_RANGE: InvalidArgument,
         _C.WRONG_DTYPE: ArtifactError, _C.WRONG_SHAPE: ArtifactError},
    ),
    (
        Category.LIFECYCLE, Admission.PAUSE, Action.RECONFIGURE,
        dict.fromkeys((_C.ALREADY_REGISTERED, _C.ALREADY_CONFIGURED, _C.NOT_CONFIGURED), NotConfigured),
    ),
    (
        Category.ARTIFACT, Admission.REFUSE_GENERATION, Action.ROLL_BACK,
        dict.fromkeys(
            (_C.ILLEGAL_VALUE, _C.ILLEGAL_CONFIG, _C.ILLEGAL_CALBIN, _C.FILE_MISSING,
             _C.FILE_UNREADABLE, _C.FILE_DAMAGED),
            ArtifactError,
        ),
    ),
    (
        Category.COMPATIBILITY, Admission.STOP, Action.STOP,
        dict.fromkeys(
            (_C.DRIVER_INCOMPATIBLE, _C.RUNTIME_TOO_OLD, _C.DEPENDENCY_ERROR), Incompatible
        ),
    ),
    (
        Category.TRANSIENT, Admission.REDUCE, Action.BACK_OFF,
        {_C.TIMEOUT: DeadlineExceeded, _C.BUSY: Unavailable},
    ),
    (
        Category.DEVICE, Admission.STOP, Action.RECOVER,
        {_C.UNAVAILABLE: Unavailable, _C.MAP_BROKEN: DeviceFailed,
         _C.SOFT_RESET_FAILED: DeviceFailed, _C.CRASHED: DeviceFailed},
    ),
    (
        Category.PROGRAMMING, Admission.CLOSE_FEATURE, Action.CLOSE_FEATURE,
        dict.fromkeys((_C.UNSUPPORTED, _C.WRONG_DIRECTION), Unsupported),
    ),
    (
        Category.UNKNOWN, Admission.PAUSE, Action.DISTRUST,
        dict.fromkeys((_C.UNEXPECTED, _C.UNKNOWN), DeviceUnknown),
    ),
)  # fmt: skip

VERDICTS: Mapping[CalrtCode, Verdict] = MappingProxyType(
    {
        code: Verdict(category, admission, action, error)
        for category, admission, action, errors in _GROUPS
        for code, error in errors.items()
    }
)

# ``DONE_CCU_EXCEPTION`` fails a job whatever ``Wait()`` returned (§6.5, FI08): the device did it.
CCU_EXCEPTION = Verdict(Category.DEVICE, Admission.STOP, Action.RECOVER, DeviceFailed)

_UNNAMED = Verdict(Category.UNKNOWN, Admission.PAUSE, Action.DISTRUST, DeviceUnknown)


def verdict(code: int) -> Verdict:
    """The row of ``code``; one that the table does not name is of category Unknown.

    Raises ``ValueError`` for 0, which is success.
    """
    if code == CalrtCode.SUCCESS:
        raise ValueError("code 0 is success; there is nothing to judge")
    return VERDICTS.get(code, _UNNAMED)  # type: ignore[call-overload,no-any-return]


def code_name(code: int) -> str:
    """``17 BUSY``, or the number alone where §8 has no name for it."""
    try:
        return f"{code} {CalrtCode(code).name}"
    except ValueError:
        return str(code)
