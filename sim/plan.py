"""The planner's first question: which in-flight limit passes the gates, under which hypothesis?"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any, Self, cast

import pyarrow as pa
import pyarrow.parquet as pq
from attrs import define, evolve, frozen

from caltrio.errors import InputError
from caltrio.manifest import load_manifest
from caltrio.observe.metrics import Summary, no_nan
from caltrio.observe.records import JOB_SCHEMA, META_KEY, REQUEST_SCHEMA, TABLES
from caltrio.scenario import Scenario, preset
from caltrio.semantics import PRESETS
from caltrio.workload.requests import Request
from caltrio.workload.run import Run, about_run

from .figures import comparison, timeline, utilisation
from .report import write_report
from .run import simulate

DEFAULT_SCENARIO = Path(__file__).parent / "scenarios" / "plan.toml"

MIN_GAIN = 0.10  # §13.3: aggregate tokens/s up by at least this
LOW_LOAD = 0.5  # compute idles more than this with one in flight: the load decides, not the engines
MAX_TPOT_P99 = 0.05  # §13.3: single-request TPOT P99 worse by at most this


@frozen
class Gate:
    """One cell against its baseline of one in flight, on the same requests.

    ``verdict`` is ``PASS``, ``FAIL`` or ``UNDEFINED``, of the two performance gates only:
    correctness and 24 h of stability (§13.3) cannot be simulated away.
    """

    throughput_gain: float
    tpot_p99_change: float
    verdict: str
    why: str


@frozen
class Cell:
    """One run of the plan; ``gate`` is ``None`` for the baseline."""

    hypothesis: str
    max_inflight: int
    run: Run
    gate: Gate | None


@define
class Plan:
    """A plan: its cells in order, and the signal that ended it early, if one did."""

    scenario: Scenario
    cells: list[Cell]
    stopped_by: Signals | None = None

    @property
    def complete(self) -> bool:
        """Did every cell run to its end?"""
        return self.stopped_by is None

    @property
    def limits(self) -> list[int]:
        """The in-flight limits compared."""
        return sorted({cell.max_inflight for cell in self.cells})

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types; an undefined number is null."""
        plain = {
            "complete": self.complete,
            "cells": [
                {
                    "hypothesis": cell.hypothesis,
                    "max_inflight": cell.max_inflight,
                    "throughput_gain": cell.gate and cell.gate.throughput_gain,
                    "tpot_p99_change": cell.gate and cell.gate.tpot_p99_change,
                    "verdict": cell.gate and cell.gate.verdict,
                    "why": cell.gate and cell.gate.why,
                    **cell.run.summary.to_json(),
                }
                for cell in self.cells
            ],
        }
        return cast(dict[str, Any], no_nan(plain))


def judge(base: Run, run: Run) -> Gate:
    """``run`` against ``base`` by the gates of §13.3.

    ``UNDEFINED``: a figure is missing, or a run did not serve its requests, so that its rates say
    nothing. Requests refused as invalid are the same in every run, and do not count against it.
    """
    one, two = base.summary, run.summary
    before, after = one.loaded_tokens_per_s, two.loaded_tokens_per_s
    gain = after / before - 1 if before else math.nan
    worse = two.tpot.p99_ns / one.tpot.p99_ns - 1 if one.tpot.count else math.nan
    unserved = [text for text in map(_unserved, (one, two)) if text]
    if unserved:
        return Gate(gain, worse, "UNDEFINED", f"not every request was served ({unserved[-1]})")
    if math.isnan(gain) or math.isnan(worse):
        why = "no request produced the two tokens or more that the gates need"
        return Gate(gain, worse, "UNDEFINED", why)
    passed = gain >= MIN_GAIN and worse <= MAX_TPOT_P99
    return Gate(gain, worse, "PASS" if passed else "FAIL", _why(one, two, gain, worse))


def _unserved(summary: Summary) -> str:
    """What became of requests that should have been served, in words; empty if all were."""
    fates = {name: summary.outcomes.get(name, 0) for name in ("expired", "failed", "cancelled")}
    invalid = summary.refusals.get("INVALID_ARGUMENT", 0)
    fates["refused"] = summary.outcomes.get("refused", 0) - invalid
    return ", ".join(f"{count} {name}" for name, count in fates.items() if count)


def _why(one: Summary, two: Summary, gain: float, worse: float) -> str:
    idle = 1 - one.utilisation["compute"]
    after = 1 - two.utilisation["compute"]
    parts = [
        f"tokens/s {gain:+.1%} ({'passes' if gain >= MIN_GAIN else 'misses'} +10 %)",
        f"TPOT P99 {worse:+.1%} ({'within' if worse <= MAX_TPOT_P99 else 'beyond'} +5 %)",
        f"compute idles {idle:.1%} of the time with one in flight and {after:.1%} now",
        f"two or more jobs are on the device {two.overlap:.0%} of its busy time",
    ]
    if idle > LOW_LOAD:
        parts.append("the load is too low to tell: one job at a time already keeps up with it")
    elif gain > idle / (1 - idle) + 0.02:
        parts.append("most of the gain is two jobs computing at once, not hidden transfers")
    elif gain < MIN_GAIN:
        parts.append("there is no more than that idle time to hide host work and transfers in")
    return "; ".join(parts)


def make_plan(
    scenario: Scenario,
    folder: Path,
    *,
    command: str,
    requests: list[Request] | None = None,
    on_progress: Callable[[int, int, str], None] = lambda _done, _total, _what: None,
) -> Plan:
    """Run every hypothesis with every limit, judge, and write tables, figures and report.

    Args:
        scenario: its ``plan`` says what is compared; every cell gets the same requests.
        folder: an existing folder.
        command: how to run this again, for the report.
        requests: the requests, if the scenario's workload has been built already.
        on_progress: called with (requests done, of how many, which cell).

    Raises :class:`InputError` if a limit cannot work under a hypothesis.
    """
    spec = scenario.plan
    pairs = [(name, limit) for name in spec.hypotheses for limit in sorted(set(spec.max_inflight))]
    for name, limit in pairs:
        try:
            preset(name).check_in_flight(limit)
        except ValueError as error:
            raise InputError("plan", f"hypothesis {name!r}", str(error)) from error
    if requests is None:
        requests = scenario.workload.build(scenario.seed, scenario.base)
    plan = Plan(scenario, [])
    done, total = 0, len(requests) * len(pairs)
    with _PlanTables(folder, about_run(scenario, "sim", load_manifest())) as tables:
        base: Run | None = None
        for name, limit in pairs:
            cell_scenario = evolve(
                scenario,
                semantics=preset(name),
                executor=evolve(scenario.executor, max_inflight=limit),
            )

            def count(name: str = name, limit: int = limit) -> None:
                nonlocal done
                done += 1
                on_progress(done, total, f"{name}, {limit} in flight")

            run = simulate(cell_scenario, requests=requests, on_request=count)
            tables.add(name, limit, run)
            if not run.complete:
                plan.stopped_by = run.stopped_by
                return plan
            if limit == 1:
                base = run
            assert base is not None, "limits are sorted, and 1 is among them"
            gate = None if limit == 1 else judge(base, run)
            plan.cells.append(Cell(name, limit, run, gate))
        tables.complete = True
    _write(plan, folder, command)
    return plan


def _write(plan: Plan, folder: Path, command: str) -> None:
    (folder / "plan.json").write_text(
        json.dumps(plan.to_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    comparison(plan.cells, MIN_GAIN, MAX_TPOT_P99, folder / "comparison.svg")
    utilisation(plan.cells, folder / "utilisation.svg")
    timelines = {}
    for name in plan.scenario.plan.hypotheses:
        runs = {
            f"{cell.max_inflight} in flight": cell.run.jobs
            for cell in plan.cells
            if cell.hypothesis == name
        }
        path = folder / f"timeline-{name}.svg"
        timeline(runs, f"{name}: {PRESETS[name].meaning}", preset(name), path)
        timelines[name] = path
    write_report(plan, folder, timelines, command)


class _PlanTables:
    """The tables of all cells in one file each, with the cell in front; valid however it ends."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.complete = False
        self._about = about
        self._folder = folder
        self._writers: dict[str, pq.ParquetWriter] = {}

    def add(self, hypothesis: str, limit: int, run: Run) -> None:
        for name, table, schema in (
            (TABLES[0], run.jobs, JOB_SCHEMA),
            (TABLES[1], run.requests, REQUEST_SCHEMA),
        ):
            rows = table.num_rows
            wide = table.select(schema.names).add_column(
                0, "max_inflight", pa.array([limit] * rows, pa.int32())
            )
            wide = wide.add_column(0, "hypothesis", pa.array([hypothesis] * rows, pa.string()))
            wide = wide.replace_schema_metadata(None)
            if name not in self._writers:
                path = self._folder / f"{name}.parquet"
                self._writers[name] = pq.ParquetWriter(path, wide.schema)
            self._writers[name].write_table(wide)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        facts = json.dumps({**self._about, "complete": self.complete}, sort_keys=True)
        for writer in self._writers.values():
            writer.add_key_value_metadata({META_KEY.decode(): facts})
            writer.close()
