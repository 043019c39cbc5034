"""The synchronous entry for callers without trio (specification §3, §6.1).

A host in the manner of llama.cpp calls :meth:`SyncExecutor.decode_sync` for results and typed
errors, or :meth:`SyncExecutor.calrt_decode` for a return code. :data:`RETURN_CODES` says which:

====  =====================================================================================
code  meaning
====  =====================================================================================
0     done; the logits are in ``Batch.out``, if it gave one
1     no KV slot: ``ResourceExhausted``, or the admission deadline passed
2     aborted: ``JobCancelled``, or the queue deadline passed
-1    the batch is invalid: ``InvalidArgument`` and its subclasses
-2    fatal: ``Unavailable``, the executor takes no work
-3    fatal: the device failed, the execution deadline passed, or anything else went wrong
-4    fatal: ``SequenceUnknown``, ``Unsupported``
====  =====================================================================================

A sequence whose first batch did not end in 0 is not open, as before the call. After a later batch
that did not, call ``seq_rm`` unless the batch was invalid.
"""

from __future__ import annotations

import atexit
import copy
import logging
import operator
import threading
from collections.abc import Awaitable, Callable, Iterable
from enum import IntEnum
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

import numpy as np
import trio
from attrs import evolve, frozen
from numpy.typing import ArrayLike, NDArray

from .config import ExecutorConfig
from .device import DeviceKind, DeviceOptions, OpenDevice, device_kind
from .errors import (
    DeadlineExceeded,
    EmptyJob,
    InputError,
    InputMismatch,
    InvalidArgument,
    JobCancelled,
    Phase,
    RequestError,
    ResourceExhausted,
    SequenceTooLong,
    SequenceUnknown,
    ServiceFailed,
    Unavailable,
    Unsupported,
)
from .events import Listener
from .executor import Executor, InferenceResult, Sequence, WarmUp, open_executor
from .units import NS_PER_S

T = TypeVar("T")

_log = logging.getLogger("caltrio.compat")

_CLOSE_MARGIN_S = 10.0  # for the end of the loop, after the grace time of the drain
_LAST_CALLS_S = 1.0  # for callers whose answer is there already; nothing waits for the device then


class ReturnCode(IntEnum):
    """What :meth:`SyncExecutor.calrt_decode` returns, in the sense of ``llama_decode()``."""

    OK = 0
    NO_KV_SLOT = 1
    ABORTED = 2
    INVALID = -1
    UNAVAILABLE = -2
    FAILED = -3
    NOT_POSSIBLE = -4


# (class of error, its phase if that matters, code): the first row that fits decides.
RETURN_CODES: tuple[tuple[type[Exception], str | None, ReturnCode], ...] = (
    (ResourceExhausted, None, ReturnCode.NO_KV_SLOT),
    (DeadlineExceeded, Phase.ADMISSION, ReturnCode.NO_KV_SLOT),
    (DeadlineExceeded, Phase.QUEUE, ReturnCode.ABORTED),
    (JobCancelled, None, ReturnCode.ABORTED),
    (InvalidArgument, None, ReturnCode.INVALID),
    (Unavailable, None, ReturnCode.UNAVAILABLE),
    (SequenceUnknown, None, ReturnCode.NOT_POSSIBLE),
    (Unsupported, None, ReturnCode.NOT_POSSIBLE),
    (Exception, None, ReturnCode.FAILED),
)


def return_code(error: Exception) -> ReturnCode:
    """The row of :data:`RETURN_CODES` for ``error``."""
    phase = getattr(error, "phase", None)
    return next(
        code
        for kind, wanted, code in RETURN_CODES
        if isinstance(error, kind) and wanted in (None, phase)
    )


@frozen(eq=False)
class Batch:
    """Tokens of one sequence, as ``llama_batch``; the card takes one sequence in each batch.

    It is checked when it is run, not when it is made.

    Args:
        tokens: ids ``[n]``; or embeddings ``[n, hidden]`` of floats, where the model takes them.
        positions: ``[n]``; those that follow what the sequence holds if ``None``.
        seq_id: of the sequence, the caller's own; 0 or more.
        out: ``[count]`` float32, gets the logits of the last position.
        base: first vocabulary entry of ``out``.
    """

    tokens: ArrayLike
    positions: ArrayLike | None = None
    seq_id: int = 0
    out: NDArray[np.float32] | None = None
    base: int = 0


@frozen(eq=False)
class _Step:
    """A batch whose form is right; its arrays are copies, ``out`` alone is the caller's."""

    seq_id: int
    tokens: NDArray[np.int32] | NDArray[np.float32]
    positions: NDArray[np.int32] | None
    out: NDArray[np.float32] | None
    base: int

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def is_decode(self) -> bool:
        return self.count == 1 and self.tokens.dtype.kind in "iu"


def _seq_id(value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(f"seq_id is {value!r}; give a whole number", Phase.PREPARE) from None


def _array(name: str, values: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputMismatch(f"{name} are not one array: {error}", Phase.PREPARE) from None


def _step(batch: Batch) -> _Step:
    """Check the form of ``batch``; what it means, the executor checks (§6.3)."""
    if not isinstance(batch, Batch):
        raise InvalidArgument(f"{type(batch).__name__} is not a Batch; give one", Phase.PREPARE)
    seq_id, base = _seq_id(batch.seq_id), batch.base
    if seq_id < 0:
        raise InvalidArgument(f"seq_id is {seq_id}; give 0 or more", Phase.PREPARE)
    if not isinstance(base, (int, np.integer)):
        raise InputMismatch(f"base is {base!r}; give a whole number", Phase.PREPARE)
    if batch.out is not None and not isinstance(batch.out, np.ndarray):
        raise InputMismatch(f"out is a {type(batch.out).__name__}; give an array", Phase.PREPARE)
    given = _array("tokens", batch.tokens)
    if given.ndim and not len(given):
        raise EmptyJob(
            f"the batch of sequence {seq_id} has no tokens; give at least one", Phase.PREPARE
        )
    if not given.ndim:
        raise InputMismatch(f"tokens are {batch.tokens!r}; give a row of them", Phase.PREPARE)
    positions = None if batch.positions is None else _array("positions", batch.positions)
    if positions is not None and positions.shape[:1] != given.shape[:1]:
        raise InputMismatch(
            f"{len(given)} tokens and positions of shape {positions.shape}; give as many of both",
            Phase.PREPARE,
        )
    return _Step(seq_id, given, positions, batch.out, int(base))


class _Call(Generic[T]):
    """Work that a calling thread hands to the loop, and waits for.

    One lock, held until there is an answer: nothing here can be left locked by an interrupt, or by
    a signal handler that calls :meth:`SyncExecutor.close`. Only the loop's thread settles it.
    """

    __slots__ = ("_answered", "_result", "error", "scope", "settled", "work")

    def __init__(self, work: Callable[[_Call[T]], Awaitable[T]] | None = None) -> None:
        self._answered = threading.Lock()
        self._answered.acquire()
        self._result: T | None = None
        self.work = work
        self.error: BaseException | None = None
        self.scope: trio.CancelScope | None = None
        self.settled = False

    def settle(self, result: T | None = None, *, error: BaseException | None = None) -> None:
        """The first answer counts."""
        if not self.settled:
            self._result, self.error, self.settled = result, error, True
            self._answered.release()

    def wait(self) -> None:
        """Block this thread until it is settled; for the one that made it.

        An interrupt may come after the lock is taken, so a second wait must not take it again.
        While it is not settled nobody can have taken it.
        """
        if not self.settled:
            self._answered.acquire()

    def outcome(self) -> T:
        """The result, or the error: a copy, since the executor may tell others of the same one."""
        if self.error is not None:
            raise copy.copy(self.error) if isinstance(self.error, RequestError) else self.error
        return self._result  # type: ignore[return-value]


class _Held:
    """A sequence id of the caller's; ``sequence`` is ``None`` while its first batch waits for KV."""

    __slots__ = ("scope", "sequence")

    def __init__(self, scope: trio.CancelScope) -> None:
        self.scope = scope
        self.sequence: Sequence | None = None


class SyncExecutor:
    """An executor and its device in a thread of their own, for callers that block.

    The constructor returns once the model is loaded and warm. Methods may be called from any thread
    but the executor's own, which calls the listeners. Without an ``admission_timeout`` a first
    batch that finds no room waits until another thread makes some; a host with one thread should
    set one, or ``max_queue = 0``. A job that was cancelled on the device still runs to its end, and
    its tokens count.

    Args:
        kind: of device, or its name.
        options: for it; virtual time will wait for other threads.
        config: limits and timeouts.
        context_tokens: KV positions that each sequence may fill; what it asks for at its start.
        listeners: called with each :data:`~caltrio.events.Event`.
        warm_up: the golden run of each generation; ``None`` runs none.

    Raises:
        InputError: the kind is unknown, or cannot be used here.
        ValueError: ``context_tokens`` is not from 1 to the model's ``max_seq``, or the in-flight
            limit cannot work with the device.
        ManifestMismatch, ServiceFailed: as :func:`~caltrio.executor.open_executor`.
    """

    def __init__(
        self,
        kind: DeviceKind | str,
        options: DeviceOptions,
        config: ExecutorConfig,
        *,
        context_tokens: int,
        listeners: Iterable[Listener] = (),
        warm_up: WarmUp | None = None,
    ) -> None:
        if isinstance(kind, str):
            kind = device_kind(kind)
        elif (reason := kind.unavailable()) is not None:
            raise InputError("kind", kind.name, reason)
        limit = options.model.max_seq
        if not 1 <= context_tokens <= limit:
            raise ValueError(f"context_tokens is {context_tokens}; give 1 to {limit}, the max_seq")
        self._options = evolve(options, outside=True)
        self._config, self._context_tokens = config, context_tokens
        self._listeners, self._warm_up = tuple(listeners), warm_up
        # Shared with the callers' threads; each is written by one side only.
        self._closed = False  # set by close()
        self._ended = False  # the loop's thread does nothing any more
        self._failure: BaseException | None = None  # what ended it
        self._executor: Executor | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._pending: set[_Call[Any]] = set()
        self._started: _Call[None] = _Call()
        # The loop's own.
        self._held: dict[int, _Held] = {}
        self._scope: trio.CancelScope
        self._stopping: trio.Event
        self._calls: trio.Nursery

        # A daemon, so that a process that forgets close() can end; atexit closes it then.
        self._thread = threading.Thread(
            target=self._run, args=(kind,), name="caltrio-executor", daemon=True
        )
        atexit.register(self.close)
        try:
            self._thread.start()
            self._started.wait()
            self._started.outcome()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- for the host -------------------------------------------------------------------------------

    def decode_sync(self, batch: Batch) -> InferenceResult:
        """Run one batch, and block until its result is there.

        The first batch of a sequence opens it, and is a prefill; later ones are a decode if they
        have one token, a prefill if more. If it does not succeed, the sequence is not open.

        Returns the result. Its ``logits`` are ``batch.out``; or, if that is ``None``, an array of
        the sequence's own that its next batch overwrites.

        Raises:
            InvalidArgument: the batch is malformed, does not follow on, or is too long; it starts
                at position 0 although its sequence is open; another one of it is under way.
            JobCancelled: the executor was closed, or the sequence removed, meanwhile.
            Unavailable: the executor is closed, or takes no work.
            RequestError: otherwise; says what became of the job.
        """
        step = _step(batch)
        if step.count > self._context_tokens:
            raise SequenceTooLong(
                f"{step.count} tokens are above the {self._context_tokens} positions of a sequence; "
                "shorten it, or raise context_tokens",
                Phase.PREPARE,
            )
        return self._call(lambda call: self._decode(step, call))

    def calrt_decode(self, batch: Batch) -> int:
        """As :meth:`decode_sync`, with a return code and one line in the log instead of an error."""
        try:
            self.decode_sync(batch)
        except Exception as error:  # noqa: BLE001 - a caller in the manner of C knows codes only
            code = return_code(error)
            self._log_failure(batch, error, code)
            return code
        return ReturnCode.OK

    def seq_rm(self, seq_id: int) -> bool:
        """Drop a sequence; its KV comes back once the device is done with it.

        A batch of it that is on its way to the device still gets its result; one that waits for KV
        ends with :class:`JobCancelled`. Returns whether there was such a sequence. Raises
        :class:`Unavailable` after the end of the executor.
        """
        wanted = _seq_id(seq_id)
        return self._call(lambda _call: self._remove(wanted))

    def seq_cp(self, *_args: object) -> NoReturn:
        """Raises :class:`Unsupported`: the runtime cannot copy KV."""
        raise self._unsupported("seq_cp")

    def seq_keep(self, *_args: object) -> NoReturn:
        """Raises :class:`Unsupported`: remove the others with :meth:`seq_rm`."""
        raise self._unsupported("seq_keep")

    def seq_add(self, *_args: object) -> NoReturn:
        """Raises :class:`Unsupported`: the runtime cannot shift positions."""
        raise self._unsupported("seq_add")

    def seq_div(self, *_args: object) -> NoReturn:
        """Raises :class:`Unsupported`: the runtime cannot divide positions."""
        raise self._unsupported("seq_div")

    def state_get_size(self, *_args: object) -> NoReturn:
        """Raises :class:`Unsupported`: the runtime cannot save its state."""
        raise self._unsupported("state_get_size")

    def state_get_data(self, *_args: object) -> NoReturn:
        """Raises :class:`Unsupported`: the runtime cannot save its state."""
        raise self._unsupported("state_get_data")

    def state_set_data(self, *_args: object) -> NoReturn:
        """Raises :class:`Unsupported`: the runtime cannot restore a state."""
        raise self._unsupported("state_set_data")

    def check(self) -> None:
        """Raise :class:`ServiceFailed`, with the exit code for a supervisor, if this has failed."""
        if self._executor is not None:
            self._executor.check()
        if self._ended and self._failure is not None:
            raise ServiceFailed(f"its event loop ended with {self._failure!r}") from self._failure

    def close(self, timeout_s: float | None = None) -> None:
        """Take no more work, let the device finish what it has, and end the thread.

        Calls under way end with their result, or with :class:`JobCancelled`. The drain is bounded
        by the grace time of the configuration. Again, or after the loop has died, it is harmless;
        from a listener it does not wait.

        Args:
            timeout_s: seconds to wait at the most; the grace time and 10 s more if ``None``.

        Raises ``TimeoutError`` if the drain takes longer: it goes on, and may be awaited again.
        """
        self._closed = True
        self._post(self._stop)
        if timeout_s is None:
            timeout_s = self._config.grace_ns / NS_PER_S + _CLOSE_MARGIN_S
        if self._thread.ident is not None and not self._in_loop():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"the executor still drains after {timeout_s} s; close it again to wait on"
                )
        atexit.unregister(self.close)

    # --- in the caller's thread -----------------------------------------------------------------------

    def _call(self, work: Callable[[_Call[T]], Awaitable[T]]) -> T:
        if self._in_loop():
            raise InvalidArgument("a call from the executor's own thread would wait for itself")
        call = _Call(work)
        try:
            self._pending.add(call)  # before the look at _ended: see _run
            if not self._post(self._begin, call):
                raise self._unavailable()
            call.wait()
        except BaseException:
            # Also an interrupt. Wait for the job's end for us: then nobody writes to ``out``.
            if self._post(self._give_up, call):
                call.wait()
            raise
        return call.outcome()

    def _post(self, act: Callable[..., None], *args: Any) -> bool:
        """Let the loop call ``act``; false if it has ended, or not yet begun."""
        if self._ended or self._token is None:
            return False
        try:
            self._token.run_sync_soon(act, *args)
        except trio.RunFinishedError:
            return False
        return True

    def _in_loop(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def _unavailable(self) -> Unavailable:
        if self._failure is not None:
            return Unavailable(f"the executor's event loop ended with {self._failure!r}; restart it")
        return Unavailable("the executor is closed; make a new one")

    @staticmethod
    def _unsupported(name: str) -> Unsupported:
        return Unsupported(f"{name} is not supported by this runtime; nothing was attempted")

    def _log_failure(self, batch: Batch, error: Exception, code: ReturnCode) -> None:
        typed = error if isinstance(error, RequestError) else RequestError(repr(error), "unknown")
        generation_id = typed.generation_id
        if generation_id < 0 and self._executor is not None:
            generation_id = self._executor.generation.generation_id  # the one that refused it
        facts = {
            "job_id": typed.job_id,
            "seq_id": getattr(batch, "seq_id", None),
            "generation": generation_id,
            "code": int(typed.code),
            "phase": typed.phase,
        }
        _log.log(
            logging.WARNING if code > 0 else logging.ERROR,
            "calrt_decode returned %d (%s): %s: %s",
            code,
            " ".join(f"{name}={value!r}" for name, value in facts.items()),
            type(error).__name__,
            " ".join(typed.message.split()),
            extra=facts,
        )

    # --- in the loop's thread -------------------------------------------------------------------------

    def _run(self, kind: DeviceKind) -> None:
        try:
            kind.run(self._main, self._options)
        except BaseException as error:  # noqa: BLE001 - it is told to everybody who calls
            self._failure = error
            if self._started.settled:
                _log.critical("the executor's event loop ended with %r", error, exc_info=error)
        # A call is noted before it looks at this, so either it sees it or we see the call.
        self._ended = True
        self._started.settle(error=self._failure or self._unavailable())
        for call in list(self._pending):
            call.settle(error=self._unavailable())

    async def _main(self, open_device: OpenDevice) -> None:
        failure: BaseException | None = None
        async with trio.open_nursery() as self._calls:
            self._scope, self._stopping = trio.CancelScope(), trio.Event()
            self._token = trio.lowlevel.current_trio_token()
            if self._closed:  # by whom the token was not seen
                self._stop()
            try:
                with self._scope:
                    await self._serve(open_device)
            except BaseException as error:  # noqa: BLE001 - raised below, outside the nursery's grouping
                failure = error
            self._stopping.set()
            # Everybody has his answer, and only has to go on.
            self._calls.cancel_scope.deadline = trio.current_time() + _LAST_CALLS_S
        if failure is not None:
            raise failure

    async def _serve(self, open_device: OpenDevice) -> None:
        async with (
            open_device() as device,
            open_executor(
                device,
                self._options.model,
                self._config,
                listeners=self._listeners,
                warm_up=self._warm_up,
            ) as executor,
        ):
            self._executor = executor
            self._started.settle()
            await self._stopping.wait()

    def _stop(self) -> None:
        self._stopping.set()
        if self._executor is None:
            self._scope.cancel()

    def _settle(
        self, call: _Call[T], result: T | None = None, *, error: BaseException | None = None
    ) -> None:
        call.settle(result, error=error)
        self._pending.discard(call)  # here, where no interrupt comes

    def _begin(self, call: _Call[Any]) -> None:
        if self._stopping.is_set():
            self._settle(call, error=self._unavailable())
        else:
            call.scope = trio.CancelScope()
            self._calls.start_soon(self._work, call)

    def _give_up(self, call: _Call[Any]) -> None:
        if call.scope is not None:
            call.scope.cancel()
        else:  # interrupted before it was handed over
            self._settle(call, error=JobCancelled("the call was given up by its caller"))

    async def _work(self, call: _Call[Any]) -> None:
        assert call.scope is not None
        assert call.work is not None
        error: Exception
        try:
            with call.scope:
                self._settle(call, await call.work(call))
                return
            error = JobCancelled("the call was given up by its caller, or its sequence was removed")
        except Exception as failed:  # noqa: BLE001 - the caller's to judge
            error = failed
        except BaseException:
            self._settle(call, error=JobCancelled("the executor ended meanwhile"))
            raise
        self._settle(call, error=error)

    async def _decode(self, step: _Step, call: _Call[InferenceResult]) -> InferenceResult:
        held = self._held.get(step.seq_id)
        if held is None:
            return await self._open(step, call)
        sequence, name = held.sequence, f"sequence {step.seq_id}"
        if sequence is None:
            raise InvalidArgument(
                f"{name} has its first batch under way; await it first", Phase.PREPARE
            )
        starts_anew = step.positions is not None and step.positions[0] == 0
        if starts_anew and sequence.request.job is None:
            raise InvalidArgument(
                f"{name} is open with {sequence.past_len} tokens, and the batch starts at position 0; "
                f"call seq_rm({step.seq_id}) first",
                Phase.PREPARE,
                0,
                -1,
                sequence.request.sequence_id,
            )
        if step.is_decode:
            return await sequence.decode(
                step.tokens[0], positions=step.positions, out=step.out, base=step.base
            )
        return await self._prefill(sequence, step)

    async def _open(self, step: _Step, call: _Call[InferenceResult]) -> InferenceResult:
        assert self._executor is not None
        assert call.scope is not None
        held = self._held[step.seq_id] = _Held(call.scope)
        try:
            # The last token that is produced takes no position.
            held.sequence = await self._executor.admit(
                step.count, self._context_tokens - step.count + 1
            )
            return await self._prefill(held.sequence, step)
        except BaseException as error:
            if self._held.get(step.seq_id) is held:
                del self._held[step.seq_id]
            if held.sequence is not None:
                given_up = JobCancelled(f"sequence {step.seq_id} was given up by its caller")
                held.sequence.close(error if isinstance(error, RequestError) else given_up)
            raise

    @staticmethod
    async def _prefill(sequence: Sequence, step: _Step) -> InferenceResult:
        return await sequence.prefill(
            step.tokens, positions=step.positions, out=step.out, base=step.base
        )

    async def _remove(self, seq_id: int) -> bool:
        held = self._held.pop(seq_id, None)
        if held is None:
            return False
        if held.sequence is None:
            held.scope.cancel()
        else:
            held.sequence.close()
        return True
