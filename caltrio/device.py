"""The :class:`Device` protocol: everything that an executor may ask of a runtime."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from importlib.metadata import entry_points
from typing import Protocol

from attrs import define, frozen

from .core.job import Job
from .semantics import EngineSemantics
from .timer import Timer


class WaitStatus(IntEnum):
    """``OutputBuf::GetStatus()``; judged together with the return code of ``Wait()`` (§6.5)."""

    DONE = 0
    DONE_CCU_EXCEPTION = 1


@define(slots=True)
class StageTimes:
    """When the stages of one job ran on the device, in ns of its clock.

    ``None`` where the device does not report it. ``engine`` is the slot that it really used;
    ``die_start_ns`` and ``die_end_ns`` have one entry for each compute stage.
    """

    engine: int = -1
    h2d_start_ns: int | None = None
    h2d_end_ns: int | None = None
    die_start_ns: list[int] | None = None
    die_end_ns: list[int] | None = None
    d2h_start_ns: int | None = None
    d2h_end_ns: int | None = None


@frozen
class Completion:
    """``Wait()`` has returned for ``job``: its return code, the buffer's status, the stage times."""

    job: Job
    rc: int
    status: WaitStatus
    stages: StageTimes


class Device(Protocol):
    """A runtime that the executor drives: ``infer`` from one task, ``wait`` from one other (§5.1)."""

    @property
    def timer(self) -> Timer:
        """The time that the device runs in."""

    @property
    def semantics(self) -> EngineSemantics:
        """What its engines do, or are assumed to do."""

    async def infer(self, job: Job) -> int:
        """Submit ``job``; returns the CalRT return code once the runtime has taken it or refused.

        May block while no engine slot is free. After code 0 the device owns the job's buffers
        until :meth:`wait` has returned the job; after any other code it never touched them.
        """

    async def wait(self) -> Completion:
        """The next completion, in the order in which the device lets ``Wait()`` return.

        Blocks while there is none. Each submitted job is returned exactly once.
        """


@frozen
class DeviceKind:
    """A kind of device, as found through the entry-point group ``caltrio.devices``.

    ``unavailable`` says in one line why this kind cannot be opened here, or returns ``None``.
    """

    name: str
    summary: str
    time: str
    unavailable: Callable[[], str | None]


def device_kinds() -> list[DeviceKind]:
    """Every kind of device that is installed, by name."""
    found = []
    for entry in entry_points(group="caltrio.devices"):
        kind = entry.load()
        if not isinstance(kind, DeviceKind):
            raise TypeError(f"entry point {entry.value!r} of caltrio.devices is not a DeviceKind")
        found.append(kind)
    return sorted(found, key=lambda kind: kind.name)
