"""``python -m caltrio``, and the console script: no more than what makes an interrupt quiet."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit. An interrupt while modules are still being imported is 130."""
    try:
        from .cli import run  # noqa: PLC0415 - the import takes time, and can be interrupted

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("caltrio: interrupted\n")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
