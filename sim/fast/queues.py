"""Rings and heaps in one array of int64, for the event loop of the twin.

A ring at ``q`` is ``[head, size, room, …]``. A heap at ``h`` is ``[size, …]`` of rows of
``WIDTH`` columns, least first by its first two: an instant, and what decides at one instant.
"""

from __future__ import annotations

from typing import Any, cast

from numba import njit, types
from numba.extending import intrinsic

HEAD, SIZE, ROOM, ITEMS = range(4)
WIDTH = 5
ROWS = 1


@cast(Any, intrinsic)  # type: ignore[untyped-decorator]  # typed as if called with the context
def pointer(_context: Any, array: Any) -> Any:
    """The data of an array of int64, to be indexed without a bound and without a reference counted.

    Numba counts references to arrays in each function that is not inlined: that was half of the time.
    Whoever calls compiled code with an array keeps it alive.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return types.CPointer(types.int64)(array), code  # type: ignore[no-untyped-call]


@njit(cache=True, error_model="numpy", forceinline=True)
def push(m: Any, q: int, who: int) -> None:
    """Append ``who``."""
    at = m[q + HEAD] + m[q + SIZE]
    if at >= m[q + ROOM]:
        at -= m[q + ROOM]
    m[q + ITEMS + at] = who
    m[q + SIZE] += 1


@njit(cache=True, error_model="numpy", forceinline=True)
def first(m: Any, q: int) -> Any:
    """The one at the head, which stays there."""
    return m[q + ITEMS + m[q + HEAD]]


@njit(cache=True, error_model="numpy", forceinline=True)
def pop(m: Any, q: int) -> Any:
    """Take the one at the head."""
    head = m[q + HEAD]
    who = m[q + ITEMS + head]
    head += 1
    m[q + HEAD] = 0 if head == m[q + ROOM] else head
    m[q + SIZE] -= 1
    return who


@njit(cache=True, error_model="numpy", forceinline=True)
def nth(m: Any, q: int, index: int) -> Any:
    """The one ``index`` places behind the head."""
    at = m[q + HEAD] + index
    if at >= m[q + ROOM]:
        at -= m[q + ROOM]
    return m[q + ITEMS + at]


@njit(cache=True, error_model="numpy")
def remove(m: Any, q: int, who: int) -> None:
    """Take ``who`` out, wherever it is; those before it move back one place."""
    if first(m, q) == who:
        pop(m, q)
        return
    index = 1
    while nth(m, q, index) != who:
        index += 1
    while index > 0:
        at = m[q + HEAD] + index
        if at >= m[q + ROOM]:
            at -= m[q + ROOM]
        m[q + ITEMS + at] = nth(m, q, index - 1)
        index -= 1
    pop(m, q)


@njit(cache=True, error_model="numpy", forceinline=True)
def _swap(m: Any, one: int, other: int) -> None:
    for column in range(WIDTH):
        m[one + column], m[other + column] = m[other + column], m[one + column]


@njit(cache=True, error_model="numpy", forceinline=True)
def _before(m: Any, one: int, other: int) -> Any:
    return m[one] < m[other] or (m[one] == m[other] and m[one + 1] < m[other + 1])


@njit(cache=True, error_model="numpy")
def rise(m: Any, h: int, place: int) -> None:
    """Let the row at ``place`` rise to where it belongs."""
    while place > 0:
        parent = (place - 1) >> 1
        if not _before(m, h + ROWS + WIDTH * place, h + ROWS + WIDTH * parent):
            return
        _swap(m, h + ROWS + WIDTH * place, h + ROWS + WIDTH * parent)
        place = parent


@njit(cache=True, error_model="numpy", forceinline=True)
def add(m: Any, h: int, when: int, tie: int, who: int, what: int, job: int) -> None:
    """Put in a row."""
    place = m[h]
    row = h + ROWS + WIDTH * place
    m[row] = when
    m[row + 1] = tie
    m[row + 2] = who
    m[row + 3] = what
    m[row + 4] = job
    m[h] += 1
    if place > 0:
        rise(m, h, place)


@njit(cache=True, error_model="numpy", forceinline=True)
def drop(m: Any, h: int) -> None:
    """Take the least row out."""
    last = m[h] - 1
    m[h] = last
    if last == 0:
        return
    rows = h + ROWS
    for column in range(WIDTH):
        m[rows + column] = m[rows + WIDTH * last + column]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= last:
            return
        if child + 1 < last and _before(m, rows + WIDTH * (child + 1), rows + WIDTH * child):
            child += 1
        if not _before(m, rows + WIDTH * child, rows + WIDTH * place):
            return
        _swap(m, rows + WIDTH * child, rows + WIDTH * place)
        place = child
