"""Latency against offered load: where each in-flight limit leaves the SLO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from sim.stats import Interval

from .style import (
    GATE,
    SMALL,
    TEXT,
    WIDTH,
    Look,
    draw,
    grid,
    halo,
    in_flight,
    known,
    label_outside,
    looks,
    new_figure,
    wrap,
)

_BEYOND = 4  # times the SLO: latencies above are arrows


@frozen
class LoadPoint:
    """One load.

    Attributes:
        load: offered, requests/s.
        latency_ms: the percentile.
        overloaded: the queue keeps growing, so the latency only says how long the run was.
    """

    load: float
    latency_ms: Interval
    overloaded: bool = False


@frozen
class Curve:
    """Latencies of one hypothesis at one in-flight limit, loads in any order."""

    hypothesis: str
    limit: int
    points: Sequence[LoadPoint]


def load_latency(
    curves: Sequence[Curve],
    slo_ms: float | None,
    path: Path,
    *,
    metric: str = "TTFT P99",
    title: str | None = None,
    log: bool | None = None,
) -> None:
    """One panel a hypothesis, one line a limit, the SLO dashed; all panels share their scales.

    Overloaded points are hollow. Neither they nor what misses the SLO by far set the scale: what is
    beyond it is an arrow at its top.

    Args:
        curves: a curve for each hypothesis and limit.
        slo_ms: the limit of the latency, ms; None draws none.
        path: the file to write.
        metric: what is drawn, as "TPOT P99".
        title: of the figure.
        log: a logarithmic scale of latency; None chooses it where values span much.
    """
    heading = title or f"{metric} against offered load"
    draw(lambda: _draw(curves, slo_ms, metric, heading, log=log), path)


@frozen
class _Scale:
    low: float
    high: float
    log: bool
    unit_ms: float

    def at(self, share: float) -> float:
        """The value at a share of the height."""
        if self.log:
            return math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        return self.low + share * (self.high - self.low)


def _values(curves: Sequence[Curve], *, overloaded: bool) -> Iterator[float]:
    for point in (point for curve in curves for point in curve.points):
        if point.overloaded == overloaded and math.isfinite(point.latency_ms.estimate):
            yield point.latency_ms.estimate
            if known(point.latency_ms):
                yield min(point.latency_ms.high, 3 * point.latency_ms.estimate)


def _scale(curves: Sequence[Curve], slo_ms: float | None, *, log: bool | None) -> _Scale:
    seen = list(_values(curves, overloaded=False)) or list(_values(curves, overloaded=True))
    seen += [] if slo_ms is None else [slo_ms]
    low, high = (min(seen), max(seen)) if seen else (0.0, 1.0)
    if slo_ms is not None:  # how far beyond the SLO a miss is matters less than what meets it
        high = min(high, max(_BEYOND * slo_ms, 1.5 * low))
    if log is None:
        log = low > 0 and high / low > 20
    unit_ms = 1000.0 if high >= 10_000 else 1.0
    if log and high > 0:
        low = low if low > 0 else min((value for value in seen if value > 0), default=high) / 2
        return _Scale(low / 1.4 / unit_ms, high * 1.9 / unit_ms, log=True, unit_ms=unit_ms)
    return _Scale(min(0.0, low) / unit_ms, (high * 1.25 or 1.0) / unit_ms, log=False, unit_ms=unit_ms)


def _draw(
    curves: Sequence[Curve], slo_ms: float | None, metric: str, title: str, *, log: bool | None
) -> Figure:
    names = list(dict.fromkeys(curve.hypothesis for curve in curves)) or [""]
    of_limit = looks([curve.limit for curve in curves])
    scale = _scale(curves, slo_ms, log=log)
    rows, columns = grid(len(names))
    figure = new_figure(title, 1.3 + (3.0 if len(names) == 1 else 2.0) * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for name, axes in zip(names, panels, strict=False):
        of_name = [curve for curve in curves if curve.hypothesis == name]
        _panel(axes, of_name, of_limit, scale)
        axes.set_title(wrap(name, WIDTH / columns - 0.7, TEXT), loc="left", fontsize=TEXT)
        if slo_ms is not None:
            axes.axhline(slo_ms / scale.unit_ms, color=GATE, linestyle="--", linewidth=1.4, zorder=1)
            axes.annotate(f"SLO {_time(slo_ms)}", (0, slo_ms / scale.unit_ms), (3, 2), va="bottom",
                          xycoords=("axes fraction", "data"), textcoords="offset points", color=GATE,
                          fontsize=SMALL, path_effects=halo(), zorder=6)  # fmt: skip
        if not any(
            math.isfinite(point.latency_ms.estimate) for curve in of_name for point in curve.points
        ):
            axes.text(0.5, 0.5, "no value", transform=axes.transAxes, ha="center")
    for axes in panels:
        axes.set_axis_off()
    first = figure.axes[0]
    first.set_yscale("log" if scale.log else "linear")
    first.set_ylim(scale.low, scale.high)
    loads = [point.load for curve in curves for point in curve.points if math.isfinite(point.load)]
    if loads:
        margin = 0.06 * (max(loads) - min(loads)) or 0.5 * abs(loads[0]) or 1
        first.set_xlim(min(loads) - margin, max(loads) + margin)
    first.xaxis.set_major_locator(MaxNLocator(4 if columns == 3 else 6))
    for axes in figure.axes[: len(names)]:
        if scale.log:
            axes.yaxis.set_major_locator(
                LogLocator(subs=(1, 2, 5) if scale.high < 30 * scale.low else (1,))
            )
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:,.15g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    label_outside(figure.axes[: len(names)], columns, "offered load, requests/s")
    figure.supylabel(f"{metric}, {'s' if scale.unit_ms == 1000 else 'ms'}", fontsize=TEXT)
    figure.legend(handles=_legend(curves, of_limit, scale), loc="outside lower center", ncols=3)
    return figure


def _panel(axes: Axes, curves: Sequence[Curve], of_limit: dict[int, Look], scale: _Scale) -> None:
    for curve in curves:
        look = of_limit[curve.limit]
        rank = list(of_limit).index(curve.limit)
        wide = 1.5 - 0.3 * min(rank, 3)  # of lines that coincide, all are seen
        line: list[tuple[float, float]] = []
        for point in sorted(curve.points, key=lambda point: point.load):
            latency = point.latency_ms
            value = latency.estimate / scale.unit_ms
            if not math.isfinite(value):
                line.append((point.load, math.nan))
                continue
            fill = "white" if point.overloaded else look.colour
            if value > scale.at(0.98) or (point.overloaded and value > scale.at(0.9)):
                value = scale.at(0.96 - 0.075 * (rank % 5))  # arrows do not hide one another
                axes.plot([point.load], [value], marker="^", color=fill, markeredgecolor=look.colour,
                          markersize=9, markeredgewidth=1.6, zorder=5)  # fmt: skip
            else:
                axes.plot([point.load], [value], marker=look.marker, color=fill, markersize=5.5 * wide,
                          markeredgecolor=look.colour, markeredgewidth=1.4, zorder=4)  # fmt: skip
                if known(latency):
                    low = max(latency.low / scale.unit_ms, scale.low if scale.log else -math.inf)
                    axes.vlines(point.load, low, latency.high / scale.unit_ms, color=look.colour,
                                linewidth=2.2, zorder=3)  # fmt: skip
                if not latency.trusted:
                    axes.annotate("~", (point.load, value), (4, 2), textcoords="offset points",
                                  fontsize=SMALL)  # fmt: skip
            line.append((point.load, value))
        axes.plot([x for x, _ in line], [y for _, y in line], color=look.colour, linestyle=look.line,
                  linewidth=1.6 * wide, zorder=2)  # fmt: skip


def _legend(curves: Sequence[Curve], of_limit: dict[int, Look], scale: _Scale) -> list[Line2D]:
    handles = [
        Line2D(
            [], [], color=look.colour, linestyle=look.line, marker=look.marker, label=in_flight(limit)
        )
        for limit, look in of_limit.items()
    ]
    points = [point for curve in curves for point in curve.points]
    hollow: dict[str, Any] = {
        "linestyle": "none",
        "markerfacecolor": "white",
        "markeredgecolor": "black",
    }
    if any(point.overloaded for point in points):
        handles.append(Line2D([], [], marker="o", label="hollow: overloaded", **hollow))
    if any(point.latency_ms.estimate / scale.unit_ms > scale.at(0.9) for point in points):
        handles.append(Line2D([], [], marker="^", markersize=9, label="beyond the scale", **hollow))
    if any(known(point.latency_ms) for point in points):
        handles.append(Line2D([], [], color="black", linestyle="none", marker="|", markersize=11,
                              markeredgewidth=2.2, label="95 % interval"))  # fmt: skip
    if any(not known(p.latency_ms) and math.isfinite(p.latency_ms.estimate) for p in points):
        handles.append(Line2D([], [], linestyle="none", label="no bar: no interval"))
    if any(not point.latency_ms.trusted for point in points):
        handles.append(Line2D([], [], linestyle="none", label="~: too few samples"))
    return handles


def _time(ms: float) -> str:
    return f"{ms / 1000:g} s" if ms >= 1000 else f"{ms:g} ms"
