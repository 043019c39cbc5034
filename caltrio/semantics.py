"""The hypotheses: what the vendor's ping/pong engines may turn out to do (specification §14).

Each field of :class:`EngineSemantics` is one open question. :data:`PRESETS` names the readings
that a decision review compares; a scenario may state any other combination.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from fractions import Fraction
from types import MappingProxyType

from attrs import evolve, field, frozen

PERMILLE = 1_000


class Dma(StrEnum):
    """One DMA channel for both directions, or one for each."""

    HALF_DUPLEX = "half_duplex"
    FULL_DUPLEX = "full_duplex"


class DmaOrder(StrEnum):
    """Does a transfer queue when it is ready, or take its place in the queue at submit?"""

    READY = "ready"
    ISSUE = "issue"


class SlotRelease(StrEnum):
    """The end of which stage lets the engine slot take the next job."""

    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"
    WAIT = "wait"


class CompletionSignal(StrEnum):
    """D2H starts once its own job has computed, or only once every queued compute has drained.

    A compute counts as queued from the start of its job's H2D.
    """

    PER_JOB = "per_job"
    COMPUTE_IDLE = "compute_idle"


class CompletionOrder(StrEnum):
    """May a later job's ``Wait()`` return first?"""

    IN_ORDER = "in_order"
    ANY = "any"


class SubmitWhenFull(StrEnum):
    """``infer()`` with no free engine slot blocks, or returns code 17."""

    BLOCK = "block"
    BUSY = "busy"


class KvAfterFailedWait(StrEnum):
    """The KV after a submit that succeeded and a ``Wait()`` that failed (§14)."""

    UNCHANGED = "unchanged"
    APPLIED = "applied"
    UNKNOWN = "unknown"


class ResetScope(StrEnum):
    """What a reset really resets (§14). Only ``device`` is enough to build a new generation on."""

    NONE = "none"
    JOB = "job"
    ENGINE = "engine"
    DEVICE = "device"


def _permille(value: float) -> int:
    return round(Fraction(repr(value)) * PERMILLE)


def _is_permille(value: float) -> bool:
    return Fraction(repr(value)) * PERMILLE == _permille(value)


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


@frozen
class EngineSemantics:
    """One reading of the vendor's semantics.

    Args:
        engines: engine slots (1 ping, 2 ping and pong, more for a what-if).
        overlap: ``False``: a job holds the whole device from H2D to D2H.
        dma, dma_order: the DMA channels and when a transfer takes its place in their queue.
        compute_stages: fractions of a job's compute that the dies do in turn, as a pipeline;
            ``(1.0,)`` is one compute unit. Multiples of 0.001 that sum to 1.
        compute_sharing: retained speed of each of k concurrent jobs on one compute unit, one entry
            for each k from 1. ``(1.0,)`` is exclusive use; ``(1.0, 0.5)`` is zero-sum, ``(1.0, 1.0)``
            independent. Multiples of 0.001. More jobs than entries queue.
        slot_release: when the engine slot takes the next job.
        completion_signal, completion_order: when D2H may start; the order of ``Wait()``.
        submit_when_full: what ``infer()`` does with no free slot.
        kv_after_failed_wait: what a failed job left in the KV; the executor never relies on it.
        reset_scope: what a reset resets; ``none`` until the vendor confirms one.
    """

    engines: int = field(default=2)
    overlap: bool = True
    dma: Dma = field(default=Dma.FULL_DUPLEX, converter=Dma)
    dma_order: DmaOrder = field(default=DmaOrder.READY, converter=DmaOrder)
    compute_stages: tuple[float, ...] = field(default=(1.0,), converter=_floats)
    compute_sharing: tuple[float, ...] = field(default=(1.0,), converter=_floats)
    slot_release: SlotRelease = field(default=SlotRelease.WAIT, converter=SlotRelease)
    completion_signal: CompletionSignal = field(
        default=CompletionSignal.PER_JOB, converter=CompletionSignal
    )
    completion_order: CompletionOrder = field(
        default=CompletionOrder.IN_ORDER, converter=CompletionOrder
    )
    submit_when_full: SubmitWhenFull = field(default=SubmitWhenFull.BUSY, converter=SubmitWhenFull)
    kv_after_failed_wait: KvAfterFailedWait = field(
        default=KvAfterFailedWait.UNKNOWN, converter=KvAfterFailedWait
    )
    reset_scope: ResetScope = field(default=ResetScope.NONE, converter=ResetScope)

    @engines.validator
    def _some_engines(self, _attribute: object, value: int) -> None:
        if not 1 <= value <= 64:
            raise ValueError(f"engines is {value}; give 1 to 64")

    @compute_stages.validator
    def _whole(self, _attribute: object, value: tuple[float, ...]) -> None:
        if not value or not all(0 < part <= 1 and _is_permille(part) for part in value):
            raise ValueError(
                f"compute_stages is {list(value)}; give fractions above 0 in steps of 0.001"
            )
        if sum(map(_permille, value)) != PERMILLE:
            raise ValueError(f"compute_stages is {list(value)}; its fractions must sum to 1")

    @compute_sharing.validator
    def _retained(self, _attribute: object, value: tuple[float, ...]) -> None:
        if not value or value[0] != 1.0:
            raise ValueError(
                f"compute_sharing is {list(value)}; its first entry, one job alone, must be 1.0"
            )
        if not all(0 < speed <= 1 and _is_permille(speed) for speed in value):
            raise ValueError(
                f"compute_sharing is {list(value)}; give speeds above 0 to 1 in steps of 0.001"
            )

    @property
    def stage_permille(self) -> tuple[int, ...]:
        """``compute_stages`` in integer thousandths."""
        return tuple(map(_permille, self.compute_stages))

    @property
    def sharing_permille(self) -> tuple[int, ...]:
        """``compute_sharing`` in integer thousandths."""
        return tuple(map(_permille, self.compute_sharing))

    def check_in_flight(self, max_inflight: int) -> None:
        """Raise ``ValueError`` if this many jobs in flight can only end in code 17."""
        if self.submit_when_full is SubmitWhenFull.BUSY and max_inflight > self.engines:
            raise ValueError(
                f"{max_inflight} jobs in flight is above the {self.engines} engine slots, and with "
                f"submit_when_full = 'busy' every further infer() returns code 17; "
                f"use at most {self.engines}, or semantics with more engines or 'block'"
            )


@frozen
class Preset:
    """A named hypothesis: its fields, and what it means in one sentence."""

    name: str
    meaning: str
    semantics: EngineSemantics


_FULL = EngineSemantics()

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset(
                "serial",
                "A job holds the whole device from H2D to D2H; "
                "a second one in flight hides host work only.",
                evolve(_FULL, overlap=False),
            ),
            Preset(
                "half-duplex",
                "One DMA channel serves both directions; transfers overlap compute.",
                evolve(_FULL, dma=Dma.HALF_DUPLEX),
            ),
            Preset(
                "full-duplex",
                "H2D, compute and D2H each have their own unit; one job computes at a time.",
                _FULL,
            ),
            Preset(
                "die-pipelined",
                "As full-duplex, and the two dies are a pipeline: each serves one job at a time.",
                evolve(_FULL, compute_stages=(0.5, 0.5)),
            ),
            Preset(
                "shared-compute",
                "As full-duplex, and both engines compute at once, each keeping 0.55 of its speed.",
                evolve(_FULL, compute_sharing=(1.0, 0.55)),
            ),
            Preset(
                "coalesced",
                "As full-duplex, but D2H starts only once all queued computes have drained.",
                evolve(_FULL, completion_signal=CompletionSignal.COMPUTE_IDLE),
            ),
        )
    }
)
