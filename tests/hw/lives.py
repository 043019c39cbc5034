"""Run as a script: each line of standard input starts ``caltrio`` once, in a process of its own.

The process is forked from this one, which has imported everything: a life begins in milliseconds.
A line is a JSON list: the file for what the life says, and its arguments. Standard output gets its
process id at once, and its exit code (negative: the signal) at its end.
"""

import json
import os
import sys
from importlib import import_module

from caltrio.cli import run


def main():
    for name in ("caltrio.logits", "caltrio.replay_command", "hw.emulator", "rich.progress"):
        import_module(name)
    for line in sys.stdin:
        said, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            return run(arguments)
        print(pid, flush=True)  # noqa: T201
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
