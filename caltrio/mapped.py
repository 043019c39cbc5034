"""Buffers for devices written in Python: the bookkeeping of ``MapBuf()`` and ``SliceTensor()``."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from .codes import CalrtCode
from .manifest import DeviceTensor, SubmodelContract


class MappedBuffers:
    """A :class:`~caltrio.device.DeviceBuffers` whose tensors are the host's arrays themselves."""

    def __init__(self, contract: SubmodelContract) -> None:
        self.contract = contract
        self._tensors = {
            tensor.name: DeviceTensor(tensor.name, tensor.shape, tensor.dtype, tensor.byte_size)
            for tensor in contract.tensors
        }
        self._token_bytes = {
            contract.tokens.name: contract.token_bytes,
            contract.position.name: contract.position_bytes,
        }
        self.host: dict[str, NDArray[Any]] = {}
        self.slices: dict[str, tuple[int, int]] = {}

    @property
    def sliced(self) -> bool:
        """Is a slice set that was not undone?"""
        return bool(self.slices)

    def tensor(self, name: str) -> DeviceTensor | None:
        """The tensor of that exact name."""
        return self._tensors.get(name)

    def extent(self, name: str, token_count: int) -> tuple[int, int]:
        """The first tokens of a row lie at its start."""
        return 0, token_count * self._token_bytes[name]

    def map(self, name: str, host: NDArray[Any]) -> int:
        """Refuses an unknown tensor, or memory of another size."""
        tensor = self._tensors.get(name)
        if tensor is None or host.nbytes != tensor.byte_size:
            return CalrtCode.MAP_BROKEN
        self.host[name] = host
        return CalrtCode.SUCCESS

    def slice(self, name: str, offset: int, size: int) -> int:
        """Refuses what is outside the tensor."""
        tensor = self._tensors.get(name)
        if tensor is None or not 0 <= offset <= offset + size <= tensor.byte_size:
            return CalrtCode.OUT_OF_RANGE
        self.slices[name] = (offset, size)
        return CalrtCode.SUCCESS

    def undo_slices(self) -> int:
        """Forget all slices."""
        self.slices.clear()
        return CalrtCode.SUCCESS
