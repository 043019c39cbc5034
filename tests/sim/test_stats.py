"""Intervals cover as often as they say, verdicts err as seldom, and wrong variants are caught."""

import itertools
import math
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from scipy import signal, stats

from caltrio.observe.metrics import MIN_SAMPLES
from sim.stats import (
    BATCH,
    Interval,
    LoadState,
    decide,
    least_samples,
    load_state,
    mean_interval,
    paired_change,
    percentile_interval,
    quantile_interval,
    replicate,
    warm_up,
)

TRIALS = 500
inf, nan = math.inf, math.nan

# Student, The probable error of a mean, Biometrika 6 (1908): additional hours of sleep. With R,
# t.test(extra ~ group, data = sleep, paired = TRUE) gives 0.7001142 to 2.4598858.
SLEEP_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SLEEP_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
SLEEP = np.subtract(SLEEP_2, SLEEP_1)


def covered(make, true):
    """The share of trials whose interval, made from a generator of its own, covers the true value."""
    made = [make(np.random.default_rng([2_024, trial])) for trial in range(TRIALS)]
    return np.mean([one.low <= true <= one.high for one in made])


def honest(share):
    """What is asked of intervals of 95 %. 500 trials are off by 1 % (one standard error)."""
    return 0.92 <= share <= 0.98


def normal_interval(values, level=0.95):
    """Wrong: the standard deviation taken for known."""
    low, high = stats.norm.interval(level, np.mean(values), stats.sem(values))
    return Interval(np.mean(values), low, high, len(values), level)


# Intervals of a mean


def test_student_s_sleep():
    made = mean_interval(SLEEP)
    assert made.estimate == pytest.approx(1.58)
    assert (made.low, made.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
    assert made.relative_half_width == pytest.approx(0.8798858 / 1.58, abs=1e-7)
    assert (made.count, made.level, made.trusted) == (10, 0.95, True)


@pytest.mark.parametrize("level", [0.8, 0.95, 0.999])
def test_mean_is_scipy_s(level):
    expected = stats.ttest_1samp(SLEEP, 0).confidence_interval(level)
    made = mean_interval(SLEEP, level)
    assert (made.low, made.high) == pytest.approx(tuple(expected))


@pytest.mark.parametrize(
    ("values", "estimate"), [([], nan), ([3.0], 3.0), ([1, nan, 2], nan), ([1, inf], nan)]
)
def test_too_few_values_have_no_interval(values, estimate):
    made = mean_interval(values)
    assert made.estimate == pytest.approx(estimate, nan_ok=True)
    assert (made.low, made.high, made.count) == (-inf, inf, len(values))
    assert made.half_width == made.relative_half_width == inf


def test_relative_half_width_is_a_number():
    assert mean_interval([5.0, 5.0, 5.0]).relative_half_width == 0
    assert mean_interval([0.0, 0.0]).relative_half_width == 0
    assert mean_interval([-1.0, 1.0]).relative_half_width == inf
    assert mean_interval([-3.0, -1.0]).relative_half_width > 0


@pytest.mark.parametrize("level", [0, 1, 95])
def test_a_level_is_a_probability(level):
    with pytest.raises(ValueError, match="between 0 and 1"):
        mean_interval(SLEEP, level)
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile_interval(SLEEP, 0.5, level)


def lognormal(rng, count):
    return rng.lognormal(-(0.3**2) / 2, 0.3, count)  # mean 1


def exponential(rng, count):
    return rng.exponential(1, count)


@pytest.mark.parametrize(
    ("draw", "count"), [(exponential, 30), (lognormal, 5), (lognormal, 10), (lognormal, 30)]
)
def test_means_are_covered(draw, count):
    assert honest(covered(lambda rng: mean_interval(draw(rng, count)), 1))


def test_a_normal_quantile_for_five_values_is_caught():
    assert covered(lambda rng: normal_interval(lognormal(rng, 5)), 1) < 0.9


# Changes under common random numbers


def test_ends_of_a_change_are_where_the_paired_t_test_gives_way():
    rng = np.random.default_rng(3)
    base = rng.normal(10, 2, 12)
    other = 1.2 * base + rng.normal(0, 1, 12)
    made = paired_change(base, other, 0.9)
    assert made.estimate == pytest.approx(other.mean() / base.mean() - 1)
    assert made.low < made.estimate < made.high
    for end in (made.low, made.high):
        assert stats.ttest_rel(other, (1 + end) * base).pvalue == pytest.approx(0.1)


def pairs(rng, count, noise):
    """Means 10 and 11 of what the seed does to both, and noise of each: +10 %."""
    seed = rng.normal(0, 2, count)
    return 10 + seed + rng.normal(0, noise, count), 11 + seed + rng.normal(0, noise, count)


@pytest.mark.parametrize("count", [5, 20])
def test_changes_are_covered(count):
    assert honest(covered(lambda rng: paired_change(*pairs(rng, count, 0.5)), 0.1))


def test_pairs_are_what_makes_a_change_precise():
    base, other = pairs(np.random.default_rng(1), 20, 0.2)
    apart = np.random.default_rng(2).permutation(other)
    assert paired_change(base, other).half_width < 0.3 * paired_change(base, apart).half_width


def test_change_at_its_limits():
    same = paired_change([9.0, 10.0, 11.0], [13.5, 15.0, 16.5])  # proportional
    assert (same.low, same.estimate, same.high) == pytest.approx((0.5, 0.5, 0.5))
    for base, other, estimate in [
        ([2.0], [3.0], 0.5),
        ([], [], nan),
        ([1.0, nan], [1.0, 2.0], nan),
        ([-1.0, 1.0], [1.0, 2.0], nan),
        ([-1.0, 1.1], [1.0, 2.0], 29),  # a mean that may be 0: any ratio
    ]:
        made = paired_change(base, other)
        assert made.estimate == pytest.approx(estimate, nan_ok=True)
        assert (made.low, made.high) == (-inf, inf)
    with pytest.raises(ValueError, match="same seeds"):
        paired_change([1.0, 2.0], [1.0])


# Percentiles


def test_the_median_of_ten_is_between_the_second_and_the_ninth():
    made = quantile_interval(np.arange(1, 11)[::-1], 0.5)  # 97.9 %: Conover, table of sign tests
    assert (made.estimate, made.low, made.high) == (5.5, 2, 9)


def test_what_p99_needs():
    for count, high in [(367, inf), (368, 368)]:  # 0.99 ** 367 > 0.025 >= 0.99 ** 368
        assert quantile_interval(np.arange(1, count + 1), 0.99).high == high
    assert quantile_interval([1.0], 0.5).low == -inf
    empty = quantile_interval([], 0.5)
    assert (empty.low, empty.high, empty.trusted) == (-inf, inf, False)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99])
def test_quantiles_are_covered(q):
    """At least as often as promised: order statistics are steps."""
    share = covered(lambda rng: quantile_interval(rng.exponential(1, 500), q), stats.expon.ppf(q))
    assert 0.93 <= share <= 0.99


def dependent(rng, count):
    return signal.lfilter([1], [1, -0.95], rng.normal(0, 1, count + 200))[200:]


def test_percentiles_over_replications_stand_dependence_and_those_of_one_run_do_not():
    true = stats.norm.ppf(0.9, scale=1 / math.sqrt(1 - 0.95**2))
    assert covered(lambda rng: quantile_interval(dependent(rng, 5_000), 0.9), true) < 0.6
    replications = covered(
        lambda rng: percentile_interval((dependent(rng, 5_000) for _ in range(10)), 0.9), true
    )
    assert honest(replications)


def test_percentiles_of_too_few_samples_are_marked():
    assert {q: least_samples(q / 100) for q in MIN_SAMPLES} == MIN_SAMPLES
    assert [least_samples(q) for q in (0.95, 0.999, 0.01)] == [40, 2_000, 200]
    assert not quantile_interval(range(199), 0.99).trusted
    assert quantile_interval(range(200), 0.99).trusted
    assert percentile_interval([range(200), range(200)], 0.99).trusted
    made = percentile_interval([range(200), range(199)], 0.99)
    assert not made.trusted
    assert made.count == 2
    silent = percentile_interval([range(200), []], 0.99)
    assert math.isnan(silent.estimate)
    assert not silent.trusted
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile_interval(SLEEP, 99)


# Warm-up


def plain_mser(series):
    """MSER-5 as it is written down."""
    count = len(series) // BATCH
    means = np.array([series[BATCH * i : BATCH * (i + 1)].mean() for i in range(count)])
    error = [
        np.sum((means[d:] - means[d:].mean()) ** 2) / (count - d) ** 2 for d in range(count // 2 + 1)
    ]
    return BATCH * int(np.argmin(error))


def transient(rng, count=600):
    """Mean 1 in the long run; begins at 6, and forgets it over 15 observations."""
    noise = signal.lfilter([1], [1, -0.5], rng.normal(0, 1, count))
    return 1 + 5 * np.exp(-np.arange(count) / 15) + noise


def test_mser_5_as_written_down():
    for seed in range(20):
        series = transient(np.random.default_rng(seed), 603) * 1e9
        assert warm_up(series).index == plain_mser(series)
    assert max(warm_up(transient(np.random.default_rng(seed))).index for seed in range(20)) > 30


def test_where_a_step_ends():
    series = np.random.default_rng(1).normal(0, 0.1, 1_000)
    series[:100] += 3
    made = warm_up(series)
    assert (made.index, made.settled) == (100, True)


def test_no_steady_state_is_not_settled():
    assert not warm_up(np.arange(1_000.0)).settled
    assert not warm_up(np.arange(9.0)).settled
    assert not warm_up([nan] * 100).settled
    late = np.zeros(1_000)
    late[:600] = np.linspace(5, 0, 600)
    assert warm_up(late).index <= 500
    assert not warm_up(late).settled
    assert warm_up(np.ones(100)) == warm_up(np.zeros(100))
    assert warm_up(np.ones(100)).index == 0


def after_warm_up(rng, *, cut):
    runs = [transient(rng) for _ in range(10)]
    index = warm_up(np.mean(runs, axis=0)).index if cut else 0
    return mean_interval([run[index:].mean() for run in runs])


def test_means_are_covered_without_the_transient_and_not_with_it():
    assert honest(covered(partial(after_warm_up, cut=True), 1))
    assert covered(partial(after_warm_up, cut=False), 1) < 0.5


# Sequential stopping


def outputs(seed):
    rng = np.random.default_rng([5, seed])
    return {"rough": rng.normal(1, 0.3), "fine": rng.normal(100, 0.1), "odd": nan}


def test_replications_stop_when_precise_at_two_looks():
    made = replicate(outputs, itertools.count(), {"rough": 0.1, "fine": 0.01})
    assert made.reached
    assert made.missed == ()
    assert made.seeds == tuple(range(len(made.seeds)))
    assert len(made.seeds) % 5 == 0
    assert made.values["rough"].tolist() == [outputs(seed)["rough"] for seed in made.seeds]
    precise = {
        count: mean_interval(made.values["rough"][:count]).relative_half_width <= 0.1
        for count in range(5, len(made.seeds) + 1, 5)
    }
    looks = list(precise.values())
    assert looks[-2:] == [True, True]
    assert [True, True] not in [looks[i : i + 2] for i in range(len(looks) - 2)]
    assert made.interval("rough") == mean_interval(made.values["rough"])
    assert made.interval("rough", 0.5).half_width < made.interval("rough").half_width


def test_what_is_precise_at_once_takes_two_looks():
    assert len(replicate(outputs, itertools.count(), {"fine": 0.01}).seeds) == 10
    assert len(replicate(outputs, itertools.count(), {"fine": 0.01}, least=20, step=1).seeds) == 21
    only = replicate(outputs, itertools.count(), {"fine": 0.01}, least=5, most=5)
    assert (len(only.seeds), only.reached) == (5, True)


def test_what_is_not_reached_is_named():
    made = replicate(outputs, itertools.count(7), {"odd": 9, "fine": 0.01, "rough": 1e-9}, most=12)
    assert made.seeds == tuple(range(7, 19))
    assert made.missed == ("odd", "rough")
    assert not made.reached
    ran_out = replicate(outputs, range(8), {"rough": 1e-9})
    assert (len(ran_out.seeds), ran_out.missed) == (8, ("rough",))
    none = replicate(outputs, [], {"rough": 0.1})
    assert (none.seeds, none.missed, dict(none.values)) == ((), ("rough",), {})


def backwards(function, seeds):
    return reversed([function(seed) for seed in seeds])


def through_pickle(function, seeds):
    return map(pickle.loads(pickle.dumps(function)), seeds)


def test_the_mapper_changes_nothing():
    watch = {"rough": 0.1}
    plain = replicate(outputs, itertools.count(), watch)
    with ThreadPoolExecutor(4) as pool:
        for mapper in (pool.map, backwards, through_pickle):
            made = replicate(outputs, itertools.count(), watch, mapper=mapper)
            assert made.seeds == plain.seeds
            assert {name: made.values[name].tobytes() for name in made.values} == {
                name: plain.values[name].tobytes() for name in plain.values
            }


def test_replications_that_make_no_sense():
    for seeds in ([1, 2, 3, 2, 5], [1, 2, 3, 4, 5, 1]):
        with pytest.raises(ValueError, match="seed came twice"):
            replicate(outputs, seeds, {"rough": 1e-9})
    with pytest.raises(ValueError, match="no run has wrong"):
        replicate(outputs, itertools.count(), {"wrong": 0.1})
    with pytest.raises(ValueError, match="not every run has b"):
        replicate(lambda seed: {"a": 1.0} | ({"b": 1.0} if seed else {}), itertools.count(), {"a": 0.1})
    for counts in ({"least": 1}, {"least": 9, "most": 8}, {"step": 0}):
        with pytest.raises(ValueError, match="wanted 2 <= least"):
            replicate(outputs, itertools.count(), {"rough": 0.1}, **counts)


def stopped_soundly(rng):
    made = replicate(lambda seed: {"x": rng.normal(1, 0.2)}, itertools.count(), {"x": 0.12})
    return made.interval("x")


def stopped_at_the_first_chance(rng):
    """Wrong: looks from the second replication on, after each, and at once believes it is done."""
    values = list(rng.normal(1, 0.2, 2))
    while normal_interval(values).relative_half_width > 0.12:
        values.append(rng.normal(1, 0.2))
    return normal_interval(values)


def test_means_are_covered_after_sequential_stopping():
    assert honest(covered(stopped_soundly, 1))


def test_stopping_at_the_first_chance_is_caught():
    assert covered(stopped_at_the_first_chance, 1) < 0.85


# Verdicts


@pytest.mark.parametrize(
    ("low", "high", "better", "verdict"),
    [
        (0.11, 0.2, "higher", "PASS"),
        (0.1, 0.1, "higher", "PASS"),
        (0.0, 0.09, "higher", "FAIL"),
        (0.09, 0.3, "higher", "UNDECIDED"),
        (0.0, 0.1, "higher", "UNDECIDED"),
        (0.11, 0.2, "lower", "FAIL"),
        (0.1, 0.1, "lower", "PASS"),
        (0.0, 0.09, "lower", "PASS"),
        (0.1, 0.2, "lower", "UNDECIDED"),
        (0.0, inf, "higher", "UNDECIDED"),
        (0.2, inf, "higher", "PASS"),
    ],
)
def test_the_whole_interval_decides(low, high, better, verdict):
    made = decide(Interval((low + high) / 2, low, high, 10), 0.1, better)
    assert made.verdict == verdict
    if verdict != "UNDECIDED":
        assert (made.more_runs, made.capped, str(made)) == (0, False, verdict)


@pytest.mark.parametrize(
    ("bound", "better"), [(0, "higher"), (0, "lower"), (1, "higher"), (1, "lower")]
)
def test_how_many_runs_decide(bound, better):
    """Standard deviation 1, distance 0.5: t(17)/sqrt(18) = 2.110/4.243 is the first below (by z 16)."""
    half = 2.262 / math.sqrt(10)  # t(9)
    made = decide(Interval(0.5, 0.5 - half, 0.5 + half, 10), bound, better)
    assert made.more_runs == 8
    assert str(made) == "UNDECIDED: about 8 further replications"


def test_an_estimate_at_the_bound_takes_more_than_anybody_says():
    made = decide(Interval(0.5, 0.0, 1.0, 10), 0.5)
    assert made.capped
    assert str(made) == "UNDECIDED: more than 10000 further replications"
    assert str(decide(Interval(0.5, 0.0, 1.0, 10), 0.5, most_more=7)).endswith(
        "more than 7 further replications"
    )
    assert decide(Interval(0.51, 0.0, 1.0, 10), 0.5, most_more=10**6).more_runs > 10_000


@pytest.mark.parametrize("values", [[], [1.0], [1.0, nan]])
def test_without_an_interval_nobody_knows(values):
    made = decide(mean_interval(values), 0.5)
    assert (made.verdict, made.more_runs) == ("UNDECIDED", None)
    assert "too few replications" in str(made)


def test_a_value_at_the_bound_seldom_passes_and_seldom_fails():
    verdicts = Counter(
        decide(mean_interval(np.random.default_rng(seed).normal(1, 1, 8)), 1).verdict
        for seed in range(TRIALS)
    )
    assert 0.9 < verdicts["UNDECIDED"] / TRIALS < 0.98
    by_the_estimate = np.mean(
        [np.random.default_rng(seed).normal(1, 1, 8).mean() > 1 for seed in range(TRIALS)]
    )
    assert by_the_estimate > 0.4  # wrong: the estimate alone passes every other one


# The state of the load

US = 1_000


def queue(load, count, seed, burst=0, at=0.0, service=None):
    """M/M/1 by Lindley's recursion, a service of 1 ms; ``burst`` more arrive at once."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / load, count))
    arrival = np.sort(np.append(arrival, np.full(burst, arrival[int(at * (count - 1))])))
    served = (service or exponential)(rng, len(arrival))
    walk = np.append(0, np.cumsum(served[:-1] - np.diff(arrival)))
    ended = arrival + walk - np.minimum.accumulate(walk) + served
    return [np.rint(ms * 1_000 * US).astype(np.int64) for ms in (arrival, ended)]


def states(count, seeds=25, **of):
    return Counter(load_state(*queue(count=count, seed=seed, **of)) for seed in range(seeds))


@pytest.mark.parametrize(
    ("load", "count"), [(0.5, 20_000), (0.9, 20_000), (0.95, 20_000), (0.9, 1_000)]
)
def test_below_one_is_stable(load, count):
    seen = states(count, load=load)
    assert seen[LoadState.STABLE] >= 23
    assert not seen[LoadState.OVERLOADED]


@pytest.mark.parametrize(("load", "count"), [(1.05, 50_000), (1.3, 20_000), (1.3, 2_000)])
def test_above_one_is_overloaded(load, count):
    assert states(count, load=load)[LoadState.OVERLOADED] == 25


def test_one_itself_is_not_taken_for_overload():
    assert states(20_000, seeds=200, load=1.0)[LoadState.OVERLOADED] <= 4


def regression_on_time(arrival, ended):
    """Wrong: least squares on the number in the system, as if its values were independent."""
    times = np.linspace(arrival[0], arrival[-1], 21)
    inside = np.searchsorted(arrival, times, "right") - np.searchsorted(np.sort(ended), times, "right")
    made = stats.linregress(np.arange(21), inside)
    return made.slope > 0 and made.pvalue / 2 < 0.05**2


def test_regression_on_time_is_caught():
    taken = [regression_on_time(*queue(1.0, 20_000, seed)) for seed in range(200)]
    assert sum(taken) > 20


@pytest.mark.parametrize("at", [0, 0.05, 0.5, 0.99])
@pytest.mark.parametrize(("load", "burst"), [(0.5, 500), (0.5, 8_000), (0.8, 2_000)])
def test_a_burst_is_a_backlog(load, burst, at):
    seen = states(10_000, seeds=5, load=load, burst=burst, at=at)
    assert seen == {LoadState.BACKLOGGED: 5}


def test_overload_that_ends_is_a_backlog():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        gaps = rng.exponential(1, 20_000)
        gaps[5_000:7_000] /= 3
        gaps[:5_000] *= 2
        gaps[7_000:] *= 2
        arrival = np.cumsum(gaps * 1_000_000).astype(np.int64)
        served = rng.exponential(1_000_000, 20_000)
        walk = np.append(0, np.cumsum(served[:-1] - np.diff(arrival)))
        ended = arrival + (walk - np.minimum.accumulate(walk) + served).astype(np.int64)
        assert load_state(arrival, ended) is LoadState.BACKLOGGED


def test_many_servers_that_fill_are_stable():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        arrival = np.cumsum(rng.exponential(10_000, 20_000)).astype(np.int64)
        ended = arrival + rng.exponential(1_000_000, 20_000).astype(np.int64)
        assert load_state(arrival, ended) is LoadState.STABLE


def test_without_chance():
    tick = np.arange(2_000, dtype=np.int64) * 1_000
    assert load_state(tick, tick + 900) is LoadState.STABLE
    assert load_state(tick, tick * 3 // 2 + 900) is LoadState.OVERLOADED
    assert load_state(tick, np.full_like(tick, -1)) is LoadState.OVERLOADED
    up_then_level = tick + np.minimum(tick, tick[600]) // 2  # grows until the 900th
    assert load_state(tick, up_then_level) is LoadState.BACKLOGGED


def test_load_of_few_requests():
    none = np.zeros(0, np.int64)
    assert load_state(none, none) is LoadState.STABLE
    one = np.zeros(1, np.int64)
    assert load_state(one, one + 5) is LoadState.STABLE
    with pytest.raises(ValueError, match="1 arrivals and 0 ends"):
        load_state(one, none)
    with pytest.raises(ValueError, match="before it arrived"):
        load_state(one + 5, one)


def test_the_order_of_requests_does_not_matter():
    arrival, ended = queue(0.5, 10_000, 1, burst=500, at=0.5)
    order = np.random.default_rng(0).permutation(len(arrival))
    assert load_state(arrival[order], ended[order]) is LoadState.BACKLOGGED
