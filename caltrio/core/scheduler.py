"""The executor's decisions, in one place: :class:`Core`.

Each event is a method that takes ``now_ns`` and decides everything that follows from it at that
moment, in FIFO order. The shell then performs the I/O and wakes the callers, in whatever order its
event loop likes: nothing is left to decide.

Permits and engines: a job takes the in-flight permit when it is handed to the submitter and gives
it back in :meth:`Core._release_permit`, which is the only place, whatever became of the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..codes import CCU_EXCEPTION, Action, CalrtCode, Verdict, code_name, verdict
from ..config import ExecutorConfig, JobOrder, KvPolicy
from ..errors import (
    DeadlineExceeded,
    InvalidArgument,
    JobCancelled,
    OutputRejected,
    Phase,
    RequestError,
    ResourceExhausted,
    SequenceUnknown,
    Unavailable,
    Unsupported,
)
from ..events import (
    BufferQuarantined,
    DeviceFault,
    Event,
    JobEnded,
    RequestEnded,
    StaleCompletion,
)
from ..manifest import ModelGeneration, TaskKind
from . import refusals
from .admission import Admission
from .buffers import BufferPool, BufferSlot, SlotMemory
from .checks import check_step
from .deadlines import Deadlines
from .health import Health
from .job import CallTimes, EngineSlot, Job, JobState, JobTimings
from .kv import KvCoordinator, KvHolding, KvManager, KvTxnState, UnlimitedKv
from .lifecycle import LifecycleState
from .request import Outcome, RequestState

if TYPE_CHECKING:
    from ..capabilities import Capabilities
    from ..stepdata import StepData


def _no_memory(_kind: TaskKind, _engine: int) -> SlotMemory | None:
    return None


class Core:
    """The state of one executor. :meth:`configured` and :meth:`warmed` make it ready.

    Args:
        config: the limits.
        engines: engine slots of the device.
        emit: told every fact, at the moment it becomes true.
        capabilities: what may be used of the device.
        ahead: jobs that the device takes beyond the in-flight limit and holds back itself: 0 or 1.
    """

    generation: ModelGeneration
    pool: BufferPool
    kv: KvCoordinator
    admission: Admission

    def __init__(
        self,
        config: ExecutorConfig,
        engines: int,
        emit: Callable[[Event], None],
        capabilities: Capabilities,
        ahead: int = 0,
    ) -> None:
        self.config = config
        self.health = Health(config, capabilities, emit)
        self._emit = emit
        self._device_engines = engines
        self._ahead = ahead
        self._engines: tuple[int, ...] = ()
        self._load: dict[int, int] = {}  # in flight, by engine
        self._share = 1  # of the limit, for each engine
        self.open: dict[int, RequestState] = {}  # not ended, by request id
        self._ready: deque[Job] = deque()  # for the submitter and a permit
        self._staged: Job | None = None  # handed over, infer() not yet called
        self._submitting: Job | None = None  # inside infer()
        self.in_flight: dict[int, Job] = {}  # hold a permit, by job id
        self._completing: dict[int, Job] = {}  # Wait() has returned, the output is being converted
        self._deadlines = Deadlines()
        self._next_job_id = 0
        self._grace_over = False
        self._resetting = False
        self._closing = False
        self.stale_completions = 0
        self.quarantined_slots = 0  # over all generations
        self.to_wake: list[RequestState | Job] = []  # the shell empties this after each event,
        self.to_withdraw: list[Job] = []  # and this: the device is not to submit them any more

    # --- generations ----------------------------------------------------------------------------

    def configured(
        self,
        generation: ModelGeneration,
        now_ns: int,
        kv_manager: KvManager | None = None,
        make_memory: Callable[[TaskKind, int], SlotMemory | None] = _no_memory,
    ) -> None:
        """The device holds ``generation``: everything that belongs to one is made anew (§9.2)."""
        self.health.new_generation()
        limit = self.health.limit
        # One in flight: the runtime chooses the engine. More: each job is bound to one (§6.4).
        self._engines = (EngineSlot.AUTO,) if limit == 1 else tuple(range(self._device_engines))
        self._load = dict.fromkeys(self._engines, 0)
        self._share = -(-limit // len(self._engines))
        self.generation = generation
        self.pool = BufferPool(
            generation.generation_id,
            generation.submodels,
            self._engines,
            self._share + 1 + self._ahead,  # one more: the one whose output is converted
            make_memory,
            self._quarantined,
        )
        self.kv = KvCoordinator(
            self.config.kv_capacity_tokens, kv_manager or UnlimitedKv(), generation.generation_id
        )
        self.admission = Admission(
            self.kv,
            self.config.max_active_sequences,
            self._admitted,
            self._grown,
            self._stuck,
        )
        self.health.go(
            LifecycleState.WARMING, f"generation {generation.generation_id} is loaded", now_ns
        )

    def warmed(self, now_ns: int) -> None:
        """The golden run was right, or none was asked for: traffic may come."""
        if self.health.lifecycle is LifecycleState.WARMING and not self._closing:
            name = f"generation {self.generation.generation_id}"
            self.health.go(LifecycleState.READY, f"{name} is ready", now_ns)

    def start_failed(self, why: str, now_ns: int, code: int = CalrtCode.SUCCESS) -> None:
        """The generation cannot be loaded, or its golden run was wrong: the end (§9.2).

        ``code``: what the load returned, where it did.
        """
        if code != CalrtCode.SUCCESS:
            self.health.distrust(verdict(code))
        if self.health.lifecycle in (LifecycleState.CONFIGURING, LifecycleState.WARMING):
            self._fail_all(why, now_ns)

    def _quarantined(self, slot: BufferSlot, reason: str) -> None:
        self.quarantined_slots += 1
        self._emit(BufferQuarantined(slot, reason))

    @property
    def lifecycle(self) -> LifecycleState:
        """What the executor is doing."""
        return self.health.lifecycle

    @property
    def waiting(self) -> deque[RequestState]:
        """Requests that wait for admission, in order."""
        return self.admission.waiting

    # --- requests -----------------------------------------------------------------------------

    def submit_request(
        self,
        request_id: int,
        prompt_tokens: int,
        output_tokens: int,
        now_ns: int,
        *,
        warmup: bool = False,
    ) -> RequestState:
        """A request enters: admitted, waiting, or refused (then its ``error`` says why).

        ``output_tokens`` is the most it may produce; 0 asks for a prefill only. ``warmup`` is for
        the golden run of a new generation, the only one that is let in while it warms.
        Raises ``ValueError`` for a request id that is in use: a defect of the caller's.
        """
        if request_id in self.open:
            raise ValueError(f"request id {request_id} is in use; give each request its own")
        # The last token produced is never fed back, so it takes no position.
        kv_tokens = prompt_tokens + max(output_tokens - 1, 0)
        grows = self.config.kv_policy is KvPolicy.GROW
        request = RequestState(
            request_id, prompt_tokens, output_tokens, kv_tokens, now_ns,
            prompt_tokens if grows else kv_tokens, warmup,
        )  # fmt: skip
        self.open[request_id] = request
        error = self._refusal(request)
        if error is not None:
            self._refuse(request, error, now_ns)
            return request
        admission = self.admission
        admission.waiting.append(request)
        admission.serve(now_ns)
        if request.outcome is not None or request.admitted:
            return request
        if len(admission.waiting) > self.config.max_queue:
            admission.waiting.remove(request)
            self._refuse(request, refusals.queue_full(request_id, len(admission.waiting)), now_ns)
        elif self.config.admission_timeout_ns is not None:
            request.admission_deadline_ns = now_ns + self.config.admission_timeout_ns
            self._deadlines.add(
                request.admission_deadline_ns,
                lambda: not request.admitted and request.outcome is None,
                lambda now: self._leave_queue(
                    request,
                    refusals.not_admitted(request.request_id, now - request.arrival_ns),
                    Outcome.EXPIRED,
                    now,
                ),
            )
        return request

    def _refusal(self, request: RequestState) -> RequestError | None:
        limit, wanted = self.generation.max_seq, (request.prompt_tokens, request.output_tokens)
        serves = LifecycleState.WARMING if request.warmup else LifecycleState.READY
        if self.health.lifecycle is not serves:
            return self.health.unavailable()
        if request.prompt_tokens < 1 or request.output_tokens < 0:
            return refusals.too_few_tokens(request.request_id, *wanted)
        if request.kv_tokens > limit:
            return refusals.too_long(request.request_id, *wanted, request.kv_tokens, limit)
        if request.kv_tokens > self.kv.capacity_tokens:
            capacity = self.kv.capacity_tokens
            return refusals.above_the_card(request.request_id, request.kv_tokens, capacity)
        return None

    def _refuse(self, request: RequestState, error: RequestError, now_ns: int) -> None:
        request.error = error
        self._end_request(request, Outcome.REFUSED, now_ns)

    def _admitted(self, request: RequestState, _now_ns: int) -> None:
        self.to_wake.append(request)

    def _stuck(self, request: RequestState, now_ns: int) -> None:
        """The head of the queue waits, and no live sequence holds KV that could come free."""
        if self.kv.quarantined:
            self._distrust("sequences of unknown KV hold all that is left", None, now_ns)
        elif self.config.admission_timeout_ns is None:
            # Nothing would ever end its wait. With a deadline it may wait: the runtime may recover.
            self._leave_queue(
                request,
                ResourceExhausted(
                    f"request {request.request_id}: the runtime gives no KV although none is in use"
                ),
                Outcome.REFUSED,
                now_ns,
            )

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
        request.error = error
        self._end_request(request, outcome, now_ns)
        self.admission.leave(request, now_ns)

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
        self._end_request(request, outcome, now_ns)
        self.admission.release(request.sequence_id, now_ns)

    def _end_request(self, request: RequestState, outcome: Outcome, now_ns: int) -> None:
        request.outcome = outcome
        request.ended_ns = now_ns
        del self.open[request.request_id]
        self.to_wake.append(request)
        self._emit(RequestEnded(now_ns, request))

    # --- jobs, up to the device -----------------------------------------------------------------

    def submit_step(
        self,
        request: RequestState,
        kind: TaskKind,
        token_count: int,
        now_ns: int,
        data: StepData | None = None,
    ) -> Job:
        """The next job of an admitted request. Raises a typed error if it may not run (§6.3)."""
        generation = self.generation
        held = self._may_step(request, kind)
        past_len = held.committed_tokens
        wrong = check_step(
            generation.submodels[kind], request, token_count, past_len, generation.max_seq, data
        )
        if wrong is not None:
            raise self._step_error(request, *wrong)
        job = Job(
            self._next_job_id, request, request.request_id, request.sequence_id,
            generation.generation_id, kind, token_count, past_len, request.jobs,
            JobTimings(now_ns), data,
        )  # fmt: skip
        self._next_job_id += 1
        request.jobs += 1
        request.job = job
        job.kv = self.kv.begin(request.sequence_id, token_count)
        if self.config.admission_timeout_ns is not None:
            # The first step inherits what its request has left; a later one enters anew.
            entered = request.arrival_ns if job.step == 0 else now_ns
            job.admission_deadline_ns = entered + self.config.admission_timeout_ns
            self._watch(
                job, job.admission_deadline_ns, Phase.ADMISSION,
                lambda: job.state in (JobState.CREATED, JobState.ADMITTED),
            )  # fmt: skip
        if self.kv.covers(job.kv):
            self._grown(job, now_ns)
        else:
            self.admission.growing.append(job)
            self.admission.serve(now_ns)
        return job

    def _step_error(self, request: RequestState, kind: type[RequestError], text: str) -> RequestError:
        return kind(
            f"request {request.request_id}: {text}",
            Phase.PREPARE, 0, -1, request.sequence_id, self.generation.generation_id,
        )  # fmt: skip

    def _may_step(self, request: RequestState, kind: TaskKind) -> KvHolding:
        """What the sequence holds, if it may take a step. Raises a typed error if not."""
        lost = request.lost
        if lost is not None:  # it was ended for its caller, by a reset or for want of KV
            raise type(lost)(*lost.args)
        serves = LifecycleState.WARMING if request.warmup else LifecycleState.READY
        if self.health.lifecycle is not serves:
            raise self.health.unavailable()
        if not request.admitted or request.closing or request.outcome is not None:
            raise self._step_error(request, InvalidArgument, "has no open sequence; open one")
        if request.job is not None:
            text = f"has job {request.job.job_id} under way; await it first"
            raise self._step_error(request, InvalidArgument, text)
        if kind not in self.generation.submodels:
            has = ", ".join(self.generation.submodels)
            text = f"this model has no graph for {kind.value}; it has {has}"
            raise self._step_error(request, Unsupported, text)
        if kind in self.health.disabled:
            text = f"{kind.value} is closed: {self.health.disabled[kind]}"
            raise self._step_error(request, Unsupported, text)
        held = self.kv.holders[request.sequence_id]
        if held.unknown is not None:
            text = f"lost its KV ({held.unknown}); close it and start anew"
            raise self._step_error(request, SequenceUnknown, text)
        return held

    def _grown(self, job: Job, now_ns: int) -> None:
        """The KV of ``job`` is reserved: it queues for its turn."""
        job.to(JobState.ADMITTED)
        job.timings.admitted_ns = now_ns
        self._ready.append(job)
        self._stage(now_ns)

    def _watch(self, job: Job, at_ns: int, phase: str, due: Callable[[], bool]) -> None:
        """Fail ``job`` to its caller at ``at_ns`` if ``due()`` still holds then."""

        def act(now_ns: int) -> None:
            facts = (job.job_id, job.sequence_id, job.generation_id)
            if job.state is JobState.CREATED:
                self._starved(job, refusals.no_growth(job.job_id, job.token_count, facts), now_ns)
                return
            self._give_up(job, refusals.too_late(phase, job.job_id, facts), now_ns)
            if phase == Phase.EXECUTE:
                self._distrust(f"job {job.job_id} passed its execution deadline", None, now_ns)

        self._deadlines.add(at_ns, due, act)

    def _starved(self, job: Job, error: RequestError, now_ns: int) -> None:
        """Growth did not come in time: the sequence gives up what it holds, so that others go on."""
        job.request.closing = True
        job.request.lost = error
        self._give_up(job, error, now_ns)

    def _stage(self, now_ns: int) -> None:
        """Hand the next ready job to the submitter, if that is idle and a permit is free."""
        health = self.health
        if (
            not self._ready
            or self._staged is not None
            or self._submitting is not None
            or len(self.in_flight) >= health.limit + self._ahead
            or health.lifecycle not in (LifecycleState.READY, LifecycleState.WARMING)
        ):
            return
        if now_ns < health.pause_until_ns:
            return  # the end of the pause calls again
        job = self._ready[0]
        if self.config.order is JobOrder.DECODE_FIRST:
            job = next((each for each in self._ready if each.kind is TaskKind.DECODE), job)
        # An engine takes its share of the limit, no more: one with buffers left may be busy.
        load, share = self._load, self._share
        if len(self.in_flight) < health.limit:
            free = [e for e in self._engines if load[e] < share and self.pool.available(job.kind, e)]
        else:
            # It follows the oldest, which Wait() returns next, on that one's engine.
            oldest = next(iter(self.in_flight.values())).share
            free = [oldest] if self.pool.available(job.kind, oldest) else []
        if not free:
            if not any(self.pool.usable(job.kind, e) for e in self._engines):
                self._distrust(f"every {job.kind.value} buffer is quarantined", None, now_ns)
            return  # a lease comes back with the delivery of the job that holds it
        self._ready.remove(job)
        job.share = min(free, key=load.__getitem__)
        job.engine = EngineSlot.AUTO if health.limit == 1 else job.share
        job.lease = self.pool.acquire(job.kind, job.share)
        load[job.share] += 1
        self.in_flight[job.job_id] = job
        job.holds_permit = True
        job.to(JobState.PREPARING)
        self._staged = job

    def _release_permit(self, job: Job) -> None:
        """The one place where an in-flight permit comes back."""
        del self.in_flight[job.job_id]
        job.holds_permit = False
        self._load[job.share] -= 1

    @property
    def has_submission(self) -> bool:
        """Is a job handed over, for which ``infer()`` is to be called?"""
        return self._staged is not None

    def next_submission(self) -> Job | None:
        """The job to prepare and to call ``infer()`` with now."""
        job, self._staged = self._staged, None
        if job is not None:
            self._submitting = job
        return job

    def prepared(self, job: Job, now_ns: int) -> None:
        """Inputs, slices and CSRs are set; ``infer()`` is called now, and the device may own it all."""
        assert job.lease is not None
        assert job.kv is not None
        job.to(JobState.QUEUED)
        job.lease.mark_submitted()
        job.kv.to(KvTxnState.SUBMITTED)
        job.timings.queued_ns = job.timings.infer_ns = now_ns
        if self.config.queue_timeout_ns is not None:
            job.queue_deadline_ns = now_ns + self.config.queue_timeout_ns
            self._watch(
                job, job.queue_deadline_ns, Phase.QUEUE,
                lambda: job.timings.submitted_ns is None and not job.answered,
            )  # fmt: skip
            # Late is one thing; a runtime that never comes back from infer() is not to be trusted.
            self._deadlines.add(
                job.queue_deadline_ns + self.config.grace_ns,
                lambda: self._submitting is job,
                lambda now: self._distrust(f"infer() of job {job.job_id} has not returned", None, now),
            )

    def prepare_failed(self, job: Job, error: RequestError, now_ns: int) -> None:
        """A check of §6.3 failed: the device never had the job, and everything goes back."""
        self._submitting = None
        self._release_permit(job)
        self._retire(job, JobState.FAILED, error, now_ns)
        if error.code != CalrtCode.SUCCESS:
            self._judge(job, error.code, Phase.PREPARE, verdict(error.code), now_ns)
        self._stage(now_ns)

    def withdrawn(self, job: Job, now_ns: int) -> None:
        """The device gave ``job`` back without having called ``infer()``; nothing of it happened."""
        self._submitting = None
        if job.final:  # a reset came meanwhile
            self._stage(now_ns)
            return
        job.timings.infer_ns = None
        self._release_permit(job)
        assert job.lease is not None
        job.lease.mark_returned()
        error = job.error or JobCancelled(
            f"job {job.job_id} was not submitted: the device ends",
            Phase.QUEUE, 0, job.job_id, job.sequence_id, job.generation_id,
        )  # fmt: skip
        self._retire(job, JobState.FAILED, error, now_ns)
        self._settle(now_ns)

    def submit_returned(self, job: Job, rc: int, now_ns: int) -> None:
        """``infer()`` has returned ``rc`` for ``job``."""
        self._submitting = None
        if job.final:  # a reset came meanwhile
            self._stale(job, now_ns)
            self._stage(now_ns)
            return
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
            row = verdict(rc)
            self._retire(job, JobState.FAILED, self._error(job, rc, Phase.SUBMIT, row), now_ns)
            self._judge(job, rc, Phase.SUBMIT, row, now_ns)
        self._settle(now_ns)

    # --- jobs, back from the device ---------------------------------------------------------------

    def wait_returned(
        self, job: Job, rc: int, now_ns: int, *, exception: bool, calls: CallTimes | None = None
    ) -> bool:
        """``Wait()`` has returned for ``job``; is its output to be checked and converted?

        ``exception``: the buffer's status is ``DONE_CCU_EXCEPTION``; it fails the job whatever
        ``rc`` says (§6.5). ``calls``: when the device's own threads made the calls. The permit
        comes back here.
        """
        if job.final:
            self._stale(job, now_ns)
            return False
        assert job.lease is not None
        assert job.kv is not None
        self._release_permit(job)
        job.lease.mark_returned()
        times = job.timings
        times.waited_ns = now_ns
        if calls is not None:
            times.infer_ns, times.submitted_ns, times.waited_ns = calls
        convert = False
        if rc != CalrtCode.SUCCESS or exception:
            row = CCU_EXCEPTION if exception else verdict(rc)
            error = self._error(job, rc, Phase.EXECUTE, row)
            self._spoil(job, error, now_ns)
            self._judge(job, rc, Phase.EXECUTE, row, now_ns)
        elif job.kv.state is KvTxnState.UNKNOWN:  # given up as lost, and come back before the reset
            self._retire(job, JobState.FAILED, None, now_ns)
        else:
            if job.state is not JobState.CANCEL_REQUESTED:
                job.to(JobState.COMPLETING)
            # A cancelled job is checked as well: its KV grew, if the device did its work (§5.1).
            self._completing[job.job_id] = job
            convert = True
        self._settle(now_ns)
        return convert

    def completed(self, job: Job, now_ns: int) -> None:
        """The output of ``job`` is checked and converted: commit, deliver, give back."""
        if job.job_id not in self._completing:
            return  # a reset came meanwhile, and ended it
        assert job.kv is not None
        self.kv.commit(job.kv)
        del self._completing[job.job_id]
        self.health.success()
        cancelled = job.state is JobState.CANCEL_REQUESTED
        self._retire(job, JobState.FAILED if cancelled else JobState.SUCCEEDED, None, now_ns)
        self._settle(now_ns)

    def output_rejected(self, job: Job, why: str, now_ns: int) -> None:
        """The output of ``job`` failed its checks (§6.5): nothing of it is trusted or delivered."""
        if self._completing.pop(job.job_id, None) is None:
            return
        error = OutputRejected(
            f"the output of job {job.job_id} was rejected: {why}",
            Phase.COMPLETE, 0, job.job_id, job.sequence_id, job.generation_id,
        )  # fmt: skip
        self._spoil(job, error, now_ns)
        self._judge(job, 0, Phase.COMPLETE, CCU_EXCEPTION, now_ns, why=str(error.message))
        self._settle(now_ns)

    def delivery_failed(self, job: Job, why: str, now_ns: int) -> None:
        """The output is right, but the caller's array does not take it: that is his error alone."""
        if job.job_id not in self._completing:
            return
        assert job.kv is not None
        self.kv.commit(job.kv)
        del self._completing[job.job_id]
        error = InvalidArgument(
            f"the logits of job {job.job_id} could not be delivered: {why}",
            Phase.COMPLETE, 0, job.job_id, job.sequence_id, job.generation_id,
        )  # fmt: skip
        self._retire(job, JobState.FAILED, error, now_ns)
        self._settle(now_ns)

    def _stale(self, job: Job, now_ns: int) -> None:
        """A job of an earlier generation came back: it was answered long ago (FI14)."""
        self.stale_completions += 1
        self._emit(StaleCompletion(now_ns, job))

    def _spoil(self, job: Job, error: RequestError, now_ns: int) -> None:
        """A failure after submit: KV unknown, buffers out of use (§6.5, §7)."""
        assert job.lease is not None
        self._mark_unknown(job, error.message)
        job.lease.quarantine(error.message)
        self._retire(job, JobState.QUARANTINED, error, now_ns)

    def _mark_unknown(self, job: Job, why: str) -> None:
        if job.kv is not None and job.kv.state is KvTxnState.SUBMITTED:
            self.kv.mark_unknown(job.kv, why)

    def _retire(self, job: Job, state: JobState, error: RequestError | None, now_ns: int) -> None:
        """End ``job``: its lease back, its caller answered, its request ended if that was due."""
        if error is not None and job.error is None:
            job.error = error
        self._note(job.request, job.error)
        job.to(state)
        if job.lease is not None and job.lease.alive:
            job.lease.release()
        if job.kv is not None and job.kv.state in (KvTxnState.RESERVED, KvTxnState.SUBMITTED):
            job.kv.to(KvTxnState.ROLLED_BACK)
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
            if job is self._unsubmitted:
                self.to_withdraw.append(job)
            return
        if job is self._staged:
            self._staged = None
            self._release_permit(job)
        elif job.state is JobState.ADMITTED:
            self._ready.remove(job)
        elif job.state is JobState.CREATED:
            self.admission.growing.remove(job)
        self._retire(job, JobState.FAILED, error, now_ns)
        self.admission.serve(now_ns)  # it may have stood before one that fits
        self._stage(now_ns)

    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire` is to be called next."""
        return self._deadlines.next_ns()

    def expire(self, now_ns: int) -> None:
        """Act on every deadline that has passed."""
        for act in self._deadlines.pop_due(now_ns):
            act(now_ns)

    # --- what a failure leads to -------------------------------------------------------------------

    def _judge(
        self, job: Job, rc: int, phase: str, row: Verdict, now_ns: int, *, why: str | None = None
    ) -> None:
        """Carry out the row of §8 for the service; the job itself has been failed already."""
        self._emit(DeviceFault(now_ns, job, phase, rc, row))
        call = {Phase.PREPARE: "preparation", Phase.SUBMIT: "infer()"}.get(phase, "Wait()")
        if why is None:
            what = f"code {code_name(rc)}" if rc else "DONE_CCU_EXCEPTION"
            why = f"{call} of job {job.job_id} ended with {what}"
        several = self.health.limit > 1
        if phase in (Phase.EXECUTE, Phase.COMPLETE):
            self.health.fall_back(why, now_ns)
        if row.action is Action.BACK_OFF:
            if self.health.strike(now_ns):
                self._distrust(f"{why}, the last of too many without a success", row, now_ns)
            else:
                at_ns = self.health.pause_until_ns
                self._deadlines.add(at_ns, lambda: True, self._stage)
        elif row.action is Action.CLOSE_FEATURE:
            if several:  # binding jobs to engines is the feature that may be missing
                self.health.fall_back(why, now_ns)
            else:
                self.health.disabled[job.kind] = why
        elif row.action is not Action.RECORD:
            self._distrust(why, row, now_ns)

    def _error(self, job: Job, rc: int, phase: str, row: Verdict) -> RequestError:
        facts = (phase, rc, job.job_id, job.sequence_id, job.generation_id)
        call = "infer()" if phase == Phase.SUBMIT else "Wait()"
        if rc == CalrtCode.SUCCESS:
            return row.error("the job ended with DONE_CCU_EXCEPTION", *facts)
        text = f"{call} returned {code_name(rc)}"
        if issubclass(row.error, Unavailable):
            return row.error(text, *facts, self.config.retry_after_ns)
        return row.error(text, *facts)

    @property
    def _unsubmitted(self) -> Job | None:
        """The job that a ring was given and has not submitted, as far as we have heard."""
        return self._submitting if self._ahead else None

    @property
    def _held_back(self) -> Job | None:
        """The job beyond the limit, which a ring holds back until another one returns."""
        return self._unsubmitted if len(self.in_flight) > self.health.limit else None

    def _drop_queued(self, make: Callable[[], RequestError], now_ns: int, held: Job | None) -> None:
        """Answer everything that has not reached the device; ``held``: what it is to give back."""
        admission = self.admission
        waiting, growing = list(admission.waiting), list(admission.growing)
        admission.waiting.clear()
        admission.growing.clear()
        for request in waiting:
            request.error = make()
            cancelled = isinstance(request.error, JobCancelled)
            self._end_request(request, Outcome.CANCELLED if cancelled else Outcome.REFUSED, now_ns)
        for job in growing:
            self._retire(job, JobState.FAILED, make(), now_ns)
        for job in [*(job for job in (held, self._staged) if job is not None), *self._ready]:
            self._give_up(job, make(), now_ns)

    def _distrust(self, why: str, row: Verdict | None, now_ns: int) -> None:
        """The device may be in any state: take no work, and let it return what it has (§9.1)."""
        health = self.health
        if health.lifecycle in (LifecycleState.FAILED, LifecycleState.CLOSED):
            return  # it is over, and has said why
        health.distrust(row)
        health.fall_back(why, now_ns)
        if health.lifecycle in (LifecycleState.CONFIGURING, LifecycleState.WARMING):
            self._fail_all(f"{why} before the generation was ready", now_ns)
            return
        if health.lifecycle not in (LifecycleState.READY, LifecycleState.DRAINING):
            return
        if health.ready:
            health.go(LifecycleState.DRAINING, why, now_ns)
        health.go(LifecycleState.RECOVERING, why, now_ns)
        self._grace_over = False
        # No further job is to reach the device, also not one that it was about to submit.
        self._drop_queued(health.unavailable, now_ns, self._unsubmitted)
        self._deadlines.add(
            now_ns + self.config.grace_ns,
            lambda: health.lifecycle is LifecycleState.RECOVERING and not self._resetting,
            self._end_grace,
        )
        self._settle(now_ns)

    def _end_grace(self, now_ns: int) -> None:
        """What the device has not returned by now is lost; its memory stays owned until a reset."""
        self._grace_over = True
        for job in list(self.in_flight.values()):
            self._lose(job, now_ns)
        self._settle(now_ns)

    def _lose(self, job: Job, now_ns: int) -> None:
        self._mark_unknown(job, "the device did not return its job")
        self._give_up(job, self._lost(job), now_ns)

    def _lost(self, job: Job) -> RequestError:
        facts = (Phase.EXECUTE, 0, job.job_id, job.sequence_id, job.generation_id)
        if self._closing:
            return JobCancelled(f"job {job.job_id} was not back when the executor closed", *facts)
        return Unavailable(
            f"job {job.job_id} was lost: the executor is {self.health.lifecycle.value} "
            f"({self.health.why})",
            *facts,
            self.config.retry_after_ns,
        )

    def _settle(self, now_ns: int) -> None:
        """After whatever may have been the last thing to wait for."""
        if self.health.lifecycle is LifecycleState.RECOVERING:
            over = self._grace_over or self.drained
            if over and not (self.health.can_reset and not self._closing):
                self._fail_all(self.health.why, now_ns)
        else:
            self._stage(now_ns)

    @property
    def reset_due(self) -> bool:
        """Is a reset to be done now?"""
        return (
            self.health.lifecycle is LifecycleState.RECOVERING
            and not self._resetting
            and (self._grace_over or self.drained)
        )

    def reset_started(self) -> None:
        """The shell has called the device's reset."""
        self._resetting = True

    def reset_returned(self, rc: int | None, now_ns: int) -> bool:
        """The reset has ended with ``rc``, or not at all in time; may a new generation be built?

        After a confirmed reset the device uses no memory of ours any more: what it still had ends
        here, and every buffer of the generation leaves service (§5.1 rule 8).
        """
        self._resetting = False
        if self.health.lifecycle is not LifecycleState.RECOVERING:
            return False
        if rc != CalrtCode.SUCCESS:
            what = "did not return in time" if rc is None else f"returned {code_name(rc)}"
            self._fail_all(f"{self.health.why}; the reset {what}", now_ns)
            return False
        self._abandon("the generation was reset", now_ns)
        self.pool.retire()
        self.health.go(LifecycleState.CONFIGURING, self.health.why, now_ns)
        return True

    def _abandon(self, why: str, now_ns: int) -> None:
        """End every job that the device or the completer has, and every open request."""
        for job in list(self.in_flight.values()):
            self._lose(job, now_ns)
            if not job.final:  # a staged one has ended already
                self._release_permit(job)
                self._quarantine(job, why, now_ns)
        for job in list(self._completing.values()):
            self._mark_unknown(job, why)
            self._quarantine(job, why, now_ns)
        self._completing.clear()
        for request in list(self.open.values()):
            if not request.admitted:
                self._leave_queue(request, self.health.unavailable(), Outcome.REFUSED, now_ns)
                continue
            error: RequestError = SequenceUnknown(
                f"request {request.request_id} lost its KV: {why}",
                Phase.EXECUTE, 0, -1, request.sequence_id, self.generation.generation_id,
            )  # fmt: skip
            request.lost = error
            if self._closing:
                error = JobCancelled(f"request {request.request_id} was open at shutdown")
            self.close_request(request, error, now_ns)

    def _quarantine(self, job: Job, why: str, now_ns: int) -> None:
        assert job.lease is not None
        job.lease.quarantine(why)
        self._retire(job, JobState.QUARANTINED, job.error or self._lost(job), now_ns)

    def _fail_all(self, why: str, now_ns: int) -> None:
        """There is no way back: ``FAILED``, and everybody is told.

        What the device has not returned stays owned: its memory is not given back.
        """
        self.health.go(LifecycleState.FAILED, why, now_ns)
        if hasattr(self, "admission"):
            self._drop_queued(self.health.unavailable, now_ns, self._unsubmitted)
        for job in list(self.in_flight.values()):
            self._lose(job, now_ns)

    # --- shutdown -----------------------------------------------------------------------------------

    def begin_shutdown(self, now_ns: int) -> None:
        """FI13: what is queued is cancelled, what is submitted drains."""
        self._closing = True
        if self.health.ready:
            self.health.go(LifecycleState.DRAINING, "shutdown", now_ns)
            self._drop_queued(
                lambda: JobCancelled("the executor is shutting down", Phase.ADMISSION),
                now_ns,
                self._held_back,
            )
        else:
            self._settle(now_ns)

    @property
    def drained(self) -> bool:
        """Is nothing on the device, and no output being converted?"""
        return not self.in_flight and not self._completing

    def finish_shutdown(self, now_ns: int) -> None:
        """The end: what the device still holds is quarantined, and every open request is ended."""
        in_order = self.drained
        self._abandon("the device had not returned it at shutdown", now_ns)
        state = self.health.lifecycle
        if state is LifecycleState.DRAINING and in_order:
            self.health.go(LifecycleState.CLOSED, self.health.why, now_ns)
        elif state not in (LifecycleState.FAILED, LifecycleState.CLOSED):
            self.health.go(LifecycleState.FAILED, f"shut down while {state.value}", now_ns)
