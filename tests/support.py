"""What many tests build: profiles with plain numbers, and runs of a few requests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from attrs import evolve

from caltrio.capabilities import Capabilities
from caltrio.config import ExecutorConfig
from caltrio.core.lifecycle import LifecycleState
from caltrio.events import LifecycleChanged
from caltrio.manifest import Manifest, load_manifest
from caltrio.observe.records import about, read_tables
from caltrio.scenario import Scenario
from caltrio.semantics import EngineSemantics
from caltrio.timing import (
    Compute,
    ComputeByKind,
    Figure,
    Fixed,
    Jitter,
    Source,
    TimingProfile,
    Transfer,
)
from caltrio.workload.requests import Request
from caltrio.workload.run import Run
from caltrio.workload.spec import ArrivalKind, Arrivals, Workload
from hw import emulator
from hw.build import LIBRARIES, SHIM_ON_EMULATOR
from hw.device import open_hw
from sim.run import simulate

MS = 1_000_000
US = 1_000

S = LifecycleState
STARTED = [S.WARMING, S.READY]
RECOVERED = [S.DRAINING, S.RECOVERING, S.CONFIGURING, S.WARMING, S.READY]
CLOSED = [S.DRAINING, S.CLOSED]
ENDED = [S.DRAINING, S.RECOVERING, S.FAILED]


def _figure(value: int) -> Figure:
    return Figure(value, Source.ASSUMED, "set by a test")


def profile(
    *,
    submit=0,
    h2d=1,
    compute=MS,
    decode=None,
    d2h=1,
    interrupt=0,
    post=0,
    client=0,
    jitter=Jitter(),  # noqa: B008 - frozen
    per_token_ps=0,
    per_pair_ps=0,
) -> TimingProfile:
    """Stages of fixed ns. A transfer takes at least 1 ns: its bytes over a huge bandwidth."""

    def transfer(ns: int) -> Transfer:
        return Transfer(_figure(ns - 1), _figure(10**18))

    def computes(ns: int) -> Compute:
        return Compute(_figure(ns), _figure(per_token_ps), _figure(per_pair_ps))

    return TimingProfile(
        1,
        "test",
        "made by a test",
        Fixed(_figure(submit)),
        transfer(h2d),
        ComputeByKind(computes(compute), computes(compute if decode is None else decode)),
        transfer(d2h),
        Fixed(_figure(interrupt)),
        Fixed(_figure(post)),
        Fixed(_figure(client)),
        jitter,
    )


def run(
    requests: Sequence[Request],
    *,
    semantics: EngineSemantics = EngineSemantics(),  # noqa: B008 - frozen
    timing: TimingProfile | None = None,
    clients: int | None = None,
    seed: int = 0,
    listeners: Iterable = (),
    **limits,
) -> Run:
    """One run of these requests: open at their arrival times, or closed with ``clients``."""
    if clients is None:
        arrivals = Arrivals(kind=ArrivalKind.CONSTANT, rate=1.0)  # only says that it is open
    else:
        arrivals = Arrivals(kind=ArrivalKind.CLOSED, clients=clients)
    limits = {"max_active_sequences": 64, "kv_capacity_tokens": 10**9, **limits}
    scenario = Scenario(
        seed=seed,
        timing=timing or profile(),
        semantics=semantics,
        workload=Workload(arrivals=arrivals),
        executor=ExecutorConfig(**limits),
    )
    return simulate(scenario, requests=list(requests), listeners=listeners)


def burst(count: int, *, prompt: int = 1, output: int = 1) -> list[Request]:
    """Requests that all arrive at 0."""
    return [Request(index, 0, prompt, output) for index in range(count)]


def small_manifest(vocab: int = 64, rows: int = 1) -> Manifest:
    """The shipped model with another vocabulary: tokens then cost next to nothing."""
    shipped = load_manifest()
    size = {"shape": (1, rows, vocab), "byte_size": 2 * rows * vocab}
    graphs = (evolve(graph, logits=evolve(graph.logits, **size)) for graph in shipped.submodels)
    return evolve(shipped, name="small", submodels=tuple(graphs))


needs_emulator = pytest.mark.skipif(
    emulator.unavailable() is not None, reason=f"device emulator: {emulator.unavailable()}"
)


def card(
    folder: Path,
    semantics: EngineSemantics,
    timing: TimingProfile,
    manifest: Manifest,
    *,
    believed_semantics: EngineSemantics | None = None,
    believed: Capabilities | None = None,
    **facts,
):
    """Write an emulated card as :func:`hw.emulator.write_card` does; opens devices on it.

    ``believed``: what the program believes of it, where that is not what it is.
    """
    calbin = emulator.write_card(folder, manifest, timing, semantics, **facts)
    return opener(calbin, believed_semantics or semantics, believed)


def opener(calbin: Path, semantics: EngineSemantics, believed: Capabilities | None = None):
    """Opens devices on the card that is there."""

    @asynccontextmanager
    async def opened():
        library = LIBRARIES / SHIM_ON_EMULATOR
        trusted = believed or Capabilities.assumed(semantics)
        async with open_hw(library, calbin, semantics, trusted) as device:
            yield device

    return opened


def path(executor):
    """The states of the lifecycle that its ``events`` tell of."""
    return [event.new for event in executor.events if isinstance(event, LifecycleChanged)]


def assert_at_rest(core):
    """An executor that was left holds nothing, and is over."""
    assert not core.open
    assert not core.kv.holders
    assert core.pool.leased == 0
    assert core.lifecycle in (LifecycleState.CLOSED, LifecycleState.FAILED)


def stopped_midway(words, folder: Path, stop: signal.Signals):
    """Stop a run of ``caltrio`` with ``--out run`` once it has begun; its requests table and complaint.

    What it leaves must be whole, and say that it is not all.
    """
    with subprocess.Popen(
        [Path(sys.executable).with_name("caltrio"), *words, "--out", "run", "--trace-jobs", "500"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        trace = folder / "run" / "trace.json"
        try:
            # Its first buffer is written once some jobs have ended: the run is under way.
            while not (trace.exists() and trace.stat().st_size):
                assert child.poll() is None
                time.sleep(0.02)
            child.send_signal(stop)
            _, complaint = child.communicate(timeout=120)
        finally:
            child.kill()  # nothing, once it has ended
    assert child.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[stop]
    assert complaint.startswith(f"caltrio {words[0]}: interrupted by {stop.name}; ")
    assert len(complaint.splitlines()) == 1
    jobs, requests = read_tables(folder / "run")
    assert jobs.num_rows
    assert about(jobs)["complete"] is about(requests)["complete"] is False
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return requests
