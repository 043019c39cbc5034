"""The simulated device: CalRT's calls on the SimPy engine, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from math import gcd
from typing import TypeVar, cast

from caltrio.assumed import RESET_NS, TILE_D0
from caltrio.capabilities import Capabilities
from caltrio.codes import CalrtCode
from caltrio.core.job import Job
from caltrio.costs import Costs
from caltrio.device import (
    Completion,
    Device,
    DeviceKind,
    DeviceOptions,
    OpenDevice,
    StageTimes,
    WaitStatus,
)
from caltrio.manifest import (
    DeviceModel,
    Manifest,
    ModelGeneration,
    SubmodelContract,
    device_models,
    load_manifest,
)
from caltrio.mapped import MappedBuffers
from caltrio.prepare import host_memory
from caltrio.semantics import (
    CompletionOrder,
    EngineSemantics,
    ResetScope,
    SlotRelease,
    SubmitWhenFull,
)
from caltrio.timer import Rank
from caltrio.timing import Stage
from caltrio.workload.requests import stream_seed

from .clock import RankedEvent, SimClock, run_virtual
from .engine import Engine
from .tokens import SimKv, TokenModel, Transfer

T = TypeVar("T")


class SimDevice:
    """A :class:`caltrio.device.Device` in virtual time.

    Args:
        clock: virtual time, with what the stages cost.
        semantics: the hypothesis about the vendor's engines.
        manifest: what the card holds.
        tokens: compute tokens too; without, jobs only take time.
        kv_tokens: tokens of KV that the card has; ``None`` leaves the limit to the executor.
    """

    ring = None

    def __init__(
        self,
        clock: SimClock,
        semantics: EngineSemantics,
        *,
        manifest: Manifest | None = None,
        tokens: bool = False,
        kv_tokens: int | None = None,
    ) -> None:
        self.timer = clock
        self.semantics = semantics
        self.capabilities = Capabilities.assumed(semantics)
        self._manifest = manifest or load_manifest()
        self._tile_d0 = gcd(TILE_D0, self._manifest.submodels[0].logits.shape[-1])
        self._kv_tokens = kv_tokens
        self.kv = SimKv(kv_tokens)
        self._model: TokenModel | None = None
        if tokens:
            vocab = self._manifest.submodels[0].logits.shape[-1]
            after = semantics.kv_after_failed_wait
            self._model = TokenModel(vocab, lambda: self.kv, after, self._tile_d0)
        self._csrs: dict[tuple[str, str], int] = {
            (contract.exact_name, name): 0
            for contract in self._manifest.submodels
            for name in (contract.csr_cur_seq, contract.csr_total_seq)
        }
        self._waiting: RankedEvent | None = None  # the completer, blocked in Wait()
        self._returned: tuple[Job, StageTimes] | None = None
        self._last_transfer: Transfer | None = None
        self._start_engine()

    def _start_engine(self) -> None:
        """A new engine; whatever still runs on an older one no longer touches anything."""
        io = (self._read, self._write) if self._model is not None else (None, None)
        self._engine = Engine(self.timer.env, self.semantics, self.timer.costs, self._finished, *io)
        self._issued: deque[Job] = deque()  # submitted, Wait() not yet returned; in order
        self._finished_jobs: dict[int, tuple[Job, StageTimes]] = {}  # Wait() may return; in order
        self._transfers: dict[int, Transfer] = {}

    # --- what the runtime holds ---------------------------------------------------------------------

    def models(self) -> Sequence[DeviceModel]:
        """Exactly what the manifest says, with the tile size of the current graph where it divides."""
        return device_models(self._manifest, self._tile_d0)

    async def configure(self, generation: ModelGeneration) -> int:
        """Takes no time of its own: it is part of the reset's."""
        self.kv = SimKv(self._kv_tokens)
        return CalrtCode.SUCCESS

    def buffers(self, contract: SubmodelContract, engine: int) -> MappedBuffers:
        """As the protocol says."""
        return MappedBuffers(contract)

    def set_csr(self, graph: str, name: str, value: int) -> int:
        """Only names that the graph has."""
        if (graph, name) not in self._csrs:
            return CalrtCode.OUT_OF_RANGE
        self._csrs[graph, name] = value
        return CalrtCode.SUCCESS

    # --- jobs ---------------------------------------------------------------------------------------

    async def infer(self, job: Job) -> int:
        """As the protocol says; the submitter is busy for the profile's ``submit`` time."""
        engine = self._engine
        transfer = self._transfer(job) if self._model is not None else None
        await self.timer.work(Stage.SUBMIT, job)
        slot = engine.free_slot(job.engine)
        if slot is None and engine is self._engine:
            if self.semantics.submit_when_full is SubmitWhenFull.BUSY:
                return CalrtCode.BUSY
            await self.timer.park(engine.slot_freed(job.engine, job.job_id))
            slot = engine.free_slot(job.engine)
        if engine is not self._engine:
            return CalrtCode.UNAVAILABLE  # a reset came meanwhile
        assert slot is not None, "the only submitter is the only one to take slots"
        self._issued.append(job)
        if transfer is not None:
            self._transfers[job.job_id] = transfer
        engine.start(job, slot)
        return CalrtCode.SUCCESS

    def _transfer(self, job: Job) -> Transfer:
        memory = host_memory(job)
        contract = memory.contract
        cur_len, total_len = (
            self._csrs[contract.exact_name, name]
            for name in (contract.csr_cur_seq, contract.csr_total_seq)
        )
        buffers = cast(MappedBuffers, memory.buffers)
        return Transfer(buffers, job.sequence_id, cur_len, total_len)

    def _read(self, job: Job) -> None:
        if job.job_id in self._transfers and self._model is not None:
            self._model.read(self._transfers[job.job_id])

    def _write(self, job: Job) -> None:
        if job.job_id in self._transfers and self._model is not None:
            self._model.write(self._transfers[job.job_id])

    def injected_failure(self, job: Job) -> None:
        """Somebody above makes ``job`` fail: its KV is what the hypothesis says of failed jobs."""
        if self._model is not None and self._last_transfer is not None:
            self._model.failed(self._last_transfer)

    async def wait(self) -> Completion:
        """As the protocol says; the order is that of ``completion_order``."""
        self._waiting = RankedEvent(self.timer.env)
        parked = self._waiting
        self._offer()
        await self.timer.park(parked)
        assert self._returned is not None
        job, times = self._returned
        self._last_transfer = self._transfers.pop(job.job_id, None)
        return Completion(job, CalrtCode.SUCCESS, WaitStatus.DONE, times)

    def _finished(self, job: Job, times: StageTimes) -> None:
        self._finished_jobs[job.job_id] = (job, times)
        self._offer()

    def _offer(self) -> None:
        """Let ``Wait()`` return, if somebody is in it and a job may be returned."""
        if self._waiting is None or not self._finished_jobs:
            return
        if self.semantics.completion_order is CompletionOrder.IN_ORDER:
            job = self._issued[0]
            if job.job_id not in self._finished_jobs:
                return
        else:
            job = next(iter(self._finished_jobs.values()))[0]
        self._returned = job, times = self._finished_jobs.pop(job.job_id)
        self._issued.remove(job)
        event, self._waiting = self._waiting, None
        if self.semantics.slot_release is SlotRelease.WAIT:
            engine = self._engine
            assert event.callbacks is not None
            event.callbacks.append(lambda _event: engine.release_slot(times.engine))
        event.after(0, Rank.WAIT_RETURNED, job.job_id)

    async def reset(self) -> int:
        """Everything that was on the card is gone, if ``reset_scope`` says so."""
        if self.semantics.reset_scope is not ResetScope.DEVICE:
            return CalrtCode.UNSUPPORTED
        self._engine.stop()
        self._start_engine()
        await self.timer.sleep_until_ns(self.timer.now_ns() + RESET_NS, Rank.DEADLINE, 0)
        return CalrtCode.SUCCESS


def run(main: Callable[[OpenDevice], Awaitable[T]], options: DeviceOptions) -> T:
    """Run ``main`` in virtual time; see :class:`caltrio.device.RunDevice`."""
    costs = Costs(
        options.timing,
        options.model,
        stream_seed(options.seed, "jitter"),
        device_samples=options.device_samples,
    )

    async def in_virtual_time(clock: SimClock) -> T:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Device]:
            yield SimDevice(clock, options.semantics, manifest=options.model, tokens=options.tokens)

        return await main(opened)

    return run_virtual(in_virtual_time, costs, outside=options.outside)


KIND = DeviceKind(
    "sim",
    "SimPy timing model of the card, under any hypothesis about its engines",
    "virtual",
    lambda: None,
    run,
    hypothetical=True,
)
