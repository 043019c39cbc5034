"""What would change the verdict: the break-even map, and a tornado of the open vendor questions (§14).

Both ask for the gain in tokens/s of more jobs in flight over one, at saturation, in the twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from caltrio.config import ExecutorConfig
from caltrio.scenario import Scenario
from caltrio.semantics import EngineSemantics
from caltrio.timing import (
    Compute,
    ComputeByKind,
    Figure,
    Fixed,
    Jitter,
    Source,
    Stage,
    TimingProfile,
    Transfer,
)
from caltrio.tomlfile import Bandwidth, Ns, Ps
from caltrio.units import NS_PER_MS
from caltrio.workload.spec import Arrivals, Workload

from .bounds import Demand
from .fast import run_twin
from .stats import Interval, paired_change

RATIOS: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SEQUENCES: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
_COMPUTE_NS = 40 * NS_PER_MS  # only ratios matter
_STEPS = 60  # of each sequence: the first and the last ones hardly count


def _fixed(ns: float) -> Fixed:
    return Fixed(Figure(Ns(round(ns)), Source.ASSUMED, "a point of the break-even map"))


def _transfer(ns: float) -> Transfer:
    """So long for every job, whatever it moves."""
    note = "a point of the break-even map"
    return Transfer(
        Figure(Ns(max(round(ns) - 1, 0)), Source.ASSUMED, note),
        Figure(Bandwidth(10**18), Source.ASSUMED, note),
    )


def hidden_share(work: Demand) -> float:
    """Host and transfer time over compute of a request: where a profile stands on the map."""
    return (work.alone_ns - work.ns[Stage.COMPUTE]) / max(work.ns[Stage.COMPUTE], 1.0)


def _stretched(profile: TimingProfile, ratio: float, shares: dict[str, float]) -> TimingProfile:
    """Constant compute, and ``ratio`` times as much for all else, split as ``shares`` says."""
    rest = ratio * _COMPUTE_NS
    compute = Compute(
        Figure(Ns(_COMPUTE_NS), Source.ASSUMED, "a point of the break-even map"),
        Figure(Ps(0), Source.ASSUMED, "a point of the break-even map"),
        Figure(Ps(0), Source.ASSUMED, "a point of the break-even map"),
    )
    return TimingProfile(
        1, "break-even", profile.summary,
        submit=_fixed(rest * shares["submit"]),
        h2d=_transfer(rest * shares["h2d"]),
        compute=ComputeByKind(compute, compute),
        d2h=_transfer(rest * shares["d2h"]),
        interrupt=_fixed(rest * shares["interrupt"]),
        postprocess=_fixed(rest * shares["postprocess"]),
        client=_fixed(rest * shares["client"]),
        jitter=Jitter(),
    )  # fmt: skip


def break_even(
    scenario: Scenario,
    semantics: EngineSemantics,
    max_inflight: int,
    work: Demand,
    ratios: Sequence[float] = RATIOS,
    sequences: Sequence[int] = SEQUENCES,
) -> NDArray[np.float64]:
    """Gain of ``max_inflight`` over one, ``[len(sequences), len(ratios)]``.

    At each point so many sequences decode without end; compute takes the same for each step, and host
    work and transfers together the ratio of it, in the proportions of ``work``.
    """
    rest = {stage.name.lower(): ns for stage, ns in work.ns.items() if stage is not Stage.COMPUTE}
    total = sum(rest.values()) or 1.0
    shares = {name: ns / total for name, ns in rest.items()}
    found = np.full((len(sequences), len(ratios)), np.nan)
    for column, ratio in enumerate(ratios):
        timing = _stretched(scenario.timing, ratio, shares)
        for row, count in enumerate(sequences):
            requests = np.tile(np.array([[0, 1, _STEPS]], np.int64), (count, 1))
            rates = []
            for limit in (1, max_inflight):
                one = Scenario(
                    timing=timing,
                    semantics=semantics,
                    workload=Workload(arrivals=Arrivals(clients=count)),
                    executor=ExecutorConfig(max_inflight=limit, max_active_sequences=count),
                )
                rates.append(run_twin(one, requests).summary.tokens_per_s)
            found[row, column] = rates[1] / rates[0] - 1
    return found


@frozen
class Unknown:
    """An open question: what it is, and the settings that it may turn out to have."""

    label: str
    settings: tuple[tuple[str, Callable[[Scenario], Scenario]], ...]


@frozen
class Swing:
    """How far an unknown alone moves the gain.

    ``gains`` by setting in words; ``flips``: does one of them change the verdict on the gain?
    """

    label: str
    gains: tuple[tuple[str, Interval], ...]
    flips: bool

    @property
    def low(self) -> tuple[str, Interval]:
        """The setting with the least gain."""
        return min(self.gains, key=lambda pair: pair[1].estimate)

    @property
    def high(self) -> tuple[str, Interval]:
        """The setting with the most gain."""
        return max(self.gains, key=lambda pair: pair[1].estimate)


def _semantics(**changes: Any) -> Callable[[Scenario], Scenario]:
    return lambda scenario: evolve(scenario, semantics=evolve(scenario.semantics, **changes))


def _host(name: str, factor: float) -> Callable[[Scenario], Scenario]:
    def change(scenario: Scenario) -> Scenario:
        figure = getattr(scenario.timing, name).time
        scaled = Fixed(evolve(figure, value=Ns(round(figure.value * factor))))
        changes: dict[str, Any] = {name: scaled}
        return evolve(scenario, timing=evolve(scenario.timing, **changes))

    return change


def _hosts(name: str) -> tuple[tuple[str, Callable[[Scenario], Scenario]], ...]:
    return ("÷ 4", _host(name, 0.25)), ("× 4", _host(name, 4))


def _link(factor: float) -> Callable[[Scenario], Scenario]:
    def change(scenario: Scenario) -> Scenario:
        def scaled(transfer: Transfer) -> Transfer:
            value = Bandwidth(max(round(transfer.bandwidth.value * factor), 1))
            return evolve(transfer, bandwidth=evolve(transfer.bandwidth, value=value))

        timing = scenario.timing
        return evolve(scenario, timing=evolve(timing, h2d=scaled(timing.h2d), d2h=scaled(timing.d2h)))

    return change


def _compute(factor: float) -> Callable[[Scenario], Scenario]:
    def change(scenario: Scenario) -> Scenario:
        def scaled(compute: Compute) -> Compute:
            return Compute(
                evolve(compute.base, value=Ns(round(compute.base.value * factor))),
                evolve(compute.per_token, value=Ps(round(compute.per_token.value * factor))),
                evolve(compute.per_pair, value=Ps(round(compute.per_pair.value * factor))),
            )

        both = scenario.timing.compute
        both = ComputeByKind(scaled(both.prefill), scaled(both.decode))
        return evolve(scenario, timing=evolve(scenario.timing, compute=both))

    return change


# The questions of §14 as far as they decide timing, then the figures that nobody has measured.
UNKNOWNS: tuple[Unknown, ...] = (
    Unknown("do stages of two jobs overlap at all?", (("no", _semantics(overlap=False)),)),
    Unknown("one DMA channel, or one each way?", (("one", _semantics(dma="half_duplex")),)),
    Unknown("when does a transfer take its place?", (("at submit", _semantics(dma_order="issue")),)),
    Unknown(
        "do the two dies work as a pipeline?",
        (
            ("50 : 50", _semantics(compute_stages=(0.5, 0.5))),
            ("60 : 40", _semantics(compute_stages=(0.6, 0.4))),
            ("80 : 20", _semantics(compute_stages=(0.8, 0.2))),
        ),
    ),
    Unknown(
        "what does each of two computes keep?",
        (
            ("0.5", _semantics(compute_sharing=(1.0, 0.5))),
            ("0.55", _semantics(compute_sharing=(1.0, 0.55))),
            ("0.7", _semantics(compute_sharing=(1.0, 0.7))),
            ("1.0", _semantics(compute_sharing=(1.0, 1.0))),
        ),
    ),
    Unknown(
        "when is the engine slot free again?",
        (
            ("after H2D", _semantics(slot_release="h2d")),
            ("after compute", _semantics(slot_release="compute")),
            ("after D2H", _semantics(slot_release="d2h")),
        ),
    ),
    Unknown(
        "is completion signalled job by job?",
        (("once idle", _semantics(completion_signal="compute_idle")),),
    ),
    Unknown("may a later job return first?", (("yes", _semantics(completion_order="any")),)),
    Unknown("how long does infer() take?", _hosts("submit")),
    Unknown(
        "how long does postprocessing take?",
        _hosts("postprocess"),
    ),
    Unknown("how long does the client take?", _hosts("client")),
    Unknown("what is the PCIe bandwidth?", (("÷ 4", _link(0.25)), ("× 2", _link(2)))),
    Unknown("how long does compute take?", (("÷ 4", _compute(0.25)), ("× 2", _compute(2)))),
)


def gain(
    scenario: Scenario, max_inflight: int, requests: Sequence[NDArray[np.int64]], seeds: Sequence[int]
) -> Interval:
    """Gain in loaded tokens/s of ``max_inflight`` over one, on the same requests."""
    rates: list[list[float]] = []
    for limit in (1, max_inflight):
        limited = evolve(scenario, executor=evolve(scenario.executor, max_inflight=limit))
        rates.append(
            [
                run_twin(evolve(limited, seed=seed), array).summary.loaded_tokens_per_s
                for seed, array in zip(seeds, requests, strict=True)
            ]
        )
    return paired_change(rates[0], rates[1])


def tornado(
    scenario: Scenario,
    max_inflight: int,
    requests: Sequence[NDArray[np.int64]],
    seeds: Sequence[int],
    least_gain: float,
    unknowns: Sequence[Unknown] = UNKNOWNS,
) -> Iterator[Swing | Interval]:
    """First the gain as the scenario stands, then the swing of each unknown alone, as they are found.

    ``scenario`` is at saturation; ``least_gain`` is the gate that may be flipped.
    """
    base = gain(scenario, max_inflight, requests, seeds)
    yield base
    for unknown in unknowns:
        gains = [("as assumed", base)]
        gains += [
            (words, gain(change(scenario), max_inflight, requests, seeds))
            for words, change in unknown.settings
        ]
        passes = {one.estimate >= least_gain for _, one in gains}
        yield Swing(unknown.label, tuple(gains), len(passes) > 1)


@frozen(eq=False)
class Sensitivity:
    """What would change the verdict.

    Attributes:
        limit: jobs in flight that are compared with one.
        maps: gain by hypothesis, ``[len(SEQUENCES), len(RATIOS)]``.
        ratio: host and transfer time over compute of the scenario's own requests.
        base: the hypothesis that the tornado starts from, and its gain.
        swings: the unknowns.
    """

    limit: int
    maps: dict[str, NDArray[np.float64]]
    ratio: float
    base: tuple[str, Interval]
    swings: list[Swing]
