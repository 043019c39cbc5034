"""KV transactions (specification §7): what each sequence holds, and what each job does to it.

Reserving is not committing (§5.1 rule 6). A job's transaction is reserved, marked submitted, and
then committed, rolled back, or unknown. A sequence whose KV is unknown takes no more work, and
what it held stays out of use until the generation ends: the device may still be writing there.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Protocol

from attrs import define

from ..errors import IllegalTransition


class KvManager(Protocol):
    """The runtime's ``KvManager``, as far as §7 describes it; it gives no reasons."""

    def can_allocate(self, sequences: int) -> bool:
        """``canAllocate()``: is there KV for so many more?"""

    def apply(self, sequence_id: int, target_tokens: int) -> bool:
        """``Apply()``: let the sequence hold up to ``target_tokens``; may fail, without a reason."""

    def release(self, sequence_id: int) -> None:
        """The sequence has ended; its KV is free."""


class UnlimitedKv:
    """A :class:`KvManager` that refuses nothing: only the executor's token budget limits."""

    def can_allocate(self, sequences: int) -> bool:
        """Always."""
        return True

    def apply(self, sequence_id: int, target_tokens: int) -> bool:
        """Always succeeds."""
        return True

    def release(self, sequence_id: int) -> None:
        """Nothing to do."""


class KvTxnState(Enum):
    """The states of one job's transaction (§7)."""

    RESERVED = "reserved"
    SUBMITTED = "submitted"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    UNKNOWN = "unknown"

    __hash__ = object.__hash__  # identity; hashing by name costs on the hot path


_K = KvTxnState

KV_TRANSITIONS: Mapping[KvTxnState, frozenset[KvTxnState]] = MappingProxyType(
    {
        _K.RESERVED: frozenset({_K.SUBMITTED, _K.ROLLED_BACK}),
        # Rolled back from there: the runtime refused the submit, so nothing ran (§7).
        _K.SUBMITTED: frozenset({_K.COMMITTED, _K.ROLLED_BACK, _K.UNKNOWN}),
        _K.COMMITTED: frozenset(),
        _K.ROLLED_BACK: frozenset(),
        _K.UNKNOWN: frozenset(),
    }
)


@define(slots=True, eq=False)
class KvReservation:
    """One job's transaction: its sequence grows from ``old_len`` to ``target_len`` tokens."""

    sequence_id: int
    old_len: int
    target_len: int
    generation_id: int
    state: KvTxnState = KvTxnState.RESERVED

    def to(self, state: KvTxnState) -> None:
        """Take one legal step. Raises :class:`IllegalTransition`."""
        if state not in KV_TRANSITIONS[self.state]:
            raise IllegalTransition(
                f"the KV transaction of sequence {self.sequence_id} cannot go from "
                f"{self.state.value} to {state.value}"
            )
        self.state = state


@define(slots=True, eq=False)
class KvHolding:
    """What one sequence holds, in tokens. ``unknown`` says why its contents are not known."""

    reserved_tokens: int
    committed_tokens: int = 0
    unknown: str | None = None


class KvCoordinator:
    """The KV of one generation, split over sequences.

    ``reserved_tokens`` is always the sum over ``holders`` and ``quarantined``.

    Args:
        capacity_tokens: the executor's own budget.
        manager: the runtime's, asked once for each attempt.
        generation_id: of the model; a transaction of another one is refused.
    """

    def __init__(self, capacity_tokens: int, manager: KvManager, generation_id: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.generation_id = generation_id
        self.reserved_tokens = 0
        self.holders: dict[int, KvHolding] = {}
        self.quarantined: dict[int, KvHolding] = {}
        self._manager = manager

    def fits(self, tokens: int) -> bool:
        """Does the executor's own budget allow so many more?"""
        return self.reserved_tokens + tokens <= self.capacity_tokens

    def reserve(self, sequence_id: int, target_tokens: int) -> bool:
        """Let a sequence, new or not, hold ``target_tokens``: one attempt; false without room."""
        held = self.holders.get(sequence_id)
        more = target_tokens - (0 if held is None else held.reserved_tokens)
        if more <= 0 and held is not None:
            return True
        if not self.fits(more) or not self._manager.can_allocate(1):
            return False
        if not self._manager.apply(sequence_id, target_tokens):
            return False
        self.reserved_tokens += more
        if held is None:
            self.holders[sequence_id] = KvHolding(target_tokens)
        else:
            held.reserved_tokens = target_tokens
        return True

    def begin(self, sequence_id: int, tokens: int) -> KvReservation:
        """The transaction of a job that adds ``tokens`` to what is committed."""
        old = self.holders[sequence_id].committed_tokens
        return KvReservation(sequence_id, old, old + tokens, self.generation_id)

    def covers(self, txn: KvReservation) -> bool:
        """Is the transaction's target reserved already?"""
        return txn.target_len <= self.holders[txn.sequence_id].reserved_tokens

    def commit(self, txn: KvReservation) -> None:
        """The job completed and its output passed the checks: its tokens are in the cache."""
        held = self.holders[txn.sequence_id]
        if txn.generation_id != self.generation_id or txn.old_len != held.committed_tokens:
            raise ValueError(
                f"sequence {txn.sequence_id} holds {held.committed_tokens} tokens in generation "
                f"{self.generation_id}; a transaction from {txn.old_len} tokens of generation "
                f"{txn.generation_id} does not fit"
            )
        if txn.target_len > held.reserved_tokens:
            raise ValueError(
                f"sequence {txn.sequence_id} commits {txn.target_len} tokens, above its reservation"
            )
        txn.to(KvTxnState.COMMITTED)
        held.committed_tokens = txn.target_len

    def mark_unknown(self, txn: KvReservation, reason: str) -> None:
        """Nobody knows what the device did to this sequence's cache; it takes no more work."""
        txn.to(KvTxnState.UNKNOWN)
        self.holders[txn.sequence_id].unknown = reason

    def release(self, sequence_id: int) -> bool:
        """The sequence has ended. May its id and its KV be used again?

        Not if its contents are unknown: the device may still write there until a reset.
        """
        held = self.holders.pop(sequence_id)
        if held.unknown is not None:
            self.quarantined[sequence_id] = held
            return False
        self.reserved_tokens -= held.reserved_tokens
        self._manager.release(sequence_id)
        return True
