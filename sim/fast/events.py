"""What the device, the service tasks and the clients do next, in the order of time, rank and job id.

Few things are ever scheduled at once and most are due soon, so this is an array that stays sorted, the
next event last: what is put in moves the few that are sooner.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from caltrio.timer import Rank

from .machine import EVENT_WIDTH, EVENTS, NEVER

# What happens. The rank of each is that of caltrio.timer.Rank: CHANNEL_END and DIE_END are stage ends,
# INTERRUPT and WAIT_RETURNED are of one rank. Deadlines are the last of an instant, and have a heap.
(
    CHANNEL_END, DIE_END, INTERRUPT, WAIT_RETURNED, SUBMIT_RETURNED, COMPLETER_DONE, CLIENT_READY,
) = range(7)  # fmt: skip

_RANKS = (
    int(Rank.STAGE_END),
    int(Rank.STAGE_END),
    int(Rank.WAIT_RETURNED),
    int(Rank.WAIT_RETURNED),
    int(Rank.SUBMIT_RETURNED),
    int(Rank.COMPLETER_DONE),
    int(Rank.CLIENT_READY),
)
_TIE_BITS = 48

_hot = njit(cache=True, error_model="numpy", forceinline=True)


@_hot
def next_event(m: Any) -> Any:
    """When the next one is due."""
    count = m[EVENTS]
    return m[EVENTS + 1 + EVENT_WIDTH * (count - 1)] if count > 0 else NEVER


@_hot
def take_event(m: Any) -> Any:
    """Take the next one out: (what, who)."""
    count = m[EVENTS] - 1
    m[EVENTS] = count
    row = EVENTS + 1 + EVENT_WIDTH * count
    return m[row + 2], m[row + 3]


@_hot
def schedule(m: Any, when: int, what: int, job: int, who: int) -> None:
    """Let ``what`` happen to ``who`` at ``when``; ``job`` is the id that orders ties."""
    count = m[EVENTS]
    m[EVENTS] = count + 1
    key = (_RANKS[what] << _TIE_BITS) | job
    row = EVENTS + 1 + EVENT_WIDTH * count
    while count > 0:
        sooner = row - EVENT_WIDTH
        if m[sooner] > when or (m[sooner] == when and m[sooner + 1] > key):
            break
        m[row] = m[sooner]
        m[row + 1] = m[sooner + 1]
        m[row + 2] = m[sooner + 2]
        m[row + 3] = m[sooner + 3]
        row = sooner
        count -= 1
    m[row] = when
    m[row + 1] = key
    m[row + 2] = what
    m[row + 3] = who


@njit(cache=True, error_model="numpy")
def unschedule(m: Any, what: int, who: int) -> None:
    """It will not happen."""
    row = EVENTS + 1 + EVENT_WIDTH * (m[EVENTS] - 1)
    last = row
    while m[row + 2] != what or m[row + 3] != who:
        row -= EVENT_WIDTH
    while row < last:
        for column in range(EVENT_WIDTH):
            m[row + column] = m[row + EVENT_WIDTH + column]
        row += EVENT_WIDTH
    m[EVENTS] -= 1
