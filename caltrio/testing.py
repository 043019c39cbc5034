"""For tests of anything that drives or is a device: :class:`FakeDevice` and :func:`check_device`."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from math import gcd
from typing import ClassVar, TypeVar

import numpy as np
import trio
from attrs import define, evolve, field

from .capabilities import Capabilities
from .codes import CalrtCode
from .config import ExecutorConfig
from .core.job import Job
from .core.kv import KvManager, UnlimitedKv
from .device import (
    Completion,
    Device,
    DeviceKind,
    DeviceOptions,
    OpenDevice,
    StageTimes,
    WaitStatus,
)
from .errors import JobCancelled
from .events import Event, JobEnded, RequestEnded
from .executor import Executor, open_executor
from .manifest import (
    DeviceModel,
    Manifest,
    ModelGeneration,
    SubmodelContract,
    device_models,
    load_manifest,
)
from .mapped import MappedBuffers
from .prepare import host_memory
from .semantics import EngineSemantics, SubmitWhenFull
from .timer import RealTimer, Timer
from .tokens import ReferenceSequence

T = TypeVar("T")


@define(slots=False)
class FakeDevice:
    """A device of the simplest kind: each job takes ``busy_ns``, jobs run side by side, in order.

    Runs on trio's clock, so under ``trio.testing.MockClock`` it takes no real time. Computes the
    tokens of :mod:`caltrio.tokens`, by the reference itself, for jobs that carry any.

    Args:
        busy_ns: from ``infer()`` to the return of ``Wait()``.
        submit_codes, wait_codes: return codes by job id; success where there is none.
        exceptions: ids of jobs that end with ``DONE_CCU_EXCEPTION``.
        lost: ids of jobs for which ``Wait()`` never returns.
        manifest: what it holds.
        kv: its KV manager.
        reset_code: what a reset returns; the default semantics have none to offer.
    """

    ring: ClassVar[None] = None

    busy_ns: int = 1_000_000
    submit_codes: dict[int, int] = field(factory=dict)
    wait_codes: dict[int, int] = field(factory=dict)
    exceptions: set[int] = field(factory=set)
    lost: set[int] = field(factory=set)
    semantics: EngineSemantics = field(
        factory=lambda: EngineSemantics(engines=4, submit_when_full=SubmitWhenFull.BLOCK)
    )
    timer: Timer = field(factory=RealTimer)
    manifest: Manifest = field(factory=load_manifest)
    kv: KvManager = field(factory=UnlimitedKv)
    reset_code: int = CalrtCode.SUCCESS
    inferred: list[int] = field(factory=list)
    waited: list[int] = field(factory=list)
    configured: list[int] = field(factory=list)
    resets: int = 0

    def __attrs_post_init__(self) -> None:
        self.capabilities = Capabilities.assumed(self.semantics)
        self._due: deque[tuple[int, Job]] = deque()
        self._more = trio.Event()
        self._cells: dict[int, list[int]] = {}

    def models(self) -> Sequence[DeviceModel]:
        """Exactly what the manifest says."""
        return device_models(self.manifest, gcd(16, self.manifest.submodels[0].logits.shape[-1]))

    async def configure(self, generation: ModelGeneration) -> int:
        """Remembers the generation."""
        await trio.lowlevel.checkpoint()
        self.configured.append(generation.generation_id)
        self._cells.clear()
        return CalrtCode.SUCCESS

    def buffers(self, contract: SubmodelContract, engine: int) -> MappedBuffers:
        """As the protocol says."""
        return MappedBuffers(contract)

    def set_csr(self, graph: str, name: str, value: int) -> int:
        """Accepts the names of the manifest."""
        names = {
            (contract.exact_name, csr)
            for contract in self.manifest.submodels
            for csr in (contract.csr_cur_seq, contract.csr_total_seq)
        }
        return CalrtCode.SUCCESS if (graph, name) in names else CalrtCode.OUT_OF_RANGE

    async def infer(self, job: Job) -> int:
        """Take the job, or refuse it with the code that was scripted."""
        await trio.lowlevel.checkpoint()
        self.inferred.append(job.job_id)
        code = self.submit_codes.get(job.job_id, CalrtCode.SUCCESS)
        if code == CalrtCode.SUCCESS and job.job_id not in self.lost:
            self._due.append((self.timer.now_ns() + self.busy_ns, job))
            self._more.set()
        return code

    async def wait(self) -> Completion:
        """The oldest job, once its time is up."""
        while not self._due:
            self._more = trio.Event()
            await self._more.wait()
        at_ns, job = self._due[0]
        await trio.sleep(max(at_ns - self.timer.now_ns(), 0) / 1e9)
        if not self._due or self._due[0][1] is not job:  # a reset came meanwhile
            return await self.wait()
        self._due.popleft()
        self.waited.append(job.job_id)
        if job.data is not None and not job.final:
            self._compute(job)
        failed = job.job_id in self.exceptions
        status = WaitStatus.DONE_CCU_EXCEPTION if failed else WaitStatus.DONE
        return Completion(job, self.wait_codes.get(job.job_id, 0), status, StageTimes())

    def _compute(self, job: Job) -> None:
        """Tokens by the reference, from and to the mapped memory."""
        memory = host_memory(job)
        cells = self._cells.setdefault(job.sequence_id, [])
        del cells[job.past_len :]
        cells += memory.tokens[: job.token_count].tolist()
        vocab = memory.contract.logits.shape[-1]
        logits = ReferenceSequence(vocab, cells).logits()
        memory.logits[-vocab:] = np.frombuffer(logits, np.uint16)

    async def reset(self) -> int:
        """Forgets every job."""
        await trio.lowlevel.checkpoint()
        self.resets += 1
        self._due.clear()
        return self.reset_code


def _run(main: Callable[[OpenDevice], Awaitable[T]], options: DeviceOptions) -> T:
    """In real time, whatever ``options.timing`` says."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Device]:
        semantics = evolve(options.semantics, engines=4, submit_when_full=SubmitWhenFull.BLOCK)
        yield FakeDevice(4_000_000, semantics=semantics, manifest=options.model)

    return trio.run(main, opened)


KIND = DeviceKind(
    "fake",
    "Scripted device for tests: each job takes a fixed time and ends as told",
    "real",
    lambda: None,
    _run,
)


class ContractBroken(AssertionError):
    """A device does not keep the contract of :class:`caltrio.device.Device`."""


_CANCELS = 20  # tries to cancel a job while the device has it


def _require(holds: bool, what: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise ContractBroken(what)


async def check_device(
    open_device: Callable[[], AbstractAsyncContextManager[Device]], *, jobs: int = 20
) -> None:
    """Drive a device through the executor and check what every device must keep.

    Each submitted job is returned exactly once; stages come in their order, between ``infer()``
    and the return of ``Wait()``; a cancelled job still returns; the end leaves nothing leased.

    Args:
        open_device: a fresh device of at least two engine slots, for the block.
        jobs: decode steps of each of two sequences.

    Raises :class:`ContractBroken`.
    """
    for max_inflight in (1, 2):
        await _check_work(open_device, jobs, max_inflight)
        await _check_cancel(open_device, max_inflight)


async def _check_work(
    open_device: Callable[[], AbstractAsyncContextManager[Device]], jobs: int, max_inflight: int
) -> None:
    ended: list[Event] = []
    async with open_device() as device:
        config = ExecutorConfig(max_inflight=max_inflight)
        async with (
            open_executor(device, load_manifest(), config, listeners=[ended.append]) as executor,
            trio.open_nursery() as nursery,
        ):
            for _ in range(2):
                nursery.start_soon(_decode, executor, jobs)
        core = executor.core
    done = [event.job for event in ended if isinstance(event, JobEnded)]
    ids = [job.job_id for job in done]
    _require(len(ids) == 2 * (jobs + 1), f"{len(ids)} jobs ended, of {2 * (jobs + 1)}")
    _require(len(set(ids)) == len(ids), "a job was returned twice")
    _require(core.pool.leased == 0, f"{core.pool.leased} leases are still out")
    for job in done:
        _require(job.error is None, f"job {job.job_id} failed: {job.error}")
        _check_order(job)


async def _decode(executor: Executor, jobs: int) -> None:
    async with executor.sequence(3, jobs + 1) as sequence:
        await sequence.prefill(3)
        for _ in range(jobs):
            await sequence.decode()


def _check_order(job: Job) -> None:
    stages = job.stages
    _require(isinstance(stages, StageTimes), f"job {job.job_id} has no stage times object")
    assert isinstance(stages, StageTimes)
    instants: Iterable[int | None] = (
        job.timings.infer_ns,
        stages.h2d_start_ns,
        stages.h2d_end_ns,
        *(stages.die_start_ns or [])[:1],
        *(stages.die_end_ns or [])[-1:],
        stages.d2h_start_ns,
        stages.d2h_end_ns,
        job.timings.waited_ns,
        job.timings.ended_ns,
    )
    known = [instant for instant in instants if instant is not None]
    _require(known == sorted(known), f"job {job.job_id} ran its stages out of order: {known}")


async def _check_cancel(
    open_device: Callable[[], AbstractAsyncContextManager[Device]], max_inflight: int
) -> None:
    for _ in range(_CANCELS):  # a device in real time may be quicker than we are
        ended: list[Event] = []
        async with open_device() as device:
            config = ExecutorConfig(max_inflight=max_inflight)
            async with open_executor(
                device, load_manifest(), config, listeners=[ended.append]
            ) as executor:
                in_time = await _cancel_on_device(executor, ended)
            _require(executor.core.pool.leased == 0, "a cancelled job kept its lease")
        if in_time:
            break
    else:
        raise ContractBroken("no job was long enough on the device to be cancelled there")
    jobs = [event.job for event in ended if isinstance(event, JobEnded)]
    _require(len(jobs) == 1, "a cancelled job never ended")
    _require(isinstance(jobs[0].error, JobCancelled), "a cancelled job is not marked so")
    _require(jobs[0].timings.waited_ns is not None, "Wait() never returned a cancelled job")
    requests = [event for event in ended if isinstance(event, RequestEnded)]
    _require(len(requests) == 1, "a cancelled request never ended")


async def _cancel_on_device(executor: Executor, ended: list[Event]) -> bool:
    """Cancel a prefill once it is submitted; was the job still on the device then?"""
    on_device = executor.core.in_flight.values
    with trio.CancelScope() as scope:
        async with executor.sequence(3, 1) as sequence, trio.open_nursery() as nursery:
            nursery.start_soon(sequence.prefill, 3)
            await _until(
                lambda: (
                    any(isinstance(event, JobEnded) for event in ended)
                    or any(job.timings.submitted_ns is not None for job in on_device())
                )
            )
            in_time = bool(on_device())
            scope.cancel()
    return in_time


async def _until(ready: Callable[[], bool]) -> None:
    while not ready():  # noqa: ASYNC110 - core has no event of trio's to wait on
        await trio.sleep(1e-5)
