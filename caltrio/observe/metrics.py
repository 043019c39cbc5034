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
from ..core.request import Outcome
from ..units import NS_PER_S
from .records import Columns

Ints = npt.NDArray[np.int64]

OUTCOMES = tuple(Outcome)
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
        float((lasting.astype(float) * loaded[:-1]).sum()) / span_ns,
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
        utilisation: busy share of each stage and engine; NaN where the device reports no times.
        overlap: share of the device's busy time in which two or more jobs are on it; NaN likewise.
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
        return cast(dict[str, Any], no_nan(asdict(self)))


def no_nan(value: Any) -> Any:
    """``value`` with every number that JSON cannot hold as ``None``."""
    if isinstance(value, dict):
        return {key: no_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [no_nan(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _ints(table: Columns, *names: str, **only: str | int) -> list[Ints]:
    """Columns as int64: of the rows where none is null and the columns of ``only`` have its values.

    Reads just these columns, so that a table on disk of many rows needs little memory.
    """
    picked = table.select([*names, *only])
    keep = np.ones(picked.num_rows, bool)
    for name in names:
        keep &= np.asarray(pc.is_valid(picked.column(name)))
    for name, value in only.items():
        column = picked.column(name)
        plain = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        keep &= np.asarray(pc.fill_null(pc.equal(plain, value), False))  # noqa: FBT003
    return [
        np.asarray(picked.column(name).fill_null(0)).astype(np.int64, copy=False)[keep]
        for name in names
    ]


def _counts(table: Columns, name: str, **only: str) -> dict[str, int]:
    """How often each word stands in a column, in alphabetical order."""
    picked = table.select([name, *only])
    for column, value in only.items():
        picked = picked.filter(pc.equal(picked.column(column).cast(pa.string()), value))
    return dict(sorted(Counter(picked.column(name).to_pylist()).items()))


@frozen
class Slo:
    """What a request must meet to count as good: TTFT and TPOT in ns; ``None`` asks nothing."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None


@frozen
class RequestFacts:
    """The requests of a run as arrays of int64, a place each; ns from its start, -1 for never.

    ``outcome`` has the words of :class:`~caltrio.core.request.Outcome`'s members by number, as of
    :data:`OUTCOMES`. ``refusals``: refused requests by gRPC status.
    """

    arrival_ns: Ints
    admitted_ns: Ints
    first_token_ns: Ints
    last_token_ns: Ints
    ended_ns: Ints
    tokens_out: Ints
    kv_tokens: Ints
    outcome: Ints
    refusals: dict[str, int]

    @property
    def span_ns(self) -> int:
        """From the first arrival to the end of the last request."""
        if not len(self.arrival_ns):
            return 0
        return int(self.ended_ns.max() - self.arrival_ns.min())

    @property
    def completed(self) -> npt.NDArray[np.bool_]:
        """Which ones completed."""
        done: npt.NDArray[np.bool_] = self.outcome == OUTCOMES.index(Outcome.COMPLETED)
        return done

    def since(self, cut: int) -> RequestFacts:
        """Without the first ``cut`` requests."""
        return RequestFacts(
            arrival_ns=self.arrival_ns[cut:],
            admitted_ns=self.admitted_ns[cut:],
            first_token_ns=self.first_token_ns[cut:],
            last_token_ns=self.last_token_ns[cut:],
            ended_ns=self.ended_ns[cut:],
            tokens_out=self.tokens_out[cut:],
            kv_tokens=self.kv_tokens[cut:],
            outcome=self.outcome[cut:],
            refusals=self.refusals,
        )

    def ttft_ns(self) -> Ints:
        """Of the requests with a token, in their order."""
        has = self.first_token_ns >= 0
        return self.first_token_ns[has] - self.arrival_ns[has]

    def tpot_ns(self) -> npt.NDArray[np.float64]:
        """Of the requests with two tokens or more, in their order."""
        has = self.tokens_out >= 2
        each: npt.NDArray[np.float64] = (self.last_token_ns - self.first_token_ns)[has] / (
            self.tokens_out[has] - 1
        )
        return each

    def good(self, slo: Slo) -> npt.NDArray[np.bool_]:
        """Which ones completed within the SLO; one without a token has no TTFT to miss."""
        fine: npt.NDArray[np.bool_] = self.completed.copy()
        if slo.ttft_ns is not None:
            late = self.first_token_ns - self.arrival_ns > slo.ttft_ns
            fine &= ~((self.first_token_ns >= 0) & late)
        if slo.tpot_ns is not None:
            slow = self.last_token_ns - self.first_token_ns > slo.tpot_ns * (self.tokens_out - 1)
            fine &= ~((self.tokens_out >= 2) & slow)
        return fine


@frozen
class JobFacts:
    """What the summary takes from the jobs of a run."""

    count: int
    loaded_tokens_per_s: float
    itl: Distribution
    utilisation: dict[str, float]
    overlap: float


def request_facts(requests: Columns) -> RequestFacts:
    """Of the requests table."""
    names = ["arrival_ns", "admitted_ns", "first_token_ns", "last_token_ns", "ended_ns", "tokens_out"]
    picked = requests.select([*names, "kv_tokens", "outcome"])

    def ints(name: str) -> Ints:
        return np.asarray(picked.column(name).fill_null(-1)).astype(np.int64, copy=False)

    words = picked.column("outcome").cast(pa.string())
    outcome = pc.index_in(words, pa.array([each.value for each in OUTCOMES]))
    arrival, admitted, first, last, ended, tokens = map(ints, names)
    return RequestFacts(
        arrival_ns=arrival,
        admitted_ns=admitted,
        first_token_ns=first,
        last_token_ns=last,
        ended_ns=ended,
        tokens_out=tokens,
        kv_tokens=ints("kv_tokens"),
        outcome=np.asarray(outcome).astype(np.int64),
        refusals=_counts(requests, "status", outcome="refused"),
    )


def _deliveries(jobs: Columns, requests: Columns) -> tuple[Ints, Ints, Ints]:
    """(request, step, instant) of each delivery of a token: not of a chunk before a prompt's last."""
    ids, prompts, outputs = _ints(requests, "request_id", "prompt_tokens", "output_tokens")
    request, step, past, count, answered = _ints(
        jobs, "request_id", "step", "past_len", "token_count", "answered_ns", state="succeeded"
    )
    bears = np.ones(len(request), bool)  # also of a request that has not ended, and has no row
    if len(ids):
        order = np.argsort(ids)
        place = order[np.searchsorted(ids, request, sorter=order).clip(max=len(ids) - 1)]
        bears = (past + count >= prompts[place]) & (outputs[place] > 0) | (ids[place] != request)
    return request[bears], step[bears], answered[bears]


def token_latencies(jobs: Columns, requests: Columns) -> Ints:
    """ITL samples: time between the deliveries of successive tokens of one request, ns."""
    request, step, answered = _deliveries(jobs, requests)
    order = np.lexsort((step, request))
    same = np.diff(request[order]) == 0
    latencies: Ints = np.diff(answered[order])[same]
    return latencies


def job_facts(jobs: Columns, requests: Columns, span_ns: int) -> JobFacts:
    """Of the jobs table."""
    on_device = _occupancy(jobs, "h2d_start_ns", "d2h_end_ns", span_ns)
    return JobFacts(
        jobs.num_rows,
        _loaded_tokens_per_s(jobs, requests),
        distribution(token_latencies(jobs, requests)),
        _utilisation(jobs, span_ns),
        on_device.overlap / on_device.busy if on_device.busy else 0.0,
    )


def summarise(jobs: Columns, requests: Columns) -> Summary:
    """The metrics of one run. Tables without rows give a summary of zeros and NaNs."""
    facts = request_facts(requests)
    return summary_of(facts, job_facts(jobs, requests, facts.span_ns))


def summary_of(requests: RequestFacts, jobs: JobFacts) -> Summary:
    """The metrics of one run."""
    span_ns = requests.span_ns
    admitted, done = requests.admitted_ns >= 0, requests.completed
    held = (requests.admitted_ns[admitted], requests.ended_ns[admitted])
    kv = occupancy(held, span_ns, requests.kv_tokens[admitted])
    rate = NS_PER_S / span_ns if span_ns else 0.0
    tokens = int(requests.tokens_out.sum())
    counts = np.bincount(requests.outcome, minlength=len(OUTCOMES))
    outcomes = {each.value: int(count) for each, count in zip(OUTCOMES, counts, strict=True) if count}
    return Summary(
        span_ns=span_ns,
        requests=len(requests.outcome),
        jobs=jobs.count,
        tokens=tokens,
        outcomes=dict(sorted(outcomes.items())),
        refusals=requests.refusals,
        tokens_per_s=tokens * rate,
        requests_per_s=int(done.sum()) * rate,
        loaded_tokens_per_s=jobs.loaded_tokens_per_s,
        ttft=distribution(requests.ttft_ns()),
        tpot=distribution(requests.tpot_ns()),
        itl=jobs.itl,
        e2e=distribution(requests.ended_ns[done] - requests.arrival_ns[done]),
        queueing=distribution(requests.admitted_ns[admitted] - requests.arrival_ns[admitted]),
        utilisation=jobs.utilisation,
        overlap=jobs.overlap,
        kv_mean_tokens=kv.mean,
        kv_peak_tokens=kv.peak,
    )


def _loaded_tokens_per_s(jobs: Columns, requests: Columns) -> float:
    arrived, admitted = _ints(requests, "arrival_ns", "admitted_ns")
    if not len(admitted):
        return 0.0
    _, _, delivered = _deliveries(jobs, requests)
    until, begin = admitted.max(), arrived.min()
    return loaded_rate(
        int(begin), int(until), int((delivered <= until).sum()), len(delivered),
        int(delivered.max()) if len(delivered) else -1,
    )  # fmt: skip


def loaded_rate(begin_ns: int, until_ns: int, by_then: int, tokens: int, last_ns: int) -> float:
    """Loaded tokens/s: ``by_then`` of ``tokens`` were delivered by the last admission, ``until_ns``.

    ``begin_ns`` is the first arrival of an admitted request, ``last_ns`` the last delivery.
    """
    if until_ns <= begin_ns and tokens:
        until_ns, by_then = last_ns, tokens  # all were admitted at once: there is no tail to leave out
    loaded_ns = until_ns - begin_ns
    return by_then * NS_PER_S / loaded_ns if loaded_ns else 0.0


def _occupancy(jobs: Columns, start: str, end: str, span_ns: int) -> Occupancy:
    """Of the device from ``start`` to ``end``; NaN if it returned jobs, but reports these for none."""
    times = _ints(jobs, start, end)
    if not len(times[0]) and len(_ints(jobs, "waited_ns")[0]):
        nan = float("nan")
        return Occupancy(nan, nan, nan, 0)
    return occupancy(times, span_ns)


def _dies(jobs: Columns) -> int:
    """Compute stages of a job: the same for every job of a run."""
    starts = jobs.select(["die_start_ns"]).column("die_start_ns")
    return int(pc.max(pc.list_value_length(starts)).as_py() or 0)


def _utilisation(jobs: Columns, span_ns: int) -> dict[str, float]:
    """Busy share of each stage, die and engine over the span."""

    def busy(start: str, end: str, **only: str | int) -> float:
        return occupancy(_ints(jobs, start, end, **only), span_ns).busy

    stages = {
        "submitter": busy("infer_ns", "submitted_ns"),
        **{
            name: _occupancy(jobs, f"{name}_start_ns", f"{name}_end_ns", span_ns).busy
            for name in ("h2d", "compute", "d2h")
        },
        "completer": busy("waited_ns", "ended_ns", state="succeeded"),
    }
    dies = _dies(jobs)
    if dies > 1:
        ran = jobs.select(["die_start_ns", "die_end_ns"])
        ran = ran.filter(pc.is_valid(ran.column("die_start_ns")))
        for die in range(dies):
            starts = np.asarray(pc.list_element(ran.column("die_start_ns"), die), np.int64)
            ends = np.asarray(pc.list_element(ran.column("die_end_ns"), die), np.int64)
            stages[f"die{die}"] = occupancy((starts, ends), span_ns).busy
    (engines,) = _ints(jobs, "engine")
    for engine in np.unique(engines[engines >= 0]):
        stages[engine_name(int(engine))] = busy("submitted_ns", "waited_ns", engine=int(engine))
    return stages


def goodput_per_s(requests: Columns, slo: Slo, span_ns: int) -> float:
    """Completed requests per second that met the SLO."""
    return int(request_facts(requests).good(slo).sum()) * NS_PER_S / span_ns if span_ns else 0.0
