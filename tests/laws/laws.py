"""The laws of DESIGN section 8 as functions of what a run left. Each raises ``AssertionError``.

They know the semantics, but none of the engine's code.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np

from caltrio.semantics import Dma, EngineSemantics, SlotRelease


def rows(table):
    return table.to_pylist()


def nothing_lost(requests, records):
    """Every request ends in exactly one outcome."""
    sent = sorted(request.request_id for request in requests)
    ended = sorted(row["request_id"] for row in rows(records.requests))
    assert ended == sent
    assert all(row["outcome"] for row in rows(records.requests))


def nothing_early(records):
    """No stage before its cause, no delivery before Wait()."""
    chain = (
        "accepted_ns",
        "queued_ns",
        "infer_ns",
        "submitted_ns",
        "h2d_start_ns",
        "h2d_end_ns",
        "compute_start_ns",
        "compute_end_ns",
        "d2h_start_ns",
        "d2h_end_ns",
        "waited_ns",
        "ended_ns",
    )
    for row in rows(records.jobs):
        known = [row[name] for name in chain if row[name] is not None]
        assert known == sorted(known), row
        if row["state"] == "succeeded":
            assert row["answered_ns"] == row["ended_ns"] >= row["waited_ns"], row
    last = {}
    for row in sorted(rows(records.jobs), key=lambda row: (row["request_id"], row["step"])):
        before = last.get(row["request_id"])
        # A step needs the token of the step before it.
        assert before is None or row["accepted_ns"] >= before["answered_ns"], row
        last[row["request_id"]] = row


def disjoint(intervals, what):
    intervals = sorted(interval for interval in intervals if None not in interval)
    for (_, end), (start, _) in itertools.pairwise(intervals):
        assert start >= end, f"{what}: one starts at {start}, another ends at {end}"


def spans(jobs, start, end):
    return [(row[start], row[end]) for row in jobs if row[start] != row[end]]


def nothing_shared(records, semantics: EngineSemantics):
    """No slot with two owners, no channel serving two transfers, no die two jobs."""
    jobs = rows(records.jobs)
    h2d, d2h = spans(jobs, "h2d_start_ns", "h2d_end_ns"), spans(jobs, "d2h_start_ns", "d2h_end_ns")
    if semantics.dma is Dma.HALF_DUPLEX:
        disjoint(h2d + d2h, "DMA channel")
    else:
        disjoint(h2d, "H2D channel")
        disjoint(d2h, "D2H channel")
    for die in range(len(semantics.compute_stages)):
        used = [
            (row["die_start_ns"][die], row["die_end_ns"][die]) for row in jobs if row["die_start_ns"]
        ]
        if len(semantics.compute_sharing) == 1:
            disjoint([span for span in used if span[0] != span[1]], f"die {die}")
        else:
            assert most_at_once(used) <= len(semantics.compute_sharing)
    if not semantics.overlap:
        disjoint(spans(jobs, "h2d_start_ns", "d2h_end_ns"), "device")
    release = {
        SlotRelease.H2D: "h2d_end_ns",
        SlotRelease.COMPUTE: "compute_end_ns",
        SlotRelease.D2H: "d2h_end_ns",
        SlotRelease.WAIT: "waited_ns",
    }[semantics.slot_release]
    slots = defaultdict(list)
    for row in jobs:
        slots[row["engine"]].append((row["h2d_start_ns"], row[release]))
    for engine, used in slots.items():
        if engine >= 0:
            disjoint([span for span in used if span[0] != span[1]], f"slot {engine}")
    sequences = defaultdict(list)
    for row in jobs:
        sequences[row["sequence_id"]].append((row["accepted_ns"], row["ended_ns"]))
    for sequence, used in sequences.items():
        disjoint(used, f"sequence {sequence}")


def most_at_once(intervals) -> int:
    steps = sorted(
        [(start, 1) for start, end in intervals if start != end]
        + [(end, -1) for start, end in intervals if start != end]
    )
    return int(max(np.cumsum([step for _, step in steps]), default=0)) if steps else 0


def in_flight_limit(records, max_inflight):
    jobs = [row for row in rows(records.jobs) if row["infer_ns"] is not None]
    assert most_at_once([(row["infer_ns"], row["waited_ns"]) for row in jobs]) <= max_inflight


def kv_within(records, capacity, max_sequences):
    """KV reserved never exceeds the card, sequences never their bound."""
    held = [row for row in rows(records.requests) if row["admitted_ns"] is not None]
    assert most_at_once([(row["admitted_ns"], row["ended_ns"]) for row in held]) <= max_sequences
    steps = sorted(
        [(row["admitted_ns"], 1, row["kv_tokens"]) for row in held]
        + [(row["ended_ns"], -1, -row["kv_tokens"]) for row in held],
    )
    assert max(np.cumsum([tokens for _, _, tokens in steps]), default=0) <= capacity


def completion_order(records, semantics: EngineSemantics):
    if semantics.completion_order == "in_order":
        done = sorted(rows(records.jobs), key=lambda row: row["submitted_ns"])
        waited = [row["waited_ns"] for row in done]
        assert waited == sorted(waited)


def work_done(records, compute_ns):
    """Each job computes for as long as its work takes, at the least: nothing is skipped."""
    for row in rows(records.jobs):
        if row["compute_end_ns"] is not None:
            assert row["compute_end_ns"] - row["compute_start_ns"] >= compute_ns, row


def bottleneck(records, semantics: EngineSemantics, stage_ns):
    """Throughput is at most one over the slowest stage, with what sharing adds."""
    jobs = rows(records.jobs)
    if len(jobs) < 2:
        return
    span = max(row["d2h_end_ns"] for row in jobs) - min(row["h2d_start_ns"] for row in jobs)
    sharing = semantics.sharing_permille
    boost = max(k * speed for k, speed in enumerate(sharing, start=1)) / 1000
    compute = max(stage_ns["compute"] * part for part in semantics.compute_stages) / boost
    transfer = (
        stage_ns["h2d"] + stage_ns["d2h"]
        if semantics.dma is Dma.HALF_DUPLEX
        else max(stage_ns["h2d"], stage_ns["d2h"])
    )
    slowest = max(compute, transfer)
    assert len(jobs) * slowest <= span + 2 * len(jobs), (len(jobs), slowest, span)


def utilisation_at_most_one(records):
    for name, share in records.summary.utilisation.items():
        assert 0 <= share <= 1 + 1e-12, (name, share)


def littles_law(number_in_system_ns, records, span_ns):
    """L = lambda W, with L integrated while the run went, and W from the request records."""
    sojourns = [row["ended_ns"] - row["arrival_ns"] for row in rows(records.requests)]
    arrivals_per_ns = len(sojourns) / span_ns
    average = number_in_system_ns / span_ns
    assert np.isclose(average, arrivals_per_ns * np.mean(sojourns), rtol=1e-9)
