"""Whether the executor takes work: the states of specification §9.2 that exist so far.

Without a reset that the vendor has confirmed there is no way from ``RECOVERING`` back to ``READY``:
it ends in ``FAILED``, and a supervisor restarts the process (§9.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from ..errors import IllegalTransition


class LifecycleState(Enum):
    """What the executor is doing."""

    READY = "ready"  # takes work
    DRAINING = "draining"  # takes none; what is on the device finishes
    RECOVERING = "recovering"  # the device is not trusted; its jobs have a grace to return
    FAILED = "failed"  # over; restart the process
    CLOSED = "closed"  # over in good order


_L = LifecycleState

LIFECYCLE: Mapping[LifecycleState, frozenset[LifecycleState]] = MappingProxyType(
    {
        _L.READY: frozenset({_L.DRAINING, _L.FAILED}),
        _L.DRAINING: frozenset({_L.RECOVERING, _L.CLOSED, _L.FAILED}),
        _L.RECOVERING: frozenset({_L.FAILED}),
        _L.FAILED: frozenset(),
        _L.CLOSED: frozenset(),
    }
)


def check_lifecycle(old: LifecycleState, new: LifecycleState) -> None:
    """Raise :class:`IllegalTransition` unless ``new`` may follow ``old``."""
    if new not in LIFECYCLE[old]:
        raise IllegalTransition(f"the executor cannot go from {old.value} to {new.value}")
