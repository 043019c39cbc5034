"""Frozen facts that the executor tells: records, traces, metrics and tests all listen to these."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

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


Event = JobEnded | RequestEnded | BufferQuarantined | LifecycleChanged
Listener = Callable[[Event], None]
