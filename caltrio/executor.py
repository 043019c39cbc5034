"""The trio shell around :class:`~caltrio.core.scheduler.Core`: one submitter, one completer, one timer.

The shell performs the I/O that ``core`` decided on and wakes the callers. It decides nothing, so
the order in which trio runs its tasks cannot change a result.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import NoReturn, cast

import trio
from attrs import frozen
from trio.lowlevel import Abort, RaiseCancelT, current_task, reschedule, wait_task_rescheduled

from .config import ExecutorConfig
from .core.job import Job, JobTimings
from .core.lifecycle import LifecycleState
from .core.request import RequestState
from .core.scheduler import Core
from .device import Device, WaitStatus
from .errors import InvalidArgument, JobCancelled, Phase, RequestError
from .events import Event, Listener
from .manifest import ModelGeneration, TaskKind
from .timer import Rank
from .timing import Stage


@frozen
class InferenceResult:
    """The result of one job: its identity and its timings (ns of the executor's clock)."""

    job_id: int
    kind: TaskKind
    timings: JobTimings


class _Parking:
    """One task at a time waits here; a signal that comes first is kept."""

    __slots__ = ("_signalled", "_task")

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._signalled = False

    def signal(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            reschedule(task)
        else:
            self._signalled = True

    async def wait(self) -> None:
        if self._signalled:
            self._signalled = False
            await trio.lowlevel.checkpoint()
            return
        self._task = current_task()

        def abort(_raise_cancel: RaiseCancelT) -> Abort:
            self._task = None
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)


def _wake(ended: Job | RequestState) -> None:
    """Let the caller go on, unless it has left meanwhile."""
    if ended.waiter is not None:
        task, ended.waiter = cast(trio.lowlevel.Task, ended.waiter), None
        reschedule(task)


class Executor:
    """Drives one device. Made by :func:`open_executor`; methods are for trio tasks.

    Attributes:
        core: the decisions, open to inspection.
        generation: the model that is loaded.
    """

    def __init__(
        self,
        device: Device,
        generation: ModelGeneration,
        config: ExecutorConfig,
        listeners: Iterable[Listener],
    ) -> None:
        device.semantics.check_in_flight(config.max_inflight)
        self.generation = generation
        self._device = device
        self._timer = device.timer
        self._listeners = tuple(listeners)
        self.core = Core(config, generation, device.semantics.engines, self._tell)
        self._submitter_wake = _Parking()
        self._timer_wake = _Parking()
        self._drain_wake = _Parking()
        self._armed_ns: int | None = None
        self._broken = False
        self._next_request_id = 0

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)

    # --- the caller's side --------------------------------------------------------------------------

    @asynccontextmanager
    async def sequence(
        self, prompt_tokens: int, output_tokens: int, *, request_id: int | None = None
    ) -> AsyncIterator[Sequence]:
        """Admit one request and hold its KV sequence for the block.

        Args:
            prompt_tokens: tokens of the prompt, at least 1.
            output_tokens: the most tokens that will be produced; 0 for a prefill only.
            request_id: unique among the open requests; given by the executor if ``None``.

        Raises:
            InvalidArgument, ResourceExhausted, Unavailable: refused.
            DeadlineExceeded: not admitted by the admission deadline.
            JobCancelled: the executor shut down meanwhile.
        """
        if request_id is None:
            request_id = self._next_request_id
        self._next_request_id = max(self._next_request_id, request_id + 1)
        request = self.core.submit_request(
            request_id, prompt_tokens, output_tokens, self._timer.now_ns()
        )
        self._act()
        try:
            await self._wait_admitted(request)
            yield Sequence(self, request)
        except RequestError as error:
            self._close(request, error)
            raise
        except BaseException:
            self._close(
                request, JobCancelled(f"request {request.request_id} was given up by its caller")
            )
            raise
        else:
            self._close(request, None)

    def _close(self, request: RequestState, error: RequestError | None) -> None:
        self.core.close_request(request, error, self._timer.now_ns())
        self._act()

    async def _wait_admitted(self, request: RequestState) -> None:
        if request.outcome is None and not request.admitted:
            request.waiter = current_task()

            def abort(_raise_cancel: RaiseCancelT) -> Abort:
                request.waiter = None
                self.core.cancel_request(request, self._timer.now_ns())
                self._act()
                return Abort.SUCCEEDED

            await wait_task_rescheduled(abort)
        if not request.admitted:
            assert request.error is not None
            raise request.error

    async def _run(self, request: RequestState, kind: TaskKind, tokens: int) -> Job:
        job = self.core.submit_step(request, kind, tokens, self._timer.now_ns())
        self._act()
        if not job.answered:
            job.waiter = current_task()

            def abort(_raise_cancel: RaiseCancelT) -> Abort:
                job.waiter = None
                self.core.cancel(job, self._timer.now_ns())
                self._act()
                return Abort.SUCCEEDED

            await wait_task_rescheduled(abort)
        if job.error is not None:
            raise job.error
        return job

    def _act(self) -> None:
        """Carry out what the last event decided: wake callers, the submitter, the timer."""
        core = self.core
        if core.to_wake:
            # Each caller goes on in its turn: what it does next, others must not race it for.
            ended, core.to_wake = core.to_wake, []
            if len(ended) == 1:
                _wake(ended[0])
            else:
                self._timer.in_turn([partial(_wake, one) for one in ended])
        if core.has_submission:
            self._submitter_wake.signal()
        next_ns = core.next_deadline_ns()
        if next_ns is not None and (self._armed_ns is None or next_ns < self._armed_ns):
            self._armed_ns = next_ns
            self._timer_wake.signal()
        if core.lifecycle is not LifecycleState.READY:
            self._drain_wake.signal()

    # --- the service tasks ----------------------------------------------------------------------------

    async def _submitter(self) -> NoReturn:
        """The only task that calls ``infer()`` (§5.1 rule 2)."""
        while True:
            job = self.core.next_submission(self._timer.now_ns())
            if job is None:
                await self._submitter_wake.wait()
                continue
            rc = await self._device.infer(job)
            self.core.submit_returned(job, rc, self._timer.now_ns())
            self._act()

    async def _completer(self) -> NoReturn:
        """The only task that calls ``wait()``; it converts the output too."""
        while True:
            done = await self._device.wait()
            job = done.job
            job.stages = done.stages
            failed = done.status is WaitStatus.DONE_CCU_EXCEPTION
            convert = self.core.wait_returned(job, done.rc, self._timer.now_ns(), exception=failed)
            self._act()
            if convert:
                await self._timer.work(Stage.POSTPROCESS, job)
                self.core.completed(job, self._timer.now_ns())
                self._act()

    async def _expirer(self) -> NoReturn:
        """Sleeps until the next deadline, or until an earlier one appears."""
        while True:
            self._armed_ns = until_ns = self.core.next_deadline_ns()
            if until_ns is None:
                await self._timer_wake.wait()
                continue
            await self._sleep_unless(self._timer_wake.wait, until_ns, 0)
            self.core.expire(self._timer.now_ns())
            self._act()

    async def _sleep_unless(
        self, earlier: Callable[[], Awaitable[None]], until_ns: int, tie: int
    ) -> None:
        """Sleep until ``until_ns``, or until ``earlier`` returns."""
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await earlier()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await self._timer.sleep_until_ns(until_ns, Rank.DEADLINE, tie)
            nursery.cancel_scope.cancel()

    async def _drain(self) -> None:
        """FI13, bounded by the grace time; then whatever is left is quarantined."""
        self.core.begin_shutdown(self._timer.now_ns())
        self._act()
        end_ns = self._timer.now_ns() + self.core.config.grace_ns
        await self._sleep_unless(self._drained, end_ns, 1)
        self.core.finish_shutdown(self._timer.now_ns())
        self._act()

    async def _drained(self) -> None:
        over = LifecycleState.FAILED
        while not (self.core.drained or self._broken or self.core.lifecycle is over):
            await self._drain_wake.wait()

    async def _serve(self, until: trio.CancelScope) -> None:
        """Run the service tasks until ``until`` is cancelled; no scope of a caller's reaches them."""
        try:
            with until:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._submitter)
                    nursery.start_soon(self._completer)
                    nursery.start_soon(self._expirer)
        finally:
            self._broken = True  # from here on nobody calls the device: do not wait for it
            self._drain_wake.signal()


class Sequence:
    """One admitted request: its KV sequence and its steps, one at a time."""

    __slots__ = ("_executor", "_last_job", "request")

    def __init__(self, executor: Executor, request: RequestState) -> None:
        self._executor = executor
        self._last_job: Job | None = None
        self.request = request

    async def _run(self, kind: TaskKind, token_count: int) -> InferenceResult:
        job = self._last_job = await self._executor._run(self.request, kind, token_count)
        return InferenceResult(job.job_id, kind, job.timings)

    async def prefill(self, token_count: int) -> InferenceResult:
        """Run ``token_count`` prompt tokens. Cancelling leaves at once; the device finishes its job.

        Raises a :class:`~caltrio.errors.RequestError` that says what became of the job.
        """
        return await self._run(TaskKind.PREFILL_IDS, token_count)

    async def decode(self) -> InferenceResult:
        """Run one token, at the position after all before it. Otherwise as :meth:`prefill`."""
        return await self._run(TaskKind.DECODE, 1)

    async def emit_token(self) -> None:
        """Sample and emit one token of the last result: charges the client's time, stamps the token."""
        if self._last_job is None:
            raise InvalidArgument("there is no result to sample from; prefill first", Phase.COMPLETE)
        executor = self._executor
        await executor._timer.work(Stage.CLIENT, self._last_job)
        executor.core.token_emitted(self.request, executor._timer.now_ns())


@asynccontextmanager
async def open_executor(
    device: Device,
    generation: ModelGeneration,
    config: ExecutorConfig,
    *,
    listeners: Iterable[Listener] = (),
) -> AsyncIterator[Executor]:
    """An executor for the block. Leaving it cancels what is queued and drains what is submitted.

    Args:
        device: what to drive.
        generation: the model that is loaded on it.
        config: limits and timeouts.
        listeners: called with each :data:`~caltrio.events.Event`, at the moment of the event.

    Raises ``ValueError`` if the in-flight limit cannot work with the device's semantics.
    """
    executor = Executor(device, generation, config, listeners)
    # A cancelled caller must not take the submitter or the completer with it: the device may own
    # memory. So they are shielded, and end only after the drain.
    services = trio.CancelScope(shield=True)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(executor._serve, services)
        try:
            yield executor
        except BaseException as error:  # noqa: BLE001 - raised again below, outside the nursery's grouping
            failure = error
        with trio.CancelScope(shield=True):
            await executor._drain()
        services.cancel()
    if failure is not None:
        raise failure
