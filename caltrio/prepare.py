"""Between a job and the device's memory: checks 5 to 8 of §6.3 before, those of §6.5 after.

A failed check raises its own typed error, makes no further call of the device, and undoes what it
had set, the last first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from .codes import CalrtCode, code_name
from .core.job import Job
from .device import Device, DeviceBuffers
from .errors import (
    CsrRejected,
    MapRejected,
    Phase,
    RequestError,
    SliceOutOfRange,
    TensorMismatch,
)
from .manifest import DeviceTensor, SubmodelContract, TensorContract, tensor_differences

if TYPE_CHECKING:
    from .logits import LogitsLayout

_DTYPES: dict[str, Any] = {"s32": np.int32, "f32": np.float32}


class HostMemory:
    """The host storage of one buffer slot, with the device's buffers on it (§4.2).

    The arrays are made once and never move: the device may read and write them whenever a job of
    this slot is on it.

    Args:
        contract: of the graph that the slot serves.
        tile_d0: tile size of its logits, from the graph's metadata.
        buffers: the device's.
    """

    def __init__(self, contract: SubmodelContract, tile_d0: int, buffers: DeviceBuffers) -> None:
        self.contract, self.tile_d0, self.buffers = contract, tile_d0, buffers
        tokens, position, logits = contract.tensors
        self.tokens: NDArray[Any] = np.zeros(tokens.byte_size // 4, _DTYPES[tokens.dtype])
        self.positions: NDArray[np.int32] = np.zeros(position.byte_size // 4, np.int32)
        self.logits: NDArray[np.uint16] = np.zeros(logits.byte_size // 2, np.uint16)  # bf16 bits
        self._seen: list[DeviceTensor | None] = [None, None, None]  # checked, and equal
        self._names = tuple(enumerate(tensor.name for tensor in contract.tensors))
        self._inputs = tuple(
            (tensor, tensor.name, each, tensor.byte_size)
            for tensor, each in (
                (tokens, contract.token_bytes),
                (position, contract.position_bytes),
            )
        )
        self._layout: LogitsLayout | None = None
        self._unread: NDArray[np.float32] | None = None
        self._mapped = False

    @property
    def sliced(self) -> bool:
        """Are slices set that were not undone?"""
        return self.buffers.sliced

    def load(self, device: Device, job: Job) -> None:
        """Check, copy the inputs, set CSRs, map and slice. Raises a typed error."""
        contract, buffers, count = self.contract, self.buffers, job.token_count
        tensor_of = buffers.tensor
        for index, name in self._names:
            theirs = tensor_of(name)
            if theirs is None or theirs is not self._seen[index]:
                self._check_tensor(index, theirs, job)
        slices = []
        for tensor, name, token_bytes, whole in self._inputs:
            offset, size = buffers.extent(name, count)
            if offset < 0 or not count * token_bytes <= size <= whole - offset:
                raise self._out_of_range(job, tensor, count * token_bytes, offset, size)
            if tensor.sliceable:
                slices.append((name, offset, size))
        if job.data is not None:
            self._copy(job.data.tokens, job.past_len, count)
        for name, value in (
            (contract.csr_cur_seq, job.past_len),
            (contract.csr_total_seq, job.past_len + count),
        ):
            rc = device.set_csr(contract.exact_name, name, value)
            if rc != CalrtCode.SUCCESS:
                text = f"SetCsrByName({name!r}, {value}) returned {code_name(rc)}"
                raise _error(CsrRejected, job, text, rc)
        if not self._mapped:
            self._map(job)
        for name, offset, size in slices:
            rc = buffers.slice(name, offset, size)
            if rc != CalrtCode.SUCCESS:
                buffers.undo_slices()
                text = f"SliceTensor({name!r}, {offset}, {size}) returned {code_name(rc)}"
                raise _error(MapRejected, job, text, rc)

    def _copy(self, tokens: NDArray[Any], past_len: int, count: int) -> None:
        if tokens.size == 1:  # each decode step: an item costs a tenth of what slices do
            self.tokens[0], self.positions[0] = tokens.item(), past_len
            return
        self.tokens[: tokens.size] = tokens.ravel()
        self.positions[:count] = np.arange(past_len, past_len + count)

    def _check_tensor(self, index: int, theirs: DeviceTensor | None, job: Job) -> None:
        ours = self.contract.tensors[index]
        if theirs is None:
            raise _error(TensorMismatch, job, f"the device has no tensor {ours.name!r}")
        found = tensor_differences(ours, theirs, f"tensor {ours.name!r}")
        if found:
            raise _error(TensorMismatch, job, "; ".join(found))
        self._seen[index] = theirs

    @staticmethod
    def _out_of_range(
        job: Job, tensor: TensorContract, needed: int, offset: int, size: int
    ) -> RequestError:
        whole = tensor.byte_size
        if needed > whole:
            text = f"{job.token_count} tokens are {needed} bytes, above the {whole} of {tensor.name!r}"
        else:
            text = (
                f"the slice of {size} bytes at {offset} is outside the {whole} bytes of "
                f"{tensor.name!r}, or below the {needed} needed"
            )
        return _error(SliceOutOfRange, job, text)

    def _map(self, job: Job) -> None:
        hosts: tuple[NDArray[Any], ...] = (self.tokens, self.positions, self.logits)
        for tensor, host in zip(self.contract.tensors, hosts, strict=True):
            rc = self.buffers.map(tensor.name, host)
            if rc != CalrtCode.SUCCESS:
                raise _error(MapRejected, job, f"MapBuf({tensor.name!r}) returned {code_name(rc)}", rc)
        self._mapped = True

    def unload(self) -> None:
        """The device is done with the slot: undo the slices."""
        if self.buffers.sliced:
            self.buffers.undo_slices()

    def deliver(self, job: Job) -> str | None:
        """Check the output and convert it into the caller's array; what is wrong, or ``None``.

        The output of a job whose caller has left is checked all the same: its KV is to be committed.
        """
        ours = self.contract.logits
        theirs = self.buffers.tensor(ours.name)
        if theirs is None:
            return f"the device has no tensor {ours.name!r}"
        if theirs is not self._seen[2]:
            found = tensor_differences(ours, theirs, f"tensor {ours.name!r}")
            if found:
                return "; ".join(found)
        if job.data is None:
            return None
        # Only where tokens flow: importing it compiles the loop.
        from .logits import LogitsLayout, convert  # noqa: PLC0415

        if self._layout is None:
            rows = ours.byte_size // (2 * ours.shape[-1])
            self._layout = LogitsLayout(rows, ours.shape[-1], self.tile_d0)
        base, out = job.data.base, job.data.out
        if job.answered or not out.flags.writeable:
            # Nobody reads it, and nothing may be written there any more; it is checked all the same.
            if self._unread is None:
                self._unread = np.empty(ours.shape[-1], np.float32)
            base, out = 0, self._unread
        bad = convert(self.logits, self._layout, self._layout.rows - 1, base, out)
        if bad:
            return f"{bad} of {out.size} logits are NaN or infinite"
        if out is self._unread and not job.answered:
            raise UndeliverableError("the array was made read-only meanwhile")
        return None


class UndeliverableError(Exception):
    """The output is right, and the caller's array cannot take it."""


def host_memory(job: Job) -> HostMemory:
    """The memory of the slot that ``job`` holds."""
    assert job.lease is not None
    return cast(HostMemory, job.lease.slot.memory)


def _error(kind: type[RequestError], job: Job, text: str, code: int = 0) -> RequestError:
    facts = (Phase.PREPARE, code, job.job_id, job.sequence_id, job.generation_id)
    return kind(f"job {job.job_id}: {text}", *facts)
