"""Verdicts: passed, failed, and undefined where the figures say nothing."""

import json
import re

import pytest
from attrs import evolve
from support import MS, profile

from caltrio.config import ExecutorConfig
from caltrio.scenario import PlanSpec, Scenario
from caltrio.workload.spec import Arrivals, Lengths, Workload
from sim.plan import make_plan

BASE = Scenario(
    seed=1,
    timing=profile(submit=MS, h2d=MS, compute=8 * MS, d2h=MS, post=MS),
    workload=Workload(
        arrivals=Arrivals("closed", clients=4),
        lengths=Lengths("fixed", prompt_tokens=10, output_tokens=4),
        requests=12,
    ),
    plan=PlanSpec(("serial", "die-pipelined"), (1, 2)),
)


def planned(tmp_path, scenario):
    plan = make_plan(scenario, tmp_path, command="caltrio plan")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"\bnan\b|>None<", page)
    assert "http" not in re.sub(r'src="data:[^"]*"', "", page)  # needs no network
    facts = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert [cell["verdict"] for cell in facts["cells"]] == [
        cell.gate and cell.gate.verdict for cell in plan.cells
    ]
    return {cell.hypothesis: cell.gate for cell in plan.cells if cell.gate is not None}, page


def test_pass_and_fail(tmp_path):
    gates, page = planned(tmp_path, evolve(BASE, timing=profile(compute=8 * MS)))
    assert gates["serial"].verdict == "FAIL"
    assert gates["serial"].throughput_gain == pytest.approx(0, abs=0.01)
    assert gates["die-pipelined"].verdict == "PASS"
    assert gates["die-pipelined"].throughput_gain > 0.6
    assert 'class="PASS"' in page
    assert page.count("<img") == 4
    for name in ("comparison", "utilisation", "timeline-serial", "timeline-die-pipelined"):
        assert (tmp_path / f"{name}.svg").stat().st_size > 10_000


def test_host_work_that_is_hidden_passes_even_when_serial(tmp_path):
    gates, _ = planned(tmp_path, evolve(BASE, timing=profile(submit=4 * MS, compute=8 * MS)))
    assert gates["serial"].throughput_gain > 0.3


@pytest.mark.parametrize("output", [0, 1])
def test_without_two_tokens_the_gates_are_undefined(tmp_path, output):
    lengths = Lengths("fixed", prompt_tokens=10, output_tokens=output)
    scenario = evolve(BASE, workload=evolve(BASE.workload, lengths=lengths))
    gates, _ = planned(tmp_path, scenario)
    assert {gate.verdict for gate in gates.values()} == {"UNDEFINED"}


@pytest.mark.parametrize(
    "limits", [{"execution_timeout_ns": MS, "grace_ns": 1}, {"kv_capacity_tokens": 5}]
)
def test_requests_that_were_not_served_pass_no_gate(tmp_path, limits):
    gates, _ = planned(tmp_path, evolve(BASE, executor=ExecutorConfig(**limits)))
    for gate in gates.values():
        assert gate.verdict == "UNDEFINED"
        assert "not every request was served" in gate.why


def test_a_load_that_one_job_keeps_up_with_is_named(tmp_path):
    arrivals = Arrivals("constant", rate=2.0)
    scenario = evolve(BASE, workload=evolve(BASE.workload, arrivals=arrivals))
    gates, _ = planned(tmp_path, scenario)
    assert "load is too low" in gates["serial"].why
