"""The planner's first question: which in-flight limit passes the gates, under which hypothesis?

A plan runs every hypothesis with every limit at several loads, each cell a number of times with
arrivals, lengths and jitter of another seed. Cells share their seeds, so that limits are compared on
the same requests (common random numbers), and each verdict is one on intervals. The compiled twin
runs the cells; the executor itself runs a part of each at saturation, and both must agree to the
nanosecond.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from attrs import define, evolve, frozen
from numpy.typing import NDArray

from caltrio.errors import CaltrioError
from caltrio.manifest import load_manifest
from caltrio.observe.metrics import RequestFacts, no_nan
from caltrio.observe.records import JOB_SCHEMA, META_KEY, REQUEST_SCHEMA, TABLES, digest
from caltrio.planspec import SATURATED
from caltrio.scenario import Scenario
from caltrio.semantics import EngineSemantics, Preset
from caltrio.signals import StoppedError, noted
from caltrio.workload.requests import Request
from caltrio.workload.run import Run, about_run
from caltrio.workload.spec import ArrivalKind, Arrivals, Workload

from .bounds import demand, most_requests_per_s
from .fast import TwinRun, request_array, run_twin
from .run import simulate
from .stats import Interval, LoadState, decide, load_state, mean_interval, paired_change, warm_up

DEFAULT_SCENARIO = Path(__file__).parent / "scenarios" / "plan.toml"

MIN_GAIN = 0.10  # §13.3: aggregate tokens/s up by at least this
MAX_TPOT_P99 = 0.05  # §13.3: single-request TPOT P99 worse by at most this
CHECKED_REQUESTS = 24  # of each cell at saturation that the executor itself runs too

Verdict = Literal["PASS", "FAIL", "UNDECIDED", "UNDEFINED"]


class TwinDiffersError(CaltrioError):
    """The compiled twin and the executor disagree: a defect of ours; nothing here can be trusted."""


@frozen
class Load:
    """A load of the plan: ``rate`` in requests/s, or a closed loop of ``clients``.

    ``share``: of the rate that one card keeps up with, one job at a time.
    """

    name: str
    share: float | None
    workload: Workload

    @property
    def rate(self) -> float | None:
        """Offered requests/s; ``None`` in a closed loop."""
        return self.workload.arrivals.rate

    @property
    def saturated(self) -> bool:
        """Is it the closed loop?"""
        return self.share is None


@frozen
class Gate:
    """One limit against one job in flight, under one hypothesis, on the same requests (§13.3).

    Attributes:
        gain: of aggregate tokens/s at saturation.
        tpot_change: of TPOT P99, at the load where that looks worst.
        tpot_load: the name of that load.
        verdict: of these two performance gates only: correctness and 24 h of stability cannot be
            simulated away. ``UNDECIDED``: the intervals do not settle it.
        more_runs: how many further replications it takes then, if that can be said.
        why: in words.
    """

    gain: Interval
    tpot_change: Interval
    tpot_load: str
    verdict: Verdict
    more_runs: int | None
    why: str


@frozen
class Cell:
    """A hypothesis with a limit at a load.

    Attributes:
        values: metrics by name, one number for each replication; NaN where undefined.
        state: what the load does to the number of requests in the system, in most replications.
        bound_tokens_per_s: what no scheduling can exceed.
        unserved: requests that should have been served and were not, in words; empty if none.
        tpot_change: of TPOT P99 against one in flight; ``None`` for one in flight.
        tokens_gain: of tokens/s likewise.
    """

    hypothesis: str
    max_inflight: int
    load: str
    values: Mapping[str, NDArray[np.float64]]
    state: LoadState
    bound_tokens_per_s: float
    unserved: str
    trusted: bool
    tpot_change: Interval | None = None
    tokens_gain: Interval | None = None
    executor_because: str | None = None

    def interval(self, name: str) -> Interval:
        """The mean of a metric over replications."""
        return mean_interval(self.values[name], trusted=self.trusted)


@define
class Plan:
    """A plan: its cells, its verdicts, and the signal that ended it early, if one did.

    ``gates`` by (hypothesis, limit); ``impossible`` says why a limit is left out. ``samples`` are short
    runs at saturation with their job tables, for timelines. ``facts`` are the requests of one
    replication at saturation.
    """

    scenario: Scenario
    loads: list[Load]
    cells: list[Cell]
    gates: dict[tuple[str, int], Gate]
    impossible: dict[tuple[str, int], str]
    samples: dict[tuple[str, int], Run]
    facts: dict[tuple[str, int], RequestFacts]
    digest: str = ""
    checked_jobs: int = 0
    stopped_by: Signals | None = None

    @property
    def complete(self) -> bool:
        """Did every cell run to its end?"""
        return self.stopped_by is None

    @property
    def hypotheses(self) -> list[Preset]:
        """In the order of the scenario."""
        return [self.scenario.plan.hypothesis(name) for name in self.scenario.plan.hypotheses]

    @property
    def limits(self) -> list[int]:
        """The in-flight limits compared."""
        return sorted(self.scenario.plan.max_inflight)

    def at_saturation(self, semantics: EngineSemantics, max_inflight: int) -> Scenario:
        """The scenario of a cell in the closed loop."""
        load = next(each for each in self.loads if each.saturated)
        return _cell_scenario(self.scenario, semantics, max_inflight, load)

    def cell(self, hypothesis: str, max_inflight: int, load: str) -> Cell:
        """That one."""
        key = (hypothesis, max_inflight, load)
        return next(c for c in self.cells if (c.hypothesis, c.max_inflight, c.load) == key)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types; an undefined number is null."""
        plain = {
            "complete": self.complete,
            "seed": self.scenario.seed,
            "replications": self.scenario.plan.replications,
            "scenario": self.scenario.to_json(),
            "loads": [{"name": load.name, "rate": load.rate} for load in self.loads],
            "digest": self.digest,
            "verdicts": [
                {
                    "hypothesis": name,
                    "max_inflight": limit,
                    "verdict": gate.verdict,
                    "gain": _numbers(gate.gain),
                    "tpot_p99_change": _numbers(gate.tpot_change),
                    "tpot_load": gate.tpot_load,
                    "more_runs": gate.more_runs,
                    "why": gate.why,
                }
                for (name, limit), gate in self.gates.items()
            ],
            "impossible": [
                {"hypothesis": name, "max_inflight": limit, "why": why}
                for (name, limit), why in self.impossible.items()
            ],
            "cells": [
                {
                    "hypothesis": cell.hypothesis,
                    "max_inflight": cell.max_inflight,
                    "load": cell.load,
                    "state": cell.state.value,
                    "bound_tokens_per_s": cell.bound_tokens_per_s,
                    "unserved": cell.unserved,
                    "executor_because": cell.executor_because,
                    **{name: _numbers(cell.interval(name)) for name in cell.values},
                }
                for cell in self.cells
            ],
        }
        return cast(dict[str, Any], no_nan(plain))


def _numbers(interval: Interval) -> dict[str, float]:
    return {"estimate": interval.estimate, "low": interval.low, "high": interval.high}


def loads_of(scenario: Scenario) -> list[Load]:
    """The loads that the scenario's plan names, as workloads.

    Shares are of what the bottleneck law allows one job at a time, so they are the same requests/s
    under every hypothesis. Open loads have the scenario's arrival process; Poisson if that is closed.
    """
    workload = scenario.workload
    requests = request_array(workload.build(scenario.seed, scenario.base))
    one_at_a_time = most_requests_per_s(demand(scenario, requests), scenario.semantics, 1)
    clients = workload.clients or scenario.executor.max_active_sequences
    found = []
    for load in scenario.plan.loads:
        if load == SATURATED:
            closed = workload if workload.clients else _closed(workload, clients)
            found.append(Load(SATURATED, None, closed))
            continue
        rate = float(f"{load * one_at_a_time:.4g}")
        arrivals = workload.arrivals
        if workload.clients is not None:
            arrivals = Arrivals(kind=ArrivalKind.POISSON, rate=rate)
        else:
            arrivals = evolve(arrivals, rate=rate, scale=1.0)
        found.append(Load(f"{100 * load:g} %", float(load), evolve(workload, arrivals=arrivals)))
    return found


def _closed(workload: Workload, clients: int) -> Workload:
    """The same requests from so many clients; of a trace, in its order."""
    return evolve(workload, arrivals=Arrivals(kind=ArrivalKind.CLOSED, clients=clients))


def make_plan(
    scenario: Scenario,
    folder: Path,
    *,
    on_progress: Callable[[int, int, str], None] = lambda _done, _total, _what: None,
) -> Plan:
    """Run every hypothesis with every limit at every load, judge, and write the figures.

    ``plan.parquet`` has a row a run, ``plan.json`` the verdicts and the intervals; ``jobs.parquet`` and
    ``requests.parquet`` are of the runs that the executor made.

    Args:
        scenario: its ``plan`` says what is compared.
        folder: an existing folder.
        on_progress: called with (runs done, of how many, which cell).

    Raises:
        InputError: the workload cannot be read.
        TwinDiffersError: a defect of ours.
    """
    spec = scenario.plan
    plan = Plan(scenario, loads_of(scenario), [], {}, {}, {}, {})
    pairs: list[tuple[Preset, list[int]]] = []
    for hypothesis in plan.hypotheses:
        possible = []
        for limit in plan.limits:
            try:
                hypothesis.semantics.check_in_flight(limit)
                possible.append(limit)
            except ValueError as error:
                plan.impossible[hypothesis.name, limit] = str(error)
        pairs.append((hypothesis, possible))
    cells = sum(len(possible) for _, possible in pairs)
    total = cells * (len(plan.loads) * spec.replications + 1)
    done = 0
    requests = {
        (load.name, seed): requests_of(scenario, load, seed)
        for load in plan.loads
        for seed in seeds_of(scenario)
    }
    rows: list[dict[str, Any]] = []
    with noted() as note:

        def step(what: str) -> bool:
            nonlocal done
            done += 1
            on_progress(done, total, what)
            return note.by is not None

        for hypothesis, possible in pairs:
            for load in plan.loads:
                every = [requests[load.name, seed] for seed in seeds_of(scenario)]
                work = demand(scenario, np.concatenate(every))
                runs: dict[int, list[TwinRun]] = {limit: [] for limit in possible}
                for limit in possible:
                    what = f"{hypothesis.name}, {limit} in flight, {load.name}"
                    cell_scenario = _cell_scenario(scenario, hypothesis.semantics, limit, load)
                    for seed in seeds_of(scenario):
                        if step(what):
                            plan.stopped_by = note.by
                            break
                        one = evolve(cell_scenario, seed=seed)
                        try:
                            runs[limit].append(run_twin(one, requests[load.name, seed]))
                        except StoppedError as stopped:
                            plan.stopped_by = stopped.by
                            break
                    if plan.stopped_by is not None:
                        break
                if plan.stopped_by is not None:
                    break
                made = list(_cells(hypothesis, load, runs, work))
                plan.cells += made
                rows += [row for cell in made for row in _rows(cell, seeds_of(scenario))]
                if load.saturated:
                    plan.facts |= {(hypothesis.name, limit): runs[limit][0].facts for limit in possible}
            for limit in possible if plan.stopped_by is None else []:
                step(f"{hypothesis.name}, {limit} in flight, by the executor itself")
                run = _checked(scenario, hypothesis, limit, plan)
                plan.stopped_by = plan.stopped_by or run.stopped_by
            if plan.stopped_by is not None:
                break
            plan.gates |= _gates(plan, hypothesis.name, possible)
    _write(plan, rows, folder)
    return plan


def seeds_of(scenario: Scenario) -> list[int]:
    """Of the replications: the scenario's own, and those that follow."""
    return [scenario.seed + index for index in range(scenario.plan.replications)]


def requests_of(scenario: Scenario, load: Load, seed: int) -> NDArray[np.int64]:
    """The requests of one replication. A trace is turned to begin at another request each time."""
    array = request_array(load.workload.build(seed, scenario.base))
    if load.workload.trace is None or seed == scenario.seed:
        return array
    start = (seed - scenario.seed) * len(array) // scenario.plan.replications % len(array)
    turned = np.roll(array, -start, axis=0)
    gaps = np.roll(np.diff(array[:, 0], prepend=array[0, 0]), -start)
    gaps[0] = 0
    # Where the end meets the beginning there is no gap of its own: the mean one.
    if start:
        gaps[len(array) - start] = (array[-1, 0] - array[0, 0]) // max(len(array) - 1, 1)
    turned[:, 0] = np.cumsum(gaps)
    return turned


def _cell_scenario(scenario: Scenario, semantics: EngineSemantics, limit: int, load: Load) -> Scenario:
    return evolve(
        scenario,
        semantics=semantics,
        workload=load.workload,
        executor=evolve(scenario.executor, max_inflight=limit),
    )


# --- metrics of the runs ---


def _cells(
    hypothesis: Preset, load: Load, runs: Mapping[int, Sequence[TwinRun]], work: Any
) -> Iterator[Cell]:
    """The cells of one hypothesis at one load, limit by limit, against one in flight."""
    cut = 0 if load.saturated else _transient(runs[min(runs)])
    base: Cell | None = None
    for limit, made in runs.items():
        each = [_metrics(run, cut) for run in made]
        values = {name: np.array([one[name] for one in each]) for name in each[0]}
        states = Counter(load_state(run.facts.arrival_ns, _ends(run.facts)) for run in made)
        bound = most_requests_per_s(
            work, hypothesis.semantics, limit, load.workload.clients if load.saturated else None
        )
        if load.rate is not None:
            bound = min(bound, load.rate)
        cell = Cell(
            hypothesis.name,
            limit,
            load.name,
            values,
            LoadState.STABLE if load.saturated else _mostly(states),
            bound * work.tokens,
            next((text for run in made if (text := _unserved(run))), ""),
            all(run.summary.tpot.trusted(99) and run.summary.ttft.trusted(99) for run in made),
            executor_because=next((r.executor_because for r in made if r.executor_because), None),
        )
        if base is None:
            base = cell
        else:
            cell = evolve(
                cell,
                tpot_change=paired_change(base.values["tpot_p99_ns"], values["tpot_p99_ns"]),
                tokens_gain=paired_change(
                    base.values["loaded_tokens_per_s"], values["loaded_tokens_per_s"]
                ),
            )
        yield cell


def _mostly(states: Counter[LoadState]) -> LoadState:
    """That of most replications; of as many, the worse."""
    return max(states, key=lambda state: (states[state], list(LoadState).index(state)))


def _ends(facts: RequestFacts) -> NDArray[np.int64]:
    """When requests ended; never, for those that were refused: a bounded queue hides an overload."""
    return np.where(facts.admitted_ns >= 0, facts.ended_ns, -1)


def _transient(runs: Sequence[TwinRun]) -> int:
    """Requests to leave out at the start: of the mean TTFT over replications, by MSER-5."""
    latencies = [run.facts.first_token_ns - run.facts.arrival_ns for run in runs]
    if any((run.facts.first_token_ns < 0).any() for run in runs):
        return 0
    shortest = min(map(len, latencies))
    return warm_up(np.mean([each[:shortest] for each in latencies], axis=0)).index


def _metrics(run: TwinRun, cut: int) -> dict[str, float]:
    """The metrics of one run; latencies of the requests from ``cut`` on."""
    summary, facts = run.summary, run.facts
    late = facts.since(cut)

    def percentile(samples: NDArray[Any], q: float) -> float:
        return float(np.percentile(samples, q)) if len(samples) else math.nan

    ttft, tpot = late.ttft_ns(), late.tpot_ns()
    return {
        "loaded_tokens_per_s": summary.loaded_tokens_per_s,
        "requests_per_s": summary.requests_per_s,
        "ttft_p50_ns": percentile(ttft, 50),
        "ttft_p99_ns": percentile(ttft, 99),
        "tpot_p50_ns": percentile(tpot, 50),
        "tpot_p99_ns": percentile(tpot, 99),
        "compute": summary.utilisation["compute"],
        "h2d": summary.utilisation["h2d"],
        "d2h": summary.utilisation["d2h"],
        "submitter": summary.utilisation["submitter"],
        "completer": summary.utilisation["completer"],
        "overlap": summary.overlap,
        "kv_mean_tokens": summary.kv_mean_tokens,
        "kv_peak_tokens": float(summary.kv_peak_tokens),
    }


def _unserved(run: TwinRun) -> str:
    """What became of requests that should have been served, in words; empty if all were."""
    summary = run.summary
    fates = {name: summary.outcomes.get(name, 0) for name in ("expired", "failed", "cancelled")}
    invalid = summary.refusals.get("INVALID_ARGUMENT", 0)
    fates["refused"] = summary.outcomes.get("refused", 0) - invalid
    return ", ".join(f"{count} {name}" for name, count in fates.items() if count)


# --- verdicts ---


def _gates(plan: Plan, name: str, limits: Sequence[int]) -> dict[tuple[str, int], Gate]:
    found = {}
    for limit in limits:
        if limit == 1:
            continue
        cells = [plan.cell(name, limit, load.name) for load in plan.loads]
        bases = [plan.cell(name, 1, load.name) for load in plan.loads]
        found[name, limit] = judge(bases, cells)
    return found


def judge(bases: Sequence[Cell], cells: Sequence[Cell]) -> Gate:
    """A limit against one in flight by the gates of §13.3, from their cells at the same loads.

    Tokens/s are judged at saturation, where nothing but the card limits them. TPOT P99 is judged at
    every load at which the card keeps up one job at a time, and at saturation: the worst counts.
    ``UNDEFINED``: a figure is missing, or a run at saturation did not serve its requests, so
    that its rates say nothing. Requests refused as invalid are the same in every run.
    """
    saturated = next(cell for cell in cells if cell.load == SATURATED)
    base = next(cell for cell in bases if cell.load == SATURATED)
    judged = [
        cell
        for cell, one in zip(cells, bases, strict=True)
        if one.state is LoadState.STABLE and not (cell.unserved or one.unserved)
    ]
    gain = saturated.tokens_gain
    assert gain is not None
    changes = [
        (cell.tpot_change, cell.load)
        for cell in judged
        if cell.tpot_change is not None and math.isfinite(cell.tpot_change.estimate)
    ]
    lost = [
        f"{cell.unserved} at {cell.load}"
        for cell, one in zip(cells, bases, strict=True)
        if cell.unserved and (cell is saturated or not one.unserved)
    ]
    unserved = base.unserved or "; ".join(lost)
    if unserved:
        why = f"not every request was served ({unserved})"
        return Gate(gain, _nothing(), "-", "UNDEFINED", None, why)
    if not changes or not math.isfinite(gain.estimate):
        why = "no request produced the two tokens or more that the gates need"
        return Gate(gain, _nothing(), "-", "UNDEFINED", None, why)
    throughput = decide(gain, MIN_GAIN)
    verdicts = [decide(change, MAX_TPOT_P99, "lower") for change, _ in changes]
    worst = max(range(len(changes)), key=lambda index: changes[index][0].high)
    all_of = [throughput, *verdicts]
    if any(one.verdict == "FAIL" for one in all_of):
        verdict: Verdict = "FAIL"
    elif all(one.verdict == "PASS" for one in all_of):
        verdict = "PASS"
    else:
        verdict = "UNDECIDED"
    open_ones = [one.more_runs for one in all_of if one.verdict == "UNDECIDED"]
    more = None if None in open_ones else max((each or 0 for each in open_ones), default=0)
    why = _why(base, saturated, gain, *changes[worst])
    left_out = [cell.load for cell in cells if cell not in judged]
    if left_out:
        why += f"; not judged at {', '.join(left_out)}: one in flight does not keep up there"
    return Gate(gain, changes[worst][0], changes[worst][1], verdict, more, why)


def _nothing() -> Interval:
    return mean_interval([])


def percent(interval: Interval) -> str:
    """A relative change with half its interval's width, for a person."""
    if math.isnan(interval.estimate):
        return "–"
    width = interval.half_width
    around = f" ± {100 * width:.1f}" if math.isfinite(width) else " ± ?"
    return f"{100 * interval.estimate:+.1f}{around} %"


def _why(one: Cell, two: Cell, gain: Interval, change: Interval, load: str) -> str:
    def mean(cell: Cell, name: str) -> float:
        return float(np.mean(cell.values[name]))

    idle, after = 1 - mean(one, "compute"), 1 - mean(two, "compute")
    at = "at saturation" if load == SATURATED else f"at {load} load"
    throughput = decide(gain, MIN_GAIN).verdict
    tpot = decide(change, MAX_TPOT_P99, "lower").verdict
    words = {"PASS": ("passes", "within"), "FAIL": ("misses", "beyond")}
    open_words = ("undecided against", "undecided against")
    parts = [
        f"tokens/s {percent(gain)} ({words.get(throughput, open_words)[0]} +10 %)",
        f"TPOT P99 {percent(change)} {at}, its worst ({words.get(tpot, open_words)[1]} +5 %)",
        f"compute idles {idle:.1%} of the time with one in flight and {after:.1%} now",
        f"two or more jobs are on the device {mean(two, 'overlap'):.0%} of its busy time",
    ]
    if gain.estimate > idle / max(1 - idle, 1e-9) + 0.02:
        parts.append("most of the gain is two jobs computing at once, not hidden transfers")
    elif gain.estimate < MIN_GAIN:
        parts.append("there is no more than that idle time to hide host work and transfers in")
    return "; ".join(parts)


# --- the executor itself ---


def _checked(scenario: Scenario, hypothesis: Preset, limit: int, plan: Plan) -> Run:
    """The executor runs the first requests of the cell at saturation; the twin must say the same."""
    load = next(each for each in plan.loads if each.saturated)
    one = _cell_scenario(scenario, hypothesis.semantics, limit, load)
    array = requests_of(scenario, load, scenario.seed)[:CHECKED_REQUESTS]
    run = simulate(one, requests=[Request(index, *row) for index, row in enumerate(array.tolist())])
    if not run.complete:
        return run
    twin = run_twin(one, array, tables=True)
    assert twin.jobs is not None
    assert twin.requests is not None
    same = [
        digest(dict(zip(TABLES, tables, strict=True)), {})
        for tables in ((run.jobs, run.requests), (twin.jobs, twin.requests))
    ]
    if same[0] != same[1]:
        raise TwinDiffersError(
            f"under {hypothesis.name!r} with {limit} in flight the compiled twin gives other tables "
            "than the executor; this is a defect of caltrio, please report it with the scenario"
        )
    plan.samples[hypothesis.name, limit] = run
    plan.checked_jobs += run.jobs.num_rows
    return run


# --- files ---


def _rows(cell: Cell, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    for index, seed in enumerate(seeds):
        yield {
            "hypothesis": cell.hypothesis,
            "max_inflight": cell.max_inflight,
            "load": cell.load,
            "seed": seed,
            **{name: float(values[index]) for name, values in cell.values.items()},
        }


def _write(plan: Plan, rows: list[dict[str, Any]], folder: Path) -> None:
    facts = about_run(plan.scenario, "twin", load_manifest())
    facts["seeds"] = {"run": seeds_of(plan.scenario)}
    about = {META_KEY: json.dumps({**facts, "complete": plan.complete}, sort_keys=True)}
    table = pa.Table.from_pylist(rows).replace_schema_metadata(about)
    pq.write_table(table, folder / "plan.parquet")
    parts: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
    for (name, limit), run in plan.samples.items():
        for kind, part, schema in (
            (TABLES[0], run.jobs, JOB_SCHEMA),
            (TABLES[1], run.requests, REQUEST_SCHEMA),
        ):
            wide = part.select(schema.names)
            wide = wide.add_column(0, "max_inflight", pa.array([limit] * wide.num_rows, pa.int32()))
            parts[kind].append(
                wide.add_column(0, "hypothesis", pa.array([name] * wide.num_rows, pa.string()))
            )
    for kind, tables in parts.items():
        if tables:
            whole = pa.concat_tables(tables).replace_schema_metadata(about)
            pq.write_table(whole, folder / f"{kind}.parquet")
    if rows:
        plain = {name: table.column(name) for name in table.column_names}
        rounded = pa.table({
            name: column if not pa.types.is_floating(column.type) else pc.round(column, 6)
            for name, column in plain.items()
        })  # fmt: skip
        plan.digest = digest({"plan": rounded}, facts["seeds"])
    text = json.dumps(plan.to_json(), indent=2, allow_nan=False)
    (folder / "plan.json").write_text(text + "\n", encoding="utf-8")
