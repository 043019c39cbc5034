"""The decision report: one HTML file that needs no network and no script."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import fields
from jinja2 import Environment, PackageLoader, StrictUndefined

from caltrio.config import ExecutorConfig
from caltrio.observe.records import TABLES, about, digest, read_tables
from caltrio.semantics import PRESETS
from caltrio.units import format_ns

if TYPE_CHECKING:
    from .plan import Plan


def _data_uri(path: Path) -> str:
    """An SVG as a data URI: in an <img> its ids cannot clash with those of the next figure."""
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()


def write_report(plan: Plan, folder: Path, timelines: Mapping[str, Path], command: str) -> None:
    """Write ``report.html`` into ``folder``, from the plan and the files that are there."""
    jobs, requests = read_tables(folder)
    facts = about(jobs)
    templates = Environment(
        loader=PackageLoader("sim"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    templates.filters["ns"] = format_ns
    templates.filters["signed"] = lambda share: "–" if share != share else f"{100 * share:+.1f} %"
    text = templates.get_template("report.html.j2").render(
        plan=plan,
        presets=PRESETS,
        figures={name: _data_uri(folder / f"{name}.svg") for name in ("comparison", "utilisation")},
        timelines={name: _data_uri(path) for name, path in timelines.items()},
        figures_assumed=_assumptions(plan),
        facts=facts,
        timeouts={
            attribute.metadata["toml"].replace("_", " "): value
            for attribute in fields(ExecutorConfig)
            if "toml" in attribute.metadata
            and (value := getattr(plan.scenario.executor, attribute.name)) is not None
        },
        command=command,
        digest=digest(dict(zip(TABLES, (jobs, requests), strict=True)), facts["seeds"]),
    )
    (folder / "report.html").write_text(text, encoding="utf-8")


def _assumptions(plan: Plan) -> list[tuple[str, str, str, str]]:
    """(figure, value, source, note) of every number of the timing profile."""
    rows = []
    for key, figure in plan.scenario.timing.figures().items():
        if key.endswith("bandwidth"):
            value = f"{figure.value / 1e9:g} GB/s"
        elif key.endswith(("per_token", "per_pair")):
            value = f"{figure.value / 1000:g} ns"  # picoseconds inside
        else:
            value = format_ns(figure.value)
        rows.append((key, value, figure.source.value, figure.note))
    return rows
