"""Golden runs: recorded greedy tokens and logits, and their comparison with a device (§13.1).

A golden comes from a file that an earlier run recorded, or, for devices that compute the tokens of
:mod:`caltrio.tokens`, from that reference itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import trio
from attrs import define, field, frozen
from numpy.typing import NDArray

from .errors import InputError, InvalidArgument, RequestError
from .executor import Executor
from .manifest import Manifest
from .timer import Rank
from .tokens import ReferenceSequence
from .workload.requests import stream

# §13.1; 40960 and a decode step after it must be refused, see refusals().
LENGTHS = (1, 2, 15, 16, 17, 127, 128, 1024, 4095, 4096, 40959)
ALTERNATING_TOKENS = 1000
_SCHEMA = 1


@frozen
class Case:
    """One prompt, and the greedy tokens after it. Cases of one group run side by side."""

    group: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: NDArray[np.uint16] = field(eq=False, repr=False)  # BF16 bits after the prompt, [vocab]


@frozen
class Golden:
    """What a model must say. ``width`` cases of a group run at once."""

    model: str
    vocab: int
    cases: tuple[Case, ...]
    source: str

    def group(self, name: str) -> list[Case]:
        """The cases of one group, in order."""
        return [case for case in self.cases if case.group == name]

    async def warm_up(self, executor: Executor) -> str | None:
        """A golden prefill and two decode steps; what was wrong, or ``None`` (§9.2)."""
        case = self.cases[0]
        got = await _generate(executor, case, 3, warmup=True)
        return got.difference


@define
class _Got:
    """What a device said to one case."""

    case: Case
    tokens: list[int]
    logits: NDArray[np.float32] | None = None
    error: str | None = None

    @property
    def difference(self) -> str | None:
        """The first thing that is not as recorded."""
        where = f"{self.case.group}, prompt of {len(self.case.prompt)} tokens"
        if self.error is not None:
            return f"{where}: {self.error}"
        for step, (ours, theirs) in enumerate(zip(self.case.tokens, self.tokens, strict=False)):
            if ours != theirs:
                return f"{where}: token {step} is {theirs}, golden {ours}"
        return None


async def _generate(executor: Executor, case: Case, count: int, *, warmup: bool = False) -> _Got:
    """Up to ``count`` greedy tokens after the prompt of ``case``."""
    got = _Got(case, [])
    count = min(count, len(case.tokens))
    async with executor.sequence(len(case.prompt), count, warmup=warmup) as sequence:
        result = await sequence.prefill(np.array(case.prompt, np.int32))
        assert result.logits is not None
        got.logits = result.logits.copy()
        got.tokens.append(int(result.logits.argmax()))
        await sequence.emit_token()
        while len(got.tokens) < count:
            result = await sequence.decode(got.tokens[-1])
            assert result.logits is not None
            got.tokens.append(int(result.logits.argmax()))
            await sequence.emit_token()
    return got


@define
class GoldenReport:
    """How a device's answers compare with a golden."""

    compared: int = 0
    tokens: int = 0
    equal: int = 0
    first_difference: str | None = None
    top1: float = 1.0  # share of prompts whose likeliest first token is the golden's
    top5_overlap: float = 1.0  # mean share of the golden's five likeliest that are among ours
    max_abs: float = 0.0  # largest |ours - golden| of a logit
    max_rel: float = 0.0  # largest |ours - golden| / |golden|, where that is not 0
    cosine: float = 1.0  # smallest cosine of two rows of logits
    _sums: list[tuple[bool, float]] = field(factory=list, repr=False)

    @property
    def passed(self) -> bool:
        """Are all token sequences equal?"""
        return self.equal == self.compared > 0 and self.first_difference is None

    def add(self, got: _Got) -> None:
        """Take one case in."""
        self.compared += 1
        self.tokens += len(got.tokens)
        difference = got.difference
        if difference is None:
            self.equal += 1
        elif self.first_difference is None:
            self.first_difference = difference
        if got.logits is None:  # it said nothing: that agrees with nothing
            self._judge(same=False, overlap=0.0)
            self.cosine = 0.0
            return
        ours, golden = got.logits, _floats(got.case.logits)
        if np.array_equal(ours, golden):
            self._judge(same=True, overlap=1.0)
            return
        best, other = _likeliest(golden), _likeliest(ours)
        self._judge(same=best[0] == other[0], overlap=len(set(best) & set(other)) / len(best))
        ours, golden = ours.astype(np.float64), golden.astype(np.float64)
        gap = np.abs(ours - golden)
        nonzero = golden != 0
        self.max_abs = max(self.max_abs, float(gap.max()))
        self.max_rel = max(
            self.max_rel, float((gap[nonzero] / np.abs(golden[nonzero])).max(initial=0.0))
        )
        norm = float(np.linalg.norm(ours) * np.linalg.norm(golden))
        self.cosine = min(self.cosine, float(ours @ golden) / norm if norm else 0.0)

    def _judge(self, *, same: bool, overlap: float) -> None:
        self._sums.append((same, overlap))
        self.top1 = sum(equal for equal, _ in self._sums) / len(self._sums)
        self.top5_overlap = sum(share for _, share in self._sums) / len(self._sums)


def _likeliest(logits: NDArray[np.float32], count: int = 5) -> list[int]:
    """The likeliest entries, the first one first; ties as ``argmax`` breaks them."""
    return [int(entry) for entry in np.argsort(-logits, kind="stable")[:count]]


def _floats(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


async def check(executor: Executor, golden: Golden, *, width: int = 8) -> GoldenReport:
    """Run every case, ``width`` at a time, and compare."""
    report = GoldenReport()
    for group in dict.fromkeys(case.group for case in golden.cases):
        wide = 1 if group == "lengths" else 2 if group == "alternating" else width
        limit = trio.CapacityLimiter(wide)
        gots: dict[int, _Got] = {}

        async def one(
            index: int, case: Case, limit: trio.CapacityLimiter, gots: dict[int, _Got]
        ) -> None:
            # In their order: trio starts tasks in any, and a difference must be seen again.
            await executor.timer.sleep_until_ns(executor.timer.now_ns(), Rank.ARRIVAL, index)
            async with limit:
                try:
                    gots[index] = await _generate(executor, case, len(case.tokens))
                except RequestError as error:
                    gots[index] = _Got(case, [], None, str(error))

        async with trio.open_nursery() as nursery:
            for index, case in enumerate(golden.group(group)):
                nursery.start_soon(one, index, case, limit, gots)
        for index in sorted(gots):
            report.add(gots[index])
    return report


async def refusals(executor: Executor) -> str | None:
    """A full context takes no decode step (§13.1); what was wrong, or ``None``."""
    longest = executor.manifest.max_seq
    try:
        async with executor.sequence(longest, 2):
            return f"a prompt of {longest} and a decode step was admitted"
    except InvalidArgument:
        pass
    except RequestError as error:
        return f"a prompt of {longest} and a decode step: {error}"
    try:
        async with executor.sequence(longest, 1) as sequence:
            await sequence.prefill(np.zeros(longest, np.int32))
            try:
                await sequence.decode(0)
            except InvalidArgument:
                return None
    except RequestError as error:
        return f"a prompt of {longest}: {error}"
    return f"a decode step after {longest} tokens ran"


def prompts(
    vocab: int, count: int, *, lengths: bool = True, max_seq: int = 40960
) -> list[tuple[str, tuple[int, ...], int]]:
    """(group, prompt, how many tokens) of a full golden: the same in every run.

    Args:
        vocab: entries of the vocabulary.
        count: prompts of 1 to 256 tokens, with 16 tokens each.
        lengths: also the lengths of §13.1, and two sequences that alternate for 1000 tokens.
        max_seq: positions of the model; what does not fit is left out or cut.
    """
    random = stream(13, "golden")

    def case(group: str, length: int, tokens: int) -> tuple[str, tuple[int, ...], int]:
        length = min(length, max_seq)
        prompt = tuple(random.integers(vocab, size=length).tolist())
        return group, prompt, min(tokens, max_seq - length + 1)

    made = [case("prompts", int(random.integers(1, 257)), 16) for _ in range(count)]
    if lengths:
        made += [case("lengths", length, 2) for length in LENGTHS if length < max_seq]
        made += [case("alternating", length, ALTERNATING_TOKENS) for length in (7, 8)]
    return made


def reference_golden(
    model: str, vocab: int, count: int, *, lengths: bool = True, max_seq: int = 40960
) -> Golden:
    """The golden of the reference token model, in plain Python; arguments as of :func:`prompts`."""
    cases = []
    for group, prompt, tokens in prompts(vocab, count, lengths=lengths, max_seq=max_seq):
        sequence = ReferenceSequence(vocab, prompt)
        logits = np.frombuffer(sequence.logits(), np.uint16)
        said = []
        for _ in range(tokens):
            said.append(sequence.next_token())
            sequence.feed(said[-1])
        cases.append(Case(group, prompt, tuple(said), logits))
    return Golden(model, vocab, tuple(cases), "the reference token model")


def golden_for(manifest: Manifest, file: Path | None, count: int, *, lengths: bool = False) -> Golden:
    """The recording in ``file``, or without one that of the reference token model.

    Args:
        manifest: of the model.
        file: a recording.
        count: prompts of the reference.
        lengths: of the reference, as of :func:`prompts`.

    Raises :class:`InputError` for a file that is no golden, or one of another model.
    """
    vocab = manifest.submodels[0].logits.shape[-1]
    if file is None:
        longest = manifest.max_seq
        return reference_golden(manifest.name, vocab, count, lengths=lengths, max_seq=longest)
    recorded = load(file)
    if recorded.vocab != vocab:
        problem = f"has {recorded.vocab} logits, the manifest {vocab}"
        raise InputError("--golden", str(file), problem, "record one of this model")
    if recorded.model != manifest.name:
        problem = f"is of model {recorded.model!r}, the manifest of {manifest.name!r}"
        raise InputError("--golden", str(file), problem, "record one of this model")
    return recorded


async def record(executor: Executor, count: int, *, lengths: bool = True) -> Golden:
    """What the device says now, as a golden for later; one sequence at a time."""
    manifest = executor.manifest
    vocab = manifest.submodels[0].logits.shape[-1]
    nothing = np.zeros(0, np.uint16)
    cases = []
    asked = prompts(vocab, count, lengths=lengths, max_seq=manifest.max_seq)
    for group, prompt, tokens in asked:
        got = await _generate(executor, Case(group, prompt, (0,) * tokens, nothing), tokens)
        assert got.logits is not None
        bits = (got.logits.view(np.uint32) >> 16).astype(np.uint16)
        cases.append(Case(group, prompt, tuple(got.tokens), bits))
    return Golden(manifest.name, vocab, tuple(cases), "a recording")


def save(golden: Golden, path: Path) -> None:
    """Write a golden to an ``.npz`` file."""
    about = {"schema": _SCHEMA, "model": golden.model, "vocab": golden.vocab,
             "groups": [case.group for case in golden.cases]}  # fmt: skip
    arrays: dict[str, Any] = {"about": np.array(json.dumps(about))}
    for name in ("prompt", "tokens"):
        rows: Sequence[tuple[int, ...]] = [getattr(case, name) for case in golden.cases]
        arrays[name] = np.array([entry for row in rows for entry in row], np.int32)
        arrays[f"{name}_len"] = np.array([len(row) for row in rows], np.int64)
    arrays["logits"] = np.stack([case.logits for case in golden.cases])
    unfinished = None
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            unfinished = Path(file.name)
            np.savez_compressed(file, **arrays)
        unfinished.chmod(0o644)
        unfinished.replace(path)  # whole, or as it was
    except BaseException:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        raise


def load(path: Path) -> Golden:
    """Read a golden. Raises :class:`InputError` for a file that is not one."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(str(path), "", "is not a regular file", "name a golden")
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about["schema"] != _SCHEMA:
                raise ValueError(f"schema {about['schema']} is not {_SCHEMA}")
            vocab, groups = about["vocab"], about["groups"]
            if type(vocab) is not int or vocab < 1 or not all(type(g) is str for g in groups):
                raise ValueError("vocab or groups are of the wrong kind")
            prompts_of, tokens_of = (_rows(file, name, vocab) for name in ("prompt", "tokens"))
            logits = file["logits"]
            if logits.dtype != np.uint16 or logits.shape != (len(groups), vocab):
                raise ValueError(f"logits are {logits.dtype} {logits.shape}")
            if not np.isfinite(_floats(logits)).all():
                raise ValueError("logits hold NaN or infinity")
            cases = tuple(
                Case(group, tuple(prompt.tolist()), tuple(tokens.tolist()), row)
                for group, prompt, tokens, row in zip(
                    groups, prompts_of, tokens_of, logits, strict=True
                )
            )
            return Golden(str(about["model"]), vocab, cases, path.name)
    except Exception as error:  # numpy, zip and json each have their own for damage
        told = "it is damaged, or something else"
        if isinstance(error, OSError) and error.strerror:
            told = error.strerror
        elif isinstance(error, ValueError | KeyError | TypeError) and "pickle" not in str(error):
            told = str(error)[:200] or told
        raise InputError(
            str(path), "", f"is not a golden: {told}", "make one with 'caltrio golden record'"
        ) from error


def _rows(file: Any, name: str, vocab: int) -> list[NDArray[np.int32]]:
    """The rows of token ids that a file holds end to end."""
    values, lengths = file[name], file[f"{name}_len"]
    if values.dtype.kind not in "iu" or lengths.dtype.kind not in "iu" or values.ndim != 1:
        raise ValueError(f"{name} are {values.dtype}, their lengths {lengths.dtype}")
    if lengths.ndim != 1 or not lengths.size or lengths.min() < 1 or lengths.sum() != values.size:
        raise ValueError(f"{name} and {name}_len do not fit: {values.size} values of {name}")
    if not 0 <= values.min() <= values.max() < vocab:
        raise ValueError(f"{name} holds {values.min()} to {values.max()}, outside 0 to {vocab - 1}")
    return np.split(values, np.cumsum(lengths)[:-1])
