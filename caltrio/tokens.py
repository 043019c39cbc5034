"""The reference token model: what a device that computes tokens must say, in plain Python.

The next token is a function of the whole history, so that a lost KV update, a swapped output or a
buffer that was reused in flight shows as wrong tokens. Devices that are not cards implement the
same definition by themselves; this one gives the golden to check them with.

Definition, all in unsigned 64 bits: ``digest = sum((t[i] + 1) * M**i)``, ``x = mix64(digest ^ n)``
for a history of ``n`` tokens. The likeliest token is ``x % vocab``; four runners-up are
``mix64(x) % vocab`` and so on. Their logits are 24, 23, 22, 21, 20; the others are noise in steps
of 1/16 from -8 to 8, a fixed table turned by ``mix64(x ^ 1) % vocab``. All are exact in BF16.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from functools import cache

from .timing import mix64

MULTIPLIER = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
TOP_LOGITS = (24.0, 23.0, 22.0, 21.0, 20.0)


def bf16_bits(value: float) -> int:
    """The upper half of the FP32 bits; exact for the values of this model."""
    bits: int = struct.unpack(">I", struct.pack(">f", value))[0]
    return bits >> 16


@cache
def noise_table(vocab: int) -> array[int]:
    """BF16 bits of the noise, twice in a row so that a turned one is a slice."""
    values = [bf16_bits(step / 16 - 8) for step in range(256)]
    once = array("H", (values[mix64(entry) & 255] for entry in range(vocab)))
    return once + once


class ReferenceSequence:
    """One history, token by token.

    Args:
        vocab: entries of the vocabulary.
        history: tokens to begin with.
    """

    def __init__(self, vocab: int, history: Iterable[int] = ()) -> None:
        self.vocab = vocab
        self.length = 0
        self._digest = 0
        self._power = 1
        for token in history:
            self.feed(token)

    def feed(self, token: int) -> None:
        """Append one token."""
        self._digest = (self._digest + (token + 1) * self._power) & MASK
        self._power = self._power * MULTIPLIER & MASK
        self.length += 1

    def _seed(self) -> int:
        return mix64(self._digest ^ self.length)

    def next_token(self) -> int:
        """The greedy choice after this history."""
        return self._seed() % self.vocab

    def logits(self) -> array[int]:
        """BF16 bits ``[vocab]`` of the logits after this history."""
        x = self._seed()
        turn = mix64(x ^ 1) % self.vocab
        bits = noise_table(self.vocab)[turn : turn + self.vocab]
        places = []
        for _ in TOP_LOGITS:
            places.append(x % self.vocab)
            x = mix64(x)
        for place, value in zip(reversed(places), reversed(TOP_LOGITS), strict=True):
            bits[place] = bf16_bits(value)  # the likelier last: it wins where two coincide
        return bits


def generate(vocab: int, prompt: Iterable[int], count: int) -> list[int]:
    """``count`` greedy tokens after ``prompt``."""
    sequence = ReferenceSequence(vocab, prompt)
    tokens = []
    for _ in range(count):
        tokens.append(sequence.next_token())
        sequence.feed(tokens[-1])
    return tokens
