"""The `verl-prefix` command: reads the command line, nothing else; each subcommand has a module of its own."""

import argparse
import contextlib
import importlib.util
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from verl_prefix.tools import doctor
from verl_prefix.tools.arguments import Parser, at_least, file_to_write, folder_to_write, json_to_write, names, numbers
from verl_prefix.tools.report import warnings_last
from verl_prefix.versions import install_verl, installed_version

EXAMPLES = """\
examples:
  verl-prefix doctor                 what runs here, and what is missing
  verl-prefix plan run.sh            whether it is worth it for the training command in run.sh
  verl-prefix ab --trace DIR         a run's recorded updates through verl's engine and this one
  verl-prefix bench --grid cpu       time and memory, without verl

exit codes: 0 all is well; 1 the answer is no; 2 wrong words or files, said in one line; 3 of ab: nothing to judge"""
DOCTOR_EXAMPLES = """\
examples:
  verl-prefix doctor
  VERL_PLATFORM=cpu verl-prefix doctor
  verl-prefix doctor --json > doctor.json      for a bug report

exit codes: 0 verl will use this package; 1 it will not: each FAIL says what to do"""
PLAN_EXAMPLES = """\
examples:
  verl-prefix plan run.sh                      a script; nothing that it starts is run
  verl-prefix plan "python3 -m verl.trainer.main_ppo key=value ..."
  verl-prefix plan python3 -m verl.trainer.main_ppo key=value ...
  verl-prefix plan python3 -m verl.experimental.fully_async_policy.fully_async_main key=value ...
  verl-prefix plan --shares update=0.5,old=0.1,ref=0.1 run.sh
  verl-prefix plan --prompt-lengths 2400,0.4 run.sh     without its data
  verl-prefix plan --turns 10 --thinking 300 --say 100 --tool 400 run.sh
  verl-prefix plan --simulate --gpu h200 --fit 120 --json run.sh

exit codes: 0 planned, worth it or not; 1 the run would be refused, or by --simulate fits no GPU; 2 wrong words or
files, said in one line"""
AB_EXAMPLES = """\
examples:
  verl-prefix ab --trace DIR --arms packed,phased
  verl-prefix ab --synthetic 2048,256,8 --model MODEL
  verl-prefix ab --runs stock.jsonl prefix.jsonl

exit codes: 0 every tolerance holds and something was shared; 1 one does not hold; 2 it could not be run, or not to its
end; 3 nothing to judge: the runs sampled different responses, or their first step has several updates"""
BENCH_EXAMPLES = """\
examples:
  verl-prefix bench --grid cpu --out bench.json
  verl-prefix bench --rows 192/48/4 --turns 6
  verl-prefix bench --render bench.json --into README.md

exit codes: 0 measured; 2 wrong words or files, said in one line"""


def _quieten_verl() -> None:
    """Before verl's import, here and in ranks: its engines that are not installed and its choice of a platform are no
    news."""
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:verl.workers.engine")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"verl\.workers\.engine")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # of torch's own renaming


def _given(arguments: argparse.Namespace, options: type) -> dict[str, Any]:
    """Fields of an options dataclass that the command line, or a default of it, gives."""
    values = {field.name: getattr(arguments, field.name, None) for field in fields(options)}
    return {name: value for name, value in values.items() if value is not None}


def _doctor(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")  # what verl and we warn of here is a finding as well
    logging.getLogger("verl_prefix").setLevel(logging.ERROR)
    _quieten_verl()
    return doctor.doctor(arguments.json)


def _ab(arguments: argparse.Namespace) -> int:
    from verl_prefix.tools.ab import render, runs
    from verl_prefix.tools.ab.options import Options

    given = _given(arguments, Options)
    if arguments.runs and given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--runs compares finished runs, {named} is for a replay; remove it")
    options = Options(**given)
    render.refuse_overwrite(arguments.out, arguments.force)
    if arguments.runs:
        return runs.compare(arguments.runs, arguments.out)
    import torch

    if not torch.cuda.is_available():  # before verl is imported, here and in the ranks
        os.environ["VERL_PLATFORM"] = "cpu"
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars, one per arm and rank
    _quieten_verl()
    from verl_prefix.tools.ab import command

    return command.run(options, arguments.out)


def _plan(arguments: argparse.Namespace) -> int:
    from verl_prefix.tools.plan.options import Options

    as_json = arguments.json or arguments.out == "-"
    out = None if arguments.out == "-" else arguments.out
    options = Options(**_given(arguments, Options))
    os.environ.setdefault("VERL_PLATFORM", "cpu")  # nothing runs: any machine will do
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # fake ranks have no backend, says torch
    _quieten_verl()
    from verl_prefix.tools.plan import command

    return command.run(options, out, as_json)


def _bench(arguments: argparse.Namespace) -> int:
    from verl_prefix.tools.bench import report

    if arguments.render:
        return report.render(arguments.render, arguments.into)
    if arguments.into:
        raise ValueError("--into is for --render")
    from verl_prefix.tools.bench.options import Options, Size
    from verl_prefix.tools.report import refuse_dirty

    sizes = tuple(
        Size(*size).with_turns(arguments.turns, arguments.thinking, arguments.tool)
        for size in (*report.grid(arguments.grid), *arguments.rows)
    )
    if arguments.out and not arguments.allow_dirty:
        refuse_dirty()
    options = Options(sizes, **_given(arguments, Options))
    from verl_prefix.tools.bench import measure

    return measure.run(options, arguments.out)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    from verl_prefix.tools.bench.options import ARMS, SHAPES, Options, Size
    from verl_prefix.tools.bench.report import GRIDS

    command = commands.add_parser("bench", help="time, memory and error of stock, a peer and ours; without verl",
        epilog=BENCH_EXAMPLES)  # fmt: skip
    command.set_defaults(run=_bench)
    add = command.add_argument
    add("--grid", choices=GRIDS, action="append", default=[], help="rows by name; repeatable")
    add("--rows", type=numbers("P/S/G", (3,)), nargs="+", default=[], metavar="P/S/G",
        help="prefix and response tokens, rows per prompt")  # fmt: skip
    add("--turns", type=at_least(1), help="of a session, a row each, whose prompt has the turns before it; P/S/G are "
        "the first prompt, a turn's response, sessions; default %(default)s", default=Size(1, 1, 1).turns)  # fmt: skip
    add("--thinking", type=at_least(0), help="of a response: tokens that later prompts leave out; default 3/4 of S")
    add("--tool", type=at_least(0), help="tokens of a tool's answer behind a turn; default S")
    add("--shape", choices=SHAPES, help=f"of the model; default {Options.shape}")
    add("--arms", type=names(ARMS), help="some of all arms, comma-separated")
    add("--layers", type=at_least(1), help="default all of the shape")
    add("--repeats", type=at_least(1), help=f"rounds of all arms; default {Options.repeats}")
    add("--truth", choices=("float64", "float32", "none"), help=f"of gradients; default {Options.truth}")
    add("--device", choices=("cpu", "cuda"), help="default cuda where there is one")
    add("--threads", type=at_least(1), help="of torch on a CPU")
    add("--no-memory", action="store_false", dest="memory", default=None, help="no peak memory")
    add("--compile", action="store_true", default=None, help="compile decoder layers, in every arm")
    add("--capacity", type=at_least(0.001, float), metavar="GIB", help="also: the longest rows that train in this")
    add("--out", type=json_to_write, help="JSON, with .md and .png beside it; goes on where it left off")
    add("--allow-dirty", action="store_true", help="write it from uncommitted files too")
    add("--render", type=Path, metavar="JSON", help="only write a report's .md and .png again")
    add("--into", type=Path, metavar="FILE", help="and its table between the marks in this file")


def _add_ab(commands: argparse._SubParsersAction) -> None:
    from verl_prefix.tools.ab.options import ARMS, MADE_UP_STEPS, Options

    command = commands.add_parser("ab", help="replay a run's updates through the stock engine and ours, and compare",
        epilog=AB_EXAMPLES)  # fmt: skip
    command.set_defaults(run=_ab)
    add = command.add_mutually_exclusive_group(required=True).add_argument
    add("--trace", metavar="DIR", help="what actor_rollout_ref.actor.prefix.trace_dir recorded")
    add("--synthetic", type=lambda text: (*numbers("P,S,G or P,S,G,N", (3, 4))(text), 1)[:4], metavar="P,S,G[,N]",
        help="random rows: prompt and response tokens, rows, groups")  # fmt: skip
    add("--runs", nargs=2, metavar=("STOCK", "OURS"),
        help="two finished runs: JSON lines of verl's file logger, or event files")  # fmt: skip
    add = command.add_argument
    add("--model", help="the model's folder, where it is not the recorded path")
    add("--arms", type=names(ARMS),
        help="of auto, packed, phased, and stock_repacked (stock again, its rows reversed and micro-batches twice as "
        f"large: what rounding alone changes); default {','.join(Options.arms)}")  # fmt: skip
    add("--steps", type=at_least(1), help=f"steps to replay; default all that were recorded, or {MADE_UP_STEPS}")
    add("--ranks", type=at_least(1), help="ranks to replay on, a divisor of the recorded ones")
    add("--dtype", choices=("fp32", "bf16"), help="of forward and backward; default as recorded")
    add("--truth-steps", type=at_least(0), help=f"first steps that the truth takes too; default {Options.truth_steps}")
    add("--out", type=folder_to_write, default="outputs/ab", help="folder of the report; default %(default)s")
    add("--force", action="store_true", help="replace a report that is there")


def _add_plan(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "plan",
        help="say whether sharing is worth it for a training command, and what to change",
        usage="%(prog)s [options] SCRIPT | COMMAND | OVERRIDE...",
        epilog=PLAN_EXAMPLES,
    )
    command.set_defaults(run=_plan)
    add = command.add_argument
    add("--config-path", help="as on the training command; or -cp")
    add("--config-name", help="as on the training command; or -cn")
    add("--response-lengths", metavar="SPEC",
        help="MEAN, MEAN,STD, or a folder of trainer.rollout_data_dir; default half of data.max_response_length; "
        "STD without one is half the mean; of a folder with rows of turns, these rows")  # fmt: skip
    add("--prompt-lengths", metavar="MEAN[,DEVIATION]", help="plan without data and tokenizer: prompts of these "
        "lengths, log-normal with this deviation of their logarithm, default 0")  # fmt: skip
    add("--turns", type=at_least(2), help="sessions of so many turns, a row each, behind the prompts of the data")
    add("--thinking", type=at_least(0), metavar="TOKENS", help="of a turn: thoughts, which later prompts leave out")
    add("--say", type=at_least(1), metavar="TOKENS", help="of a turn: what is said, and stays")
    add("--tool", type=at_least(0), metavar="TOKENS", help="of a turn: what a tool answers")
    add("--dead-groups", type=float, default=0.0, metavar="SHARE",
        help="of groups without advantage, which updates leave out under prefix.skip_zero_advantage")  # fmt: skip
    add("--shares", metavar="SPEC", help="a stock step's shares, update=0.5,old=0.1,ref=0.1, or that run's JSON lines")
    add(
        "--simulate",
        action="store_true",
        help="run one mini-batch on fake tensors: GiB, FLOPs and seconds per phase of every schedule, without a GPU",
    )
    add("--gpu", metavar="NAME[,RATE=N]", default="h100",
        help="h100, h200, h20, a100, or with rates of one's own; default %(default)s")  # fmt: skip
    add(
        "--fit",
        type=at_least(0.001, float),
        metavar="GIB",
        help="of --simulate: also the longest prompt, group and wave that fit",
    )
    add("--out", type=lambda text: text if text == "-" else file_to_write(text),
        help="also write the plan there, as JSON; - is --json")  # fmt: skip
    add("--json", action="store_true", help="print JSON alone")
    return command


def _long(words: list[str]) -> list[str]:
    """Writes Hydra's short options -cp and -cn in full, and leaves out the word `--`.

    argparse would take `-c`, which belongs to the launcher, for a short form of one of them. Behind a `--`, as in
    `ray job submit ... -- python3`, argparse would read no options.
    """
    names = {"p": "--config-path", "n": "--config-name"}
    return [re.sub(r"^-c([pn])(?=$|=)", lambda match: names[match[1]], word) for word in words if word != "--"]


def _missing(error: ModuleNotFoundError, command: Callable[[argparse.Namespace], int]) -> str:
    """What to install where a command's import fails; of our own modules the error goes on."""
    name = (error.name or "").partition(".")[0]
    if name == "verl_prefix":
        raise error
    if command is not _bench and importlib.util.find_spec("verl") is None:
        return f"verl is not installed here: {install_verl()}"
    return f"{name} is not installed here: pip install {name}"


def main(argv: list[str] | None = None) -> int:
    """Entry point of `verl-prefix`; the return value is the exit code."""
    parser = Parser(prog="verl-prefix", description="Shared-prefix GRPO for verl's actors.", epilog=EXAMPLES)
    ours, verl, torch = (installed_version(name) or "not installed" for name in ("verl-prefix", "verl", "torch"))
    parser.add_argument("--version", action="version", version=f"verl-prefix {ours} (verl {verl}, torch {torch})")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("doctor", help="say whether verl will use this package and what runs here",
        epilog=DOCTOR_EXAMPLES)  # fmt: skip
    command.set_defaults(run=_doctor)
    command.add_argument("--json", action="store_true", help="print JSON alone, for a bug report")
    _add_ab(commands)
    plan = _add_plan(commands)
    _add_bench(commands)
    argv = sys.argv[1:] if argv is None else argv
    arguments, words = parser.parse_known_args(_long(argv))
    is_plan = arguments.run is _plan
    if not is_plan and words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    if is_plan and not any(map(str.strip, words)):
        plan.print_help(sys.stderr)
        return 2
    try:
        # A simulation takes minutes, and shows its progress on stderr.
        with warnings_last() if is_plan and not arguments.simulate else contextlib.nullcontext():
            if is_plan:
                from verl_prefix.tools.plan.script import expanded

                _, arguments.words = plan.parse_known_args(_long(expanded(words)), arguments)
            return arguments.run(arguments)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if arguments.run is _doctor:  # the traceback is what it is for
            raise
        told = _missing(error, arguments.run) if isinstance(error, ModuleNotFoundError) else str(error)
        print(f"verl-prefix {argv[0]}: {' '.join(told.split())}", file=sys.stderr)
        return 2  # 1 is for a tolerance that does not hold


if __name__ == "__main__":
    sys.exit(main())
