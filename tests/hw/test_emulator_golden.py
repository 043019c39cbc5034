"""What the emulated card says through the driver is what the reference says, whatever overlaps."""

import pytest
import trio
from attrs import evolve
from support import MS, US, card, needs_emulator, profile, small_manifest

from caltrio.config import ExecutorConfig, KvPolicy
from caltrio.errors import ServiceFailed
from caltrio.executor import open_executor
from caltrio.golden import check, reference_golden, refusals
from caltrio.semantics import (
    PRESETS,
    CompletionOrder,
    CompletionSignal,
    Dma,
    DmaOrder,
    EngineSemantics,
    SlotRelease,
    SubmitWhenFull,
)
from caltrio.tomlfile import Ns
from hw.device import HwDevice

pytestmark = needs_emulator

VOCAB = 64
BLOCK = EngineSemantics(submit_when_full=SubmitWhenFull.BLOCK)
QUICK = profile(submit=5 * US, h2d=60 * US, compute=150 * US, decode=100 * US, d2h=40 * US,
                interrupt=5 * US)  # fmt: skip
GOLDEN = reference_golden("small", VOCAB, 6, lengths=False)
LENGTHS = evolve(GOLDEN, cases=reference_golden("small", VOCAB, 0).group("lengths"))


def said(folder, semantics=BLOCK, *, golden=GOLDEN, rows=1, facts=None, **limits):
    """The report of a golden run; on a new card of these semantics."""
    manifest = small_manifest(golden.vocab, rows)
    open_device = card(folder, semantics, QUICK, manifest, **(facts or {}))

    async def main():
        config = ExecutorConfig(**limits)
        async with open_device() as device, open_executor(device, manifest, config) as executor:
            report = await check(executor, golden)
            return report, await refusals(executor)

    report, refused = trio.run(main)
    assert refused is None
    return report


def assert_equal(report, golden=GOLDEN):
    assert report.first_difference is None
    assert report.passed
    assert report.compared == len(golden.cases)
    assert report.max_abs == 0  # bit for bit


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("preset", PRESETS)
def test_each_hypothesis(tmp_path, preset, in_flight):
    semantics = evolve(PRESETS[preset].semantics, submit_when_full=SubmitWhenFull.BLOCK)
    assert_equal(said(tmp_path, semantics, max_inflight=in_flight))


@pytest.mark.parametrize("release", SlotRelease)
@pytest.mark.parametrize("engines", [2, 3])
def test_each_end_of_a_slot(tmp_path, release, engines):
    semantics = evolve(BLOCK, engines=engines, slot_release=release)
    assert_equal(said(tmp_path, semantics, max_inflight=3))


@pytest.mark.parametrize(
    "more",
    [
        {"dma_order": DmaOrder.ISSUE},
        {"dma_order": DmaOrder.ISSUE, "dma": Dma.HALF_DUPLEX},
        {"completion_signal": CompletionSignal.COMPUTE_IDLE},
        {"completion_signal": CompletionSignal.COMPUTE_IDLE, "slot_release": SlotRelease.H2D},
        {"completion_order": CompletionOrder.ANY, "compute_sharing": (1.0, 0.6, 0.4)},
        {"compute_stages": (0.2, 0.3, 0.5), "compute_sharing": (1.0, 0.5)},
        {"submit_when_full": SubmitWhenFull.BUSY, "engines": 3},
    ],
    ids=lambda more: " ".join(f"{key}={value}" for key, value in more.items()),
)
def test_further_semantics(tmp_path, more):
    assert_equal(said(tmp_path, evolve(BLOCK, **more), max_inflight=3))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_kv_that_grows(tmp_path, in_flight):
    report = said(
        tmp_path, max_inflight=in_flight, kv_policy=KvPolicy.GROW, admission_timeout_ns=Ns(60_000 * MS)
    )
    assert_equal(report)


def test_the_card_has_little_kv(tmp_path):
    """The card's own manager refuses what does not fit; requests wait, and none is wrong."""
    assert_equal(said(tmp_path, facts={"kv_tokens": 41_000}, max_inflight=2, max_active_sequences=64,
                      kv_capacity_tokens=10**9))  # fmt: skip


@pytest.mark.parametrize(("rows", "vocab"), [(4, 64), (3, 40), (2, 7)])
def test_several_rows_of_logits(tmp_path, rows, vocab):
    golden = reference_golden("small", vocab, 4, lengths=False)
    assert_equal(said(tmp_path, golden=golden, rows=rows, max_inflight=2), golden)


def test_prompts_up_to_a_full_context(tmp_path):
    assert max(len(case.prompt) for case in LENGTHS.cases) == 40_959
    assert_equal(said(tmp_path, golden=LENGTHS, max_inflight=2), LENGTHS)


@pytest.mark.parametrize("late", [5, 0])
def test_a_csr_that_is_off_by_one_is_a_wrong_token(tmp_path, monkeypatch, late):
    """The model sees such a defect of the driver; from the sixth job on, or at once."""
    right, calls = HwDevice.set_csr, []

    def wrong(self, graph, name, value):
        calls.append(value)
        return right(self, graph, name, value + (len(calls) > 2 * late))

    monkeypatch.setattr(HwDevice, "set_csr", wrong)
    with pytest.raises(AssertionError, match="token"):
        assert_equal(said(tmp_path, max_inflight=2))


def test_a_card_with_one_engine_has_no_parallel_mode(tmp_path):
    """The load says so; a restart with the same configuration would not help."""
    with pytest.raises(ServiceFailed, match="27 UNSUPPORTED") as caught:
        said(tmp_path, evolve(BLOCK, engines=1), max_inflight=2)
    assert caught.value.exit_code == 78
    assert_equal(said(tmp_path, evolve(BLOCK, engines=1), max_inflight=1))
