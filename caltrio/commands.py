"""The commands that need neither a simulation nor a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from attrs import asdict
from rich.markup import escape
from rich.table import Table

from .device import device_kinds
from .observe.records import TABLES, about, read_tables
from .observe.records import digest as digest_of
from .output import console, print_json
from .semantics import PRESETS

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")


@click.command()
@json_option
def semantics(as_json: bool) -> None:  # noqa: FBT001 - click gives it by keyword
    """List the hypotheses about the ping/pong engines, with their meaning.

    Each answers the vendor's open questions in one way. Use a name with 'simulate --semantics',
    or write fields of your own in a scenario file:

    \b
      [semantics]
      preset = "full-duplex"
      compute_sharing = [1.0, 0.7]
    """  # noqa: D301 - click wants the character, not its escape
    if as_json:
        print_json(
            {
                preset.name: {"meaning": preset.meaning, **asdict(preset.semantics)}
                for preset in PRESETS.values()
            }
        )
        return
    table = Table(title="Hypotheses about the engines (assumptions, none confirmed by the vendor)")
    table.add_column("preset", no_wrap=True)
    table.add_column("meaning")
    table.add_column("differs from full-duplex in")
    base = asdict(PRESETS["full-duplex"].semantics)
    for preset in PRESETS.values():
        fields = asdict(preset.semantics)
        changed = [f"{key} = {_plain(value)}" for key, value in fields.items() if base[key] != value]
        table.add_row(preset.name, preset.meaning, escape("\n".join(changed) or "-"))
    console().print(table)
    common = ", ".join(f"{key} = {_plain(value)}" for key, value in base.items())
    console().print(f"full-duplex: {escape(common)}")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


@click.command()
@json_option
def devices(as_json: bool) -> None:  # noqa: FBT001
    """List the devices that the executor can drive here, and why not, where it cannot."""
    kinds = [(kind, kind.unavailable()) for kind in device_kinds()]
    if as_json:
        print_json(
            [
                {
                    "name": kind.name,
                    "summary": kind.summary,
                    "time": kind.time,
                    "unavailable": reason,
                }
                for kind, reason in kinds
            ]
        )
        return
    table = Table(title="Devices")
    for heading in ("device", "what it is", "time", "usable here"):
        table.add_column(heading)
    for kind, reason in kinds:
        table.add_row(kind.name, kind.summary, kind.time, "yes" if reason is None else reason)
    console().print(table)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
def digest(folder: Path, as_json: bool) -> None:  # noqa: FBT001
    """Print a hash of the contents of FOLDER's tables and of the seeds that made them.

    Two runs with one seed give one digest, whatever the scheduling; file layout does not count.
    """
    jobs, requests = read_tables(folder)
    facts = about(jobs)
    value = digest_of(dict(zip(TABLES, (jobs, requests), strict=True)), facts["seeds"])
    if as_json:
        print_json(
            {
                "sha256": value,
                "jobs": jobs.num_rows,
                "requests": requests.num_rows,
                "seeds": facts["seeds"],
                "complete": facts["complete"],
            }
        )
        return
    state = "" if facts["complete"] else "  (interrupted run)"
    click.echo(f"{value}  {jobs.num_rows} jobs, {requests.num_rows} requests{state}")
