"""The requests of a run, and the named random streams that they may be drawn from."""

from __future__ import annotations

from zlib import crc32

import numpy as np
from attrs import frozen
from numpy.typing import NDArray


@frozen
class Request:
    """One request: when it arrives (ns from the start of the run) and how long it is (tokens)."""

    request_id: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream ``name`` of a run. Streams of other names are independent of it.

    So another arrival process leaves the lengths as they were, and the other way round.
    """
    return np.random.default_rng(np.random.SeedSequence([seed, crc32(name.encode())]))


def stream_seed(seed: int, name: str) -> int:
    """64 bits of the stream ``name``, for a consumer that has a generator of its own."""
    return int(stream(seed, name).integers(2**64, dtype=np.uint64))


def prompt_of(request: Request, seed: int, vocab: int, most: int) -> NDArray[np.int32]:
    """The prompt of ``request``, ``[tokens]`` of ids below ``vocab``: the same in every run of a seed.

    It ends at ``most`` tokens: no model takes a longer one, and a trace may tell of any length.
    """
    count = min(request.prompt_tokens, most)
    random = stream(seed, f"prompt {request.request_id}")
    return random.integers(vocab, size=count, dtype=np.int32)
