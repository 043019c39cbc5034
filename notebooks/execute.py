"""Execute every notebook of this folder in place; a cell that raises fails it, as does a slow one."""

import sys
from pathlib import Path
from time import monotonic

import nbformat
from nbclient import NotebookClient

from caltrio import Scenario, Workload
from caltrio.workload.spec import Arrivals
from sim import request_array, run_fleet, run_twin

HERE = Path(__file__).parent
MOST_S = 60


def compile_twin() -> float:
    """Compile the twin, if it is not yet, so that no notebook waits for it; seconds it took."""
    begin = monotonic()
    scenario = Scenario(workload=Workload(requests=2, arrivals=Arrivals("poisson", rate=1.0)))
    requests = request_array(scenario.workload.build(scenario.seed))
    run_twin(scenario, requests, tables=True)
    run_fleet(scenario, requests, 2)
    return monotonic() - begin


def execute(path: Path) -> float:
    """Execute one notebook; seconds it took."""
    notebook = nbformat.read(path, as_version=4)
    begin = monotonic()
    NotebookClient(
        notebook,
        timeout=MOST_S,
        coalesce_streams=True,  # how prints are cut into messages differs from run to run
        extra_arguments=["--log-level=ERROR"],
        kernel_name="python3",
        resources={"metadata": {"path": str(HERE)}},
    ).execute()
    seconds = monotonic() - begin
    notebook.metadata.language_info = {"name": "python"}  # without the version of this interpreter
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # wall-clock times: they would differ each run
    nbformat.write(notebook, path)
    return seconds


def main() -> int:
    """Execute them all; 0 if none failed, and none took longer than a minute."""
    found = sorted(HERE.glob("*.ipynb"))
    print("the twin, compiled where it is not yet", end=": ", flush=True)
    print(f"{compile_twin():.0f} s", flush=True)
    slow = []
    for path in found:
        seconds = execute(path)
        print(f"{path.name}: {seconds:.0f} s", flush=True)
        if seconds > MOST_S:
            slow.append(path.name)
    if slow:
        print(f"longer than {MOST_S} s: {', '.join(slow)}; make them smaller", file=sys.stderr)
    return 0 if found and not slow else 1


if __name__ == "__main__":
    sys.exit(main())
