"""Compiled code on disk that is of the sources as they are now.

Numba keeps what it compiled beside the source, and compiles again when *that* file has changed. But the
code also holds constants and functions of other files: after an update of one of these, it would run
as it was, on data that are laid out otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any


def keep_fresh(function: Any, modules: Iterable[ModuleType]) -> None:
    """Forget compiled code in the folder of ``function``'s if it is not of these sources.

    Args:
        function: one that numba compiles and keeps (``cache=True``); not called yet in this process.
        modules: all whose constants or functions its code may hold, its own included.
    """
    sources = sorted(Path(str(module.__file__)) for module in modules)
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    folder = Path(function.stats.cache_path)
    stamp = folder / f"{Path(str(function.py_func.__code__.co_filename)).stem}.sources"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return
    for index in folder.glob("*.nbi"):
        index.unlink(missing_ok=True)  # another process may be doing the same
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest, encoding="utf-8")
