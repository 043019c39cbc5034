"""Random lives of a Core: the invariants of §5.1 and the conservation laws after every step.

Rule 1 of §5.1 (nobody but the executor uses the device) has no meaning here: this test is the device.
Some of the devices take one job beyond the limit, which they hold back as the driver's ring does.
``make fuzz`` runs many more examples than ``make test``.
"""

import gc
import os
import warnings
from collections import Counter
from enum import Enum

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from caltrio.capabilities import Capabilities
from caltrio.config import ExecutorConfig, KvPolicy
from caltrio.core.job import JobState
from caltrio.core.kv import KvTxnState
from caltrio.core.lifecycle import LifecycleState
from caltrio.core.request import Outcome
from caltrio.core.scheduler import Core
from caltrio.errors import CsrRejected, RequestError
from caltrio.events import JobEnded, LifecycleChanged, RequestEnded
from caltrio.manifest import TaskKind, bind, device_models, load_manifest
from caltrio.semantics import ResetScope

ON_DEVICE = (JobState.SUBMITTED, JobState.CANCEL_REQUESTED)
BEFORE_DEVICE = (JobState.QUEUED, JobState.CANCEL_REQUESTED)
FUZZ = os.environ.get("CALTRIO_FUZZ_EXAMPLES")
EXAMPLES = int(FUZZ or "300")  # the same ones every time, unless it is to find new ones
MANIFEST = load_manifest()
MODELS = device_models(MANIFEST, 16)


counts = Counter()  # how often the machine came to the rare places


Ring = Enum("Ring", ["INSIDE", "HELD", "BACK"])


class Memory:
    """Stands for host storage; ``sliced`` is what a driver forgot to undo."""

    sliced = False


class Kv:
    """A runtime's KV manager that refuses at the test's whim."""

    refuses = False
    applied_without_asking = 0

    def __init__(self):
        self.asked = False

    def can_allocate(self, sequences):
        self.asked = True
        return not self.refuses

    def apply(self, sequence_id, target_tokens):
        self.applied_without_asking += not self.asked
        self.asked = False
        return True

    def release(self, sequence_id):
        pass


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        max_inflight=st.integers(1, 3),
        engines=st.integers(1, 3),
        sequences=st.integers(1, 4),
        queue=st.integers(0, 3),
        timeouts=st.booleans(),
        policy=st.sampled_from(KvPolicy),
        scope=st.sampled_from([ResetScope.DEVICE, ResetScope.DEVICE, ResetScope.NONE]),
        parallel=st.booleans(),
        begun=st.integers(0, 3),
        ahead=st.integers(0, 1),
    )
    def start(
        self, max_inflight, engines, sequences, queue, timeouts, policy, scope, parallel, begun, ahead
    ):
        self.now = 0
        self.events = []
        timeout = 50 if timeouts else None
        self.core = Core(
            ExecutorConfig(
                max_inflight=max_inflight,
                max_active_sequences=sequences,
                max_queue=queue,
                kv_capacity_tokens=40,
                admission_timeout_ns=timeout,
                queue_timeout_ns=timeout,
                execution_timeout_ns=timeout,
                grace_ns=30,
                kv_policy=policy if timeouts else KvPolicy.FULL,
                backoff_ns=3,
                backoff_threshold=3,
            ),
            engines,
            self.events.append,
            Capabilities(max_inflight=4096 if parallel else 1, reset_scope=scope),
            ahead,
        )
        self.ahead = ahead
        self.allowed = max_inflight if parallel else 1
        self.requests = []
        self.submitting = None
        self.ring = None  # where that is: Ring.INSIDE infer(), HELD back, or on its way BACK to us
        self.submitted = []  # on the device, in order, not yet waited for
        self.completing = None
        self.resetting = False
        self.next_id = 0
        self.committed = {}  # by request id: what completed jobs added
        self.memory_of = {}  # by job id: where its memory is
        self.old_pools = []
        self.load(1)
        self.core.warmed(self.now)
        for _ in range(begun):  # some work is on its way: rare places are nearer from there
            self.request(3, 4)
            if self.requests[-1].admitted:
                self.core.submit_step(self.requests[-1], TaskKind.PREFILL_IDS, 3, self.now)
            self.infer(csr_fails=False, code=0)
            if self.ring is Ring.INSIDE:
                self.infer_returns(0)

    def load(self, generation_id):
        self.kv_manager = Kv()
        generation = bind(MANIFEST, MODELS, generation_id)
        self.core.configured(generation, self.now, self.kv_manager, lambda kind, engine: Memory())

    @property
    def full(self):
        """Are as many jobs on the card as may be?"""
        return sum(not job.final for job in self.submitted) >= self.core.health.limit

    def ring_submits(self):
        """A job came back well: the ring does not ask before it submits the one it holds back."""
        if self.ring is Ring.HELD and not self.full:
            assert self.core.lifecycle in (LifecycleState.READY, LifecycleState.WARMING)
            assert not self.submitting.answered  # or it would have been withdrawn
            self.ring = Ring.INSIDE
            counts["held, submitted"] += 1

    def ring_withdraws(self):
        """What the shell does with ``to_withdraw`` after each event."""
        for job in self.core.to_withdraw:
            assert self.ahead
            assert job is self.submitting
            assert job.answered
            if self.ring is Ring.HELD:  # else infer() has been called already
                self.ring = Ring.BACK
        self.core.to_withdraw.clear()

    def jobs(self):
        return [request.job for request in self.requests if request.job is not None]

    @rule(step=st.integers(0, 20))
    def time_passes(self, step):
        self.now += step

    @rule(refuses=st.booleans())
    def runtime_has_kv(self, refuses):
        self.kv_manager.refuses = refuses

    @rule(prompt=st.integers(0, 25), output=st.integers(0, 25))
    def request(self, prompt, output):
        request = self.core.submit_request(self.next_id, prompt, output, self.now)
        self.next_id += 1
        self.requests.append(request)
        assert (request.outcome is not None) == (request.error is not None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def step(self, data):
        request = data.draw(st.sampled_from(self.requests))
        kind = data.draw(st.sampled_from(TaskKind))
        tokens = data.draw(st.integers(0, 26))
        before = self.core._next_job_id
        try:
            self.core.submit_step(request, kind, tokens, self.now)
        except RequestError:
            assert self.core._next_job_id == before

    @precondition(lambda self: self.submitting is None)
    @rule(csr_fails=st.sampled_from([False] * 5 + [True]), code=st.sampled_from([0, 14, 24]))
    def infer(self, csr_fails, code):
        job = self.core.next_submission()
        if job is None:
            return
        assert not self.core.has_submission  # rule 2: one infer() at a time
        if csr_fails:
            error = CsrRejected("no such CSR", "prepare", code, job.job_id)
            self.core.prepare_failed(job, error, self.now)
            assert job.final
            return
        self.memory_of[job.job_id] = job.lease.slot.memory
        self.core.prepared(job, self.now)
        self.submitting = job
        assert self.ahead or not self.full
        self.ring = Ring.HELD if self.full else Ring.INSIDE

    @precondition(lambda self: self.ahead and self.full and self.submitting is None)
    @rule()
    def a_job_comes_on_top(self):
        """All the way at once: random steps seldom go it."""
        self.request(2, 3)
        if self.requests[-1].admitted and TaskKind.PREFILL_IDS not in self.core.health.disabled:
            self.core.submit_step(self.requests[-1], TaskKind.PREFILL_IDS, 2, self.now)
        self.infer(csr_fails=False, code=0)

    @precondition(lambda self: self.ring is Ring.INSIDE)
    @rule(code=st.sampled_from([0, 0, 0, 0, 0, 17, 17, 18, 27, 14, 99]))
    def infer_returns(self, code):
        job, self.submitting, self.ring = self.submitting, None, None
        if code == 0:
            self.submitted.append(job)
        self.core.submit_returned(job, code, self.now)

    @precondition(lambda self: self.ring is Ring.BACK)
    @rule()
    def withdrawn(self):
        job, self.submitting, self.ring = self.submitting, None, None
        stale = job.final
        self.core.withdrawn(job, self.now)
        assert job.final
        assert not job.holds_permit
        if not stale:
            counts["withdrawn"] += 1
            assert job.timings.infer_ns is None
            assert job.kv.state is KvTxnState.ROLLED_BACK or job.kv.state is KvTxnState.UNKNOWN

    @precondition(lambda self: self.submitted and self.completing is None)
    @rule(
        data=st.data(),
        code=st.sampled_from([0, 0, 0, 0, 0, 0, 13, 28, 8]),
        exception=st.booleans(),
        sliced=st.sampled_from([False, False, False, True]),
    )
    def wait_returns(self, data, code, exception, sliced):
        job = self.submitted[data.draw(st.integers(0, len(self.submitted) - 1))]
        exception = exception and code == 0 and data.draw(st.booleans())
        self.comes_back(job, code, exception=exception, sliced=sliced)

    @precondition(lambda self: self.ring is Ring.HELD and self.completing is None)
    @rule(code=st.sampled_from([0, 0, 0, 28]))
    def the_oldest_returns_while_one_is_held_back(self, code):
        oldest = next(iter(self.core.in_flight.values()))
        if oldest in self.submitted:
            self.comes_back(oldest, code, exception=False)

    def comes_back(self, job, code, *, exception, sliced=False):
        self.submitted.remove(job)
        stale = job.final
        before, free = self.core.stale_completions, self.core.pool.free
        if not stale:
            job.lease.slot.memory.sliced = sliced
        if code == 0 and not exception:
            self.ring_submits()
        if self.core.wait_returned(job, code, self.now, exception=exception):
            self.completing = job
        assert (self.core.stale_completions == before + 1) == stale
        if stale:
            assert self.core.pool.free == free  # nothing new was touched
        self.ring_withdraws()
        self.ring_submits()  # a failure has been judged now

    @precondition(lambda self: any(job.final for job in self.submitted))
    @rule()
    def a_job_of_an_old_generation_returns(self):
        job = next(job for job in self.submitted if job.final)
        self.submitted.remove(job)
        before, free = self.core.stale_completions, self.core.pool.free
        assert not self.core.wait_returned(job, 0, self.now, exception=False)
        assert self.core.stale_completions == before + 1
        assert self.core.pool.free == free

    @precondition(lambda self: self.completing is not None)
    @rule(rejected=st.sampled_from([False] * 6 + [True]))
    def completes(self, rejected):
        job, self.completing = self.completing, None
        if rejected:
            self.core.output_rejected(job, "NaN", self.now)
            assert job.kv.state is not KvTxnState.COMMITTED
            return
        self.core.completed(job, self.now)
        if job.kv.state is KvTxnState.COMMITTED:
            self.committed[job.request_id] = job.kv.target_len

    @precondition(lambda self: self.jobs())
    @rule(data=st.data())
    def cancel(self, data):
        job = data.draw(st.sampled_from(self.jobs()))
        self.core.cancel(job, self.now)
        assert job.answered

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel_request(self, data):
        self.core.cancel_request(data.draw(st.sampled_from(self.requests)), self.now)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def close(self, data):
        request = data.draw(st.sampled_from(self.requests))
        if request.admitted:
            self.core.close_request(request, None, self.now)

    @rule()
    def expire(self):
        self.core.expire(self.now)
        due = self.core.next_deadline_ns()
        assert due is None or due > self.now

    @precondition(lambda self: self.core.in_flight and self.core.config.execution_timeout_ns)
    @rule()
    def device_hangs(self):
        self.now += 51
        self.core.expire(self.now)

    @precondition(lambda self: self.core.lifecycle is LifecycleState.RECOVERING)
    @rule()
    def grace_ends(self):
        self.now += 31
        self.core.expire(self.now)
        if not self.resetting:
            assert self.core.reset_due or self.core.lifecycle is LifecycleState.FAILED

    @precondition(lambda self: self.core.reset_due and self.core.health.can_reset)
    @rule()
    def reset_begins(self):
        self.core.reset_started()
        self.resetting = True
        assert self.ring is not Ring.HELD

    @precondition(lambda self: self.resetting or (self.core.reset_due and self.core.health.can_reset))
    @rule(code=st.sampled_from([0, 0, 0, 25, None]), warm=st.sampled_from([True, True, True, False]))
    def reset_ends(self, code, warm):
        if not self.resetting:
            self.core.reset_started()
        self.resetting = False
        pool, generation_id = self.core.pool, self.core.generation.generation_id
        rebuild = self.core.reset_returned(code, self.now)
        if code != 0:
            assert not rebuild
        if not rebuild:
            return
        assert pool.free == pool.leased == 0  # rule 8
        assert len(pool.quarantined) == pool.total
        assert not self.core.in_flight
        assert not self.core.open  # whoever held KV of that generation was told
        self.old_pools.append(pool)
        self.load(generation_id + 1)
        if warm:
            self.core.warmed(self.now)
            assert self.core.health.ready
        else:
            self.core.start_failed("wrong tokens", self.now)
            assert self.core.lifecycle is LifecycleState.FAILED

    @precondition(lambda self: self.submitted and self.core.health.ready and self.core.health.can_reset)
    @rule()
    def a_job_is_lost_over_a_reset(self):
        """All the way at once: random steps seldom go it."""
        self.core._distrust("the device does not answer", None, self.now)
        self.grace_ends()
        if self.core.reset_due:
            self.reset_ends(code=0, warm=True)
            assert all(job.final for job in self.submitted)

    @precondition(lambda self: self.next_id > 8 or self.ring is Ring.HELD)
    @rule()
    def shut_down(self):
        self.core.begin_shutdown(self.now)

    @invariant()
    def holds(self):
        if not hasattr(self, "core"):
            return
        core = self.core
        pool, kv = core.pool, core.kv
        assert pool.leased + pool.free + len(pool.quarantined) == pool.total
        for old in self.old_pools:
            assert old.free == old.leased == 0
        held_tokens = [
            held.reserved_tokens for held in (*kv.holders.values(), *kv.quarantined.values())
        ]
        assert kv.reserved_tokens == sum(held_tokens)
        assert 0 <= kv.reserved_tokens <= kv.capacity_tokens
        assert not kv.holders.keys() & kv.quarantined.keys()
        assert self.kv_manager.applied_without_asking == 0
        self.ring_withdraws()
        assert len(core.in_flight) <= self.allowed + self.ahead
        assert self.ring is not Ring.HELD or len(core.in_flight) > 1
        if core.lifecycle not in (LifecycleState.READY, LifecycleState.WARMING):
            assert self.ring is not Ring.HELD  # nothing more is to reach the device
        if core.health.limit_reason is not None and "fell back" in core.health.limit_reason:
            assert core.health.limit == 1
        assert sum(core._load.values()) == len(core.in_flight)
        live = [job for job in self.jobs() if job.lease is not None and job.lease.alive]
        assert len(live) == pool.leased
        assert len({id(job.lease.slot) for job in live}) == len(live)  # rule 3
        for job in live:
            memory = self.memory_of.get(job.job_id)
            assert memory is None or job.lease.slot.memory is memory  # rule 4
            assert job.lease.slot.generation_id == job.generation_id  # rule 5
            assert job.generation_id == core.generation.generation_id
            assert job.kv.generation_id == job.generation_id
        inside = [] if self.submitting is None else [self.submitting]
        for job in [*self.submitted, *inside]:  # rule 7: what is on the device keeps its buffers
            if not job.final:
                assert job.state in (ON_DEVICE if job not in inside else BEFORE_DEVICE)
                assert job.lease.alive
                assert job.job_id in core.in_flight
                assert job.kv.state in (KvTxnState.SUBMITTED, KvTxnState.UNKNOWN)
        for request in core.open.values():  # rule 6: committed is what completed, and nothing else
            if request.admitted:
                held = kv.holders[request.sequence_id]
                assert held.committed_tokens == self.committed.get(request.request_id, 0)
                assert held.committed_tokens <= held.reserved_tokens <= request.kv_tokens
        assert len(core.waiting) <= core.config.max_queue
        sequences = [r.sequence_id for r in core.open.values() if r.admitted]
        assert sorted(sequences) == sorted(kv.holders)
        assert not set(sequences) & set(kv.quarantined)
        if core.lifecycle is LifecycleState.FAILED:
            assert all(job.answered for job in core.in_flight.values())
            assert not core.waiting
            assert core.health.why
        ended = [event.request.request_id for event in self.events if isinstance(event, RequestEnded)]
        assert len(set(ended)) == len(ended)
        assert set(ended) | set(core.open) == set(range(self.next_id))
        done = [event.job.job_id for event in self.events if isinstance(event, JobEnded)]
        assert len(set(done)) == len(done)
        for event in self.events:
            if isinstance(event, JobEnded):
                state = event.job.kv.state
                assert state not in (KvTxnState.RESERVED, KvTxnState.SUBMITTED)
                if event.job.state is JobState.QUARANTINED:
                    assert state is KvTxnState.UNKNOWN
                if event.job.error is not None:  # a request whose job failed did not complete
                    assert event.job.request.outcome is not Outcome.COMPLETED

    def teardown(self):
        if not hasattr(self, "core"):
            return
        core = self.core
        core.begin_shutdown(self.now)
        self.ring_withdraws()
        assert self.ring is not Ring.HELD  # FI13: what was not submitted is not submitted now
        if self.ring is Ring.BACK:
            self.withdrawn()
        elif self.submitting is not None:
            core.submit_returned(self.submitting, 0, self.now)
            self.submitted.append(self.submitting)
        if self.completing is not None:
            core.completed(self.completing, self.now)
        for job in self.submitted:
            if core.wait_returned(job, 0, self.now, exception=False):
                core.completed(job, self.now)
        counts.update(resets=len(self.old_pools), stale=core.stale_completions, runs=1)
        assert core.drained
        core.finish_shutdown(self.now)
        assert not core.open
        assert core.pool.leased == 0
        assert not core.kv.holders
        assert core.lifecycle in (LifecycleState.CLOSED, LifecycleState.FAILED)
        states = [event.new for event in self.events if isinstance(event, LifecycleChanged)]
        assert states[:2] == [LifecycleState.WARMING, LifecycleState.READY]


CoreMachine.TestCase.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=50, deadline=None, derandomize=FUZZ is None
)
TestCore = CoreMachine.TestCase


def test_the_machine_came_to_the_rare_places():
    assert counts["resets"] > counts["runs"] / 10, counts
    assert counts["stale"] > 0, counts
    assert counts["held, submitted"] > 0, counts
    assert counts["withdrawn"] > 0, counts


drop_queued = Core._drop_queued


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("_release_permit", lambda self, job: setattr(job, "holds_permit", False)),
        ("_mark_unknown", lambda self, job, why: None),
        ("_stale", lambda self, job, now: None),
        ("_note", staticmethod(lambda request, error: None)),
        ("withdrawn", lambda self, job, now: setattr(self, "_submitting", None)),
        ("_held_back", property(lambda self: None)),
        ("_drop_queued", lambda self, make, now, held: drop_queued(self, make, now, None)),
    ],
)
def test_the_machine_sees_a_broken_core(monkeypatch, method, broken):
    monkeypatch.setattr(Core, method, broken)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of leases that a broken core loses
        with pytest.raises((AssertionError, KeyError, ExceptionGroup, ValueError)):
            run_state_machine_as_test(
                CoreMachine,
                settings=settings(
                    max_examples=600,
                    stateful_step_count=50,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],  # any example will do: no need to shrink it
                    report_multiple_bugs=False,
                ),
            )
        gc.collect()
