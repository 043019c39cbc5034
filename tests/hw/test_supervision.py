"""Processes: a card that hangs ends them, a supervisor starts them again, and SIGKILL harms nobody."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest
from emulated import MANIFEST
from support import US, needs_emulator, profile

from caltrio.observe.records import about, read_tables
from caltrio.semantics import EngineSemantics
from hw.emulator import card_file, write_card

pytestmark = needs_emulator

QUICK = profile(h2d=50 * US, compute=500 * US, d2h=50 * US)
BOUNDS = ("--execution-timeout", "700ms", "--queue-timeout", "1500ms", "--grace", "100ms")
LONGEST_S = 60  # for what takes two or three seconds
FINAL = (2, 78)  # RestartPreventExitStatus


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    """Starts processes of ``caltrio``, as ``lives.py`` says; ``temp`` is their temporary folder."""
    temp = tmp_path_factory.mktemp("temp")
    script = Path(__file__).with_name("lives.py")
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temp)},
    ) as process:
        process.temp = temp
        yield process
        process.stdin.close()
        assert process.wait(LONGEST_S) == 0


@pytest.fixture
def work(tmp_path):
    """A folder with a small manifest."""
    text = (files("caltrio") / "manifests" / "qwen3-8b.toml").read_text(encoding="utf-8")
    text = text.replace("151936", "64").replace("303872", "128").replace('"qwen3-8b"', '"small"')
    (tmp_path / "small.toml").write_text(text, encoding="utf-8")
    return tmp_path


def write(work, *faults, semantics=None):
    return write_card(work, MANIFEST, QUICK, semantics or EngineSemantics(), faults=faults)


def replay(work, calbin, out, *more, limit=60):
    where = () if calbin is None else ("--calbin", calbin)
    words = ("replay", "--device", "emulator", "--manifest", work / "small.toml", *where, "--out", out,
             "--clients", 2, "--limit", limit, "--prompt-tokens", 8, "--output-tokens", 3, *BOUNDS,
             *more)  # fmt: skip
    return list(map(str, words))


class Life:
    """One process from the zygote."""

    def __init__(self, zygote, said, arguments):
        self.said, self._zygote = said, zygote
        zygote.stdin.write(json.dumps([str(said), *arguments]) + "\n")
        zygote.stdin.flush()
        self.pid = int(zygote.stdout.readline())

    def end(self):
        """Its exit code, negative for a signal, and what it said."""
        code = int(self._zygote.stdout.readline())
        return code, self.said.read_text(encoding="utf-8")


@pytest.fixture
def live(zygote, work):
    """(exit code, output, seconds) of a command in a process of its own."""

    def live(*arguments):
        begin = time.monotonic()
        code, said = Life(zygote, work / "said.txt", arguments).end()
        return code, said, time.monotonic() - begin

    return live


def supervise(start, most=5):
    """As systemd's Restart=on-failure: the exit codes of the lives."""
    codes = []
    while len(codes) < most:
        codes.append(start(len(codes)))
        if codes[-1] == 0 or codes[-1] in FINAL:
            break
    return codes


def complaints(said):
    return [line for line in said.splitlines() if line.startswith("caltrio: ")]


# --- a card that hangs --------------------------------------------------------------------------------


def test_a_thread_that_never_returns_ends_the_process_and_the_next_one_serves(work):
    """The card recovers between two lives; no code of the service knows that it was restarted."""
    calbin = write(work, "hang_for_ever at=50")

    def start(life):
        if life == 1:  # somebody has mended the card
            lines = card_file(calbin).read_text(encoding="utf-8").splitlines(keepends=True)
            kept = (line for line in lines if not line.startswith("fault"))
            card_file(calbin).write_text("".join(kept), encoding="utf-8")
        arguments = replay(work, calbin, work / f"run{life}", "--max-inflight", 2)
        ended = subprocess.run(
            [sys.executable, "-m", "caltrio", *arguments],
            capture_output=True, text=True, timeout=LONGEST_S, check=False,
        )  # fmt: skip
        (work / f"said{life}").write_text(ended.stderr, encoding="utf-8")
        return ended.returncode

    assert supervise(start) == [75, 0]
    (complaint,) = complaints((work / "said0").read_text(encoding="utf-8"))
    assert "passed its execution deadline" in complaint
    assert complaint.endswith("restart the process")
    assert complaints((work / "said1").read_text(encoding="utf-8")) == []

    jobs, requests = read_tables(work / "run0")
    assert about(jobs)["complete"] is about(requests)["complete"] is False
    outcomes = requests.column("outcome").to_pylist()
    assert outcomes.count("completed") > 5
    assert outcomes.count("expired") in (1, 2)
    assert len(outcomes) < 60
    facts = json.loads((work / "run0" / "summary.json").read_text(encoding="utf-8"))
    assert facts["complete"] is False
    assert "execution deadline" in facts["failure"]

    jobs, requests = read_tables(work / "run1")
    assert about(jobs)["complete"] is about(requests)["complete"] is True
    assert requests.column("outcome").to_pylist() == ["completed"] * 60


@pytest.mark.parametrize(
    ("fault", "codes", "told"),
    [
        ("hang_infer at=50", [75], "has not returned"),
        ("wait code=28 at=50", [75] * 2, "28 CRASHED"),
        ("configure code=8", [78], "8 DRIVER_INCOMPATIBLE"),
        ("infer code=19 at=50", [78], "19 ILLEGAL_CALBIN"),
        ("infer code=17 at=50", [0], None),
    ],
)
def test_a_fault_that_comes_again_in_each_life(live, work, fault, codes, told):
    """The supervisor gives up by its own count, and at once where a restart does not help."""
    calbin = write(work, fault)
    said = []

    def start(life):
        more = ("--force", "--queue-timeout", "500ms")
        code, output, took_s = live(*replay(work, calbin, work / "run", *more))
        said.append(output)
        assert took_s < LONGEST_S
        return code

    assert supervise(start, len(codes)) == codes
    for output in said:
        assert [told in line for line in complaints(output)] == ([True] if told else [])


def test_a_file_that_cannot_be_loaded_is_not_tried_again(live, work):
    calbin = write(work)
    calbin.write_text("nonsense\n", encoding="utf-8")
    assert supervise(lambda life: live(*replay(work, calbin, work / "run", "--force"))[0]) == [2]


def test_a_signal_ends_a_service_whose_card_hangs(zygote, work):
    calbin = write(work, "hang_for_ever at=20")
    arguments = replay(work, calbin, work / "run", "--execution-timeout", "60s")
    life = Life(zygote, work / "said.txt", arguments)
    time.sleep(1)
    os.kill(life.pid, signal.SIGTERM)
    begin = time.monotonic()
    code, said = life.end()
    assert time.monotonic() - begin < LONGEST_S / 2
    assert code == 128 + signal.SIGTERM, said
    jobs, _ = read_tables(work / "run")
    assert about(jobs)["complete"] is False


# --- SIGKILL ------------------------------------------------------------------------------------------


def shared():
    """Shared memory and semaphores with a name."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def test_killed_at_any_moment_the_next_life_works(zygote, live, work):
    moments = random.Random(11)
    calbin = write(work)
    before = shared()
    killed = served = 0
    for number in range(20):
        # Every other one makes its own card, in a temporary folder.
        where = calbin if number % 2 else None
        out = work / f"run{number % 3}"
        life = Life(zygote, work / "killed.txt",
                    replay(work, where, out, "--force", "--timing", "quick", limit=5000))  # fmt: skip
        time.sleep(moments.uniform(0, 0.5))
        served += (out / "jobs.parquet").exists()
        os.kill(life.pid, signal.SIGKILL)
        assert life.end()[0] == -signal.SIGKILL
        killed += 1
        again = replay(work, where, out, "--force", "--timing", "quick", limit=6)
        code, said, _ = live(*again)
        assert code == 0, said
        _, requests = read_tables(out)
        assert requests.column("outcome").to_pylist() == ["completed"] * 6
    assert killed == 20
    assert served > 3  # they were at work
    assert shared() - before == set()
    # What a killed process had in its temporary folder stays there, in a folder of its own.
    left = sorted(path.name for path in zygote.temp.iterdir())
    assert all(name.startswith("caltrio-emulator-") for name in left)
    assert len(left) <= 10
