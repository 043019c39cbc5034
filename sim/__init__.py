"""The simulated card: virtual time on SimPy, the timing model, and planning on top of it."""

from .clock import SimClock, VirtualDeadlock, run_virtual
from .device import SimDevice
from .plan import Plan, make_plan
from .run import simulate

__all__ = [
    "Plan",
    "SimClock",
    "SimDevice",
    "VirtualDeadlock",
    "make_plan",
    "run_virtual",
    "simulate",
]
