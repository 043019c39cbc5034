"""The native libraries, loaded with cffi; what they offer is ``native/shim/caltrio.h`` itself."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import cffi

from caltrio.errors import InputError

from .build import LIBRARIES, SOURCES

ABI = 1


def keep_for_ever(thing: object) -> None:
    """Never free ``thing``, not even as the interpreter ends.

    For memory that a device may still write to, and for code that threads of its own may still run.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@cache
def ffi() -> Any:
    """The declarations of the header."""
    text = (SOURCES / "shim" / "caltrio.h").read_text(encoding="utf-8")
    made = cffi.FFI()
    made.cdef(text.split("/* begin */")[1].split("/* end */")[0])
    return made


@cache
def load(path: Path) -> Any:
    """The library at ``path``, for the life of the process. Raises :class:`InputError`."""
    try:
        library = ffi().dlopen(str(path))
    except OSError as error:
        raise InputError(
            str(path), "", f"cannot be loaded: {error}", "build it again: python -m hw.build --force"
        ) from error
    found = library.caltrio_abi()
    if found != ABI:
        raise InputError(
            str(path),
            "",
            f"has ABI {found}, this version needs {ABI}",
            "build it again: python -m hw.build",
        )
    keep_for_ever(library)
    return library


def missing(name: str) -> bool:
    """Is that library not built?"""
    return not (LIBRARIES / name).is_file()
