"""Buffer slots and the move-only leases on them (specification §4.2, §5.1).

A slot is free, leased or quarantined, never two of them; a lease has one owner and ends once.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

from attrs import define

from ..errors import LeaseError
from ..manifest import TaskKind


class SlotMemory(Protocol):
    """The memory of a slot, as far as the pool asks about it."""

    @property
    def sliced(self) -> bool:
        """Are slices set that were not undone?"""


@define(slots=True, eq=False)
class BufferSlot:
    """The input and output buffers of one job at a time, bound to a kind and an engine.

    ``memory`` is the host storage with the device's buffers on it; it stays where it is for the
    life of the generation.
    """

    slot_id: int
    generation_id: int
    kind: TaskKind
    engine: int
    memory: SlotMemory | None = None


class BufferLease:
    """The right to use one slot, until :meth:`release` or :meth:`quarantine`.

    Cannot be copied or pickled. Releasing while the device owns the memory raises and quarantines
    the slot; a lease that is garbage-collected unended warns (``ResourceWarning``) and quarantines.
    """

    __slots__ = ("_in_flight", "_pool", "_slot")

    def __init__(self, pool: BufferPool, slot: BufferSlot) -> None:
        self._pool = pool
        self._slot: BufferSlot | None = slot
        self._in_flight = False

    @property
    def slot(self) -> BufferSlot:
        """The slot. Raises :class:`LeaseError` once the lease has ended or moved."""
        if self._slot is None:
            raise LeaseError("this lease has ended or was moved; take a new one from the pool")
        return self._slot

    @property
    def alive(self) -> bool:
        """Does this lease still own its slot?"""
        return self._slot is not None

    def mark_submitted(self) -> None:
        """The device owns the memory from here on."""
        _ = self.slot
        self._in_flight = True

    def mark_returned(self) -> None:
        """The device has let go of the memory."""
        _ = self.slot
        self._in_flight = False

    def move(self) -> BufferLease:
        """A new lease on the same slot; this one is dead afterwards."""
        moved = BufferLease(self._pool, self.slot)
        moved._in_flight = self._in_flight
        self._slot = None
        return moved

    def release(self) -> None:
        """Give the slot back. Raises and quarantines if the device still owns the memory.

        A slot whose slices were not undone is quarantined instead (FI15).
        """
        slot = self.slot
        if self._in_flight:
            self.quarantine("released while the device owned it")
            raise LeaseError(
                f"slot {slot.slot_id} was released while the device owned it; it is quarantined"
            )
        if slot.memory is not None and slot.memory.sliced:
            self.quarantine("returned with its slices not undone")
            return
        self._slot = None
        self._pool._give_back(slot)

    def quarantine(self, reason: str) -> None:
        """Take the slot out of use for good."""
        slot = self.slot
        self._slot = None
        self._pool._quarantine(slot, reason)

    def __del__(self) -> None:
        if getattr(self, "_slot", None) is not None:
            slot = self.slot
            self.quarantine("its lease was lost")
            warnings.warn(
                f"the lease on buffer slot {slot.slot_id} was never released; it is quarantined",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _refuse(self, *_args: object) -> NoReturn:
        raise LeaseError("a buffer lease has one owner; move() it instead of copying it")

    __copy__ = __deepcopy__ = __reduce_ex__ = __reduce__ = _refuse


class BufferPool:
    """The slots of one generation, by kind and engine. Free slots go out in FIFO order.

    Args:
        generation_id: of every slot.
        kinds, engines: one set of slots for each pair.
        slots_each: how many slots a pair has.
        make_memory: called once for each slot.
        on_quarantine: told of each slot taken out of use, with the reason.
    """

    def __init__(
        self,
        generation_id: int,
        kinds: Iterable[TaskKind],
        engines: Iterable[int],
        slots_each: int,
        make_memory: Callable[[TaskKind, int], SlotMemory | None],
        on_quarantine: Callable[[BufferSlot, str], None],
    ) -> None:
        self._on_quarantine = on_quarantine
        self._free: dict[tuple[TaskKind, int], deque[BufferSlot]] = {}
        engines = tuple(engines)
        next_id = 0
        for kind in kinds:
            for engine in engines:
                slots = range(next_id, next_id + slots_each)
                next_id += slots_each
                self._free[kind, engine] = deque(
                    BufferSlot(slot_id, generation_id, kind, engine, make_memory(kind, engine))
                    for slot_id in slots
                )
        self.total = next_id
        self.leased = 0
        self.quarantined: list[tuple[BufferSlot, str]] = []

    @property
    def free(self) -> int:
        """Slots that can be leased, over all kinds and engines."""
        return sum(map(len, self._free.values()))

    def usable(self, kind: TaskKind, engine: int) -> bool:
        """Will a slot of this pair ever be free again?"""
        lost = sum(1 for slot, _ in self.quarantined if (slot.kind, slot.engine) == (kind, engine))
        return lost < self.total // len(self._free)

    def available(self, kind: TaskKind, engine: int) -> bool:
        """Is a slot of this pair free now?"""
        return bool(self._free[kind, engine])

    def acquire(self, kind: TaskKind, engine: int) -> BufferLease | None:
        """A lease on the slot that has been free longest, or ``None`` if none is free."""
        free = self._free[kind, engine]
        if not free:
            return None
        self.leased += 1
        return BufferLease(self, free.popleft())

    def retire(self) -> None:
        """The generation has ended: what is free leaves service too (§5.1 rule 8)."""
        for free in self._free.values():
            while free:
                slot = free.popleft()
                self.leased += 1
                self._quarantine(slot, "its generation ended")

    def _give_back(self, slot: BufferSlot) -> None:
        self.leased -= 1
        self._free[slot.kind, slot.engine].append(slot)

    def _quarantine(self, slot: BufferSlot, reason: str) -> None:
        self.leased -= 1
        self.quarantined.append((slot, reason))
        self._on_quarantine(slot, reason)
