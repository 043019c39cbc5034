"""``caltrio simulate`` and ``caltrio plan``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
from attrs import evolve
from rich.markup import escape
from rich.table import Table

from caltrio.commands import json_option
from caltrio.output import RESULT_FILES, after_signal, console, output_folder, print_json, progress
from caltrio.run_output import conduct, force_option, percentile_text, run_options
from caltrio.scenario import load_scenario
from caltrio.scenario_options import read_scenario, scenario_argument, scenario_options, seed_option
from caltrio.workload.run import Run

from .figures import timeline
from .plan import DEFAULT_SCENARIO, make_plan
from .run import simulate as run_simulation


@click.command()
@scenario_argument
@scenario_options
@run_options("both tables, trace.json (open it at ui.perfetto.dev), timeline.svg")
def simulate(scenario_file: Path | None, **options: Any) -> int:
    """Run the executor once against the simulated card, and print its latencies and loads.

    The scenario is SCENARIO.toml, or the defaults; options override it.

    \b
    Examples:
      caltrio simulate --workload trace.csv --limit 200 --semantics full-duplex \\
          --max-inflight 2 --seed 7 --out out/run
      caltrio simulate --arrivals poisson --rate 0.2 --lengths lognormal --output-tokens 100

    TTFT runs from arrival to the first token, TPOT is the mean time per further token of one
    request, ITL the time between two tokens, queueing the wait for admission.
    """  # fmt: skip  # noqa: D301 - click wants the character, not its escape
    scenario = read_scenario(scenario_file, options)
    requests = scenario.workload.build(scenario.seed, scenario.base)

    def draw(run: Run, out: Path) -> None:
        if run.jobs.num_rows:
            title = f"{scenario.executor.max_inflight} in flight"
            timeline({title: run.jobs}, "Steady state", scenario.semantics, out / "timeline.svg")

    return conduct(
        "simulate",
        requests,
        options,
        lambda folder, trace_jobs, on_request: run_simulation(
            scenario,
            requests=requests,
            folder=folder,
            trace_jobs=trace_jobs,
            on_request=on_request,
        ),
        draw,
    )


@click.command()
@scenario_argument
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out/plan"),
    show_default=True,
    help="Folder for report.html, the tables and the figures.",
)
@seed_option
@force_option
@json_option
def plan(
    scenario_file: Path | None,
    out: Path,
    seed: int | None,
    *,
    force: bool,
    as_json: bool,
) -> int:
    """Is a second job in flight worth shipping? A verdict per hypothesis, with a report.

    Runs the executor under each hypothesis about the ping/pong engines, with each in-flight limit,
    on the same requests, and judges by the gates of specification §13.3: aggregate tokens/s up by
    at least 10 %, TPOT P99 of a request worse by at most 5 %.

    Without SCENARIO.toml it runs the scenario that ships with caltrio.
    """  # fmt: skip
    scenario = load_scenario(scenario_file or DEFAULT_SCENARIO)
    if seed is not None:
        scenario = evolve(scenario, seed=seed)
    command = "caltrio plan" + (f" {scenario_file.name}" if scenario_file else "")
    requests = scenario.workload.build(scenario.seed, scenario.base)  # before a folder is touched
    with output_folder(out, force=force, files=RESULT_FILES), progress() as shown:
        task = shown.add_task("plan")

        def on_progress(done: int, total: int, what: str) -> None:
            shown.update(task, completed=done, total=total, description=what)

        made = make_plan(scenario, out, command=command, requests=requests, on_progress=on_progress)
    if as_json:
        print_json(made.to_json())
    elif made.complete:
        _print_plan(made, out)
    return after_signal("plan", made.stopped_by, "the runs that had ended are kept")


def _signed(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:+.1%}"


def _print_plan(made: Any, out: Path) -> None:
    screen = console()
    table = Table(title="Is a second job in flight worth shipping? (gates of §13.3)")
    for heading, justify in (
        ("hypothesis", "left"), ("in flight", "right"), ("tokens/s", "right"), ("gain", "right"),
        ("TTFT P50", "right"), ("TTFT P99", "right"), ("TPOT P50", "right"), ("TPOT P99", "right"),
        ("change", "right"), ("verdict", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for cell in made.cells:
        s, gate = cell.run.summary, cell.gate
        table.add_row(
            cell.hypothesis if gate is None else "",
            str(cell.max_inflight),
            f"{s.loaded_tokens_per_s:.2f}",
            "" if gate is None else _signed(gate.throughput_gain),
            percentile_text(s.ttft, 50),
            percentile_text(s.ttft, 99),
            percentile_text(s.tpot, 50),
            percentile_text(s.tpot, 99),
            "" if gate is None else _signed(gate.tpot_p99_change),
            "" if gate is None else gate.verdict,
            end_section=gate is not None and cell.max_inflight == max(made.limits),
        )
    screen.print(table)
    for cell in made.cells:
        if cell.gate is not None:
            screen.print(f"{cell.hypothesis}, {cell.max_inflight} in flight: {cell.gate.why}")
    screen.print(
        "All timing figures and all semantics are assumptions until they are measured: "
        "docs/assumptions.md. One run each; intervals are not computed."
    )
    screen.print(f"report: {escape(str(out / 'report.html'))}")
