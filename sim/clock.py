"""Trio's clock on SimPy time, the pump that moves it, and the executor's timer in virtual time.

The pump waits until every task is blocked, then steps through SimPy's events until one of them
wakes a task: one wake-up per quiescence. Everything timed is a SimPy event with a rank (see
:class:`caltrio.timer.Rank`), so that ties are broken by the model and never by trio.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import simpy
import trio
import trio.testing
from simpy.events import Event
from trio.lowlevel import Abort, RaiseCancelT, current_task, reschedule, wait_task_rescheduled

from caltrio.errors import CaltrioError
from caltrio.timer import Rank
from caltrio.timing import Costs, JobShape, Stage
from caltrio.units import NS_PER_S

T = TypeVar("T")

_NEVER_S = 1e9  # real seconds that trio may sleep: the pump, not the deadline, ends a sleep
_TIE_BITS = 48


class VirtualDeadlock(CaltrioError):
    """Every task is blocked and nothing is scheduled: virtual time can never move again."""


def priority(rank: Rank, tie: int) -> int:
    """The SimPy priority of a ranked event; above SimPy's own 0 and 1, which settle at once."""
    return (rank + 1 << _TIE_BITS) | tie


_HOST_RANK = {
    Stage.SUBMIT: Rank.SUBMIT_RETURNED,
    Stage.POSTPROCESS: Rank.COMPLETER_DONE,
    Stage.CLIENT: Rank.CLIENT_READY,
}


class RankedEvent(Event):
    """A SimPy event that is ordered at its instant by rank, then by ``tie``.

    Scheduling one does what ``simpy.Timeout`` does, which has no room for a priority.
    """

    def after(self, delay_ns: int, rank: Rank, tie: int) -> RankedEvent:
        """Let it happen ``delay_ns`` from now."""
        self._ok = True
        self._value = None
        self.env.schedule(self, priority(rank, tie), delay_ns)  # type: ignore[arg-type]
        return self


class SimClock(trio.abc.Clock):
    """Trio's clock in virtual time, and the :class:`caltrio.timer.Timer` of a simulated device.

    Args:
        costs: what host work costs; :meth:`work` charges it.
    """

    def __init__(self, costs: Costs) -> None:
        self.env = simpy.Environment(initial_time=0)
        self.costs = costs
        self._woke = False
        self._next_deadline_s = math.inf

    # --- trio.abc.Clock ---------------------------------------------------------------------------

    def start_clock(self) -> None:
        """Nothing to start: time is where SimPy is."""

    def current_time(self) -> float:
        """SimPy's time, in seconds."""
        return self.env.now / NS_PER_S

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Real seconds to sleep: none if the deadline has passed, else until the pump acts.

        Trio asks this of its next deadline whenever no task can run, so it also tells the pump.
        """
        self._next_deadline_s = deadline
        return 0 if deadline <= self.current_time() else _NEVER_S

    # --- caltrio.timer.Timer ------------------------------------------------------------------------

    def now_ns(self) -> int:
        """SimPy's time, in ns."""
        return self.env.now  # type: ignore[return-value]  # int: every delay is one

    async def sleep_until_ns(self, time_ns: int, rank: Rank, tie: int) -> None:
        """Sleep until ``time_ns``; at that instant, wake in the order of rank and tie."""
        delay_ns = max(time_ns - self.now_ns(), 0)
        await self.park(RankedEvent(self.env).after(delay_ns, rank, tie))

    async def work(self, stage: Stage, job: JobShape) -> None:
        """Sleep what ``stage`` costs the host for ``job``."""
        cost_ns = self.costs.ns(stage, job)
        await self.park(RankedEvent(self.env).after(cost_ns, _HOST_RANK[stage], job.job_id))

    async def park(self, event: Event) -> None:
        """Block this task until ``event`` is processed."""
        task = current_task()
        callbacks = event.callbacks
        assert callbacks is not None, "the event has been processed already"

        def wake(_done: Event) -> None:
            self._woke = True
            reschedule(task)

        def abort(_raise_cancel: RaiseCancelT) -> Abort:
            if event.callbacks is not None:
                event.callbacks.remove(wake)
            return Abort.SUCCEEDED

        callbacks.append(wake)
        await wait_task_rescheduled(abort)

    # --- the pump -------------------------------------------------------------------------------------

    async def pump(self) -> None:
        """Move virtual time whenever every other task is blocked. Runs until cancelled.

        Raises :class:`VirtualDeadlock` if nothing can ever happen again.
        """
        env = self.env
        while True:
            await trio.testing.wait_all_tasks_blocked()
            self._woke = False
            while not self._woke:
                next_ns = env.peek()
                if next_ns == math.inf == self._next_deadline_s:
                    raise VirtualDeadlock(
                        "every task is blocked and nothing is scheduled; "
                        "a task waits for something that no device and no timer will bring"
                    )
                if self._next_deadline_s <= next_ns / NS_PER_S:
                    self._go_to_deadline()
                    break
                env.step()

    def _go_to_deadline(self) -> None:
        """The next thing to happen is a deadline of trio's: be there, and let trio act on it."""
        at_ns = math.ceil(self._next_deadline_s * NS_PER_S)
        if at_ns / NS_PER_S < self._next_deadline_s:
            at_ns += 1  # the product was rounded down
        RankedEvent(self.env).after(max(at_ns - self.now_ns(), 0), Rank.DEADLINE, 0)
        self.env.step()


def run_virtual(main: Callable[[SimClock], Awaitable[T]], costs: Costs) -> T:
    """``trio.run`` in virtual time: runs ``main(clock)`` and returns its result.

    Raises :class:`VirtualDeadlock`, after cancelling ``main``, if virtual time cannot move.
    """
    clock = SimClock(costs)

    async def root() -> T:
        failure: BaseException | None = None
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def pump() -> None:
                nonlocal failure
                try:
                    await clock.pump()
                except VirtualDeadlock as error:
                    failure = error
                    scope.cancel()
                    await clock.pump()  # the way out takes virtual time too

            nursery.start_soon(pump)
            try:
                with scope:
                    result = await main(clock)
            except BaseException as error:  # noqa: BLE001 - raised below, outside the nursery's grouping
                failure = failure or error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return result

    return trio.run(root, clock=clock)
