"""The device kind ``hw``: the driver on the vendor's library."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from caltrio.capabilities import Capabilities
from caltrio.device import Device, DeviceKind, DeviceOptions, OpenDevice
from caltrio.errors import InputError

from .bindings import missing
from .build import LIBRARIES, SHIM_ON_CALRT, remedy
from .device import open_hw

T = TypeVar("T")


def unavailable() -> str | None:
    """Why the card cannot be used, or ``None``."""
    if not missing(SHIM_ON_CALRT):
        return None
    home = os.environ.get("CALRT_HOME")
    if not home:
        return f"not built: set CALRT_HOME to the CalRT SDK's folder, then {remedy()}"
    return f"not built on the SDK that CALRT_HOME names, {home}: {remedy()}"


def run(main: Callable[[OpenDevice], Awaitable[T]], options: DeviceOptions) -> T:
    """Run ``main`` on the card; see :class:`caltrio.device.RunDevice`.

    Without a capability file one job is in flight and no reset is used (§14).
    """
    calbin = options.calbin
    if calbin is None:
        raise InputError("--device", "hw", "needs a model file", "give it with --calbin")

    @asynccontextmanager
    async def opened() -> AsyncIterator[Device]:
        library = LIBRARIES / SHIM_ON_CALRT
        believed = options.capabilities or Capabilities()
        async with open_hw(library, calbin, options.semantics, believed) as device:
            yield device

    return trio.run(main, opened)


KIND = DeviceKind(
    "hw",
    "The CalRT driver on the vendor's library",
    "real",
    unavailable,
    run,
)
