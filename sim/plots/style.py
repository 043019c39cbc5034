"""What all figures share: style, colours by in-flight limit, words for gains, and text that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from attrs import frozen
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patheffects import AbstractPathEffect, withStroke
from matplotlib.textpath import TextPath

from sim.figures import COLOURS, HATCHES
from sim.stats import Interval

WIDTH = 7.2  # inches: a page 400 pixels wide shows 10 points as 8 pixels
TITLE, TEXT, SMALL = 12.0, 10.0, 9.0  # points
GATE = "#B3261E"  # dashed wherever it is drawn, and labelled
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "caltrio",  # the same figure is the same file
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "text.parse_math": False,  # a name may hold dollars
    "font.size": TEXT,
    "axes.titlesize": TEXT + 0.5,
    "axes.labelsize": TEXT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
}
GROUND = {"boxstyle": "square,pad=0.05", "fc": "white", "ec": "none"}  # behind text
_LINES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")


@frozen
class Look:
    """How one in-flight limit is drawn, in every figure alike."""

    colour: str
    hatch: str
    line: Literal["-", "--", "-.", ":"]
    marker: str


def looks(limits: Sequence[int]) -> dict[int, Look]:
    """A look for each limit, the same in every figure unless there are more than eight."""
    taken: dict[int, int] = {}
    for limit in sorted(set(limits)):
        free = [slot for slot in range(len(COLOURS)) if slot not in taken.values()]
        wanted = (limit - 1) % len(COLOURS)
        taken[limit] = wanted if wanted in free or not free else free[0]
    return {
        limit: Look(COLOURS[slot], HATCHES[slot], _LINES[slot % len(_LINES)], _MARKERS[slot])
        for limit, slot in taken.items()
    }


def draw(make: Callable[[], Figure], path: Path) -> None:
    """Write the figure that ``make`` draws; the ending of ``path`` says in which format."""
    with mpl.rc_context(STYLE):
        figure = make()
        metadata = {"Date": None, "Title": figure.get_suptitle().replace("\n", " ")}
        figure.savefig(path, metadata=metadata if path.suffix == ".svg" else None)


def new_figure(title: str, height: float, width: float = WIDTH) -> Figure:
    """An empty figure with its title."""
    figure = Figure(figsize=(width, height), layout="constrained")
    lines = wrap(title, width - 0.4, TITLE, bold=True)
    figure.suptitle(lines, x=0.02, ha="left", fontsize=TITLE, fontweight="bold")
    return figure


def grid(panels: int) -> tuple[int, int]:
    """Rows and columns for a number of panels: at most three a row, two if that is enough."""
    columns = 1 if panels == 1 else 2 if panels <= 6 else 3
    return max(1, math.ceil(panels / columns)), columns


def label_outside(axes: Sequence[Axes], columns: int, label: str) -> None:
    """Ticks and the label of x below the lowest panel of each column only."""
    for at, one in enumerate(axes):
        lowest = at + columns >= len(axes)
        one.tick_params(labelbottom=lowest)
        if lowest:
            one.set_xlabel(wrap(label, WIDTH / columns - 0.7, TEXT))


def halo(width: float = 2.5, colour: str = "white") -> list[AbstractPathEffect]:
    """A rim, which keeps text and lines legible on any ground."""
    return [withStroke(linewidth=width, foreground=colour)]


@lru_cache(maxsize=1024)
def _advance(letter: str, bold: bool) -> float:  # noqa: FBT001
    """How far one letter moves the pen, as a share of the font size."""
    font = FontProperties(family="DejaVu Sans", size=100, weight="bold" if bold else "normal")
    ends = [
        float(TextPath((0, 0), text, prop=font).get_extents().width) for text in (f"|{letter}|", "||")
    ]
    return (ends[0] - ends[1]) / 100


def inches(text: str, size: float, *, bold: bool = False) -> float:
    """How wide the widest line of ``text`` is."""
    return max(sum(_advance(letter, bold) for letter in line) for line in text.split("\n")) * size / 72


def wrap(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """``text`` in lines of at most ``width`` inches, broken after spaces or hyphens, else anywhere."""
    lines = [""]
    for word in text.replace("-", "-\0").replace(" ", " \0").split("\0"):
        if inches((lines[-1] + word).rstrip(), size, bold=bold) <= width:
            lines[-1] += word
            continue
        lines.append("")
        for letter in word:
            if lines[-1] and inches((lines[-1] + letter).rstrip(), size, bold=bold) > width:
                lines.append("")
            lines[-1] += letter
    return "\n".join(line.rstrip() for line in lines if line.strip())


def known(interval: Interval | None) -> bool:
    """Are estimate and both ends numbers?"""
    return interval is not None and all(
        map(math.isfinite, (interval.estimate, interval.low, interval.high))
    )


def percent(gain: float, decimals: int | None = None) -> str:
    """A relative change in words: ``+83 %``, ``−0.2 %``, ``0 %``; tenths below ten."""
    value = 100 * gain
    places = decimals if decimals is not None else int(abs(value) < 9.95)
    shown = f"{value:+.{places}f}"
    if not float(shown):
        return "0 %"
    if shown.endswith(".0") and decimals is None:
        shown = shown[:-2]
    return shown.replace("-", "−") + " %"


def gain_text(gain: Interval | None, *, unknown: str = "no value") -> str:
    """A gain and its half-width in points of percent: ``+83 % ±2``; says so if it has no interval."""
    if gain is None or not math.isfinite(gain.estimate):
        return unknown
    if not known(gain):
        return f"{percent(gain.estimate)}, no interval"
    half = 100 * gain.half_width
    places = int(abs(100 * gain.estimate) < 9.95 or half < 0.95)
    if half:  # never as if there were no doubt
        half = max(half, 10**-places)
    return f"{percent(gain.estimate, places)} ±{half:.{places if half else 0}f}"


def in_flight(limit: int) -> str:
    """The limit in words."""
    return f"{limit} in flight"
