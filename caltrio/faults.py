"""Faults on purpose: :class:`FaultyDevice` injects what a :class:`FaultPlan` says into any device.

The names FI01 to FI15 are those of specification §12. Three of them are no faults of a device but
acts of a caller (FI11 to FI13), which :mod:`caltrio.drills` performs.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import trio
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from .capabilities import Capabilities
from .codes import CalrtCode
from .core.buffers import BufferSlot
from .core.job import Job
from .core.kv import KvManager
from .device import Completion, Device, DeviceBuffers, Ring, Submission, WaitStatus
from .manifest import DeviceModel, DeviceTensor, ModelGeneration, SubmodelContract
from .prepare import host_memory
from .semantics import EngineSemantics
from .timer import Timer


class Point(StrEnum):
    """Where a fault is injected, and what it does there."""

    MODELS = "models"  # a graph's name is off by one character (FI01)
    CSR = "csr"  # the CSR that is set does not exist (FI02)
    SLICE = "slice"  # a slice is one byte longer than its tensor (FI03)
    MAP = "map"  # MapBuf() returns the code
    KV = "kv"  # canAllocate() says no (FI04)
    SUBMIT = "submit"  # infer() returns the code, and the device never sees the job (FI05, FI06)
    WAIT = "wait"  # Wait() returns the code (FI07)
    STATUS = "status"  # Wait() succeeds, the status is DONE_CCU_EXCEPTION (FI08)
    SHORT_OUTPUT = "short_output"  # the output tensor is smaller than the vocabulary (FI09)
    NAN_OUTPUT = "nan_output"  # the logits hold a NaN and an infinity (FI10)
    HOLD = "hold"  # the completion comes back only after a reset (FI14)
    LOSE = "lose"  # Wait() never returns the job
    UNDO = "undo"  # UndoSlice() does nothing (FI15)
    CONFIGURE = "configure"  # the load of a model returns the code
    RESET = "reset"  # a reset returns the code


CODES = {
    Point.MAP: CalrtCode.MAP_BROKEN,
    Point.SUBMIT: CalrtCode.BUSY,
    Point.WAIT: CalrtCode.TIMEOUT,
    Point.CONFIGURE: CalrtCode.ILLEGAL_CALBIN,
    Point.RESET: CalrtCode.SOFT_RESET_FAILED,
}


@frozen
class Fault:
    """One kind of fault, and when it strikes.

    Args:
        point: which call, and what happens there.
        call: only the call of that number, counted from 0 at that point; ``None``: any.
        job_id: only this job, at the points that see one (submit, wait and what follows it).
        times: at most so often.
        probability: of striking, at each call that matches.
        code: what the call returns, at the points that return one; 0 takes that of :data:`CODES`.
    """

    point: Point = field(converter=Point)
    call: int | None = None
    job_id: int | None = None
    times: float = field(default=1)
    probability: float = field(default=1.0)
    code: int = 0

    @times.validator
    def _some(self, _attribute: object, value: float) -> None:
        if not value >= 0:
            raise ValueError(f"times is {value}; give 0 or more")

    @probability.validator
    def _is_one(self, _attribute: object, value: float) -> None:
        if not 0 <= value <= 1:
            raise ValueError(f"probability is {value}; give 0 to 1")


ALWAYS = math.inf
_REMEMBERED = 1000  # jobs, by FaultyDevice


class FaultPlan:
    """Decides at each call whether a fault strikes; the same seed and calls give the same faults.

    Attributes:
        calls: how often each point was passed.
        injected: (point, job id or -1) of each fault that struck, in order.
        active: nothing strikes while false.
    """

    def __init__(self, faults: Iterable[Fault], seed: int = 0) -> None:
        self._faults: list[Fault] = []
        self._left: list[float] = []
        for fault in faults:
            self.add(fault)
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self.calls = dict.fromkeys(Point, 0)
        self.injected: list[tuple[Point, int]] = []
        self.active = True

    def add(self, fault: Fault) -> None:
        """One more."""
        if fault.times >= 1:
            self._faults.append(fault)
            self._left.append(fault.times)

    def strikes(self, point: Point, job: Job | None = None) -> Fault | None:
        """The fault that strikes this call, if one does."""
        call = self.calls[point]
        self.calls[point] += 1
        if not self.active:
            return None
        for index, fault in enumerate(self._faults):
            if (
                fault.point is point
                and fault.call in (None, call)
                and (fault.job_id is None or (job is not None and fault.job_id == job.job_id))
                and (fault.probability >= 1 or self._random.random() < fault.probability)
            ):
                self._left[index] -= 1
                if self._left[index] <= 0:
                    del self._faults[index], self._left[index]
                self.injected.append((point, -1 if job is None else job.job_id))
                return fault
        return None


class _FaultyKv:
    def __init__(self, inner: KvManager, plan: FaultPlan) -> None:
        self._inner, self._plan = inner, plan

    def can_allocate(self, sequences: int) -> bool:
        return self._plan.strikes(Point.KV) is None and self._inner.can_allocate(sequences)

    def apply(self, sequence_id: int, target_tokens: int) -> bool:
        return self._inner.apply(sequence_id, target_tokens)

    def release(self, sequence_id: int) -> None:
        self._inner.release(sequence_id)


class _FaultyRing:
    def __init__(self, inner: Ring, plan: FaultPlan) -> None:
        self._inner, self._plan = inner, plan
        self.withdraw, self.limit = inner.withdraw, inner.limit

    def hand_over(self, job: Job) -> int | None:
        fault = self._plan.strikes(Point.SUBMIT, job)
        return self._inner.hand_over(job) if fault is None else _code(fault)


class FaultyBuffers:
    """A device's buffers with faults. ``inner`` is what the device below gets."""

    def __init__(self, inner: DeviceBuffers, contract: SubmodelContract, plan: FaultPlan) -> None:
        self.inner = inner
        self.short_output = False
        self._contract, self._plan = contract, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # what a device adds for itself

    @property
    def sliced(self) -> bool:
        """As of the device."""
        return self.inner.sliced

    def tensor(self, name: str) -> DeviceTensor | None:
        """As of the device; too small an output while that is injected."""
        tensor = self.inner.tensor(name)
        if tensor is not None and self.short_output and name == self._contract.logits.name:
            shape = (*tensor.shape[:-1], tensor.shape[-1] - 1)
            return evolve(tensor, shape=shape, byte_size=tensor.byte_size - 2)
        return tensor

    def extent(self, name: str, token_count: int) -> tuple[int, int]:
        """One byte too many while that is injected."""
        offset, size = self.inner.extent(name, token_count)
        tensor = self.inner.tensor(name)
        if tensor is not None and self._plan.strikes(Point.SLICE) is not None:
            return offset, tensor.byte_size + 1
        return offset, size

    def map(self, name: str, host: NDArray[Any]) -> int:
        """The code that is injected, or the device's."""
        fault = self._plan.strikes(Point.MAP)
        return self.inner.map(name, host) if fault is None else _code(fault)

    def slice(self, name: str, offset: int, size: int) -> int:
        """As of the device; a new job begins."""
        self.short_output = False
        return self.inner.slice(name, offset, size)

    def undo_slices(self) -> int:
        """Does nothing, and says that it did, while that is injected."""
        if self._plan.strikes(Point.UNDO) is not None:
            return CalrtCode.SUCCESS
        return self.inner.undo_slices()


def _code(fault: Fault) -> int:
    return fault.code or CODES[fault.point]


def _note(ids: list[int], one: int) -> None:
    """Remember ``one``, and not all there ever were: a soak runs for days."""
    ids.append(one)
    if len(ids) > _REMEMBERED:
        del ids[0]


class FaultyDevice:
    """Any :class:`~caltrio.device.Device`, with the faults of a plan.

    A job that is made to fail has run on the device below. One that wants to know about it (as the
    simulated one, for its KV) has a method ``injected_failure(job)``.
    """

    def __init__(self, inner: Device, plan: FaultPlan) -> None:
        self.inner, self.plan = inner, plan
        self.inferred: list[int] = []
        self.waited: list[int] = []
        self.slots: dict[int, BufferSlot] = {}  # of the jobs inferred, the last few
        self.configured: list[int] = []
        self._held: list[Completion] = []
        self._ready: deque[Completion] = deque()

    @property
    def timer(self) -> Timer:
        """As of the device."""
        return self.inner.timer

    @property
    def semantics(self) -> EngineSemantics:
        """As of the device."""
        return self.inner.semantics

    @property
    def capabilities(self) -> Capabilities:
        """As of the device."""
        return self.inner.capabilities

    @property
    def kv(self) -> KvManager:
        """As of the device, with faults."""
        return _FaultyKv(self.inner.kv, self.plan)

    @property
    def ring(self) -> _FaultyRing | None:
        """As of the device, with faults."""
        return None if self.inner.ring is None else _FaultyRing(self.inner.ring, self.plan)

    def models(self) -> Sequence[DeviceModel]:
        """As of the device; one name off by a character while that is injected."""
        models = list(self.inner.models())
        if models and self.plan.strikes(Point.MODELS) is not None:
            models[0] = evolve(models[0], name=f"{models[0].name[:-1]}_")
        return models

    async def configure(self, generation: ModelGeneration) -> int:
        """The code that is injected, or the device's."""
        _note(self.configured, generation.generation_id)
        fault = self.plan.strikes(Point.CONFIGURE)
        return await self.inner.configure(generation) if fault is None else _code(fault)

    def buffers(self, contract: SubmodelContract, engine: int) -> FaultyBuffers:
        """As of the device, with faults."""
        return FaultyBuffers(self.inner.buffers(contract, engine), contract, self.plan)

    def set_csr(self, graph: str, name: str, value: int) -> int:
        """As of the device; under a name that it does not have while that is injected."""
        wrong = self.plan.strikes(Point.CSR) is not None
        return self.inner.set_csr(graph, f"{name}?" if wrong else name, value)

    async def infer(self, job: Job) -> int:
        """The code that is injected, or the device's."""
        fault = self.plan.strikes(Point.SUBMIT, job)
        if fault is not None:
            await trio.lowlevel.checkpoint()
            return _code(fault)
        self._note_infer(job)
        return await self.inner.infer(job)

    def _note_infer(self, job: Job) -> None:
        _note(self.inferred, job.job_id)
        assert job.lease is not None
        self.slots[job.job_id] = job.lease.slot
        if len(self.slots) > _REMEMBERED:
            del self.slots[next(iter(self.slots))]

    async def wait(self) -> Completion | Submission:
        """The next completion, with what is injected into it."""
        while True:
            if self._ready:
                await trio.lowlevel.checkpoint()
                done = self._ready.popleft()
                if not done.job.final:
                    _note(self.waited, done.job.job_id)
                return done
            came = await self.inner.wait()
            job = came.job
            if isinstance(came, Submission):
                if not came.withdrawn and not job.final:
                    self._note_infer(job)
                return came
            done = came
            if job.final:
                return done
            if self.plan.strikes(Point.HOLD, job) is not None:
                self._held.append(done)
                continue
            if self.plan.strikes(Point.LOSE, job) is not None:
                continue
            done = self._spoiled(done)
            if self._ready:  # what was held back comes first
                self._ready.append(done)
                continue
            _note(self.waited, job.job_id)
            return done

    def _spoiled(self, done: Completion) -> Completion:
        job, plan = done.job, self.plan
        fault = plan.strikes(Point.WAIT, job)
        if fault is not None:
            self._tell(job)
            return evolve(done, rc=_code(fault))
        if plan.strikes(Point.STATUS, job) is not None:
            self._tell(job)
            return evolve(done, status=WaitStatus.DONE_CCU_EXCEPTION)
        if plan.strikes(Point.SHORT_OUTPUT, job) is not None:
            buffers = host_memory(job).buffers
            assert isinstance(buffers, FaultyBuffers)
            buffers.short_output = True
        if plan.strikes(Point.NAN_OUTPUT, job) is not None:
            logits = host_memory(job).logits
            logits[logits.size // 3], logits[-1] = 0x7FC0, 0x7F80
        return done

    def _tell(self, job: Job) -> None:
        tell = getattr(self.inner, "injected_failure", None)
        if tell is not None:
            tell(job)

    async def reset(self) -> int:
        """The code that is injected, or the device's; what was held back comes out after it."""
        fault = self.plan.strikes(Point.RESET)
        if fault is not None:
            await trio.lowlevel.checkpoint()
            return _code(fault)
        rc = await self.inner.reset()
        self._ready.extend(self._held)
        self._held.clear()
        return rc
