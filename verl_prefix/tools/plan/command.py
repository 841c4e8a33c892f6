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
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice, tee
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import verl_prefix.plugin  # noqa: F401  first: whatever imports verl imports it, and must not find us half imported
from verl_prefix.auto.shape import model_shape
from verl_prefix.files import write_whole
from verl_prefix.models.recurrent import packing_leak
from verl_prefix.models.support import unsupported_reasons
from verl_prefix.tools.plan.options import CONFIG_PATH, TIMINGS, PlanError, is_dump, spread
from verl_prefix.tools.plan.predict import PATHS, SEED, MicroBatch, Sizes, predict
from verl_prefix.tools.plan.training_command import (
    check_values,
    compose_config,
    micro_batches,
    read_model,
    read_model_config,
    read_prompts,
    read_tokenizer,
    refusals,
    sequence_ranks,
)
from verl_prefix.tools.report import provenance
from verl_prefix.tools.simulate.command import fits_nothing, read_job, show_simulated, simulated


def response_lengths(spec: str | None, longest: int, tokenizer: Any) -> tuple[Iterator[int], list[str]]:
    """Endless draws, the same in every run: of a normal distribution (`spread`), cut to 1 to `longest`, or of the
    outputs in verl's rollout dumps; and which spread nobody asked for. Where nothing is said the mean is half of the
    longest response: rows of one length would hide what a trainer's row order costs.

    Raises:
        PlanError: the specification is none of these, or the dumps hold no outputs.
    """
    draw = Random(SEED)
    if spec and is_dump(spec):
        files = sorted(Path(spec).glob("*.jsonl")) if Path(spec).is_dir() else [Path(spec)]
        try:
            texts = [json.loads(line)["output"] for file in files for line in file.read_text().splitlines()]
        except (ValueError, KeyError, TypeError) as error:
            wrong = f"{type(error).__name__}: {error}"
            raise PlanError(f"{spec} is not what trainer.rollout_data_dir writes ({wrong})") from None
        if not texts:
            raise PlanError(f"{spec} holds no rollouts")
        # A finished response also has its end token.
        lengths = [min(len(ids) + 1, longest) for ids in tokenizer(texts, add_special_tokens=False).input_ids]
        return (draw.choice(lengths) for _ in count()), []
    mean, std = spread(spec or str(max(1, longest / 2)))
    if mean > longest:
        raise PlanError(
            f"--response-lengths {spec!r}: write a mean of 1 to {longest} tokens (data.max_response_length; raise it "
            "for more)"
        )
    # A draw may be infinite where STD is huge.
    draws = (round(min(longest, max(1, draw.gauss(mean, std)))) for _ in count())
    if spec and "," in spec:
        return draws, []
    return draws, [
        f"response lengths are drawn around {mean:g} tokens with a deviation of {std:g}, from 1 to {longest} (data."
        "max_response_length); --response-lengths MEAN,STD or a folder of trainer.rollout_data_dir says what yours are"
    ]


def sizes(config: Any) -> Sizes:
    """Raises PlanError where the batch sizes do not divide."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompts, mini, ranks = config.data.train_batch_size, actor.ppo_mini_batch_size, config.trainer.n_gpus_per_node
    ranks *= config.trainer.nnodes
    shared, shared_by_ref = (sequence_ranks(config.actor_rollout_ref[role]) for role in ("actor", "ref"))
    if ranks % shared == 0:  # the driver refuses others
        ranks //= shared
    if prompts % mini or mini * rollout.n % ranks:
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
        prompts, rollout.n, mini_batches=prompts // mini, ranks=ranks, micro_batches=passes, ref_in_actor=ref_in_actor,
        whole=whole, exchange=exchange, sequence_ranks=shared, ref_sequence_ranks=shared_by_ref,
    )  # fmt: skip


def splits_groups(size: Sizes) -> bool:
    """True where the trainer may spread a prompt's rows over mini-batches."""
    return size.rollouts > 1 and size.mini_batches > 1 and not size.whole


def notes(config: Any, size: Sizes, leak: str | None, update: float, update_of_whole: float) -> list[str]:
    """Names what keeps prompts from being shared, and what is wrong with model_engine=dp: `recurrent.packing_leak`.

    Args:
        update, update_of_whole: the update's speed-up, also with the trainer mode that keeps groups whole.
    """
    lines = []
    if leak and any(micro.tokens or micro.rows > 1 for micro in size.micro_batches.values()):
        lines.append(
            f"model_engine=dp would be wrong for this model: {leak}, and a row's state goes on in the next row. "
            "model_engine=prefix computes row by row where it takes verl's own path; with dp set "
            "actor_rollout_ref.model.use_remove_padding=False"
        )
    if size.rollouts == 1:
        return [*lines, "actor_rollout_ref.rollout.n=1: a prompt has one response, nothing to share; set 2 or more"]
    mode = config.trainer.v1.trainer_mode
    if not size.exchange and size.ranks > 1:
        lines.append(
            f"actor_rollout_ref.actor.prefix.exchange=off leaves a prompt's rows on {size.ranks} ranks, and each "
            "shares only what it holds; set it to auto"
        )
    if splits_groups(size):
        lines.append(
            f"trainer.v1.trainer_mode={mode} spreads a prompt's rows over {size.mini_batches} mini-batches, and each "
            f"computes it again; set trainer.v1.trainer_mode=prefix_{mode} for an update {update_of_whole:.2f} times "
            f"as fast as stock's, not {update:.2f}"
        )
    return lines


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
) -> dict[str, Any]:
    """The plan, as JSON can hold it; without figures where the model is refused.

    Args:
        config_name, words, config_path: see `compose_config`. parts: see `options.shares`. gpu, fit_gib: of a
            simulation, see `simulated`; or None.

    Raises:
        PlanError: something that the plan needs is missing or does not fit.
    """
    parts = parts or {}
    config = compose_config(config_name, words, config_path)
    check_values(config)
    size, roles = sizes(config), config.actor_rollout_ref
    if gpu and size.sequence_ranks > 1:
        raise PlanError(
            "--simulate knows no sequence parallelism; leave it out, or set ulysses_sequence_parallel_size=1"
        )
    reasons = refusals(config, config.trainer.n_gpus_per_node * config.trainer.nnodes)
    if reasons and unsupported_reasons(read_model_config(config)):
        return {"unsupported": reasons, "notes": []}
    tokenizer = read_tokenizer(config)
    longest = config.data.max_response_length
    draws, assumed = response_lengths(responses, longest, tokenizer)
    sample = list(islice(draws, 2000))
    prompts, overlong = read_prompts(config, tokenizer)
    empty = read_model(config)
    lengths = [prompt.tokens for prompt in prompts]
    mixed = (roles.actor.fsdp_config.get("mixed_precision") or {}).get("param_dtype", "bf16")
    num_parameters = sum(parameter.numel() for parameter in empty.parameters())
    shape = model_shape(empty, torch.float32 if mixed == "fp32" else torch.bfloat16)
    leak = packing_leak(empty) if roles.model.use_remove_padding else None
    draws, again = tee(draws)
    predicted = predict(roles, size, shape=shape, prompts=prompts, responses=draws, one_row=leak is not None)
    used, gains, gains_of_whole = roles.actor.prefix.schedule, predicted.gains, predicted.gains
    if splits_groups(size):
        whole = replace(size, whole=True)
        gains_of_whole = predict(roles, whole, shape, prompts=prompts, responses=again, one_row=leak is not None).gains
    step = 1.0 / (1.0 - sum(parts.values()) + sum(share / gains[used][name] for name, share in parts.items()))
    ratio = [p / (p + s) for p, s in zip(lengths, sample, strict=False)]
    simulation = {}
    if gpu:
        first = predicted.first
        budgets = {name: size.micro_batches[name].budget(first) for name in ("update", "old")}
        job = read_job(roles, empty.config, groups=first, shown=predicted.shown, budgets=budgets, ranks=size.ranks)
        simulation = {"simulated": simulated(job, gpu, fit_gib, config.trainer.n_gpus_per_node)}
    return {
        "unsupported": reasons,
        "notes": notes(config, size, leak, gains[used]["update"], gains_of_whole[used]["update"]),
        "assumed": assumed,
        "prompt_tokens": percentiles([float(x) for x in lengths]) | {"count": len(lengths), "overlong": overlong},
        "response_tokens": percentiles([float(x) for x in sample]),
        "prefix_share_of_a_row": percentiles(ratio),
        "groups_per_rank_and_mini_batch": percentiles(predicted.bins),
        "tokens": {
            "logical": predicted.logical,
            "physical": predicted.physical,
            "ratio": predicted.logical / predicted.physical,
            "ratio_without_exchange": predicted.logical / predicted.physical_without,
        },
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
    if "step" in report["speedup"]:
        lines.append(f"whole step: {report['speedup']['step']:.2f}x")
    if report["prompt_tokens"]["overlong"]:
        lines.append(f"{report['prompt_tokens']['overlong']} prompts are over data.max_prompt_length and not counted")
    _print(lines, console)


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
