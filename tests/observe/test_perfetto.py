import json
from itertools import pairwise

import pytest
from attrs import evolve
from support import MS, US, burst, profile, run

from caltrio.core.job import Job, JobState, JobTimings
from caltrio.core.request import RequestState
from caltrio.events import JobEnded
from caltrio.manifest import TaskKind
from caltrio.observe.perfetto import PerfettoTrace
from caltrio.semantics import PRESETS, EngineSemantics
from caltrio.timing import Distribution, Jitter

TIMING = profile(
    submit=40 * US, h2d=MS // 3, compute=2 * MS, d2h=MS // 7, interrupt=15 * US, post=100 * US,
    client=500 * US, jitter=Jitter(Distribution.LOGNORMAL, 0.3, stages=("compute", "h2d", "d2h")),
)  # fmt: skip


def trace_of(path, semantics, *, max_jobs=1_000, requests=None, **limits):
    with PerfettoTrace(path, semantics, max_jobs) as trace:
        done = run(
            requests or burst(12, output=4), semantics=semantics, timing=TIMING, listeners=[trace],
            **{"max_inflight": 2, **limits},
        )  # fmt: skip
    return trace, done, json.loads(path.read_text())["traceEvents"]


def tracks(events):
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = {
        (e["pid"], e["tid"]): f"{processes[e['pid']]}/{e['args']['name']}"
        for e in events
        if e["name"] == "thread_name"
    }
    found = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1_000), round(event["dur"] * 1_000)
            found[names[event["pid"], event["tid"]]].append((start, start + length))
    return found


def assert_no_overlap(events):
    for name, slices in tracks(events).items():
        for (_, end), (start, _) in pairwise(sorted(slices)):
            assert end <= start, name


READINGS = {
    **{name: preset.semantics for name, preset in PRESETS.items()},
    "dies and sharing": EngineSemantics(compute_stages=(0.5, 0.5), compute_sharing=(1.0, 0.5)),
    "sharing, and a slot that is free early": EngineSemantics(
        compute_sharing=(1.0, 0.5, 0.3), slot_release="h2d"
    ),
    **{
        f"{release}, {order}": EngineSemantics(slot_release=release, completion_order=order)
        for release in ("h2d", "compute", "d2h", "wait")
        for order in ("in_order", "any")
    },
}


@pytest.mark.parametrize("name", READINGS)
@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_slices_of_one_track_never_overlap(tmp_path, name, in_flight):
    semantics = evolve(READINGS[name], submit_when_full="block")
    _, done, events = trace_of(tmp_path / "t.json", semantics, max_inflight=in_flight)
    assert done.jobs.num_rows == 48
    assert_no_overlap(events)


def test_overlap_would_be_seen():
    head = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "device"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "h2d"}},
    ]
    slices = [{"ph": "X", "pid": 1, "tid": 1, "name": "a", "ts": at, "dur": 2.0} for at in (0.0, 1.999)]
    with pytest.raises(AssertionError, match="device/h2d"):
        assert_no_overlap(head + slices)


def test_tracks_show_what_is_shared(tmp_path):
    def names(preset):
        _, _, events = trace_of(tmp_path / "t.json", PRESETS[preset].semantics)
        return {name for name in tracks(events) if not name.startswith("sequences")}

    common = {"engine slots/ping", "engine slots/pong", "host/submitter", "host/completer"}
    device = {"device/h2d", "device/d2h"}
    assert names("full-duplex") == common | device | {"device/compute"}
    assert names("half-duplex") == common | {"device/dma", "device/compute"}
    assert names("die-pipelined") == common | device | {"device/die0", "device/die1"}
    assert names("shared-compute") == common | device | {
        "device/compute (ping)",
        "device/compute (pong)",
    }


def test_slices_are_the_records(tmp_path):
    _, done, events = trace_of(tmp_path / "t.json", EngineSemantics())
    jobs = done.jobs.to_pylist()
    found = tracks(events)
    for track, start, end in (
        ("device/h2d", "h2d_start_ns", "h2d_end_ns"),
        ("device/compute", "compute_start_ns", "compute_end_ns"),
        ("device/d2h", "d2h_start_ns", "d2h_end_ns"),
        ("host/submitter", "infer_ns", "submitted_ns"),
        ("host/completer", "waited_ns", "ended_ns"),
    ):
        assert sorted(found[track]) == sorted((job[start], job[end]) for job in jobs)
    assert len(found["engine slots/ping"]) + len(found["engine slots/pong"]) == len(jobs)


def test_times_are_from_the_start_of_the_run(tmp_path):
    def starts(start_ns, begin_ns=None):
        path = tmp_path / f"{start_ns}.json"
        with PerfettoTrace(path, EngineSemantics(), 10, start_ns=start_ns) as trace:
            if begin_ns is not None:
                trace.begin(begin_ns)
            run(burst(1), timing=TIMING, listeners=[trace])
        events = json.loads(path.read_text())["traceEvents"]
        return [event["ts"] for event in events if event["ph"] == "X"]

    assert starts(1_000) == pytest.approx([at - 1 for at in starts(0)])
    assert starts(0, 1_000) == starts(1_000)


def test_a_golden_run_is_not_shown(tmp_path):
    times = JobTimings(0, ended_ns=9)
    with PerfettoTrace(tmp_path / "t.json", EngineSemantics(), 100) as trace:
        for index, warmup in enumerate((True, False)):
            request = RequestState(index, 5, 1, 5, 0, warmup=warmup, sequence_id=index)
            trace(JobEnded(9, Job(
                index, request, index, index, 1, TaskKind.DECODE, 1, 5, 0, times, state=JobState.FAILED
            )))  # fmt: skip
    shown = tracks(json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    assert list(shown) == ["sequences/sequence 1"]


def test_later_jobs_are_left_out_and_counted(tmp_path):
    trace, _, events = trace_of(tmp_path / "t.json", EngineSemantics(), max_jobs=5)
    assert trace.left_out == 48 - 5
    assert {event["args"]["job"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3, 4}


def test_the_file_is_valid_after_an_exception(tmp_path):
    path = tmp_path / "t.json"

    def half_a_run():
        with PerfettoTrace(path, EngineSemantics(), 100) as trace:
            run(burst(2, output=2), timing=TIMING, listeners=[trace])
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        half_a_run()
    assert any(event["ph"] == "X" for event in json.loads(path.read_text())["traceEvents"])


def test_a_run_without_jobs_is_valid(tmp_path):
    path = tmp_path / "t.json"
    with PerfettoTrace(path, EngineSemantics(), 100):
        pass
    assert len(json.loads(path.read_text())["traceEvents"]) == 4


def test_a_job_that_never_reached_the_device_is_shown_with_its_sequence_only(tmp_path):
    request = RequestState(0, 5, 1, 5, 0, sequence_id=3)
    job = Job(
        0, request, 0, 3, 1, TaskKind.DECODE, 1, 5, 0, JobTimings(0, ended_ns=9), state=JobState.FAILED
    )
    with PerfettoTrace(tmp_path / "t.json", EngineSemantics(), 100) as trace:
        trace(JobEnded(9, job))
    assert tracks(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) == {
        "sequences/sequence 3": [(0, 9)]
    }
