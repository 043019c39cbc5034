"""The two tables of a run, one row a job and one row a request, streamed to Parquet.

Times are integer ns from the start of the run. What the device does not report is null. The
scenario, seeds and versions are in the files' metadata. Everything that is reported later is
computed from these tables.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from attrs import frozen

from ..core.job import Job
from ..core.request import RequestState
from ..device import StageTimes
from ..errors import InputError
from ..events import Event, JobEnded, RequestEnded

META_KEY = b"caltrio"
TABLES = ("jobs", "requests")
_ROW_GROUP = 50_000

_I64, _I32, _TEXT = pa.int64(), pa.int32(), pa.string()
_WORD = pa.dictionary(pa.int8(), pa.string())
_TIMES = pa.list_(pa.int64())

JOB_SCHEMA = pa.schema(
    [
        ("job_id", _I64),
        ("request_id", _I64),
        ("sequence_id", _I32),
        ("generation_id", _I32),
        ("kind", _WORD),
        ("step", _I32),
        ("past_len", _I32),
        ("token_count", _I32),
        ("engine", _I32),  # the slot that the device used; -1 if it never had the job
        ("state", _WORD),
        ("status", _WORD),  # gRPC status: OK, or that of the error
        ("accepted_ns", _I64),
        ("queued_ns", _I64),
        ("infer_ns", _I64),
        ("submitted_ns", _I64),
        ("h2d_start_ns", _I64),
        ("h2d_end_ns", _I64),
        ("compute_start_ns", _I64),
        ("compute_end_ns", _I64),
        ("d2h_start_ns", _I64),
        ("d2h_end_ns", _I64),
        ("waited_ns", _I64),
        ("ended_ns", _I64),
        ("answered_ns", _I64),
        ("die_start_ns", _TIMES),  # one entry a compute stage
        ("die_end_ns", _TIMES),
    ]
)

REQUEST_SCHEMA = pa.schema(
    [
        ("request_id", _I64),
        ("sequence_id", _I32),
        ("prompt_tokens", _I64),
        ("output_tokens", _I64),
        ("kv_tokens", _I64),
        ("tokens_out", _I64),
        ("jobs", _I32),
        ("outcome", _WORD),
        ("status", _WORD),
        ("reason", _TEXT),
        ("arrival_ns", _I64),
        ("admitted_ns", _I64),
        ("first_token_ns", _I64),
        ("last_token_ns", _I64),
        ("ended_ns", _I64),
    ]
)

_NO_STAGES = StageTimes()


def _job_row(job: Job) -> tuple[Any, ...]:
    stages = job.stages if isinstance(job.stages, StageTimes) else _NO_STAGES
    times = job.timings
    starts, ends = stages.die_start_ns, stages.die_end_ns
    return (
        job.job_id,
        job.request_id,
        job.sequence_id,
        job.generation_id,
        job.kind.value,
        job.step,
        job.past_len,
        job.token_count,
        stages.engine,
        job.state.value,
        "OK" if job.error is None else job.error.grpc,
        times.accepted_ns,
        times.queued_ns,
        times.infer_ns,
        times.submitted_ns,
        stages.h2d_start_ns,
        stages.h2d_end_ns,
        starts[0] if starts else None,
        ends[-1] if ends else None,
        stages.d2h_start_ns,
        stages.d2h_end_ns,
        times.waited_ns,
        times.ended_ns,
        times.answered_ns,
        starts,
        ends,
    )


def _request_row(request: RequestState) -> tuple[Any, ...]:
    assert request.outcome is not None
    error = request.error
    return (
        request.request_id,
        request.sequence_id,
        request.prompt_tokens,
        request.output_tokens,
        request.kv_tokens,
        request.tokens_out,
        request.jobs,
        request.outcome.value,
        "OK" if error is None else error.grpc,
        None if error is None else error.message,
        request.arrival_ns,
        request.admitted_ns,
        request.first_token_ns,
        request.last_token_ns,
        request.ended_ns,
    )


class _Table:
    """Rows on their way to one Parquet file, or to memory where there is no path."""

    def __init__(self, schema: pa.Schema, path: Path | None) -> None:
        self._schema = schema
        self._rows: list[tuple[Any, ...]] = []
        self._kept: list[pa.Table] = []
        self._writer = None if path is None else pq.ParquetWriter(path, schema)

    def add(self, row: tuple[Any, ...]) -> None:
        self._rows.append(row)
        if len(self._rows) >= _ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        columns = zip(*self._rows, strict=True)
        arrays = [
            pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)
        ]
        self._rows = []
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        if self._writer is not None:
            self._writer.write_table(table)
        else:
            self._kept.append(table)

    def close(self, metadata: Mapping[str, str]) -> None:
        try:
            self.flush()
        finally:
            if self._writer is not None:
                self._writer.add_key_value_metadata(dict(metadata))
                self._writer.close()

    def table(self, metadata: Mapping[bytes, bytes]) -> pa.Table:
        schema = self._schema.with_metadata(dict(metadata))
        return pa.concat_tables(self._kept or [self._schema.empty_table()]).cast(schema)


class Recorder:
    """A listener that records a run; a context manager that leaves valid files however it ends.

    Args:
        folder: where ``jobs.parquet`` and ``requests.parquet`` go; ``None`` keeps them in memory.
        start_ns: the executor's clock at the start of the run; times are written relative to it.
        about: what the metadata says of the run: scenario, seeds, versions. JSON types only.
        on_request: called at the end of each request, for a progress display.
    """

    def __init__(
        self,
        folder: Path | None,
        about: Mapping[str, Any],
        *,
        start_ns: int = 0,
        on_request: Callable[[], None] | None = None,
    ) -> None:
        self.complete = False
        self._about = dict(about)
        self._on_request = on_request
        paths = [None if folder is None else folder / f"{name}.parquet" for name in TABLES]
        self._jobs = _Table(JOB_SCHEMA, paths[0])
        self._requests = _Table(REQUEST_SCHEMA, paths[1])
        self.begin(start_ns)

    def begin(self, start_ns: int) -> None:
        """The run starts only now, as after a warm-up; before the first row."""
        self._shift = _shifter(start_ns)

    def __call__(self, event: Event) -> None:
        """Take in one fact."""
        if isinstance(event, JobEnded):
            if event.job.request.warmup:
                return  # the golden run of a generation is not of the traffic
            self._jobs.add(self._shift(JOB_SCHEMA, _job_row(event.job)))
        elif isinstance(event, RequestEnded) and not event.request.warmup:
            self._requests.add(self._shift(REQUEST_SCHEMA, _request_row(event.request)))
            if self._on_request is not None:
                self._on_request()

    def _metadata(self) -> str:
        return json.dumps({**self._about, "complete": self.complete}, sort_keys=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        metadata = {META_KEY.decode(): self._metadata()}
        try:
            self._jobs.close(metadata)
        finally:
            self._requests.close(metadata)

    def tables(self) -> tuple[pa.Table, pa.Table]:
        """(jobs, requests), for a recorder without a folder, after it was closed."""
        metadata = {META_KEY: self._metadata().encode()}
        return self._jobs.table(metadata), self._requests.table(metadata)


def _shifter(start_ns: int) -> Callable[[pa.Schema, tuple[Any, ...]], tuple[Any, ...]]:
    """Times relative to the start. Virtual time starts at 0: nothing to do on the hot path."""
    if start_ns == 0:
        return lambda _schema, row: row

    def shift(schema: pa.Schema, row: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            [instant - start_ns for instant in value]
            if isinstance(value, list)
            else value - start_ns
            if value is not None and name.endswith("_ns")
            else value
            for name, value in zip(schema.names, row, strict=True)
        )

    return shift


class Columns(Protocol):
    """A table of which columns can be had: a ``pyarrow.Table``, or one on disk."""

    @property
    def num_rows(self) -> int:
        """Rows of the table."""

    def select(self, columns: list[str]) -> pa.Table:
        """These columns only."""


@frozen
class StoredTable:
    """A table on disk. Columns are read as they are asked for: a long run never fits in memory."""

    path: Path

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return cast(int, pq.read_metadata(self.path).num_rows)

    def select(self, columns: list[str]) -> pa.Table:
        """These columns only."""
        with pq.ParquetFile(self.path) as file:
            return file.read(columns)


def stored_tables(folder: Path) -> tuple[StoredTable, StoredTable]:
    """(jobs, requests) of a run's folder, not yet read."""
    jobs, requests = (StoredTable(folder / f"{name}.parquet") for name in TABLES)
    return jobs, requests


def read_tables(folder: Path) -> tuple[pa.Table, pa.Table]:
    """(jobs, requests) of a run's folder. Raises :class:`InputError` if they are not there."""
    found = []
    for name in TABLES:
        path = folder / f"{name}.parquet"
        try:
            with pq.ParquetFile(path) as file:
                table, metadata = file.read(), file.metadata.metadata or {}
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(
                str(path),
                "",
                f"cannot be read as records: {str(error).splitlines()[0]}",
                "name the --out folder of a run",
            ) from error
        if META_KEY not in metadata:
            raise InputError(str(path), "", "is not a record of caltrio: it has no such metadata")
        found.append(table.replace_schema_metadata({META_KEY: metadata[META_KEY]}))
    return found[0], found[1]


def about(table: pa.Table) -> dict[str, Any]:
    """What a table's metadata says of its run."""
    try:
        facts = json.loads((table.schema.metadata or {})[META_KEY])
        if not {"seeds", "complete"} <= facts.keys():
            raise ValueError("no seeds")
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError("records", "metadata", f"is damaged: {error}", "run it again") from error
    return cast(dict[str, Any], facts)


def digest(tables: Mapping[str, pa.Table], seeds: Mapping[str, Any]) -> str:
    """SHA-256 of the contents of tables and of the seeds; of values only, not of file layout."""
    sha = hashlib.sha256(json.dumps(dict(seeds), sort_keys=True).encode())
    for name, table in sorted(tables.items()):
        for column_name in table.column_names:
            column = table.column(column_name).combine_chunks()
            sha.update(f"{name}.{column_name}:{len(column)}:".encode())
            if pa.types.is_list(column.type):
                sha.update(np.asarray(pc.list_value_length(column).fill_null(-1)).tobytes())
                column = pc.list_flatten(column)
            if pa.types.is_integer(column.type):
                sha.update(np.asarray(column.is_null()).tobytes())
                sha.update(np.asarray(column.fill_null(0)).astype("<i8").tobytes())
            else:
                sha.update(json.dumps(column.to_pylist()).encode())
    return sha.hexdigest()
