"""The command line: `grpo presets --recipes [NAME ...]` prints the table of named variants."""

import argparse
import os
import sys
from collections.abc import Sequence

from grpo import __version__

OK, BAD_USAGE = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 for bad usage."""
    arguments = _parser().parse_args(argv)
    try:
        code = _presets(arguments.recipes)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has had enough. The interpreter flushes once more at exit: give it a sink.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = OK
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo", description="Group Relative Policy Optimization.")
    parser.add_argument("--version", action="version", version=f"grpo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    presets = commands.add_parser("presets", help="print what can be chosen by name")
    presets.add_argument(
        "--recipes",
        nargs="*",
        required=True,
        metavar="NAME",
        help="the named variants of the algorithm and what each fixes; all of them, or those given",
    )
    return parser


def _presets(names: Sequence[str]) -> int:
    from grpo.recipes import table_text  # here, so that --help stays immediate

    try:
        print(table_text(names))
    except ValueError as error:
        print(error, file=sys.stderr)
        return BAD_USAGE
    return OK


if __name__ == "__main__":
    sys.exit(main())
