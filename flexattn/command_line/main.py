"""main: the command line, `python -m flexattn COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from flexattn.command_line import bench, doctor, explain_mod, kernel_cache, show_mod
from flexattn.errors import ArgumentError, FlexAttentionError

_COMMANDS = (doctor, explain_mod, show_mod, bench, kernel_cache)
_EXIT = """
exit status: 0 if all is well, 1 if something does not work or a mod is refused, 2 if the command line is wrong.
Without a command, the size of the kernel cache is printed.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    Args:
        arguments: the words of the command line, by default those of this process.

    Raises:
        SystemExit with status 2 if the words are no command, as argparse does. Errors of flexattn are printed.

    Example:
        >>> main(["cache", "--help"])
        Traceback (most recent call last):
        SystemExit: 0
    """
    chosen = parser().parse_args(arguments)
    try:
        return chosen.run(chosen)
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FlexAttentionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if type(error) is ArgumentError else 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    made = argparse.ArgumentParser(
        prog="python -m flexattn", description="Inspect flexattn on this machine.", epilog=_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.set_defaults(run=kernel_cache.show_size)
    commands = made.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        text = (command.__doc__ or "").partition(": ")[2]
        summary, _, examples = text.partition("\n\n")
        one = commands.add_parser(
            command.NAME, help=summary.rstrip("."), description=f"{summary}\n\n{examples.rstrip()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        one.set_defaults(run=command.run)
        command.add_arguments(one)
    return made
