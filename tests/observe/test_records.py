import hashlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import burst, run

from caltrio.core.job import Job, JobState, JobTimings
from caltrio.core.request import Outcome, RequestState
from caltrio.device import StageTimes
from caltrio.errors import InputError, ResourceExhausted
from caltrio.events import JobEnded, RequestEnded
from caltrio.manifest import TaskKind
from caltrio.observe.records import (
    JOB_SCHEMA,
    META_KEY,
    REQUEST_SCHEMA,
    TABLES,
    Recorder,
    about,
    digest,
    read_tables,
    stored_tables,
)

ABOUT = {"device": "test", "seeds": {"run": 7}}


def events(count=3, *, start_ns=0):
    for index in range(count):
        now = start_ns + 100 * index
        request = RequestState(index, 5, 1, 5, now)
        request.outcome, request.admitted_ns, request.ended_ns = Outcome.COMPLETED, now + 1, now + 90
        request.tokens_out, request.first_token_ns, request.last_token_ns = 1, now + 80, now + 80
        stages = StageTimes(
            0, now + 3, now + 4, [now + 4, now + 9], [now + 9, now + 20], now + 20, now + 30
        )
        times = JobTimings(now, now + 1, now + 2, now + 2, now + 3, now + 40, now + 50, now + 60)
        yield JobEnded(now, Job(
            index, request, index, 0, 1, TaskKind.PREFILL_IDS, 5, 0, 0, times,
            state=JobState.SUCCEEDED, stages=stages,
        ))  # fmt: skip
        yield RequestEnded(now, request)
    refused = RequestState(count, 5, 1, 5, start_ns)
    refused.outcome, refused.error = Outcome.REFUSED, ResourceExhausted("the queue is full")
    refused.ended_ns = start_ns
    yield RequestEnded(start_ns, refused)


def record(folder, *, complete=True, **options):
    with Recorder(folder, ABOUT, **options) as recorder:
        for event in events(start_ns=options.get("start_ns", 0)):
            recorder(event)
        recorder.complete = complete
    return recorder


def named(tables):
    return dict(zip(TABLES, tables, strict=True))


def test_rows_are_what_happened(tmp_path):
    record(tmp_path)
    jobs, requests = read_tables(tmp_path)
    assert jobs.schema.names == JOB_SCHEMA.names
    assert requests.schema.names == REQUEST_SCHEMA.names
    assert jobs.slice(1, 1).to_pylist() == [{
        "job_id": 1, "request_id": 1, "sequence_id": 0, "generation_id": 1, "kind": "prefill_ids",
        "step": 0, "past_len": 0, "token_count": 5, "engine": 0, "state": "succeeded", "status": "OK",
        "accepted_ns": 100, "queued_ns": 102, "infer_ns": 102, "submitted_ns": 103,
        "h2d_start_ns": 103, "h2d_end_ns": 104, "compute_start_ns": 104, "compute_end_ns": 120,
        "d2h_start_ns": 120, "d2h_end_ns": 130, "waited_ns": 140, "ended_ns": 150, "answered_ns": 160,
        "die_start_ns": [104, 109], "die_end_ns": [109, 120],
    }]  # fmt: skip
    assert requests.slice(3, 1).to_pylist() == [{
        "request_id": 3, "sequence_id": -1, "prompt_tokens": 5, "output_tokens": 1, "kv_tokens": 5,
        "tokens_out": 0, "jobs": 0, "outcome": "refused", "status": "RESOURCE_EXHAUSTED",
        "reason": "the queue is full", "arrival_ns": 0, "admitted_ns": None, "first_token_ns": None,
        "last_token_ns": None, "ended_ns": 0,
    }]  # fmt: skip


def test_what_the_device_does_not_report_is_null(tmp_path):
    with Recorder(tmp_path, ABOUT) as recorder:
        for event in events(1):
            if isinstance(event, JobEnded):
                event.job.stages = None
            recorder(event)
    row = read_tables(tmp_path)[0].to_pylist()[0]
    assert row["engine"] == -1
    unknown = [name for name, value in row.items() if value is None]
    assert unknown == [
        "h2d_start_ns", "h2d_end_ns", "compute_start_ns", "compute_end_ns", "d2h_start_ns",
        "d2h_end_ns", "die_start_ns", "die_end_ns",
    ]  # fmt: skip


def test_metadata_says_what_the_run_was(tmp_path):
    record(tmp_path)
    for table in read_tables(tmp_path):
        assert about(table) == {**ABOUT, "complete": True}


def test_memory_and_files_hold_the_same(tmp_path):
    record(tmp_path)
    stored = read_tables(tmp_path)
    kept = record(None).tables()
    for left, right in zip(stored, kept, strict=True):
        assert left.to_pylist() == right.to_pylist()
        assert about(left) == about(right)
    assert digest(named(stored), {}) == digest(named(kept), {})


def test_times_are_from_the_start_of_the_run(tmp_path):
    plain, shifted = record(None).tables(), record(None, start_ns=10**9).tables()
    for left, right in zip(plain, shifted, strict=True):
        assert left.to_pylist() == right.to_pylist()


def test_a_run_may_begin_after_its_recorder():
    plain = record(None).tables()
    with Recorder(None, ABOUT) as recorder:
        recorder.begin(10**9)
        for event in events(start_ns=10**9):
            recorder(event)
    for left, right in zip(plain, recorder.tables(), strict=True):
        assert left.to_pylist() == right.to_pylist()


def test_the_files_are_valid_when_the_block_raises(tmp_path):
    def half_a_run():
        with Recorder(tmp_path, ABOUT) as recorder:
            for event in list(events())[:4]:
                recorder(event)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        half_a_run()
    jobs, requests = read_tables(tmp_path)
    assert (jobs.num_rows, requests.num_rows) == (2, 2)
    assert about(jobs)["complete"] is about(requests)["complete"] is False


def test_a_run_without_rows_leaves_valid_files(tmp_path):
    with Recorder(tmp_path, ABOUT):
        pass
    assert [table.num_rows for table in read_tables(tmp_path)] == [0, 0]
    assert len(digest(named(read_tables(tmp_path)), {})) == 64


def test_each_request_is_told_of():
    ended = []
    record(None, on_request=lambda: ended.append(1))
    assert len(ended) == 4


def test_stored_tables_read_what_is_asked_for(tmp_path):
    record(tmp_path)
    jobs, requests = stored_tables(tmp_path)
    assert (jobs.num_rows, requests.num_rows) == (3, 4)
    assert jobs.select(["job_id"]).to_pylist() == [{"job_id": 0}, {"job_id": 1}, {"job_id": 2}]


def test_what_is_no_record_is_named(tmp_path):
    with pytest.raises(InputError, match=r"jobs\.parquet: cannot be read as records.*; name the --out"):
        read_tables(tmp_path)
    (tmp_path / "jobs.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match=r"jobs\.parquet: cannot be read as records"):
        read_tables(tmp_path)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "jobs.parquet")
    with pytest.raises(InputError, match=r"jobs\.parquet: is not a record of caltrio"):
        read_tables(tmp_path)


SEEDS = {"run": 7}


@pytest.fixture(scope="module")
def tables():
    return named(record(None).tables())


def test_the_digest_does_not_see_the_layout_of_a_file(tables, tmp_path):
    wanted = digest(tables, SEEDS)
    hashes = set()
    for size, options in ((1, {}), (2, {"compression": "zstd"}), (100, {"use_dictionary": False})):
        for name, table in tables.items():
            pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=size, **options)
        hashes.add(hashlib.sha256((tmp_path / "jobs.parquet").read_bytes()).hexdigest())
        assert digest(named(read_tables(tmp_path)), SEEDS) == wanted
    assert len(hashes) == 3


def changed(table, column, row, value):
    values = table.column(column).to_pylist()
    values[row] = value
    field = table.schema.field(column)
    return table.set_column(table.schema.get_field_index(column), field, pa.array(values, field.type))


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("jobs", "ended_ns", 151),
        ("jobs", "ended_ns", None),
        ("jobs", "step", 1),
        ("jobs", "state", "failed"),
        ("jobs", "die_start_ns", [104, 110]),
        ("jobs", "die_start_ns", [104]),
        ("jobs", "die_start_ns", []),
        ("jobs", "die_start_ns", None),
        ("requests", "outcome", "failed"),
        ("requests", "reason", "why"),
        ("requests", "arrival_ns", 0),
    ],
)
def test_one_changed_value_is_another_digest(tables, name, column, value):
    other = {**tables, name: changed(tables[name], column, 1, value)}
    assert digest(other, SEEDS) != digest(tables, SEEDS)


def test_null_is_not_zero(tables):
    zero, null = (
        {**tables, "jobs": changed(tables["jobs"], "ended_ns", 0, value)} for value in (0, None)
    )
    assert digest(zero, SEEDS) != digest(null, SEEDS)


def test_an_empty_list_is_not_a_null(tables):
    empty, null = (
        {**tables, "jobs": changed(tables["jobs"], "die_start_ns", 0, value)} for value in ([], None)
    )
    assert digest(empty, SEEDS) != digest(null, SEEDS)


def test_another_order_another_name_and_another_seed_are_other_digests(tables):
    wanted = digest(tables, SEEDS)
    assert digest({**tables, "jobs": tables["jobs"].take([1, 0, 2])}, SEEDS) != wanted
    assert digest(named((tables["requests"], tables["jobs"])), SEEDS) != wanted
    assert digest(tables, {"run": 8}) != wanted
    assert digest(dict(reversed(tables.items())), SEEDS) == wanted


def test_metadata_is_no_part_of_the_digest(tables):
    bare = {name: table.replace_schema_metadata({META_KEY: b"{}"}) for name, table in tables.items()}
    assert digest(bare, SEEDS) == digest(tables, SEEDS)


def test_two_runs_of_one_seed_have_one_digest():
    first, second = (run(burst(5, output=3), max_inflight=2) for _ in range(2))
    assert digest(named((first.jobs, first.requests)), SEEDS) == digest(
        named((second.jobs, second.requests)), SEEDS
    )
