"""A workload as a scenario states it: which requests arrive when, and how long they are."""

from __future__ import annotations

import math
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, field, frozen
from attrs.validators import optional

from ..errors import InputError
from ..tomlfile import Ns, one_of
from ..units import NS_PER_S
from .requests import Request, stream
from .traces import FORMATS, MOST_NS, MOST_TOKENS, read_trace

_MOST_REQUESTS = 100_000_000
_CV = 0.001, 1_000.0  # beyond, the numbers drawn overflow


class ArrivalKind(StrEnum):
    """How requests arrive."""

    TRACE = "trace"  # at the times of the trace
    POISSON = "poisson"
    GAMMA = "gamma"  # burstier (cv > 1) or smoother (cv < 1) than Poisson
    CONSTANT = "constant"
    CLOSED = "closed"  # N clients, each sends its next request when its last one has ended


class Sampling(StrEnum):
    """Who picks the next token from the logits."""

    HOST = "host"
    DEVICE = "device"  # a what-if (§10.1: C3): see docs/assumptions.md


class LengthKind(StrEnum):
    """How long requests are."""

    TRACE = "trace"  # in the trace's order with its arrivals, else drawn from its rows
    FIXED = "fixed"
    LOGNORMAL = "lognormal"


def _positive(_instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and not (0 < value < math.inf):
        raise ValueError(f"{attribute.name} is {value}; give a number above 0")


def _drawable(_instance: Any, attribute: Any, value: float) -> None:
    least, most = _CV
    if not least <= value <= most:
        raise ValueError(f"{attribute.name} is {value}; give {least} to {most:.0f}")


def _tokens(least: int) -> Any:
    def check(_instance: Any, attribute: Any, value: int) -> None:
        if not least <= value <= MOST_TOKENS:
            raise ValueError(f"{attribute.name} is {value}; give {least} to {MOST_TOKENS}")

    return check


@frozen
class Arrivals:
    """The arrival process.

    Args:
        kind: see :class:`ArrivalKind`.
        rate: requests per second; for ``trace`` it rescales the trace to this mean rate.
        scale: for ``trace``: 2.0 makes it arrive twice as fast.
        cv: coefficient of variation of ``gamma`` interarrival times.
        clients: for ``closed``.
    """

    kind: ArrivalKind = field(default=ArrivalKind.CLOSED, converter=ArrivalKind)
    rate: float | None = field(default=None, validator=_positive)
    scale: float = field(default=1.0, validator=_positive)
    cv: float = field(default=1.0, validator=_drawable)
    clients: int = field(default=1, validator=_positive)

    def __attrs_post_init__(self) -> None:
        synthetic = (ArrivalKind.POISSON, ArrivalKind.GAMMA, ArrivalKind.CONSTANT)
        if self.kind in synthetic and self.rate is None:
            raise ValueError(f"{self.kind.value} arrivals need a rate in requests per second")
        if self.kind is not ArrivalKind.TRACE and self.scale != 1.0:
            raise ValueError(f"scale is for trace arrivals; these are {self.kind.value}, set rate")
        if self.kind is ArrivalKind.CLOSED and self.rate is not None:
            raise ValueError("closed arrivals have no rate: each client waits for its answer")
        if self.kind is ArrivalKind.TRACE and self.rate is not None and self.scale != 1.0:
            raise ValueError("give rate or scale, not both")


@frozen
class Lengths:
    """Prompt and output lengths, in tokens; means where they vary, with their cv."""

    kind: LengthKind = field(default=LengthKind.FIXED, converter=LengthKind)
    prompt_tokens: int = field(default=1024, validator=_tokens(1))
    output_tokens: int = field(default=128, validator=_tokens(0))
    prompt_cv: float = field(default=1.0, validator=_drawable)
    output_cv: float = field(default=1.0, validator=_drawable)


@frozen
class Workload:
    """What arrives.

    Args:
        trace: a trace file; needed where arrivals or lengths say ``trace``.
        format: of the trace; one of :data:`~caltrio.workload.traces.FORMATS`.
        arrivals, lengths: see there.
        requests: how many; ``None`` is the whole trace, or 100.
        max_tokens: cut synthetic lognormal lengths here, for prompt and output each.
        prefill_chunk_tokens: clients run a prompt in jobs of at most so many tokens; ``None``: in one.
        sampling: on the host, or as a what-if on the device.
        client_time_ns: host time per token in place of the timing profile's, ns.
    """

    trace: str | None = None
    format: str = field(default="auto")
    arrivals: Arrivals = field(factory=Arrivals)
    lengths: Lengths = field(factory=Lengths)
    requests: int | None = field(default=None, validator=_positive)
    max_tokens: int = field(default=16_384, validator=_tokens(1))
    prefill_chunk_tokens: int | None = field(default=None, validator=optional(_tokens(1)))
    sampling: Sampling = field(default=Sampling.HOST, converter=Sampling)
    client_time_ns: Ns | None = field(default=None, metadata={"toml": "client_time"})

    @format.validator  # noqa: A003 - the attribute, not the builtin
    def _known(self, _attribute: object, value: str) -> None:
        one_of(value, list(FORMATS), "format")

    def __attrs_post_init__(self) -> None:
        wants = self.arrivals.kind is ArrivalKind.TRACE or self.lengths.kind is LengthKind.TRACE
        if self.trace is not None and not wants:
            raise ValueError(
                f"trace {self.trace!r} is named, but neither arrivals nor lengths are of kind 'trace'"
            )
        if wants and self.trace is None:
            raise ValueError("arrivals or lengths are of kind 'trace'; name a trace file")
        if self.requests is not None and self.requests > _MOST_REQUESTS:
            raise ValueError(f"requests is {self.requests}; give at most {_MOST_REQUESTS}")

    @property
    def clients(self) -> int | None:
        """Clients of a closed loop; ``None`` for an open one."""
        return self.arrivals.clients if self.arrivals.kind is ArrivalKind.CLOSED else None

    def build(self, seed: int, base: Path | None = None) -> list[Request]:
        """The requests of one run. ``base`` is the folder that a relative trace is taken from."""
        rows: list[Request] = []
        wants_rows = ArrivalKind.TRACE in (self.arrivals.kind, self.lengths.kind)
        if self.trace is not None and wants_rows:
            whole = self.arrivals.kind is not ArrivalKind.TRACE  # lengths are drawn from all of it
            path = (base or Path()) / self.trace
            rows = read_trace(path, self.format, None if whole else self.requests)
        count = self.requests or (len(rows) if rows else 100)
        if self.arrivals.kind is ArrivalKind.TRACE:
            count = len(rows)
        arrivals = self._arrivals(seed, count, rows)
        prompts, outputs = self._lengths(seed, count, rows)
        return [
            Request(index, arrival_ns, prompt, output)
            for index, (arrival_ns, prompt, output) in enumerate(
                zip(arrivals, prompts, outputs, strict=True)
            )
        ]

    def _arrivals(self, seed: int, count: int, rows: list[Request]) -> list[int]:
        spec = self.arrivals
        if spec.kind is ArrivalKind.CLOSED:
            return [0] * count
        if spec.kind is ArrivalKind.TRACE:
            factor = 1 / Fraction(repr(spec.scale))
            last_ns = rows[-1].arrival_ns
            if spec.rate is not None:
                if last_ns == 0:
                    raise InputError(
                        str(self.trace), "", "all requests arrive at once, so it has no rate",
                        "use --arrivals poisson",
                    )  # fmt: skip
                wanted_ns = (count - 1) * NS_PER_S / Fraction(repr(spec.rate))
                factor = wanted_ns / last_ns
            if last_ns * factor >= MOST_NS:
                raise self._never_ends()
            return [round(row.arrival_ns * factor) for row in rows]
        assert spec.rate is not None
        random = stream(seed, "arrivals")
        mean_s = 1 / spec.rate
        if spec.kind is ArrivalKind.POISSON:
            gaps = random.exponential(mean_s, count)
        elif spec.kind is ArrivalKind.GAMMA:
            gaps = random.gamma(1 / spec.cv**2, mean_s * spec.cv**2, count)
        else:
            gaps = np.full(count, mean_s)
        gaps[0] = 0.0  # a run starts with its first request
        seconds = np.cumsum(gaps)
        if not seconds[-1] < MOST_NS / NS_PER_S:
            raise self._never_ends()
        return [int(instant) for instant in np.rint(seconds * NS_PER_S)]

    def _never_ends(self) -> InputError:
        rate, scale = self.arrivals.rate, self.arrivals.scale
        given = f"scale {scale}" if rate is None else f"rate {rate}"
        return InputError(
            "workload.arrivals", "", f"with {given} the last request comes after 146 years",
            "give more",
        )  # fmt: skip

    def _lengths(self, seed: int, count: int, rows: list[Request]) -> tuple[list[int], list[int]]:
        spec = self.lengths
        random = stream(seed, "lengths")
        if spec.kind is LengthKind.TRACE:
            if self.arrivals.kind is not ArrivalKind.TRACE:
                rows = [rows[index] for index in random.integers(len(rows), size=count)]
            return [row.prompt_tokens for row in rows], [row.output_tokens for row in rows]
        if spec.kind is LengthKind.FIXED:
            return [spec.prompt_tokens] * count, [spec.output_tokens] * count

        def lognormal(mean: int, cv: float) -> list[int]:
            if mean == 0:
                return [0] * count
            variance = math.log1p(cv * cv)
            drawn = random.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
            return [int(value) for value in np.clip(np.rint(drawn), 1, self.max_tokens)]

        return (
            lognormal(spec.prompt_tokens, spec.prompt_cv),
            lognormal(spec.output_tokens, spec.output_cv),
        )

    def with_trace(self, trace: str, form: str = "auto") -> Workload:
        """The same workload with the arrivals and the lengths of a trace."""
        return evolve(
            self,
            trace=trace,
            format=form,
            arrivals=Arrivals(kind=ArrivalKind.TRACE),
            lengths=Lengths(kind=LengthKind.TRACE),
        )
