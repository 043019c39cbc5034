"""The ends of a device: threads, descriptors and memory come back, except what a card may still use."""

import ctypes
import gc
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import trio
from emulated import MANIFEST, driven, held_back, on_card, say, until
from kept import arrays_after
from support import CLOSED, MS, STARTED, US, card, needs_emulator, opener, path, profile

import hw.device
from caltrio.manifest import load_manifest
from caltrio.semantics import EngineSemantics
from hw.emulator import write_card

pytestmark = needs_emulator

FULL = EngineSemantics()
QUICK = profile(h2d=10 * US, compute=50 * US, d2h=10 * US)
SLOW = profile(h2d=MS, compute=120 * MS, d2h=MS)


def threads():
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def in_use():
    """Bytes that the C library has given out and not got back, in all of its pools."""

    class Mallinfo2(ctypes.Structure):
        _fields_ = tuple(
            (name, ctypes.c_size_t)
            for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                         "uordblks", "fordblks", "keepcost")
        )  # fmt: skip

    call = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if call is None:
        pytest.skip("this C library does not tell what is in use")
    call.restype = Mallinfo2
    info = call()
    return info.uordblks + info.hblkhd


# --- what comes back ------------------------------------------------------------------------------


async def growth(some):
    """What ``some()`` leaves in use, the second time; no thread and no descriptor."""
    await some()  # what stays for the life of the process is there then
    gc.collect()
    before, used = (threads(), descriptors()), in_use()
    await some()
    gc.collect()
    assert (threads(), descriptors()) == before
    return in_use() - used


async def test_two_hundred_devices(tmp_path):
    open_device = card(tmp_path, FULL, QUICK, MANIFEST)

    async def some():
        for _ in range(200):
            async with open_device() as device:
                assert len(device.models()) == len(MANIFEST.submodels)

    assert await growth(some) < 200 * 100


async def test_executors_that_worked(tmp_path):
    open_device = card(tmp_path, FULL, QUICK, MANIFEST)

    async def some():
        for _ in range(50):
            async with driven(open_device, max_inflight=2) as executor:
                await say(executor)

    assert await growth(some) < 50 * 1000


async def test_what_is_kept_is_seen():
    kept = []

    async def some():
        await trio.lowlevel.checkpoint()
        kept.extend(np.ones(1000) for _ in range(50))

    assert await growth(some) > 50 * 8000


async def test_several_devices_at_once(tmp_path):
    """Nothing in the driver or the emulator is of the process."""
    before = threads(), descriptors()
    open_device = card(tmp_path, FULL, QUICK, MANIFEST)

    async def client(index):
        async with driven(open_device, max_inflight=2) as executor:
            for step in range(4):
                await say(executor, index + step)

    async with trio.open_nursery() as nursery:
        for index in range(5):
            nursery.start_soon(client, index)
    assert (threads(), descriptors()) == before


# --- left early -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["exception", "cancel", "held back"])
async def test_an_executor_that_is_left_early(tmp_path, how):
    """With a job on the card, and one held back: the first is waited for, and all is over then."""
    before = threads(), descriptors()

    async def leave():
        async with trio.open_nursery() as nursery:
            async with driven(card(tmp_path, FULL, SLOW, MANIFEST)) as executor:
                nursery.start_soon(say, executor, 0, 1)
                await until(lambda: on_card(executor))
                if how == "held back":
                    nursery.start_soon(say, executor, 1, 1)
                    await until(lambda: held_back(executor) is not None)
                (job,) = on_card(executor)
                left.append((executor, job))
                if how == "cancel":
                    scope.cancel()
                    await trio.sleep_forever()
                raise KeyError("left")

    left = []
    with trio.fail_after(30):
        if how == "cancel":
            with trio.CancelScope() as scope:
                await leave()
        else:
            with pytest.raises(ExceptionGroup) as caught:
                await leave()
            assert caught.group_contains(KeyError)
    ((executor, job),) = left
    assert job.timings.waited_ns is not None
    assert path(executor) == [*STARTED, *CLOSED]
    assert (threads(), descriptors()) == before


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", [False, True])
def test_memory_that_a_card_may_still_use_is_never_freed(tmp_path, monkeypatch, hangs):
    monkeypatch.setattr(hw.device, "_CLOSE_S", 0.2)
    faults = ["hang_for_ever at=0"] if hangs else []
    before = threads()
    begin = time.monotonic()
    open_device = card(tmp_path, FULL, QUICK if hangs else SLOW, MANIFEST, faults=faults)
    arrays = trio.run(arrays_after, open_device, MANIFEST)
    assert time.monotonic() - begin < 30
    for _ in range(3):
        gc.collect()
    assert [array() is not None for array in arrays] == [hangs] * 3
    assert (threads() > before) == hangs


@pytest.mark.parametrize(("fault", "alive", "code"), [("hang_for_ever", 3, 75), ("", 0, 7)])
def test_the_interpreter_ends_as_told(tmp_path, fault, alive, code):
    """Native threads that hang hold nobody up: the process ends, with the code that it was to have."""
    faults = [f"{fault} at=0"] if fault else []
    calbin = write_card(tmp_path, load_manifest(), SLOW, FULL, faults=faults)
    script = Path(__file__).with_name("kept.py")
    line = [sys.executable, script, calbin, str(code)]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == (f"{alive}\n", "", code)


async def test_a_device_after_one_that_hangs(tmp_path, monkeypatch):
    """What the process keeps of the first is no matter to the second."""
    monkeypatch.setattr(hw.device, "_CLOSE_S", 0.2)
    await arrays_after(card(tmp_path, FULL, QUICK, MANIFEST, faults=["hang_for_ever at=0"]), MANIFEST)
    write_card(tmp_path, MANIFEST, QUICK, FULL)
    async with driven(opener(tmp_path / "model.calbin", FULL), max_inflight=2) as executor:
        async with trio.open_nursery() as nursery:
            for index in range(4):
                nursery.start_soon(say, executor, index, 6)
