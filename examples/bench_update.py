"""Time, added memory and gradient error of one actor update: stock, packed and phased, on CPU or CUDA, without verl.

    python examples/bench_update.py --prefix 2048 --suffix 256 --group 8 --out bench.json

An update is forward and backward of the weighted sum of all response log-probs, accumulated over the batch, on a random
HF Llama. Every arm is measured three times over: seconds (`--repeats` rounds of all arms in turn, in one process), peak
memory above model, gradients and inputs (one fresh process per arm), and the largest relative gradient error over
parameters against the truth: stock in float64 (HF's RMSNorm stays fp32), so that speed never stands without it.

- stock: HF's own forward with sdpa on one whole row at a time. No stock run needs less memory.
- stock_packed: rows packed up to the tokens of one group's packed pass, as verl's remove-padding path does. Only where
  flash_attn runs: under sdpa, HF turns such position ids into a dense T x T mask, which forgoes the flash kernel and
  repeats K/V (4 layers, hidden 256, rows of 640: 2.6 s row by row, 9.0 s with 8 rows packed), so that there row by row
  is both the faster and the smaller baseline.
- packed, phased: `schedule.Schedule`, one group per packed pass; phased in waves of `--wave-rows` suffixes.
- +checkpoint: gradient checkpointing of decoder layers. +offload: dormant prefix activations wait in pinned host memory.

All arms run lm_head on response tokens only (what `logits_to_keep` does) and bound logits in the same way: at most
`--logits-chunk` tokens at a time, checkpointed beyond one chunk. Speed-up is over the fastest stock arm with the same
checkpointing. Its ceiling is the ratio of FLOPs (`update_flops`). Not measured: optimizer, FSDP, planning (below 1 ms).
"""

import argparse
import copy
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from verl_prefix.groups import Group, group_rows
from verl_prefix.layout import Layout
from verl_prefix.schedule import Schedule, TokenBatch
from verl_prefix.testing import random_rollouts
from verl_prefix.waves import make_plan

SCHEMA = "verl_prefix.bench_update/1"
RESET_PEAK = Path("/proc/self/clear_refs")
TINY = {"prefix": 8, "suffix": 4, "group": 2, "groups_count": 1}


@dataclass(frozen=True)
class Arm:
    """What an arm runs: `path` is a schedule, "stock" or "stock_packed"."""

    path: str
    checkpoint: bool = False
    offload: bool = False

    @property
    def stock(self) -> bool:
        return self.path.startswith("stock")


ARMS = {
    "stock": Arm("stock"),
    "stock_packed": Arm("stock_packed"),
    "packed": Arm("packed"),
    "phased": Arm("phased"),
    "phased+offload": Arm("phased", offload=True),
    "stock+checkpoint": Arm("stock", checkpoint=True),
    "phased+checkpoint": Arm("phased", checkpoint=True),
}


@dataclass(frozen=True)
class Batch:
    """Equal groups of G rows: P prefix tokens, one more prompt token, S response tokens.

    `weights` [N] stand at the response tokens of the flat `tokens`. `budget` is the packed tokens of one group, P + G S.
    """

    tokens: TokenBatch
    weights: torch.Tensor
    groups: list[Group]
    prefix_len: int
    row_len: int
    budget: int

    def log_probs(self, place: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Log-probs [n, 1] of the successors of tokens `place` [n], in fp32 at least."""
        labels = self.tokens.input_ids[place + 1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return -torch.nn.functional.cross_entropy(wide, labels, reduction="none").unsqueeze(-1)

    def loss(self, place: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        return (log_probs[:, 0] * self.weights[place + 1]).sum()


def build_model(options: argparse.Namespace) -> PreTrainedModel:
    """A random Llama in `--dtype` on `--device`, its intermediate size 8/3 of hidden, with zero gradients in place."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=-(-options.hidden * 8 // 3 // 32) * 32,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.prefix + options.suffix + 1,
        tie_word_embeddings=False,
    )
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def build_batch(options: argparse.Namespace) -> Batch:
    """The rows that `options.prefix, suffix, group, groups_count` ask for, in random order."""
    rollouts = random_rollouts(
        [(options.prefix + 1, [options.suffix] * options.group)] * options.groups_count, options.vocab
    )
    rows = [torch.cat(pair) for pair in zip(rollouts.prompts, rollouts.responses, strict=True)]
    row_len = options.prefix + 1 + options.suffix
    positions = torch.arange(row_len).repeat(len(rows))
    tokens = TokenBatch(
        torch.cat(rows).to(options.device), positions.to(options.device), range(0, len(positions) + 1, row_len)
    )
    weights = [torch.cat([torch.zeros(options.prefix + 1), weight.float()]) for weight in rollouts.weights]
    groups, _ = group_rows(rollouts.prompts, [options.suffix] * len(rows))
    budget = options.prefix + options.group * options.suffix
    return Batch(tokens, torch.cat(weights).to(options.device), groups, options.prefix, row_len, budget)


def run_stock(model: PreTrainedModel, batch: Batch, rows_per_pass: int, logits_chunk: int) -> None:
    """Forward and backward of whole rows, several of them packed into one if `rows_per_pass` > 1."""
    ids, positions = batch.tokens.input_ids, batch.tokens.position_ids
    for start in range(0, len(ids), rows_per_pass * batch.row_len):
        packed = slice(start, start + rows_per_pass * batch.row_len)
        # Outputs of the last prompt token up to the last response token but one.
        kept = (positions[packed] >= batch.prefix_len) & (positions[packed] < batch.row_len - 1)
        kept = kept.nonzero().squeeze(-1)
        decoded = model.base_model(input_ids=ids[None, packed], position_ids=positions[None, packed], use_cache=False)
        pieces = list(
            zip((kept + start).split(logits_chunk), decoded.last_hidden_state[0, kept].split(logits_chunk), strict=True)
        )

        def piece_loss(place: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            return batch.loss(place, batch.log_probs(place, model.lm_head(hidden)))

        if len(pieces) == 1:
            loss = piece_loss(*pieces[0])
        else:
            loss = sum(checkpoint(piece_loss, *piece, use_reentrant=False) for piece in pieces)
        loss.backward()


def run_shared(model: PreTrainedModel, batch: Batch, schedule: str, wave_tokens: int, **options: Any) -> None:
    """Forward and backward by `Schedule`, with `options` for it."""

    def step(groups: list[Group], layout: Layout, log_probs: torch.Tensor) -> torch.Tensor:
        return batch.loss(layout.suffix_index.to(log_probs.device), log_probs)

    plan = make_plan(batch.groups, batch.budget, schedule, wave_tokens)
    Schedule(model, batch.log_probs, step, torch.Tensor.backward, **options).run(batch.tokens, plan)


def run_arm(model: PreTrainedModel, arm: Arm, batch: Batch, options: argparse.Namespace) -> float:
    """Run one update on zeroed gradients and return its seconds."""
    model.set_attn_implementation("flash_attention_2" if arm.path == "stock_packed" else "sdpa")
    if arm.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    model.zero_grad(set_to_none=False)
    cuda = batch.tokens.input_ids.is_cuda
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    if arm.stock:
        rows_per_pass = max(1, batch.budget // batch.row_len) if arm.path == "stock_packed" else 1
        run_stock(model, batch, rows_per_pass, options.logits_chunk)
    else:
        extra = {"offload": True} if arm.offload else {}
        wave_tokens = options.wave_rows * (batch.row_len - batch.prefix_len - 1)
        run_shared(model, batch, arm.path, wave_tokens, logits_chunk=options.logits_chunk, **extra)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def update_flops(model: PreTrainedModel, arm: Arm, options: argparse.Namespace) -> float:
    """FLOPs of one update in matmuls: linear layers, causal attention, lm_head.

    Forward, per layer: 2 FLOPs per weight and token, and 4 H D per (query, key) pair; lm_head: 2 per weight and
    response token. Backward counts as two forwards; checkpointing adds a third of the layers, not of lm_head. Left out:
    norms, softmax, what flash backward recomputes, and lm_head forwards repeated beyond one logits chunk.
    """
    prefix, suffix, group = options.prefix, options.suffix, options.group
    row = prefix + 1 + suffix
    if arm.stock:
        tokens, pairs = group * row, group * row * (row + 1) / 2
    else:
        tokens = prefix + group * suffix
        pairs = prefix * (prefix + 1) / 2 + group * suffix * (prefix + (suffix + 1) / 2)
    linear = sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, torch.nn.Linear))
    layers = 2 * linear * tokens + model.config.num_hidden_layers * 4 * options.hidden * pairs
    head = 2 * model.lm_head.weight.numel() * group * suffix
    return options.groups_count * ((4 if arm.checkpoint else 3) * layers + 3 * head)


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def gradient_error(model: PreTrainedModel, truth: dict[str, torch.Tensor]) -> float:
    """The largest ||g - truth|| / ||truth|| over parameters, in float64."""
    return max(
        ((parameter.grad.double() - truth[name].double()).norm() / truth[name].double().norm()).item()
        for name, parameter in model.named_parameters()
    )


def added_peak(options: argparse.Namespace, name: str) -> int:
    """Bytes that one update adds at its peak to model, gradients, inputs and what a tiny update leaves behind."""
    arm, model, batch = ARMS[name], build_model(options), build_batch(options)
    run_arm(model, arm, build_batch(argparse.Namespace(**vars(options) | TINY)), options)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_arm(model, arm, batch, options)
        return torch.cuda.max_memory_allocated() - before
    RESET_PEAK.write_text("5")  # proc(5): sets VmHWM back to the current VmRSS, so that building does not hide the peak
    before = _resident("VmRSS")
    run_arm(model, arm, batch, options)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def measure(options: argparse.Namespace, argv: list[str], console: Console) -> dict[str, Any]:
    """Run everything that was asked for; returns the report's `truth` and `arms`."""
    model, batch = build_model(options), build_batch(options)
    costs = {name: update_flops(model, ARMS[name], options) for name in options.arms}
    arms: dict[str, Any] = {name: {"seconds": [], "grad_error": 0.0, "flops": costs[name]} for name in options.arms}
    truth_cost = (2 if options.truth == "float64" else 1) * update_flops(model, ARMS["stock"], options)
    rounds = options.repeats + (not options.no_memory)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("ETA"))
    # Steps take minutes, and progress counts FLOPs: speed is estimated over the whole run.
    with Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=1e6) as progress:
        task = progress.add_task("warm-up", total=truth_cost + rounds * sum(costs.values()))
        tiny = build_batch(argparse.Namespace(**vars(options) | TINY))
        for name in options.arms:
            run_arm(model, ARMS[name], tiny, options)
        progress.update(task, description=f"truth: stock in {options.truth_dtype}")
        double = copy.deepcopy(model).double() if options.truth == "float64" else model
        progress.console.print(
            f"truth in {options.truth_dtype}: {run_arm(double, ARMS['stock'], batch, options):.2f} s"
        )
        truth = gradients(double)
        del double
        progress.advance(task, truth_cost)
        for turn in range(options.repeats):
            for name, arm in arms.items():
                progress.update(task, description=f"round {turn + 1}/{options.repeats} {name}")
                arm["seconds"].append(run_arm(model, ARMS[name], batch, options))
                arm["grad_error"] = max(arm["grad_error"], gradient_error(model, truth))
                progress.console.print(f"round {turn + 1} {name}: {arm['seconds'][-1]:.2f} s")
                progress.advance(task, costs[name])
        del model, truth
        if options.device == "cuda":
            torch.cuda.empty_cache()
        for name, arm in {} if options.no_memory else arms.items():
            progress.update(task, description=f"memory {name}")
            command = [sys.executable, str(Path(__file__).resolve()), *argv, "--memory-of", name]
            child = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            arm["added_peak_bytes"] = int(child.stdout.split()[-1])
            progress.console.print(f"memory {name}: {arm['added_peak_bytes'] / 2**20:.0f} MiB")
            progress.advance(task, costs[name])
    return {"truth": f"stock in {options.truth_dtype}", "arms": compare(arms)}


def compare(arms: dict[str, Any]) -> dict[str, Any]:
    """Adds median, speed-up, ceiling and their ratio to every arm; None where no stock arm to compare with ran."""
    for arm in arms.values():
        arm["median_s"] = statistics.median(arm["seconds"])
    for name, arm in arms.items():
        rivals = [n for n in arms if ARMS[n].stock and ARMS[n].checkpoint == ARMS[name].checkpoint]
        baseline = min(rivals, key=lambda n: arms[n]["median_s"], default=None)
        speedup = arms[baseline]["median_s"] / arm["median_s"] if baseline else None
        ceiling = arms[baseline]["flops"] / arm["flops"] if baseline else None
        of_ceiling = speedup / ceiling if baseline else None
        arm |= {"baseline": baseline, "speedup": speedup, "ceiling": ceiling, "of_ceiling": of_ceiling}
    return arms


def show(report: dict[str, Any], console: Console) -> None:
    """Print one line per arm."""
    size = report["config"]
    table = Table(title=f"P={size['prefix']} S={size['suffix']} G={size['group']} x {size['groups_count']}")
    for title in ("arm", "seconds, median (min-max)", "speed-up", "ceiling", "of it", "added MiB", "gradient error"):
        table.add_column(title, justify="left" if title == "arm" else "right")
    for name, arm in report["arms"].items():
        seconds = f"{arm['median_s']:.2f} ({min(arm['seconds']):.2f}-{max(arm['seconds']):.2f})"
        ratios = [f"{arm[key]:.2f}" if arm["baseline"] else "-" for key in ("speedup", "ceiling", "of_ceiling")]
        memory = f"{arm['added_peak_bytes'] / 2**20:.0f}" if "added_peak_bytes" in arm else "-"
        table.add_row(name, seconds, *ratios, memory, f"{arm['grad_error']:.1e}")
    console.print(table)
    console.print(f"gradient error: largest relative over parameters, against {report['truth']}; {report['device']}")


def git_state() -> tuple[str | None, bool]:
    """Commit, and whether tracked or new files differ from it (earlier results, *.json, do not count).

    (None, True) outside of a git checkout.
    """
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    status = subprocess.run([*git, "status", "--porcelain", "--", ":/", ":(exclude,top)*.json"], capture_output=True)
    return commit.stdout.strip() or None, bool(status.returncode or status.stdout)


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = (
        [x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x] if info.exists() else []
    )
    return names[0] if names else platform.processor()


def parse(argv: list[str]) -> argparse.Namespace:
    """Options, completed and checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"prefix": 2048, "suffix": 256, "group": 8, "groups-count": 1, "hidden": 512, "layers": 8, "heads": 8}
    numbers |= {"kv-heads": 2, "vocab": 32000, "wave-rows": 2, "logits-chunk": 4096, "repeats": 3}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} by default")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--truth", choices=["float64", "stock"], default="float64")
    parser.add_argument("--arms", default=None, help=f"comma-separated, of {', '.join(ARMS)}; all that run by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=None, help="write a JSON report there")
    parser.add_argument("--allow-dirty", action="store_true", help="write it from uncommitted files too")
    parser.add_argument("--no-memory", action="store_true", help="time and gradient error only")
    parser.add_argument("--memory-of", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in (*numbers, "threads"):
        if (value := getattr(options, name.replace("-", "_"))) < 1:
            parser.error(f"--{name}={value}: use 1 or more")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    options.truth_dtype = "float64" if options.truth == "float64" else options.dtype
    impossible = {}
    if options.device != "cuda" or options.dtype == "float32" or not importlib.util.find_spec("flash_attn"):
        impossible["stock_packed"] = "it needs flash_attn, --device cuda and --dtype bfloat16 or float16"
    if "offload" not in inspect.signature(Schedule).parameters:
        impossible["phased+offload"] = "this version's Schedule has no offload"
    options.arms = options.arms.split(",") if options.arms else [name for name in ARMS if name not in impossible]
    for name in options.arms:
        if name not in ARMS or name in impossible:
            parser.error(f"--arms: {name!r} cannot run: {impossible.get(name, f'use some of {list(ARMS)}')}")
    if not options.no_memory and options.device == "cpu" and not RESET_PEAK.exists():
        parser.error(f"peak memory on CPU is read from {RESET_PEAK}, which this system lacks: add --no-memory")
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(added_peak(options, options.memory_of))
        return 0
    commit, dirty = git_state()
    if options.out and dirty and not options.allow_dirty:
        print("the git tree has uncommitted files: commit them, or add --allow-dirty", file=sys.stderr)
        return 2
    console = Console()
    report = {
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "device": device_name(options.device),
        "versions": {"python": platform.python_version()}
        | {p: importlib.metadata.version(p) for p in ("torch", "transformers")},
        "config": {key: value for key, value in vars(options).items() if key not in ("out", "memory_of")},
        **measure(options, argv, console),
    }
    show(report, console)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
