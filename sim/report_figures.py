"""The figures of the decision report, from a plan and its sensitivity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from caltrio.observe.metrics import RequestFacts
from caltrio.planspec import SATURATED
from caltrio.units import NS_PER_MS, NS_PER_S

from . import plots
from .figures import timeline
from .plan import MAX_TPOT_P99, MIN_GAIN, Load, Plan
from .sensitivity import RATIOS, SEQUENCES, Sensitivity
from .stats import Interval, LoadState, decide


def draw_figures(
    plan: Plan,
    unknowns: Sensitivity | None,
    folder: Path,
    on_progress: Callable[[str], None] = lambda _what: None,
) -> dict[str, Path]:
    """Draw the figures of a report into ``folder``; their files by name, in order."""
    drawn: dict[str, Path] = {}
    for name, draw in _figures(plan, unknowns):
        on_progress(f"figure {name}")
        drawn[name] = folder / f"{name}.svg"
        draw(drawn[name])
    return drawn


def _figures(plan: Plan, unknowns: Sensitivity | None) -> Iterator[tuple[str, Callable[[Path], None]]]:
    yield "matrix", lambda path: _matrix(plan, path)
    yield "gain", lambda path: _gain(plan, path)
    if any(not load.saturated for load in plan.loads):
        spec = plan.scenario.plan
        for name, metric, slo_ns in (
            ("ttft", "TTFT P99", spec.ttft_p99_ns),
            ("tpot", "TPOT P99", spec.tpot_p99_ns),
        ):
            slo_ms = None if slo_ns is None else slo_ns / NS_PER_MS
            curves = _curves(plan, f"{name}_p99_ns")
            yield f"load-{name}", partial(_load, curves, slo_ms, metric)
    yield "kv", lambda path: _kv(plan, path)
    if unknowns is not None:
        yield "break-even", lambda path: _break_even(plan, unknowns, path)
        yield "tornado", lambda path: _tornado(unknowns, path)
    for hypothesis in plan.hypotheses:
        runs = {
            f"{limit} in flight": run.jobs
            for (name, limit), run in plan.samples.items()
            if name == hypothesis.name
        }
        title = f"{hypothesis.name}: {hypothesis.meaning}"
        yield f"timeline-{hypothesis.name}", partial(timeline, runs, title, hypothesis.semantics)


def _load(curves: list[plots.Curve], slo_ms: float | None, metric: str, path: Path) -> None:
    plots.load_latency(curves, slo_ms, path, metric=metric)


def _matrix(plan: Plan, path: Path) -> None:
    rows = list(plan.gates)
    columns = [
        "tokens/s, saturated" if load.saturated else f"TPOT P99 at {load.name} load"
        for load in plan.loads
    ]
    cells = [[_matrix_cell(plan, row, load) for load in plan.loads] for row in rows]
    title = "Verdict on each gate: change against one job in flight"
    plots.decision_matrix(rows, columns, cells, path, title)


def _matrix_cell(plan: Plan, row: tuple[str, int], load: Load) -> plots.MatrixCell:
    cell, base = plan.cell(*row, load.name), plan.cell(row[0], 1, load.name)
    change = cell.tokens_gain if load.saturated else cell.tpot_change
    if change is None or cell.unserved or base.unserved or not math.isfinite(change.estimate):
        return plots.MatrixCell("UNDEFINED")
    if load.saturated:
        return plots.MatrixCell(decide(change, MIN_GAIN).verdict, change)
    return plots.MatrixCell(decide(change, MAX_TPOT_P99, "lower").verdict, change)


def _gain(plan: Plan, path: Path) -> None:
    rows = []
    for (name, limit), gate in plan.gates.items():
        base = plan.cell(name, 1, SATURATED).interval("loaded_tokens_per_s").estimate
        bound = plan.cell(name, limit, SATURATED).bound_tokens_per_s
        rows.append(plots.GainRow(name, limit, gate.gain, bound / base - 1 if base else None))
    plots.gain_bars(rows, MIN_GAIN, path)


def _curves(plan: Plan, metric: str) -> list[plots.Curve]:
    curves = []
    for hypothesis in plan.hypotheses:
        for limit in plan.limits:
            if (hypothesis.name, limit) in plan.impossible:
                continue
            points = []
            for load in plan.loads:
                if load.rate is None:
                    continue
                cell = plan.cell(hypothesis.name, limit, load.name)
                ns = cell.interval(metric)
                low, high = ns.low / NS_PER_MS, ns.high / NS_PER_MS
                ms = Interval(ns.estimate / NS_PER_MS, low, high, ns.count)
                points.append(plots.LoadPoint(load.rate, ms, cell.state is LoadState.OVERLOADED))
            curves.append(plots.Curve(hypothesis.name, limit, points))
    return curves


def kv_series(limit: int, facts: RequestFacts) -> plots.KvSeries:
    """KV reserved over time, from the requests of one run."""
    held = facts.admitted_ns >= 0
    at = np.concatenate([facts.admitted_ns[held], facts.ended_ns[held]])
    change = np.concatenate([facts.kv_tokens[held], -facts.kv_tokens[held]])
    order = np.lexsort((change, at))  # at one instant, what is given back first
    return plots.KvSeries(limit, at[order] / NS_PER_S, np.cumsum(change[order]))


def _kv(plan: Plan, path: Path) -> None:
    """Of the hypothesis that lets most jobs in flight, else of the first."""
    name = max(plan.hypotheses, key=lambda one: max(n for h, n in plan.facts if h == one.name)).name
    series = [kv_series(limit, facts) for (of, limit), facts in plan.facts.items() if of == name]
    title = f"KV reserved over time at saturation, {name}"
    plots.kv_occupancy(series, plan.scenario.executor.kv_capacity_tokens, path, title)


def _break_even(plan: Plan, unknowns: Sensitivity, path: Path) -> None:
    clients = next(load for load in plan.loads if load.saturated).workload.clients
    assert clients is not None
    at = (unknowns.ratio, float(min(clients, plan.scenario.executor.max_active_sequences)))
    inside = SEQUENCES[0] <= at[1] <= SEQUENCES[-1] and RATIOS[0] <= at[0] <= RATIOS[-1]
    maps = [plots.GainMap(name, gains, at if inside else None) for name, gains in unknowns.maps.items()]
    title = f"Where {unknowns.limit} jobs in flight pay"
    plots.break_even(maps, RATIOS, SEQUENCES, MIN_GAIN, path, title)


def _tornado(unknowns: Sensitivity, path: Path) -> None:
    bars = [
        plots.TornadoBar(
            swing.label, swing.low[0], swing.low[1].estimate,
            swing.high[0], swing.high[1].estimate, swing.flips,
        )
        for swing in unknowns.swings
    ]  # fmt: skip
    title = f"What would change the verdict: one unknown at a time, from {unknowns.base[0]}"
    plots.tornado(bars, unknowns.base[1].estimate, MIN_GAIN, path, title)
