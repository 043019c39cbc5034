import socket
import threading
import urllib.request
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from support import MS, US, burst, profile, run

from caltrio.core.buffers import BufferSlot
from caltrio.core.job import Job, JobState, JobTimings
from caltrio.core.lifecycle import LifecycleState
from caltrio.core.request import Outcome, RequestState
from caltrio.device import StageTimes
from caltrio.errors import DeviceFailed, InputError, RequestError, ResourceExhausted
from caltrio.events import BufferQuarantined, JobEnded, LifecycleChanged, RequestEnded
from caltrio.manifest import TaskKind
from caltrio.observe import prometheus
from caltrio.observe.prometheus import BOUNDS_S, PrometheusMetrics
from caltrio.timing import Distribution, Jitter
from caltrio.units import NS_PER_S
from caltrio.workload.requests import Request

TIMING = profile(
    submit=40 * US, h2d=MS // 3, compute=20 * MS, decode=2 * MS, d2h=MS // 7, interrupt=15 * US,
    post=100 * US, client=500 * US,
    jitter=Jitter(Distribution.LOGNORMAL, 0.3, stages=("compute", "h2d", "d2h")),
)  # fmt: skip
IMPOSSIBLE = Request(900, 0, 10**6, 1)  # above max_seq
STAGES = {
    "queued": ("accepted_ns", "infer_ns"),
    "submit": ("infer_ns", "submitted_ns"),
    "h2d": ("h2d_start_ns", "h2d_end_ns"),
    "device_wait": ("submitted_ns", "waited_ns"),
    "d2h": ("d2h_start_ns", "d2h_end_ns"),
    "postprocess": ("waited_ns", "ended_ns"),
}


def series(text):
    """Value by (name, labels), of an exposition text."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics, name, **labels):
    return series(metrics.text()).get((name, frozenset(labels.items())))


def simulated(count, **limits):
    metrics = PrometheusMetrics()
    requests = [*burst(count, output=4), IMPOSSIBLE]
    done = run(requests, timing=TIMING, listeners=[metrics], max_inflight=2, **limits)
    return metrics, done.jobs.to_pylist(), done.requests.to_pylist()


def assert_histogram(metrics, name, samples_ns, **labels):
    found = series(metrics.text())

    def at(suffix, **bound):
        return found[f"{name}_{suffix}", frozenset({**labels, **bound}.items())]

    assert at("count") == len(samples_ns)
    assert at("sum") == pytest.approx(sum(samples_ns) / NS_PER_S)
    for bound in BOUNDS_S:
        below = sum(ns <= bound * NS_PER_S for ns in samples_ns)
        assert at("bucket", le=str(bound)) == below, bound


# --- against the tables of a run -----------------------------------------------------------------


def test_requests_as_in_the_table():
    metrics, _, rows = simulated(40, max_active_sequences=8, max_queue=20)
    samples = {
        "ttft": [r["first_token_ns"] - r["arrival_ns"] for r in rows if r["first_token_ns"]],
        "tpot": [
            (r["last_token_ns"] - r["first_token_ns"]) / (r["tokens_out"] - 1)
            for r in rows
            if r["tokens_out"] >= 2
        ],
        "e2e": [r["ended_ns"] - r["arrival_ns"] for r in rows if r["outcome"] == "completed"],
        "queueing": [r["admitted_ns"] - r["arrival_ns"] for r in rows if r["admitted_ns"] is not None],
    }
    for name, expected in samples.items():
        assert len(expected) == 28, name
        assert_histogram(metrics, f"caltrio_request_{name}_seconds", expected)


def test_refusals_by_status():
    metrics, _, rows = simulated(40, max_active_sequences=8, max_queue=20)
    assert len(rows) == 41
    counted = {"OK": 28, "RESOURCE_EXHAUSTED": 12, "INVALID_ARGUMENT": 1}
    for status, expected in counted.items():
        assert sum(r["status"] == status for r in rows) == expected
        outcome = "completed" if status == "OK" else "refused"
        found = value(metrics, "caltrio_requests_total", outcome=outcome, status=status)
        assert found == expected


def test_jobs_as_in_the_table():
    metrics, rows, _ = simulated(10)
    for kind in ("prefill_ids", "decode"):
        of_kind = [r for r in rows if r["kind"] == kind]
        assert len(of_kind) == {"prefill_ids": 10, "decode": 30}[kind]
        total = value(metrics, "caltrio_jobs_total", kind=kind, state="succeeded", status="OK")
        assert total == len(of_kind)
        for stage, (start, end) in STAGES.items():
            expected = [r[end] - r[start] for r in of_kind]
            assert sum(expected) > 0, stage
            assert_histogram(metrics, "caltrio_job_seconds", expected, kind=kind, stage=stage)


def test_stages_on_the_host_add_up_to_the_job():
    metrics, rows, _ = simulated(10)
    total = sum(
        found
        for (name, labels), found in series(metrics.text()).items()
        if name == "caltrio_job_seconds_sum" and not {"h2d", "d2h"} & {v for _, v in labels}
    )
    assert total == pytest.approx(sum(r["ended_ns"] - r["accepted_ns"] for r in rows) / NS_PER_S)


def test_series_do_not_grow_with_the_load():
    few, *_ = simulated(5)
    many, *_ = simulated(50)
    assert series(few.text()).keys() == series(many.text()).keys()
    assert few.text() != many.text()


def test_same_seed_same_text():
    assert simulated(5)[0].text() == simulated(5)[0].text()  # no wall clock in it


def statuses(error):
    return {error.grpc}.union(*map(statuses, error.__subclasses__()))


def test_labels_are_words_of_a_fixed_vocabulary():
    metrics, *_ = simulated(40, max_active_sequences=8, max_queue=20)
    words = {
        "outcome": set(Outcome),
        "status": {"OK"} | statuses(RequestError),
        "kind": set(TaskKind),
        "stage": set(STAGES),
        "state": {state.value for states in (JobState, LifecycleState) for state in states},
        "le": {str(bound) for bound in BOUNDS_S} | {"+Inf"},
    }
    found = series(metrics.text())
    assert len(found) > 300
    for name, labels in found:
        for label, word in labels:
            assert word in words[label], (name, label, word)


def test_two_executors_do_not_clash():
    one, other = PrometheusMetrics(), PrometheusMetrics()
    run(burst(3), listeners=[one])
    name, labels = "caltrio_requests_total", {"outcome": "completed", "status": "OK"}
    assert value(one, name, **labels) == 3
    assert value(other, name, **labels) is None
    assert one.text() != other.text()


def test_lifecycle_of_a_run():
    metrics, *_ = simulated(3)
    for state in LifecycleState:
        now = value(metrics, "caltrio_lifecycle_state", state=state.value)
        assert now == (state is LifecycleState.CLOSED), state
        once = state.value in {"warming", "ready", "draining", "closed"}
        assert value(metrics, "caltrio_lifecycle_transitions_total", state=state.value) == once, state


# --- with facts made by hand ---------------------------------------------------------------------

ID = 987_654_321


def request_state(**facts):
    return RequestState(
        request_id=ID, prompt_tokens=7, output_tokens=3, kv_tokens=9, admission_tokens=9, arrival_ns=5,
        sequence_id=ID, **facts,
    )  # fmt: skip


def job(state, timings, *, warmup=False, **facts):
    return Job(
        job_id=ID, request=request_state(warmup=warmup), request_id=ID, sequence_id=ID, generation_id=1,
        kind=TaskKind.DECODE, token_count=1, past_len=7, step=1, timings=timings, state=state, **facts,
    )  # fmt: skip


def test_a_single_token_has_no_tpot():
    metrics = PrometheusMetrics()
    facts = {"admitted_ns": 5, "first_token_ns": 2 * MS, "ended_ns": 9 * MS}
    ended = {"outcome": Outcome.COMPLETED, **facts}
    metrics(RequestEnded(9 * MS, request_state(tokens_out=1, last_token_ns=2 * MS, **ended)))
    assert value(metrics, "caltrio_request_ttft_seconds_count") == 1
    assert value(metrics, "caltrio_request_tpot_seconds_count") == 0
    metrics(RequestEnded(9 * MS, request_state(tokens_out=3, last_token_ns=8 * MS, **ended)))
    assert value(metrics, "caltrio_request_ttft_seconds_count") == 2
    assert value(metrics, "caltrio_request_tpot_seconds_sum") == pytest.approx(0.003)


def test_only_completed_requests_have_an_end_to_end_time():
    metrics = PrometheusMetrics()
    failed = request_state(
        admitted_ns=6, ended_ns=MS, outcome=Outcome.FAILED, error=DeviceFailed("it broke")
    )
    metrics(RequestEnded(MS, failed))
    assert value(metrics, "caltrio_requests_total", outcome="failed", status="INTERNAL") == 1
    assert value(metrics, "caltrio_request_queueing_seconds_count") == 1
    for name in ("ttft", "tpot", "e2e"):
        assert value(metrics, f"caltrio_request_{name}_seconds_count") == 0
    refused = request_state(ended_ns=5, outcome=Outcome.REFUSED, error=ResourceExhausted("full"))
    metrics(RequestEnded(5, refused))
    assert value(metrics, "caltrio_request_queueing_seconds_count") == 1


def test_a_job_has_the_stages_that_are_known():
    metrics = PrometheusMetrics()
    refused = JobTimings(0, queued_ns=MS, infer_ns=2 * MS, ended_ns=9 * MS)
    metrics(JobEnded(9 * MS, job(JobState.FAILED, refused, error=DeviceFailed("no"))))
    broken = JobTimings(0, infer_ns=2 * MS, submitted_ns=3 * MS, waited_ns=7 * MS, ended_ns=8 * MS)
    stages = StageTimes(h2d_start_ns=3 * MS, h2d_end_ns=5 * MS)
    metrics(
        JobEnded(8 * MS, job(JobState.QUARANTINED, broken, error=DeviceFailed("no"), stages=stages))
    )
    never = JobTimings(0, ended_ns=9 * MS)
    metrics(JobEnded(9 * MS, job(JobState.FAILED, never, error=DeviceFailed("no"))))
    expected = {
        "queued": (2, 0.004),
        "submit": (1, 0.001),
        "h2d": (1, 0.002),
        "device_wait": (1, 0.004),
    }
    for stage in STAGES:
        count, total = expected.get(stage, (None, None))
        labels = {"kind": "decode", "stage": stage}
        assert value(metrics, "caltrio_job_seconds_count", **labels) == count, stage
        if total is not None:
            assert value(metrics, "caltrio_job_seconds_sum", **labels) == pytest.approx(total), stage
    for state, count in (("failed", 2), ("quarantined", 1)):
        labels = {"kind": "decode", "state": state, "status": "INTERNAL"}
        assert value(metrics, "caltrio_jobs_total", **labels) == count


def test_quarantine_and_lifecycle():
    metrics = PrometheusMetrics()
    assert value(metrics, "caltrio_buffers_quarantined_total") == 0
    assert value(metrics, "caltrio_lifecycle_state", state="configuring") == 1
    metrics(BufferQuarantined(BufferSlot(ID, 1, TaskKind.DECODE, 0), f"Wait() failed for job {ID}"))
    metrics(LifecycleChanged(1, LifecycleState.READY, LifecycleState.DRAINING, f"job {ID} failed"))
    assert value(metrics, "caltrio_buffers_quarantined_total") == 1
    for state in LifecycleState:
        draining = state is LifecycleState.DRAINING
        assert value(metrics, "caltrio_lifecycle_state", state=state.value) == draining
        told = value(metrics, "caltrio_lifecycle_transitions_total", state=state.value)
        assert told == draining
    assert str(ID) not in metrics.text()


def test_no_id_is_told():
    metrics = PrometheusMetrics()
    error = DeviceFailed(f"job {ID} broke", "execute", 1, ID, ID)
    timings = JobTimings(0, infer_ns=1, submitted_ns=2, waited_ns=3, ended_ns=4)
    metrics(JobEnded(4, job(JobState.FAILED, timings, error=error)))
    metrics(RequestEnded(4, request_state(outcome=Outcome.FAILED, error=error, ended_ns=4)))
    assert str(ID) not in metrics.text()
    assert "broke" not in metrics.text()


def test_a_golden_run_is_not_traffic():
    metrics = PrometheusMetrics()
    before = metrics.text()
    timings = JobTimings(0, infer_ns=1, submitted_ns=2, waited_ns=3, ended_ns=4)
    metrics(JobEnded(4, job(JobState.SUCCEEDED, timings, warmup=True)))
    ended = {"admitted_ns": 5, "ended_ns": 9, "outcome": Outcome.COMPLETED}
    metrics(RequestEnded(9, request_state(warmup=True, **ended)))
    assert metrics.text() == before
    metrics(RequestEnded(9, request_state(**ended)))
    assert metrics.text() != before


def test_unknown_facts_are_left_alone():
    metrics = PrometheusMetrics()
    before = metrics.text()
    metrics(SimpleNamespace(now_ns=1, job=None, request=None))
    assert metrics.text() == before


def test_bounds_cover_100_us_to_minutes():
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))
    assert BOUNDS_S[0] == 100e-6
    assert 120 <= BOUNDS_S[-1] <= 300


# --- the endpoint --------------------------------------------------------------------------------

LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever the environment says


def scrape(port, path="/metrics"):
    with LOOPBACK.open(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def reachable(address, port):
    try:
        socket.create_connection((address, port), timeout=30).close()
    except ConnectionRefusedError:
        return False
    return True


def test_endpoint():
    metrics, *_ = simulated(3)
    with metrics.serve(0) as port:
        status, content_type, text = scrape(port)
    assert status == 200
    assert content_type.startswith("text/plain; version=")
    assert text == metrics.text()


def test_endpoint_tells_of_a_run_under_way():
    metrics = PrometheusMetrics()
    name, labels = "caltrio_requests_total", frozenset({"outcome": "completed", "status": "OK"}.items())
    seen = []
    with metrics.serve(0) as port:

        def watch(event):
            if isinstance(event, RequestEnded):
                seen.append(series(scrape(port)[2])[name, labels])

        run(burst(4), listeners=[metrics, watch])
    assert seen == [1, 2, 3, 4]


def test_only_loopback():
    with PrometheusMetrics().serve(0) as port:
        assert reachable("127.0.0.1", port)
        assert not reachable("127.0.0.2", port)
    server, thread = start_http_server(0, addr="0.0.0.0", registry=CollectorRegistry())
    try:
        assert reachable("127.0.0.2", server.server_port), "the test above cannot fail"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_nothing_is_left_of_the_server():
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="the run broke"):
        with PrometheusMetrics().serve(0) as port:
            assert len(set(threading.enumerate()) - before) == 1
            raise RuntimeError("the run broke")
    assert set(threading.enumerate()) <= before
    assert not reachable("127.0.0.1", port)
    with PrometheusMetrics().serve(port) as again:  # and the port is free
        assert again == port


def test_port_in_use():
    with PrometheusMetrics().serve(0) as port:
        with pytest.raises(InputError) as caught, PrometheusMetrics().serve(port):
            pytest.fail("served twice")
    assert str(caught.value) == (
        f"--metrics-port {port}: is in use; choose another one from 1024 on, or 0 for any that is free"
    )


@pytest.mark.parametrize("port", [-1, 65_536, 10**30])
def test_not_a_port(port):
    with pytest.raises(InputError, match="is not a port; choose one from 0 to 65535"):
        with PrometheusMetrics().serve(port):
            pytest.fail("served")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (PermissionError(13, "Permission denied"), "is not allowed for this user"),
        (OSError(99, "Cannot assign requested address"), "cannot be served: Cannot assign"),
    ],
)
def test_port_refused(monkeypatch, error, problem):
    def refuse(*_arguments, **_options):
        raise error

    monkeypatch.setattr(prometheus, "start_server", refuse)
    with pytest.raises(InputError, match=f"--metrics-port 80: {problem}.*; choose another one"):
        with PrometheusMetrics().serve(80):
            pytest.fail("served")
