"""What may be used of a device, and the evidence for it (§14); the gate that holds it closed."""

import pytest
import trio
import trio.testing

from caltrio.capabilities import Capabilities, Source, load_capabilities
from caltrio.config import ExecutorConfig
from caltrio.core.job import EngineSlot
from caltrio.errors import InputError
from caltrio.events import JobEnded
from caltrio.executor import open_executor
from caltrio.manifest import load_manifest
from caltrio.semantics import EngineSemantics, ResetScope
from caltrio.testing import FakeDevice

KINDS = ("runner_output", "timeline", "fault_injection", "golden_after_recovery")


@pytest.fixture
def clock():
    return trio.testing.MockClock(autojump_threshold=0)


def section(name, line, files=None):
    files = files or {kind: f"{name}-{kind}.txt" for kind in KINDS}
    rows = "\n".join(f'{kind} = "{file}"' for kind, file in files.items())
    return f"[{name}]\n{line}\n[{name}.evidence]\n{rows}\n"


HEAD = 'schema = 1\ncalrt_version = "0.7.6"\n'


@pytest.fixture
def write(tmp_path):
    """A capability file with all its evidence there."""
    for name in ("parallel", "reset"):
        for kind in KINDS:
            (tmp_path / f"{name}-{kind}.txt").write_text("evidence")
    (tmp_path / "folder").mkdir()

    def written(*parts, head=HEAD):
        path = tmp_path / "card.toml"
        path.write_text(head + "".join(parts))
        return path

    return written


def test_both(write):
    path = write(section("parallel", "max_inflight = 2"), section("reset", 'scope = "device"'))
    found = load_capabilities(path)
    assert found.max_inflight == 2
    assert found.reset_scope is ResetScope.DEVICE
    assert found.source is Source.EVIDENCE
    assert "card.toml" in found.note
    assert "parallel, reset" in found.note


def test_nothing_named_is_nothing_allowed(write):
    found = load_capabilities(write())
    assert (found.max_inflight, found.reset_scope) == (1, ResetScope.NONE)
    assert found.source is Source.NONE
    assert "nothing" in found.note


def test_no_file_is_nothing_allowed():
    found = Capabilities()
    assert (found.max_inflight, found.reset_scope) == (1, ResetScope.NONE)
    assert found.source is Source.NONE


def test_one_does_not_imply_the_other(write):
    parallel = load_capabilities(write(section("parallel", "max_inflight = 3")))
    assert (parallel.max_inflight, parallel.reset_scope) == (3, ResetScope.NONE)
    reset = load_capabilities(write(section("reset", 'scope = "device"')))
    assert (reset.max_inflight, reset.reset_scope) == (1, ResetScope.DEVICE)
    assert reset.source is Source.EVIDENCE


def test_a_simulation_assumes_what_it_simulates():
    found = Capabilities.assumed(EngineSemantics(reset_scope="device"))
    assert found.source is Source.ASSUMED
    assert found.reset_scope is ResetScope.DEVICE
    assert Capabilities.assumed(EngineSemantics()).reset_scope is ResetScope.NONE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["parallel", "reset"])
@pytest.mark.parametrize("file", ["gone.txt", "", "folder"])
def test_each_file_of_evidence_must_be_there(write, name, kind, file):
    lines = {"parallel": "max_inflight = 2", "reset": 'scope = "device"'}
    parts = []
    for one, line in lines.items():
        files = {each: f"{one}-{each}.txt" for each in KINDS}
        if one == name:
            files[kind] = file
        parts.append(section(one, line, files))
    with pytest.raises(InputError) as caught:
        load_capabilities(write(*parts))
    assert caught.value.place == f"{name}.evidence.{kind}"
    assert repr(file) in caught.value.problem


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_evidence_must_be_named(write, kind):
    files = {each: f"parallel-{each}.txt" for each in KINDS if each != kind}
    with pytest.raises(InputError, match=kind):
        load_capabilities(write(section("parallel", "max_inflight = 2", files)))


@pytest.mark.parametrize(
    ("part", "place", "shown"),
    [
        (section("reset", 'scope = "chip"'), "reset", "chip"),
        (section("reset", "scope = 1"), "reset", "1"),
        (section("parallel", "max_inflight = 1"), "parallel", "1"),
        (section("parallel", "max_inflight = 4097"), "parallel", "4097"),
        (section("parallel", "max_inflight = true"), "parallel.max_inflight", "True"),
        (section("parallel", 'max_inflight = "2"'), "parallel.max_inflight", "'2'"),
        ("[parallel]\nmax_inflight = 2\n", "parallel", "evidence"),
        (section("paralel", "max_inflight = 2"), "", "paralel"),
        (section("reset", 'scope = "device"\nforce = true'), "reset", "force"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(write, part, place, shown):
    with pytest.raises(InputError) as caught:
        load_capabilities(write(part))
    assert caught.value.place.startswith(place)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("head", "shown"),
    [('schema = 2\ncalrt_version = "0.7.6"\n', "schema is 2"), ("schema = 1\n", "calrt_version"),
     ('calrt_version = "0.7.6"\n', "schema")],
)  # fmt: skip
def test_the_head_is_checked(write, head, shown):
    with pytest.raises(InputError, match=shown):
        load_capabilities(write(head=head))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"gone\.toml"):
        load_capabilities(tmp_path / "gone.toml")


# --- the gate ---------------------------------------------------------------------------------------


class Counting(FakeDevice):
    """Knows the most jobs that it ever had at once."""

    now = 0
    most = 0

    async def infer(self, job):
        rc = await super().infer(job)
        self.now += 1
        self.most = max(self.most, self.now)
        return rc

    async def wait(self):
        done = await super().wait()
        self.now -= 1
        return done


async def _four_callers(device, **limits):
    ended = []
    config = ExecutorConfig(**limits)
    async with open_executor(device, load_manifest(), config, listeners=[ended.append]) as executor:
        async with trio.open_nursery() as nursery:

            async def one():
                async with executor.sequence(2, 3) as sequence:
                    await sequence.prefill(2)
                    await sequence.decode()
                    await sequence.decode()

            for _ in range(4):
                nursery.start_soon(one)
    return executor, [event.job for event in ended if isinstance(event, JobEnded)]


async def test_without_evidence_one_job_at_a_time_whatever_was_asked_for(clock):
    device = Counting()
    device.capabilities = Capabilities(max_inflight=1, note="no file names evidence for two")
    executor, jobs = await _four_callers(device, max_inflight=2)
    assert device.most == 1
    assert len(jobs) == 12
    assert all(job.error is None for job in jobs)
    assert {job.engine for job in jobs} == {EngineSlot.AUTO}
    health = executor.core.health
    assert health.limit == 1
    assert "2 jobs in flight" in health.limit_reason
    assert "no file names evidence for two" in health.limit_reason


async def test_with_evidence_as_many_as_asked_for_and_no_more(clock):
    device = Counting()
    device.capabilities = Capabilities(max_inflight=3)
    executor, jobs = await _four_callers(device, max_inflight=2)
    assert device.most == 2
    assert executor.core.health.limit == 2
    assert executor.core.health.limit_reason is None
    assert EngineSlot.AUTO not in {job.engine for job in jobs}


async def test_evidence_for_fewer_than_asked_for(clock):
    device = Counting()
    device.capabilities = Capabilities(max_inflight=2, note="evidence for two")
    executor, _jobs = await _four_callers(device, max_inflight=4)
    assert device.most == 2
    assert "evidence for two" in executor.core.health.limit_reason


async def test_one_that_was_asked_for_needs_no_reason(clock):
    device = Counting()
    device.capabilities = Capabilities()
    executor, _jobs = await _four_callers(device)
    assert executor.core.health.limit_reason is None
