"""The `verl-prefix` command: reads the command line, nothing else; each subcommand has a module of its own."""

import argparse
import sys

from verl_prefix import doctor


def main(argv: list[str] | None = None) -> int:
    """Entry point of `verl-prefix`; the return value is the exit code."""
    parser = argparse.ArgumentParser(prog="verl-prefix", description="Shared-prefix GRPO for verl's FSDP actor.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("doctor", help="say whether verl will use this package, and if not, why")
    command.set_defaults(run=lambda _: doctor.doctor())
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
