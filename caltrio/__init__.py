"""One trio executor for an NPU runtime, run unchanged on a timing model or on the card.

The face of the package: what a program needs to drive a device. Modules hold the rest, and are
imported as a name is first used, so that the command line starts and can be interrupted at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ExecutorConfig
    from .errors import CaltrioError, InputError, RequestError, ServiceFailed
    from .executor import Executor, InferenceResult, Sequence, open_executor
    from .manifest import Manifest, ManifestMismatch, ModelGeneration, TaskKind, load_manifest
    from .scenario import Scenario, load_scenario
    from .semantics import PRESETS, EngineSemantics
    from .timing import TimingProfile, load_timing
    from .workload.spec import Workload

_HOME = {
    "PRESETS": ".semantics",
    "CaltrioError": ".errors",
    "EngineSemantics": ".semantics",
    "Executor": ".executor",
    "ExecutorConfig": ".config",
    "InferenceResult": ".executor",
    "InputError": ".errors",
    "Manifest": ".manifest",
    "ManifestMismatch": ".manifest",
    "ModelGeneration": ".manifest",
    "RequestError": ".errors",
    "Scenario": ".scenario",
    "Sequence": ".executor",
    "ServiceFailed": ".errors",
    "TaskKind": ".manifest",
    "TimingProfile": ".timing",
    "Workload": ".workload.spec",
    "load_scenario": ".scenario",
    "load_manifest": ".manifest",
    "load_timing": ".timing",
    "open_executor": ".executor",
}

__all__ = [
    "PRESETS",
    "CaltrioError",
    "EngineSemantics",
    "Executor",
    "ExecutorConfig",
    "InferenceResult",
    "InputError",
    "Manifest",
    "ManifestMismatch",
    "ModelGeneration",
    "RequestError",
    "Scenario",
    "Sequence",
    "ServiceFailed",
    "TaskKind",
    "TimingProfile",
    "Workload",
    "load_manifest",
    "load_scenario",
    "load_timing",
    "open_executor",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
