"""Sweeps: every point is what its scenario says; the table is the same to the byte, come what may."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from caltrio.cli import run as caltrio
from caltrio.errors import InputError
from caltrio.observe.records import META_KEY
from caltrio.output import RESULT_FILES, output_folder
from caltrio.scenario import load_scenario
from caltrio.timing import Source
from sim import sweep as module
from sim.run import simulate
from sim.sweep import (
    JOURNAL,
    TABLE,
    Journal,
    SweepFailed,
    cluster_executor,
    run_point,
    run_sweep,
    write_table,
)
from sim.sweep_design import NOTE, load_sweep

CALTRIO = Path(sys.executable).with_name("caltrio")
BASE = """schema = 1
seed = 7
timing = "quick"
[workload]
requests = 4
[workload.arrivals]
kind = "poisson"
[workload.lengths]
prompt_tokens = 8
output_tokens = 3
"""
GRID = """schema = 1
scenario = "base.toml"
replications = 2
[parameters]
"semantics" = ["serial", "full-duplex"]
"executor.max_inflight" = [1, 2]
"workload.arrivals.rate" = [200, 5000.0]
"""


def write(folder, text=GRID, base=BASE):
    (folder / "base.toml").write_text(base, encoding="utf-8")
    path = folder / "sweep.toml"
    path.write_text(text, encoding="utf-8")
    return path


def sampled(line, design="sobol", points=64, more=""):
    return f"""schema = 1
scenario = "base.toml"
design = "{design}"
points = {points}
{more}
[parameters]
"workload.arrivals.rate" = [50.0]
{line}
"""


def swept(path, out, executor=None, window=4, **journal):
    """Run a sweep on threads to its end; its table's bytes."""
    sweep = load_sweep(path)
    out.mkdir(exist_ok=True)
    with executor or ThreadPoolExecutor(2) as workers, Journal(out / JOURNAL, sweep, **journal) as kept:
        assert run_sweep(sweep, kept, workers, window) is None
        write_table(sweep, kept, out / TABLE)
    assert not (out / f"{TABLE}.tmp").exists()
    return (out / TABLE).read_bytes()


class Late(Executor):
    """Ends what it was given in a random order; fails for good after ``most`` runs."""

    def __init__(self, seed, most=10**9):
        self.random, self.most, self.waiting = random.Random(seed), most, []

    def submit(self, work, *args):
        future = Future()
        self.waiting.append((future, work, args))
        if len(self.waiting) == 4:
            self.shutdown()
        return future

    def shutdown(self, *_args, **_kwargs):
        self.random.shuffle(self.waiting)
        for future, work, args in self.waiting:
            self.most -= 1
            if self.most < 0:
                future.set_exception(MemoryError("no more"))
            else:
                with ThreadPoolExecutor(1) as thread:  # here trio runs already
                    future.set_result(thread.submit(work, *args).result())
        self.waiting = []


def rows(out):
    return pq.read_table(out / TABLE).to_pylist()


def test_a_grid_is_every_combination_with_the_same_seeds(tmp_path):
    swept(write(tmp_path), tmp_path / "out")
    table = rows(tmp_path / "out")
    assert [row["point"] for row in table] == [point for point in range(8) for _ in range(2)]
    assert [row["seed"] for row in table] == [7, 8] * 8
    assert [row["executor.max_inflight"] for row in table[::2]] == [1, 1, 2, 2] * 2
    assert [row["workload.arrivals.rate"] for row in table[::2]] == [200.0, 5000.0] * 4
    assert [row["semantics"] for row in table[::8]] == ["serial", "full-duplex"]
    assert {row["status"] for row in table} == {"ok"}
    one = tmp_path / "one.toml"
    rate = BASE.replace('"poisson"', '"poisson"\nrate = 5000.0').replace("seed = 7", "seed = 8")
    one.write_text(rate + "[executor]\nmax_inflight = 2\n", encoding="utf-8")
    last = load_scenario(one)
    summary = simulate(last).summary
    assert table[-1]["ttft_p99_ns"] == summary.ttft.p99_ns
    assert table[-1]["loaded_tokens_per_s"] == summary.loaded_tokens_per_s
    assert table[-1]["utilisation_compute"] == summary.utilisation["compute"]
    assert table[-1]["outcomes_completed"] == 4
    about = json.loads(pq.read_schema(tmp_path / "out" / TABLE).metadata[META_KEY])
    assert about["seeds"] == {"run": 7, "replications": 2}
    assert about["sweep"]["parameters"]["executor.max_inflight"] == [1, 2]
    assert str(tmp_path) not in str(about)


def test_a_figure_of_the_timing_profile_is_marked_as_assumed(tmp_path):
    text = """schema = 1
[parameters]
"timing.compute.decode.base" = ["1ms", "2ms"]
"timing.compute.prefill.per_pair" = ["1.5ns"]
"timing.h2d.bandwidth" = ["1GB/s"]
"timing.jitter.cv" = [0.5]
timing.submit.time = ["3us"]
"""
    sweep = load_sweep(write(tmp_path, text))
    timing = sweep.scenario(1).timing
    base = timing.compute.decode.base
    assert (base.value, base.source, base.note) == (2_000_000, Source.ASSUMED, NOTE)
    assert timing.compute.prefill.per_pair.value == 1_500
    assert timing.submit.time.value == 3_000
    assert timing.jitter.cv == 0.5
    assert timing.jitter.stages == ("compute",)
    assert timing.d2h.bandwidth.note != NOTE
    assert [axis.column for axis in sweep.axes] == [
        "timing.compute.decode.base_ns",
        "timing.compute.prefill.per_pair_ps",
        "timing.h2d.bandwidth_bytes_per_s",
        "timing.jitter.cv",
        "timing.submit.time_ns",
    ]


def test_semantics_are_changed_on_top_of_the_preset_that_is_swept_too(tmp_path):
    text = GRID.replace(
        "[parameters]", '[parameters]\n"semantics.compute_sharing" = [[1.0, 0.5], [1.0, 0.55]]'
    )
    sweep = load_sweep(write(tmp_path, text))
    first, last = sweep.scenario(0).semantics, sweep.scenario(15).semantics
    assert (first.overlap, first.compute_sharing) == (False, (1.0, 0.5))
    assert (last.overlap, last.compute_sharing) == (True, (1.0, 0.55))
    swept(write(tmp_path, text), tmp_path / "out")
    assert rows(tmp_path / "out")[-1]["semantics.compute_sharing"] == "[1.0, 0.55]"


def test_whole_tables_can_be_swept(tmp_path):
    text = """schema = 1
scenario = "base.toml"
[parameters]
"workload.arrivals" = [{ kind = "closed", clients = 2 }, { kind = "constant", rate = 3.0 }]
"workload.arrivals.clients" = [3]
"""
    with pytest.raises(InputError, match=r"point 0 .*closed arrivals have no rate"):
        load_sweep(write(tmp_path, text.replace("clients = 2", "rate = 2.0")))
    sweep = load_sweep(write(tmp_path, text))
    assert [sweep.scenario(point).workload.clients for point in (0, 1)] == [3, None]
    assert sweep.points[0].values[0]["clients"] == 2, "a value of the file was changed"


@pytest.mark.parametrize("design", ["sobol", "latin_hypercube"])
def test_drawn_points_cover_their_ranges_evenly(tmp_path, design):
    line = """
"executor.max_active_sequences" = { from = 1, to = 4, integer = true }
"executor.max_queue" = { from = 1, to = 1000, integer = true, scale = "log" }
"timing.submit.time" = { from = "2ms", to = "40ms" }
"workload.lengths.prompt_cv" = { from = 0.1, to = 10.0, scale = "log" }
"semantics" = ["serial", "full-duplex"]
"""
    sweep = load_sweep(write(tmp_path, sampled(line, design)))
    columns = list(zip(*(point.values for point in sweep.points), strict=True))
    _, whole, queue, submit, spread, names = columns
    for value in (1, 2, 3, 4):  # the ends as often as the numbers between them
        assert whole.count(value) == pytest.approx(16, abs=1)
    assert min(queue) >= 1
    assert max(queue) <= 1000
    assert sum(value <= 31 for value in queue) == pytest.approx(32, abs=6)
    assert all(text.endswith("ns") and 2e6 <= int(text[:-2]) <= 4e7 for text in submit)
    assert sum(int(text[:-2]) < 21e6 for text in submit) == 32
    assert sum(value < 1 for value in spread) == 32
    assert names.count("serial") == 32
    again = load_sweep(write(tmp_path, sampled(line, design)))
    other = load_sweep(write(tmp_path, sampled(line, design, more="seed = 1")))
    assert again.digest == sweep.digest != other.digest


HOSTILE = {
    "no parameters": (GRID.partition("[parameters]")[0] + "[parameters]", "parameters: is empty"),
    "parameters missing": ("schema = 1", "key 'parameters' is missing"),
    "schema": (GRID.replace("schema = 1", "schema = 2"), "schema is 2; this version reads 1"),
    "unknown setting": ("sede = 3\n" + GRID, "unknown key 'sede'; did you mean 'seed'?"),
    "unknown design": (
        sampled("", "sobel"),
        "design: Design 'sobel' is unknown; did you mean 'sobol'?",
    ),
    "no points": (sampled("").replace("points = 64", ""), "design sobol needs points"),
    "points of a grid": ("points = 3\n" + GRID, "points is for sobol and latin_hypercube"),
    "60 Sobol points": (
        sampled("", points=60),
        "which is not a power of two; only then do Sobol points cover the ranges evenly: give 32 or 64",
    ),
    "too many points": (sampled("", "latin_hypercube", 10**6), "points is 1000000; give 1 to 100000"),
    "replications": (GRID.replace("replications = 2", "replications = 0"), "replications is 0; give 1"),
    "no text": (GRID + '"executor.grace" = 3\n', "parameters.executor.grace: 3 is not a list"),
    "range in a grid": (
        GRID + '"x" = { from = 1, to = 2 }\n',
        "is not a list; a grid needs the values",
    ),
    "empty list": (GRID + '"executor.grace" = []\n', "parameters.executor.grace: is an empty list"),
    "NaN": (
        GRID + '"workload.arrivals.cv" = [1.0, nan]\n',
        "parameters.workload.arrivals.cv.1: nan is not",
    ),
    "twice": (GRID + "executor.max_inflight = [1]\n", "executor.max_inflight: is there twice, in"),
    "huge": (GRID + '"executor.max_queue" = [99999999999999999999]\n', "is beyond 64 bits"),
    "date": (GRID + '"executor.grace" = [2026-01-01]\n', "parameters.executor.grace.0: datetime.date("),
    "unknown key": (
        GRID + '"workload.arivals.rate" = [1.0]\n',
        "workload.arivals.rate = 1): workload: unknown key 'arivals'; did you mean 'arrivals'?",
    ),
    "wrong type": (
        GRID + '"executor.max_queue" = ["many"]\n',
        "executor.max_queue: 'many' is not a whole",
    ),
    "wrong unit": (
        GRID + '"executor.grace" = ["3 GB/s"]\n',
        "executor.grace: '3 GB/s' is not a duration",
    ),
    "no unit": (
        GRID + '"timing.submit.time" = [3]\n',
        "timing.submit.time: 3 has no unit; write it as",
    ),
    "unknown figure": (
        GRID + '"timing.submit.tme" = ["3ms"]\n',
        "timing.submit.tme: timing figure 'submit.tme' is unknown; did you mean 'submit.time'?",
    ),
    "wrong jitter": (GRID + '"timing.jitter.cv" = [11.0]\n', "cv is 11.0; give 0 to 10"),
    "unknown profile": (
        GRID + '"timing" = ["qwen"]\n',
        "timing profile 'qwen': is neither a .toml file",
    ),
    "below no table": (
        GRID + '"seed.x" = [1]\n',
        "parameters.seed.x: cannot be swept: seeds come from",
    ),
    "below a number": (
        GRID + '"timing" = ["quick"]\n"workload.requests.x" = [1]\n',
        "parameters.workload.requests.x: workload.requests: is 4 in the scenario, not a table",
    ),
    "plan": (GRID + '"plan.max_inflight" = [[1]]\n', "cannot be swept: it changes no run"),
    "a million points": (
        "schema = 1\n[parameters]\n"
        + "".join(f"x{place} = {list(range(100))}\n" for place in range(3)),
        "parameters: 1,000,000 points are more than 100,000; list fewer values, or draw",
    ),
    "misspelled range": (
        sampled('"executor.max_queue" = { form = 1, to = 2 }'),
        "parameters.executor.max_queue: unknown key 'form'; did you mean 'from'?",
    ),
    "backwards": (sampled('"x" = { from = 2, to = 1 }'), "parameters.x: from 2 is not below to 1"),
    "endless": (
        sampled('"x" = { from = 1.0, to = inf }'),
        "parameters.x.to: inf is not a finite number",
    ),
    "log of 0": (sampled('"x" = { from = 0, to = 1, scale = "log" }'), "starts above 0"),
    "halves": (sampled('"x" = { from = 0.5, to = 9, integer = true }'), "0.5 is not a whole number"),
    "mixed ends": (
        sampled('"x" = { from = "1ms", to = 2 }'),
        "'1ms' is not a number, nor are both ends",
    ),
    "fraction": (
        sampled('"executor.max_queue" = { from = 1, to = 9 }'),
        "is not a whole number",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_sweep_is_one_line_before_anything_runs(tmp_path, name, capsys):
    text, said = HOSTILE[name]
    path = write(tmp_path, text)
    assert caltrio(["sweep", str(path), "--out", str(tmp_path / "out")]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"caltrio: {path}: ")
    assert said in complaint
    assert len(complaint.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_error_of_the_scenario_names_its_file(tmp_path):
    with pytest.raises(InputError, match=r"base.toml: workload: unknown key 'reqests'"):
        load_sweep(write(tmp_path, base=BASE.replace("requests", "reqests")))


def test_a_trace_that_cannot_be_read_is_an_error_before_anything_runs(tmp_path):
    text = 'schema = 1\n[workload]\ntrace = "t.csv"\narrivals.kind = "trace"\nlengths.kind = "trace"\n'
    path = write(
        tmp_path, 'schema = 1\nscenario = "base.toml"\n[parameters]\nsemantics = ["serial"]', text
    )
    with pytest.raises(InputError, match=r"t\.csv: cannot be read"):
        load_sweep(path)
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,many,1\n", encoding="utf-8")
    with pytest.raises(InputError, match="many"):
        load_sweep(path)
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,2,1\n", encoding="utf-8")
    before = load_sweep(path)
    assert str(tmp_path) not in json.dumps(before.about)
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,3,1\n", encoding="utf-8")
    assert load_sweep(path).digest != before.digest, "the contents of a trace do not count"


def test_impossible_points_are_an_error_or_rows(tmp_path, capsys):
    text = GRID.replace("[1, 2]", "[2, 3]")
    path, out = write(tmp_path, text), tmp_path / "out"
    with pytest.raises(
        InputError, match=r"point 2 \(semantics = serial, executor.max_inflight = 3, .* slots"
    ):
        load_sweep(path)
    swept(write(tmp_path, "skip_impossible = true\n" + text), out)
    table = rows(out)
    assert [row["status"] for row in table] == (["ok"] * 4 + ["impossible"] * 4) * 2
    assert "3 jobs in flight is above the 2 engine slots" in table[4]["reason"]
    assert table[4]["jobs"] is None
    assert caltrio(["sweep", str(path), "--out", str(out)]) == 0  # all has been done
    printed = capsys.readouterr().out
    assert "8 of them done before; 4 points are impossible, the column 'reason' says why" in printed


def test_a_time_that_is_too_long_is_a_row(tmp_path):
    path = write(tmp_path, GRID + '"timing.submit.time" = ["5us", "1000000h"]\n')
    swept(path, tmp_path / "out")
    table = rows(tmp_path / "out")
    assert [row["status"] for row in table] == ["ok", "ok", "failed", "failed"] * 8
    assert table[2]["reason"] == "a time is beyond 292 years"
    assert table[2]["jobs"] is table[2]["outcomes_completed"] is table[2]["tokens_per_s"] is None


def test_counts_that_a_run_does_not_have_are_0(tmp_path, capsys):
    text = """schema = 1
scenario = "base.toml"
[parameters]
"workload.arrivals.rate" = [50.0]
"executor.kv_capacity_tokens" = [1000, 5]
"""
    path, out = write(tmp_path, text), tmp_path / "out"
    swept(path, out)
    served, refused = rows(out)
    assert (served["outcomes_completed"], served["outcomes_refused"]) == (4, 0)
    assert (refused["outcomes_completed"], refused["outcomes_refused"]) == (0, 4)
    assert refused["ttft_p99_ns"] is None
    assert caltrio(["sweep", str(path), "--out", str(out)]) == 0
    assert "in 1 runs not every request was served" in capsys.readouterr().out


def test_the_table_does_not_depend_on_who_ran_what_when(tmp_path):
    path = write(tmp_path)
    want = swept(path, tmp_path / "one", ThreadPoolExecutor(1))
    for seed in range(3):
        assert swept(path, tmp_path / f"late{seed}", Late(seed)) == want
    out = tmp_path / "stopped"
    for done in range(3, 16, 3):
        with pytest.raises(
            SweepFailed, match=r"point \d \(semantics = .*\), seed [78]: MemoryError: no more"
        ):
            swept(path, out, Late(done, most=3))
        assert (out / JOURNAL).read_bytes().count(b"\n") == 1 + done
        assert not (out / TABLE).exists()
    assert swept(path, out) == want


def test_a_line_torn_anywhere_is_run_again(tmp_path):
    path, out = write(tmp_path), tmp_path / "out"
    want = swept(path, out)
    whole = (out / JOURNAL).read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in (0, 1, 50, last, last + 1, len(whole) - 1):
        (out / JOURNAL).write_bytes(whole[:cut])
        assert swept(path, out) == want
        assert len((out / JOURNAL).read_bytes()) == len(whole)


@pytest.mark.parametrize("damage", ['{"key": 1\n', "[]\n", "\n"])
def test_a_damaged_journal_is_an_error(tmp_path, damage):
    path, out = write(tmp_path), tmp_path / "out"
    swept(path, out)
    lines = (out / JOURNAL).read_text(encoding="utf-8").splitlines(keepends=True)
    (out / JOURNAL).write_text("".join([*lines[:3], damage, *lines[3:]]), encoding="utf-8")
    with pytest.raises(
        InputError, match="line 4: is not of a sweep's journal; name another folder, or"
    ):
        swept(path, out)
    swept(path, out, fresh=True)


def test_a_changed_sweep_or_scenario_does_not_go_on(tmp_path, capsys):
    path, out = write(tmp_path), tmp_path / "out"
    swept(path, out)
    swept(write(tmp_path, "# a remark\n" + GRID), out)  # changes nothing
    for text, base in (
        (GRID.replace("5000.0", "5001.0"), BASE),
        (GRID.replace("replications = 2", "replications = 3"), BASE),
        (GRID, BASE.replace("output_tokens = 3", "output_tokens = 4")),
        (GRID, BASE.replace("seed = 7", "seed = 8")),
    ):
        write(tmp_path, text, base)
        assert caltrio(["sweep", str(path), "--out", str(out)]) == 2
        complaint = capsys.readouterr().err
        assert (
            f"{JOURNAL}: was begun before {path}, its scenario, timing or trace was changed"
            in complaint
        )
        assert "start over with --force" in complaint


def test_points_of_one_scenario_share_their_runs(tmp_path):
    path, out = write(tmp_path, GRID.replace("[1, 2]", "[2, 2]")), tmp_path / "out"
    swept(path, out)
    assert len((out / JOURNAL).read_text(encoding="utf-8").splitlines()) == 1 + 8
    assert len(rows(out)) == 16


def test_the_folder_is_shared_with_nobody(tmp_path, capsys):
    path, out = write(tmp_path), tmp_path / "out"
    words = ["sweep", str(path), "--out", str(out)]
    out.mkdir()
    (out / "notes.txt").touch()
    assert caltrio(words) == 2
    assert "is in use: it holds 'notes.txt'" in capsys.readouterr().err
    (out / "notes.txt").unlink()
    with output_folder(out, force=False, files=RESULT_FILES, journal=JOURNAL):
        assert caltrio(words) == 2
        assert "another run is writing there" in capsys.readouterr().err
    swept(path, out)
    (out / "notes.txt").touch()  # in a folder that is ours, it is nobody's business
    assert caltrio([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["runs"], said["done_before"], len(said["points"])) == (16, 16, 8)
    assert said["points"][0]["parameters"]["semantics"] == "serial"
    assert caltrio(["simulate", "--limit", "1", "--out", str(out)]) == 2
    assert "is in use" in capsys.readouterr().err
    with output_folder(out, force=True, files=RESULT_FILES):
        assert sorted(file.name for file in out.iterdir()) == [".caltrio.lock", "notes.txt"]


def test_means_are_printed_of_forty_points_at_most(tmp_path, capsys):
    rates = [float(rate) for rate in range(100, 142)]
    path = write(
        tmp_path, GRID.replace("[200, 5000.0]", str(rates)).replace('"full-duplex"', '"serial"', 1)
    )
    path.write_text(
        path.read_text().replace('["serial", "serial"]', '["serial"]').replace("[1, 2]", "[1]")
    )
    swept(path, tmp_path / "out")
    assert caltrio(["sweep", str(path), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "Means over 2 replications" in printed
    assert "139" in printed
    assert "140" not in printed
    assert "2 more points are in the table only" in printed
    assert "semantics" not in printed.partition("more points")[0]  # does not vary
    assert str(tmp_path / "out" / TABLE) in printed.replace("\n", "")


def test_a_worker_of_another_version_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path)
    scenario = load_sweep(path).scenario(0)
    with pytest.raises(SweepFailed, match=r"a worker has caltrio .*, here is 9.9; install the same"):
        module._work(scenario, 7, "9.9")
    assert module._work(scenario, 7, module.VERSION) == run_point(scenario, 7)


# What follows has real processes.

LONG = BASE.replace('"poisson"', '"closed"').replace("output_tokens = 3", "output_tokens = 8")
SLOW = """schema = 1
scenario = "base.toml"
replications = 2
[parameters]
"workload.requests" = [60, 61, 62, 63, 64, 65, 66, 67]
"""


@contextmanager
def started(folder, *more):
    """A sweep on two processes that has ended some runs but not all: (process, its children)."""
    words = ["sweep", "sweep.toml", "--out", "out", *(more or ("--workers", "2"))]
    with subprocess.Popen(
        [CALTRIO, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    ) as child:  # fmt: skip
        children = []
        try:
            while lines_of(folder) < 3:
                assert child.poll() is None, child.communicate()
                time.sleep(0.01)
            children = psutil.Process(child.pid).children(recursive=True)
            assert more or len(children) >= 2
            yield child, children
        finally:
            child.kill()
            alive = left_of(children)
            for orphan in alive:
                orphan.kill()
    assert not alive, "processes were left behind"
    assert 3 <= lines_of(folder) < 1 + 16, "it was stopped after its end"


def left_of(processes):
    """Which of these still do something after a while; a zombie does not."""
    end = time.monotonic() + 20
    while True:
        alive = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.02)


def lines_of(folder):
    journal = folder / "out" / JOURNAL
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def interrupted(folder, name):
    return (
        f"caltrio sweep: interrupted by {name}; {lines_of(folder) - 1} of 16 runs are kept in out; "
        "the same command goes on from there\n"
    )


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """The table of an uninterrupted run of ``SLOW``."""
    folder = tmp_path_factory.mktemp("slow")
    return swept(write(folder, SLOW, LONG), folder / "out")


def test_interrupted_it_says_so_and_goes_on(tmp_path, slow):
    path = write(tmp_path, SLOW, LONG)
    with started(tmp_path) as (child, _):
        child.send_signal(signal.SIGINT)
        printed, complaint = child.communicate(timeout=30)
    assert child.returncode == 130
    assert complaint == interrupted(tmp_path, "SIGINT")
    assert not printed
    assert swept(path, tmp_path / "out") == slow


def test_killed_it_leaves_no_process_and_goes_on(tmp_path, slow):
    path = write(tmp_path, SLOW, LONG)
    with started(tmp_path) as (child, children):
        child.kill()
        child.wait()
        assert not left_of(children)
    assert not (tmp_path / "out" / TABLE).exists()
    words = ["sweep", str(path), "--out", str(tmp_path / "out"), "--workers", "2"]
    assert caltrio(words) == 0  # on processes, from a journal
    assert (tmp_path / "out" / TABLE).read_bytes() == slow


def test_a_worker_that_dies_is_one_error(tmp_path):
    write(tmp_path, SLOW, LONG)
    with started(tmp_path) as (child, children):
        workers = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
        workers[0].kill()
        _, complaint = child.communicate(timeout=30)
    kept = lines_of(tmp_path) - 1
    assert child.returncode == 1
    assert complaint == (
        "caltrio: a worker process died: it was killed, perhaps for the memory that it took; "
        f"{kept} of 16 runs are kept in out; the same command goes on from there\n"
    )


@pytest.fixture(scope="module")
def cluster():
    """The address of a Dask cluster of two processes on the loopback, and the process that has it."""
    program = """
import sys, distributed
if __name__ == "__main__":
    made = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
    )
    print(made.scheduler_address, flush=True)
    sys.stdin.read()
    made.close()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child.stdout.readline().strip()
            child.communicate(timeout=20)
        finally:
            child.kill()


def test_a_cluster_makes_the_same_table_even_if_stopped(tmp_path, slow, cluster):
    path, out = write(tmp_path, SLOW, LONG), tmp_path / "out"
    with started(tmp_path, "--cluster", cluster) as (child, _):
        child.send_signal(signal.SIGTERM)
        _, complaint = child.communicate(timeout=30)
    assert child.returncode == 143
    assert complaint == interrupted(tmp_path, "SIGTERM")
    with cluster_executor(cluster) as (executor, window):
        assert window == 4
        assert swept(path, out, executor, window) == slow


@pytest.mark.parametrize("address", ["nonsense", "foo://127.0.0.1:1", "tcp://127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_an_error(tmp_path, address, monkeypatch):
    monkeypatch.setattr(module, "_CONNECT_S", 1)
    with pytest.raises(InputError, match=f"--cluster {address}: no scheduler can be reached: "):
        with cluster_executor(address):
            pass


def test_a_scheduler_that_never_answers_is_an_error(monkeypatch):
    monkeypatch.setattr(module, "_CONNECT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(InputError, match="no scheduler can be reached: "):
            with cluster_executor(address):
                pass


def test_without_distributed_the_error_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distributed", None)
    words = [
        "sweep",
        str(write(tmp_path)),
        "--out",
        str(tmp_path / "out"),
        "--cluster",
        "tcp://127.0.0.1:1",
    ]
    assert caltrio(words) == 2
    complaint = capsys.readouterr().err
    assert complaint.endswith("needs the package distributed; pip install 'caltrio[cluster]'\n")
    assert caltrio([*words, "--workers", "2"]) == 2
    assert "--workers is for this machine" in capsys.readouterr().err
