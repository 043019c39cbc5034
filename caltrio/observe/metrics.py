"""The metrics of a run, computed from its two tables and nothing else. Defined in docs/metrics.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from attrs import asdict, frozen

from ..core.job import engine_name
from ..units import NS_PER_S

Ints = npt.NDArray[np.int64]

PERCENTILES = (50, 90, 99)
MIN_SAMPLES = {50: 3, 90: 20, 99: 200}  # below these a percentile rests on one or two values


@frozen
class Distribution:
    """Samples of one quantity in ns: how many, mean, percentiles and maximum; NaN without samples."""

    count: int
    mean_ns: float
    p50_ns: float
    p90_ns: float
    p99_ns: float
    max_ns: float

    def trusted(self, percentile: int) -> bool:
        """Are there samples enough for this percentile?"""
        return self.count >= MIN_SAMPLES[percentile]


def distribution(samples: npt.NDArray[Any]) -> Distribution:
    """The distribution of samples in ns. Percentiles interpolate linearly."""
    if not len(samples):
        nan = float("nan")
        return Distribution(0, nan, nan, nan, nan, nan)
    p50, p90, p99 = np.percentile(samples, PERCENTILES)
    return Distribution(
        len(samples),
        float(samples.mean()),
        float(p50),
        float(p90),
        float(p99),
        float(samples.max()),
    )


@frozen
class Occupancy:
    """How many intervals are open at once, over a span: time-weighted.

    ``busy`` is the share of the span with at least one, ``overlap`` that with at least two.
    """

    busy: float
    overlap: float
    mean: float
    peak: int


def occupancy(intervals: Sequence[Ints], span_ns: int, weights: Ints | None = None) -> Occupancy:
    """Occupancy of ``[start, end)`` over ``span_ns``; each interval counts ``weights``, or 1.

    ``intervals`` are the starts and the ends, ns.
    """
    starts, ends = intervals
    if not len(starts) or span_ns <= 0:
        return Occupancy(0.0, 0.0, 0.0, 0)
    ones = np.ones(len(starts), np.int64)
    size = ones if weights is None else weights
    at = np.concatenate([starts, ends])
    step = np.concatenate([ones, -ones])
    load = np.concatenate([size, -size])
    order = np.lexsort((step, at))  # at one instant, what ends goes before what starts
    at, open_now, loaded = at[order], np.cumsum(step[order]), np.cumsum(load[order])
    lasting = np.diff(at)
    return Occupancy(
        float(lasting[open_now[:-1] >= 1].sum()) / span_ns,
        float(lasting[open_now[:-1] >= 2].sum()) / span_ns,
        float((lasting * loaded[:-1]).sum()) / span_ns,
        int(loaded.max()),
    )


@frozen
class Summary:
    """The metrics of one run. Times in ns; rates per second; shares from 0 to 1.

    Attributes:
        span_ns: from the first arrival to the end of the last request.
        outcomes: requests by outcome. refusals: refused requests by gRPC status.
        tokens_per_s, requests_per_s: emitted tokens, and completed requests, over the span.
        loaded_tokens_per_s: tokens delivered until the last admission, over the time until then:
            throughput without the tail in which the load has run out.
        ttft, tpot, itl, e2e, queueing: distributions over requests (itl over tokens).
        utilisation: busy share of each stage and engine.
        overlap: share of the device's busy time in which two or more jobs are on it.
        kv_mean_tokens, kv_peak_tokens: KV reserved.
    """

    span_ns: int
    requests: int
    jobs: int
    tokens: int
    outcomes: dict[str, int]
    refusals: dict[str, int]
    tokens_per_s: float
    requests_per_s: float
    loaded_tokens_per_s: float
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    queueing: Distribution
    utilisation: dict[str, float]
    overlap: float
    kv_mean_tokens: float
    kv_peak_tokens: int

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON types; an undefined number is null."""
        return cast(dict[str, Any], _no_nan(asdict(self)))


def _no_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _no_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _ints(table: pa.Table, *names: str) -> list[Ints]:
    """Columns as int64, of the rows where none of them is null."""
    columns = [table.column(name) for name in names]
    there = np.logical_and.reduce([np.asarray(pc.is_valid(column)) for column in columns])
    return [np.asarray(column.fill_null(0)).astype(np.int64, copy=False)[there] for column in columns]


def _where(table: pa.Table, column: str, value: str) -> pa.Table:
    return table.filter(pc.equal(table.column(column).cast(pa.string()), value))


def _succeeded(jobs: pa.Table) -> pa.Table:
    return _where(jobs, "state", "succeeded")


def token_latencies(jobs: pa.Table) -> Ints:
    """ITL samples: time between the deliveries of successive tokens of one request, ns."""
    request, step, answered = _ints(_succeeded(jobs), "request_id", "step", "answered_ns")
    order = np.lexsort((step, request))
    same = np.diff(request[order]) == 0
    latencies: Ints = np.diff(answered[order])[same]
    return latencies


def summarise(jobs: pa.Table, requests: pa.Table) -> Summary:
    """The metrics of one run. Tables without rows give a summary of zeros and NaNs."""
    arrival, ended = _ints(requests, "arrival_ns", "ended_ns")
    span_ns = int(ended.max() - arrival.min()) if len(arrival) else 0
    outcomes = Counter(requests.column("outcome").to_pylist())
    refused = _where(requests, "outcome", "refused")
    completed = _where(requests, "outcome", "completed")
    tokens = int(pc.sum(requests.column("tokens_out")).as_py() or 0)

    began, first = _ints(requests, "arrival_ns", "first_token_ns")
    head, tail, count = _ints(requests, "first_token_ns", "last_token_ns", "tokens_out")
    several = count >= 2
    tpot = (tail - head)[several] / (count[several] - 1)
    came, done = _ints(completed, "arrival_ns", "ended_ns")
    waited, admitted = _ints(requests, "arrival_ns", "admitted_ns")
    held_from, held_to, held = _ints(requests, "admitted_ns", "ended_ns", "kv_tokens")

    on_device = occupancy(_ints(jobs, "h2d_start_ns", "d2h_end_ns"), span_ns)
    kv = occupancy((held_from, held_to), span_ns, held)
    rate = NS_PER_S / span_ns if span_ns else 0.0
    return Summary(
        span_ns=span_ns,
        requests=requests.num_rows,
        jobs=jobs.num_rows,
        tokens=tokens,
        outcomes=dict(sorted(outcomes.items())),
        refusals=dict(sorted(Counter(refused.column("status").to_pylist()).items())),
        tokens_per_s=tokens * rate,
        requests_per_s=completed.num_rows * rate,
        loaded_tokens_per_s=_loaded_tokens_per_s(jobs, requests),
        ttft=distribution(first - began),
        tpot=distribution(tpot),
        itl=distribution(token_latencies(jobs)),
        e2e=distribution(done - came),
        queueing=distribution(admitted - waited),
        utilisation=_utilisation(jobs, span_ns),
        overlap=on_device.overlap / on_device.busy if on_device.busy else 0.0,
        kv_mean_tokens=kv.mean,
        kv_peak_tokens=kv.peak,
    )


def _loaded_tokens_per_s(jobs: pa.Table, requests: pa.Table) -> float:
    arrived, admitted = _ints(requests, "arrival_ns", "admitted_ns")
    wanted = requests.filter(pc.greater(requests.column("output_tokens"), 0))
    done = _succeeded(jobs)
    # A prefill of a request that wants no token delivers none.
    done = done.filter(pc.is_in(done.column("request_id"), wanted.column("request_id")))
    (delivered,) = _ints(done, "answered_ns")
    if not len(admitted) or admitted.max() <= arrived.min():
        return 0.0
    loaded_ns = int(admitted.max() - arrived.min())
    return int((delivered <= admitted.max()).sum()) * NS_PER_S / loaded_ns


def _utilisation(jobs: pa.Table, span_ns: int) -> dict[str, float]:
    """Busy share of each stage, die and engine over the span."""

    def busy(table: pa.Table, start: str, end: str) -> float:
        return occupancy(_ints(table, start, end), span_ns).busy

    stages = {
        "submitter": busy(jobs, "infer_ns", "submitted_ns"),
        "h2d": busy(jobs, "h2d_start_ns", "h2d_end_ns"),
        "compute": busy(jobs, "compute_start_ns", "compute_end_ns"),
        "d2h": busy(jobs, "d2h_start_ns", "d2h_end_ns"),
        "completer": busy(_succeeded(jobs), "waited_ns", "ended_ns"),
    }
    ran = jobs.filter(pc.is_valid(jobs.column("die_start_ns")))
    dies = int(pc.max(pc.list_value_length(ran.column("die_start_ns"))).as_py() or 0)
    if dies > 1:
        for die in range(dies):
            starts = np.asarray(pc.list_element(ran.column("die_start_ns"), die), np.int64)
            ends = np.asarray(pc.list_element(ran.column("die_end_ns"), die), np.int64)
            stages[f"die{die}"] = occupancy((starts, ends), span_ns).busy
    for engine in sorted(set(jobs.column("engine").to_pylist()) - {-1}):
        own = jobs.filter(pc.equal(jobs.column("engine"), engine))
        stages[engine_name(engine)] = busy(own, "submitted_ns", "waited_ns")
    return stages


@frozen
class Slo:
    """What a request must meet to count as good: TTFT and TPOT in ns; ``None`` asks nothing."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None


def goodput_per_s(requests: pa.Table, slo: Slo, span_ns: int) -> float:
    """Completed requests per second that met the SLO."""
    if not span_ns:
        return 0.0
    completed = _where(requests, "outcome", "completed")
    good = 0
    for arrival, first, last, count in zip(
        *(
            completed.column(name).to_pylist()
            for name in ("arrival_ns", "first_token_ns", "last_token_ns", "tokens_out")
        ),
        strict=True,
    ):
        late = slo.ttft_ns is not None and first is not None and first - arrival > slo.ttft_ns
        slow = slo.tpot_ns is not None and count >= 2 and last - first > slo.tpot_ns * (count - 1)
        good += not (late or slow)
    return good * NS_PER_S / span_ns
