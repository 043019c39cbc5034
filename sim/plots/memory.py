"""KV tokens reserved over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import frozen
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .style import GATE, SMALL, TEXT, Look, draw, in_flight, looks, new_figure

COLUMNS = 500  # of the envelope of a long run; shorter ones are drawn step by step
Floats = npt.NDArray[np.float64]


@frozen(eq=False)
class KvSeries:
    """KV tokens reserved in one run, as steps.

    Attributes:
        limit: jobs in flight.
        times_s: ascending, seconds from the start; ``tokens[i]`` holds from ``times_s[i]`` on.
        tokens: reserved, as many as times.
        end_s: until when the last value holds; the last time if None.
    """

    limit: int
    times_s: npt.ArrayLike
    tokens: npt.ArrayLike
    end_s: float | None = None


def kv_occupancy(
    series: Sequence[KvSeries],
    capacity_tokens: float | None,
    path: Path,
    title: str = "KV memory reserved over time",
) -> None:
    """One panel a limit: steps, their mean over time, and the capacity.

    Long runs are shown by the lowest and highest value in each of `COLUMNS` stretches, so that no
    peak is lost, and by the mean of the stretch.

    Args:
        series: one run each.
        capacity_tokens: of the card; None draws none.
        path: the file to write.
        title: of the figure.

    Raises:
        ValueError: times that go back, or not as many values as times.
    """
    for one in series:
        times, tokens = _arrays(one)
        if times.shape != tokens.shape or (np.diff(times) < 0).any():
            raise ValueError(f"{in_flight(one.limit)}: wanted as many values as times, times ascending")
    draw(lambda: _draw(series, capacity_tokens, title), path)


def _arrays(one: KvSeries) -> tuple[Floats, Floats]:
    return np.asarray(one.times_s, np.float64), np.asarray(one.tokens, np.float64)


def _closed(one: KvSeries) -> tuple[Floats, Floats]:
    """Edges of the steps, one more than values."""
    times, tokens = _arrays(one)
    end = times[-1] if one.end_s is None else max(one.end_s, times[-1])
    return np.append(times, end), tokens


def mean_over_time(edges: Floats, tokens: Floats) -> float:
    """The mean of steps, each weighted by how long it holds."""
    lengths = np.diff(edges)
    total = lengths.sum()
    return float((tokens * lengths).sum() / total) if total > 0 else float(tokens[-1])


def envelope(
    edges: Floats, tokens: Floats, columns: int = COLUMNS
) -> tuple[Floats, Floats, Floats, Floats]:
    """(edges, lowest, highest, mean) of steps over stretches of equal length; no peak is lost."""
    cuts = np.linspace(edges[0], edges[-1], columns + 1)
    area = np.concatenate([[0.0], np.cumsum(tokens * np.diff(edges))])
    means = np.diff(np.interp(cuts, edges, area)) / np.diff(cuts)
    first = np.clip(np.searchsorted(edges, cuts[:-1], "right") - 1, 0, len(tokens) - 1)
    last = np.clip(np.searchsorted(edges, cuts[1:], "left"), first + 1, len(tokens))
    lowest = np.array([tokens[a:b].min() for a, b in zip(first, last, strict=True)])
    highest = np.array([tokens[a:b].max() for a, b in zip(first, last, strict=True)])
    return cuts, lowest, highest, means


def _draw(series: Sequence[KvSeries], capacity: float | None, title: str) -> Figure:
    of_limit = looks([one.limit for one in series])
    panels = max(len(series), 1)
    figure = new_figure(title, 1.1 + (2.4 if panels == 1 else 1.75) * panels)
    grid = figure.subplots(panels, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    tops = [0.0 if capacity is None else capacity]
    for axes, one in zip(grid, series, strict=False):
        tops.append(_panel(axes, one, of_limit[one.limit], capacity))
    if not series:
        grid[0].text(0.5, 0.5, "no run", transform=grid[0].transAxes, ha="center")
    grid[0].set_ylim(0, 1.22 * max(tops) or 1)
    grid[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:,.0f}"))
    grid[0].yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ends = [edge for one in series if len(_arrays(one)[0]) for edge in _closed(one)[0][[0, -1]]]
    if ends:
        grid[0].set_xlim(min(ends), max(ends) if max(ends) > min(ends) else min(ends) + 1)
    grid[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:,.12g}"))
    grid[-1].set_xlabel("time since the start of the run, s")
    figure.supylabel("KV reserved, tokens", fontsize=TEXT)
    return figure


def _panel(axes: Axes, one: KvSeries, look: Look, capacity: float | None) -> float:
    """Draw one run; its highest value."""
    if capacity is not None:
        axes.axhline(capacity, color=GATE, linestyle="--", linewidth=1.4)
        axes.annotate(f"capacity\n{capacity:,.0f}", (1, capacity), (5, 0), ha="left", va="bottom",
                      xycoords=("axes fraction", "data"), textcoords="offset points", color=GATE,
                      fontsize=SMALL)  # fmt: skip
    heading = in_flight(one.limit)
    if not len(_arrays(one)[0]):
        axes.text(0.5, 0.5, "nothing was reserved", transform=axes.transAxes, ha="center")
        axes.set_title(heading, loc="left", fontsize=TEXT)
        return 0.0
    edges, tokens = _closed(one)
    mean = mean_over_time(edges, tokens)
    if len(tokens) > 2 * COLUMNS and edges[-1] > edges[0]:
        cuts, lowest, highest, means = envelope(edges, tokens)
        axes.fill_between(cuts, np.append(lowest, lowest[-1]), np.append(highest, highest[-1]),
                          step="post", color=look.colour, alpha=0.35, linewidth=0)  # fmt: skip
        axes.stairs(means, cuts, color=look.colour, linewidth=1.1, baseline=None)
        each = cuts[1] - cuts[0]
        heading += f" (line: mean, band: lowest to highest, of each {each:.2g} s)"
    else:
        axes.stairs(tokens, edges, fill=True, color=look.colour, alpha=0.25, linewidth=0)
        axes.stairs(tokens, edges, color=look.colour, linewidth=1.2, baseline=None)
    share = "" if not capacity else f" ({mean / capacity:.0%})".replace("%", " %")
    at = "top" if capacity and 0.75 * capacity < mean else "center"  # clear of the capacity's label
    axes.axhline(mean, color="black", linestyle=":", linewidth=1.4)
    axes.annotate(f"mean\n{mean:,.0f}{share}", (1, mean), (5, 0), ha="left", va=at,
                  xycoords=("axes fraction", "data"), textcoords="offset points",
                  fontsize=SMALL)  # fmt: skip
    axes.set_title(heading, loc="left", fontsize=TEXT)
    axes.margins(x=0)
    return float(tokens.max())
