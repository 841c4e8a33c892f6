"""`make demo`: GRPO on a machine without a GPU, first with verl's stock actor, then with the shared-prefix actor.

Both arms are `python -m verl.trainer.main_ppo` with the same model, data, seed and trainer. They differ in what `ARMS`
lists: the actor's engine. `demo_verdict` compares what verl logged; any failure, different numbers at step 1, a rollout
that has not the actor's weights, or a run that shared nothing make the exit status 1.
"""

import argparse
import fcntl
import itertools
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import demo_report
import demo_verdict
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from smollm2 import smollm2
from training_process import ROLES, ROOT, environment, memory_mib, process_group

from verl_prefix.tools.arguments import Parser, at_least, file_to_read, folder_to_write

RECIPES = ROOT / "recipes"
NUM_STEPS = 3  # of which the sizes' time limits are
SEED = 7
ARMS = {
    "stock": ["model_engine=dp", "actor_rollout_ref.actor.strategy=fsdp2"],
    "prefix": ["model_engine=prefix", "actor_rollout_ref.actor.strategy=fsdp2"],
}
MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
)
# Printed by verl as it goes: what the arm does from that line on.
PHASES = {
    "ray init kwargs": "starting Ray",
    "Started a local Ray instance": "starting workers",
    "Creating file logger": "generating step 1",
}


@dataclass(frozen=True)
class Size:
    """What a model's demo runs: prompts per step, rollouts per prompt, lengths in tokens, seconds that a step may take.

    Of vision models also the pixels of a video's frame, at most. Of several `turns` each is a row, by the loop of the
    MuSiQue recipe: what is no answer is asked for again. `seconds`: of both arms' starts, and of a step of both, on two
    idle cores; None: not known.
    """

    prompts: int
    rollouts: int
    paragraphs: int | None
    prompt_tokens: int
    response_tokens: int
    lr: float
    reward: str
    limit_s: int
    # verl's Qwen2.5-VL without padding needs flash attention, which a CPU has not.
    remove_padding: bool = True
    steps: int = NUM_STEPS
    frame_pixels: int = 48 * 48
    turns: int = 1
    short: bool = False  # questions made up with short paragraphs
    seconds: tuple[int, int] | None = None


# So small a model does not answer, and a random one never: what they write is graded by its letters, so that a group's
# rewards differ.
LETTERS = "pkg://verl_prefix.testing:letter_share"
SIZES = {
    "smollm2": Size(1, 4, 2, 512, 16, 1e-6, LETTERS, 900, short=True, seconds=(130, 40)),
    "tiny": Size(2, 8, 5, 4096, 24, 1e-3, LETTERS, 600),
    "qwen2_5_vl": Size(2, 8, None, 4096, 24, 1e-4, LETTERS, 600, remove_padding=False),
    "qwen3_vl": Size(2, 8, None, 4096, 24, 1e-4, LETTERS, 600),
    "qwen3_5": Size(2, 8, None, 4096, 24, 1e-4, LETTERS, 600),
}
VISION = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")


def overrides(model: str, data: Path, rollout: str, ranks: int, size: Size) -> list[str]:
    """Return the Hydra overrides that both arms share.

    One row per micro-batch is what the stock actor is fastest with on a CPU: sdpa has no varlen kernel there and pays
    a dense mask over all rows of a micro-batch (1.4x for 2 rows of SmolLM2, 3.8x for 6 of the tiny model, in CPU
    seconds). Larger ones would credit that to the shared prefix; and a recurrent model's state would leak across packed
    rows. Checkpointing would only cost both arms time.
    """
    actor, sampler = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    reward_path, reward_name = size.reward.rsplit(":", 1)
    return [
        "+platform=cpu",
        "+ray_kwargs.ray_init.address=local",
        "trainer.v1.trainer_mode=prefix_sync",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        f"data.train_batch_size={size.prompts}",
        f"data.max_prompt_length={size.prompt_tokens}",
        f"data.max_response_length={size.response_tokens}",
        "data.filter_overlong_prompts=true",
        # Of the tiny vision models. verl measures prompts with this key, and generates with the processor's own size.
        "data.image_patch_size=4",
        "data.shuffle=false",
        "data.dataloader_num_workers=0",
        f"data.seed={SEED}",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.model.use_remove_padding={str(size.remove_padding).lower()}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"{actor}.ppo_mini_batch_size={size.prompts}",
        *(f"{key}=1" for key in MICRO_BATCHES),
        f"{actor}.optim.lr={size.lr}",
        f"{actor}.entropy_coeff=0.001",
        f"{sampler}.name={rollout}",
        # verl makes an optimizer step of n rows a prompt; of turns, `prepare` says how many sessions they are.
        f"{sampler}.n={size.rollouts * size.turns}",
        f"{sampler}.temperature=1.0",
        f"{sampler}.seed={SEED}",
        f"{sampler}.calculate_log_probs=true",
        f"reward.custom_reward_function.path={reward_path}",
        f"reward.custom_reward_function.name={reward_name}",
        "trainer.logger=[console,file]",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.total_training_steps={size.steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        *(_turns(size.turns) if size.turns > 1 else ()),
    ]


def _turns(most: int) -> list[str]:
    """Overrides for a row per turn."""
    sampler, folder = "actor_rollout_ref.rollout", RECIPES / "musique"
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return [
        f"{sampler}.multi_turn.max_assistant_turns={most}",
        f"{sampler}.agent.agent_loop_config_path={folder / 'search_turns.yaml'}",
        f"{sampler}.agent.default_agent_loop=search_turns",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH='{path}'",  # workers import the loop
    ]


def prepare(output: Path, source: Path | None, size: Size) -> tuple[Path, Path]:
    """Return the questions' file, made up unless `source` names one, and the folder of verl's parquet.

    They are MuSiQue's questions, or, where the size has no paragraphs, questions about clips.
    """
    data, count = output / "data", size.prompts * size.steps + 2
    if size.paragraphs is None:
        questions = source or output / "clips" / "questions.json"
        if source is None:
            side = max(112, 2 * round(size.frame_pixels**0.5 / 2))
            run_recipe(
                "video_rlvr/make_clips.py", output=questions.parent, clips=max(2, count // 5 + 1), seed=SEED, size=side
            )
        most = size.frame_pixels
        pixels = {"min_pixels": 64, "max_pixels": most, "image_max_pixels": most}
        run_recipe("video_rlvr/prepare.py", input=questions, output=data, val_size=1, **pixels)
    else:
        questions = source or output / "questions.jsonl"
        if source is None:
            flags = ["--short"] if size.short else []
            run_recipe("musique/make_questions.py", *flags, output=questions, num=count, seed=SEED)
        run_recipe("musique/prepare.py", input=questions, output=data, max_paragraphs=size.paragraphs, val_size=2)
        if size.turns > 1:
            rows = pq.read_table(data / "train.parquet")
            sessions = pa.array([size.rollouts] * len(rows))  # instead of rollout.n (verl's ppo/v1/agent_loop_tq.py)
            pq.write_table(rows.append_column("__rollout_n__", sessions), data / "train.parquet")
    return questions, data


def run_recipe(script: str, *flags: str, **options: object) -> None:
    """Run a script of recipes/ with these options; SystemExit where it fails, which it has explained by then."""
    args = [*flags]
    args += [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    command = [sys.executable, str(RECIPES / script), *args]
    if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"recipes/{script} failed with the message above; it ran as: {' '.join(command)}")


def run_arm(
    name: str, arguments: list[str], output: Path, size: Size, ranks: int, progress: Progress
) -> demo_verdict.Arm:
    """Train one arm and return what became of it; every second, show its phase and step."""
    log_path, metrics_path = output / f"{name}.log", output / f"{name}.jsonl"
    env = environment(metrics_path, ranks)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    command.append(f"hydra.run.dir={output / 'hydra' / name}")
    arm = demo_verdict.Arm(name, metrics_path, log_path, None, 0.0)
    task = progress.add_task(name, total=size.steps, phase="starting")
    memory = dict.fromkeys(ROLES, 0.0)
    start = moved = time.monotonic()
    shown, error = "", None
    with process_group(command, env, log_path) as process:
        while process.poll() is None:
            now, done = time.monotonic(), len(arm.steps())
            phase = f"step {done + 1}" if 0 < done < size.steps else _phase(log_path) if not done else "shutting down"
            progress.update(task, completed=done, phase=phase)
            if phase != shown:
                shown, moved = phase, now
                if not progress.console.is_terminal:
                    progress.console.print(f"{name}: {phase}, {done}/{size.steps} steps done after {now - start:.0f} s")
            if now - moved > size.limit_s:  # a slow machine needs longer in all
                error = f"no progress for {size.limit_s} s, at {phase!r}"
                break
            memory = {role: max(used, memory[role]) for role, used in memory_mib(process.pid).items()}
            time.sleep(1)
    if error is None and process.returncode:
        error = f"verl exited with status {process.returncode} at {shown!r}"
    progress.update(task, completed=len(arm.steps()), phase="failed" if error else "done")
    progress.stop_task(task)
    return demo_verdict.Arm(name, metrics_path, log_path, error, time.monotonic() - start, memory)


def _phase(log_path: Path) -> str:
    text = log_path.read_text(errors="replace")
    return next((phase for line, phase in reversed(PHASES.items()) if line in text), "importing verl")


def _free(text: str) -> Path:
    """Reader of the report's folder: it, or the first like it without a report. No run overwrites another's."""
    output = Path(os.path.abspath(text))
    names = (output if i == 1 else output.with_name(f"{output.name}-{i}") for i in itertools.count(1))
    return folder_to_write(next(name for name in names if not os.path.exists(name / "report.json")))


def _announce(size: Size, output: Path) -> str:
    """What runs, where its report will be, and how long it takes."""
    told = f"{size.steps} steps with verl's actor, then {size.steps} with the shared prefix; report in {output}"
    if size.seconds is None:
        return told
    start, step = size.seconds
    told += f"\nabout {(start + step * size.steps) / 60:.0f} minutes on two idle cores"
    load = os.getloadavg()[0]
    return told + f"; other work keeps {load:.1f} cores busy now, so longer" * (load > 1)


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="smollm2")
    parser.add_argument("--rollout", choices=["hf", "vllm"], default="hf", help="what generates the responses")
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1, help="data-parallel ranks")
    parser.add_argument("--schedule", choices=["auto", "packed", "phased"], default="auto", help="of the prefix arm")
    parser.add_argument("--steps", type=at_least(1), default=NUM_STEPS, help="training steps of each arm")
    parser.add_argument("--turns", type=at_least(1), default=1, help="rows of a session, one per turn; text models")
    parser.add_argument("--frame-pixels", type=at_least(1), help="of a video's frame, at most; vision models")
    parser.add_argument(
        "--data", type=file_to_read, help="a file of MuSiQue, or of Video-R1, instead of made-up questions"
    )
    parser.add_argument("--output", type=_free, default=str(ROOT / "outputs" / "demo"),
        help="folder of the report; where it has one already, the first free of NAME-2, NAME-3, ...")  # fmt: skip
    args = parser.parse_args()
    console = Console()
    output, size = args.output, replace(SIZES[args.model], steps=args.steps)
    if args.turns > 1 and args.model in VISION:
        parser.error(f"--turns {args.turns}: 1 of {' and '.join(VISION)}")
    if args.turns > 1:  # about as many rows
        size = replace(size, turns=args.turns, rollouts=max(2, size.rollouts // args.turns))
    if args.model in VISION:
        # Of two prompts at least on every rank: verl 0.9.1 cannot cut mini-batches of visual rows of one length.
        size = replace(size, prompts=size.prompts * args.ranks)
    if args.frame_pixels is not None:
        if args.model not in VISION or args.frame_pixels < 64:
            parser.error(f"--frame-pixels {args.frame_pixels}: of {' or '.join(VISION)}, 64 or more")
        size = replace(size, frame_pixels=args.frame_pixels)
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.error(f"another demo is writing to {output}; wait for it, or give another --output")
        return demonstrate(args, output, size, console)


def demonstrate(args: argparse.Namespace, output: Path, size: Size, console: Console) -> int:
    """Prepare model and data, train both arms one after the other, report; return the exit status."""
    for name in ARMS:  # of an earlier run
        for kind in ("log", "jsonl"):
            (output / f"{name}.{kind}").unlink(missing_ok=True)
    console.print(_announce(size, output), highlight=False, soft_wrap=True, markup=False)
    questions, data = prepare(output, args.data, size)
    if args.model == "tiny" or args.model in VISION:
        from transformers.utils.logging import disable_progress_bar

        from verl_prefix.testing import write_tiny_model, write_tiny_vlm

        disable_progress_bar()  # of one file's writing
        texts = questions.read_text().splitlines()
        if args.model == "tiny":
            model = write_tiny_model(output / "tiny", texts=texts)
        else:
            model = write_tiny_vlm(output / args.model, family=args.model, texts=texts)
    else:
        try:
            model = smollm2(ROOT / "outputs" / "models" / "smollm2-135m")
        except ValueError as error:
            raise SystemExit(str(error)) from error

    shared = overrides(model, data, args.rollout, args.ranks, size)
    # No self-check, which takes longer than a step: the report compares all of step 1 with stock's.
    options = [f"actor_rollout_ref.actor.prefix.{option}" for option in (f"schedule={args.schedule}", "verify=off")]
    arms = {"stock": ARMS["stock"], "prefix": [*ARMS["prefix"], *options]}
    if args.schedule != "packed":
        # A group's responses: the budget of stock's micro-batches, one row, would make every row a wave of its own, and
        # each backward touches all weights.
        waves = size.rollouts * size.turns * size.response_tokens
        arms["prefix"].append(f"actor_rollout_ref.actor.prefix.wave_tokens={waves}")
    if size.turns > 1:
        # A micro-batch's tokens are our budget, and a tree of which it has no room computes its trunk in every part.
        arms["prefix"] += [f"{key}={size.turns}" for key in MICRO_BATCHES]
    columns = [TextColumn("{task.description:>7}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("{task.fields[phase]}"), console=console) as progress:
        stock = run_arm("stock", [*shared, *arms["stock"]], output, size, args.ranks, progress)
        if stock.error:
            error = "not started, because the stock arm failed"
            skipped = {"name": "prefix", "error": error, "seconds": 0.0, "memory_mib": {}}
            paths = {"metrics_path": output / "prefix.jsonl", "log_path": output / "prefix.log"}
            prefix = replace(stock, **skipped, **paths)
        else:
            prefix = run_arm("prefix", [*shared, *arms["prefix"]], output, size, args.ranks, progress)
    turns = f" x {size.turns} turns" if size.turns > 1 else ""
    workload = f"{size.prompts} prompt{'s' * (size.prompts > 1)} x {size.rollouts} rollouts{turns}"
    config = {
        "model": args.model,
        "rollout": args.rollout,
        "ranks": args.ranks,
        "workload": workload,
        "seed": SEED,
        "size": asdict(size),
    }
    config |= {"shared": shared, "arms": arms}
    return demo_report.finish(demo_verdict.build(stock, prefix, size.steps, config), output, console)


if __name__ == "__main__":
    sys.exit(main())
