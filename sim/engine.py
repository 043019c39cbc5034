"""The device's stages under one :class:`~caltrio.semantics.EngineSemantics`, on SimPy's events.

A job is one flow of events: slot -> H2D -> compute stages -> D2H -> interrupt. The units it goes
through (:class:`Channel`, :class:`SharedUnit`) serve turns; a turn's end is one ranked SimPy event.
At a stage end the unit takes its next turn first, and then the job whose turn it was goes on:
whoever already queues is before whoever joins at that instant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from itertools import pairwise

import simpy
from attrs import define, field
from simpy.events import Event

from caltrio.core.job import EngineSlot, Job
from caltrio.costs import Costs
from caltrio.device import StageTimes
from caltrio.semantics import (
    PERMILLE,
    CompletionSignal,
    Dma,
    DmaOrder,
    EngineSemantics,
    SlotRelease,
)
from caltrio.timer import Rank
from caltrio.timing import Stage

from .clock import RankedEvent


@define(slots=True, eq=False)
class Turn:
    """One job's use of one unit, for ``duration_ns`` of undisturbed service.

    ``on_start`` is called as service begins, ``end`` happens as it ends.
    """

    job_id: int
    duration_ns: int
    end: RankedEvent
    on_start: Callable[[], None] | None = None
    start_ns: int = -1
    joined: bool = False
    ready: bool = False
    remaining: int = field(default=0, init=False)  # thousandths of a ns; SharedUnit's


class Channel:
    """Serves one turn at a time, in the order in which turns joined.

    A turn that has joined but is not ready holds up those behind it (``dma_order = "issue"``).
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._queue: deque[Turn] = deque()
        self._busy = False

    def join(self, turn: Turn) -> None:
        """Take a place in the queue; the turn is served once it is ready too."""
        turn.joined = True
        self._queue.append(turn)

    def serve(self, turn: Turn) -> Event:
        """The turn is ready; returns the event of its end."""
        if not turn.joined:
            self.join(turn)
        turn.ready = True
        assert turn.end.callbacks is not None
        turn.end.callbacks.append(self._ended)
        self._next()
        return turn.end

    def _next(self) -> None:
        if self._busy or not self._queue or not self._queue[0].ready:
            return
        turn = self._queue.popleft()
        self._busy = True
        turn.start_ns = self._env.now  # type: ignore[assignment]
        if turn.on_start is not None:
            turn.on_start()
        turn.end.after(turn.duration_ns, Rank.STAGE_END, turn.job_id)

    def _ended(self, _event: Event) -> None:
        self._busy = False
        self._next()


class SharedUnit:
    """Serves up to ``len(speeds)`` turns at once; with k of them each runs at ``speeds[k - 1]``.

    Processor sharing in integers: work remains in thousandths of a nanosecond, speeds are
    thousandths, and an end is rounded up to a whole nanosecond. Turns beyond the last speed queue.
    """

    def __init__(self, env: simpy.Environment, speeds_permille: tuple[int, ...]) -> None:
        self._env = env
        self._speeds = speeds_permille
        self._queue: deque[Turn] = deque()
        self._running: list[Turn] = []
        self._since_ns = 0
        self._version = 0

    def serve(self, turn: Turn) -> Event:
        """Start or queue the turn; returns the event of its end."""
        self._progress()
        turn.remaining = turn.duration_ns * PERMILLE
        self._queue.append(turn)
        self._refill()
        return turn.end

    def _progress(self) -> None:
        """Account for the work done since the number of running turns last changed."""
        now_ns: int = self._env.now  # type: ignore[assignment]
        if self._running:
            done = (now_ns - self._since_ns) * self._speeds[len(self._running) - 1]
            for turn in self._running:
                turn.remaining -= done
        self._since_ns = now_ns

    def _refill(self) -> None:
        while self._queue and len(self._running) < len(self._speeds):
            turn = self._queue.popleft()
            turn.start_ns = self._env.now  # type: ignore[assignment]
            self._running.append(turn)
        self._version += 1  # any end foreseen before now is void
        if not self._running:
            return
        first = min(self._running, key=lambda turn: (turn.remaining, turn.job_id))
        speed = self._speeds[len(self._running) - 1]
        after_ns = max(-(-first.remaining // speed), 0)
        version = self._version
        foreseen = RankedEvent(self._env).after(after_ns, Rank.STAGE_END, first.job_id)
        assert foreseen.callbacks is not None
        foreseen.callbacks.append(lambda _event: self._ends(first, version))

    def _ends(self, turn: Turn, version: int) -> None:
        if version != self._version:
            return
        self._progress()
        self._running.remove(turn)
        self._refill()
        # SimPy settles this before the next ranked event of this instant.
        turn.end.succeed()


Unit = Channel | SharedUnit


def split_permille(duration_ns: int, parts_permille: tuple[int, ...]) -> list[int]:
    """``duration_ns`` in whole nanoseconds over parts that sum to 1000; nothing is lost."""
    cuts = [0]
    total = 0
    for part in parts_permille:
        total += part
        cuts.append(duration_ns * total // PERMILLE)
    return [end - start for start, end in pairwise(cuts)]


class _Flow:
    """Goes through a generator of events, from now on.

    As ``simpy.Process``, less the two events of its own that one has: nobody waits for a job's end.
    """

    __slots__ = ("_steps",)

    def __init__(self, steps: Generator[Event, None, None]) -> None:
        self._steps = steps
        self._next(None)

    def _next(self, _event: Event | None) -> None:
        for event in self._steps:
            assert event.callbacks is not None, "the event has been processed already"
            event.callbacks.append(self._next)
            return


class Engine:
    """The units of one device, and the jobs on them.

    Args:
        env: SimPy's environment; time is integer nanoseconds.
        semantics: the hypothesis.
        costs: the durations.
        on_finished: called when ``Wait()`` may return for a job.
        on_read, on_written: called at the end of a job's H2D and of its D2H.
    """

    def __init__(
        self,
        env: simpy.Environment,
        semantics: EngineSemantics,
        costs: Costs,
        on_finished: Callable[[Job, StageTimes], None],
        on_read: Callable[[Job], None] | None = None,
        on_written: Callable[[Job], None] | None = None,
    ) -> None:
        self._env = env
        self._semantics = semantics
        self._costs = costs
        self._on_finished = on_finished
        self._on_read, self._on_written = on_read, on_written
        self._stopped = False
        self._h2d = Channel(env)
        self._d2h = self._h2d if semantics.dma is Dma.HALF_DUPLEX else Channel(env)
        speeds = semantics.sharing_permille
        self._dies: list[Unit] = [
            Channel(env) if len(speeds) == 1 else SharedUnit(env, speeds)
            for _ in semantics.compute_stages
        ]
        self._parts_permille = semantics.stage_permille
        self._whole = None if semantics.overlap else simpy.Resource(env)
        self._free = [True] * semantics.engines
        self._slot_wanted: tuple[int, RankedEvent, int] | None = None
        self._computes_queued = 0
        self._held_d2h: list[Event] = []

    # --- engine slots -------------------------------------------------------------------------------

    def free_slot(self, engine: int) -> int | None:
        """The slot that a job for ``engine`` can take now; any free one for ``AUTO``."""
        if engine != EngineSlot.AUTO:
            return engine if self._free[engine] else None
        return next((slot for slot, free in enumerate(self._free) if free), None)

    def slot_freed(self, engine: int, job_id: int) -> Event:
        """An event that happens once :meth:`free_slot` would find one. One submitter, one waiter."""
        event = RankedEvent(self._env)
        self._slot_wanted = (engine, event, job_id)
        return event

    def release_slot(self, slot: int) -> None:
        """The slot takes the next job."""
        self._free[slot] = True
        if self._slot_wanted is not None:
            wanted, event, job_id = self._slot_wanted
            if self.free_slot(wanted) is not None:
                self._slot_wanted = None
                event.after(0, Rank.SUBMIT_RETURNED, job_id)

    def stop(self) -> None:
        """A reset: jobs end where they are, and a submitter that waits for a slot goes on."""
        self._stopped = True
        if self._slot_wanted is not None:
            _, event, job_id = self._slot_wanted
            self._slot_wanted = None
            event.after(0, Rank.SUBMIT_RETURNED, job_id)

    # --- jobs -----------------------------------------------------------------------------------------

    def start(self, job: Job, slot: int) -> None:
        """``job`` takes ``slot``, and is on its way."""
        self._free[slot] = False
        _Flow(self._run(job, slot))

    def _turn(self, job: Job, duration_ns: int, on_start: Callable[[], None] | None = None) -> Turn:
        return Turn(job.job_id, duration_ns, RankedEvent(self._env), on_start)

    def _run(self, job: Job, slot: int) -> Generator[Event, None, None]:
        semantics, costs, env = self._semantics, self._costs, self._env
        times = StageTimes(slot)
        h2d = self._turn(job, costs.ns(Stage.H2D, job), self._compute_queued)
        d2h = self._turn(job, costs.ns(Stage.D2H, job))
        if semantics.dma_order is DmaOrder.ISSUE:
            self._h2d.join(h2d)
            self._d2h.join(d2h)
        claim = None
        if self._whole is not None:
            claim = self._whole.request()
            yield claim

        yield self._h2d.serve(h2d)
        times.h2d_start_ns, times.h2d_end_ns = h2d.start_ns, env.now  # type: ignore[assignment]
        if self._on_read is not None and not self._stopped:
            self._on_read(job)
        if semantics.slot_release is SlotRelease.H2D:
            self.release_slot(slot)

        times.die_start_ns, times.die_end_ns = [], []
        parts = split_permille(costs.ns(Stage.COMPUTE, job), self._parts_permille)
        for die, part_ns in zip(self._dies, parts, strict=True):
            turn = self._turn(job, part_ns)
            yield die.serve(turn)
            times.die_start_ns.append(turn.start_ns)
            times.die_end_ns.append(env.now)  # type: ignore[arg-type]
        self._computes_queued -= 1
        if semantics.slot_release is SlotRelease.COMPUTE:
            self.release_slot(slot)

        if semantics.completion_signal is CompletionSignal.COMPUTE_IDLE:
            yield self._computes_drained()
        yield self._d2h.serve(d2h)
        times.d2h_start_ns, times.d2h_end_ns = d2h.start_ns, env.now  # type: ignore[assignment]
        if self._on_written is not None and not self._stopped:
            self._on_written(job)
        if self._whole is not None and claim is not None:
            self._whole.release(claim)
        if semantics.slot_release is SlotRelease.D2H:
            self.release_slot(slot)

        interrupt = RankedEvent(env)
        yield interrupt.after(costs.ns(Stage.INTERRUPT, job), Rank.WAIT_RETURNED, job.job_id)
        if not self._stopped:
            self._on_finished(job, times)

    def _compute_queued(self) -> None:
        self._computes_queued += 1

    def _computes_drained(self) -> Event:
        """The signal that lets D2H start; once all computes are done, in the order of their ends."""
        drained = Event(self._env)
        self._held_d2h.append(drained)
        if self._computes_queued == 0:
            held, self._held_d2h = self._held_d2h, []
            for signal in held:
                signal.succeed()
        return drained
