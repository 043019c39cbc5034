"""One run of a scenario on a device of any kind: a scenario in, two tables out."""

from __future__ import annotations

import importlib.metadata
import platform
import signal
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from attrs import define, frozen

from ..capabilities import Capabilities
from ..device import Device, DeviceKind, DeviceOptions, OpenDevice
from ..errors import InputError, ServiceFailed
from ..events import Listener
from ..executor import WarmUp, open_executor
from ..manifest import Manifest, load_manifest
from ..observe.metrics import Summary, summarise
from ..observe.perfetto import PerfettoTrace
from ..observe.records import Columns, Recorder, stored_tables
from ..scenario import Scenario
from ..signals import Stop, stoppable
from .replay import Prompts, replay
from .requests import Request, prompt_of
from .spec import Sampling


@frozen
class Run:
    """What a run left: its tables (``pyarrow.Table``, or on disk if it had a folder), its metrics.

    ``stopped_by`` is the signal that ended it early, ``failure`` the end of an executor that failed
    for good, if one did; the tables then hold what had ended by then. ``limit_reason`` says why
    fewer jobs were in flight than the scenario asks for.
    """

    jobs: Columns
    requests: Columns
    summary: Summary
    stopped_by: signal.Signals | None = None
    trace_left_out: int = 0
    failure: ServiceFailed | None = None
    limit_reason: str | None = None

    @property
    def complete(self) -> bool:
        """Did every request end by itself?"""
        return self.stopped_by is None and self.failure is None


def about_run(scenario: Scenario, device: str, manifest: Manifest) -> dict[str, Any]:
    """What the metadata of records says of a run."""
    packages = ("caltrio", "trio", "simpy", "numpy", "pyarrow")
    return {
        "device": device,
        "manifest": manifest.name,
        "scenario": scenario.to_json(),
        "seeds": {"run": scenario.seed},
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"python": platform.python_version()},
    }


@define
class _Ended:
    """How a run ended; ``recorder`` is ``None`` if not even its device was open by then."""

    recorder: Recorder | None = None
    trace: PerfettoTrace | None = None
    stopped_by: signal.Signals | None = None
    failure: ServiceFailed | None = None
    limit_reason: str | None = None


def run_scenario(
    scenario: Scenario,
    kind: DeviceKind,
    *,
    manifest: Manifest | None = None,
    calbin: Path | None = None,
    capabilities: Capabilities | None = None,
    warm_up: WarmUp | None = None,
    requests: list[Request] | None = None,
    folder: Path | None = None,
    trace_jobs: int = 0,
    listeners: Iterable[Listener] = (),
    on_request: Callable[[], None] | None = None,
    heed_failure: bool = True,
) -> Run:
    """Run ``scenario`` on a device of ``kind``.

    In virtual time jobs only take time; in real time they carry tokens, from prompts that the seed
    decides.

    Args:
        scenario: what to run; its ``workload`` is built unless ``requests`` are given.
        kind: the kind of device.
        manifest: what the device is to hold; the model that ships if ``None``.
        calbin: the model file of a real device.
        capabilities: what may be used of a real device; ``None``: its kind decides.
        warm_up: the golden run before traffic; see :func:`~caltrio.executor.open_executor`.
        requests: the requests, if they have been built already.
        folder: an existing folder for ``jobs.parquet`` and ``requests.parquet``; ``None`` keeps
            the tables in memory.
        trace_jobs: write ``trace.json`` of the first so many jobs into ``folder``; 0 writes none.
        listeners: further listeners to the executor's facts.
        on_request: called at the end of each request.
        heed_failure: see :func:`~caltrio.workload.replay.replay`.

    SIGINT or SIGTERM, in the main thread, ends the run in good order, and the result says so; as it
    does of an executor that fails for good.

    Raises:
        InputError: the workload cannot be read, or the in-flight limit cannot work with the device.
        ManifestMismatch: the device holds something else.
    """
    model = load_manifest() if manifest is None else manifest
    if requests is None:
        requests = scenario.workload.build(scenario.seed, scenario.base)
    prompts: Prompts | None = None
    if kind.time == "real":
        if scenario.workload.sampling is Sampling.DEVICE:
            raise InputError(
                "workload.sampling", "", f"is 'device', a what-if that {kind.name} cannot do",
                "use 'host', or a simulated device",
            )  # fmt: skip
        vocab = model.submodels[0].logits.shape[-1]
        prompts = partial(prompt_of, seed=scenario.seed, vocab=vocab, most=model.max_seq)
    about = about_run(scenario, kind.name, model)
    ended = _Ended()

    async def record(device: Device, stop: Stop) -> None:
        try:
            device.semantics.check_in_flight(scenario.executor.max_inflight)
        except ValueError as error:
            raise InputError("max_inflight", kind.name, str(error)) from error
        with ExitStack() as files:
            recorder = Recorder(folder, about, on_request=on_request)
            ended.recorder = files.enter_context(recorder)
            heard: list[Listener] = [recorder, *listeners]
            trace = None
            if folder is not None and trace_jobs:
                trace = PerfettoTrace(folder / "trace.json", device.semantics, trace_jobs)
                ended.trace = files.enter_context(trace)
                heard.append(trace)
            executor = None
            try:
                async with open_executor(
                    device, model, scenario.executor, listeners=heard, warm_up=warm_up
                ) as executor:
                    start_ns = device.timer.now_ns()
                    recorder.begin(start_ns)
                    if trace is not None:
                        trace.begin(start_ns)
                    await replay(
                        executor,
                        device.timer,
                        requests,
                        scenario.workload.clients,
                        prompts,
                        chunk_tokens=scenario.workload.prefill_chunk_tokens,
                        heed_failure=heed_failure,
                    )
            except ServiceFailed as error:
                ended.failure = error
            finally:
                ended.stopped_by = stop.by
                if executor is not None:
                    ended.limit_reason = executor.core.health.limit_reason
            recorder.complete = ended.stopped_by is None and ended.failure is None

    async def main(open_device: OpenDevice) -> None:
        async with stoppable() as stop, open_device() as device:
            await record(device, stop)
        if ended.recorder is None:
            ended.stopped_by = stop.by
            with Recorder(folder, about) as ended.recorder:
                pass

    options = DeviceOptions(
        scenario.semantics,
        scenario.run_timing,
        scenario.seed,
        model,
        device_samples=scenario.workload.sampling is Sampling.DEVICE,
        tokens=prompts is not None,
        calbin=calbin,
        capabilities=capabilities,
    )
    kind.run(main, options)
    assert ended.recorder is not None
    jobs, rows = ended.recorder.tables() if folder is None else stored_tables(folder)
    return Run(
        jobs,
        rows,
        summarise(jobs, rows),
        ended.stopped_by,
        0 if ended.trace is None else ended.trace.left_out,
        ended.failure,
        ended.limit_reason,
    )
