"""What is kept of a job whose card hangs. As a script: in a process of its own, that ends with a code.

Arguments: the calbin, and the exit code. It says how many arrays of the job are still in memory.
"""

import gc
import sys
import weakref
from pathlib import Path

import trio

import hw.device
from caltrio.capabilities import Capabilities
from caltrio.config import ExecutorConfig
from caltrio.executor import open_executor
from caltrio.manifest import load_manifest
from caltrio.prepare import host_memory
from caltrio.semantics import EngineSemantics
from caltrio.tomlfile import Ns
from hw.build import LIBRARIES, SHIM_ON_EMULATOR

FULL = EngineSemantics()


async def arrays_after(open_device, manifest):
    """Weak references to the arrays of a job that was on the card as the executor was left."""
    config = ExecutorConfig(grace_ns=Ns(50_000_000))
    async with open_device() as device, open_executor(device, manifest, config) as executor:
        flying = executor.core.in_flight.values()
        async with executor.sequence(4, 1) as sequence, trio.open_nursery() as nursery:
            nursery.start_soon(sequence.prefill, [1, 2, 3, 4])
            while not any(job.timings.submitted_ns is not None for job in flying):
                await trio.sleep(1e-4)
            (job,) = flying
            memory = host_memory(job)
            arrays = [weakref.ref(each) for each in (memory.tokens, memory.positions, memory.logits)]
            nursery.cancel_scope.cancel()
        del job, memory
    return arrays


def main():
    _, calbin, code = sys.argv
    hw.device._CLOSE_S = 0.2

    def opened():
        believed = Capabilities.assumed(FULL)
        return hw.device.open_hw(LIBRARIES / SHIM_ON_EMULATOR, Path(calbin), FULL, believed)

    arrays = trio.run(arrays_after, opened, load_manifest())
    gc.collect()
    print(sum(array() is not None for array in arrays), flush=True)  # noqa: T201
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
