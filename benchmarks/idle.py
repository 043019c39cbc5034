"""What waiting costs: 100 requests wait for KV for ten real seconds, and the process sleeps.

The runtime's ``canAllocate()`` says no all the time (FI04), on a device in real time. Waiting is
event-driven: nothing polls, so the share of a core that is used must be far below 1 %.

    python benchmarks/idle.py [--waiting 100] [--seconds 10]
"""

from __future__ import annotations

import time

import click
import trio

from caltrio.config import ExecutorConfig
from caltrio.errors import DeadlineExceeded
from caltrio.executor import open_executor
from caltrio.manifest import load_manifest
from caltrio.testing import FakeDevice


class NoKv:
    """A runtime that has no KV to give; counts how often it is asked."""

    asked = 0

    def can_allocate(self, sequences):
        self.asked += 1
        return False

    def apply(self, sequence_id, target_tokens):
        raise AssertionError("never asked for")

    def release(self, sequence_id):
        raise AssertionError("nothing is held")


@click.command()
@click.option("--waiting", default=100, show_default=True)
@click.option("--seconds", default=10.0, show_default=True)
def main(waiting: int, seconds: float) -> None:
    """Print the share of a core that the process used while everybody waited."""
    kv, ended = NoKv(), []

    async def one(executor) -> None:
        try:
            async with executor.sequence(100, 100):
                raise AssertionError("admitted without KV")
        except DeadlineExceeded:
            ended.append(trio.current_time())

    async def run() -> tuple[float, float]:
        config = ExecutorConfig(admission_timeout_ns=round((seconds + 1) * 1e9))
        async with (
            open_executor(FakeDevice(kv=kv), load_manifest(), config) as executor,
            trio.open_nursery() as nursery,
        ):
            for _ in range(waiting):
                nursery.start_soon(one, executor)
            await trio.sleep(0.5)  # all of them wait now
            cpu, wall = time.process_time(), time.perf_counter()
            await trio.sleep(seconds)
            return time.process_time() - cpu, time.perf_counter() - wall

    cpu, wall = trio.run(run)
    print(
        f"{waiting} requests waited for KV for {wall:.1f} s: {cpu * 1e3:.2f} ms of CPU, "
        f"{cpu / wall:.4%} of a core (below 1 %); canAllocate() was asked {kv.asked} times; "
        f"{len(ended)} ended by their deadline"
    )


if __name__ == "__main__":
    main()
