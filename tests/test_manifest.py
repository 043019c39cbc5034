"""The contracts of §4.1, read strictly, and compared exactly with what a device reports (§10.2)."""

from importlib.resources import files

import pytest
import trio
import trio.testing
from attrs import evolve

from caltrio.config import ExecutorConfig
from caltrio.errors import InputError
from caltrio.executor import open_executor
from caltrio.manifest import (
    TILE_D0_KEY,
    DeviceModel,
    DeviceTensor,
    ManifestMismatch,
    TaskKind,
    bind,
    device_models,
    load_manifest,
    parse_manifest,
    shipped_manifests,
)
from caltrio.testing import FakeDevice

MANIFEST = load_manifest()
TEXT = (files("caltrio") / "manifests" / "qwen3-8b.toml").read_text(encoding="utf-8")


@pytest.fixture
def clock():
    return trio.testing.MockClock(autojump_threshold=0)


# --- what ships -------------------------------------------------------------------------------------


def test_the_shipped_manifest_is_the_product_of_4_1():
    assert shipped_manifests() == ["qwen3-8b"]
    assert MANIFEST.schema == 1
    assert MANIFEST.calrt_version == "0.7.6"
    assert set(MANIFEST.by_kind) == {TaskKind.PREFILL_IDS, TaskKind.DECODE}
    assert MANIFEST.max_seq == 40960
    positions = {TaskKind.PREFILL_IDS: 40960, TaskKind.DECODE: 1}
    for kind, contract in MANIFEST.by_kind.items():
        assert contract.max_batch == 1
        assert contract.max_seq == 40960
        assert contract.tokens.dtype == contract.position.dtype == "s32"
        assert contract.tokens.shape == contract.position.shape == (1, positions[kind])
        assert contract.tokens.byte_size == contract.position.byte_size == 4 * positions[kind]
        assert contract.logits.dtype == "bf16"
        assert contract.logits.shape == (1, 1, 151936)
        assert contract.logits.byte_size == contract.output_bytes == 303872
        assert contract.csr_cur_seq != contract.csr_total_seq


def test_the_tile_size_is_no_default_of_the_manifest():
    assert TILE_D0_KEY not in "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    with pytest.raises(InputError, match=TILE_D0_KEY):
        parse_manifest(TEXT.replace("max_batch = 1", f"max_batch = 1\n{TILE_D0_KEY} = 16", 1), "m.toml")


def test_the_kinds_of_4_1():
    assert {kind.name for kind in TaskKind} == {"PREFILL_IDS", "PREFILL_EMBEDS", "DECODE", "VISION"}


@pytest.mark.parametrize("tokens", [1, 2, 40960])
def test_bytes_moved(tokens):
    contract = MANIFEST.by_kind[TaskKind.PREFILL_IDS]
    assert contract.input_bytes(tokens) == 8 * tokens
    assert (contract.token_bytes, contract.position_bytes) == (4, 4)


def test_bytes_of_an_embedding():
    contract = MANIFEST.by_kind[TaskKind.PREFILL_IDS]
    tokens = evolve(contract.tokens, shape=(1, 8, 32), dtype="f32", byte_size=1024)
    assert evolve(contract, tokens=tokens).token_bytes == 128
    assert evolve(contract, tokens=tokens).input_bytes(2) == 2 * (128 + 4)


def test_a_manifest_from_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace("40960\n", "20480\n").replace('"qwen3-8b"', '"mine"'))
    read = load_manifest(str(path))
    assert read.name == "mine"
    assert read.max_seq == 20480


def test_max_seq_is_the_least_of_the_graphs():
    first, second = MANIFEST.submodels
    shorter = evolve(MANIFEST, submodels=(first, evolve(second, max_seq=100)))
    assert shorter.max_seq == 100
    assert bind(shorter, device_models(shorter, 16), 1).max_seq == 100


@pytest.mark.parametrize("name", ["qwen3", "qwen3-8", "wen3-8b", "qwen3-8b-x", ""])
def test_no_manifest_is_found_by_a_part_of_its_name(name):
    with pytest.raises(InputError, match="qwen3-8b"):
        load_manifest(name)


# --- strict TOML --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "place", "shown"),
    [
        ("schema = 1", "schema = 2", "", "schema is 2"),
        ("schema = 1", "", "", "'schema' is missing"),
        ('name = "qwen3-8b"', 'name = "x"\nnmae = "x"', "", "nmae"),
        ("max_batch = 1", "max_batches = 1", "submodels.0", "max_batches"),
        ("max_batch = 1", "max_batch = 0", "submodels.0", "max_batch is 0"),
        ("max_seq = 40960", "max_seq = -1", "submodels.0", "max_seq is -1"),
        ("max_seq = 40960", f"max_seq = {2**63}", "submodels.0", "max_seq is"),
        ("max_batch = 1", 'max_batch = "1"', "submodels.0.max_batch", "'1'"),
        ("max_batch = 1", "max_batch = true", "submodels.0.max_batch", "True"),
        ('kind = "prefill_ids"', 'kind = "prefil"', "submodels.0.kind", "prefil"),
        ('kind = "prefill_ids"', 'kind = "decode"', "", "'decode' stands for two"),
        ('exact_name = "prefill"', 'exact_name = "decode"', "", "'decode' stands for two"),
        ('dtype = "s32"', 'dtype = "s64"', "submodels.0.tokens", "'s64' is unknown"),
        ('dtype = "bf16"', 'dtype = "f32"', "submodels.0.logits", "607744"),
        ("byte_size = 163840", "byte_size = 163841", "submodels.0.tokens", "163841"),
        ("shape = [1, 40960]", "shape = []", "submodels.0.tokens", "shape is []"),
        ("shape = [1, 40960]", "shape = [1, 0]", "submodels.0.tokens", "shape is [1, 0]"),
        ("shape = [1, 40960]", "shape = [-1, -40960]", "submodels.0.tokens", "[-1, -40960]"),
        ("shape = [1, 40960]", "shape = 40960", "submodels.0.tokens.shape", "40960"),
        ("shape = [1, 40960]", "shape = [1.0, 40960]", "submodels.0.tokens.shape", "1.0"),
        ("sliceable = true", 'sliceable = "yes"', "submodels.0.tokens.sliceable", "'yes'"),
        ("sliceable = true", "sliceable = true\nslicable = true", "submodels.0.tokens", "slicable"),
        ('csr_cur_seq = "cur_seq"', "", "submodels.0", "csr_cur_seq"),
        ("[submodels.logits]", "[submodels.logit]", "submodels.0", "logit"),
    ],
)  # fmt: skip
def test_a_wrong_manifest_is_refused_by_its_key(old, new, place, shown):
    assert old in TEXT
    with pytest.raises(InputError) as caught:
        parse_manifest(TEXT.replace(old, new, 1), "m.toml")
    assert caught.value.where == "m.toml"
    assert caught.value.place.startswith(place)
    assert shown in str(caught.value)


def test_no_submodels():
    with pytest.raises(InputError, match="submodels is empty"):
        parse_manifest('schema = 1\nname = "x"\ncalrt_version = "0.7.6"\nsubmodels = []', "m.toml")


# --- bind ---------------------------------------------------------------------------------------------


def models(**changes):
    """What the device reports, with the first graph changed."""
    first, second = device_models(MANIFEST, 16)
    return [evolve(first, **changes), second]


def with_tensor(index, **changes):
    first = models()[0]
    tensors = list(first.tensors)
    tensors[index] = evolve(tensors[index], **changes)
    return models(tensors=tuple(tensors))


def differences(reported, manifest=MANIFEST):
    with pytest.raises(ManifestMismatch) as caught:
        bind(manifest, reported, 1)
    assert caught.value.manifest == "qwen3-8b"
    assert all(one in str(caught.value) for one in caught.value.differences)
    return caught.value.differences


def test_what_fits_binds():
    generation = bind(MANIFEST, models(), 7)
    assert generation.generation_id == 7
    assert generation.manifest is MANIFEST
    assert generation.submodels == MANIFEST.by_kind
    assert generation.max_seq == 40960


def test_the_order_of_graphs_and_tensors_means_nothing():
    turned = [evolve(model, tensors=model.tensors[::-1]) for model in reversed(models())]
    assert set(bind(MANIFEST, turned, 1).tile_d0) == set(MANIFEST.by_kind)


@pytest.mark.parametrize("d0", [16, 64, 1, 151936])
def test_the_tile_size_is_the_devices(d0):
    generation = bind(MANIFEST, device_models(MANIFEST, d0), 1)
    assert dict(generation.tile_d0) == {TaskKind.PREFILL_IDS: d0, TaskKind.DECODE: d0}


def test_each_graph_has_a_tile_size_of_its_own():
    generation = bind(MANIFEST, models(metadata={TILE_D0_KEY: "32"}), 1)
    assert dict(generation.tile_d0) == {TaskKind.PREFILL_IDS: 32, TaskKind.DECODE: 16}


def test_a_missing_graph():
    (found,) = differences(models()[1:])
    assert "'prefill' is missing" in found
    assert "'decode'" in found  # what the device has instead


def test_no_graphs_at_all():
    found = differences([])
    assert len(found) == 2
    assert all("none" in one for one in found)


def test_a_surplus_graph():
    (found,) = differences([*models(), DeviceModel("vision", (), {TILE_D0_KEY: "16"})])
    assert "'vision'" in found
    assert "not in the manifest" in found
    assert "'prefill', 'decode'" in found


def test_a_graph_that_is_there_twice():
    (found,) = differences([*models(), models()[0]])
    assert "'prefill'" in found
    assert "2 times" in found


@pytest.mark.parametrize("name", ["prefill_v2", "xprefill", "Prefill", "prefil", "prefill ", ""])
def test_a_name_that_only_resembles_is_missing_and_surplus(name):
    """S08: no substring, no near match."""
    found = differences(models(name=name))
    assert len(found) == 2
    assert "'prefill' is missing" in found[0]
    assert f"{name!r} is on the device, but not in the manifest" in found[1]


def test_a_second_graph_whose_name_contains_the_right_one_does_not_replace_it():
    (found,) = differences([*models(), evolve(models()[0], name="prefill_long")])
    assert "'prefill_long'" in found
    assert "missing" not in found


def test_a_missing_tensor():
    (found,) = differences(models(tensors=models()[0].tensors[1:]))
    assert "graph 'prefill'" in found
    assert "'token_ids' is missing" in found
    assert "'position_ids', 'logits'" in found


def test_a_surplus_tensor():
    extra = DeviceTensor("mask", (1,), "s32", 4)
    (found,) = differences(models(tensors=(*models()[0].tensors, extra)))
    assert "'mask' is not in the manifest" in found
    assert "'token_ids'" in found


def test_a_tensor_that_is_there_twice():
    tensors = models()[0].tensors
    found = differences(models(tensors=(*tensors, tensors[2])))
    assert found
    assert all("'logits' is there 2 times" in one for one in found)


@pytest.mark.parametrize("name", ["logits_out", "ogits", "Logits"])
def test_a_tensor_whose_name_only_resembles(name):
    found = differences(with_tensor(2, name=name))
    assert len(found) == 2
    assert "'logits' is missing" in found[0]
    assert f"{name!r} is not in the manifest" in found[1]


@pytest.mark.parametrize(
    ("changes", "what", "ours", "theirs"),
    [
        ({"dtype": "f32"}, "dtype", "bf16", "f32"),
        ({"shape": (1, 151936)}, "rank", "3", "2"),
        ({"shape": (1, 1, 151935)}, "shape", "[1, 1, 151936]", "[1, 1, 151935]"),
        ({"shape": (1, 151936, 1)}, "shape", "[1, 1, 151936]", "[1, 151936, 1]"),
        ({"byte_size": 303871}, "byte size", "303872", "303871"),
    ],
)
def test_a_tensor_of_another_form_is_shown_with_both_sides(changes, what, ours, theirs):
    (found,) = differences(with_tensor(2, **changes))
    assert "graph 'prefill', tensor 'logits'" in found
    assert f"{what} is {ours} in the manifest, {theirs} on the device" in found


@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_tensor_is_compared(index):
    name = models()[0].tensors[index].name
    (found,) = differences(with_tensor(index, byte_size=1))
    assert repr(name) in found


def test_the_last_graph_is_compared_too():
    first, second = models()
    tensors = (*second.tensors[:2], evolve(second.tensors[2], dtype="f32"))
    (found,) = differences([first, evolve(second, tensors=tensors)])
    assert "graph 'decode', tensor 'logits'" in found


def test_all_differences_are_told_at_once():
    first, second = with_tensor(0, dtype="f32", byte_size=1)
    found = differences([evolve(first, metadata={}), second, evolve(second, name="other")])
    assert len(found) == 4


@pytest.mark.parametrize(
    "value",
    [None, "", "sixteen", "16.0", "0x10", " 16", "-16", "0", "1_6", "１６", "9" * 20, "9" * 5000],
)
def test_a_tile_size_that_is_no_whole_number(value):
    (found,) = differences(models(metadata={} if value is None else {TILE_D0_KEY: value}))
    assert "graph 'prefill'" in found
    assert TILE_D0_KEY in found
    assert repr(value)[:20] in found


@pytest.mark.parametrize("value", ["15", "151937", "303872"])
def test_a_tile_size_that_does_not_divide_the_vocabulary(value):
    (found,) = differences(models(metadata={TILE_D0_KEY: value}))
    assert value in found
    assert "151936" in found


def test_the_hash_of_the_calbin_is_compared_if_the_manifest_has_one():
    """``Manifest`` says: "the device must report the same"; a device that reports none does not."""
    wanted = evolve(MANIFEST, calbin_sha256="ab" * 32)
    (found,) = differences(models(), wanted)
    assert "ab" * 32 in found


# --- an executor on a device that holds something else (FI01) ---


class Other(FakeDevice):
    """Holds graphs of other names."""

    def models(self):
        return [evolve(model, name=model.name + "e") for model in super().models()]


async def test_a_device_that_holds_another_model_is_never_configured(clock):
    device = Other()
    warmed = []

    async def warm_up(executor):
        warmed.append(executor)

    with trio.fail_after(10):
        with pytest.raises(ManifestMismatch, match="'prefille'"):
            async with open_executor(device, MANIFEST, ExecutorConfig(), warm_up=warm_up):
                raise AssertionError("must not become ready")
    assert device.configured == []
    assert device.inferred == []
    assert warmed == []


async def test_the_generation_of_an_executor_has_the_tile_size_of_the_device(clock):
    class Tiled(FakeDevice):
        def models(self):
            return device_models(self.manifest, 64)

    async with open_executor(Tiled(), MANIFEST, ExecutorConfig()) as executor:
        assert executor.generation.tile_d0[TaskKind.DECODE] == 64
        slot = executor.core.pool.acquire(TaskKind.DECODE, -1)
        assert slot.slot.memory.tile_d0 == 64
        slot.release()
