"""Integer nanoseconds, picoseconds and bytes inside; "40ms" and "16GB/s" at the edges.

Parsing is exact (:class:`fractions.Fraction`): a value that is finer than the unit kept inside is an
error, never a silent rounding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

_PS_PER_TIME_UNIT: Mapping[str, int] = {
    "ps": 1,
    "ns": 1_000,
    "us": 1_000_000,
    "µs": 1_000_000,
    "μs": 1_000_000,
    "ms": 1_000_000_000,
    "s": 1_000_000_000_000,
    "min": 60_000_000_000_000,
    "h": 3_600_000_000_000_000,
}
_BYTES_PER_UNIT: Mapping[str, int] = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
# ASCII digits only, and few of them: a value of a thousand digits is a mistake, not a quantity.
_QUANTITY = re.compile(r"\s*([+-]?[0-9]{1,24}(?:\.[0-9]{1,24})?(?:[eE][+-]?[0-9]{1,2})?)\s*(\S+)\s*")
_LIMIT = 2**62  # what fits a 64-bit column with room for a sum


def _quantity(text: str, units: Mapping[str, int], what: str, example: str, per: int = 1) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not a {what}; write a number and a unit, as in {example!r}")
    scaled = Fraction(match[1]) * units[match[2]] / per
    if scaled < 0:
        raise ValueError(f"{text!r} is negative; a {what} is 0 or more")
    if scaled >= _LIMIT:
        raise ValueError(f"{text!r} is too large for a {what}")
    whole = int(scaled)
    if whole != scaled:
        raise ValueError(f"{text!r} is finer than this {what} can hold; round it")
    return whole


def parse_ns(text: str) -> int:
    """``"40ms"`` -> nanoseconds. Units: ns, us, µs, ms, s, min, h. Raises ``ValueError``."""
    return _quantity(text, _PS_PER_TIME_UNIT, "duration", "40ms", per=1_000)


def parse_ps(text: str) -> int:
    """``"5.9ns"`` -> picoseconds, for slopes such as time per token. Raises ``ValueError``."""
    return _quantity(text, _PS_PER_TIME_UNIT, "duration", "5.9ns")


def parse_bandwidth(text: str) -> int:
    """``"16GB/s"`` -> bytes per second, at least 1. Raises ``ValueError``."""
    stripped = text.strip()
    if not stripped.endswith("/s"):
        raise ValueError(f"{text!r} is not a bandwidth; write a size per second, as in '16GB/s'")
    rate = _quantity(stripped[:-2], _BYTES_PER_UNIT, "bandwidth", "16GB/s")
    if rate == 0:
        raise ValueError(f"{text!r} is a bandwidth of 0, over which nothing ever arrives; give more")
    return rate


def format_ns(ns: float) -> str:
    """Nanoseconds for a person: three significant digits, from 1 µs on, and the unit that fits."""
    if abs(ns) < 1_000 * NS_PER_S:  # before the unit is chosen: 999.9 µs is 1.00 ms
        ns = float(f"{ns:.3g}")
    for unit, size in (("s", NS_PER_S), ("ms", NS_PER_MS), ("µs", NS_PER_US)):
        if abs(ns) >= size:
            value = ns / size
            digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
            return f"{value:,.{digits}f} {unit}"
    return f"{ns:.0f} ns"


def transfer_ns(size_bytes: int, latency_ns: int, bandwidth_bytes_per_s: int) -> int:
    """Latency plus bytes over bandwidth, rounded up to a whole nanosecond."""
    return latency_ns - (-size_bytes * NS_PER_S // bandwidth_bytes_per_s)
