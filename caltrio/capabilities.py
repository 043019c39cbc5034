"""What the device is known to do, with the evidence for it (specification §14, ``Capabilities``).

More than one job in flight, and a reset, are off until a capability file names the evidence that a
vendor's delivery must contain: runner output, timeline, fault injection, golden after recovery.
Simulation may assume them; hardware may not.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from attrs import field, fields, frozen

from .errors import InputError
from .semantics import EngineSemantics, ResetScope
from .tomlfile import converter, read_toml, structure


class Source(StrEnum):
    """How a capability is known."""

    NONE = "none"  # it is not
    ASSUMED = "assumed"  # by a simulation
    EVIDENCE = "evidence"  # shown on the card


@frozen
class Evidence:
    """The four files that show a capability (§14); each must exist."""

    runner_output: str
    timeline: str
    fault_injection: str
    golden_after_recovery: str


@frozen
class _Parallel:
    max_inflight: int = field()
    evidence: Evidence

    @max_inflight.validator
    def _some(self, _attribute: object, value: int) -> None:
        if not 2 <= value <= 4096:
            raise ValueError(f"max_inflight is {value}; give 2 to 4096")


@frozen
class _Reset:
    scope: ResetScope = field(converter=ResetScope)
    evidence: Evidence


@frozen
class _File:
    schema: int = field()
    calrt_version: str
    parallel: _Parallel | None = None
    reset: _Reset | None = None

    @schema.validator
    def _known_schema(self, _attribute: object, schema: int) -> None:
        if schema != 1:
            raise ValueError(f"schema is {schema}; this version reads 1")


@frozen
class Capabilities:
    """What may be used of the device.

    Args:
        max_inflight: jobs between ``infer()`` and the return of ``Wait()``; 1 without evidence.
        reset_scope: what a reset is known to reset.
        source: how that is known.
        note: in words, for messages.
    """

    max_inflight: int = 1
    reset_scope: ResetScope = ResetScope.NONE
    source: Source = Source.NONE
    note: str = "no capability file names evidence for more"

    @classmethod
    def assumed(cls, semantics: EngineSemantics) -> Capabilities:
        """What a simulation of ``semantics`` assumes."""
        return cls(4096, semantics.reset_scope, Source.ASSUMED, "assumed by the simulation")


def load_capabilities(path: Path) -> Capabilities:
    """Capabilities from TOML. Raises :class:`InputError` if a file of evidence is not there."""
    where = str(path)
    read = structure(read_toml(path), _File, where, converter())
    for name, part in (("parallel", read.parallel), ("reset", read.reset)):
        if part is None:
            continue
        for attribute in fields(Evidence):
            file = str(getattr(part.evidence, attribute.name))
            if not file or not (path.parent / file).is_file():
                raise InputError(
                    where,
                    f"{name}.evidence.{attribute.name}",
                    f"{file!r} is not a file beside {path.name}",
                    "a capability is off until all four kinds of evidence are there",
                )
    parts = [name for name, part in (("parallel", read.parallel), ("reset", read.reset)) if part]
    return Capabilities(
        read.parallel.max_inflight if read.parallel else 1,
        read.reset.scope if read.reset else ResetScope.NONE,
        Source.EVIDENCE if parts else Source.NONE,
        f"evidence in {path.name} for: {', '.join(parts) or 'nothing'}",
    )
