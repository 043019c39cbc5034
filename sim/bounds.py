"""What no scheduling can exceed: the bottleneck law on the mean work of a request.

Asymptotic bounds of operational analysis (Denning and Buzen, The operational analysis of queueing
network models, ACM Computing Surveys 10, 1978): throughput is at most one over the largest demand
on a resource that serves one job at a time, and with N clients at most N over the time that a request
takes alone. Jitter has mean 1 and is left out.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from attrs import evolve, frozen
from numba import njit
from numpy.typing import NDArray

from caltrio import costs, timing, units
from caltrio.compiled import keep_fresh
from caltrio.costs import DECODE, PREFILL, Costs, stage_ns
from caltrio.manifest import load_manifest
from caltrio.scenario import Scenario
from caltrio.semantics import Dma, EngineSemantics
from caltrio.timing import Jitter, Stage
from caltrio.units import NS_PER_S
from caltrio.workload.spec import Sampling

_STAGES = tuple(Stage)
_COUNT, _CLIENT = len(_STAGES), int(Stage.CLIENT)


@njit(cache=True)
def _demands(table: Any, requests: Any, chunk: int, totals: Any) -> None:
    """Adds up ns by stage over all jobs of all requests."""
    for r in range(requests.shape[0]):
        prompt, output = requests[r, 1], requests[r, 2]
        past = 0
        step = 0
        while past < prompt + max(output - 1, 0):
            if past < prompt:
                kind, tokens = PREFILL, min(prompt - past, chunk)
            else:
                kind, tokens = DECODE, 1
            silent = past + tokens < prompt or output == 0  # the client has nothing to sample
            for stage in range(_COUNT):
                if stage == _CLIENT and silent:
                    continue
                totals[stage] += stage_ns(table, 0, stage, kind, tokens, past, r, step)
            past += tokens
            step += 1


keep_fresh(_demands, [sys.modules[__name__], costs, timing, units])


@frozen
class Demand:
    """Mean work of one request, ns by stage, and the tokens that it produces."""

    ns: dict[Stage, float]
    tokens: float

    @property
    def on_device_ns(self) -> float:
        """H2D, compute and D2H."""
        return sum(self.ns[stage] for stage in (Stage.H2D, Stage.COMPUTE, Stage.D2H))

    @property
    def in_flight_ns(self) -> float:
        """From the call of ``infer()`` to the return of ``Wait()``, alone on the device."""
        return self.ns[Stage.SUBMIT] + self.on_device_ns + self.ns[Stage.INTERRUPT]

    @property
    def alone_ns(self) -> float:
        """With what the completer and the client do: a request that has all to itself."""
        return self.in_flight_ns + self.ns[Stage.POSTPROCESS] + self.ns[Stage.CLIENT]


def demand(scenario: Scenario, requests: NDArray[np.int64]) -> Demand:
    """The mean work of ``requests``, ``[n, 3]`` as of :func:`~sim.fast.twin.request_array`."""
    costs = Costs(
        evolve(scenario.run_timing, jitter=Jitter()),
        load_manifest(),
        0,
        device_samples=scenario.workload.sampling is Sampling.DEVICE,
    )
    totals = np.zeros(len(_STAGES), np.int64)
    chunk = scenario.workload.prefill_chunk_tokens or 2**40
    _demands(costs.table, np.ascontiguousarray(requests), chunk, totals)
    count = max(len(requests), 1)
    ns = {stage: float(totals[stage]) / count for stage in _STAGES}
    return Demand(ns, float(requests[:, 2].sum()) / count)


def most_requests_per_s(
    work: Demand, semantics: EngineSemantics, max_inflight: int, clients: int | None = None
) -> float:
    """The bound on requests/s with so many jobs in flight; and ``clients``, if the loop is closed."""
    ns = work.ns
    # A shared unit with k jobs does k times what each retains; jobs beyond the limit cannot help.
    speeds = semantics.compute_sharing[:max_inflight]
    boost = max(k * speed for k, speed in enumerate(speeds, start=1))
    compute = ns[Stage.COMPUTE] * max(semantics.compute_stages) / boost
    transfers = (ns[Stage.H2D], ns[Stage.D2H])
    channel = sum(transfers) if semantics.dma is Dma.HALF_DUPLEX else max(transfers)
    least = max(
        ns[Stage.SUBMIT],
        channel,
        compute,
        ns[Stage.POSTPROCESS],
        work.in_flight_ns / max_inflight,
        work.on_device_ns if not semantics.overlap else 0,
    )
    if clients is not None:
        least = max(least, work.alone_ns / clients)
    return NS_PER_S / least if least else float("inf")
