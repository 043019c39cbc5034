"""Trio's clock on SimPy time, and the executor's timer in virtual time.

Before trio blocks, that is once no task can run, it asks its clock how long it may sleep. This one
answers by stepping through SimPy's events until one of them wakes a task, or until trio's next
deadline: one wake-up per quiescence. Everything timed is a SimPy event with a rank (see
:class:`caltrio.timer.Rank`), so that ties are broken by the model and never by trio.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import simpy
import trio
from simpy.events import Event
from trio.lowlevel import Abort, RaiseCancelT, Task, current_task, reschedule, wait_task_rescheduled

from caltrio.costs import Costs
from caltrio.errors import CaltrioError
from caltrio.timer import Rank
from caltrio.timing import JobShape, Stage
from caltrio.units import NS_PER_S

T = TypeVar("T")

_NEVER_S = 1e9  # real seconds that trio may sleep if only the world outside can wake a task
_TIE_BITS = 48


class VirtualDeadlock(CaltrioError):
    """Every task is blocked and nothing is scheduled: virtual time can never move again."""


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
        # Above SimPy's own priorities 0 and 1, which settle at once.
        priority = (rank + 1 << _TIE_BITS) | tie
        self.env.schedule(self, priority, delay_ns)  # type: ignore[arg-type]
        return self


class SimClock(trio.abc.Clock):
    """Trio's clock in virtual time, and the :class:`caltrio.timer.Timer` of a simulated device.

    Args:
        costs: what host work costs; :meth:`work` charges it.
        outside: other threads hand in work: with nothing scheduled, wait for them in real time.
    """

    def __init__(self, costs: Costs, *, outside: bool = False) -> None:
        self.env = simpy.Environment(initial_time=0)
        self.costs = costs
        self._outside = outside
        self._woke = False
        self._moving = True
        self._failure: Exception | None = None
        self._watcher: Task | None = None

    # --- trio.abc.Clock ---------------------------------------------------------------------------

    def start_clock(self) -> None:
        """Nothing to start: time is where SimPy is."""

    def current_time(self) -> float:
        """SimPy's time, in seconds."""
        return self.env.now / NS_PER_S

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Move virtual time until a task can run; then trio need not sleep at all.

        Trio calls this with its next deadline, when no task is runnable and it is about to block.
        """
        if not self._moving:
            return _NEVER_S
        try:
            return 0.0 if self._advance(deadline) else _NEVER_S
        except Exception as error:  # a defect of the model: hand it to a task, trio cannot take it
            if self._failure is not None:
                raise
            self._fail(error)
            return 0.0

    def _advance(self, deadline_s: float) -> bool:
        """Step to the next wake-up or to trio's deadline; false if there is nothing to wait for."""
        env = self.env
        self._woke = False
        while not self._woke:
            next_ns = env.peek()
            if next_ns == math.inf == deadline_s:
                if self._failure is not None or self._outside:
                    return False
                self._fail(
                    VirtualDeadlock(
                        "every task is blocked and nothing is scheduled; "
                        "a task waits for something that no device and no timer will bring"
                    )
                )
                return True
            if deadline_s <= next_ns / NS_PER_S:
                self._go_to(deadline_s)
                return True
            env.step()
        return True

    def _go_to(self, deadline_s: float) -> None:
        """The next thing to happen is a deadline of trio's: be there, and let trio act on it."""
        at_ns = math.ceil(deadline_s * NS_PER_S)
        if at_ns / NS_PER_S < deadline_s:
            at_ns += 1  # the product was rounded down
        if at_ns > self.now_ns():
            RankedEvent(self.env).after(at_ns - self.now_ns(), Rank.DEADLINE, 0)
            self.env.step()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        if self._watcher is not None:
            reschedule(self._watcher)

    async def failure(self) -> Exception:
        """Wait until virtual time cannot move on, and return why."""
        self._watcher = current_task()

        def abort(_raise_cancel: RaiseCancelT) -> Abort:
            self._watcher = None
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)
        assert self._failure is not None
        return self._failure

    def stop(self) -> None:
        """Leave virtual time where it is."""
        self._moving = False

    # --- caltrio.timer.Timer ------------------------------------------------------------------------

    def now_ns(self) -> int:
        """SimPy's time, in ns."""
        return self.env.now  # type: ignore[return-value]  # int: every delay is one

    async def sleep_until_ns(self, time_ns: int, rank: Rank, tie: int) -> None:
        """Sleep until ``time_ns``; at that instant, wake in the order of rank and tie."""
        delay_ns = max(time_ns - self.now_ns(), 0)
        await self.park(RankedEvent(self.env).after(delay_ns, rank, tie))

    def in_turn(self, actions: Sequence[Callable[[], None]]) -> None:
        """The first now; each further one at this instant, once all tasks have come to rest again."""

        def after_rest(action: Callable[[], None]) -> Callable[[Event], None]:
            def act(_event: Event) -> None:
                self._woke = True
                action()

            return act

        actions[0]()
        for action in actions[1:]:
            turn = Event(self.env)
            assert turn.callbacks is not None
            turn.callbacks.append(after_rest(action))
            turn.succeed()  # SimPy settles these in order, before anything ranked

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


def run_virtual(main: Callable[[SimClock], Awaitable[T]], costs: Costs, *, outside: bool = False) -> T:
    """``trio.run`` in virtual time: runs ``main(clock)`` and returns its result.

    With ``outside``, other threads hand in work, and virtual time stands still until they do.
    Raises :class:`VirtualDeadlock`, after cancelling ``main``, if virtual time cannot move.
    """
    clock = SimClock(costs, outside=outside)

    async def root() -> T:
        failure: BaseException | None = None
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def watch() -> None:
                nonlocal failure
                failure = await clock.failure()
                scope.cancel()

            nursery.start_soon(watch)
            try:
                with scope:
                    result = await main(clock)
            except BaseException as error:  # noqa: BLE001 - raised below, outside the nursery
                failure = failure or error
            clock.stop()
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return result

    return trio.run(root, clock=clock)
