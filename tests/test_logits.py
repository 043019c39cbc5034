import threading
import tracemalloc

import ml_dtypes
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caltrio import logits
from caltrio.logits import LogitsBounds, LogitsLayout, convert

PATTERNS = np.arange(65536, dtype=np.uint16)
QWEN_VOCAB = 151_936
GUARD = np.float32(-7.5)
NOT_FINITE = 2 * 128  # an exponent of ones, under either sign: infinity and 127 NaNs


def bits(values):
    return values.view(np.uint32).tolist()


def guarded(count):
    """``count`` floats between two guards on either side."""
    whole = np.full(count + 4, GUARD, np.float32)
    return whole, whole[2 : 2 + count]


def refused(error, match, source, layout, row, base, out):
    """``convert`` refuses, and ``out`` is as it was."""
    before = out.copy()
    with pytest.raises(error, match=match):
        convert(source, layout, row, base, out)
    assert out.tobytes() == before.tobytes()


@pytest.mark.parametrize("d0", [1, 16, 4096, 65536])
def test_every_pattern_as_ml_dtypes_has_it(d0):
    expected = PATTERNS.view(ml_dtypes.bfloat16).astype(np.float32)
    whole, out = guarded(65536)
    assert convert(PATTERNS, LogitsLayout(1, 65536, d0), 0, 0, out) == NOT_FINITE
    assert bits(out) == bits(expected)
    assert bits(out) == [pattern << 16 for pattern in range(65536)]  # payloads of NaNs too
    assert np.count_nonzero(~np.isfinite(expected)) == NOT_FINITE
    assert whole[:2].tolist() == whole[-2:].tolist() == [GUARD, GUARD]


def test_a_block_of_nothing_but_nans_is_counted_in_full():
    source = np.full(200_000, 0x7FC1, np.uint16)
    out = np.zeros(200_000, np.float32)
    for d0 in (16, 200_000):
        assert convert(source, LogitsLayout(1, 200_000, d0), 0, 0, out) == 200_000
    two = np.tile(source, 2)  # two rows, one tile of more than 65535 entries
    assert convert(two, LogitsLayout(2, 200_000, 200_000), 1, 0, out) == 200_000


@pytest.mark.parametrize(
    ("word", "counted"),
    [
        (0x7F80, 1),
        (0xFF80, 1),
        (0x7F81, 1),
        (0xFFFF, 1),
        (0x7F7F, 0),
        (0xFF7F, 0),
        (0x0001, 0),
        (0x8000, 0),
    ],
)
def test_what_counts_as_not_finite(word, counted):
    out = np.zeros(3, np.float32)
    assert convert(np.array([0, word, 0], np.uint16), LogitsLayout(1, 3, 2 + 1), 0, 0, out) == counted
    assert np.count_nonzero(~np.isfinite(out)) == counted


@pytest.mark.parametrize(("base", "count"), [(0, 0), (0, 10), (3, 4), (9, 1), (10, 0), (0, 1)])
def test_regions_at_the_edges(base, count):
    source = PATTERNS[100:110]
    whole, out = guarded(count)
    assert convert(source, LogitsLayout(1, 10, 5), 0, base, out) == 0
    assert bits(out) == [int(word) << 16 for word in source[base : base + count]]
    assert whole[:2].tolist() == whole[-2:].tolist() == [GUARD, GUARD]


@pytest.mark.parametrize(
    ("base", "count"),
    [(0, 11), (10, 1), (11, 0), (5, 6), (-1, 1), (-1, 0), (-(2**63), 1), (2**63 - 1, 2), (2**63, 0),
     (2**64 - 1, 2), (2**64, 1)],
)  # fmt: skip
def test_regions_outside_are_refused(base, count):
    out = np.full(count, GUARD)
    refused(LogitsBounds, "the vocabulary has 10", PATTERNS, LogitsLayout(1, 10, 5), 0, base, out)


@pytest.mark.parametrize("row", [-1, 3, 2**63, -(2**63)])
def test_rows_outside_are_refused(row):
    out = np.full(1, GUARD)
    refused(LogitsBounds, f"row is {row}; .* 0 to 2", PATTERNS, LogitsLayout(3, 10, 5), row, 0, out)


def test_padding_of_the_last_tile_is_no_vocabulary():
    layout = LogitsLayout(2, 10, 8)
    assert layout.elements == 32
    refused(LogitsBounds, "has 10", PATTERNS, layout, 1, 8, np.full(3, GUARD))


def test_numpy_integers_are_indices_and_floats_are_not():
    layout = LogitsLayout(2, 10, 8)
    out = np.zeros(2, np.float32)
    assert convert(PATTERNS, layout, np.int64(1), np.uint8(7), out) == 0
    assert bits(out) == [15 << 16, 24 << 16]
    refused(TypeError, "float", PATTERNS, layout, 1.0, 0, out)
    refused(TypeError, "float", PATTERNS, layout, 1, 7.0, out)


@pytest.mark.parametrize(
    ("rows", "vocab", "d0", "size"),
    [(1, 10, 10, 9), (1, 10, 8, 15), (2, 10, 8, 31), (1, QWEN_VOCAB, 16, 0), (2**40, 2**40, 2**40, 64)],
)
def test_a_tensor_smaller_than_its_vocabulary_is_refused(rows, vocab, d0, size):
    """FI09: seen, and nothing written."""
    layout = LogitsLayout(rows, vocab, d0)
    assert size < layout.elements
    refused(LogitsBounds, f"{layout.elements}", PATTERNS[:size], layout, 0, 0, np.full(4, GUARD))


def test_elements_with_padding():
    assert LogitsLayout(1, 10, 10).elements == 10
    assert LogitsLayout(1, 11, 10).elements == 20
    assert LogitsLayout(3, QWEN_VOCAB, 16).elements == 3 * QWEN_VOCAB
    assert LogitsLayout(3, 1, 16).elements == 48


@pytest.mark.parametrize("name", ["rows", "vocab", "d0"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "16"])
def test_a_layout_of_nothing_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name} is {value!r}; give a whole number of at least 1"):
        LogitsLayout(**{"rows": 1, "vocab": 1, "d0": 1, name: value})


def test_d0_has_no_default():
    with pytest.raises(TypeError, match="d0"):
        LogitsLayout(1, QWEN_VOCAB)


TEN = LogitsLayout(1, 10, 10)
MISALIGNED = np.frombuffer(bytes(101), np.uint16, 50, 1)


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        ([0] * 10, TypeError, "source is a list"),
        (np.zeros(10, np.int16), TypeError, "source holds int16"),
        (np.zeros(10, ">u2"), TypeError, "source holds >u2"),
        (np.zeros(10, ml_dtypes.bfloat16), TypeError, r"source\.view\(np\.uint16\)"),
        (np.zeros((2, 5), np.uint16), ValueError, r"source has shape \(2, 5\)"),
        (np.zeros(20, np.uint16)[::2], ValueError, "strides"),
        (MISALIGNED, ValueError, "aligned"),
    ],
)
def test_sources_that_are_refused(source, error, match):
    refused(error, match, source, TEN, 0, 0, np.full(10, GUARD))


def read_only():
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "error", "match"),
    [
        (np.zeros(4), TypeError, "out holds float64; give an array of float32"),
        (np.zeros(4, ">f4"), TypeError, "out holds >f4"),
        (np.zeros(4, np.uint32), TypeError, "out holds uint32"),
        (np.zeros((2, 2), np.float32), ValueError, "out has shape"),
        (np.zeros((), np.float32), ValueError, "out has shape"),
        (np.zeros(8, np.float32)[::2], ValueError, "strides"),
        (np.zeros(4, np.float32)[::-1], ValueError, "strides"),
        (np.frombuffer(bytearray(17), np.float32, 4, 1), ValueError, "aligned"),
        (read_only(), ValueError, "out is read-only"),
    ],
)
def test_outs_that_are_refused(out, error, match):
    refused(error, match, PATTERNS, TEN, 0, 0, out)


def test_out_is_no_part_of_source():
    source = PATTERNS.copy()
    refused(ValueError, "overlaps", source, TEN, 0, 0, source.view(np.float32)[:10])


def test_a_source_may_be_read_only_longer_and_of_a_subclass(tmp_path):
    PATTERNS.tofile(tmp_path / "tensor")
    source = np.memmap(tmp_path / "tensor", np.uint16, "r")
    out = np.zeros(5, np.float32)
    assert convert(source, TEN, 0, 5, out) == 0
    assert bits(out) == [word << 16 for word in range(5, 10)]


WORDS = st.sampled_from([0x0000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0x7F81]) | st.integers(
    0, 0xFFFF
)


@st.composite
def regions(draw):
    rows, vocab, d0 = draw(st.integers(1, 5)), draw(st.integers(1, 70)), draw(st.integers(1, 20))
    matrix = draw(
        st.lists(st.lists(WORDS, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows)
    )
    base = draw(st.integers(0, vocab))
    count = draw(st.integers(0, vocab - base))
    return matrix, LogitsLayout(rows, vocab, d0), draw(st.integers(0, rows - 1)), base, count


def tiled(matrix, layout):
    """The words as the device lays them; NaNs fill the last tile up."""
    memory = []
    for begin in range(0, layout.vocab, layout.d0):
        for row in matrix:
            tile = row[begin : begin + layout.d0]
            memory += tile + [0x7FC0] * (layout.d0 - len(tile))
    return np.array(memory, np.uint16)


@settings(deadline=None, max_examples=300)
@given(regions())
def test_any_region_of_any_tiling(region):
    matrix, layout, row, base, count = region
    source = tiled(matrix, layout)
    assert source.size == layout.elements
    whole, out = guarded(count)
    expected = matrix[row][base : base + count]
    bad = convert(source, layout, row, base, out)
    assert bits(out) == [word << 16 for word in expected]
    assert bad == sum(word >> 7 & 0xFF == 0xFF for word in expected)
    assert whole[:2].tolist() == whole[-2:].tolist() == [GUARD, GUARD]


@pytest.mark.parametrize("rows", [1, 3])
def test_d0_matters_once_there_are_two_rows(rows):
    """S09: a wrong d0 reads other words, except where one row makes all layouts the same."""
    matrix = [[100 * row + entry for entry in range(32)] for row in range(rows)]
    source = tiled(matrix, LogitsLayout(rows, 32, 16))
    right, wrong = np.zeros(32, np.float32), np.zeros(32, np.float32)
    convert(source, LogitsLayout(rows, 32, 16), rows - 1, 0, right)
    convert(source, LogitsLayout(rows, 32, 8), rows - 1, 0, wrong)
    assert (bits(right) == bits(wrong)) == (rows == 1)


@pytest.mark.parametrize("rows", [1, 2])
def test_nothing_is_allocated_that_grows_with_the_vocabulary(rows):
    layout = LogitsLayout(rows, QWEN_VOCAB, 16)
    source = np.zeros(layout.elements, np.uint16)
    out = np.empty(QWEN_VOCAB, np.float32)

    def peak(work):
        work()
        tracemalloc.start()
        work()
        _, high = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return high

    assert peak(lambda: convert(source, layout, 0, 0, out)) < 4096
    assert peak(lambda: source.astype(np.float32)) > 4 * QWEN_VOCAB  # the instrument sees such a thing


def test_the_interpreter_runs_on_meanwhile():
    """Two threads convert different rows at once, and each gets its own."""
    layout = LogitsLayout(2, QWEN_VOCAB, 16)
    source = tiled([[0x3F80] * QWEN_VOCAB, [0x4000] * QWEN_VOCAB], layout)
    outs = [np.empty(QWEN_VOCAB, np.float32) for _ in range(2)]
    threads = [
        threading.Thread(target=convert, args=(source, layout, row, 0, outs[row])) for row in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outs[0].tolist()) == {1.0}
    assert set(outs[1].tolist()) == {2.0}


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError(28, "no space left")])
def test_without_a_place_to_keep_code_it_compiles_all_the_same(monkeypatch, error):
    real = numba.njit

    def homeless(*args, cache=False, **kwargs):
        if cache:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(numba, "njit", homeless)
    monkeypatch.setattr(logits, "_kernel", logits._compiled(logits._expand))
    out = np.zeros(10, np.float32)
    assert convert(PATTERNS[0x7F7C:], TEN, 0, 0, out) == 6
    assert bits(out) == [word << 16 for word in range(0x7F7C, 0x7F86)]
