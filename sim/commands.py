"""``caltrio simulate`` and ``caltrio plan``."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from signal import Signals
from typing import Any

import click
from attrs import evolve
from rich.markup import escape
from rich.table import Table

from caltrio.commands import json_option
from caltrio.errors import InputError
from caltrio.observe.metrics import Distribution, Slo, Summary, goodput_per_s
from caltrio.output import console, output_folder, print_json, progress
from caltrio.scenario import Scenario, load_scenario, preset
from caltrio.timing import load_timing
from caltrio.units import format_ns, parse_ns
from caltrio.workload.spec import ArrivalKind, Arrivals, LengthKind, Workload
from caltrio.workload.traces import FORMATS

from .figures import timeline
from .plan import DEFAULT_SCENARIO, PLAN_FILES, make_plan
from .run import Run
from .run import simulate as run_simulation

# What either command may leave: the next one into that folder removes all of it.
RESULT_FILES = (*PLAN_FILES, "trace.json", "timeline.svg", "summary.json")


class _Duration(click.ParamType[int]):
    """A duration with its unit, such as 40ms."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            ns = parse_ns(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if ns == 0:
            self.fail(f"{value!r} is 0; give a longer time", param, ctx)
        return ns


DURATION = _Duration()
_POSITIVE = click.IntRange(min=1, max=10**9)
_RATE = click.FloatRange(min=0, min_open=True, max=1e9)
_scenario_argument = click.argument(
    "scenario_file", metavar="[SCENARIO.toml]", required=False, type=click.Path(path_type=Path)
)
_out_options = (
    click.option("--force", is_flag=True, help="Write to a folder that holds files already."),
    json_option,
)


@click.command()
@_scenario_argument
@click.option("--workload", "trace", type=click.Path(), help="A request trace; see --format.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="auto",
    show_default=True,
    help="Format of the trace; auto looks at its header.",
)
@click.option(
    "--arrivals",
    type=click.Choice([kind.value for kind in ArrivalKind]),
    help="How requests arrive; with --workload its own times.",
)
@click.option("--rate", type=_RATE, help="Requests per second; rescales a trace to this mean.")
@click.option("--rate-scale", type=_RATE, help="Let a trace arrive so many times as fast.")
@click.option("--burstiness", type=_RATE, help="CV of gamma interarrival times; 1 is Poisson.")
@click.option("--clients", type=_POSITIVE, help="Clients of a closed loop.")
@click.option(
    "--lengths",
    type=click.Choice([kind.value for kind in LengthKind]),
    help="How long requests are; with --workload as in the trace.",
)
@click.option("--prompt-tokens", type=_POSITIVE, help="Prompt length, or its mean.")
@click.option("--output-tokens", type=click.IntRange(0, 10**9), help="Output length, or its mean.")
@click.option("--limit", type=_POSITIVE, help="Only the first so many requests.")
@click.option("--semantics", "preset_name", help="A hypothesis; see 'caltrio semantics'.")
@click.option("--max-inflight", type=click.IntRange(1, 4096), help="Jobs in flight at once.")
@click.option("--sequences", type=click.IntRange(1, 100_000), help="Sequences that hold KV at once.")
@click.option("--kv-tokens", type=_POSITIVE, help="Tokens of KV that the card holds.")
@click.option("--max-queue", type=click.IntRange(0, 10**9), help="Requests that may wait.")
@click.option(
    "--admission-timeout",
    type=DURATION,
    help="Longest wait for KV and a buffer, of a request and of each of its steps (§9.1).",
)
@click.option("--timing", help="Timing profile: a name that ships, or a .toml file.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Of all random streams.")
@click.option("--slo-ttft", type=DURATION, help="Count a request as good up to this TTFT.")
@click.option("--slo-tpot", type=DURATION, help="Count a request as good up to this TPOT.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for both tables, trace.json (open it at ui.perfetto.dev), timeline.svg.",
)
@click.option(
    "--trace-jobs",
    default=20_000,
    show_default=True,
    type=click.IntRange(0),
    help="Jobs in trace.json; 0 writes none.",
)
@_out_options[0]
@_out_options[1]
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
    scenario = _override(load_scenario(scenario_file) if scenario_file else Scenario(), options)
    requests = scenario.workload.build(scenario.seed, scenario.base)
    out: Path | None = options["out"]
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(output_folder(out, force=options["force"], files=RESULT_FILES))
        shown = stack.enter_context(progress())
        task = shown.add_task("requests", total=len(requests))
        run = run_simulation(
            scenario,
            requests=requests,
            folder=out,
            trace_jobs=options["trace_jobs"] if out is not None else 0,
            on_request=lambda: shown.advance(task),
        )
        shown.stop()
        slo = Slo(options["slo_ttft"], options["slo_tpot"])
        asked = slo != Slo()
        good = goodput_per_s(run.requests, slo, run.summary.span_ns) if asked else None
        facts = {**run.summary.to_json(), "goodput_per_s": good, "complete": run.complete}
        if out is not None:
            if run.jobs.num_rows:
                timeline({f"{scenario.executor.max_inflight} in flight": run.jobs},
                         "Steady state", scenario.semantics, out / "timeline.svg")  # fmt: skip
            _write_json(out / "summary.json", facts)
    if options["as_json"]:
        print_json(facts)
    else:
        _print_run(run, good, out)
    return _exit_code("simulate", run.stopped_by, "what had ended by then is kept")


def _exit_code(command: str, stopped_by: Signals | None, kept: str) -> int:
    """0, or what a shell expects after a signal: 130 for an interrupt."""
    if stopped_by is None:
        return 0
    click.echo(f"caltrio {command}: interrupted by {stopped_by.name}; {kept}", err=True)
    return 128 + stopped_by


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _override(scenario: Scenario, options: dict[str, Any]) -> Scenario:
    """The scenario with what the command line says. Raises :class:`InputError` naming the option."""
    name = options["preset_name"]
    try:
        semantics = scenario.semantics if name is None else preset(name)
    except ValueError as error:
        raise InputError("--semantics", "", str(error)) from error
    try:
        workload = _workload(scenario, options)
        limits = {
            "max_inflight": options["max_inflight"],
            "max_active_sequences": options["sequences"],
            "kv_capacity_tokens": options["kv_tokens"],
            "max_queue": options["max_queue"],
            "admission_timeout_ns": options["admission_timeout"],
        }
        given = {name: value for name, value in limits.items() if value is not None}
        changed = evolve(
            scenario,
            workload=workload,
            executor=evolve(scenario.executor, **given),
            semantics=semantics,
            seed=scenario.seed if options["seed"] is None else options["seed"],
        )
    except ValueError as error:
        raise InputError("command line", "", str(error.args[0])) from error
    if options["preset_name"] is not None:
        try:
            changed = evolve(changed, semantics=preset(options["preset_name"]))
        except ValueError as error:
            raise InputError("--semantics", "", str(error)) from error
    if options["timing"] is not None:
        changed = evolve(changed, timing=load_timing(options["timing"]))
    try:
        changed.semantics.check_in_flight(changed.executor.max_inflight)
    except ValueError as error:
        raise InputError("--max-inflight", "", str(error)) from error
    return changed


def _workload(scenario: Scenario, options: dict[str, Any]) -> Workload:
    workload = scenario.workload
    if options["trace"] is None and options["form"] != "auto":
        raise ValueError(f"--format {options['form']} has no trace to read; add --workload FILE")
    if options["trace"] is not None:
        # A path on the command line is from here; one in a file is from that file's folder.
        workload = workload.with_trace(str(Path(options["trace"]).absolute()), options["form"])
    arrivals, lengths = workload.arrivals, workload.lengths
    kind = options["arrivals"]
    if kind is None and options["clients"] is not None:
        kind = ArrivalKind.CLOSED
    changes = {
        "kind": kind and ArrivalKind(kind),
        "rate": options["rate"],
        "scale": options["rate_scale"],
        "cv": options["burstiness"],
        "clients": options["clients"],
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if kind is not None:
        arrivals = Arrivals(**changes)  # a new process: nothing of the old one's numbers stays
    elif changes:
        arrivals = evolve(arrivals, **changes)
    if arrivals.kind is not ArrivalKind.CLOSED and options["clients"] is not None:
        raise ValueError(f"--clients is for closed arrivals; these are {arrivals.kind.value}")
    if arrivals.kind is not ArrivalKind.GAMMA and options["burstiness"] is not None:
        raise ValueError(f"--burstiness is for gamma arrivals; these are {arrivals.kind.value}")
    sizes = {
        "kind": options["lengths"] and LengthKind(options["lengths"]),
        "prompt_tokens": options["prompt_tokens"],
        "output_tokens": options["output_tokens"],
    }
    sizes = {name: value for name, value in sizes.items() if value is not None}
    if sizes and "kind" not in sizes and lengths.kind is LengthKind.TRACE:
        raise ValueError("lengths come from the trace; add --lengths fixed or lognormal")
    lengths = evolve(lengths, **sizes)
    count = workload.requests if options["limit"] is None else options["limit"]
    return evolve(workload, arrivals=arrivals, lengths=lengths, requests=count)


def _percentile(samples: Distribution, percentile: int) -> str:
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
            *(_percentile(samples, percentile) for percentile in (50, 90, 99)),
            format_ns(samples.max_ns) if samples.count else "-",
            f"{samples.count:,}",
        )
    screen.print(table)
    busy = Table(title="Utilisation (busy share of the span)")
    for name in summary.utilisation:
        busy.add_column(name, justify="right")
    busy.add_row(*(f"{share:.1%}" for share in summary.utilisation.values()))
    screen.print(busy)
    screen.print(
        f"{summary.tokens_per_s:,.2f} tokens/s and {summary.requests_per_s:,.3f} requests/s "
        f"over {format_ns(summary.span_ns)}; two or more jobs on the device "
        f"{summary.overlap:.1%} of its busy time; "
        f"KV reserved {summary.kv_mean_tokens:,.0f} tokens on average, "
        f"{summary.kv_peak_tokens:,} at most"
    )
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


@click.command()
@_scenario_argument
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out/plan"),
    show_default=True,
    help="Folder for report.html, the tables and the figures.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Of all random streams.")
@_out_options[0]
@_out_options[1]
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
    return _exit_code("plan", made.stopped_by, "the runs that had ended are kept")


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
            _percentile(s.ttft, 50),
            _percentile(s.ttft, 99),
            _percentile(s.tpot, 50),
            _percentile(s.tpot, 99),
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
