"""Random lives of a Core: the invariants of §5.1 and the conservation laws after every step."""

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

from caltrio.config import ExecutorConfig
from caltrio.core.job import JobState
from caltrio.core.lifecycle import LifecycleState
from caltrio.core.scheduler import Core
from caltrio.errors import RequestError
from caltrio.events import JobEnded, RequestEnded
from caltrio.manifest import TaskKind, qwen3_generation

ON_DEVICE = (JobState.SUBMITTED, JobState.CANCEL_REQUESTED)


class CoreMachine(RuleBasedStateMachine):
    @initialize(
        max_inflight=st.integers(1, 3),
        engines=st.integers(1, 3),
        sequences=st.integers(1, 4),
        queue=st.integers(0, 3),
        timeouts=st.booleans(),
    )
    def start(self, max_inflight, engines, sequences, queue, timeouts):
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
            ),
            qwen3_generation(),
            engines,
            self.events.append,
        )
        self.requests = []
        self.submitting = None
        self.submitted = []  # in order, not yet waited for
        self.completing = None
        self.next_id = 0

    def jobs(self):
        return [request.job for request in self.requests if request.job is not None]

    @rule(step=st.integers(0, 20))
    def time_passes(self, step):
        self.now += step

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
    @rule()
    def infer(self):
        self.submitting = self.core.next_submission(self.now)

    @precondition(lambda self: self.submitting is not None)
    @rule(code=st.sampled_from([0, 0, 0, 0, 17, 18]))
    def infer_returns(self, code):
        job, self.submitting = self.submitting, None
        if code == 0:
            self.submitted.append(job)
        self.core.submit_returned(job, code, self.now)

    @precondition(lambda self: self.submitted and self.completing is None)
    @rule(data=st.data(), code=st.sampled_from([0, 0, 0, 0, 0, 13, 28]), exception=st.booleans())
    def wait_returns(self, data, code, exception):
        job = self.submitted.pop(data.draw(st.integers(0, len(self.submitted) - 1)))
        exception = exception and code == 0 and data.draw(st.booleans())
        if self.core.wait_returned(job, code, self.now, exception=exception):
            self.completing = job

    @precondition(lambda self: self.completing is not None)
    @rule()
    def completes(self):
        job, self.completing = self.completing, None
        self.core.completed(job, self.now)

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

    @precondition(lambda self: self.next_id > 8)
    @rule()
    def shut_down(self):
        self.core.begin_shutdown(self.now)

    @invariant()
    def holds(self):
        if not hasattr(self, "core"):
            return
        core = self.core
        pool = core.pool
        assert pool.leased + pool.free + len(pool.quarantined) == pool.total
        assert core.kv.reserved_tokens == sum(held.reserved_tokens for held in core.kv.holders.values())
        assert 0 <= core.kv.reserved_tokens <= core.kv.capacity_tokens
        assert len(core.in_flight) <= core.config.max_inflight
        assert sum(core._load.values()) == len(core.in_flight)
        live = [job for job in self.jobs() if job.lease is not None and job.lease.alive]
        assert len(live) == pool.leased
        assert len({id(job.lease.slot) for job in live}) == len(live)  # §5.1 rule 3
        for job in live:
            assert job.lease.slot.generation_id == core.generation.generation_id  # rule 5
        for job in self.submitted:  # rule 7: what is on the device keeps its buffers
            assert job.state in ON_DEVICE
            assert job.lease.alive
            assert job.job_id in core.in_flight
        for held in core.kv.holders.values():  # rule 6: never more committed than reserved
            assert held.committed_tokens <= held.reserved_tokens
        assert len(core.waiting) <= core.config.max_queue
        sequences = [r.sequence_id for r in core.open.values() if r.admitted]
        assert sorted(sequences) == sorted(core.kv.holders)
        assert len(set(sequences)) == len(sequences)
        if core.lifecycle is LifecycleState.FAILED:
            assert all(job.answered for job in core.in_flight.values())
            assert not core.waiting
        ended = [event.request.request_id for event in self.events if isinstance(event, RequestEnded)]
        assert len(set(ended)) == len(ended)
        assert set(ended) | set(core.open) == set(range(self.next_id))
        done = [event.job.job_id for event in self.events if isinstance(event, JobEnded)]
        assert len(set(done)) == len(done)

    def teardown(self):
        if not hasattr(self, "core"):
            return
        self.core.begin_shutdown(self.now)
        if self.submitting is not None:
            self.core.submit_returned(self.submitting, 0, self.now)
            self.submitted.append(self.submitting)
        if self.completing is not None:
            self.core.completed(self.completing, self.now)
        for job in self.submitted:
            if self.core.wait_returned(job, 0, self.now, exception=False):
                self.core.completed(job, self.now)
        assert self.core.drained
        self.core.finish_shutdown(self.now)
        assert not self.core.open
        assert self.core.pool.leased == 0
        assert self.core.kv.reserved_tokens == 0
        assert self.core.lifecycle in (LifecycleState.CLOSED, LifecycleState.FAILED)


CoreMachine.TestCase.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
TestCore = CoreMachine.TestCase


def test_the_machine_sees_a_leaked_permit(monkeypatch):
    def leak(self, job):
        job.holds_permit = False

    monkeypatch.setattr(Core, "_release_permit", leak)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(
            CoreMachine,
            settings=settings(
                max_examples=200,
                deadline=None,
                database=None,
                phases=[Phase.generate],  # any example will do: no need to shrink it
                report_multiple_bugs=False,
            ),
        )
