"""Report of a simulation, as JSON: arms side by side, what fits, and which settings are the cheapest.

Every figure is simulated, on the assumptions of `hardware` and `tracker`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from verl_prefix.core.groups import Group
from verl_prefix.tools.simulate.depth import simulate
from verl_prefix.tools.simulate.hardware import GIB, Hardware
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.model import whole_shape
from verl_prefix.tools.simulate.passes import plan_of
from verl_prefix.tools.simulate.tower import num_features
from verl_prefix.tools.simulate.tracker import OWNERS, Phase

ARMS = (
    Arm("stock"), Arm("stock", rows=1), Arm("stock_lean"), Arm("packed"), Arm("phased"), Arm("phased", offload=True),
)  # fmt: skip
NOT_MODELLED = (
    "fragmentation of the allocator, workspaces of NCCL and cuBLAS, kernels that slow each other down, vLLM's share of "
    "the device, the reference model, rollout and reward; what param_offload and optimizer_offload move between passes;"
    " experts that get more tokens than others; a recurrent layer's steps from chunk to chunk (its kernels, "
    "flash-linear-attention's and causal_conv1d's, take what a roofline says, which no GPU has measured here)"
)
_LOG_PROBS = "log_probs/"


def as_json(phases: dict[str, Phase]) -> dict[str, Any]:
    """An arm's phases: GiB, FLOPs and seconds; and their sums and peak."""

    def part(phase: Phase, prefix: str) -> dict[str, float]:
        return {name.removeprefix(prefix): x for name, x in phase.items() if name.startswith(prefix) and x}

    figures: dict[str, dict[str, Any]] = {
        name: {
            "peak_gib": phase["peak"] / GIB,
            "owners_gib": {owner: phase[f"peak/{owner}"] / GIB for owner in OWNERS if phase[f"peak/{owner}"] > 0},
            "seconds": phase["seconds"],
            "flops": part(phase, "flops/"),
            "launches": round(phase["launches"]),
            "host_syncs": round(phase["host_syncs"]),
            "collective_bytes": part(phase, "collective/"),
            "host_gib": phase["host_peak"] / GIB,
            **({"bubble": phase["bubble"]} if "bubble" in phase else {}),
        }
        for name, phase in phases.items()
        if name != "setup"
    }
    return {
        "update_seconds": sum(x["seconds"] for name, x in figures.items() if not name.startswith(_LOG_PROBS)),
        "log_prob_seconds": sum(x["seconds"] for name, x in figures.items() if name.startswith(_LOG_PROBS)),
        "peak_gib": max(x["peak_gib"] for x in figures.values()),
        "flops": sum(sum(x["flops"].values()) for x in figures.values()),
        "phases": figures,
    }


def compare(job: Job, hardware: Hardware, arms: Sequence[Arm] = ARMS) -> dict[str, Any]:
    """Every arm's update and log-probs, and what they gain over stock as verl runs it (`arms[0]`)."""
    simulated = map(as_json, simulate(job, arms, hardware, shown=True))
    outcomes = dict(zip((arm.name for arm in arms), simulated, strict=True))
    for arm in outcomes.values():
        for name, baseline in (("", "stock"), ("_over_lean", "stock_lean")):
            if theirs := outcomes.get(baseline):
                arm[f"speedup{name}"] = _seconds(theirs) / _seconds(arm)
                arm[f"flop_ratio{name}"] = theirs["flops"] / arm["flops"]
        arm["fits"] = arm["peak_gib"] * GIB <= hardware.capacity
    return outcomes


def _seconds(arm: dict[str, Any]) -> float:
    return arm["update_seconds"] + arm["log_prob_seconds"]


def settings(job: Job, hardware: Hardware, arms: dict[str, Any]) -> list[dict[str, Any]]:
    """Ways to run the job with sharing, cheapest first, those that do not fit behind: overrides, seconds, GiB.

    Args:
        arms: of `compare`; the best of them also runs with the other gradient synchronisation, if there is one. Where
            it has waves, or nothing fits, it or the one with offload also runs with waves of a quarter.
    """
    ours = [arm for arm in ARMS if not arm.path.startswith("stock")]
    ways = [_way(job, arm, arms[arm.name]) for arm in ours]
    way, best = min(zip(ways, ours, strict=True), key=lambda pair: _rank(pair[0]))

    def also(other: Job, arm: Arm, *overrides: str) -> None:
        ways.append(_way(other, arm, compare(other, hardware, [arm])[arm.name], *overrides))

    key = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation"
    if not job.memory.veomni and not job.memory.division:
        other = replace(job.memory, no_sync=not job.memory.no_sync)
        also(replace(job, memory=other), best, f"{key}={other.no_sync}")
    if best.path == "phased" or not way["fits"]:
        arm = best if way["fits"] else ours[-1]
        plan = plan_of(job, whole_shape(job), arm, job.budget)
        also(replace(job, wave_tokens=max(1, plan.largest_wave // 4)), arm)
    return sorted(ways, key=_rank)


def _rank(way: dict[str, Any]) -> tuple[bool, float]:
    return not way["fits"], way["seconds"]


def _way(job: Job, arm: Arm, outcome: dict[str, Any], *more: str) -> dict[str, Any]:
    words = [f"schedule={arm.path}"] + ["offload=True"] * arm.offload
    if arm.path == "phased" and job.wave_tokens:
        words.append(f"wave_tokens={job.wave_tokens}")
    return {
        "overrides": [*(f"actor_rollout_ref.actor.prefix.{word}" for word in words), *more],
        "seconds": _seconds(outcome),
        "peak_gib": outcome["peak_gib"],
        "fits": outcome["fits"],
    }


def longest(peak_gib: Callable[[int], float], gib: float, low: int, high: int) -> int | None:
    """The largest size of `low` to `high` whose peak fits, to 2 %, by halving their ratio; None: none fits.

    Args:
        peak_gib: of a size; no less with more.
    """
    if peak_gib(low) > gib:
        return None
    if peak_gib(high) <= gib:
        return high
    while high > 1.02 * low + 1:
        middle = max(low + 1, math.isqrt(low * high))
        low, high = (middle, high) if peak_gib(middle) <= gib else (low, middle)
    return low


def fit(job: Job, hardware: Hardware, gib: float, arms: Sequence[Arm] = ARMS) -> dict[str, dict[str, int | None]]:
    """Per arm: tokens of the longest prompt, rows of the largest group, and tokens of the largest wave that fit `gib`,
    each with the rest of the job's longest group as it is; None: nothing does. No prompt and response are longer than
    the model's positions."""
    hardware = replace(hardware, capacity=gib * GIB)  # the offload fetches back as much as there is room for
    group = max(job.groups, key=lambda one: one.num_own_strand_tokens + max(one.suffix_lens))
    suffix, rows = max(group.suffix_lens), len(group.rows)
    shown = job.grids[job.groups.index(group)] if job.grids else ()
    shortest = 64 + (num_features(shown, job.config) if shown else 0)
    positions = getattr(job.config.get_text_config(), "max_position_embeddings", 1 << 17)
    longest_prompt = positions - suffix - 1

    def peak(arm: Arm, prefix: int, num_rows: int, wave: int | None) -> float:
        one = Group.of_prompt(tuple(range(num_rows)), prefix, (suffix,) * num_rows)
        # Rows beyond those of one pass change nothing.
        budget = max(job.budget, prefix + 1 + suffix) if arm.path.startswith("stock") else 1 << 40
        changed = replace(
            job, groups=(one,), grids=(shown,), budget=budget, log_prob_budget=None, wave_tokens=wave, kept=1
        )
        # Where room ends, nothing is kept that can be computed again.
        least = replace(arm, keeps_attention=False, all_logits=False)
        return as_json(simulate(changed, [least], hardware)[0])["peak_gib"]

    def sizes(arm: Arm) -> dict[str, int | None]:
        wave = (job.wave_tokens or suffix) if arm.path == "phased" else None
        num_rows = rows if arm.path == "packed" else min(rows, 2)
        prompt = longest(lambda n: peak(arm, n, num_rows, wave), gib, shortest, longest_prompt)
        if arm.path == "packed":
            return {
                "prompt": prompt,
                "group": longest(lambda n: peak(arm, group.num_own_strand_tokens, n, None), gib, 1, 64),
            }
        if wave is None:
            return {"prompt": prompt}

        def of_wave(tokens: int) -> float:
            return peak(arm, group.num_own_strand_tokens, 2 * -(-tokens // suffix), tokens)

        return {"prompt": prompt, "wave": longest(of_wave, gib, suffix, 64 * suffix)}

    return {arm.name: sizes(arm) for arm in tqdm(arms, "arms whose longest rows are found", disable=None)}
