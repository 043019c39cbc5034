"""The native libraries are compiled where that is possible; where not, one line says why.

What is compiled here is a small tree beside a copy of ``hw/build.py``; the driver's own sources
once, on a folder that looks like the vendor's SDK.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from caltrio.cli import run
from caltrio.manifest import load_manifest
from caltrio.semantics import PRESETS
from caltrio.timing import load_timing
from hw import bindings, build, calrt, emulator

ROOT = Path(__file__).parents[2]
SOURCES = {
    "include/calrt/calrt.hpp": "#pragma once\nint answer();\n",
    "emulator/answer.cpp": '#include "calrt/calrt.hpp"\nint answer() { return 42; }\n',
    "emulator/other.cpp": "int other = 0;\n",
    "shim/asked.cpp": '#include "calrt/calrt.hpp"\nextern "C" int asked() { return answer(); }\n',
}
LONG_AGO = 946_684_800  # 2000

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")


def load(path):
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_a_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def age(*paths, by=0):
    for path in paths:
        os.utime(path, (LONG_AGO + by, LONG_AGO + by))


def asked(library):
    """What the shim at that path answers, in a process that ends with it."""
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).asked())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.fixture
def small(tmp_path):
    """A copy of hw/build.py beside small sources."""
    write(tmp_path / "hw" / "native", SOURCES)
    shutil.copy(build.__file__, tmp_path / "hw" / "build.py")
    return load(tmp_path / "hw" / "build.py")


@pytest.fixture
def sdk(tmp_path, small):
    """Makes a folder with the SDK's form, whose library is the small emulator."""

    def make(name):
        home = tmp_path / name
        write(home, {"include/calrt/calrt.hpp": SOURCES["include/calrt/calrt.hpp"]})
        (home / "lib").mkdir()
        small.build_emulator()
        for library in ("libcalrt.so", build.EMULATOR_LIBRARY):  # its soname
            shutil.copy(small.LIBRARIES / build.EMULATOR_LIBRARY, home / "lib" / library)
        return home

    return make


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)


def script(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_first_compiler_of_the_path_unless_cxx_names_one(tmp_path, monkeypatch, no_compiler):
    assert build.compiler() is None
    for name in ("clang++", "g++", "c++"):
        script(tmp_path / "bin" / name, "#!/bin/sh\n")
        assert build.compiler() == [name]
    monkeypatch.setenv("CXX", "g++ -m64 '-DNAME=a b'")
    assert build.compiler() == ["g++", "-m64", "-DNAME=a b"]
    monkeypatch.setenv("CXX", "")
    assert build.compiler() == ["c++"]


@pytest.mark.parametrize("named", ["nothing++", "'g++"])
def test_cxx_names_nothing(small, monkeypatch, named):
    monkeypatch.setenv("CXX", named)
    assert small.compiler() is None
    with pytest.raises(small.NoCompiler, match=f"CXX names .*{named}.*, which is not there; install"):
        small.build_emulator()


def test_a_compiler_that_fails(small, tmp_path, monkeypatch, capsys):
    failing = script(tmp_path / "bin" / "bad++", "#!/bin/sh\necho 'a.cpp:3:1: error: no' >&2\nexit 4\n")
    monkeypatch.setenv("CXX", f"{failing} -w")
    with pytest.raises(
        small.BuildError, match=r"(?s)bad\+\+ -w .*answer\.cpp.* failed:\na\.cpp:3:1: err"
    ):
        small.build_emulator()
    assert list(small.LIBRARIES.iterdir()) == []
    for optional in ([], ["--optional"]):
        assert small.main(optional) == 1
        said = capsys.readouterr()
        assert said.err.startswith("hw.build: ")
        assert said.err.endswith("a.cpp:3:1: error: no\n")
        assert said.out == ""


def test_a_compiler_that_cannot_be_run(small, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(script(tmp_path / "bin" / "no++", "no program\n")))
    with pytest.raises(small.BuildError, match=r"no\+\+ cannot be run: "):
        small.build_emulator()


def test_no_compiler(small, no_compiler, capsys):
    assert small.main([]) == 1
    assert small.main(["--optional"]) == 0
    said = capsys.readouterr()
    assert said.err == 2 * "hw.build: there is no C++ compiler; install g++ or clang++, or set CXX\n"
    assert said.out == ""


@needs_compiler
@pytest.mark.parametrize("folder", ["a_file", "a_file/below", "/proc/self/fdinfo"])
def test_a_folder_that_cannot_be_written_to(small, tmp_path, capsys, folder):
    write(tmp_path, {"a_file": ""})
    assert small.main(["--into", str(tmp_path / folder)]) == 1
    assert capsys.readouterr().err.startswith(f"hw.build: {tmp_path / folder} cannot be written to: ")


@pytest.mark.parametrize("missing", ["include/calrt/calrt.hpp", "lib/libcalrt.so"])
def test_a_folder_that_is_no_sdk(small, tmp_path, missing):
    write(tmp_path / "sdk", {"include/calrt/calrt.hpp": "", "lib/libcalrt.so": ""})
    (tmp_path / "sdk" / missing).unlink()
    with pytest.raises(small.BuildError) as caught:
        small.build_calrt(tmp_path / "sdk")
    assert str(caught.value) == (
        f"{tmp_path}/sdk/{missing} is not there; CALRT_HOME is to name the CalRT SDK's folder"
    )


@needs_compiler
def test_it_builds_what_it_says(small, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CALRT_HOME", raising=False)
    into = tmp_path / "of a user" / "libraries"
    assert small.main(["--into", str(into)]) == 0
    emulated, shim = into / build.EMULATOR_LIBRARY, into / build.SHIM_ON_EMULATOR
    sdk_line = "to build it, set CALRT_HOME to the CalRT SDK's folder\n"
    assert capsys.readouterr().out == (
        f"device emulator: built {emulated}, {shim}\ndevice hw: not built; {sdk_line}"
    )
    assert sorted(into.iterdir()) == [emulated, shim]
    assert asked(shim) == 42

    (into / build.SHIM_ON_CALRT).touch()
    assert small.main(["--into", str(into)]) == 0
    assert capsys.readouterr().out == (
        f"device emulator: up to date\ndevice hw: left as it is; {sdk_line}"
    )


@needs_compiler
def test_only_what_has_changed_is_compiled(small):
    libraries = [small.LIBRARIES / name for name in (build.EMULATOR_LIBRARY, build.SHIM_ON_EMULATOR)]
    assert small.build_emulator() == libraries
    assert small.build_emulator() == []
    assert small.build_emulator(force=True) == libraries

    def edit(name, text):
        (small.SOURCES / name).write_text(text)

    def older_than_build_py():
        age(*small.SOURCES.rglob("*"))
        age(*libraries, by=1)

    changes = {
        "a source": lambda: edit("emulator/answer.cpp", "int answer() { return 43; }\n"),
        "a header": lambda: edit("include/calrt/calrt.hpp", "int answer();\n"),
        "one less": (small.SOURCES / "emulator" / "other.cpp").unlink,
        "a library less": libraries[1].unlink,
        "build.py": older_than_build_py,
    }
    for what, change in changes.items():
        change()
        assert small.build_emulator() == libraries, what
        assert small.build_emulator() == [], what
    assert asked(libraries[1]) == 43

    (small.SOURCES / "shim" / ".#asked.cpp").symlink_to("an editor's lock")
    assert small.build_emulator() == libraries


@needs_compiler
def test_another_sdk_is_built_on_anew(small, sdk):
    first, second = sdk("first"), sdk("second")
    shim = small.LIBRARIES / build.SHIM_ON_CALRT
    for home in (first, second, first):
        assert small.build_calrt(home) == [shim]
        assert small.build_calrt(home) == []
        assert asked(shim) == 42


@needs_compiler
def test_the_driver_builds_on_an_sdk_and_opens_a_card(tmp_path):
    emulated = build.LIBRARIES / build.EMULATOR_LIBRARY
    if not emulated.is_file():
        pytest.skip("the emulator is not built")
    home = tmp_path / "sdk"
    shutil.copytree(build.SOURCES / "include", home / "include")
    (home / "lib").mkdir()
    for name in ("libcalrt.so", build.EMULATOR_LIBRARY):  # its soname
        (home / "lib" / name).symlink_to(emulated)

    [shim] = build.build_calrt(home, tmp_path)
    assert shim == tmp_path / "libcaltrio_calrt.so"
    library = bindings.load(shim)
    manifest = load_manifest()
    calbin = emulator.write_card(
        tmp_path, manifest, load_timing("quick"), PRESETS["full-duplex"].semantics
    )
    code = bindings.ffi().new("int32_t *", 99)
    device = library.caltrio_open(bytes(calbin), code)
    assert device != bindings.ffi().NULL
    assert code[0] == 0
    assert library.caltrio_model_count(device) == len(manifest.submodels)
    library.caltrio_stop(device)
    while not library.caltrio_stopped(device):
        time.sleep(0.001)
    library.caltrio_free(device)


@pytest.fixture
def not_built(tmp_path, monkeypatch):
    """An installation without libraries, and a compiler in sight."""
    monkeypatch.setattr(bindings, "LIBRARIES", tmp_path / "none")
    monkeypatch.delenv("CALRT_HOME", raising=False)
    monkeypatch.setenv("CXX", str(script(tmp_path / "bin" / "some++", "#!/bin/sh\n")))


RUN = "run 'python -m hw.build'"
INSTALL_AND_RUN = f"install a C++ compiler (g++ or clang++) and {RUN}"


@pytest.mark.parametrize("cxx", ["some++", "nothing++"])
def test_a_device_that_is_not_built_says_what_to_do(not_built, tmp_path, monkeypatch, cxx):
    monkeypatch.setenv("CXX", str(tmp_path / "bin" / cxx))
    remedy = RUN if cxx == "some++" else INSTALL_AND_RUN
    assert emulator.unavailable() == f"not built: {remedy}"
    assert calrt.unavailable() == (
        f"not built: set CALRT_HOME to the CalRT SDK's folder, then {remedy}"
    )
    monkeypatch.setenv("CALRT_HOME", "/opt/calrt")
    assert calrt.unavailable() == (f"not built on the SDK that CALRT_HOME names, /opt/calrt: {remedy}")


def test_the_command_line_says_it(not_built, monkeypatch, capsys):
    assert run(["devices", "--json"]) == 0
    reasons = {kind["name"]: kind["unavailable"] for kind in json.loads(capsys.readouterr().out)}
    assert reasons["emulator"] == f"not built: {RUN}"
    assert reasons["hw"].startswith("not built: set CALRT_HOME ")
    assert reasons["sim"] is None

    assert run(["golden", "check", "--device", "emulator"]) == 2
    assert capsys.readouterr().err == f"caltrio: --device: emulator: not built: {RUN}\n"


class Hook:
    """hatch_build.py on a small tree: what it did to the wheel, and what it said."""

    def __init__(self, root):
        self.root = root
        self.warnings = []
        app = SimpleNamespace(display_warning=self.warnings.append)
        made = load(ROOT / "hatch_build.py").NativeLibraries
        self.hook = made(str(root), {}, None, None, "", "wheel", app)

    def __call__(self, version="standard"):
        self.warnings.clear()
        data = {"force_include": {}, "pure_python": True}
        self.hook.initialize(version, data)
        return data


LATER = "build later with 'python -m hw.build'"
PURE = {"force_include": {}, "pure_python": True}


@pytest.fixture
def hook(tmp_path, small, monkeypatch):
    monkeypatch.delenv("CALRT_HOME", raising=False)
    return Hook(tmp_path)


@needs_compiler
def test_a_wheel_has_what_was_compiled_for_it(hook, sdk, small, monkeypatch):
    names = [build.EMULATOR_LIBRARY, build.SHIM_ON_EMULATOR]

    def included(*names):
        return {str(small.LIBRARIES / name): f"hw/_native/{name}" for name in names}

    data = hook()
    assert data["force_include"] == included(*names)
    assert data["tag"].startswith("py3-none-")
    assert not data["pure_python"]
    assert hook.warnings == []
    assert hook("editable") == PURE
    assert all((small.LIBRARIES / name).is_file() for name in names)

    monkeypatch.setenv("CALRT_HOME", str(sdk("sdk")))
    assert hook()["force_include"] == included(*names, build.SHIM_ON_CALRT)
    assert hook.warnings == []

    monkeypatch.delenv("CALRT_HOME")
    assert hook()["force_include"] == included(*names)

    monkeypatch.setenv("CALRT_HOME", "/nowhere")
    assert hook()["force_include"] == included(*names)
    [warning] = hook.warnings
    assert warning == (
        "device hw left out: /nowhere/include/calrt/calrt.hpp is not there; CALRT_HOME is to name the"
        f" CalRT SDK's folder; {LATER}"
    )


@needs_compiler
def test_a_wheel_made_without_a_compiler_has_no_libraries_of_before(hook, small, monkeypatch, tmp_path):
    small.build_emulator()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    assert hook() == PURE


def test_a_wheel_made_without_a_compiler_says_what_is_left_out(hook, no_compiler):
    for version in ("standard", "editable"):
        assert hook(version) == PURE
        [warning] = hook.warnings
        assert warning == (
            "devices emulator and hw left out: there is no C++ compiler; install g++ or clang++, or"
            f" set CXX; {LATER}"
        )


def test_a_compiler_that_fails_does_not_end_an_installation(hook, tmp_path, monkeypatch):
    failing = script(
        tmp_path / "bin" / "bad++", "#!/bin/sh\necho 'In x:\na.cpp:3:1: error: no' >&2\nexit 4\n"
    )
    monkeypatch.setenv("CXX", str(failing))
    assert hook() == PURE
    assert hook.warnings == [f"devices emulator and hw left out: a.cpp:3:1: error: no; {LATER}"]
