"""Frozen facts that the executor tells: records, traces, metrics and tests all listen to these."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from .codes import Verdict
from .core.buffers import BufferSlot
from .core.job import Job
from .core.lifecycle import LifecycleState
from .core.request import RequestState


@frozen
class JobEnded:
    """A job reached its final state; nothing of it changes any more."""

    now_ns: int
    job: Job


@frozen
class RequestEnded:
    """A request reached its single outcome; nothing of it changes any more."""

    now_ns: int
    request: RequestState


@frozen
class BufferQuarantined:
    """A buffer slot left service for good."""

    slot: BufferSlot
    reason: str


@frozen
class LifecycleChanged:
    """The executor changed what it is doing, and why."""

    now_ns: int
    old: LifecycleState
    new: LifecycleState
    reason: str


@frozen
class DeviceFault:
    """The device failed a job: the phase, its code (0 with an exception), and the row of §8."""

    now_ns: int
    job: Job
    phase: str
    code: int
    verdict: Verdict


@frozen
class InflightLimited:
    """Fewer jobs in flight from here on than the configuration asks for, and why."""

    now_ns: int
    limit: int
    reason: str


@frozen
class StaleCompletion:
    """The device returned a job that had ended before, with its generation; nothing was touched."""

    now_ns: int
    job: Job


Event = (
    JobEnded
    | RequestEnded
    | BufferQuarantined
    | LifecycleChanged
    | DeviceFault
    | InflightLimited
    | StaleCompletion
)
Listener = Callable[[Event], None]
