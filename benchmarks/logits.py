"""How fast BF16 logits become FP32 in the caller's array, against the ways that it replaces.

All ways convert the same 151,936 logits in one process, a few calls of each in turn, and medians are
compared:

- ours: ``caltrio.logits.convert``, one pass into the target; NaN and infinity are counted.
- astype: ``.astype(np.float32)`` of ``ml_dtypes``' ``bfloat16``; a new array, nothing counted.
- two passes (S10): the whole tensor into a fresh temporary array, then a copy into the target;
  nothing counted. Once as §10.1 of the specification quotes it, a compiled loop over an array that was
  zeroed, as ``std::vector<float> src(n)`` is; once leaner than that, with ``ml_dtypes``' conversion
  and nothing zeroed.

What the ways with a temporary array take depends on whether the C library gives its pages back to
the system in between, which it does in some runs and not in others: run this more than once.

Where memory sets the pace, one pass (6 bytes read and written an entry) can win at most 18 / 6 = 3.0
over the zeroed two passes and 14 / 6 = 2.3 over the leaner ones; more than that is the cost of
allocating.

The memory copy moves as many bytes as ours reads and writes together. "In cache": a way runs several
times in a row, and what it touches stays near. "Out of cache": 32 MB are read before each call, as if
the device had just written the tensor; the interpreter's own data are then far away as well. Bytes
allocated are tracemalloc's peak, in a call that is not timed.

    python benchmarks/logits.py [--vocab 151936] [--rounds 100]
"""

from __future__ import annotations

import statistics
import time
import tracemalloc

import click
import ml_dtypes
import numba
import numpy as np

from caltrio.logits import LogitsLayout, convert

D0 = 16
IN_A_ROW = 20


def scalar_loop(source, target):
    """What §10.1 quotes: one value after another."""
    for i in range(source.size):
        target[i] = np.uint32(source[i]) << np.uint32(16)


compiled_loop = numba.njit("void(uint16[::1], uint32[::1])", nogil=True)(scalar_loop)


def medians(ways: dict, rounds: int, sweep: np.ndarray | None = None) -> dict:
    """Median nanoseconds of each way; the first of its calls in a turn does not count."""
    times = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            way()
            for _ in range(IN_A_ROW):
                if sweep is not None:
                    sweep.max()
                begin = time.perf_counter_ns()
                way()
                times[name].append(time.perf_counter_ns() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def allocated(way) -> int:
    """The peak of bytes that one call allocates."""
    tracemalloc.start()
    way()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@click.command()
@click.option("--vocab", default=151_936, show_default=True)
@click.option("--rounds", default=100, show_default=True)
def main(vocab: int, rounds: int) -> None:
    """Print times, bytes and the two ratios that have a target."""
    decode = LogitsLayout(1, vocab, D0)
    words = np.random.default_rng(0).standard_normal(decode.elements).astype(ml_dtypes.bfloat16)
    source = words.view(np.uint16)
    target = np.empty(vocab, np.float32)
    copied, copy_of = np.ones(3 * vocab, np.uint8), np.empty(3 * vocab, np.uint8)

    def two_passes():
        temporary = words.astype(np.float32)
        np.copyto(target, temporary[:vocab])

    def two_passes_loop():
        temporary = np.empty(words.size, np.float32)
        temporary.fill(0)
        compiled_loop(source, temporary.view(np.uint32))
        np.copyto(target, temporary[:vocab])

    ours = "ours: one pass, NaN and infinity counted"
    astype = "ml_dtypes astype, a new array"
    as_written = "two passes: zeroed, compiled loop, np.copyto"
    leaner = "two passes: ml_dtypes astype, np.copyto"
    copy = "memory copy: np.copyto of as many bytes as ours"
    ways = {  # what runs, and how many bytes an entry it reads and writes
        ours: (lambda: convert(source, decode, 0, 0, target), 6),
        astype: (lambda: words.astype(np.float32), 6),
        as_written: (two_passes_loop, 18),
        leaner: (two_passes, 14),
        copy: (lambda: np.copyto(copy_of, copied), 6),
    }
    for name in (ours, as_written, leaner):
        target.fill(0)
        ways[name][0]()
        assert target.tobytes() == words[:vocab].astype(np.float32).tobytes(), name

    run = {name: way for name, (way, _) in ways.items()}
    print(f"{vocab:,} logits of one row, bf16 to fp32, median of {rounds * IN_A_ROW:,}")
    for condition, sweep in (("in cache", None), ("out of cache", np.ones(32_000_000, np.uint8))):
        took = medians(run, rounds, sweep)
        print(f"{condition}:")
        for name, (way, per_entry) in ways.items():
            microseconds, rate = took[name] / 1e3, per_entry * vocab / took[name]
            print(
                f"  {name:48} {microseconds:6.1f} µs {rate:5.1f} GB/s {allocated(way):>8,} B allocated"
            )
        for other, least in ((as_written, 3), (leaner, 3), (astype, 1)):
            ratio = took[other] / took[ours]
            verdict = "reached" if ratio >= least else "MISSED"
            print(f"  {ratio:5.2f} times as fast as {other} (at least {least}: {verdict})")

    prefill = LogitsLayout(4, vocab, D0)
    tiles = np.random.default_rng(1).standard_normal(prefill.elements).astype(ml_dtypes.bfloat16)
    flat = tiles.view(np.uint16)

    def slice_and_copy():
        row = tiles.reshape(-1, prefill.rows, D0)[:, 3, :].astype(np.float32)
        np.copyto(target, row.reshape(-1)[:vocab])

    took = medians(
        {"ours": lambda: convert(flat, prefill, 3, 0, target), "numpy": slice_and_copy}, rounds
    )
    one, other = took["ours"] / 1e3, took["numpy"] / 1e3
    print(
        f"one of {prefill.rows} rows in tiles of {D0}, in cache: ours {one:.1f} µs; "
        f"numpy slice, astype and np.copyto {other:.1f} µs ({other / one:.2f} times)"
    )


if __name__ == "__main__":
    main()
