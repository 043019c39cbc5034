"""``caltrio golden``, ``faults`` and ``soak`` on the command line: options, exit codes, JSON."""

import json
from importlib.resources import files
from types import SimpleNamespace

import pytest
from attrs import evolve

import caltrio.golden
from caltrio import soak as soak_module
from caltrio.cli import run
from caltrio.golden import load, reference_golden, save
from caltrio.semantics import PRESETS
from sim.device import SimDevice
from sim.tokens import TokenModel


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    """Short lengths, and no full collections: what the commands do is not what they cost."""
    monkeypatch.setattr(caltrio.golden, "LENGTHS", (1, 2, 17))
    monkeypatch.setattr(caltrio.golden, "ALTERNATING_TOKENS", 20)
    monkeypatch.setattr(soak_module, "gc", SimpleNamespace(collect=lambda: 0))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with manifests and goldens; the working directory."""
    text = (files("caltrio") / "manifests" / "qwen3-8b.toml").read_text(encoding="utf-8")
    text = text.replace("151936", "64").replace("303872", "128").replace('"qwen3-8b"', '"small"')
    (tmp_path / "small.toml").write_text(text, encoding="utf-8")
    (tmp_path / "wrong.toml").write_text(text.replace("128", "126"), encoding="utf-8")
    # A context of 100, as another product may have.
    short = text.replace("163840", "400").replace("40960", "100")
    (tmp_path / "short.toml").write_text(short, encoding="utf-8")
    save(reference_golden("small", 64, 4, lengths=False), tmp_path / "right.npz")
    save(reference_golden("big", 128, 3, lengths=False), tmp_path / "big.npz")
    (tmp_path / "no.npz").write_bytes(b"nothing")
    (tmp_path / "used").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def here(folder, capsys):
    """(exit code, standard output, standard error) of a command line, with the small manifest."""

    def here(*arguments, manifest="small.toml"):
        code = run([*map(str, arguments), *(["--manifest", manifest] if manifest else [])])
        return (code, *capsys.readouterr())

    return here


@pytest.fixture
def as_json(here):
    def as_json(*arguments, code=0):
        done, out, err = here(*arguments, "--json")
        assert (done, err) == (code, "")
        return json.loads(out, parse_constant=pytest.fail)

    return as_json


# --- wrong options --------------------------------------------------------------------------------

COMMANDS = {
    "record": ("golden", "record", "new.npz"),
    "check": ("golden", "check"),
    "faults": ("faults",),
    "soak": ("soak", "--minutes", "1"),
}
SOME = {name: words for name, words in COMMANDS.items() if name != "record"}


def assert_complaint(done, *texts):
    code, out, err = done
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("caltrio")
    for text in texts:
        assert text in err


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_device(here, name):
    assert_complaint(
        here(*COMMANDS[name], "--device", "npu"),
        "--device: 'npu' is unknown; use one of ",
        "fake, hw, sim",
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_manifest(here, name):
    assert_complaint(
        here(*COMMANDS[name], manifest="wrong.toml"),
        "wrong.toml: submodels.0.logits: byte_size is 126, but [1, 1, 64] of bf16 is 128 bytes",
    )
    assert_complaint(here(*COMMANDS[name], manifest="qwen"), "manifest 'qwen': is neither a .toml file")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_profile(here, name):
    assert_complaint(here(*COMMANDS[name], "--timing", "fast"), "timing profile 'fast'")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_negative_seed(here, name):
    assert_complaint(here(*COMMANDS[name], "--seed", "-1"), "'--seed': -1 is not in the range")


@pytest.mark.parametrize("name", SOME)
def test_an_unknown_hypothesis(here, name):
    assert_complaint(
        here(*SOME[name], "--semantics", "full-dublex"),
        "--semantics: semantics preset 'full-dublex' is unknown; did you mean 'full-duplex'?",
    )


@pytest.mark.parametrize("name", SOME)
def test_a_golden_of_another_vocabulary(here, name):
    assert_complaint(
        here(*SOME[name], "--golden", "big.npz"),
        "--golden: big.npz: has 128 logits, the manifest 64; record one of this model",
    )


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("file", "why"), [("no.npz", ""), ("none.npz", "No such"), ("used", "Is a")])
def test_what_is_no_golden(here, name, file, why):
    assert_complaint(here(*SOME[name], "--golden", file), f"{file}: is not a golden: {why}")


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("count", ["0", "65", "x"])
def test_jobs_in_flight_out_of_range(here, name, count):
    assert_complaint(here(*SOME[name], "--max-inflight", count), "'--max-inflight'", count)


@pytest.mark.parametrize("name", SOME)
def test_more_in_flight_than_slots(here, name):
    """As 'caltrio simulate' says it."""
    extra = ["--only", "FI02"] if name == "faults" else []
    try:
        done = here(*SOME[name], *extra, "--max-inflight", "3", "--semantics", "full-duplex")
    except ValueError as error:
        pytest.fail(f"a traceback: {error}")
    assert_complaint(done, "--max-inflight: 3 jobs in flight is above the 2 engine slots")


@pytest.mark.parametrize("only", ["FI16", "fi01", ""])
def test_an_unknown_drill(here, only):
    assert_complaint(
        here("faults", "--only", "FI01", "--only", only), f"--only: {only!r} is unknown", "FI15"
    )


def test_only_and_random_exclude_each_other(here):
    assert_complaint(here("faults", "--random", "2", "--only", "FI01"), "--only", "--random")


def test_hours_and_minutes_exclude_each_other(here):
    assert_complaint(
        here("soak", "--hours", "1", "--minutes", "1"),
        "--minutes: and --hours exclude each other; give one",
    )


@pytest.mark.parametrize(
    "option",
    [("--hours", "0"), ("--minutes", "-1"), ("--hours", "nan"), ("--minutes", "nan"),
     ("--hours", "inf"), ("--faults-per-hour", "-1"), ("--faults-per-hour", "nan"), ("--clients", "0"),
     ("--metrics-port", "65536"), ("--reset", "all")],
)  # fmt: skip
def test_options_of_soak_out_of_range(here, option):
    words = ("soak",) if option[0] in ("--hours", "--minutes") else ("soak", "--minutes", "1")
    try:
        done = here(*words, *option)
    except (ValueError, ExceptionGroup) as error:
        pytest.fail(f"a traceback: {type(error).__name__}: {error}")
    assert_complaint(done, option[0], option[1])


@pytest.mark.parametrize(
    ("file", "force", "text"),
    [("right.npz", [], "right.npz: is there already; name another, or add --force"),
     ("none/new.npz", [], "none/new.npz: cannot be written: its folder is not there"),
     ("right.npz/new.npz", [], "cannot be written: its folder is not there"),
     ("used", [], "used: is there already"),
     ("used", ["--force"], "used: cannot be written: Is a directory")],
)  # fmt: skip
def test_files_that_cannot_be_recorded_to(here, folder, file, force, text):
    before = (folder / "right.npz").read_bytes()
    assert_complaint(here("golden", "record", file, *force, "--prompts", "1"), text)
    assert (folder / "right.npz").read_bytes() == before


def test_a_port_in_use(here, monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert_complaint(
            here("soak", "--minutes", "1", "--metrics-port", port), f"--metrics-port {port}: is in use"
        )


@pytest.mark.parametrize("command", ["golden", "golden record", "golden check", "faults", "soak"])
def test_help(here, command):
    code, out, err = here(*command.split(), "--help", manifest=None)
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: caltrio {command}")


# --- golden ---------------------------------------------------------------------------------------


def test_record_then_check(as_json, here, folder):
    facts = as_json("golden", "record", "new.npz", "--prompts", "4")
    assert facts == {"file": "new.npz", "cases": 9, "model": "small", "vocab": 64}
    made = load(folder / "new.npz")
    assert len(made.group("prompts")) == 4
    facts = as_json("golden", "check", "--golden", "new.npz")
    assert facts["golden"] == "new.npz"
    assert facts["passed"] is True
    assert [(one["semantics"], one["max_inflight"]) for one in facts["runs"]] == [
        (preset, limit) for preset in PRESETS for limit in (1, 2)
    ]
    for one in facts["runs"]:
        assert one == {
            "semantics": one["semantics"], "max_inflight": one["max_inflight"], "cases": 9, "equal": 9,
            "tokens": 4 * 16 + 3 * 2 + 2 * 20, "top1": 1.0, "top5_overlap": 1.0, "max_abs": 0.0,
            "max_rel": 0.0, "cosine": 1.0, "first_difference": None, "refusals": None, "limit": None,
        }  # fmt: skip


def test_check_against_the_reference(here):
    code, out, err = here(
        "golden", "check", "--prompts", "2", "--semantics", "serial", "--max-inflight", "2"
    )
    assert (code, err) == (0, "")
    assert "Golden check against the reference token model: 7 cases" in out
    assert "7 of 7" in out
    assert "refused" in out
    assert "half-duplex" not in out


def test_a_file_name_is_no_markup(here, folder):
    name = "of[bold]today.npz"
    (folder / "right.npz").rename(folder / name)
    code, out, _ = here(
        "golden", "check", "--golden", name, "--semantics", "serial", "--max-inflight", "1"
    )
    assert code == 0
    assert name in " ".join(out.split())


def test_record_says_what_it_wrote(here, folder):
    code, out, err = here("golden", "record", "new.npz", "--prompts", "1")
    assert (code, out, err) == (0, "6 cases, 62 tokens: new.npz\n", "")
    code, *_ = here("golden", "record", "new.npz", "--prompts", "2", "--force")
    assert code == 0
    assert len(load(folder / "new.npz").cases) == 7


def shift(monkeypatch):
    """A card that says another token once in a while."""
    original = TokenModel.write

    def write(self, transfer):
        original(self, transfer)
        if transfer.total_len == 19:
            transfer.buffers.host["logits"][:] = transfer.buffers.host["logits"][::-1].copy()

    monkeypatch.setattr(TokenModel, "write", write)


def test_a_difference_is_exit_code_1(as_json, here, monkeypatch):
    shift(monkeypatch)
    words = ("golden", "check", "--prompts", "3", "--semantics", "serial", "--max-inflight", "1")
    facts = as_json(*words, code=1)
    (only,) = facts["runs"]
    assert facts["passed"] is False
    assert only["equal"] < only["cases"]
    assert only["first_difference"].count("golden") == 1
    code, out, _ = here(*words)
    assert code == 1
    assert only["first_difference"] in " ".join(out.split())


def test_a_context_that_is_not_refused_is_exit_code_1(as_json, monkeypatch):
    async def ran(executor):
        return "a decode step after 40960 tokens ran"

    monkeypatch.setattr("caltrio.device_commands.refusals", ran)
    facts = as_json("golden", "check", "--prompts", "1", "--semantics", "serial", code=1)
    assert facts["passed"] is False
    assert {one["refusals"] for one in facts["runs"]} == {"a decode step after 40960 tokens ran"}


def test_a_device_that_fails_is_a_report_too(as_json, monkeypatch):
    original = SimDevice.wait

    async def wait(self):
        return evolve(await original(self), rc=28)

    monkeypatch.setattr(SimDevice, "wait", wait)
    facts = as_json("golden", "check", "--prompts", "1", "--semantics", "serial", code=1)
    assert facts["passed"] is False
    assert "28" in facts["runs"][0]["first_difference"]


def test_a_model_of_a_shorter_context_can_pass(folder, capsys, monkeypatch):
    """Lengths that its context does not hold are none of its lengths."""
    monkeypatch.setattr(caltrio.golden, "LENGTHS", (1, 2, 17, 1024))
    code = run(["golden", "check", "--manifest", "short.toml", "--prompts", "1", "--json",
                "--semantics", "serial", "--max-inflight", "1"])  # fmt: skip
    facts = json.loads(capsys.readouterr().out)
    assert (code, facts["runs"][0]["first_difference"]) == (0, None)


def test_a_golden_of_another_model_is_refused(here, folder):
    save(reference_golden("another", 64, 1, lengths=False), folder / "other.npz")
    assert_complaint(here("golden", "check", "--golden", "other.npz"), "other.npz", "another", "small")


def test_the_fake_device_is_checked_once_a_limit(as_json):
    facts = as_json("golden", "check", "--device", "fake", "--prompts", "1")
    assert facts["passed"] is True
    assert [one["max_inflight"] for one in facts["runs"]] == [1, 2]


# --- faults ---------------------------------------------------------------------------------------


def test_drills_by_name(as_json, here):
    words = ("faults", "--only", "FI05", "--only", "FI01", "--only", "busy", "--max-inflight", "2")
    facts = as_json(*words)
    assert [one["name"] for one in facts] == ["FI01", "FI05", "busy"]
    for one in facts:
        assert set(one) == {"name", "injection", "passed", "expected", "observed"}
        assert one["passed"] is True
        assert one["expected"].items() <= one["observed"].items()
    code, out, err = here(*words)
    assert (code, err) == (0, "")
    assert "Faults of specification §12: 2 of 2 as expected" in out
    assert "Beyond the table: 1 of 1 as expected" in out


def test_what_is_expected_depends_on_the_reset(as_json):
    ends = {}
    for reset in ("device", "none"):
        (one,) = as_json("faults", "--only", "FI08", "--reset", reset)
        assert one["passed"]
        ends[reset] = one["observed"]["afterwards"]
    assert ends == {"device": "golden equal", "none": "failed, exit code 75"}


def test_a_drill_that_differs_is_exit_code_1(as_json, here, monkeypatch):
    from caltrio.core import scheduler

    monkeypatch.setattr(
        scheduler.Core, "output_rejected", lambda self, job, why, now_ns: self.completed(job, now_ns)
    )
    facts = as_json("faults", "--only", "FI09", "--only", "FI05", code=1)
    assert {one["name"]: one["passed"] for one in facts} == {"FI05": True, "FI09": False}
    code, out, _ = here("faults", "--only", "FI09", "--only", "FI05")
    assert code == 1
    assert "DIFFERS" in out
    assert "1 of 2 as expected" in out
    assert "FI09: expected caller: OutputRejected, observed " in out


def test_drills_with_a_recording(as_json):
    (one,) = as_json("faults", "--only", "FI12", "--golden", "right.npz")
    assert one["passed"] is True


@pytest.mark.parametrize("count", [1, 20])
def test_random_faults(as_json, count):
    facts = as_json("faults", "--random", count, "--max-inflight", "2")
    assert facts["golden"] is True
    assert facts["complaints"] == []
    assert facts["passed"] is True
    assert sum(facts["injected"].values()) >= count


def test_random_faults_are_those_of_the_seed(as_json):
    first, again, other = (
        as_json("faults", "--random", "20", "--seed", seed)["injected"] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_random_faults_with_a_wrong_card_are_exit_code_1(as_json, monkeypatch):
    shift(monkeypatch)
    monkeypatch.setattr(caltrio.golden.Golden, "warm_up", None)
    facts = as_json("faults", "--random", "150", code=1)
    assert facts["complaints"]
    assert facts["passed"] is False


# --- soak -----------------------------------------------------------------------------------------


def test_soak_says_what_it_saw(as_json):
    facts = as_json("soak", "--minutes", "3", "--faults-per-hour", "200")
    assert set(facts) >= {
        "ran_ns", "jobs", "requests", "endings", "injected", "tokens_checked", "wrong_tokens",
        "recoveries", "restarts", "unexplained", "stale_completions", "quarantined",
        "longest_wait_ns", "longest_allowed_ns", "leased_at_end", "memory_bytes",
        "memory_growth_bytes", "stopped_by", "complaints", "passed",
    }  # fmt: skip
    assert facts["passed"] is True
    assert facts["ran_ns"] >= 180_000_000_000


def test_a_soak_with_complaints_is_exit_code_1(as_json, here, monkeypatch):
    original = TokenModel.write

    def write(self, transfer):
        original(self, transfer)
        if transfer.total_len == 100:
            transfer.buffers.host["logits"][:] = transfer.buffers.host["logits"][::-1].copy()

    monkeypatch.setattr(TokenModel, "write", write)
    facts = as_json("soak", "--minutes", "5", "--faults-per-hour", "0", code=1)
    assert facts["passed"] is False
    assert facts["wrong_tokens"] > 0
    code, out, _ = here("soak", "--minutes", "5", "--faults-per-hour", "0")
    assert code == 1
    assert "NOT RIGHT: " in out
    assert out.rstrip().endswith("soak FAILED")


def test_a_soak_with_a_recording_checks_no_tokens(as_json):
    facts = as_json("soak", "--minutes", "1", "--golden", "right.npz")
    assert facts["tokens_checked"] == 0
    assert facts["requests"]["completed"] > 0


def test_a_soak_serves_metrics_and_says_where(here):
    code, _, err = here("soak", "--minutes", "1", "--metrics-port", "0", "--json")
    assert code == 0
    assert err.startswith("metrics: http://127.0.0.1:")
    assert len(err.splitlines()) == 1
