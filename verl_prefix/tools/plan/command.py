"""`verl-prefix plan`: from a training command's own overrides, what sharing the prefix would do to it.

Composes the same Hydra config as the command, reads its train parquet with its tokenizer, draws response lengths,
deals rows as the trainer does, exchanges them as the engine does, and prices every pass with `cost`. No GPU, no Ray, no
weights: the model exists on torch's meta device alone. Prompts with images or videos are decoded and counted by verl's
own dataset and the model's processor. Not modelled: rollout, reward, what is idle between passes; and, but by
`--simulate`, communication, the optimizer and a vision tower (ours runs it once per group: the gain is larger than
said).
"""

import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import verl_prefix.plugin  # noqa: F401  first: whatever imports verl imports it, and must not find us half imported
from verl_prefix.auto.shape import model_shape
from verl_prefix.files import write_whole
from verl_prefix.models.recurrent import packing_leak
from verl_prefix.models.support import unsupported_reasons
from verl_prefix.tools.plan.options import CONFIG_PATH, TIMINGS, PlanError, Turns, is_dump
from verl_prefix.tools.plan.predict import PATHS, MicroBatch, Predictor, Sizes, predict
from verl_prefix.tools.plan.training_command import (
    check_values,
    compose_config,
    micro_batches,
    read_model,
    read_model_config,
    read_tokenizer,
    refusals,
    sequence_ranks,
)
from verl_prefix.tools.plan.turns import LEVELS, read_dump
from verl_prefix.tools.plan.work import Work, counts_rows, kept_whole, read_work, splits_groups
from verl_prefix.tools.report import provenance
from verl_prefix.tools.simulate.command import fits_nothing, read_job, show_simulated, simulated


def sizes(config: Any, several_turns: bool = False) -> Sizes:
    """Raises PlanError where the batch sizes do not divide; rows of several turns are padded, whatever they are."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompts, mini, ranks = config.data.train_batch_size, actor.ppo_mini_batch_size, config.trainer.n_gpus_per_node
    ranks *= config.trainer.nnodes
    shared, shared_by_ref = (sequence_ranks(config.actor_rollout_ref[role]) for role in ("actor", "ref"))
    if ranks % shared == 0:  # the driver refuses others
        ranks //= shared
    if (prompts % mini and not several_turns) or mini * rollout.n % ranks:
        raise PlanError(
            f"data.train_batch_size={prompts}, actor.ppo_mini_batch_size={mini}, rollout.n={rollout.n}, {ranks} ranks: "
            "make the batch a multiple of the mini-batch, and mini-batch times n one of the ranks"
        )
    keys = micro_batches(config)
    ref_in_actor = keys["ref"][0].startswith("actor_rollout_ref.rollout.")
    factors = {name: shared_by_ref if name == "ref" and not ref_in_actor else shared for name in keys}
    passes = {
        name: MicroBatch(value and value * factors[name]) if counts_tokens else MicroBatch(None, value or 1)
        for name, (_, value, counts_tokens) in keys.items()
    }
    whole, exchange = config.trainer.v1.trainer_mode.startswith("prefix_"), actor.prefix.exchange != "off"
    return Sizes(
        prompts, rollout.n, mini_batches=prompts // mini or 1, ranks=ranks, micro_batches=passes,
        ref_in_actor=ref_in_actor, whole=whole, by_prompts=actor.prefix.mini_batches == "prompts", exchange=exchange,
        sequence_ranks=shared, ref_sequence_ranks=shared_by_ref,
    )  # fmt: skip


def notes(config: Any, work: Work, leak: str | None, update: float, update_of_whole: float) -> list[str]:
    """Names what keeps prompts from being shared, and what is wrong with model_engine=dp: `recurrent.packing_leak`.

    Args:
        update, update_of_whole: the update's speed-up, also of steps that are `kept_whole`.
    """
    lines, size, turns = [], work.steps[0].size, work.turns
    if turns and max(work.prompts) > config.data.max_prompt_length:
        lines.append(
            f"histories have up to {max(work.prompts)} tokens, and data.max_prompt_length="
            f"{config.data.max_prompt_length} ends their sessions, without a word; raise it"
        )
    if leak and any(micro.tokens or micro.rows > 1 for micro in size.micro_batches.values()):
        lines.append(
            f"model_engine=dp would be wrong for this model: {leak}, and a row's state goes on in the next row. "
            "model_engine=prefix computes row by row where it takes verl's own path; with dp set "
            "actor_rollout_ref.model.use_remove_padding=False"
        )
    if size.rollouts == 1 and not turns:
        return [*lines, "actor_rollout_ref.rollout.n=1: a prompt has one response, nothing to share; set 2 or more"]
    mode, mini = config.trainer.v1.trainer_mode, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if not size.exchange and size.ranks > 1:
        lines.append(
            f"actor_rollout_ref.actor.prefix.exchange=off leaves a prompt's rows on {size.ranks} ranks, and each "
            "shares only what it holds; set it to auto"
        )
    updates = round(size.mini_batches * size.prompts / work.priced)
    gain = f"for an update {update_of_whole:.2f} times as fast as stock's, not {update:.2f}"
    if counts_rows(config, work):
        whole = "" if size.whole else f" and trainer.v1.trainer_mode=prefix_{mode}"
        lines.append(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} counts rows: a step makes {updates} "
            f"updates, between which sessions are torn; set actor_rollout_ref.actor.prefix.mini_batches=prompts{whole} "
            f"{gain}"
        )
    elif splits_groups(size):
        lines.append(
            f"trainer.v1.trainer_mode={mode} spreads a prompt's rows over {size.mini_batches} mini-batches, and each "
            f"computes it again; set trainer.v1.trainer_mode=prefix_{mode} {gain}"
        )
    return lines


def of_trees(predicted: Predictor) -> dict[str, Any]:
    """What a value of prefix.trees makes of a step, by the schedule in use."""
    return {
        "tokens": dict(predicted.computed),
        "speedup": predicted.gains[predicted.schedule],
        "added_gib": predicted.peaks[predicted.schedule] / 2**30,
    }


# What another value of prefix.trees must gain to be worth a word: a system prompt, too, changes bits.
WORTH = 1.02


def verdict(trees: dict[str, dict[str, Any]], used: str) -> str | None:
    """The value of prefix.trees that pays, of those that gain as much the one that shares least; None where the command
    has it already, and rows share whole prompts alone, or where none was counted."""
    if not trees:  # prompts have images
        return None
    updates = {over: one["speedup"]["update"] for over, one in trees.items()}
    best = next(over for over, gain in updates.items() if gain * WORTH >= max(updates.values()))
    used = used if used in trees else "off"
    others = ", ".join(f"{gain:.2f} with {over}" for over, gain in updates.items() if over != best)
    told = f"an update {updates[best]:.2f} times as fast as stock's; {others}"
    if best != used:
        return f"set actor_rollout_ref.actor.prefix.trees={best} for {told}"
    return f"prefix.trees={best} pays: {told}" if best != "off" else None


def percentiles(values: list[float]) -> dict[str, float]:
    """p5, p50, p95 and mean."""
    cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
    return {"p5": cuts[0], "p50": statistics.median(values), "p95": cuts[18], "mean": statistics.fmean(values)}


def build(
    config_name: str,
    words: list[str],
    responses: str | None,
    parts: dict[str, float] | None,
    config_path: str = CONFIG_PATH,
    gpu: str | None = None,
    fit_gib: float | None = None,
    turns: Turns | None = None,
) -> dict[str, Any]:
    """The plan, as JSON can hold it; without figures where the model is refused.

    Args:
        config_name, words, config_path: see `compose_config`. parts: see `options.shares`. gpu, fit_gib: of a
            simulation, see `simulated`; or None. turns: of sessions; None: one, or as dumps say.

    Raises:
        PlanError: something that the plan needs is missing or does not fit.
    """
    parts = parts or {}
    config = compose_config(config_name, words, config_path)
    check_values(config)
    roles = config.actor_rollout_ref
    reasons = refusals(config, config.trainer.n_gpus_per_node * config.trainer.nnodes)
    if reasons and unsupported_reasons(read_model_config(config)):
        return {"unsupported": reasons, "notes": []}
    tokenizer = read_tokenizer(config)
    dump = read_dump(responses, tokenizer) if responses and is_dump(responses) else None
    size = sizes(config, several_turns=bool(turns or dump))
    if gpu and size.sequence_ranks > 1:
        raise PlanError(
            "--simulate knows no sequence parallelism; leave it out, or set ulysses_sequence_parallel_size=1"
        )
    if fit_gib and (turns or dump):
        raise PlanError("--fit searches rows of one prompt, and these are of several turns; leave it out")
    empty = read_model(config)
    mixed = (roles.actor.fsdp_config.get("mixed_precision") or {}).get("param_dtype", "bf16")
    num_parameters = sum(parameter.numel() for parameter in empty.parameters())
    shape = model_shape(empty, torch.float32 if mixed == "fp32" else torch.bfloat16)
    leak = packing_leak(empty) if roles.model.use_remove_padding else None
    work = read_work(config, size, shape, tokenizer, responses, turns or dump)
    used, over = roles.actor.prefix.schedule, roles.actor.prefix.trees
    trees = {
        level: predict(roles, [replace(work.with_tokens, over=level)], leak is not None)
        for level in (LEVELS if work.turns else LEVELS[::2])
        if work.with_tokens is not None
    }
    predicted = trees.get(over) if work.turns or over == "batch" else None
    predicted = predicted or predict(roles, work.steps, leak is not None)
    gains, of_whole = predicted.gains, predicted.gains[used]["update"]
    step_size = work.steps[0].size
    if (torn := counts_rows(config, work)) or splits_groups(step_size):
        whole = predict(roles, [kept_whole(one, torn) for one in work.steps], leak is not None)
        of_whole = whole.gains[used]["update"]
    step = 1.0 / (1.0 - sum(parts.values()) + sum(share / gains[used][name] for name, share in parts.items()))
    simulation = {}
    if gpu:
        first = predicted.first
        budgets = {name: size.micro_batches[name].budget(first) for name in ("update", "old")}
        job = read_job(roles, empty.config, groups=first, shown=predicted.shown, budgets=budgets, ranks=size.ranks)
        simulation = {"simulated": simulated(job, gpu, fit_gib, config.trainer.n_gpus_per_node)}
    return {
        "unsupported": reasons,
        "notes": notes(config, work, leak, gains[used]["update"], of_whole),
        "assumed": work.assumed,
        "prompt_tokens": percentiles([float(x) for x in work.prompts])
        | {"count": len(work.prompts), "overlong": work.overlong},
        "response_tokens": percentiles([float(x) for x in work.responses]),
        "prefix_share_of_a_row": percentiles([p / (p + s) for p, s in zip(work.prompts, work.responses, strict=False)]),
        "groups_per_rank_and_mini_batch": percentiles(predicted.bins),
        "tokens": {
            "logical": predicted.logical,
            "physical": predicted.computed["update"],
            "ratio": predicted.logical / predicted.computed["update"],
            "ratio_without_exchange": predicted.logical / predicted.physical_without,
        },
        "turns": work.turns,
        "updates": round(step_size.mini_batches * step_size.prompts / work.priced),
        "trees": {level: of_trees(one) for level, one in trees.items()},
        "verdict": verdict({level: of_trees(one) for level, one in trees.items()}, over),
        "schedule": used,
        "packed_groups": predicted.packed,
        "phased_groups": predicted.phased,
        "speedup": gains[used] | ({"step": step} if parts else {}),
        "speedup_by_schedule": {schedule: gains[schedule] for schedule in PATHS},
        # fp32 weights, gradients and two AdamW moments, over the ranks that share them.
        "resident_gib": 16 * num_parameters / predicted.memory.ranks / 2**30,
        "added_gib": {name: value / 2**30 for name, value in predicted.peaks.items()},
        **simulation,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Prints what `build` says."""
    if "speedup" in report:
        _show_figures(report, console)
    if "simulated" in report:
        show_simulated(report["simulated"], console)
    lines = [f"warning: {note}" for note in report["notes"]]
    lines += [f"unsupported: {reason}" for reason in report["unsupported"]]
    _print(lines, console)


def _print(lines: list[str], console: Console) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _show_figures(report: dict[str, Any], console: Console) -> None:
    lengths = Table("tokens", "p5", "median", "p95", "mean", title="lengths")
    rows = {"prompt": "prompt_tokens", "response": "response_tokens", "prompt share of a row": "prefix_share_of_a_row",
            "groups per rank and mini-batch": "groups_per_rank_and_mini_batch"}  # fmt: skip
    for title, key in rows.items():
        lengths.add_row(title, *(f"{report[key][column]:.4g}" for column in ("p5", "p50", "p95", "mean")))
    console.print(lengths)
    gains = Table("expected speed-up", *PATHS, title="FLOPs of verl's path over ours; the slowest rank counts")
    for name in TIMINGS.values():
        gains.add_row(name, *(f"{report['speedup_by_schedule'][s][name]:.2f}" for s in PATHS))
    console.print(gains)
    if report["turns"]:
        _show_trees(report, console)
    memory = Table(
        "GiB per rank", *report["added_gib"], title="weights, gradients, AdamW; what an update adds at its peak"
    )
    memory.add_row("added", *(f"{value:.2f}" for value in report["added_gib"].values()))
    memory.add_row("resident", *(f"{report['resident_gib']:.2f}" for _ in report["added_gib"]))
    console.print(memory)
    tokens = report["tokens"]
    lines = [
        *(f"assumed: {assumption}" for assumption in report["assumed"]),
        f"tokens: {tokens['logical']} logical, {tokens['physical']} computed, {tokens['ratio']:.2f} to 1; "
        f"{tokens['ratio_without_exchange']:.2f} where rows stay on their ranks",
        f"schedule {report['schedule']}: {report['packed_groups']} groups packed, {report['phased_groups']} in phases"
        + ("" if report["packed_groups"] + report["phased_groups"] else "; verl's own path, sharing would not pay"),
    ]
    if report["verdict"]:
        lines.append(report["verdict"])
    if "step" in report["speedup"]:
        lines.append(f"whole step: {report['speedup']['step']:.2f}x")
    if report["prompt_tokens"]["overlong"]:
        lines.append(f"{report['prompt_tokens']['overlong']} prompts are over data.max_prompt_length and not counted")
    _print(lines, console)


def _show_trees(report: dict[str, Any], console: Console) -> None:
    trees = Table(
        "prefix.trees", *(x for name in TIMINGS.values() for x in (f"tokens of {name}", "speed-up")), "added GiB",
        title=f"rows of turns, {report['turns']:.3g} of a session; updates of a step: {report['updates']}; schedule: "
        f"{report['schedule']}",
    )  # fmt: skip
    nothing = (str(report["tokens"]["logical"]), "1.00") * len(TIMINGS)
    trees.add_row("(stock)", *nothing, f"{report['added_gib']['stock']:.2f}")
    for over, one in report["trees"].items():
        cells = (x for name in TIMINGS.values() for x in (str(one["tokens"][name]), f"{one['speedup'][name]:.2f}"))
        trees.add_row(over + " (one level)" * (over == "off"), *cells, f"{one['added_gib']:.2f}")
    console.print(trees)


def run(out: Path | None, *command: Any, **options: Any) -> int:
    """The command; returns 0, or 1 where the run would be refused, or by simulation fits no GPU.

    Args:
        command, options: of `build`.

    Raises:
        PlanError: see `build`.
    """
    report = build(*command, **options)
    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    show(report, Console() if told else Console(width=120))  # in a log, tables keep their columns
    if out:
        write_whole(out, json.dumps({**provenance("verl_prefix.plan/1"), **report}, indent=1) + "\n")
    return 1 if report["unsupported"] or ("simulated" in report and fits_nothing(report["simulated"])) else 0
