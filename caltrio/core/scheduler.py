"""The executor's decisions, in one place: :class:`Core`.

Each event is a method that takes ``now_ns`` and decides everything that follows from it at that
moment, in FIFO order. The shell then performs the I/O and wakes the callers, in whatever order its
event loop likes: nothing is left to decide.

Permits and engines: a job takes the in-flight permit when it is handed to the submitter and gives
it back in :meth:`Core._release_permit`, which is the only place, whatever became of the job.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from ..config import ExecutorConfig
from ..errors import (
    CalrtCode,
    DeadlineExceeded,
    DeviceFailed,
    InvalidArgument,
    JobCancelled,
    Phase,
    RequestError,
    ResourceExhausted,
    SequenceUnknown,
    Unavailable,
)
from ..events import BufferQuarantined, Event, JobEnded, LifecycleChanged, RequestEnded
from ..manifest import ModelGeneration, TaskKind
from .buffers import BufferPool
from .deadlines import Deadlines
from .job import EngineSlot, Job, JobState, JobTimings
from .kv import KvLedger
from .lifecycle import LifecycleState, check_lifecycle
from .request import Outcome, RequestState

# Codes after which the device may still be trusted (§8: transient). Any other one ends the service.
_TRANSIENT = frozenset({CalrtCode.TIMEOUT, CalrtCode.BUSY})


class Core:
    """The state of one executor.

    Args:
        config: the limits.
        generation: the model; its contracts bound every request.
        engines: engine slots of the device.
        emit: told every fact, at the moment it becomes true.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        generation: ModelGeneration,
        engines: int,
        emit: Callable[[Event], None],
    ) -> None:
        self.config = config
        self.generation = generation
        self.lifecycle = LifecycleState.READY
        self.why = "started"
        self._emit = emit
        # One in flight: the runtime chooses the engine. More: each job is bound to one (§6.4).
        self._engines = (EngineSlot.AUTO,) if config.max_inflight == 1 else tuple(range(engines))
        per_engine = -(-config.max_inflight // len(self._engines))
        self.pool = BufferPool(
            generation.generation_id,
            generation.submodels,
            self._engines,
            per_engine + 1,  # one more than can be in flight: the one whose output is converted
            lambda slot, reason: self._emit(BufferQuarantined(slot, reason)),
        )
        self.kv = KvLedger(config.kv_capacity_tokens)
        self._free_sequences = list(range(config.max_active_sequences))
        self._load = dict.fromkeys(self._engines, 0)
        self.waiting: deque[RequestState] = deque()  # for admission
        self.open: dict[int, RequestState] = {}  # not ended, by request id
        self._ready: deque[Job] = deque()  # for the submitter and a permit
        self._staged: Job | None = None  # handed over, infer() not yet called
        self._submitting: Job | None = None  # inside infer()
        self.in_flight: dict[int, Job] = {}  # hold a permit, by job id
        self._completing = 0
        self._deadlines = Deadlines()
        self._next_job_id = 0
        self.to_wake: list[RequestState | Job] = []  # the shell empties this after each event

    # --- requests -----------------------------------------------------------------------------

    def submit_request(
        self, request_id: int, prompt_tokens: int, output_tokens: int, now_ns: int
    ) -> RequestState:
        """A request enters: admitted, waiting, or refused (then its ``error`` says why).

        ``output_tokens`` is the most it may produce; 0 asks for a prefill only.
        Raises ``ValueError`` for a request id that is in use: a defect of the caller's.
        """
        if request_id in self.open:
            raise ValueError(f"request id {request_id} is in use; give each request its own")
        # The last token produced is never fed back, so it takes no position.
        kv_tokens = prompt_tokens + max(output_tokens - 1, 0)
        request = RequestState(request_id, prompt_tokens, output_tokens, kv_tokens, now_ns)
        self.open[request_id] = request
        error = self._refusal(request)
        if error is not None:
            request.error = error
            self._end_request(request, Outcome.REFUSED, now_ns)
            return request
        if self.config.admission_timeout_ns is not None:
            request.admission_deadline_ns = now_ns + self.config.admission_timeout_ns
            self._deadlines.add(
                request.admission_deadline_ns,
                lambda: not request.admitted and request.outcome is None,
                lambda now: self._leave_queue(
                    request,
                    DeadlineExceeded(
                        f"request {request_id} waited {now - request.arrival_ns} ns for KV; "
                        "lower the load or raise admission_timeout"
                    ),
                    Outcome.EXPIRED,
                    now,
                ),
            )
        self.waiting.append(request)
        self._admit(now_ns)
        return request

    def _refusal(self, request: RequestState) -> RequestError | None:
        name, limit = f"request {request.request_id}", self.generation.max_seq
        if self.lifecycle is not LifecycleState.READY:
            return self._unavailable()
        if request.prompt_tokens < 1 or request.output_tokens < 0:
            return InvalidArgument(
                f"{name} has {request.prompt_tokens} prompt and {request.output_tokens} output "
                "tokens; it needs at least 1 and 0"
            )
        if request.kv_tokens > limit:
            return InvalidArgument(
                f"{name} needs {request.kv_tokens} positions ({request.prompt_tokens} prompt, "
                f"{request.output_tokens} output), above max_seq {limit}; shorten it"
            )
        if request.kv_tokens > self.kv.capacity_tokens:
            return ResourceExhausted(
                f"{name} needs {request.kv_tokens} tokens of KV, above the card's "
                f"{self.kv.capacity_tokens}; shorten it"
            )
        if (self.waiting or not self._fits(request)) and len(self.waiting) >= self.config.max_queue:
            return ResourceExhausted(
                f"{name} found the admission queue full ({len(self.waiting)} waiting); retry later"
            )
        return None

    def _fits(self, request: RequestState) -> bool:
        return bool(self._free_sequences) and self.kv.fits(request.kv_tokens)

    def _admit(self, now_ns: int) -> None:
        """Admit from the head of the queue while it fits; a later one never overtakes."""
        while self.waiting and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            request.sequence_id = heapq.heappop(self._free_sequences)
            request.admitted_ns = now_ns
            self.kv.reserve(request.sequence_id, request.kv_tokens)
            self.to_wake.append(request)

    def cancel_request(self, request: RequestState, now_ns: int) -> None:
        """The caller gives up waiting for admission."""
        if not request.admitted and request.outcome is None:
            self._leave_queue(
                request,
                JobCancelled(f"request {request.request_id} was given up while it waited"),
                Outcome.CANCELLED,
                now_ns,
            )

    def _leave_queue(
        self, request: RequestState, error: RequestError, outcome: Outcome, now_ns: int
    ) -> None:
        self.waiting.remove(request)
        request.error = error
        self._end_request(request, outcome, now_ns)
        self._admit(now_ns)  # it may have stood before a smaller one

    def token_emitted(self, request: RequestState, now_ns: int) -> None:
        """The client has sampled and emitted one token of ``request``."""
        request.tokens_out += 1
        request.last_token_ns = now_ns
        if request.first_token_ns is None:
            request.first_token_ns = now_ns

    def close_request(self, request: RequestState, error: RequestError | None, now_ns: int) -> None:
        """The caller is done with an admitted request; it ends once the device is done with it.

        ``error`` is why the caller leaves before the end, if it does.
        """
        if request.outcome is not None or request.closing:
            return
        request.closing = True
        self._note(request, error)
        if request.job is None:
            self._end_admitted(request, now_ns)

    def _end_admitted(self, request: RequestState, now_ns: int) -> None:
        error = request.error
        if error is None:
            outcome = Outcome.COMPLETED
        elif isinstance(error, DeadlineExceeded):
            outcome = Outcome.EXPIRED
        elif isinstance(error, JobCancelled):
            outcome = Outcome.CANCELLED
        else:
            outcome = Outcome.FAILED
        self.kv.release(request.sequence_id)
        heapq.heappush(self._free_sequences, request.sequence_id)
        self._end_request(request, outcome, now_ns)
        self._admit(now_ns)

    def _end_request(self, request: RequestState, outcome: Outcome, now_ns: int) -> None:
        request.outcome = outcome
        request.ended_ns = now_ns
        del self.open[request.request_id]
        self.to_wake.append(request)
        self._emit(RequestEnded(now_ns, request))

    # --- jobs, up to the device -----------------------------------------------------------------

    def submit_step(self, request: RequestState, kind: TaskKind, token_count: int, now_ns: int) -> Job:
        """The next job of an admitted request. Raises a typed error if it may not run (§6.3)."""
        where = f"request {request.request_id}"
        sequence_id, generation_id = request.sequence_id, self.generation.generation_id
        if self.lifecycle is not LifecycleState.READY:
            raise self._unavailable()
        if not request.admitted or request.closing or request.outcome is not None:
            raise InvalidArgument(f"{where} has no open sequence; open one", Phase.PREPARE)
        if request.job is not None:
            raise InvalidArgument(
                f"{where} has job {request.job.job_id} under way; await it first", Phase.PREPARE
            )
        held = self.kv.holders[sequence_id]
        if held.unknown:
            raise SequenceUnknown(
                f"{where} lost its KV to a failed job; close it and start anew",
                Phase.PREPARE, 0, -1, sequence_id, generation_id,
            )  # fmt: skip
        past_len = held.committed_tokens
        if token_count < 1 or (kind is TaskKind.DECODE and past_len == 0):
            raise InvalidArgument(
                f"{where}: {kind.value} of {token_count} tokens at past length {past_len}; "
                "prefill at least one token first",
                Phase.PREPARE, 0, -1, sequence_id, generation_id,
            )  # fmt: skip
        limit = min(self.generation.max_seq, held.reserved_tokens)
        if past_len + token_count > limit:
            raise InvalidArgument(
                f"{where}: past length {past_len} + {token_count} tokens is above the {limit} "
                "that it reserved; ask for more output tokens at its start",
                Phase.PREPARE, 0, -1, sequence_id, generation_id,
            )  # fmt: skip
        job = Job(
            self._next_job_id, request, request.request_id, sequence_id, generation_id,
            kind, token_count, past_len, request.jobs, JobTimings(now_ns),
        )  # fmt: skip
        self._next_job_id += 1
        request.jobs += 1
        request.job = job
        job.to(JobState.ADMITTED)
        job.timings.admitted_ns = now_ns
        if self.config.admission_timeout_ns is not None:
            # The first step inherits what its request has left; a later one enters anew.
            entered = request.arrival_ns if job.step == 0 else now_ns
            job.admission_deadline_ns = entered + self.config.admission_timeout_ns
            self._watch(
                job, job.admission_deadline_ns, Phase.ADMISSION,
                lambda: job.state is JobState.ADMITTED,
            )  # fmt: skip
        self._ready.append(job)
        self._stage(now_ns)
        return job

    def _watch(self, job: Job, at_ns: int, phase: str, due: Callable[[], bool]) -> None:
        """Fail ``job`` to its caller at ``at_ns`` if ``due()`` still holds then."""

        def act(now_ns: int) -> None:
            error = DeadlineExceeded(
                f"the {phase} deadline of job {job.job_id} passed; "
                f"lower the load or raise the {phase} timeout",
                phase, 0, job.job_id, job.sequence_id, job.generation_id,
            )  # fmt: skip
            self._give_up(job, error, now_ns)
            if phase == Phase.EXECUTE:
                self._distrust(f"job {job.job_id} passed its execution deadline", now_ns)

        self._deadlines.add(at_ns, due, act)

    def _stage(self, now_ns: int) -> None:
        """Hand the oldest ready job to the submitter, if that is idle and a permit is free."""
        if (
            not self._ready
            or self._staged is not None
            or self._submitting is not None
            or len(self.in_flight) >= self.config.max_inflight
            or self.lifecycle is not LifecycleState.READY
        ):
            return
        job = self._ready[0]
        free = [e for e in self._engines if self.pool.available(job.kind, e)]
        if not free:
            if not any(self.pool.usable(job.kind, e) for e in self._engines):
                self._distrust(f"every {job.kind.value} buffer is quarantined", now_ns)
            return  # a lease comes back with the delivery of the job that holds it
        self._ready.popleft()
        job.engine = min(free, key=self._load.__getitem__)
        job.lease = self.pool.acquire(job.kind, job.engine)
        job.to(JobState.PREPARING)
        self._load[job.engine] += 1
        self.in_flight[job.job_id] = job
        job.holds_permit = True
        job.to(JobState.QUEUED)
        job.timings.queued_ns = now_ns
        self._staged = job
        if self.config.queue_timeout_ns is not None:
            job.queue_deadline_ns = now_ns + self.config.queue_timeout_ns
            self._watch(
                job, job.queue_deadline_ns, "queue",
                lambda: job.timings.submitted_ns is None and not job.answered,
            )  # fmt: skip

    def _release_permit(self, job: Job) -> None:
        """The one place where an in-flight permit comes back."""
        del self.in_flight[job.job_id]
        job.holds_permit = False
        self._load[job.engine] -= 1

    @property
    def has_submission(self) -> bool:
        """Is a job handed over, for which ``infer()`` is to be called?"""
        return self._staged is not None

    def next_submission(self, now_ns: int) -> Job | None:
        """The job to call ``infer()`` with now; the device may own its buffers from here on."""
        job, self._staged = self._staged, None
        if job is not None:
            assert job.lease is not None
            job.lease.mark_submitted()
            job.timings.infer_ns = now_ns
            self._submitting = job
        return job

    def submit_returned(self, job: Job, rc: int, now_ns: int) -> None:
        """``infer()`` has returned ``rc`` for ``job``."""
        self._submitting = None
        if rc == CalrtCode.SUCCESS:
            job.timings.submitted_ns = now_ns
            if job.state is JobState.QUEUED:
                job.to(JobState.SUBMITTED)
            if self.config.execution_timeout_ns is not None:
                job.execution_deadline_ns = now_ns + self.config.execution_timeout_ns
                self._watch(
                    job, job.execution_deadline_ns, Phase.EXECUTE,
                    # Also when nobody waits any more: a device that hangs is not to be trusted.
                    lambda: job.holds_permit,
                )  # fmt: skip
        else:
            # The runtime refused it, so nothing of it ever reached the device (§7).
            self._release_permit(job)
            assert job.lease is not None
            job.lease.mark_returned()
            self._retire(job, JobState.FAILED, self._device_error(job, rc, Phase.SUBMIT), now_ns)
            if rc not in _TRANSIENT:
                self._distrust(f"infer() returned code {rc} for job {job.job_id}", now_ns)
        self._stage(now_ns)

    # --- jobs, back from the device ---------------------------------------------------------------

    def wait_returned(self, job: Job, rc: int, now_ns: int, *, exception: bool) -> bool:
        """``Wait()`` has returned for ``job``; is its output to be converted?

        ``exception``: the buffer's status is ``DONE_CCU_EXCEPTION``; it fails the job whatever
        ``rc`` says (§6.5). The permit comes back here.
        """
        assert job.lease is not None
        self._release_permit(job)
        job.lease.mark_returned()
        job.timings.waited_ns = now_ns
        convert = False
        if rc != CalrtCode.SUCCESS or exception:
            self.kv.mark_unknown(job.sequence_id)
            job.lease.quarantine(f"Wait() failed for job {job.job_id} (code {rc})")
            error = self._device_error(job, rc, Phase.EXECUTE)
            self._retire(job, JobState.QUARANTINED, error, now_ns)
            if exception or rc not in _TRANSIENT:
                self._distrust(f"Wait() failed for job {job.job_id} (code {rc})", now_ns)
        elif job.state is JobState.CANCEL_REQUESTED:
            # The device did the work, so its KV grew; only the result is dropped (§5.1 rule 7).
            self.kv.commit(job.sequence_id, job.token_count)
            self._retire(job, JobState.FAILED, None, now_ns)
        else:
            job.to(JobState.COMPLETING)
            self._completing += 1
            convert = True
        if self.lifecycle is LifecycleState.RECOVERING and not self.in_flight:
            self._fail_all(now_ns)
        self._stage(now_ns)
        return convert

    def completed(self, job: Job, now_ns: int) -> None:
        """The output of ``job`` is checked and converted: commit, deliver, give back."""
        self._completing -= 1
        self.kv.commit(job.sequence_id, job.token_count)
        cancelled = job.state is JobState.CANCEL_REQUESTED
        self._retire(job, JobState.FAILED if cancelled else JobState.SUCCEEDED, None, now_ns)
        self._stage(now_ns)

    def _retire(self, job: Job, state: JobState, error: RequestError | None, now_ns: int) -> None:
        """End ``job``: its lease back, its caller answered, its request ended if that was due."""
        if error is not None and job.error is None:
            job.error = error
        self._note(job.request, job.error)
        job.to(state)
        if job.lease is not None and job.lease.alive:
            job.lease.release()
        job.timings.ended_ns = now_ns
        job.request.job = None
        self._answer(job, now_ns)
        self._emit(JobEnded(now_ns, job))
        if job.request.closing:
            self._end_admitted(job.request, now_ns)

    def _answer(self, job: Job, now_ns: int) -> None:
        if not job.answered:
            job.answered = True
            job.timings.answered_ns = now_ns
            self.to_wake.append(job)

    @staticmethod
    def _note(request: RequestState, error: RequestError | None) -> None:
        """The first error of a request decides its outcome."""
        if request.error is None:
            request.error = error

    # --- giving up --------------------------------------------------------------------------------

    def cancel(self, job: Job, now_ns: int) -> None:
        """The caller gives ``job`` up. On the device it runs on, unowned by nobody: by us."""
        job.cancel_requested = True
        self._give_up(
            job,
            JobCancelled(
                f"job {job.job_id} was given up by its caller",
                Phase.EXECUTE if job.on_device else Phase.PREPARE,
                0, job.job_id, job.sequence_id, job.generation_id,
            ),
            now_ns,
        )  # fmt: skip

    def _give_up(self, job: Job, error: RequestError, now_ns: int) -> None:
        """Answer the caller with ``error``; end the job too if the device never had it."""
        if job.final:
            return
        if job.error is None:
            job.error = error
        self._note(job.request, job.error)
        if job.state is JobState.CANCEL_REQUESTED:
            return  # given up and answered before; it ends when the device or the completer is done
        if job.on_device or job.state is JobState.COMPLETING:
            job.to(JobState.CANCEL_REQUESTED)
            self._answer(job, now_ns)
            return
        if job is self._staged:
            self._staged = None
            self._release_permit(job)
        elif job.state is JobState.ADMITTED:
            self._ready.remove(job)
        self._retire(job, JobState.FAILED, error, now_ns)
        self._stage(now_ns)

    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire` is to be called next."""
        return self._deadlines.next_ns()

    def expire(self, now_ns: int) -> None:
        """Act on every deadline that has passed."""
        for act in self._deadlines.pop_due(now_ns):
            act(now_ns)

    # --- lifecycle --------------------------------------------------------------------------------

    def _go(self, state: LifecycleState, why: str, now_ns: int) -> None:
        check_lifecycle(self.lifecycle, state)
        old, self.lifecycle, self.why = self.lifecycle, state, why
        self._emit(LifecycleChanged(now_ns, old, state, why))

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"the executor is {self.lifecycle.value} ({self.why}); retry later")

    @staticmethod
    def _device_error(job: Job, rc: int, phase: str) -> RequestError:
        facts = (phase, rc, job.job_id, job.sequence_id, job.generation_id)
        call = "infer()" if phase == Phase.SUBMIT else "Wait()"
        if rc == CalrtCode.TIMEOUT:
            return DeadlineExceeded(f"{call} reported a timeout", *facts)
        if rc in (CalrtCode.BUSY, CalrtCode.UNAVAILABLE):
            return Unavailable(f"{call} found the device busy or unavailable; retry later", *facts)
        if rc == CalrtCode.SUCCESS:
            return DeviceFailed("the job ended with DONE_CCU_EXCEPTION", *facts)
        return DeviceFailed(f"{call} failed", *facts)

    def _drop_queued(self, make: Callable[[], RequestError], now_ns: int) -> None:
        """Answer everything that has not reached the device."""
        for request in list(self.waiting):
            error = make()
            cancelled = isinstance(error, JobCancelled)
            outcome = Outcome.CANCELLED if cancelled else Outcome.REFUSED
            self.waiting.remove(request)
            request.error = error
            self._end_request(request, outcome, now_ns)
        queued = [*([self._staged] if self._staged else []), *self._ready]
        for job in queued:
            self._give_up(job, make(), now_ns)

    def _distrust(self, why: str, now_ns: int) -> None:
        """The device may be in any state: take no work, and let it return what it has (§9.1)."""
        if self.lifecycle not in (LifecycleState.READY, LifecycleState.DRAINING):
            return
        if self.lifecycle is LifecycleState.READY:
            self._go(LifecycleState.DRAINING, why, now_ns)
        self._go(LifecycleState.RECOVERING, why, now_ns)
        self._drop_queued(self._unavailable, now_ns)
        if not self.in_flight:
            self._fail_all(now_ns)
            return
        self._deadlines.add(
            now_ns + self.config.grace_ns,
            lambda: self.lifecycle is LifecycleState.RECOVERING,
            self._fail_all,
        )

    def _fail_all(self, now_ns: int) -> None:
        """No reset is confirmed, so there is no way back: ``FAILED``, and everybody is told.

        What the device has not returned stays owned: its memory is not given back.
        """
        self._go(LifecycleState.FAILED, self.why, now_ns)
        for job in list(self.in_flight.values()):
            self._lose(job, now_ns)

    def _lose(self, job: Job, now_ns: int) -> None:
        self.kv.mark_unknown(job.sequence_id)
        self._give_up(job, self._unavailable(), now_ns)

    def begin_shutdown(self, now_ns: int) -> None:
        """FI13: what is queued is cancelled, what is submitted drains."""
        if self.lifecycle is not LifecycleState.READY:
            return
        self._go(LifecycleState.DRAINING, "shutdown", now_ns)
        self._drop_queued(
            lambda: JobCancelled("the executor is shutting down", Phase.ADMISSION), now_ns
        )

    @property
    def drained(self) -> bool:
        """Is nothing on the device, and no output being converted?"""
        return not self.in_flight and not self._completing

    def finish_shutdown(self, now_ns: int) -> None:
        """The end: what the device still holds is quarantined, and every open request is ended."""
        in_order = self.drained
        for job in list(self.in_flight.values()):
            self._lose(job, now_ns)
            if not job.final:  # a staged one has ended already
                assert job.lease is not None
                self._release_permit(job)
                job.lease.quarantine("the device had not returned it at shutdown")
                self._retire(job, JobState.QUARANTINED, job.error, now_ns)
        for request in list(self.open.values()):
            error = JobCancelled(f"request {request.request_id} was open at shutdown")
            self.close_request(request, error, now_ns)
        if self.lifecycle is LifecycleState.DRAINING:
            ended = LifecycleState.CLOSED if in_order else LifecycleState.FAILED
            self._go(ended, self.why, now_ns)
