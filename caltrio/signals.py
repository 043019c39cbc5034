"""End a run in good order on SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio
from attrs import define, field


@define
class Stop:
    """What is cancelled by the first signal, and which one that was."""

    scope: trio.CancelScope = field(factory=trio.CancelScope)
    by: signal.Signals | None = None


class StoppedError(Exception):
    """A run that others build on was ended by a signal: what it left is not a result."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by)
        self.by = by


@define
class Noted:
    """Which signal has come, if one has."""

    by: signal.Signals | None = None


@contextmanager
def noted() -> Iterator[Noted]:
    """A block of synchronous work that looks itself whether it is to end. In the main thread only."""
    note = Noted()
    if threading.current_thread() is not threading.main_thread():
        yield note
        return

    def heed(number: int, _frame: object) -> None:
        note.by = note.by or signal.Signals(number)

    before = {number: signal.signal(number, heed) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield note
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@asynccontextmanager
async def stoppable() -> AsyncIterator[Stop]:
    """A block that a signal cancels. Only the main thread may handle signals; elsewhere none does.

    A task takes them, so that they never hit a step of a simulation, and a second one cannot cut
    the first one's clean end short.
    """
    stop, listening = Stop(), trio.CancelScope(shield=True)

    async def heed() -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        with listening, trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                stop.by = stop.by or signal.Signals(number)
                stop.scope.cancel()

    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heed)
        try:
            with stop.scope:
                yield stop
        except BaseException as error:  # noqa: BLE001 - raised below, outside the nursery's grouping
            failure = error
        listening.cancel()
    if failure is not None:
        raise failure
