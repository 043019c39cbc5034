"""What the stages cost: :class:`TimingProfile`, read from TOML, and :class:`Costs` made from it.

Every number carries where it comes from (``assumed``, ``measured`` or ``cited``) and a note.
Durations are pure functions of the profile, the kind, the tokens and the past length; jitter is a
pure function of (seed, stage, request, step), so that no order of events can change a duration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from attrs import field, frozen

from .errors import InputError
from .manifest import Manifest, TaskKind
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
from .units import transfer_ns

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


def jitter_factor(
    distribution: Distribution, cv: float, seed: int, stage: int, request: int, step: int
) -> float:
    """The factor of one stage of one job: mean 1, coefficient of variation ``cv``."""
    key = mix64(mix64(mix64(seed ^ stage) ^ request) ^ step)
    first = ((mix64(key) >> 11) + 0.5) / (1 << 53)  # inside (0, 1): both logarithms are finite
    if distribution is Distribution.UNIFORM:
        return 1 + cv * math.sqrt(3) * (2 * first - 1)
    if distribution is Distribution.EXPONENTIAL:
        return -math.log(first)
    if distribution is Distribution.LOGNORMAL:
        second = (mix64(key ^ 1) >> 11) / (1 << 53)
        normal = math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)  # Box and Muller
        variance = math.log1p(cv * cv)
        return math.exp(math.sqrt(variance) * normal - variance / 2)
    return 1.0


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


class Costs:
    """The durations of one run: profile, contracts and seed, resolved to integer nanoseconds.

    Args:
        profile: the timing profile.
        manifest: the contracts, for the bytes that DMA moves.
        seed: of the run; mixed with the profile's own.
    """

    def __init__(self, profile: TimingProfile, manifest: Manifest, seed: int) -> None:
        self.profile = profile
        self._distribution = profile.jitter.distribution
        self._cv = profile.jitter.cv
        self._seed = mix64(mix64(seed) ^ profile.jitter.seed)
        self._jittered = frozenset(
            Stage[name.upper()]
            for name in profile.jitter.stages
            if profile.jitter.distribution is not Distribution.NONE and profile.jitter.cv > 0
        )
        h2d, d2h = profile.h2d, profile.d2h
        self._h2d = h2d.latency.value, h2d.bandwidth.value
        contracts = manifest.by_kind.items()
        self._token_bytes = {kind: contract.input_bytes(1) for kind, contract in contracts}
        self._d2h_ns = {
            kind: transfer_ns(contract.output_bytes, d2h.latency.value, d2h.bandwidth.value)
            for kind, contract in contracts
        }
        self._compute: Mapping[TaskKind, tuple[int, int, int]] = {
            kind: (c.base.value, c.per_token.value, c.per_pair.value)
            for kind, c in (
                (TaskKind.PREFILL_IDS, profile.compute.prefill),
                (TaskKind.PREFILL_EMBEDS, profile.compute.prefill),
                (TaskKind.DECODE, profile.compute.decode),
            )
        }
        self._fixed: Mapping[Stage, int] = {
            Stage.SUBMIT: profile.submit.time.value,
            Stage.INTERRUPT: profile.interrupt.time.value,
            Stage.POSTPROCESS: profile.postprocess.time.value,
            Stage.CLIENT: profile.client.time.value,
        }

    def _transfer_or_compute_ns(self, stage: Stage, job: JobShape) -> int:
        if stage is Stage.D2H:
            return self._d2h_ns[job.kind]
        tokens = job.token_count
        if stage is Stage.H2D:
            return transfer_ns(tokens * self._token_bytes[job.kind], *self._h2d)
        base, per_token, per_pair = self._compute[job.kind]
        pairs = tokens * job.past_len + tokens * (tokens + 1) // 2
        return base - (-(tokens * per_token + pairs * per_pair) // 1_000)  # ps, rounded up to ns

    def ns(self, stage: Stage, job: JobShape) -> int:
        """Nanoseconds that ``stage`` takes for ``job``, with its jitter."""
        duration = self._fixed.get(stage)
        if duration is None:
            duration = self._transfer_or_compute_ns(stage, job)
        if stage not in self._jittered:
            return duration
        factor = jitter_factor(
            self._distribution, self._cv, self._seed, stage, job.request_id, job.step
        )
        return round(duration * factor)
