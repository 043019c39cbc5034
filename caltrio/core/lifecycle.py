"""Whether the executor takes work: the state machine of specification §9.2.

Without a reset of the whole device that the vendor has confirmed there is no way on from
``RECOVERING``: it ends in ``FAILED``, and a supervisor restarts the process (§9.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from ..errors import IllegalTransition


class LifecycleState(Enum):
    """What the executor is doing. It starts as ``CONFIGURING``."""

    READY = "ready"  # takes work
    DRAINING = "draining"  # takes none; what is on the device finishes
    RECOVERING = "recovering"  # the device is not trusted; grace for its jobs, then a reset
    CONFIGURING = "configuring"  # a new generation: the model is checked and loaded
    WARMING = "warming"  # golden prefill and decode run; nothing else does
    FAILED = "failed"  # over; restart the process
    CLOSED = "closed"  # over in good order


_L = LifecycleState

LIFECYCLE: Mapping[LifecycleState, frozenset[LifecycleState]] = MappingProxyType(
    {
        _L.READY: frozenset({_L.DRAINING, _L.FAILED}),
        _L.DRAINING: frozenset({_L.RECOVERING, _L.CLOSED, _L.FAILED}),
        _L.RECOVERING: frozenset({_L.CONFIGURING, _L.FAILED}),
        _L.CONFIGURING: frozenset({_L.WARMING, _L.FAILED}),
        _L.WARMING: frozenset({_L.READY, _L.FAILED}),
        _L.FAILED: frozenset(),
        _L.CLOSED: frozenset(),
    }
)


def check_lifecycle(old: LifecycleState, new: LifecycleState) -> None:
    """Raise :class:`IllegalTransition` unless ``new`` may follow ``old``."""
    if new not in LIFECYCLE[old]:
        raise IllegalTransition(f"the executor cannot go from {old.value} to {new.value}")
