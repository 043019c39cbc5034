"""Statistics of replications: intervals, when to stop, verdicts on intervals, and the load's state.

References are by number in the docstrings:

1. A. M. Law, Simulation Modeling and Analysis, 5th ed., McGraw-Hill 2015.
2. E. C. Fieller, Some problems in interval estimation, J. R. Statist. Soc. B 16 (1954) 175-185.
3. W. J. Conover, Practical Nonparametric Statistics, 3rd ed., Wiley 1999, §3.2.
4. K. P. White, An effective truncation heuristic for bias reduction in simulation output,
   Simulation 69 (1997) 323-334; with batches of five: K. P. White, M. J. Cobb, S. C. Spratt,
   A comparison of five steady-state truncation heuristics, Winter Simulation Conference 2000.
5. K. Hoad, S. Robinson, R. Davies, Automating warm-up length estimation, J. Oper. Res. Soc. 61
   (2010) 1389-1403.
6. K. Hoad, S. Robinson, R. Davies, Automated selection of the number of replications for a
   discrete-event simulation, J. Oper. Res. Soc. 61 (2010) 1632-1644.
7. Y. S. Chow, H. Robbins, On the asymptotic theory of fixed-width sequential confidence intervals,
   Ann. Math. Statist. 36 (1965) 457-462.
8. C. W. J. Granger, P. Newbold, Spurious regressions in econometrics, J. Econometrics 2 (1974)
   111-120.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt
from attrs import frozen
from scipy import stats

from caltrio.observe.metrics import MIN_SAMPLES

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Outputs = Mapping[str, float]

LEVEL = 0.95
MOST_MORE_RUNS = 10_000  # an estimate beyond this says only that replications will not decide it


def _t(level: float, freedom: int) -> float:
    """Two-sided quantile of Student's t."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, and has to be between 0 and 1, as 0.95")
    return float(stats.t.ppf((1 + level) / 2, freedom))


@frozen
class Interval:
    """A confidence interval, in the unit of what was measured.

    Attributes:
        estimate: NaN where it is undefined; the interval is then infinite.
        low, high: the ends; -inf and inf where there are too few values to say.
        count: replications (of `quantile_interval`: samples) that it rests on.
        level: the probability with which intervals made this way cover the true value.
        trusted: false for a percentile from fewer samples than `least_samples`.
    """

    estimate: float
    low: float
    high: float
    count: int
    level: float = LEVEL
    trusted: bool = True

    @property
    def half_width(self) -> float:
        """Half the length of the interval; inf if an end is."""
        return (self.high - self.low) / 2

    @property
    def relative_half_width(self) -> float:
        """Half-width over the absolute estimate; inf where that says nothing, never NaN."""
        if not math.isfinite(self.half_width) or math.isnan(self.estimate):
            return math.inf
        if self.estimate == 0:
            return 0.0 if self.half_width == 0 else math.inf
        return self.half_width / abs(self.estimate)


def _unknown(estimate: float, count: int, level: float, *, trusted: bool = True) -> Interval:
    return Interval(estimate, -math.inf, math.inf, count, level, trusted)


def mean_interval(values: npt.ArrayLike, level: float = LEVEL, *, trusted: bool = True) -> Interval:
    """The mean of independent replications, by Student's t [1, §4.5].

    Exact for normal values; close to it for means over long runs. For skewed values it covers too
    rarely: 10 values of an exponential distribution are covered by nine in ten intervals of 95 %.
    One value has no interval, nor has any set with a value that is not finite.

    Raises:
        ValueError: the level is not between 0 and 1.
    """
    sample = np.asarray(values, np.float64)
    count = len(sample)
    quantile = _t(level, max(1, count - 1))
    if not count or not np.isfinite(sample).all():
        return _unknown(math.nan, count, level, trusted=trusted)
    mean = float(sample.mean())
    if count == 1:
        return _unknown(mean, count, level, trusted=trusted)
    half = quantile * float(sample.std(ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count, level, trusted)


def paired_change(base: npt.ArrayLike, other: npt.ArrayLike, level: float = LEVEL) -> Interval:
    """Relative change from ``base`` to ``other`` under common random numbers [1, §11.2]; 0.1 is +10 %.

    Value *i* of both comes from the same seed, so what the seed does to both cancels. The estimate
    is the ratio of the means, less 1, which estimates the ratio of expectations. (The mean of
    ratios has a bias that no number of replications removes.) The interval is Fieller's for pairs
    [2]: all changes r - 1 for which a paired t test cannot tell mean(other - r base) from 0. It is
    exact for normal pairs, and not quite symmetric. It is infinite if the mean of ``base`` cannot
    be told from 0, or if there are fewer than two pairs.

    Raises:
        ValueError: not as many values in one as in the other; a level not between 0 and 1.
    """
    x, y = np.asarray(base, np.float64), np.asarray(other, np.float64)
    if x.shape != y.shape:
        raise ValueError(f"{len(x)} values against {len(y)}: pairs come from the same seeds")
    count = len(x)
    quantile = _t(level, max(1, count - 1))
    if not count or not np.isfinite([x, y]).all() or x.mean() == 0:
        return _unknown(math.nan, count, level)
    ratio = float(y.mean() / x.mean())
    if count == 1:
        return _unknown(ratio - 1, count, level)
    # In terms of d = r - ratio: d² (mean² - t² var(x)) + 2 d t² cov - t² var(rest) <= 0. Squares of
    # the means themselves would cancel to nothing where the pairs are nearly proportional.
    rest = y - ratio * x
    (var_x, cov), (_, var_rest) = quantile**2 * np.cov([x, rest]) / count
    lead = float(x.mean()) ** 2 - var_x
    if lead <= 0:
        return _unknown(ratio - 1, count, level)
    root = math.sqrt(cov**2 + lead * var_rest)
    low, high = (-cov - root) / lead, (-cov + root) / lead
    return Interval(ratio - 1, ratio - 1 + float(low), ratio - 1 + float(high), count, level)


def least_samples(q: float) -> int:
    """Samples below which the quantile ``q`` rests on one or two values, and is not trusted.

    As `caltrio.observe.metrics.MIN_SAMPLES`, and by the same rule for what is not listed there: two
    samples beyond the quantile are expected.

    Raises:
        ValueError: ``q`` is not between 0 and 1.
    """
    if not 0 < q < 1:
        raise ValueError(f"q is {q}, and has to be between 0 and 1, as 0.99 for P99")
    percent = round(100 * q, 9)
    if percent in MIN_SAMPLES:
        return MIN_SAMPLES[int(percent)]
    return math.ceil(round(2 / min(q, 1 - q), 6))


def percentile_interval(
    replications: Iterable[npt.ArrayLike], q: float, level: float = LEVEL
) -> Interval:
    """The mean of each replication's own quantile ``q``, by Student's t.

    Sound where samples of one run depend on each other, as waiting times do. It is the expected
    quantile of a run of this length, which is off the long-run one by the order of 1/samples. Not
    trusted if any replication has fewer than `least_samples`; one without samples leaves it undefined.

    Raises:
        ValueError: ``q`` or the level is not between 0 and 1.
    """
    least = least_samples(q)
    runs = [np.asarray(samples, np.float64) for samples in replications]
    own = [float(np.quantile(samples, q)) if len(samples) else math.nan for samples in runs]
    return mean_interval(own, level, trusted=all(len(samples) >= least for samples in runs))


def quantile_interval(samples: npt.ArrayLike, q: float, level: float = LEVEL) -> Interval:
    """The quantile ``q`` of one long run, free of any distribution, from order statistics [3].

    An end is infinite if there are too few samples for it: the upper one of P99 at 95 % needs 368.
    Samples have to be independent. Those of one run seldom are: at high load, latencies
    that follow each other are nearly equal, and this interval is far too narrow; then
    use `percentile_interval`, or samples far apart.

    Raises:
        ValueError: ``q`` or the level is not between 0 and 1.
    """
    sample = np.asarray(samples, np.float64)
    count, least = len(sample), least_samples(q)
    if not count or not np.isfinite(sample).all():
        return _unknown(math.nan, count, level, trusted=False)
    ends = stats.quantile_test(sample, p=q).confidence_interval(level)
    return Interval(
        float(np.quantile(sample, q)),
        -math.inf if math.isnan(ends.low) else float(ends.low),
        math.inf if math.isnan(ends.high) else float(ends.high),
        count,
        level,
        trusted=count >= least,
    )


BATCH = 5  # of MSER-5


@frozen
class WarmUp:
    """How many observations at the start of a series to leave out.

    ``settled`` is false where no end of the transient was found in the first half: run longer.
    """

    index: int
    settled: bool


def warm_up(series: npt.ArrayLike) -> WarmUp:
    """The end of the initial transient by MSER-5 [4], looked for in the first half.

    Of the means of each five observations, it leaves out as many as make the standard error of the
    mean of what remains least, as if these were independent. Feed it one run's
    observations in order, or better their mean over replications, observation by observation [5].

    It balances the bias that is left against variance for the series that it is given, so the cut of a
    single run is too early for a mean over many. After a transient that fades slowly something
    is left in any case: with a time constant of 1/15 of the series and ten runs, intervals of 95 %
    covered 86 % of the time (cut by the mean of the runs) or 65 % (each run by itself).

    It cannot be relied upon for fewer than about 100 observations; where the transient is longer
    than half of the series (not settled) [5]; where observations depend on each other over a good
    part of the series, as in a queue at a load near 1, for then it cuts away a busy spell as
    if it were a transient, or keeps one; for periodic series; with rare huge values. A series with a
    trend, as of an overloaded system, has no steady state, and is not settled. For the part
    beyond the first half it is not asked: there it takes a few values that happen to be near each
    other for the steady state.
    """
    values = np.asarray(series, np.float64)
    count = len(values) // BATCH
    most = count // 2
    if not most or not np.isfinite(values).all():
        return WarmUp(0, settled=False)
    means = values[: count * BATCH].reshape(count, BATCH).mean(axis=1)
    means -= means[most:].mean()  # squares of small numbers cancel less
    left = np.arange(count, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    error = (squares - sums**2 / left) / left.astype(np.float64) ** 2
    cut = int(np.argmin(error[: most + 1]))
    return WarmUp(cut * BATCH, settled=cut < most)


@frozen
class Replications:
    """Outputs of replications, in the order of their seeds.

    Attributes:
        seeds: of the replications made.
        values: by name of the output, one number for each seed.
        missed: the watched outputs that are less precise than wanted.
        level: of the intervals that were watched.
    """

    seeds: tuple[int, ...]
    values: Mapping[str, Floats]
    missed: tuple[str, ...]
    level: float = LEVEL

    @property
    def reached(self) -> bool:
        """Is every watched output as precise as wanted?"""
        return not self.missed

    def interval(self, name: str, level: float | None = None) -> Interval:
        """The mean of one output over replications."""
        return mean_interval(self.values[name], self.level if level is None else level)


@frozen
class _Seeded:
    """``run`` with its seed beside the result. A class, so that it pickles."""

    run: Callable[[int], Outputs]

    def __call__(self, seed: int) -> tuple[int, Outputs]:
        return seed, self.run(seed)


def replicate(
    run: Callable[[int], Outputs],
    seeds: Iterable[int],
    watch: Mapping[str, float],
    *,
    least: int = 5,
    most: int = 200,
    step: int = 5,
    level: float = LEVEL,
    mapper: Callable[..., Iterable[tuple[int, Outputs]]] = map,
) -> Replications:
    """Replicate until every watched mean is as precise as wanted, at most ``most`` times [1, §9.4.1].

    Stopping when the interval is short prefers samples that happen to vary little, so the
    interval covers less often than its level says, the more so the fewer replications it starts
    with; only for ever shorter intervals does that vanish [7]. Against it: a minimum count, few looks
    (one each ``step`` runs), and precision has to hold at two looks in a row, the look-ahead
    of [6]. So even what is precise at once takes ``least`` + ``step`` runs, unless ``most`` is fewer.

    Steps have a fixed size and results are put in the order of ``seeds``: how parallel ``mapper`` is,
    and in which order it delivers, changes nothing. Each interval has the level for itself; that all
    of several cover at once is less likely.

    Args:
        run: the outputs of one replication, by name; the same names for every seed.
        seeds: one for each replication, each once; may be infinite.
        watch: wanted half-width over the mean, by name of output: 0.05 is ±5 %.
        least: replications before the first look, 2 or more.
        most: replications at most.
        step: replications between looks.
        level: of the intervals.
        mapper: as `map`; for example that of an executor of processes.

    Raises:
        ValueError: a seed comes twice; an output is watched that no run has; runs differ in the
            names of their outputs; counts or level make no sense.
    """
    if least < 2 or step < 1 or most < least:
        raise ValueError(
            f"least {least}, step {step}, most {most}: wanted 2 <= least <= most, step > 0"
        )
    coming = iter(seeds)
    made: dict[int, Outputs] = {}
    held = False
    while True:
        size = min(step if made else least, most - len(made))
        batch = list(islice(coming, size))
        if len({*made, *batch}) < len(made) + len(batch):
            raise ValueError(f"a seed came twice, among {batch}: replications have to be independent")
        done = dict(mapper(_Seeded(run), batch))
        made.update((seed, done[seed]) for seed in batch)
        values = _by_name(list(made.values()))
        unknown = sorted(watch.keys() - values.keys())
        if unknown and made:
            raise ValueError(f"no run has {', '.join(unknown)}; there are {', '.join(sorted(values))}")
        missed = tuple(
            name
            for name, wanted in watch.items()
            if not made or mean_interval(values[name], level).relative_half_width > wanted
        )
        if (held and not missed) or len(made) >= most or len(batch) < size:
            return Replications(tuple(made), values, missed, level)
        held = not missed


def _by_name(outputs: Sequence[Outputs]) -> dict[str, Floats]:
    """One array for each name, in the order of the first run's names."""
    for one in outputs:
        if one.keys() != outputs[0].keys():
            odd = sorted(one.keys() ^ outputs[0].keys())
            raise ValueError(f"not every run has {', '.join(odd)}: give NaN where it is undefined")
    names = outputs[0] if outputs else ()
    return {name: np.array([one[name] for one in outputs], np.float64) for name in names}


Verdict = Literal["PASS", "FAIL", "UNDECIDED"]


@frozen
class Decision:
    """A verdict on an interval, and how many further replications would settle it.

    ``more_runs`` is 0 for what is decided, and ``None`` where the interval is infinite, so that nobody
    can say. With ``capped``, it takes more than ``more_runs``.
    """

    verdict: Verdict
    more_runs: int | None = 0
    capped: bool = False

    def __str__(self) -> str:
        """The verdict in words."""
        if self.verdict != "UNDECIDED":
            return self.verdict
        if self.more_runs is None:
            return "UNDECIDED: too few replications to say how many it takes"
        about = "more than" if self.capped else "about"
        runs = "replication" if self.more_runs == 1 else "replications"
        return f"UNDECIDED: {about} {self.more_runs} further {runs}"


def decide(
    interval: Interval,
    bound: float,
    better: Literal["higher", "lower"] = "higher",
    *,
    most_more: int = MOST_MORE_RUNS,
) -> Decision:
    """Is the true value on the good side of ``bound``? The bound itself is good.

    PASS and FAIL if the whole interval is on one side, so each is wrong with a probability
    of at most (1 - level)/2. UNDECIDED otherwise, with the replications it would take if the estimate
    and the standard deviation are what they seem: the least m > n with t(m-1) s/sqrt(m) below
    the distance to the bound. Estimates change as runs are added, so it is decided by then about
    every other time; and who looks again and again until it is decided errs more often. For an
    interval of `quantile_interval` the count is in samples. It does not ask whether the
    interval is ``trusted``.
    """
    low, high = (interval.low, interval.high) if better == "higher" else (-interval.high, -interval.low)
    edge = bound if better == "higher" else -bound
    if low >= edge:
        return Decision("PASS")
    if high < edge:
        return Decision("FAIL")
    above = interval.estimate > bound
    reach = interval.estimate - interval.low if above else interval.high - interval.estimate
    count = interval.count
    if not math.isfinite(reach) or count < 2:
        return Decision("UNDECIDED", None)
    spread = reach * math.sqrt(count) / _t(interval.level, count - 1)
    distance = abs(interval.estimate - bound)

    def clear(more: int) -> bool:
        runs = count + more
        return _t(interval.level, runs - 1) * spread / math.sqrt(runs) < distance

    more = bisect_left(range(most_more + 1), True, lo=1, key=clear)  # noqa: FBT003
    capped = more > most_more
    return Decision("UNDECIDED", most_more if capped else more, capped)


class LoadState(StrEnum):
    """What the load of an open-loop run does to the number of requests in the system."""

    STABLE = "stable"  # nothing shows that it grows
    BACKLOGGED = "backlogged"  # a backlog built up, and did not keep growing
    OVERLOADED = "overloaded"  # departures keep falling behind arrivals


WINDOWS = 10  # in each half of the run
TIMES = 1_000  # at which the number in the system is looked at, a multiple of 2 * WINDOWS


def load_state(arrival_ns: Ints, ended_ns: Ints) -> LoadState:
    """The state of the load in one open-loop run.

    It is told by the number in the system between the first and the last arrival. OVERLOADED: it
    grows in both halves of the run, each by a t test at 5 % on its changes over ten windows.
    BACKLOGGED: not that, but it rises to its peak or falls from it throughout, by the same test at
    1 % over the windows on that side; or its peak is higher than an exponential tail through its
    quartile and median makes likely at 1 %. STABLE: neither. Closed-loop runs bound the number in
    the system themselves, and say nothing here; nor do requests that all arrive at once (STABLE).

    The test is on changes and not on the numbers themselves. Near a load of 1 those go as a random walk
    does, and regression on time finds trends in random walks [8]. Changes of a stable system
    cancel over the windows, which makes the test cautious; at a load of exactly 1 both halves
    pass it in less than 1 % of runs.

    What it cannot tell: a load of 1 + e takes some 50/e² requests to show, of 1.05 some 20,000;
    with fewer it looks backlogged or stable. A stable load near 1 may look backlogged in a run that
    is short against its busy spells, and so may many servers that fill through much of the run.
    Growth that stops after two thirds of the run is still taken for overload.
    A burst that is gone within a thousandth of the run is not seen. A bounded queue never
    grows beyond its bound, however great the overload: give refused requests as -1.

    Args:
        arrival_ns: arrival of each request, int64, in any order.
        ended_ns: end of each request, int64, -1 for never.

    Raises:
        ValueError: not as many ends as arrivals, or an end before its arrival.
    """
    if arrival_ns.shape != ended_ns.shape:
        raise ValueError(f"{len(arrival_ns)} arrivals and {len(ended_ns)} ends")
    over = ended_ns != -1
    if (ended_ns[over] < arrival_ns[over]).any():
        raise ValueError("a request ended before it arrived; -1 is for one that never ends")
    if not len(arrival_ns):
        return LoadState.STABLE
    arrivals, ends = np.sort(arrival_ns, kind="stable"), np.sort(ended_ns[over], kind="stable")
    times = np.linspace(arrivals[0], arrivals[-1], TIMES + 1)
    inside = np.searchsorted(arrivals, times, "right") - np.searchsorted(ends, times, "right")
    levels = inside[:: TIMES // (2 * WINDOWS)]
    if _grows(levels[: WINDOWS + 1], 0.05) and _grows(levels[WINDOWS:], 0.05):
        return LoadState.OVERLOADED
    peak = int(np.argmax(levels))
    if _grows(levels[: peak + 1], 0.01) or _grows(levels[peak:][::-1], 0.01):
        return LoadState.BACKLOGGED
    quartile, median = np.quantile(inside, (0.25, 0.5))
    scale = (median - quartile + 1) / math.log(1.5)  # 1: it is a whole number
    likely = stats.expon.isf(0.01 / TIMES, quartile - scale * math.log(4 / 3), scale)
    return LoadState.BACKLOGGED if inside.max() > likely else LoadState.STABLE


def _grows(levels: npt.NDArray[np.int_], alpha: float) -> bool:
    """Do the changes between successive levels have a mean above 0, by a t test?"""
    changes = np.diff(levels)
    if len(changes) < 2:
        return False
    if (changes == changes[0]).all():  # no variance to test with
        return bool(changes[0] > 0)
    return bool(stats.ttest_1samp(changes, 0, alternative="greater").pvalue < alpha)
