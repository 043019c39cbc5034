"""Figures say what the data say, are the same for the same data, and no text hides another."""

import math
import xml.etree.ElementTree as ET
from itertools import combinations

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from sim.plots import (
    Curve,
    GainMap,
    GainRow,
    KvSeries,
    LoadPoint,
    MatrixCell,
    TornadoBar,
    break_even,
    decision_matrix,
    gain_bars,
    kv_occupancy,
    load_latency,
    style,
    tornado,
)
from sim.plots.memory import envelope, mean_over_time
from sim.stats import Interval

inf, nan = math.inf, math.nan
UNKNOWN = Interval(nan, -inf, inf, 0)
ONE_RUN = Interval(0.12, -inf, inf, 1)
LONG = (
    "a reading of the engines whose name is very long indeed, and-one-word-that-does-not-end" + 40 * "x"
)


def around(value, half):
    return Interval(value, value - half, value + half, 10)


@pytest.fixture
def drawn(monkeypatch):
    """What the last figure wrote, each text with the box that it fills; and the page."""
    written = []
    draw_text = Text.draw

    def draw(text, renderer, *args, **kwargs):
        if text.get_text().strip() and text.get_visible():
            written.append((text.get_text(), text.get_window_extent(renderer)))
        draw_text(text, renderer, *args, **kwargs)

    def save(figure, *_args, **_kwargs):
        figure.draw_without_rendering()  # once for the layout
        figure.set_layout_engine("none")
        with monkeypatch.context() as patch:
            patch.setattr(Text, "draw", draw)
            written.clear()
            figure.draw_without_rendering()
        written.insert(0, ("", figure.bbox))

    monkeypatch.setattr(Figure, "savefig", save)
    return written


@pytest.fixture
def texts(tmp_path, drawn):
    """Draw; what is written, in one string."""

    def read(figure, *args, **kwargs):
        figure(*args, tmp_path / "figure.svg", **kwargs)
        return " | ".join(text.replace("\n", " ") for text, _ in drawn)

    return read


@pytest.fixture
def layout(tmp_path, drawn):
    """Check that what a figure writes lies on the page, and not on other text."""

    def check(figure, *args, **kwargs):
        figure(*args, tmp_path / "figure.svg", **kwargs)
        (_, page), *written = drawn
        assert written, "nothing was written"
        for text, box in written:
            inside = box.x0 > -1 and box.y0 > -1 and box.x1 < page.x1 + 1 and box.y1 < page.y1 + 1
            assert inside, f"{text!r} is off the page"
        words = [(text, box) for text, box in written if text != "~"]  # a mark, as of a point
        for (one, a), (other, b) in combinations(words, 2):
            wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
            assert wide < 2 or high < 3, f"{one!r} hides {other!r}"

    return check


NAMES = ["serial", "die-pipelined"]
CELLS = [
    [MatrixCell("BASELINE"), MatrixCell("FAIL", around(-0.031, 0.004))],
    [MatrixCell("PASS", around(0.83, 0.02)), MatrixCell("UNDECIDED", ONE_RUN)],
    [MatrixCell("UNDEFINED", UNKNOWN), MatrixCell("IMPOSSIBLE")],
]
MATRIX = ([("serial", 1), ("serial", 2), ("die-pipelined", 2)], ["50 %", "saturated"], CELLS)
CURVES = [
    Curve(
        name,
        limit,
        [
            LoadPoint(0.1, around(300, 20)),
            LoadPoint(0.2, Interval(900, -inf, inf, 1, trusted=False)),
            LoadPoint(0.3, around(90_000 / limit, 500), overloaded=True),
        ],
    )
    for name in NAMES
    for limit in (1, 2)
]
KV = [KvSeries(limit, [0, 1, 4], [100, 900 * limit, 0], 10) for limit in (1, 2)]
RATIOS, SEQUENCES = [0.01, 0.1, 1.0], [1, 2, 4, 8]
MAPS = [
    GainMap("serial", np.zeros((4, 3)), (0.02, 4)),
    GainMap("full-duplex", np.outer([0, 0.5, 0.8, 1], [0.01, 0.1, 0.5]), (0.02, 4)),
    GainMap("coalesced", np.full((4, 3), nan)),
]
BARS = [
    TornadoBar("prompt length", "128 tokens", 0.86, "2,048 tokens", 0.85),
    TornadoBar("transfer bandwidth", "2 GB/s", 0.05, "32 GB/s", 0.9, flips=True),
    TornadoBar("die balance", "50 : 50", 0.837, "80 : 20", 0.22),
]
GAINS = [
    GainRow("serial", 2, around(0.002, 0.001), 0.01),
    GainRow("serial", 4, UNKNOWN, note="impossible"),
    GainRow("die-pipelined", 2, around(0.83, 0.02), 0.95),
    GainRow("die-pipelined", 4, ONE_RUN),
    GainRow("coalesced", 2, around(-0.12, 0.03)),
]
FIGURES = {
    "matrix": (decision_matrix, *MATRIX),
    "latency": (load_latency, CURVES, 2000.0),
    "kv": (kv_occupancy, KV, 2000),
    "break-even": (break_even, MAPS, RATIOS, SEQUENCES, 0.1),
    "tornado": (tornado, BARS, 0.837, 0.1),
    "gains": (gain_bars, GAINS, 0.1),
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_same_data_are_the_same_file(name, tmp_path):
    figure, *args = FIGURES[name]
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    figure(*args, one)
    figure(*args, two)
    assert one.read_bytes() == two.read_bytes()
    root = ET.parse(one).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not list(root.iter("{http://www.w3.org/2000/svg}text")), "letters are paths"


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_hides_another(name, layout):
    figure, *args = FIGURES[name]
    layout(figure, *args)


def test_text_that_is_hidden_or_off_the_page_is_found(layout):
    def twice(_path):
        figure = Figure()
        figure.text(0.5, 0.5, "one")
        figure.text(0.5, 0.5, "two")
        figure.savefig(_path)

    def outside(_path):
        figure = Figure()
        figure.text(0.99, 0.5, "too far to the right")
        figure.savefig(_path)

    with pytest.raises(AssertionError, match="'one' hides 'two'"):
        layout(twice)
    with pytest.raises(AssertionError, match="off the page"):
        layout(outside)


BEYOND = [LoadPoint(1, around(9e6, 1), overloaded=True)]
EDGES = {
    "one cell": (decision_matrix, [(LONG, 2)], [LONG], [[None]]),
    "no cell": (decision_matrix, [], [], []),
    "one load": (load_latency, [Curve("serial", 1, [LoadPoint(0.2, around(0, 0))])], None),
    "no latency": (load_latency, [Curve(LONG, 1, [LoadPoint(0.2, UNKNOWN)])], 50.0),
    "only overloaded": (load_latency, [Curve("$x$", 9, BEYOND)], 50.0),
    "no curve": (load_latency, [], 50.0),
    "nothing reserved": (kv_occupancy, [KvSeries(1, [], []), KvSeries(2, [3.0], [0.0])], None),
    "full": (kv_occupancy, [KvSeries(1, [0, 9], [500, 500])], 500),
    "no run": (kv_occupancy, [], 100),
    "one point": (break_even, [GainMap(LONG, [[0.2]], (9, 9)), GainMap("x", [[inf]])], [0.1], [2], 0.1),
    "no map": (break_even, [], [0.1], [2], 0.1),
    "zero": (tornado, [TornadoBar("a", "x", 0, "y", 0)], 0, 0),
    "no gain": (tornado, [TornadoBar(LONG, LONG, nan, LONG, inf, flips=True)], nan, 0.1),
    "same side": (
        tornado,
        [TornadoBar("a", "x", 0.3, "y", 0.2), TornadoBar("b", "x", 2, "y", 3)],
        1,
        1,
    ),
    "no bar": (tornado, [], 0.5, 0.1),
    "no gains": (gain_bars, [GainRow(LONG, 2, UNKNOWN)], None),
    "zero gain": (gain_bars, [GainRow("serial", 2, around(0, 0), inf)], 0.1),
    "no rows": (gain_bars, [], 0.1),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_of_the_data(name, layout):
    figure, *args = EDGES[name]
    layout(figure, *args)


def test_twelve_hypotheses(layout):
    names = [f"hypothesis-{at}" for at in range(12)]
    layout(load_latency, [Curve(name, 1, CURVES[0].points) for name in names], 2000.0)


def test_matrix_says_verdict_and_gain(texts):
    said = texts(decision_matrix, *MATRIX, title="Which limit?", loads="load, share of capacity")
    wanted = [
        "Which limit?",
        "load, share of capacity",
        "saturated",
        "die-pipelined",
        "✓ +83 %",
        "±2",
        "✗ −3.1 %",
        "±0.4",
        "? +12 %",
        "no interval",
        "IMPOSSIBLE under",
        "BASELINE",
    ]
    assert not [words for words in wanted if words not in said]
    with pytest.raises(ValueError, match="do not fill 3 rows of 1 columns"):
        texts(decision_matrix, MATRIX[0], ["x"], CELLS)


def test_latency_says_what_is_overloaded_and_beyond(texts):
    said = texts(load_latency, CURVES, 2000.0, metric="TPOT P99")
    wanted = [
        "TPOT P99, ms",
        "offered load, requests/s",
        "SLO 2 s",
        "hollow: overloaded",
        "2 in flight",
        "beyond the scale",
        "95 % interval",
        "no bar: no interval",
        "too few samples",
    ]
    assert not [words for words in wanted if words not in said]
    assert "90,000" not in said, "an overloaded point set the scale"
    calm = texts(load_latency, [Curve("serial", 1, [LoadPoint(1, around(30, 1))])], None)
    assert "SLO" not in calm
    assert "beyond" not in calm
    assert "overloaded" not in calm


def test_kv_says_mean_and_capacity(texts):
    said = texts(kv_occupancy, KV, 2000)
    assert "capacity 2,000" in said
    assert "280 (14 %)" in said  # (100 + 3 * 900) / 10
    assert "550 (28 %)" in said
    with pytest.raises(ValueError, match="times ascending"):
        texts(kv_occupancy, [KvSeries(1, [1, 0], [1, 1])], 10)
    times = np.arange(20_000) / 10
    assert "lowest to highest, of each 4 s" in texts(kv_occupancy, [KvSeries(1, times, times)], None)


def test_no_peak_is_lost_in_the_envelope():
    rng = np.random.default_rng(1)
    edges = np.concatenate([[0.0], np.sort(rng.uniform(0, 100, 9_999)), [100.0]])
    tokens = rng.integers(0, 1000, 10_000).astype(float)
    tokens[1234] = 50_000
    cuts, lowest, highest, means = envelope(edges, tokens, 37)
    assert highest.max() == 50_000
    assert (lowest <= means).all()
    assert (means <= highest).all()
    assert np.average(means, weights=np.diff(cuts)) == pytest.approx(mean_over_time(edges, tokens))
    for at in range(37):
        middle = (edges[:-1] + edges[1:]) / 2
        held = tokens[(middle > cuts[at]) & (middle < cuts[at + 1])]
        assert lowest[at] <= held.min()
        assert held.max() <= highest[at]
    # A step that lasts through many stretches is in all of them.
    _, low, high, _ = envelope(np.array([0.0, 1.0, 10.0]), np.array([3.0, 7.0]), 10)
    assert list(low) == list(high) == [3] + [7] * 9


def test_break_even_says_where_the_gate_is(texts):
    said = texts(break_even, MAPS, RATIOS, SEQUENCES, 0.1)
    wanted = [
        "all below the gate",
        "gate +10 %",
        "assumed profile",
        "no value",
        "concurrent sequences",
        "(host + transfer time) / compute time",
    ]
    assert not [words for words in wanted if words not in said]
    above = texts(break_even, [GainMap("x", np.ones((4, 3)))], RATIOS, SEQUENCES, 0.1)
    assert "all above the gate" in above
    assert "assumed profile" not in above
    with pytest.raises(ValueError, match="have to ascend"):
        texts(break_even, [], [0.0, 1.0], [1], 0.1)
    with pytest.raises(ValueError, match="wanted"):
        texts(break_even, [GainMap("x", [[1.0]])], RATIOS, SEQUENCES, 0.1)


def test_tornado_says_settings_and_flips_widest_first(texts):
    said = texts(tornado, BARS, 0.837, 0.1)
    assert said.index("transfer") < said.index("die balance") < said.index("prompt length")
    assert said.count("▸ flips") == 1
    wanted = [
        "2 GB/s",
        "32 GB/s",
        "+5 %",
        "+90 %",
        "as assumed +84 %",
        "gate +10 %",
        "flips the verdict",
    ]
    assert not [words for words in wanted if words not in said]


def test_gains_say_interval_bound_and_gate(texts):
    said = texts(gain_bars, GAINS, 0.1)
    wanted = [
        "+0.2 % ±0.1",
        "impossible",
        "+83 % ±2",
        "+12 %, no interval",
        "−12 % ±3",
        "gate +10 %",
        "95 % interval",
        "analytic bound",
        "gain in aggregate tokens/s, %",
    ]
    assert not [words for words in wanted if words not in said]


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (around(0.832, 0.021), "+83 % ±2"),
        (around(0.832, 0.0021), "+83.2 % ±0.2"),
        (around(0.0, 0.0), "0 % ±0"),
        (around(-0.00004, 0.00001), "0 % ±0.1"),  # rounded, and not as if there were no doubt
        (around(-0.5, 0.1), "−50 % ±10"),
        (Interval(0.05, -inf, 1.0, 2), "+5 %, no interval"),
        (UNKNOWN, "no value"),
        (None, "no value"),
    ],
)
def test_gains_in_words(gain, said):
    assert style.gain_text(gain) == said


def test_a_limit_looks_the_same_in_every_figure():
    assert style.looks([2, 4])[2] == style.looks([1, 2])[2]
    many = style.looks(range(1, 9))
    assert len({(look.colour, look.marker) for look in many.values()}) == 8
    assert style.looks([1, 9])[1] != style.looks([1, 9])[9]


def test_wrapped_text_keeps_its_letters_and_fits():
    for text in (LONG, "one", "", "a-b c", "x" * 100):
        wrapped = style.wrap(text, 1.0, 10)
        assert wrapped.replace("\n", "").replace(" ", "") == text.replace(" ", "")
        assert all(style.inches(line, 10) <= 1.0 for line in wrapped.split("\n") if line)
