"""What one step reads, and where its logits go."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from .manifest import SubmodelContract


@frozen(eq=False)
class StepData:
    """The arrays of one step.

    Args:
        tokens: ids ``[token_count]`` int32, or embeddings ``[token_count, hidden]`` float32.
        positions: ``[token_count]`` int32.
        out: ``[count]`` float32, the caller's; gets the logits of ``count`` vocabulary entries.
        base: the first vocabulary entry of ``out``.
        sequences: how many sequences the step holds.
    """

    tokens: NDArray[np.int32] | NDArray[np.float32]
    positions: NDArray[np.int32]
    out: NDArray[np.float32]
    base: int = 0
    sequences: int = 1

    def mismatch(self, contract: SubmodelContract, token_count: int, past_len: int) -> str | None:
        """What is wrong with tokens and positions (check 4 of §6.3), or ``None``."""
        tokens, positions = self.tokens, self.positions
        wanted = np.dtype(np.float32 if contract.tokens.dtype == "f32" else np.int32)
        if tokens.dtype != wanted or positions.dtype != np.int32 or positions.ndim != 1:
            return (
                f"tokens are {tokens.dtype} and positions {positions.dtype} of {positions.ndim} "
                f"dimensions; give {wanted.name} and a row of int32"
            )
        each = contract.token_bytes // wanted.itemsize
        if tokens.size != token_count * each or positions.size != token_count:
            return (
                f"{tokens.size} token elements and {positions.size} positions for {token_count} "
                f"tokens of {each} elements each; give as many of both"
            )
        if int(positions[0]) != past_len or (token_count > 1 and (np.diff(positions) != 1).any()):
            return f"positions do not run on from {past_len}, the tokens that the sequence holds"
        vocab = contract.logits.shape[-1]
        if wanted == np.int32 and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            return f"token ids are {tokens.min()} to {tokens.max()}; give 0 to {vocab - 1}"
        return None
