"""One trio executor for an NPU runtime, run unchanged on a timing model or on the card.

The face of the package: what a program needs to drive a device. Modules hold the rest.
"""

from .config import ExecutorConfig
from .errors import CaltrioError, InputError, RequestError
from .executor import Executor, InferenceResult, Sequence, open_executor
from .manifest import ModelGeneration, TaskKind, qwen3_generation
from .scenario import Scenario, load_scenario
from .semantics import PRESETS, EngineSemantics
from .timing import TimingProfile, load_timing
from .workload.spec import Workload

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
