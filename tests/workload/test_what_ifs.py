"""What-ifs of the workload, on the executor itself: order, chunks, client time, sampling."""

import itertools

import numpy as np
import pytest
from attrs import evolve
from support import MS, US, needs_emulator, profile, small_manifest

from caltrio.cli import run as caltrio
from caltrio.config import ExecutorConfig, JobOrder
from caltrio.costs import SAMPLED_BYTES, Costs
from caltrio.errors import InputError
from caltrio.manifest import TaskKind, load_manifest
from caltrio.scenario import Scenario
from caltrio.timing import Stage, load_timing
from caltrio.workload.requests import Request
from caltrio.workload.run import run_scenario
from caltrio.workload.spec import Arrivals, Workload
from hw import emulator
from sim.run import simulate

TIMING = profile(compute=MS, per_token_ps=1_000_000, client=100 * US)


def ran(requests, *, order="fifo", **workload):
    scenario = Scenario(
        timing=TIMING,
        workload=Workload(arrivals=Arrivals("constant", rate=1.0), **workload),
        executor=ExecutorConfig(order=JobOrder(order)),
    )
    return simulate(scenario, requests=requests)


def kinds(run):
    """Kinds of jobs in the order in which infer() was called."""
    return [row["kind"] for row in run.jobs.sort_by("infer_ns").to_pylist()]


def test_decode_first_lets_a_newcomer_wait():
    # Two sequences decode in turn; a third one arrives in the middle.
    requests = [Request(0, 0, 1, 8), Request(1, 0, 1, 8), Request(2, 5 * MS, 1, 1)]
    fifo, first = ran(requests), ran(requests, order="decode_first")
    assert sorted(kinds(fifo)) == sorted(kinds(first))
    place = [
        max(i for i, kind in enumerate(kinds(run)) if kind == "prefill_ids") for run in (fifo, first)
    ]
    assert place[0] < 8 < place[1]
    assert fifo.summary.ttft.max_ns < first.summary.ttft.max_ns


@pytest.mark.parametrize(
    ("chunk", "tokens"), [(None, [100]), (40, [40, 40, 20]), (100, [100]), (1, [1] * 100)]
)
def test_a_prompt_in_chunks(chunk, tokens):
    done = ran([Request(0, 0, 100, 3)], prefill_chunk_tokens=chunk)
    jobs = done.jobs.sort_by("step").to_pylist()
    assert [row["token_count"] for row in jobs] == [*tokens, 1, 1]
    assert [row["past_len"] for row in jobs] == [*np.cumsum([0, *tokens]).tolist(), 101]
    # The client samples once for each token, not for each chunk: only then does a token count.
    assert done.requests.to_pylist()[0]["tokens_out"] == 3
    assert done.summary.itl.count == 2
    waits = [later["accepted_ns"] - row["answered_ns"] for row, later in itertools.pairwise(jobs)]
    assert waits == [0] * (len(tokens) - 1) + [100 * US] * 2


def test_client_time_replaces_the_profiles():
    fast, slow = (ran([Request(0, 0, 1, 5)], client_time_ns=ns) for ns in (0, 10 * MS))
    assert slow.summary.span_ns - fast.summary.span_ns == 5 * 10 * MS
    assert ran([Request(0, 0, 1, 5)]).summary.span_ns - fast.summary.span_ns == 5 * 100 * US


def test_sampling_on_the_device_moves_a_token_and_leaves_the_host_nothing():
    host, device = (ran([Request(0, 0, 1, 5)], sampling=where) for where in ("host", "device"))
    gaps = host.summary.span_ns - device.summary.span_ns
    assert gaps == 5 * 100 * US  # this profile's transfers take 1 ns whatever they move
    model, real = load_manifest(), load_timing("qwen3-8b")

    class Step:
        kind, token_count, past_len, request_id, step, job_id = TaskKind.DECODE, 1, 10, 0, 0, 0

    costs = Costs(real, model, 0, device_samples=True)
    assert costs.ns(Stage.POSTPROCESS, Step) == costs.ns(Stage.CLIENT, Step) == 0
    moved_ns = -(-SAMPLED_BYTES * 10**9 // real.d2h.bandwidth.value)
    assert costs.ns(Stage.D2H, Step) == real.d2h.latency.value + moved_ns
    assert costs.ns(Stage.D2H, Step) < Costs(real, model, 0).ns(Stage.D2H, Step)


@needs_emulator
def test_a_device_of_real_time_cannot_sample():
    scenario = Scenario(workload=Workload(sampling="device"))
    with pytest.raises(InputError, match="a what-if that emulator cannot do"):
        run_scenario(scenario, emulator.KIND, manifest=small_manifest(), requests=[Request(0, 0, 1, 1)])


@needs_emulator
def test_chunks_carry_tokens_in_real_time():
    scenario = Scenario(
        timing=load_timing("quick"),
        workload=Workload(prefill_chunk_tokens=3, arrivals=Arrivals(clients=1)),
    )
    request = [Request(0, 0, 8, 2)]
    done = run_scenario(scenario, emulator.KIND, manifest=small_manifest(), requests=request)
    whole = evolve(scenario, workload=evolve(scenario.workload, prefill_chunk_tokens=None))
    assert done.jobs.sort_by("step").column("token_count").to_pylist() == [3, 3, 2, 1]
    assert done.summary.outcomes == {"completed": 1}
    once = run_scenario(whole, emulator.KIND, manifest=small_manifest(), requests=request)
    assert once.jobs.num_rows == 2


def test_the_command_line(tmp_path, capsys):
    words = ["simulate", "--limit", "4", "--prompt-tokens", "9", "--output-tokens", "2",
             "--clients", "2", "--prefill-chunk", "4", "--order", "decode_first", "--sampling",
             "device", "--client-time", "1ms", "--kv-policy", "grow",
             "--admission-timeout", "1s"]  # fmt: skip
    assert caltrio(words) == 0
    assert "16 jobs" in capsys.readouterr().out  # three chunks and a decode step, four times
    assert caltrio([*words[:-2]]) == 2  # sequences that grow may wait for each other
    assert "admission_timeout" in capsys.readouterr().err


def test_a_duration_that_no_column_holds_is_an_error(tmp_path):
    timing = profile(per_pair_ps=2**61)
    with pytest.raises(InputError, match="more than 146 years"):
        Costs(timing, load_manifest(), 0)
