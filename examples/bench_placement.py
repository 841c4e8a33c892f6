"""Tokens and balance of a training step by who places rows: verl, `prefix_sync` as it was, the engine's exchange.

Lengths alone, no model: a row costs what `auto.placement.row_cost` says of an 8B model. Writes
examples/results/placement.md, and with --turns placement_turns.md (`make -C examples/results placement`).
"""

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
from typing import NamedTuple

import numpy as np
import torch
import verl  # noqa: F401

from verl_prefix.auto.placement import place_rows, row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.trees import mix
from verl_prefix.engine.travel.row_table import RowTable
from verl_prefix.engine.travel.session_pieces import LAST_CUTS
from verl_prefix.tools.arguments import Parser, file_to_write
from verl_prefix.tools.plan.predict import Sizes, Step
from verl_prefix.tools.report import provenance, table
from verl_prefix.trainer.mini_batches import fill_mini_batches, whole_prompts

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


# Turns of so many sessions.
TURNS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "5 turns": lambda rng, n: np.full(n, 5),
    "1 to 20 turns": lambda rng, n: rng.integers(1, 21, n),
    "1 to 20, a tenth 40": lambda rng, n: np.where(rng.random(n) < 0.1, 40, rng.integers(1, 21, n)),
}
SESSIONS = 8


class Turns(NamedTuple):
    """Rows of sessions, session by session, and their pieces, as `session_pieces.describe_pieces` has them.

    Of rows [rows]: uid, session, turn, prompt and length. Of pieces [pieces]: row, digest, tokens and cost.
    """

    uid: np.ndarray
    session: np.ndarray
    turn: np.ndarray
    prompt: np.ndarray
    length: np.ndarray
    row: np.ndarray
    digest: np.ndarray
    tokens: np.ndarray
    cost: np.ndarray


def mixed(x: np.ndarray) -> np.ndarray:
    return mix(torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64))).numpy()


def draw_turns(kind: str, prompts: int) -> Turns:
    rng = np.random.default_rng(0)
    num = prompts * SESSIONS
    turns, first = TURNS[kind](rng, num), rng.normal(2000, 300, prompts).clip(100).astype(int).repeat(SESSIONS)
    rows, pieces, base, ends = [], [], 0, [(first, np.arange(num) // SESSIONS)]
    for turn in range(turns.max()):
        here = np.flatnonzero(turns > turn)
        prompt, response = (
            ends[-1][0][here],
            rng.lognormal(5.9, 0.4, len(here)).clip(8).astype(int),
        )  # 365, thinking too
        rows.append((here // SESSIONS, here, np.full(len(here), turn), prompt, prompt + response))
        before, row = np.zeros(len(here), int), base + np.arange(len(here))
        for end, digest in ends:
            pieces.append((row, digest[here], before, end[here], np.zeros(len(here), int)))
            before = end[here]
        pieces.append((row, here * 256 + turn + 2**40, before, prompt, response))
        base += len(here)
        said, tool = (rng.lognormal(mean, 0.5, num).clip(4).astype(int) for mean in (4.5, 5.9))
        for i, more in enumerate((said, tool)):
            ends.append((ends[-1][0] + more, (np.arange(num) * 256 + 2 * turn + i) + 2**41))
    row, digest, start, end, response = (np.concatenate(column) for column in zip(*pieces, strict=True))
    upto = np.array([row_cost(SHAPE, n, 0)[0] for n in range(int((end + response).max()) + 1)])
    head = (row_cost(SHAPE, 100, 10)[1] - upto[110] + upto[100]) / 10
    cost = upto[end + response] - upto[start] + head * response
    columns = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Turns(*columns, row, mixed(digest), end + response - start, cost)


def some_turns(all_rows: Turns, rows: np.ndarray) -> Turns:
    """`rows` alone, in their order."""
    place = np.full(len(all_rows.uid), -1)
    place[rows] = np.arange(len(rows))
    kept = np.flatnonzero(place[all_rows.row] >= 0)
    kept = kept[np.argsort(place[all_rows.row[kept]], kind="stable")]
    own = (column[rows] for column in all_rows[:5])
    return Turns(*own, place[all_rows.row[kept]], *(column[kept] for column in all_rows[6:]))


def home_of_turns(rows: Turns, ranks: int, by_session: bool) -> tuple[np.ndarray, float]:
    """Where the engine computes each row, which lie on ranks in their order; and CPU seconds of that."""
    bounds = np.linspace(0, len(rows.uid), ranks + 1).astype(int)
    total = np.bincount(rows.row, rows.cost, len(rows.uid))
    last = np.bincount(rows.row, minlength=len(rows.uid)).cumsum() - 1
    suffix = rows.cost[last]  # and what stands between the last cut and it
    key = mixed(np.where(rows.turn == 0, rows.uid, rows.session * 256 + rows.turn + 2**42))
    bits = [(x + 0.0).view(np.int64) for x in (total - suffix, suffix)]
    nothing, uid, session = np.zeros_like(key), mixed(rows.uid), mixed(rows.session + 2**43)
    columns = np.stack([key, key, *bits, nothing, nothing, rows.length, nothing, uid, session], 1)
    tables = [torch.from_numpy(columns[a:b]) for a, b in itertools.pairwise(bounds)]
    # What ranks tell each other of a row: the first piece, and of the others the last.
    first = np.searchsorted(rows.row, np.arange(len(rows.uid)))
    place, begins = np.arange(len(rows.row)), np.maximum(first + 1, last - LAST_CUTS)[rows.row]
    told = (place == first[rows.row]) | (place >= begins)
    upto, cost = rows.cost.cumsum(), rows.cost.copy()
    joined = np.flatnonzero((place == begins) & (place > first[rows.row]))
    cost[joined] = upto[joined] - upto[first[rows.row[joined]]]
    cuts = np.searchsorted(rows.row[told], bounds)
    pieces = torch.from_numpy(np.stack([x[told] for x in (rows.row, rows.digest, cost.view(np.int64))], 1))
    pieces = [
        pieces[a:b] - torch.tensor([n, 0, 0]) for (a, b), n in zip(itertools.pairwise(cuts), bounds, strict=False)
    ]
    start = time.process_time()
    known = RowTable(tables)
    placed = known.by_session(ranks, pieces) if by_session else known.by_group(ranks)
    return np.array(placed.ranks), time.process_time() - start


def measure_turns(kind: str, ranks: int) -> dict[str, dict[str, float]]:
    every, rng, prompts = draw_turns(kind, max(ranks, 4)), np.random.default_rng(1), max(ranks, 4)
    sessions = every.session.tolist()
    of_prompts = whole_prompts(every.uid.tolist(), sessions, 2)
    size = prompts // 2 * SESSIONS  # verl's, of rows
    keys = [*every.uid.tolist(), *[None] * (-len(sessions) % size)]
    by_rows = fill_mini_batches(keys, len(keys) // size)
    by_rows = [[row for row in rows if row < len(sessions)] for rows in by_rows]
    anyhow = np.array_split(rng.permutation(len(sessions)), len(by_rows))
    outcomes = {}
    for name, cut, by_session in (
        ("verl", anyhow, None), ("rows, by session", by_rows, True),
        ("prompts, by prompt's tokens", of_prompts, False), ("prompts, by session", of_prompts, True),
    ):  # fmt: skip
        tokens = longest = total = moved = seconds = 0.0
        for mini_batch in cut:
            rows = some_turns(every, rng.permutation(mini_batch))
            lie = np.arange(len(rows.uid)) * ranks // len(rows.uid)
            home = lie
            if by_session is not None:
                home, took = home_of_turns(rows, ranks, by_session)
                seconds = max(seconds, took)
            _, at = np.unique(rows.digest ^ mixed(home[rows.row]), return_index=True)
            tokens += rows.tokens[at].sum()
            loads = np.bincount(home[rows.row[at]], rows.cost[at], ranks)
            longest, total = longest + loads.max(), total + loads.sum() / ranks
            response = rows.length - rows.prompt
            moved += ((BYTES_PROMPT * rows.prompt + BYTES_RESPONSE * response) * (home != lie)).sum()
        outcomes[name] = {"ratio": every.length.sum() / tokens, "imbalance": longest / total, "time": longest,
                          "mib": moved / ranks / 2**20, "steps": len(cut), "seconds": seconds}  # fmt: skip
    fastest = min(one["time"] for one in outcomes.values())
    return {name: one | {"time": one["time"] / fastest} for name, one in outcomes.items()}


def write_turns(ranks: list[int], out: Path, commit: str) -> None:
    lines: list[list[str]] = []
    for kind, num in itertools.product(TURNS, ranks):
        outcomes = measure_turns(kind, num)
        cells = [f"{one['steps']} / {one['ratio']:.2f} / {one['imbalance']:.2f} / {one['time']:.2f}"
                 for one in outcomes.values()]  # fmt: skip
        last = [*outcomes.values()][-1]
        lines.append([kind, str(num), *cells, f"{last['mib']:.1f}", f"{last['seconds']:.2f}"])
        print(" | ".join(lines[-1]), flush=True)
    text = [
        "# Placement of rows of turns: tokens and balance", "",
        f"{SESSIONS} sessions per prompt, as many prompts as ranks (4 at least), `ppo_mini_batch_size` half of them; a "
        "row per turn, whose history has no thoughts; lengths are drawn, costs those of an 8B model. Each cell: "
        "optimizer steps / tokens that stock computes over those computed / time of a step over that with perfect "
        "balance of the same work / time over the fastest of the line. Under `verl` rows lie in mini-batches and on "
        "ranks at random, and share what they have in common there. Mini-batches of `rows` and `prompts` are those of "
        "`prefix.mini_batches` under `prefix_sync`, without padding; of each, rows go to the rank of their whole "
        "prompt's tokens, or of their session. Of the last: MiB that a rank sends in an update, CPU seconds of "
        f"the placement of a mini-batch. Made by `make -C examples/results placement` at {commit[:7]}.", "",
        *table(["turns", "ranks", *outcomes, "MiB", "s"], lines)[:-1],
    ]  # fmt: skip
    out.write_text("\n".join(text) + "\n")


def main() -> None:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", action="store_true", help="rows of turns")
    parser.add_argument("--ranks", type=int, nargs="*")
    parser.add_argument("--out", type=file_to_write)
    options = parser.parse_args()
    options.out = options.out or ROOT / f"examples/results/placement{'_turns' * options.turns}.md"
    options.ranks = options.ranks or ([2, 8, 64, 512, 4096] if options.turns else [8, 64, 512, 4096])
    commit = provenance("placement/1", "cpu")["git"]["commit"]
    if options.turns:
        return write_turns(options.ranks, options.out, commit)
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
