"""Figures of a decision report, drawn from plain data. SVG, legible in grey and on a narrow page."""

from .gains import GainRow, gain_bars
from .loads import Curve, LoadPoint, load_latency
from .maps import GainMap, break_even
from .memory import KvSeries, kv_occupancy
from .unknowns import TornadoBar, tornado
from .verdicts import VERDICTS, MatrixCell, decision_matrix

__all__ = [
    "VERDICTS",
    "Curve",
    "GainMap",
    "GainRow",
    "KvSeries",
    "LoadPoint",
    "MatrixCell",
    "TornadoBar",
    "break_even",
    "decision_matrix",
    "gain_bars",
    "kv_occupancy",
    "load_latency",
    "tornado",
]
