"""The compiled twin and the executor in the loop: the same tables, to the nanosecond."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import CLOSED, MS, STARTED, US, profile

from caltrio.config import ExecutorConfig, JobOrder, KvPolicy
from caltrio.events import LifecycleChanged
from caltrio.scenario import Scenario
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
from caltrio.timing import Distribution, Jitter
from caltrio.workload.requests import Request
from caltrio.workload.spec import Arrivals, Lengths, Sampling, Workload
from sim.fast import run_twin
from sim.run import simulate

EXAMPLES = int(os.environ.get("CALTRIO_PARITY_EXAMPLES", "300"))


def plain(table):
    return {name: table.column(name).to_pylist() for name in table.column_names}


def same(scenario, requests):
    """Both run; returns the twin's, after having compared everything."""
    events = []
    executor = simulate(scenario, requests=requests, listeners=[events.append])
    twin = run_twin(scenario, requests, tables=True)
    # What it leaves to the executor is what ends there in distrust, and nothing else.
    states = [event.new for event in events if isinstance(event, LifecycleChanged)]
    assert (twin.executor_because is not None) == (states != [*STARTED, *CLOSED])
    assert plain(twin.requests) == plain(executor.requests)
    ours, theirs = plain(twin.jobs), plain(executor.jobs)
    for name, column in theirs.items():
        assert ours[name] == column, name
    return twin, executor


# Durations that collide often: ties are where two implementations differ.
SHORT = st.sampled_from([0, 1, 5, 10, 10, 10, 20, 50])
JITTERS = st.sampled_from(
    [
        Jitter(),
        Jitter(),
        Jitter(Distribution.LOGNORMAL, 0.5, stages=("compute", "client")),
        Jitter(Distribution.EXPONENTIAL, 1.0, stages=("submit", "h2d", "d2h", "interrupt")),
        Jitter(Distribution.UNIFORM, 0.5, stages=("postprocess", "compute")),
    ]
)


def profiles(times):
    return st.builds(
        lambda submit, h2d, compute, decode, d2h, interrupt, post, client, jitter, slopes: profile(
            submit=submit * US, h2d=max(h2d * US, 1), compute=compute * US, decode=decode * US,
            d2h=max(d2h * US, 1), interrupt=interrupt * US, post=post * US, client=client * US,
            jitter=jitter, per_token_ps=slopes[0], per_pair_ps=slopes[1],
        ),
        times, times, times, times, times, times, times, times, JITTERS,
        st.sampled_from([(0, 0), (0, 0), (700, 0), (1_000_000, 333)]),
    )  # fmt: skip


PROFILES = st.one_of(profiles(SHORT), profiles(st.sampled_from([0, 10, 10, 20])))
SEMANTICS = st.builds(
    EngineSemantics,
    engines=st.integers(1, 4),
    overlap=st.booleans(),
    dma=st.sampled_from(Dma),
    dma_order=st.sampled_from(DmaOrder),
    compute_stages=st.sampled_from([(1.0,), (1.0,), (0.5, 0.5), (0.2, 0.3, 0.5)]),
    compute_sharing=st.sampled_from(
        [(1.0,), (1.0,), (1.0, 0.5), (1.0, 0.55), (1.0, 1.0), (1.0, 0.9, 0.4)]
    ),
    slot_release=st.sampled_from(SlotRelease),
    completion_signal=st.sampled_from(CompletionSignal),
    completion_order=st.sampled_from(CompletionOrder),
    submit_when_full=st.sampled_from(SubmitWhenFull),
)
REQUEST = st.tuples(
    st.sampled_from([0, 0, 1, 10, 20, 50, 100, 333]),
    st.sampled_from([0, 1, 1, 2, 5, 10, 16, 25, 40]),
    st.integers(0, 7),
)
# Few requests shrink well; many are where jobs meet.
REQUESTS = st.one_of(
    st.lists(REQUEST, min_size=1, max_size=12), st.lists(REQUEST, min_size=12, max_size=20)
).map(
    lambda found: [
        Request(index, arrival * US, prompt, output)
        for index, (arrival, prompt, output) in enumerate(sorted(found, key=lambda row: row[0]))
    ]
)
TIMEOUT = st.sampled_from([None, None, 1, 20 * US, 100 * US, 200 * US, 3 * MS])


@st.composite
def scenarios(draw):
    grow = draw(st.booleans())
    calm = draw(st.booleans())  # nobody is refused, nothing is late: more jobs meet
    timeout = st.none() if calm else TIMEOUT
    admission = draw(timeout)
    semantics = draw(SEMANTICS)
    most = semantics.engines if semantics.submit_when_full is SubmitWhenFull.BUSY else 5
    limits = ExecutorConfig(
        max_inflight=draw(st.integers(1, most)),
        max_active_sequences=draw(st.sampled_from([1, 2, 3, 4, 6, 9])),
        max_queue=50 if calm else draw(st.sampled_from([0, 1, 3, 50])),
        kv_capacity_tokens=1000 if calm else draw(st.sampled_from([12, 45, 45, 60, 100])),
        admission_timeout_ns=admission if admission or not grow else (100 * MS if calm else 100 * US),
        queue_timeout_ns=draw(timeout),
        execution_timeout_ns=draw(
            st.none() if calm else st.sampled_from([None, None, None, 5 * MS, 60 * US])
        ),
        grace_ns=draw(st.sampled_from([60_000 * MS, 60_000 * MS, 10 * US])),
        kv_policy=KvPolicy.GROW if grow else KvPolicy.FULL,
        order=draw(st.sampled_from(JobOrder)),
    )
    clients = draw(st.sampled_from([None, None, 1, 3, 8]))
    arrivals = Arrivals("constant", rate=1.0) if clients is None else Arrivals(clients=clients)
    workload = Workload(
        arrivals=arrivals,
        prefill_chunk_tokens=draw(st.sampled_from([None, None, 1, 7, 16])),
        sampling=draw(st.sampled_from([Sampling.HOST, Sampling.HOST, Sampling.DEVICE])),
        client_time_ns=draw(st.sampled_from([None, None, 0, 20 * US])),
    )
    return Scenario(
        seed=draw(st.integers(0, 3)),
        timing=draw(PROFILES),
        semantics=semantics,
        workload=workload,
        executor=limits,
    )


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(scenario=scenarios(), requests=REQUESTS)
def test_the_twin_is_the_executor(scenario, requests):
    same(scenario, requests)


def test_a_request_that_is_admitted_at_its_deadline():
    """Request 1 expires, which admits request 2 at its own deadline: its job is late at once.

    A deadline is the last of its instant: the client of request 3 goes on first, also where a later
    deadline is pending already and this one wakes the executor's timer early.
    """
    prompts = [30, 40, 10, 55, 5, 5]
    requests = [Request(index, 0, prompt, 1) for index, prompt in enumerate(prompts)]
    scenario = Scenario(
        timing=profile(compute=MS),
        workload=Workload(arrivals=Arrivals(clients=4)),
        executor=ExecutorConfig(
            kv_capacity_tokens=60, admission_timeout_ns=20 * US, max_active_sequences=8, max_queue=8
        ),
    )
    twin, _ = same(scenario, requests)
    assert (twin.facts.admitted_ns == 20 * US).any()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("max_inflight", [1, 2])
@pytest.mark.parametrize("arrivals", [Arrivals(clients=6), Arrivals("poisson", rate=1.0)])
def test_every_preset_on_the_shipped_profile(preset, max_inflight, arrivals):
    workload = Workload(
        arrivals=arrivals,
        lengths=Lengths("lognormal", prompt_tokens=300, output_tokens=12),
        requests=40,
    )
    scenario = Scenario(
        seed=5,
        semantics=PRESETS[preset].semantics,
        workload=workload,
        executor=ExecutorConfig(max_inflight=max_inflight, max_active_sequences=4),
    )
    twin, executor = same(scenario, workload.build(5))
    assert twin.executor_because is None
    # The summary that is added up on the way says the same as the one from the tables.
    quick = run_twin(scenario, workload.build(5)).summary
    ours = quick.to_json()
    theirs = executor.summary.to_json()
    assert ours.pop("itl")["count"] == 0
    theirs.pop("itl")
    assert ours.pop("utilisation") == pytest.approx(theirs.pop("utilisation"))
    assert ours.pop("loaded_tokens_per_s") == pytest.approx(theirs.pop("loaded_tokens_per_s"))
    assert ours.pop("overlap") == pytest.approx(theirs.pop("overlap"))
    # Means of fractions depend in their last bits on the order of the requests.
    assert ours.pop("tpot") == pytest.approx(theirs.pop("tpot"))
    assert ours == theirs
    assert twin.summary == executor.summary


@pytest.mark.parametrize(
    ("timing", "arrival_ns", "why"),
    [(profile(), 2**62 - 10, "146 years"), (profile(compute=2**53), 0, "52 days")],
)
def test_times_that_the_twin_does_not_hold_are_left_to_the_executor(timing, arrival_ns, why):
    scenario = Scenario(timing=timing, workload=Workload(arrivals=Arrivals("constant", rate=1.0)))
    requests = [Request(0, arrival_ns, 1, 2)]
    twin = run_twin(scenario, requests, tables=True)
    assert why in twin.executor_because
    assert plain(twin.jobs) == plain(simulate(scenario, requests=requests).jobs)
