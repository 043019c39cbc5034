"""Every device passes the same contract; a broken one does not."""

from contextlib import asynccontextmanager

import pytest
import trio.testing
from attrs import evolve
from support import MS, card, needs_emulator, profile

from caltrio.costs import Costs
from caltrio.errors import Unavailable
from caltrio.manifest import load_manifest
from caltrio.semantics import PRESETS, SubmitWhenFull
from caltrio.testing import ContractBroken, FakeDevice, check_device
from sim.clock import run_virtual
from sim.device import SimDevice

TIMING = profile(submit=1000, h2d=3000, compute=50_000, d2h=4000, interrupt=500, post=700)


@pytest.mark.parametrize("preset", PRESETS)
def test_sim(preset):
    async def main(clock):
        @asynccontextmanager
        async def opened():
            yield SimDevice(clock, PRESETS[preset].semantics)

        await check_device(opened)

    run_virtual(main, Costs(TIMING, load_manifest(), 0))


@needs_emulator
@pytest.mark.parametrize("reports", [True, False], ids=["stages", "no-stages"])
@pytest.mark.parametrize("when_full", SubmitWhenFull)
@pytest.mark.parametrize("preset", PRESETS)
def test_emulator(tmp_path, preset, when_full, reports):
    semantics = evolve(PRESETS[preset].semantics, submit_when_full=when_full)
    # Long enough that a busy machine finds the prefill still there, to cancel it.
    timing = profile(submit=1000, h2d=3000, compute=20 * MS, decode=50_000, d2h=4000, interrupt=500)
    trio.run(check_device, card(tmp_path, semantics, timing, load_manifest(), report_stages=reports))


@pytest.fixture
def clock():
    return trio.testing.MockClock(autojump_threshold=0)


def opener(cls):
    @asynccontextmanager
    async def opened():
        yield cls(busy_ns=200_000)

    return opened


async def test_fake(clock):
    await check_device(opener(FakeDevice))


class Fails(FakeDevice):
    async def infer(self, job):
        return 17 if job.job_id == 3 else await super().infer(job)


class OutOfOrder(FakeDevice):
    async def wait(self):
        done = await super().wait()
        done.stages.h2d_start_ns = self.timer.now_ns() + 10**9
        return done


async def test_a_device_that_refuses_is_caught(clock):
    with pytest.raises(ExceptionGroup) as caught:
        await check_device(opener(Fails))
    assert caught.group_contains(Unavailable, match="CalRT code 17")


async def test_a_device_with_stages_out_of_order_is_caught(clock):
    with pytest.raises(ContractBroken, match="out of order"):
        await check_device(opener(OutOfOrder))


async def test_a_device_too_quick_for_a_cancel_is_told(clock):
    @asynccontextmanager
    async def opened():
        yield FakeDevice(busy_ns=0)

    with pytest.raises(ContractBroken, match="long enough"):
        await check_device(opened)
