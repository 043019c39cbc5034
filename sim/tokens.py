"""The token model on the simulated card: KV in the device's memory, inputs and outputs by DMA.

Inputs are copied out of the mapped host memory when H2D ends, logits into it when D2H ends, so what
the host does to that memory meanwhile is seen. The definition is that of
:mod:`caltrio.tokens`; this is another implementation of it, on arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import define
from numpy.typing import NDArray

from caltrio.mapped import MappedBuffers
from caltrio.semantics import KvAfterFailedWait
from caltrio.timing import mix64
from caltrio.tokens import MULTIPLIER, TOP_LOGITS, bf16_bits

_U64 = np.uint64
_MOST_CELLS = 1 << 20  # of one sequence: whatever a CSR says, the card has no more


def _scatter(entries: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser on an array."""
    value = entries + _U64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> _U64(27))) * _U64(0x94D049BB133111EB)
    return value ^ (value >> _U64(31))


@define(slots=True, eq=False)
class Transfer:
    """One job on the card: what H2D brought, and how to take its KV update back."""

    buffers: MappedBuffers
    sequence_id: int
    cur_len: int  # the CSRs' values at submit: tokens before the job,
    total_len: int  # and after it
    tokens: NDArray[np.int32] | None = None
    positions: NDArray[np.int32] | None = None
    where: NDArray[np.int64] | None = None  # the cells that it wrote, and
    before: NDArray[np.int64] | None = None  # what they held


class SimKv:
    """The card's KV, and the runtime's ``KvManager`` for it.

    Args:
        capacity_tokens: of the card; ``None`` leaves the limit to the executor's budget.
    """

    def __init__(self, capacity_tokens: int | None) -> None:
        self._capacity = capacity_tokens
        self._used = 0
        self.allowed: dict[int, int] = {}
        self.cells: dict[int, NDArray[np.int64]] = {}

    def can_allocate(self, sequences: int) -> bool:
        """Is there a token of room for each?"""
        return self._capacity is None or self._used + sequences <= self._capacity

    def apply(self, sequence_id: int, target_tokens: int) -> bool:
        """Let a sequence hold so many tokens."""
        more = target_tokens - self.allowed.get(sequence_id, 0)
        if self._capacity is not None and self._used + more > self._capacity:
            return False
        self._used += max(more, 0)
        self.allowed[sequence_id] = max(target_tokens, self.allowed.get(sequence_id, 0))
        return True

    def release(self, sequence_id: int) -> None:
        """Its cells are gone."""
        self._used -= self.allowed.pop(sequence_id, 0)
        self.cells.pop(sequence_id, None)

    def of(self, sequence_id: int, length: int) -> NDArray[np.int64]:
        """The cells of a sequence, at least ``length`` of them; -1 where nothing was written."""
        cells = self.cells.get(sequence_id)
        if cells is None or cells.size < length:
            grown = np.full(max(length, 64, 2 * (0 if cells is None else cells.size)), -1, np.int64)
            if cells is not None:
                grown[: cells.size] = cells
            cells = self.cells[sequence_id] = grown
        return cells


class TokenModel:
    """Computes logits from the KV of the card.

    Args:
        vocab: entries of the vocabulary.
        kv: gives the KV of the present configuration.
        after_failure: what a failed job leaves in it.
        tile_d0: tile size of logits with more than one row; it divides ``vocab``.
    """

    def __init__(
        self,
        vocab: int,
        kv: Callable[[], SimKv],
        after_failure: KvAfterFailedWait,
        tile_d0: int = 1,
    ) -> None:
        self._tile_d0 = tile_d0
        self._vocab, self._kv, self._after_failure = vocab, kv, after_failure
        values = np.array([bf16_bits(step / 16 - 8) for step in range(256)], np.uint16)
        noise = values[(_scatter(np.arange(vocab, dtype=_U64)) & _U64(255)).astype(np.intp)]
        self._noise = np.concatenate([noise, noise])
        self._top = [bf16_bits(value) for value in TOP_LOGITS]
        self._powers = np.ones(1, _U64)

    def read(self, transfer: Transfer) -> None:
        """H2D has ended: the inputs are on the card."""
        buffers, contract = transfer.buffers, transfer.buffers.contract
        taken = []
        for tensor in (contract.tokens, contract.position):
            # Of a tensor without a slice, as many as the CSRs say.
            whole = 4 * max(transfer.total_len - transfer.cur_len, 0)
            offset, size = buffers.slices.get(tensor.name, (0, min(whole, tensor.byte_size)))
            taken.append(buffers.host[tensor.name][offset // 4 : (offset + size) // 4].copy())
        transfer.tokens, transfer.positions = taken

    def write(self, transfer: Transfer) -> None:
        """D2H has ended: the KV has grown, and the logits are in the mapped host memory."""
        tokens, positions = transfer.tokens, transfer.positions
        assert tokens is not None
        assert positions is not None
        kv = self._kv()
        allowed = kv.allowed.get(transfer.sequence_id, 0)
        total = max(min(transfer.total_len, _MOST_CELLS), 0)
        # Written where the CSR and the position agree, inside what Apply() allowed; else lost.
        expected = transfer.cur_len + np.arange(tokens.size)
        right = (positions == expected) & (expected >= 0) & (expected < allowed)
        where = transfer.where = expected[right]
        cells = kv.of(transfer.sequence_id, max(total, allowed))
        transfer.before = cells[where]
        cells[where] = tokens[right]
        output = transfer.buffers.host[transfer.buffers.contract.logits.name]
        if output.size == self._vocab:
            self._logits(cells[:total], output)
            return
        row = np.empty(self._vocab, np.uint16)  # the last of several, in tiles of d0
        self._logits(cells[:total], row)
        tiles = output.reshape(self._vocab // self._tile_d0, -1, self._tile_d0)
        tiles[:, -1, :] = row.reshape(-1, self._tile_d0)

    def _logits(self, history: NDArray[np.int64], output: NDArray[np.uint16]) -> None:
        count = history.size
        if self._powers.size < count:
            steps = np.full(2 * count, MULTIPLIER, _U64)
            steps[0] = 1
            self._powers = np.multiply.accumulate(steps)
        digest = int(np.dot((history + 1).astype(_U64), self._powers[:count]))
        x = mix64(digest ^ count)
        turn = mix64(x ^ 1) % self._vocab
        output[:] = self._noise[turn : turn + self._vocab]
        places = []
        for _ in self._top:
            places.append(x % self._vocab)
            x = mix64(x)
        output[places[::-1]] = self._top[::-1]

    def failed(self, transfer: Transfer) -> None:
        """The job is to have failed: leave its KV as the hypothesis says."""
        where, before = transfer.where, transfer.before
        if where is None or before is None:
            return
        cells = self._kv().of(transfer.sequence_id, 0)
        if self._after_failure is KvAfterFailedWait.UNCHANGED:
            cells[where] = before
        elif self._after_failure is KvAfterFailedWait.UNKNOWN:
            cells[where] ^= 0x5555  # neither the old nor the new
