"""The decision report: one HTML file that needs no network and no script, and its figures."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from attrs import fields, frozen
from jinja2 import Environment, PackageLoader, StrictUndefined

from caltrio.config import ExecutorConfig
from caltrio.manifest import load_manifest
from caltrio.planspec import SATURATED
from caltrio.scenario import Scenario
from caltrio.units import format_ns
from caltrio.workload.run import about_run

from .bounds import Demand, demand
from .compare import Change
from .plan import MIN_GAIN, Cell, Gate, Plan, percent, requests_of, seeds_of
from .report_figures import draw_figures
from .sensitivity import RATIOS, SEQUENCES, Sensitivity, Swing, break_even, hidden_share, tornado
from .stats import Interval, LoadState

_SWING_SEEDS = 5  # replications behind each bar of the tornado


def sensitivity(
    plan: Plan, on_progress: Callable[[str], None] = lambda _what: None
) -> Sensitivity | None:
    """Break-even maps of all hypotheses, and a tornado from the scenario's own semantics.

    If these have no slots for what is compared, from those of the first hypothesis that has.
    ``None`` where no hypothesis lets more than one job in flight.
    """
    scenario = plan.scenario
    if not plan.gates:
        return None
    limit = min(limit for _, limit in plan.gates)
    semantics = scenario.semantics
    try:
        semantics.check_in_flight(limit)
    except ValueError:
        name = next(name for name, of in plan.gates if of == limit)
        semantics = scenario.plan.hypothesis(name).semantics
    load = next(each for each in plan.loads if each.saturated)
    seeds = seeds_of(scenario)[:_SWING_SEEDS]
    requests = [requests_of(scenario, load, seed) for seed in seeds]
    work: Demand = demand(scenario, requests[0])
    maps = {}
    for hypothesis in plan.hypotheses:
        if (hypothesis.name, limit) in plan.gates:
            on_progress(f"break-even of {hypothesis.name}")
            maps[hypothesis.name] = break_even(scenario, hypothesis.semantics, limit, work)
    on_progress("tornado")
    start = plan.at_saturation(semantics, 1)
    found = list(tornado(start, limit, requests, seeds, MIN_GAIN))
    base, swings = found[0], found[1:]
    assert isinstance(base, Interval)
    name = next(
        (h.name for h in plan.hypotheses if h.semantics == scenario.semantics), "the scenario's own"
    )
    only_swings = [swing for swing in swings if isinstance(swing, Swing)]
    return Sensitivity(limit, maps, hidden_share(work), (name, base), only_swings)


def _data_uri(path: Path) -> str:
    """An SVG as a data URI: in an <img> its ids cannot clash with those of the next figure."""
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()


def write_report(
    plan: Plan,
    unknowns: Sensitivity | None,
    folder: Path,
    *,
    command: str,
    changes: Sequence[Change] | None = None,
    compared_with: str = "",
    on_progress: Callable[[str], None] = lambda _what: None,
) -> None:
    """Write ``report.html`` and its figures into ``folder``.

    Args:
        plan: a complete one.
        unknowns: of :func:`sensitivity`.
        folder: an existing folder.
        command: how to run this again.
        changes: since an earlier plan; ``None`` if it was not asked for.
        compared_with: the name of that plan.
        on_progress: called with what is drawn next.
    """
    figures = draw_figures(plan, unknowns, folder, on_progress)
    templates = Environment(
        loader=PackageLoader("sim"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    templates.filters["ns"] = _ns
    templates.filters["change"] = percent
    templates.filters["share"] = lambda share: "–" if math.isnan(share) else f"{100 * share:.0f} %"
    facts = about_run(plan.scenario, "twin", load_manifest())
    text = templates.get_template("report.html.j2").render(
        plan=plan,
        unknowns=unknowns,
        figures={name: _data_uri(path) for name, path in figures.items()},
        rows=_rows(plan),
        no_slots=_no_slots(plan),
        executor_because=sorted({c.executor_because for c in plan.cells if c.executor_because}),
        unstable=[
            f"{cell.hypothesis}, {cell.max_inflight} in flight at {cell.load}: {cell.state.value}"
            for cell in plan.cells
            if cell.state is not LoadState.STABLE
        ],
        answer=_answer(plan),
        figures_assumed=_assumptions(plan.scenario),
        semantics_assumed=[(one.name, one.meaning) for one in plan.hypotheses],
        versions=facts["versions"],
        timeouts=_timeouts(plan.scenario),
        command=command,
        changes=changes,
        compared_with=compared_with,
        seeds=seeds_of(plan.scenario),
        flips=[] if unknowns is None else [swing for swing in unknowns.swings if swing.flips],
    )
    (folder / "report.html").write_text(text, encoding="utf-8")


def _ns(value: float) -> str:
    return "–" if math.isnan(value) else format_ns(value)


def _timeouts(scenario: Scenario) -> dict[str, int]:
    return {
        attribute.metadata["toml"].replace("_", " "): value
        for attribute in fields(ExecutorConfig)
        if "toml" in attribute.metadata
        and (value := getattr(scenario.executor, attribute.name)) is not None
    }


# --- in words ---


@frozen
class _Row:
    """A line of the table of verdicts; ``gate`` is ``None`` for one in flight."""

    hypothesis: str
    limit: int
    saturated: Cell
    gate: Gate | None

    @property
    def bound_share(self) -> float:
        """Tokens/s over what no scheduling can exceed."""
        bound = self.saturated.bound_tokens_per_s
        return self.saturated.interval("loaded_tokens_per_s").estimate / bound if bound else math.nan


def _rows(plan: Plan) -> list[_Row]:
    rows = []
    for hypothesis in plan.hypotheses:
        for limit in plan.limits:
            key = (hypothesis.name, limit)
            if key not in plan.impossible:
                rows.append(_Row(*key, plan.cell(*key, SATURATED), plan.gates.get(key)))
    return rows


def _no_slots(plan: Plan) -> str:
    """Which limits are left out where, in words; empty if none."""
    by_limit: dict[int, list[str]] = {}
    for name, limit in plan.impossible:
        by_limit.setdefault(limit, []).append(name)
    words = (f"for {limit} in flight under {', '.join(names)}" for limit, names in by_limit.items())
    return "; ".join(words)


def _answer(plan: Plan) -> dict[str, list[str]]:
    """(hypothesis, limit) in words by verdict."""
    found: dict[str, list[str]] = {}
    for (name, limit), gate in plan.gates.items():
        found.setdefault(gate.verdict, []).append(f"{name} ({limit} in flight)")
    return found


def _assumptions(scenario: Scenario) -> list[tuple[str, str, str, str]]:
    """(figure, value, source, note) of every number of the timing profile."""
    rows = []
    for key, figure in scenario.run_timing.figures().items():
        if key.endswith("bandwidth"):
            value = f"{figure.value / 1e9:g} GB/s"
        elif key.endswith(("per_token", "per_pair")):
            value = f"{figure.value / 1000:g} ns"  # picoseconds inside
        else:
            value = format_ns(figure.value)
        rows.append((key, value, figure.source.value, figure.note))
    return rows


def sensitivity_json(unknowns: Sensitivity) -> str:
    """The maps and the swings, for machines."""
    return json.dumps(
        {
            "max_inflight": unknowns.limit,
            "ratios": RATIOS,
            "sequences": SEQUENCES,
            "profile_ratio": unknowns.ratio,
            "maps": {name: np.round(gains, 6).tolist() for name, gains in unknowns.maps.items()},
            "base": {"semantics": unknowns.base[0], "gain": unknowns.base[1].estimate},
            "swings": [
                {
                    "unknown": swing.label,
                    "flips": swing.flips,
                    "gains": {words: gain.estimate for words, gain in swing.gains},
                }
                for swing in unknowns.swings
            ],
        },
        indent=2,
    )
