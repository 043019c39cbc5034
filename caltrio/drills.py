"""The fault drills: FI01 to FI15 of specification §12, and what goes beyond that table.

Each drill opens an executor on a device with faults, lets one job (the target) meet the fault while
other work goes on, and compares what is observed with what §12 expects, fact by fact. At the end
of each the device must still pass a golden run, or the executor has failed and says why.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import trio
from attrs import define, evolve, field, frozen

from .config import ExecutorConfig
from .core.job import Job, JobState
from .core.lifecycle import LifecycleState
from .device import OpenDevice
from .errors import CaltrioError, RequestError, ServiceFailed
from .events import (
    BufferQuarantined,
    Event,
    JobEnded,
    LifecycleChanged,
    StaleCompletion,
)
from .executor import Executor, open_executor
from .faults import ALWAYS, Fault, FaultPlan, FaultyDevice, Point
from .golden import Golden, check
from .manifest import Manifest, ManifestMismatch
from .tomlfile import Ns

Facts = dict[str, str]

MS = 1_000_000
_LONGEST_S = 900  # of the device's time, for one drill
_SENTINEL = np.float32(-12345.0)


def drill_config(max_inflight: int) -> ExecutorConfig:
    """Deadlines that are long against a job and short against a person."""
    return ExecutorConfig(
        max_inflight=max_inflight,
        admission_timeout_ns=Ns(20_000 * MS),
        queue_timeout_ns=Ns(10_000 * MS),
        execution_timeout_ns=Ns(10_000 * MS),
        grace_ns=Ns(5_000 * MS),
        reset_timeout_ns=Ns(30_000 * MS),
    )


@define
class Caller:
    """What one caller saw."""

    ended: str = "waits"
    error: RequestError | None = None
    job_id: int = -1
    waited_ns: int = 0
    out: Any = field(default=None, repr=False)


class Bench:
    """One executor on a device with faults, and what was seen of it since the fault was armed."""

    def __init__(
        self, executor: Executor, device: FaultyDevice, golden: Golden, events: list[Event]
    ) -> None:
        self.executor, self.device, self.golden, self.events = executor, device, golden, events
        self.core = executor.core
        self._seen = 0

    def arm(self, *faults: Fault) -> None:
        """From here on these faults strike, and facts are collected."""
        for fault in faults:
            self.device.plan.add(fault)
        self._seen = len(self.events)
        self.device.plan.calls = dict.fromkeys(Point, 0)
        self.device.plan.active = True

    @property
    def since(self) -> list[Event]:
        """Facts since :meth:`arm`."""
        return self.events[self._seen :]

    @property
    def next_job_id(self) -> int:
        """The id that the next step will get."""
        return self.core._next_job_id

    async def serve(self, caller: Caller, index: int = 0, *, steps: int = 2) -> None:
        """One request with the prompt of a golden case: a prefill, and decode steps."""
        case = self.golden.cases[index]
        timer = self.device.timer
        begin = timer.now_ns()
        caller.out = np.full(self.golden.vocab, _SENTINEL)
        try:
            async with self.executor.sequence(len(case.prompt), steps) as sequence:
                caller.job_id = self.next_job_id
                await sequence.prefill(np.array(case.prompt, np.int32), out=caller.out)
                token = int(caller.out.argmax())
                for step in range(1, steps):
                    if token != case.tokens[step - 1]:
                        caller.ended = "WRONG TOKEN"
                        return
                    logits = (await sequence.decode(token)).logits
                    assert logits is not None
                    token = int(logits.argmax())
            caller.ended = "right tokens" if token == case.tokens[steps - 1] else "WRONG TOKEN"
        except RequestError as error:
            caller.error = error
            caller.ended = type(error).__name__
        except trio.Cancelled:
            caller.ended = "left"
            raise
        finally:
            caller.waited_ns = timer.now_ns() - begin

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something; bounded by two minutes of the device's time."""
        with trio.fail_after(120):
            while not holds():  # noqa: ASYNC110 - core has no event of trio's to wait on
                await trio.sleep(5e-4)

    async def settle(self) -> None:
        """Until nothing is on its way any more, and the service is ready or over."""
        core = self.core
        await self.until(
            lambda: core.lifecycle is LifecycleState.FAILED or (core.health.ready and core.drained)
        )

    # --- facts ----------------------------------------------------------------------------------

    def job(self, job_id: int) -> Job | None:
        """The job of that id, once it has ended."""
        for event in self.events:
            if isinstance(event, JobEnded) and event.job.job_id == job_id:
                return event.job
        return None

    def facts(self, caller: Caller) -> Facts:
        """What became of the caller's first job."""
        job = self.job(caller.job_id)
        facts = {"caller": caller.ended}
        if caller.error is not None and caller.error.code:
            facts["caller"] += f" (code {caller.error.code})"
        facts["infer()"] = "called" if caller.job_id in self.device.inferred else "not called"
        facts["Wait()"] = "returned" if caller.job_id in self.device.waited else "not returned"
        if job is not None and job.kv is not None:
            facts["KV"] = job.kv.state.value
            slot = self.device.slots.get(caller.job_id)
            lost = [
                event.slot
                for event in self.since
                if isinstance(event, BufferQuarantined) and "generation ended" not in event.reason
            ]
            facts["buffer"] = "quarantined" if slot in lost else "given back"
        return facts | self.service()

    def service(self) -> Facts:
        """What became of the service."""
        path = [e.new.value for e in self.since if isinstance(e, LifecycleChanged)]
        return {"service": " ".join(path) or "stays ready"}

    async def afterwards(self) -> Facts:
        """The golden run that each drill ends with."""
        self.device.plan.active = False
        await self.settle()
        if self.core.lifecycle is LifecycleState.FAILED:
            try:
                self.executor.check()
            except ServiceFailed as error:
                return {"afterwards": f"failed, exit code {error.exit_code}"}
        few = evolve(self.golden, cases=self.golden.cases[:4])
        report = await check(self.executor, few)
        wrong = report.first_difference or ""
        return {"afterwards": "golden equal" if report.passed else f"GOLDEN DIFFERS: {wrong}"}


@frozen
class Setup:
    """What every drill needs."""

    open_device: OpenDevice
    manifest: Manifest
    golden: Golden
    max_inflight: int

    @asynccontextmanager
    async def bench(self, **limits: Any) -> AsyncIterator[Bench]:
        """An executor that is ready, with a fault plan that strikes only once armed."""
        events: list[Event] = []
        async with self.open_device() as device:
            faulty = FaultyDevice(device, FaultPlan([]))
            faulty.plan.active = False
            config = evolve(drill_config(self.max_inflight), **limits)
            async with open_executor(
                faulty,
                self.manifest,
                config,
                listeners=[events.append],
                warm_up=self.golden.warm_up,
            ) as executor:
                yield Bench(executor, faulty, self.golden, events)
        assert executor.core.pool.leased == 0, "a lease was left at the end"


@frozen
class Drill:
    """One drill: what is done, what must be seen, and how to do it."""

    name: str
    injection: str
    expected: Callable[[bool], Facts]  # by whether the device has a confirmed reset
    run: Callable[[Setup], Awaitable[Facts]]


@frozen
class DrillResult:
    """Expected and observed of one drill, fact by fact."""

    drill: Drill
    expected: Facts
    observed: Facts

    @property
    def differences(self) -> list[str]:
        """Facts that are not as expected."""
        return [
            f"{fact}: {wanted}, observed {self.observed.get(fact, 'nothing')}"
            for fact, wanted in self.expected.items()
            if self.observed.get(fact) != wanted
        ]

    @property
    def passed(self) -> bool:
        """Is every fact as expected?"""
        return not self.differences


def _recovers(can_reset: bool) -> Facts:  # noqa: FBT001 - given by position in every table row
    if can_reset:
        return {
            "service": "draining recovering configuring warming ready",
            "afterwards": "golden equal",
        }
    return {"service": "draining recovering failed", "afterwards": "failed, exit code 75"}


_STAYS = {"service": "stays ready", "afterwards": "golden equal"}


def _struck(point: Point, code: int = 0, *, alone: bool = False) -> Callable[[Setup], Awaitable[Facts]]:
    """The common drill: the target's prefill meets one fault, another sequence goes on beside it."""

    async def run(setup: Setup) -> Facts:
        async with setup.bench() as bench:
            target, other = Caller(), Caller()
            at = None if point in (Point.CSR, Point.SLICE, Point.UNDO) else bench.next_job_id
            bench.arm(Fault(point, job_id=at, code=code))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.serve, target)
                first = bench.next_job_id
                await bench.until(lambda: bench.next_job_id > first or target.ended != "waits")
                if alone:
                    await bench.until(lambda: target.ended != "waits")
                    bench.device.plan.active = False
                calls = dict(bench.device.plan.calls)
                nursery.start_soon(bench.serve, other, 1)
            await bench.settle()
            facts = bench.facts(target)
            facts["logits"] = _delivery(target)
            facts["others"] = "no wrong token" if other.ended != "WRONG TOKEN" else "WRONG TOKEN"
            facts["runtime calls"] = _calls(calls)
            reasons = [e.reason for e in bench.since if isinstance(e, BufferQuarantined)]
            facts["slot"] = next((r for r in reasons if "slices" in r), "slices undone")
            facts["generation"] = str(bench.core.generation.generation_id)
            facts |= await bench.afterwards()
            return facts

    return run


def _delivery(caller: Caller) -> str:
    if caller.error is None and caller.ended == "right tokens":
        return "delivered"
    return "untouched" if (caller.out == _SENTINEL).all() else "not delivered"


def _calls(calls: dict[Point, int]) -> str:
    made = [point for point in (Point.CSR, Point.MAP, Point.SUBMIT) if calls[point]]
    return ", ".join(made) or "none"


async def _fi01(setup: Setup) -> Facts:
    first = setup.manifest.submodels[0]
    wrong = evolve(first, exact_name=f"{first.exact_name[:-1]}_")
    manifest = evolve(setup.manifest, submodels=(wrong, *setup.manifest.submodels[1:]))
    async with setup.open_device() as device:
        faulty = FaultyDevice(device, FaultPlan([]))
        try:
            async with open_executor(faulty, manifest, drill_config(setup.max_inflight)):
                start = "started"
        except ManifestMismatch as error:
            both = wrong.exact_name in str(error) and first.exact_name in str(error)
            start = "refused, both names shown" if both else "refused"
        return {"start": start, "configure()": f"{len(faulty.configured)} calls"}


async def _fi04(setup: Setup) -> Facts:
    timeout_ns = 500 * MS
    async with setup.bench(admission_timeout_ns=timeout_ns) as bench:
        target = Caller()
        bench.arm(Fault(Point.KV, times=ALWAYS))
        await bench.serve(target)
        facts = {
            "caller": target.ended,
            "waited": "to the deadline" if target.waited_ns >= timeout_ns else "not to the deadline",
            "canAllocate()": "asked once"
            if bench.device.plan.calls[Point.KV] == 1
            else f"asked {bench.device.plan.calls[Point.KV]} times",
        }
        return facts | bench.service() | await bench.afterwards()


async def _fi11(setup: Setup) -> Facts:
    async with setup.bench() as bench:
        bench.arm()
        busy = [Caller() for _ in range(setup.max_inflight)]
        target = Caller()
        async with trio.open_nursery() as nursery:
            for index, caller in enumerate(busy):
                nursery.start_soon(bench.serve, caller, index)
            await bench.until(lambda: len(bench.core.in_flight) == setup.max_inflight)
            leased = bench.core.pool.leased
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    inner.start_soon(bench.serve, target)
                    await bench.until(lambda: target.job_id >= 0 and bench.next_job_id > target.job_id)
                    scope.cancel()
            # A device that held it back is asked for it.
            await bench.until(lambda: bench.job(target.job_id) is not None)
            facts = bench.facts(target)
            facts["leases"] = (
                "none for it" if bench.core.pool.leased <= leased else "one more than before"
            )
        facts["others"] = "; ".join(sorted({caller.ended for caller in busy}))
        return facts | await bench.afterwards()


async def _fi12(setup: Setup) -> Facts:
    async with setup.bench() as bench:
        bench.arm()
        target, other = Caller(), Caller()
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    inner.start_soon(bench.serve, target)
                    await bench.until(lambda: target.job_id in bench.core.in_flight
                                      and bench.core.in_flight[target.job_id].state
                                      is JobState.SUBMITTED)  # fmt: skip
                    nursery.start_soon(bench.serve, other, 1)
                    scope.cancel()
            left = "at once" if bench.job(target.job_id) is None else "only after the job"
        await bench.settle()
        facts = bench.facts(target)
        facts["caller"] += f" {left}"
        facts["logits"] = _delivery(target)
        facts["others"] = other.ended
        return facts | await bench.afterwards()


async def _fi13(setup: Setup) -> Facts:
    submitted = [Caller() for _ in range(setup.max_inflight)]
    queued = Caller()
    async with trio.open_nursery() as nursery, setup.bench() as bench:  # the callers outlive it
        bench.arm()
        for index, caller in enumerate(submitted):
            nursery.start_soon(partial(bench.serve, caller, index, steps=1))
        await bench.until(lambda: len(bench.core.in_flight) == setup.max_inflight)
        nursery.start_soon(bench.serve, queued, 3)
        await bench.until(lambda: queued.job_id >= 0 and bench.next_job_id > queued.job_id)
    return {
        "submitted": "; ".join(sorted({caller.ended for caller in submitted})),
        "queued": queued.ended,
        "infer()": "called" if queued.job_id in bench.device.inferred else "not called",
        "leased": str(bench.core.pool.leased),
    } | bench.service()


async def _fi14(setup: Setup) -> Facts:
    async with setup.bench() as bench:
        target = Caller()
        bench.arm(Fault(Point.HOLD, job_id=bench.next_job_id))
        await bench.serve(target)
        await bench.settle()
        facts = bench.facts(target)
        facts |= await bench.afterwards()
        stale = [event.job.job_id for event in bench.since if isinstance(event, StaleCompletion)]
        facts["stale"] = "counted once" if stale == [target.job_id] else f"counted {len(stale)} times"
        pool = bench.core.pool
        whole = pool.free == pool.total and not bench.core.kv.holders
        facts["new generation"] = "untouched" if whole else "TOUCHED"
        return facts


def _both(point: Point, code: int = 0) -> Callable[[Setup], Awaitable[Facts]]:
    async def run(setup: Setup) -> Facts:
        async with setup.bench() as bench:
            callers = [Caller() for _ in range(2)]
            first = bench.next_job_id
            bench.arm(*(Fault(point, job_id=first + which, code=code) for which in range(2)))
            async with trio.open_nursery() as nursery:
                for index, caller in enumerate(callers):
                    nursery.start_soon(bench.serve, caller, index)
            await bench.settle()
            facts = bench.service()
            right = any(caller.ended in ("right tokens", "WRONG TOKEN") for caller in callers)
            facts["callers"] = "an answer came through" if right else "typed errors"
            return facts | await bench.afterwards()

    return run


async def _twice(setup: Setup) -> Facts:
    async with setup.bench() as bench:
        bench.arm()
        for _ in range(2):
            bench.device.plan.add(Fault(Point.STATUS, job_id=bench.next_job_id))
            await bench.serve(Caller())
            await bench.settle()
        facts = bench.service()
        facts["generation"] = str(bench.core.generation.generation_id)
        return facts | await bench.afterwards()


def _during_recovery(fault: Fault) -> Callable[[Setup], Awaitable[Facts]]:
    async def run(setup: Setup) -> Facts:
        async with setup.bench() as bench:
            bench.arm(Fault(Point.STATUS, job_id=bench.next_job_id))
            await bench.serve(Caller())
            bench.device.plan.add(fault)
            await bench.settle()
            late = Caller()
            await bench.serve(late)
            return {"late": late.ended} | bench.service() | await bench.afterwards()

    return run


async def _busy_for_ever(setup: Setup) -> Facts:
    async with setup.bench() as bench:
        bench.arm(Fault(Point.SUBMIT, times=ALWAYS, code=17))
        begin_ns = bench.device.timer.now_ns()
        calls = 0
        while bench.core.health.ready and calls < 100:
            await bench.serve(Caller())
            calls += 1
        paused_ns = bench.device.timer.now_ns() - begin_ns
        bench.device.plan.active = False
        await bench.settle()
        config = bench.core.config
        least = sum(config.backoff_ns << step for step in range(config.backoff_threshold - 1))
        return {
            "calls until it drains": str(calls),
            "pauses between": "kept" if paused_ns >= least else "too short",
        } | bench.service() | await bench.afterwards()  # fmt: skip


async def _lost_beside_nan(setup: Setup) -> Facts:
    async with setup.bench() as bench:
        lost, nan = Caller(), Caller()
        bench.arm(
            Fault(Point.LOSE, job_id=bench.next_job_id),
            Fault(Point.NAN_OUTPUT, job_id=bench.next_job_id + 1),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.serve, lost)
            await bench.until(lambda: lost.job_id >= 0 and bench.next_job_id > lost.job_id)
            nursery.start_soon(bench.serve, nan, 1)
        await bench.settle()
        facts = bench.service()
        job = bench.job(lost.job_id)
        facts["lost job"] = "still owned" if job is None else job.state.value
        facts["NaN"] = "delivered" if nan.ended in ("right tokens", "WRONG TOKEN") else "held back"
        return facts | await bench.afterwards()


def _fixed(**facts: str) -> Callable[[bool], Facts]:
    named = {name.replace("_", " "): text for name, text in facts.items()}
    return lambda _can_reset: named | {k: v for k, v in _STAYS.items() if k not in named}


def _recovering(facts: Facts) -> Callable[[bool], Facts]:
    return lambda can_reset: facts | _recovers(can_reset)


_ROLLED_BACK = {"KV": "rolled_back", "buffer": "given back", "infer()": "not called"}
_SPOILED = {"KV": "unknown", "buffer": "quarantined", "slot": "slices undone",
            "infer()": "called", "Wait()": "returned", "others": "no wrong token"}  # fmt: skip

DRILLS: tuple[Drill, ...] = (
    Drill(
        "FI01", "one character of a graph's name in the manifest",
        lambda _: {"start": "refused, both names shown", "configure()": "0 calls"}, _fi01,
    ),
    Drill(
        "FI02", "the CSR does not exist",
        lambda _: {"caller": "CsrRejected (code 14)", **_ROLLED_BACK, **_STAYS},
        _struck(Point.CSR, alone=True),
    ),
    Drill(
        "FI03", "slice size = ByteSize + 1",
        lambda _: {"caller": "SliceOutOfRange", "runtime calls": "none", **_ROLLED_BACK, **_STAYS},
        _struck(Point.SLICE, alone=True),
    ),
    Drill(
        "FI04", "canAllocate() says no",
        lambda _: {"caller": "DeadlineExceeded", "waited": "to the deadline",
                   "canAllocate()": "asked once", **_STAYS}, _fi04,
    ),
    Drill(
        "FI05", "infer() returns 17, busy",
        lambda _: {"caller": "Unavailable (code 17)", "Wait()": "not returned",
                   "others": "no wrong token", **_ROLLED_BACK, **_STAYS},
        _struck(Point.SUBMIT, 17),
    ),
    Drill(
        "FI06", "infer() returns 18, unavailable",
        _recovering({"caller": "Unavailable (code 18)", "Wait()": "not returned", **_ROLLED_BACK}),
        _struck(Point.SUBMIT, 18),
    ),
    Drill(
        "FI07", "Wait() returns 13, timeout",
        lambda _: {"caller": "DeadlineExceeded (code 13)", "logits": "untouched", **_SPOILED, **_STAYS},
        _struck(Point.WAIT, 13),
    ),
    Drill(
        "FI08", "status DONE_CCU_EXCEPTION, Wait() succeeds",
        _recovering({"caller": "DeviceFailed", "logits": "untouched", **_SPOILED}),
        _struck(Point.STATUS),
    ),
    Drill(
        "FI09", "the output tensor is smaller than the vocabulary",
        _recovering({"caller": "OutputRejected", "logits": "untouched", **_SPOILED}),
        _struck(Point.SHORT_OUTPUT),
    ),
    Drill(
        "FI10", "NaN and infinity in the logits",
        _recovering({"caller": "OutputRejected", "logits": "not delivered", **_SPOILED}),
        _struck(Point.NAN_OUTPUT),
    ),
    Drill(
        "FI11", "cancelled before submit",
        lambda _: {"caller": "left", "leases": "none for it", "others": "right tokens",
                   **_ROLLED_BACK, **_STAYS}, _fi11,
    ),
    Drill(
        "FI12", "cancelled after submit",
        lambda _: {"caller": "left at once", "infer()": "called", "Wait()": "returned",
                   "logits": "untouched", "KV": "committed", "buffer": "given back",
                   "others": "right tokens", **_STAYS}, _fi12,
    ),
    Drill(
        "FI13", "shutdown with one queued, the others submitted",
        lambda _: {"submitted": "right tokens", "queued": "JobCancelled", "infer()": "not called",
                   "leased": "0", "service": "draining closed"}, _fi13,
    ),
    Drill(
        "FI14", "a completion that comes after the reset",
        lambda can_reset: {"caller": "DeadlineExceeded", "buffer": "quarantined", "KV": "unknown",
                           "stale": "counted once", "new generation": "untouched",
                           **_recovers(can_reset)}
        if can_reset else {"caller": "DeadlineExceeded", **_recovers(can_reset)}, _fi14,
    ),
    Drill(
        "FI15", "UndoSlice() is left out",
        lambda _: {"caller": "right tokens", "slot": "returned with its slices not undone", **_STAYS},
        _struck(Point.UNDO),
    ),
)  # fmt: skip

_NO_WAY_BACK = {"late": "Unavailable", "afterwards": "failed, exit code 75"}

BEYOND: tuple[Drill, ...] = (
    Drill(
        "both", "an exception in two jobs, both in flight where the limit allows",
        _recovering({"callers": "typed errors"}), _both(Point.STATUS),
    ),
    Drill(
        "both-nan", "NaN in two jobs",
        _recovering({"callers": "typed errors"}), _both(Point.NAN_OUTPUT),
    ),
    Drill(
        "twice", "a second fault after the recovery from the first",
        lambda can_reset: {"service": " ".join(["draining recovering configuring warming ready"] * 2),
                           "generation": "3", "afterwards": "golden equal"}
        if can_reset else {"generation": "1", **_recovers(can_reset)}, _twice,
    ),
    Drill(
        "reset-fails", "the reset returns 25",
        lambda _: {"service": "draining recovering failed", **_NO_WAY_BACK},
        _during_recovery(Fault(Point.RESET)),
    ),
    Drill(
        "golden-fails", "an exception in the golden run of the recovery",
        lambda can_reset: {
            "service": "draining recovering configuring warming failed"
            if can_reset else "draining recovering failed", **_NO_WAY_BACK,
        },
        _during_recovery(Fault(Point.STATUS)),
    ),
    Drill(
        "load-fails", "the load of the model in the recovery returns 19",
        lambda can_reset: {
            "service": "draining recovering configuring failed"
            if can_reset else "draining recovering failed",
            "late": "Unavailable", "afterwards": f"failed, exit code {78 if can_reset else 75}",
        },
        _during_recovery(Fault(Point.CONFIGURE)),
    ),
    Drill(
        "busy", "infer() is busy for ever: back-off, then drain",
        _recovering({"calls until it drains": "5", "pauses between": "kept"}), _busy_for_ever,
    ),
    Drill(
        "lost+nan", "one job never returns, the next has NaN",
        lambda can_reset: {"lost job": "quarantined" if can_reset else "still owned",
                           "NaN": "held back",
                           **_recovers(can_reset)}, _lost_beside_nan,
    ),
)  # fmt: skip


async def run_drill(drill: Drill, setup: Setup) -> DrillResult:
    """Run one drill; an error that comes out of it is an observation too."""
    async with setup.open_device() as device:
        can_reset = device.capabilities.reset_scope == "device"
    try:
        with trio.fail_after(_LONGEST_S):
            observed = await drill.run(setup)
    except (CaltrioError, AssertionError, trio.TooSlowError, ExceptionGroup) as error:
        observed = {"drill": f"ended with {type(error).__name__}: {error}"}
    return DrillResult(drill, drill.expected(can_reset), observed)
