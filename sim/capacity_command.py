"""``caltrio capacity``."""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from caltrio.commands import json_option
from caltrio.errors import InputError
from caltrio.observe.metrics import MIN_SAMPLES, no_nan
from caltrio.output import console, print_json, progress
from caltrio.scenario import Scenario
from caltrio.scenario_options import (
    DURATION,
    RATE,
    read_scenario,
    scenario_argument,
    scenario_options_but,
)
from caltrio.semantics import EngineSemantics
from caltrio.units import format_ns
from caltrio.workload.spec import ArrivalKind

from .capacity import (
    BLOCK,
    LEAST_REQUESTS,
    MOST_CARDS,
    MOST_LOST,
    OWN,
    WARM_UP,
    Cell,
    Objective,
    Question,
    cells_of,
    check,
    cost_per_million,
    find_capacity,
    output_tokens,
    servable,
    traffic_of,
)
from .fast import Router
from .stats import Interval
from .sweep import local_executor

_MADE_UP = (ArrivalKind.POISSON, ArrivalKind.GAMMA, ArrivalKind.CONSTANT)


@click.command()
@scenario_argument
@click.option("--ttft-p99", type=DURATION, help="Most that P99 of TTFT may be; else as [plan] says.")
@click.option("--tpot-p99", type=DURATION, help="Most that P99 of TPOT may be; else as [plan] says.")
@click.option(
    "--goodput",
    type=click.FloatRange(0, 1, min_open=True),
    help="In place of percentiles: at least this share of the requests, such as 0.95, is within "
    "both bounds, each by itself.",
)
@click.option("--price", type=RATE, help="Of a card for an hour; prints the cost of output tokens.")
@click.option(
    "--router",
    type=click.Choice([router.value for router in Router]),
    default=Router.LEAST_OUTSTANDING.value,
    show_default=True,
    help="Which card of a fleet a request goes to.",
)
@click.option(
    "--hypotheses",
    metavar="A,B",
    help=f"Which to compare, '{OWN}' for the scenario's [semantics]; else those of its [plan].",
)
@click.option("--requests", type=click.IntRange(LEAST_REQUESTS, 10**6), default=1_000,
              show_default=True, help="How many each run has.")  # fmt: skip
@click.option("--replications", type=click.IntRange(2, 1_000), default=10, show_default=True,
              help="Runs at each rate, with seeds from the scenario's on.")  # fmt: skip
@click.option("--most-cards", type=click.IntRange(1, 600), default=MOST_CARDS, show_default=True,
              help="The largest fleet to simulate.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), help="Processes; one a core.")
@json_option
@scenario_options_but(
    rate=click.option("--rate", type=RATE, help="Requests a second to find the number of cards for."),
    max_inflight=click.option(
        "--max-inflight", metavar="N,M", help="Limits to compare; else those of the scenario's [plan]."
    ),
)
def capacity(
    scenario_file: Path | None,
    price: float | None,
    replications: int,
    workers: int | None,
    *,
    as_json: bool,
    **options: Any,
) -> int:
    """How many requests a second does one card hold within an SLO, and how many cards does a rate take?

    For each hypothesis about the engines and each in-flight limit, in the compiled twin. The
    workload's pattern of arrivals is kept and scaled; closed clients become Poisson arrivals.

    \b
    Examples:
      caltrio capacity --workload trace.csv --limit 1000 --ttft-p99 2s --tpot-p99 60ms --rate 10
      caltrio capacity my.toml --ttft-p99 2s --goodput 0.95 --hypotheses own --max-inflight 1,2
    """  # noqa: D301 - click wants the character, not its escape
    question = _question(scenario_file, options)
    check(question)
    with ExitStack() as stack:
        shown = stack.enter_context(progress())
        task = shown.add_task("replications", total=replications)
        executor = None
        if workers != 1:
            executor, _ = stack.enter_context(local_executor(workers))
        cells = find_capacity(question, replications, executor, lambda: shown.advance(task))
    tokens = output_tokens(question, replications)
    if as_json:
        print_json(_json(question, cells, replications, tokens, price))
    else:
        _print(question, cells, replications, tokens, price)
    return 0


def _question(file: Path | None, options: dict[str, Any]) -> Question:
    kind = options["arrivals"]
    # Whatever rate the scenario has, it is scaled; but made-up arrivals must have one.
    rate = 1.0 if kind is not None and ArrivalKind(kind) in _MADE_UP else None
    scenario = read_scenario(file, {**options, "rate": rate, "max_inflight": None})
    try:
        objective = Objective(
            options["ttft_p99"] or scenario.plan.ttft_p99_ns,
            options["tpot_p99"] or scenario.plan.tpot_p99_ns,
            options["goodput"],
        )
    except ValueError as error:
        raise click.UsageError("give a bound: --ttft-p99, --tpot-p99, or both") from error
    if options["limit"] is not None and scenario.workload.arrivals.kind is not ArrivalKind.TRACE:
        raise click.UsageError(
            "--limit takes the first requests of a trace that arrives in its own pattern; "
            "how many a run has is --requests"
        )
    return Question(
        scenario,
        _cells(scenario, options),
        objective,
        traffic_of(scenario),
        options["requests"],
        options["rate"],
        Router(options["router"]),
        options["most_cards"],
    )


def _cells(scenario: Scenario, options: dict[str, Any]) -> tuple[tuple[str, EngineSemantics, int], ...]:
    names, limits = options["hypotheses"], options["max_inflight"]
    if options["preset_name"] is not None:
        if names is not None:
            raise click.UsageError("give --hypotheses or --semantics, not both")
        names = options["preset_name"]
    hypotheses = scenario.plan.hypotheses if names is None else _listed(names)
    if not hypotheses:
        raise click.UsageError(f"--hypotheses is {names!r}; give names, as full-duplex,die-pipelined")
    chosen = scenario.plan.max_inflight if limits is None else _limits(limits)
    try:
        cells = cells_of(scenario, hypotheses, chosen, possible=limits is None)
    except ValueError as error:
        raise InputError("capacity", "", str(error)) from error
    return cells


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _limits(text: str) -> tuple[int, ...]:
    parts = _listed(text)
    if not parts or not all(re.fullmatch("[0-9]{1,4}", part) for part in parts):
        raise click.UsageError(f"--max-inflight is {text!r}; give limits from 1 on, as 1,2")
    limits = tuple(dict.fromkeys(map(int, parts)))
    if not 1 <= min(limits) <= max(limits) <= 4096:
        raise click.UsageError(f"--max-inflight is {text!r}; give 1 to 4096 each")
    return limits


def _number(value: float) -> str:
    """Three significant digits, without exponent; a dash where there is none."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _interval_text(interval: Interval) -> str:
    """The mean with half of its interval's length as a share; or the ends, where that is too long."""
    wide = interval.relative_half_width
    return f"{_number(interval.estimate)} ±{wide:.0%}" if math.isfinite(wide) else "?"


def _bound(objective: Objective) -> str:
    bounds = [
        f"{name} {format_ns(ns)}"
        for name, ns in (("TTFT", objective.ttft_ns), ("TPOT", objective.tpot_ns))
        if ns is not None
    ]
    if objective.goodput is None:
        return f"P99 of {' and '.join(bounds)}"
    return f"{100 * objective.goodput:.5g} % of requests within {' and '.join(bounds)}"


def _cards(cell: Cell, question: Question) -> str:
    if cell.cards_needed is not None:
        return f"{cell.cards_needed:,}"
    return "-" if cell.alone_missed else f"> {question.most_cards:,}"


def _cost(cell: Cell, question: Question, tokens: float, price: float) -> float:
    """Of the fleet, where its size is known; of one card, where no rate was asked for."""
    if question.rate is None:
        return cost_per_million(1, price, cell.holds_at, tokens)
    if cell.cards_needed is None:
        return math.nan
    return cost_per_million(cell.cards_needed, price, question.rate, tokens)


def _print(
    question: Question, cells: list[Cell], replications: int, tokens: float, price: float | None
) -> None:
    screen = console()
    rate = question.rate
    title = f"Requests a second that one card holds: {_bound(question.objective)}"
    table = Table(title=title, min_width=len(title) + 2)
    table.add_column("hypothesis", no_wrap=True)
    headings = ["jobs in\nflight", "holds\nat", "mean,\n95 %", "limited\nby", "satu-\nrates at"]
    if rate is not None:
        headings += [f"cards for\n{rate:,.6g}/s", "mean,\n95 %", "by di-\nvision"]
    if price is not None:
        headings.append("cost, 1 M\ntokens")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for index, cell in enumerate(cells):
        last = index + 1 == len(cells) or cells[index + 1].hypothesis != cell.hypothesis
        first = index == 0 or cells[index - 1].hypothesis != cell.hypothesis
        row = [
            cell.hypothesis if first else "",
            str(cell.max_inflight),
            _number(cell.holds_at),
            "-" if cell.alone_missed else _interval_text(cell.rate),
            ", ".join(cell.limited_by),
            _number(cell.saturation),
        ]
        if rate is not None:
            by_division = cell.by_division(rate)
            row += [
                _cards(cell, question),
                "-" if cell.cards is None else _interval_text(cell.cards),
                "-" if by_division is None else f"{by_division:,}",
            ]
        if price is not None:
            row.append(_number(_cost(cell, question, tokens, price)))
        table.add_row(*row, end_section=last)
    screen.print(table)
    for note in _notes(question, cells, replications, tokens):
        screen.print(escape(note))


def _notes(question: Question, cells: list[Cell], replications: int, tokens: float) -> list[str]:
    """What the table does not say by itself."""
    notes = []
    holding = [cell for cell in cells if cell.holds_at]
    if holding:
        held = min(cell.held for cell in holding)
        which = "all of them hold it" if held == 1 else f"{held:.0%} of them or more hold it"
        notes.append(
            "holds at: the lower end of the 95 % interval of the highest rate, over "
            f"{replications} replications; {which}. "
            "saturates at: what a card completes if it never rests."
        )
    if question.rate is not None:
        notes.append(
            f"cards: a simulated fleet behind a {question.router.value} router; the upper end of the "
            "interval. by division: the rate over what one card holds, as if no router could "
            "send a request to the card that has least to do."
        )
    for cell in _one_of_each(cells):
        which = f"{cell.hypothesis}, {cell.max_inflight} in flight"
        latency = f"TTFT P99 {format_ns(cell.alone_ttft_ns)}, TPOT P99 {format_ns(cell.alone_tpot_ns)}"
        if cell.alone_missed == ("faults",):
            notes.append(f"{which}: an execution deadline passes even with one request at a time.")
        elif cell.alone_missed:
            notes.append(f"{which}: misses it even with one request at a time: {latency}.")
        elif not cell.rate.estimate:
            notes.append(
                f"{which}: one request at a time holds ({latency}), but no rate does: too many "
                "requests arrive at once. Allow a little more, or see what a fleet does: --rate."
            )
        elif not cell.holds_at:
            notes.append(f"{which}: the interval reaches 0; give more --replications.")
    if question.rate is not None and any(
        cell.cards_needed is None and not cell.alone_missed for cell in cells
    ):
        notes.append(
            f"> {question.most_cards:,}: larger fleets are not simulated; raise --most-cards, "
            "or plan by division, which errs on the side of too many."
        )
    if not any(cell.alone_missed for cell in cells):
        ttft = max(cell.alone_ttft_ns for cell in cells)
        tpot = max(cell.alone_tpot_ns for cell in cells)
        notes.append(
            f"One request at a time has TTFT P99 {format_ns(ttft)}, TPOT P99 {format_ns(tpot)}."
        )
    notes += _about_runs(question, tokens)
    widest = max((c.rate.relative_half_width for c in cells if c.holds_at), default=0.0)
    if widest > 0.1:
        notes.append(f"The rates are known to ±{widest:.0%}: four times the --replications halve that.")
    notes.append(
        "Timing and semantics are assumptions until they are measured: docs/assumptions.md. "
        "Definitions: docs/metrics.md, Capacity."
    )
    return notes


def _one_of_each(cells: list[Cell]) -> list[Cell]:
    """Without those that only repeat: with one job in flight, hypotheses do not differ."""
    seen: dict[tuple[int, str], Cell] = {}
    for cell in cells:
        seen.setdefault((cell.max_inflight, cell.hypothesis if cell.max_inflight > 1 else ""), cell)
    return list(seen.values())


def _about_runs(question: Question, tokens: float) -> list[str]:
    traffic, count = question.traffic, question.requests
    unit = check(question)
    fits = servable(unit, question.scenario.executor)
    text = (
        f"Runs of {count:,} requests, the first {WARM_UP:.0%} left out, "
        f"of {_number(tokens)} output tokens on average"
    )
    if traffic.rows is not None:
        rows = len(traffic.rows)
        text += f"; drawn in blocks of {min(BLOCK, rows)} from the trace's {rows:,} requests"
    if traffic.was_closed:
        text += "; the closed clients became Poisson arrivals"
    notes = [f"{text}."]
    if not fits.all():
        notes.append(
            f"{1 - fits.mean():.1%} of the requests are longer than a card or the model can serve; "
            "they are refused at any load, and not judged."
        )
    samples = int((fits & (unit[:, 2] >= 2))[int(WARM_UP * count) :].sum())
    if question.objective.tpot_ns is not None and samples < MIN_SAMPLES[99]:
        notes.append(
            f"~ P99 of TPOT rests on {samples:,} requests with two tokens or more; raise --requests."
        )
    return notes


def _json(
    question: Question, cells: list[Cell], replications: int, tokens: float, price: float | None
) -> Any:
    objective = question.objective
    return no_nan(
        {
            "objective": {
                "ttft_p99_ns": objective.ttft_ns,
                "tpot_p99_ns": objective.tpot_ns,
                "goodput": objective.goodput,
                "most_lost": MOST_LOST if objective.goodput is None else None,
            },
            "rate_per_s": question.rate,
            "router": question.router.value,
            "requests": question.requests,
            "replications": replications,
            "seed": question.scenario.seed,
            "output_tokens": tokens,
            "closed_became_poisson": question.traffic.was_closed,
            "cells": [
                {
                    "hypothesis": cell.hypothesis,
                    "max_inflight": cell.max_inflight,
                    "holds_at_per_s": cell.holds_at,
                    "rate_per_s": _interval(cell.rate),
                    "held": cell.held,
                    "limited_by": list(cell.limited_by),
                    "saturation_per_s": cell.saturation,
                    "alone": {
                        "ttft_p99_ns": cell.alone_ttft_ns,
                        "tpot_p99_ns": cell.alone_tpot_ns,
                        "missed": list(cell.alone_missed),
                    },
                    "cards": cell.cards_needed,
                    "cards_interval": None if cell.cards is None else _interval(cell.cards),
                    "cards_held": None if cell.cards is None else cell.cards_held,
                    "cards_by_division": None
                    if question.rate is None
                    else cell.by_division(question.rate),
                    "cost_per_million_tokens": None
                    if price is None
                    else _cost(cell, question, tokens, price),
                    "replications": [
                        {"rate_per_s": each.rate, "missed": list(each.missed), "cards": each.cards}
                        for each in cell.found
                    ],
                }
                for cell in cells
            ],
        }
    )


def _interval(interval: Interval) -> dict[str, float]:
    return {
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "level": interval.level,
    }
