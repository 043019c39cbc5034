"""The C ABI of the shim called directly, as its header says: what the driver relies on."""

import select
from contextlib import contextmanager

import numpy as np
import pytest
from emulated import MANIFEST
from support import MS, US, needs_emulator, profile

from caltrio.manifest import TaskKind
from caltrio.semantics import EngineSemantics, KvAfterFailedWait
from caltrio.tokens import ReferenceSequence
from hw.bindings import ffi, load
from hw.build import LIBRARIES, SHIM_ON_EMULATOR
from hw.emulator import write_card

pytestmark = needs_emulator

QUICK = profile(h2d=10 * US, compute=50 * US, d2h=10 * US)
SLOW = profile(h2d=MS, compute=100 * MS, d2h=MS)
VOCAB = 64
PREFILL, DECODE = TaskKind.PREFILL_IDS, TaskKind.DECODE
NULL = ffi().NULL


class Native:
    """One device, without Python's driver."""

    def __init__(self, library, device):
        self.library, self.device = library, device
        self.jobs = {}  # by token: (buffers, host arrays, that of the logits)
        self.submissions = ffi().new("caltrio_submission[]", 16)
        self.completions = ffi().new("caltrio_completion[]", 16)
        self.waiting = [], []  # reports that nobody has asked for yet: of submissions, of completions

    def buffers(self, kind=PREFILL):
        graph = MANIFEST.by_kind[kind]
        handle = self.library.caltrio_buffers_new(self.device, graph.exact_name.encode())
        assert handle != NULL
        hosts = {}
        for tensor in graph.tensors:
            host = np.zeros(tensor.byte_size // 2, np.uint16)
            out = tensor is graph.logits
            call = self.library.caltrio_map_output if out else self.library.caltrio_map_input
            memory = ffi().from_buffer(host)
            assert call(handle, tensor.name.encode(), memory, host.nbytes) == 0
            hosts[tensor.name] = host
        return handle, hosts

    def submit(self, token, past, tokens, *, kind=PREFILL, sequence=0):
        graph = MANIFEST.by_kind[kind]
        handle, hosts = self.buffers(kind)
        ints = {name: host.view(np.int32) for name, host in hosts.items()}
        ints[graph.tokens.name][: len(tokens)] = tokens
        ints[graph.position.name][: len(tokens)] = np.arange(past, past + len(tokens))
        for name, value in ((graph.csr_cur_seq, past), (graph.csr_total_seq, past + len(tokens))):
            assert self.csr(graph.exact_name, name, value) == 0
        self.library.caltrio_kv_apply(self.device, sequence, past + len(tokens))
        said = self.library.caltrio_submit(self.device, handle, token, -1, sequence)
        if said != 0:
            self.library.caltrio_buffers_free(handle)
        else:
            self.jobs[token] = handle, hosts, hosts[graph.logits.name]
        return said

    def csr(self, graph, name, value):
        return self.library.caltrio_set_csr(self.device, graph.encode(), name.encode(), value)

    def drain(self, timeout_s=20.0):
        """Reports, once there are some: ([(token, rc, withdrawn)], completions)."""
        fd = self.library.caltrio_event_fd(self.device)
        if not select.select([fd], [], [], timeout_s)[0]:
            return [], []
        counts = ffi().new("int32_t[2]")
        self.library.caltrio_drain(
            self.device, self.submissions, counts, self.completions, counts + 1, 16
        )
        told = [(s.token, s.rc, s.withdrawn) for s in self.submissions[0 : counts[0]]]
        done = []
        for raw in self.completions[0 : counts[1]]:
            copied = ffi().new("caltrio_completion *", raw)
            done.append(copied)
        return told, done

    def next(self, what):
        """The next report: of a submission (0) or a completion (1)."""
        while not self.waiting[what]:
            for kind, found in enumerate(self.drain()):
                self.waiting[kind].extend(found)
        return self.waiting[what].pop(0)

    def run(self, token, past, tokens, **more):
        """One job from end to end; its completion and its logits."""
        assert self.submit(token, past, tokens, **more) == 0
        done = self.next(1)
        assert done.token == token
        return done, self.jobs[token][2].copy()

    def close(self):
        self.library.caltrio_stop(self.device)
        while not self.library.caltrio_stopped(self.device):
            pass
        for handle, *_ in self.jobs.values():
            self.library.caltrio_buffers_free(handle)
        self.library.caltrio_free(self.device)


@pytest.fixture
def native(tmp_path):
    """Opens a device on a card; configured."""

    @contextmanager
    def native(timing=QUICK, semantics=None, *, configure=True, **facts):
        semantics = semantics or EngineSemantics()
        calbin = write_card(tmp_path, MANIFEST, timing, semantics, **facts)
        library = load(LIBRARIES / SHIM_ON_EMULATOR)
        code = ffi().new("int32_t *")
        device = library.caltrio_open(str(calbin).encode(), code)
        assert code[0] == 0
        made = Native(library, device)
        library.caltrio_limit(device, 1)
        if configure:
            assert library.caltrio_configure(device, 0) == 0
        try:
            yield made
        finally:
            made.close()

    return native


def reference(*history):
    return np.frombuffer(ReferenceSequence(VOCAB, history).logits(), np.uint16)


# --- what a job leaves --------------------------------------------------------------------------------


def test_a_job_from_end_to_end(native):
    with native() as card:
        done, logits = card.run(7, 0, [5, 6, 7])
        assert (done.token, done.rc, done.exception, done.output_bytes) == (7, 0, 0, 2 * VOCAB)
        assert done.infer_ns <= done.h2d_start_ns < done.d2h_end_ns <= done.waited_ns
        assert (logits == reference(5, 6, 7)).all()
        _, logits = card.run(8, 3, [9], kind=DECODE)
        assert (logits == reference(5, 6, 7, 9)).all()


@pytest.mark.parametrize("fault", ["wait code=13 at=1", "exception at=1"])
@pytest.mark.parametrize("after", KvAfterFailedWait)
def test_the_kv_after_a_failed_wait_is_what_the_hypothesis_says(native, after, fault):
    with native(semantics=EngineSemantics(kv_after_failed_wait=after), faults=[fault]) as card:
        card.run(0, 0, [5, 6, 7])
        done, _ = card.run(1, 3, [9], kind=DECODE)
        assert (done.rc, done.exception) in ((13, 0), (0, 1))
        card.library.caltrio_resume(card.device)
        _, logits = card.run(2, 4, [11], kind=DECODE)  # as if it had been applied
        applied = (logits == reference(5, 6, 7, 9, 11)).all()
        unchanged = (logits == reference(5, 6, 7, -1, 11)).all()  # nothing was written there
        assert (applied, unchanged) == {
            KvAfterFailedWait.APPLIED: (True, False),
            KvAfterFailedWait.UNCHANGED: (False, True),
            KvAfterFailedWait.UNKNOWN: (False, False),
        }[after]
        # Written again, it is right whatever was there.
        card.run(3, 3, [9], kind=DECODE)
        assert (card.run(4, 4, [11], kind=DECODE)[1] == reference(5, 6, 7, 9, 11)).all()


# --- the ring -----------------------------------------------------------------------------------------


def test_one_job_is_held_back_and_no_second(native):
    with native(SLOW) as card:
        assert card.submit(0, 0, [1]) == 0
        assert card.next(0) == (0, 0, 0)
        assert card.submit(1, 0, [2], sequence=1) == 0
        assert card.submit(2, 0, [3], sequence=2) == 17
        card.library.caltrio_withdraw(card.device, 99)  # not there: nothing happens
        card.library.caltrio_withdraw(card.device, 0)  # the card has it: nothing happens
        card.library.caltrio_withdraw(card.device, 1)
        assert card.next(0) == (1, 0, 1)
        assert card.submit(3, 0, [4], sequence=3) == 0
        order = []
        while len(order) < 3:
            told, done = card.drain()
            order += [("infer", token) for token, _, _ in told]
            order += [("wait", one.token) for one in done]
        assert order == [("wait", 0), ("infer", 3), ("wait", 3)] or order == [
            ("infer", 3), ("wait", 0), ("wait", 3),
        ]  # fmt: skip


def test_after_a_failure_nothing_is_submitted_until_it_was_looked_at(native):
    with native(faults=["wait code=28 at=0"]) as card:
        assert card.submit(0, 0, [1]) == 0
        assert card.next(0) == (0, 0, 0)
        assert card.submit(1, 0, [2], sequence=1) == 0
        assert card.next(1).rc == 28
        assert card.drain(0.05) == ([], [])
        card.library.caltrio_resume(card.device)
        assert card.next(0) == (1, 0, 0)


def test_a_refused_infer_frees_its_place(native):
    with native(faults=["infer code=17 at=0", "throw at=1"]) as card:
        for token, rc in ((0, 17), (1, 15), (2, 0)):
            assert card.submit(token, 0, [1]) == 0
            assert card.next(0) == (token, rc, 0)
        assert card.next(1).token == 2


def test_nothing_is_submitted_before_a_model_is_loaded(native):
    with native(configure=False) as card:
        assert card.library.caltrio_kv_can_allocate(card.device, 1) == 0
        assert card.library.caltrio_kv_apply(card.device, 0, 5) == 0
        card.library.caltrio_kv_release(card.device, 0)
        assert card.csr("no such graph", "x", 1) == 14
        assert card.library.caltrio_configure(card.device, 1) == 0
        assert card.library.caltrio_configure(card.device, 1) == 7
        assert card.run(0, 0, [1])[0].rc == 0


def test_a_reset_withdraws_what_is_held_back_and_ends_what_is_not(native):
    semantics = EngineSemantics(reset_scope="device")
    with native(SLOW, semantics, reset_ns=MS) as card:
        assert card.submit(0, 0, [1]) == 0
        assert card.next(0) == (0, 0, 0)
        assert card.submit(1, 0, [2], sequence=1) == 0
        assert card.library.caltrio_reset(card.device, 5 * 10**9) == 0
        told, done = card.drain()
        assert told == [(1, 0, 1)]
        assert [(one.token, one.rc) for one in done] == [(0, 18)]
        for handle, *_ in card.jobs.values():
            card.library.caltrio_buffers_free(handle)
        card.jobs.clear()
        assert card.library.caltrio_kv_can_allocate(card.device, 1) == 0  # no manager any more
        assert card.library.caltrio_configure(card.device, 0) == 0
        _, logits = card.run(2, 0, [5, 6])
        assert (logits == reference(5, 6)).all()


def test_after_the_end_no_job_is_taken(native):
    with native() as card:
        card.library.caltrio_stop(card.device)
        assert card.submit(0, 0, [1]) == 18


# --- questions with no answer -------------------------------------------------------------------------


def test_indices_and_names_that_there_are_not(native):
    with native() as card:
        library, device = card.library, card.device
        raw = ffi().new("caltrio_tensor *")
        key, value = ffi().new("char **"), ffi().new("char **")
        count = library.caltrio_model_count(device)
        assert count == len(MANIFEST.submodels)
        for model in (-1, count):
            assert library.caltrio_model_name(device, model) == NULL
            assert library.caltrio_model_tensors(device, model) <= 0
            assert library.caltrio_model_tensor(device, model, 0, raw) != 0
            assert library.caltrio_model_metadata(device, model, 0, key, value) != 0
        for index in (-1, 3):
            assert library.caltrio_model_tensor(device, 0, index, raw) != 0
            assert library.caltrio_model_metadata(device, 0, index, key, value) != 0
        handle, hosts = card.buffers()
        graph = MANIFEST.by_kind[PREFILL]
        assert library.caltrio_buffers_tensor(handle, b"nothing", raw) != 0
        host = ffi().from_buffer(np.zeros(8, np.uint16))
        assert library.caltrio_map_input(handle, b"nothing", host, 16) == 24
        assert library.caltrio_map_input(handle, graph.logits.name.encode(), host, 16) == 29
        assert library.caltrio_map_output(handle, graph.tokens.name.encode(), host, 16) == 29
        assert library.caltrio_map_output(handle, graph.logits.name.encode(), host, 16) == 24
        whole = graph.tokens.byte_size
        name = graph.tokens.name.encode()
        for offset, size in (
            (0, whole + 1),
            (whole, 1),
            (whole + 1, 0),
            (4, 2**64 - 4),
            (2**64 - 1, 2),
        ):
            assert library.caltrio_slice(handle, name, offset, size) == 14
        assert library.caltrio_slice(handle, name, 4, whole - 4) == 0
        assert library.caltrio_slice(handle, b"nothing", 0, 0) == 14
        assert library.caltrio_undo_slices(handle) == 0
        library.caltrio_buffers_free(handle)
        assert hosts


def test_a_card_with_little_kv(native):
    with native(kv_tokens=10) as card:
        library, device = card.library, card.device
        assert library.caltrio_kv_can_allocate(device, 10) == 1
        assert library.caltrio_kv_can_allocate(device, 11) == 0
        assert library.caltrio_kv_apply(device, 0, 6) == 1
        assert library.caltrio_kv_apply(device, 1, 5) == 0
        assert library.caltrio_kv_apply(device, 1, 4) == 1
        assert library.caltrio_kv_apply(device, 0, 6) == 1  # no more than it has
        assert library.caltrio_kv_apply(device, 0, 7) == 0
        library.caltrio_kv_release(device, 1)
        assert library.caltrio_kv_apply(device, 0, 10) == 1
        assert library.caltrio_kv_can_allocate(device, 1) == 0
