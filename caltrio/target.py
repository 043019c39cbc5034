"""The device that a command works on: the options that say which, and :class:`Target`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from signal import Signals
from typing import Any, TypeVar

import click

from .capabilities import Capabilities, load_capabilities
from .commands import json_option
from .device import DeviceKind, DeviceOptions, OpenDevice, device_kind
from .errors import InputError
from .manifest import Manifest, load_text_manifest
from .output import after_signal
from .semantics import EngineSemantics
from .signals import stoppable
from .timing import load_timing

T = TypeVar("T")

PRODUCT_TIMING = "qwen3-8b"

_DEVICE_OPTIONS = (
    click.option("--device", "device_name", default="sim", show_default=True,
                 help="A device; see 'caltrio devices'."),
    click.option("--manifest", "manifest_name", default="qwen3-8b", show_default=True,
                 help="What it holds: a manifest that ships, or a .toml file."),
    click.option("--calbin", type=click.Path(path_type=Path), help="Model file of a real device."),
    click.option("--capabilities", type=click.Path(path_type=Path),
                 help="What may be used of a real device, with the evidence (.toml)."),
)  # fmt: skip


DEVICE_PARAMETERS = ("device_name", "manifest_name", "calbin", "capabilities")


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which device, and what it holds; :func:`device_of` reads them."""
    for option in reversed(_DEVICE_OPTIONS):
        command = option(command)
    return command


def device_of(
    device_name: str, manifest_name: str, calbin: Path | None, capabilities: Path | None
) -> tuple[DeviceKind, Manifest, Capabilities | None]:
    """What the options name. Raises :class:`InputError` for one that cannot mean anything."""
    kind, manifest = device_kind(device_name), load_text_manifest(manifest_name)
    for option, value in (("--calbin", calbin), ("--capabilities", capabilities)):
        only_for_real(kind, option, given=value is not None)
    if calbin is not None and not calbin.is_file():
        raise InputError(f"--calbin {calbin}", "", "is not a file", "name the model file of the device")
    return kind, manifest, None if capabilities is None else load_capabilities(capabilities)


def only_for_real(kind: DeviceKind, option: str, *, given: bool) -> None:
    """Raise :class:`InputError` if an option for devices of real time is given for another."""
    if given and kind.time != "real":
        problem = f"is for a device of real time, and {kind.name} is of {kind.time} time"
        raise InputError(option, "", problem, "leave it out")


class Target:
    """The device that a command works on.

    Attributes:
        kind, manifest: which, and what it holds.
        seed: of everything random.
        stopped_by: the signal that ended a run early, if one did.
    """

    def __init__(
        self,
        device_name: str,
        manifest_name: str,
        calbin: Path | None,
        capabilities: Path | None,
        timing: str | None,
        seed: int,
    ) -> None:
        self.kind, self.manifest, self._capabilities = device_of(
            device_name, manifest_name, calbin, capabilities
        )
        self._calbin, self.seed = calbin, seed
        self._timing = None if timing is None else load_timing(timing)
        self.stopped_by: Signals | None = None

    def run(
        self,
        semantics: EngineSemantics,
        main: Callable[[OpenDevice], Awaitable[T]],
        *,
        check: bool = False,
    ) -> T | None:
        """Run ``main``; ``None`` if a signal ended it.

        ``check``: what the device says is to be checked, not when: it may be quicker than the product.
        """
        usual = (check and self.kind.check_timing) or PRODUCT_TIMING
        options = DeviceOptions(
            semantics,
            self._timing or load_timing(usual),
            self.seed,
            self.manifest,
            calbin=self._calbin,
            capabilities=self._capabilities,
        )

        async def stoppable_main(open_device: OpenDevice) -> T | None:
            result: T | None = None
            async with stoppable() as stop:
                result = await main(open_device)
            self.stopped_by = stop.by
            return result if stop.by is None else None

        return self.kind.run(stoppable_main, options)

    def exit_code(self, command: str, code: int, kept: str = "what had ended is shown") -> int:
        """That of a signal, if one ended a run: then a line says what is ``kept``. Else ``code``."""
        return code if self.stopped_by is None else after_signal(command, self.stopped_by, kept)


def on_target(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` the :class:`Target` that its options name, as its argument ``target``."""

    @wraps(command)
    def with_target(timing: str | None, seed: int, **options: Any) -> Any:
        device = {name: options.pop(name) for name in DEVICE_PARAMETERS}
        return command(target=Target(**device, timing=timing, seed=seed), **options)

    for option in (
        json_option,
        click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1),
                     help="Of everything random."),
        click.option("--timing", help="Timing profile, where the card is a model.  [default: "
                     "qwen3-8b; 'quick' where only what it says is checked, in real time]"),
    ):  # fmt: skip
        with_target = option(with_target)
    return device_options(with_target)
