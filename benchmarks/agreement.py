"""One scenario on the simulated and on the emulated card, under each preset: do they agree?

Total time, tokens/s, TTFT and TPOT P50 within 2 %, P99 within 5 %, on a quiet machine; its own
timer error is printed beside. Exit code 1 if they do not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import trio
from attrs import evolve
from rich.console import Console
from rich.table import Table

from caltrio.device import device_kind
from caltrio.golden import golden_for
from caltrio.manifest import load_manifest
from caltrio.observe.metrics import Summary
from caltrio.scenario import load_scenario
from caltrio.semantics import PRESETS
from caltrio.units import format_ns
from caltrio.workload.run import run_scenario

SCENARIO = Path(__file__).with_suffix(".toml")
METRICS = (
    ("total time", lambda s: s.span_ns, 0.02),
    ("tokens/s", lambda s: s.tokens_per_s, 0.02),
    ("TTFT P50", lambda s: s.ttft.p50_ns, 0.02),
    ("TTFT P99", lambda s: s.ttft.p99_ns, 0.05),
    ("TPOT P50", lambda s: s.tpot.p50_ns, 0.02),
    ("TPOT P99", lambda s: s.tpot.p99_ns, 0.05),
)


def timer_error_ns(sleeps: int = 200, sleep_ns: int = 5_000_000) -> tuple[float, float]:
    """P50 and P99 of how late trio wakes from a sleep of 5 ms here."""

    async def main() -> list[float]:
        late = []
        for _ in range(sleeps):
            due = trio.current_time() + sleep_ns / 1e9
            await trio.sleep_until(due)
            late.append((trio.current_time() - due) * 1e9)
        return late

    late = trio.run(main)
    return float(np.percentile(late, 50)), float(np.percentile(late, 99))


def text(name: str, value: float) -> str:
    return f"{value:.2f}" if name == "tokens/s" else format_ns(round(value))


def compare(preset: str, table: Table) -> bool:
    scenario = evolve(load_scenario(SCENARIO), semantics=PRESETS[preset].semantics)
    golden = golden_for(load_manifest(), None, 1)  # what the first job of a process costs is no matter
    simulated = run_scenario(scenario, device_kind("sim")).summary
    emulated = run_scenario(scenario, device_kind("emulator"), warm_up=golden.warm_up).summary
    agrees = True
    for name, figure, allowed in METRICS:
        ours, theirs = figure(simulated), figure(emulated)
        difference = theirs / ours - 1
        within = abs(difference) <= allowed
        agrees &= within
        table.add_row(
            preset if name == METRICS[0][0] else "", name, text(name, ours), text(name, theirs),
            f"{difference:+.2%}", f"{allowed:.0%}", "met" if within else "MISSED",
            end_section=name == METRICS[-1][0],
        )  # fmt: skip
    return agrees and _whole(simulated, emulated)


def _whole(simulated: Summary, emulated: Summary) -> bool:
    return simulated.outcomes == emulated.outcomes == {"completed": simulated.requests}


def main() -> int:
    screen = Console(width=110)
    median, high = timer_error_ns()
    table = Table(title=f"{SCENARIO.name} on the simulated and on the emulated card")
    for heading in ("hypothesis", "metric", "sim", "emulator", "difference", "allowed", ""):
        table.add_column(
            heading, justify="left" if heading in ("hypothesis", "metric", "") else "right"
        )
    results = [compare(preset, table) for preset in PRESETS]
    agrees = all(results)
    screen.print(table)
    screen.print(
        f"timer error of this machine, a sleep of 5 ms: P50 {format_ns(round(median))} late, "
        f"P99 {format_ns(round(high))}"
    )
    screen.print("they agree" if agrees else "they DIFFER; on a busy machine, try again alone")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
