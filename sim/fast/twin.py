"""Run a scenario in the compiled twin: what :func:`sim.run.simulate` says, thousands of times as fast.

The twin has the rules of the executor and of the simulated card in one compiled loop
(:mod:`sim.fast.kernel`). It covers runs without faults. Where one of its checks finds that the executor
would come to distrust the device, the executor itself runs the scenario, and the result says why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from attrs import frozen
from numpy.typing import NDArray

from caltrio.config import JobOrder, KvPolicy
from caltrio.costs import Costs
from caltrio.errors import InputError
from caltrio.manifest import load_manifest
from caltrio.observe import metrics
from caltrio.observe.metrics import RequestFacts, Summary, summarise, summary_of
from caltrio.observe.records import Columns
from caltrio.scenario import Scenario
from caltrio.semantics import (
    CompletionOrder,
    CompletionSignal,
    Dma,
    DmaOrder,
    SlotRelease,
    SubmitWhenFull,
)
from caltrio.signals import StoppedError
from caltrio.workload.requests import Request, stream_seed
from caltrio.workload.run import about_run
from caltrio.workload.spec import Sampling

from ..run import simulate
from . import kernel
from . import machine as k
from .machine import NONE, Machine, lay_out
from .queues import ROWS, WIDTH
from .tables import job_facts, job_table, request_facts, request_table, with_metadata

_FLUSH_ROWS = 200_000  # of the job table, held as numbers before they become columns

_RELEASES = {
    SlotRelease.H2D: kernel.AFTER_H2D,
    SlotRelease.COMPUTE: kernel.AFTER_COMPUTE,
    SlotRelease.D2H: kernel.AFTER_D2H,
    SlotRelease.WAIT: kernel.AFTER_WAIT,
}
WHY_NOT = {
    k.FAULT_BUSY: "infer() returned 17: the executor backs off",
    k.FAULT_EXECUTION: "an execution deadline passed: the executor distrusts the device",
    k.FAULT_INFER: "infer() did not return in time: the executor distrusts the device",
    k.FAULT_DRAIN: "the device did not return its jobs within the grace time",
    k.TOO_LONG: "a stage takes more than 52 days, or the run 146 years",
}


def request_array(requests: Sequence[Request]) -> NDArray[np.int64]:
    """``[n, 3]``: arrival (ns), prompt and output tokens."""
    flat = [(each.arrival_ns, each.prompt_tokens, each.output_tokens) for each in requests]
    return np.array(flat, np.int64).reshape(-1, 3)


def cost_table(scenario: Scenario) -> NDArray[np.int64]:
    """What stages cost, with the jitter of the scenario's seed."""
    costs = Costs(
        scenario.run_timing,
        load_manifest(),
        stream_seed(scenario.seed, "jitter"),
        device_samples=scenario.workload.sampling is Sampling.DEVICE,
    )
    return costs.table


def checked(requests: NDArray[Any], *, ordered: bool = True) -> NDArray[np.int64]:
    """``requests`` as int64. Raises :class:`InputError` if they are not as of request_array.

    ``ordered``: their arrivals count, and do not go back. A closed loop does not look at them.
    """
    array = np.asarray(requests)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":
        text = f"are {array.dtype} of shape {list(array.shape)}"
        raise InputError("requests", "", text, "give whole numbers [n, 3]: arrival_ns, prompt, output")
    array = array.astype(np.int64)
    if ordered and len(array) and (array[0, 0] < 0 or (np.diff(array[:, 0]) < 0).any()):
        raise InputError("requests", "arrival_ns", "goes back or is negative", "sort them by arrival")
    return np.ascontiguousarray(array)


def not_covered(scenario: Scenario, requests: int) -> str | None:
    """Why the twin has no room for so many requests of ``scenario``, or ``None`` if it has."""
    if len(scenario.semantics.compute_stages) > k.MOST_DIES:
        return f"it covers up to {k.MOST_DIES} compute stages"
    if min(scenario.executor.max_active_sequences, requests) > k.MOST_SEQUENCES:
        return f"it covers up to {k.MOST_SEQUENCES:,} sequences at once"
    return None


def build(scenario: Scenario, requests: NDArray[np.int64], *, job_rows: int = 0) -> Machine:
    """A card with its executor before its first request.

    Args:
        scenario: its timing, semantics, limits and seed.
        requests: ``[n, 3]`` as of :func:`request_array`; the request id is the place.
        job_rows: room for the job table; 0 keeps none.

    Raises:
        ValueError: the in-flight limit cannot work with the semantics.
        InputError: the twin has no room for it; see :func:`not_covered`.
    """
    no_room = not_covered(scenario, len(requests))
    if no_room is not None:
        raise InputError("twin", "", f"does not run this: {no_room}", "lower that")
    semantics, limits, workload = scenario.semantics, scenario.executor, scenario.workload
    semantics.check_in_flight(limits.max_inflight)
    manifest = load_manifest()
    count = len(requests)
    sequences = min(limits.max_active_sequences, max(count, 1))
    groups = 1 if limits.max_inflight == 1 else semantics.engines
    share = -(-limits.max_inflight // groups)
    dies = len(semantics.compute_stages)
    waiting = min(limits.max_queue, count) + 2
    machine = lay_out(
        cost_table(scenario),
        requests=count,
        sequences=sequences,
        waiting=waiting,
        engines=max(semantics.engines, groups),
        dies=dies,
        speeds=len(semantics.sharing_permille),
        # One event may end so many jobs at once.
        job_rows=job_rows and job_rows + sequences + 2,
    )
    m = machine.m
    clients = workload.clients
    m[[k.REQUESTS, k.CLIENTS]] = count, 0 if clients is None else min(clients, count)
    m[[k.LIMIT, k.MAX_QUEUE]] = limits.max_inflight, limits.max_queue
    m[[k.KV_CAPACITY, k.MAX_SEQ]] = limits.kv_capacity_tokens, manifest.max_seq
    m[k.GROWS] = limits.kv_policy is KvPolicy.GROW
    m[k.DECODE_FIRST] = limits.order is JobOrder.DECODE_FIRST
    m[k.CHUNK] = workload.prefill_chunk_tokens or 0
    m[k.ADMISSION_TIMEOUT] = limits.admission_timeout_ns or 0
    m[k.QUEUE_TIMEOUT] = limits.queue_timeout_ns or 0
    m[k.EXECUTION_TIMEOUT] = limits.execution_timeout_ns or 0
    m[k.GRACE] = limits.grace_ns
    m[[k.ENGINES, k.GROUPS, k.SHARE_LIMIT]] = semantics.engines, groups, share
    m[k.OVERLAP] = semantics.overlap
    m[k.HALF_DUPLEX] = semantics.dma is Dma.HALF_DUPLEX
    m[k.AT_ISSUE] = semantics.dma_order is DmaOrder.ISSUE
    m[k.SLOT_RELEASE] = _RELEASES[semantics.slot_release]
    m[k.COMPUTE_IDLE] = semantics.completion_signal is CompletionSignal.COMPUTE_IDLE
    m[k.ANY_ORDER] = semantics.completion_order is CompletionOrder.ANY
    m[k.BUSY_WHEN_FULL] = semantics.submit_when_full is SubmitWhenFull.BUSY
    m[k.KEEP_JOBS] = job_rows
    m[[k.SUBMITTING, k.ENTERING, k.UNTIL]] = NONE
    m[k.IN_WAIT] = 1

    rows = machine.requests
    rows[:, k.ARRIVAL], rows[:, k.PROMPT], rows[:, k.OUTPUT] = requests.T
    rows[:, k.KV_TOKENS] = rows[:, k.PROMPT] + np.maximum(rows[:, k.OUTPUT] - 1, 0)
    rows[:, [k.SEQUENCE, k.ADMITTED, k.FIRST, k.LAST, k.ENDED]] = NONE
    machine.engines[:, k.E_FREE] = 1
    # One more than its share: the one whose output is converted.
    machine.engines[:, [k.E_PREFILL_FREE, k.E_DECODE_FREE]] = share + 1
    machine.dies[:, k.D_FORESEEN] = NONE
    machine.dies[:, k.D_PART_END] = np.cumsum(semantics.stage_permille)
    m[m[k.AT_SPEEDS] : m[k.AT_SPEEDS] + m[k.SPEEDS]] = semantics.sharing_permille
    free = k.FREE_IDS
    m[free] = sequences
    m[free + ROWS : free + ROWS + WIDTH * sequences : WIDTH] = np.arange(sequences)
    m[free + ROWS + 2 : free + ROWS + WIDTH * sequences : WIDTH] = np.arange(sequences)
    return machine


@frozen
class TwinRun:
    """What the twin says of a scenario.

    Attributes:
        facts: every request, in the order of their ids.
        summary: its metrics. Token for token nothing is kept, so it has no ITL unless the jobs are.
        jobs, requests: the two tables, where they were asked for.
        executor_because: the twin does not cover this scenario, for this reason: these figures are
            the executor's own. ``None`` if they are the twin's.
    """

    facts: RequestFacts
    summary: Summary
    jobs: Columns | None = None
    requests: Columns | None = None
    executor_because: str | None = None


def run_twin(
    scenario: Scenario,
    requests: Sequence[Request] | NDArray[np.int64] | None = None,
    *,
    tables: bool = False,
) -> TwinRun:
    """Run ``scenario`` in the twin.

    Args:
        scenario: what to run; its ``workload`` is built unless ``requests`` are given.
        requests: in the order of their arrivals, as records or as :func:`request_array` makes them.
        tables: make the two tables too. The job table takes some 200 bytes a job.

    Raises:
        ValueError: the in-flight limit cannot work with the semantics.
        InputError: the array is not one of requests.
        StoppedError: a signal ended a run that the executor made in the twin's place.
    """
    if requests is None:
        requests = scenario.workload.build(scenario.seed, scenario.base)
    array = requests if isinstance(requests, np.ndarray) else request_array(requests)
    array = checked(array, ordered=scenario.workload.clients is None)
    no_room = not_covered(scenario, len(array))
    if no_room is not None:
        return _by_executor(scenario, array, no_room, tables=tables)
    machine = build(scenario, array, job_rows=_FLUSH_ROWS if tables else 0)
    m = machine.m
    parts = []
    kernel.drive(m)
    while m[k.STATUS] == k.FLUSH:
        parts.append(_flushed(machine))
        kernel.drive(m)
    why_not = WHY_NOT.get(int(m[k.STATUS]))
    if why_not is not None:
        return _by_executor(scenario, array, why_not, tables=tables)
    facts = request_facts(m, machine.requests)
    if not tables:
        return TwinRun(facts, summary_of(facts, job_facts(machine, facts.span_ns)))
    parts.append(_flushed(machine))
    about = json.dumps(
        {**about_run(scenario, "twin", load_manifest()), "complete": True}, sort_keys=True
    )
    jobs = with_metadata(pa.concat_tables(parts), about)
    rows = with_metadata(request_table(machine), about)
    return TwinRun(facts, summarise(jobs, rows), jobs, rows)


def _flushed(machine: Machine) -> pa.Table:
    """The jobs so far, which then leave the machine."""
    m = machine.m
    table = job_table(machine.jobs[: m[k.JOB_ROWS]], int(m[k.DIES]))
    m[[k.JOB_ROWS, k.STATUS]] = 0, k.RUNNING
    return table


def _by_executor(
    scenario: Scenario, array: NDArray[np.int64], why_not: str, *, tables: bool
) -> TwinRun:
    requests = [Request(index, *row) for index, row in enumerate(array.tolist())]
    run = simulate(scenario, requests=requests)
    if run.stopped_by is not None:
        raise StoppedError(run.stopped_by)
    facts = metrics.request_facts(run.requests)
    if not tables:
        return TwinRun(facts, run.summary, executor_because=why_not)
    return TwinRun(facts, run.summary, run.jobs, run.requests, executor_because=why_not)
