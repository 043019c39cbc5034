"""Timelines of a run. SVG, legible in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from caltrio.observe.records import Columns
from caltrio.semantics import Dma, EngineSemantics
from caltrio.units import NS_PER_MS, NS_PER_US

if TYPE_CHECKING:
    pass

# Okabe and Ito's palette, which colour-blind readers tell apart; hatches and labels carry it in grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "caltrio",  # the same figure is the same file
    "svg.fonttype": "path",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.5,
}


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})


_TIMELINE_COLUMNS = [
    "request_id", "sequence_id", "kind", "state", "engine", "infer_ns", "submitted_ns",
    "h2d_start_ns", "h2d_end_ns", "compute_end_ns", "die_start_ns", "die_end_ns",
    "d2h_start_ns", "d2h_end_ns", "waited_ns", "ended_ns",
]  # fmt: skip
Interval = tuple[str, int, int, int, int]  # row, start_ns, end_ns, request, sequence


def timeline(runs: Mapping[str, Columns], title: str, semantics: EngineSemantics, path: Path) -> None:
    """Gantt charts of the middle of each run: a few jobs, and one hand-over magnified.

    Args:
        runs: the jobs table of each run, by its heading.
        title: of the figure.
        semantics: says which stages share a unit.
        path: the file to write; its ending says in which format.
    """
    tables = {heading: jobs.select(_TIMELINE_COLUMNS) for heading, jobs in runs.items()}
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 0.7 + 2.4 * len(runs)), layout="constrained")
        figure.suptitle(title, fontsize=10)
        grid = figure.subplots(len(runs), 2, squeeze=False, width_ratios=(3, 2))
        for (heading, jobs), (wide, close) in zip(tables.items(), grid, strict=True):
            window = _steady_window(jobs)
            if window is None:
                wide.set_title(f"{heading}: no job completed")
                continue
            start, end, handover, around = window
            intervals = _intervals(jobs, start, end, semantics)
            rows = list(dict.fromkeys(interval[0] for interval in intervals))
            _gantt(wide, intervals, rows, start, end, NS_PER_MS, labels=True)
            wide.set(title=f"{heading}: steady state", xlabel="time in the run's middle, ms")
            _gantt(close, intervals, rows, handover - around, handover + around, NS_PER_US,
                   labels=False)  # fmt: skip
            close.set(title="one hand-over, magnified", xlabel="µs")
        _save(figure, path)


def _steady_window(jobs: pa.Table) -> tuple[int, int, int, int] | None:
    """(start, end, instant of a hand-over, ns around it) near the middle of a run."""
    done = jobs.filter(pc.is_valid(jobs.column("compute_end_ns"))).sort_by("compute_end_ns")
    if not done.num_rows:
        return None
    ends = np.asarray(done.column("compute_end_ns")).astype(np.int64)
    decode = np.asarray(pc.equal(done.column("kind").cast(pa.string()), "decode"))
    # Eight steps of decode on end, the nearest to the middle; prefills are too long to show.
    run_length = min(8, len(ends))
    clean = [
        index for index in range(len(ends) - run_length + 1) if decode[index : index + run_length].all()
    ]
    middle = len(ends) // 2
    first = min(clean, key=lambda index: abs(index - middle)) if clean else 0
    last = min(first + run_length - 1, len(ends) - 1)
    begin = int(ends[first]) if last > first else int(done.column("infer_ns")[0].as_py())
    handover = int(ends[(first + last + 1) // 2])
    step = max((int(ends[last]) - begin) // max(last - first, 1), 1)
    return begin, int(ends[last]) + step // 10, handover, min(400 * NS_PER_US, step)


def _intervals(
    jobs: pa.Table, start_ns: int, end_ns: int, semantics: EngineSemantics
) -> list[Interval]:
    near = jobs.filter(
        pc.and_(
            pc.greater_equal(jobs.column("ended_ns"), start_ns),
            pc.less_equal(jobs.column("infer_ns"), end_ns),
        )
    )
    half = semantics.dma is Dma.HALF_DUPLEX
    dies = len(semantics.compute_stages)
    shared = len(semantics.compute_sharing) > 1
    rows: dict[str, list[Interval]] = {"submitter": []}
    rows |= {"DMA": []} if half else {"H2D": []}
    for job in near.to_pylist():
        who = (job["request_id"], job["sequence_id"])

        def put(row: str, begin: int | None, until: int | None, who: tuple[int, int] = who) -> None:
            if begin is not None and until is not None:
                rows.setdefault(row, []).append((row, begin, until, *who))

        put("submitter", job["infer_ns"], job["submitted_ns"])
        put("DMA" if half else "H2D", job["h2d_start_ns"], job["h2d_end_ns"])
        for die, (begin, until) in enumerate(
            zip(job["die_start_ns"] or [], job["die_end_ns"] or [], strict=True)
        ):
            name = "compute" if dies == 1 else f"die {die}"
            put(f"{name}, engine {job['engine']}" if shared else name, begin, until)
        put("DMA" if half else "D2H", job["d2h_start_ns"], job["d2h_end_ns"])
        if job["state"] == "succeeded":
            put("completer", job["waited_ns"], job["ended_ns"])
    order = sorted(rows, key=lambda row: (_ROW_ORDER.index(row.split()[0].rstrip(",")), row))
    return [interval for row in order for interval in rows[row]]


_ROW_ORDER = ["submitter", "H2D", "DMA", "compute", "die", "D2H", "completer"]


def _gantt(
    axes: Axes,
    intervals: Sequence[Interval],
    rows: list[str],
    start_ns: int,
    end_ns: int,
    unit_ns: int,
    *,
    labels: bool,
) -> None:
    span = end_ns - start_ns
    for row, begin, until, request, sequence in intervals:
        if until < start_ns or begin > end_ns:
            continue
        left, right = max(begin, start_ns), min(until, end_ns)
        at = len(rows) - 1 - rows.index(row)
        axes.broken_barh(
            [((left - start_ns) / unit_ns, max(right - left, span // 1000) / unit_ns)],
            (at - 0.4, 0.8),
            facecolors=COLOURS[sequence % len(COLOURS)],
            hatch=HATCHES[sequence % len(HATCHES)],
            edgecolor="white",
            linewidth=0.4,
        )
        if labels and right - left > span / 20:
            axes.text((left + right - 2 * start_ns) / 2 / unit_ns, at, f"r{request}", ha="center",
                      va="center", fontsize=7,
                      bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none"})  # fmt: skip
    axes.set_yticks(range(len(rows)), reversed(rows))
    axes.set_xlim(0, span / unit_ns)
    axes.set_ylim(-0.6, len(rows) - 0.4)
