"""What the twin left, as the two tables of a run and as the facts that its summary takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from caltrio.core import refusals
from caltrio.core.job import engine_name
from caltrio.core.request import Outcome
from caltrio.errors import Phase, RequestError
from caltrio.observe.metrics import OUTCOMES, JobFacts, RequestFacts, distribution, loaded_rate
from caltrio.observe.records import JOB_SCHEMA, META_KEY, REQUEST_SCHEMA

from . import machine as k
from .machine import Machine

_OUTCOMES = {
    k.COMPLETED: Outcome.COMPLETED,
    k.REFUSED: Outcome.REFUSED,
    k.EXPIRED: Outcome.EXPIRED,
    k.FAILED: Outcome.FAILED,
}
_OUTCOME_NUMBERS = np.array([-1, *(OUTCOMES.index(each) for each in _OUTCOMES.values())])
_JOB_STATUS = {k.NO_REASON: "OK", k.NO_GROWTH: "RESOURCE_EXHAUSTED"}  # else a deadline passed
_GENERATION = 1


def request_error(m: NDArray[np.int64], row: NDArray[np.int64], request_id: int) -> RequestError | None:
    """What ``core`` tells a request that ended so, or ``None``."""
    reason, detail = int(row[k.REASON]), int(row[k.DETAIL])
    prompt, output, kv_tokens = int(row[k.PROMPT]), int(row[k.OUTPUT]), int(row[k.KV_TOKENS])
    whose = (detail, int(row[k.SEQUENCE]), _GENERATION)
    match reason:
        case k.NO_REASON:
            return None
        case k.TOO_FEW_TOKENS:
            return refusals.too_few_tokens(request_id, prompt, output)
        case k.TOO_LONG_FOR_MODEL:
            return refusals.too_long(request_id, prompt, output, kv_tokens, int(m[k.MAX_SEQ]))
        case k.ABOVE_THE_CARD:
            return refusals.above_the_card(request_id, kv_tokens, int(m[k.KV_CAPACITY]))
        case k.QUEUE_FULL:
            return refusals.queue_full(request_id, detail)
        case k.NOT_ADMITTED:
            return refusals.not_admitted(request_id, detail)
        case k.NO_GROWTH:
            left = 1 if row[k.TOKENS_OUT] else prompt
            return refusals.no_growth(detail, left, whose)
        case k.LATE_ADMISSION:
            return refusals.too_late(Phase.ADMISSION, detail, whose)
        case _:
            return refusals.too_late(Phase.QUEUE, detail, whose)


def request_facts(m: NDArray[np.int64], rows: NDArray[np.int64]) -> RequestFacts:
    """Of rows of ``Machine.requests``, in their order."""
    refused = rows[:, k.OUTCOME] == k.REFUSED
    statuses: dict[str, int] = {}
    for reason in np.unique(rows[refused, k.REASON]):
        first = int(np.argmax(refused & (rows[:, k.REASON] == reason)))
        error = request_error(m, rows[first], first)
        assert error is not None
        count = int((rows[refused, k.REASON] == reason).sum())
        statuses[error.grpc] = statuses.get(error.grpc, 0) + count
    return RequestFacts(
        arrival_ns=rows[:, k.ARRIVAL],
        admitted_ns=rows[:, k.ADMITTED],
        first_token_ns=rows[:, k.FIRST],
        last_token_ns=rows[:, k.LAST],
        ended_ns=rows[:, k.ENDED],
        tokens_out=rows[:, k.TOKENS_OUT],
        kv_tokens=rows[:, k.KV_TOKENS],
        outcome=_OUTCOME_NUMBERS[rows[:, k.OUTCOME]],
        refusals=dict(sorted(statuses.items())),
    )


def job_facts(machine: Machine, span_ns: int) -> JobFacts:
    """What was added up on the way; token for token nothing was kept, so there is no ITL."""
    m, rows = machine.m, machine.requests

    def share(busy_ns: Any) -> float:
        return float(busy_ns) / span_ns if span_ns else 0.0

    utilisation = {
        "submitter": share(m[k.SUBMIT_BUSY]),
        "h2d": share(m[k.H2D_BUSY]),
        "compute": share(m[k.COMPUTE_BUSY]),
        "d2h": share(m[k.D2H_BUSY]),
        "completer": share(m[k.COMPLETER_BUSY]),
    }
    if m[k.DIES] > 1:
        utilisation |= {f"die{d}": share(busy) for d, busy in enumerate(machine.dies[:, k.D_BUSY])}
    used = machine.engines[:, k.E_USED] > 0
    utilisation |= {
        engine_name(int(slot)): share(machine.engines[slot, k.E_BUSY]) for slot in np.flatnonzero(used)
    }
    admitted = rows[:, k.ADMITTED] >= 0
    loaded = 0.0
    if admitted.any():
        begin = int(rows[admitted, k.ARRIVAL].min())
        counts = (int(m[k.DELIVERED_UNTIL]), int(m[k.DELIVERED]), int(m[k.LAST_DELIVERY]))
        loaded = loaded_rate(begin, int(m[k.UNTIL]), *counts)
    busy = float(m[k.DEVICE_BUSY])
    return JobFacts(
        count=int(m[k.STEPS]),
        loaded_tokens_per_s=loaded,
        itl=distribution(np.zeros(0)),
        utilisation=utilisation,
        overlap=float(m[k.DEVICE_OVERLAP]) / busy if busy else 0.0,
    )


def _ints(values: NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    """-1 is null."""
    return pa.array(values, pa.int64(), mask=values == k.NONE).cast(kind)


def _words(codes: NDArray[Any], words: list[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8()), pa.array(words, pa.string()))


def job_table(rows: NDArray[np.int64], dies: int) -> pa.Table:
    """Rows of ``Machine.jobs`` in the schema of the records."""
    reasons = rows[:, k.ROW_REASON]
    failed = reasons != k.NO_REASON
    late = ~np.isin(reasons, list(_JOB_STATUS))
    status = np.where(late, 2, np.where(failed, 1, 0))
    times = rows[:, k.JOB_COLUMNS :].reshape(len(rows), dies, 2)
    on_device = times[:, 0, 0] != k.NONE
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * dies

    def of_dies(end: int) -> pa.Array:
        values = pa.array(np.ascontiguousarray(times[:, :, end]).ravel(), pa.int64())
        return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(~on_device))

    columns: dict[str, Any] = {
        "generation_id": np.full(len(rows), _GENERATION),
        "kind": _words(rows[:, k.ROW_KIND], ["prefill_ids", "decode"]),
        "state": _words(failed, ["succeeded", "failed"]),
        "status": _words(status, ["OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"]),
        "engine": rows[:, k.ROW_ENGINE],
        "compute_start_ns": _ints(times[:, 0, 0], pa.int64()),
        "compute_end_ns": _ints(times[:, -1, 1], pa.int64()),
        "die_start_ns": of_dies(0),
        "die_end_ns": of_dies(1),
    }
    plain = {
        "job_id": k.ROW_JOB, "request_id": k.ROW_REQUEST, "sequence_id": k.ROW_SEQUENCE,
        "step": k.ROW_STEP, "past_len": k.ROW_PAST, "token_count": k.ROW_TOKENS,
        "accepted_ns": k.ROW_ACCEPTED, "queued_ns": k.ROW_INFER, "infer_ns": k.ROW_INFER,
        "submitted_ns": k.ROW_SUBMITTED, "h2d_start_ns": k.ROW_H2D_START,
        "h2d_end_ns": k.ROW_H2D_END, "d2h_start_ns": k.ROW_D2H_START, "d2h_end_ns": k.ROW_D2H_END,
        "waited_ns": k.ROW_WAITED, "ended_ns": k.ROW_ENDED, "answered_ns": k.ROW_ANSWERED,
    }  # fmt: skip
    for name, column in plain.items():
        columns[name] = _ints(rows[:, column], JOB_SCHEMA.field(name).type)
    arrays = [
        pa.array(columns[field.name], field.type)
        if isinstance(columns[field.name], np.ndarray)
        else columns[field.name]
        for field in JOB_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=JOB_SCHEMA)


def request_table(machine: Machine) -> pa.Table:
    """In the order in which the requests ended, as the executor records them."""
    order = np.argsort(machine.requests[:, k.END_ORDER], kind="stable")
    rows = machine.requests[order]
    unsaid = rows[:, k.REASON] == k.NO_REASON
    errors = [
        None if fine else request_error(machine.m, row, int(request))
        for fine, row, request in zip(unsaid, rows, order, strict=True)
    ]
    columns: dict[str, Any] = {
        "request_id": order,
        "sequence_id": rows[:, k.SEQUENCE],
        "prompt_tokens": rows[:, k.PROMPT],
        "output_tokens": rows[:, k.OUTPUT],
        "kv_tokens": rows[:, k.KV_TOKENS],
        "tokens_out": rows[:, k.TOKENS_OUT],
        "jobs": rows[:, k.STEPS_TAKEN],
        "outcome": [_OUTCOMES[outcome].value for outcome in rows[:, k.OUTCOME].tolist()],
        "status": ["OK" if error is None else error.grpc for error in errors],
        "reason": [None if error is None else error.message for error in errors],
        "arrival_ns": rows[:, k.ARRIVAL],
        "admitted_ns": _ints(rows[:, k.ADMITTED], pa.int64()),
        "first_token_ns": _ints(rows[:, k.FIRST], pa.int64()),
        "last_token_ns": _ints(rows[:, k.LAST], pa.int64()),
        "ended_ns": rows[:, k.ENDED],
    }
    arrays = [
        column if isinstance(column := columns[field.name], pa.Array) else pa.array(column, field.type)
        for field in REQUEST_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=REQUEST_SCHEMA)


def with_metadata(table: pa.Table, facts: str) -> pa.Table:
    """``table`` with the metadata that records carry."""
    return table.replace_schema_metadata({META_KEY: facts.encode()})
