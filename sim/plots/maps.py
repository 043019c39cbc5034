"""From where on a further job in flight pays: gain over host share and concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import frozen
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from .style import SMALL, TEXT, WIDTH, draw, grid, halo, label_outside, new_figure, percent, wrap

Floats = npt.NDArray[np.float64]


@frozen(eq=False)
class GainMap:
    """Gains of one hypothesis.

    Attributes:
        hypothesis: its name.
        gains: [sequences, ratios], 0.1 is +10 %; NaN where there is none.
        profile: (ratio, sequences) at which the assumed profile stands; None marks none.
    """

    hypothesis: str
    gains: npt.ArrayLike
    profile: tuple[float, float] | None = None


def break_even(
    maps: Sequence[GainMap],
    ratios: Sequence[float],
    sequences: Sequence[float],
    gate: float,
    path: Path,
    title: str = "Where a second job in flight pays",
) -> None:
    """One panel a hypothesis: shades of gain, the line of the gate, and the assumed profile.

    Args:
        maps: one for each hypothesis.
        ratios: time of host and transfers over that of compute, ascending, above 0.
        sequences: concurrent, ascending.
        gate: the least gain worth shipping, 0.1 is +10 %.
        path: the file to write.
        title: of the figure.

    Raises:
        ValueError: ratios or sequences do not ascend, a ratio is not positive, or gains do not fit.
    """
    shape = (len(sequences), len(ratios))
    if (
        not all(shape)
        or min(ratios) <= 0
        or (np.diff(ratios) <= 0).any()
        or (np.diff(sequences) <= 0).any()
    ):
        raise ValueError("ratios and sequences have to ascend, and ratios to be above 0")
    for one in maps:
        if np.shape(one.gains) != shape:
            raise ValueError(f"{one.hypothesis}: gains are {np.shape(one.gains)}, wanted {shape}")
    draw(lambda: _draw(maps, ratios, sequences, gate, title), path)


def _edges(centres: Floats) -> Floats:
    """Borders of cells around centres, halfway; the outer ones as far as the inner."""
    if len(centres) == 1:
        return np.array([centres[0] - 0.15, centres[0] + 0.15])
    inner = (centres[:-1] + centres[1:]) / 2
    return np.concatenate([[2 * centres[0] - inner[0]], inner, [2 * centres[-1] - inner[-1]]])


def _draw(
    maps: Sequence[GainMap],
    ratios: Sequence[float],
    sequences: Sequence[float],
    gate: float,
    title: str,
) -> Figure:
    values = [np.asarray(one.gains, np.float64) for one in maps]
    values = [np.where(np.isfinite(one), one, np.nan) for one in values]
    finite = np.concatenate([one[np.isfinite(one)] for one in values] or [np.empty(0)])
    low = min(0.0, float(finite.min())) if len(finite) else 0.0
    high = max(1.5 * gate, float(finite.max())) if len(finite) else 1.0
    norm = Normalize(low, high)
    rows, columns = grid(max(len(maps), 1))
    figure = new_figure(title, 1.9 + (2.7 if len(maps) == 1 else 1.75) * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for one, gains, axes in zip(maps, values, panels, strict=False):
        _panel(
            axes,
            one,
            gains,
            np.asarray(ratios, np.float64),
            np.asarray(sequences, np.float64),
            gate,
            norm,
        )
        axes.set_title(wrap(one.hypothesis, WIDTH / columns - 0.6, TEXT), loc="left", fontsize=TEXT)
    for axes in panels:
        axes.set_axis_off()
    used = figure.axes[: max(len(maps), 1)]
    label_outside(used, columns, "(host + transfer time) / compute time")
    figure.supylabel("concurrent sequences", fontsize=TEXT)
    bar = figure.colorbar(ScalarMappable(norm, "cividis"), ax=list(figure.axes), pad=0.02, aspect=30)
    bar.set_label("gain in tokens/s, %")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
    bar.ax.axhline(gate, color="black", linewidth=3.5)
    bar.ax.axhline(gate, color="white", linewidth=1.6)
    handles: list[Line2D | Patch] = [
        Line2D(
            [],
            [],
            color="white",
            linewidth=1.8,
            path_effects=halo(4, "black"),
            label=f"gate {percent(gate)}",
        ),
    ]
    if any(one.profile for one in maps):
        handles.append(Line2D([], [], linestyle="none", marker="*", markersize=13, color="white",
                              markeredgecolor="black", label="assumed profile"))  # fmt: skip
    if any(np.isnan(one).any() for one in values):
        handles.append(Patch(facecolor="white", hatch="xxx", edgecolor="#777777", label="no value"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _panel(
    axes: Axes,
    one: GainMap,
    gains: Floats,
    ratios: Floats,
    sequences: Floats,
    gate: float,
    norm: Normalize,
) -> None:
    x, y = np.log10(ratios), np.arange(len(sequences), dtype=np.float64)
    x_edges = _edges(x)
    y_edges = np.arange(len(sequences) + 1) - 0.5
    axes.set_facecolor("white")
    axes.patch.set(hatch="xxx", edgecolor="#999999")
    axes.pcolormesh(
        10**x_edges,
        y_edges,
        np.ma.masked_invalid(gains),
        cmap="cividis",
        norm=norm,
        edgecolors="face",
        linewidth=0.3,
    )
    axes.set_xscale("log")
    axes.set_xlim(10 ** x_edges[0], 10 ** x_edges[-1])
    axes.set_ylim(y_edges[0], y_edges[-1])
    finite = gains[np.isfinite(gains)]
    if not len(finite) or finite.min() >= gate or finite.max() < gate:
        what = (
            "no value"
            if not len(finite)
            else "all above the gate"
            if finite.min() >= gate
            else "all below the gate"
        )
        axes.text(0.5, 0.93, what, transform=axes.transAxes, ha="center", va="top", fontsize=SMALL,
                  bbox={"boxstyle": "round,pad=0.2", "fc": "white", "ec": "none"})  # fmt: skip
    else:
        padded = np.ma.masked_invalid(np.pad(gains, 1, "edge"))
        wide = np.concatenate([[x_edges[0]], x, [x_edges[-1]]])
        tall = np.concatenate([[y_edges[0]], y, [y_edges[-1]]])
        line = axes.contour(10**wide, tall, padded, levels=[gate], colors="white", linewidths=1.8)
        line.set_path_effects(halo(4, "black"))
        for label in axes.clabel(line, fmt=percent, fontsize=SMALL, colors="black"):
            label.set_bbox({"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"})
    axes.set_yticks(y, [f"{value:g}" for value in sequences])
    axes.xaxis.set_major_locator(LogLocator(numticks=5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if one.profile is not None:
        at_x = float(np.clip(one.profile[0], ratios[0], ratios[-1]))
        at_y = float(np.interp(one.profile[1], sequences, y))
        axes.plot([at_x], [at_y], marker="*", markersize=13, color="white", markeredgecolor="black",
                  linestyle="none", zorder=6, clip_on=False)  # fmt: skip
