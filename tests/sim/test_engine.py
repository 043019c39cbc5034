"""Each field of the semantics, on schedules worked out by hand. Stages of 3 ms unless said."""

import pytest
from attrs import evolve
from support import MS, burst, profile, run

from caltrio.semantics import (
    PRESETS,
    CompletionOrder,
    CompletionSignal,
    Dma,
    EngineSemantics,
    SlotRelease,
    SubmitWhenFull,
)
from caltrio.workload.requests import Request
from sim.engine import split_permille

T = 3 * MS
EQUAL = profile(h2d=T, compute=T, d2h=T)
FULL = EngineSemantics(engines=2)


def times(done, *columns):
    rows = done.jobs.sort_by("job_id").to_pylist()
    return [tuple(row[column] / MS for column in columns) for row in rows]


def ends(done):
    return [end for (end,) in times(done, "d2h_end_ns")]


def test_one_in_flight_is_strictly_sequential():
    for preset in PRESETS.values():
        done = run(burst(3), semantics=preset.semantics, timing=EQUAL)
        assert ends(done) == [9, 18, 27], preset.name


def test_without_overlap_a_job_holds_the_device():
    semantics = evolve(FULL, overlap=False)
    done = run(burst(3), semantics=semantics, timing=EQUAL, max_inflight=2)
    assert times(done, "h2d_start_ns", "d2h_end_ns") == [(0, 9), (9, 18), (18, 27)]


def test_full_duplex_fills_the_pipeline():
    done = run(burst(3), semantics=FULL, timing=EQUAL, max_inflight=2)
    # The third job waits for the first one's slot, freed as Wait() returns at 9.
    assert times(done, "h2d_start_ns", "compute_start_ns", "d2h_end_ns") == [
        (0, 3, 9),
        (3, 6, 12),
        (9, 12, 18),
    ]


def test_half_duplex_shares_one_channel():
    semantics = evolve(FULL, dma=Dma.HALF_DUPLEX)
    done = run(burst(2), semantics=semantics, timing=EQUAL, max_inflight=2)
    assert times(done, "h2d_start_ns", "d2h_start_ns", "d2h_end_ns") == [(0, 6, 9), (3, 9, 12)]


def test_dies_are_a_pipeline():
    semantics = evolve(FULL, compute_stages=(0.5, 0.5))
    timing = profile(compute=10 * MS)
    done = run(burst(2), semantics=semantics, timing=timing, max_inflight=2)
    rows = done.jobs.sort_by("job_id").to_pylist()
    assert [row["die_start_ns"] for row in rows] == [[1, 5 * MS + 1], [5 * MS + 1, 10 * MS + 1]]
    assert rows[1]["die_end_ns"][1] == 15 * MS + 1


@pytest.mark.parametrize(("parts", "expected"), [((500, 500), [3, 4]), ((333, 667), [2, 5])])
def test_split_loses_nothing(parts, expected):
    assert split_permille(7, parts) == expected


@pytest.mark.parametrize(
    ("speeds", "end"), [((1.0, 0.5), 20.0), ((1.0, 1.0), 10.0), ((1.0, 0.8), 12.5)]
)
def test_two_equal_jobs_share_compute(speeds, end):
    semantics = evolve(FULL, compute_sharing=speeds)
    done = run(burst(2), semantics=semantics, timing=profile(compute=10 * MS), max_inflight=2)
    # H2D of the second starts 1 ns later, and so does its compute.
    first, second = (row["compute_end_ns"] for row in done.jobs.sort_by("job_id").to_pylist())
    assert first == pytest.approx(end * MS, abs=3)
    assert second == pytest.approx(end * MS, abs=3)


def test_sharing_gives_back_the_speed():
    """A short job beside a long one: 4 ms at half speed take 8, then the long one is alone."""
    semantics = evolve(FULL, compute_sharing=(1.0, 0.5))
    timing = profile(compute=0, per_token_ps=10**9)  # 1 ms a token
    requests = [Request(0, 0, 10, 0), Request(1, 0, 4, 0)]
    done = run(requests, semantics=semantics, timing=timing, max_inflight=2)
    first, second = (row["compute_end_ns"] for row in done.jobs.sort_by("job_id").to_pylist())
    assert second == pytest.approx(8 * MS, abs=3)
    assert first == pytest.approx(14 * MS, abs=3)


def test_more_jobs_than_speeds_queue():
    semantics = EngineSemantics(engines=3, compute_sharing=(1.0, 0.5))
    done = run(burst(3), semantics=semantics, timing=profile(compute=10 * MS), max_inflight=3)
    starts = [start for (start,) in times(done, "compute_start_ns")]
    assert starts[2] == pytest.approx(20, abs=1e-3)


@pytest.mark.parametrize(
    ("release", "third_h2d"),
    [(SlotRelease.H2D, 3), (SlotRelease.COMPUTE, 6), (SlotRelease.D2H, 9), (SlotRelease.WAIT, 11)],
)
def test_slot_release(release, third_h2d):
    """One engine, two in flight, infer() blocks: the slot's release is the next job's H2D."""
    semantics = EngineSemantics(engines=1, slot_release=release, submit_when_full=SubmitWhenFull.BLOCK)
    timing = profile(h2d=T, compute=T, d2h=T, interrupt=2 * MS)
    done = run(burst(2), semantics=semantics, timing=timing, max_inflight=2)
    assert times(done, "h2d_start_ns")[1] == (third_h2d,)


def test_busy_when_full_fails_the_job_without_wait():
    """Submitted one after another into the only slot: the second infer() returns 17."""
    semantics = EngineSemantics(engines=1, submit_when_full=SubmitWhenFull.BUSY)
    with pytest.raises(ValueError, match="code 17"):
        run(burst(2), semantics=semantics, timing=EQUAL, max_inflight=2)


def test_coalesced_holds_d2h_until_queued_computes_drain():
    semantics = evolve(FULL, completion_signal=CompletionSignal.COMPUTE_IDLE)
    done = run(burst(2), semantics=semantics, timing=EQUAL, max_inflight=2)
    assert times(done, "compute_end_ns", "d2h_start_ns") == [(6, 9), (9, 12)]


@pytest.mark.parametrize(
    ("order", "short_waits_until"), [(CompletionOrder.IN_ORDER, 10), (CompletionOrder.ANY, 2)]
)
def test_completion_order(order, short_waits_until):
    semantics = EngineSemantics(compute_sharing=(1.0, 1.0), completion_order=order)
    timing = profile(compute=0, per_token_ps=10**9)
    requests = [Request(0, 0, 10, 0), Request(1, 0, 2, 0)]
    done = run(requests, semantics=semantics, timing=timing, max_inflight=2)
    waited = done.jobs.sort_by("job_id").column("waited_ns").to_pylist()
    assert waited[1] == pytest.approx(short_waits_until * MS, abs=5)


@pytest.mark.parametrize("dma_order", ["ready", "issue"])
@pytest.mark.parametrize("dma", ["half_duplex", "full_duplex"])
@pytest.mark.parametrize("signal", ["per_job", "compute_idle"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("release", ["h2d", "compute", "d2h", "wait"])
def test_no_combination_deadlocks(dma_order, dma, signal, overlap, release):
    from caltrio.scenario import semantics_from
    from caltrio.tomlfile import converter

    fields = {
        "dma_order": dma_order,
        "dma": dma,
        "completion_signal": signal,
        "overlap": overlap,
        "slot_release": release,
        "submit_when_full": "block",
    }
    semantics = semantics_from(fields, converter(), "test")
    done = run(burst(4, output=3), semantics=semantics, timing=EQUAL, max_inflight=3)
    assert done.summary.outcomes == {"completed": 4}
