"""The CalRT driver: :class:`HwDevice`, a device over the native ring (``native/shim``).

Native threads call ``infer()`` and ``Wait()``. This side hands jobs over and fetches reports in
batches, when trio says that the ring's eventfd is readable: no Python thread, and no interpreter
lock, is between two jobs on the card.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, cast

import trio
from numpy.typing import NDArray

from caltrio.capabilities import Capabilities
from caltrio.codes import CalrtCode, code_name
from caltrio.core.job import CallTimes, Job
from caltrio.device import Completion, StageTimes, Submission, WaitStatus
from caltrio.errors import InputError
from caltrio.manifest import DeviceModel, DeviceTensor, ModelGeneration, SubmodelContract
from caltrio.prepare import host_memory
from caltrio.semantics import EngineSemantics
from caltrio.timer import RealTimer

from .bindings import ffi, keep_for_ever, load

_BATCH = 16  # reports of one call
_SETTLE_NS = 1_000_000_000  # after a reset, for every Wait() to return
_CLOSE_S = 2.0  # for the native threads to end
_DTYPES = ("s32", "bf16", "f32")


class HwBuffers:
    """The buffers of one slot on the card, with the host memory that is mapped into them."""

    def __init__(self, library: Any, device: Any, contract: SubmodelContract) -> None:
        self._library = library
        self._contract = contract
        self._names = {tensor.name: tensor.name.encode() for tensor in contract.tensors}
        self._token_bytes = {
            contract.tokens.name: contract.token_bytes,
            contract.position.name: contract.position_bytes,
        }
        self.handle = library.caltrio_buffers_new(device, contract.exact_name.encode())
        if self.handle == ffi().NULL:
            raise MemoryError(f"no buffers for {contract.exact_name!r}")
        self._tensors = {name: self._describe(name) for name in self._names}
        self._slices = 0
        self.host: dict[str, tuple[NDArray[Any], Any]] = {}

    def _describe(self, name: str) -> DeviceTensor | None:
        raw = ffi().new("caltrio_tensor *")
        if self._library.caltrio_buffers_tensor(self.handle, self._names[name], raw) != 0:
            return None
        return _tensor(raw)

    @property
    def sliced(self) -> bool:
        """Is a slice set that was not undone?"""
        return self._slices > 0

    def tensor(self, name: str) -> DeviceTensor | None:
        """The tensor of that exact name; the output as large as the last job left it."""
        return self._tensors.get(name)

    def output_has(self, size: int) -> None:
        """A job left so many bytes of output."""
        name = self._contract.logits.name
        known = self._tensors[name]
        if known is None or known.byte_size == size:
            return
        per_entry = 2 * max(known.byte_size // 2 // max(known.shape[-1], 1), 1)
        self._tensors[name] = DeviceTensor(
            name, (*known.shape[:-1], size // per_entry), known.dtype, size
        )

    def extent(self, name: str, token_count: int) -> tuple[int, int]:
        """The first tokens of a row lie at its start."""
        return 0, token_count * self._token_bytes[name]

    def map(self, name: str, host: NDArray[Any]) -> int:
        """``MapBuf()``."""
        if self.over:
            return CalrtCode.UNAVAILABLE
        memory = ffi().from_buffer(host)
        self.host[name] = (host, memory)
        out = name == self._contract.logits.name
        call = self._library.caltrio_map_output if out else self._library.caltrio_map_input
        rc: int = call(self.handle, name.encode(), memory, host.nbytes)
        return rc

    def slice(self, name: str, offset: int, size: int) -> int:
        """``SliceTensor()``."""
        if self.over:
            return CalrtCode.UNAVAILABLE
        rc: int = self._library.caltrio_slice(self.handle, self._names[name], offset, size)
        self._slices += rc == CalrtCode.SUCCESS
        return rc

    def undo_slices(self) -> int:
        """``UndoSlice()``; done with the buffers themselves once a reset has ended them."""
        rc: int = 0 if self.over else self._library.caltrio_undo_slices(self.handle)
        if rc == CalrtCode.SUCCESS:
            self._slices = 0
        return rc

    @property
    def over(self) -> bool:
        """Have they been freed?"""
        return bool(self.handle == ffi().NULL)

    def free(self) -> None:
        """The card does not use them any more."""
        if not self.over:
            self._library.caltrio_buffers_free(self.handle)
            self.handle = ffi().NULL

    def abandon(self) -> None:
        """The card may use them for ever: they, and their memory, are never freed."""
        keep_for_ever(self.host)


@cache
def _bytes(name: str) -> bytes:
    """The names of graphs and CSRs are few, and used with each job."""
    return name.encode()


def _text(raw: Any) -> str:
    """A name of the runtime's, of which nobody promised that it is text."""
    return cast(bytes, ffi().string(raw)).decode(errors="backslashreplace")


def _tensor(raw: Any) -> DeviceTensor:
    shape = tuple(raw.shape[index] for index in range(min(raw.rank, 8)))
    known = 0 <= raw.dtype < len(_DTYPES)
    dtype = _DTYPES[raw.dtype] if known else f"type {raw.dtype}"
    return DeviceTensor(_text(raw.name), shape, dtype, raw.byte_size)


class HwKv:
    """The runtime's KV manager of one generation; silent once a reset has ended that."""

    def __init__(self, library: Any, device: Any) -> None:
        self._library, self._device = library, device
        self.over = False

    def can_allocate(self, sequences: int) -> bool:
        """``canAllocate()``."""
        return not self.over and bool(self._library.caltrio_kv_can_allocate(self._device, sequences))

    def apply(self, sequence_id: int, target_tokens: int) -> bool:
        """``Apply()``."""
        if self.over:
            return False
        return bool(self._library.caltrio_kv_apply(self._device, sequence_id, target_tokens))

    def release(self, sequence_id: int) -> None:
        """The sequence has ended."""
        if not self.over:
            self._library.caltrio_kv_release(self._device, sequence_id)


class HwDevice:
    """A :class:`caltrio.device.Device` over a library with the C ABI of ``native/shim``.

    Made by :func:`open_hw`, inside trio. One job more than the in-flight limit may be handed over;
    the ring holds it back.

    Args:
        library: the loaded library.
        calbin: the model file.
        semantics: what the card's engines are assumed to do.
        capabilities: what may be used of it.
    """

    def __init__(
        self, library: Any, calbin: Path, semantics: EngineSemantics, capabilities: Capabilities
    ) -> None:
        self.timer = RealTimer()
        self.semantics, self.capabilities = semantics, capabilities
        self._library = library
        code = ffi().new("int32_t *")
        self._device = library.caltrio_open(os.fsencode(calbin), code)
        if self._device == ffi().NULL:
            raise InputError(str(calbin), "", f"cannot be loaded: CalRT code {code_name(code[0])}")
        self._fd: int = library.caltrio_event_fd(self._device)
        self._offset_ns = _clock_offset_ns(self.timer)
        self.kv = HwKv(library, self._device)
        self._limit = 1
        self._next_token = 0
        self._jobs: dict[int, tuple[Job, HwBuffers]] = {}  # the ring or the card has them
        self._buffers: list[HwBuffers] = []
        self._submissions = ffi().new("caltrio_submission[]", _BATCH)
        self._completions = ffi().new("caltrio_completion[]", _BATCH)
        self._words = ffi().sizeof("caltrio_completion") // 8
        self._rows = [ffi().cast("int64_t *", self._completions + index) for index in range(_BATCH)]
        self._counts = ffi().new("int32_t[2]")
        self._reports: deque[Submission | Completion] = deque()  # fetched, and not yet told
        self._handed_over: tuple[int, Job | None] = (-1, None)  # last
        self._look_at_failure = False

    # --- what the runtime holds ---------------------------------------------------------------------

    def models(self) -> Sequence[DeviceModel]:
        """``GetAllModels()`` of the model file."""
        library, device = self._library, self._device
        return [self._model(index) for index in range(library.caltrio_model_count(device))]

    def _model(self, index: int) -> DeviceModel:
        library, device = self._library, self._device
        raw, key, value = (ffi().new(kind) for kind in ("caltrio_tensor *", "char **", "char **"))
        tensors = []
        for each in range(library.caltrio_model_tensors(device, index)):
            library.caltrio_model_tensor(device, index, each, raw)
            tensors.append(_tensor(raw))
        metadata: dict[str, str] = {}
        for each in count():
            if library.caltrio_model_metadata(device, index, each, key, value) != 0:
                break
            metadata[_text(key[0])] = _text(value[0])
        name = _text(library.caltrio_model_name(device, index))
        return DeviceModel(name, tuple(tensors), metadata)

    async def configure(self, generation: ModelGeneration) -> int:
        """Load the model; in parallel mode if more than one job may be in flight."""
        rc = await self._slow_call(self._library.caltrio_begin_configure, int(self._limit > 1))
        if rc == CalrtCode.SUCCESS:
            self.kv = HwKv(self._library, self._device)
        return rc

    async def _slow_call(self, begin: Any, argument: int) -> int:
        """A call that may block: in a thread of the library's, left alone if we may not wait."""
        code = ffi().new("int32_t *")
        rc = int(begin(self._device, argument))
        if rc != CalrtCode.SUCCESS:
            return rc  # an earlier one hangs
        while not self._library.caltrio_ended(self._device, code):  # noqa: ASYNC110 - seldom, and slow
            await trio.sleep(0.001)
        return int(code[0])

    def buffers(self, contract: SubmodelContract, engine: int) -> HwBuffers:
        """As the protocol says."""
        made = HwBuffers(self._library, self._device, contract)
        self._buffers.append(made)
        return made

    def set_csr(self, graph: str, name: str, value: int) -> int:
        """``SetCsrByName()``; the ring has no job then that is still to be submitted."""
        rc: int = self._library.caltrio_set_csr(self._device, _bytes(graph), _bytes(name), value)
        return rc

    # --- jobs ---------------------------------------------------------------------------------------

    @property
    def ring(self) -> HwDevice:
        """Itself."""
        return self

    def limit(self, max_inflight: int) -> None:
        """As the protocol says."""
        self._limit = max_inflight
        self._library.caltrio_limit(self._device, max_inflight)

    def hand_over(self, job: Job) -> int | None:
        """As the protocol says."""
        token = self._next_token
        self._next_token += 1
        buffers = host_memory(job).buffers
        buffers = cast(HwBuffers, getattr(buffers, "inner", buffers))  # without what injects faults
        self._jobs[token] = job, buffers
        self._handed_over = token, job
        rc: int = self._library.caltrio_submit(
            self._device, buffers.handle, token, job.engine, job.sequence_id
        )
        if rc == CalrtCode.SUCCESS:
            return None
        del self._jobs[token]
        return rc

    def withdraw(self, job: Job) -> None:
        """As the protocol says; the ring decides whether it is in time."""
        token, last = self._handed_over
        if last is job:
            self._library.caltrio_withdraw(self._device, token)

    async def infer(self, job: Job) -> int:
        """Raises ``TypeError``: its ring calls ``infer()``."""
        raise TypeError("jobs go to this device through its ring")

    async def wait(self) -> Completion | Submission:
        """As the protocol says; in the order of submission."""
        if self._look_at_failure:
            # The executor has judged the failure by now, and withdrawn what it no longer wants.
            self._look_at_failure = False
            if not any(map(_failed, self._reports)):
                self._library.caltrio_resume(self._device)
        while not self._reports:
            await trio.lowlevel.wait_readable(self._fd)
            self._drain()
        report = self._reports.popleft()
        self._look_at_failure = _failed(report)
        return report

    def _drain(self) -> None:
        counts, jobs = self._counts, self._jobs
        self._library.caltrio_drain(
            self._device, self._submissions, counts, self._completions, counts + 1, _BATCH
        )
        for index in range(counts[0]):
            told = self._submissions[index]
            token, rc, withdrawn = told.token, told.rc, bool(told.withdrawn)
            gone = withdrawn or rc != CalrtCode.SUCCESS
            job, _ = jobs.pop(token) if gone else jobs[token]
            self._reports.append(Submission(job, rc, withdrawn))
        for row in self._rows[: counts[1]]:
            token, rc, exception, output_bytes, *times = ffi().unpack(row, self._words)
            job, buffers = jobs.pop(token)
            buffers.output_has(output_bytes)
            self._reports.append(self._completion(job, rc, exception, times))

    def _completion(self, job: Job, rc: int, exception: int, times: list[int]) -> Completion:
        """From the fields of ``caltrio_completion`` after its first four, in their order."""
        offset = self._offset_ns
        infer, submitted, waited, engine, dies, h2d_start, h2d_end, d2h_start, d2h_end = times[:9]
        stages = StageTimes(engine)
        if h2d_start >= 0:
            stages.h2d_start_ns, stages.h2d_end_ns = h2d_start + offset, h2d_end + offset
            stages.die_start_ns = [start + offset for start in times[9 : 9 + dies]]
            stages.die_end_ns = [end + offset for end in times[17 : 17 + dies]]
            stages.d2h_start_ns, stages.d2h_end_ns = d2h_start + offset, d2h_end + offset
        status = WaitStatus.DONE_CCU_EXCEPTION if exception else WaitStatus.DONE
        calls = CallTimes(infer + offset, submitted + offset, waited + offset)
        return Completion(job, rc, status, stages, calls)

    async def reset(self) -> int:
        """Reset the card; succeeds only if every job that it had has come back."""
        self.kv.over = True
        rc = await self._slow_call(self._library.caltrio_begin_reset, _SETTLE_NS)
        if rc == CalrtCode.SUCCESS:
            for buffers in self._buffers:
                buffers.free()
            self._buffers.clear()
        return rc

    @property
    def _ended(self) -> bool:
        return bool(self._library.caltrio_stopped(self._device))

    async def aclose(self) -> None:
        """End the native threads; what they have not given back in time is never freed."""
        library, device = self._library, self._device
        library.caltrio_stop(device)
        with trio.move_on_after(_CLOSE_S, shield=True):
            while not self._ended:  # noqa: ASYNC110 - native threads tell no event of trio's
                await trio.sleep(0.0005)
        if not self._ended:
            for buffers in self._buffers:
                buffers.abandon()
            return
        for buffers in self._buffers:
            buffers.free()
        library.caltrio_free(device)


def _failed(report: Submission | Completion) -> bool:
    """Does it hold the ring up until somebody has looked at it?"""
    if isinstance(report, Submission):
        return False
    return report.rc != CalrtCode.SUCCESS or report.status is not WaitStatus.DONE


def _clock_offset_ns(timer: RealTimer) -> int:
    """What to add to CLOCK_MONOTONIC for the executor's clock: the narrowest of some brackets."""
    brackets = []
    for _ in range(20):
        before = time.monotonic_ns()
        now = timer.now_ns()
        after = time.monotonic_ns()
        brackets.append((after - before, now - (before + after) // 2))
    return min(brackets)[1]


@asynccontextmanager
async def open_hw(
    library: Path, calbin: Path, semantics: EngineSemantics, capabilities: Capabilities
) -> AsyncIterator[HwDevice]:
    """A device over the library at that path, for the block.

    Raises :class:`~caltrio.errors.InputError` if the library or the model file cannot be loaded.
    """
    device = HwDevice(load(library), calbin, semantics, capabilities)
    import_module("caltrio.logits")  # compiles its loop: now, rather than as the first job is back
    try:
        yield device
    finally:
        await device.aclose()
