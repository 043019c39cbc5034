"""What the commands around one run share: its folder, its progress, its latencies and loads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from .commands import json_option
from .observe.metrics import Distribution, Slo, Summary, goodput_per_s
from .output import RESULT_FILES, after_signal, console, output_folder, print_json, progress
from .scenario_options import DURATION
from .units import format_ns
from .workload.requests import Request
from .workload.run import Run

# (folder or None, jobs in trace.json, what to call at the end of each request)
DoRun = Callable[[Path | None, int, Callable[[], None]], Run]

force_option = click.option("--force", is_flag=True, help="Write to a folder that holds files already.")
_SLO = (
    click.option("--slo-ttft", type=DURATION, help="Count a request as good up to this TTFT."),
    click.option("--slo-tpot", type=DURATION, help="Count a request as good up to this TPOT."),
)
_TRACE_JOBS = click.option(
    "--trace-jobs",
    default=20_000,
    show_default=True,
    type=click.IntRange(0),
    help="Jobs in trace.json; 0 writes none.",
)


def run_options(files: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options that :func:`conduct` knows; ``files``: what --out gets, in words."""
    out = click.option("--out", type=click.Path(path_type=Path), help=f"Folder for {files}.")

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((*_SLO, out, _TRACE_JOBS, force_option, json_option)):
            command = option(command)
        return command

    return decorate


def conduct(
    command: str,
    requests: list[Request],
    options: Mapping[str, Any],
    do_run: DoRun,
    draw: Callable[[Run, Path], None] | None = None,
) -> int:
    """Carry one run out: claim the folder, show progress, write the summary, print; the exit code.

    Args:
        command: its name, for messages.
        requests: what will be sent.
        options: the values of :func:`run_options` by parameter.
        do_run: runs it.
        draw: adds figures to the folder.

    Raises:
        InputError: the folder is in use, or cannot be written.
        ServiceFailed: the executor has failed for good; what had ended by then is written and shown.
    """
    out: Path | None = options["out"]
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(output_folder(out, force=options["force"], files=RESULT_FILES))
        shown = stack.enter_context(progress())
        task = shown.add_task("requests", total=len(requests))
        run = do_run(out, options["trace_jobs"] if out is not None else 0, lambda: shown.advance(task))
        shown.stop()
        slo = Slo(options["slo_ttft"], options["slo_tpot"])
        asked = slo != Slo()
        good = goodput_per_s(run.requests, slo, run.summary.span_ns) if asked else None
        facts = {
            **run.summary.to_json(),
            "goodput_per_s": good,
            "complete": run.complete,
            "failure": None if run.failure is None else run.failure.reason,
            "limit_reason": run.limit_reason,
        }
        if out is not None:
            if draw is not None:
                draw(run, out)
            text = json.dumps(facts, indent=2, allow_nan=False)
            (out / "summary.json").write_text(f"{text}\n", encoding="utf-8")
    if options["as_json"]:
        print_json(facts)
    else:
        _print_run(run, good, out)
    if run.failure is not None:
        raise run.failure
    return after_signal(command, run.stopped_by, "what had ended by then is kept")


def percentile_text(samples: Distribution, percentile: int) -> str:
    """A percentile for a table; marked with ~ where it rests on too few samples."""
    if not samples.count:
        return "-"
    mark = "" if samples.trusted(percentile) else "~"
    return mark + format_ns(getattr(samples, f"p{percentile}_ns"))


def _print_run(run: Run, goodput: float | None, out: Path | None) -> None:
    summary, screen = run.summary, console()
    table = Table(title="Latency (~: few samples, the percentile rests on one or two of them)")
    table.add_column("")
    for heading in ("mean", "P50", "P90", "P99", "max", "samples"):
        table.add_column(heading, justify="right")
    for name, samples in _latencies(summary):
        table.add_row(
            name,
            format_ns(samples.mean_ns) if samples.count else "-",
            *(percentile_text(samples, percentile) for percentile in (50, 90, 99)),
            format_ns(samples.max_ns) if samples.count else "-",
            f"{samples.count:,}",
        )
    screen.print(table)
    busy = Table(title="Utilisation (busy share of the span)")
    for name in summary.utilisation:
        busy.add_column(name, justify="right")
    busy.add_row(*map(_share, summary.utilisation.values()))
    screen.print(busy)
    screen.print(
        f"{summary.tokens_per_s:,.2f} tokens/s and {summary.requests_per_s:,.3f} requests/s "
        f"over {format_ns(summary.span_ns)}; two or more jobs on the device "
        f"{_share(summary.overlap)} of its busy time; "
        f"KV reserved {summary.kv_mean_tokens:,.0f} tokens on average, "
        f"{summary.kv_peak_tokens:,} at most"
    )
    if run.limit_reason is not None:
        screen.print(f"in flight: {escape(run.limit_reason)}")
    if goodput is not None:
        screen.print(f"goodput: {goodput:,.3f} requests/s met the SLO")
    outcomes = ", ".join(f"{count:,} {name}" for name, count in summary.outcomes.items())
    screen.print(f"requests: {outcomes or 'none'}; {summary.jobs:,} jobs")
    for outcome in summary.outcomes:
        if outcome != "completed":
            for status, count, reason in _reasons(run, outcome):
                screen.print(f"{outcome}: {count:,} × {status}, the first because {escape(reason)}")
    if run.trace_left_out:
        screen.print(f"trace.json leaves out {run.trace_left_out:,} later jobs; see --trace-jobs")
    if out is not None:
        screen.print(f"written to {escape(str(out))}")


def _share(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _latencies(summary: Summary) -> list[tuple[str, Distribution]]:
    return [
        ("TTFT", summary.ttft),
        ("TPOT", summary.tpot),
        ("ITL", summary.itl),
        ("E2E", summary.e2e),
        ("queueing", summary.queueing),
    ]


def _reasons(run: Run, outcome: str) -> list[tuple[str, int, str]]:
    """(status, how many, reason of the first) of the requests that ended so."""
    found: dict[str, tuple[int, str]] = {}
    for row in run.requests.select(["outcome", "status", "reason"]).to_pylist():
        if row["outcome"] == outcome:
            count, reason = found.get(row["status"], (0, str(row["reason"])))
            found[row["status"]] = (count + 1, reason)
    return [(status, count, reason) for status, (count, reason) in found.items()]
