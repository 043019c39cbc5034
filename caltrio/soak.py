"""A long run with random cancels, impatience and faults, and the evidence that it leaves (§13.2).

An executor that has failed for good is opened anew, as a supervisor would restart the process; each
time must be explained by a fault that was injected.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import psutil
import trio
from attrs import define, evolve, field, frozen

from .config import ExecutorConfig
from .core.lifecycle import LifecycleState
from .device import OpenDevice
from .drills import MS, drill_config
from .errors import Phase, RequestError, ServiceFailed, Unavailable
from .events import (
    BufferQuarantined,
    DeviceFault,
    Event,
    InflightLimited,
    JobEnded,
    LifecycleChanged,
    Listener,
    RequestEnded,
    StaleCompletion,
)
from .executor import Executor, Sequence, open_executor
from .faults import Fault, FaultPlan, FaultyDevice, Point
from .golden import Golden, GoldenReport, check
from .manifest import Manifest
from .tokens import ReferenceSequence
from .units import format_ns

NOTHING_COMPLETED = "no request completed"
NS_PER_HOUR = 3600 * 1_000_000_000
_SAMPLES = 24  # of memory, over the run; each collects garbage first
_WARM = 0.25  # share of the run that memory may take to settle
_DURING_RECOVERY = 0.1  # chance of a fault that comes up then
_GROWTH_BYTES = 16 << 20  # over the rest; below this nothing is called a trend

# What is injected: each kind of §8, and those faults of §12 that are the device's.
RANDOM_FAULTS: tuple[Fault, ...] = (
    Fault(Point.CSR),
    Fault(Point.SLICE),
    Fault(Point.MAP),
    Fault(Point.KV, times=3),
    *(Fault(Point.SUBMIT, code=code) for code in (1, 2, 13, 14, 15, 17, 18, 28, 99)),
    *(Fault(Point.WAIT, code=code) for code in (13, 16, 18, 20, 21, 24, 25, 28, 99)),
    Fault(Point.STATUS),
    Fault(Point.SHORT_OUTPUT),
    Fault(Point.NAN_OUTPUT),
    Fault(Point.HOLD),
    Fault(Point.LOSE),
    Fault(Point.UNDO),
    Fault(Point.RESET),
)


@frozen
class SoakSpec:
    """What a soak does.

    Args:
        duration_ns: of the device's time.
        seed: of everything random.
        max_inflight: jobs in flight, until a fault makes it one.
        clients: each sends one request after another, with a pause between.
        faults_per_hour: injected at random moments; 0 for none.
        think_ns: mean pause of a client.
        most_faults: the soak ends early, once so many have struck.
        restart: go on with a new executor after one has failed; else that is the end.
    """

    duration_ns: int
    seed: int = 0
    max_inflight: int = 2
    clients: int = 6
    faults_per_hour: float = 30.0
    think_ns: int = 30_000 * MS
    most_faults: int | None = None
    restart: bool = True

    @property
    def config(self) -> ExecutorConfig:
        """The limits of the executor: a deadline for everything."""
        return evolve(drill_config(self.max_inflight), max_active_sequences=self.clients)

    @property
    def longest_wait_ns(self) -> int:
        """No call may take longer: the deadlines, then a recovery."""
        config = self.config
        assert config.admission_timeout_ns is not None
        assert config.queue_timeout_ns is not None
        assert config.execution_timeout_ns is not None
        deadlines = config.admission_timeout_ns + config.queue_timeout_ns + config.execution_timeout_ns
        return deadlines + config.grace_ns + config.reset_timeout_ns


@define
class Evidence:
    """What a soak leaves behind; :attr:`complaints` says what was not as it must be."""

    ran_ns: int = 0
    jobs: int = 0
    requests: Counter[str] = field(factory=Counter)  # by outcome
    endings: Counter[str] = field(factory=Counter)  # what callers saw, by kind of error
    injected: Counter[str] = field(factory=Counter)  # by point
    tokens_checked: int = 0
    wrong_tokens: int = 0
    recoveries: int = 0
    restarts: list[str] = field(factory=list)  # reasons
    unexplained: list[str] = field(factory=list)
    limited: Counter[str] = field(factory=Counter)  # falls to one in flight, by reason
    stale: int = 0
    quarantined: int = 0
    longest_wait_ns: int = 0
    longest_allowed_ns: int = 0
    leased: int = 0
    memory: list[tuple[float, int]] = field(factory=list)  # (share of the run, resident bytes)
    golden: GoldenReport | None = None  # of the end; None if the last executor has failed
    stopped_by: str | None = None

    @property
    def memory_growth_bytes(self) -> float:
        """Of a line through the samples after the warm-up, from its begin to its end."""
        settled = [(at, size) for at, size in self.memory if at >= _WARM]
        if len(settled) < 3:
            return 0.0
        at, size = np.array(settled).T
        slope, _ = np.polyfit(at, size, 1)
        return float(slope * (at[-1] - at[0]))

    @property
    def complaints(self) -> list[str]:
        """Empty if the soak passed."""
        found = []
        if self.wrong_tokens:
            found.append(f"{self.wrong_tokens} tokens were wrong")
        if self.leased:
            found.append(f"{self.leased} leases were left at the end")
        if self.longest_wait_ns > self.longest_allowed_ns:
            took, allowed = format_ns(self.longest_wait_ns), format_ns(self.longest_allowed_ns)
            found.append(f"a call took {took}, above {allowed}")
        if self.unexplained:
            found.append(f"{len(self.unexplained)} faults nobody injected: {self.unexplained[0]}")
        if self.memory_growth_bytes > _GROWTH_BYTES:
            found.append(f"memory grew by {self.memory_growth_bytes / 2**20:.0f} MiB after warm-up")
        if self.golden is not None and not self.golden.passed:
            found.append(f"golden afterwards: {self.golden.first_difference}")
        if not self.requests["completed"]:
            found.append(NOTHING_COMPLETED)
        return found

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "ran_ns": self.ran_ns,
            "jobs": self.jobs,
            "requests": dict(self.requests),
            "endings": dict(self.endings),
            "injected": dict(self.injected),
            "tokens_checked": self.tokens_checked,
            "wrong_tokens": self.wrong_tokens,
            "recoveries": self.recoveries,
            "restarts": self.restarts,
            "unexplained": self.unexplained,
            "fell_back": dict(self.limited),
            "stale_completions": self.stale,
            "quarantined": self.quarantined,
            "longest_wait_ns": self.longest_wait_ns,
            "longest_allowed_ns": self.longest_allowed_ns,
            "leased_at_end": self.leased,
            "memory_bytes": [size for _, size in self.memory],
            "memory_growth_bytes": self.memory_growth_bytes,
            "golden_at_end": None if self.golden is None else self.golden.passed,
            "stopped_by": self.stopped_by,
            "complaints": self.complaints,
            "passed": not self.complaints,
        }


class Soak:
    """One soak; :meth:`run` it on an open device kind.

    Args:
        spec: what to do.
        open_device: opens the device, once for each restart.
        manifest: what it holds.
        golden: for the warm-up of each generation.
        reference: check every token against :mod:`caltrio.tokens`.
        listeners: further listeners, as for :func:`caltrio.executor.open_executor`.
        on_progress: told the share that is done.
    """

    def __init__(
        self,
        spec: SoakSpec,
        open_device: OpenDevice,
        manifest: Manifest,
        golden: Golden,
        *,
        reference: bool = True,
        listeners: Iterable[Listener] = (),
        on_progress: Callable[[float], None] = lambda _share: None,
    ) -> None:
        self.evidence = Evidence(longest_allowed_ns=spec.longest_wait_ns)
        self.spec, self._open_device = spec, open_device
        self._manifest, self._golden, self._reference = manifest, golden, reference
        self._listeners, self._on_progress = tuple(listeners), on_progress
        self._random = self._stream("plan")
        self._vocab = manifest.submodels[0].logits.shape[-1]
        self._strikes_at_ready = 0
        self._rebuilding = False
        self._prepare_faults = self._strikes_at_configuring = 0
        self._was_ready = False
        self._plan = FaultPlan([])

    def _stream(self, name: str) -> random.Random:
        """A random stream of its own for each that draws: their order must not matter."""
        return random.Random(f"{self.spec.seed} {name}")  # noqa: S311 - no secret

    async def run(self) -> Evidence:
        """Run to the end of the duration; the evidence is complete even if cancelled."""
        async with self._open_device() as device:
            timer = device.timer
        self._timer, begin_ns = timer, timer.now_ns()
        self._begin_ns, self._end_ns = begin_ns, begin_ns + self.spec.duration_ns
        try:
            while not self._over:
                await self._one_life()
        finally:
            self.evidence.ran_ns = timer.now_ns() - begin_ns
        return self.evidence

    async def _one_life(self) -> None:
        """From the opening of an executor to its end, or to the end of the soak."""
        evidence = self.evidence
        async with self._open_device() as device:
            self._prepare_faults = self._strikes_at_configuring = 0
            self._was_ready = False
            self._plan = FaultPlan([], seed=self._random.randrange(2**63))
            faulty = FaultyDevice(device, self._plan)
            listeners = [self._listen, *self._listeners]
            executor = None
            try:
                async with open_executor(
                    faulty,
                    self._manifest,
                    self.spec.config,
                    listeners=listeners,
                    warm_up=self._golden.warm_up,
                ) as executor:
                    await self._traffic(executor)
                    await self._check_golden(executor)
            except ServiceFailed as error:
                evidence.restarts.append(error.reason)
                if not self.spec.restart or not (self._plan.injected or self._was_ready):
                    raise  # nothing was done to it: a restart would only end the same way
                await trio.sleep(5)  # a supervisor waits a little
            finally:
                if executor is not None:
                    evidence.leased += executor.core.pool.leased
                evidence.injected.update(point.value for point, _ in self._plan.injected)
                self._plan = FaultPlan([])

    async def _traffic(self, executor: Executor) -> None:
        async with trio.open_nursery() as life:
            life.start_soon(self._watch, executor, life.cancel_scope)
            life.start_soon(self._sabotage, executor)
            life.start_soon(self._sample)
            async with trio.open_nursery() as clients:
                for index in range(self.spec.clients):
                    clients.start_soon(self._client, executor, index)
            life.cancel_scope.cancel()
        executor.check()

    async def _check_golden(self, executor: Executor) -> None:
        """At the end of the traffic, on the executor that went through it all (§13.2)."""
        self._plan.active = False
        with trio.fail_after(self.spec.longest_wait_ns / 1e9):
            while not executor.core.health.ready:
                executor.check()
                await trio.sleep(0.1)
        self.evidence.golden = await check(executor, self._golden)
        executor.check()

    async def _watch(self, executor: Executor, life: trio.CancelScope) -> None:
        try:
            await executor.failed()
        except ServiceFailed:
            life.cancel()

    async def _pause(self, draw: random.Random, mean_ns: float) -> bool:
        """Sleep a random time; is the soak still on?"""
        left_ns = max(self._end_ns - self._timer.now_ns(), 0)
        await trio.sleep(min(draw.expovariate(1) * mean_ns, left_ns) / 1e9)
        return not self._over

    @property
    def _over(self) -> bool:
        most = self.spec.most_faults
        struck = sum(self.evidence.injected.values()) + len(self._plan.injected)
        return self._timer.now_ns() >= self._end_ns or (most is not None and struck >= most)

    async def _sabotage(self, executor: Executor) -> None:
        if self.spec.faults_per_hour <= 0:
            return
        draw = self._stream(f"faults {len(self.evidence.restarts)}")
        while await self._pause(draw, NS_PER_HOUR / self.spec.faults_per_hour):
            # Most faults meet traffic, a few a recovery: those end in Failed.
            if executor.core.health.ready or draw.random() < _DURING_RECOVERY:
                self._plan.add(draw.choice(RANDOM_FAULTS))

    async def _sample(self) -> None:
        process, each_ns = psutil.Process(), self.spec.duration_ns // _SAMPLES
        while True:
            share = (self._timer.now_ns() - self._begin_ns) / self.spec.duration_ns
            gc.collect()  # what waits for the collector is no leak
            self.evidence.memory.append((share, process.memory_info().rss))
            self._on_progress(min(share, 1.0))
            await trio.sleep(max(each_ns / 1e9, 1))

    async def _client(self, executor: Executor, index: int) -> None:
        draw = self._stream(f"client {index} {len(self.evidence.restarts)}")
        while await self._pause(draw, self.spec.think_ns):
            length = min(int(draw.lognormvariate(4, 1)) + 1, 4000)
            prompt = np.array([draw.randrange(self._vocab) for _ in range(length)], np.int32)
            count = draw.randint(1, 48)
            # One in ten leaves at a random moment: while it waits, on the device, or between.
            patience_s = draw.uniform(0, 3) if draw.random() < 0.1 else float("inf")
            ended = "left"
            try:
                with trio.move_on_after(patience_s):
                    await self._request(executor, prompt, count)
                    ended = "answered"
            except Unavailable as error:
                ended = type(error).__name__
                await trio.sleep(max(error.retry_after_ns, 0) / 1e9)
            except RequestError as error:
                ended = type(error).__name__
            self.evidence.endings[ended] += 1

    async def _request(self, executor: Executor, prompt: Any, count: int) -> None:
        reference = ReferenceSequence(self._vocab, prompt.tolist()) if self._reference else None
        token = -1
        async with self._admitted(executor, len(prompt), count) as sequence:
            for step in range(count):
                begin_ns = self._timer.now_ns()
                try:
                    if step == 0:
                        result = await sequence.prefill(prompt)
                    else:
                        result = await sequence.decode(token)
                finally:
                    self._waited(begin_ns)
                assert result.logits is not None
                token = int(result.logits.argmax())
                await sequence.emit_token()
                if reference is not None:
                    self.evidence.tokens_checked += 1
                    if token != reference.next_token():
                        self.evidence.wrong_tokens += 1
                    reference.feed(token)

    @asynccontextmanager
    async def _admitted(self, executor: Executor, prompt: int, count: int) -> AsyncIterator[Sequence]:
        """A sequence, whose wait for admission is measured however it ends."""
        async with AsyncExitStack() as stack:
            begin_ns = self._timer.now_ns()
            try:
                sequence = await stack.enter_async_context(executor.sequence(prompt, count))
            finally:
                self._waited(begin_ns)
            yield sequence

    def _waited(self, begin_ns: int) -> None:
        waited_ns = self._timer.now_ns() - begin_ns
        self.evidence.longest_wait_ns = max(self.evidence.longest_wait_ns, waited_ns)

    def _listen(self, event: Event) -> None:
        """Count, and hold each fault against what was injected."""
        evidence, struck = self.evidence, len(self._plan.injected)
        if isinstance(event, JobEnded):
            evidence.jobs += 1
        elif isinstance(event, RequestEnded):
            golden = event.request.warmup or not self._plan.active
            if not golden and event.request.outcome is not None:
                evidence.requests[event.request.outcome.value] += 1
        elif isinstance(event, DeviceFault):
            if event.phase == Phase.PREPARE:  # these calls name no job: each strike explains one
                self._prepare_faults += 1
                strikes = [point in (Point.CSR, Point.MAP) for point, _ in self._plan.injected]
                explained = self._prepare_faults <= sum(strikes)
            else:
                explained = event.job.job_id in {job_id for _, job_id in self._plan.injected}
            if not explained:
                evidence.unexplained.append(str(event.job.error))
        elif isinstance(event, LifecycleChanged):
            coming_up = (LifecycleState.CONFIGURING, LifecycleState.WARMING)
            if event.new is LifecycleState.CONFIGURING:
                self._rebuilding, self._strikes_at_configuring = True, struck
            elif event.old in coming_up and event.new is LifecycleState.FAILED:
                ended = event.reason.startswith("shut down")  # by an interrupt of the soak
                if struck == self._strikes_at_configuring and not ended:
                    evidence.unexplained.append(event.reason)
            elif event.new is LifecycleState.READY:
                self._was_ready = True
                evidence.recoveries += self._rebuilding
                self._rebuilding, self._strikes_at_ready = False, struck
            elif (
                event.old is LifecycleState.READY
                and event.reason != "shutdown"
                and struck == self._strikes_at_ready
            ):
                evidence.unexplained.append(event.reason)
        elif isinstance(event, InflightLimited):
            evidence.limited[event.reason] += 1
        elif isinstance(event, StaleCompletion):
            evidence.stale += 1
        elif isinstance(event, BufferQuarantined):
            evidence.quarantined += "generation ended" not in event.reason
