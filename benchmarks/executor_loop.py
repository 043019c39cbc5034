"""How fast the executor runs in the loop with the SimPy device, against a bare SimPy queue.

Both are timed alternately in one process, and the medians are compared: absolute times vary from
machine to machine, their ratio much less. The bare queue is SimPy's textbook one: a source, one
process a customer, and one ``simpy.Resource``.

    python benchmarks/executor_loop.py [--steps 1000000]
"""

from __future__ import annotations

import statistics
import time

import click
import simpy
import trio

from caltrio.config import ExecutorConfig
from caltrio.costs import Costs
from caltrio.executor import Executor, open_executor
from caltrio.manifest import load_manifest
from caltrio.semantics import PRESETS
from caltrio.timing import load_timing
from sim.clock import SimClock, run_virtual
from sim.device import SimDevice

SEQUENCES = 8


def bare_simpy(jobs: int) -> float:
    """Seconds for ``jobs`` through one server."""
    env = simpy.Environment()
    server = simpy.Resource(env, capacity=1)

    def customer():
        with server.request() as turn:
            yield turn
            yield env.timeout(40)

    def source():
        for _ in range(jobs):
            yield env.timeout(50)
            env.process(customer())

    env.process(source())
    begin = time.perf_counter()
    env.run()
    return time.perf_counter() - begin


def executor_in_loop(preset: str, max_inflight: int, steps: int) -> float:
    """Seconds for ``steps`` device steps over 8 sequences."""
    generation = load_manifest()
    costs = Costs(load_timing("qwen3-8b"), generation, seed=1)
    each = steps // SEQUENCES

    async def client(executor: Executor) -> None:
        async with executor.sequence(100, each) as sequence:
            await sequence.prefill(100)
            await sequence.emit_token()
            for _ in range(each - 1):
                await sequence.decode()
                await sequence.emit_token()

    async def main(clock: SimClock) -> None:
        device = SimDevice(clock, PRESETS[preset].semantics)
        config = ExecutorConfig(max_inflight=max_inflight, kv_capacity_tokens=10**9)
        async with (
            open_executor(device, generation, config) as executor,
            trio.open_nursery() as nursery,
        ):
            for _ in range(SEQUENCES):
                nursery.start_soon(client, executor)

    begin = time.perf_counter()
    run_virtual(main, costs)
    return time.perf_counter() - begin


@click.command()
@click.option("--repeats", default=5, show_default=True)
def main(repeats: int) -> None:
    """Print steps per second and the ratio to a bare SimPy queue."""
    jobs, steps = 30_000, 8_000
    print(f"executor in the loop, {SEQUENCES} sequences, {steps} steps a run, median of {repeats}")
    for preset, max_inflight in (("full-duplex", 1), ("full-duplex", 2), ("shared-compute", 2)):
        bare, ours = [], []
        for _ in range(repeats):
            bare.append(bare_simpy(jobs) / jobs)
            ours.append(executor_in_loop(preset, max_inflight, steps) / steps)
        one, other = statistics.median(bare), statistics.median(ours)
        print(
            f"  {preset:15} {max_inflight} in flight: {1 / other:8,.0f} steps/s "
            f"({other * 1e6:5.1f} µs a step); bare SimPy queue {1 / one:8,.0f} jobs/s; "
            f"ratio 1/{other / one:.1f} (at least 1/25)"
        )


if __name__ == "__main__":
    main()
