"""The compiled twin of the executor and the simulated card: the same figures, much sooner."""

from .fleet import FleetRun, Router, run_fleet
from .twin import TwinRun, request_array, run_twin

__all__ = ["FleetRun", "Router", "TwinRun", "request_array", "run_fleet", "run_twin"]
