"""Compile the native libraries: ``python -m hw.build``.

The shim is compiled once against the emulator, and once against the vendor's SDK where
``--calrt`` (or ``CALRT_HOME``) says where that is. Needs a C++17 compiler and nothing else; it
imports the standard library alone, because an installation runs it before anything is there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "native"
LIBRARIES = HERE / "_native"  # where they go, beside this file

EMULATOR_LIBRARY = "libcalrt_emulator.so"  # stands in for the vendor's
SHIM_ON_EMULATOR = "libcaltrio_emulator.so"
SHIM_ON_CALRT = "libcaltrio_calrt.so"

_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra")


class BuildError(Exception):
    """The libraries cannot be built: no compiler, no SDK, or the compiler's own complaint."""


def compiler() -> list[str] | None:
    """The C++ compiler: ``CXX``, or the first that is found; ``None`` if there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    return None


def _compile(out: Path, sources: list[Path], *more: str) -> None:
    command = compiler()
    if command is None:
        wanted = os.environ.get("CXX")
        what = f"CXX names {wanted!r}, which is not there" if wanted else "there is no C++ compiler"
        raise BuildError(f"{what}; install g++ or clang++, or set CXX")
    # Whole or not at all, also while another process builds or uses the old one.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".build-") as folder:
        made = Path(folder) / out.name
        line = [*command, *_FLAGS, "-o", str(made), *map(str, sources), *more]
        try:
            ended = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603
        except OSError as error:
            raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from error
        if ended.returncode != 0:
            raise BuildError(f"{shlex.join(line)} failed:\n{ended.stderr.strip()}")
        made.replace(out)


def _sources(name: str) -> list[Path]:
    return sorted((SOURCES / name).glob("*.cpp"))


def build_emulator(into: Path = LIBRARIES) -> list[Path]:
    """Compile the emulated vendor library, and the shim on it. Raises :class:`BuildError`."""
    _make(into)
    include = f"-I{SOURCES / 'include'}"
    emulator, shim = into / EMULATOR_LIBRARY, into / SHIM_ON_EMULATOR
    _compile(emulator, _sources("emulator"), include, f"-Wl,-soname,{EMULATOR_LIBRARY}")
    _compile(shim, _sources("shim"), include, str(emulator), "-Wl,-rpath,$ORIGIN")
    return [emulator, shim]


def build_calrt(home: Path, into: Path = LIBRARIES) -> list[Path]:
    """Compile the shim on the vendor's SDK at ``home``. Raises :class:`BuildError`.

    Assumed of the SDK (docs/assumptions.md): ``include/calrt/calrt.hpp`` and ``lib/libcalrt.so``.
    """
    include, library = home / "include", home / "lib"
    for needed in (include / "calrt" / "calrt.hpp", library / "libcalrt.so"):
        if not needed.is_file():
            raise BuildError(f"{needed} is not there; CALRT_HOME is to name the CalRT SDK's folder")
    _make(into)
    out = into / SHIM_ON_CALRT
    where = library.resolve()
    _compile(out, _sources("shim"), f"-I{include}", f"-L{where}", "-lcalrt", f"-Wl,-rpath,{where}")
    return [out]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise BuildError(f"{folder} cannot be written; build where you may, with --into")


def main(arguments: list[str] | None = None) -> int:
    """Build, and say what was built."""
    parser = argparse.ArgumentParser(prog="python -m hw.build", description=__doc__)
    parser.add_argument(
        "--calrt",
        type=Path,
        default=os.environ.get("CALRT_HOME") or None,
        metavar="FOLDER",
        help="the CalRT SDK; default: CALRT_HOME",
    )
    parser.add_argument("--into", type=Path, default=LIBRARIES, metavar="FOLDER", help="%(default)s")
    options = parser.parse_args(arguments)
    try:
        made = build_emulator(options.into)
        if options.calrt is not None:
            made += build_calrt(options.calrt, options.into)
    except BuildError as error:
        sys.stderr.write(f"hw.build: {error}\n")
        return 1
    for path in made:
        sys.stdout.write(f"built {path}\n")
    if options.calrt is None:
        sys.stdout.write("device hw: not built; set CALRT_HOME to the CalRT SDK's folder\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
