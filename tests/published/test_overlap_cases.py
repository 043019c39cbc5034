"""Published measurements of overlap: the engine must give the schematic's answer exactly."""

import tomllib
from fractions import Fraction
from pathlib import Path

import pytest
from support import MS, burst, profile, run

from caltrio.scenario import semantics_from
from caltrio.tomlfile import converter
from caltrio.workload.requests import Request

# Facts of NVIDIA's and Hugging Face's posts, as in shared/published/overlap-cases.toml.
CASES = {
    "one copy engine, issue order": (
        {"dma": "half_duplex", "dma_order": "issue"},
        Fraction(12, 12),
    ),
    "one copy engine, all H2D first": (
        {"dma": "half_duplex", "dma_order": "ready"},
        Fraction(8, 12),
    ),
    "two copy engines, per job": ({"dma": "full_duplex", "dma_order": "issue"}, Fraction(6, 12)),
    "two copy engines, compute idle": (
        {"dma": "full_duplex", "dma_order": "ready", "completion_signal": "compute_idle"},
        Fraction(9, 12),
    ),
}
COMMON = {"completion_signal": "per_job", "slot_release": "wait", "engines": 4}
FILE = Path(__file__).parents[2].parent / "shared" / "published" / "overlap-cases.toml"
STAGE = 3 * MS


def fraction_of_sequential(fields: dict, jobs: int = 4) -> Fraction:
    semantics = semantics_from(COMMON | fields, converter(), "case")
    timing = profile(h2d=STAGE, compute=STAGE, d2h=STAGE)
    done = run(burst(jobs), semantics=semantics, timing=timing, max_inflight=jobs)
    end = max(done.jobs.column("d2h_end_ns").to_pylist())
    return Fraction(end, 3 * STAGE * jobs)


@pytest.mark.parametrize("name", CASES)
def test_fraction(name):
    fields, expected = CASES[name]
    assert fraction_of_sequential(fields) == expected


@pytest.mark.skipif(not FILE.exists(), reason="the published cases are not beside the project")
def test_every_published_fraction():
    cases = [case for case in tomllib.loads(FILE.read_text())["case"] if "fraction" in case]
    assert len(cases) == 4
    for case in cases:
        assert fraction_of_sequential(case["semantics"], case["jobs"]) == Fraction(case["fraction"])


def decode_loop(max_inflight: int) -> float:
    """Seconds of 8192 steps whose host work is 24.0 % of 300.6 s, as two sequences.

    The host prepares each step (``submit``), so one in flight cannot hide it.
    """
    steps = 8192
    step_ns = 300.6e9 / steps
    device = round(0.760 * step_ns)
    timing = profile(submit=round(step_ns) - device - 2, compute=device)
    requests = [Request(index, 0, 1, steps // 2) for index in range(2)]
    done = run(requests, timing=timing, max_inflight=max_inflight)
    return done.summary.span_ns / 1e9


def test_decode_loop_with_one_in_flight():
    assert decode_loop(1) == pytest.approx(300.6, rel=1e-6)


def test_decode_loop_with_two_in_flight():
    # The source measured 234.5 s; the ideal, all host work hidden, is 300.6 x 0.760 = 228.5 s.
    seconds = decode_loop(2)
    assert seconds == pytest.approx(228.5, rel=0.02)
    assert seconds < 234.5
