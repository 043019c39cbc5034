"""What the tests of the driver share: an executor on an emulated card, and what was heard of it."""

from contextlib import asynccontextmanager

import numpy as np
import trio
from support import assert_at_rest, small_manifest

from caltrio.config import ExecutorConfig
from caltrio.events import JobEnded
from caltrio.executor import open_executor
from caltrio.golden import reference_golden

MANIFEST = small_manifest()
GOLDEN = reference_golden("small", 64, 4, lengths=False)


@asynccontextmanager
async def driven(open_device, *, manifest=MANIFEST, warm_up=None, bound_s=60, listeners=(), **limits):
    """An executor on a device of ``open_device``, with ``events`` and ``device``; nothing leaks."""
    events = []
    with trio.fail_after(bound_s):
        async with open_device() as device:
            async with open_executor(
                device,
                manifest,
                ExecutorConfig(**limits),
                listeners=[events.append, *listeners],
                warm_up=warm_up,
            ) as executor:
                executor.events, executor.device = events, device
                yield executor
    assert_at_rest(executor.core)


def ended_jobs(executor):
    """By job id."""
    jobs = [event.job for event in executor.events if isinstance(event, JobEnded)]
    return {job.job_id: job for job in jobs}


async def until(condition):
    while not condition():
        await trio.sleep(1e-4)


async def in_state(executor, state):
    await until(lambda: executor.core.lifecycle is state)


async def say(executor, index=0, tokens=3, answers=None):
    """A greedy answer to a prompt of the golden, which must be right; also put into ``answers``."""
    case = GOLDEN.cases[index % len(GOLDEN.cases)]
    async with executor.sequence(len(case.prompt), tokens) as sequence:
        result = await sequence.prefill(np.array(case.prompt, np.int32))
        said = [int(result.logits.argmax())]
        while len(said) < tokens:
            said.append(int((await sequence.decode(said[-1])).logits.argmax()))
    assert tuple(said) == case.tokens[:tokens]
    if answers is not None:
        answers.append(index)


def on_card(executor):
    """Jobs that the card has, and that have not come back."""
    return [job for job in executor.core.in_flight.values() if job.timings.submitted_ns is not None]


def held_back(executor):
    """The job that the ring has beyond the limit, or ``None``."""
    job = executor.core._held_back
    return job if job is not None and job.timings.queued_ns is not None else None


def most_at_once(jobs):
    """The most jobs that were between the call of infer() and the return of Wait() at one time."""
    moments = []
    for job in jobs:
        if job.timings.infer_ns is not None and job.timings.waited_ns is not None:
            moments += [(job.timings.infer_ns, 1), (job.timings.waited_ns, -1)]
    now = most = 0
    for _, change in sorted(moments):  # at one instant an end comes first
        now += change
        most = max(most, now)
    return most
