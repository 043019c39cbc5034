"""BF16 logits to FP32, straight into the caller's array (specification §10.1, S09, S10).

One pass over the region that is asked for: no temporary array, no second copy, and values that are
NaN or infinite are counted on the way. The loop is compiled when this module is imported (once a
machine, where numba finds a folder to keep it in), and runs without the interpreter's lock.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn

import numba
import numpy as np
import numpy.typing as npt
from attrs import Attribute, field, frozen

_BLOCK = 4096  # entries between two sums of the 16-bit count, which 65535 would be the end of


class LogitsBounds(ValueError):
    """A region outside the logits, or a tensor smaller than its layout; nothing was written."""


def _at_least_one(_owner: object, attribute: Attribute[int], value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{attribute.name} is {value!r}; "
            "give a whole number of at least 1, from the graph's metadata"
        )


@frozen
class LogitsLayout:
    """How logits ``[rows, vocab] bf16`` lie in memory: ``[ceil(vocab / d0)][rows][d0]`` (S09).

    Args:
        rows: positions in the tensor, 1 or more.
        vocab: entries of the vocabulary, 1 or more.
        d0: entries of the vocabulary in one tile, 1 or more; from the graph's metadata, so no default.

    Raises:
        ValueError: one of them is not a whole number of at least 1.
    """

    rows: int = field(validator=_at_least_one)
    vocab: int = field(validator=_at_least_one)
    d0: int = field(validator=_at_least_one)

    @cached_property
    def elements(self) -> int:
        """Entries in memory, those that fill up the last tile included."""
        return -(-self.vocab // self.d0) * self.rows * self.d0


def _expand(
    source: npt.NDArray[np.uint16],
    out: npt.NDArray[np.float32],
    row: int,
    base: int,
    rows: int,
    d0: int,
) -> np.int64:
    """The loop of :func:`convert` on bits, compiled; every index was checked before."""
    bits = out.view(np.uint32)
    bad = np.int64(0)
    done = 0
    tile, inside = divmod(base, d0)
    while done < out.size:
        count = min(d0 - inside, out.size - done, _BLOCK)
        # Unsigned indices, which cannot count from the end, and a sum as narrow as the words: without
        # either the loop is not vectorised.
        begin, to = np.uintp((tile * rows + row) * d0 + inside), np.uintp(done)
        bad_here = np.uint16(0)
        for i in range(np.uintp(count)):
            word = source[begin + i]
            bits[to + i] = np.uint32(word) << np.uint32(16)
            not_finite = (word & np.uint16(0x7F80)) == np.uint16(0x7F80)
            bad_here = np.uint16(bad_here + np.uint16(not_finite))
        bad += np.int64(bad_here)
        done += count
        inside += count
        if inside == d0:
            tile, inside = tile + 1, 0
    return bad


def _compiled(function: Callable[..., np.int64]) -> Callable[..., np.int64]:
    """``function`` in machine code, kept on disk where numba finds a folder that it may write to."""
    words = numba.types.Array(numba.uint16, 1, "C", readonly=True)
    signature: Any = numba.int64(words, numba.float32[::1], *[numba.int64] * 4)
    try:
        kernel: Callable[..., np.int64] = numba.njit(signature, nogil=True, cache=True)(function)
    except (RuntimeError, OSError):  # no such folder, or no room in it
        kernel = numba.njit(signature, nogil=True)(function)
    return kernel


_kernel = _compiled(_expand)


_U16, _F32 = np.dtype(np.uint16), np.dtype(np.float32)
_READABLE = 0x1 | 0x100  # NPY_ARRAY_C_CONTIGUOUS, NPY_ARRAY_ALIGNED
_WRITABLE = _READABLE | 0x400  # NPY_ARRAY_WRITEABLE


def _usable(array: object, dtype: np.dtype[Any], flags: int) -> bool:
    """The checks of :func:`_check_array` in one; that one then finds what to say."""
    return (
        isinstance(array, np.ndarray)
        and array.dtype == dtype
        and array.ndim == 1
        and array.flags.num & flags == flags
    )


def _check_array(name: str, array: object, dtype: type[np.generic], hint: str) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is a {type(array).__name__}; give a numpy array of {dtype.__name__}{hint}"
        )
    if array.dtype != dtype:
        raise TypeError(f"{name} holds {array.dtype}; give an array of {dtype.__name__}{hint}")
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(
            f"{name} has shape {array.shape} and strides {array.strides}; "
            "give a one-dimensional, contiguous, aligned array"
        )


def _complain_of_region(layout: LogitsLayout, row: int, base: int, count: int) -> NoReturn:
    if not 0 <= row < layout.rows:
        raise LogitsBounds(
            f"row is {row}; the logits have {layout.rows} rows, give 0 to {layout.rows - 1}"
        )
    raise LogitsBounds(
        f"{count} entries from {base} were asked for; the vocabulary has {layout.vocab}, "
        "give a base and an out within it"
    )


def convert(
    source: npt.NDArray[np.uint16],
    layout: LogitsLayout,
    row: int,
    base: int,
    out: npt.NDArray[np.float32],
) -> int:
    """Convert ``out.size`` entries from ``base`` of row ``row`` into ``out``, bit for bit.

    FP32 holds every BF16 value, so nothing is rounded; payloads of NaNs are kept. Nothing is allocated
    that grows with the size (§10.1).

    Args:
        source: the whole tensor's words, ``[layout.elements] uint16`` or longer, contiguous.
        layout: how the tensor lies in ``source``.
        row: which position, 0 to ``layout.rows - 1``.
        base: the first entry of the vocabulary to convert.
        out: ``[count] float32``, contiguous and writable, apart from ``source``; may be empty.

    Returns:
        How many of the converted entries are NaN or infinite.

    Raises:
        LogitsBounds: the region is not inside the logits, or ``source`` is too small (FI09).
        TypeError: an array of another type, or an index that is not a whole number.
        ValueError: an array that is not flat, contiguous, writable, or that overlaps the other.
            After any error ``out`` is as it was.
    """
    if not (_usable(source, _U16, _READABLE) and _usable(out, _F32, _WRITABLE)):
        _check_array("source", source, np.uint16, " (source.view(np.uint16) for bfloat16)")
        _check_array("out", out, np.float32, "")
        raise ValueError("out is read-only; give an array that can be written to")
    row, base, rows, d0 = operator.index(row), operator.index(base), layout.rows, layout.d0
    if not (0 <= row < rows and 0 <= base <= layout.vocab and out.size <= layout.vocab - base):
        _complain_of_region(layout, row, base, out.size)
    elements = layout.elements
    if source.size < elements:
        raise LogitsBounds(
            f"source has {source.size} entries; {layout} needs {elements}, "
            "give the whole tensor or the layout that the graph declares"
        )
    if np.may_share_memory(source, out):
        raise ValueError("out overlaps source; give an array of its own")
    if rows == 1:
        d0 = elements  # tiles of one row follow one another: one run, whatever their size
    return int(_kernel(source, out, row, base, rows, d0))
