"""Compiles the native libraries into a wheel, where there is a C++ compiler; see hw/build.py."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeLibraries(BuildHookInterface[BuilderConfig]):
    """Adds the libraries to the wheel, or leaves the devices that need them to be built later."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a failure is one line, not the end of the installation."""
        build = _load(Path(self.root, "hw", "build.py"))
        home = os.environ.get("CALRT_HOME")
        names: list[str] = []
        try:
            build.build_emulator()
            names += [build.EMULATOR_LIBRARY, build.SHIM_ON_EMULATOR]
            if home:
                build.build_calrt(Path(home))
                names.append(build.SHIM_ON_CALRT)
        except build.BuildError as error:
            devices = "device hw" if names else "devices emulator and hw"
            self.app.display_warning(
                f"{devices} left out: {_line(str(error))}; build later with 'python -m hw.build'"
            )
        if names and version == "standard":
            # cffi loads them by their ABI: any Python 3, on a machine like this one.
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["pure_python"] = False
            for name in names:
                build_data["force_include"][str(build.LIBRARIES / name)] = f"hw/_native/{name}"


def _load(path: Path) -> Any:
    """The module at ``path``, without its package: that needs what is not installed yet."""
    spec = importlib.util.spec_from_file_location("hw_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line(text: str) -> str:
    """The line of a compiler's complaint that says most."""
    first, *more = text.splitlines()
    return next((line for line in more if "error" in line), first.rstrip(":"))
