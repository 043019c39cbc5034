"""What a model asks of the device: the contracts of specification §4.1.

The values of the current product are given by :func:`qwen3_generation`.
"""

from __future__ import annotations

from enum import StrEnum
from math import prod

from attrs import field, frozen


class TaskKind(StrEnum):
    """What a job runs (§4.1); the two kinds that a text request needs."""

    PREFILL_IDS = "prefill_ids"
    DECODE = "decode"


DTYPE_BYTES = {"s32": 4, "bf16": 2, "f32": 4}


@frozen
class TensorContract:
    """One tensor of a submodel: exact name, shape, dtype (``s32``, ``bf16``, ``f32``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = field()

    @dtype.validator
    def _known(self, _attribute: object, value: str) -> None:
        if value not in DTYPE_BYTES:
            raise ValueError(f"dtype {value!r} is unknown; use one of {', '.join(DTYPE_BYTES)}")

    @property
    def byte_size(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@frozen
class SubmodelContract:
    """One graph of the calbin: its tensors and limits, batch 1 in the current product."""

    kind: TaskKind
    exact_name: str
    tokens: TensorContract
    position: TensorContract
    logits: TensorContract
    max_seq: int

    def input_bytes(self, token_count: int) -> int:
        """Bytes that H2D moves for ``token_count`` tokens: their ids and their positions."""
        return token_count * (DTYPE_BYTES[self.tokens.dtype] + DTYPE_BYTES[self.position.dtype])

    @property
    def output_bytes(self) -> int:
        """Bytes that D2H moves: the logits of one position."""
        return self.logits.byte_size


@frozen
class ModelGeneration:
    """One loaded model. A reset or a model switch makes a new generation (§9.2)."""

    generation_id: int
    name: str
    submodels: dict[TaskKind, SubmodelContract]

    @property
    def max_seq(self) -> int:
        """Positions that one sequence may fill, in tokens."""
        return min(contract.max_seq for contract in self.submodels.values())


def qwen3_generation(generation_id: int = 1) -> ModelGeneration:
    """The product of §4.1: batch 1, 40960 positions, BF16 logits of ``[1, 1, 151936]``."""

    def contract(kind: TaskKind, name: str, positions: int) -> SubmodelContract:
        return SubmodelContract(
            kind=kind,
            exact_name=name,
            tokens=TensorContract("token_ids", (1, positions), "s32"),
            position=TensorContract("position_ids", (1, positions), "s32"),
            logits=TensorContract("logits", (1, 1, 151936), "bf16"),
            max_seq=40960,
        )

    return ModelGeneration(
        generation_id,
        "qwen3-8b",
        {
            TaskKind.PREFILL_IDS: contract(TaskKind.PREFILL_IDS, "prefill", 40960),
            TaskKind.DECODE: contract(TaskKind.DECODE, "decode", 1),
        },
    )
