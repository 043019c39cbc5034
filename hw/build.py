"""Compile the native libraries: ``python -m hw.build``.

The shim is compiled once against the emulator, and once against the vendor's SDK where
``--calrt`` (or ``CALRT_HOME``) says where that is. Needs a C++17 compiler and nothing else; it
imports the standard library alone, because an installation runs it (``hatch_build.py``) before
anything is there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "native"
LIBRARIES = HERE / "_native"  # where they go, beside this file

EMULATOR_LIBRARY = "libcalrt_emulator.so"  # stands in for the vendor's
SHIM_ON_EMULATOR = "libcaltrio_emulator.so"
SHIM_ON_CALRT = "libcaltrio_calrt.so"

_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-pthread", "-Wall", "-Wextra")


class BuildError(Exception):
    """The libraries cannot be built: no compiler, no SDK, or the compiler's own complaint."""


class NoCompiler(BuildError):
    """There is no C++ compiler."""


def compiler() -> list[str] | None:
    """The C++ compiler: ``CXX``, or the first that is found; ``None`` if there is none."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation without an end
        return None
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    return None


def remedy() -> str:
    """What a person does to have the libraries built."""
    first = "" if compiler() else "install a C++ compiler (g++ or clang++) and "
    return f"{first}run 'python -m hw.build'"


def build_emulator(into: Path = LIBRARIES, *, force: bool = False) -> list[Path]:
    """Compile the emulated vendor library, and the shim on it. Raises :class:`BuildError`.

    Returns what was compiled: nothing if both are newer than their sources, unless ``force``.
    """
    command = _ready(into)
    include = SOURCES / "include"
    emulator, shim = into / EMULATOR_LIBRARY, into / SHIM_ON_EMULATOR
    if not force and _newer([emulator, shim], [SOURCES / "emulator", SOURCES / "shim", include]):
        return []
    _compile(command, emulator, "emulator", include, f"-Wl,-soname,{EMULATOR_LIBRARY}")
    _compile(command, shim, "shim", include, str(emulator), "-Wl,-rpath,$ORIGIN")
    return [emulator, shim]


def build_calrt(home: Path, into: Path = LIBRARIES, *, force: bool = False) -> list[Path]:
    """Compile the shim on the vendor's SDK at ``home``. Raises :class:`BuildError`.

    Returns what was compiled, as :func:`build_emulator` does.
    Assumed of the SDK (docs/assumptions.md): ``include/calrt/calrt.hpp`` and ``lib/libcalrt.so``.
    """
    include, library = home / "include", home / "lib" / "libcalrt.so"
    for needed in (include / "calrt" / "calrt.hpp", library):
        if not needed.is_file():
            raise BuildError(f"{needed} is not there; CALRT_HOME is to name the CalRT SDK's folder")
    command = _ready(into)
    out, where = into / SHIM_ON_CALRT, library.parent.resolve()
    if not force and _newer([out], [SOURCES / "shim", include, library]) and _looks_in(out, where):
        return []
    _compile(command, out, "shim", include, f"-L{where}", "-lcalrt", f"-Wl,-rpath,{where}")
    return [out]


def _ready(folder: Path) -> list[str]:
    """The compiler, once ``folder`` can be written to."""
    command = compiler()
    if command is None:
        wanted = os.environ.get("CXX")
        what = f"CXX names {wanted!r}, which is not there" if wanted else "there is no C++ compiler"
        raise NoCompiler(f"{what}; install g++ or clang++, or set CXX")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BuildError(f"{folder} cannot be written to: {error.strerror}") from error
    return command


def _newer(made: list[Path], sources: list[Path]) -> bool:
    """Is each library newer than these files, all that is in these folders, and this file?

    Folders count themselves: what was taken out of them, or renamed, is a change too.
    """
    everything = [Path(__file__), *sources]
    for folder in sources:
        everything += folder.rglob("*")
    try:
        oldest = min(path.stat().st_mtime_ns for path in made)
        return oldest > max(path.stat().st_mtime_ns for path in everything)
    except FileNotFoundError:
        return False


def _looks_in(library: Path, folder: Path) -> bool:
    """Does the library search that folder, not another SDK's?"""
    return b"\0" + os.fsencode(folder) + b"\0" in library.read_bytes()


def _compile(command: list[str], out: Path, part: str, include: Path, *link: str) -> None:
    """Compile that part of the sources into ``out``.

    Whole or not at all: another process may be building it too, or using the old one.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".build-") as name:
        folder = Path(name)

        def compile_one(source: Path) -> str:
            made = str(folder / f"{source.stem}.o")
            _run([*command, *_FLAGS, f"-I{include}", "-c", str(source), "-o", made])
            return made

        sources = sorted((SOURCES / part).glob("[!.]*.cpp"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sources))
        made = folder / out.name
        _run([*command, *_FLAGS, "-shared", "-o", str(made), *objects, *link])
        made.replace(out)


def _run(line: list[str]) -> None:
    try:
        ended = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        raise BuildError(f"{line[0]} cannot be run: {error.strerror}") from error
    if ended.returncode != 0:
        raise BuildError(f"{shlex.join(line)} failed:\n{ended.stderr.strip()}")
    sys.stderr.write(ended.stderr)  # warnings


def main(arguments: list[str] | None = None) -> int:
    """Build, and say what was built."""
    parser = argparse.ArgumentParser(
        prog="python -m hw.build",
        description="Compile the emulated card and the driver of caltrio; needs a C++17 compiler.",
    )
    parser.add_argument(
        "--calrt", type=Path, default=os.environ.get("CALRT_HOME") or None, metavar="FOLDER",
        help="the CalRT SDK, for device hw; default: CALRT_HOME",
    )  # fmt: skip
    parser.add_argument(
        "--into", type=Path, default=LIBRARIES, metavar="FOLDER",
        help="where to; devices are looked for in the default, %(default)s",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="compile what is up to date too")
    parser.add_argument("--optional", action="store_true", help="no compiler is no error")
    options = parser.parse_args(arguments)
    try:
        _report("emulator", build_emulator(options.into, force=options.force))
        if options.calrt is None:
            there = (options.into / SHIM_ON_CALRT).exists()
            sys.stdout.write(
                f"device hw: {'left as it is' if there else 'not built'}; "
                "to build it, set CALRT_HOME to the CalRT SDK's folder\n"
            )
        else:
            _report("hw", build_calrt(options.calrt, options.into, force=options.force))
    except BuildError as error:
        sys.stderr.write(f"hw.build: {error}\n")
        return 0 if options.optional and isinstance(error, NoCompiler) else 1
    return 0


def _report(device: str, made: list[Path]) -> None:
    what = f"built {', '.join(map(str, made))}" if made else "up to date"
    sys.stdout.write(f"device {device}: {what}\n")


if __name__ == "__main__":
    sys.exit(main())
