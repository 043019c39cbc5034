"""One simulated run: a scenario in, two tables out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from caltrio.events import Listener
from caltrio.scenario import Scenario
from caltrio.workload.requests import Request
from caltrio.workload.run import Run, run_scenario

from .device import KIND


def simulate(
    scenario: Scenario,
    *,
    requests: list[Request] | None = None,
    folder: Path | None = None,
    trace_jobs: int = 0,
    listeners: Iterable[Listener] = (),
    on_request: Callable[[], None] | None = None,
) -> Run:
    """Run ``scenario`` in virtual time; arguments as of :func:`caltrio.workload.run.run_scenario`.

    SIGINT or SIGTERM, in the main thread, ends the run in good order, and the result says so. Every
    request is sent: if the executor fails, which takes a deadline, the rest is refused.

    Raises:
        InputError: the workload cannot be read.
        ValueError: the in-flight limit cannot work with the scenario's semantics.
    """
    scenario.semantics.check_in_flight(scenario.executor.max_inflight)
    return run_scenario(
        scenario,
        KIND,
        requests=requests,
        folder=folder,
        trace_jobs=trace_jobs,
        listeners=listeners,
        on_request=on_request,
        heed_failure=False,
    )
