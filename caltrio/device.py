"""The :class:`Device` protocol: everything that an executor may ask of a runtime."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from enum import IntEnum
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from attrs import define, field, frozen
from numpy.typing import NDArray

from .capabilities import Capabilities
from .core.job import CallTimes, Job
from .core.kv import KvManager
from .errors import InputError
from .manifest import (
    DeviceModel,
    DeviceTensor,
    Manifest,
    ModelGeneration,
    SubmodelContract,
    load_manifest,
)
from .semantics import EngineSemantics
from .timer import Timer
from .timing import TimingProfile


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
    """``Wait()`` has returned for ``job``: its return code, the buffer's status, the stage times.

    ``calls``: when the device's own threads made the calls, if it has such threads.
    """

    job: Job
    rc: int
    status: WaitStatus
    stages: StageTimes
    calls: CallTimes | None = None


class Submission(NamedTuple):
    """``infer()`` has returned for ``job``, or it was withdrawn before ``infer()`` was called."""

    job: Job
    rc: int
    withdrawn: bool


class Ring(Protocol):
    """Threads of a device's that make the calls: jobs are handed over, and nobody waits for them.

    It has the in-flight limit, and takes one job more than that: it holds it back, and submits it
    when another one returns, without waiting for the executor.
    """

    def hand_over(self, job: Job) -> int | None:
        """Call ``infer()`` with ``job`` as soon as fewer than the limit are in flight.

        ``None``: :meth:`Device.wait` will return its :class:`Submission`, and until then no other job
        may come. A code: it was refused at once, and nothing follows.
        """

    def withdraw(self, job: Job) -> None:
        """Do not call ``infer()`` with ``job`` any more, if that is still possible."""

    def limit(self, max_inflight: int) -> None:
        """The in-flight limit from here on."""


class DeviceBuffers(Protocol):
    """The input and output buffers of one slot: ``CalrtInputBuf`` and ``CalrtOutputBuf``.

    Return codes are CalRT's; none of these calls waits.
    """

    @property
    def sliced(self) -> bool:
        """Is a slice set that was not undone?"""

    def tensor(self, name: str) -> DeviceTensor | None:
        """The tensor of that exact name, as the device reports it now; ``None`` if there is none."""

    def extent(self, name: str, token_count: int) -> tuple[int, int]:
        """(offset, size) in bytes of the first ``token_count`` tokens in the tensor's layout."""

    def map(self, name: str, host: NDArray[Any]) -> int:
        """``MapBuf()``: the tensor lives in ``host`` from here on, which must stay where it is."""

    def slice(self, name: str, offset: int, size: int) -> int:
        """``SliceTensor()``: the next job uses these bytes of the tensor only."""

    def undo_slices(self) -> int:
        """``UndoSlice()``, for all tensors."""


class Device(Protocol):
    """A runtime that the executor drives: ``infer`` from one task, ``wait`` from one other (§5.1)."""

    @property
    def timer(self) -> Timer:
        """The time that the device runs in."""

    @property
    def semantics(self) -> EngineSemantics:
        """What its engines do, or are assumed to do."""

    @property
    def capabilities(self) -> Capabilities:
        """What may be used of it, and how that is known (§14)."""

    @property
    def kv(self) -> KvManager:
        """The KV manager of what is configured now."""

    @property
    def ring(self) -> Ring | None:
        """Threads of its own that make the calls, if it has some: :meth:`infer` is then not used."""

    def models(self) -> Sequence[DeviceModel]:
        """``GetAllModels()``: every graph of the calbin, as the device reports it."""

    async def configure(self, generation: ModelGeneration) -> int:
        """Load a model whose graphs have been checked; returns the CalRT return code."""

    def buffers(self, contract: SubmodelContract, engine: int) -> DeviceBuffers:
        """New buffers for one slot of the generation that is configured."""

    def set_csr(self, graph: str, name: str, value: int) -> int:
        """``SetCsrByName()``, for the job that ``infer`` is called with next; the return code."""

    async def infer(self, job: Job) -> int:
        """Submit ``job``; returns the CalRT return code once the runtime has taken it or refused.

        May block while no engine slot is free. After code 0 the device owns the job's buffers
        until :meth:`wait` has returned the job; after any other code it never touched them.
        """

    async def wait(self) -> Completion | Submission:
        """The next completion, in the order in which the device lets ``Wait()`` return.

        A device with a ring also returns what became of each submission, before the completion that
        it leads to. Blocks while there is nothing. Each submitted job is returned exactly once,
        unless a reset ends it.
        """

    async def reset(self) -> int:
        """Reset everything that ``capabilities.reset_scope`` says; the return code.

        After code 0 and scope ``device`` the device uses no memory of the jobs that it had.
        """


OpenDevice = Callable[[], AbstractAsyncContextManager[Device]]


@frozen
class DeviceOptions:
    """How a command wants a device.

    Args:
        semantics: the hypothesis; a device of real time has its own.
        timing: what the stages cost, where they are simulated.
        seed: of the run's random streams.
        model: what the device is to hold.
        device_samples: the what-if of sampling on the device; see :class:`caltrio.costs.Costs`.
        tokens: compute tokens too, not timing alone, where that is a choice.
        outside: other threads will hand in work; virtual time then waits for them.
        calbin: the model file of a real device.
        capabilities: what may be used of a real device; ``None``: its kind decides.
    """

    semantics: EngineSemantics
    timing: TimingProfile
    seed: int = 0
    model: Manifest = field(factory=load_manifest)
    device_samples: bool = False
    tokens: bool = True
    outside: bool = False
    calbin: Path | None = None
    capabilities: Capabilities | None = None


T = TypeVar("T")


class RunDevice(Protocol):
    """How a kind of device is run: ``main`` is called in an event loop with the device's time."""

    def __call__(self, main: Callable[[OpenDevice], Awaitable[T]], options: DeviceOptions) -> T:
        """Run ``main`` to its end, and return its result."""


@frozen
class DeviceKind:
    """A kind of device, as found through the entry-point group ``caltrio.devices``.

    ``unavailable`` says in one line why this kind cannot be opened here, or returns ``None``;
    ``run`` runs a program on it. ``hypothetical``: its card is a model that takes semantics and
    timing from the options. ``check_timing``: the profile for checks of what such a card says, where
    that of the product would take long in real time.
    """

    name: str
    summary: str
    time: str
    unavailable: Callable[[], str | None]
    run: RunDevice
    hypothetical: bool = False
    check_timing: str | None = None


def _entries() -> dict[str, EntryPoint]:
    found = {entry.name: entry for entry in entry_points(group="caltrio.devices")}
    return dict(sorted(found.items()))


def _load(entry: EntryPoint) -> DeviceKind:
    kind = entry.load()
    if not isinstance(kind, DeviceKind):
        raise TypeError(f"entry point {entry.value!r} of caltrio.devices is not a DeviceKind")
    return kind


def device_kinds() -> list[DeviceKind]:
    """Every kind of device that is installed, by name."""
    return [_load(entry) for entry in _entries().values()]


def device_kind(name: str) -> DeviceKind:
    """The kind of that name, if it can be used here. Raises :class:`InputError` if not.

    Nothing of the other kinds is imported.
    """
    entries = _entries()
    if name not in entries:
        raise InputError("--device", "", f"{name!r} is unknown", f"use one of {', '.join(entries)}")
    kind = _load(entries[name])
    reason = kind.unavailable()
    if reason is not None:
        raise InputError("--device", name, reason)
    return kind
