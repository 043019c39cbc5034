"""``caltrio sweep``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from caltrio.commands import json_option
from caltrio.output import RESULT_FILES, after_signal, console, output_folder, print_json, progress
from caltrio.run_output import force_option
from caltrio.units import format_ns

from .sweep import (
    JOURNAL,
    TABLE,
    Journal,
    SweepFailed,
    cluster_executor,
    ended_runs,
    local_executor,
    results,
    run_sweep,
    write_table,
)
from .sweep_design import Sweep, load_sweep

_SHOWN = ("loaded_tokens_per_s", "ttft_p99_ns", "tpot_p99_ns")
_MOST_ROWS = 40


@click.command()
@click.argument("sweep_file", metavar="SWEEP.toml", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for sweep.parquet, and for the journal from which a stopped sweep goes on.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes on this machine; one a core.")
@click.option("--cluster", metavar="ADDRESS", help="Run on the Dask scheduler there instead.")
@force_option
@json_option
def sweep(
    sweep_file: Path,
    out: Path,
    workers: int | None,
    cluster: str | None,
    *,
    force: bool,
    as_json: bool,
) -> int:
    """Run a scenario at many points: a grid, Sobol points or a latin hypercube over its fields.

    SWEEP.toml names a scenario, the fields to vary, by dotted key, and how many replications,
    with the same seeds at every point:

    \b
      schema = 1
      scenario = "base.toml"
      replications = 3
      design = "grid"
      [parameters]
      "executor.max_inflight" = [1, 2]
      "timing.submit.time" = ["40us", "4ms"]

    Stopped, by Ctrl-C or otherwise, the same command goes on where it was. --force starts over.
    """  # noqa: D301 - click wants the character, not its escape
    if workers is not None and cluster is not None:
        raise click.UsageError("--workers is for this machine; a cluster has its own")
    with progress() as shown:
        checking = shown.add_task("check points", total=None)
        made = load_sweep(
            sweep_file, lambda done, total: shown.update(checking, completed=done, total=total)
        )
        shown.remove_task(checking)
    executors = local_executor(workers) if cluster is None else cluster_executor(cluster)
    with (
        executors as (executor, window),
        output_folder(out, force=force, files=RESULT_FILES, journal=JOURNAL),
        Journal(out / JOURNAL, made, fresh=force) as journal,
    ):
        before = ended_runs(made, journal)
        try:
            with progress() as shown:
                task = shown.add_task("runs", total=made.total, completed=before)
                stopped_by = run_sweep(made, journal, executor, window, lambda: shown.advance(task))
        except SweepFailed as error:
            raise SweepFailed(f"{error}; {_kept(made, journal, out)}") from error
        if stopped_by is not None:
            return after_signal("sweep", stopped_by, _kept(made, journal, out))
        write_table(made, journal, out / TABLE)
        if as_json:
            print_json(
                {
                    "table": str(out / TABLE),
                    "runs": made.total,
                    "done_before": before,
                    "points": list(_means(made, journal)),
                }
            )
        else:
            _print(made, journal, out, before)
    return 0


def _kept(made: Sweep, journal: Journal, out: Path) -> str:
    done = ended_runs(made, journal)
    return f"{done:,} of {made.total:,} runs are kept in {out}; the same command goes on from there"


def _means(made: Sweep, journal: Journal) -> Iterator[dict[str, Any]]:
    """For each point: its parameters, its worst status, and means over its replications."""
    found: list[dict[str, Any]] = []
    for index, _, result in results(made, journal):
        found.append(result)
        if len(found) < len(made.seeds):
            continue
        pairs = zip(made.axes, made.points[index].values, strict=True)
        status, reason = next(
            ((r["status"], r["reason"]) for r in found if r["status"] != "ok"), ("ok", None)
        )
        yield {
            "point": index,
            "parameters": {axis.column: axis.number(value) for axis, value in pairs},
            "status": status,
            "reason": reason,
            **{name: _mean([result["metrics"].get(name) for result in found]) for name in _SHOWN},
        }
        found = []


def _mean(values: list[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def _unserved(metrics: dict[str, Any]) -> bool:
    return bool(metrics) and metrics.get("outcomes_completed", 0) < metrics["requests"]


def _headings(keys: list[str]) -> list[str]:
    """The last two parts of each key, or all of it where these would name two columns."""
    short = [".\n".join(key.split(".")[-2:]) for key in keys]
    return [
        name if short.count(name) == 1 else key.replace(".", ".\n")
        for name, key in zip(short, keys, strict=True)
    ]


def _print(made: Sweep, journal: Journal, out: Path, before: int) -> None:
    screen = console()
    varying = [
        (place, axis)
        for place, axis in enumerate(made.axes)
        if any(point.values[place] != made.points[0].values[place] for point in made.points)
    ]
    count = len(made.seeds)
    table = Table(title=f"Means over {count} replication{'s' * (count > 1)}")
    for heading in _headings([axis.key for _, axis in varying]):
        table.add_column(heading, overflow="fold")
    for heading in ("tokens/s", "TTFT P99", "TPOT P99"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for row, _ in zip(_means(made, journal), range(_MOST_ROWS), strict=False):
        values = made.points[row["point"]].values
        rate, *latencies = (row[name] for name in _SHOWN)
        table.add_row(
            *(escape(axis.text(values[place])) for place, axis in varying),
            "-" if rate is None else f"{rate:,.2f}",
            *("-" if latency is None else format_ns(latency) for latency in latencies),
            row["status"],
        )
    screen.print(table)
    left_out = len(made.points) - _MOST_ROWS
    if left_out > 0:
        screen.print(f"{left_out:,} more points are in the table only")
    impossible = sum(point.impossible is not None for point in made.points)
    text = f"{len(made.points):,} points, {made.total:,} runs"
    if before:
        text += f", {before:,} of them done before"
    if impossible:
        text += f"; {impossible:,} points are impossible, the column 'reason' says why"
    unserved = sum(_unserved(result["metrics"]) for _, _, result in results(made, journal))
    if unserved:
        text += f"; in {unserved:,} runs not every request was served, see the columns 'outcomes_...'"
    screen.print(f"{text}; table: {escape(str(out / TABLE))}")
