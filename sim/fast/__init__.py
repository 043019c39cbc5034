"""The compiled twin of the executor and the simulated card: the same figures, much sooner."""

from caltrio import costs, semantics, timer, timing, units
from caltrio.compiled import keep_fresh

from . import events, fleet, kernel, machine, queues
from .fleet import FleetRun, Router, run_fleet
from .twin import TwinRun, request_array, run_twin

__all__ = ["FleetRun", "Router", "TwinRun", "request_array", "run_fleet", "run_twin"]

keep_fresh(
    kernel.drive,
    [events, fleet, kernel, machine, queues, costs, semantics, timer, timing, units],
)
