"""Resident memory of a long run that streams its records to Parquet.

    python benchmarks/memory.py [--steps 1000000]

The target is 500 MB of peak resident memory for one million steps.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click
import psutil

from caltrio.config import ExecutorConfig
from caltrio.scenario import Scenario
from caltrio.semantics import PRESETS
from caltrio.workload.spec import Arrivals, Lengths, Workload
from sim.run import simulate

MB = 10**6
TOKENS = 250


@click.command()
@click.option("--steps", default=1_000_000, show_default=True)
def main(steps: int) -> None:
    """Print the peak of resident memory, and what it was before."""
    process = psutil.Process()
    before = process.memory_info().rss
    peak = before
    ended = 0

    def sample() -> None:
        nonlocal peak, ended
        ended += 1
        peak = max(peak, process.memory_info().rss)
        if ended % 400 == 0:
            print(f"  {ended * TOKENS:>9,} steps: {process.memory_info().rss / MB:5.0f} MB", flush=True)

    scenario = Scenario(
        semantics=PRESETS["full-duplex"].semantics,
        workload=Workload(
            arrivals=Arrivals("closed", clients=8),
            lengths=Lengths(prompt_tokens=100, output_tokens=TOKENS),
            requests=steps // TOKENS,
        ),
        executor=ExecutorConfig(max_inflight=2),
    )
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(scenario, folder=Path(folder), on_request=sample)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    seconds = time.perf_counter() - begin
    after = process.memory_info().rss
    print(
        f"{run.summary.jobs:,} steps with records streamed: {seconds:.0f} s, "
        f"{run.summary.jobs / seconds:,.0f} steps/s; resident {before / MB:.0f} MB before, "
        f"{peak / MB:.0f} MB at most while running, {after / MB:.0f} MB with the summary made "
        f"(target: under 500 MB); {size / MB:.0f} MB of Parquet"
    )


if __name__ == "__main__":
    main()
