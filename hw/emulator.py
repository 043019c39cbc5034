"""The device kind ``emulator``: the driver on a stand-in for the vendor's library.

The emulated card reads what it is from two text files: the calbin, which the runtime shows to the
program, and the card file beside it, which it does not: timing, semantics and faults.
:func:`write_card` makes them from the same objects that a simulation takes.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from math import gcd
from pathlib import Path
from typing import TypeVar

import trio

from caltrio.assumed import RESET_NS, TILE_D0
from caltrio.capabilities import Capabilities
from caltrio.device import Device, DeviceKind, DeviceOptions, OpenDevice
from caltrio.errors import InputError
from caltrio.manifest import CALBIN_KEY, TILE_D0_KEY, Manifest, TaskKind
from caltrio.semantics import EngineSemantics
from caltrio.timing import Compute, Distribution, TimingProfile
from caltrio.workload.requests import stream_seed

from .bindings import missing
from .build import LIBRARIES, SHIM_ON_EMULATOR, remedy
from .device import open_hw

T = TypeVar("T")

CALBIN_NAME = "model.calbin"


def write_card(
    folder: Path,
    manifest: Manifest,
    timing: TimingProfile,
    semantics: EngineSemantics,
    *,
    seed: int = 0,
    tokens: bool = True,
    kv_tokens: int = 0,
    report_stages: bool = True,
    reset_ns: int = RESET_NS,
    faults: Iterable[str] = (),
) -> Path:
    """Write an emulated calbin and its card file into ``folder``; returns the calbin's path.

    Args:
        folder: an existing one.
        manifest: what the calbin holds.
        timing: what the stages cost on it.
        semantics: what its engines do.
        seed: of its jitter.
        tokens: compute tokens; without, jobs only take time.
        kv_tokens: tokens of KV that the card has; 0 leaves the limit to the executor.
        report_stages: tell when the stages of a job ran.
        reset_ns: how long a reset takes.
        faults: lines of the card file without the word ``fault``, as ``wait code=13 at=7``;
            docs/emulator.md lists them.

    Raises :class:`InputError` for what the format cannot say.
    """
    calbin = folder / CALBIN_NAME
    model = _calbin(manifest)
    lines = [
        "card 1",
        *_semantics(semantics),
        *_timing(timing, seed),
        f"kv_tokens {kv_tokens}",
        f"compute_tokens {int(tokens)}",
        f"report_stages {int(report_stages)}",
        f"reset_ns {reset_ns}",
        *(f"fault {line}" for line in faults),
    ]
    calbin.write_text("\n".join(model) + "\n", encoding="utf-8")
    card_file(calbin).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return calbin


def card_file(calbin: Path) -> Path:
    """The card file beside an emulated calbin."""
    return calbin.with_name(f"{calbin.name}.card")


def _word(text: str) -> str:
    if not text or text.split() != [text] or "#" in text:
        raise InputError(
            "manifest", "", f"the name {text!r} is no single word", "an emulated calbin needs one"
        )
    return text


def _calbin(manifest: Manifest) -> list[str]:
    tile = gcd(TILE_D0, manifest.submodels[0].logits.shape[-1])
    lines = ["calbin 1"]
    for graph in manifest.submodels:
        lines.append(f"graph {_word(graph.exact_name)} {graph.kind.value}")
        for role in ("tokens", "position", "logits"):
            tensor = getattr(graph, role)
            shape = " ".join(map(str, tensor.shape))
            lines.append(f"tensor {role} {_word(tensor.name)} {tensor.dtype} {shape}")
        lines.append(f"csr cur {_word(graph.csr_cur_seq)}")
        lines.append(f"csr total {_word(graph.csr_total_seq)}")
        lines.append(f"meta {TILE_D0_KEY} {tile}")
        if manifest.calbin_sha256 is not None:
            lines.append(f"meta {CALBIN_KEY} {_word(manifest.calbin_sha256)}")
    return lines


def _semantics(semantics: EngineSemantics) -> list[str]:
    if len(semantics.compute_stages) > 8 or len(semantics.compute_sharing) > 8:
        raise InputError("semantics", "", "the emulator has at most 8 compute stages or sharers")
    return [
        f"engines {semantics.engines}",
        f"overlap {int(semantics.overlap)}",
        f"dma {semantics.dma.value}",
        f"dma_order {semantics.dma_order.value}",
        f"compute_stages {' '.join(map(str, semantics.stage_permille))}",
        f"compute_sharing {' '.join(map(str, semantics.sharing_permille))}",
        f"slot_release {semantics.slot_release.value}",
        f"completion_signal {semantics.completion_signal.value}",
        f"completion_order {semantics.completion_order.value}",
        f"submit_when_full {semantics.submit_when_full.value}",
        f"kv_after_failed_wait {semantics.kv_after_failed_wait.value}",
        f"reset_scope {semantics.reset_scope.value}",
    ]


def _timing(timing: TimingProfile, seed: int) -> list[str]:
    def compute(kind: TaskKind, cost: Compute) -> str:
        parts = cost.base.value, cost.per_token.value, cost.per_pair.value
        return f"compute {kind.value} {' '.join(map(str, parts))}"

    lines = [
        f"submit_ns {timing.submit.time.value}",
        f"interrupt_ns {timing.interrupt.time.value}",
        f"h2d {timing.h2d.latency.value} {timing.h2d.bandwidth.value}",
        f"d2h {timing.d2h.latency.value} {timing.d2h.bandwidth.value}",
        compute(TaskKind.PREFILL_IDS, timing.compute.prefill),
        compute(TaskKind.PREFILL_EMBEDS, timing.compute.prefill),
        compute(TaskKind.DECODE, timing.compute.decode),
    ]
    jitter = timing.jitter
    if jitter.distribution is not Distribution.NONE and jitter.cv > 0:
        on_card = [name for name in jitter.stages if name not in ("postprocess", "client")]
        mixed = (stream_seed(seed, "jitter") ^ jitter.seed) >> 1
        parts = jitter.distribution.value, round(jitter.cv * 1e6), mixed, *on_card
        lines.append(f"jitter {' '.join(map(str, parts))}")
    return lines


def unavailable() -> str | None:
    """Why the emulator cannot be used, or ``None``."""
    if missing(SHIM_ON_EMULATOR):
        return f"not built: {remedy()}"
    return None


def run(main: Callable[[OpenDevice], Awaitable[T]], options: DeviceOptions) -> T:
    """Run ``main`` in real time; see :class:`caltrio.device.RunDevice`.

    With ``options.calbin`` the card is what the file beside that says, and semantics and timing of
    the options are only what the program believes.
    """
    believed = options.capabilities or Capabilities.assumed(options.semantics)

    def on_card(calbin: Path) -> T:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Device]:
            library = LIBRARIES / SHIM_ON_EMULATOR
            async with open_hw(library, calbin, options.semantics, believed) as device:
                yield device

        return trio.run(main, opened)

    if options.calbin is not None:
        return on_card(options.calbin)
    with tempfile.TemporaryDirectory(prefix="caltrio-emulator-") as folder:
        calbin = write_card(
            Path(folder),
            options.model,
            options.timing,
            options.semantics,
            seed=options.seed,
            tokens=options.tokens,
        )
        return on_card(calbin)


KIND = DeviceKind(
    "emulator",
    "The CalRT driver on an emulated card: real threads, real DMA memory, real time",
    "real",
    unavailable,
    run,
    hypothetical=True,
    check_timing="quick",
)
