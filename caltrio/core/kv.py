"""The KV ledger: how many tokens of the cache each sequence holds (specification §7).

Today's policy is ``full``: a sequence reserves all that it may ever need when it is admitted, so
that a decode step never waits for KV. Reserving is not committing: ``committed`` grows only when
the device has completed a job and its output has passed the checks.
"""

from __future__ import annotations

from attrs import define


@define(slots=True, eq=False)
class KvReservation:
    """What one sequence holds, in tokens; ``unknown`` after a failure on the device (§7)."""

    reserved_tokens: int
    committed_tokens: int = 0
    unknown: bool = False


class KvLedger:
    """Tokens of KV, split over sequences. ``reserved`` is always the sum over the holders."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.reserved_tokens = 0
        self.holders: dict[int, KvReservation] = {}

    def fits(self, tokens: int) -> bool:
        """Could ``tokens`` be reserved now?"""
        return self.reserved_tokens + tokens <= self.capacity_tokens

    def reserve(self, sequence_id: int, tokens: int) -> KvReservation:
        """Reserve for a new sequence. The caller has asked :meth:`fits` first."""
        if sequence_id in self.holders or not self.fits(tokens):
            raise ValueError(f"sequence {sequence_id} cannot reserve {tokens} tokens of KV")
        self.reserved_tokens += tokens
        reservation = self.holders[sequence_id] = KvReservation(tokens)
        return reservation

    def commit(self, sequence_id: int, tokens: int) -> None:
        """``tokens`` more are in the cache: their job completed."""
        reservation = self.holders[sequence_id]
        total = reservation.committed_tokens + tokens
        if total > reservation.reserved_tokens:
            raise ValueError(f"sequence {sequence_id} commits {total} tokens, above its reservation")
        reservation.committed_tokens = total

    def mark_unknown(self, sequence_id: int) -> None:
        """Nobody knows what the device did to this sequence's cache; it takes no more work."""
        self.holders[sequence_id].unknown = True

    def release(self, sequence_id: int) -> None:
        """The sequence has ended and the device is done with it."""
        self.reserved_tokens -= self.holders.pop(sequence_id).reserved_tokens
