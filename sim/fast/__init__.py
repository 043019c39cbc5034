"""The compiled twin of the executor and the simulated card: the same figures, much sooner."""

from .twin import TwinRun, request_array, run_twin

__all__ = ["TwinRun", "request_array", "run_twin"]
