"""What schedule=auto predicts and chooses, against what was measured, on CPU or CUDA without verl.

    python examples/bench_gate.py --out gate.json

One update per row of P/S/G (prefix tokens, response tokens, rows of a group), stock and ours interleaved, `--repeats`
rounds, medians. Both have the same token budget, one whole row: the stock arm (lm_head on every token) is that of
bench_update.py, ours is the plan that the gate chose. Rates are measured once, as the engine does at its first batch.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bench_update
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedModel

from verl_prefix.gate import Gate
from verl_prefix.groups import Group
from verl_prefix.layout import Layout
from verl_prefix.models import model_shape
from verl_prefix.schedule import Schedule
from verl_prefix.waves import Plan, make_plan

SCHEMA = "verl_prefix.bench_gate/1"
ROWS = ((2048, 256, 8), (512, 512, 8), (100, 600, 8), (64, 64, 2))
MIN_SPEEDUP = 1.05  # the default of actor.prefix.min_speedup


def measure(argv: list[str], progress: Progress) -> list[dict[str, Any]]:
    """One result per row of `ROWS`."""
    options = bench_update.parse(argv)
    longest = max(p + s for p, s, _ in ROWS)
    options.prefix, options.suffix = longest - 1, 1  # for the model's positions
    model = bench_update.build_model(options)
    shape = model_shape(model, model.dtype)
    device = model.device
    gate = Gate(
        shape, False, options.logits_chunk, MIN_SPEEDUP, None, False, "", lambda values: values,
        lambda outputs, step, backward: Schedule(model, outputs, step, backward), model.zero_grad,
    )  # fmt: skip
    gate._know(False, longest * 8, device)
    results = []
    for prefix, suffix, group in ROWS:
        options.prefix, options.suffix, options.group = prefix, suffix, group
        batch = bench_update.build_batch(options)
        budget = prefix + 1 + suffix
        chosen = gate.choose(batch.groups, budget, None, False, device, forward_only=False)
        plan = chosen or make_plan(batch.groups, budget, "auto")
        arms = {
            "stock": lambda batch=batch: bench_update.run_arm(model, "stock", batch, options),
            "ours": lambda batch=batch, plan=plan: run_plan(model, batch, plan, options.logits_chunk),
        }
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for run in arms.values():
            run()
        task = progress.add_task(f"P={prefix} S={suffix} G={group}", total=options.repeats)
        for _ in range(options.repeats):
            for arm, run in arms.items():
                seconds[arm].append(run())
            progress.advance(task)
        medians = {arm: statistics.median(found) for arm, found in seconds.items()}
        measured = medians["stock"] / medians["ours"]
        phased = any(work.waves is not None for work in plan.works)
        choice = "stock" if chosen is None else "phased" if phased else "packed"
        results.append(
            dict(prefix=prefix, suffix=suffix, group=group, seconds=seconds, predicted=gate.speedup, measured=measured,
                 choice=choice, of_stock=measured if chosen else 1.0)
        )  # fmt: skip
    return results


def run_plan(model: PreTrainedModel, batch: bench_update.Batch, plan: Plan, logits_chunk: int) -> float:
    """Seconds of one update by this plan, on zeroed gradients."""

    def step(groups: list[Group], layout: Layout, log_probs: torch.Tensor) -> torch.Tensor:
        return batch.loss(layout.suffix_index.to(log_probs.device), log_probs)

    model.zero_grad(set_to_none=False)
    start = time.perf_counter()
    Schedule(model, batch.log_probs, step, torch.Tensor.backward, logits_chunk=logits_chunk).run(batch.tokens, plan)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(argv: list[str]) -> int:
    options = bench_update.parse(argv)
    git = bench_update.git_state()
    if options.out and git["dirty"] and not options.allow_dirty:
        print("the git tree has uncommitted files: commit them, or add --allow-dirty", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 120)
    with Progress(console=console) as progress:
        results = measure(argv, progress)
    table = Table("P", "S", "G", "choice", "predicted", "measured", "prediction off by", "against stock")
    for row in results:
        off = f"{row['predicted'] / row['measured'] - 1:+.0%}"
        numbers = [f"{row[name]:.2f}" for name in ("predicted", "measured")]
        sizes = [str(row[name]) for name in ("prefix", "suffix", "group")]
        table.add_row(*sizes, row["choice"], *numbers, off, f"{row['of_stock']:.2f}")
    console.print(table)
    if options.out:
        report = bench_update.header(SCHEMA, options, git) | {"rows": results}
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
