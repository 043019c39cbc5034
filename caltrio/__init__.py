"""One trio executor for an NPU runtime, run unchanged on a timing model or on the card.

The face of the package: what a program needs to drive a device. Modules hold the rest, and are
imported as a name is first used, so that the command line starts and can be interrupted at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import ExecutorConfig
    from .errors import CaltrioError, InputError, RequestError
    from .executor import Executor, InferenceResult, Sequence, open_executor
    from .manifest import ModelGeneration, TaskKind, qwen3_generation
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
    "ModelGeneration": ".manifest",
    "RequestError": ".errors",
    "Scenario": ".scenario",
    "Sequence": ".executor",
    "TaskKind": ".manifest",
    "TimingProfile": ".timing",
    "Workload": ".workload.spec",
    "load_scenario": ".scenario",
    "load_timing": ".timing",
    "open_executor": ".executor",
    "qwen3_generation": ".manifest",
}

__all__ = [
    "PRESETS",
    "CaltrioError",
    "EngineSemantics",
    "Executor",
    "ExecutorConfig",
    "InferenceResult",
    "InputError",
    "ModelGeneration",
    "RequestError",
    "Scenario",
    "Sequence",
    "TaskKind",
    "TimingProfile",
    "Workload",
    "load_scenario",
    "load_timing",
    "open_executor",
    "qwen3_generation",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
