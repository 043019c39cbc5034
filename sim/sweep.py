"""Runs a sweep: on many processes or machines, so that it can be stopped and go on, into one table.

What ends is appended to a journal at once. The table is made from the journal alone, in the order
of the points: it is the same to the byte, whoever ran what when, and however often it was stopped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
import trio
from attrs import evolve, frozen

from caltrio.errors import CaltrioError, InputError
from caltrio.observe.records import META_KEY
from caltrio.scenario import Scenario
from caltrio.signals import Stop, StoppedError, stoppable

from .fast import run_twin
from .sweep_design import VERSION, Sweep

JOURNAL = "sweep.jsonl"
TABLE = "sweep.parquet"
_SYNC_S = 1.0
_ROW_GROUP = 20_000
_CONNECT_S = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_I64, _F64, _TEXT = pa.int64(), pa.float64(), pa.string()


class SweepFailed(CaltrioError):
    """A sweep cannot go on, though its file is right; what had ended is in the journal."""


def run_point(scenario: Scenario, seed: int) -> dict[str, Any]:
    """One run: its ``status`` (``ok``, ``failed``), the ``reason``, and its ``metrics`` by name.

    Metrics are those of :class:`~caltrio.observe.metrics.Summary`, an undefined one ``None``.
    """
    try:
        run = run_twin(evolve(scenario, seed=seed))
    except StoppedError as stopped:
        raise SweepFailed(f"a worker was told to stop by {stopped.by.name}") from stopped
    except OverflowError:
        return {"status": "failed", "reason": "a time is beyond 292 years", "metrics": {}}
    metrics: dict[str, Any] = {}
    for name, value in run.summary.to_json().items():
        inner = value.items() if isinstance(value, dict) else ()
        metrics |= {f"{name}_{part}": number for part, number in inner}
        if not isinstance(value, dict):
            metrics[name] = value
    return {"status": "ok", "reason": None, "metrics": metrics}


def _work(scenario: Scenario, seed: int, version: str) -> dict[str, Any]:
    """What a worker does: a run, if it would do the same as whoever asks."""
    if version != VERSION:
        raise SweepFailed(f"a worker has caltrio {VERSION}, here is {version}; install the same")
    return run_point(scenario, seed)


class Journal:
    """The runs that have ended, one JSON line each, in a file that survives our end.

    Args:
        path: the file.
        sweep: what it is the journal of.
        fresh: begin anew, whatever is there.

    Raises :class:`InputError` if the file is another sweep's, or damaged.
    """

    def __init__(self, path: Path, sweep: Sweep, *, fresh: bool = False) -> None:
        self._path = path
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        self._at: dict[str, int] = {}
        self._synced = time.monotonic()
        try:
            if fresh:
                self._file.truncate(0)
            self._read(sweep)
        except BaseException:
            self._file.close()
            raise

    def _read(self, sweep: Sweep) -> None:
        where, end = str(self._path), 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                break  # we were killed while we wrote it
            try:
                said = json.loads(line)
                if number == 0:
                    begun = said["sweep"], said["caltrio"]
                    self._check(begun, sweep, where)
                else:
                    self._at[said["key"]] = end
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    where, f"line {number + 1}", "is not of a sweep's journal",
                    "name another folder, or start over with --force",
                ) from error  # fmt: skip
            end += len(line)
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._append({"sweep": sweep.digest, "caltrio": VERSION})

    @staticmethod
    def _check(begun: tuple[str, str], sweep: Sweep, where: str) -> None:
        if begun == (sweep.digest, VERSION):
            return
        if begun[1] != VERSION:
            problem = f"was begun with caltrio {begun[1]}; this is {VERSION}"
        else:
            problem = f"was begun before {sweep.path}, its scenario, timing or trace was changed"
        raise InputError(
            where, "", problem, "undo the change, name another folder, or start over with --force"
        )

    def _append(self, said: dict[str, Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(said, allow_nan=False).encode() + b"\n")
        self._file.flush()  # now it survives our end; that of the machine, within a second
        if time.monotonic() - self._synced >= _SYNC_S:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def __contains__(self, key: str) -> bool:
        return key in self._at

    def add(self, key: str, result: dict[str, Any]) -> None:
        """Write down the result of a run."""
        at = self._file.seek(0, os.SEEK_END)
        self._append({"key": key, **result})
        self._at[key] = at

    def result(self, key: str) -> dict[str, Any]:
        """The result of a run that is in it."""
        self._file.seek(self._at[key])
        result: dict[str, Any] = json.loads(self._file.readline())
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def _key(digest: str, seed: int) -> str:
    return f"{digest}-{seed}"


@frozen
class _Task:
    index: int
    seed: int
    key: str
    scenario: Scenario


def _tasks(sweep: Sweep, journal: Journal) -> Iterator[_Task]:
    """The runs that have not ended, each once: points of one scenario share theirs."""
    asked: set[str] = set()
    for index, point in enumerate(sweep.points):
        keys = {seed: _key(point.digest, seed) for seed in sweep.seeds}
        left = [seed for seed, key in keys.items() if key not in journal and key not in asked]
        if point.impossible is not None or not left:
            continue
        asked.update(keys.values())
        scenario = sweep.scenario(index)
        for seed in left:
            yield _Task(index, seed, keys[seed], scenario)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes started inside never hear of a Ctrl-C: we alone do, and end them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker() -> None:
    """Leave no orphan: if the process that started us dies, whatever we do, so do we."""
    parent = parent_process()
    assert parent is not None

    def heed() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=heed, daemon=True).start()


@contextmanager
def local_executor(workers: int | None = None) -> Iterator[tuple[Executor, int]]:
    """(executor on processes of this machine, how many runs to give it at once).

    ``workers``: how many processes; ``None`` is one a core. When the block ends they are gone, even
    in the middle of a run.
    """
    count = workers or os.cpu_count() or 1
    before = set(active_children())
    pool = ProcessPoolExecutor(count, get_context("spawn"), _begin_worker)
    try:
        yield pool, 2 * count
    finally:
        for child in set(active_children()) - before:
            child.kill()
        pool.shutdown(cancel_futures=True)


@contextmanager
def cluster_executor(address: str) -> Iterator[tuple[Executor, int]]:
    """(executor on the Dask cluster whose scheduler is at ``address``, how many runs at once).

    Raises :class:`InputError`, within ten seconds, if it cannot be reached or has no worker.
    """
    where = f"--cluster {address}"
    try:
        distributed: Any = import_module("distributed")  # optional, and not typed throughout
    except ModuleNotFoundError as error:
        raise InputError(
            where, "", "needs the package distributed", "pip install 'caltrio[cluster]'"
        ) from error
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters is in our errors

    async def knock() -> None:
        comm = await import_module("distributed.comm").connect(address, timeout=_CONNECT_S)
        await comm.close()

    try:
        # A client that cannot connect takes its time, and complains at the end of the process.
        asyncio.run(asyncio.wait_for(knock(), _CONNECT_S + 1))
        client = distributed.Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError, RuntimeError, ImportError) as error:  # a timeout is an OSError
        reason = str(error).splitlines()[0] if str(error) else "it does not answer"
        raise InputError(
            where, "", f"no scheduler can be reached: {reason}", "start one, or correct the address"
        ) from error
    try:
        threads = sum(client.nthreads().values())
        if not threads:
            raise InputError(
                where, "", "the cluster has no worker", "start some, with caltrio installed"
            )
        executor = client.get_executor(pure=False)
        try:
            yield executor, 2 * threads
        finally:
            executor.shutdown(wait=False)
    finally:
        client.close(timeout=2)


async def _drive(
    sweep: Sweep, journal: Journal, executor: Executor, window: int, on_run: Callable[[], None]
) -> None:
    send, receive = trio.open_memory_channel[Future[dict[str, Any]]](math.inf)
    token = trio.lowlevel.current_trio_token()
    tasks = _tasks(sweep, journal)
    running: dict[Future[dict[str, Any]], _Task] = {}

    def ended(future: Future[dict[str, Any]]) -> None:  # in a thread of the executor's
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(send.send_nowait, future)

    def keep(future: Future[dict[str, Any]], task: _Task) -> None:
        journal.add(task.key, future.result())
        on_run()

    try:
        while True:
            while len(running) < window and (task := next(tasks, None)) is not None:
                with _signals_blocked():
                    future = executor.submit(_work, task.scenario, task.seed, VERSION)
                running[future] = task
                future.add_done_callback(ended)
            if not running:
                return
            future = await receive.receive()
            task = running.pop(future)
            try:
                keep(future, task)
            except (Exception, CancelledError) as error:
                raise _explained(error, sweep, task) from error
    except BrokenExecutor as error:  # of submit()
        raise SweepFailed(_LOST_WORKER) from error
    finally:
        for future, task in running.items():  # whose news had not come through
            if future.done() and not future.cancelled() and future.exception() is None:
                keep(future, task)


_LOST_WORKER = "a worker process died: it was killed, perhaps for the memory that it took"


def _explained(error: BaseException, sweep: Sweep, task: _Task) -> Exception:
    """An error of a run, as one that says what it means for the sweep."""
    if isinstance(error, OSError):
        return SweepFailed(f"{error.filename or 'journal'}: {error.strerror or error}")
    if isinstance(error, BrokenExecutor):
        return SweepFailed(_LOST_WORKER)
    if isinstance(error, CancelledError):
        return SweepFailed("the cluster has dropped a run: its scheduler has ended, or was restarted")
    if isinstance(error, SweepFailed):
        return error
    text = str(error) if isinstance(error, CaltrioError) else f"{type(error).__name__}: {error}"
    return SweepFailed(f"{sweep.name(task.index)}, seed {task.seed}: {text}")


def run_sweep(
    sweep: Sweep,
    journal: Journal,
    executor: Executor,
    window: int,
    on_run: Callable[[], None] = lambda: None,
) -> signal.Signals | None:
    """Run what of ``sweep`` is not in ``journal``; the signal that ended it early, if one did.

    Args:
        sweep: what to run.
        journal: where each run's result goes as soon as it has ended.
        executor: runs them.
        window: so many are given to it at once.
        on_run: called at the end of each.

    Raises:
        SweepFailed: a worker died, or a run cannot be carried out; it names the point.
    """

    async def main() -> Stop:
        async with stoppable() as stop:
            await _drive(sweep, journal, executor, window, on_run)
        return stop

    stopped_by = trio.run(main).by
    return None if ended_runs(sweep, journal) == sweep.total else stopped_by


def ended_runs(sweep: Sweep, journal: Journal) -> int:
    """How many of the sweep's runs are in the journal."""
    return sum(
        _key(point.digest, seed) in journal
        for point in sweep.points
        if point.impossible is None
        for seed in sweep.seeds
    )


def results(sweep: Sweep, journal: Journal) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(point, replication, result) of every run, in the order of the table."""
    for index, point in enumerate(sweep.points):
        for replication, seed in enumerate(sweep.seeds):
            if point.impossible is not None:
                yield (
                    index,
                    replication,
                    {"status": "impossible", "reason": point.impossible, "metrics": {}},
                )
            else:
                yield index, replication, journal.result(_key(point.digest, seed))


def write_table(sweep: Sweep, journal: Journal, path: Path) -> None:
    """Write the table of a sweep whose runs have all ended: all of it, or nothing."""
    metrics: dict[str, pa.DataType] = {}
    for _, _, result in results(sweep, journal):
        for name, value in result["metrics"].items():
            if not isinstance(value, int):
                metrics[name] = _F64
            else:
                metrics.setdefault(name, _I64)
    parameters = {
        axis.column: _typed([axis.number(point.values[place]) for point in sweep.points])
        for place, axis in enumerate(sweep.axes)
    }
    schema = pa.schema(
        [
            ("point", _I64),
            ("replication", _I64),
            *((name, column.type) for name, column in parameters.items()),
            ("seed", _I64),
            ("status", _TEXT),
            ("reason", _TEXT),
            *metrics.items(),
        ],
        {META_KEY: json.dumps(dict(sweep.about), sort_keys=True).encode()},
    )
    part = path.with_name(f"{path.name}.tmp")
    with pq.ParquetWriter(part, schema) as writer:
        rows = results(sweep, journal)
        while chunk := [row for _, row in zip(range(_ROW_GROUP), rows, strict=False)]:
            points = pa.array([index for index, _, _ in chunk], _I64)
            columns = [
                points,
                pa.array([replication for _, replication, _ in chunk], _I64),
                *(column.take(points) for column in parameters.values()),
                pa.array([sweep.seeds[replication] for _, replication, _ in chunk], _I64),
                pa.array([result["status"] for _, _, result in chunk], _TEXT),
                pa.array([result["reason"] for _, _, result in chunk], _TEXT),
            ]
            for name, kind in metrics.items():
                columns.append(pa.array([_metric(result, name, kind) for _, _, result in chunk], kind))
            writer.write_batch(pa.record_batch(columns, schema=schema))
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.replace(path)


def _metric(result: dict[str, Any], name: str, kind: pa.DataType) -> float | int | None:
    # A count that a run does not mention, of an outcome that it did not see, is 0.
    absent = 0 if kind is _I64 and result["metrics"] else None
    value: float | int | None = result["metrics"].get(name, absent)
    return value


def _typed(values: list[Any]) -> pa.Array:
    """A column of parameters: whole numbers, numbers, truths or text; else JSON."""
    kinds = {type(value) for value in values}
    if kinds <= {str} or kinds <= {bool}:
        return pa.array(values)
    if kinds <= {int, float}:
        with suppress(OverflowError, pa.ArrowInvalid):
            return pa.array(values, _I64 if kinds == {int} else _F64)
    return pa.array([json.dumps(value) for value in values])
