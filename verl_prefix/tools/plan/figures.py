"""What `verl-prefix plan` finds out about a command whose config and data are read.

Draws response lengths, deals rows as the trainer does, exchanges them as the engine does, and prices every pass with
`cost`. No GPU, no Ray, no weights: the model exists on torch's meta device alone. Prompts with images or videos are
decoded and counted by verl's own dataset and the model's processor. Not modelled: rollout, reward, what is idle between
passes; and, but by `--simulate`, communication, the optimizer and a vision tower (ours runs it once per group: the gain
is larger than said).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

import verl_prefix.plugin  # noqa: F401  first: whatever imports verl imports it, and must not find us half imported
from verl_prefix.config.driver import BYPASS
from verl_prefix.config.engines import CRITIC, slices_of
from verl_prefix.models.vision import is_vision_config
from verl_prefix.tools.plan.compose import Asked, check_batch
from verl_prefix.tools.plan.notes import notes
from verl_prefix.tools.plan.options import PlanError
from verl_prefix.tools.plan.predict import PATHS, Predictor, Sizes, predict
from verl_prefix.tools.plan.training_command import (
    Model,
    check_prefix,
    read_model,
    read_model_config,
    read_tokenizer,
    refusals,
)
from verl_prefix.tools.plan.turns import LEVELS, read_dump
from verl_prefix.tools.plan.verdict import Price, critic_gains, judge, needed_gib, step_gain
from verl_prefix.tools.plan.work import Work, as_actor, read_work, sizes, steps_of
from verl_prefix.tools.simulate.command import read_job, simulated
from verl_prefix.tools.simulate.hardware import GIB, read_hardware


def _predictions(config: Any, work: Work, model: Model) -> tuple[Predictor, dict[str, Predictor], Price]:
    """Predicted of the command as it is, by each value of prefix.trees, and a function that predicts it with more
    overrides."""
    roles, bypass = config.actor_rollout_ref, bool(OmegaConf.select(config, BYPASS))
    over = roles.actor.prefix.trees

    def price(*overrides: str) -> Predictor:
        other: Any = OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides))) if overrides else config
        return predict(other.actor_rollout_ref, steps_of(work, other, sizes(other)), model, bypass)

    trees = {
        level: predict(roles, [replace(work.with_tokens, over=level)], model, bypass)
        for level in (LEVELS if work.turns else LEVELS[::2])
        if work.with_tokens is not None
    }
    of_level = trees.get(over) if work.turns or over == "batch" else None
    return of_level or price(), trees, price


def _of_critic(config: Any, work: Work) -> tuple[Predictor | None, list[str]]:
    """Predicted of the critic, whose old log-probs are values; None: there is none, or it cannot be priced, and why."""
    other = as_actor(config)
    if other is None:
        return None, []
    try:
        model = read_model(other, critic=True)
    except PlanError:
        return None, ["the critic is not priced: critic.model.path cannot be read here, or has no token classification"]
    steps = [replace(x, shape=model.shape, dead=frozenset()) for x in steps_of(work, other, sizes(other))]
    predicted = predict(other.actor_rollout_ref, steps, model)
    if config.critic._target_ != CRITIC.target:
        predicted.schedule = "stock"
    return predicted, []


def figures(asked: Asked) -> dict[str, Any]:
    """The report, as JSON can hold it; without figures where the command is refused.

    Raises:
        PlanError: the model cannot be read, or something does not fit it.
    """
    options, config, parts = asked.options, asked.config, asked.options.parts
    check_prefix(config)
    # From here on the model's folder is read.
    reasons = refusals(config, config.trainer.n_gpus_per_node * config.trainer.nnodes)
    if reasons:
        read_model_config(config)  # one that cannot be read is said first
        return {"unsupported": reasons, "verdict": f"Not possible: {reasons[0]}", "notes": []}
    tokenizer = read_tokenizer(config) if asked.messages or asked.rollouts else None
    dump = read_dump(asked.rollouts, tokenizer)
    has_turns = bool(options.session or dump)
    check_batch(config, several_turns=has_turns)
    if options.fit and has_turns:
        raise PlanError("--fit searches rows of one prompt, and these are of several turns; leave it out")
    if options.dead_groups and (has_turns or config.actor_rollout_ref.actor.prefix.trees == "batch"):
        raise PlanError("--dead-groups is of groups that share whole prompts, and these share more; leave it out")
    if options.dead_groups and not config.actor_rollout_ref.actor.prefix.skip_zero_advantage:
        key = "actor_rollout_ref.actor.prefix.skip_zero_advantage=true"
        raise PlanError(f"--dead-groups {options.dead_groups:g}: they are computed without {key}; add it")
    size, model = sizes(config), read_model(config)
    if round(options.dead_groups * size.prompts) == size.prompts:
        most = math.floor(1000 * (size.prompts - 1) / size.prompts) / 1000
        raise PlanError(
            f"--dead-groups {options.dead_groups:g} leaves nothing of {size.prompts} prompts to update by; write at "
            f"most {most:g}"
        )
    if options.simulate and size.slices > 1 and is_vision_config(model.hf.config):
        key, _ = slices_of("actor", config.actor_rollout_ref.actor)
        raise PlanError(f"--simulate knows no sequence parallelism of pixels; leave it out, or set {key}=1")
    work = read_work(asked, size, model.shape, tokenizer, dump)
    now, trees, price = _predictions(config, work, model)
    critic, why = _of_critic(config, work)
    needed, simulation = needed_gib(now, critic), {}
    on_cpu = any(word.lstrip("+") == "platform=cpu" for word in options.overrides)
    limit = math.inf if on_cpu else read_hardware(options.gpu).capacity / GIB
    if options.simulate:
        simulation = _simulated(asked, size, now, model)
        path = "phased" + "+offload" * config.actor_rollout_ref.actor.prefix.offload if now.phased else "packed"
        needed = needed_gib(now, critic, simulation["arms"][path]["peak_gib"])
    return {
        **judge(asked, work, now, trees, price, limit=limit, needed=needed, critic=critic),
        "unsupported": [],
        "notes": [*notes(config, work, model, now), *why],
        **_of_rows(work),
        **_of_passes(now, trees),
        "speedup": now.gains[now.schedule] | ({"step": step_gain(config, now, parts, critic)} if parts else {}),
        **({"critic": _figures_of_critic(critic)} if critic else {}),
        "parameters": model.shape.parameters,
        **({"simulated": simulation} if options.simulate else {}),
    }


def _simulated(asked: Asked, size: Sizes, now: Predictor, model: Model) -> dict[str, Any]:
    budgets = {name: size.micro_batches[name].budget(now.first) for name in ("update", "old")}
    job = read_job(
        asked.config.actor_rollout_ref, model.hf.config, groups=now.first, shown=now.shown, budgets=budgets,
        gpus=size.gpus,
    )  # fmt: skip
    return simulated(job, asked.options.gpu, asked.options.fit, asked.config.trainer.n_gpus_per_node)


def _of_rows(work: Work) -> dict[str, Any]:
    """The figures of rows."""
    return {
        "assumed": work.assumed,
        "prompt_tokens": percentiles(work.prompts) | {"count": len(work.prompts), "overlong": work.overlong},
        "response_tokens": percentiles(work.responses),
        "prefix_share_of_a_row": percentiles([p / (p + s) for p, s in zip(work.prompts, work.responses, strict=False)]),
        "turns": work.turns,
        "updates": work.updates,
    }


def _of_passes(now: Predictor, trees: dict[str, Predictor]) -> dict[str, Any]:
    """The figures of groups, tokens, speed-ups and memory."""
    return {
        "groups_per_rank_and_mini_batch": percentiles(now.bins),
        "tokens": {
            "logical": now.logical,
            "physical": now.computed["update"],
            "ratio": now.logical / now.computed["update"],
            "ratio_without_exchange": now.logical / now.physical_without,
        },
        "trees": {
            level: {"tokens": dict(one.computed), "speedup": one.gains[one.schedule],
                    "added_gib": one.peaks[one.schedule] / GIB}
            for level, one in trees.items()
        },
        "schedule": now.schedule,
        "packed_groups": now.packed,
        "phased_groups": now.phased,
        "bubbles": now.bubbles if now.memory.stages > 1 else {},
        "speedup_by_schedule": {schedule: now.gains[schedule] for schedule in PATHS},
        "resident_gib": now.resident_gib,
        "added_gib": {name: value / GIB for name, value in now.peaks.items()},
    }  # fmt: skip


def _figures_of_critic(critic: Predictor) -> dict[str, Any]:
    """Its speed-ups, by the path that it takes and by each, and its memory."""
    gains = {path: critic_gains(critic, path) for path in (*PATHS, critic.schedule)}
    return {
        "schedule": critic.schedule,
        "speedup": gains[critic.schedule],
        "speedup_by_schedule": {path: gains[path] for path in PATHS},
        "tokens": {"logical": critic.logical, "physical": critic.computed["update"]},
        "resident_gib": critic.resident_gib,
        "added_gib": {name: value / GIB for name, value in critic.peaks.items()},
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p5, p50, p95 and mean."""
    values = [float(x) for x in values]
    cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
    return {"p5": cuts[0], "p50": statistics.median(values), "p95": cuts[18], "mean": statistics.fmean(values)}
