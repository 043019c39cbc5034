"""The eight checks of §6.3, in their order; what a failed one leaves behind; what the device sees."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing
from attrs import evolve

from caltrio.config import ExecutorConfig
from caltrio.core.kv import KvTxnState
from caltrio.core.lifecycle import LifecycleState
from caltrio.errors import (
    BatchTooLarge,
    CsrRejected,
    EmptyJob,
    InputMismatch,
    MapRejected,
    RequestError,
    SequenceTooLong,
    SliceOutOfRange,
    TensorMismatch,
    Unsupported,
)
from caltrio.events import JobEnded
from caltrio.executor import open_executor
from caltrio.manifest import DeviceTensor, TaskKind, load_manifest
from caltrio.mapped import MappedBuffers
from caltrio.prepare import host_memory
from caltrio.testing import FakeDevice
from caltrio.tokens import ReferenceSequence

VOCAB = 64
BASE = load_manifest()


def small(**changes):
    """The shipped manifest with a small vocabulary; ``changes`` are of its prefill graph."""
    graphs = []
    for graph in BASE.submodels:
        logits = evolve(graph.logits, shape=(1, 1, VOCAB), byte_size=2 * VOCAB)
        more = changes if graph.kind is TaskKind.PREFILL_IDS else {}
        graphs.append(evolve(graph, logits=logits, **more))
    return evolve(BASE, submodels=tuple(graphs))


SMALL = small()


@pytest.fixture
def clock():
    return trio.testing.MockClock(autojump_threshold=0)


class Buffers(MappedBuffers):
    """Writes down each call, and answers as the device's ``script`` says."""

    def __init__(self, contract, device):
        super().__init__(contract)
        self.device = device

    def _scripted(self, *call):
        self.device.calls.append(call)
        return self.device.script.get(call[:2])

    def tensor(self, name):
        changes = self._scripted("tensor", name)
        if changes == "gone":
            return None
        found = super().tensor(name)
        return found if changes is None else evolve(found, **changes)

    def extent(self, name, token_count):
        wrong = self._scripted("extent", name)
        return super().extent(name, token_count) if wrong is None else wrong

    def map(self, name, host):
        code = self._scripted("map", name)
        return super().map(name, host) if code is None else code

    def slice(self, name, offset, size):
        code = self._scripted("slice", name, offset, size)
        return super().slice(name, offset, size) if code is None else code

    def undo_slices(self):
        self._scripted("undo")
        return super().undo_slices()


class Scripted(FakeDevice):
    """A device whose calls are written down; ``script`` says which of them fail."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        self.calls = []
        self.script = {}
        self.made = []

    def buffers(self, contract, engine):
        self.made.append(Buffers(contract, self))
        return self.made[-1]

    def set_csr(self, graph, name, value):
        self.calls.append(("csr", name, value))
        code = self.script.get(("csr", name))
        return super().set_csr(graph, name, value) if code is None else code

    async def infer(self, job):
        self.calls.append(("infer", job.job_id))
        return await super().infer(job)


@asynccontextmanager
async def opened(device=None, **limits):
    events = []
    device = device or Scripted(manifest=SMALL)
    config = ExecutorConfig(**limits)
    with trio.fail_after(60):
        async with open_executor(
            device, device.manifest, config, listeners=[events.append]
        ) as executor:
            executor.events = events
            executor.device = device
            yield executor
    assert executor.core.pool.leased == 0
    assert not executor.core.open


def ended_jobs(executor):
    return [event.job for event in executor.events if isinstance(event, JobEnded)]


def nothing_is_held(executor, sequence):
    core = executor.core
    assert core.pool.leased == 0
    assert core.pool.quarantined == []
    assert core.pool.free == core.pool.total
    assert not core.in_flight
    assert core._submitting is None
    assert sum(core._load.values()) == 0
    assert sequence.request.job is None
    held = core.kv.holders[sequence.request.sequence_id]
    assert held.committed_tokens == sequence.past_len
    assert held.unknown is None
    assert not any(buffers.slices for buffers in executor.device.made)


def kinds_of(calls):
    return [call[0] for call in calls]


# --- what a good step does -------------------------------------------------------------------------


async def test_the_calls_of_one_job_in_their_order(clock):
    async with opened() as executor, executor.sequence(3, 2) as sequence:
        result = await sequence.prefill([1, 2, 3])
        calls = executor.device.calls
        device_calls = [call for call in calls if call[0] not in ("tensor", "extent")]
        assert device_calls == [
            ("csr", "cur_seq", 0),
            ("csr", "total_seq", 3),
            ("map", "token_ids"),
            ("map", "position_ids"),
            ("map", "logits"),
            ("slice", "token_ids", 0, 12),
            ("slice", "position_ids", 0, 12),
            ("infer", 0),
            ("undo",),
        ]
        checks = {i for i, call in enumerate(calls) if call[0] in ("tensor", "extent")}
        first = calls.index(("csr", "cur_seq", 0))
        assert len([i for i in checks if i < first]) == 5  # 3 tensors, 2 extents: checks 5 and 6 first
        bits = np.array(ReferenceSequence(VOCAB, [1, 2, 3]).logits(), np.uint32) << 16
        assert (result.logits == bits.view(np.float32)).all()
        calls.clear()
        await sequence.decode(4)
        assert ("csr", "cur_seq", 3) in calls
        assert ("csr", "total_seq", 4) in calls
        assert ("slice", "token_ids", 0, 4) in calls


async def test_what_is_not_sliceable_is_not_sliced(clock):
    tokens = evolve(SMALL.submodels[0].tokens, sliceable=False)
    async with opened(Scripted(manifest=small(tokens=tokens))) as executor:
        async with executor.sequence(2, 0) as sequence:
            await sequence.prefill([1, 2])
    sliced = [call[1] for call in executor.device.calls if call[0] == "slice"]
    assert sliced == ["position_ids"]


async def test_inputs_lie_in_the_mapped_memory_when_infer_is_called(clock):
    seen = []

    class Looking(Scripted):
        async def infer(self, job):
            memory = host_memory(job)
            count = job.token_count
            seen.append((memory.tokens[:count].tolist(), memory.positions[:count].tolist()))
            assert memory.buffers.host["token_ids"] is memory.tokens
            assert memory.buffers.host["position_ids"] is memory.positions
            assert memory.buffers.host["logits"] is memory.logits
            return await super().infer(job)

    async with opened(Looking(manifest=SMALL)) as executor, executor.sequence(5, 2) as sequence:
        await sequence.prefill([7, 8, 9])
        await sequence.prefill([10, 11])
        await sequence.decode(12)
    assert seen == [([7, 8, 9], [0, 1, 2]), ([10, 11], [3, 4]), ([12], [5])]


async def test_the_memory_of_a_slot_never_moves_and_is_mapped_once(clock):
    places = {}

    class Looking(Scripted):
        async def infer(self, job):
            memory = host_memory(job)
            where = tuple(a.ctypes.data for a in (memory.tokens, memory.positions, memory.logits))
            places.setdefault(job.lease.slot.slot_id, set()).add(where)
            return await super().infer(job)

    device = Looking(manifest=SMALL)
    async with opened(device, max_inflight=2) as executor:
        async with trio.open_nursery() as nursery:

            async def one():
                for _ in range(5):
                    async with executor.sequence(2, 11) as sequence:
                        await sequence.prefill([1, 2])
                        for token in range(10):
                            await sequence.decode(token)

            for _ in range(3):
                nursery.start_soon(one)
        assert len(ended_jobs(executor)) == 165
    assert len(places) > 2
    assert all(len(where) == 1 for where in places.values())
    assert len({where for wheres in places.values() for where in wheres}) == len(places)
    assert kinds_of(device.calls).count("map") == 3 * len(places)
    assert kinds_of(device.calls).count("slice") == 2 * 165


# --- checks 1 to 4: the device is not asked --------------------------------------------------------


async def prefill_with(sequence, tokens=(1, 2, 3), **how):
    return await sequence.prefill(list(tokens), **how)


LOCAL = [  # of a sequence that may take 3 tokens of prompt and 2 of output
    ("1 no tokens at all", EmptyJob, lambda s: s.prefill([])),
    ("1 an empty row of ids", EmptyJob, lambda s: s.prefill(np.array([], np.int32))),
    ("1 a count of none", EmptyJob, lambda s: s.prefill(0)),
    ("1 a count below none", EmptyJob, lambda s: s.prefill(-1)),
    ("1 decode before prefill", EmptyJob, lambda s: s.decode(1)),
    ("2 above what was asked for", SequenceTooLong, lambda s: prefill_with(s, range(5))),
    ("2 a count far above", SequenceTooLong, lambda s: s.prefill(2**63)),
    ("3 two sequences", BatchTooLarge, lambda s: prefill_with(s, sequences=2)),
    ("4 too few positions", InputMismatch, lambda s: prefill_with(s, positions=[0, 1])),
    ("4 too many positions", InputMismatch, lambda s: prefill_with(s, positions=[0, 1, 2, 3])),
    ("4 no positions", InputMismatch, lambda s: prefill_with(s, positions=[])),
    ("4 positions of floats", InputMismatch, lambda s: prefill_with(s, positions=[0.0, 1.0, 2.0])),
    ("4 positions in rows", InputMismatch, lambda s: prefill_with(s, positions=[[0, 1, 2]])),
    ("4 positions that begin late", InputMismatch, lambda s: prefill_with(s, positions=[1, 2, 3])),
    ("4 positions with a gap", InputMismatch, lambda s: prefill_with(s, positions=[0, 1, 3])),
    ("4 positions backwards", InputMismatch, lambda s: prefill_with(s, positions=[0, -1, -2])),
    ("4 positions that wrap", InputMismatch, lambda s: prefill_with(s, positions=[2**32, 1, 2])),
    ("4 tokens of text", InputMismatch, lambda s: s.prefill(["a"])),
    ("4 tokens of truth", InputMismatch, lambda s: s.prefill([True, False])),
    ("4 tokens in rows", InputMismatch, lambda s: s.prefill([[1, 2]])),
    ("4 a token above the vocabulary", InputMismatch, lambda s: prefill_with(s, [1, VOCAB, 2])),
    ("4 a token below it", InputMismatch, lambda s: prefill_with(s, [1, 2, -1])),
    ("4 a token that wraps", InputMismatch, lambda s: prefill_with(s, [2**32 + 1])),
    ("4 out of another type", InputMismatch,
     lambda s: prefill_with(s, out=np.zeros(VOCAB, np.float64))),
    ("4 out too long", InputMismatch, lambda s: prefill_with(s, out=np.zeros(VOCAB + 1, np.float32))),
    ("4 out past the end", InputMismatch,
     lambda s: prefill_with(s, out=np.zeros(2, np.float32), base=VOCAB - 1)),
    ("4 base below 0", InputMismatch, lambda s: prefill_with(s, base=-1)),
    ("4 out in steps", InputMismatch,
     lambda s: prefill_with(s, out=np.zeros(2 * VOCAB, np.float32)[::2])),
    ("4 out not aligned", InputMismatch,
     lambda s: prefill_with(s, out=np.frombuffer(bytearray(4 * VOCAB + 1), np.float32, VOCAB, 1))),
]  # fmt: skip


def same_bytes(sequence):
    """An ``out`` that may not be written to."""
    out = np.zeros(VOCAB, np.float32)
    out.flags.writeable = False
    return prefill_with(sequence, out=out)


LOCAL.append(("4 out read-only", InputMismatch, same_bytes))


@pytest.mark.parametrize(("name", "kind", "step"), LOCAL, ids=[row[0] for row in LOCAL])
async def test_a_local_check_fails_before_the_device_is_asked(clock, name, kind, step):
    async with opened() as executor, executor.sequence(3, 2) as sequence:
        with pytest.raises(RequestError) as caught:
            await step(sequence)
        assert type(caught.value) is kind
        assert caught.value.phase == "prepare"
        assert caught.value.code == 0
        assert caught.value.http == 400
        assert executor.device.calls == []
        nothing_is_held(executor, sequence)
        await sequence.prefill([1, 2, 3])  # the sequence can go on
        await sequence.decode(4)
    assert executor.core.lifecycle is LifecycleState.CLOSED


async def test_the_error_names_request_sequence_and_generation(clock):
    async with opened() as executor, executor.sequence(1, 0), executor.sequence(3, 0) as sequence:
        with pytest.raises(SequenceTooLong) as caught:
            await sequence.prefill([1, 2, 3, 4])
        assert caught.value.sequence_id == 1
        assert caught.value.generation_id == 1
        assert "request 1" in str(caught.value)


async def test_an_input_that_is_refused_early_names_its_sequence_too(clock):
    """§6.1: no error without its sequence and its generation."""
    async with opened() as executor, executor.sequence(3, 0) as sequence:
        with pytest.raises(InputMismatch) as caught:
            await sequence.prefill([2**40])
        assert caught.value.sequence_id == 0
        assert caught.value.generation_id == 1


async def test_the_bound_is_past_length_and_tokens_together(clock):
    async with opened() as executor, executor.sequence(40959, 2) as sequence:
        await sequence.prefill(40958)
        await sequence.prefill([1])
        with pytest.raises(SequenceTooLong, match="40959 \\+ 2"):
            await sequence.prefill([1, 2])
        await sequence.decode(5)
        with pytest.raises(SequenceTooLong, match="40960"):
            await sequence.decode(5)


@pytest.mark.parametrize("token", [0, VOCAB - 1])
async def test_the_ends_of_the_vocabulary_are_in_it(clock, token):
    async with opened() as executor, executor.sequence(1, 0) as sequence:
        await sequence.prefill([token])


async def test_a_batch_of_two_where_the_graph_takes_two(clock):
    async with opened(Scripted(manifest=small(max_batch=2))) as executor:
        async with executor.sequence(2, 0) as sequence:
            await sequence.prefill([1, 2], sequences=2)


ORDER = [
    ("1 before 3", EmptyJob, lambda s: s.prefill([], sequences=2)),
    ("1 before 4", EmptyJob, lambda s: s.decode(VOCAB)),
    ("2 before 3", SequenceTooLong, lambda s: prefill_with(s, range(5), sequences=2)),
    ("2 before 4", SequenceTooLong, lambda s: prefill_with(s, [VOCAB] * 5)),
    ("3 before 4 (positions)", BatchTooLarge, lambda s: prefill_with(s, sequences=2, positions=[0])),
    ("3 before 4 (ids)", BatchTooLarge, lambda s: prefill_with(s, [VOCAB], sequences=2)),
    ("2 before 4 (type)", SequenceTooLong,
     lambda s: prefill_with(s, range(5), positions=np.arange(5.0))),
    ("3 before 4 (type)", BatchTooLarge,
     lambda s: prefill_with(s, sequences=2, positions=[0.0, 1.0, 2.0])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "step"), ORDER, ids=[row[0] for row in ORDER])
async def test_of_two_local_checks_that_fail_the_first_is_told(clock, name, kind, step):
    async with opened() as executor, executor.sequence(3, 2) as sequence:
        with pytest.raises(RequestError) as caught:
            await step(sequence)
        assert type(caught.value) is kind


async def test_check_4_before_check_5(clock):
    device = Scripted(manifest=SMALL)
    device.script["tensor", "token_ids"] = "gone"
    async with opened(device) as executor, executor.sequence(3, 2) as sequence:
        with pytest.raises(InputMismatch):
            await sequence.prefill([VOCAB])
        assert device.calls == []


# --- embeddings ------------------------------------------------------------------------------------


async def test_embeddings_where_the_model_has_no_graph_for_them(clock):
    async with opened() as executor, executor.sequence(2, 0) as sequence:
        with pytest.raises(Unsupported, match="prefill_embeds") as caught:
            await sequence.prefill(np.zeros((2, 8), np.float32))
        assert caught.value.grpc == "UNIMPLEMENTED"
        assert executor.device.calls == []
        nothing_is_held(executor, sequence)
        await sequence.prefill([1, 2])


class Embedding(Scripted):
    """Has a graph for embeddings; keeps what it got."""

    got = None

    def _compute(self, job):
        memory = host_memory(job)
        self.got = memory.tokens[: job.data.tokens.size].copy(), memory.tokens.dtype
        memory.logits[:] = 0


def embedding_device():
    graph = SMALL.submodels[0]
    tokens = evolve(graph.tokens, shape=(1, 8, 4), dtype="f32", byte_size=128)
    embeds = evolve(graph, kind=TaskKind.PREFILL_EMBEDS, exact_name="embeds", tokens=tokens)
    return Embedding(manifest=evolve(SMALL, submodels=(*SMALL.submodels, embeds)))


async def test_embeddings_reach_the_device_as_they_are(clock):
    device = embedding_device()
    async with opened(device) as executor, executor.sequence(3, 0) as sequence:
        given = np.arange(12.0).reshape(3, 4)
        await sequence.prefill(given)
        values, dtype = device.got
        assert dtype == np.float32
        assert values.tolist() == given.ravel().tolist()
        assert ("slice", "token_ids", 0, 48) in device.calls
        assert sequence.past_len == 3


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (np.zeros((3, 5)), InputMismatch),
        (np.zeros((3, 3)), InputMismatch),
        (np.zeros((0, 4)), EmptyJob),
        (np.zeros((4, 4)), SequenceTooLong),
    ],
)
async def test_embeddings_have_their_number_of_elements_checked(clock, given, kind):
    device = embedding_device()
    async with opened(device) as executor, executor.sequence(3, 0) as sequence:
        with pytest.raises(RequestError) as caught:
            await sequence.prefill(given)
        assert type(caught.value) is kind
        assert device.calls == []
        nothing_is_held(executor, sequence)


# --- checks 5 to 8: no call after the one that failed ----------------------------------------------

DEVICE = [  # name, script, class, code, the last call that may be made
    ("5 gone", {("tensor", "token_ids"): "gone"}, TensorMismatch, 0, ("tensor", "token_ids")),
    ("5 dtype", {("tensor", "token_ids"): {"dtype": "f32"}}, TensorMismatch, 0,
     ("tensor", "token_ids")),
    ("5 rank", {("tensor", "position_ids"): {"shape": (40960,)}}, TensorMismatch, 0,
     ("tensor", "position_ids")),
    ("5 shape", {("tensor", "logits"): {"shape": (1, VOCAB, 1)}}, TensorMismatch, 0,
     ("tensor", "logits")),
    ("5 size", {("tensor", "logits"): {"byte_size": 2 * VOCAB - 1}}, TensorMismatch, 0,
     ("tensor", "logits")),
    ("6 one byte too much", {("extent", "token_ids"): (0, 163841)}, SliceOutOfRange, 0,
     ("extent", "token_ids")),
    ("6 offset outside", {("extent", "token_ids"): (163840, 12)}, SliceOutOfRange, 0,
     ("extent", "token_ids")),
    ("6 offset pushes it outside", {("extent", "position_ids"): (163840 - 11, 12)}, SliceOutOfRange,
     0, ("extent", "position_ids")),
    ("6 offset below 0", {("extent", "position_ids"): (-4, 12)}, SliceOutOfRange, 0,
     ("extent", "position_ids")),
    ("6 below what is needed", {("extent", "position_ids"): (0, 11)}, SliceOutOfRange, 0,
     ("extent", "position_ids")),
    ("6 overflow", {("extent", "token_ids"): (2**63, 2**63)}, SliceOutOfRange, 0,
     ("extent", "token_ids")),
    ("7 first", {("csr", "cur_seq"): 14}, CsrRejected, 14, ("csr", "cur_seq")),
    ("7 second", {("csr", "total_seq"): 1}, CsrRejected, 1, ("csr", "total_seq")),
    ("8 map first", {("map", "token_ids"): 21}, MapRejected, 21, ("map", "token_ids")),
    ("8 map last", {("map", "logits"): 22}, MapRejected, 22, ("map", "logits")),
    ("8 slice first", {("slice", "token_ids"): 14}, MapRejected, 14, ("slice", "token_ids")),
    ("8 slice second", {("slice", "position_ids"): 22}, MapRejected, 22, ("slice", "position_ids")),
]  # fmt: skip
BY_NAME = {row[0]: row for row in DEVICE}


@pytest.mark.parametrize(
    ("name", "script", "kind", "code", "last"), DEVICE, ids=[row[0] for row in DEVICE]
)
async def test_a_check_that_asks_the_device(clock, name, script, kind, code, last):
    device = Scripted(manifest=SMALL)
    device.script.update(script)
    async with opened(device) as executor, executor.sequence(3, 2) as sequence:
        with pytest.raises(RequestError) as caught:
            await sequence.prefill([1, 2, 3])
        error = caught.value
        assert type(error) is kind
        assert (error.code, error.phase, error.http) == (code, "prepare", 500)
        assert (error.job_id, error.sequence_id, error.generation_id) == (0, 0, 1)
        assert last[1] in str(error)
        calls = [call for call in device.calls if call[0] != "undo"]
        assert calls[-1][:2] == last  # and nothing after it
        assert device.inferred == []
        nothing_is_held(executor, sequence)
        assert sequence.past_len == 0
        assert executor.core.lifecycle is LifecycleState.READY
        (job,) = ended_jobs(executor)
        assert job.kv.state is KvTxnState.ROLLED_BACK
        assert job.timings.infer_ns is None
        if "slice" in name and "second" in name:
            assert ("undo",) in device.calls

        device.script.clear()  # it was transient: the same sequence goes on
        device.calls.clear()
        result = await sequence.prefill([1, 2, 3])
        assert np.argmax(result.logits) == ReferenceSequence(VOCAB, [1, 2, 3]).next_token()
        assert sequence.past_len == 3
        await sequence.decode(4)


@pytest.mark.parametrize(
    ("later", "earlier"),
    [
        (BY_NAME["6 one byte too much"], BY_NAME["5 gone"]),
        (BY_NAME["7 first"], BY_NAME["6 one byte too much"]),
        (BY_NAME["8 map first"], BY_NAME["7 second"]),
        (BY_NAME["8 slice second"], BY_NAME["8 map last"]),
    ],
    ids=["5 before 6", "6 before 7", "7 before 8", "map before slice"],
)  # fmt: skip
async def test_of_two_checks_that_fail_the_first_is_told(clock, later, earlier):
    device = Scripted(manifest=SMALL)
    device.script.update({**later[1], **earlier[1]})
    async with opened(device) as executor, executor.sequence(3, 2) as sequence:
        with pytest.raises(RequestError) as caught:
            await sequence.prefill([1, 2, 3])
        assert type(caught.value) is earlier[2]
        assert caught.value.code == earlier[3]
        calls = [call for call in device.calls if call[0] != "undo"]
        assert calls[-1][:2] == earlier[4]
        nothing_is_held(executor, sequence)


async def test_a_tensor_that_was_right_once_is_compared_again_if_the_device_reports_another(clock):
    device = Scripted(manifest=SMALL)
    async with opened(device) as executor, executor.sequence(3, 2) as sequence:
        for _ in range(2):  # each slot of the kind has been used
            await sequence.prefill([1])
        device.script["tensor", "logits"] = {"byte_size": 2}
        with pytest.raises(TensorMismatch):
            await sequence.prefill([1])


async def test_more_tokens_than_the_tensor_holds(clock):
    """FI03, where ``max_seq`` alone would allow it."""
    tokens = evolve(SMALL.submodels[0].tokens, shape=(1, 4), byte_size=16)
    device = Scripted(manifest=small(tokens=tokens))
    async with opened(device) as executor, executor.sequence(5, 0) as sequence:
        with pytest.raises(SliceOutOfRange, match="20 bytes, above the 16"):
            await sequence.prefill([1, 2, 3, 4, 5])
        assert not {"csr", "map", "slice", "infer"} & set(kinds_of(device.calls))
        nothing_is_held(executor, sequence)
        await sequence.prefill([1, 2, 3, 4])


async def test_a_csr_that_the_graph_does_not_have(clock):
    """FI02."""

    class WithoutCsr(Scripted):
        def set_csr(self, graph, name, value):
            self.calls.append(("csr", name, value))
            return 14

    device = WithoutCsr(manifest=SMALL)
    async with opened(device) as executor, executor.sequence(1, 0) as sequence:
        with pytest.raises(CsrRejected, match="SetCsrByName\\('cur_seq', 0\\) returned 14"):
            await sequence.prefill(1)
        assert device.inferred == device.waited == []


@pytest.mark.parametrize("call", [("csr", "cur_seq"), ("map", "token_ids"), ("slice", "token_ids")])
async def test_a_code_of_the_device_found_in_preparation_is_judged_like_any_other(clock, call):
    device = Scripted(manifest=SMALL)
    device.script[call] = 24
    async with opened(device) as executor:
        with pytest.raises((CsrRejected, MapRejected)) as caught:
            async with executor.sequence(1, 0) as sequence:
                await sequence.prefill(1)
        assert caught.value.code == 24
        assert executor.core.lifecycle is LifecycleState.FAILED  # no reset to offer
        assert device.inferred == []


async def test_a_failed_preparation_lets_the_next_job_go(clock):
    device = Scripted(manifest=SMALL)
    device.script["csr", "total_seq"] = 14
    async with opened(device) as executor:
        async with executor.sequence(1, 0) as first, executor.sequence(1, 0) as second:
            async with trio.open_nursery() as nursery:

                async def fails():
                    with pytest.raises(CsrRejected):
                        await first.prefill([1])
                    device.script.clear()

                nursery.start_soon(fails)
                await trio.testing.wait_all_tasks_blocked()
                await second.prefill([1])
        assert device.waited == [1]


async def test_slices_are_undone_if_infer_refuses(clock):
    device = Scripted(manifest=SMALL, submit_codes={0: 17})
    async with opened(device) as executor, executor.sequence(2, 0) as sequence:
        with pytest.raises(RequestError):
            await sequence.prefill([1, 2])
        assert device.calls[-1] == ("undo",)
        nothing_is_held(executor, sequence)
        await sequence.prefill([1, 2])
        assert device.waited == [1]


async def test_a_slot_whose_slices_cannot_be_undone_leaves_service(clock):
    """FI15."""

    class Stuck(Buffers):
        def undo_slices(self):
            self._scripted("undo")
            return 15

    class Device(Scripted):
        def buffers(self, contract, engine):
            return Stuck(contract, self)

    async with opened(Device(manifest=SMALL)) as executor, executor.sequence(2, 0) as sequence:
        await sequence.prefill([1])
        pool = executor.core.pool
        assert pool.leased == 0
        ((slot, reason),) = pool.quarantined
        assert slot.kind is TaskKind.PREFILL_IDS
        assert "slices" in reason


async def test_the_output_tensor_is_checked_before_it_is_read(clock):
    """FI09: smaller than the vocabulary."""
    device = Scripted(manifest=SMALL)
    out = np.full(VOCAB, 7, np.float32)

    class Shrinks(Scripted):
        async def infer(self, job):
            self.script["tensor", "logits"] = {"shape": (1, 1, 8), "byte_size": 16}
            return await super().infer(job)

    device = Shrinks(manifest=SMALL)
    async with opened(device) as executor:
        with pytest.raises(RequestError, match="byte size") as caught:
            async with executor.sequence(2, 0) as sequence:
                await sequence.prefill([1, 2], out=out)
        assert type(caught.value).__name__ == "OutputRejected"
        assert (out == 7).all()
        assert executor.core.lifecycle is LifecycleState.FAILED


async def test_a_part_of_the_vocabulary(clock):
    async with opened() as executor, executor.sequence(2, 0) as sequence:
        whole = (await sequence.prefill([1])).logits.copy()
    async with opened() as executor, executor.sequence(2, 0) as sequence:
        out = np.full(12, 99, np.float32)
        result = await sequence.prefill([1], out=out[1:11], base=17)
        assert (out[1:11] == whole[17:27]).all()
        assert out[0] == out[11] == 99
        assert result.logits.base is out or result.logits is out[1:11]


def test_the_fake_buffers_report_what_the_manifest_says():
    buffers = MappedBuffers(SMALL.submodels[0])
    assert buffers.tensor("logits") == DeviceTensor("logits", (1, 1, VOCAB), "bf16", 2 * VOCAB)
    assert buffers.tensor("logit") is None
    assert buffers.map("logits", np.zeros(VOCAB + 1, np.uint16)) == 24
    assert buffers.slice("token_ids", 163840, 1) == 14
    assert not buffers.sliced


async def test_nothing_is_written_for_a_caller_who_has_left(clock):
    out = np.full(VOCAB, 7, np.float32)
    async with opened() as executor:
        sequence = await executor.admit(2, 2)
        with trio.move_on_after(5e-4):
            await sequence.prefill([1, 2], out=out)
        await trio.sleep(0.01)
        assert executor.device.waited == [0]
        assert (out == 7).all()
        result = await sequence.decode(3)  # what the device did counts
        assert np.argmax(result.logits) == ReferenceSequence(VOCAB, [1, 2, 3]).next_token()
        sequence.close()
