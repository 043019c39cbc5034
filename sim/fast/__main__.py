"""``python -m sim.fast``: compile the twin now, so that the first plan need not wait for it."""

import numpy as np

from caltrio.scenario import Scenario
from caltrio.workload.spec import Arrivals, Workload
from sim.bounds import demand

from . import run_fleet, run_twin

_ONE = np.array([[0, 1, 1]], np.int64)


def main() -> None:
    """Call each compiled function once; the compiled code is kept beside the source."""
    scenario = Scenario(workload=Workload(arrivals=Arrivals("poisson", rate=1.0)))
    run_twin(scenario, _ONE)
    run_fleet(scenario, _ONE, 1)
    demand(scenario, _ONE)


if __name__ == "__main__":
    main()
