import fcntl
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import stopped_midway

from caltrio.cli import run
from caltrio.observe.records import about, read_tables
from caltrio.timing import builtin_profiles

CALTRIO = Path(sys.executable).parent / "caltrio"
PROFILE = builtin_profiles()["qwen3-8b"]
CSV = "arrival_s,prompt_tokens,output_tokens\n"
SMALL = ("simulate", "--limit", "3", "--prompt-tokens", "8", "--output-tokens", "3")


def caltrio(*arguments, cwd):
    return subprocess.run(
        [CALTRIO, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONWARNINGS": "error", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def rows(count, **wrong):
    lines = [f"{index},10,5" for index in range(1, count + 1)]
    for number, line in wrong.items():
        lines[int(number.removeprefix("row")) - 1] = line
    return CSV + "\n".join(lines) + "\n"


FILES = {
    "key.toml": "schema = 1\n[workload]\nreqests = 3\n",
    "preset.toml": 'schema = 1\nsemantics = "full-dublex"\n',
    "type.toml": 'schema = 1\nseed = "1"\n',
    "plan.toml": "schema = 1\n[plan]\nmax_inflight = [1, 5000]\n",
    "broken.toml": "schema = \n",
    "negative.toml": PROFILE.replace('"40us"', '"-40us"'),
    "nan.toml": PROFILE.replace('"40us"', "nan"),
    "cv.toml": PROFILE.replace("cv = 0.02", "cv = nan"),
    "width.toml": PROFILE.replace('"12GB/s"', '"0GB/s"', 1),
    "column.csv": "arrival_s,prompt_tokens\n0,1\n",
    "row.csv": rows(20, row17="17,many,5"),
    "ragged.csv": rows(20, row17="17,10"),
    "backwards.csv": rows(20, row17="15.5,10,5"),
    "empty.csv": "",
    "header.csv": CSV,
    "bad.jsonl": '{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 1\n',
    "file": "",
    "used/notes.txt": "",
}

BAD = {
    "unknown key": (
        ["simulate", "key.toml"],
        "caltrio: key.toml: workload: unknown key 'reqests'; did you mean 'requests'? known keys: ",
    ),
    "unknown preset in a file": (
        ["simulate", "preset.toml"],
        (
            "caltrio: preset.toml: semantics: semantics preset 'full-dublex' is unknown; "
            "did you mean 'full-duplex'? use one of serial, "
        ),
    ),
    "unknown preset": (
        ["simulate", "--semantics", "full-dublex"],
        (
            "caltrio: --semantics: semantics preset 'full-dublex' is unknown; "
            "did you mean 'full-duplex'? use one of serial, "
        ),
    ),
    "wrong type": (["plan", "type.toml"], "caltrio: type.toml: seed: '1' is not a whole number"),
    "a plan that cannot work": (
        ["plan", "plan.toml"],
        "caltrio: plan.toml: plan: max_inflight is 5000; give 1 to 4096",
    ),
    "broken TOML": (
        ["simulate", "broken.toml"],
        "caltrio: broken.toml: is not valid TOML: Invalid value (at line 1, column 10); correct the",
    ),
    "negative duration in a profile": (
        ["simulate", "--timing", "negative.toml"],
        "caltrio: negative.toml: submit.time.value: '-40us' is negative; a duration is 0 or more",
    ),
    "negative duration": (
        ["simulate", "--admission-timeout=-1ms"],
        (
            "caltrio simulate: Invalid value for '--admission-timeout': '-1ms' is negative; "
            "a duration is 0 or more. See 'caltrio simulate --help'."
        ),
    ),
    "no duration": (
        ["simulate", "--slo-ttft", "0s"],
        "caltrio simulate: Invalid value for '--slo-ttft': '0s' is 0; give a longer time. See ",
    ),
    "duration without a unit": (
        ["simulate", "--slo-tpot", "40"],
        (
            "caltrio simulate: Invalid value for '--slo-tpot': '40' is not a duration; "
            "write a number and a unit, as in '40ms'. See "
        ),
    ),
    "NaN duration": (
        ["simulate", "--timing", "nan.toml"],
        "caltrio: nan.toml: submit.time.value: nan has no unit; write it as text with one",
    ),
    "NaN cv": (
        ["simulate", "--timing", "cv.toml"],
        "caltrio: cv.toml: jitter.cv: nan is not a finite number",
    ),
    "NaN rate": (
        ["simulate", "--arrivals", "poisson", "--rate", "nan"],
        "caltrio: command line: rate is nan; give a number above 0",
    ),
    "bandwidth 0": (
        ["simulate", "--timing", "width.toml"],
        (
            "caltrio: width.toml: h2d.bandwidth.value: '0GB/s' is a bandwidth of 0, "
            "over which nothing ever arrives; give more"
        ),
    ),
    "unknown profile": (
        ["simulate", "--timing", "qwen"],
        "timing profile 'qwen': is neither a .toml file nor one that ships; shipped: quick, qwen3-8b",
    ),
    "missing column": (
        ["simulate", "--workload", "column.csv"],
        (
            "/column.csv: line 1: column 'output_tokens' is missing; the header has arrival_s, "
            "prompt_tokens; the csv format needs arrival_s, prompt_tokens, output_tokens"
        ),
    ),
    "no number in row 17": (
        ["simulate", "--workload", "row.csv"],
        (
            "/row.csv: row 17 (line 18), column 'prompt_tokens': 'many' is not a token count; "
            "give a whole number, 0 or more"
        ),
    ),
    "ragged row 17": (
        ["simulate", "--workload", "ragged.csv"],
        "/ragged.csv: row 17 (line 18): has 2 cells, the header 3; mend the row",
    ),
    "backwards arrivals": (
        ["simulate", "--workload", "backwards.csv"],
        "/backwards.csv: row 17 (line 18): arrival time goes backwards by 0.5 s; sort the trace by",
    ),
    "empty trace": (
        ["simulate", "--workload", "empty.csv"],
        "/empty.csv: is empty; give a trace with a header and at least one row",
    ),
    "header only": (
        ["simulate", "--workload", "header.csv"],
        "/header.csv: has a header but no rows; give at least one request",
    ),
    "bad JSON line": (
        ["simulate", "--workload", "bad.jsonl"],
        "/bad.jsonl: row 2 (line 2): is not valid JSON: ",
    ),
    "no job in flight": (
        ["simulate", "--max-inflight", "0"],
        "caltrio simulate: Invalid value for '--max-inflight': 0 is not in the range 1<=x<=",
    ),
    "more in flight than slots": (
        ["simulate", "--semantics", "full-duplex", "--max-inflight", "3"],
        (
            "caltrio: --max-inflight: 3 jobs in flight is above the 2 engine slots, and with "
            "submit_when_full = 'busy' every further infer() returns code 17; use at most 2, or "
        ),
    ),
    "arrivals without a rate": (
        ["simulate", "--arrivals", "poisson"],
        "caltrio: command line: poisson arrivals need a rate in requests per second",
    ),
    "unknown arrivals": (
        ["simulate", "--arrivals", "poison"],
        "caltrio simulate: Invalid value for '--arrivals': 'poison' is not one of 'trace', 'poisson'",
    ),
    "scale without a trace": (
        ["simulate", "--rate-scale", "2"],
        "caltrio: command line: scale is for trace arrivals; these are closed, set rate",
    ),
    "clients of an open loop": (
        ["simulate", "--arrivals", "poisson", "--rate", "1", "--clients", "2"],
        "caltrio: command line: --clients is for closed arrivals; these are poisson",
    ),
    "burstiness of no gamma": (
        ["simulate", "--arrivals", "poisson", "--rate", "1", "--burstiness", "2"],
        "caltrio: command line: --burstiness is for gamma arrivals; these are poisson",
    ),
    "arrivals that never come": (
        ["simulate", "--arrivals", "poisson", "--rate", "1e-300"],
        "caltrio: workload.arrivals: with rate 1e-300 the last request comes after 146 years; give",
    ),
    "missing scenario": (
        ["simulate", "none.toml"],
        "caltrio: none.toml: cannot be read: No such file or directory; give a readable file",
    ),
    "missing trace": (
        ["simulate", "--workload", "none.csv"],
        "/none.csv: cannot be read: No such file or directory; give a readable file",
    ),
    "unwritable folder": (
        [*SMALL, "--out", "file/run"],
        "caltrio: --out file/run: cannot be written: Not a directory; name a folder that can",
    ),
    "unwritable folder of a plan": (
        ["plan", "--out", "file/run"],
        "caltrio: --out file/run: cannot be written: Not a directory; name a folder that can",
    ),
    "a file for a folder": (
        [*SMALL, "--out", "file"],
        "caltrio: --out file: cannot be written: File exists; name a folder that can",
    ),
    "folder in use": (
        [*SMALL, "--out", "used"],
        "caltrio: --out used: is in use: it holds 'notes.txt'; name another, or add --force",
    ),
    "no records": (
        ["digest", "used"],
        "caltrio: used/jobs.parquet: cannot be read as records: ",
    ),
    "unknown command": (["simulat"], "caltrio: No such command 'simulat'"),
    "unknown option": (["plan", "--bogus"], "caltrio plan: No such option '--bogus'"),
}


def at_once(arguments, cwd):
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda words: caltrio(*words, cwd=cwd), arguments))


STARTED = [  # as a program of its own; the others in this process, as a start costs a second
    "unknown key", "unknown preset", "negative duration in a profile", "NaN duration", "bandwidth 0",
    "missing column", "no number in row 17", "backwards arrivals", "empty trace", "no job in flight",
    "more in flight than slots", "missing scenario", "missing trace", "unwritable folder",
    "folder in use",
]  # fmt: skip


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    yield folder
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == {*FILES, "used"}


@pytest.fixture(scope="module")
def answers(bad_files):
    return dict(zip(STARTED, at_once([BAD[name][0] for name in STARTED], bad_files), strict=True))


@pytest.fixture
def here(monkeypatch, capsys):
    """The command line in this process."""

    def here(*arguments, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.setenv("COLUMNS", "100")
        code = run(list(map(str, arguments)))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return here


@pytest.fixture
def good(here):
    def good(*arguments, cwd):
        done = here(*arguments, cwd=cwd)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return good


def assert_complaint(done, text):
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.endswith("\n")
    assert len(done.stderr.splitlines()) == 1
    assert text in done.stderr
    assert done.stderr.startswith("caltrio")


@pytest.mark.parametrize("name", STARTED)
def test_bad_input_is_one_line_and_exit_code_2(answers, name):
    assert_complaint(answers[name], BAD[name][1])


@pytest.mark.parametrize("name", sorted(BAD.keys() - set(STARTED)))
def test_further_bad_input_is_one_line_and_exit_code_2(bad_files, here, name):
    arguments, text = BAD[name]
    assert_complaint(here(*arguments, cwd=bad_files), text)


def test_a_folder_that_another_run_writes_to_is_refused(tmp_path, good):
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / ".caltrio.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_complaint(
            caltrio(*SMALL, "--out", "run", "--force", cwd=tmp_path),
            "caltrio: --out run: another run is writing there; wait for it, or name another folder",
        )
    good(*SMALL, "--out", "run", cwd=tmp_path)  # a lock that nobody holds is no obstacle


def test_force_replaces_what_a_run_writes_and_leaves_the_rest(tmp_path, good):
    folder = tmp_path / "run"
    good(*SMALL, "--out", "run", cwd=tmp_path)
    (folder / "notes.txt").write_text("old", encoding="utf-8")
    assert (folder / "trace.json").exists()
    good(*SMALL, "--out", "run", "--force", "--trace-jobs", "0", cwd=tmp_path)
    assert (folder / "notes.txt").read_text(encoding="utf-8") == "old"
    assert not (folder / "trace.json").exists()
    assert about(read_tables(folder)[0])["complete"] is True


def test_force_into_a_foreign_folder_removes_nothing(tmp_path, good):
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name in ("notes.txt", "timeline-mine.svg", "trace.json"):
        (folder / name).write_text("mine", encoding="utf-8")
    good(*SMALL, "--out", "foreign", "--force", "--trace-jobs", "0", cwd=tmp_path)
    for name in ("notes.txt", "timeline-mine.svg", "trace.json"):
        assert (folder / name).read_text(encoding="utf-8") == "mine"


def test_a_plan_that_cannot_be_read_costs_no_old_result(tmp_path):
    folder = tmp_path / "old"
    assert run(["simulate", *SMALL[1:], "--out", str(folder)]) == 0
    before = sorted(path.name for path in folder.iterdir())
    bad = tmp_path / "bad.toml"
    bad.write_text(
        'schema = 1\n[workload]\ntrace = "none.csv"\narrivals.kind = "trace"\n', encoding="utf-8"
    )
    assert run(["plan", str(bad), "--out", str(folder), "--force"]) == 2
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_run_leaves_its_files_and_says_the_same_in_json(tmp_path, good):
    printed = json.loads(good(*SMALL, "--out", "run", "--json", "--slo-ttft", "1h", cwd=tmp_path))
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} - {".caltrio.lock"} == {
        "jobs.parquet", "requests.parquet", "trace.json", "timeline.svg", "summary.json",
    }  # fmt: skip
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8")) == printed
    assert json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert (printed["requests"], printed["jobs"], printed["tokens"]) == (3, 9, 9)
    assert printed["outcomes"] == {"completed": 3}
    assert printed["complete"] is True
    assert printed["goodput_per_s"] == pytest.approx(printed["requests_per_s"])


@pytest.mark.parametrize("command", ["semantics", "devices"])
def test_lists_are_json(tmp_path, command, good):
    assert json.loads(good(command, "--json", cwd=tmp_path))
    assert good(command, cwd=tmp_path)


def test_an_undefined_number_is_null_in_json(tmp_path, good):
    text = good("simulate", "--limit", "2", "--output-tokens", "0", "--json", cwd=tmp_path)
    assert json.loads(text, parse_constant=pytest.fail)["ttft"]["p50_ns"] is None


def test_a_digest_tells_seeds_apart_and_runs_not(tmp_path, good):
    seeds = {"one": 7, "two": 7, "three": 8}
    at_once([(*SMALL, "--seed", seed, "--out", name) for name, seed in seeds.items()], tmp_path)
    facts = [json.loads(good("digest", name, "--json", cwd=tmp_path)) for name in seeds]
    digests = [fact.pop("sha256") for fact in facts]
    assert facts == [
        {"jobs": 9, "requests": 3, "seeds": {"run": seed}, "complete": True} for seed in seeds.values()
    ]
    assert digests[0] == digests[1] != digests[2]
    assert good("digest", "one", cwd=tmp_path) == f"{digests[0]}  9 jobs, 3 requests\n"


def test_options_override_a_scenario(tmp_path, good):
    (tmp_path / "s.toml").write_text(
        "schema = 1\nseed = 5\n[workload]\nrequests = 50\n", encoding="utf-8"
    )
    good("simulate", "s.toml", *SMALL[1:], "--semantics", "serial", "--out", "run", cwd=tmp_path)
    facts = about(read_tables(tmp_path / "run")[0])
    assert facts["seeds"] == {"run": 5}
    assert facts["scenario"]["workload"]["requests"] == 3
    assert facts["scenario"]["semantics"]["overlap"] is False


def test_a_trace_is_limited_and_may_arrive_by_another_process(tmp_path, good):
    (tmp_path / "t.csv").write_text(rows(20, row9="9,many,5"), encoding="utf-8")
    text = good("simulate", "--workload", "t.csv", "--limit", "8", "--json", cwd=tmp_path)
    assert json.loads(text)["requests"] == 8
    (tmp_path / "t.csv").write_text(rows(20), encoding="utf-8")
    text = good(
        "simulate", "--workload", "t.csv", "--limit", "4", "--arrivals", "poisson", "--rate", "1",
        "--json", cwd=tmp_path,
    )  # fmt: skip
    assert (json.loads(text)["requests"], json.loads(text)["tokens"]) == (4, 20)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_keeps_what_had_ended(tmp_path, good, stop):
    sizes = ["--limit", "1000000", "--output-tokens", "2", "--prompt-tokens", "8"]
    requests = stopped_midway(["simulate", *sizes], tmp_path, stop)
    assert 0 < requests.num_rows < 1_000_000
    assert "(interrupted run)" in good("digest", "run", cwd=tmp_path)


@pytest.mark.parametrize(
    "command", ["", "simulate", "replay", "plan", "semantics", "devices", "digest"]
)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(tmp_path, good, command, flag):
    text = good(*command.split(), flag, cwd=tmp_path)
    assert text.startswith(f"Usage: caltrio {command}".rstrip())
    assert "\\b" not in text


def test_examples_in_help_keep_their_lines(tmp_path, good):
    text = good("simulate", "--help", cwd=tmp_path)
    assert "\n    caltrio simulate --arrivals poisson --rate 0.2" in text


def test_version(tmp_path, good):
    assert good("--version", cwd=tmp_path).startswith("caltrio, version ")
