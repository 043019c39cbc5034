"""What one step reads, and where its logits go."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .manifest import SubmodelContract


@frozen(eq=False)
class StepData:
    """The arrays of one step, as the caller gave them; :meth:`mismatch` says whether they are right.

    Args:
        tokens: ids ``[token_count]`` of integers, or embeddings ``[token_count, hidden]`` of floats.
        positions: ``[token_count]`` of integers; ``None``: those after what the sequence holds.
        out: ``[count]`` float32, the caller's; gets the logits of ``count`` vocabulary entries.
        base: the first vocabulary entry of ``out``.
        sequences: how many sequences the step holds.
    """

    tokens: NDArray[Any]
    positions: NDArray[Any] | None
    out: NDArray[Any]
    base: int = 0
    sequences: int = 1

    def mismatch(self, contract: SubmodelContract, token_count: int, past_len: int) -> str | None:
        """What is wrong with the arrays (check 4 of §6.3), or ``None``."""
        tokens, positions = self.tokens, self.positions
        vocab = contract.logits.shape[-1]
        if contract.tokens.dtype == "f32":
            each = contract.token_bytes // 4
            if tokens.dtype.kind != "f" or tokens.shape != (token_count, each):
                return f"embeddings are {tokens.dtype} {tokens.shape}; give floats [n, {each}]"
        elif tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            return f"tokens are {tokens.dtype} of {tokens.ndim} dimensions; give a row of integers"
        else:
            # Of one token, as in each decode step, numpy's reductions would cost more than the rest.
            low, high = [tokens.item()] * 2 if tokens.size == 1 else (tokens.min(), tokens.max())
            if not 0 <= int(low) <= int(high) < vocab:
                return f"token ids are {low} to {high}; give 0 to {vocab - 1}"
        if positions is not None:
            if positions.dtype.kind not in "iu" or positions.ndim != 1:
                return (
                    f"positions are {positions.dtype} of {positions.ndim} dimensions; "
                    "give a row of integers"
                )
            if positions.size != token_count:
                return f"{positions.size} positions for {token_count} tokens; give as many of both"
            if not np.array_equal(positions, np.arange(past_len, past_len + token_count)):
                return f"positions do not run on from {past_len}, the tokens that the sequence holds"
        if self.sequences < 1:
            return f"{self.sequences} sequences in one job; give 1"
        return self._out_mismatch(vocab)

    def _out_mismatch(self, vocab: int) -> str | None:
        out = self.out
        flags = out.flags
        right = out.dtype == np.float32 and out.ndim == 1
        if not (right and flags.c_contiguous and flags.aligned and flags.writeable):
            return (
                f"out is {out.dtype} {out.shape}; "
                "give a row of float32 that is contiguous, aligned and writable"
            )
        if type(self.base) is not int:
            return f"base is {self.base!r}; give a whole number"
        if not 0 <= self.base <= vocab or out.size > vocab - self.base:
            return f"{out.size} logits from entry {self.base} on are outside the vocabulary of {vocab}"
        return None
