"""Soaks: a right one passes and leaves nothing, each kind of wrong is complained about."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve
from support import small_manifest

from caltrio.cli import run
from caltrio.core.lifecycle import LifecycleState
from caltrio.device import DeviceOptions
from caltrio.errors import ServiceFailed
from caltrio.faults import Fault, Point
from caltrio.golden import Golden, reference_golden
from caltrio.semantics import EngineSemantics
from caltrio.soak import NS_PER_HOUR, RANDOM_FAULTS, Evidence, Soak, SoakSpec
from caltrio.timing import load_timing
from sim.device import KIND
from sim.tokens import TokenModel

CALTRIO = Path(sys.executable).parent / "caltrio"
VOCAB = 64
SMALL = small_manifest(VOCAB)
TIMING = load_timing("qwen3-8b")
GOLDEN = reference_golden("small", VOCAB, 6, lengths=False)
MINUTE = NS_PER_HOUR // 60


@pytest.fixture
def no_collector(monkeypatch):
    """A full collection costs a tenth of a second here, and a soak asks for a hundred."""
    monkeypatch.setattr("caltrio.soak.gc", SimpleNamespace(collect=lambda: 0))


@pytest.fixture
def manifest(tmp_path):
    """The product's, with a vocabulary of 64."""
    text = (files("caltrio") / "manifests" / "qwen3-8b.toml").read_text(encoding="utf-8")
    path = tmp_path / "small.toml"
    text = text.replace("151936", "64").replace("303872", "128")
    path.write_text(text.replace('"qwen3-8b"', '"small"'), encoding="utf-8")
    return path


def soaked(scope="device", **spec):
    """One soak on the simulated card: it, and its evidence."""
    made = []

    async def main(open_device):
        made.append(Soak(SoakSpec(**{"duration_ns": 4 * MINUTE, **spec}), open_device, SMALL, GOLDEN))
        return await made[0].run()

    KIND.run(main, DeviceOptions(EngineSemantics(reset_scope=scope), TIMING, 0, SMALL))
    return made[0], made[0].evidence


# --- through the command line ---------------------------------------------------------------------


def test_a_fifth_of_an_hour(no_collector, manifest, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["soak", "--hours", "0.2", "--manifest", str(manifest), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    facts = json.loads(out, parse_constant=pytest.fail)
    assert facts["passed"] is True
    assert facts["complaints"] == facts["unexplained"] == []
    assert facts["leased_at_end"] == facts["wrong_tokens"] == 0
    assert facts["ran_ns"] >= 0.2 * NS_PER_HOUR
    assert facts["tokens_checked"] > 1000
    assert facts["requests"]["completed"] > 50
    assert facts["longest_wait_ns"] <= facts["longest_allowed_ns"] == 75_000_000_000
    assert sum(facts["injected"].values()) > 0
    assert len(facts["memory_bytes"]) > 20
    assert facts["stopped_by"] is None


def test_it_prints_the_evidence(no_collector, manifest, capsys):
    assert run(["soak", "--minutes", "2", "--manifest", str(manifest)]) == 0
    out = capsys.readouterr().out
    lines = {}
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.strip("│ ").split("│")]
        if len(cells) == 2 and cells[0]:
            lines[cells[0]] = cells[1]
    assert lines["leased at the end"] == "0"
    assert lines["unexplained faults"] == "0"
    assert lines["tokens checked"].endswith(", 0 wrong")
    assert lines["longest call"].endswith("allowed 75.0 s")
    assert out.splitlines()[-1] == "soak passed"


# --- what is complained about ---------------------------------------------------------------------


def right(**changes):
    evidence = Evidence(
        requests=Counter(completed=5), longest_wait_ns=10, longest_allowed_ns=10,
        memory=[(share / 20, 10**9) for share in range(21)],
    )  # fmt: skip
    for name, value in changes.items():
        setattr(evidence, name, value)
    return evidence


def grown(mib_at_end, begin=0.0):
    return [
        (share / 20, 10**9 + round(max(share / 20 - begin, 0) / (1 - begin) * mib_at_end * 2**20))
        for share in range(21)
    ]


WRONG = {
    "1 tokens were wrong": {"wrong_tokens": 1},
    "2 leases were left at the end": {"leased": 2},
    "a call took 11 ns, above 10 ns": {"longest_wait_ns": 11},
    "1 faults nobody injected: device on fire": {"unexplained": ["device on fire"]},
    "memory grew by 23 MiB after warm-up": {"memory": grown(30)},
    "no request completed": {"requests": Counter(refused=3)},
}


def test_right_evidence_has_no_complaints():
    assert right().complaints == []
    assert right().to_json()["passed"] is True


@pytest.mark.parametrize("complaint", WRONG)
def test_each_complaint(complaint):
    evidence = right(**WRONG[complaint])
    assert len(evidence.complaints) == 1
    assert evidence.complaints[0].startswith(complaint.split(" by ")[0])
    facts = evidence.to_json()
    assert facts["passed"] is False
    assert facts["complaints"] == evidence.complaints
    json.dumps(facts, allow_nan=False)


def test_all_complaints_at_once():
    changes = {name: value for change in WRONG.values() for name, value in change.items()}
    assert len(right(**changes).complaints) == len(WRONG)


@pytest.mark.parametrize(
    "memory",
    [
        [],
        [(0.5, 1), (1.0, 10**12)],  # too few to speak of a trend
        grown(10),
        [(at, 10**9 if at < 0.25 else 2 * 10**9) for at, _ in grown(0)],  # while it warmed up
        list(reversed([(1 - at, size) for at, size in grown(500)])),  # it shrinks
    ],
)
def test_memory_that_does_not_grow(memory):
    assert right(memory=sorted(memory)).complaints == []


def test_growth_is_that_of_the_line_after_the_warm_up():
    assert right(memory=grown(100)).memory_growth_bytes == pytest.approx(75 * 2**20, rel=0.01)
    assert right(memory=grown(100, begin=0.25)).memory_growth_bytes == pytest.approx(
        100 * 2**20, rel=0.01
    )


# --- a wrong executor or device is seen -----------------------------------------------------------


def test_a_lost_kv_update_is_a_wrong_token(no_collector, monkeypatch):
    original, written = TokenModel.write, Counter()

    def write(self, transfer):
        original(self, transfer)
        written[0] += 1
        if written[0] % 40 == 0:
            self._kv().cells[transfer.sequence_id][transfer.positions] = 3

    monkeypatch.setattr(TokenModel, "write", write)
    _, evidence = soaked(faults_per_hour=0)
    assert evidence.wrong_tokens > 0
    assert any("tokens were wrong" in complaint for complaint in evidence.complaints)


@pytest.mark.parametrize("failure", ["code", "status", "lost"])
def test_a_fault_that_nobody_injected_is_unexplained(no_collector, monkeypatch, failure):
    from caltrio.device import WaitStatus
    from sim.device import SimDevice

    original, count = SimDevice.wait, Counter()

    async def wait(self):
        done = await original(self)
        count[0] += 1
        if count[0] != 60:
            return done
        if failure == "lost":
            return await original(self)
        if failure == "code":
            return evolve(done, rc=28)
        return evolve(done, status=WaitStatus.DONE_CCU_EXCEPTION)

    monkeypatch.setattr(SimDevice, "wait", wait)
    _, evidence = soaked(faults_per_hour=0)
    assert evidence.unexplained
    assert evidence.recoveries == 1
    assert any("nobody injected" in complaint for complaint in evidence.complaints)


def test_a_fault_that_nobody_injected_is_unexplained_among_others_that_were(no_collector, monkeypatch):
    """The device rejects a CSR by itself, long after one was rejected on purpose."""
    from caltrio.faults import Fault, Point
    from sim.device import SimDevice

    monkeypatch.setattr("caltrio.soak.RANDOM_FAULTS", (Fault(Point.CSR),))
    original, calls = SimDevice.set_csr, Counter()

    def set_csr(self, graph, name, value):
        calls[name.endswith("?")] += 1
        if calls[True] and calls[False] in (1500, 1600):
            return 14
        return original(self, graph, name, value)

    monkeypatch.setattr(SimDevice, "set_csr", set_csr)
    _, evidence = soaked(faults_per_hour=100, duration_ns=8 * MINUTE)
    assert calls[False] > 1600
    assert evidence.injected["csr"] > 0
    assert evidence.unexplained


def test_nothing_is_unexplained_where_everything_was_injected(no_collector):
    _, evidence = soaked(faults_per_hour=600, duration_ns=8 * MINUTE)
    assert sum(evidence.injected.values()) > 20
    assert evidence.complaints == []


def test_a_lease_that_stays_is_a_leak(no_collector, monkeypatch):
    from caltrio.core import scheduler

    original = scheduler.Core.finish_shutdown

    def finish(self, now_ns):
        original(self, now_ns)
        self.pool.leased += 1

    monkeypatch.setattr(scheduler.Core, "finish_shutdown", finish)
    _, evidence = soaked(faults_per_hour=0, duration_ns=MINUTE)
    assert evidence.leased == 1
    assert evidence.complaints == ["1 leases were left at the end"]


# --- runs -----------------------------------------------------------------------------------------


def without_memory(evidence):
    facts = evidence.to_json()
    return {name: value for name, value in facts.items() if "memory" not in name}


def test_the_same_seed_leaves_the_same_evidence(no_collector):
    spec = {"faults_per_hour": 600, "duration_ns": 5 * MINUTE}
    first, second, other = (without_memory(soaked(seed=seed, **spec)[1]) for seed in (3, 3, 4))
    assert first == second
    assert first != other
    assert first["injected"]


@pytest.mark.parametrize("max_inflight", [1, 2])
def test_without_a_reset_each_restart_is_explained(no_collector, max_inflight):
    _, evidence = soaked("none", faults_per_hour=600, duration_ns=6 * MINUTE, max_inflight=max_inflight)
    assert evidence.recoveries == 0
    assert len(evidence.restarts) > 3
    assert all(evidence.restarts)
    assert evidence.complaints == []


def test_no_faults_no_restarts(no_collector):
    soak, evidence = soaked(faults_per_hour=0)
    assert not evidence.injected
    assert evidence.restarts == []
    assert (evidence.recoveries, evidence.stale, evidence.quarantined) == (0, 0, 0)
    assert set(evidence.endings) <= {"answered", "left"}
    assert evidence.endings["answered"] == evidence.requests["completed"] > 0
    assert evidence.ran_ns >= soak.spec.duration_ns
    assert evidence.complaints == []


def test_it_ends_early_after_so_many_faults(no_collector):
    _, evidence = soaked(faults_per_hour=3600, duration_ns=NS_PER_HOUR, most_faults=5)
    assert 5 <= sum(evidence.injected.values()) <= 8
    assert evidence.ran_ns < NS_PER_HOUR


def test_every_kind_of_fault_is_injected():
    assert len({(fault.point, fault.code) for fault in RANDOM_FAULTS}) == len(RANDOM_FAULTS) > 25


def test_progress_reaches_the_end_and_listeners_hear(no_collector):
    shares, events = [], []

    async def main(open_device):
        soak = Soak(
            SoakSpec(MINUTE, faults_per_hour=0), open_device, SMALL, GOLDEN,
            listeners=[events.append], on_progress=shares.append,
        )  # fmt: skip
        return await soak.run()

    KIND.run(main, DeviceOptions(EngineSemantics(), TIMING, 0, SMALL))
    assert shares == sorted(shares)
    assert 0 <= shares[0] < 0.01
    assert 0.9 < shares[-1] <= 1
    assert events[-1].new is LifecycleState.CLOSED


# --- programs of their own ------------------------------------------------------------------------


def started(manifest, *arguments):
    return subprocess.Popen(
        [CALTRIO, "soak", "--hours", "1000", "--manifest", manifest, "--metrics-port", "0", *arguments],
        env={**os.environ, "PYTHONWARNINGS": "error", "COLUMNS": "100"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def samples(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    rows = [line.split(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in rows}


def test_metrics_are_served_and_an_interrupt_keeps_the_evidence(manifest):
    with started(manifest, "--json") as child:
        try:
            line = child.stderr.readline()
            assert line.startswith("metrics: http://127.0.0.1:")
            url = line.split()[1]
            while True:  # until some work has been done
                assert child.poll() is None
                found = samples(url)
                done = sum(
                    value for name, value in found.items() if name.startswith("caltrio_jobs_total")
                )
                if done > 50:
                    break
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=120)
        finally:
            child.kill()
    assert child.returncode == 130
    assert err == "caltrio soak: interrupted by SIGINT; what had ended is shown\n"
    facts = json.loads(out, parse_constant=pytest.fail)
    assert facts["stopped_by"] == "SIGINT"
    assert facts["leased_at_end"] == 0
    assert facts["jobs"] > 50
    assert 0 < facts["ran_ns"] < 1000 * NS_PER_HOUR


def test_a_terminated_soak_prints_its_evidence_too(manifest):
    with started(manifest) as child:
        try:
            url = child.stderr.readline().split()[1]
            while not sum(v for n, v in samples(url).items() if n.startswith("caltrio_jobs_total")):
                assert child.poll() is None
            child.send_signal(signal.SIGTERM)
            out, err = child.communicate(timeout=120)
        finally:
            child.kill()
    assert child.returncode == 143
    assert err == "caltrio soak: interrupted by SIGTERM; what had ended is shown\n"
    assert "leased at the end" in out
    assert out.rstrip().endswith("until SIGTERM")


def test_a_warm_up_that_fails_by_itself_is_unexplained(no_collector, monkeypatch):
    """The second generation's golden run is wrong, and nobody injected that."""
    original = Golden.warm_up

    async def wrong_the_second_time(self, executor):
        if executor.generation.generation_id == 2:
            return "wrong tokens"
        return await original(self, executor)

    monkeypatch.setattr(Golden, "warm_up", wrong_the_second_time)
    monkeypatch.setattr("caltrio.soak.RANDOM_FAULTS", (Fault(Point.STATUS),))
    _, evidence = soaked(faults_per_hour=400.0, duration_ns=8 * MINUTE)
    assert evidence.restarts
    assert any("wrong tokens" in reason for reason in evidence.unexplained)


def test_a_golden_that_never_was_right_ends_the_soak(no_collector, monkeypatch):
    """No restart would help: the first generation never came up, and nothing was done to it."""

    async def wrong(self, executor):
        return "wrong tokens"

    monkeypatch.setattr(Golden, "warm_up", wrong)
    with pytest.raises(ServiceFailed, match="wrong tokens"):
        soaked()


def test_the_wait_for_an_admission_that_fails_is_measured(no_collector, monkeypatch):
    monkeypatch.setattr("caltrio.soak.RANDOM_FAULTS", (Fault(Point.KV, times=10**6),))
    _, evidence = soaked(faults_per_hour=400.0, duration_ns=8 * MINUTE)
    assert evidence.endings["DeadlineExceeded"]
    assert evidence.longest_wait_ns == 20_000_000_000  # the admission timeout


@pytest.mark.parametrize("duration_ns", [1, 3_600, 10**6, 10**9])
def test_a_soak_of_no_time_ends(no_collector, duration_ns):
    _, evidence = soaked(duration_ns=duration_ns)
    assert evidence.leased == 0
    assert len(evidence.memory) < 100
