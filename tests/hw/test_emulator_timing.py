"""The emulated card against the simulated one: the same stages at the same instants, in real time.

The card's events happen at exact instants, each from that of its cause, so what they are measured
against is exact too. Only the instant of a submission is real: where it decides something, a run in
which this machine was too late for it is done again.
"""

from itertools import pairwise

import pytest
import trio
from attrs import evolve
from support import MS, US, _figure, card, needs_emulator, profile, small_manifest

from caltrio.config import ExecutorConfig
from caltrio.costs import Costs
from caltrio.events import JobEnded
from caltrio.executor import open_executor
from caltrio.semantics import (
    PRESETS,
    CompletionSignal,
    Dma,
    DmaOrder,
    EngineSemantics,
    SlotRelease,
    SubmitWhenFull,
)
from caltrio.timing import Jitter, Stage, Transfer
from sim.clock import run_virtual
from sim.device import SimDevice

pytestmark = needs_emulator

TRIES = 8  # until this machine submits in time
MANIFEST = small_manifest()
BLOCK = EngineSemantics(submit_when_full=SubmitWhenFull.BLOCK)
TIMING = evolve(
    profile(compute=7 * MS, decode=3 * MS, per_token_ps=90 * US * 1000, per_pair_ps=7_003),
    h2d=Transfer(_figure(8 * MS), _figure(1_000_003)),
    d2h=Transfer(_figure(4 * MS), _figure(800_011)),
)


def relative(jobs):
    """The stages of each job, in ns since the first one's H2D began."""
    first = jobs[0].stages.h2d_start_ns
    return [
        [
            stages.engine,
            *(
                instant - first
                for instant in (
                    stages.h2d_start_ns,
                    stages.h2d_end_ns,
                    *stages.die_start_ns,
                    *stages.die_end_ns,
                    stages.d2h_start_ns,
                    stages.d2h_end_ns,
                )
            ),
        ]
        for stages in (job.stages for job in jobs)
    ]


async def prefills(device, tokens):
    """One prefill of so many tokens each, handed in at once in this order; the jobs."""
    events = []
    config = ExecutorConfig(max_inflight=max(len(tokens), 1))
    async with open_executor(device, MANIFEST, config, listeners=[events.append]) as executor:
        async with trio.open_nursery() as nursery:
            for index, count in enumerate(tokens):
                sequence = await executor.admit(count, 1)
                nursery.start_soon(sequence.prefill, count)
                while executor.core._next_job_id <= index:
                    await trio.lowlevel.checkpoint()
    jobs = [event.job for event in events if isinstance(event, JobEnded)]
    return sorted(jobs, key=lambda job: job.job_id)


def simulated(semantics, tokens, timing=TIMING):
    async def main(clock):
        return await prefills(SimDevice(clock, semantics, manifest=MANIFEST), tokens)

    return run_virtual(main, Costs(timing, MANIFEST, 0))


def emulated(folder, semantics, tokens, timing=TIMING):
    open_device = card(folder, semantics, timing, MANIFEST, tokens=False)

    async def main():
        async with open_device() as device:
            return await prefills(device, tokens)

    return trio.run(main)


def assert_same(folder, semantics, tokens):
    wanted = relative(simulated(semantics, tokens))
    for _ in range(TRIES):
        jobs = emulated(folder, semantics, tokens)
        assert all(job.error is None for job in jobs)
        if jobs[-1].timings.submitted_ns < jobs[0].stages.h2d_end_ns:
            break
    else:
        pytest.skip("this machine is too busy to submit in time")
    assert relative(jobs) == wanted


JOBS = [(5,), (5, 60), (60, 5), (30, 3, 70)]


@pytest.mark.parametrize("tokens", JOBS, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_each_hypothesis(tmp_path, preset, tokens):
    semantics = evolve(PRESETS[preset].semantics, engines=3)
    assert_same(tmp_path, semantics, tokens)


@pytest.mark.parametrize("tokens", JOBS[1:], ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {"dma_order": DmaOrder.ISSUE},
        {"dma_order": DmaOrder.ISSUE, "dma": Dma.HALF_DUPLEX},
        {"dma": Dma.HALF_DUPLEX, "completion_signal": CompletionSignal.COMPUTE_IDLE},
        {"compute_stages": (0.25, 0.125, 0.625)},
        {"compute_sharing": (1.0, 0.7, 0.333)},
        {"compute_stages": (0.3, 0.7), "compute_sharing": (1.0, 0.9)},
    ],
    ids=lambda more: " ".join(f"{key}={value}" for key, value in more.items()),
)
def test_further_semantics(tmp_path, more, tokens):
    assert_same(tmp_path, evolve(BLOCK, engines=3, **more), tokens)


def test_the_comparison_sees_another_hypothesis(tmp_path):
    wanted = relative(simulated(evolve(PRESETS["die-pipelined"].semantics, engines=3), (60, 60)))
    got = relative(emulated(tmp_path, evolve(BLOCK, compute_stages=(0.6, 0.4)), (60, 60)))
    assert got != wanted


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", SlotRelease)
def test_the_end_of_a_slot(tmp_path, release):
    """The third job waits in infer() for the slot of the first: it starts then, and not before."""
    semantics = evolve(BLOCK, slot_release=release)
    tokens = (20, 60, 10)
    wanted = relative(simulated(semantics, tokens))[2]
    late = []
    for _ in range(TRIES):
        jobs = emulated(tmp_path, semantics, tokens)
        first, third = jobs[0].stages, jobs[2].stages
        freed = {
            SlotRelease.H2D: first.h2d_end_ns,
            SlotRelease.COMPUTE: first.die_end_ns[-1],
            SlotRelease.D2H: first.d2h_end_ns,
            SlotRelease.WAIT: first.d2h_end_ns,
        }[release]
        assert third.h2d_start_ns >= freed
        assert third.engine == first.engine == wanted[0]
        late.append(relative(jobs)[2][1] - wanted[1])
        assert late[-1] >= 0
        if late[-1] < 2 * MS:  # well before the next stage would end
            return
    pytest.skip(f"this machine is too busy: the slot was taken {late} ns late")


# --- durations ------------------------------------------------------------------------------------


def some_steps(open_device, steps=4, sequences=3):
    """The jobs of sequences side by side, and the device's stage times."""
    events = []

    async def main():
        async with open_device() as device:
            config = ExecutorConfig(max_inflight=2)
            async with open_executor(device, MANIFEST, config, listeners=[events.append]) as executor:
                async with trio.open_nursery() as nursery:
                    for length in range(sequences):
                        nursery.start_soon(steps_of, executor, 10 * length + 1, steps)

    async def steps_of(executor, length, steps):
        async with executor.sequence(length, steps) as sequence:
            await sequence.prefill(length)
            for _ in range(steps - 1):
                await sequence.decode()

    trio.run(main)
    return [event.job for event in events if isinstance(event, JobEnded)]


QUICK = evolve(
    profile(submit=20 * US, compute=300 * US, decode=200 * US, interrupt=30 * US,
            per_token_ps=3_331, per_pair_ps=123_457),
    h2d=Transfer(_figure(50 * US), _figure(10_000_019)),
    d2h=Transfer(_figure(40 * US), _figure(20_000_003)),
)  # fmt: skip


def durations(job):
    stages = job.stages
    spans = {
        Stage.H2D: (stages.h2d_start_ns, stages.h2d_end_ns),
        Stage.COMPUTE: (stages.die_start_ns[0], stages.die_end_ns[-1]),
        Stage.D2H: (stages.d2h_start_ns, stages.d2h_end_ns),
    }
    return {stage: end - start for stage, (start, end) in spans.items()}


def test_durations_are_those_of_the_profile(tmp_path):
    costs = Costs(QUICK, MANIFEST, 0)
    jobs = some_steps(card(tmp_path, BLOCK, QUICK, MANIFEST))
    assert len(jobs) == 12
    for job in jobs:
        for stage, ns in durations(job).items():
            assert ns == costs.ns(stage, job), stage
        times = job.timings
        assert times.submitted_ns - times.infer_ns >= costs.ns(Stage.SUBMIT, job)
        assert times.waited_ns - job.stages.d2h_end_ns >= costs.ns(Stage.INTERRUPT, job)
    assert len({durations(job)[Stage.COMPUTE] for job in jobs}) > 6  # they do differ


@pytest.mark.parametrize("cv", [0.05, 0.3])
@pytest.mark.parametrize("distribution", ["uniform", "lognormal"])
def test_jitter_is_of_the_stages_named_and_of_the_seed(tmp_path, distribution, cv):
    jitter = Jitter(distribution, cv, 3, ("d2h",))
    timing = evolve(profile(h2d=40 * US, compute=90 * US, d2h=50 * US), jitter=jitter)

    def run(seed):
        jobs = some_steps(card(tmp_path, BLOCK, timing, MANIFEST, seed=seed), 20, 2)
        jobs.sort(key=lambda job: job.stages.h2d_start_ns)  # the card counts its jobs in this order
        spans = [durations(job) for job in jobs]
        assert {span[Stage.H2D] for span in spans} == {40 * US}
        assert {span[Stage.COMPUTE] for span in spans} == {90 * US}
        return [span[Stage.D2H] for span in spans]

    once = run(1)
    assert run(1) == once
    assert run(2) != once
    assert len(set(once)) > 30
    mean = sum(once) / len(once)
    assert abs(mean / (50 * US) - 1) < 4 * cv / len(once) ** 0.5
    if distribution == "uniform":
        assert max(abs(ns / (50 * US) - 1) for ns in once) <= cv * 3**0.5 + 1e-4


def test_a_card_without_stage_reports_tells_none(tmp_path):
    jobs = some_steps(card(tmp_path, BLOCK, QUICK, MANIFEST, report_stages=False))
    assert len(jobs) == 12
    for job in jobs:
        assert job.error is None
        stages = job.stages
        assert stages.h2d_start_ns is stages.d2h_end_ns is stages.die_start_ns is None


def test_the_clock_of_the_stages_is_that_of_the_executor(tmp_path):
    """Two clocks, one offset: what the card did lies between the calls that caused it."""
    for job in some_steps(card(tmp_path, BLOCK, QUICK, MANIFEST), 20, 2):
        times, stages = job.timings, job.stages
        instants = (
            times.accepted_ns, times.admitted_ns, times.queued_ns, times.infer_ns,
            stages.h2d_start_ns, stages.h2d_end_ns, stages.die_start_ns[0], stages.die_end_ns[0],
            stages.d2h_start_ns, stages.d2h_end_ns, times.waited_ns, times.ended_ns,
        )  # fmt: skip
        assert all(before <= after for before, after in pairwise(instants)), instants
