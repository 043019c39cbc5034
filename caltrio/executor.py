"""The trio shell around :class:`~caltrio.core.scheduler.Core`: one submitter, one completer, one timer.

The shell performs the I/O that ``core`` decided on and wakes the callers. It decides nothing, so
the order in which trio runs its tasks cannot change a result.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import trio
from numpy.typing import ArrayLike, NDArray
from trio.lowlevel import Abort, RaiseCancelT, current_task, reschedule, wait_task_rescheduled

from .codes import CalrtCode, code_name
from .config import ExecutorConfig
from .core.buffers import SlotMemory
from .core.job import Job, JobTimings
from .core.lifecycle import LifecycleState
from .core.request import RequestState
from .core.scheduler import Core
from .device import Device, Ring, StageTimes, Submission, WaitStatus
from .errors import (
    InputMismatch,
    InvalidArgument,
    JobCancelled,
    Phase,
    RequestError,
    ServiceFailed,
)
from .events import Event, Listener
from .manifest import Manifest, ManifestMismatch, ModelGeneration, TaskKind, bind
from .prepare import HostMemory, UndeliverableError, host_memory
from .stepdata import StepData
from .timer import Rank, Timer
from .timing import Stage

WarmUp = Callable[["Executor"], Awaitable[str | None]]


class InferenceResult(NamedTuple):
    """The result of one job.

    Attributes:
        job_id, request_id, generation_id: what it was.
        kind: what it ran.
        timings: of the executor, ns of its clock.
        stages: of the device, where it reports them.
        logits: ``[count]`` float32, of the last position; ``None`` for a step without tokens.
            Unless the caller gave an array of its own, the next step of the sequence overwrites it.
    """

    job_id: int
    request_id: int
    generation_id: int
    kind: TaskKind
    timings: JobTimings
    stages: StageTimes | None
    logits: NDArray[np.float32] | None


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
        manifest: what the device is to hold.
    """

    def __init__(
        self,
        device: Device,
        manifest: Manifest,
        config: ExecutorConfig,
        listeners: Iterable[Listener],
        warm_up: WarmUp | None,
    ) -> None:
        device.semantics.check_in_flight(config.max_inflight)
        self.manifest = manifest
        self._device = device
        self._timer = device.timer
        self._listeners = tuple(listeners)
        self._warm_up = warm_up
        self.core = Core(
            config,
            device.semantics.engines,
            self._tell,
            device.capabilities,
            ahead=int(device.ring is not None),
        )
        self._ring = device.ring
        self._told_limit = 0
        self._handing_over = False
        self._submitter_wake = _Parking()
        self._timer_wake = _Parking()
        self._drain_wake = _Parking()
        self._recovery_wake = _Parking()
        self._ended = trio.Event()
        self._listener_failure: Exception | None = None
        self._listener_wake = _Parking()
        self._armed_ns: int | None = None
        self._broken = False
        self._next_request_id = 0
        self._next_warmup_id = -1

    @property
    def generation(self) -> ModelGeneration:
        """The model that is loaded; another one after a recovery."""
        return self.core.generation

    @property
    def timer(self) -> Timer:
        """The time that the executor and its device run in."""
        return self._timer

    async def failed(self) -> NoReturn:
        """Wait until the executor has failed for good; for the task that supervises a service.

        Raises :class:`ServiceFailed` with the exit code that the process should end with.
        """
        await self._ended.wait()
        self.check()
        await trio.sleep_forever()
        raise AssertionError

    def check(self) -> None:
        """Raise :class:`ServiceFailed` if the executor has failed."""
        health = self.core.health
        if health.lifecycle is LifecycleState.FAILED:
            raise ServiceFailed(health.why, health.exit_code)

    def _tell(self, event: Event) -> None:
        """Tell every listener. One that raises must not leave ``core`` halfway through a decision."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception as error:  # noqa: BLE001 - raised by a task of its own
                self._listener_failure = self._listener_failure or error
                self._listener_wake.signal()

    async def _heed_listeners(self) -> NoReturn:
        """A listener that raised ends the executor; here, where no decision is under way."""
        await self._listener_wake.wait()
        raise self._take_listener_failure()

    def _take_listener_failure(self) -> Exception:
        failure, self._listener_failure = self._listener_failure, None
        assert failure is not None
        return failure

    # --- the caller's side --------------------------------------------------------------------------

    @asynccontextmanager
    async def sequence(
        self,
        prompt_tokens: int,
        output_tokens: int,
        *,
        request_id: int | None = None,
        warmup: bool = False,
    ) -> AsyncIterator[Sequence]:
        """Admit one request and hold its KV sequence for the block.

        Args:
            prompt_tokens: tokens of the prompt, at least 1.
            output_tokens: the most tokens that will be produced; 0 for a prefill only.
            request_id: unique among the open requests; given by the executor if ``None``.
            warmup: part of the golden run of a generation; for :data:`WarmUp` alone.

        Raises:
            InvalidArgument, ResourceExhausted, Unavailable: refused.
            DeadlineExceeded: not admitted by the admission deadline.
            JobCancelled: the executor shut down meanwhile.
        """
        sequence = await self.admit(prompt_tokens, output_tokens, request_id=request_id, warmup=warmup)
        try:
            yield sequence
        except RequestError as error:
            sequence.close(error)
            raise
        except BaseException:
            name = f"request {sequence.request.request_id}"
            sequence.close(JobCancelled(f"{name} was given up by its caller"))
            raise
        else:
            sequence.close()

    async def admit(
        self,
        prompt_tokens: int,
        output_tokens: int,
        *,
        request_id: int | None = None,
        warmup: bool = False,
    ) -> Sequence:
        """As :meth:`sequence`, for a caller who closes the sequence himself."""
        for name, value in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
            if not isinstance(value, (int, np.integer)):
                raise InvalidArgument(f"{name} is {value!r}; give a whole number")
        prompt_tokens, output_tokens = int(prompt_tokens), int(output_tokens)
        if request_id is not None and (type(request_id) is not int or request_id < 0):
            raise ValueError(f"request_id is {request_id!r}; give a whole number from 0")
        if request_id is None:
            request_id = self._next_warmup_id if warmup else self._next_request_id
        if warmup:
            self._next_warmup_id -= 1
        else:
            self._next_request_id = max(self._next_request_id, request_id + 1)
        request = self.core.submit_request(
            request_id, prompt_tokens, output_tokens, self._timer.now_ns(), warmup=warmup
        )
        self._act()
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
        return Sequence(self, request)

    def _close(self, request: RequestState, error: RequestError | None) -> None:
        self.core.close_request(request, error, self._timer.now_ns())
        self._act()

    async def _run(
        self, request: RequestState, kind: TaskKind, tokens: int, data: StepData | None
    ) -> Job:
        job = self.core.submit_step(request, kind, tokens, self._timer.now_ns(), data)
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
        if self._ring is not None:
            self._feed(self._ring)
        elif core.has_submission:
            self._submitter_wake.signal()
        next_ns = core.next_deadline_ns()
        if next_ns is not None and (self._armed_ns is None or next_ns < self._armed_ns):
            self._armed_ns = next_ns
            self._timer_wake.signal()
        if not core.health.ready:
            self._drain_wake.signal()
            if core.reset_due:
                self._recovery_wake.signal()
            if core.lifecycle is LifecycleState.FAILED:
                self._ended.set()

    def _feed(self, ring: Ring) -> None:
        """What a ring is to know and to have: nobody waits for a job that is handed over."""
        core = self.core
        if core.to_withdraw:
            withdrawn, core.to_withdraw = core.to_withdraw, []
            for each in withdrawn:
                ring.withdraw(each)
        if core.health.limit != self._told_limit:
            self._told_limit = core.health.limit
            ring.limit(self._told_limit)
        if self._handing_over:
            return  # what follows from it: the loop below goes on
        self._handing_over = True
        try:
            while (job := core.next_submission()) is not None:
                if self._prepare(job):
                    rc = ring.hand_over(job)
                    if rc is not None:
                        self._submitted(job, rc)
        finally:
            self._handing_over = False

    def _prepare(self, job: Job) -> bool:
        """Load the inputs of ``job``; is it prepared?"""
        memory = host_memory(job)
        try:
            memory.load(self._device, job)
        except RequestError as error:
            memory.unload()
            self.core.prepare_failed(job, error, self._timer.now_ns())
            self._act()
            return False
        self.core.prepared(job, self._timer.now_ns())
        if job.queue_deadline_ns is not None:
            self._act()  # infer() may block until then
        return True

    def _submitted(self, job: Job, rc: int, *, withdrawn: bool = False) -> None:
        """``infer()`` has returned, or was not called."""
        if (rc != CalrtCode.SUCCESS or withdrawn) and not job.final:  # else a reset has its buffers
            host_memory(job).unload()
        if withdrawn:
            self.core.withdrawn(job, self._timer.now_ns())
        else:
            self.core.submit_returned(job, rc, self._timer.now_ns())
        self._act()

    # --- the service tasks ----------------------------------------------------------------------------

    async def _submitter(self) -> NoReturn:
        """The only task that prepares jobs and calls ``infer()`` (§5.1 rule 2), if there is no ring."""
        device, core = self._device, self.core
        while True:
            job = core.next_submission()
            if job is None:
                await self._submitter_wake.wait()
            elif self._prepare(job):
                self._submitted(job, await device.infer(job))
            else:
                await trio.lowlevel.checkpoint()

    async def _completer(self) -> NoReturn:
        """The only task that calls ``wait()``; it checks and converts the output too."""
        core, timer = self.core, self._timer
        while True:
            done = await self._device.wait()
            job = done.job
            if isinstance(done, Submission):
                self._submitted(job, done.rc, withdrawn=done.withdrawn)
                continue
            memory = None if job.final else host_memory(job)
            failed = done.status is WaitStatus.DONE_CCU_EXCEPTION
            if memory is not None and done.rc == CalrtCode.SUCCESS and not failed:
                memory.unload()
            if not job.final:
                job.stages = done.stages
            convert = core.wait_returned(
                job, done.rc, timer.now_ns(), exception=failed, calls=done.calls
            )
            self._act()
            if not convert:
                continue
            if not job.answered:
                await timer.work(Stage.POSTPROCESS, job)
            assert memory is not None
            # A reset may have come meanwhile; then the job has ended, and nobody reads this.
            try:
                wrong = None if job.final else memory.deliver(job)
            except UndeliverableError as error:
                core.delivery_failed(job, str(error), timer.now_ns())
                self._act()
                continue
            if wrong is None:
                core.completed(job, timer.now_ns())
            else:
                core.output_rejected(job, wrong, timer.now_ns())
            self._act()

    async def _recoverer(self) -> NoReturn:
        """Resets the device when ``core`` says so, and brings up the next generation (§9.2)."""
        core = self.core
        while True:
            await self._recovery_wake.wait()
            if not core.reset_due:
                continue
            core.reset_started()
            rc = await self._in_time(self._device.reset)
            if core.reset_returned(rc, self._timer.now_ns()):
                self._act()
                await self._bring_up(core.generation.generation_id + 1)
            self._act()

    async def _in_time(self, call: Callable[[], Awaitable[int]]) -> int | None:
        """The return code of ``call``, or ``None`` if it takes longer than the reset timeout."""
        rc: int | None = None
        failure: Exception | None = None
        came = _Parking()

        async def do() -> None:
            nonlocal rc, failure
            try:
                rc = await call()
            except Exception as error:  # noqa: BLE001 - raised below, outside the nursery's grouping
                failure = error
            came.signal()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(do)
            end_ns = self._timer.now_ns() + self.core.config.reset_timeout_ns
            await self._sleep_unless(came.wait, end_ns, 2)
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return rc

    async def _bring_up(self, generation_id: int) -> None:
        """Check, load and warm up a generation: ``CONFIGURING``, ``WARMING``, ``READY``."""
        core, device = self.core, self._device
        self._act()  # the device knows its limit before it is configured
        try:
            generation = bind(self.manifest, device.models(), generation_id)
        except ManifestMismatch as error:
            core.start_failed(str(error), self._timer.now_ns(), CalrtCode.ILLEGAL_CALBIN)
            if generation_id == 1:
                raise  # nobody uses the executor yet
            return
        rc = await self._in_time(lambda: device.configure(generation))
        if rc != CalrtCode.SUCCESS:
            what = "did not end in time" if rc is None else f"returned {code_name(rc)}"
            core.start_failed(f"the load of the model {what}", self._timer.now_ns(), rc or 0)
            return
        if core.lifecycle is not LifecycleState.CONFIGURING:
            return  # shut down meanwhile

        def make_memory(kind: TaskKind, engine: int) -> SlotMemory:
            contract = generation.submodels[kind]
            return HostMemory(contract, generation.tile_d0[kind], device.buffers(contract, engine))

        core.configured(generation, self._timer.now_ns(), device.kv, make_memory)
        self._act()
        wrong = await self._warm() if self._warm_up is not None else None
        if wrong is None:
            core.warmed(self._timer.now_ns())
        else:
            core.start_failed(f"the golden run of the warm-up failed: {wrong}", self._timer.now_ns())
        self._act()

    async def _warm(self) -> str | None:
        """What was wrong with the golden run, or ``None``; bounded as the load is."""
        warm_up, wrong = self._warm_up, None
        assert warm_up is not None

        async def run() -> int:
            nonlocal wrong
            try:
                wrong = await warm_up(self)
            except RequestError as error:
                wrong = str(error)
            return CalrtCode.SUCCESS

        if await self._in_time(run) is None:
            return "it did not end in time"
        return wrong

    async def _expirer(self) -> NoReturn:
        """Sleeps until the next deadline, or until an earlier one appears."""
        while True:
            self._armed_ns = until_ns = self.core.next_deadline_ns()
            if until_ns is None:
                await self._timer_wake.wait()
                continue
            await self._sleep_unless(self._timer_wake.wait, until_ns, 0)
            if self._timer.now_ns() < until_ns:
                continue  # an earlier one appeared: it is acted on in its turn of its instant, not now
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
                    if self._ring is None:
                        nursery.start_soon(self._submitter)
                    nursery.start_soon(self._completer)
                    nursery.start_soon(self._expirer)
                    nursery.start_soon(self._recoverer)
                    nursery.start_soon(self._heed_listeners)
        finally:
            self._broken = True  # from here on nobody calls the device: do not wait for it
            self._drain_wake.signal()


class Sequence:
    """One admitted request: its KV sequence and its steps, one at a time."""

    __slots__ = ("_executor", "_last_job", "_logits", "request")

    def __init__(self, executor: Executor, request: RequestState) -> None:
        self._executor = executor
        self._last_job: Job | None = None
        self._logits: NDArray[np.float32] | None = None
        self.request = request

    @property
    def past_len(self) -> int:
        """Tokens that its KV holds."""
        held = self._executor.core.kv.holders.get(self.request.sequence_id)
        return 0 if held is None or self.request.outcome is not None else held.committed_tokens

    async def prefill(
        self,
        tokens: int | ArrayLike,
        *,
        positions: ArrayLike | None = None,
        out: NDArray[np.float32] | None = None,
        base: int = 0,
        sequences: int = 1,
    ) -> InferenceResult:
        """Run prompt tokens. Cancelling leaves at once; the device finishes its job.

        Args:
            tokens: ids ``[n]``; embeddings ``[n, hidden]`` of floats where the model has a graph
                for them; or only how many, where nothing but timing is of interest.
            positions: ``[n]``; those that follow what the sequence holds if ``None``.
            out: ``[count]`` float32, gets the logits of vocabulary entries from ``base`` on; an
                array of the sequence's own for the whole vocabulary if ``None``.
            base: first vocabulary entry of ``out``.
            sequences: how many the tokens belong to; more than ``max_batch`` is refused.

        Raises a :class:`~caltrio.errors.RequestError` that says what became of the job.
        """
        given = self._array(tokens).copy()  # what the caller does to his own is no matter then
        if given.ndim == 0 and given.dtype.kind in "iu":
            return await self._run(TaskKind.PREFILL_IDS, int(given), None)
        embeds = given.dtype.kind == "f" and given.ndim == 2
        count = len(given) if embeds else given.size
        where = None if positions is None else self._array(positions)
        data = StepData(given, where, self._out(out, base), base, sequences)
        kind = TaskKind.PREFILL_EMBEDS if embeds else TaskKind.PREFILL_IDS
        return await self._run(kind, count, data)

    async def decode(
        self,
        token: int | None = None,
        *,
        positions: ArrayLike | None = None,
        out: NDArray[np.float32] | None = None,
        base: int = 0,
    ) -> InferenceResult:
        """Run one token at the position after all before it. Otherwise as :meth:`prefill`.

        Without ``token`` only the timing of the step is of interest.
        """
        data = None
        if token is not None:
            where = None if positions is None else self._array(positions)
            data = StepData(self._array([token]), where, self._out(out, base), base)
        return await self._run(TaskKind.DECODE, 1, data)

    def _array(self, values: ArrayLike) -> NDArray[Any]:
        """``values`` as numpy sees them; their type is checked with the step."""
        try:
            return np.asarray(values)
        except (ValueError, TypeError, OverflowError) as error:
            raise self._mismatch(f"{error}; give a row of numbers") from error

    def _mismatch(self, text: str) -> InputMismatch:
        request = self.request
        generation_id = self._executor.generation.generation_id
        facts = (Phase.PREPARE, 0, -1, request.sequence_id, generation_id)
        return InputMismatch(f"request {request.request_id}: {text}", *facts)

    def _out(self, out: NDArray[np.float32] | None, base: int) -> NDArray[np.float32]:
        """The caller's array, or the sequence's own from ``base`` on."""
        if isinstance(out, np.ndarray):
            return out
        if out is not None:
            raise self._mismatch(f"out is a {type(out).__name__}; give a numpy array of float32")
        if self._logits is None:
            vocab = self._executor.manifest.submodels[0].logits.shape[-1]
            self._logits = np.empty(vocab, np.float32)
        inside = type(base) is int and 0 <= base <= self._logits.size
        return self._logits[base:] if inside else self._logits

    async def _run(self, kind: TaskKind, token_count: int, data: StepData | None) -> InferenceResult:
        job = await self._executor._run(self.request, kind, token_count, data)
        self._last_job = job
        return InferenceResult(
            job.job_id,
            job.request_id,
            job.generation_id,
            kind,
            job.timings,
            job.stages if isinstance(job.stages, StageTimes) else None,
            None if data is None else data.out,
        )

    async def emit_token(self) -> None:
        """Sample and emit one token of the last result: charges the client's time, stamps the token."""
        if self._last_job is None:
            raise InvalidArgument("there is no result to sample from; prefill first", Phase.COMPLETE)
        executor = self._executor
        await executor._timer.work(Stage.CLIENT, self._last_job)
        executor.core.token_emitted(self.request, executor._timer.now_ns())

    def close(self, error: RequestError | None = None) -> None:
        """The caller is done: KV comes back once the device is done too. ``error``: why, if early."""
        self._executor._close(self.request, error)


@asynccontextmanager
async def open_executor(
    device: Device,
    manifest: Manifest,
    config: ExecutorConfig,
    *,
    listeners: Iterable[Listener] = (),
    warm_up: WarmUp | None = None,
) -> AsyncIterator[Executor]:
    """An executor for the block. Leaving it cancels what is queued and drains what is submitted.

    Args:
        device: what to drive.
        manifest: what it is to hold; checked before anything is loaded.
        config: limits and timeouts.
        listeners: called with each :data:`~caltrio.events.Event`, at the moment of the event.
        warm_up: the golden run that each generation must pass before traffic, as
            :meth:`caltrio.golden.Golden.warm_up`; returns what was wrong. ``None`` runs none.

    Raises:
        ManifestMismatch: the device holds something else.
        ServiceFailed: the model cannot be loaded, or its golden run was wrong.
        ValueError: the in-flight limit cannot work with the device's semantics.
    """
    executor = Executor(device, manifest, config, listeners, warm_up)
    # A cancelled caller must not take the submitter or the completer with it: the device may own
    # memory. So they are shielded, and end only after the drain.
    services = trio.CancelScope(shield=True)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(executor._serve, services)
        try:
            await executor._bring_up(1)
            executor.check()
            yield executor
        except BaseException as error:  # noqa: BLE001 - raised again below, outside the nursery's grouping
            failure = error
        with trio.CancelScope(shield=True):
            await executor._drain()
        services.cancel()
        if executor._listener_failure is not None:
            failure = failure or executor._take_listener_failure()
    if failure is not None:
        raise failure
