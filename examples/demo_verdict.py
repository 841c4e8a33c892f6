"""What `make demo` says of its two runs: ratios of their seconds, what is to be known of these, and what failed.

Input is what verl's own `file` logger wrote, one JSON object `{"step": int, "data": {metric: number}}` per line.
Step 1 is compared as `verl-prefix ab --runs` does, on more metrics, and seconds too. Nothing here imports verl, and
nothing is read from a log but what trees compute of rows of turns.
"""

import json
import math
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_prefix.tools.ab.runs import TOLERANCE, compare_seconds, even_ratio, relative_difference, same_rollouts
from verl_prefix.tools.report import provenance

SCHEMA = "verl_prefix.demo/3"  # 1: ratios of medians, the first step's seconds among them; 2: device was a dict
Metrics = dict[str, float | None]

# Column title -> verl's metric.
CURVES = {"reward": "critic/rewards/mean", "loss": "actor/loss", "gradient norm": "actor/grad_norm"}
TIMINGS = {
    "update_actor": "timing_s/update_actor",
    "old_log_prob": "timing_s/old_log_prob",
    "ref": "timing_s/ref",
    "rollout": "timing_s/gen",
    "step": "timing_s/step",
}
PREFIX = ("prefix/reuse_fraction", "prefix/tokens_saved", "prefix/groups", "prefix/stock_rows")
# Both arms sampled the same responses if all of these are equal.
ROLLOUTS = tuple(
    f"{name}/{kind}"
    for name in ("critic/rewards", "response_length", "prompt_length")
    for kind in ("mean", "max", "min")
)
# Judged in step 1, within `TOLERANCE` of `verl-prefix ab --runs`, in fp32.
JUDGED = ("actor/grad_norm", "actor/loss", "actor/entropy", "actor/pg_loss")
# Largest difference between a token's probability in the rollout and in the actor's own log-probs, in fp32: 3e-9 (tiny)
# and 2e-5 (SmolLM2) where the rollout has the actor's weights.
ROLLOUT_NOISE = 1e-4
# What the engine says of the first batch of rows of turns: tokens of stock, of whole prompts alone, and of trees.
TREES = re.compile(r"of (\d+) tokens prefix\.trees=off \(whole prompts alone\) computes (\d+), uid (\d+)")
SHARED = ("stock", "one level", "trees")
# Above tokens saved, lm_head (not run on prefixes) and attention explain a part, about this much on small models.
SUSPICIOUS = 1.5


@dataclass(frozen=True)
class Arm:
    """One finished run of `verl.trainer.main_ppo`.

    Attributes:
        error: why it counts as failed, in words; None if it exited with 0 in time.
        seconds: wall time of the whole process.
        memory_mib: the most RSS by role of a process, looked at once a second; of the ranks, the largest's.
    """

    name: str
    metrics_path: Path
    log_path: Path
    error: str | None
    seconds: float
    memory_mib: dict[str, float] = field(default_factory=dict)

    def steps(self) -> list[dict[str, Any]]:
        """Return the logged training steps, `{"step": int, "data": Metrics}`, in order; [] if there are none."""
        if not self.metrics_path.exists():
            return []
        lines = [json.loads(line) for line in self.metrics_path.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if TIMINGS["step"] in line["data"]]


def find(metrics: Metrics, suffix: str) -> float | None:
    """Return the metric named `suffix`, or `<anything>/suffix` where verl routes it under its own name, else None."""
    return next((v for k, v in metrics.items() if k == suffix or k.endswith(f"/{suffix}")), None)


def build(stock: Arm, prefix: Arm, num_steps: int, config: dict[str, Any]) -> dict[str, Any]:
    """Return the report of both arms; its `problems` lists in words everything that makes the demo fail."""
    arms = {arm.name: {**_describe(arm), "steps": arm.steps()} for arm in (stock, prefix)}
    first_step = _compare_first_step(*(arm["steps"] for arm in arms.values()))
    report = provenance(SCHEMA) | {"config": config, "arms": arms, "first_step": first_step}
    derive(report)
    report["problems"] = _problems(stock, prefix, num_steps, first_step, config.get("rollout") != "vllm")
    if config.get("size", {}).get("turns", 1) > 1 and not prefix.error:
        found = TREES.search(prefix.log_path.read_text(errors="replace"))
        report["tokens"] = tokens = dict(zip(SHARED, map(int, found.groups()), strict=True)) if found else {}
        if not found or tokens["trees"] >= tokens["one level"]:
            report["problems"].append(f"trees share no more than whole prompts do: {tokens}; read {prefix.log_path}")
    return report


def derive(report: dict[str, Any]) -> None:
    """Set in the report what follows from both arms' steps: ratios, token_ratio and notes."""
    steps = [report["arms"][name]["steps"] for name in ("stock", "prefix")]
    report |= {"schema": SCHEMA, "ratios": _ratios(*steps), "token_ratio": _token_ratio(steps[1])}
    report["notes"] = _notes(report)


def _describe(arm: Arm) -> dict[str, Any]:
    memory = {role: round(mib) for role, mib in arm.memory_mib.items()}
    return {"error": arm.error, "seconds": round(arm.seconds, 1), "log": str(arm.log_path), "peak_rss_mib": memory}


def _compare_first_step(stock: list[dict[str, Any]], prefix: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Compare step 1, which starts from the same weights in both arms; None if an arm has no step.

    Later steps are not held to that: they start from weights that differ by rounding, which may change a sampled token.
    """
    if not stock or not prefix:
        return None
    ours, theirs = prefix[0]["data"], stock[0]["data"]
    both = {name: {"stock": theirs.get(name), "prefix": ours.get(name)} for name in (*ROLLOUTS, *JUDGED)}
    metrics = {}
    for name in JUDGED:
        difference = relative_difference(*both[name].values())
        metrics[name] = both[name] | {
            "relative_difference": None if math.isnan(difference) else difference,
            "tolerance": TOLERANCE,
            "agree": difference <= TOLERANCE,
        }
    return {
        "same_rollouts": same_rollouts(theirs, ours, ROLLOUTS),
        "rollouts": {name: both[name] for name in ROLLOUTS},
        "metrics": metrics,
    }


def _ratios(stock: list[dict[str, Any]], prefix: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return median seconds and stock/prefix of every step after the first, for each timing that both arms logged.

    The first step warms up, measures rates and checks itself. Seconds follow the length of a step's prompts, so those
    of an idle machine may be twice as many in one step as in another. `ratio`: see `even_ratio`.
    """
    theirs, ours = ({step["step"]: step["data"] for step in steps} for steps in (stock, prefix))
    both = [step for step in theirs if step in ours]
    timings = compare_seconds(theirs, ours, both[1:], TIMINGS.values())
    rows = {title: timings[name] for title, name in TIMINGS.items() if name in timings}
    for row in rows.values():
        row["ratio"] = even_ratio(row["ratios"])
    return rows


def _token_ratio(prefix: list[dict[str, Any]]) -> float | None:
    """Return logical tokens / computed tokens of the prefix arm, what a time ratio has to be read against."""
    shares = [share for step in prefix if (share := find(step["data"], PREFIX[0]))]
    return 1 / (1 - statistics.median(shares)) if shares else None


def _notes(report: dict[str, Any]) -> list[str]:
    """Return what a reader must know before quoting the ratios: times that the saved tokens or the steps don't bear."""
    notes = []
    if report["first_step"] and not report["first_step"]["same_rollouts"]:
        notes.append("the arms sampled other responses: losses and gradients of their steps are not comparable")
    notes += ["steps after the first start from weights that differ by rounding, and sampling multiplies that"]
    tokens, update = report["token_ratio"], report["ratios"].get("update_actor")
    if tokens and update and (faster := statistics.median(update["ratios"])) > SUSPICIOUS * tokens:
        notes.append(
            f"update_actor is {faster:.1f}x faster with {tokens:.1f}x fewer tokens: the rest is not sharing, but other "
            "load on this machine or a slow stock path"
        )
    if all(len(row["ratios"]) == 1 for row in report["ratios"].values()):
        notes.append("less than two steps after the first were timed: no ratio can be quoted; run three or more")
    notes += [
        f"stock / prefix of {title} is {min(row['ratios']):.2f} to {max(row['ratios']):.2f} over the steps: too uneven "
        "for a ratio that can be quoted; run again on an idle machine"
        for title, row in report["ratios"].items()
        if row["ratio"] is None and len(row["ratios"]) > 1
    ]
    return notes


def _problems(
    stock: Arm, prefix: Arm, num_steps: int, first_step: dict[str, Any] | None, reproducible: bool
) -> list[str]:
    """`reproducible`: the rollout draws the same responses in both arms. vLLM's draws depend on what arrives when."""
    problems = []
    for arm in (stock, prefix):
        if arm.error:
            problems.append(f"the {arm.name} arm failed: {arm.error}; its log is {arm.log_path}")
        elif len(arm.steps()) != num_steps:
            problems.append(
                f"the {arm.name} arm logged {len(arm.steps())} of {num_steps} steps; its log is {arm.log_path}"
            )
        for step in arm.steps():
            difference = step["data"].get("training/rollout_probs_diff_max")
            if difference is None or not difference <= ROLLOUT_NOISE:
                problems.append(
                    f"step {step['step']} of the {arm.name} arm: rollout and actor disagree about a token's "
                    f"probability by {number(difference)} > {ROLLOUT_NOISE:g}, so their weights are not the same"
                )
    if not prefix.error and not any(find(step["data"], PREFIX[0]) for step in prefix.steps()):
        problems.append(
            f"the prefix arm shared nothing: {PREFIX[0]} is 0 or missing in every step; "
            f"run `verl-prefix doctor` and read {prefix.log_path}"
        )
    if first_step and not first_step["same_rollouts"]:
        if not reproducible:
            return problems
        rows = [
            f"{name} {pair['stock']} / {pair['prefix']}"
            for name, pair in first_step["rollouts"].items()
            if not same_rollouts({name: pair["stock"]}, {name: pair["prefix"]}, [name])
        ]
        problems.append(
            f"step 1 is not comparable, the arms sampled other responses (stock / prefix): {', '.join(rows)}"
        )
    elif first_step:
        for name, row in first_step["metrics"].items():
            if not row["agree"]:
                problems.append(
                    f"step 1 differs in {name}: stock {row['stock']}, prefix {row['prefix']}, "
                    f"relative difference {number(row['relative_difference'])} > {row['tolerance']:g}"
                )
    return problems


def number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else str(round(value)) if value >= 1000 else f"{value:.{digits}g}"
