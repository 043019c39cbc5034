"""Execute every notebook of this folder in place; a cell that raises fails the run."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def main() -> int:
    """Execute them all; 0 if none failed."""
    found = sorted(HERE.glob("*.ipynb"))
    for path in found:
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(
            notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}
        ).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # wall-clock times: they would differ each run
        nbformat.write(notebook, path)
        print(f"executed {path.name}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
