"""Generated scenarios obey every law; a model broken on purpose fails the law it breaks."""

import sys
from pathlib import Path

import pyarrow.compute as pc
import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import MS, US, profile, run

from caltrio.config import ExecutorConfig
from caltrio.core import kv as kv_module
from caltrio.core import scheduler
from caltrio.observe.metrics import summarise
from caltrio.semantics import (
    PRESETS,
    CompletionOrder,
    CompletionSignal,
    Dma,
    DmaOrder,
    EngineSemantics,
    SlotRelease,
    SubmitWhenFull,
)
from caltrio.workload.requests import Request
from sim import device as device_module
from sim import engine as engine_module

sys.path.insert(0, str(Path(__file__).parent))
import laws

STAGES = {"h2d": 200 * US, "compute": MS, "d2h": 300 * US}
TIMING = profile(submit=20 * US, interrupt=10 * US, post=50 * US, client=100 * US, **STAGES)

semantics_fields = st.builds(
    EngineSemantics,
    engines=st.integers(1, 4),
    overlap=st.booleans(),
    dma=st.sampled_from(Dma),
    dma_order=st.sampled_from(DmaOrder),
    compute_stages=st.sampled_from([(1.0,), (0.5, 0.5), (0.2, 0.3, 0.5)]),
    compute_sharing=st.sampled_from([(1.0,), (1.0, 0.5), (1.0, 0.55), (1.0, 1.0), (1.0, 0.9, 0.4)]),
    slot_release=st.sampled_from(SlotRelease),
    completion_signal=st.sampled_from(CompletionSignal),
    completion_order=st.sampled_from(CompletionOrder),
    submit_when_full=st.just(SubmitWhenFull.BLOCK),
)
requests_strategy = st.lists(
    st.tuples(st.integers(0, 10 * MS), st.integers(1, 50), st.integers(0, 6)),
    min_size=1,
    max_size=12,
).map(
    lambda found: [
        Request(index, arrival, prompt, output)
        for index, (arrival, prompt, output) in enumerate(sorted(found))
    ]
)


class InSystem:
    """Integrates the number of requests in the system while the run goes."""

    def __init__(self, requests):
        self.arrivals = sorted(request.arrival_ns for request in requests)
        self.integral = 0
        self.ended = 0
        self.last_end = 0

    def __call__(self, event):
        if type(event).__name__ == "RequestEnded":
            # Each adds the time from the end back to the start of counting; arrivals take theirs off.
            self.integral += event.now_ns
            self.ended += 1
            self.last_end = max(self.last_end, event.now_ns)

    def total_ns(self):
        return self.integral - sum(self.arrivals)


def check(requests, semantics, max_inflight, max_sequences, kv):
    counter = InSystem(requests)
    done = run(
        requests,
        semantics=semantics,
        timing=TIMING,
        max_inflight=max_inflight,
        max_active_sequences=max_sequences,
        kv_capacity_tokens=kv,
        listeners=[counter],
    )
    laws.nothing_lost(requests, done)
    laws.nothing_early(done)
    laws.nothing_shared(done, semantics)
    laws.in_flight_limit(done, max_inflight)
    laws.kv_within(done, kv, max_sequences)
    laws.completion_order(done, semantics)
    laws.work_done(done, STAGES["compute"])
    laws.bottleneck(done, semantics, STAGES)
    laws.utilisation_at_most_one(done)
    laws.littles_law(counter.total_ns(), done, max(counter.last_end, 1))
    return done


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=requests_strategy,
    semantics=semantics_fields,
    max_inflight=st.integers(1, 4),
    max_sequences=st.integers(1, 5),
    kv=st.integers(60, 200),
)
def test_every_law_holds(requests, semantics, max_inflight, max_sequences, kv):
    check(requests, semantics, max_inflight, max_sequences, kv)


BURST = [Request(index, 0, 10, 3) for index in range(8)]


def broken(preset="full-duplex", max_inflight=2, kv=10**6, **changes):
    semantics = evolve(PRESETS[preset].semantics, **changes)
    return check(BURST, semantics, max_inflight, 8, kv)


def test_the_unbroken_model_passes():
    for preset in PRESETS:
        broken(preset)


def test_a_channel_that_serves_two_at_once_is_caught(monkeypatch):
    original = engine_module.Channel._next

    def never_busy(self):
        self._busy = False
        original(self)

    monkeypatch.setattr(engine_module.Channel, "_next", never_busy)
    with pytest.raises(AssertionError, match="channel|die"):
        broken()


def test_a_slot_given_twice_is_caught(monkeypatch):
    monkeypatch.setattr(engine_module.Engine, "free_slot", lambda self, engine: 0)
    with pytest.raises(AssertionError, match="slot 0"):
        broken()


def test_a_device_lock_that_does_not_lock_is_caught(monkeypatch):
    original = engine_module.Engine.__init__

    def unlocked(self, *arguments):
        original(self, *arguments)
        self._whole = None

    monkeypatch.setattr(engine_module.Engine, "__init__", unlocked)
    with pytest.raises(AssertionError, match="device"):
        broken("serial")


def test_a_job_delivered_before_wait_is_caught(monkeypatch):
    original = scheduler.Core.submit_returned

    def early(self, job, rc, now_ns):
        original(self, job, rc, now_ns)
        self._answer(job, now_ns)

    monkeypatch.setattr(scheduler.Core, "submit_returned", early)
    with pytest.raises(AssertionError):
        broken()


def test_a_permit_given_back_too_early_is_caught(monkeypatch):
    original = scheduler.Core.submit_returned

    def early(self, job, rc, now_ns):
        original(self, job, rc, now_ns)
        self.in_flight.pop(job.job_id, None)
        self._load[job.share] -= 1
        self._stage(now_ns)

    def lenient(self, job):
        self.in_flight.pop(job.job_id, None)
        job.holds_permit = False

    monkeypatch.setattr(scheduler.Core, "submit_returned", early)
    monkeypatch.setattr(scheduler.Core, "_release_permit", lenient)
    semantics = EngineSemantics(engines=4, submit_when_full=SubmitWhenFull.BLOCK)
    with pytest.raises(AssertionError):
        check(BURST, semantics, 1, 8, 10**6)


def test_kv_that_is_never_refused_is_caught(monkeypatch):
    monkeypatch.setattr(kv_module.KvCoordinator, "fits", lambda self, tokens: True)
    with pytest.raises(AssertionError):
        broken(kv=20)


def test_compute_that_is_skipped_is_caught(monkeypatch):
    monkeypatch.setattr(
        engine_module, "split_permille", lambda duration, parts: [duration // 2 for _ in parts]
    )
    with pytest.raises(AssertionError):
        broken()


def test_completions_out_of_order_are_caught(monkeypatch):
    original = device_module.SimDevice._offer

    def any_order(self):
        was, self.semantics = self.semantics, evolve(self.semantics, completion_order="any")
        original(self)
        self.semantics = was

    requests = [Request(0, 0, 40, 2), Request(1, 0, 1, 2)]
    timing = profile(compute=0, per_token_ps=10**9)
    semantics = EngineSemantics(compute_sharing=(1.0, 1.0))
    monkeypatch.setattr(device_module.SimDevice, "_offer", any_order)
    done = run(requests, semantics=semantics, timing=timing, max_inflight=2)
    with pytest.raises(AssertionError):
        laws.completion_order(done, semantics)


def test_a_lost_request_is_caught():
    done = run(BURST, timing=TIMING)
    with pytest.raises(AssertionError):
        laws.nothing_lost([*BURST, Request(99, 0, 1, 1)], done)


def test_a_wrong_arrival_stamp_breaks_littles_law(monkeypatch):
    original = scheduler.Core.submit_request

    def late(self, request_id, prompt, output, now_ns, *, warmup):
        request = original(self, request_id, prompt, output, now_ns)
        request.arrival_ns += MS
        return request

    monkeypatch.setattr(scheduler.Core, "submit_request", late)
    with pytest.raises(AssertionError):
        broken()


def test_speeds_that_add_up_to_too_much_break_the_bottleneck_bound(monkeypatch):
    monkeypatch.setattr(
        engine_module.SharedUnit,
        "_progress",
        _generous(engine_module.SharedUnit._progress),
    )
    with pytest.raises(AssertionError):
        broken("shared-compute")


def _generous(original):
    def progress(self):
        original(self)
        for turn in self._running:
            turn.remaining -= turn.remaining // 2

    return progress


def test_limits_are_checked():
    with pytest.raises(ValueError, match="max_inflight is 0"):
        ExecutorConfig(max_inflight=0)


def test_a_stage_that_never_ends_in_time_breaks_the_utilisation_bound():
    done = run(BURST, timing=TIMING)
    late = pc.add(done.jobs.column("d2h_end_ns"), 10**9)  # ends after the run has
    where = done.jobs.column_names.index("d2h_end_ns")
    jobs = done.jobs.set_column(where, "d2h_end_ns", late)
    laws.utilisation_at_most_one(done)
    with pytest.raises(AssertionError, match="d2h"):
        laws.utilisation_at_most_one(evolve(done, summary=summarise(jobs, done.requests)))
