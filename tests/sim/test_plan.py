"""Verdicts on intervals, the report, what changed since an earlier plan, and what would change it."""

import json
import math
import re
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from attrs import evolve
from support import MS, profile

from caltrio.cli import run as caltrio
from caltrio.config import ExecutorConfig
from caltrio.errors import InputError
from caltrio.planspec import PlanSpec
from caltrio.scenario import Scenario, scenario_from
from caltrio.semantics import PRESETS
from caltrio.signals import StoppedError
from caltrio.timing import Distribution, Jitter
from caltrio.workload.spec import Arrivals, Lengths, Workload
from sim import plan as plan_module
from sim.bounds import demand, most_requests_per_s
from sim.compare import changes, read_plan
from sim.fast import request_array, run_fleet, run_twin
from sim.plan import TwinDiffersError, judge, make_plan
from sim.report import sensitivity, write_report
from sim.sensitivity import SEQUENCES, Swing, break_even, gain, tornado
from sim.stats import Interval

JITTER = Jitter(Distribution.LOGNORMAL, 0.05)
BASE = Scenario(
    seed=1,
    timing=profile(submit=MS, h2d=MS, compute=8 * MS, d2h=MS, post=MS, jitter=JITTER),
    workload=Workload(
        arrivals=Arrivals("closed", clients=4),
        lengths=Lengths("lognormal", prompt_tokens=10, output_tokens=8),
        requests=30,
    ),
    plan=PlanSpec(("serial", "die-pipelined"), (1, 2, 4), (0.5, "saturated"), replications=4),
)


def planned(tmp_path, scenario):
    tmp_path.mkdir(exist_ok=True)
    return make_plan(scenario, tmp_path)


def reported(tmp_path, scenario):
    plan = planned(tmp_path, scenario)
    write_report(plan, sensitivity(plan), tmp_path, command="caltrio plan")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    plain = re.sub(r'src="data:[^"]*"', "", page)
    assert not re.search(r"\bnan\b|>None<|\binf\b", plain)
    assert "http" not in plain  # needs no network
    assert "<script" not in plain
    facts = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert [one["verdict"] for one in facts["verdicts"]] == [g.verdict for g in plan.gates.values()]
    return plan, plain


def test_pass_and_fail(tmp_path):
    timing = profile(compute=8 * MS, jitter=JITTER)
    plan, page = reported(tmp_path, evolve(BASE, timing=timing))
    serial, pipelined = plan.gates["serial", 2], plan.gates["die-pipelined", 2]
    assert serial.verdict == "FAIL"
    assert serial.gain.estimate == pytest.approx(0, abs=0.01)
    assert pipelined.verdict == "PASS"
    assert pipelined.gain.low > 0.5
    assert 'class="PASS"' in page
    assert "What decides it" in page
    # Four in flight have no slots under either hypothesis, and the page says so.
    assert set(plan.impossible) == {("serial", 4), ("die-pipelined", 4)}
    assert "for 4 in flight under serial, die-pipelined" in page
    rows = pq.read_table(tmp_path / "plan.parquet").to_pylist()
    assert len(rows) == 2 * 2 * 2 * 4
    assert {row["seed"] for row in rows} == {1, 2, 3, 4}
    assert plan.checked_jobs == pq.read_metadata(tmp_path / "jobs.parquet").num_rows


def test_host_work_that_is_hidden_passes_even_when_serial(tmp_path):
    plan = planned(tmp_path, evolve(BASE, timing=profile(submit=4 * MS, compute=8 * MS)))
    assert plan.gates["serial", 2].gain.low > 0.3


@pytest.mark.parametrize("output", [0, 1])
def test_without_two_tokens_the_gates_are_undefined(tmp_path, output):
    lengths = Lengths("fixed", prompt_tokens=10, output_tokens=output)
    plan, _ = reported(tmp_path, evolve(BASE, workload=evolve(BASE.workload, lengths=lengths)))
    assert {gate.verdict for gate in plan.gates.values()} == {"UNDEFINED"}


@pytest.mark.parametrize(
    "limits", [{"execution_timeout_ns": MS, "grace_ns": 1}, {"kv_capacity_tokens": 9}]
)
def test_requests_that_were_not_served_pass_no_gate(tmp_path, limits):
    plan = planned(tmp_path, evolve(BASE, executor=ExecutorConfig(**limits)))
    for gate in plan.gates.values():
        assert gate.verdict == "UNDEFINED"
        assert "not every request was served" in gate.why


def cell(plan, limit, tokens, tpot=(100.0,) * 4):
    """A cell of made-up replications."""
    one = plan.cell("serial", limit, "saturated")
    base = plan.cell("serial", 1, "saturated")
    values = {**one.values, "loaded_tokens_per_s": np.array(tokens), "tpot_p99_ns": np.array(tpot)}
    ratio = plan_module.paired_change
    return evolve(
        one,
        values=values,
        tokens_gain=ratio(base.values["loaded_tokens_per_s"], tokens),
        tpot_change=ratio(np.full(4, 100.0), np.array(tpot)),
    )


def test_a_verdict_is_one_on_the_interval(tmp_path):
    """The same estimate passes, fails and is undecided, by how far the replications are apart."""
    plan = make_plan(evolve(BASE, plan=evolve(BASE.plan, loads=("saturated",))), tmp_path)
    base = plan.cell("serial", 1, "saturated")
    of = base.values["loaded_tokens_per_s"]
    tight, wide = of * 1.12, of * np.array([1.0, 1.24, 0.9, 1.34])
    assert judge([base], [cell(plan, 2, tight)]).verdict == "PASS"
    assert judge([base], [cell(plan, 2, of * 1.08)]).verdict == "FAIL"
    open_one = judge([base], [cell(plan, 2, wide)])
    assert open_one.verdict == "UNDECIDED"
    assert open_one.more_runs > 0
    assert judge([base], [cell(plan, 2, tight, (107.0, 108.0, 107.5, 107.7))]).verdict == "FAIL"
    undecided = judge([base], [cell(plan, 2, tight, (90.0, 120.0, 95.0, 117.0))])
    assert undecided.verdict == "UNDECIDED"


def test_a_twin_that_differs_is_a_defect_and_no_verdict(tmp_path, monkeypatch):
    slower = evolve(BASE.timing, submit=profile(submit=MS + 1).submit)

    def other(scenario, requests=None, **options):
        return run_twin(evolve(scenario, timing=slower), requests, **options)

    monkeypatch.setattr(plan_module, "run_twin", other)
    with pytest.raises(TwinDiffersError, match="other tables"):
        make_plan(BASE, tmp_path)


def test_one_seed_one_digest(tmp_path):
    plans = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        plans.append(make_plan(evolve(BASE, seed=seed), tmp_path / name))
    assert plans[0].digest == plans[1].digest != plans[2].digest


# --- what changed ---


def test_what_changed(tmp_path):
    plan = planned(tmp_path / "before", evolve(BASE, timing=profile(compute=8 * MS, jitter=JITTER)))
    earlier = read_plan(tmp_path / "before")
    assert changes(earlier, plan.to_json()) == []
    now = planned(tmp_path / "now", evolve(BASE, timing=profile(compute=8 * MS, submit=4 * MS)))
    found = {change.what: (change.before, change.now) for change in changes(earlier, now.to_json())}
    assert found["verdict of serial, 2 in flight"] == ("FAIL", "PASS")
    assert found["setting timing.submit.time.value"] == ("0", str(4 * MS))
    assert any(name.startswith("gain in tokens/s of serial") for name in found)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "is not of a plan of this version"),
        (f"{'[' * 5000}", "is not JSON"),
        ('{"verdicts": [], "scenario": {}, "cells": [], "seed": 0, "complete": false}', "interrupted"),
        ('{"verdicts": 3, "scenario": {}, "cells": [], "seed": 0, "complete": true}', "is damaged"),
    ],
)
def test_an_earlier_plan_that_is_none(tmp_path, content, text):
    if content is not None:
        (tmp_path / "plan.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=text):
        read_plan(tmp_path)


SMALL = """schema = 1
[workload]
requests = 12
[workload.lengths]
prompt_tokens = 8
output_tokens = 4
[plan]
hypotheses = ["serial", "quad"]
max_inflight = [1, 4]
loads = ["saturated", 0.4]
replications = 2
[plan.custom.quad]
preset = "full-duplex"
engines = 4
"""


def test_the_command(tmp_path, capsys):
    file, out = tmp_path / "small.toml", tmp_path / "out"
    file.write_text(SMALL, encoding="utf-8")
    assert caltrio(["plan", str(file), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "no slot" in text
    assert "quad, 4 in flight: FAIL" in text
    assert caltrio(["plan", str(file), "--out", str(tmp_path / "b"), "--compare", str(out)]) == 0
    assert "0 changes since" in capsys.readouterr().out
    page = (tmp_path / "b" / "report.html").read_text(encoding="utf-8")
    assert "Nothing: the same verdicts" in page
    assert caltrio(["plan", str(file), "--out", str(tmp_path / "c"), "--compare", "nowhere"]) == 2
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('loads = ["saturated", 0]', "loads has 0; give shares above 0"),
        ('loads = ["saturated", "full"]', "loads has 'full'"),
        ('loads = ["saturated", true]', "loads has True"),
        ('loads = ["saturated", nan]', "loads"),
        ("loads = [0.5]", 'loads must hold "saturated"'),
        ('loads = ["saturated", "saturated"]', "loads names something twice"),
        ("replications = 1", "replications is 1; an interval needs 2"),
        ("max_inflight = [1, 1]", "max_inflight names something twice"),
        ('ttft_p99 = "0s"', "ttft_p99 is 0; give a longer time"),
        ("custom = { serial = {} }", "custom.serial has the name of a preset"),
        ('custom = { "a/b" = { preset = "serial" } }', "a name has letters, digits"),
        ('custom = { "<b>" = { preset = "serial" } }', "a name has letters, digits"),
        ("custom = { mine = 3 }", "custom.mine is 3; give a table"),
        ('custom = { mine = { preset = "serial", engine = 4 } }', "unknown key 'engine'"),
    ],
)
def test_a_plan_table_that_is_wrong(tmp_path, line, text, capsys):
    file = tmp_path / "bad.toml"
    file.write_text(f"schema = 1\n[plan]\n{line}\n", encoding="utf-8")
    assert caltrio(["plan", str(file), "--out", str(tmp_path / "out")]) == 2
    complaint = capsys.readouterr().err
    assert text in complaint
    assert "bad.toml" in complaint
    assert len(complaint.splitlines()) == 1


# --- bounds and sensitivity ---


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("clients", [1, 2, 6])
def test_nothing_beats_the_bound_and_one_in_flight_comes_near(preset, limit, clients):
    timing = profile(
        submit=MS, h2d=2 * MS, compute=5 * MS, d2h=3 * MS, interrupt=MS, post=MS, client=MS
    )
    workload = Workload(
        arrivals=Arrivals(clients=clients),
        lengths=Lengths(prompt_tokens=40, output_tokens=20),
        requests=60,
        prefill_chunk_tokens=16,
    )
    scenario = Scenario(
        timing=timing,
        semantics=PRESETS[preset].semantics,
        workload=workload,
        executor=ExecutorConfig(max_inflight=limit),
    )
    requests = request_array(workload.build(0))
    rate = run_twin(scenario, requests).summary.requests_per_s
    bound = most_requests_per_s(demand(scenario, requests), scenario.semantics, limit, clients)
    assert rate <= bound * (1 + 1e-9)
    if limit == 1 or preset in ("serial", "full-duplex"):
        assert rate > 0.7 * bound  # the law says something: it is not far from what happens


def test_break_even_grows_with_what_can_be_hidden():
    work = demand(BASE, request_array(BASE.workload.build(0)))
    found = break_even(BASE, PRESETS["full-duplex"].semantics, 2, work, (0.01, 0.1, 0.5), (1, 4))
    assert found.shape == (2, 3)
    assert np.abs(found[0]) == pytest.approx(0, abs=1e-9)  # one sequence: never two jobs
    assert (np.diff(found[1]) > 0).all()
    assert found[1, 0] < 0.02
    assert len(SEQUENCES) > 3


def test_a_tornado_names_what_flips_the_verdict():
    scenario = evolve(BASE, timing=profile(compute=8 * MS))
    requests = [request_array(scenario.workload.build(seed)) for seed in (1, 2)]
    base, *swings = tornado(scenario, 2, requests, (1, 2), 0.10)
    assert isinstance(base, Interval)
    assert base.estimate < 0.05
    assert all(isinstance(swing, Swing) for swing in swings)
    flips = {swing.label for swing in swings if swing.flips}
    assert flips == {"do the two dies work as a pipeline?", "what does each of two computes keep?"}
    by_label = {swing.label: swing for swing in swings}
    pipeline = by_label["do the two dies work as a pipeline?"]
    assert pipeline.high[0] == "50 : 50"
    assert pipeline.low[0] == "as assumed"


def test_the_gain_is_of_the_same_requests():
    requests = [request_array(BASE.workload.build(seed)) for seed in (1, 2, 3)]
    found = gain(BASE, 2, requests, (1, 2, 3))
    assert found.count == 3
    assert math.isfinite(found.half_width)
    assert found.half_width < 0.02  # far less than the replications are apart


def test_hypotheses_of_a_file():
    data = {"schema": 1, "plan": {"custom": {"mine": {"preset": "serial", "engines": 3}}}}
    plan = scenario_from(data, "x", Path()).plan
    assert plan.hypothesis("mine").semantics == evolve(PRESETS["serial"].semantics, engines=3)
    assert plan.hypothesis("mine").meaning == "As serial, with engines = 3."


def test_requests_lost_where_one_in_flight_loses_none_are_no_pass(tmp_path):
    plan = make_plan(BASE, tmp_path)
    bases = [plan.cell("die-pipelined", 1, load.name) for load in plan.loads]
    cells = [plan.cell("die-pipelined", 2, load.name) for load in plan.loads]
    lost = judge(bases, [evolve(cells[0], unserved="3 refused"), cells[1]])
    assert lost.verdict == "UNDEFINED"
    assert "3 refused at 50 %" in lost.why
    neither = judge([evolve(bases[0], unserved="3 refused"), bases[1]], cells)
    assert neither.verdict == judge(bases, cells).verdict
    assert "not judged at 50 %" in neither.why


def test_a_run_of_the_executor_that_was_stopped_is_no_result(tmp_path, monkeypatch):
    def stopped(scenario, requests=None, **options):
        raise StoppedError(signal.SIGTERM)

    monkeypatch.setattr(plan_module, "run_twin", stopped)
    plan = make_plan(BASE, tmp_path)
    assert plan.stopped_by is signal.SIGTERM
    assert not json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["complete"]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([[5, 1, 1], [0, 1, 1]], "goes back"),
        ([[-1, 1, 1]], "is negative"),
        ([[0, 1]], "give whole numbers"),
        ([[0.5, 1, 1]], "give whole numbers"),
        ([0, 1, 1], "give whole numbers"),
    ],
)
def test_an_array_that_is_no_requests(rows, text):
    scenario = evolve(BASE, workload=Workload(arrivals=Arrivals("constant", rate=1.0)))
    for run in (run_twin, lambda scenario, requests: run_fleet(scenario, requests, 2)):
        with pytest.raises(InputError, match=text):
            run(scenario, np.array(rows))
    with pytest.raises(InputError, match="cards: is 0"):
        run_fleet(scenario, np.array([[0, 1, 1]]), 0)
