"""The simulated card: virtual time on SimPy, the compiled twin, and planning on top of them.

The face of the package. Modules hold the rest, and are imported as a name is first used: planning needs
SciPy and compiled code, which the simulated device alone does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clock import SimClock, VirtualDeadlock, run_virtual
    from .device import SimDevice
    from .fast import FleetRun, Router, TwinRun, request_array, run_fleet, run_twin
    from .plan import Plan, make_plan
    from .run import simulate
    from .stats import Interval, decide, mean_interval, paired_change, replicate

_HOME = {
    "FleetRun": ".fast",
    "Interval": ".stats",
    "Plan": ".plan",
    "Router": ".fast",
    "SimClock": ".clock",
    "SimDevice": ".device",
    "TwinRun": ".fast",
    "VirtualDeadlock": ".clock",
    "decide": ".stats",
    "make_plan": ".plan",
    "mean_interval": ".stats",
    "paired_change": ".stats",
    "replicate": ".stats",
    "request_array": ".fast",
    "run_fleet": ".fast",
    "run_twin": ".fast",
    "run_virtual": ".clock",
    "simulate": ".run",
}

__all__ = [
    "FleetRun",
    "Interval",
    "Plan",
    "Router",
    "SimClock",
    "SimDevice",
    "TwinRun",
    "VirtualDeadlock",
    "decide",
    "make_plan",
    "mean_interval",
    "paired_change",
    "replicate",
    "request_array",
    "run_fleet",
    "run_twin",
    "run_virtual",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
