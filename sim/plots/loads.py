"""Latency against offered load: where each in-flight limit leaves the SLO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

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
    """The values that the axis shows, in its unit; with a strip above for what is beyond them."""

    low: float
    high: float
    log: bool
    unit_ms: float
    strip: bool

    @property
    def top(self) -> float:
        """The upper end of the axis."""
        return self.at(1.28) if self.strip else self.high

    def at(self, share: float) -> float:
        """The value at a share of the height of the scale."""
        if self.log:
            return math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        return self.low + share * (self.high - self.low)

    def share(self, value: float) -> float:
        """The share of the height at which a value stands."""
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _estimates(curves: Sequence[Curve]) -> list[tuple[bool, Interval]]:
    points = (point for curve in curves for point in curve.points)
    return [(p.overloaded, p.latency_ms) for p in points if math.isfinite(p.latency_ms.estimate)]


def _scale(curves: Sequence[Curve], slo_ms: float | None, *, log: bool | None) -> _Scale:
    every = _estimates(curves)
    chosen = [latency for overloaded, latency in every if not overloaded] or [one for _, one in every]
    seen = [latency.estimate for latency in chosen]
    # A very long interval is cut off rather than allowed to flatten everything else.
    seen += [min(one.high, 3 * one.estimate) for one in chosen if known(one)]
    seen += [] if slo_ms is None else [slo_ms, 1.3 * slo_ms]  # with room for its name
    low, high = (min(seen), max(seen)) if seen else (0.0, 1.0)
    if slo_ms is not None:  # how far beyond the SLO a miss is matters less than what meets it
        high = min(high, max(_BEYOND * slo_ms, 1.5 * low))
    if log is None:
        log = low > 0 and high / low > 20
    unit_ms = 1000.0 if high >= 10_000 else 1.0
    if log and high > 0:
        low = low if low > 0 else min((value for value in seen if value > 0), default=high) / 2
        low, high = low / 1.4, high * 1.25
    else:
        low, high, log = min(0.0, low), high * 1.06 or 1.0, False
    strip = any(latency.estimate > high for _, latency in every)
    return _Scale(low / unit_ms, high / unit_ms, log, unit_ms, strip)


def _draw(
    curves: Sequence[Curve], slo_ms: float | None, metric: str, title: str, *, log: bool | None
) -> Figure:
    names = list(dict.fromkeys(curve.hypothesis for curve in curves)) or [""]
    of_limit = looks([curve.limit for curve in curves])
    scale = _scale(curves, slo_ms, log=log)
    loads = [point.load for curve in curves for point in curve.points] or [0.0]
    margin = 0.07 * (max(loads) - min(loads)) or 0.5 * abs(loads[0]) or 1.0
    ends = (min(loads) - margin, max(loads) + margin)
    rows, columns = grid(len(names))
    figure = new_figure(title, 1.4 + (3.0 if len(names) == 1 else 2.1) * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for name, axes in zip(names, panels, strict=False):
        of_name = [curve for curve in curves if curve.hypothesis == name]
        lines = [_line(axes, curve, of_limit, scale) for curve in of_name]
        axes.set_title(wrap(name, WIDTH / columns - 0.7, TEXT), loc="left", fontsize=TEXT)
        if slo_ms is not None:
            _slo(axes, slo_ms, lines, scale, ends)
        if scale.strip:
            axes.axhspan(scale.high, scale.top, color="#EEEEEE", zorder=0)
        if not _estimates(of_name):
            axes.text(0.5, 0.5, "no value", transform=axes.transAxes, ha="center")
    for axes in panels:
        axes.set_axis_off()
    used = figure.axes[: len(names)]
    used[0].set_yscale("log" if scale.log else "linear")
    used[0].set_ylim(scale.low, scale.top)
    used[0].set_xlim(*ends)
    used[0].xaxis.set_major_locator(MaxNLocator(4 if columns == 3 else 6))
    for axes in used:
        _ticks(axes, scale)
    label_outside(used, columns, "offered load, requests/s")
    figure.supylabel(f"{metric}, {'s' if scale.unit_ms == 1000 else 'ms'}", fontsize=TEXT)
    figure.legend(handles=_legend(curves, of_limit, scale), loc="outside lower center", ncols=3)
    return figure


def _ticks(axes: Axes, scale: _Scale) -> None:
    """Ticks on the scale, and none on the strip above it."""
    if scale.log:
        span = scale.high / scale.low
        subs = (1, 2, 5) if span < 60 else (1, 3) if span < 2000 else (1,)
        ticks = LogLocator(subs=subs, numticks=20).tick_values(scale.low, scale.high)
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        ticks = MaxNLocator(5).tick_values(scale.low, scale.high)
    axes.set_yticks([tick for tick in ticks if scale.low <= tick <= scale.high])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:,.10g}"))
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)


def _line(
    axes: Axes, curve: Curve, of_limit: dict[int, Look], scale: _Scale
) -> list[tuple[float, float]]:
    """Draw one curve; where its points stand."""
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
        if value > scale.high:
            value = scale.at(1.21 - 0.07 * (rank % 3))  # arrows do not hide one another
            axes.plot([point.load], [value], marker="^", color=fill, markeredgecolor=look.colour,
                      markersize=8, markeredgewidth=1.6, zorder=5)  # fmt: skip
        else:
            axes.plot([point.load], [value], marker=look.marker, color=fill, markersize=5.5 * wide,
                      markeredgecolor=look.colour, markeredgewidth=1.4, zorder=4)  # fmt: skip
            if known(latency):
                low = max(latency.low / scale.unit_ms, scale.low)
                high = min(latency.high / scale.unit_ms, scale.at(1.12) if scale.strip else scale.high)
                axes.vlines(point.load, low, high, color=look.colour, linewidth=2.2, zorder=3)
            if not latency.trusted:
                axes.annotate(
                    "~", (point.load, value), (4, 2), textcoords="offset points", fontsize=SMALL
                )
        line.append((point.load, value))
    axes.plot([x for x, _ in line], [y for _, y in line], color=look.colour, linestyle=look.line,
              linewidth=1.6 * wide, zorder=2)  # fmt: skip
    return line


def _slo(
    axes: Axes,
    slo_ms: float,
    lines: Sequence[Sequence[tuple[float, float]]],
    scale: _Scale,
    ends: tuple[float, float],
) -> None:
    """The line of the SLO, with its name where the curves leave most room."""
    slo = slo_ms / scale.unit_ms
    axes.axhline(slo, color=GATE, linestyle="--", linewidth=1.4, zorder=1)
    taken: list[tuple[float, float]] = []  # on the curves, as shares of the panel
    for line in lines:
        held = [(x, scale.share(y)) for x, y in line if math.isfinite(y)]
        if held:
            at = np.linspace(ends[0], ends[1], 60)
            loads, shares = np.array(held).T
            heights = np.interp(at, loads, shares, left=math.nan, right=math.nan)
            taken += zip(np.linspace(0, 1, 60).tolist(), heights.tolist(), strict=True)
    middle = scale.share(slo)

    def crossed(place: tuple[str, str]) -> int:
        left, above = place[0] == "left", place[1] == "bottom"
        return sum(
            (x < 0.45 if left else x > 0.55)
            and (-0.02 < y - middle < 0.17 if above else -0.17 < y - middle < 0.02)
            for x, y in taken
        )

    places = [("left", "bottom"), ("right", "bottom"), ("left", "top"), ("right", "top")]
    if middle < 0.2:
        places = places[:2]
    side, edge = min(places, key=crossed)
    axes.annotate(f"SLO {_time(slo_ms)}", (side == "right", slo),
                  (3 if side == "left" else -3, 2 if edge == "bottom" else -3), ha=side, va=edge,
                  xycoords=("axes fraction", "data"), textcoords="offset points", color=GATE,
                  fontsize=SMALL, path_effects=halo(), zorder=6)  # fmt: skip


def _legend(curves: Sequence[Curve], of_limit: dict[int, Look], scale: _Scale) -> list[Line2D]:
    handles = [
        Line2D(
            [], [], color=look.colour, linestyle=look.line, marker=look.marker, label=in_flight(limit)
        )
        for limit, look in of_limit.items()
    ]
    every = _estimates(curves)
    hollow: dict[str, Any] = {"linestyle": "none", "mfc": "white", "mec": "black"}
    if any(overloaded for overloaded, _ in every):
        handles.append(Line2D([], [], marker="o", label="hollow: overloaded", **hollow))
    if scale.strip:
        handles.append(Line2D([], [], marker="^", markersize=8, label="beyond the scale", **hollow))
    if any(known(latency) for _, latency in every):
        handles.append(Line2D([], [], color="black", linestyle="none", marker="|", markersize=11,
                              markeredgewidth=2.2, label="95 % interval"))  # fmt: skip
    if not all(known(latency) for _, latency in every):
        handles.append(Line2D([], [], linestyle="none", label="no bar: no interval"))
    if not all(latency.trusted for _, latency in every):
        handles.append(Line2D([], [], linestyle="none", label="~: too few samples"))
    return handles


def _time(ms: float) -> str:
    return f"{ms / 1000:g} s" if ms >= 1000 else f"{ms:g} ms"
