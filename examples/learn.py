"""`make learn`: does GRPO with the shared-prefix actor learn? SmolLM2-135M on a CPU, through real verl.

A few steps of verl's SFT trainer teach the format of an answer, and all runs start from what they leave. A run is an
arm (verl's stock actor, or ours) and a seed, which draws the order of the questions and the responses. A call ends
after `--minutes`; the next one goes on from verl's last checkpoint. Each writes the report of all runs so far.

The questions are of four worlds (recipes/musique/make_questions.py), which share no name: for SFT, for GRPO, to try
settings on, and the held-out ones, which decide. Success, of both seeds of the prefix arm: exact match on the held-out
questions rises by at least `LEAST_RISE` and by at least `LEAST_ERRORS` of its standard errors.
"""

import argparse
import bisect
import fcntl
import itertools
import json
import math
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import demo
import demo_report
from rich.console import Console
from rich.table import Table

from verl_prefix.files import write_whole
from verl_prefix.tools.plots import Bars, Curves
from verl_prefix.tools.plots import save as save_plot
from verl_prefix.tools.report import provenance

SCHEMA = "verl_prefix.learn/1"
LEAST_RISE, LEAST_ERRORS, SEEDS = 0.10, 3.0, 2
# Questions and seed of each world; `tune` is to look for other settings on (`--test tune`). Seeds 4, 5 and 7 were held
# out for settings that failed (examples/results): the next setting wants another, which its test tells to be apart.
WORLDS = {"sft": (64, 1), "train": (960, 2), "tune": (128, 3), "test": (256, 8)}
SFT_STEPS, SFT_BATCH = 4, 8  # enough for the format of every answer; from 8 steps GRPO adds less (examples/results)
SAVE_EVERY = 4
WINDOW = 5  # steps whose mean reward is a run's reward at its start and at its end
ACCURACY = "val-core/musique/acc/mean@1"
REWARD, SECONDS = demo_report.CURVES["reward"], demo_report.TIMINGS["step"]
SIZE = demo.Size(
    prompts=8, rollouts=8, paragraphs=3, prompt_tokens=384, response_tokens=16, lr=3e-5, limit_s=0, steps=16,
    reward=demo.SIZES["smollm2"].reward,
)  # fmt: skip
Curve = dict[int, dict[str, float]]  # what verl logged, by step; step 0 is the start after SFT


def make_data(folder: Path) -> None:
    """Write each world's questions as verl's parquet, and SFT's as messages, the last of which is a bare answer."""
    done = folder / "sft.parquet"
    if done.exists():
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, (num, seed) in WORLDS.items():
        questions = folder / f"{name}.jsonl"
        demo.run_recipe(
            "musique/make_questions.py", "--short", output=questions, num=num, seed=seed, paragraphs=SIZE.paragraphs
        )
        demo.run_recipe("musique/prepare.py", input=questions, output=folder / name)
    rows = pq.read_table(folder / "sft" / "train.parquet").to_pylist()
    answers = [f"<answer>{row['reward_model']['ground_truth'][0]}</answer>" for row in rows]
    messages = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": answer}]}
        for row, answer in zip(rows, answers, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(messages), folder / ".sft.partial")
    (folder / ".sft.partial").rename(done)


def sft_overrides(model: str, data: Path, output: Path) -> list[str]:
    return [
        f"data.train_files={data / 'sft.parquet'}",
        f"data.train_batch_size={SFT_BATCH}",
        "data.micro_batch_size_per_gpu=4",
        "data.use_dynamic_bsz=false",
        "data.max_length=512",
        "data.num_workers=0",
        f"model.path={model}",
        "model.enable_gradient_checkpointing=false",
        "model.use_remove_padding=true",
        "+model.override_config.attn_implementation=sdpa",
        "engine.strategy=fsdp2",
        "engine.use_torch_compile=false",
        "optim.lr=2e-5",
        "optim.lr_warmup_steps=0",
        "optim.lr_scheduler_type=constant",
        "checkpoint.save_contents=[hf_model]",
        "checkpoint.load_contents=[]",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        f"trainer.total_training_steps={SFT_STEPS}",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={output}",
    ]


def grpo_overrides(arm: str, seed: int, model: str, data: Path, test: str, output: Path, size: demo.Size) -> list[str]:
    """Return the overrides of a run; a later one wins over an earlier one.

    One update per step, whose old log-probs are those of the rollout: without a KL term, no other pass. Passes are in
    bf16, verl's default, over weights in fp32: on a CPU with AVX-512 BF16 that takes 0.6 of the time.
    """
    actor, sampler = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        *demo.overrides(model, data / "train", "hf", 1, size),
        *demo.ARMS[arm],
        f"data.val_files={data / test / 'train.parquet'}",
        "data.shuffle=true",
        f"data.seed={seed}",
        f"{sampler}.seed={seed}",
        f"{sampler}.dtype=bfloat16",
        f"{sampler}.max_num_seqs={size.prompts * size.rollouts}",
        f"{actor}.fsdp_config.mixed_precision.param_dtype=bf16",
        # Stock is fastest with one row in a micro-batch (demo.overrides).
        f"{actor}.use_dynamic_bsz={str(arm == 'prefix').lower()}",
        f"{actor}.ppo_max_token_len_per_gpu=4096",
        f"{actor}.use_kl_loss=false",
        f"{actor}.entropy_coeff=0",
        "algorithm.rollout_correction.bypass_mode=true",
        f"trainer.test_freq={size.steps}",
        f"trainer.save_freq={SAVE_EVERY}",
        "trainer.max_actor_ckpt_to_keep=2",  # with 1, a moment in which the last one is no longer whole
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={output / 'checkpoints'}",
    ]


def read(run: Path) -> Curve:
    """Return what all calls of a run logged. A step that was lost with its call is in two of them: the later one
    counts. The line in which a call was cut off is passed over."""
    curve: Curve = {}
    for path in sorted(run.glob("call_*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                continue
            curve[found["step"]] = curve.get(found["step"], {}) | found["data"]
    return dict(sorted(curve.items()))


def finished(run: Path, steps: int) -> bool:
    return ACCURACY in read(run).get(steps, {})


def checkpoint(folder: Path) -> int:
    """Return the step of verl's last whole checkpoint, 0 if there is none."""
    latest = folder / "latest_checkpointed_iteration.txt"
    return int(latest.read_text()) if latest.exists() else 0


def call(module: list[str], overrides: list[str], metrics: Path, deadline: float) -> bool:
    """Run verl until it ends, True, or to the deadline, False; its log is beside `metrics`.

    Raises:
        SystemExit: verl failed.
    """
    log = metrics.with_suffix(".log")
    command = [sys.executable, *module, *overrides, f"hydra.run.dir={metrics.with_suffix('')}"]
    # Ray makes its workers yield to whatever else runs, which on a machine in use stretches a step several times over.
    env = demo.environment(metrics) | {"RAY_worker_niceness": "0"}
    with demo.process_group(command, env, log) as process:
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    if status:
        raise SystemExit(f"verl exited with status {status}; its log is {log}")
    return True


def warm_up(output: Path, deadline: float) -> Path | None:
    """Return the model that SFT leaves, which is trained where there is none; None where time is up."""
    folder = output / "sft"
    model = folder / f"global_step_{SFT_STEPS}" / "huggingface"
    if checkpoint(folder) == SFT_STEPS:
        return model
    start = demo.smollm2(demo.ROOT / "outputs" / "models" / "smollm2-135m")
    script = [str(Path(__file__).with_name("sft_cpu.py"))]
    done = call(script, sft_overrides(start, output / "data", folder), output / "sft.jsonl", deadline)
    return model if done else None


def train(args: argparse.Namespace, run: Path, model: Path, size: demo.Size, deadline: float) -> bool:
    """Train a run from where it is to its last step; return whether it is there.

    The held-out questions are answered once before the first run, for all runs, and once after each. A call that was
    cut off while they were answered at the end left verl's last checkpoint, and the next one only answers them.
    """
    if finished(run, size.steps):
        return True
    overrides = grpo_overrides(args.arm, args.seed, str(model), run.parent / "data", args.test, run, size)
    reached = checkpoint(run / "checkpoints")
    if reached == size.steps:
        overrides += ["trainer.val_before_train=true", "trainer.val_only=true"]
    elif reached == 0 and start_accuracy(run.parent) is None:
        overrides.append("trainer.val_before_train=true")
    number = len(list(run.glob("call_*.jsonl"))) + 1
    call(["-m", "verl.trainer.main_ppo"], overrides, run / f"call_{number:02d}.jsonl", deadline)
    return finished(run, size.steps)


def runs(output: Path) -> dict[str, Curve]:
    """Return the curve of each run, by its name."""
    found = {
        path.name: read(path) for path in sorted(output.iterdir()) if re.fullmatch(r"(stock|prefix)_\d+", path.name)
    }
    return {name: curve for name, curve in found.items() if curve}


def start_accuracy(output: Path) -> float | None:
    """Return the exact match after SFT, from which every run starts; None where no run has measured it."""
    return next((curve[0][ACCURACY] for curve in runs(output).values() if 0 in curve), None)


def judge(start: float, end: float, questions: int) -> dict[str, Any]:
    """Return the rise of a share of `questions`, its standard error and whether it is enough.

    The error is that of two independent shares. Both are of the same questions, which makes the true one smaller.
    """
    rise, error = end - start, math.sqrt((start * (1 - start) + end * (1 - end)) / questions)
    return {"rise": rise, "standard_error": error, "enough": rise >= max(LEAST_RISE, LEAST_ERRORS * error)}


def describe(curve: Curve, start: float | None, steps: int, questions: int) -> dict[str, Any]:
    """Return a run's exact match and reward at its start and its end, and what was logged by step."""
    logged = {step: data for step, data in curve.items() if SECONDS in data}
    rewards = [data[REWARD] for data in logged.values()]
    end = curve.get(steps, {}).get(ACCURACY)
    return {
        "exact_match": {"start": start, "end": end},
        **(judge(start, end, questions) if start is not None and end is not None else {}),
        "reward": {"start": _spread(rewards[:WINDOW]), "end": _spread(rewards[-WINDOW:])},
        "minutes": sum(data[SECONDS] for data in logged.values()) / 60,
        "steps": [
            {"step": step} | {key: data[key] for key in sorted(data) if _kept(key)} for step, data in logged.items()
        ],
    }


def _spread(rewards: list[float]) -> dict[str, float] | None:
    """Return mean and standard deviation over steps."""
    if len(rewards) < 2:
        return None
    return {"mean": statistics.fmean(rewards), "deviation": statistics.stdev(rewards), "steps": len(rewards)}


def _kept(key: str) -> bool:
    return key in {*demo_report.CURVES.values(), *demo_report.TIMINGS.values(), "response_length/mean"} or key.endswith(
        demo_report.PREFIX
    )


def build(output: Path, size: demo.Size, test: str = "test") -> dict[str, Any]:
    """Return the report; `problems` says in words what keeps it from success: what is missing, and what failed."""
    start = start_accuracy(output)
    questions = WORLDS[test][0]
    described = {name: describe(curve, start, size.steps, questions) for name, curve in runs(output).items()}
    done = {name: run for name, run in described.items() if "rise" in run}
    missing = [
        f"{num} {arm} runs of {size.steps} steps are wanted, there are {found}"
        for arm, num in (("prefix", SEEDS), ("stock", 1))
        if (found := sum(name.startswith(arm) for name in done)) < num
    ]
    failed = [
        f"{name}: exact match rose by {run['rise']:.3f}, and {LEAST_RISE} and {LEAST_ERRORS:g} standard errors of "
        f"{run['standard_error']:.3f} are wanted"
        for name, run in done.items()
        if name.startswith("prefix") and not run["enough"]
    ]
    commands = {}
    for name in described:
        arm, seed = name.split("_")
        overrides = grpo_overrides(arm, int(seed), "SFT", output / "data", test, output / name, size)
        learn = ["examples/learn.py", "--arm", arm, "--seed", seed, "--steps", str(size.steps), "--lr", f"{size.lr:g}"]
        commands[name] = {"learn": _shown(learn), "verl": _shown(["-m", "verl.trainer.main_ppo", *overrides])}
    sft = _shown(["examples/sft_cpu.py", *sft_overrides("SMOLLM2", output / "data", output / "sft")])
    config = {
        "worlds": WORLDS,
        "test": test,
        "size": asdict(replace(size, reward=size.reward.replace(f"{demo.ROOT}/", ""))),
        "sft": sft,
        "commands": commands,
    }
    return {
        **provenance(SCHEMA),
        "config": config,
        "runs": described,
        "problems": {"missing": missing, "failed": failed},
    }


def _shown(command: list[str]) -> str:
    return shlex.join(["python", *command]).replace(f"{demo.ROOT}/", "")


def draw(report: dict[str, Any], path: Path) -> bool:
    """Draw reward by step and by minute, seconds of each step, and exact match at both ends of each run."""
    named = {name.replace("_", ", seed "): run for name, run in report["runs"].items() if run["steps"]}
    if not named:
        return False
    steps = range(1, max(step["step"] for run in named.values() for step in run["steps"]) + 1)
    minutes = range(math.ceil(max(run["minutes"] for run in named.values())) + 1)

    def by_step(run: dict[str, Any], key: str) -> list[float | None]:
        values = {step["step"]: step[key] for step in run["steps"]}
        return [values.get(step) for step in steps]

    def by_minute(run: dict[str, Any]) -> list[float | None]:
        ends = list(itertools.accumulate(step[SECONDS] / 60 for step in run["steps"]))
        smooth = moving([step[REWARD] for step in run["steps"]])
        return [
            smooth[i - 1] if 0 < (i := bisect.bisect_right(ends, m)) and m <= ends[-1] + 1 else None for m in minutes
        ]

    title = f"Mean reward, moving over {WINDOW} steps"
    panels = [
        Curves(title, "reward", steps, [(n, moving(by_step(run, REWARD))) for n, run in named.items()]),
        Curves(title, "reward", minutes, [(n, by_minute(run)) for n, run in named.items()], x="minutes of training"),
        Curves("Seconds of a step", "seconds", steps, [(n, by_step(run, SECONDS)) for n, run in named.items()]),
        Bars(
            f"Exact match on {report['config']['worlds'][report['config']['test']][0]} held-out questions", "share", "",
            ["after SFT", f"after {report['config']['size']['steps']} steps"],
            {n: [run["exact_match"]["start"], run["exact_match"]["end"]] for n, run in named.items()},
        ),
    ]  # fmt: skip
    return save_plot(path, "verl GRPO of SmolLM2-135M on a CPU, stock actor and shared prefix", panels)


def moving(values: list[float | None]) -> list[float | None]:
    """Return at each place the mean of what is known of the last `WINDOW` values; None where the value is unknown."""
    means: list[float | None] = []
    for i, value in enumerate(values):
        known = [v for v in values[max(0, i + 1 - WINDOW) : i + 1] if v is not None]
        means.append(None if value is None else statistics.fmean(known))
    return means


def show(report: dict[str, Any], console: Console) -> None:
    table = Table("mean (deviation)")
    rows: dict[str, list[str]] = {}
    for name, run in report["runs"].items():
        table.add_column(name, justify="right", no_wrap=True)
        cells = {"steps": str(len(run["steps"])), "minutes": f"{run['minutes']:.1f}"}
        cells |= {f"exact match, {end}": "-" if x is None else f"{x:.3f}" for end, x in run["exact_match"].items()}
        cells["rise (standard error)"] = f"{run['rise']:.3f} ({run['standard_error']:.3f})" if "rise" in run else "-"
        for end, s in run["reward"].items():
            cells[f"reward of {WINDOW} steps, {end}"] = f"{s['mean']:.2f} ({s['deviation']:.2f})" if s else "-"
        for title, cell in cells.items():
            rows.setdefault(title, []).append(cell)
    for title, row in rows.items():
        table.add_row(title, *row)
    console.print(table)
    for kind, problems in report["problems"].items():
        for problem in problems:
            console.print(f"{kind}: {problem}", highlight=False, soft_wrap=True)
    if not any(report["problems"].values()):
        console.print("OK: exact match rises enough in every run of the prefix arm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=demo.ARMS, default="prefix")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=SIZE.steps, help="of a run")
    parser.add_argument("--lr", type=float, default=SIZE.lr)
    parser.add_argument("--minutes", type=float, default=45, help="of this call; another one goes on")
    parser.add_argument("--test", choices=["test", "tune"], default="test", help="tune: to look for other settings")
    parser.add_argument("--output", type=Path, default=demo.ROOT / "outputs" / "learn")
    args = parser.parse_args()
    if args.steps < 1 or args.minutes <= 0 or args.seed < 0:
        parser.error("--steps and --minutes are above 0, --seed is not below")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that what it started ends too
    deadline = time.monotonic() + 60 * args.minutes - 20  # until its last process has gone
    output, size, console = args.output.resolve(), replace(SIZE, steps=args.steps, lr=args.lr), Console()
    with alone(output / "data"):
        keep_settings(output, args)
        make_data(output / "data")
        model = warm_up(output, deadline)
    with alone(output / f"{args.arm}_{args.seed}") as run:
        done = model is not None and train(args, run, model, size, deadline)
    if not done:
        console.print(f"time is up after {args.minutes:g} minutes: the same command goes on from the last checkpoint")
    if not runs(output):
        return 0
    report = build(output, size, args.test)
    write_whole(output / "report.json", json.dumps(report, indent=1) + "\n")
    draw(report, output / "report.png")
    show(report, console)
    return 1 if report["problems"]["failed"] else 0


@contextmanager
def alone(folder: Path) -> Iterator[Path]:
    """Make `folder`, and refuse to write to it beside another process; two runs may go at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another process is writing to {folder}: wait for it, or give another --output") from None
        yield folder


def keep_settings(output: Path, args: argparse.Namespace) -> None:
    """Refuse to go on with other settings than those that the runs of this folder began with."""
    path, ours = output / "settings.json", {"steps": args.steps, "lr": args.lr, "test": args.test}
    if not path.exists():
        write_whole(path, json.dumps(ours) + "\n")
    elif (theirs := json.loads(path.read_text())) != ours:
        raise SystemExit(f"the runs in {output} have {theirs}, this one {ours}: give another --output")


if __name__ == "__main__":
    sys.exit(main())
