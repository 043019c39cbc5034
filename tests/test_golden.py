"""Golden runs: right devices pass, wrong ones fail with the right figures, files are read strictly."""

import json
import zipfile
from collections import deque
from itertools import pairwise

import numpy as np
import pytest
import trio.testing
from attrs import evolve
from support import profile, small_manifest

from caltrio.config import ExecutorConfig
from caltrio.core.buffers import BufferLease, BufferPool
from caltrio.device import DeviceOptions
from caltrio.errors import InputError, RequestError
from caltrio.executor import open_executor
from caltrio.faults import Fault, FaultPlan, FaultyDevice, Point
from caltrio.golden import (
    ALTERNATING_TOKENS,
    LENGTHS,
    Case,
    Golden,
    check,
    load,
    prompts,
    record,
    reference_golden,
    refusals,
    save,
)
from caltrio.semantics import PRESETS, EngineSemantics
from caltrio.testing import FakeDevice
from caltrio.tokens import ReferenceSequence, generate
from sim.device import KIND
from sim.tokens import TokenModel

VOCAB = 64
SMALL = small_manifest(VOCAB)
TIMING = profile(submit=40_000, h2d=20_000, compute=10**6, d2h=30_000, interrupt=15_000, post=100_000)
REFERENCE = reference_golden("small", VOCAB, 10, lengths=False)


def on_sim(main, *, semantics=EngineSemantics(), faults=(), **limits):  # noqa: B008 - frozen
    """``main(executor)`` on a simulated card."""

    async def opened(open_device):
        async with (
            open_device() as device,
            open_executor(
                FaultyDevice(device, FaultPlan(faults)), SMALL, ExecutorConfig(**limits)
            ) as executor,
        ):
            return await main(executor)

    return KIND.run(opened, DeviceOptions(semantics, TIMING, 0, SMALL))


def checked(golden=REFERENCE, **kwargs):
    return on_sim(lambda executor: check(executor, golden), **kwargs)


# --- what is asked --------------------------------------------------------------------------------


def test_the_reference_golden_is_the_reference():
    for case in REFERENCE.cases:
        assert list(case.tokens) == generate(VOCAB, case.prompt, 16)
        assert case.logits.tolist() == ReferenceSequence(VOCAB, case.prompt).logits().tolist()
    assert (REFERENCE.model, REFERENCE.vocab) == ("small", VOCAB)


def test_a_hundred_prompts_and_the_lengths_of_the_specification():
    made = prompts(151_936, 100)
    assert [group for group, _, _ in made] == (
        ["prompts"] * 100 + ["lengths"] * 11 + ["alternating"] * 2
    )
    assert len({prompt for _, prompt, _ in made}) == 113
    lengths = [(len(prompt), tokens) for group, prompt, tokens in made if group == "lengths"]
    # §13.1; two tokens, so that a decode step follows each
    assert lengths == [(length, 2) for length in (1, 2, 15, 16, 17, 127, 128, 1024, 4095, 4096, 40959)]
    assert [tokens for *_, tokens in made[-2:]] == [1000, 1000]
    assert all(1 <= len(prompt) <= 256 for _, prompt, _ in made[:100])
    everything = [token for _, prompt, _ in made for token in prompt]
    assert 0 <= min(everything) <= max(everything) < 151_936
    assert prompts(151_936, 100) == made
    assert prompts(151_936, 100, lengths=False) == made[:100]


# --- a right device passes ------------------------------------------------------------------------


def test_the_same_check_is_the_same_run():
    """Trio starts tasks in a random order: a difference that was seen once must be seen again."""

    async def main(executor):
        order = []
        original = executor._device.infer

        async def infer(job):
            order.append((job.token_count, executor._timer.now_ns()))
            return await original(job)

        executor._device.infer = infer
        await check(executor, REFERENCE)
        return order

    runs = [on_sim(main, max_inflight=2) for _ in range(12)]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("max_inflight", [1, 2])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_card_passes_under_every_hypothesis(preset, max_inflight):
    most = 0

    async def main(executor):
        nonlocal most
        assert executor.core.health.limit == max_inflight
        original = executor._device.infer

        async def infer(job):
            nonlocal most
            most = max(most, len(executor.core.in_flight))
            return await original(job)

        executor._device.infer = infer
        return await check(executor, REFERENCE)

    report = on_sim(main, semantics=PRESETS[preset].semantics, max_inflight=max_inflight)
    assert report.passed
    assert (report.compared, report.equal, report.tokens) == (10, 10, 160)
    assert (report.top1, report.top5_overlap, report.cosine) == (1, 1, 1)
    assert (report.max_abs, report.max_rel, report.first_difference) == (0, 0, None)
    assert most == max_inflight


async def test_the_fake_device_passes(autojump_clock):
    device = FakeDevice(manifest=SMALL)
    async with open_executor(device, SMALL, ExecutorConfig(max_inflight=2)) as executor:
        report = await check(executor, REFERENCE)
    assert report.passed


def test_every_length_and_two_alternating_sequences():
    golden = reference_golden("small", VOCAB, 1)
    assert len(golden.group("lengths")) == len(LENGTHS)
    assert len(golden.group("alternating")) == 2
    order = []

    async def main(executor):
        original = executor._device.infer

        async def infer(job):
            order.append((job.sequence_id, job.token_count))
            return await original(job)

        executor._device.infer = infer
        report = await check(executor, golden)
        assert executor.core.pool.leased == 0
        assert await refusals(executor) is None
        return report

    report = on_sim(main, max_inflight=2)
    assert report.passed, report.first_difference
    assert (report.compared, report.tokens) == (14, 16 + 22 + 2000)
    lengths = [n for _, n in order]
    assert all(lengths.count(length) == 1 for length in (*LENGTHS[1:], 7, 8, 40960))
    ids = [sequence for sequence, _ in order[-2 * ALTERNATING_TOKENS - 1 : -1]]
    assert len(set(ids)) == 2
    changes = sum(one != other for one, other in pairwise(ids))
    assert changes > 1900  # they alternate, all the way


def test_a_full_context_that_runs_is_told(monkeypatch):
    async def lenient(executor):
        from caltrio.core import scheduler

        # Admission no longer looks at the context, only at the KV there is.
        monkeypatch.setattr(scheduler.Core, "_refusal", lambda self, request: None)
        return await refusals(executor)

    assert on_sim(lenient) == "a prompt of 40960 and a decode step was admitted"


def test_a_decode_step_after_a_full_context_that_runs_is_told(monkeypatch):
    from caltrio.core import scheduler
    from caltrio.executor import Sequence

    async def lenient(executor):
        assert scheduler.check_step is not None

        async def decode(self, token):
            return None

        monkeypatch.setattr(Sequence, "decode", decode)
        return await refusals(executor)

    assert on_sim(lenient) == "a decode step after 40960 tokens ran"


def test_the_warm_up_is_a_prefill_and_two_decode_steps():
    async def main(open_device):
        async with open_device() as device:
            faulty = FaultyDevice(device, FaultPlan([]))
            config = ExecutorConfig()
            async with open_executor(faulty, SMALL, config, warm_up=REFERENCE.warm_up):
                return list(faulty.inferred), faulty.plan.calls[Point.NAN_OUTPUT]

    options = DeviceOptions(EngineSemantics(), TIMING, 0, SMALL)
    assert KIND.run(main, options) == ([0, 1, 2], 3)


# --- a wrong one fails, with the right figures ----------------------------------------------------


def bf16(bits):
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def figures(pairs):
    """top1, top5, max_abs, max_rel, cosine of (ours, golden) rows, with exact ties broken by place."""
    top1, top5, most, relative, cosine = [], [], 0.0, 0.0, 1.0
    for rows in pairs:
        ours, golden = (row.astype(float).tolist() for row in rows)
        best = [
            sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:5] for row in (ours, golden)
        ]
        top1.append(best[0][0] == best[1][0])
        top5.append(len(set(best[0]) & set(best[1])) / 5)
        for one, other in zip(ours, golden, strict=True):
            most = max(most, abs(one - other))
            if other:
                relative = max(relative, abs(one - other) / abs(other))
        dot = sum(one * other for one, other in zip(ours, golden, strict=True))
        norms = sum(one * one for one in ours) * sum(other * other for other in golden)
        cosine = min(cosine, dot / norms**0.5)
    return {
        "top1": sum(top1) / len(top1), "top5_overlap": sum(top5) / len(top5),
        "max_abs": most, "max_rel": relative, "cosine": cosine,
    }  # fmt: skip


def assert_figures(report, pairs):
    for name, value in figures(pairs).items():
        assert getattr(report, name) == pytest.approx(value, rel=1e-9), name


def meddle(monkeypatch, change):
    """``change(logits bits, history)`` as the card writes them; returns the rows after each prompt."""
    original = TokenModel.write
    rows = []

    def write(self, transfer):
        original(self, transfer)
        buffers = transfer.buffers
        logits = buffers.host[buffers.contract.logits.name]
        change(logits, transfer.total_len)
        if transfer.positions[0] == 0:
            rows.append(
                (self._kv().cells[transfer.sequence_id][: transfer.total_len].tolist(), logits.copy())
            )

    monkeypatch.setattr(TokenModel, "write", write)
    return rows


def pairs_of(rows, golden=REFERENCE):
    by_prompt = {case.prompt: case.logits for case in golden.cases}
    return [(bf16(ours), bf16(by_prompt[tuple(prompt)])) for prompt, ours in rows]


def test_one_wrong_token_is_named(monkeypatch):
    case = REFERENCE.cases[3]
    at = len(case.prompt) + 5

    def change(logits, length):
        if length == at:
            logits[(int(logits.argmax()) + 1) % VOCAB] = 0x4200  # 32.0: another token is likeliest

    meddle(monkeypatch, change)
    golden = evolve(REFERENCE, cases=(case,))
    report = checked(golden)
    assert not report.passed
    assert (report.compared, report.equal) == (1, 0)
    told = report.first_difference
    assert told.startswith(f"prompts, prompt of {len(case.prompt)} tokens: token 5 is ")
    assert told.endswith(f", golden {case.tokens[5]}")
    assert (report.max_abs, report.cosine, report.top1) == (0, 1, 1)  # the first row was right


def test_the_first_difference_is_that_of_the_first_case(monkeypatch):
    case = REFERENCE.cases[2]
    wrong = evolve(REFERENCE, cases=tuple(
        evolve(one, tokens=(one.tokens[0] ^ 1, *one.tokens[1:])) if number in (2, 5) else one
        for number, one in enumerate(REFERENCE.cases)
    ))  # fmt: skip
    report = checked(wrong, max_inflight=2)
    assert (report.compared, report.equal) == (10, 8)
    assert (
        f"prompt of {len(case.prompt)} tokens: token 0 is {case.tokens[0]}, " in report.first_difference
    )


def test_other_logits_with_the_same_tokens_pass_with_their_figures(monkeypatch):
    """As a floating point difference would: §13.1 reports it, the tokens decide."""
    rng = np.random.default_rng(1)

    def change(logits, length):
        logits[:] = bf16_of(bf16(logits) + rng.normal(0, 0.4, logits.size))

    def bf16_of(values):
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    rows = meddle(monkeypatch, change)
    report = checked()
    assert report.max_abs > 0.5
    assert report.cosine < 1
    assert_figures(report, pairs_of(rows))
    assert report.passed == (report.equal == 10)


def test_wrong_logits_everywhere_have_the_right_figures(monkeypatch):
    rng = np.random.default_rng(2)

    def change(logits, length):
        order = rng.permutation(logits.size)
        order[:8] = np.sort(order[:8])
        logits[:] = logits[order]

    rows = meddle(monkeypatch, change)
    report = checked()
    assert not report.passed
    assert report.equal == 0
    assert report.top1 < 0.5
    assert_figures(report, pairs_of(rows))


def test_ties_count_as_the_device_breaks_them(monkeypatch):
    """BF16 has few digits, so equal logits are common: the likeliest is the first, as for argmax."""
    rng = np.random.default_rng(3)

    def change(logits, length):
        logits[:] = np.array([0x3F80, 0x4000, 0x4040], np.uint16)[rng.integers(0, 3, logits.size)]

    rows = meddle(monkeypatch, change)
    golden = evolve(REFERENCE, cases=tuple(
        evolve(case, logits=np.array([0x3F80, 0x4000, 0x4040], np.uint16)[rng.integers(0, 3, VOCAB)])
        for case in REFERENCE.cases
    ))  # fmt: skip
    report = checked(golden)
    assert_figures(report, pairs_of(rows, golden))


def test_the_first_token_agrees_with_top1_where_logits_tie(monkeypatch):
    """The same likeliest token on both sides, and lesser logits that differ: top-1 is 100%."""
    rng = np.random.default_rng(4)

    def tied(logits):
        logits[:] = np.array([0x3F80, 0x4000], np.uint16)[rng.integers(0, 2, logits.size)]
        logits[[10, *rng.integers(11, VOCAB, 20)]] = 0x4040
        return logits

    meddle(monkeypatch, lambda logits, _: tied(logits))
    golden = evolve(REFERENCE, cases=tuple(
        evolve(case, tokens=(10,), logits=tied(case.logits.copy())) for case in REFERENCE.cases
    ))  # fmt: skip
    report = checked(golden)
    assert report.passed
    assert report.top1 == 1.0


def test_nan_is_told_and_never_delivered():
    report = checked(faults=[Fault(Point.NAN_OUTPUT, job_id=0)])
    assert not report.passed
    assert report.equal < report.compared == 10
    assert "NaN or infinite" in report.first_difference


def test_a_device_that_answers_nothing_agrees_in_nothing():
    """No prompt's likeliest token is the golden's where none was said."""
    report = checked(faults=[Fault(Point.SUBMIT, code=14, times=10**6)])
    assert not report.passed
    assert (report.compared, report.equal, report.tokens) == (10, 0, 0)
    assert report.top1 == 0.0


def test_a_golden_with_nothing_to_compare_does_not_pass():
    report = checked(Golden("small", VOCAB, (), "nothing"))
    assert not report.passed


def test_failing_requests_do_not_end_the_check():
    report = checked(faults=[Fault(Point.SUBMIT, code=14, job_id=2)])
    assert (report.compared, report.equal) == (10, 9)
    assert "code 14" in report.first_difference


def test_a_failed_device_is_reported_as_one():
    """Exit code 1 and a report, not an error without one: what was refused, was not admitted."""

    async def main(executor):
        report = await check(executor, REFERENCE)
        assert not report.passed
        return await refusals(executor)

    try:
        said = on_sim(main, faults=[Fault(Point.STATUS, job_id=0)])
    except RequestError as error:
        pytest.fail(f"refusals() raised {type(error).__name__} on a device that has failed")
    assert said is not None


# --- a pool that hands out what is in use ---------------------------------------------------------


def any_slot_in_flight(self, kind, engine):
    """The slot of another job of this kind that is on the device, if there is one."""
    out = vars(self).setdefault("out", deque(maxlen=64))
    taken = [lease for lease in out if lease.alive and lease.slot.kind == kind]
    free = self._free[kind, engine]
    if not free:
        return None
    slot = taken[-1].slot if taken else free.popleft()
    self.leased += 1
    lease = BufferLease(self, slot)
    out.append(lease)
    return lease


def one_slot_for_all(self, kind, engine):
    """Every lease is on the first slot of the kind."""
    self.leased += 1
    first = vars(self).setdefault("first", {})
    return BufferLease(self, first.setdefault(kind, self._free[kind, engine][0]))


def same_memory(self, kind, engine):
    """Different slots, on the same memory: as if two engines were bound to one buffer."""
    free = self._free[kind, engine]
    if not free:
        return None
    slot = free.popleft()
    slot.memory = vars(self).setdefault("memory", {}).setdefault(kind, slot.memory)
    self.leased += 1
    return BufferLease(self, slot)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("broken", [any_slot_in_flight, one_slot_for_all, same_memory])
def test_a_buffer_that_is_reused_in_flight_fails_the_golden(monkeypatch, broken, preset):
    monkeypatch.setattr(BufferPool, "acquire", broken)
    semantics = PRESETS[preset].semantics
    report = checked(semantics=semantics, max_inflight=2)
    assert not report.passed
    assert "golden" in report.first_difference  # a wrong token, not an error
    monkeypatch.undo()
    assert checked(semantics=semantics, max_inflight=2).passed


# --- files ----------------------------------------------------------------------------------------


def assert_equal(one, other):
    assert (one.model, one.vocab) == (other.model, other.vocab)
    assert len(one.cases) == len(other.cases)
    for ours, theirs in zip(one.cases, other.cases, strict=True):
        assert (ours.group, ours.prompt, ours.tokens) == (theirs.group, theirs.prompt, theirs.tokens)
        assert ours.logits.dtype == theirs.logits.dtype == np.uint16
        assert ours.logits.tolist() == theirs.logits.tolist()


def test_recorded_saved_loaded_and_checked(tmp_path):
    recorded = on_sim(lambda executor: record(executor, 10, lengths=False))
    assert_equal(recorded, REFERENCE)  # another implementation, the same definition
    path = tmp_path / "golden.npz"
    save(recorded, path)
    read = load(path)
    assert_equal(read, recorded)
    assert read.source == "golden.npz"
    assert type(read.cases[0].prompt[0]) is int
    report = checked(read, max_inflight=2)
    assert report.passed
    assert report.compared == 10


def test_a_recording_is_no_copy_of_the_expectation(monkeypatch):
    meddle(monkeypatch, lambda logits, _: logits.__setitem__(slice(None), np.roll(logits, 1)))
    recorded = on_sim(lambda executor: record(executor, 2, lengths=False))
    case = recorded.cases[0]
    first = (REFERENCE.cases[0].tokens[0] + 1) % VOCAB
    assert case.tokens[0] == first
    assert case.logits.tolist() == np.roll(REFERENCE.cases[0].logits, 1).tolist()
    assert on_sim(lambda executor: check(executor, recorded)).passed
    monkeypatch.undo()
    assert not on_sim(lambda executor: check(executor, recorded)).passed


def test_saving_the_same_golden_twice_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        save(REFERENCE, tmp_path / name)
    parts = [
        {info.filename: (archive.read(info), info.CRC) for info in archive.infolist()}
        for archive in map(zipfile.ZipFile, (tmp_path / "one", tmp_path / "two"))
    ]
    assert parts[0] == parts[1]


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.npz"
    save(evolve(REFERENCE, cases=REFERENCE.cases[:3]), path)
    return path


def parts_of(path):
    with np.load(path) as file:
        return dict(file)


def about(parts, **changes):
    facts = json.loads(str(parts["about"])) | changes
    parts["about"] = np.array(json.dumps(facts))


def cut(parts, name, what):
    parts[name] = what(parts[name])


SPOILED = {
    "another schema": (lambda p: about(p, schema=2), "schema 2 is not 1"),
    "no schema": (lambda p: p.update(about=np.array("{}")), "schema"),
    "no JSON": (lambda p: p.update(about=np.array("{")), "Expecting"),
    "a list for the facts": (lambda p: p.update(about=np.array("[1]")), "indices"),
    "no facts": (lambda p: p.pop("about"), "about"),
    "no prompts": (lambda p: p.pop("prompt"), "prompt"),
    "no logits": (lambda p: p.pop("logits"), "logits"),
    "no lengths": (lambda p: p.pop("tokens_len"), "tokens_len"),
    "a prompt cut short": (lambda p: cut(p, "prompt", lambda a: a[:-1]), "prompt and prompt_len"),
    "tokens too many": (lambda p: cut(p, "tokens", lambda a: np.append(a, 1)), "tokens and tokens_len"),
    "no cases": (
        lambda p: p.update(prompt_len=np.zeros(0, np.int64), prompt=np.zeros(0, np.int32)),
        "prompt and prompt_len",
    ),
    "one row of lengths less": (
        lambda p: p.update(tokens_len=p["tokens_len"][:2] + np.array([0, 16])), "shorter",
    ),
    "logits as floats": (lambda p: cut(p, "logits", lambda a: a.astype("f4")), "logits are float32"),
    "a row of logits less": (lambda p: cut(p, "logits", lambda a: a[1:]), "(2, 64)"),
    "another vocabulary": (lambda p: about(p, vocab=65), "(3, 64)"),
    "a group less": (lambda p: about(p, groups=["prompts"] * 2), "(3, 64)"),
    "a pickled object": (
        lambda p: p.update(prompt=np.array([{"a": 1}], dtype=object)), "damaged, or something else",
    ),
    "tokens that are no whole numbers": (
        lambda p: cut(p, "tokens", lambda a: a.astype(np.float64) + 0.5), "float64",
    ),
    "a negative length": (
        lambda p: p.update(prompt_len=p["prompt_len"] * 0 + [-1, 1, p["prompt"].size]), "prompt_len",
    ),
    "an empty prompt": (
        lambda p: p.update(prompt_len=p["prompt_len"] * 0 + [0, 0, p["prompt"].size]), "prompt",
    ),
    "a token outside of the vocabulary": (
        lambda p: cut(p, "tokens", lambda a: a + 64), "64",
    ),
    "groups that are no names": (lambda p: about(p, groups=[["a"], ["a"], ["a"]]), "group"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_not_a_golden_is_refused(good, tmp_path, name):
    change, text = SPOILED[name]
    parts = parts_of(good)
    change(parts)
    path = tmp_path / "bad.npz"
    np.savez(path, **parts)
    with pytest.raises(InputError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: is not a golden: ")
    assert text in str(caught.value)
    assert "caltrio golden record" in str(caught.value)


def test_the_file_they_are_made_of_is_good(good):
    assert_equal(load(good), evolve(REFERENCE, cases=REFERENCE.cases[:3]))


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04", b"\x93NUMPY", b"\x80\x04N."])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a golden: "):
        load(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(InputError, match="is not a golden: No such file or directory"):
        load(tmp_path / "none.npz")
    with pytest.raises(InputError, match="is not a golden: Is a directory"):
        load(tmp_path)


def test_a_single_array_is_refused(tmp_path):
    path = tmp_path / "array.npy"
    np.save(path, np.zeros(3))
    with pytest.raises(InputError, match="is not a golden: "):
        load(path)


def test_no_damage_goes_unnoticed(good, tmp_path):
    """Cut off anywhere, or with a byte changed anywhere: refused, or read as it was saved."""
    whole = good.read_bytes()
    path = tmp_path / "damaged.npz"
    refused, others = 0, set()
    for at in range(0, len(whole), 29):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            try:
                read = load(path)
            except InputError:
                refused += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                others.add(f"{type(error).__name__} at {at} of {len(whole)}: {error}")
            else:
                assert_equal(read, evolve(REFERENCE, cases=REFERENCE.cases[:3]))
    assert not others
    assert refused > len(whole) / 29


def test_cases_compare_by_what_was_said():
    row = np.zeros(VOCAB, np.uint16)
    assert Case("a", (1,), (2,), row) == Case("a", (1,), (2,), row + 1)
    assert Case("a", (1,), (2,), row) != Case("a", (1,), (3,), row)


@pytest.fixture
def autojump_clock():
    return trio.testing.MockClock(autojump_threshold=0)


def test_a_recording_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "golden.npz"
    save(REFERENCE, path)
    before = path.read_bytes()

    def stops(file, **arrays):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", stops)
    with pytest.raises(KeyboardInterrupt):
        save(REFERENCE, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
