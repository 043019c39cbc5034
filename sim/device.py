"""The simulated device: CalRT's calls on the SimPy engine, in virtual time."""

from __future__ import annotations

from collections import deque

from caltrio.core.job import Job
from caltrio.device import Completion, DeviceKind, StageTimes, WaitStatus
from caltrio.errors import CalrtCode
from caltrio.semantics import CompletionOrder, EngineSemantics, SlotRelease, SubmitWhenFull
from caltrio.timer import Rank
from caltrio.timing import Stage

from .clock import RankedEvent, SimClock
from .engine import Engine

KIND = DeviceKind(
    "sim",
    "SimPy timing model of the card, under any hypothesis about its engines",
    "virtual",
    lambda: None,
)


class SimDevice:
    """A :class:`caltrio.device.Device` in virtual time.

    Args:
        clock: virtual time, with what the stages cost.
        semantics: the hypothesis about the vendor's engines.
    """

    def __init__(self, clock: SimClock, semantics: EngineSemantics) -> None:
        self.timer = clock
        self.semantics = semantics
        self._engine = Engine(clock.env, semantics, clock.costs, self._finished)
        self._issued: deque[Job] = deque()  # submitted, Wait() not yet returned; in order
        self._finished_jobs: dict[int, tuple[Job, StageTimes]] = {}  # Wait() may return; in order
        self._waiting: RankedEvent | None = None  # the completer, blocked in Wait()
        self._returned: tuple[Job, StageTimes] | None = None

    async def infer(self, job: Job) -> int:
        """As the protocol says; the submitter is busy for the profile's ``submit`` time."""
        await self.timer.work(Stage.SUBMIT, job)
        slot = self._engine.free_slot(job.engine)
        if slot is None:
            if self.semantics.submit_when_full is SubmitWhenFull.BUSY:
                return CalrtCode.BUSY
            await self.timer.park(self._engine.slot_freed(job.engine, job.job_id))
            slot = self._engine.free_slot(job.engine)
            assert slot is not None, "the only submitter is the only one to take slots"
        self._issued.append(job)
        self._engine.start(job, slot)
        return CalrtCode.SUCCESS

    async def wait(self) -> Completion:
        """As the protocol says; the order is that of ``completion_order``."""
        self._waiting = RankedEvent(self.timer.env)
        parked = self._waiting
        self._offer()
        await self.timer.park(parked)
        assert self._returned is not None
        job, times = self._returned
        return Completion(job, CalrtCode.SUCCESS, WaitStatus.DONE, times)

    def _finished(self, job: Job, times: StageTimes) -> None:
        self._finished_jobs[job.job_id] = (job, times)
        self._offer()

    def _offer(self) -> None:
        """Let ``Wait()`` return, if somebody is in it and a job may be returned."""
        if self._waiting is None or not self._finished_jobs:
            return
        if self.semantics.completion_order is CompletionOrder.IN_ORDER:
            job = self._issued[0]
            if job.job_id not in self._finished_jobs:
                return
        else:
            job = next(iter(self._finished_jobs.values()))[0]
        self._returned = job, times = self._finished_jobs.pop(job.job_id)
        self._issued.remove(job)
        event, self._waiting = self._waiting, None
        if self.semantics.slot_release is SlotRelease.WAIT:
            assert event.callbacks is not None
            event.callbacks.append(lambda _event: self._engine.release_slot(times.engine))
        event.after(0, Rank.WAIT_RETURNED, job.job_id)
