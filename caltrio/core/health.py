"""What the executor thinks of its device: lifecycle, in-flight limit, back-off, closed features."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..codes import Action, Verdict
from ..config import ExecutorConfig
from ..errors import Unavailable
from ..events import Event, InflightLimited, LifecycleChanged
from ..manifest import TaskKind
from ..semantics import ResetScope
from .lifecycle import LifecycleState, check_lifecycle

if TYPE_CHECKING:
    from ..capabilities import Capabilities

EXIT_RESTART, EXIT_REPAIR = 75, 78  # EX_TEMPFAIL and EX_CONFIG of sysexits.h


class Health:
    """The state that admission and submission depend on. Only ``Core`` changes it.

    Attributes:
        lifecycle, why: the state of §9.2, and what led to it.
        exit_code: for the process, once ``FAILED``: 75 asks for a restart, 78 for a person.
        limit, limit_reason: jobs in flight, and why it is not what the configuration asks for.
        pause_until_ns: no submission before (back-off).
        disabled: features closed after a programming error, with the reason.
    """

    def __init__(
        self, config: ExecutorConfig, capabilities: Capabilities, emit: Callable[[Event], None]
    ) -> None:
        self._config, self._emit = config, emit
        self.lifecycle = LifecycleState.CONFIGURING
        self.why = "starting"
        self.exit_code = EXIT_RESTART
        self.can_reset = capabilities.reset_scope is ResetScope.DEVICE
        self.limit = config.max_inflight
        self.limit_reason: str | None = None
        if self.limit > capabilities.max_inflight:
            self.limit = capabilities.max_inflight
            self.limit_reason = (
                f"{config.max_inflight} jobs in flight were asked for, but {capabilities.note}"
            )
        self.pause_until_ns = 0
        self.disabled: dict[TaskKind, str] = {}
        self._strikes = 0

    @property
    def ready(self) -> bool:
        """Is traffic served?"""
        return self.lifecycle is LifecycleState.READY

    def go(self, state: LifecycleState, why: str, now_ns: int) -> None:
        """Take one legal step. Raises :class:`~caltrio.errors.IllegalTransition`."""
        check_lifecycle(self.lifecycle, state)
        old, self.lifecycle, self.why = self.lifecycle, state, why
        self._emit(LifecycleChanged(now_ns, old, state, why))

    def distrust(self, row: Verdict | None) -> None:
        """A reset helps where the device is at fault, not an artifact, a version or a configuration."""
        if row is not None and row.action in (Action.ROLL_BACK, Action.STOP, Action.CLOSE_FEATURE):
            self.can_reset = False
            self.exit_code = EXIT_REPAIR

    def fall_back(self, why: str, now_ns: int) -> None:
        """A fault with more than one job in flight: one at a time from here on (PR8)."""
        if self.limit > 1:
            self.limit, self.limit_reason = 1, f"fell back to one in flight: {why}"
            self._emit(InflightLimited(now_ns, 1, self.limit_reason))

    def strike(self, now_ns: int) -> bool:
        """A transient fault: pause for longer each time. Is the threshold reached?"""
        pause = min(self._config.backoff_ns << min(self._strikes, 40), self._config.backoff_most_ns)
        self._strikes += 1
        self.pause_until_ns = now_ns + pause
        return self._strikes >= self._config.backoff_threshold

    def new_generation(self) -> None:
        """What was transient of the old one is over with it."""
        self.pause_until_ns = self._strikes = 0

    def success(self) -> None:
        """A job completed: what was transient is over."""
        self._strikes = 0

    def unavailable(self) -> Unavailable:
        """The refusal of the moment, with a hint when to try again unless that would not help."""
        helps = self.exit_code == EXIT_RESTART and self.lifecycle is not LifecycleState.CLOSED
        return Unavailable(
            f"the executor is {self.lifecycle.value} ({self.why})",
            retry_after_ns=self._config.retry_after_ns if helps else -1,
        )
