"""The gain of each hypothesis and limit, with its interval, its bound and the gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from sim.stats import Interval

from .style import (
    GATE,
    GROUND,
    SMALL,
    TEXT,
    draw,
    gain_text,
    in_flight,
    known,
    looks,
    new_figure,
    percent,
    wrap,
)


@frozen
class GainRow:
    """The gain of one hypothesis at one limit.

    Attributes:
        hypothesis: its name.
        limit: jobs in flight.
        gain: over the baseline, 0.1 is +10 %.
        bound: what no schedule can exceed; None where none is known.
        note: said in place of a gain that is not a number, as "impossible".
    """

    hypothesis: str
    limit: int
    gain: Interval
    bound: float | None = None
    note: str = "undefined"


def gain_bars(
    rows: Sequence[GainRow],
    gate_gain: float | None,
    path: Path,
    title: str = "Gain in tokens/s over one job in flight",
) -> None:
    """Bars with 95 % whiskers, a tick at the analytic bound, and the gate.

    Args:
        rows: in order; one group a hypothesis.
        gate_gain: the least gain worth shipping, 0.1 is +10 %; None draws no gate.
        path: the file to write.
        title: of the figure.
    """
    draw(lambda: _draw(rows, gate_gain, title), path)


def _draw(rows: Sequence[GainRow], gate: float | None, title: str) -> Figure:
    names = list(dict.fromkeys(row.hypothesis for row in rows))
    of_limit = looks([row.limit for row in rows])
    places: list[float] = []
    middles: list[float] = []
    at = 0.0
    ordered: list[GainRow] = []
    for name in names:
        group = [row for row in rows if row.hypothesis == name]
        spare = max(0.0, 0.62 * (wrap(name, 1.6, TEXT).count("\n") + 1) - len(group)) / 2
        places += [at + spare + index for index in range(len(group))]
        middles.append(at + spare + (len(group) - 1) / 2)
        ordered += group
        at += len(group) + 2 * spare + 0.7
    figure = new_figure(title, 1.6 + 0.27 * max(at, 2))
    axes = figure.subplots()
    ends = [0.0] + ([] if gate is None else [gate])
    for row, place in zip(ordered, places, strict=True):
        gain, look = row.gain, of_limit[row.limit]
        end = 0.0
        if math.isfinite(gain.estimate):
            axes.barh(
                place, gain.estimate, 0.84, color=look.colour, hatch=look.hatch, edgecolor="white"
            )
            end = max(end, gain.estimate)
            ends.append(gain.estimate)
        if known(gain):
            reach = [[gain.estimate - gain.low], [gain.high - gain.estimate]]
            axes.errorbar([gain.estimate], [place], xerr=reach,
                          fmt="none", ecolor="black", elinewidth=1.4, capsize=3)  # fmt: skip
            end = max(end, gain.high)
            ends += [gain.low, gain.high]
        if row.bound is not None and math.isfinite(row.bound):
            axes.plot([row.bound] * 2, [place - 0.42, place + 0.42], color="black", linewidth=2.6,
                      solid_capstyle="butt")  # fmt: skip
            end = max(end, row.bound)
            ends.append(row.bound)
        axes.annotate(gain_text(gain, unknown=row.note), (end, place), (6, 0),
                      textcoords="offset points",
                      va="center", fontsize=SMALL,
                      bbox=GROUND)  # fmt: skip
    low, high = min(ends), max(ends)
    span = (high - low) or 0.1
    axes.set_xlim(low - (0.03 * span if low < 0 else 0), high + 0.42 * span)
    axes.set_ylim(max(at - 0.7, 1) - 0.3, -0.7)
    axes.axvline(0, color="black", linewidth=0.8)
    if gate is not None:
        axes.axvline(gate, color=GATE, linestyle="--", linewidth=1.5)
        axes.annotate(f"gate {percent(gate)}", (gate, 1), (0, 2), xycoords=("data", "axes fraction"),
                      textcoords="offset points", ha="center", va="bottom", color=GATE,
                      fontsize=SMALL)  # fmt: skip
    axes.set_yticks(middles, [wrap(name, 1.6, TEXT) for name in names], fontsize=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axes.set_xlabel("gain in aggregate tokens/s, %")
    handles: list[Patch | Line2D] = [
        Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", label=in_flight(limit))
        for limit, look in of_limit.items()
    ]
    if any(known(row.gain) for row in rows):
        handles.append(Line2D([], [], color="black", linewidth=1.4, marker="|", markersize=7,
                              label="95 % interval"))  # fmt: skip
    if any(row.bound is not None and math.isfinite(row.bound) for row in rows):
        handles.append(Line2D([], [], color="black", linestyle="none", marker="|", markersize=11,
                              markeredgewidth=2.6, label="analytic bound"))  # fmt: skip
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4))
    return figure
