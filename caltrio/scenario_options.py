"""The options that change a scenario on the command line, and the scenario that they make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from attrs import evolve

from .config import JobOrder, KvPolicy
from .errors import InputError
from .scenario import Scenario, load_scenario, preset
from .timing import load_timing
from .units import parse_ns
from .workload.spec import ArrivalKind, Arrivals, LengthKind, Sampling, Workload
from .workload.traces import FORMATS


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


Option = Callable[[Callable[..., Any]], Callable[..., Any]]

DURATION = _Duration()
_POSITIVE = click.IntRange(min=1, max=10**9)
RATE = click.FloatRange(min=0, min_open=True, max=1e9)

scenario_argument = click.argument(
    "scenario_file", metavar="[SCENARIO.toml]", required=False, type=click.Path(path_type=Path)
)
seed_option = click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Of all random streams.")
_RATE_OPTION = click.option(
    "--rate", type=RATE, help="Requests per second; rescales a trace to this mean."
)
_LIMIT_OPTION = click.option(
    "--max-inflight", type=click.IntRange(1, 4096), help="Jobs in flight at once."
)
_OPTIONS = (
    click.option("--workload", "trace", type=click.Path(), help="A request trace; see --format."),
    click.option(
        "--format",
        "form",
        type=click.Choice(FORMATS),
        default="auto",
        show_default=True,
        help="Format of the trace; auto looks at its header.",
    ),
    click.option(
        "--arrivals",
        type=click.Choice([kind.value for kind in ArrivalKind]),
        help="How requests arrive; with --workload its own times.",
    ),
    _RATE_OPTION,
    click.option("--rate-scale", type=RATE, help="Let a trace arrive so many times as fast."),
    click.option("--burstiness", type=RATE, help="CV of gamma interarrival times; 1 is Poisson."),
    click.option("--clients", type=_POSITIVE, help="Clients of a closed loop."),
    click.option(
        "--lengths",
        type=click.Choice([kind.value for kind in LengthKind]),
        help="How long requests are; with --workload as in the trace.",
    ),
    click.option("--prompt-tokens", type=_POSITIVE, help="Prompt length, or its mean."),
    click.option("--output-tokens", type=click.IntRange(0, 10**9), help="Output length, or its mean."),
    click.option("--limit", type=_POSITIVE, help="Only the first so many requests."),
    click.option("--semantics", "preset_name", help="A hypothesis; see 'caltrio semantics'."),
    _LIMIT_OPTION,
    click.option(
        "--sequences", type=click.IntRange(1, 100_000), help="Sequences that hold KV at once."
    ),
    click.option("--kv-tokens", type=_POSITIVE, help="Tokens of KV that the card holds."),
    click.option("--max-queue", type=click.IntRange(0, 10**9), help="Requests that may wait."),
    click.option(
        "--admission-timeout",
        type=DURATION,
        help="Longest wait for KV and a buffer, of a request and of each of its steps (§9.1).",
    ),
    click.option(
        "--order",
        type=click.Choice([order.value for order in JobOrder]),
        help="Which job goes next: the oldest, or the oldest decode step.",
    ),
    click.option(
        "--kv-policy",
        type=click.Choice([policy.value for policy in KvPolicy]),
        help="KV reserved at admission: all, or the prompt's (needs --admission-timeout).",
    ),
    click.option("--prefill-chunk", type=_POSITIVE, help="Longest prefill job, in tokens."),
    click.option(
        "--sampling",
        type=click.Choice([where.value for where in Sampling]),
        help="Who samples; 'device' is a what-if.",
    ),
    click.option(
        "--client-time", type=DURATION, help="Host time per token, in place of the profile's."
    ),
    click.option("--timing", help="Timing profile: a name that ships, or a .toml file."),
    seed_option,
)


def scenario_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that :func:`read_scenario` knows."""
    return scenario_options_but()(command)


def scenario_options_but(rate: Option = _RATE_OPTION, max_inflight: Option = _LIMIT_OPTION) -> Option:
    """As :func:`scenario_options`, with a command's own options for ``--rate`` and ``--max-inflight``.

    The command then says itself which of these :func:`read_scenario` gets.
    """
    instead = {_RATE_OPTION: rate, _LIMIT_OPTION: max_inflight}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(_OPTIONS):
            command = instead.get(option, option)(command)
        return command

    return decorate


def read_scenario(file: Path | None, options: Mapping[str, Any]) -> Scenario:
    """The scenario of ``file``, or the default one, with what the command line says.

    ``options`` are the values of :func:`scenario_options` by parameter; beyond these it may hold
    ``queue_timeout``, ``execution_timeout`` and ``grace``, ns. Raises :class:`InputError` naming the
    file or the option.
    """
    scenario = load_scenario(file) if file else Scenario()
    name = options["preset_name"]
    try:
        semantics = scenario.semantics if name is None else preset(name)
    except ValueError as error:
        raise InputError("--semantics", "", str(error)) from error
    limits = {
        "max_inflight": options["max_inflight"],
        "max_active_sequences": options["sequences"],
        "kv_capacity_tokens": options["kv_tokens"],
        "max_queue": options["max_queue"],
        "admission_timeout_ns": options["admission_timeout"],
        "queue_timeout_ns": options.get("queue_timeout"),
        "execution_timeout_ns": options.get("execution_timeout"),
        "grace_ns": options.get("grace"),
        "order": options["order"],
        "kv_policy": options["kv_policy"],
    }
    given = {name: value for name, value in limits.items() if value is not None}
    try:
        changed = evolve(
            scenario,
            workload=_workload(scenario.workload, options),
            executor=evolve(scenario.executor, **given),
            semantics=semantics,
            seed=scenario.seed if options["seed"] is None else options["seed"],
        )
    except ValueError as error:
        raise InputError("command line", "", str(error.args[0])) from error
    if options["timing"] is not None:
        changed = evolve(changed, timing=load_timing(options["timing"]))
    try:
        changed.semantics.check_in_flight(changed.executor.max_inflight)
    except ValueError as error:
        raise InputError("--max-inflight", "", str(error)) from error
    return changed


def _workload(workload: Workload, options: Mapping[str, Any]) -> Workload:
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
    what_ifs = {
        "prefill_chunk_tokens": options["prefill_chunk"],
        "sampling": options["sampling"],
        "client_time_ns": options["client_time"],
    }
    what_ifs = {name: value for name, value in what_ifs.items() if value is not None}
    return evolve(workload, arrivals=arrivals, lengths=lengths, requests=count, **what_ifs)
