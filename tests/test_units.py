from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caltrio.units import format_ns, parse_bandwidth, parse_ns, parse_ps, transfer_ns


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0ns", 0),
        ("1ns", 1),
        ("1000ps", 1),
        ("40us", 40_000),
        ("40µs", 40_000),  # micro sign
        ("40μs", 40_000),  # Greek mu
        ("40ms", 40_000_000),
        (" 37.84 ms ", 37_840_000),
        ("1.5e3 us", 1_500_000),
        ("+2s", 2_000_000_000),
        ("1min", 60_000_000_000),
        ("1h", 3_600_000_000_000),
    ],
)
def test_parse_ns(text, ns):
    assert parse_ns(text) == ns


def test_parse_ps_keeps_thousandths_of_a_nanosecond():
    assert parse_ps("5.898ns") == 5_898
    assert parse_ps("138.915us") == 138_915_000


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("7B/s", 7),
        ("1kB/s", 1_000),
        ("1KB/s", 1_000),
        ("1KiB/s", 1_024),
        ("1.5GiB/s", 3 << 29),
        ("2TB/s", 2 * 10**12),
    ],
)
def test_parse_bandwidth_units(text, rate):
    assert parse_bandwidth(text) == rate


def test_parse_bandwidth():
    assert parse_bandwidth("12GB/s") == 12 * 10**9
    assert parse_bandwidth(" 1B/s ") == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("40", "write a number and a unit"),
        ("ms", "write a number and a unit"),
        ("", "write a number and a unit"),
        ("40 parsecs", "write a number and a unit"),
        ("nanms", "write a number and a unit"),
        ("infs", "write a number and a unit"),
        ("1_000ns", "write a number and a unit"),
        ("４０ms", "write a number and a unit"),  # full-width digits
        ("1e999s", "write a number and a unit"),
        ("40MS", "write a number and a unit"),
        ("-1ms", "negative"),
        ("0.5ns", "finer"),
        ("1e-12ms", "finer"),
        ("1e20s", "too large"),
    ],
)
def test_parse_ns_says_what_is_wrong_and_with_which_value(text, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        parse_ns(text)
    assert repr(text) in str(caught.value)


def test_many_digits_are_never_rounded_away():
    with pytest.raises(ValueError, match="finer"):
        parse_ns("12345.000000000000000000000001s")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("16GB", "size per second"),
        ("16/s", "bandwidth"),
        ("0GB/s", "nothing ever arrives"),
        ("-1GB/s", "negative"),
        ("0.5B/s", "finer"),
    ],
)
def test_parse_bandwidth_errors(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.00 µs"),
        (12_345, "12.3 µs"),
        (999_900, "1.00 ms"),
        (9_999_000, "10.0 ms"),
        (123_456_789, "123 ms"),
        (-123_456_789, "-123 ms"),
        (1_500_000_000, "1.50 s"),
        (12_345 * 10**9, "12,345 s"),
    ],
)
def test_format_ns(ns, text):
    assert format_ns(ns) == text


@given(
    st.integers(0, 2**62 - 1), st.sampled_from([("ns", 1), ("us", 10**3), ("ms", 10**6), ("s", 10**9)])
)
def test_what_is_written_in_a_unit_is_read_back_exactly(ns, unit):
    name, size = unit
    whole, rest = divmod(ns, size)
    assert parse_ns(f"{whole}.{rest:0{len(str(size)) - 1}d}{name}" if size > 1 else f"{ns}ns") == ns


def test_transfer_rounds_up():
    assert transfer_ns(0, 8_000, 12 * 10**9) == 8_000
    assert transfer_ns(12, 8_000, 12 * 10**9) == 8_001
    assert transfer_ns(13, 8_000, 12 * 10**9) == 8_002
    assert transfer_ns(303_872, 8_000, 12 * 10**9) == 33_323  # 25,322.67 ns


@given(st.integers(0, 10**12), st.integers(0, 10**9), st.integers(1, 10**13))
def test_transfer_is_the_next_nanosecond_after_the_exact_time(size, latency, bandwidth):
    exact = latency + Fraction(size * 10**9, bandwidth)
    assert 0 <= transfer_ns(size, latency, bandwidth) - exact < 1
