import json
import math

import numpy as np
import pyarrow as pa
import pytest

from caltrio.observe.metrics import (
    MIN_SAMPLES,
    Slo,
    distribution,
    goodput_per_s,
    occupancy,
    summarise,
    token_latencies,
)
from caltrio.observe.records import JOB_SCHEMA, REQUEST_SCHEMA

WORDS = {"kind": "decode", "state": "succeeded", "status": "OK", "outcome": "completed"}


def table(schema, rows):
    plain = [{name: row.get(name, WORDS.get(name)) for name in schema.names} for row in rows]
    return pa.table(
        {field.name: pa.array([row[field.name] for row in plain], field.type) for field in schema},
        schema=schema,
    )


def job(request, step, engine, *times, state="succeeded"):
    """Times: infer, submitted, H2D end, compute start and end, D2H start and end, wait, end, answer."""
    names = (
        "infer_ns", "submitted_ns", "h2d_end_ns", "compute_start_ns", "compute_end_ns",
        "d2h_start_ns", "d2h_end_ns", "waited_ns", "ended_ns", "answered_ns",
    )  # fmt: skip
    row = dict(zip(names, times, strict=False))
    return {
        "job_id": 10 * request + step, "request_id": request, "step": step, "engine": engine,
        "past_len": step, "token_count": 1,
        "state": state, "h2d_start_ns": row.get("submitted_ns"),
        "die_start_ns": [times[3]] if times else None, "die_end_ns": [times[4]] if times else None,
        **row,
    }  # fmt: skip


def request(index, arrival, admitted, first, last, ended, tokens, *, kv=0, **rest):
    return {
        "request_id": index, "arrival_ns": arrival, "admitted_ns": admitted, "first_token_ns": first,
        "last_token_ns": last, "ended_ns": ended, "tokens_out": tokens, "output_tokens": 3,
        "prompt_tokens": 1, "kv_tokens": kv, **rest,
    }  # fmt: skip


JOBS = table(
    JOB_SCHEMA,
    [
        job(0, 0, 0, 10, 12, 20, 20, 80, 80, 90, 95, 98, 100),
        job(1, 0, 1, 60, 62, 70, 80, 200, 200, 210, 215, 240, 250),
        job(0, 1, 0, 100, 102, 110, 200, 230, 230, 240, 245, 258, 260),
        job(0, 2, 0, 260, 262, 264, 264, 280, 280, 285, 290, 295, 300),
        job(1, 1, 1, 300, 303, 310, 310, 370, 370, 380, 385, 395, 400),
        job(3, 0, -1, state="failed"),
    ],
)
REQUESTS = table(
    REQUEST_SCHEMA,
    [
        request(0, 0, 10, 100, 300, 310, 3, kv=20),
        request(1, 50, 60, 250, 400, 410, 2, kv=30),
        request(2, 70, None, None, None, 70, 0, kv=99, outcome="refused", status="RESOURCE_EXHAUSTED"),
        request(3, 80, 260, None, None, 270, 0, kv=40, outcome="cancelled", status="CANCELLED"),
    ],
)
SPAN = 410


@pytest.fixture(scope="module")
def summary():
    return summarise(JOBS, REQUESTS)


def test_counts_and_rates(summary):
    assert (summary.span_ns, summary.requests, summary.jobs, summary.tokens) == (SPAN, 4, 6, 5)
    assert summary.outcomes == {"cancelled": 1, "completed": 2, "refused": 1}
    assert summary.refusals == {"RESOURCE_EXHAUSTED": 1}
    assert summary.tokens_per_s == pytest.approx(5e9 / SPAN)
    assert summary.requests_per_s == pytest.approx(2e9 / SPAN)


def test_loaded_rate_ends_with_the_last_admission(summary):
    # tokens at 100, 250 and 260; the last admission is at 260
    assert summary.loaded_tokens_per_s == pytest.approx(3e9 / 260)


def test_a_prefill_that_is_to_give_no_token_is_no_token():
    jobs = table(JOB_SCHEMA, [job(0, 0, 0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 8)])
    late = request(1, 0, 10, 11, 11, 12, 1)
    with_token = table(REQUEST_SCHEMA, [request(0, 0, 0, 8, 8, 9, 1), late])
    without = table(REQUEST_SCHEMA, [request(0, 0, 0, None, None, 9, 0, output_tokens=0), late])
    assert summarise(jobs, with_token).loaded_tokens_per_s == pytest.approx(1e9 / 10)
    assert summarise(jobs, without).loaded_tokens_per_s == 0


def test_latencies(summary):
    ttft, tpot, itl, e2e, queueing = (
        summary.ttft, summary.tpot, summary.itl, summary.e2e, summary.queueing,
    )  # fmt: skip
    assert (ttft.count, ttft.mean_ns, ttft.p50_ns, ttft.max_ns) == (2, 150, 150, 200)
    assert (tpot.count, tpot.mean_ns, tpot.max_ns) == (2, 125, 150)  # 200 / 2 and 150 / 1
    assert (itl.count, itl.p50_ns, itl.max_ns) == (3, 150, 160)
    assert (e2e.count, e2e.mean_ns, e2e.max_ns) == (2, 335, 360)
    assert (queueing.count, queueing.p50_ns, queueing.max_ns) == (3, 10, 180)


def test_itl_is_between_tokens_of_one_request_in_their_order():
    assert sorted(token_latencies(JOBS, REQUESTS)) == [40, 150, 160]
    assert sorted(token_latencies(JOBS.take([4, 3, 2, 1, 0, 5]), REQUESTS)) == [40, 150, 160]


def test_a_chunk_before_the_last_of_a_prompt_delivers_no_token():
    chunks = [job(0, step, 0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 100 * (step + 1)) for step in range(4)]
    jobs, whole = table(JOB_SCHEMA, chunks), request(0, 0, 0, 300, 400, 400, 2, prompt_tokens=3)
    late = request(1, 0, 350, None, None, 400, 0)
    found = summarise(jobs, table(REQUEST_SCHEMA, [whole, late]))
    assert (found.itl.count, found.itl.max_ns) == (1, 100)
    assert found.loaded_tokens_per_s == pytest.approx(1e9 / 350)


def test_utilisation(summary):
    busy = {name: round(share * SPAN, 6) for name, share in summary.utilisation.items()}
    assert busy == {
        "submitter": 2 + 2 + 2 + 2 + 3,
        "h2d": 8 + 8 + 8 + 2 + 7,
        "compute": 60 + 120 + 30 + 16 + 60,
        "d2h": 10 + 10 + 10 + 5 + 10,
        "completer": 3 + 25 + 13 + 5 + 10,
        "ping": 83 + 143 + 28,
        "pong": 153 + 82,
    }


def test_overlap_is_the_share_of_the_busy_time_with_two_jobs(summary):
    # on the device: 12-90, 62-210, 102-240, 262-285, 303-380
    assert summary.overlap == pytest.approx((28 + 108) / (228 + 23 + 77))


def test_kv(summary):
    assert summary.kv_mean_tokens == pytest.approx((20 * 300 + 30 * 350 + 40 * 10) / SPAN)
    assert summary.kv_peak_tokens == 90


def test_dies_are_told_apart():
    first = job(0, 0, 0, 0, 0, 0, 0, 40, 40, 50, 50, 50, 50)
    second = job(1, 0, 1, 0, 0, 0, 20, 60, 60, 70, 70, 70, 100)
    dies = [
        {**first, "die_start_ns": [0, 20], "die_end_ns": [20, 40]},
        {**second, "die_start_ns": [20, 45], "die_end_ns": [40, 60]},
        job(2, 0, -1, state="failed"),
    ]
    whole = table(REQUEST_SCHEMA, [request(0, 0, 0, 50, 50, 100, 1)])
    utilisation = summarise(table(JOB_SCHEMA, dies), whole).utilisation
    assert utilisation["die0"] == pytest.approx(0.4)
    assert utilisation["die1"] == pytest.approx(0.35)
    assert utilisation["compute"] == pytest.approx(0.6)


def test_stages_that_a_device_does_not_report_are_no_zeros():
    reported = ("h2d", "compute", "d2h")
    columns = [name for name in JOB_SCHEMA.names if name.startswith((*reported, "die"))]
    silent = table(JOB_SCHEMA, [{**row, **dict.fromkeys(columns)} for row in JOBS.to_pylist()])
    summary, full = summarise(silent, REQUESTS), summarise(JOBS, REQUESTS)
    assert [name for name, share in summary.utilisation.items() if math.isnan(share)] == [*reported]
    assert math.isnan(summary.overlap)
    assert summary.to_json()["utilisation"]["compute"] is None
    assert summary.utilisation["submitter"] == full.utilisation["submitter"]
    # That no job ever came to the device is another matter: it was idle.
    never = [{**row, "waited_ns": None} for row in silent.to_pylist()]
    assert summarise(table(JOB_SCHEMA, never), REQUESTS).utilisation["compute"] == 0


def test_no_rows_are_zeros_and_nulls():
    empty = summarise(JOB_SCHEMA.empty_table(), REQUEST_SCHEMA.empty_table())
    assert (empty.span_ns, empty.tokens_per_s, empty.overlap, empty.ttft.count) == (0, 0, 0, 0)
    assert math.isnan(empty.ttft.p50_ns)
    plain = json.loads(json.dumps(empty.to_json(), allow_nan=False))
    assert plain["ttft"]["p50_ns"] is None
    assert plain["utilisation"]["compute"] == 0


def ints(*values):
    return np.array(values, np.int64)


def test_occupancy():
    plain = occupancy((ints(0, 5, 15), ints(10, 15, 20)), 40)
    assert (plain.busy, plain.overlap, plain.mean, plain.peak) == (20 / 40, 5 / 40, 25 / 40, 2)


def test_occupancy_with_weights():
    loaded = occupancy((ints(0, 5, 15), ints(10, 15, 20)), 40, ints(2, 3, 4))
    assert (loaded.busy, loaded.overlap) == (20 / 40, 5 / 40)
    assert (loaded.mean, loaded.peak) == ((2 * 10 + 3 * 10 + 4 * 5) / 40, 5)


def test_intervals_that_touch_do_not_overlap():
    assert occupancy((ints(0, 10), ints(10, 20)), 20) == occupancy((ints(10, 0), ints(20, 10)), 20)
    assert occupancy((ints(0, 10), ints(10, 20)), 20).peak == 1


def test_nothing_occupies_nothing():
    assert occupancy((ints(), ints()), 40).busy == 0
    assert occupancy((ints(0), ints(1)), 0).mean == 0


def test_percentiles_interpolate():
    samples = distribution(np.arange(0, 201))
    assert (samples.count, samples.mean_ns, samples.max_ns) == (201, 100, 200)
    assert (samples.p50_ns, samples.p90_ns, samples.p99_ns) == (100, 180, 198)
    assert distribution(ints(0, 10)).p90_ns == pytest.approx(9)


@pytest.mark.parametrize(("percentile", "least"), [(50, 3), (90, 20), (99, 200)])
def test_a_percentile_of_few_samples_is_not_trusted(percentile, least):
    assert MIN_SAMPLES[percentile] == least
    assert not distribution(np.arange(least - 1)).trusted(percentile)
    assert distribution(np.arange(least)).trusted(percentile)
    assert not distribution(ints()).trusted(percentile)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 2),
        (Slo(ttft_ns=200), 2),
        (Slo(ttft_ns=199), 1),
        (Slo(ttft_ns=99), 0),
        (Slo(tpot_ns=150), 2),
        (Slo(tpot_ns=149), 1),
        (Slo(tpot_ns=99), 0),
        (Slo(ttft_ns=199, tpot_ns=100), 1),
        (Slo(ttft_ns=100, tpot_ns=99), 0),
    ],
)
def test_goodput(slo, good):
    assert goodput_per_s(REQUESTS, slo, SPAN) == pytest.approx(good * 1e9 / SPAN)


def test_goodput_of_requests_with_one_token_or_none():
    short = table(
        REQUEST_SCHEMA,
        [request(0, 0, 0, None, None, 5, 0, output_tokens=0), request(1, 0, 0, 9, 9, 10, 1)],
    )
    assert goodput_per_s(short, Slo(ttft_ns=9, tpot_ns=1), 10) == pytest.approx(2e9 / 10)
    assert goodput_per_s(short, Slo(ttft_ns=8, tpot_ns=1), 10) == pytest.approx(1e9 / 10)
    assert goodput_per_s(short, Slo(), 0) == 0
