"""Rows of turns and of a tree search on 8 H100s, simulated: stock, whole prompts shared alone, trees. No GPU.

Writes examples/results/simulated_turns.json and .md (`make -C examples/results simulated-turns`). Every figure is
simulated, by `verl_prefix.tools.simulate`.
"""

import math
from dataclasses import replace
from typing import Any

from simulate_tables import config_of, heading, run, write_report

from verl_prefix.auto.cost import Memory, Rates
from verl_prefix.core.groups import Group
from verl_prefix.testing.rollouts import Rollouts, flatten, search_rollouts, turn_rollouts
from verl_prefix.tools.report import table
from verl_prefix.tools.simulate.hardware import GPUS
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.model import whole_shape
from verl_prefix.tools.simulate.passes import plan_of

VOCAB = 1 << 30  # tokens that do not agree by chance
FIRST, THINKING, SAID, TOOL = 2000, 300, 100, 400
SESSIONS = 4  # of one prompt on a rank: 4 prompts of 8 sessions on 8 ranks
BRANCHES = (5, 2, 2)  # of a tree search: continuations of a turn; its answers and thoughts stay in a row
WANTED = {"packed": 0.93, "phased": 0.93}  # of time / FLOPs
WANTED_ONCE = 0.97  # of the FLOPs of the whole tree, in phased passes
ONE_PASS = "tree, one pass"  # whatever memory that takes
# What others report, and what of their settings is published.
PEERS = (
    ("AReaL-DTA (arXiv 2602.00482)", "8.31", "tau2-bench, over dense rows with checkpointing (1.70 over a tree mask, "
     "2.28 end to end); dense Qwen2.5 and Qwen3, data parallel; a branch, sequential, checkpointing off"),
    ("Tree Training (arXiv 2511.00413)", "6.2 to 6.3", "agentic SFT and RL updates, dense and MoE, Megatron; no code"),
    ("psRL (arXiv 2608.25683)", "5.2", "update 462 s -> 89 s, 2.1 end to end, 56 -> 33 GB; verl, Megatron; no code"),
    ("HARTS (arXiv 2608.28158)", "4.81 to 4.87", "a tree on KDA, MLA and MoE; no code"),
)  # fmt: skip


def settings() -> dict[str, Rollouts]:
    turns = {f"{n} turns": turn_rollouts(FIRST, SESSIONS, n, THINKING, SAID, TOOL, VOCAB) for n in (5, 10, 30)}
    return turns | {
        f"tree search, {math.prod(BRANCHES)} leaves": search_rollouts(FIRST, THINKING + SAID + TOOL, BRANCHES, VOCAB)
    }


def simulated(rollouts: Rollouts) -> dict[str, Any]:
    """One rank's update by every arm."""
    trees, prompts = (flatten(some, "cpu")[2] for some in (rollouts, replace(rollouts, cuts=None)))
    rows = [len(p) + len(r) for p, r in zip(rollouts.prompts, rollouts.responses, strict=True)]
    budget = max(16384, 2 * max(rows))  # verl's default, and its advice
    job = Job(config_of("qwen3-8b"), tuple(trees), budget, Memory(8), kept=4)
    shape = whole_shape(job)
    once = Rates().seconds(shape, [shape.pass_of(trees)])
    found: dict[str, Any] = {"rows": len(rows), "tokens": sum(rows), "longest_row": max(rows), "budget": budget}
    full = full_budget(max(rows), len(rollouts.responses[0]), budget)
    found["one_prompt_peak_gib"] = run(replace(job, groups=full), Arm("phased"), "h100")["peak_gib"]
    found["arms"] = by_arm = {}
    for name, arm, groups in (
        ("stock", Arm("stock"), prompts), ("one level, packed", Arm("packed"), prompts),
        ("one level, phased", Arm("phased"), prompts), ("tree, packed", Arm("packed"), trees),
        ("tree, phased", Arm("phased"), trees), (ONE_PASS, Arm("packed"), trees),
    ):  # fmt: skip
        of_arm = replace(job, groups=tuple(groups))
        if name == ONE_PASS:
            of_arm = replace(of_arm, budget=sum(group.num_physical_tokens for group in trees))
        one = run(of_arm, arm, "h100")
        by_arm[name] = ours = {key: one[key] for key in ("update_seconds", "flops", "peak_gib")}
        ours["phases"] = {name: (phase["seconds"], phase["peak_gib"]) for name, phase in one["phases"].items()}
        ours["attention_flops"] = sum(phase["flops"].get("attention", 0.0) for phase in one["phases"].values())
        if arm.path == "stock":
            continue
        stock, plan = by_arm["stock"], plan_of(of_arm, shape, arm, of_arm.budget)
        ours["tokens"] = plan.num_physical_tokens
        ours["of_tree_once"] = once / Rates().seconds(shape, shape.passes_of(plan))
        ours["speedup"] = stock["update_seconds"] / ours["update_seconds"]
        ours["flop_ratio"] = stock["flops"] / ours["flops"]
        ours["of_flop_ratio"] = ours["speedup"] / ours["flop_ratio"]
        ours["kernels"] = kernel_seconds(stock) / kernel_seconds(ours) / ours["flop_ratio"]
    return found


def full_budget(longest_row: int, response: int, budget: int) -> tuple[Group, ...]:
    """Rows of one prompt each, none longer, whose phases fill the budget: what waves need beside half of it."""
    prompt = longest_row - response
    prompts = max(1, budget // 2 // prompt)
    rows = max(2, (budget - prompts * prompt) // response // prompts)
    return tuple(
        Group.of_prompt((*range(i * rows, (i + 1) * rows),), prompt - 1, (response,) * rows) for i in range(prompts)
    )


def kernel_seconds(arm: dict[str, Any]) -> float:
    """Of all matmuls, by the simulator's rates: those of attention, whose backward has 2.5 times its forward's FLOPs,
    are lower."""
    gpu = GPUS["h100"]
    attention = (1 / gpu.attention_forward + 2.5 / gpu.attention_backward) / 3.5
    return (arm["flops"] - arm["attention_flops"]) / gpu.matmul_16 + arm["attention_flops"] * attention


def markdown(report: dict[str, Any]) -> str:
    rows, missed, peaks = [], [], []
    for name, setting in report["settings"].items():
        arms = setting["arms"]
        for i, (arm, one) in enumerate(arms.items()):
            cells = [f"{one['update_seconds']:.2f}", f"{one['flops'] / 1e15:.2f}", f"{one['peak_gib']:.1f}"]
            shared = [f"{one[key]:.2f}" for key in ("speedup", "flop_ratio", "of_flop_ratio", "kernels", "of_tree_once")
                      ] if "speedup" in one else ["-"] * 5  # fmt: skip
            shared.append(f"{arms[ONE_PASS]['update_seconds'] / one['update_seconds']:.2f}")
            rows.append([name if i == 0 else "", arm, str(one.get("tokens", setting["tokens"])), *cells, *shared])
        for path, wanted in WANTED.items():
            if (of := arms[f"tree, {path}"]["of_flop_ratio"]) < wanted:
                missed.append(f"{path}, {name}: {of:.3f} instead of {wanted}")
        if (once := arms["tree, phased"]["of_tree_once"]) < WANTED_ONCE:
            missed.append(f"tree once, {name}: {once:.3f} instead of {WANTED_ONCE}")
        peak, most = arms["tree, phased"]["peak_gib"], setting["one_prompt_peak_gib"]
        peaks.append(f"{name}: {peak:.1f} of {most:.1f}")
        if peak > most:
            missed.append(f"peak of phased, {name}: {peak:.1f} GiB, one prompt {most:.1f}")
    head = ("setting", "arm", "tokens", "update s", "PFLOP", "peak GiB", "time ratio", "FLOP ratio", "time / FLOPs",
            "kernels alone", "tree once", "time of one pass")  # fmt: skip
    lines = [
        *heading("rows of turns, and a tree search", "simulated-turns", report),
        "One update of Qwen3-8B on 8 H100s (FSDP2, gradient checkpointing, bf16), of a rank that has 4 of a prompt's 8 "
        f"sessions: first prompt {FIRST}, per turn {THINKING} thinking (stripped later), {SAID} said, {TOOL} of a "
        f"tool. The tree search has one prompt a rank and branches {' x '.join(map(str, BRANCHES))} times, at turns "
        f"of {THINKING + SAID + TOOL}. A pass has 16,384 tokens, or two of the longest rows.", "",
        *table(head, rows),
        "Ratios are stock's over an arm's; time / FLOPs is the time ratio over the FLOP ratio of what runs. Kernels "
        "alone: the same where nothing but matmuls and attention took time, at the simulator's rates; attention is "
        "slower per FLOP, and trees have more of it. Tree once: FLOPs of the whole tree in one pass over those of the "
        "arm's passes. The budget cuts packed ones, which repeat what pieces share; phased ones nest. Time of one "
        "pass: seconds of the whole tree in one pass, of whatever budget and memory, over the arm's; the rest is what "
        "passes cost beside their FLOPs, gathers of weights above all.", "",
        f"Wanted are {WANTED['packed']:.2f} packed, {WANTED['phased']:.2f} phased in time / FLOPs, "
        f"{WANTED_ONCE:.2f} phased of the tree once, and a phased peak of at most that of groups of one prompt whose "
        "longest row is as long, and which fill the budget with one wave, before any gradient (GiB of the tree, of "
        f"such groups: {'; '.join(peaks)}). Missed: {'; '.join(missed) or 'nothing'}.", "",
        "## What others report", "",
        *table(("", "times faster", "settings as far as published"), PEERS),
        "Each measured its own workload against a baseline of its own: no figure here compares with one above.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def measured() -> dict[str, Any]:
    return {"settings": {name: simulated(rollouts) for name, rollouts in settings().items()}}


if __name__ == "__main__":
    write_report(__doc__, "simulated_turns", "simulated_turns/1", measured, markdown)
