"""The `verl-prefix` command: reads the command line, nothing else; each subcommand has a module of its own."""

import argparse
import os
import sys
from pathlib import Path

from verl_prefix import doctor

REPLAY_OPTIONS = ("trace", "synthetic", "model", "arms", "steps", "ranks", "dtype", "lr", "truth_steps")


def _ab(arguments: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():  # before verl is imported, here and in the ranks
        os.environ["VERL_PLATFORM"] = "cpu"
    from verl_prefix import ab, runs
    from verl_prefix.trace import TraceError

    given = {name: value for name in REPLAY_OPTIONS if (value := getattr(arguments, name)) is not None}
    try:
        if arguments.runs and given:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise TraceError(f"--runs compares finished runs, {named} is for a replay; remove it")
        if arguments.runs:
            return runs.compare(arguments.runs, arguments.out, arguments.force)
        return ab.run(ab.Options(**given), arguments.out, arguments.force)
    except (ValueError, OSError) as error:  # 1 is for a tolerance that does not hold
        print(f"verl-prefix ab: {error}", file=sys.stderr)
        return 2


def _plan(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("VERL_PLATFORM", "cpu")  # nothing runs: any machine will do
    from verl_prefix import plan

    try:
        return plan.run(
            arguments.config_name, arguments.overrides, arguments.response_lengths, arguments.shares, arguments.out
        )
    except ValueError as error:
        print(f"verl-prefix plan: {error}", file=sys.stderr)
        return 2


def _numbers(text: str) -> tuple[int, int, int, int]:
    values = tuple(int(x) for x in text.split(","))
    if len(values) not in (3, 4):
        raise argparse.ArgumentTypeError(f"{text!r}: write P,S,G or P,S,G,N")
    return (*values, 1)[:4]


def _add_ab(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("ab", help="replay a run's updates through the stock engine and ours, and compare")
    command.set_defaults(run=_ab)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="DIR", help="what actor_rollout_ref.actor.prefix.trace_dir recorded")
    source.add_argument(
        "--synthetic", type=_numbers, metavar="P,S,G[,N]", help="random rows: prompt and response tokens, rows, groups"
    )
    source.add_argument(
        "--runs",
        nargs=2,
        metavar=("A", "B"),
        help="two finished runs: JSON lines of verl's file logger, or event files",
    )
    command.add_argument("--model", help="the model's folder, where it is not the recorded path")
    command.add_argument(
        "--arms", type=lambda text: tuple(text.split(",")),
        help="of auto, packed, phased, and stock_repacked (stock again, its rows reversed and micro-batches twice as "
        "large: the run-to-run envelope); default auto",
    )  # fmt: skip
    command.add_argument("--steps", type=int, help="steps to replay; default all that were recorded, or 5")
    command.add_argument("--ranks", type=int, help="ranks to replay on, a divisor of the recorded ones")
    command.add_argument("--dtype", choices=("fp32", "bf16"), help="of forward and backward; default as recorded")
    command.add_argument("--lr", type=float, help="learning rate; default as recorded")
    command.add_argument("--truth-steps", type=int, help="first steps that the truth takes too; default 3")
    command.add_argument(
        "--out", type=Path, default=Path("outputs/ab"), help="folder of the report; default outputs/ab"
    )
    command.add_argument("--force", action="store_true", help="replace a report that is there")


def _add_plan(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("plan", help="say what sharing would gain a training command, from its own overrides")
    command.set_defaults(run=_plan)
    command.add_argument("overrides", nargs="*", help="the training command's Hydra overrides")
    command.add_argument("--config-name", default="ppo_trainer", help="as on the training command")
    command.add_argument(
        "--response-lengths", metavar="SPEC",
        help="TOKENS, MEAN,STD, or a folder of trainer.rollout_data_dir; default data.max_response_length",
    )  # fmt: skip
    command.add_argument(
        "--shares", metavar="SPEC", help="a stock step's shares, update=0.5,old=0.1,ref=0.1, or that run's JSON lines"
    )
    command.add_argument("--out", type=Path, help="also write the plan there, as JSON")


def main(argv: list[str] | None = None) -> int:
    """Entry point of `verl-prefix`; the return value is the exit code."""
    parser = argparse.ArgumentParser(prog="verl-prefix", description="Shared-prefix GRPO for verl's FSDP actor.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("doctor", help="say whether verl will use this package, and if not, why")
    command.set_defaults(run=lambda _: doctor.doctor())
    _add_ab(commands)
    _add_plan(commands)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
