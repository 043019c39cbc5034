"""Live aggregates for Prometheus (§10.3): what ends is put into histograms, then forgotten.

Formulas: docs/metrics.md. No label names a request, a sequence or a job, so the number of series
has a bound that no amount of work moves.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client import start_http_server as start_server

from ..core.job import Job, JobState
from ..core.lifecycle import LifecycleState
from ..core.request import Outcome, RequestState
from ..device import StageTimes
from ..errors import InputError
from ..events import BufferQuarantined, Event, JobEnded, LifecycleChanged, RequestEnded
from ..units import NS_PER_S

ADDRESS = "127.0.0.1"  # whoever wants it on a network puts a proxy with access control before it
_PORTS = range(65_536)

# Upper bounds of the buckets, s: 1, 2, 5 in each decade, from 100 µs (a small transfer) to 200 s (the
# end-to-end time of a long answer). Quantiles are no finer than these; for exact ones use the tables.
BOUNDS_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
    0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0,
)  # fmt: skip

_NO_STAGES = StageTimes()


class _Registry(CollectorRegistry):
    """A registry without ``_created`` samples: they hold the wall clock, which is not ours to tell."""

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


class PrometheusMetrics:
    """A listener that aggregates in a registry of its own: two executors do not clash.

    Memory is one number a bucket; nothing is kept of a request, a sequence or a job (S11).
    """

    def __init__(self) -> None:
        self._registry = _Registry()

        def seconds(name: str, of: str, *labels: str) -> Histogram:
            return Histogram(name, of, labels, buckets=BOUNDS_S, registry=self._registry)

        def count(name: str, of: str, *labels: str) -> Counter:
            return Counter(name, of, labels, registry=self._registry)

        self._ttft = seconds("caltrio_request_ttft_seconds", "Arrival to first token.")
        self._tpot = seconds(
            "caltrio_request_tpot_seconds", "Mean time per further token of a request."
        )
        self._e2e = seconds("caltrio_request_e2e_seconds", "Arrival to end of a completed request.")
        self._queueing = seconds("caltrio_request_queueing_seconds", "Arrival to admission.")
        self._requests = count("caltrio_requests_total", "Requests that ended.", "outcome", "status")
        self._stages = seconds("caltrio_job_seconds", "Stages of ended jobs.", "kind", "stage")
        self._jobs = count("caltrio_jobs_total", "Jobs that ended.", "kind", "state", "status")
        self._quarantined = count(
            "caltrio_buffers_quarantined_total", "Buffer slots that left service for good."
        )
        self._lifecycle = Gauge(
            "caltrio_lifecycle_state",
            "1 for the state that the executor is in, 0 for the others.",
            ["state"],
            registry=self._registry,
        )
        self._transitions = count(
            "caltrio_lifecycle_transitions_total", "Changes into a lifecycle state.", "state"
        )
        for state in LifecycleState:
            self._transitions.labels(state.value)  # from 0 on, so that rate() sees the first one
        # Only changes are told, and this is where an executor starts.
        self._set_lifecycle(LifecycleState.CONFIGURING)

    def __call__(self, event: Event) -> None:
        """Take in one fact; those that have no metric, and a golden run, are left alone."""
        if isinstance(event, JobEnded):
            if not event.job.request.warmup:
                self._job_ended(event.job)
        elif isinstance(event, RequestEnded):
            if not event.request.warmup:
                self._request_ended(event.request)
        elif isinstance(event, BufferQuarantined):
            self._quarantined.inc()
        elif isinstance(event, LifecycleChanged):
            self._transitions.labels(event.new.value).inc()
            self._set_lifecycle(event.new)

    def _set_lifecycle(self, now: LifecycleState) -> None:
        for state in LifecycleState:
            self._lifecycle.labels(state.value).set(int(state is now))

    def _request_ended(self, request: RequestState) -> None:
        assert request.outcome is not None
        status = "OK" if request.error is None else request.error.grpc
        self._requests.labels(request.outcome.value, status).inc()
        first, last, tokens = request.first_token_ns, request.last_token_ns, request.tokens_out
        _observe(self._queueing, request.arrival_ns, request.admitted_ns)
        _observe(self._ttft, request.arrival_ns, first)
        if tokens >= 2:
            _observe(self._tpot, first, last, tokens - 1)
        if request.outcome is Outcome.COMPLETED:
            _observe(self._e2e, request.arrival_ns, request.ended_ns)

    def _job_ended(self, job: Job) -> None:
        kind, times = job.kind.value, job.timings
        status = "OK" if job.error is None else job.error.grpc
        self._jobs.labels(kind, job.state.value, status).inc()
        device = job.stages if isinstance(job.stages, StageTimes) else _NO_STAGES
        # The completer of docs/metrics.md: succeeded jobs only.
        converted_ns = times.ended_ns if job.state is JobState.SUCCEEDED else None
        for stage, start_ns, end_ns in (
            ("queued", times.accepted_ns, times.infer_ns),
            ("submit", times.infer_ns, times.submitted_ns),
            ("h2d", device.h2d_start_ns, device.h2d_end_ns),
            ("device_wait", times.submitted_ns, times.waited_ns),
            ("d2h", device.d2h_start_ns, device.d2h_end_ns),
            ("postprocess", times.waited_ns, converted_ns),
        ):
            if start_ns is not None and end_ns is not None:
                _observe(self._stages.labels(kind, stage), start_ns, end_ns)

    def text(self) -> str:
        """Every metric in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    @contextmanager
    def serve(self, port: int) -> Iterator[int]:
        """Answer scrapes over HTTP on 127.0.0.1, from a thread, until the end of the context.

        Args:
            port: the TCP port; 0 takes any that is free.

        Yields the real port. Leaving waits for the thread: up to half a second. Raises
        :class:`InputError` for a port that cannot be had.
        """
        if port not in _PORTS:
            raise _port_error(port, "is not a port", f"choose one from 0 to {_PORTS[-1]}")
        try:
            server, thread = start_server(port, addr=ADDRESS, registry=self._registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                problem = "is in use"
            elif error.errno in (errno.EACCES, errno.EPERM):
                problem = "is not allowed for this user"
            else:
                problem = f"cannot be served: {error.strerror or error}"
            remedy = "choose another one from 1024 on, or 0 for any that is free"
            raise _port_error(port, problem, remedy) from error
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _port_error(port: int, problem: str, remedy: str) -> InputError:
    return InputError(f"--metrics-port {port}", "", problem, remedy)


def _observe(into: Histogram, start_ns: int | None, end_ns: int | None, parts: int = 1) -> None:
    """The time from start to end, in seconds, over ``parts``; nothing where either is not known."""
    if start_ns is not None and end_ns is not None:
        into.observe((end_ns - start_ns) / parts / NS_PER_S)
