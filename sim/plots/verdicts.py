"""The decision at a glance: a verdict for each hypothesis, limit and load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from attrs import frozen
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from sim.stats import Interval

from .style import SMALL, TEXT, WIDTH, draw, gain_text, inches, new_figure, wrap

Verdict = Literal["PASS", "FAIL", "UNDECIDED", "UNDEFINED", "IMPOSSIBLE", "BASELINE"]


@frozen
class MatrixCell:
    """What is known in one cell.

    Attributes:
        verdict: one of `VERDICTS`.
        gain: in aggregate tokens/s over the baseline, 0.1 is +10 %; None where there is none.
    """

    verdict: Verdict
    gain: Interval | None = None


@frozen
class _Shade:
    symbol: str
    ground: str
    ink: str
    hatch: str
    meaning: str


VERDICTS = MappingProxyType(
    {
        "PASS": _Shade("✓", "#006B50", "white", "", "PASS"),
        "FAIL": _Shade("✗", "#F6C28F", "black", "", "FAIL"),
        "UNDECIDED": _Shade("?", "#FFF6C4", "black", "////", "UNDECIDED: more runs needed"),
        "UNDEFINED": _Shade("–", "white", "black", "....", "UNDEFINED: a figure is missing"),
        "IMPOSSIBLE": _Shade("⊘", "#8C8C8C", "black", "xxxx", "IMPOSSIBLE under this hypothesis"),
        "BASELINE": _Shade("=", "#E4EEF6", "black", "", "BASELINE: gains are against it"),
    }
)


def decision_matrix(
    rows: Sequence[tuple[str, int]],
    columns: Sequence[str],
    cells: Sequence[Sequence[MatrixCell | None]],
    path: Path,
    title: str = "Is it worth shipping? Verdict and gain in tokens/s",
    loads: str = "offered load",
) -> None:
    """A table of verdicts: symbol, shade, and the gain with its half-width.

    Args:
        rows: (hypothesis, in-flight limit); rows of one hypothesis next to each other.
        columns: names of the loads, from light to heavy.
        cells: for each row, one cell for each column; None leaves it empty.
        path: the file to write.
        title: of the figure.
        loads: what the columns are, with their unit.

    Raises:
        ValueError: not as many cells as rows and columns need.
    """
    if len(cells) != len(rows) or any(len(line) != len(columns) for line in cells):
        raise ValueError(f"cells do not fill {len(rows)} rows of {len(columns)} columns")
    draw(lambda: _draw(rows, columns, cells, title, loads), path)


def _draw(
    rows: Sequence[tuple[str, int]],
    columns: Sequence[str],
    cells: Sequence[Sequence[MatrixCell | None]],
    title: str,
    loads: str,
) -> Figure:
    names = [wrap(name, 1.5, TEXT) for name, _ in rows]
    first = [at for at in range(len(rows)) if not at or rows[at][0] != rows[at - 1][0]]
    spans = list(pairwise([*first, len(rows)]))
    # A row is as high as its texts and its share of its hypothesis's name need.
    shares = [(names[at].count("\n") + 1) / (after - at) for at, after in spans]
    row_height = max([0.46, *(0.18 * share + 0.1 for share in shares)])
    shown = [
        kind
        for kind in VERDICTS
        if any(cell and cell.verdict == kind for line in cells for cell in line)
    ]
    height = 1.5 + row_height * max(len(rows), 1) + 0.22 * ((len(shown) + 1) // 2)
    figure = new_figure(title, height)
    axes = figure.subplots()
    room = (WIDTH - 2.6) / max(len(columns), 1)
    texts = [_cell_text(cell) for line in cells for cell in line if cell]
    size = TEXT + 0.5
    while size > 6.5 and any(inches(text, size, bold=True) > room - 0.06 for text in texts):
        size -= 0.5
    for row, line in enumerate(cells):
        for column, cell in enumerate(line):
            if cell is None:
                continue
            shade = VERDICTS[cell.verdict]
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=shade.ground,
                                     hatch=shade.hatch, edgecolor="#BBBBBB", linewidth=0))  # fmt: skip
            axes.text(column, row, _cell_text(cell), ha="center", va="center", color=shade.ink,
                      fontsize=size,
                      fontweight="bold" if cell.verdict == "PASS" else "normal", linespacing=1.15,
                      bbox={"pad": 1.2, "fc": shade.ground, "ec": "none"})  # fmt: skip
    for edge in range(len(columns) + 1):
        axes.axvline(edge - 0.5, color="white", linewidth=2)
    for edge in range(len(rows) + 1):
        of_group = edge in first or edge == len(rows)
        axes.axhline(
            edge - 0.5, color="black" if of_group else "white", linewidth=0.8 if of_group else 2
        )
    axes.set_xticks(
        range(len(columns)), [wrap(name, room - 0.05, TEXT) for name in columns], fontsize=TEXT
    )
    axes.set_yticks(range(len(rows)), [str(limit) for _, limit in rows], fontsize=TEXT)
    for text, offset in (("hypothesis", -56), ("in flight", -6)):
        axes.annotate(text, (0, 1), (offset, 4), textcoords="offset points", va="bottom", ha="right",
                      xycoords="axes fraction", fontsize=SMALL, color="#444444",
                      annotation_clip=False)  # fmt: skip
    for at, after in spans:
        axes.annotate(names[at], (0, (at + after - 1) / 2), (-56, 0), va="center", ha="right",
                      fontsize=TEXT,
                      xycoords=("axes fraction", "data"), textcoords="offset points",
                      annotation_clip=False)  # fmt: skip
    axes.set_xlim(-0.5, max(len(columns), 1) - 0.5)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(loads, labelpad=6)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    handles = [
        Patch(facecolor=VERDICTS[kind].ground, hatch=VERDICTS[kind].hatch, edgecolor="#888888",
              label=f"{VERDICTS[kind].symbol}  {VERDICTS[kind].meaning}")
        for kind in shown
    ]  # fmt: skip
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=SMALL)
    return figure


def _cell_text(cell: MatrixCell) -> str:
    shade = VERDICTS[cell.verdict]
    if cell.gain is None:
        return shade.symbol
    return f"{shade.symbol} " + gain_text(cell.gain, unknown="").replace(", ", "\n").replace(
        " ±", "\n±"
    )
