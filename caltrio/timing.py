"""What the stages cost: :class:`TimingProfile`, read from TOML. See :mod:`caltrio.costs`.

Every number carries where it comes from (``assumed``, ``measured`` or ``cited``) and a note.
"""

from __future__ import annotations

import math
from enum import IntEnum, StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from attrs import field, frozen

from .errors import InputError
from .manifest import TaskKind
from .tomlfile import (
    Bandwidth,
    Ns,
    Ps,
    converter,
    one_of,
    parse_toml,
    read_text,
    structure,
)

V = TypeVar("V", Ns, Ps, Bandwidth)


class Source(StrEnum):
    """How a number came to be known."""

    ASSUMED = "assumed"
    MEASURED = "measured"
    CITED = "cited"


@frozen
class Figure(Generic[V]):
    """One number of a profile, with its source and a note that says why it is this number."""

    value: V
    source: Source
    note: str = field()

    @note.validator
    def _says_something(self, _attribute: object, note: str) -> None:
        if not note.strip():
            raise ValueError("the note is empty; say where the number comes from")


@frozen
class Fixed:
    """Host or device work that takes the same time for each job."""

    time: Figure[Ns]


@frozen
class Transfer:
    """One direction of DMA: latency + bytes / bandwidth, rounded up to a nanosecond."""

    latency: Figure[Ns]
    bandwidth: Figure[Bandwidth]


@frozen
class Compute:
    """Compute of one kind of job: ``base + tokens * per_token + pairs * per_pair``.

    ``pairs`` are the (query, key) pairs of causal attention:
    ``tokens * past + tokens * (tokens + 1) / 2``.
    """

    base: Figure[Ns]
    per_token: Figure[Ps]
    per_pair: Figure[Ps]


@frozen
class ComputeByKind:
    """Compute of prefill and of decode."""

    prefill: Compute
    decode: Compute


class Stage(IntEnum):
    """The stages that jitter can be applied to; the number selects the random stream."""

    SUBMIT = 0
    H2D = 1
    COMPUTE = 2
    D2H = 3
    INTERRUPT = 4
    POSTPROCESS = 5
    CLIENT = 6


class Distribution(StrEnum):
    """Shape of the jitter; the mean of the factor is 1 for each."""

    NONE = "none"
    UNIFORM = "uniform"
    EXPONENTIAL = "exponential"
    LOGNORMAL = "lognormal"


@frozen
class Jitter:
    """A random factor of mean 1 on the durations of the stages named.

    Args:
        distribution: its shape.
        cv: coefficient of variation (standard deviation over mean); 1 for exponential, 0 for none.
        seed: mixed with the seed of the run.
        stages: names of :class:`Stage`, in lower case.
    """

    distribution: Distribution = field(default=Distribution.NONE, converter=Distribution)
    cv: float = field(default=0.0)
    seed: int = field(default=0)
    stages: tuple[str, ...] = field(default=("compute",))

    @cv.validator
    def _sensible(self, _attribute: object, cv: float) -> None:
        if not 0 <= cv <= 10:
            raise ValueError(f"cv is {cv}; give 0 to 10")
        if self.distribution is Distribution.UNIFORM and cv > 1 / math.sqrt(3):
            raise ValueError(f"cv is {cv}; a uniform factor that is never negative has at most 0.577")
        if self.distribution is Distribution.EXPONENTIAL and cv != 1:
            raise ValueError(f"cv is {cv}; that of the exponential distribution is 1")

    @seed.validator
    def _in_64_bits(self, _attribute: object, seed: int) -> None:
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed is {seed}; give 0 to 2**64 - 1")

    @stages.validator
    def _known(self, _attribute: object, stages: tuple[str, ...]) -> None:
        for stage in stages:
            one_of(stage, [known.name.lower() for known in Stage], "stage")


@frozen
class TimingProfile:
    """The cost of every stage of a job, each number with its source.

    ``schema`` is 1. See ``sim/data`` and ``docs/assumptions.md`` for the profile that ships.
    """

    schema: int = field()
    name: str
    summary: str
    submit: Fixed
    h2d: Transfer
    compute: ComputeByKind
    d2h: Transfer
    interrupt: Fixed
    postprocess: Fixed
    client: Fixed
    jitter: Jitter = Jitter()

    @schema.validator
    def _known_schema(self, _attribute: object, schema: int) -> None:
        if schema != 1:
            raise ValueError(f"schema is {schema}; this version reads 1")

    def figures(self) -> dict[str, Figure[Ns] | Figure[Ps] | Figure[Bandwidth]]:
        """Every number of the profile by its dotted key, for reports."""
        found: dict[str, Figure[Ns] | Figure[Ps] | Figure[Bandwidth]] = {
            "submit.time": self.submit.time,
            "h2d.latency": self.h2d.latency,
            "h2d.bandwidth": self.h2d.bandwidth,
        }
        for kind, compute in (("prefill", self.compute.prefill), ("decode", self.compute.decode)):
            found[f"compute.{kind}.base"] = compute.base
            found[f"compute.{kind}.per_token"] = compute.per_token
            found[f"compute.{kind}.per_pair"] = compute.per_pair
        return found | {
            "d2h.latency": self.d2h.latency,
            "d2h.bandwidth": self.d2h.bandwidth,
            "interrupt.time": self.interrupt.time,
            "postprocess.time": self.postprocess.time,
            "client.time": self.client.time,
        }


def parse_timing(text: str, where: str) -> TimingProfile:
    """A profile from TOML text. Raises :class:`InputError` naming ``where`` and the key."""
    return structure(parse_toml(text, where), TimingProfile, where, converter())


def builtin_profiles() -> dict[str, str]:
    """Name and TOML text of the profiles that ship with caltrio."""
    folder = files("caltrio") / "profiles"
    return {
        entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def load_timing(name_or_path: str, base: Path | None = None) -> TimingProfile:
    """A profile by the name of one that ships, or from a ``.toml`` file.

    A relative path is taken from ``base``, the folder of the scenario that names it.
    """
    shipped = builtin_profiles()
    if name_or_path in shipped:
        return parse_timing(shipped[name_or_path], f"timing profile {name_or_path!r}")
    path = (base or Path()) / name_or_path
    if not name_or_path.endswith(".toml") and not path.exists():
        raise InputError(
            f"timing profile {name_or_path!r}",
            "",
            "is neither a .toml file nor one that ships",
            f"shipped: {', '.join(shipped)}",
        )
    return parse_timing(read_text(path), str(path))


_MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection that scatters 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class JobShape(Protocol):
    """What the duration of a job depends on; ``step`` counts the jobs of its request from 0.

    ``job_id`` orders ties; no duration depends on it.
    """

    job_id: int

    kind: TaskKind
    token_count: int
    past_len: int
    request_id: int
    step: int
