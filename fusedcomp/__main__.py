"""The command line: ``python -m fusedcomp demo``."""

import argparse
import sys
from collections.abc import Sequence

from fusedcomp.demo import DemoError, command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedcomp", description="Compressed data-parallel training.")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", help=command.SUMMARY, description=command.SUMMARY)
    command.add_arguments(demo)
    demo.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
