"""The `verl-prefix` command: reads the command line, nothing else; each subcommand has a module of its own."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Container
from pathlib import Path
from typing import NoReturn

from verl_prefix.tools import doctor
from verl_prefix.versions import package_versions

REPLAY_OPTIONS = ("trace", "synthetic", "model", "arms", "steps", "ranks", "dtype", "lr", "truth_steps")

BENCH_OPTIONS = ("shape", "arms", "layers", "repeats", "budget", "truth", "device", "dtype", "threads", "memory",
                 "compile", "capacity")  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _quieten_verl() -> None:
    """Before verl's import: its engines that are not installed and its choice of a platform are no news here."""
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARNING")
    warnings.filterwarnings("ignore", r"\w+ engine is not available", UserWarning)


def _version() -> str:
    found = package_versions(("verl-prefix", "verl", "torch"))
    ours, verl, torch = (found[name] or "not installed" for name in ("verl-prefix", "verl", "torch"))
    return f"verl-prefix {ours} (verl {verl}, torch {torch})"


def _doctor(_: argparse.Namespace) -> int:
    _quieten_verl()
    return doctor.doctor()


def _ab(arguments: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():  # before verl is imported, here and in the ranks
        os.environ["VERL_PLATFORM"] = "cpu"
    _quieten_verl()
    from verl_prefix.engine.trace import TraceError
    from verl_prefix.tools.ab import command as ab
    from verl_prefix.tools.ab import runs

    given = {name: value for name in REPLAY_OPTIONS if (value := getattr(arguments, name)) is not None}
    if "synthetic" in given:
        given["synthetic"] = (*given["synthetic"], 1)[:4]
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
    _quieten_verl()
    from verl_prefix.tools.plan import command as plan

    try:
        return plan.run(
            arguments.config_path, arguments.config_name, arguments.words, arguments.response_lengths,
            arguments.shares, arguments.out,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        print(f"verl-prefix plan: {error}", file=sys.stderr)
        return 2


def _bench(arguments: argparse.Namespace) -> int:
    from verl_prefix.tools.bench import report

    given = {key: value for key, value in vars(arguments).items() if key in BENCH_OPTIONS and value is not None}
    try:
        if arguments.render:
            return report.render(arguments.render, arguments.into)
        if arguments.into:
            raise ValueError("--into is for --render")
        from verl_prefix.tools.bench import measure, options

        sizes = tuple(options.Size(*size) for size in (*report.grid(arguments.grid), *arguments.rows))
        return measure.run(options.Options(sizes, **given), arguments.out, arguments.allow_dirty)
    except (ValueError, OSError) as error:
        print(f"verl-prefix bench: {error}", file=sys.stderr)
        return 2


def _numbers(form: str, counts: Container[int]) -> Callable[[str], tuple[int, ...]]:
    """Reader of so many numbers above 0, divided as in `form`."""

    def read(text: str) -> tuple[int, ...]:
        values = [int(x) if x.isdecimal() else 0 for x in text.split("/" if "/" in form else ",")]
        if len(values) not in counts or min(values) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}: write {form}, numbers above 0")
        return tuple(values)

    return read


def _add_bench(commands: argparse._SubParsersAction) -> None:
    from verl_prefix.tools.bench.report import GRIDS

    command = commands.add_parser("bench", help="time, memory and error of stock, peers and ours; without verl")
    command.set_defaults(run=_bench)
    command.add_argument("--grid", action="append", default=[], help=f"rows by name: {', '.join(GRIDS)}; repeatable")
    command.add_argument(
        "--rows", type=_numbers("P/S/G", (3,)), nargs="+", default=[], metavar="P/S/G",
        help="prefix and response tokens, rows per prompt",
    )  # fmt: skip
    command.add_argument("--shape", help="model shape, such as qwen3-8b; default small, that of the grid cpu")
    command.add_argument("--arms", type=lambda text: tuple(text.split(",")), help="some of all arms, comma-separated")
    command.add_argument(
        "--layers", type=_numbers("N or N,M", (1, 2)), metavar="N[,M]",
        help="layers, or two depths to extrapolate from; default all of the shape",
    )  # fmt: skip
    command.add_argument("--repeats", type=int, help="rounds of all arms; default 3")
    command.add_argument("--budget", type=int, help="tokens of a pass in every arm; default twice the row")
    command.add_argument("--truth", choices=("float64", "float32", "none"), help="of gradients; default float64")
    command.add_argument("--device", choices=("cpu", "cuda"), help="default cuda where there is one")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default bfloat16 on cuda")
    command.add_argument("--threads", type=int, help="of torch on a CPU")
    command.add_argument("--no-memory", action="store_false", dest="memory", default=None, help="no peak memory")
    command.add_argument("--compile", action="store_true", default=None, help="compile decoder layers, in every arm")
    command.add_argument("--capacity", type=float, metavar="GIB", help="also: the longest rows that train in this")
    command.add_argument("--out", type=Path, help="JSON, with .md and .png beside it; goes on where it left off")
    command.add_argument("--allow-dirty", action="store_true", help="write it from uncommitted files too")
    command.add_argument("--render", type=Path, metavar="JSON", help="only write a report's .md and .png again")
    command.add_argument("--into", type=Path, metavar="FILE", help="and its table between the marks in this file")


def _add_ab(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("ab", help="replay a run's updates through the stock engine and ours, and compare")
    command.set_defaults(run=_ab)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="DIR", help="what actor_rollout_ref.actor.prefix.trace_dir recorded")
    source.add_argument(
        "--synthetic", type=_numbers("P,S,G or P,S,G,N", (3, 4)), metavar="P,S,G[,N]",
        help="random rows: prompt and response tokens, rows, groups",
    )  # fmt: skip
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
    command = commands.add_parser(
        "plan",
        help="say what sharing would gain a training command, from its own overrides",
        usage="%(prog)s [options] OVERRIDE...\n       %(prog)s [options] python3 -m verl.trainer.main_ppo OVERRIDE...",
        allow_abbrev=False,
    )
    command.set_defaults(run=_plan)
    command.add_argument("--config-path", "-cp", default="config", help="as on the training command")
    command.add_argument("--config-name", "-cn", default="ppo_trainer", help="as on the training command")
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
    parser = _Parser(prog="verl-prefix", description="Shared-prefix GRPO for verl's FSDP actor.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("doctor", help="say whether verl will use this package and what runs here")
    command.set_defaults(run=_doctor)
    _add_ab(commands)
    _add_plan(commands)
    _add_bench(commands)
    argv = sys.argv[1:] if argv is None else argv
    arguments, words = parser.parse_known_args([word for word in argv if word != "--"])  # of `ray job submit ... --`
    if arguments.run is _plan:
        arguments.words = words
    elif words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
