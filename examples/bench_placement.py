"""Tokens and balance of a training step by who places rows: verl, `prefix_sync` as it was, the engine's exchange.

Lengths alone, no model: a row costs what `auto.placement.row_cost` says of an 8B model. Writes
examples/results/placement.md (`make -C examples/results placement`).
"""

import argparse
import importlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import verl  # noqa: F401

from verl_prefix.auto.placement import place_rows, row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.tools.plan.predict import Sizes, Step
from verl_prefix.tools.report import provenance

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "b9faa82"  # the last commit whose prefix_sync placed groups on ranks, by equal row counts
# Qwen3-8B: FLOPs per token of the layers and of lm_head, per query-key pair of a layer.
SHAPE = ModelShape(2 * 6.95e9, 2 * 4096 * 151936, 4 * 32 * 128, (None,) * 36, 1.0, 1.0, 1.0, 151936)
G, ROWS, MINI_BATCHES = 8, 32, 4  # rows per prompt, rows per rank, mini-batches
# What a row sends: token ids, positions and two outputs of every token, masks and floats of response tokens.
BYTES_PROMPT, BYTES_RESPONSE = 32, 68
KINDS: dict[str, Callable[[random.Random], tuple[int, Callable[[], int]]]] = {
    "MuSiQue": lambda rng: (round(rng.gauss(2400, 400)), lambda: round(rng.lognormvariate(5.4, 0.5))),
    "video": lambda rng: (round(rng.uniform(3000, 13000)), lambda: round(rng.lognormvariate(5.4, 0.5))),
    "math": lambda rng: (round(rng.gauss(150, 40)), lambda: round(rng.lognormvariate(6.6, 0.7))),
    "heavy-tailed": lambda rng: (round(rng.lognormvariate(7.5, 0.8)), lambda: round(rng.lognormvariate(6.2, 0.9))),
}


def old_place() -> Callable:
    source = subprocess.run(
        ["git", "show", f"{BEFORE}:verl_prefix/trainer/placement.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "old_placement.py").write_text(source)
        sys.path.insert(0, folder)
        module = importlib.import_module("old_placement")
        sys.path.remove(folder)
    return module.place


def score(step: Step, dealt: list[list[list[int]]], exchange: bool) -> dict[str, float]:
    """Tokens that stock computes over those computed, time over that of perfect balance, MiB that a rank sends."""
    costs = [row_cost(SHAPE, p, s) for p, s in zip(step.prefixes, step.suffixes, strict=True)]
    tokens = longest = total = moved = 0.0
    for k in range(MINI_BATCHES):
        rows = [row for rank in dealt for row in rank[k]]
        ranks = [i for i, rank in enumerate(dealt) for _ in rank[k]]
        if exchange:
            keys, prefix, suffix = ([x[row] for row in rows] for x in (step.keys, *zip(*costs, strict=True)))
            home = place_rows(keys, prefix, suffix, ranks, len(dealt)).ranks
            moved += sum(
                BYTES_PROMPT * step.prefixes[row] + BYTES_RESPONSE * step.suffixes[row]
                for row, a, b in zip(rows, ranks, home, strict=True) if a != b
            )  # fmt: skip
            ranks = home
        loads = [0.0] * len(dealt)
        for rank, key in {(rank, step.keys[row]): row for row, rank in zip(rows, ranks, strict=True)}.items():
            tokens += step.prefixes[key]
            loads[rank[0]] += costs[key][0]
        for row, rank in zip(rows, ranks, strict=True):
            tokens += step.suffixes[row]
            loads[rank] += costs[row][1]
        longest += max(loads)
        total += sum(loads) / len(dealt)
    logical = sum(step.prefixes) + sum(step.suffixes)
    return {"ratio": logical / tokens, "imbalance": longest / total, "mib": moved / len(dealt) / 2**20,
            "time": longest}  # fmt: skip


def measure(kind: str, ranks: int, place: Callable) -> dict[str, dict[str, float]]:
    rng = random.Random(0)
    prompts = ranks * ROWS // G
    keys, prefixes, suffixes = [], [], []
    for prompt in range(prompts):
        prefix, draw = KINDS[kind](rng)
        keys += [prompt] * G
        prefixes += [max(prefix, 1)] * G
        suffixes += [min(max(draw(), 1), 16384) for _ in range(G)]

    def step(whole: bool) -> Step:
        return Step(Sizes(prompts, G, MINI_BATCHES, ranks, {}, whole=whole), SHAPE, keys, prefixes, suffixes)

    verl_dealt, dealt = step(False).dealt(), step(True).dealt()
    order, size = place(keys, prefixes, suffixes, ranks, MINI_BATCHES).order, ROWS // MINI_BATCHES
    bins = list(itertools.batched(order, size)) if hasattr(itertools, "batched") else [
        order[start : start + size] for start in range(0, len(order), size)
    ]  # fmt: skip
    before = [[list(b) for b in bins[rank * MINI_BATCHES : (rank + 1) * MINI_BATCHES]] for rank in range(ranks)]
    outcomes = {
        "verl": score(step(False), verl_dealt, False),
        "prefix_sync before": score(step(False), before, False),
        "exchange, sync": score(step(False), verl_dealt, True),
        "exchange, prefix_sync": score(step(True), dealt, True),
    }
    fastest = min(one["time"] for one in outcomes.values())
    for one in outcomes.values():
        one["time"] /= fastest
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512, 4096])
    parser.add_argument("--out", type=Path, default=ROOT / "examples/results/placement.md")
    options = parser.parse_args()
    commit = provenance("placement/1", "cpu")["git"]["commit"]
    place, names = old_place(), ("verl", "prefix_sync before", "exchange, sync", "exchange, prefix_sync")
    lines = [
        "# Placement of rows: tokens and balance", "",
        f"{G} rows per prompt, {ROWS} rows per rank, {MINI_BATCHES} mini-batches; lengths are drawn, costs those of an "
        "8B model. Each cell: tokens that stock computes over those computed / time of a step over that with perfect "
        "balance of the same work / time over the fastest of the line. MiB: what a rank sends in an update under the "
        "last. "
        f"`prefix_sync` before is that of commit {BEFORE}, by equal row counts. Made by `make -C examples/results "
        f"placement` at {commit[:7]}.", "",
        f"| lengths | ranks | {' | '.join(names)} | MiB |", "|---" * (len(names) + 3) + "|",
    ]  # fmt: skip
    for kind in KINDS:
        for ranks in options.ranks:
            start = time.perf_counter()
            outcomes = measure(kind, ranks, place)
            cells = (
                f"{one['ratio']:.2f} / {one['imbalance']:.2f} / {one['time']:.2f}" for one in map(outcomes.get, names)
            )
            lines.append(f"| {kind} | {ranks} | {' | '.join(cells)} | {outcomes[names[-1]]['mib']:.1f} |")
            print(lines[-1], json.dumps({"seconds": round(time.perf_counter() - start, 1)}), flush=True)
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
