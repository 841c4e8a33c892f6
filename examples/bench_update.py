"""Time, added memory and gradient error of one actor update: stock, packed and phased, on CPU or CUDA, without verl.

    python examples/bench_update.py --prefix 2048 --suffix 256 --group 8 --out bench.json

An update is forward and backward of the weighted sum of all response log-probs of a random HF Llama. Measured per arm:
seconds (`--repeats` rounds of all arms in turn, one process), peak memory above model, gradients and inputs (one fresh
process per arm), and the largest relative gradient error of a parameter against the truth: stock in float64 (HF's
RMSNorm stays fp32). P prefix tokens, one more prompt token, S response tokens per row, G rows per group.

- stock: HF's own forward with sdpa on one whole row at a time, lm_head on every token, as verl's FSDP engine runs it.
- stock_lean: the same, with lm_head on response tokens only, as ours. No stock run is faster or needs less memory.
- stock_packed: rows packed up to the tokens of one group's packed pass, as verl's remove-padding path does. Only where
  flash_attn runs: under sdpa, HF turns such position ids into a dense T x T mask and repeats K/V (4 layers, hidden 256,
  8 rows of 640 tokens on one core: 2.6 s row by row, 9.0 s packed), so that row by row is the stronger baseline.
- packed, phased: `schedule.Schedule`, one group per packed pass; phased in waves of `--wave-rows` suffixes.
- +checkpoint: gradient checkpointing of decoder layers. +offload: dormant prefix activations wait in host memory (on
  CPU that is the same memory, and only its cost shows).

All arms but `stock` run lm_head on response tokens only (what `logits_to_keep` does) and bound logits in the same way:
at most `--logits-chunk` tokens at a time, checkpointed beyond one chunk. Speed-up: over the fastest stock arm with the
same checkpointing. Its ceiling is the ratio of FLOPs (`update_flops`). Not measured: optimizer, FSDP, grouping of rows.
"""

import argparse
import copy
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
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
# A path, "stock" or a schedule, and at most one thing added to it.
ARMS = (
    "stock", "stock_lean", "stock_packed", "packed", "phased", "phased+offload",
    "stock+checkpoint", "stock_lean+checkpoint", "phased+checkpoint",
)  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Rows of one length; `weights` [N] of log-probs stand at the response tokens of the flat `tokens`."""

    tokens: TokenBatch
    weights: torch.Tensor
    groups: list[Group]

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
        vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=-(-options.hidden * 8 // 3 // 32) * 32,
        num_hidden_layers=options.layers, num_attention_heads=options.heads, num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.prefix + options.suffix + 1,
    )  # fmt: skip
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def build_batch(options: argparse.Namespace, **size: int) -> Batch:
    """The rows that `options.prefix, suffix, group, groups_count` or `size` ask for, in random order."""
    prefix, suffix, group, count = ({**vars(options), **size}[name] for name in TINY)
    rollouts = random_rollouts([(prefix + 1, [suffix] * group)] * count, options.vocab)
    flat = torch.stack([torch.cat(pair) for pair in zip(rollouts.prompts, rollouts.responses, strict=True)])
    weights = torch.nn.functional.pad(torch.stack(rollouts.weights).float(), (prefix + 1, 0))
    positions = torch.arange(flat.shape[1]).expand_as(flat)
    flat, weights, positions = (x.flatten().to(options.device) for x in (flat, weights, positions))
    tokens = TokenBatch(flat, positions, range(0, len(flat) + 1, prefix + 1 + suffix))
    groups, _ = group_rows(rollouts.prompts, [suffix] * group * count)
    return Batch(tokens, weights, groups)


def run_stock(model: PreTrainedModel, batch: Batch, rows_per_pass: int, logits_chunk: int | None) -> None:
    """Forward and backward of whole rows, several of them packed into one if `rows_per_pass` > 1; `logits_chunk` None:
    logits of all tokens at once."""

    def loss(place: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return batch.loss(place, batch.log_probs(place, model.lm_head(hidden)))

    ids, positions = batch.tokens.input_ids, batch.tokens.position_ids
    prefix_len, row_len = batch.groups[0].prefix_len, batch.tokens.offsets[1]
    for place in torch.arange(len(ids), device=ids.device).split(rows_per_pass * row_len):
        decoded = model.base_model(input_ids=ids[None, place], position_ids=positions[None, place], use_cache=False)
        if logits_chunk is None:
            logits = model.lm_head(decoded.last_hidden_state[0, :-1])
            (batch.log_probs(place[:-1], logits)[:, 0] * batch.weights[place[1:]]).sum().backward()
            continue
        # The last prompt token up to the last response token but one: their outputs are the responses' log-probs.
        kept = place.view(-1, row_len)[:, prefix_len:-1].flatten()
        hidden = decoded.last_hidden_state[0, kept - place[0]]
        pieces = list(zip(kept.split(logits_chunk), hidden.split(logits_chunk), strict=True))
        whole = len(pieces) == 1
        sum(loss(*p) if whole else checkpoint(loss, *p, use_reentrant=False) for p in pieces).backward()


def run_shared(model: PreTrainedModel, batch: Batch, schedule: str, wave_tokens: int, **options: Any) -> None:
    """Forward and backward by `Schedule`, with `options` for it."""

    def step(groups: list[Group], layout: Layout, log_probs: torch.Tensor) -> torch.Tensor:
        return batch.loss(layout.suffix_index.to(log_probs.device), log_probs)

    plan = make_plan(batch.groups, batch.groups[0].num_physical_tokens, schedule, wave_tokens)
    Schedule(model, batch.log_probs, step, torch.Tensor.backward, **options).run(batch.tokens, plan)


def run_arm(model: PreTrainedModel, arm: str, batch: Batch, options: argparse.Namespace) -> float:
    """Run one update on zeroed gradients and return its seconds."""
    path, _, added = arm.partition("+")
    model.set_attn_implementation("flash_attention_2" if path == "stock_packed" else "sdpa")
    model.gradient_checkpointing_disable()
    if added == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad(set_to_none=False)
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    group = batch.groups[0]
    if path.startswith("stock"):
        rows_per_pass = group.num_physical_tokens // batch.tokens.offsets[1] if path == "stock_packed" else 1
        run_stock(model, batch, max(1, rows_per_pass), None if path == "stock" else options.logits_chunk)
    else:
        extra = {"logits_chunk": options.logits_chunk} | ({"offload": True} if added == "offload" else {})
        run_shared(model, batch, path, wave_tokens=options.wave_rows * group.suffix_lens[0], **extra)
    synchronize()
    return time.perf_counter() - start


def update_flops(model: PreTrainedModel, arm: str, options: argparse.Namespace) -> float:
    """FLOPs of one update in matmuls: linear layers, causal attention, lm_head.

    Forward, per layer: 2 FLOPs per weight and token, and 4 H D per (query, key) pair; lm_head: 2 per weight and token
    that it sees. Backward counts as two forwards; checkpointing adds a third of the layers, not of lm_head. Left out:
    norms, softmax, rotary angles, what flash backward recomputes, lm_head forwards repeated beyond one logits chunk.
    """
    prefix, suffix, group = options.prefix, options.suffix, options.group
    row = prefix + 1 + suffix
    if arm.startswith("stock"):
        tokens, pairs = group * row, group * row * (row + 1) / 2
    else:
        tokens = prefix + group * suffix
        pairs = prefix * (prefix + 1) / 2 + group * suffix * (prefix + (suffix + 1) / 2)
    linear = sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, torch.nn.Linear))
    layers = 2 * linear * tokens + model.config.num_hidden_layers * 4 * options.hidden * pairs
    head = 2 * model.lm_head.weight.numel() * group * (row - 1 if arm.partition("+")[0] == "stock" else suffix)
    return options.groups_count * ((4 if "checkpoint" in arm else 3) * layers + 3 * head)


def gradient_error(model: PreTrainedModel, truth: dict[str, torch.Tensor]) -> float:
    """The largest ||g - truth|| / ||truth|| over parameters, in float64."""
    grads = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    return max(((grads[name] - truth[name].double()).norm() / truth[name].double().norm()).item() for name in truth)


def added_peak_mib(options: argparse.Namespace, arm: str) -> float:
    """MiB that one update adds at its peak to model, gradients, inputs and what a tiny update leaves behind.

    To be called in a fresh process: memory that an earlier run freed and the process still holds would hide a part.
    """
    torch.set_num_threads(options.threads)
    model, batch = build_model(options), build_batch(options)
    run_arm(model, arm, build_batch(options, **TINY), options)
    before = reset_peak_mib(options.device)
    run_arm(model, arm, batch, options)
    return memory_mib(options.device)[1] - before


def reset_peak_mib(device: str) -> float:
    """Forgets the peak; returns MiB in use now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        RESET_PEAK.write_text("5")  # proc(5): sets VmHWM back to VmRSS, so that building does not hide the peak
    return memory_mib(device)[0]


def memory_mib(device: str) -> list[float]:
    """In use now, and at the peak."""
    if device == "cuda":
        return [torch.cuda.memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20]
    status = Path("/proc/self/status").read_text()
    return [int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) / 2**10 for field in ("VmRSS", "VmHWM")]


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run everything that was asked for; returns the report's `truth` and `arms`."""
    model, batch = build_model(options), build_batch(options)
    costs = {name: update_flops(model, name, options) for name in ARMS}
    truth_cost = (2 if options.truth == "float64" else 1) * costs["stock"]
    total = truth_cost + (options.repeats + (not options.no_memory)) * sum(costs[name] for name in options.arms)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("ETA"))
    # Progress counts FLOPs, and one step may take minutes: its speed is estimated over the whole run.
    with Progress(*columns, TimeRemainingColumn(), console=console, speed_estimate_period=1e6) as progress:
        task = progress.add_task("warm-up", total=total)

        def step(text: str, cost: float, run: Callable[..., float], *args: Any) -> float:
            progress.update(task, description=text)
            value = run(*args)
            progress.console.print(f"{text}: {value:.2f}")
            progress.advance(task, cost)
            return value

        for name in options.arms:
            run_arm(model, name, build_batch(options, **TINY), options)
        truth_name = f"stock in {'float64' if options.truth == 'float64' else options.dtype}"
        reference = copy.deepcopy(model).double() if options.truth == "float64" else model
        step(f"truth: {truth_name}, seconds", truth_cost, run_arm, reference, "stock", batch, options)
        truth = {name: parameter.grad.clone() for name, parameter in reference.named_parameters()}
        arms = {name: {"seconds": [], "grad_error": 0.0, "flops": costs[name]} for name in options.arms}
        for turn in range(1, options.repeats + 1):
            for name, arm in arms.items():
                text = f"round {turn}/{options.repeats} {name}, seconds"
                arm["seconds"].append(step(text, costs[name], run_arm, model, name, batch, options))
                arm["grad_error"] = max(arm["grad_error"], gradient_error(model, truth))
        del model, reference, truth
        if options.device == "cuda":
            torch.cuda.empty_cache()
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # glibc in the fresh processes gives freed memory back at once
        for name, arm in {} if options.no_memory else arms.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                result = fresh.submit(added_peak_mib, options, name).result
                arm["added_peak_mib"] = step(f"added memory of {name}, MiB", costs[name], result)
    return {"truth": truth_name, "arms": arms}


def compare(arms: dict[str, Any]) -> None:
    """Adds median, speed-up, ceiling and their ratio to every arm that ran together with its stock arm."""
    for arm in arms.values():
        arm["median_s"] = statistics.median(arm["seconds"])
    for name, arm in arms.items():
        rivals = [other for other in arms if "stock" in other and ("checkpoint" in other) == ("checkpoint" in name)]
        if rivals:
            arm["baseline"] = min(rivals, key=lambda other: arms[other]["median_s"])
            arm["speedup"], arm["ceiling"] = (arms[arm["baseline"]][key] / arm[key] for key in ("median_s", "flops"))
            arm["of_ceiling"] = arm["speedup"] / arm["ceiling"]


def show(report: dict[str, Any], console: Console) -> None:
    """Print one line per arm."""
    size = report["config"]
    table = Table(title=f"P={size['prefix']} S={size['suffix']} G={size['group']} x {size['groups_count']}")
    for title in ("arm", "seconds, median (min-max)", "speed-up", "ceiling", "of it", "added MiB", "gradient error"):
        table.add_column(title, justify="left" if title == "arm" else "right", no_wrap=True)
    for name, arm in report["arms"].items():
        seconds = f"{arm['median_s']:.2f} ({min(arm['seconds']):.2f}-{max(arm['seconds']):.2f})"
        others = [f"{arm[k]:.2f}" if k in arm else "-" for k in ("speedup", "ceiling", "of_ceiling", "added_peak_mib")]
        table.add_row(name, seconds, *others, f"{arm['grad_error']:.1e}")
    console.print(table)
    console.print(f"gradient error: largest relative one of a parameter, against {report['truth']}")


def git_state() -> dict[str, Any]:
    """Commit, and whether files other than *.json (earlier results) differ from it; None and True outside of git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    status = subprocess.run([*git, "status", "--porcelain", "--", ":/", ":(exclude,top)*.json"], capture_output=True)
    return {"commit": commit.stdout.strip() or None, "dirty": bool(status.returncode or status.stdout)}


def header(schema: str, options: argparse.Namespace, git: dict[str, Any]) -> dict[str, Any]:
    """What every report says first: code, machine and sizes."""
    return {
        "schema": schema,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **git,
        "device": device_name(options.device),
        "load_average": os.getloadavg()[0],
        "versions": {"python": platform.python_version()} | {m.__name__: m.__version__ for m in (torch, transformers)},
        "config": {key: value for key, value in vars(options).items() if key != "out"},
    }


def device_name(device: str) -> str:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "")
    return torch.cuda.get_device_name() if device == "cuda" else cpu[1] if cpu else platform.machine()


def parse(argv: list[str]) -> argparse.Namespace:
    """Options, completed and checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"prefix": 2048, "suffix": 256, "group": 8, "groups-count": 1, "hidden": 512, "layers": 8, "heads": 8}
    numbers |= {"kv-heads": 2, "vocab": 32000, "wave-rows": 2, "logits-chunk": 4096, "repeats": 3}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--truth", choices=["float64", "stock"], default="float64")
    parser.add_argument("--arms", default=None, help=f"comma-separated, of {', '.join(ARMS)}; all that run by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=None, help="write a JSON report there")
    parser.add_argument("--allow-dirty", action="store_true", help="write it from uncommitted files too")
    parser.add_argument("--no-memory", action="store_true", help="time and gradient error only")
    options = parser.parse_args(argv)
    for name in (*numbers, "threads"):
        if (value := getattr(options, name.replace("-", "_"))) < 1:
            parser.error(f"--{name}={value}: use 1 or more")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    impossible = {}
    if options.device != "cuda" or options.dtype == "float32" or not importlib.util.find_spec("flash_attn"):
        impossible["stock_packed"] = "it needs flash_attn, --device cuda and --dtype bfloat16 or float16"
    options.arms = options.arms.split(",") if options.arms else [name for name in ARMS if name not in impossible]
    for name in options.arms:
        if name not in ARMS or name in impossible:
            parser.error(f"--arms: {name!r} cannot run: {impossible.get(name, f'use some of {list(ARMS)}')}")
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out={options.out}: no directory {options.out.parent}; create it")
    if not options.no_memory and options.device == "cpu" and not RESET_PEAK.exists():
        parser.error(f"peak memory on CPU is read from {RESET_PEAK}, which this system lacks: add --no-memory")
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    git = git_state()
    if options.out and git["dirty"] and not options.allow_dirty:
        print("the git tree has uncommitted files: commit them, or add --allow-dirty", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 120)
    report = header(SCHEMA, options, git) | measure(options, console)
    compare(report["arms"])
    show(report, console)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
