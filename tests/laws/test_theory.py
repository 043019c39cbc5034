"""The compiled twin against queueing theory: within 99 % intervals of independent replications.

Formulas: L. Kleinrock, Queueing Systems I, Wiley 1975 (M/G/1: §5.6, M/M/c: §3.5); M. Reiser,
S. S. Lavenberg, Mean-value analysis of closed multichain queuing networks, J. ACM 27 (1980) 313-322.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
from support import profile

from caltrio.config import ExecutorConfig
from caltrio.scenario import Scenario
from caltrio.semantics import EngineSemantics
from caltrio.timing import Jitter
from caltrio.workload.requests import stream
from caltrio.workload.spec import Arrivals, Workload
from sim.fast import Router, run_fleet, run_twin
from sim.stats import mean_interval, paired_change

SERVICE = 1_000_000  # ns; H2D and D2H, 1 ns each, are a millionth of it
LEVEL = 0.99
EXPONENTIAL = Jitter("exponential", 1.0)
TENTH_FASTER = SERVICE * 9 // 10


def card(seed, jitter, service, **workload):
    """One job at a time, which is all compute."""
    return Scenario(
        seed=seed,
        timing=profile(compute=service, jitter=jitter),
        workload=Workload(arrivals=Arrivals("poisson", rate=1.0), **workload),  # only says: open
        executor=ExecutorConfig(max_active_sequences=1, max_queue=10**7, kv_capacity_tokens=10**9),
    )


def poisson(seed, count, gap_ns):
    """Requests of one job each: a prompt, of which nothing comes out."""
    rows = np.zeros((count, 3), np.int64)
    rows[:, 0] = np.rint(np.cumsum(stream(seed, "arrivals").exponential(gap_ns, count)))
    rows[:, 1] = 1
    return rows


def waits_ns(facts, left_out):
    return (facts.admitted_ns - facts.arrival_ns)[left_out:]


def holds(values, known, precision):
    """Is ``known`` in the interval? It has to be narrow enough to say."""
    interval = mean_interval(values, LEVEL)
    assert interval.half_width < precision * known
    return interval.low <= known <= interval.high


# --- one server -----------------------------------------------------------------------------------
LOAD = 0.7
SINGLE = {
    "M/M/1": (EXPONENTIAL, 1.0),
    "M/D/1": (Jitter(), 0.0),
    "M/G/1": (Jitter("lognormal", 0.7), 0.7),
}


def mean_waits(jitter, service=SERVICE):
    waits = []
    for seed in range(30):
        requests = poisson(seed, 50_000, SERVICE / LOAD)
        waits.append(waits_ns(run_twin(card(seed, jitter, service), requests).facts, 2_000).mean())
    return waits


@pytest.mark.parametrize("name", SINGLE)
def test_wait_for_one_server_is_that_of_pollaczek_and_khinchine(name):
    jitter, cv = SINGLE[name]
    known = LOAD / (1 - LOAD) * (1 + cv * cv) / 2 * SERVICE
    assert holds(mean_waits(jitter), known, 0.03)
    assert not holds(mean_waits(jitter, TENTH_FASTER), known, 0.03)


# --- several servers ------------------------------------------------------------------------------
SERVERS = 4


def erlang_c(servers, load):
    """The probability of waiting, at ``load`` of each server."""
    offered = servers * load
    last = offered**servers / math.factorial(servers) / (1 - load)
    return last / (last + sum(offered**n / math.factorial(n) for n in range(servers)))


def waits_for_cards(service=SERVICE):
    waits = []
    for seed in range(30):
        requests = poisson(seed, 60_000, SERVICE / 0.8 / SERVERS)
        run = run_fleet(card(seed, EXPONENTIAL, service), requests, SERVERS, Router.SHARED_QUEUE)
        waits.append(waits_ns(run.facts, 2_000).mean())
    return waits


def test_wait_for_cards_behind_one_queue_is_erlangs():
    known = erlang_c(SERVERS, 0.8) / (SERVERS * (1 - 0.8)) * SERVICE
    assert holds(waits_for_cards(), known, 0.05)
    assert not holds(waits_for_cards(TENTH_FASTER), known, 0.05)


MEAN_TOKENS = 400


def routed_waits(router):
    """Same seeds, same arrivals, same work: a job takes what its prompt says, on whichever card."""
    waits = []
    for seed in range(20):
        requests = poisson(seed, 20_000, SERVICE / 0.8 / SERVERS)
        tokens = stream(seed, "prompts").exponential(MEAN_TOKENS, len(requests))
        requests[:, 1] = np.maximum(np.rint(tokens), 1)
        scenario = Scenario(
            seed=seed,
            timing=profile(compute=0, per_token_ps=SERVICE * 1_000 // MEAN_TOKENS),
            workload=Workload(arrivals=Arrivals("poisson", rate=1.0)),
            executor=ExecutorConfig(max_active_sequences=1, max_queue=10**7, kv_capacity_tokens=10**9),
        )
        waits.append(waits_ns(run_fleet(scenario, requests, SERVERS, router).facts, 2_000).mean())
    return waits


def test_the_more_a_router_knows_the_shorter_is_the_wait():
    routers = (Router.ROUND_ROBIN, Router.POWER_OF_TWO, Router.LEAST_OUTSTANDING, Router.SHARED_QUEUE)
    waits = [routed_waits(router) for router in routers]
    for worse, better in pairwise(waits):
        assert paired_change(worse, better, LEVEL).high < 0


# --- a closed network -----------------------------------------------------------------------------
CLIENTS = 5
STATIONS = {"submit": 300_000, "compute": 1_000_000, "postprocess": 600_000}  # one server each
THINK = 1_500_000
CYCLES = 40_000


def mean_value_analysis(clients, demands, think):
    """Cycles a ns, exactly, for exponential servers in FIFO order and clients that think."""
    lengths = [0.0] * len(demands)
    rate = 0.0
    for count in range(1, clients + 1):
        times = [demand * (1 + length) for demand, length in zip(demands, lengths, strict=True)]
        rate = count / (think + sum(times))
        lengths = [rate * time for time in times]
    return rate


def rates(compute):
    """Cycles a ns in a part of the run that no run decides for itself."""
    known = mean_value_analysis(CLIENTS, STATIONS.values(), THINK)
    begin, end = 0.1 * CYCLES / known, 0.7 * CYCLES / known
    jitter = Jitter("exponential", 1.0, stages=(*STATIONS, "client"))
    requests = np.tile(np.array([0, 1, 1]), (CYCLES, 1))  # one job, one token, one cycle
    found = []
    for seed in range(20):
        scenario = Scenario(
            seed=seed,
            timing=profile(
                submit=STATIONS["submit"],
                compute=compute,
                post=STATIONS["postprocess"],
                client=THINK,
                jitter=jitter,
            ),
            semantics=EngineSemantics(engines=CLIENTS),  # a slot each: the submitter never waits
            workload=Workload(arrivals=Arrivals(clients=CLIENTS)),
            executor=ExecutorConfig(max_inflight=CLIENTS, max_active_sequences=CLIENTS),
        )
        ended = run_twin(scenario, requests).facts.ended_ns
        assert ended.max() > end
        found.append(((ended > begin) & (ended <= end)).sum() / (end - begin))
    return found


def test_throughput_of_a_closed_network_is_that_of_mean_value_analysis():
    known = mean_value_analysis(CLIENTS, STATIONS.values(), THINK)
    assert holds(rates(STATIONS["compute"]), known, 0.005)
    assert not holds(rates(STATIONS["compute"] * 9 // 10), known, 0.005)
    without_queues = min(CLIENTS / (THINK + sum(STATIONS.values())), 1 / max(STATIONS.values()))
    assert not holds(rates(STATIONS["compute"]), without_queues, 0.005)
