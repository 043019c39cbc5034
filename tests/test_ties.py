"""What several callers are told at one instant, they act on one after another."""

import pytest
import trio._core._run as trio_run
from support import MS, profile, run

from caltrio.observe.records import digest
from caltrio.semantics import PRESETS
from caltrio.workload.requests import Request, stream


def contents(shuffle, requests, **limits):
    trio_run._r.seed(shuffle)
    done = run(requests, **limits)
    return digest({"jobs": done.jobs, "requests": done.requests}, {})


def requests_of(count, gap_ns):
    random = stream(5, "lengths")
    return [
        Request(index, index * gap_ns, int(random.integers(1, 90)), int(random.integers(0, 9)))
        for index in range(count)
    ]


@pytest.mark.parametrize("preset", ["full-duplex", "shared-compute"])
@pytest.mark.parametrize(
    "limits",
    [
        {"admission_timeout_ns": 9 * MS},
        {"queue_timeout_ns": 1},
        {"execution_timeout_ns": 15 * MS, "grace_ns": 1},
        {"kv_capacity_tokens": 100},
        {"max_active_sequences": 3, "max_queue": 4},
    ],
)
@pytest.mark.parametrize("clients", [None, 9])
def test_one_seed_one_digest(preset, limits, clients):
    timing = profile(submit=MS, compute=8 * MS, post=MS, client=MS)
    found = {
        contents(
            shuffle,
            requests_of(40, MS),
            semantics=PRESETS[preset].semantics,
            timing=timing,
            clients=clients,
            max_inflight=2,
            **limits,
        )
        for shuffle in range(5)
    }
    assert len(found) == 1


def test_callers_told_all_at_once_race(monkeypatch):
    from sim.clock import SimClock

    def at_once(self, actions):
        for action in actions:
            action()

    monkeypatch.setattr(SimClock, "in_turn", at_once)
    with pytest.raises(AssertionError):
        test_one_seed_one_digest("full-duplex", {"admission_timeout_ns": 9 * MS}, 9)
