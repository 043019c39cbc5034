"""``caltrio simulate`` and ``caltrio plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from caltrio.run_output import conduct, run_options
from caltrio.scenario_options import read_scenario, scenario_argument, scenario_options
from caltrio.workload.run import Run

from .figures import timeline
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
