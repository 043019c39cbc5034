"""Capacity: the rate found is where the SLO changes, the fleet found is the smallest that holds."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from support import profile

from caltrio.cli import run as caltrio
from caltrio.config import ExecutorConfig
from caltrio.errors import InputError
from caltrio.observe.metrics import OUTCOMES, RequestFacts, request_facts
from caltrio.scenario import Scenario
from caltrio.semantics import PRESETS
from caltrio.workload.requests import Request
from caltrio.workload.spec import Arrivals, Lengths, Workload
from sim import capacity as module
from sim.capacity import (
    Objective,
    Question,
    at_rate,
    cells_of,
    cost_per_million,
    critical_cards,
    critical_rate,
    find_capacity,
    replication,
    servable,
    traffic_of,
)
from sim.fast import Router, run_fleet, run_twin
from sim.run import simulate

AZURE = Path(__file__).parents[2].parent / "shared" / "traces" / "AzureLLMInferenceTrace_conv.csv"
needs_azure = pytest.mark.skipif(not AZURE.exists(), reason="the public traces are not here")
MS = 10**6
S = 10**9


def made_up(*, kind="poisson", tokens=4, timing=None, **limits):
    rate = None if kind == "closed" else 1.0
    return Scenario(
        seed=3,
        timing=timing or profile(),
        workload=Workload(
            arrivals=Arrivals(kind, rate=rate), lengths=Lengths(prompt_tokens=8, output_tokens=tokens)
        ),
        executor=ExecutorConfig(**limits),
    )


def question(scenario, objective, hypotheses=("full-duplex",), limits=(1,), **more):
    cells = cells_of(scenario, hypotheses, limits)
    return Question(scenario, cells, objective, traffic_of(scenario), **{"requests": 300, **more})


# --- the search -----------------------------------------------------------------------------------
@pytest.mark.parametrize("guess", [0.001, 0.3, 1.234, 50.0])
@pytest.mark.parametrize("edge", [0.02, 1.234, 7.9])
def test_the_rate_found_is_just_below_the_edge(guess, edge):
    asked = []

    def missed_at(rate):
        asked.append(rate)
        return ("TPOT",) if rate > edge else ()

    rate, missed = critical_rate(missed_at, guess, 1e-3, 8.0)
    assert rate <= edge < rate * 1.005
    assert missed == ("TPOT",)
    assert len(asked) <= 22


def test_where_nothing_holds_and_where_all_does():
    assert critical_rate(lambda _rate: ("TTFT",), 1.0, 0.01, 5.0) == (0.0, ("TTFT",))
    assert critical_rate(lambda _rate: (), 1.0, 0.01, 5.0) == (5.0, ("saturation",))


@pytest.mark.parametrize("guess", [1, 7, 40, 500])
@pytest.mark.parametrize("edge", [1, 2, 13, 99, 100])
def test_the_fewest_cards(guess, edge):
    assert critical_cards(lambda cards: cards >= edge, guess, 100) == edge


def test_more_cards_than_the_most():
    asked = []

    def holds(cards):
        asked.append(cards)
        return False

    assert critical_cards(holds, 5, 100) is None
    assert asked[-1] == 100


# --- what has to hold -----------------------------------------------------------------------------
def facts(ttft_ms, tpot_ms, outcome=None):
    """Requests with two tokens each, a second apart."""
    count = len(ttft_ms)
    arrival = np.arange(count) * S
    first = arrival + np.array(ttft_ms) * MS
    last = first + np.array(tpot_ms) * MS
    fate = np.zeros(count, np.int64) if outcome is None else np.array(outcome)
    completed = OUTCOMES.index("completed")
    return RequestFacts(
        arrival, arrival, first, last, last, np.full(count, 2), np.full(count, 9),
        np.where(fate == 0, completed, OUTCOMES.index("refused")), {},
    )  # fmt: skip


def missed(objective, *arguments):
    made = facts(*arguments)
    return objective.missed(made, np.ones(len(made.outcome), bool))


def test_percentiles_and_losses():
    fine = [10] * 100
    slow = [10] * 97 + [90] * 3
    both = Objective(50 * MS, 50 * MS)
    assert missed(both, fine, fine) == ()
    assert missed(both, slow, fine) == ("TTFT",)
    assert missed(both, slow, slow) == ("TTFT", "TPOT")
    assert missed(both, [10] * 100, [50] * 100) == ()  # the bound itself is good
    assert missed(Objective(50 * MS), fine, slow) == ()
    assert missed(both, fine, fine, [0] * 99 + [1]) == ()
    assert missed(both, fine, fine, [0] * 98 + [1, 1]) == ("lost",)
    assert missed(both, fine, fine, [1] * 100) == ("lost",)


def test_goodput_is_of_each_request_by_itself():
    late, slow = [10] * 97 + [90] * 3, [90] * 3 + [10] * 97
    assert missed(Objective(50 * MS, 50 * MS, 0.94), late, slow) == ()
    assert missed(Objective(50 * MS, 50 * MS, 0.95), late, slow) == ("goodput",)
    refused = [0] * 90 + [1] * 10
    assert missed(Objective(50 * MS, goodput=0.9), [10] * 100, slow, refused) == ()
    assert missed(Objective(50 * MS, goodput=0.91), [10] * 100, slow, refused) == ("goodput",)


def test_only_what_counts_is_judged():
    made = facts([90] * 10 + [10] * 90, [10] * 100)
    assert Objective(50 * MS).missed(made, np.arange(100) >= 10) == ()


def test_an_objective_has_a_bound():
    with pytest.raises(ValueError, match="no bound to hold"):
        Objective(goodput=0.9)


# --- the traffic ----------------------------------------------------------------------------------
@pytest.fixture
def trace(tmp_path):
    """Three requests at once, then a pause: a rhythm that a resample must keep."""
    file = tmp_path / "trace.csv"
    rows = [f"{i // 3 * 3},{i + 1},{i % 7 + 2}" for i in range(600)]
    file.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]), encoding="utf-8")
    return file


def test_a_trace_is_drawn_in_blocks_with_its_gaps(trace):
    scenario = Scenario(workload=Workload().with_trace(str(trace)))
    traffic = traffic_of(scenario)
    unit = traffic.draw(5, 1_000)
    assert len(unit) == 1_000
    assert unit[0, 0] == 0
    row = unit[:, 1] - 1  # its place in the trace
    follows = np.diff(row) % 600 == 1
    assert follows.mean() > 0.97  # 19 seams
    gaps = np.diff(unit[:, 0]) / S
    within = follows & (row[1:] > 0)
    expected = np.where(row[1:] % 3 == 0, 3.0, 0.0) / (597 / 599)
    np.testing.assert_allclose(gaps[within], expected[within], atol=2e-9)
    assert len(np.unique(row[:: module.BLOCK])) == 20
    assert (unit[:500] == traffic.draw(5, 500)).all()
    assert not (unit == traffic.draw(6, 1_000)).all()


def test_mean_rate_of_many_draws_is_one(trace):
    traffic = traffic_of(Scenario(workload=Workload().with_trace(str(trace))))
    spans = [traffic.draw(seed, 1_000)[-1, 0] / 999 / S for seed in range(50)]
    assert np.mean(spans) == pytest.approx(1, rel=0.01)


def test_scaling_keeps_the_pattern():
    unit = traffic_of(made_up()).draw(1, 300)
    slow = at_rate(unit, 0.1)
    assert (slow[:, 1:] == unit[:, 1:]).all()
    np.testing.assert_allclose(slow[:, 0], unit[:, 0] * 10.0, atol=1)
    with pytest.raises(OverflowError):
        at_rate(unit, 1e-9)


def test_made_up_arrivals_are_those_that_simulate_would_make():
    scenario = made_up()
    unit = traffic_of(scenario).draw(7, 300)
    workload = evolve(scenario.workload, requests=300, arrivals=Arrivals("poisson", rate=4.0))
    built = [each.arrival_ns for each in workload.build(7)]
    np.testing.assert_allclose(at_rate(unit, 4.0)[:, 0], built, atol=2)


def test_closed_clients_become_poisson():
    traffic = traffic_of(made_up(kind="closed"))
    assert traffic.was_closed
    assert (traffic.draw(1, 300) == traffic_of(made_up()).draw(1, 300)).all()


def test_a_trace_that_arrives_at_once_has_no_rate(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n0,5,5\n", encoding="utf-8")
    with pytest.raises(InputError, match="all requests arrive at once"):
        traffic_of(Scenario(workload=Workload().with_trace(str(file))))


def test_what_no_card_can_serve():
    requests = np.array([[0, 10, 1], [0, 11, 1], [0, 5, 6], [0, 5, 7], [0, 0, 1], [0, 10, 0]])
    fits = servable(requests, ExecutorConfig(kv_capacity_tokens=10))
    assert fits.tolist() == [True, False, True, False, False, True]
    made = [Request(index, *row) for index, row in enumerate(requests.tolist())]
    ran = run_twin(evolve(made_up(), executor=ExecutorConfig(kv_capacity_tokens=10)), made)
    assert (ran.facts.completed == fits).all()


# --- one card -------------------------------------------------------------------------------------
OBJECTIVE = Objective(30 * MS, 3 * MS)


def found(seed=3, **more):
    asked = question(made_up(), OBJECTIVE, **more)
    return asked, replication(asked, seed)


def executor_at(asked, seed, rate, semantics="full-duplex", limit=1):
    """The facts of the executor in the loop on what a replication sent; and who counts."""
    unit = asked.traffic.draw(seed, asked.requests)
    requests = [Request(index, *row) for index, row in enumerate(at_rate(unit, rate).tolist())]
    scenario = evolve(
        asked.scenario,
        seed=seed,
        semantics=PRESETS[semantics].semantics,
        executor=evolve(asked.scenario.executor, max_inflight=limit),
        workload=asked.traffic.workload,
    )
    ran = request_facts(simulate(scenario, requests=requests).requests)
    order = np.argsort(ran.arrival_ns, kind="stable")
    ran = RequestFacts(
        *(getattr(ran, name)[order] for name in (
            "arrival_ns", "admitted_ns", "first_token_ns", "last_token_ns", "ended_ns",
            "tokens_out", "kv_tokens", "outcome",
        )), ran.refusals,
    )  # fmt: skip
    counted = servable(unit, scenario.executor)
    counted[: len(unit) // 10] = False
    return ran, counted


def test_the_executor_holds_at_the_rate_found_and_not_above():
    asked, [said] = found()
    assert 0 < said.rate < said.saturation
    assert said.missed
    facts, counted = executor_at(asked, 3, said.rate)
    assert asked.objective.missed(facts, counted) == ()
    facts, counted = executor_at(asked, 3, 1.1 * said.rate)
    assert asked.objective.missed(facts, counted)


def test_saturation_is_what_a_card_completes_without_rest():
    _, [said] = found()
    # 1 prefill and 3 decode steps of 1 ms and 2 ns each, one at a time.
    assert said.saturation == pytest.approx(250, rel=0.02)  # less what the last ones had left
    easy = question(made_up(), Objective(3600 * S))
    [said] = replication(easy, 3)
    assert said.rate == said.saturation or said.missed == ("overload",)
    assert said.rate > 200


def test_overload_never_holds_whatever_the_bound():
    asked = question(made_up(), Objective(3600 * S))
    card = module._Card(
        asked, evolve(asked.scenario, workload=asked.traffic.workload), "x", asked.traffic.draw(3, 300)
    )
    assert card._missed_at(2_000.0) == ("overload",)


def test_even_one_request_alone_is_too_slow():
    asked = question(made_up(), Objective(tpot_ns=MS // 2))
    [cell] = find_capacity(asked, 3)
    assert cell.holds_at == 0
    assert cell.alone_missed == ("TPOT",)
    assert cell.alone_tpot_ns == pytest.approx(MS, rel=0.01)
    assert cell.by_division(10) is None


def test_requests_that_arrive_at_once_hold_at_no_rate(trace):
    scenario = evolve(made_up(), workload=Workload().with_trace(str(trace)))
    asked = question(scenario, Objective(tpot_ns=round(1.2 * MS)))
    [cell] = find_capacity(asked, 2)
    assert cell.rate.estimate == 0
    assert not cell.alone_missed
    assert cell.limited_by == ("TPOT",)


def test_losses_end_what_a_short_queue_holds():
    scenario = made_up(max_queue=0, max_active_sequences=1)
    [said] = replication(question(scenario, Objective(3600 * S)), 3)
    assert said.missed == ("lost",)
    assert said.rate < 0.1 * said.saturation
    [more] = replication(question(scenario, Objective(3600 * S, goodput=0.8)), 3)
    assert more.missed == ("goodput",)
    assert more.rate > 5 * said.rate


def test_an_execution_deadline_that_passes_does_not_hold():
    timing = profile(compute=2 * MS)
    scenario = made_up(timing=timing, execution_timeout_ns=MS)
    [said] = replication(question(scenario, OBJECTIVE), 3)
    assert said.rate == 0
    assert said.alone_missed == ("faults",)


def test_with_one_in_flight_all_hypotheses_are_the_same():
    unit = traffic_of(made_up()).draw(1, 300)
    for rate in (150.0, 1_000.0):
        runs = [
            run_twin(evolve(made_up(), semantics=preset.semantics), at_rate(unit, rate)).facts.ended_ns
            for preset in PRESETS.values()
        ]
        assert all((run == runs[0]).all() for run in runs)


def test_cells_share_requests_and_hints_change_little():
    names, limits = ("serial", "die-pipelined"), (1, 2)
    asked, said = found(hypotheses=names, limits=limits)
    assert said[0] == said[2]
    assert said[3].rate > 1.3 * said[0].rate
    _, other = found(seed=4, hypotheses=names, limits=limits)
    hinted = replication(asked, 4, said)
    for one, two in zip(other, hinted, strict=True):
        assert two.rate == pytest.approx(one.rate, rel=0.006)


def test_replications_make_an_interval():
    asked, _ = found()
    [cell] = find_capacity(asked, 5)
    rates = [replication(asked, 3 + index)[0].rate for index in range(5)]
    assert cell.rate.estimate == pytest.approx(np.mean(rates), rel=0.01)
    half = 2.776445 * np.std(rates, ddof=1) / math.sqrt(5)
    assert cell.holds_at == pytest.approx(np.mean(rates) - half, rel=0.02)
    assert cell.held == np.mean([each.rate >= cell.holds_at for each in cell.found])


# --- fleets ---------------------------------------------------------------------------------------
def test_the_fleet_found_is_the_smallest_that_holds():
    asked, [said] = found(rate=1_000.0)
    unit = asked.traffic.draw(3, asked.requests)

    def holds(cards):
        ran = run_fleet(evolve(asked.scenario, seed=3), at_rate(unit, 1_000.0), cards).facts
        counted = np.arange(len(unit)) >= len(unit) // 10
        return not asked.objective.missed(ran, counted)

    assert said.cards
    assert holds(said.cards)
    assert not holds(said.cards - 1)
    # A router finds idle cards: fewer than by division, more than if cards never rested.
    assert 1_000 / said.saturation <= said.cards < 1_000 / said.rate


def test_a_blind_router_takes_more_cards():
    scenario = made_up()
    lengths = Lengths("lognormal", prompt_tokens=8, output_tokens=20)
    scenario = evolve(scenario, workload=evolve(scenario.workload, lengths=lengths))
    cards = []
    for router in (Router.LEAST_OUTSTANDING, Router.ROUND_ROBIN):
        [said] = replication(question(scenario, OBJECTIVE, rate=1_000.0, router=router), 3)
        cards.append(said.cards)
    assert cards[1] > 1.1 * cards[0]


def test_too_large_a_fleet_is_not_simulated():
    asked, [said] = found(rate=1e6)
    assert said.cards is None
    [cell] = find_capacity(asked, 5)
    assert cell.cards is None
    assert cell.cards_needed is None
    assert cell.by_division(1e6) > 200


def test_cost():
    assert cost_per_million(2, 1.8, 0.5, 200) == pytest.approx(2 * 1.8 / 360_000 * 1e6)
    assert math.isnan(cost_per_million(2, 1.8, 0.5, 0))


# --- the trace ------------------------------------------------------------------------------------
@needs_azure
def test_azure_conversations_hold_at_the_rate_found_and_not_at_a_tenth_more():
    """By the executor in the loop, on one replication's own requests; and in the mean of fresh ones.

    Rates of single replications differ by more than a tenth, so there is no rate that all of
    them hold, and none a tenth above; what the interval says is checked on replications not used.
    """
    workload = evolve(Workload().with_trace(str(AZURE)), requests=300)
    scenario = evolve(Scenario(workload=workload), seed=1)
    asked = question(
        scenario, Objective(2 * S, 120 * MS), ("die-pipelined",), (2,), requests=250, rate=10.0
    )
    [cell] = find_capacity(asked, 6)
    assert cell.limited_by == ("TPOT",)
    assert 40 <= cell.cards_needed <= 80
    rate = cell.found[0].rate
    ran, counted = executor_at(asked, 1, rate, "die-pipelined", 2)
    assert asked.objective.missed(ran, counted) == ()
    ran, counted = executor_at(asked, 1, 1.1 * rate, "die-pipelined", 2)
    assert asked.objective.missed(ran, counted) == ("TPOT",)
    one_card = evolve(asked, rate=None)
    fresh = [replication(one_card, seed, cell.found[:1])[0].rate for seed in range(50, 66)]
    assert cell.rate.low <= np.mean(fresh) < 1.1 * cell.rate.high
    assert np.mean([each >= cell.holds_at for each in fresh]) > 0.5
    assert np.mean([each >= 1.1 * cell.rate.high for each in fresh]) < 0.5


# --- the command ----------------------------------------------------------------------------------
TINY = """schema = 1
timing = "quick"
[workload.arrivals]
kind = "closed"
clients = 4
[workload.lengths]
kind = "lognormal"
prompt_tokens = 200
output_tokens = 20
"""
FEW = ["--requests", "250", "--replications", "3", "--workers", "1"]


@pytest.fixture
def tiny(tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(TINY, encoding="utf-8")
    return str(file)


def test_the_command_prints_what_it_found(tiny, capsys):
    words = ["capacity", tiny, "--tpot-p99", "500us", "--rate", "2000", "--price", "1.5", *FEW]
    assert caltrio([*words, "--hypotheses", "serial,die-pipelined", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(cell["hypothesis"], cell["max_inflight"]) for cell in said["cells"]] == [
        ("serial", 1), ("serial", 2), ("die-pipelined", 1), ("die-pipelined", 2),
    ]  # fmt: skip
    assert said["closed_became_poisson"]
    cell = said["cells"][0]
    assert cell["rate_per_s"]["low"] == cell["holds_at_per_s"] > 0
    assert cell["cards"] <= cell["cards_by_division"] == math.ceil(2000 / cell["holds_at_per_s"])
    cost = cell["cards"] * 1.5 / (2000 * said["output_tokens"] * 3600) * 1e6
    assert cell["cost_per_million_tokens"] == pytest.approx(cost)
    assert caltrio([*words, "--semantics", "serial", "--max-inflight", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "TPOT 500 µs" in shown
    assert "the closed clients became Poisson arrivals" in shown
    assert "by division" in shown


def test_workers_change_nothing(tiny, capsys):
    words = ["capacity", tiny, "--tpot-p99", "500us", "--semantics", "serial", "--json", *FEW[:4]]
    assert caltrio([*words, "--workers", "1"]) == 0
    alone = capsys.readouterr().out
    assert caltrio([*words, "--workers", "2"]) == 0
    assert capsys.readouterr().out == alone


def test_a_bound_below_one_request_is_said_with_its_figure(tiny, capsys):
    words = ["capacity", tiny, "--tpot-p99", "10us", "--rate", "5", "--semantics", "serial", *FEW]
    assert caltrio(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 in flight: misses it even with one request at a time: TTFT P99" in shown


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "give a bound: --ttft-p99, --tpot-p99, or both"),
        (["--goodput", "0.9"], "give a bound"),
        (["--tpot-p99", "0s"], "'0s' is 0"),
        (["--tpot-p99", "-1ms"], "is negative"),
        (["--tpot-p99", "9999999h"], "too large"),
        (["--tpot-p99", "1ms", "--goodput", "1.1"], "is not in the range"),
        (["--tpot-p99", "1ms", "--rate", "0"], "is not in the range"),
        (["--tpot-p99", "1ms", "--price", "0"], "is not in the range"),
        (["--tpot-p99", "1ms", "--router", "best"], "is not one of"),
        (["--tpot-p99", "1ms", "--hypotheses", "triplex"], "'triplex' is unknown"),
        (["--tpot-p99", "1ms", "--hypotheses", ","], "give names"),
        (["--tpot-p99", "1ms", "--hypotheses", "own", "--semantics", "serial"], "not both"),
        (["--tpot-p99", "1ms", "--max-inflight", "1,x"], "give limits from 1 on"),
        (["--tpot-p99", "1ms", "--max-inflight", "0"], "give 1 to 4096"),
        (["--tpot-p99", "1ms", "--max-inflight", "3"], "above the 2 engine slots"),
        (["--tpot-p99", "1ms", "--limit", "300"], "how many a run has is --requests"),
        (["--tpot-p99", "1ms", "--requests", "100"], "is not in the range"),
        (["--tpot-p99", "1ms", "--rate", "5", "--requests", "100000"], "take too much memory"),
        (["--tpot-p99", "1ms", "--kv-tokens", "1"], "no request can be served"),
        (["--tpot-p99", "1ms", "--lengths", "fixed", "--output-tokens", "1"], "none has a TPOT"),
        (["--ttft-p99", "1ms", "--lengths", "fixed", "--output-tokens", "0"], "none has a TTFT"),
    ],
)
def test_what_cannot_be_answered_is_one_line(tiny, capsys, words, complaint):
    assert caltrio(["capacity", tiny, *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert complaint in output.err
    assert len(output.err.splitlines()) == 1


def test_an_interrupt_prints_nothing_but_that(tmp_path):
    file = tmp_path / "long.toml"
    file.write_text(TINY.replace("quick", "qwen3-8b"), encoding="utf-8")
    words = ["capacity", str(file), "--ttft-p99", "2s", "--replications", "1000", "--requests", "20000"]
    with subprocess.Popen(
        [Path(sys.executable).with_name("caltrio"), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ},
    ) as child:  # fmt: skip
        try:
            time.sleep(6)
            assert child.poll() is None
            child.send_signal(signal.SIGINT)
            out, complaint = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 130
    assert out == ""
    assert complaint == "caltrio: interrupted\n"
