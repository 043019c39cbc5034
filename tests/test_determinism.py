"""One seed gives the same contents, whatever trio shuffles; another gives others."""

import pytest
import trio._core._run as trio_run
from attrs import evolve

from caltrio.config import ExecutorConfig
from caltrio.observe.records import digest
from caltrio.scenario import Scenario
from caltrio.semantics import PRESETS
from caltrio.workload.spec import Arrivals, Lengths, Workload
from sim.run import simulate


def contents(scenario, shuffle):
    trio_run._r.seed(shuffle)  # trio's own generator, which orders each batch of tasks
    done = simulate(scenario)
    tables = {"jobs": done.jobs, "requests": done.requests}
    return digest(tables, {"run": scenario.seed})


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("arrivals", [Arrivals("closed", clients=6), Arrivals("poisson", rate=2.0)])
def test_same_seed_same_contents(preset, arrivals):
    scenario = Scenario(
        seed=3,
        semantics=PRESETS[preset].semantics,
        workload=Workload(
            arrivals=arrivals,
            lengths=Lengths("lognormal", prompt_tokens=200, output_tokens=6),
            requests=20,
        ),
        executor=ExecutorConfig(max_inflight=2, max_active_sequences=4, max_queue=8),
    )
    found = {contents(scenario, shuffle) for shuffle in range(4)}
    assert len(found) == 1
    assert contents(evolve(scenario, seed=4), 0) not in found


def test_requests_at_one_instant_enter_in_the_order_of_their_ids():
    workload = Workload(
        arrivals=Arrivals("constant", rate=1e9), lengths=Lengths(output_tokens=3), requests=12
    )
    scenario = Scenario(workload=workload, executor=ExecutorConfig(max_active_sequences=3))
    assert len({contents(scenario, shuffle) for shuffle in range(6)}) == 1
