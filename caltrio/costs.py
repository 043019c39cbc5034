"""The durations of one run: a :class:`Costs` made from a timing profile, in integer nanoseconds.

A duration is a pure function of the profile, the kind, the tokens and the past length; its jitter
is a pure function of (seed, stage, request, step). Both are compiled once (:func:`stage_ns`), and
called by the simulated device and by its compiled twin alike, so that they cannot drift.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numba import njit

from . import timing, units
from .compiled import keep_fresh
from .errors import InputError
from .manifest import Manifest, TaskKind
from .timing import Distribution, JobShape, Stage, TimingProfile, mix64
from .units import NS_PER_S, transfer_ns

# Kinds of job, as the compiled code numbers them.
PREFILL, DECODE, EMBEDS = 0, 1, 2
KIND_CODES: Mapping[TaskKind, int] = MappingProxyType(
    {TaskKind.PREFILL_IDS: PREFILL, TaskKind.DECODE: DECODE, TaskKind.PREFILL_EMBEDS: EMBEDS}
)

SAMPLED_BYTES = 4  # that D2H moves where the device samples: one token id (DESIGN: a what-if, C3)
_LONGEST_NS = 2**62  # a jittered duration ends there: 146 years

# The table that stage_ns reads: columns of int64.
_STAGES = len(Stage)
_FIXED = 0  # ns by stage, for those that take the same time for each job
_JITTERED = _FIXED + _STAGES  # a flag by stage
_LATENCY, _BANDWIDTH, _DISTRIBUTION, _SPREAD, _SEED = range(2 * _STAGES, 2 * _STAGES + 5)
_KINDS = _SEED + 1  # six columns for each kind of job, as follow
_TOKEN_BYTES, _H2D_ONE, _D2H, _BASE, _PER_TOKEN, _PER_PAIR, _KIND_COLUMNS = range(7)
TABLE_SIZE = _KINDS + _KIND_COLUMNS * len(KIND_CODES)

_H2D, _COMPUTE, _D2H_STAGE = int(Stage.H2D), int(Stage.COMPUTE), int(Stage.D2H)
_DISTRIBUTIONS = tuple(Distribution)
_UNIFORM = _DISTRIBUTIONS.index(Distribution.UNIFORM)
_EXPONENTIAL = _DISTRIBUTIONS.index(Distribution.EXPONENTIAL)
_LOGNORMAL = _DISTRIBUTIONS.index(Distribution.LOGNORMAL)


@njit(cache=True)
def mix(value: Any) -> Any:
    """:func:`caltrio.timing.mix64`, compiled; of a uint64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True)
def jitter_factor(
    distribution: int, spread: float, seed: Any, stage: int, request: int, step: int
) -> Any:
    """The factor of one stage of one job: mean 1, coefficient of variation as :func:`spread_of` says.

    ``distribution`` is the place in :class:`~caltrio.timing.Distribution`, ``seed`` a uint64.
    """
    key = mix(mix(mix(seed ^ np.uint64(stage)) ^ np.uint64(request)) ^ np.uint64(step))
    # Inside (0, 1): both logarithms are finite.
    first = (np.int64(mix(key) >> np.uint64(11)) + 0.5) / 9007199254740992.0
    if distribution == _UNIFORM:
        return 1 + spread * (2 * first - 1)
    if distribution == _EXPONENTIAL:
        return -math.log(first)
    if distribution == _LOGNORMAL:
        second = np.int64(mix(key ^ np.uint64(1)) >> np.uint64(11)) / 9007199254740992.0
        normal = math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)  # Box and Muller
        return math.exp(spread * normal - spread * spread / 2)
    return 1.0


def spread_of(distribution: Distribution, cv: float) -> float:
    """The parameter of the distribution: half the width of the uniform one, sigma of the lognormal."""
    return cv * math.sqrt(3) if distribution is Distribution.UNIFORM else math.sqrt(math.log1p(cv * cv))


@njit(cache=True)
def stage_ns(
    table: Any, at: int, stage: int, kind: int, tokens: int, past_len: int, request: int, step: int
) -> Any:
    """Nanoseconds that ``stage`` takes for a job, with its jitter.

    ``table`` is an array that holds a :attr:`Costs.table` from ``at`` on.
    """
    of_kind = at + _KINDS + _KIND_COLUMNS * kind
    if stage == _COMPUTE:
        pairs = tokens * past_len + tokens * (tokens + 1) // 2
        slopes_ps = tokens * table[of_kind + _PER_TOKEN] + pairs * table[of_kind + _PER_PAIR]
        duration = table[of_kind + _BASE] + (slopes_ps + 999) // 1_000  # ps, rounded up to ns
    elif stage == _H2D:
        duration = table[of_kind + _H2D_ONE]
        if tokens != 1:
            whole = tokens * table[of_kind + _TOKEN_BYTES]
            bandwidth = table[at + _BANDWIDTH]
            # Twice a division, so that no product leaves 64 bits.
            rest = (whole % bandwidth) * NS_PER_S
            duration = whole // bandwidth * NS_PER_S + (rest + bandwidth - 1) // bandwidth
            duration += table[at + _LATENCY]
    elif stage == _D2H_STAGE:
        duration = table[of_kind + _D2H]
    else:
        duration = table[at + _FIXED + stage]
    if table[at + _JITTERED + stage]:
        spread = np.int64(table[at + _SPREAD]).view(np.float64)  # its bits
        seed = np.uint64(table[at + _SEED])
        factor = jitter_factor(table[at + _DISTRIBUTION], spread, seed, stage, request, step)
        value = np.rint(duration * factor)
        duration = np.int64(value) if value < _LONGEST_NS else np.int64(_LONGEST_NS)
    return duration


class Costs:
    """The durations of one run: profile, contracts and seed, resolved to integer nanoseconds.

    Args:
        profile: the timing profile.
        manifest: the contracts, for the bytes that DMA moves.
        seed: of the run; mixed with the profile's own.
        device_samples: the what-if of sampling on the device (``docs/assumptions.md``): D2H moves
            one token id, and the host neither converts logits nor samples.

    Raises :class:`~caltrio.errors.InputError` if a job could take longer than 146 years.
    """

    def __init__(
        self, profile: TimingProfile, manifest: Manifest, seed: int, *, device_samples: bool = False
    ) -> None:
        table = np.zeros(TABLE_SIZE, np.int64)
        table[_FIXED + Stage.SUBMIT] = profile.submit.time.value
        table[_FIXED + Stage.INTERRUPT] = profile.interrupt.time.value
        if not device_samples:
            table[_FIXED + Stage.POSTPROCESS] = profile.postprocess.time.value
            table[_FIXED + Stage.CLIENT] = profile.client.time.value
        h2d, d2h, jitter = profile.h2d, profile.d2h, profile.jitter
        table[_LATENCY], table[_BANDWIDTH] = h2d.latency.value, h2d.bandwidth.value
        for kind, code in KIND_CODES.items():
            contract = manifest.by_kind.get(kind)
            if contract is None:
                continue
            compute = profile.compute.decode if kind is TaskKind.DECODE else profile.compute.prefill
            longest_ps = manifest.max_seq * compute.per_token.value
            longest_ps += manifest.max_seq * (manifest.max_seq + 1) * compute.per_pair.value
            if longest_ps >= 2**63 - 1_000 or compute.base.value + longest_ps // 1_000 >= _LONGEST_NS:
                raise InputError(
                    f"timing profile {profile.name!r}", "compute",
                    f"a {kind.value} of {manifest.max_seq} tokens would take more than 146 years",
                    "give less per token or per pair",
                )  # fmt: skip
            one = contract.input_bytes(1)
            output_bytes = SAMPLED_BYTES if device_samples else contract.output_bytes
            begin = _KINDS + _KIND_COLUMNS * code
            table[begin : begin + _KIND_COLUMNS] = (
                one,
                transfer_ns(one, h2d.latency.value, h2d.bandwidth.value),
                transfer_ns(output_bytes, d2h.latency.value, d2h.bandwidth.value),
                compute.base.value,
                compute.per_token.value,
                compute.per_pair.value,
            )
        if jitter.distribution is not Distribution.NONE and jitter.cv > 0:
            for name in jitter.stages:
                table[_JITTERED + Stage[name.upper()]] = 1
        table[_DISTRIBUTION] = _DISTRIBUTIONS.index(jitter.distribution)
        spread = spread_of(jitter.distribution, jitter.cv)
        table[_SPREAD] = np.float64(spread).view(np.int64)  # its bits
        table[_SEED] = np.uint64(mix64(mix64(seed) ^ jitter.seed)).view(np.int64)
        self.table = table
        constant = (Stage.SUBMIT, Stage.INTERRUPT, Stage.POSTPROCESS, Stage.CLIENT)
        self._constant = {
            stage: int(table[_FIXED + stage]) for stage in constant if not table[_JITTERED + stage]
        }

    def ns(self, stage: Stage, job: JobShape) -> int:
        """Nanoseconds that ``stage`` takes for ``job``, with its jitter."""
        duration = self._constant.get(stage)
        if duration is not None:
            return duration
        kind = KIND_CODES[job.kind]
        found: int = stage_ns(
            self.table, 0, int(stage), kind, job.token_count, job.past_len, job.request_id, job.step
        )
        return found


keep_fresh(stage_ns, [sys.modules[__name__], timing, units])
