"""What ``caltrio plan`` compares, as the ``[plan]`` table of a scenario states it."""

from __future__ import annotations

import math
import re
from typing import Any

from attrs import field, frozen

from .semantics import PRESETS, Preset
from .tomlfile import Ns, one_of

SATURATED = "saturated"


def _a_time(_instance: object, attribute: Any, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{attribute.metadata['toml']} is {value}; give a longer time")


@frozen
class PlanSpec:
    """What a plan compares.

    Args:
        hypotheses: names of presets, or of ``custom``.
        max_inflight: in-flight limits; those that a hypothesis has no engine slots for are left out.
        loads: each a share of the rate that a card can keep up with, one job at a time; or
            ``"saturated"``: a closed loop that never lets it rest, which is where throughput shows.
        replications: runs of each cell, with other arrivals and lengths each.
        ttft_p99_ns, tpot_p99_ns: the SLO that load-latency curves are drawn against.
        custom: further hypotheses by name: each a :class:`~caltrio.semantics.Preset`, in a file
            ``{preset = "...", field = ...}``.
    """

    hypotheses: tuple[str, ...] = tuple(PRESETS)
    max_inflight: tuple[int, ...] = (1, 2)
    loads: tuple[Any, ...] = (0.3, 0.5, 0.7, 0.9, SATURATED)
    replications: int = 10
    ttft_p99_ns: Ns | None = field(default=None, metadata={"toml": "ttft_p99"}, validator=_a_time)
    tpot_p99_ns: Ns | None = field(default=None, metadata={"toml": "tpot_p99"}, validator=_a_time)
    custom: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if not self.hypotheses or not self.max_inflight:
            raise ValueError("hypotheses and max_inflight each need at least one entry")
        for what, values in (("hypotheses", self.hypotheses), ("max_inflight", self.max_inflight),
                             ("loads", self.loads)):  # fmt: skip
            if len(set(values)) < len(values):
                raise ValueError(f"{what} names something twice: {list(values)}")
        for limit in self.max_inflight:
            if not 1 <= limit <= 4096:
                raise ValueError(f"max_inflight is {limit}; give 1 to 4096")
        for name in self.custom:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", name):  # it goes into file names
                raise ValueError(
                    f"custom.{name[:60]!r}: a name has letters, digits, '.', '_' and '-', at most 40"
                )
        if 1 not in self.max_inflight:
            raise ValueError("max_inflight must hold 1: the gates compare against it")
        if not 2 <= self.replications <= 10_000:
            raise ValueError(f"replications is {self.replications}; an interval needs 2 to 10000")
        if SATURATED not in self.loads:
            raise ValueError('loads must hold "saturated": throughput is judged there')
        for load in self.loads:
            if load == SATURATED:
                continue
            if isinstance(load, bool) or not isinstance(load, int | float) or not 0 < load <= 2:
                raise ValueError(f'loads has {load!r}; give shares above 0 to 2, or "saturated"')
            if not math.isfinite(load):
                raise ValueError(f"loads has {load!r}; give finite shares")

    def hypothesis(self, name: str) -> Preset:
        """The hypothesis of that name. Raises ``ValueError`` naming the known ones."""
        known = {**PRESETS, **self.custom}
        found: Preset = known[one_of(name, list(known), "semantics preset")]
        return found
