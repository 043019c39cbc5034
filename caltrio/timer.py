"""The executor's only view of time: a clock, and sleeping until an instant with a rank.

In real time (:class:`RealTimer`) a rank means nothing. In virtual time it orders what happens at
one instant, so that a tie never depends on which task trio happens to run first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

import trio

from .timing import JobShape, Stage
from .units import NS_PER_S


class Rank(IntEnum):
    """What comes first at one instant; ties within a rank go by job or request id."""

    STAGE_END = 0  # frees channels and engine slots, which everything below may want
    WAIT_RETURNED = 1  # frees the in-flight permit before a new submission asks for one
    SUBMIT_RETURNED = 2  # the job takes its engine slot: after those that free one
    COMPLETER_DONE = 3  # delivers, and frees the buffer lease
    CLIENT_READY = 4  # hands in the next step: after the delivery that caused it
    DEADLINE = 5  # what was done by its deadline, at the very instant, was done in time
    ARRIVAL = 6  # a newcomer queues behind the work that was here before it


class Timer(Protocol):
    """Time as the executor sees it."""

    def now_ns(self) -> int:
        """Nanoseconds of :func:`trio.current_time`."""

    async def sleep_until_ns(self, time_ns: int, rank: Rank, tie: int) -> None:
        """Return at ``time_ns``, or at the next checkpoint if that is past; cancellable."""

    def in_turn(self, actions: Sequence[Callable[[], None]]) -> None:
        """Do each of ``actions``. Virtual time lets what one wakes come to rest before the next."""

    async def work(self, stage: Stage, job: JobShape) -> None:
        """Charge host work of ``job``. Real time charges itself; virtual time sleeps its cost."""


class RealTimer:
    """:class:`Timer` on trio's own clock; right for hardware, and for trio's ``MockClock``."""

    def now_ns(self) -> int:
        """Nanoseconds of :func:`trio.current_time`."""
        return round(trio.current_time() * NS_PER_S)

    async def sleep_until_ns(self, time_ns: int, rank: Rank, tie: int) -> None:
        """Sleep until ``time_ns``; rank and tie order nothing in real time."""
        await trio.sleep_until(time_ns / NS_PER_S)

    def in_turn(self, actions: Sequence[Callable[[], None]]) -> None:
        """Do them all: in real time nobody promises the order of what happens together."""
        for action in actions:
            action()

    async def work(self, stage: Stage, job: JobShape) -> None:
        """Return at once: the work itself takes the time."""
