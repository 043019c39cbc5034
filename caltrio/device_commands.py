"""The commands that drive a device and judge it: ``golden``, ``faults``, ``soak``."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import evolve
from rich.markup import escape
from rich.table import Table

from .config import ExecutorConfig
from .device import OpenDevice
from .drills import BEYOND, DRILLS, DrillResult, Setup, run_drill
from .errors import InputError, ServiceFailed
from .executor import open_executor
from .golden import Golden, GoldenReport, check, golden_for, record, refusals, save
from .manifest import Manifest
from .observe.prometheus import PrometheusMetrics
from .output import console, print_json, progress
from .scenario import preset
from .semantics import PRESETS, EngineSemantics, ResetScope
from .soak import NOTHING_COMPLETED, NS_PER_HOUR, Soak, SoakSpec
from .target import Target, on_target
from .tomlfile import Ns
from .units import format_ns

T = TypeVar("T")

# What differs between restarts of one kind.
_WHICH = re.compile(r"(?<=\bjob) \d+|(?<=\brequest) -?\d+| \[[A-Z_]+; [^]]*\]")
_MOST_REASONS = 8
_DRILL_CASES = 4  # prompts that the drills use


def _semantics(name: str, max_inflight: int, reset: str = "device") -> EngineSemantics:
    """The preset, which must have engines enough. Raises :class:`InputError` naming the option."""
    try:
        semantics = evolve(preset(name), reset_scope=ResetScope(reset))
    except ValueError as error:
        raise InputError("--semantics", "", str(error)) from error
    try:
        semantics.check_in_flight(max_inflight)
    except ValueError as error:
        raise InputError("--max-inflight", "", str(error)) from error
    return semantics


class _Finite(click.FloatRange):
    """A range that NaN is not in either."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


@click.group()
def golden() -> None:
    """Record what a device says to fixed prompts, or check that it still says it (§13.1)."""


def _golden_config(manifest: Manifest, max_inflight: int) -> ExecutorConfig:
    """Room for the longest prompt, and a bound for a device that hangs."""
    bound = Ns(300_000_000_000)
    return ExecutorConfig(
        max_inflight=max_inflight,
        kv_capacity_tokens=max(81_920, 2 * manifest.max_seq),
        queue_timeout_ns=bound,
        execution_timeout_ns=bound,
    )


@golden.command("record")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--prompts", default=100, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--force", is_flag=True, help="Replace FILE.")
@on_target
def golden_record(
    file: Path,
    prompts: int,
    target: Target,
    *,
    force: bool,
    as_json: bool,
) -> int:
    """Run the prompts on a device, one at a time, and write tokens and logits to FILE (.npz)."""
    if file.exists() and not force:
        raise InputError(str(file), "", "is there already", "name another, or add --force")
    if file.is_dir():
        raise InputError(str(file), "", "cannot be written: Is a directory", "name a file")
    if not file.parent.is_dir():
        raise InputError(str(file), "", "cannot be written: its folder is not there")

    async def main(open_device: OpenDevice) -> Golden:
        async with (
            open_device() as device,
            open_executor(device, target.manifest, _golden_config(target.manifest, 1)) as executor,
        ):
            return await record(executor, prompts)

    made = target.run(_semantics("full-duplex", 1), main, check=True)
    if made is None:
        return target.exit_code("golden record", 1, "nothing is written")
    save(made, file)
    facts = {"file": str(file), "cases": len(made.cases), "model": made.model, "vocab": made.vocab}
    if as_json:
        print_json(facts)
    else:
        tokens = sum(len(case.tokens) for case in made.cases)
        console().print(f"{len(made.cases)} cases, {tokens:,} tokens: {escape(str(file))}")
    return 0


@golden.command("check")
@click.option("--golden", "file", type=click.Path(path_type=Path),
              help="A recording; without one, the reference token model.")  # fmt: skip
@click.option("--prompts", default=100, show_default=True, type=click.IntRange(1, 10_000),
              help="How many, of the reference; a recording has its own.")  # fmt: skip
@click.option("--semantics", "presets", multiple=True, help="A hypothesis; default: each preset.")
@click.option("--max-inflight", "limits", multiple=True, type=click.IntRange(1, 64),
              help="Jobs in flight; default: 1 and then 2.")  # fmt: skip
@on_target
def golden_check(
    file: Path | None,
    prompts: int,
    presets: tuple[str, ...],
    limits: tuple[int, ...],
    target: Target,
    *,
    as_json: bool,
) -> int:
    """Compare greedy tokens and logits with a golden, several sequences at once.

    Covers fixed prompts, the prompt lengths of §13.1 with a decode step after each (and that a full
    context refuses one), and two sequences that alternate for 1000 tokens. Exit code 1 if any token
    differs.
    """
    recorded = golden_for(target.manifest, file, prompts, lengths=True)
    if not target.kind.hypothetical and not presets:
        presets = ("full-duplex",)  # the device has semantics of its own
    rows = []
    with progress() as shown:
        plan = [(name, limit) for name in presets or PRESETS for limit in limits or (1, 2)]
        for name, limit in plan:
            _semantics(name, limit)  # what is wrong, before anything runs
        task = shown.add_task("golden", total=len(plan))
        for name, limit in plan:
            main = _checker(target.manifest, recorded, limit)
            result = target.run(_semantics(name, limit), main, check=True)
            if result is None:
                break  # interrupted; what had ended is shown
            rows.append((name, limit, *result))
            shown.advance(task)
    complete = target.stopped_by is None
    passed = complete and all(report.passed and refusal is None for *_, report, refusal, _ in rows)
    if as_json:
        print_json({"golden": recorded.source, "passed": passed, "complete": complete, "runs": [
            {"semantics": name, "max_inflight": limit, "cases": report.compared,
             "equal": report.equal, "tokens": report.tokens, "top1": report.top1,
             "top5_overlap": report.top5_overlap, "max_abs": report.max_abs,
             "max_rel": report.max_rel, "cosine": report.cosine,
             "first_difference": report.first_difference, "refusals": refusal, "limit": why}
            for name, limit, report, refusal, why in rows
        ]})  # fmt: skip
    else:
        _print_golden(recorded, rows)
    return target.exit_code("golden check", 0 if passed else 1)


def _checker(
    manifest: Manifest, recorded: Golden, limit: int
) -> Callable[[OpenDevice], Awaitable[tuple[GoldenReport, str | None, str | None]]]:
    async def main(open_device: OpenDevice) -> tuple[GoldenReport, str | None, str | None]:
        async with (
            open_device() as device,
            open_executor(device, manifest, _golden_config(manifest, limit)) as executor,
        ):
            report = await check(executor, recorded)
            return report, await refusals(executor), executor.core.health.limit_reason

    return main


def _print_golden(
    recorded: Golden, rows: list[tuple[str, int, GoldenReport, str | None, str | None]]
) -> None:
    table = Table(title=f"Golden check against {escape(recorded.source)}: {len(recorded.cases)} cases")
    for heading in ("hypothesis", "in flight", "equal", "tokens", "top-1", "top-5", "max_abs",
                    "max_rel", "cosine", "full context"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "hypothesis" else "right")
    for name, limit, report, refusal, _ in rows:
        table.add_row(
            name, str(limit), f"{report.equal} of {report.compared}", f"{report.tokens:,}",
            f"{report.top1:.1%}", f"{report.top5_overlap:.1%}", f"{report.max_abs:g}",
            f"{report.max_rel:g}", f"{report.cosine:.6f}", "refused" if refusal is None else "RAN",
        )  # fmt: skip
    screen = console()
    screen.print(table)
    for name, limit, report, refusal, why in rows:
        for text in (report.first_difference, refusal, why):
            if text is not None:
                screen.print(f"{name}, {limit} in flight: {escape(text)}")


@click.command()
@click.option("--max-inflight", default=1, show_default=True, type=click.IntRange(1, 64))
@click.option("--semantics", "preset_name", default="full-duplex", show_default=True,
              help="A hypothesis; see 'caltrio semantics'.")  # fmt: skip
@click.option("--reset", type=click.Choice([scope.value for scope in ResetScope]), default="device",
              show_default=True, help="What a simulated reset resets.")  # fmt: skip
@click.option("--only", multiple=True, help="Only the drill of this name, as FI07.")
@click.option("--random", "count", type=click.IntRange(1, 1_000_000),
              help="Inject so many random faults instead, then the golden run.")  # fmt: skip
@click.option("--golden", "file", type=click.Path(path_type=Path),
              help="A recording; without one, the reference token model.")  # fmt: skip
@on_target
def faults(
    max_inflight: int,
    preset_name: str,
    reset: str,
    only: tuple[str, ...],
    count: int | None,
    file: Path | None,
    target: Target,
    *,
    as_json: bool,
) -> int:
    """Inject the faults FI01 to FI15 of specification §12, and more, into a device.

    Prints expected against observed; exit code 1 if a fact differs.
    """
    semantics = _semantics(preset_name, max_inflight, reset)
    said = golden_for(target.manifest, file, 6)
    if len(said.cases) < _DRILL_CASES or min(len(case.tokens) for case in said.cases) < 3:
        problem = f"has {len(said.cases)} cases"
        raise InputError(
            "--golden", str(file), problem, f"give {_DRILL_CASES} or more, of 3 or more tokens"
        )
    if count is not None and only:
        raise InputError("--only", "", "and --random exclude each other", "give one")
    if count is not None:
        return _random_faults(target, semantics, said, max_inflight, count, as_json=as_json)
    names = [drill.name for drill in (*DRILLS, *BEYOND)]
    for name in only:
        if name not in names:
            raise InputError("--only", "", f"{name!r} is unknown", f"use one of {', '.join(names)}")
    chosen = [drill for drill in (*DRILLS, *BEYOND) if not only or drill.name in only]
    results: list[DrillResult] = []
    with progress() as shown:
        task = shown.add_task("faults", total=len(chosen))
        for drill in chosen:
            result = target.run(
                semantics,
                lambda open_device, drill=drill: run_drill(  # type: ignore[misc]
                    drill, Setup(open_device, target.manifest, said, max_inflight)
                ),
            )
            if result is None:
                break  # interrupted; what had ended is shown
            results.append(result)
            shown.advance(task)
    if as_json:
        print_json([{"name": r.drill.name, "injection": r.drill.injection, "passed": r.passed,
                     "expected": r.expected, "observed": r.observed} for r in results])  # fmt: skip
    else:
        _print_drills(results, target.kind.name, max_inflight)
    return target.exit_code("faults", 0 if all(result.passed for result in results) else 1)


def _print_drills(results: list[DrillResult], device: str, max_inflight: int) -> None:
    screen = console()
    for title, drills in (("Faults of specification §12", DRILLS), ("Beyond the table", BEYOND)):
        rows = [result for result in results if result.drill in drills]
        if not rows:
            continue
        table = Table(title=f"{title}, on {device}, {max_inflight} in flight", show_lines=True)
        for heading in ("fault", "injection", "expected", "observed", ""):
            table.add_column(heading, no_wrap=heading in ("fault", ""))
        for result in rows:
            seen = {fact: result.observed.get(fact, "nothing") for fact in result.expected}
            if "drill" in result.observed:
                seen["drill"] = result.observed["drill"]
            table.add_row(
                result.drill.name,
                result.drill.injection,
                escape(_lines(result.expected)),
                escape(_lines(seen)),
                "ok" if result.passed else "DIFFERS",
            )
        screen.print(table)
        right = sum(result.passed for result in rows)
        screen.print(f"{title}: {right} of {len(rows)} as expected")
    for result in results:
        for difference in result.differences:
            screen.print(f"{result.drill.name}: expected {escape(difference)}")


def _lines(facts: dict[str, str]) -> str:
    return "\n".join(f"{fact}: {text}" for fact, text in facts.items())


def _random_faults(
    target: Target,
    semantics: EngineSemantics,
    said: Golden,
    max_inflight: int,
    count: int,
    *,
    as_json: bool,
) -> int:
    """So many random faults, one after another, with traffic; then golden, or Failed with a reason."""
    spec = SoakSpec(
        duration_ns=10_000 * NS_PER_HOUR, seed=target.seed, max_inflight=max_inflight,
        faults_per_hour=3600, think_ns=500_000_000, most_faults=count,
    )  # fmt: skip

    async def main(open_device: OpenDevice) -> Soak:
        soak = Soak(spec, open_device, target.manifest, said)
        await soak.run()
        if soak.evidence.golden is None:  # the last one has failed, and said why: after a restart
            config = _golden_config(target.manifest, max_inflight)
            async with (
                open_device() as device,
                open_executor(device, target.manifest, config) as executor,
            ):
                soak.evidence.golden = await check(executor, said)
        return soak

    soak = target.run(semantics, main)
    if soak is None:
        return target.exit_code("faults", 1, "no result")
    evidence = soak.evidence
    # So few faults may strike that the first request is not even through.
    complaints = [text for text in evidence.complaints if text != NOTHING_COMPLETED]
    if as_json:
        passed = evidence.golden is not None and evidence.golden.passed
        facts = {"golden": passed, "complaints": complaints, "passed": not complaints}
        print_json(evidence.to_json() | facts)
    else:
        _print_soak(soak, f"{sum(evidence.injected.values()):,} random faults", complaints)
    return 1 if complaints else 0


@click.command()
@click.option("--hours", type=_Finite(min=0, min_open=True, max=10_000),
              help="Of the device's time.  [default: 24]")  # fmt: skip
@click.option("--minutes", type=_Finite(min=0, min_open=True, max=600_000),
              help="Of the device's time, instead of hours.")  # fmt: skip
@click.option("--max-inflight", default=2, show_default=True, type=click.IntRange(1, 64))
@click.option("--semantics", "preset_name", default="full-duplex", show_default=True)
@click.option("--reset", type=click.Choice([scope.value for scope in ResetScope]), default="device",
              show_default=True, help="What a simulated reset resets.")  # fmt: skip
@click.option("--faults-per-hour", default=30.0, show_default=True, type=_Finite(0, 1e5))
@click.option("--clients", default=6, show_default=True, type=click.IntRange(1, 1000))
@click.option("--golden", "file", type=click.Path(path_type=Path),
              help="A recording for the warm-up; without one, the reference.")  # fmt: skip
@click.option("--no-restart", is_flag=True,
              help="End with exit code 75 at the first Failed, for a supervisor.")  # fmt: skip
@click.option("--metrics-port", type=click.IntRange(0, 65535),
              help="Serve Prometheus metrics on this loopback port; 0: any free one.")  # fmt: skip
@on_target
def soak(
    hours: float | None,
    minutes: float | None,
    max_inflight: int,
    preset_name: str,
    reset: str,
    faults_per_hour: float,
    clients: int,
    file: Path | None,
    metrics_port: int | None,
    target: Target,
    *,
    no_restart: bool,
    as_json: bool,
) -> int:
    """Run for hours with random cancels, impatience and faults, and print the evidence (§13.2).

    Passes if no token was wrong, no call waited past the deadlines, no fault went unexplained, no
    lease was left, and memory showed no trend after the warm-up. Exit code 1 if not.
    """
    if hours is not None and minutes is not None:
        raise InputError("--minutes", "", "and --hours exclude each other", "give one")
    total_ns = round((minutes / 60 if minutes is not None else hours or 24) * NS_PER_HOUR)
    said = golden_for(target.manifest, file, 6)
    semantics = _semantics(preset_name, max_inflight, reset)
    spec = SoakSpec(
        total_ns, target.seed, max_inflight, clients, faults_per_hour, restart=not no_restart
    )
    metrics = None if metrics_port is None else PrometheusMetrics()
    with ExitStack() as stack:
        if metrics is not None and metrics_port is not None:
            port = stack.enter_context(metrics.serve(metrics_port))
            click.echo(f"metrics: http://127.0.0.1:{port}/metrics", err=True)
        shown = stack.enter_context(progress())
        task = shown.add_task("soak", total=100)
        made: list[Soak] = []

        async def main(open_device: OpenDevice) -> None:
            made.append(
                Soak(
                    spec, open_device, target.manifest, said, reference=file is None,
                    listeners=[] if metrics is None else [metrics],
                    on_progress=lambda share: shown.update(task, completed=round(100 * share)),
                )
            )  # fmt: skip
            await made[0].run()

        failure: ServiceFailed | None = None
        try:
            target.run(semantics, main)
        except ServiceFailed as error:
            failure = error
    evidence = made[0].evidence
    evidence.stopped_by = None if target.stopped_by is None else target.stopped_by.name
    if as_json:
        print_json(evidence.to_json())
    else:
        _print_soak(made[0], f"{format_ns(evidence.ran_ns)} on {target.kind.name}", evidence.complaints)
    if failure is not None:
        raise failure
    return target.exit_code("soak", 1 if evidence.complaints else 0)


def _print_soak(soak: Soak, what: str, complaints: list[str]) -> None:
    evidence, screen = soak.evidence, console()
    table = Table(title=f"Soak: {what}, seed {soak.spec.seed}", show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("")
    sizes = [size for _, size in evidence.memory] or [0]
    memory = f"{sizes[0] / 2**20:.0f} MiB at first, {sizes[-1] / 2**20:.0f} MiB at last"
    memory += f"; trend after warm-up {evidence.memory_growth_bytes / 2**20:+.1f} MiB"
    longest = format_ns(evidence.longest_wait_ns)
    longest += f", allowed {format_ns(evidence.longest_allowed_ns)}"
    for name, text in (
        ("jobs", f"{evidence.jobs:,}"),
        ("requests", _counts(evidence.requests)),
        ("callers saw", _counts(evidence.endings)),
        ("faults injected", f"{sum(evidence.injected.values()):,}: {_counts(evidence.injected)}"),
        ("tokens checked", f"{evidence.tokens_checked:,}, {evidence.wrong_tokens:,} wrong"),
        ("recoveries", f"{evidence.recoveries:,} to a new generation"),
        ("restarts", f"{len(evidence.restarts):,} after Failed"),
        ("fell back", f"{sum(evidence.limited.values()):,} times to one in flight"),
        ("stale completions", f"{evidence.stale:,}"),
        ("buffers quarantined", f"{evidence.quarantined:,}"),
        ("longest call", longest),
        ("leased at the end", str(evidence.leased)),
        ("unexplained faults", str(len(evidence.unexplained))),
        ("golden afterwards", _golden_afterwards(evidence.golden)),
        ("resident memory", memory),
    ):  # fmt: skip
        table.add_row(name, escape(text))
    screen.print(table)
    kinds = Counter(_WHICH.sub("", reason) for reason in evidence.restarts)
    for reason, count in kinds.most_common(_MOST_REASONS):
        screen.print(f"restarted {count:,} ×: {escape(reason)}")
    if len(kinds) > _MOST_REASONS:
        screen.print(f"and for {len(kinds) - _MOST_REASONS:,} other reasons; --json has them all")
    for complaint in complaints:
        screen.print(f"NOT RIGHT: {escape(complaint)}")
    verdict = "passed" if not complaints else "FAILED"
    screen.print(f"soak {verdict}" + (f" until {evidence.stopped_by}" if evidence.stopped_by else ""))


def _golden_afterwards(report: GoldenReport | None) -> str:
    if report is None:
        return "not run: the executor had failed, or was interrupted"
    return f"{report.equal} of {report.compared} equal"


def _counts(counter: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counter.items())) or "none"
