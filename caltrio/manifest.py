"""What a model asks of the device: the contracts of specification §4.1, read from a TOML manifest.

A :class:`Manifest` says what is expected, a :class:`DeviceModel` what the device reports.
:func:`bind` compares them exactly (§10.2) and gives the :class:`ModelGeneration` that runs; there
is no other way to one, and no name is ever matched in part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache, cached_property
from importlib.resources import files
from math import prod
from pathlib import Path

from attrs import field, frozen

from .errors import CaltrioError, InputError
from .tomlfile import converter, parse_toml, read_text, structure


class TaskKind(StrEnum):
    """What a job runs (§4.1). The current product has graphs for ``prefill_ids`` and ``decode``."""

    PREFILL_IDS = "prefill_ids"
    PREFILL_EMBEDS = "prefill_embeds"
    DECODE = "decode"
    VISION = "vision"


_MOST_BYTES = 1 << 32  # of one tensor; its storage on the host is as large
_MOST_VOCAB = 1 << 24
DTYPE_BYTES = {"s32": 4, "bf16": 2, "f32": 4}

# The key under which a graph's metadata gives the tile size of its logits: an assumption.
TILE_D0_KEY = "logits_tile_d0"
# And that under which it says of which calbin it is: another one.
CALBIN_KEY = "calbin_sha256"


def _positive(_instance: object, attribute: object, value: int) -> None:
    if not 1 <= value < 2**31:
        raise ValueError(f"{getattr(attribute, 'name', '')} is {value}; give 1 to 2**31 - 1")


@frozen
class TensorContract:
    """One tensor of a submodel: exact name, shape, dtype (``s32``, ``bf16``, ``f32``), size.

    Args:
        sliceable: may a job use a slice of it (``SliceTensor()``)?
    """

    name: str
    shape: tuple[int, ...] = field()
    dtype: str = field()
    byte_size: int = field()
    sliceable: bool = False

    @shape.validator
    def _real(self, _attribute: object, shape: tuple[int, ...]) -> None:
        if not shape or any(size < 1 for size in shape):
            raise ValueError(f"shape is {list(shape)}; give sizes of 1 or more")

    @dtype.validator
    def _known(self, _attribute: object, dtype: str) -> None:
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPE_BYTES)}")

    @byte_size.validator
    def _fits(self, _attribute: object, byte_size: int) -> None:
        whole = prod(self.shape) * DTYPE_BYTES[self.dtype]
        if whole > _MOST_BYTES:
            raise ValueError(f"{list(self.shape)} of {self.dtype} is more than {_MOST_BYTES} bytes")
        if byte_size != whole:
            raise ValueError(
                f"byte_size is {byte_size}, but {list(self.shape)} of {self.dtype} is {whole} bytes"
            )


@frozen
class SubmodelContract:
    """One graph of the calbin: its exact name, its tensors, its CSRs, its limits (§4.1)."""

    kind: TaskKind
    exact_name: str
    tokens: TensorContract = field()
    position: TensorContract = field()
    logits: TensorContract = field()
    csr_cur_seq: str
    csr_total_seq: str
    max_batch: int = field(validator=_positive)
    max_seq: int = field(validator=_positive)

    @tokens.validator
    def _ids_or_embeddings(self, _attribute: object, tensor: TensorContract) -> None:
        if tensor.dtype not in ("s32", "f32") or len(tensor.shape) < 2:
            raise ValueError("tokens must be s32 or f32 of shape [batch, positions, …]")

    @position.validator
    def _whole_numbers(self, _attribute: object, tensor: TensorContract) -> None:
        if tensor.dtype != "s32":
            raise ValueError(f"position is {tensor.dtype}; it must be s32")

    @logits.validator
    def _bf16(self, _attribute: object, tensor: TensorContract) -> None:
        if tensor.dtype != "bf16" or tensor.shape[-1] > _MOST_VOCAB:
            raise ValueError(f"logits must be bf16 of at most {_MOST_VOCAB} vocabulary entries")

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in the token (or embedding) tensor ``[batch, positions, …]``."""
        return self.tokens.byte_size // prod(self.tokens.shape[:2])

    @cached_property
    def position_bytes(self) -> int:
        """Bytes of one token's position."""
        return DTYPE_BYTES[self.position.dtype]

    @cached_property
    def tensors(self) -> tuple[TensorContract, TensorContract, TensorContract]:
        """Tokens, positions, logits."""
        return self.tokens, self.position, self.logits

    def input_bytes(self, token_count: int) -> int:
        """Bytes that H2D moves for ``token_count`` tokens: their ids and their positions."""
        return token_count * (self.token_bytes + self.position_bytes)

    @property
    def output_bytes(self) -> int:
        """Bytes that D2H moves: the logits."""
        return self.logits.byte_size


@frozen
class Manifest:
    """What a calbin is expected to hold.

    Args:
        schema: 1.
        name: of the model.
        submodels: its graphs; each kind and each exact name once.
        calrt_version: the runtime that it was made for.
        calbin_sha256: of the file, where known; the device must report the same.
    """

    schema: int = field()
    name: str
    submodels: tuple[SubmodelContract, ...] = field()
    calrt_version: str
    calbin_sha256: str | None = None

    @schema.validator
    def _known_schema(self, _attribute: object, schema: int) -> None:
        if schema != 1:
            raise ValueError(f"schema is {schema}; this version reads 1")

    @submodels.validator
    def _unambiguous(self, _attribute: object, submodels: tuple[SubmodelContract, ...]) -> None:
        if not submodels:
            raise ValueError("submodels is empty; name at least one graph")
        for what, values in (
            ("kind", [str(contract.kind) for contract in submodels]),
            ("exact_name", [contract.exact_name for contract in submodels]),
        ):
            twice = [value for value, count in Counter(values).items() if count > 1]
            if twice:
                raise ValueError(f"{what} {twice[0]!r} stands for two submodels; name each once")
        vocabularies = {contract.logits.shape[-1] for contract in submodels}
        if len(vocabularies) > 1:
            raise ValueError(f"submodels have different vocabularies: {sorted(vocabularies)}")

    @cached_property
    def by_kind(self) -> Mapping[TaskKind, SubmodelContract]:
        """The graphs by what they run."""
        return {contract.kind: contract for contract in self.submodels}

    @property
    def max_seq(self) -> int:
        """Positions that one sequence may fill, in tokens."""
        return min(contract.max_seq for contract in self.submodels)


@frozen
class DeviceTensor:
    """A tensor as the device reports it; ``byte_size`` is what its ``ByteSize()`` says."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    byte_size: int


@frozen
class DeviceModel:
    """A graph as the device reports it (``GetAllModels()``), with the graph's own metadata."""

    name: str
    tensors: tuple[DeviceTensor, ...]
    metadata: Mapping[str, str] = field(factory=dict)


@frozen
class ModelGeneration:
    """One loaded model. A reset or a change of model makes a new generation (§9.2).

    Made by :func:`bind`. ``tile_d0`` has the tile size of each kind's logits, from the graph.
    """

    generation_id: int
    manifest: Manifest
    tile_d0: Mapping[TaskKind, int]

    @property
    def submodels(self) -> Mapping[TaskKind, SubmodelContract]:
        """The contracts by kind."""
        return self.manifest.by_kind

    @cached_property
    def max_seq(self) -> int:
        """Positions that one sequence may fill, in tokens."""
        return self.manifest.max_seq


class ManifestMismatch(CaltrioError):
    """The device does not hold what the manifest says; the generation never becomes ready.

    Args:
        manifest: its name.
        differences: each with both sides.
    """

    def __init__(self, manifest: str, differences: tuple[str, ...]) -> None:
        super().__init__(manifest, differences)
        self.manifest, self.differences = manifest, differences

    def __str__(self) -> str:
        return (
            f"manifest {self.manifest!r} and the device differ: {'; '.join(self.differences)}; "
            "load the calbin that the manifest describes, or correct the manifest"
        )


def bind(manifest: Manifest, models: Sequence[DeviceModel], generation_id: int) -> ModelGeneration:
    """Check that the device holds exactly what ``manifest`` says (§10.2).

    Raises :class:`ManifestMismatch` with every difference: a missing, surplus or repeated graph or
    tensor, a wrong dtype, rank, shape or size, no usable tile size in a graph's metadata.
    """
    expected = {contract.exact_name: contract for contract in manifest.submodels}
    counts = Counter(model.name for model in models)
    has = f"the device has {_names(counts)}"
    differences = [f"graph {name!r} is missing ({has})" for name in expected if name not in counts]
    differences += [
        f"graph {name!r} is on the device {count} times" if name in expected
        else f"graph {name!r} is on the device, but not in the manifest ({_names(expected)})"
        for name, count in counts.items()
        if name not in expected or count > 1
    ]  # fmt: skip
    tile_d0 = {}
    for model in models:
        contract = expected.get(model.name)
        if contract is None:
            continue
        differences += _tensor_differences(contract, model)
        d0 = model.metadata.get(TILE_D0_KEY)
        whole = d0 is not None and d0.isascii() and d0.isdigit() and len(d0) < 10
        if d0 is None or not whole or int(d0) == 0:
            differences.append(
                f"graph {model.name!r}: metadata {TILE_D0_KEY} is {str(d0)[:40]!r}, not a whole number"
            )
        elif contract.logits.shape[-1] % int(d0):
            differences.append(
                f"graph {model.name!r}: metadata {TILE_D0_KEY} is {d0}, which does not divide the "
                f"{contract.logits.shape[-1]} entries of the manifest's logits"
            )
        else:
            tile_d0[contract.kind] = int(d0)
    wanted = manifest.calbin_sha256
    hashes = {model.metadata.get(CALBIN_KEY) for model in models}
    if wanted is not None and hashes != {wanted}:
        reported = ", ".join(sorted(str(value)[:64] for value in hashes))
        differences.append(f"{CALBIN_KEY} is {wanted} in the manifest, {reported} on the device")
    if differences:
        raise ManifestMismatch(manifest.name, tuple(differences))
    return ModelGeneration(generation_id, manifest, tile_d0)


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _tensor_differences(contract: SubmodelContract, model: DeviceModel) -> list[str]:
    counts = Counter(tensor.name for tensor in model.tensors)
    expected = {tensor.name: tensor for tensor in contract.tensors}
    where = f"graph {model.name!r}"
    found = [
        f"{where}: tensor {name!r} is missing (the device has {_names(counts)})"
        for name in expected
        if name not in counts
    ]
    for tensor in model.tensors:
        ours = expected.get(tensor.name)
        if ours is None:
            found.append(f"{where}: tensor {tensor.name!r} is not in the manifest ({_names(expected)})")
        elif counts[tensor.name] > 1:
            found.append(f"{where}: tensor {tensor.name!r} is there {counts[tensor.name]} times")
        else:
            found += tensor_differences(ours, tensor, f"{where}, tensor {tensor.name!r}")
    return found


def tensor_differences(ours: TensorContract, theirs: DeviceTensor, where: str) -> list[str]:
    """What differs between a contract and a tensor of the device, each with both sides."""
    pairs: list[tuple[str, object, object]] = [("dtype", ours.dtype, theirs.dtype)]
    if len(ours.shape) != len(theirs.shape):
        pairs.append(("rank", len(ours.shape), len(theirs.shape)))
    else:
        pairs.append(("shape", list(ours.shape), list(theirs.shape)))
    pairs.append(("byte size", ours.byte_size, theirs.byte_size))
    return [
        f"{where}: {what} is {mine} in the manifest, {other} on the device"
        for what, mine, other in pairs
        if mine != other
    ]


def parse_manifest(text: str, where: str) -> Manifest:
    """A manifest from TOML text. Raises :class:`InputError` naming ``where`` and the key."""
    return structure(parse_toml(text, where), Manifest, where, converter())


@cache
def _shipped(name: str) -> Manifest:
    text = (files("caltrio") / "manifests" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_manifest(text, f"manifest {name!r}")


def shipped_manifests() -> list[str]:
    """Names of the manifests that ship with caltrio."""
    folder = files("caltrio") / "manifests"
    return sorted(e.name.removesuffix(".toml") for e in folder.iterdir() if e.name.endswith(".toml"))


def load_manifest(name_or_path: str = "qwen3-8b") -> Manifest:
    """A manifest by the name of one that ships, or from a ``.toml`` file.

    Raises :class:`InputError` naming the file and the first wrong key.
    """
    if name_or_path in shipped_manifests():
        return _shipped(name_or_path)
    path = Path(name_or_path)
    if not name_or_path.endswith(".toml"):
        raise InputError(
            f"manifest {name_or_path!r}",
            "",
            "is neither a .toml file nor one that ships",
            f"shipped: {', '.join(shipped_manifests())}",
        )
    return parse_manifest(read_text(path), str(path))


def load_text_manifest(name_or_path: str) -> Manifest:
    """As :func:`load_manifest`, of a model that continues a prompt of token ids.

    Raises :class:`InputError` also if it has no graphs for that.
    """
    manifest = load_manifest(name_or_path)
    for needed in (TaskKind.PREFILL_IDS, TaskKind.DECODE):
        if needed not in manifest.by_kind:
            raise InputError("--manifest", name_or_path, f"has no graph for {needed.value}")
    return manifest


def device_models(manifest: Manifest, tile_d0: int) -> list[DeviceModel]:
    """What a device that holds exactly ``manifest`` reports; for devices written in Python."""
    return [
        DeviceModel(
            contract.exact_name,
            tuple(
                DeviceTensor(tensor.name, tensor.shape, tensor.dtype, tensor.byte_size)
                for tensor in contract.tensors
            ),
            {TILE_D0_KEY: str(tile_d0)},
        )
        for contract in manifest.submodels
    ]
