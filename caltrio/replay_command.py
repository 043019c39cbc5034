"""``caltrio replay``: a scenario on a device of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from attrs import evolve

from .config import ExecutorConfig
from .device import DeviceKind
from .errors import InputError
from .executor import WarmUp
from .golden import golden_for
from .manifest import Manifest
from .run_output import conduct, run_options
from .scenario_options import DURATION, read_scenario, scenario_argument, scenario_options
from .target import DEVICE_PARAMETERS, device_of, device_options, only_for_real
from .tomlfile import Ns
from .workload.run import run_scenario

_HANGS_NS = Ns(60_000_000_000)  # a device of real time that takes longer for a job is given up


@click.command()
@scenario_argument
@device_options
@click.option("--warm-up/--no-warm-up", default=None,
              help="A golden run before traffic.  [default: in real time]")  # fmt: skip
@click.option("--golden", type=click.Path(path_type=Path),
              help="A recording for the warm-up; without one, the reference.")  # fmt: skip
@scenario_options
@click.option("--queue-timeout", type=DURATION,
              help="Longest from prepared to submitted.  [default: twice the next, in real time]",
              )  # fmt: skip
@click.option("--execution-timeout", type=DURATION,
              help="Longest on the device; then it is not trusted.  [default: 60s in real time]",
              )  # fmt: skip
@click.option("--grace", type=DURATION, help="How long to wait for what is on the device at an end.")
@run_options("both tables, summary.json, and trace.json (open it at ui.perfetto.dev)")
def replay(scenario_file: Path | None, **options: Any) -> int:
    """Run the executor once against a device of any kind, and print its latencies and loads.

    As 'caltrio simulate', whose options and tables it shares: on --device sim both give the same.
    On a device of real time requests carry tokens: the seed decides the prompts, and answers are
    greedy. A request that fails is recorded, and the others go on. If the executor fails for good
    the tables keep what had ended, and the exit code is 75, or 78 where a restart would not help.

    \b
    Examples:
      caltrio replay --device fake --limit 20 --prompt-tokens 64 --output-tokens 8
      caltrio replay my.toml --device hw --calbin model.calbin --golden golden.npz --out out/run
    """  # fmt: skip  # noqa: D301 - click wants the character, not its escape
    kind, manifest, capabilities = device_of(*(options[name] for name in DEVICE_PARAMETERS))
    _check(kind, options)
    scenario = read_scenario(scenario_file, options)
    if kind.time == "real":
        scenario = evolve(scenario, executor=_bounded(scenario.executor))
    requests = scenario.workload.build(scenario.seed, scenario.base)
    warm_up = _warm_up(kind, manifest, options)
    return conduct(
        "replay",
        requests,
        options,
        lambda folder, trace_jobs, on_request: run_scenario(
            scenario,
            kind,
            manifest=manifest,
            calbin=options["calbin"],
            capabilities=capabilities,
            warm_up=warm_up,
            requests=requests,
            folder=folder,
            trace_jobs=trace_jobs,
            on_request=on_request,
        ),
    )


def _check(kind: DeviceKind, options: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` for an option of the device that cannot mean anything."""
    if options["golden"] is not None and options["warm_up"] is False:
        raise InputError("--golden", "", "and --no-warm-up exclude each other", "give one")
    only_for_real(kind, "--golden", given=options["golden"] is not None)
    only_for_real(kind, "--warm-up", given=bool(options["warm_up"]))


def _bounded(config: ExecutorConfig) -> ExecutorConfig:
    """With deadlines on every call of the device, so that none can hang unnoticed."""
    longest = config.execution_timeout_ns or _HANGS_NS
    # Before its own infer() a job may be held back for as long as another one takes.
    queued = config.queue_timeout_ns or Ns(2 * longest)
    return evolve(config, execution_timeout_ns=longest, queue_timeout_ns=queued)


def _warm_up(kind: DeviceKind, manifest: Manifest, options: Mapping[str, Any]) -> WarmUp | None:
    if kind.time != "real" or options["warm_up"] is False:
        return None
    return golden_for(manifest, options["golden"], 1).warm_up
