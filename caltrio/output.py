"""What commands print, and the folder that they write to."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .errors import InputError

# What any run may leave in its folder: the next one there, of whatever kind, removes all of it.
RESULT_FILES = ("jobs.parquet", "requests.parquet", "summary.json", "trace.json", "timeline.svg",
                "plan.json", "plan.parquet", "sensitivity.json", "report.html", "matrix.svg",
                "gain.svg", "load-*.svg", "kv.svg", "break-even.svg", "tornado.svg",
                "timeline-*.svg", "sweep.jsonl", "sweep.parquet", "sweep.parquet.tmp")  # fmt: skip
_LOCK = ".caltrio.lock"
_LEAST_WIDTH = 120  # columns; a terminal that is narrower wraps lines, but loses nothing


def console() -> Console:
    """The console for results: standard output, never too narrow for the numbers of a table."""
    screen = Console(highlight=False)
    if not sys.stdout.isatty() or screen.width < _LEAST_WIDTH:
        screen.width = _LEAST_WIDTH
    return screen


def print_json(data: Any) -> None:
    """``data`` on standard output, for machines; an undefined number must be null by now."""
    print(json.dumps(data, indent=2, allow_nan=False))  # noqa: T201


def after_signal(command: str, stopped_by: Signals | None, kept: str) -> int:
    """The exit code, 0 or what a shell expects after a signal: then a line says what is ``kept``."""
    if stopped_by is None:
        return 0
    print(f"caltrio {command}: interrupted by {stopped_by.name}; {kept}", file=sys.stderr)  # noqa: T201
    return 128 + stopped_by


def progress() -> Progress:
    """A progress display on standard error; silent where that is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


@contextmanager
def output_folder(
    path: Path, *, force: bool, files: Iterable[str], journal: str | None = None
) -> Iterator[Path]:
    """Make ``path`` ours for the block.

    Args:
        path: the folder; made if it is not there.
        force: take a folder that holds files. Those that this run writes are removed first, so
            that nothing of an older run passes for part of this one; others are left alone.
        files: names or glob patterns of what this run may write.
        journal: the file in which a run that can go on later says what it has done. A folder that
            holds it is taken without ``force`` too, and then nothing in it is removed.

    Raises :class:`InputError` if the folder is in use, by files or by a run, or cannot be written.
    """
    where = f"--out {path}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        present = sorted(entry.name for entry in path.iterdir())
        goes_on = not force and journal in present
        # Only a folder that is ours to take gets a lock file; one with a lock is asked for it first.
        if present and not force and not goes_on and _LOCK not in present:
            raise InputError(
                where, "", f"is in use: it holds {present[0]!r}", "name another, or add --force"
            )
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(where, "", f"cannot be written: {reason}", "name a folder that can") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by the kernel, however we end
        except OSError as error:
            raise InputError(
                where, "", "another run is writing there", "wait for it, or name another folder"
            ) from error
        results = [name for name in present if name != _LOCK]
        if results and not force and not goes_on:
            raise InputError(
                where, "", f"is in use: it holds {results[0]!r}", "name another, or add --force"
            )
        # Old results go only from a folder that a run of ours has had: it holds our lock file.
        old = [file for pattern in files for file in path.glob(pattern)]
        folders = [file.name for file in old if file.is_dir()]
        if folders:
            raise InputError(
                where, "", f"holds a folder {folders[0]!r} where a file is to go", "name another folder"
            )
        try:
            for file in old if force and _LOCK in present else []:
                file.unlink()
        except OSError as error:
            raise InputError(
                where, "", f"cannot be cleared: {error.strerror} ({error.filename})"
            ) from error
        yield path
    finally:
        os.close(lock)
