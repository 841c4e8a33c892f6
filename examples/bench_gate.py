"""What schedule=auto predicts and chooses, against what was measured, on CPU or CUDA without verl.

    python examples/bench_gate.py --out gate.json

One update per row of P/S/G (prefix tokens, response tokens, rows of a group), stock and packed interleaved, `--repeats`
rounds, medians. Rates are measured once (`cost.calibrate`, as the engine does at its first batch). The model, the stock
arm (one whole row at a time, lm_head on every token) and its FLOPs are those of bench_update.py.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import bench_update
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from verl_prefix import cost
from verl_prefix.gate import Gate
from verl_prefix.models import model_shape
from verl_prefix.schedule import Schedule
from verl_prefix.waves import make_plan

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
        shape, False, MIN_SPEEDUP, None, False, "", lambda values: values,
        lambda outputs, step, backward: Schedule(model, outputs, step, backward), model.zero_grad,
    )  # fmt: skip
    gate._know(False, longest * 8, device)
    rates = gate.profile.update
    results = []
    for prefix, suffix, group in ROWS:
        options.prefix, options.suffix, options.group = prefix, suffix, group
        batch = bench_update.build_batch(options)
        seconds: dict[str, list[float]] = {"stock": [], "packed": []}
        for arm in seconds:
            bench_update.run_arm(model, arm, batch, options)
        task = progress.add_task(f"P={prefix} S={suffix} G={group}", total=options.repeats)
        for _ in range(options.repeats):
            for arm, found in seconds.items():
                found.append(bench_update.run_arm(model, arm, batch, options))
            progress.advance(task)
        # The stock arm takes one row per pass, so its budget is a row.
        budget = prefix + 1 + suffix
        predicted = rates.seconds(shape, cost.stock_passes(shape, batch.groups, budget, False)) / rates.seconds(
            shape, cost.plan_passes(shape, make_plan(batch.groups, 10**9, "packed"))
        )
        medians = {arm: statistics.median(found) for arm, found in seconds.items()}
        measured = medians["stock"] / medians["packed"]
        choice = "packed" if predicted >= MIN_SPEEDUP else "stock"
        results.append(
            dict(prefix=prefix, suffix=suffix, group=group, seconds=seconds, predicted=predicted, measured=measured,
                 choice=choice, of_stock=measured if choice == "packed" else 1.0)
        )  # fmt: skip
    return results


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
