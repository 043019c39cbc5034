"""``caltrio replay``: any kind of device, the same tables, and an end in good order."""

import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import pytest
import trio
import trio.testing
from attrs import evolve
from support import stopped_midway

from caltrio import target
from caltrio.capabilities import Capabilities
from caltrio.cli import run
from caltrio.device import DeviceKind
from caltrio.golden import reference_golden, save
from caltrio.observe.records import about, read_tables
from caltrio.semantics import EngineSemantics, SubmitWhenFull
from caltrio.testing import FakeDevice
from caltrio.tokens import generate
from caltrio.workload.requests import Request, prompt_of

CALTRIO = Path(sys.executable).parent / "caltrio"
FAKE = ("--device", "fake", "--manifest", "small.toml")
SMALL = ("--limit", "4", "--prompt-tokens", "8", "--output-tokens", "3")
VOCAB = 64


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a manifest, goldens and scenarios; the working directory."""
    text = (files("caltrio") / "manifests" / "qwen3-8b.toml").read_text(encoding="utf-8")
    text = text.replace("151936", "64").replace("303872", "128").replace('"qwen3-8b"', '"small"')
    (tmp_path / "small.toml").write_text(text, encoding="utf-8")
    right = reference_golden("small", VOCAB, 1, lengths=False)
    save(right, tmp_path / "right.npz")
    (case,) = right.cases
    wrong = evolve(case, tokens=tuple((token + 1) % VOCAB for token in case.tokens))
    save(evolve(right, cases=(wrong,)), tmp_path / "wrong.npz")
    (tmp_path / "engines.toml").write_text(
        "schema = 1\n[semantics]\nengines = 8\n[executor]\nmax_inflight = 6\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def here(capsys):
    """(exit code, standard output, standard error) of a command line."""

    def here(*arguments):
        code = run(list(map(str, arguments)))
        return (code, *capsys.readouterr())

    return here


@pytest.fixture
def as_json(here):
    def as_json(*arguments, code=0):
        done, out, err = here("replay", *arguments, "--json")
        assert (done, err) == (code, "")
        return json.loads(out, parse_constant=pytest.fail)

    return as_json


@pytest.fixture
def scripted(monkeypatch):
    """Let --device fake open this device; gives the options that it was opened with."""

    def scripted(device, before=trio.lowlevel.checkpoint):
        seen = []

        def run_fake(main, options):
            @asynccontextmanager
            async def opened():
                await before()
                device.manifest = options.model
                yield device

            seen.append(options)
            return trio.run(main, opened)

        kind = DeviceKind("fake", "scripted", "real", lambda: None, run_fake)
        monkeypatch.setattr(target, "device_kind", lambda _name: kind)
        return seen

    return scripted


def fake(**facts):
    return FakeDevice(1_000_000, **facts)


def resettable():
    return EngineSemantics(engines=4, submit_when_full=SubmitWhenFull.BLOCK, reset_scope="device")


# --- the simulated card ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [("--clients", "3"), ("--arrivals", "poisson", "--rate", "3", "--semantics", "half-duplex")],
)
def test_on_the_simulated_card_it_is_simulate(here, folder, words):
    same = (*SMALL, *words, "--max-inflight", "2", "--seed", "5", "--slo-ttft", "300ms")
    outputs = []
    for command in ("simulate", "replay"):
        code, out, err = here(command, *same, "--out", command)
        assert (code, err) == (0, "")
        outputs.append(out.replace(f"written to {command}", ""))
    assert outputs[0] == outputs[1]
    assert here("digest", "simulate")[1] == here("digest", "replay")[1]
    for left, right in zip(
        read_tables(folder / "simulate"), read_tables(folder / "replay"), strict=True
    ):
        assert left.to_pylist() == right.to_pylist()
        assert about(left) == about(right)
    names = {path.name for path in (folder / "replay").iterdir()} - {".caltrio.lock"}
    assert names == {"jobs.parquet", "requests.parquet", "summary.json", "trace.json"}
    for name in ("summary.json", "trace.json"):
        assert (folder / "simulate" / name).read_bytes() == (folder / "replay" / name).read_bytes()


def test_a_folder_of_another_command_is_cleared_of_all_its_results(here, folder):
    assert here("simulate", *SMALL, "--out", "run")[0] == 0
    assert (folder / "run" / "timeline.svg").exists()
    assert here("replay", *SMALL, "--out", "run", "--force")[0] == 0
    assert not (folder / "run" / "timeline.svg").exists()


# --- a device of real time ------------------------------------------------------------------------


def test_tokens_flow_in_real_time(as_json, folder, monkeypatch):
    histories = {}
    compute = FakeDevice._compute

    def watched(self, job):
        compute(self, job)
        histories[job.request_id] = list(self._cells[job.sequence_id])

    monkeypatch.setattr(FakeDevice, "_compute", watched)
    facts = as_json(*FAKE, *SMALL, "--clients", "2", "--seed", "5", "--max-inflight", "2",
                    "--slo-ttft", "1h", "--out", "run")  # fmt: skip
    prompts = {index: prompt_of(Request(index, 0, 8, 3), 5, VOCAB, 100).tolist() for index in range(4)}
    assert len({tuple(prompt) for prompt in prompts.values()}) == 4
    warm_up = histories.pop(-1)
    assert len(warm_up) > 2
    assert histories == {
        index: prompt + generate(VOCAB, prompt, 2) for index, prompt in prompts.items()
    }
    assert (facts["requests"], facts["jobs"], facts["tokens"]) == (4, 12, 12)
    assert facts["outcomes"] == {"completed": 4}
    assert facts["complete"] is True
    assert facts["goodput_per_s"] == pytest.approx(facts["requests_per_s"])
    assert facts["utilisation"]["compute"] is None  # this device does not report its stages
    assert facts["utilisation"]["submitter"] > 0
    jobs, requests = read_tables(folder / "run")
    # The warm-up, three jobs, is not of the traffic; times count from after it.
    assert min(jobs.column("job_id").to_pylist()) == 3
    assert requests.column("request_id").to_pylist() == [0, 1, 2, 3]
    assert 0 <= min(requests.column("arrival_ns").to_pylist()) < 10**9
    said = about(jobs)
    assert (said["device"], said["manifest"], said["seeds"]) == ("fake", "small", {"run": 5})
    assert said["scenario"]["workload"]["requests"] == 4
    assert {"caltrio", "trio", "python"} <= said["versions"].keys()
    slices = [event for event in json.loads((folder / "run" / "trace.json").read_text())["traceEvents"]
              if event["ph"] == "X"]  # fmt: skip
    assert {event["args"]["job"] for event in slices} == set(range(3, 15))
    assert min(event["ts"] for event in slices) >= 0


def test_a_table_is_printed_without_what_the_device_does_not_report(here):
    code, out, err = here("replay", *FAKE, *SMALL)
    assert (code, err) == (0, "")
    assert "requests: 4 completed; 12 jobs" in out
    assert "two or more jobs on the device - of its busy time" in " ".join(out.split())


@pytest.mark.parametrize("words", [("--no-warm-up",), ("--golden", "right.npz")])
def test_the_warm_up_can_be_another_or_none(as_json, folder, words):
    as_json(*FAKE, *SMALL, *words, "--out", "run")
    first = min(read_tables(folder / "run")[0].column("job_id").to_pylist())
    assert first == (0 if words == ("--no-warm-up",) else 3)


def test_a_warm_up_that_is_wrong_ends_it_before_traffic(here, folder):
    code, out, err = here("replay", *FAKE, *SMALL, "--golden", "wrong.npz", "--out", "run", "--json")
    assert code == 75
    assert err.startswith("caltrio: the executor has failed: the golden run of the warm-up failed: ")
    assert json.loads(out)["requests"] == 0
    jobs, requests = read_tables(folder / "run")
    assert jobs.num_rows == requests.num_rows == 0
    assert about(jobs)["complete"] is about(requests)["complete"] is False


def test_the_device_is_asked_for_with_everything_that_was_said(as_json, scripted, folder):
    seen = scripted(fake())
    (folder / "model.calbin").write_bytes(b"")
    (folder / "caps.toml").write_text('schema = 1\ncalrt_version = "1"\n', encoding="utf-8")
    as_json(*FAKE, *SMALL, "--calbin", "model.calbin", "--capabilities", "caps.toml", "--seed", "9",
            "--semantics", "serial")  # fmt: skip
    (options,) = seen
    assert (options.calbin, options.seed, options.tokens) == (Path("model.calbin"), 9, True)
    assert (options.capabilities.max_inflight, options.model.name) == (1, "small")
    assert options.semantics.overlap is False


@pytest.mark.parametrize(
    ("words", "expected"),
    [((*FAKE,), (120, 60, 60)), ((*FAKE, "--execution-timeout", "5s"), (10, 5, 60)),
     (("--device", "sim"), (None, None, 60)),
     ((*FAKE, "--queue-timeout", "3s", "--execution-timeout", "5s", "--grace", "7s"), (3, 5, 7))],
)  # fmt: skip
def test_deadlines(as_json, folder, words, expected):
    as_json(*words, *SMALL, "--out", "run")
    limits = about(read_tables(folder / "run")[0])["scenario"]["executor"]
    names = ("queue_timeout_ns", "execution_timeout_ns", "grace_ns")
    assert tuple(limits[name] and limits[name] // 10**9 for name in names) == expected


def test_fewer_in_flight_than_asked_for_is_said(here, scripted):
    device = fake()
    device.capabilities = Capabilities()
    scripted(device)
    code, out, _ = here("replay", *FAKE, *SMALL, "--max-inflight", "2")
    assert code == 0
    assert "in flight: 2 jobs in flight were asked for, but no capability file" in " ".join(out.split())


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("--clients", "2", "--limit", "1000"),
        ("--arrivals", "constant", "--rate", "20", "--limit", "1000"),
    ],
)
def test_an_executor_that_fails_for_good_ends_it_and_leaves_valid_tables(here, scripted, folder, words):
    scripted(fake(lost={9}))
    code, out, err = here(
        "replay", *FAKE, *SMALL, *words, "--limit", "1000", "--execution-timeout", "400ms",
        "--grace", "60ms", "--out", "run", "--json",
    )  # fmt: skip
    assert code == 75
    assert err.startswith("caltrio: the executor has failed: job 9 passed its execution deadline; ")
    assert len(err.splitlines()) == 1
    jobs, requests = read_tables(folder / "run")
    assert about(jobs)["complete"] is about(requests)["complete"] is False
    outcomes = requests.column("outcome").to_pylist()
    assert outcomes.count("expired") == 1
    assert "completed" in outcomes
    assert len(outcomes) < 200  # the rest was never sent
    facts = json.loads(out)
    assert facts == json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    assert facts["complete"] is False
    assert facts["failure"] == "job 9 passed its execution deadline"
    assert facts["requests"] == len(outcomes)


def test_a_request_that_fails_is_recorded_and_the_others_go_on(as_json, scripted, folder):
    device = fake(lost={7}, semantics=resettable())
    scripted(device)
    (folder / "s.toml").write_text('schema = 1\n[executor]\nretry_after = "200ms"\n', encoding="utf-8")
    facts = as_json("s.toml", *FAKE, *SMALL, "--clients", "2", "--limit", "8",
                    "--execution-timeout", "400ms", "--grace", "30ms")  # fmt: skip
    assert device.resets == 1
    assert facts["complete"] is True
    assert facts["requests"] == 8
    assert facts["outcomes"]["expired"] == 1
    # A client that was told to try again later did not use up its requests meanwhile.
    assert facts["outcomes"]["completed"] >= 4


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_replay_that_is_stopped_keeps_what_had_ended(folder, stop):
    requests = stopped_midway(["replay", *FAKE, *SMALL, "--limit", "100000"], folder, stop)
    assert 0 < requests.num_rows < 100_000


def test_a_signal_while_the_device_is_opened(here, scripted, folder):
    async def never():
        await trio.testing.wait_all_tasks_blocked()
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.sleep_forever()

    scripted(fake(), never)
    code, out, err = here("replay", *FAKE, *SMALL, "--out", "run", "--json")
    assert (code, json.loads(out)["complete"]) == (143, False)
    assert err == "caltrio replay: interrupted by SIGTERM; what had ended by then is kept\n"
    jobs, requests = read_tables(folder / "run")
    assert jobs.num_rows == requests.num_rows == 0


# --- bad input ------------------------------------------------------------------------------------

BAD = {
    "unknown device": (["--device", "npu"], "--device: 'npu' is unknown; use one of "),
    "unknown manifest": (["--manifest", "qwen"], "manifest 'qwen': is neither a .toml file"),
    "missing scenario": (["none.toml"], "none.toml: cannot be read: No such file or directory"),
    "missing trace": ([*FAKE, "--workload", "none.csv"], "none.csv: cannot be read: No such file"),
    "missing calbin": ([*FAKE, "--calbin", "none.calbin"], "--calbin none.calbin: is not a file; name"),
    "a folder for a calbin": ([*FAKE, "--calbin", "."], "--calbin .: is not a file; name the model"),
    "missing capabilities": ([*FAKE, "--capabilities", "none.toml"], "none.toml: cannot be read"),
    "missing golden": ([*FAKE, "--golden", "none.npz"], "none.npz: is not a golden: No such file"),
    "golden of another model": (
        ["--device", "fake", "--golden", "right.npz"], "--golden: right.npz: has 64 logits"
    ),
    "golden without a warm-up": (
        [*FAKE, "--golden", "right.npz", "--no-warm-up"],
        "--golden: and --no-warm-up exclude each other; give one",
    ),
    "calbin of a simulation": (
        ["--calbin", "small.toml"],
        "--calbin: is for a device of real time, and sim is of virtual time; leave it out",
    ),
    "warm-up of a simulation": (["--warm-up"], "--warm-up: is for a device of real time, and sim"),
    "no duration": ([*FAKE, "--grace", "60"], "'60' is not a duration; write a number and a unit"),
    "more in flight than slots": (
        [*FAKE, "--semantics", "serial", "--max-inflight", "3"],
        "--max-inflight: 3 jobs in flight is above the 2 engine slots",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(here, folder, name):
    arguments, text = BAD[name]
    before = sorted(folder.rglob("*"))
    code, out, err = here("replay", *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("caltrio")
    assert text in err
    assert sorted(folder.rglob("*")) == before


def test_more_in_flight_than_the_device_has_slots(here, scripted, folder):
    scripted(fake(semantics=EngineSemantics()))
    code, out, err = here("replay", "engines.toml", *FAKE, *SMALL, "--out", "run")
    assert (code, out) == (2, "")
    assert err.startswith("caltrio: max_inflight: fake: 6 jobs in flight is above the 2 engine slots")
    assert not list((folder / "run").glob("*.parquet"))
