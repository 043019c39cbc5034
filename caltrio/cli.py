"""The ``caltrio`` command: a group whose sub-commands come from entry points.

Errors that a person can mend are one line on standard error and exit code 2; an interrupt is 130; an
executor that has failed for good ends the process with 75, or 78 where a restart would not help.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, entry_points

import click

from .errors import CaltrioError, InputError, ServiceFailed

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class _Commands(click.Group):
    """Sub-commands of the entry-point group ``caltrio.commands``, loaded when they are needed."""

    @staticmethod
    def _entries() -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group="caltrio.commands")}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._entries())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._entries().get(cmd_name)
        if entry is None:
            return None
        command = entry.load()
        if not isinstance(command, click.Command):
            raise TypeError(f"entry point {entry.value!r} of caltrio.commands is not a command")
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="caltrio")
def caltrio() -> None:
    """One trio executor for an NPU runtime, on a timing model or on the card.

    Ask first what a second job in flight would bring, under each reading of the vendor's
    ping/pong engines:

    \b
      caltrio plan                 verdict per hypothesis, with a report
      caltrio semantics            what the hypotheses are
      caltrio simulate --help      one run, on a trace or on made-up requests
      caltrio replay --help        the same run on a device
    """  # noqa: D301 - click wants the character, not its escape


def run(arguments: list[str]) -> int:
    """Run the command line; returns the exit code."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    try:
        # Not caltrio.main(): on an interrupt that prints an empty line of its own.
        with caltrio.make_context("caltrio", list(arguments)) as root:
            result = caltrio.invoke(root)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        name = context.command_path if context is not None else "caltrio"
        text = error.format_message().rstrip(".")
        return _complain(name, f"{text}. See '{name} --help'.", EXIT_USAGE)
    except InputError as error:
        return _complain("caltrio", str(error), EXIT_USAGE)
    except (click.Abort, KeyboardInterrupt):
        return _complain("caltrio", "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has left, as `head` does: not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except ServiceFailed as error:
        return _complain("caltrio", str(error), error.exit_code)
    except CaltrioError as error:
        return _complain("caltrio", str(error), EXIT_FAILED)
    except OverflowError:
        text = "a time of this run is beyond 292 years; lower the timing figures or the lengths"
        return _complain("caltrio", text, EXIT_USAGE)
    except MemoryError:
        return _complain("caltrio", "out of memory; ask for fewer requests", EXIT_FAILED)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _complain("caltrio", f"{place}{error.strerror or error}", EXIT_FAILED)
    return result if isinstance(result, int) else 0


def _complain(name: str, text: str, code: int) -> int:
    click.echo(f"{name}: {' '.join(text.split())}", err=True)
    return code
