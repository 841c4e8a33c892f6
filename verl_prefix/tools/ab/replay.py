"""Replay: the same optimizer steps through verl's stock engine and through ours, in one process per rank, in turn.

Three questions per step, each with its own pair of weights:
- same weights: both engines compute the step from stock's weights. What differs is what ours computes differently.
- own weights: every engine goes on from its own weights with its own optimizer. What differs is what a run would see.
- truth: the stock engine one precision above (float64 for fp32, fp32 for bf16) takes the first steps as well; an
  engine's distance from it is that engine's own error.
"""

import io
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from typing import Any

import torch

from verl_prefix.tools.ab.arm import (
    Arm,
    errors_by_parameter,
    largest,
    largest_of_ranks,
    parameter_distance,
    precision,
    relative_error,
)
from verl_prefix.tools.ab.diagnosis import first_diverging
from verl_prefix.tools.ab.options import REPACKED, STOCK, TRUTH, Options
from verl_prefix.tools.ab.source import Source
from verl_prefix.tools.ab.verdict import same_weights_limits
from verl_prefix.trace import StepRows


def replay(source: Source, options: Options, rank: int) -> Iterator[dict[str, Any]]:
    """Runs all steps on this rank; yields the figures of every step (read by `verdict.build`), the same on every rank.

    From stock's weights, each arm computes a step's passes once, and those are timed: after step 1, which warms up, no
    arm has seen a trace's rows before, and who comes first changes from step to step. All but stock then compute the
    update again from their own weights and take the optimizer's step; `values` are of that. So does the truth, whose
    passes from stock's weights tell each arm's own error.
    """
    with redirect_stdout(io.StringIO()):  # verl prints a dozen lines for each
        arms = [Arm(name, source.manifest) for name in (STOCK, *options.arms)]
        truth = Arm(TRUTH, source.manifest) if options.truth_steps else None
    stock, *others = arms
    vocab_size = stock.engine.model_config.hf_config.get_text_config().vocab_size
    undiagnosed = [arm for arm in others if arm.name in options.judged]
    dtype, stock_error = precision(source.manifest), dict[str, float]()
    for number in range(source.num_steps):
        rows = source.rows(number, rank, vocab_size)
        if "old_log_probs" not in rows.jagged:
            rows.jagged["old_log_probs"] = stock.responses(stock.infer(rows), rows).float(), rows.jagged["responses"][1]
        record: dict[str, Any] = {"step": number + 1}
        if number == 0:
            record |= {"recorded_log_prob_gap": _warm_up(arms, rows), "packing_leak": stock.leak}
        start = [w.clone() for w in stock.weights()]
        judge = truth if number < options.truth_steps else None
        if judge is not None:
            with judge.at(start):
                judge.passes(rows, infer=False, optimize=False)
        results: dict[str, Any] = dict.fromkeys(arm.name for arm in arms)
        turn = number % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            with nullcontext() if arm is stock else arm.at(start):
                results[arm.name] = arm.passes(rows, optimize=arm is stock)
        results[STOCK]["values"] = stock.values
        errors = {arm.name: _errors(arm, judge) for arm in arms} if judge is not None else {}
        same = {arm.name: _same_weights(arm, stock, rows) for arm in others}
        stock_error = errors.get(STOCK, stock_error)
        limits = same_weights_limits(dtype, stock_error, same.get(REPACKED))
        off = [arm for arm in undiagnosed if not all(same[arm.name][key] <= limit for key, limit in limits.items())]
        first = {arm.name: first_diverging(arm, stock, rows, start, dtype=dtype, limits=limits) for arm in off}
        record["first_diverging"] = {name: where for name, where in first.items() if where}
        undiagnosed = [arm for arm in undiagnosed if arm.name not in record["first_diverging"]]
        for arm in others:
            results[arm.name] |= {"same_weights": same[arm.name], **_own_step(arm, stock, rows, results[arm.name])}
        if judge is not None:
            judge.passes(rows, infer=False)
            for arm in arms:
                errors[arm.name]["params"] = relative_error(list(zip(arm.weights(), judge.weights(), strict=True)))
        yield record | {"arms": results, "truth_errors": errors}


def _own_step(arm: Arm, stock: Arm, rows: StepRows, timed: dict[str, Any]) -> dict[str, Any]:
    """What an arm's update from its own weights, and its optimizer's step, add to the figures that were `timed`."""
    own = arm.passes(rows, infer=False)
    return {
        "seconds": own["seconds"] | timed["seconds"],  # the optimizer's is own's
        "added_gib": own["added_gib"] | timed["added_gib"],
        "values": arm.values,
        "own_weights": {
            "log_probs_max": largest_of_ranks(largest(arm.log_probs.double() - stock.log_probs.double())),
            "grads": relative_error(list(zip(arm.grads, stock.grads, strict=True))),
            "params": parameter_distance(arm, stock),
        },
    }


def _warm_up(arms: list[Arm], rows: StepRows) -> float | None:
    """One of each pass per arm; returns how far stock's log-probs are from the recorded old ones, at most."""
    for arm in arms:
        arm.passes(rows, optimize=False)
    old, lengths = rows.jagged["old_log_probs"]
    if not torch.equal(lengths, rows.jagged["responses"][1]):
        return None
    return largest_of_ranks(largest((arms[0].log_probs.float() - old)[rows.jagged["response_mask"][0].bool()]))


def _errors(arm: Arm, reference: Arm) -> dict[str, float]:
    """Relative errors of the update's log-probs, of all gradients and of the worst parameter's."""
    return {
        "log_probs": relative_error([(arm.log_probs, reference.log_probs)]),
        "grads": relative_error(list(zip(arm.grads, reference.grads, strict=True))),
        "worst_grad": max(errors_by_parameter(arm, reference)),
    }


def _same_weights(arm: Arm, stock: Arm, rows: StepRows) -> dict[str, float]:
    """`_errors` against stock, that of the other log-probs, and the loss's relative to the mean size of the advantages
    that it averages."""
    advantages = rows.jagged["advantages"][0].abs()
    scale = largest_of_ranks(float(advantages.mean()) if len(advantages) else 0.0)
    return _errors(arm, stock) | {
        "infer_log_probs": relative_error([(arm.infer_log_probs, stock.infer_log_probs)]),
        "loss": abs(arm.values["loss"] - stock.values["loss"]) / max(scale, abs(stock.values["loss"]), 1e-300),
    }
