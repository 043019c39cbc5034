"""Which unknown moves the gain most, and which of them turns the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from attrs import frozen
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sim.figures import COLOURS

from .style import GATE, GROUND, SMALL, TEXT, WIDTH, draw, inches, new_figure, percent, wrap

_LABELS, _SETTINGS = 1.7, 1.15  # inches for the names on the left, and for a setting beside a bar
_SIDES = ((COLOURS[0], "low setting"), (COLOURS[1], "high setting"))


@frozen
class TornadoBar:
    """One unknown, set low and high with all else as assumed.

    Attributes:
        label: its name.
        low_setting, high_setting: in words, as "8 GB/s".
        low_gain, high_gain: the gain there, 0.1 is +10 %; NaN if undefined.
        flips: one of the two changes the verdict.
    """

    label: str
    low_setting: str
    low_gain: float
    high_setting: str
    high_gain: float
    flips: bool = False


def tornado(
    bars: Sequence[TornadoBar],
    base_gain: float,
    gate: float,
    path: Path,
    title: str = "What would change the verdict: one unknown at a time",
) -> None:
    """Bars from the base to the gain at each setting, widest on top; those that flip are hatched.

    Args:
        bars: in any order.
        base_gain: with everything as assumed, 0.1 is +10 %.
        gate: the least gain worth shipping.
        path: the file to write.
        title: of the figure.
    """
    draw(lambda: _draw(bars, base_gain, gate, title), path)


def _span(bar: TornadoBar, base: float) -> float:
    ends = [gain for gain in (bar.low_gain, bar.high_gain, base) if math.isfinite(gain)]
    return max(ends) - min(ends) if ends else 0.0


def _draw(bars: Sequence[TornadoBar], base: float, gate: float, title: str) -> Figure:
    ordered = sorted(bars, key=lambda bar: (-_span(bar, base), bar.label))
    start = base if math.isfinite(base) else gate
    texts = [
        [f"{wrap(setting, _SETTINGS, SMALL)}\n{percent(gain) if math.isfinite(gain) else 'undefined'}"
         for setting, gain in ((bar.low_setting, bar.low_gain), (bar.high_setting, bar.high_gain))]
        for bar in ordered
    ]  # fmt: skip
    names = [wrap(bar.label, _LABELS, TEXT) + ("\n▸ flips" if bar.flips else "") for bar in ordered]
    lines = max([2, *(text.count("\n") + 1 for text in [*names, *chain.from_iterable(texts)])])
    row = 0.16 * lines + 0.14
    figure = new_figure(title, 1.55 + row * max(len(ordered), 1))
    axes = figure.subplots()
    ends = [start, gate]
    for at, (bar, both) in enumerate(zip(ordered, texts, strict=True)):
        gains = [gain if math.isfinite(gain) else start for gain in (bar.low_gain, bar.high_gain)]
        ends += gains
        same_side = (gains[0] - start) * (gains[1] - start) > 0
        for side, gain in enumerate(gains):
            top = at - 0.3 if not same_side else at - 0.3 + 0.3 * side
            axes.barh(top, gain - start, 0.6 if not same_side else 0.3, left=start, align="edge",
                      color=_SIDES[side][0], hatch="///" if bar.flips else "", edgecolor="white",
                      linewidth=0.5)  # fmt: skip
        left = 0 if (gains[0], 0) < (gains[1], 1) else 1
        for side, gain in enumerate(gains):
            outward = -1 if side == left else 1
            edge = min(gain, start) if outward < 0 else max(gain, start)
            axes.annotate(both[side], (edge, at), (5 * outward, 0), textcoords="offset points",
                          va="center", ha="right" if outward < 0 else "left", fontsize=SMALL,
                          multialignment="right" if outward < 0 else "left",
                          bbox=GROUND)  # fmt: skip
    low, high = min(ends), max(ends)
    wide = WIDTH - 0.5 - max([0.6, *(inches(name, TEXT) for name in names)])
    margin = 0.15 + max([0.3, *(inches(text, SMALL) for both in texts for text in both)])
    scale = ((high - low) or 0.1) / max(wide - 2 * margin, 0.8)
    axes.set_xlim(low - margin * scale, high + margin * scale)
    axes.set_ylim(max(len(ordered), 1) - 0.45, -0.55)
    axes.axvline(gate, color=GATE, linestyle="--", linewidth=1.5, zorder=1.5)
    right = start >= gate
    axes.annotate(f"gate {percent(gate)}", (gate, 1), (2 if not right else -2, 3), color=GATE,
                  xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=SMALL,
                  va="bottom", ha="left" if not right else "right")  # fmt: skip
    if math.isfinite(base):
        axes.axvline(base, color="black", linewidth=1.2)
        axes.annotate(f"as assumed {percent(base)}", (base, 1), (2 if right else -2, 3), fontsize=SMALL,
                      xycoords=("data", "axes fraction"), textcoords="offset points", va="bottom",
                      ha="left" if right else "right")  # fmt: skip
    axes.set_yticks(range(len(names)), names, fontsize=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axes.set_xlabel("gain in aggregate tokens/s, %")
    handles = [Patch(facecolor=colour, edgecolor="white", label=label) for colour, label in _SIDES]
    if any(bar.flips for bar in bars):
        handles.append(
            Patch(facecolor="#999999", hatch="///", edgecolor="white", label="flips the verdict")
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure
