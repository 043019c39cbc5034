"""``caltrio plan``: the verdicts, and the report."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from signal import Signals

import click
from attrs import evolve
from rich.markup import escape
from rich.table import Table

from caltrio.commands import json_option
from caltrio.output import RESULT_FILES, after_signal, console, output_folder, print_json, progress
from caltrio.planspec import SATURATED
from caltrio.run_output import force_option
from caltrio.scenario import load_scenario
from caltrio.scenario_options import scenario_argument, seed_option
from caltrio.signals import StoppedError, noted
from caltrio.units import format_ns

from .compare import changes, read_plan
from .plan import DEFAULT_SCENARIO, Plan, make_plan, percent
from .report import sensitivity, sensitivity_json, write_report


@click.command()
@scenario_argument
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out/plan"),
    show_default=True,
    help="Folder for report.html, the tables and the figures.",
)
@click.option(
    "--compare", type=click.Path(path_type=Path), help="Folder of an earlier plan: what changed since."
)
@seed_option
@force_option
@json_option
def plan(
    scenario_file: Path | None,
    out: Path,
    compare: Path | None,
    seed: int | None,
    *,
    force: bool,
    as_json: bool,
) -> int:
    """Is a second job in flight worth shipping? A verdict per hypothesis, with a report.

    Simulates each hypothesis about the ping/pong engines with each in-flight limit at several loads, a
    number of times each on the same seeds, and judges by the gates of specification §13.3 on 95 %
    intervals: aggregate tokens/s up by at least 10 %, TPOT P99 of a request worse by at most 5 %.

    Without SCENARIO.toml it runs the scenario that ships with caltrio.
    """  # fmt: skip
    scenario = load_scenario(scenario_file or DEFAULT_SCENARIO)
    if seed is not None:
        scenario = evolve(scenario, seed=seed)
    earlier = None if compare is None else read_plan(compare)  # before a folder is touched
    scenario.workload.build(scenario.seed, scenario.base)
    words = ["caltrio", "plan", *([scenario_file.name] if scenario_file else [])]
    command = shlex.join([*words, "--seed", str(scenario.seed)])
    stopped_by: Signals | None = None
    since = None
    with (
        noted() as note,
        output_folder(out, force=force, files=RESULT_FILES),
        progress() as shown,
    ):
        task = shown.add_task("plan")

        def on_progress(done: int, total: int, what: str) -> None:
            shown.update(task, completed=done, total=total, description=what)

        def say(what: str) -> None:
            shown.update(task, description=what)
            if note.by is not None:
                raise StoppedError(note.by)

        say("compile the twin (the first time only)")
        made = make_plan(scenario, out, on_progress=on_progress)
        stopped_by = made.stopped_by
        if made.complete:
            since = None if earlier is None else changes(earlier, made.to_json())
            try:
                unknowns = sensitivity(made, say)
                if unknowns is not None:
                    text = sensitivity_json(unknowns)
                    (out / "sensitivity.json").write_text(text + "\n", encoding="utf-8")
                write_report(
                    made, unknowns, out, command=command, changes=since,
                    compared_with=str(compare), on_progress=say,
                )  # fmt: skip
            except StoppedError as stopped:
                stopped_by = stopped.by
    if stopped_by is not None:
        kept = "the runs that had ended are kept in plan.parquet, without a report"
        return after_signal("plan", stopped_by, kept)
    if as_json:
        facts = made.to_json()
        if since is not None:
            facts["changes"] = [[one.what, one.before, one.now] for one in since]
        print_json(facts)
    else:
        _print_plan(made, out)
        if since is not None:
            console().print(f"{len(since)} changes since {escape(str(compare))}: see the report")
    return 0


def _print_plan(made: Plan, out: Path) -> None:
    screen = console()
    runs = made.scenario.plan.replications
    table = Table(title=f"Is a second job in flight worth shipping? (gates of §13.3, {runs} runs each)")
    for heading, justify in (
        ("hypothesis", "left"), ("in flight", "right"), ("tokens/s", "right"), ("gain", "right"),
        ("TTFT P99", "right"), ("TPOT P99", "right"), ("worst change", "right"), ("verdict", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for hypothesis in made.hypotheses:
        for limit in made.limits:
            key = (hypothesis.name, limit)
            first, last = limit == made.limits[0], limit == made.limits[-1]
            name = hypothesis.name if first else ""
            if key in made.impossible:
                table.add_row(name, str(limit), *["–"] * 5, "no slot", end_section=last)
                continue
            cell, gate = made.cell(*key, SATURATED), made.gates.get(key)
            mark = "" if cell.trusted else "~"
            table.add_row(
                name,
                str(limit),
                f"{cell.interval('loaded_tokens_per_s').estimate:.2f}",
                "" if gate is None else percent(gate.gain),
                mark + _ns(cell.interval("ttft_p99_ns").estimate),
                mark + _ns(cell.interval("tpot_p99_ns").estimate),
                "" if gate is None else f"{percent(gate.tpot_change)} at {gate.tpot_load}",
                "" if gate is None else gate.verdict,
                end_section=last,
            )
    screen.print(table)
    for (name, limit), gate in made.gates.items():
        more = f" (about {gate.more_runs:,} more runs would settle it)" if gate.more_runs else ""
        screen.print(f"{name}, {limit} in flight: {gate.verdict}{more}: {gate.why}", markup=False)
    for reason in sorted({cell.executor_because for cell in made.cells if cell.executor_because}):
        screen.print(f"Run by the executor, since the twin does not cover it: {reason}.", markup=False)
    loads = ", ".join(
        load.name if load.rate is None else f"{load.name} = {load.rate:g} requests/s"
        for load in made.loads
    )
    screen.print(
        f"Table: at saturation, mean over {runs} runs, ± half of the 95 % interval. Loads: {loads}. "
        f"{made.checked_jobs:,} jobs were run by the executor itself, with the same times. "
        "All timing figures and all semantics are assumptions until they are measured: "
        "docs/assumptions.md."
    )
    screen.print(f"report: {escape(str(out / 'report.html'))}")


def _ns(value: float) -> str:
    return "–" if math.isnan(value) else format_ns(value)
