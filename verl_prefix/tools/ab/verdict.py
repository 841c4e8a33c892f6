"""The verdict of `verl-prefix ab`: the project's tolerances, which of them hold, and the report that says so.

1. Against a truth one precision above: log-probs and gradients (all of them, and the worst parameter's) from the same
   weights, and the weights after steps of their own, within 1.3 times stock's own error, in fp32 or within 5e-6.
2. Against stock from the same weights, at every step, log-probs of both passes, gradients and loss: in fp32 within
   5e-6, in bf16 within 2.3 = 1 + 1.3 times stock's own error: stock is 1 from the truth, ours at most 1.3.
3. Where stock itself, its micro-batches repacked, keeps the first rule and differs from stock by more than the second
   allows, within 1.3 times as much.

Why the first rule has 5e-6 in fp32: an error is a few roundings there, and how many depends on where a CPU's matmul
cuts its sums. Stock's lm_head also sums over the prompt's zeros, which cuts the sum over response tokens into more
pieces: by torch's own matmul alone, the weight's gradient over 8 rows of 16 response tokens is off by 9e-8 with those
zeros and by 2e-7 without them, as in ours; over 8 rows of 64 tokens 1.5e-7 and 2.4e-7 (AMD EPYC, AVX2, MKL 2024.2).

Why gradients are compared from the same weights: fp32 runs drift apart, since AdamW makes whole steps of gradients that
are rounding, and then differ by more than an engine does. Over ten recorded steps with each arm on its own weights,
stock with its micro-batches repacked missed a float64 run by 0.80 to 1.38 times as much as stock did (worst parameter,
three choices of MKL's and torch's kernels), ours by 0.83 to 1.15 times; from the same weights both by 0.98 to 1.05.
"""

import math
import statistics
from typing import Any

SCHEMA = "verl_prefix.ab/2"  # 1: truth_errors were of every arm's own weights
RELATIVE = 5e-6
FACTOR = 1.3
PASSES = ("log_probs", "update", "optimizer")
UNEVEN = 1.5
SAME_WEIGHTS = ("log_probs", "infer_log_probs", "grads", "worst_grad", "loss")


def same_weights_limits(
    dtype: str, stock_error: dict[str, float], repacked: dict[str, float] | None
) -> dict[str, float]:
    """Limits of each figure's distance from stock's, from the same weights; none where there is nothing to judge by.

    Args:
        stock_error: stock's own against the truth, empty if unknown.
        repacked: the same figures of stock with its micro-batches repacked, None if it did not run; not counted where
            no truth tells whether it is right.
    """
    limits = {}
    for name in SAME_WEIGHTS:
        error = stock_error.get(name.removeprefix("infer_"))
        limit = RELATIVE if dtype == "fp32" else error and (1 + FACTOR) * error
        if limit:  # none of a low precision's loss: one number, by luck close or not
            limits[name] = max(limit, FACTOR * repacked[name]) if repacked and stock_error else limit
    return limits


def tolerances(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Every tolerance that was checked: arm, name, limit, value, the step of the worst value or None, and `holds`.

    Args:
        measured: dtype, judged (arms), num_steps (to be replayed) and steps (as `replay` measured them).
    """
    checked = []

    def check(arm: str, name: str, value: float, limit: float, step: int | None = None) -> None:
        checked.append(dict(arm=arm, name=name, value=value, limit=limit, step=step, holds=value <= limit < math.inf))

    steps, dtype = measured["steps"], measured["dtype"]
    errors = [step["truth_errors"] for step in steps if step["truth_errors"]]
    stock_error = {k: statistics.fmean(e["stock"][k] for e in errors) for k in errors[0]["stock"]} if errors else {}

    def worst(arm: str, name: str) -> tuple[float, int]:
        values = [(step["arms"][arm]["same_weights"][name], step["step"]) for step in steps]
        return max(values, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])

    def error(arm: str, name: str) -> float:
        return statistics.fmean(e[arm][name] for e in errors)

    repacked, floor = None, RELATIVE if dtype == "fp32" else 0.0
    truth_limits = {name: max(floor, FACTOR * stock) for name, stock in stock_error.items()}
    if "stock_repacked" in steps[0]["arms"] and errors:
        right = all(error("stock_repacked", name) <= limit for name, limit in truth_limits.items())
        repacked = {name: worst("stock_repacked", name)[0] for name in SAME_WEIGHTS} if right else None
    limits = same_weights_limits(dtype, stock_error, repacked)
    for arm in measured["judged"]:
        for name, limit in limits.items():
            value, step = worst(arm, name)
            check(arm, f"same weights: {name}", value, limit, step=step)
        for name, limit in truth_limits.items():
            check(arm, f"error against the truth: {name}", error(arm, name), limit)
        bad = sum(not all(map(math.isfinite, _figures(step["arms"][arm]))) for step in steps)
        # What compares nothing shows nothing.
        values = [(step["arms"]["stock"]["values"]["grad_norm"], step["arms"][arm]["values"]) for step in steps]
        norms = [norm for norm, _ in (values if dtype == "fp32" else values[: len(errors)])]
        faults = {
            "steps with figures that are not finite": bad,
            "no step that is judged has a gradient": not any(norms),
            "no step shares a prefix": not shared_steps(steps, arm),
            "steps that were not replayed": measured["num_steps"] - len(steps),
        }
        for name in filter(faults.get, faults):
            check(arm, name, float(faults[name]), 0.0)
    return checked


def shared_steps(steps: list[dict[str, Any]], arm: str) -> int:
    """In how many steps an arm shared a prefix."""
    return sum(bool(step["arms"][arm]["values"].get("prefix/reuse_fraction")) for step in steps)


def _figures(arm: dict[str, Any]) -> list[float]:
    """By how much an arm differs from stock in a step, and the loss and the gradient's norm of its own run."""
    values, own = arm["values"], arm["own_weights"]
    of_run = values["loss"], values["grad_norm"], own["log_probs_max"], own["grads"]
    return [*arm["same_weights"].values(), *of_run, *own["params"].values()]


def timed(steps: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The steps whose seconds of this pass count: an optimizer's first step allocates its state."""
    return steps[1:] if name == "optimizer" and len(steps) > 1 else steps


def median_ratio(ratios: list[float]) -> float | None:
    """The median of the steps' ratios of seconds; None of one step alone."""
    return statistics.median(ratios) if len(ratios) > 1 else None


def even_ratio(ratios: list[float]) -> float | None:
    """The median ratio of arms whose steps of one number have the same rows. None also where ratios are uneven: then
    something else ran on the machine."""
    return median_ratio(ratios) if max(ratios) <= UNEVEN * min(ratios) else None


def as_ratio(ratio: float | None, steps: int) -> str:  # a median or an even ratio in words
    return f"{ratio:.2f}" if ratio else "uneven" if steps > 1 else "one step"


def _passes(steps: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    """Medians with spread per pass, stock's seconds over ours step by step, and the most memory that a pass added."""
    passes = {}
    for name in PASSES:
        seconds, stock = ([step["arms"][a]["seconds"][name] for step in timed(steps, name)] for a in (arm, "stock"))
        added = [step["arms"][arm]["added_gib"].get(name) for step in steps]
        passes[name] = {
            "median_s": statistics.median(seconds),
            "min_s": min(seconds),
            "max_s": max(seconds),
            "speedup": even_ratio([a / b for a, b in zip(stock, seconds, strict=True)]),
            "added_gib": None if None in added else max(added),
        }
    return passes


def build(described: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The report; `holds` is the verdict. described: of what and with what, and all of `tolerances` but the steps."""
    checked = tolerances(described | {"steps": steps})
    notes = []
    gap = steps[0].get("recorded_log_prob_gap")
    if (gap or 0.0) > 0.1:
        notes.append(
            f"stock's log-probs of step 1 are up to {gap:.3g} from the recorded old ones: the trace was recorded from "
            "other weights, or its first update was not on-policy"
        )
    if leak := steps[0].get("packing_leak"):
        notes.append(
            f"stock takes one row per micro-batch here; model_engine=dp is wrong where a micro-batch has more: {leak}, "
            "and a row's state goes on in the next row unless actor_rollout_ref.model.use_remove_padding=False"
        )
    failed = {row["arm"] for row in checked if not row["holds"]}
    missed = {row["name"].partition(":")[0] for row in checked if not row["holds"]}
    if missed == {"same weights"} and "stock_repacked" not in steps[0]["arms"]:
        notes.append(
            "only figures from the same weights are over their limits: add stock_repacked to --arms and --truth-steps "
            "of 1 or more to see how far stock is from itself, which then counts"
        )
    return {
        **described,
        "notes": notes,
        "holds": bool(checked) and not failed,
        "tolerances": checked,
        "first_diverging": {
            arm: {"step": step["step"]} | where
            for step in steps for arm, where in step["first_diverging"].items() if arm in failed
        },
        "passes": {name: _passes(steps, name) for name in steps[0]["arms"]},
        "recorded_log_prob_gap": gap,
        "steps": steps,
    }  # fmt: skip
