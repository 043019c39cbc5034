"""The synchronous entry, from real threads. Nothing here is timed; whatever waits is bounded."""

import itertools
import logging
import pickle
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
from attrs import evolve
from support import profile

from caltrio import compat
from caltrio.compat import RETURN_CODES, Batch, ReturnCode, SyncExecutor, return_code
from caltrio.config import ExecutorConfig
from caltrio.core.request import Outcome
from caltrio.device import DeviceKind, DeviceOptions, device_kind
from caltrio.errors import (
    ArtifactError,
    DeadlineExceeded,
    DeviceFailed,
    DeviceUnknown,
    EmptyJob,
    InputError,
    InputMismatch,
    InvalidArgument,
    JobCancelled,
    Phase,
    ResourceExhausted,
    SequenceTooLong,
    SequenceUnknown,
    ServiceFailed,
    Unavailable,
    Unsupported,
)
from caltrio.events import JobEnded, RequestEnded
from caltrio.manifest import ManifestMismatch, load_manifest
from caltrio.semantics import EngineSemantics
from caltrio.testing import FakeDevice
from caltrio.tokens import generate

VOCAB = load_manifest().submodels[0].logits.shape[-1]
OPTIONS = DeviceOptions(EngineSemantics(), profile(submit=10, compute=1000, post=10))
WAIT_S = 60  # a bound, never reached
MS = 1_000_000


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread.name for thread in left]


class Scripted(FakeDevice):
    """A fake whose ``infer()``, or whose ``Wait()``, holds back the jobs in ``gated`` until told.

    ``arrived`` is set once such a job is there. Both are the test's, of its threads.
    """

    def __init__(self, *, gate_submit=(), gate_wait=(), models=None, **script):
        super().__init__(**{"busy_ns": 1000, **script})
        self.gate_submit, self.gate_wait = set(gate_submit), set(gate_wait)
        self.arrived, self.opened = threading.Event(), threading.Event()
        self._models = models

    def models(self):
        return super().models() if self._models is None else self._models()

    async def _pass(self, job_id, gated):
        if job_id in gated:
            self.arrived.set()
            while not self.opened.is_set():
                await trio.sleep(1e-4)

    async def infer(self, job):
        await self._pass(job.job_id, self.gate_submit)
        return await super().infer(job)

    async def wait(self):
        done = await super().wait()
        await self._pass(done.job.job_id, self.gate_wait)
        return done


def kind_of(device):
    """A kind in real time that opens ``device``."""

    def run(main, options):
        assert options.outside, "virtual time would not wait for the callers"

        @asynccontextmanager
        async def opened():
            yield device

        return trio.run(main, opened)

    return DeviceKind("scripted", "for a test", "real", lambda: None, run)


def host(device=None, *, kind=None, context_tokens=64, listeners=(), warm_up=None, **limits):
    return SyncExecutor(
        kind or kind_of(device or Scripted()),
        OPTIONS,
        ExecutorConfig(**limits),
        context_tokens=context_tokens,
        listeners=listeners,
        warm_up=warm_up,
    )


def in_thread(function, *args):
    """A future for ``function``, in a thread that ends with it."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args)
    pool.shutdown(wait=False)
    return future


def until(condition):
    """Wait for what another thread does; bounded."""
    nothing = threading.Event()
    for _ in range(WAIT_S * 1000):
        if condition():
            return
        nothing.wait(0.001)
    raise AssertionError("it never came")


def kv_tokens(executor):
    return executor._executor.core.kv.reserved_tokens


def greedy(executor, prompt, count, seq_id, *, explicit=False):
    """As a host of llama.cpp does it."""
    out = np.empty(VOCAB, np.float32) if explicit else None
    tokens, given = [], list(prompt)
    at = 0
    while True:
        positions = range(at, at + len(given)) if explicit else None
        positions = None if positions is None else list(positions)
        result = executor.decode_sync(Batch(given, positions, seq_id, out))
        assert result.logits.shape == (VOCAB,)
        if explicit:
            assert result.logits is out
        tokens.append(int(result.logits.argmax()))
        at += len(given)
        given = [tokens[-1]]
        if len(tokens) == count:
            return tokens


# --- the results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fake", "sim"])
@pytest.mark.parametrize("explicit", [False, True])
def test_greedy_tokens_are_the_references(name, explicit):
    prompt = [11, 7, 5, 3, 2]
    with host(kind=name) as executor:
        assert greedy(executor, prompt, 8, 3, explicit=explicit) == generate(VOCAB, prompt, 8)
        assert executor.seq_rm(3)
        again = [9, 9, 1]  # the same id, anew
        assert greedy(executor, again, 4, 3, explicit=explicit) == generate(VOCAB, again, 4)


@pytest.mark.parametrize("name", ["fake", "sim"])
def test_several_threads_each_with_its_sequence(name):
    prompts = {seq_id: [seq_id + 1, 2 * seq_id, 17] for seq_id in range(6)}
    # Fewer may be active than there are: the others wait until one is removed.
    with host(kind=name, max_active_sequences=3, max_inflight=2) as executor:

        def one(seq_id):
            tokens = greedy(executor, prompts[seq_id], 6, seq_id, explicit=bool(seq_id % 2))
            assert executor.seq_rm(seq_id)
            return tokens

        with ThreadPoolExecutor(len(prompts)) as pool:
            got = dict(zip(prompts, pool.map(one, prompts, timeout=WAIT_S), strict=True))
        assert kv_tokens(executor) == 0
    assert got == {seq_id: generate(VOCAB, prompt, 6) for seq_id, prompt in prompts.items()}


def test_a_later_batch_of_several_tokens_is_a_prefill():
    ended = []
    with host(listeners=[ended.append]) as executor:
        executor.decode_sync(Batch([1, 2]))
        executor.decode_sync(Batch([3, 4, 5], [2, 3, 4]))
        result = executor.decode_sync(Batch(np.array([6]), np.array([5])))
    assert result.logits.argmax() == generate(VOCAB, [1, 2, 3, 4, 5, 6], 1)[0]
    jobs = [event.job for event in ended if isinstance(event, JobEnded)]
    assert [(job.kind.name, job.token_count) for job in jobs] == [
        ("PREFILL_IDS", 2),
        ("PREFILL_IDS", 3),
        ("DECODE", 1),
    ]


def test_a_part_of_the_vocabulary():
    with host() as executor:
        whole = executor.decode_sync(Batch([4, 2], seq_id=0)).logits
        part = np.zeros(10, np.float32)
        result = executor.decode_sync(Batch([4, 2], None, 1, part, 100))
    assert result.logits is part
    assert (part == whole[100:110]).all()


def test_the_logits_of_a_sequence_are_its_own():
    with host() as executor:
        one = executor.decode_sync(Batch([1], seq_id=0)).logits
        kept = one.copy()
        executor.decode_sync(Batch([2], seq_id=1))
        assert (one == kept).all()


# --- sequences --------------------------------------------------------------------------------------


def test_seq_rm_frees_the_kv():
    with host(kv_capacity_tokens=100) as executor:
        executor.decode_sync(Batch([1, 2]))
        assert kv_tokens(executor) == 64  # context_tokens: the last token produced takes none
        assert executor.seq_rm(0) is True
        assert kv_tokens(executor) == 0
        assert executor.seq_rm(0) is False
        assert executor.seq_rm(-1) is False
        executor.decode_sync(Batch([1, 2]))


def test_seq_rm_while_a_job_runs_frees_the_kv_after_it():
    device = Scripted(gate_wait={0})
    with host(device) as executor:
        call = in_thread(executor.decode_sync, Batch([1, 2]))
        assert device.arrived.wait(WAIT_S)
        assert executor.seq_rm(0)
        assert kv_tokens(executor) == 64  # the device still writes there
        device.opened.set()
        assert call.result(WAIT_S).logits.argmax() == generate(VOCAB, [1, 2], 1)[0]
        assert kv_tokens(executor) == 0
        assert not executor.seq_rm(0)


def test_seq_rm_of_a_sequence_that_waits_for_kv():
    with host(max_active_sequences=1) as executor:
        executor.decode_sync(Batch([1], seq_id=0))
        call = in_thread(executor.decode_sync, Batch([1], seq_id=1))
        until(lambda: executor._executor.core.waiting)
        with pytest.raises(InvalidArgument, match="under way"):
            executor.decode_sync(Batch([1], seq_id=1))
        assert executor.seq_rm(1)
        with pytest.raises(JobCancelled):
            call.result(WAIT_S)
        assert not executor._executor.core.waiting
        assert executor.seq_rm(0)
        executor.decode_sync(Batch([1], seq_id=1))


def test_an_open_sequence_is_not_begun_anew():
    with host() as executor:
        executor.decode_sync(Batch([1, 2], [0, 1], 5))
        with pytest.raises(InvalidArgument, match=r"call seq_rm\(5\) first"):
            executor.decode_sync(Batch([1, 2], [0, 1], 5))
        assert executor.calrt_decode(Batch([1], [0], 5)) == -1
        executor.decode_sync(Batch([3], [2], 5))  # as if nothing had been
        executor.seq_rm(5)
        executor.decode_sync(Batch([1, 2], [0, 1], 5))


@pytest.mark.parametrize("tokens", [[3], [3, 4]])
def test_positions_must_follow_on(tokens):
    with host() as executor:
        executor.decode_sync(Batch([1, 2]))
        for first in (1, 3):
            with pytest.raises(InputMismatch, match="do not run on"):
                executor.decode_sync(Batch(tokens, list(range(first, first + len(tokens)))))
        executor.decode_sync(Batch(tokens, list(range(2, 2 + len(tokens)))))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("positions", [None, [0]])
def test_one_batch_of_a_sequence_at_a_time(first, positions):
    device = Scripted(gate_wait={0 if first else 1})
    with host(device) as executor:
        if not first:
            executor.decode_sync(Batch([1]))
        call = in_thread(executor.decode_sync, Batch([2]))
        assert device.arrived.wait(WAIT_S)
        with pytest.raises(InvalidArgument, match="has job . under way"):
            executor.decode_sync(Batch([3], positions))
        device.opened.set()
        call.result(WAIT_S)
        executor.decode_sync(Batch([3]))


def test_a_first_batch_that_fails_opens_nothing():
    with host(Scripted(submit_codes={0: 14}), kv_capacity_tokens=64) as executor:
        with pytest.raises(InputMismatch):
            executor.decode_sync(Batch([1, 2], [1, 2]))
        with pytest.raises(InputMismatch):
            executor.decode_sync(Batch([VOCAB]))
        with pytest.raises(InvalidArgument, match="14"):
            executor.decode_sync(Batch([1, 2]))
        assert kv_tokens(executor) == 0
        assert not executor.seq_rm(0)
        executor.decode_sync(Batch([1, 2], [0, 1]))


def test_a_later_batch_that_fails_leaves_it_open():
    with host(Scripted(wait_codes={1: 21})) as executor:
        executor.decode_sync(Batch([1, 2]))
        with pytest.raises(ArtifactError):
            executor.decode_sync(Batch([3]))
        for _ in range(2):
            with pytest.raises(SequenceUnknown):
                executor.decode_sync(Batch([3], [2]))
        assert executor.seq_rm(0)


def test_as_many_positions_as_context_tokens():
    with host(context_tokens=4) as executor:
        executor.decode_sync(Batch([1, 2, 3]))
        executor.decode_sync(Batch([4]))
        with pytest.raises(SequenceTooLong):
            executor.decode_sync(Batch([5]))
        executor.decode_sync(Batch([1, 2, 3, 4], seq_id=1))
        with pytest.raises(SequenceTooLong, match="context_tokens"):
            executor.decode_sync(Batch([1, 2, 3, 4, 5], seq_id=2))


# --- errors and return codes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ResourceExhausted("x"), 1),
        (DeadlineExceeded("x", Phase.ADMISSION), 1),
        (DeadlineExceeded("x", Phase.QUEUE), 2),
        (JobCancelled("x"), 2),
        (InvalidArgument("x"), -1),
        (SequenceTooLong("x"), -1),
        (InputMismatch("x"), -1),
        (EmptyJob("x"), -1),
        (Unavailable("x"), -2),
        (DeadlineExceeded("x", Phase.EXECUTE), -3),
        (DeadlineExceeded("x", Phase.SUBMIT, 13), -3),
        (DeviceFailed("x"), -3),
        (DeviceUnknown("x"), -3),
        (ServiceFailed("x"), -3),
        (ValueError("x"), -3),
        (SequenceUnknown("x"), -4),
        (Unsupported("x"), -4),
    ],
)
def test_return_codes(error, code):
    assert return_code(error) == code


def test_the_table_covers_everything_once():
    rows = [row[:2] for row in RETURN_CODES]
    assert len(set(rows)) == len(rows)
    assert RETURN_CODES[-1][0] is Exception
    assert {row[2] for row in RETURN_CODES} == set(ReturnCode) - {ReturnCode.OK}


def only_line(caplog):
    (record,) = [record for record in caplog.records if record.name == "caltrio.compat"]
    caplog.clear()
    return record


@pytest.mark.parametrize(
    ("script", "calrt", "phase", "code", "kind"),
    [
        ({"submit_codes": {1: 1}}, 1, "submit", 1, ResourceExhausted),
        ({"submit_codes": {1: 14}}, 14, "submit", -1, InvalidArgument),
        ({"submit_codes": {1: 17}}, 17, "submit", -2, Unavailable),
        ({"wait_codes": {1: 18}}, 18, "execute", -2, Unavailable),
        ({"submit_codes": {1: 13}}, 13, "submit", -3, DeadlineExceeded),
        ({"wait_codes": {1: 22}}, 22, "execute", -3, ArtifactError),
        ({"wait_codes": {1: 28}}, 28, "execute", -3, DeviceFailed),
        ({"wait_codes": {1: 99}}, 99, "execute", -3, DeviceUnknown),
        ({"exceptions": {1}}, 0, "execute", -3, DeviceFailed),
        ({"submit_codes": {1: 27}}, 27, "submit", -4, Unsupported),
    ],
)
def test_what_the_device_says(caplog, script, calrt, phase, code, kind):
    with host(Scripted(**script)) as executor:
        assert executor.calrt_decode(Batch([1, 2], None, 41)) == 0
        assert not caplog.records
        assert executor.calrt_decode(Batch([3], None, 41)) == code
    line = only_line(caplog)
    assert line.levelno == (logging.WARNING if code > 0 else logging.ERROR)
    text = line.getMessage()
    assert "\n" not in text
    for fact in ("job_id=1", "seq_id=41", "generation=1", f"code={calrt}", f"phase='{phase}'"):
        assert fact in text
    assert f"returned {code} " in text
    assert kind.__name__ in text
    assert ("DONE_CCU_EXCEPTION" if calrt == 0 else f"returned {calrt}") in text  # the message


def test_the_error_itself(caplog):
    ended = []
    with host(Scripted(wait_codes={0: 22}), listeners=[ended.append]) as executor:
        with pytest.raises(ArtifactError) as caught:
            executor.decode_sync(Batch([1, 2], None, 41))
    error = caught.value
    (theirs,) = [event.job.error for event in ended if isinstance(event, JobEnded)]
    assert error is not theirs, "one exception would be raised in several threads"
    assert error.args == theirs.args
    assert (error.code, error.phase, error.job_id, error.generation_id) == (22, "execute", 0, 1)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ArtifactError
    assert again.args == error.args
    assert not caplog.records


def test_no_kv_slot(caplog):
    with host(max_active_sequences=1, max_queue=0) as executor:
        assert executor.calrt_decode(Batch([1], None, 0)) == 0
        assert executor.calrt_decode(Batch([1], None, 1)) == 1
        line = only_line(caplog).getMessage()
        assert "seq_id=1" in line
        assert "job_id=-1" in line
        assert "generation=1" in line
        executor.seq_rm(0)
        assert executor.calrt_decode(Batch([1], None, 1)) == 0


@pytest.mark.parametrize("name", ["fake", "sim"])
def test_the_admission_deadline(name, caplog):
    with host(kind=name, kv_capacity_tokens=100, admission_timeout_ns=20 * MS) as executor:
        assert executor.calrt_decode(Batch([1], None, 0)) == 0
        assert executor.calrt_decode(Batch([1], None, 1)) == 1
        assert "DeadlineExceeded" in only_line(caplog).getMessage()
        assert not executor.seq_rm(1)


def test_the_queue_deadline(caplog):
    device = Scripted(gate_submit={0})
    with host(device, queue_timeout_ns=MS) as executor:
        assert executor.calrt_decode(Batch([1])) == 2
        assert "phase='queue'" in only_line(caplog).getMessage()
        device.opened.set()


def test_the_execution_deadline(caplog):
    device = Scripted(lost={0})
    with host(device, execution_timeout_ns=MS, grace_ns=MS) as executor:
        assert executor.calrt_decode(Batch([1])) == -3
        assert "phase='execute'" in only_line(caplog).getMessage()
        until(lambda: executor._executor.core.lifecycle.value == "failed")
        assert executor.calrt_decode(Batch([1])) == -2
        with pytest.raises(ServiceFailed) as caught:
            executor.check()
        assert caught.value.exit_code == 75
    with pytest.raises(ServiceFailed):
        executor.check()


def test_a_sequence_whose_kv_is_unknown():
    with host(Scripted(wait_codes={1: 22})) as executor:
        assert [executor.calrt_decode(Batch([1])) for _ in range(3)] == [0, -3, -4]


@pytest.mark.parametrize(
    "batch",
    [
        None,
        [1, 2],
        Batch([]),
        Batch(3),
        Batch("text"),
        Batch([[1, 2], [3]]),
        Batch([[1, 2], [3, 4]]),
        Batch([1.5]),
        Batch([2**70]),
        Batch([2**31]),
        Batch([-1]),
        Batch([VOCAB]),
        Batch([None]),
        Batch([1, 2], [0]),
        Batch([1, 2], [0, 2]),
        Batch([1, 2], [1, 2]),
        Batch([1, 2], [0.0, 1.0]),
        Batch([1, 2], 0),
        Batch([1], seq_id=-1),
        Batch([1], seq_id="one"),
        Batch([1], seq_id=[0, 1]),
        Batch([1], None, 0, [0.0] * 10),
        Batch([1], None, 0, np.empty(10)),
        Batch([1], None, 0, np.empty((2, 5), np.float32)),
        Batch([1], None, 0, np.empty(10, np.float32), VOCAB),
        Batch([1], None, 0, np.empty(10, np.float32), "0"),
        Batch([1] * 65),
    ],
    ids=str,
)
def test_malformed_batches(batch, caplog):
    with host() as executor:
        assert executor.calrt_decode(batch) == -1
        assert "phase=" in only_line(caplog).getMessage()
        with pytest.raises(InvalidArgument):
            executor.decode_sync(batch)
        assert kv_tokens(executor) == 0
        assert executor.calrt_decode(Batch([1, 2])) == 0


def test_a_seq_id_that_is_no_number():
    with host() as executor, pytest.raises(InvalidArgument, match="seq_id"):
        executor.seq_rm("one")


@pytest.mark.parametrize("name", ["cp", "keep", "add", "div"])
def test_operations_on_sequences_that_there_are_not(name):
    with host() as executor:
        executor.decode_sync(Batch([1]))
        with pytest.raises(Unsupported, match=f"seq_{name} is not supported"):
            getattr(executor, f"seq_{name}")(0, 1, 0, 5)
        executor.decode_sync(Batch([2]))


@pytest.mark.parametrize("name", ["get_size", "get_data", "set_data"])
def test_no_saved_state(name):
    with host() as executor:
        with pytest.raises(Unsupported, match=f"state_{name} is not supported"):
            getattr(executor, f"state_{name}")()


def test_a_defect_of_a_listener_is_no_crash_of_the_caller(caplog):
    """It ends the executor, which says so to everybody from then on."""

    def listener(event):
        if isinstance(event, RequestEnded) and event.request.outcome is Outcome.REFUSED:
            raise ZeroDivisionError("a listener's own fault")

    with host(max_queue=0, max_active_sequences=1, listeners=[listener]) as executor:
        assert executor.calrt_decode(Batch([1], seq_id=0)) == 0
        assert executor.calrt_decode(Batch([1], seq_id=1)) in (1, -2)  # it may be over by then
        until(lambda: executor._ended)
        caplog.clear()
        assert executor.calrt_decode(Batch([2], seq_id=0)) == -2
        assert "a listener's own fault" in only_line(caplog).getMessage()


# --- the end ----------------------------------------------------------------------------------------


def test_close_drains_the_call_that_is_on_the_device():
    device = Scripted(gate_wait={0})
    executor = host(device)
    call = in_thread(executor.decode_sync, Batch([1, 2]))
    assert device.arrived.wait(WAIT_S)
    with pytest.raises(TimeoutError, match="drains"):
        executor.close(0.01)
    with pytest.raises(Unavailable):
        executor.decode_sync(Batch([1], seq_id=1))
    device.opened.set()
    executor.close(WAIT_S)
    assert call.result(WAIT_S).logits.argmax() == generate(VOCAB, [1, 2], 1)[0]
    executor.check()


def test_close_cancels_what_waits():
    device = Scripted(gate_wait={0})
    executor = host(device, max_active_sequences=2)
    calls = {0: in_thread(executor.decode_sync, Batch([1], seq_id=0))}
    assert device.arrived.wait(WAIT_S)
    calls[1] = in_thread(executor.decode_sync, Batch([1], seq_id=1))  # for the permit
    core = executor._executor.core
    until(lambda: len(core.open) == 2 and all(request.job for request in core.open.values()))
    calls[2] = in_thread(executor.calrt_decode, Batch([1], seq_id=2))  # for a sequence
    until(lambda: core.waiting)
    closer = in_thread(executor.close)
    with pytest.raises(JobCancelled):
        calls[1].result(WAIT_S)
    assert calls[2].result(WAIT_S) == 2
    device.opened.set()
    closer.result(WAIT_S)
    assert calls[0].result(WAIT_S)
    assert device.inferred == [0]


@pytest.mark.parametrize("lost", ["lost", "gate_submit"])
def test_close_is_bounded_by_the_grace(lost):
    device = Scripted(**{lost: {0}})
    executor = host(device, grace_ns=20 * MS)
    call = in_thread(executor.decode_sync, Batch([1]))
    until(lambda: executor._executor.core.in_flight)
    executor.close()
    with pytest.raises(JobCancelled) as caught:
        call.result(WAIT_S)
    assert caught.value.job_id == 0
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_after_close(caplog):
    executor = host()
    executor.decode_sync(Batch([1]))
    executor.close()
    executor.close()
    executor.close(timeout_s=0)
    with pytest.raises(Unavailable, match="closed"):
        executor.decode_sync(Batch([2]))
    with pytest.raises(Unavailable):
        executor.seq_rm(0)
    assert executor.calrt_decode(Batch([2])) == -2
    assert only_line(caplog).levelno == logging.ERROR
    with pytest.raises(Unsupported):
        executor.seq_cp(0, 1)
    executor.check()


def test_close_from_several_threads():
    executor = host()
    executor.decode_sync(Batch([1]))
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(executor.close) for _ in range(8)]:
            future.result(WAIT_S)


def test_calls_race_the_close():
    for _ in range(20):
        executor = host(kind="sim")
        go = threading.Barrier(5)

        def call(seq_id, executor=executor, go=go):
            go.wait(WAIT_S)
            codes = []
            while not codes or codes[-1] == 0:
                codes.append(executor.calrt_decode(Batch([1], seq_id=seq_id)))
            return codes[-1]

        calls = [in_thread(call, seq_id) for seq_id in range(4)]
        go.wait(WAIT_S)
        executor.close()
        # -1: it got to its context_tokens first.
        assert {future.result(WAIT_S) for future in calls} <= {2, -2, -1}


def test_close_and_calls_from_the_executors_own_thread():
    seen = []

    def listener(event):
        if isinstance(event, JobEnded):
            with pytest.raises(InvalidArgument, match="own thread"):
                executor.seq_rm(0)
            executor.close()
            seen.append(event)

    executor = host(listeners=[listener])
    executor.decode_sync(Batch([1]))
    executor.close()
    assert len(seen) == 1


class Dies(Scripted):
    async def wait(self):
        await super().wait()
        raise OSError("the runtime is gone")


def test_the_loop_dies(caplog):
    executor = host(Dies())
    with pytest.raises((Unavailable, JobCancelled)):
        executor.decode_sync(Batch([1]))
    executor._thread.join(WAIT_S)
    with pytest.raises(Unavailable, match="the runtime is gone"):
        executor.decode_sync(Batch([1]))
    with pytest.raises(ServiceFailed):
        executor.check()
    assert caplog.records[0].levelno == logging.CRITICAL
    executor.close()
    executor.close()


def test_a_call_that_the_loop_never_saw():
    """Whatever happens to the loop, nobody waits for it for ever."""
    executor = host()
    executor._begin = lambda _call: None  # as if the loop had ended just before
    call = in_thread(executor.decode_sync, Batch([1]))
    until(lambda: executor._pending)
    executor.close()
    with pytest.raises(Unavailable):
        call.result(WAIT_S)


# --- the start --------------------------------------------------------------------------------------


def test_a_model_that_differs():
    def models():
        first, *others = FakeDevice().models()
        return [evolve(first, name="another"), *others]

    with pytest.raises(ManifestMismatch, match="another"):
        host(Scripted(models=models))


def test_a_golden_run_that_is_wrong():
    async def warm_up(_executor):
        return "token 3 is 5, not 4"

    with pytest.raises(ServiceFailed, match="token 3 is 5"):
        host(warm_up=warm_up)


def test_a_golden_run_that_is_right():
    async def warm_up(executor):
        async with executor.sequence(2, 1, warmup=True) as sequence:
            result = await sequence.prefill([1, 2])
        right = generate(VOCAB, [1, 2], 1)[0]
        return None if result.logits.argmax() == right else "wrong"

    with host(warm_up=warm_up) as executor:
        executor.decode_sync(Batch([1]))


def test_limits_that_cannot_work():
    with pytest.raises(ValueError, match="in flight"):
        host(kind="sim", max_inflight=3)
    for tokens in (0, load_manifest().max_seq + 1):
        with pytest.raises(ValueError, match="context_tokens"):
            host(context_tokens=tokens)


def test_a_device_that_is_not_there():
    with pytest.raises(InputError, match="unknown"):
        host(kind="card")
    with pytest.raises(InputError, match="no driver"):
        host(kind=evolve(device_kind("fake"), unavailable=lambda: "no driver"))


def test_a_device_that_cannot_be_opened():
    def run(main, options):
        @asynccontextmanager
        async def opened():
            raise InputError("device", "", "no card")
            yield

        return trio.run(main, opened)

    with pytest.raises(InputError, match="no card"):
        host(kind=evolve(kind_of(None), run=run))


# --- interrupts -------------------------------------------------------------------------------------


def interrupt():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.fixture
def default_interrupt():
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


def interrupt_when(condition):
    def act():
        until(condition)
        interrupt()

    return in_thread(act)


def test_an_interrupt_cancels_the_job(default_interrupt):
    device, ended = Scripted(gate_wait={1}), []
    with host(device, listeners=[ended.append]) as executor:
        executor.decode_sync(Batch([1], seq_id=0))
        out = np.full(VOCAB, -1, np.float32)
        sender = interrupt_when(device.arrived.is_set)
        with pytest.raises(KeyboardInterrupt):
            executor.decode_sync(Batch([2], None, 0, out))
        sender.result(WAIT_S)
        request = next(iter(executor._executor.core.open.values()))
        assert request.job.cancel_requested
        device.opened.set()
        executor.decode_sync(Batch([7], seq_id=1))  # the executor is whole
        assert (out == -1).all()
        # What was on the device ran to its end.
        result = executor.decode_sync(Batch([3], [2], 0))
        assert result.logits.argmax() == generate(VOCAB, [1, 2, 3], 1)[0]
    jobs = {event.job.job_id: event.job for event in ended if isinstance(event, JobEnded)}
    assert isinstance(jobs[1].error, JobCancelled)


def test_an_interrupt_while_waiting_for_kv(default_interrupt):
    with host(max_active_sequences=1) as executor:
        executor.decode_sync(Batch([1], seq_id=0))
        core = executor._executor.core
        sender = interrupt_when(lambda: core.waiting)
        with pytest.raises(KeyboardInterrupt):
            executor.calrt_decode(Batch([1], seq_id=1))
        sender.result(WAIT_S)
        assert not core.waiting
        assert not executor.seq_rm(1)
        executor.decode_sync(Batch([2], seq_id=0))


def test_an_interrupt_of_the_start(default_interrupt):
    warming = threading.Event()

    async def warm_up(_executor):
        warming.set()
        await trio.sleep_forever()

    sender = interrupt_when(warming.is_set)
    with pytest.raises(KeyboardInterrupt):
        host(warm_up=warm_up)
    sender.result(WAIT_S)


def test_a_signal_handler_may_close():
    device = Scripted(lost={0})
    executor = host(device, grace_ns=20 * MS)
    old = signal.signal(signal.SIGINT, lambda *_: executor.close())
    try:
        sender = interrupt_when(lambda: executor._executor.core.in_flight)
        with pytest.raises(JobCancelled):
            executor.decode_sync(Batch([1]))
        sender.result(WAIT_S)
    finally:
        signal.signal(signal.SIGINT, old)


class InterruptAt:
    """An interrupt before the ``count``-th instruction that this thread runs in ``caltrio.compat``."""

    def __init__(self, count):
        self.left = count

    def __enter__(self):
        self._old = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_error):
        sys.settrace(self._old)

    def _trace(self, frame, event, _arg):
        if frame.f_code.co_filename != compat.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if self.left == 0:
                self.left = -1
                raise KeyboardInterrupt
            self.left -= 1
        return self._trace


@pytest.mark.parametrize("what", ["decode_sync", "seq_rm"])
def test_an_interrupt_before_any_instruction(what):
    """Wherever a call is interrupted: the executor is whole, and nobody waits for ever."""
    with host(max_active_sequences=2) as executor:
        core = executor._executor.core
        for count in itertools.count():
            if what == "seq_rm":
                executor.decode_sync(Batch([1, 2]))
            interrupt = InterruptAt(count)
            try:
                with interrupt:
                    if what == "seq_rm":
                        executor.seq_rm(0)
                    else:
                        executor.decode_sync(Batch([1, 2]))
            except KeyboardInterrupt:
                pass
            else:
                assert interrupt.left >= 0, "the interrupt was swallowed"
                break
            executor.seq_rm(0)
            until(lambda: not core.open)
            assert not executor._pending
        assert count > 100, "it interrupted nothing"
        executor.seq_rm(0)
        assert greedy(executor, [3, 1], 3, 0) == generate(VOCAB, [3, 1], 3)
