import math
import statistics

import numpy as np
import pytest
from attrs import evolve, frozen
from support import profile

from caltrio.costs import Costs, jitter_factor, spread_of
from caltrio.errors import InputError
from caltrio.manifest import TaskKind, load_manifest
from caltrio.timing import (
    Distribution,
    Jitter,
    Source,
    Stage,
    builtin_profiles,
    load_timing,
    mix64,
    parse_timing,
)

TEXT = builtin_profiles()["qwen3-8b"]


@frozen
class Shape:
    kind: TaskKind
    token_count: int
    past_len: int
    request_id: int = 0
    step: int = 0
    job_id: int = 0


def fault(old, new):
    assert old in TEXT
    with pytest.raises(InputError) as caught:
        parse_timing(TEXT.replace(old, new, 1), "mine.toml")
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("mine.toml: ")
    return text.removeprefix("mine.toml: ")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("schema = 1", "schema = 2", "schema is 2; this version reads 1"),
        ("schema = 1", "shema = 1", "unknown key 'shema'; did you mean 'schema'?"),
        ("[h2d]\nlatency", "[h2d]\nlatncy", "h2d: unknown key 'latncy'; did you mean 'latency'?"),
        ('"40us"', "40", "submit.time.value: 40 has no unit"),
        ('"40us"', '"-40us"', "submit.time.value: '-40us' is negative"),
        ('"40us"', '"nanus"', "submit.time.value: 'nanus' is not a duration"),
        ('"40us"', "nan", "submit.time.value: nan has no unit"),
        ('"12GB/s"', '"0GB/s"', "h2d.bandwidth.value: '0GB/s' is a bandwidth of 0"),
        ('"12GB/s"', '"12GB"', "h2d.bandwidth.value: '12GB' is not a bandwidth"),
        ('source = "assumed"', 'source = "guessed"', "submit.time.source: Source 'guessed' is unknown"),
        ('note = "as h2d"', 'note = "  "', "d2h.latency: the note is empty; say where"),
        ("cv = 0.02", "cv = nan", "jitter.cv: nan is not a finite number"),
        ("cv = 0.02", "cv = 11", "jitter: cv is 11.0; give 0 to 10"),
        ("cv = 0.02", "cv = -0.1", "jitter: cv is -0.1; give 0 to 10"),
        ("cv = 0.02", 'cv = "0.02"', "jitter.cv: '0.02' is not a number"),
        ("cv = 0.02", "cv = 0.02\nseed = -1", "jitter: seed is -1; give 0 to 2**64 - 1"),
        ('"lognormal"', '"exponential"', "jitter: cv is 0.02; that of the exponential"),
        ('"lognormal"', '"lognormol"', "jitter.distribution: Distribution 'lognormol' is unknown; did"),
        ('["compute"]', '["compte"]', "jitter: stage 'compte' is unknown; did you mean 'compute'?"),
        ('["compute"]', '"compute"', "jitter.stages: 'compute' is not a list"),
    ],
)
def test_a_bad_profile_is_one_line_that_names_key_and_value(old, new, text):
    assert fault(old, new).startswith(text)


def test_a_missing_table_is_named():
    cut = TEXT.index("[interrupt]"), TEXT.index("[postprocess]")
    with pytest.raises(InputError, match="key 'interrupt' is missing; add it"):
        parse_timing(TEXT[: cut[0]] + TEXT[cut[1] :], "mine.toml")


def test_a_uniform_factor_has_a_largest_cv():
    Jitter(Distribution.UNIFORM, cv=0.577)
    with pytest.raises(ValueError, match="cv is 0.6; a uniform factor"):
        Jitter(Distribution.UNIFORM, cv=0.6)


def test_the_shipped_profile_says_where_each_number_is_from():
    shipped = load_timing("qwen3-8b")
    assert shipped == parse_timing(TEXT, "here")
    figures = shipped.figures()
    assert len(figures) == 14
    assert {figure.source for figure in figures.values()} == {Source.ASSUMED}
    assert figures["compute.decode.per_pair"].value == 368_640


def test_a_profile_from_a_file_is_relative_to_its_scenario(tmp_path):
    (tmp_path / "card.toml").write_text(TEXT, encoding="utf-8")
    assert load_timing("card.toml", tmp_path).name == "qwen3-8b"
    with pytest.raises(InputError, match=r"none\.toml: cannot be read"):
        load_timing("none.toml", tmp_path)
    with pytest.raises(InputError, match="one that ships; shipped: quick, qwen3-8b"):
        load_timing("qwen3", tmp_path)


def shipped_costs():
    return Costs(evolve(load_timing("qwen3-8b"), jitter=Jitter()), load_manifest(), 1)


@pytest.mark.parametrize(
    ("stage", "shape", "ns"),
    [
        (Stage.SUBMIT, Shape(TaskKind.DECODE, 1, 1000), 40_000),
        (Stage.INTERRUPT, Shape(TaskKind.DECODE, 1, 1000), 15_000),
        (Stage.POSTPROCESS, Shape(TaskKind.DECODE, 1, 1000), 100_000),
        (Stage.CLIENT, Shape(TaskKind.DECODE, 1, 1000), 500_000),
        # 8 bytes at 12 GB/s: 0.67 ns, rounded up
        (Stage.H2D, Shape(TaskKind.DECODE, 1, 1000), 8_001),
        # 8,192 bytes: 682.67 ns
        (Stage.H2D, Shape(TaskKind.PREFILL_IDS, 1024, 0), 8_683),
        # 303,872 bytes of logits: 25,322.67 ns
        (Stage.D2H, Shape(TaskKind.DECODE, 1, 1000), 33_323),
        (Stage.D2H, Shape(TaskKind.PREFILL_IDS, 1024, 0), 33_323),
        # 37.84 ms + 1,001 pairs * 368.64 ns = 37,840,000 + 369,008.64
        (Stage.COMPUTE, Shape(TaskKind.DECODE, 1, 1000), 38_209_009),
        # 37.84 ms + 1,024 * 138.915 µs + 524,800 pairs * 5.898 ns
        (Stage.COMPUTE, Shape(TaskKind.PREFILL_IDS, 1024, 0), 37_840_000 + 142_248_960 + 3_095_271),
        # a second chunk: 10 * 100 + 55 pairs = 6,222.39 ns
        (Stage.COMPUTE, Shape(TaskKind.PREFILL_IDS, 10, 100), 37_840_000 + 1_389_150 + 6_223),
    ],
)
def test_durations_by_hand(stage, shape, ns):
    assert shipped_costs().ns(stage, shape) == ns


SAMPLES = 20_000


def drawn(distribution, cv, seed, stage, request, step):
    index = list(Distribution).index(distribution)
    return jitter_factor(index, spread_of(distribution, cv), np.uint64(seed), int(stage), request, step)


def test_the_compiled_factor_is_its_formula():
    for request in range(200):
        key = mix64(mix64(mix64(7 ^ 2) ^ request) ^ 5)
        first, second = ((mix64(key) >> 11) + 0.5) / 2**53, (mix64(key ^ 1) >> 11) / 2**53
        normal = math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)
        variance = math.log1p(0.25)
        expected = {
            Distribution.UNIFORM: 1 + 0.5 * math.sqrt(3) * (2 * first - 1),
            Distribution.EXPONENTIAL: -math.log(first),
            Distribution.LOGNORMAL: math.exp(math.sqrt(variance) * normal - variance / 2),
        }
        for distribution, factor in expected.items():
            assert drawn(distribution, 0.5, 7, 2, request, 5) == pytest.approx(factor, rel=1e-14)


@pytest.mark.parametrize(
    ("distribution", "cv"),
    [
        (Distribution.UNIFORM, 0.1),
        (Distribution.UNIFORM, 0.577),
        (Distribution.EXPONENTIAL, 1.0),
        (Distribution.LOGNORMAL, 0.02),
        (Distribution.LOGNORMAL, 0.5),
        (Distribution.LOGNORMAL, 1.0),
    ],
)
def test_jitter_has_mean_one_and_the_cv_stated(distribution, cv):
    factors = [
        drawn(distribution, cv, 7, Stage.COMPUTE, index // 50, index % 50) for index in range(SAMPLES)
    ]
    assert min(factors) > 0
    assert statistics.fmean(factors) == pytest.approx(1, abs=5 * cv / math.sqrt(SAMPLES))
    assert statistics.stdev(factors) == pytest.approx(cv, rel=0.06)


def test_jitter_none_is_one():
    assert drawn(Distribution.NONE, 0.5, 1, 2, 3, 4) == 1.0


def test_jitter_depends_on_each_of_its_arguments_and_on_nothing_else():
    def factor(seed=1, stage=2, request=3, step=4):
        return drawn(Distribution.LOGNORMAL, 0.5, seed, stage, request, step)

    assert factor() == factor()
    others = [
        factor(seed=2),
        factor(stage=3),
        factor(request=4),
        factor(step=5),
        factor(request=4, step=3),
    ]
    assert len({factor(), *others}) == 6


def test_neighbouring_jobs_are_not_correlated():
    factors = [drawn(Distribution.UNIFORM, 0.5, 1, 2, 0, step) for step in range(SAMPLES)]
    assert abs(statistics.correlation(factors[1:], factors[:-1])) < 0.04
    other = [drawn(Distribution.UNIFORM, 0.5, 1, 3, 0, step) for step in range(SAMPLES)]
    assert abs(statistics.correlation(factors, other)) < 0.04


def test_mix64_is_that_of_the_paper():
    # the first outputs of SplitMix64 seeded with 0: its state is 0, then the golden gamma
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_only_the_stages_named_are_jittered():
    timing = profile(submit=1_000_000, jitter=Jitter(Distribution.LOGNORMAL, 0.5))
    costs = Costs(timing, load_manifest(), 1)
    shapes = [Shape(TaskKind.DECODE, 1, 0, request_id=index) for index in range(50)]
    assert {costs.ns(Stage.SUBMIT, shape) for shape in shapes} == {1_000_000}
    assert len({costs.ns(Stage.COMPUTE, shape) for shape in shapes}) == 50


def test_a_duration_does_not_depend_on_what_was_asked_before():
    timing = profile(jitter=Jitter(Distribution.LOGNORMAL, 0.5))
    shapes = [Shape(TaskKind.DECODE, 1, 0, request_id=index, job_id=index) for index in range(20)]
    forward, backward = (Costs(timing, load_manifest(), 1) for _ in range(2))
    there = [forward.ns(Stage.COMPUTE, shape) for shape in shapes]
    back = [backward.ns(Stage.COMPUTE, evolve(shape, job_id=99)) for shape in reversed(shapes)]
    assert there == back[::-1]


@pytest.mark.parametrize("seeds", [(2, 0), (1, 5)])
def test_the_seed_of_the_run_and_that_of_the_profile_both_count(seeds):
    run, own = seeds
    shape = Shape(TaskKind.DECODE, 1, 0)

    def ns(run, own):
        timing = profile(jitter=Jitter(Distribution.LOGNORMAL, 0.5, seed=own))
        return Costs(timing, load_manifest(), run).ns(Stage.COMPUTE, shape)

    assert ns(run, own) != ns(1, 0)
