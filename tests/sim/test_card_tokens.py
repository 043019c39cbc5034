"""The simulated card's tokens against the reference; and each way to go wrong shows in them."""

from functools import cache

import numpy as np
import pytest
import trio
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from support import MS, profile

from caltrio.config import ExecutorConfig
from caltrio.costs import Costs
from caltrio.errors import RequestError
from caltrio.executor import open_executor
from caltrio.faults import Fault, FaultPlan, FaultyDevice, Point
from caltrio.manifest import load_manifest
from caltrio.mapped import MappedBuffers
from caltrio.prepare import HostMemory, host_memory
from caltrio.semantics import PRESETS, EngineSemantics, KvAfterFailedWait
from caltrio.tokens import ReferenceSequence, generate
from sim.clock import run_virtual
from sim.device import SimDevice
from sim.tokens import SimKv, TokenModel, Transfer

T = 3 * MS
EQUAL = profile(h2d=T, compute=T, d2h=T)
BUSY = profile(submit=40_000, h2d=10_000, compute=MS, d2h=30_000, interrupt=15_000, post=100_000)
FULL = EngineSemantics()


@cache
def small(vocab=64):
    base = load_manifest()
    return evolve(
        base,
        submodels=tuple(
            evolve(graph, logits=evolve(graph.logits, shape=(1, 1, vocab), byte_size=2 * vocab))
            for graph in base.submodels
        ),
    )


def on_sim(main, *, semantics=FULL, timing=BUSY, vocab=64, faults=(), kv_tokens=None, **limits):
    """``main(executor, device)`` on a simulated card."""
    manifest = small(vocab)

    async def opened(clock):
        device = SimDevice(clock, semantics, manifest=manifest, tokens=True, kv_tokens=kv_tokens)
        faulty = FaultyDevice(device, FaultPlan(faults))
        async with open_executor(faulty, manifest, ExecutorConfig(**limits)) as executor:
            return await main(executor, device)

    return run_virtual(opened, Costs(timing, manifest, 0))


async def say(executor, prompt, count):
    """Greedy tokens, as a client would make them."""
    tokens = []
    async with executor.sequence(len(prompt), count) as sequence:
        result = await sequence.prefill(np.array(prompt))
        tokens.append(int(result.logits.argmax()))
        while len(tokens) < count:
            result = await sequence.decode(tokens[-1])
            tokens.append(int(result.logits.argmax()))
    return tokens


def said(prompts, count, **kwargs):
    """What the card says to each prompt, all side by side."""

    async def main(executor, device):
        tokens = {}

        async def one(index, prompt):
            tokens[index] = await say(executor, prompt, count)

        async with trio.open_nursery() as nursery:
            for index, prompt in enumerate(prompts):
                nursery.start_soon(one, index, prompt)
        return [tokens[index] for index in range(len(prompts))]

    return on_sim(main, **kwargs)


# --- the definition -------------------------------------------------------------------------------

CHUNKS = st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=12), min_size=1, max_size=4)
PLANS = st.lists(st.tuples(CHUNKS, st.integers(0, 4)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(PLANS, st.sampled_from(list(PRESETS)), st.sampled_from([1, 2]))
def test_it_says_what_the_reference_says(plans, preset, max_inflight):
    """Prompts in chunks, then decode steps: every row of logits, bit for bit."""
    checked = 0

    async def main(executor, device):
        async def one(chunks, steps):
            nonlocal checked
            reference = ReferenceSequence(64)
            length = sum(map(len, chunks))
            async with executor.sequence(length, steps + 1) as sequence:
                for step in range(len(chunks) + steps):
                    if step < len(chunks):
                        fed = chunks[step]
                        result = await sequence.prefill(np.array(fed))
                    else:
                        fed = [reference.next_token()]
                        result = await sequence.decode(fed[0])
                    for token in fed:
                        reference.feed(token)
                    bits = result.logits.view(np.uint32) >> 16
                    assert bits.tolist() == reference.logits().tolist()
                    checked += 1

        async with trio.open_nursery() as nursery:
            for chunks, steps in plans:
                nursery.start_soon(one, chunks, steps)

    on_sim(main, semantics=PRESETS[preset].semantics, max_inflight=max_inflight)
    assert checked == sum(len(chunks) + steps for chunks, steps in plans)


def test_the_vocabulary_of_the_product():
    vocab = 151_936
    prompt = [vocab - 1, 0, 100_000]
    assert said([prompt], 4, vocab=vocab) == [generate(vocab, prompt, 4)]


def test_a_long_prompt():
    prompt = [(7 * place * place) % 64 for place in range(5000)]
    assert said([prompt], 3) == [generate(64, prompt, 3)]


def test_without_tokens_nothing_is_computed():
    async def opened(clock):
        device = SimDevice(clock, FULL, manifest=small())
        async with (
            open_executor(device, small(), ExecutorConfig()) as executor,
            executor.sequence(2, 1) as sequence,
        ):
            result = await sequence.prefill(np.array([1, 2]))
            return result.logits.tolist(), dict(device.kv.cells)

    assert run_virtual(opened, Costs(BUSY, small(), 0)) == ([0.0] * 64, {})


# --- the KV ---------------------------------------------------------------------------------------


def test_kv_has_a_capacity():
    kv = SimKv(10)
    assert kv.can_allocate(10)
    assert not kv.can_allocate(11)
    assert kv.apply(1, 6)
    assert not kv.apply(2, 5)
    assert 2 not in kv.allowed  # refused: as if never asked
    assert kv.apply(2, 4)
    assert not kv.can_allocate(1)
    assert not kv.apply(1, 7)
    assert kv.apply(1, 3)  # holds more already
    assert kv.allowed == {1: 6, 2: 4}
    kv.release(1)
    assert kv.can_allocate(6)
    assert not kv.can_allocate(7)
    assert kv.apply(2, 10)
    kv.release(2)
    assert kv.can_allocate(10)


def test_a_released_sequence_leaves_no_cells():
    async def main(executor, device):
        await say(executor, [1, 2, 3], 2)
        assert not device.kv.cells
        assert not device.kv.allowed
        return await say(executor, [4], 2)  # the same sequence id again

    assert on_sim(main) == generate(64, [4], 2)


def test_a_card_without_room_lets_the_second_wait():
    tokens = said([[1, 2, 3], [4, 5, 6]], 3, kv_tokens=6, max_inflight=2)
    assert tokens == [generate(64, prompt, 3) for prompt in ([1, 2, 3], [4, 5, 6])]


def transfer_of(kv, tokens, positions, *, total, after=KvAfterFailedWait.UNKNOWN):
    """One job by hand: (the model, what H2D brought, the output memory)."""
    contract = small().submodels[0]
    buffers = MappedBuffers(contract)
    memory = HostMemory(contract, 16, buffers)
    for name, host in (
        (contract.tokens.name, memory.tokens),
        (contract.position.name, memory.positions),
        (contract.logits.name, memory.logits),
    ):
        assert buffers.map(name, host) == 0
    memory.tokens[: len(tokens)] = tokens
    memory.positions[: len(positions)] = positions
    for tensor in (contract.tokens, contract.position):
        assert buffers.slice(tensor.name, 0, 4 * len(tokens)) == 0
    model, transfer = TokenModel(64, lambda: kv, after), Transfer(buffers, 7, positions[0], total)
    model.read(transfer)
    return model, transfer, memory.logits


def test_writes_outside_of_what_is_allowed_are_dropped():
    kv = SimKv(None)
    kv.apply(7, 3)
    model, transfer, logits = transfer_of(kv, [10, 11, 12, 13, 14], range(5), total=5)
    model.write(transfer)
    assert kv.cells[7][:5].tolist() == [10, 11, 12, -1, -1]
    # Such a cell counts as nothing, at its place: and the tokens are others.
    assert logits.tolist() == ReferenceSequence(64, [10, 11, 12, -1, -1]).logits().tolist()
    assert logits.tolist() != ReferenceSequence(64, [10, 11, 12, 13, 14]).logits().tolist()


def test_negative_positions_are_dropped_and_never_taken_back():
    kv = SimKv(None)
    kv.apply(7, 4)
    after = KvAfterFailedWait.UNCHANGED
    model, transfer, _ = transfer_of(kv, [10, 11, 12], [-1, 0, 1], total=3, after=after)
    model.write(transfer)
    assert kv.cells[7][:4].tolist() == [11, 12, -1, -1]
    assert set(kv.cells[7][4:]) == {-1}
    model.failed(transfer)
    assert set(kv.cells[7]) == {-1}


def test_a_sequence_that_nobody_applied_for_is_not_written():
    kv = SimKv(None)
    model, transfer, _ = transfer_of(kv, [10], [0], total=1)
    model.write(transfer)
    assert -1 in kv.cells.get(7, [-1])
    assert 10 not in kv.cells.get(7, [])


@pytest.mark.parametrize("after", KvAfterFailedWait)
@pytest.mark.parametrize("point", [Point.WAIT, Point.STATUS])
def test_kv_after_a_failed_wait(after, point):
    """A prefill of 3 that works, and a decode step that fails."""

    async def main(executor, device):
        async with executor.sequence(3, 3) as sequence:
            await sequence.prefill(np.array([10, 11, 12]))
            before = device.kv.cells[sequence.request.sequence_id][:4].tolist()
            with pytest.raises(RequestError):
                await sequence.decode(13)
            return before, device.kv.cells[sequence.request.sequence_id][:4].tolist()

    semantics = evolve(FULL, kv_after_failed_wait=after)
    before, cells = on_sim(main, semantics=semantics, faults=[Fault(point, job_id=1)])
    assert before == [10, 11, 12, -1]
    assert cells[:3] == [10, 11, 12]
    if after is KvAfterFailedWait.UNCHANGED:
        assert cells[3] == -1
    elif after is KvAfterFailedWait.APPLIED:
        assert cells[3] == 13
    else:
        assert cells[3] not in (-1, 13)


def test_a_failed_job_spoils_no_other_sequence():
    async def main(executor, device):
        tokens = {}

        async def one(index):
            try:
                tokens[index] = await say(executor, [index, 5, 6], 6)
            except RequestError as error:
                tokens[index] = type(error).__name__

        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(one, index)
        return tokens

    tokens = on_sim(main, faults=[Fault(Point.WAIT, job_id=4)], max_inflight=2)
    failed = [index for index in tokens if tokens[index] == "DeadlineExceeded"]
    assert len(failed) == 1
    assert all(
        tokens[index] == generate(64, [index, 5, 6], 6) for index in range(3) if index not in failed
    )


# --- what goes wrong, shows -----------------------------------------------------------------------

PROMPTS = [[1, 2, 3, 4], [9, 8, 7, 6, 5]]


def right():
    return [generate(64, prompt, 8) for prompt in PROMPTS]


def lose_a_kv_update(monkeypatch):
    written = 0
    original = TokenModel.write

    def write(self, transfer):
        nonlocal written
        original(self, transfer)
        written += 1
        if written == 5:
            self._kv().cells[transfer.sequence_id][transfer.positions] = transfer.before

    monkeypatch.setattr(TokenModel, "write", write)


def swap_the_outputs(monkeypatch):
    original, last = TokenModel.write, {}

    def write(self, transfer):
        own = transfer.buffers
        transfer.buffers = last.get(own.contract.kind, own)
        original(self, transfer)
        transfer.buffers = last[own.contract.kind] = own

    monkeypatch.setattr(TokenModel, "write", write)


def forget_a_csr(which):
    def forget(monkeypatch):
        original = SimDevice.set_csr

        def set_csr(self, graph, name, value):
            contract = small().submodels[0]
            if name == getattr(contract, which):
                return 0
            return original(self, graph, name, value)

        monkeypatch.setattr(SimDevice, "set_csr", set_csr)

    return forget


def leave_the_positions(monkeypatch):
    original = HostMemory.load

    def load(self, device, job):
        old = self.positions.copy()
        original(self, device, job)
        self.positions[:] = old

    monkeypatch.setattr(HostMemory, "load", load)


def leave_the_tokens(monkeypatch):
    original = HostMemory.load

    def load(self, device, job):
        old = self.tokens.copy()
        original(self, device, job)
        if job.step:
            self.tokens[:] = old

    monkeypatch.setattr(HostMemory, "load", load)


def drop_the_output(monkeypatch):
    original = TokenModel.write

    def write(self, transfer):
        old = transfer.buffers.host["logits"].copy()
        original(self, transfer)
        if transfer.total_len == 7:
            transfer.buffers.host["logits"][:] = old

    monkeypatch.setattr(TokenModel, "write", write)


def slice_one_token_short(monkeypatch):
    original = MappedBuffers.slice

    def slice_(self, name, offset, size):
        return original(self, name, offset, size - 4 if size > 4 else size)

    monkeypatch.setattr(MappedBuffers, "slice", slice_)


def share_the_kv(monkeypatch):
    original = SimDevice._transfer

    def transfer(self, job):
        made = original(self, job)
        made.sequence_id = 0
        return made

    monkeypatch.setattr(SimDevice, "_transfer", transfer)


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_all_is_right_where_nothing_is_broken(max_inflight):
    assert said(PROMPTS, 8, max_inflight=max_inflight) == right()


@pytest.mark.parametrize("max_inflight", [1, 2])
@pytest.mark.parametrize(
    "broken",
    [
        lose_a_kv_update,
        swap_the_outputs,
        forget_a_csr("csr_total_seq"),
        forget_a_csr("csr_cur_seq"),
        leave_the_positions,
        leave_the_tokens,
        drop_the_output,
        slice_one_token_short,
        share_the_kv,
    ],
    ids=["kv", "outputs", "total_seq", "cur_seq", "positions", "tokens", "output", "slice", "sequence"],
)
def test_what_is_broken_shows_as_wrong_tokens(monkeypatch, broken, max_inflight):
    broken(monkeypatch)
    assert said(PROMPTS, 8, max_inflight=max_inflight) != right()


# --- when the memory is read and written ----------------------------------------------------------


def meddled(at_ns, meddle, *, timing=EQUAL):
    """What the first prefill says if ``meddle(memory)`` is done at that time; its H2D ends at 3 ms,
    its D2H at 9 ms."""

    async def main(executor, device):
        seen = []

        async def later():
            await trio.sleep(at_ns / 1e9)
            (job,) = executor.core.in_flight.values()
            seen.append(meddle(host_memory(job), device))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            tokens = await say(executor, [1, 2, 3], 1)
        return tokens, seen

    return on_sim(main, timing=timing)


def change_a_token(memory, _device):
    memory.tokens[1] = 63


def change_a_position(memory, _device):
    memory.positions[1] = 2


@pytest.mark.parametrize(
    ("meddle", "history"), [(change_a_token, [1, 63, 3]), (change_a_position, [1, -1, 3])]
)
def test_inputs_are_read_as_h2d_ends(meddle, history):
    other = [ReferenceSequence(64, history).next_token()]
    assert other != generate(64, [1, 2, 3], 1)
    assert meddled(T - 10, meddle)[0] == other
    assert meddled(T + 10, meddle)[0] == generate(64, [1, 2, 3], 1)


def test_outputs_and_kv_are_written_as_d2h_ends():
    timing = evolve(EQUAL, interrupt=profile(interrupt=MS).interrupt)

    def look(memory, device):
        seen = memory.logits.copy()
        memory.logits[:] = 0
        memory.logits[17] = 0x4000
        return seen.any(), device.kv.cells.get(0, np.full(3, -1))[:3].tolist()

    right = generate(64, [1, 2, 3], 1)
    assert meddled(9 * MS - 10, look, timing=timing) == (right, [(False, [-1, -1, -1])])
    assert meddled(9 * MS + 10, look, timing=timing) == ([17], [(True, [1, 2, 3])])


def test_after_a_reset_an_old_job_touches_nothing():
    """Its deadline passes at 10 ms, the grace at 20 ms; its D2H would end at 106 ms."""
    timing = profile(h2d=T, compute=100 * MS, d2h=T)
    semantics = evolve(FULL, reset_scope="device")

    async def main(executor, device):
        memories = []
        async with trio.open_nursery() as nursery:

            async def client():
                with pytest.raises(RequestError):
                    await say(executor, [1, 2, 3], 1)

            nursery.start_soon(client)
            await trio.sleep(0.005)
            memories += [host_memory(job) for job in executor.core.in_flight.values()]
        await trio.sleep(5)
        assert executor.generation.generation_id == 2
        (memory,) = memories
        assert not memory.logits.any()
        assert not device.kv.cells
        return memory

    limits = {"execution_timeout_ns": 10 * MS, "grace_ns": 10 * MS}
    memory = on_sim(main, timing=timing, semantics=semantics, **limits)
    # The same without a deadline: that memory is indeed where the logits would have gone.
    assert memory.logits.size == 64
    assert meddled(9 * MS + 10, lambda m, _: m.logits.any(),
                   timing=profile(h2d=T, compute=T, d2h=T, interrupt=MS))[1] == [True]  # fmt: skip
