"""One simulated run: a scenario in, two tables out."""

from __future__ import annotations

import importlib.metadata
import platform
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from caltrio.events import Listener
from caltrio.executor import open_executor
from caltrio.manifest import load_manifest
from caltrio.observe.metrics import Summary, summarise
from caltrio.observe.perfetto import PerfettoTrace
from caltrio.observe.records import Columns, Recorder, stored_tables
from caltrio.scenario import Scenario
from caltrio.signals import stoppable
from caltrio.timing import Costs
from caltrio.workload.replay import replay
from caltrio.workload.requests import Request, stream_seed

from .clock import SimClock, run_virtual
from .device import SimDevice


@frozen
class Run:
    """What a run left: its tables (``pyarrow.Table``, or on disk if it had a folder), its metrics.

    ``stopped_by`` is the signal that ended it early, if one did; the tables then hold what had
    ended by then.
    """

    jobs: Columns
    requests: Columns
    summary: Summary
    stopped_by: signal.Signals | None = None
    trace_left_out: int = 0

    @property
    def complete(self) -> bool:
        """Did every request end by itself?"""
        return self.stopped_by is None


def about_run(scenario: Scenario, device: str) -> dict[str, Any]:
    """What the metadata of records says of a run."""
    packages = ("caltrio", "trio", "simpy", "numpy", "pyarrow")
    return {
        "device": device,
        "scenario": scenario.to_json(),
        "seeds": {"run": scenario.seed},
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"python": platform.python_version()},
    }


def simulate(
    scenario: Scenario,
    *,
    requests: list[Request] | None = None,
    folder: Path | None = None,
    trace_jobs: int = 0,
    listeners: Iterable[Listener] = (),
    on_request: Callable[[], None] | None = None,
) -> Run:
    """Run ``scenario`` in virtual time.

    Args:
        scenario: what to run; its ``workload`` is built unless ``requests`` are given.
        requests: the requests, if they have been built already.
        folder: an existing folder for ``jobs.parquet`` and ``requests.parquet``; ``None`` keeps
            the tables in memory.
        trace_jobs: write ``trace.json`` of the first so many jobs into ``folder``; 0 writes none.
        listeners: further listeners to the executor's facts.
        on_request: called at the end of each request.

    SIGINT or SIGTERM, in the main thread, ends the run in good order, and the result says so.
    Raises :class:`~caltrio.errors.InputError` for a workload that cannot be read.
    """
    if requests is None:
        requests = scenario.workload.build(scenario.seed, scenario.base)
    manifest = load_manifest()
    costs = Costs(scenario.timing, manifest, stream_seed(scenario.seed, "jitter"))
    recorder = Recorder(folder, about_run(scenario, "sim"), on_request=on_request)
    scenario.semantics.check_in_flight(scenario.executor.max_inflight)

    async def main(clock: SimClock) -> signal.Signals | None:
        device = SimDevice(clock, scenario.semantics)
        async with (
            stoppable() as stop,
            open_executor(device, manifest, scenario.executor, listeners=heard) as executor,
        ):
            await replay(executor, clock, requests, scenario.workload.clients)
        return stop.by

    with ExitStack() as stack:
        hold_interrupts = stack.enter_context(_interrupts_can_be_held())
        stack.enter_context(recorder)
        heard: list[Listener] = [recorder, *listeners]
        trace = None
        if folder is not None and trace_jobs:
            trace = PerfettoTrace(folder / "trace.json", scenario.semantics, trace_jobs)
            heard.append(stack.enter_context(trace))
        stopped_by = run_virtual(main, costs)
        hold_interrupts()  # closing the files takes a moment, and must not be cut short
        recorder.complete = stopped_by is None
    jobs, ended = recorder.tables() if folder is None else stored_tables(folder)
    return Run(
        jobs,
        ended,
        summarise(jobs, ended),
        stopped_by,
        0 if trace is None else trace.left_out,
    )


@contextmanager
def _interrupts_can_be_held() -> Iterator[Callable[[], None]]:
    """Yields what makes the process ignore SIGINT until the end of the block."""
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()

    def hold() -> None:
        if in_main:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    try:
        yield hold
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)
