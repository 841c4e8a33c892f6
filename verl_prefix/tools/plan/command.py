"""`verl-prefix plan`: from a training command's own overrides, what sharing the prefix would do to it.

Composes the same Hydra config as the command, reads its train parquet with its tokenizer, draws response lengths,
deals rows as the trainer does, exchanges them as the engine does, and prices every pass with `cost`. No GPU, no Ray, no
weights: the model exists on torch's meta device alone. Prompts with images or videos are decoded and counted by verl's
own dataset and the model's processor. Not modelled: rollout, reward, what is idle between passes; and, but by
`--simulate`, communication, the optimizer and a vision tower (ours runs it once per group: the gain is larger than
said).
"""

import json
import math
import os
import statistics
import sys
from collections.abc import Iterator
from itertools import islice
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
from verl_prefix.tools.ab.runs import read_run
from verl_prefix.tools.plan.predict import PATHS, SEED, MicroBatch, Sizes, predict
from verl_prefix.tools.plan.training_command import (
    PlanError,
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
from verl_prefix.tools.simulate.command import Request, fits_nothing, read_job, show_simulated, simulated

# verl's timing -> the pass that it holds.
TIMINGS = {"timing_s/update_actor": "update", "timing_s/old_log_prob": "old", "timing_s/ref": "ref"}


def response_lengths(spec: str | None, longest: int, tokenizer: Any) -> Iterator[int]:
    """Endless draws: of a constant, a normal distribution "MEAN,STD", or the outputs in verl's rollout dumps.

    Raises:
        PlanError: the specification is none of these, or its mean is no length that the run allows.
    """
    draw = Random(SEED)
    if spec and Path(spec).exists():
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
        while True:
            yield draw.choice(lengths)
    spec = spec or str(longest)
    try:
        mean, spread = map(float, (spec if "," in spec else f"{spec},0").split(","))
    except ValueError:
        raise PlanError(f"--response-lengths {spec!r}: write TOKENS, MEAN,STD, or a folder of rollout dumps") from None
    if not (1 <= mean <= longest and 0 <= spread < math.inf):
        raise PlanError(
            f"--response-lengths {spec!r}: write a mean of 1 to {longest} tokens (data.max_response_length; raise it "
            "for more) and a finite STD of at least 0"
        )
    while True:  # a draw may be infinite where STD is huge
        yield round(min(longest, max(1, draw.gauss(mean, spread))))


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


def notes(config: Any, size: Sizes, leak: str | None = None) -> list[str]:
    """Names what keeps prompts from being shared, and what is wrong with model_engine=dp: `recurrent.packing_leak`."""
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
    if not size.whole and size.mini_batches > 1:
        lines.append(
            f"trainer.v1.trainer_mode={mode} spreads a prompt's rows over {size.mini_batches} mini-batches, and each "
            f"computes it again; set trainer.v1.trainer_mode=prefix_{mode}"
        )
    return lines


def shares(spec: str | None) -> dict[str, float]:
    """Share of a stock step that each pass takes: from "update=0.5,old=0.1,ref=0.1", or from a stock run's metrics.

    Raises:
        PlanError, or ValueError of `tools.ab.runs.read_run`: neither of these.
    """
    if spec is None:
        return {}
    if "=" not in spec:
        steps = list(read_run(spec).values())
        whole = statistics.median(step["timing_s/step"] for step in steps)
        return {
            name: statistics.median(step.get(timing, 0.0) for step in steps) / whole for timing, name in TIMINGS.items()
        }
    try:
        given = {name: float(value) for name, value in (pair.split("=") for pair in spec.split(","))}
    except ValueError:
        given = {}
    fit = all(0 <= share <= 1 for share in given.values()) and sum(given.values()) <= 1
    if not given or set(given) - set(TIMINGS.values()) or not fit:
        raise PlanError(
            f"--shares {spec!r}: write update=0.5,old=0.1,ref=0.1 (0 to 1 each, at most 1 together), or a stock run's "
            "file"
        )
    return given


def percentiles(values: list[float]) -> dict[str, float]:
    """p5, p50, p95 and mean."""
    cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
    return {"p5": cuts[0], "p50": statistics.median(values), "p95": cuts[18], "mean": statistics.fmean(values)}


def build(
    config_name: str,
    words: list[str],
    responses: str | None,
    share_spec: str | None,
    config_path: str = "config",
    request: Request | None = None,
) -> dict[str, Any]:
    """The plan, as JSON can hold it; without figures where the model is refused.

    Args:
        config_name, words, config_path: see `compose_config`. request: also simulate.

    Raises:
        PlanError: something that the plan needs is missing or does not fit.
    """
    parts = shares(share_spec)
    config = compose_config(config_name, words, config_path)
    check_values(config)
    size, roles = sizes(config), config.actor_rollout_ref
    if request and size.sequence_ranks > 1:
        raise PlanError(
            "--simulate knows no sequence parallelism; leave it out, or set ulysses_sequence_parallel_size=1"
        )
    reasons = refusals(config, config.trainer.n_gpus_per_node * config.trainer.nnodes)
    if reasons and unsupported_reasons(read_model_config(config)):
        return {"unsupported": reasons, "notes": []}
    empty = read_model(config)
    tokenizer = read_tokenizer(config)
    draws = response_lengths(responses, config.data.max_response_length, tokenizer)
    sample = list(islice(draws, 2000))
    prompts, overlong = read_prompts(config, tokenizer)
    lengths = [prompt.tokens for prompt in prompts]
    mixed = (roles.actor.fsdp_config.get("mixed_precision") or {}).get("param_dtype", "bf16")
    num_parameters = sum(parameter.numel() for parameter in empty.parameters())
    shape = model_shape(empty, torch.float32 if mixed == "fp32" else torch.bfloat16)
    leak = packing_leak(empty) if roles.model.use_remove_padding else None
    predicted = predict(roles, size, shape=shape, prompts=prompts, responses=draws, one_row=leak is not None)
    used, stock = roles.actor.prefix.schedule, predicted.seconds["stock"]
    gains = {path: {name: stock[name] / ours[name] for name in stock} for path, ours in predicted.seconds.items()}
    step = 1.0 / (1.0 - sum(parts.values()) + sum(share / gains[used][name] for name, share in parts.items()))
    ratio = [p / (p + s) for p, s in zip(lengths, sample, strict=False)]
    simulation = {}
    if request:
        first = predicted.first
        budgets = {name: size.micro_batches[name].budget(first) for name in ("update", "old")}
        job = read_job(roles, empty.config, groups=first, shown=predicted.shown, budgets=budgets, ranks=size.ranks)
        simulation = {"simulated": simulated(job, request, config.trainer.n_gpus_per_node)}
    return {
        "unsupported": reasons,
        "notes": notes(config, size, leak),
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
        "rates": "measured" if predicted.measured else "FLOPs",
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
    title = f"{report['rates']} of verl's path over ours; the slowest rank counts"
    gains = Table("expected speed-up", *PATHS, title=title)
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
        PlanError: see `build`; or `out` cannot be a file.
    """
    if out and (out.is_dir() or not out.parent.is_dir()):
        wrong = "is a folder" if out.is_dir() else f"is in {out.parent}, which is no folder here"
        raise PlanError(f"--out {out} {wrong}; write the name of a file in a folder that exists")
    report = build(*command, **options)
    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    show(report, Console() if told else Console(width=120))  # in a log, tables keep their columns
    if out:
        write_whole(out, json.dumps({**provenance("verl_prefix.plan/1"), **report}, indent=1) + "\n")
    return 1 if report["unsupported"] or ("simulated" in report and fits_nothing(report["simulated"])) else 0
