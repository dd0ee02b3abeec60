"""The command line: ``python -m fusedcomp demo``, ``doctor`` and ``plan``."""

import argparse
import sys
from collections.abc import Sequence

from fusedcomp.demo import DemoError
from fusedcomp.demo import command as demo
from fusedcomp.doctor import command as doctor
from fusedcomp.plan import command as plan

COMMANDS = {"demo": demo, "doctor": doctor, "plan": plan}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedcomp", description="Compressed data-parallel training.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.SUMMARY, description=command.SUMMARY)
        command.add_arguments(own)
        own.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
