"""What `verl-prefix plan` finds out about a command whose config and data are read, and its words and tables.

Draws response lengths, deals rows as the trainer does, exchanges them as the engine does, and prices every pass with
`cost`. No GPU, no Ray, no weights: the model exists on torch's meta device alone. Prompts with images or videos are
decoded and counted by verl's own dataset and the model's processor. Not modelled: rollout, reward, what is idle between
passes; and, but by `--simulate`, communication, the optimizer and a vision tower (ours runs it once per group: the gain
is larger than said).
"""

import statistics
from dataclasses import replace
from typing import Any

import verl_prefix.plugin  # noqa: F401  first: whatever imports verl imports it, and must not find us half imported
from verl_prefix.auto.shape import model_shape
from verl_prefix.backends.own_path import wrong_when_sharded
from verl_prefix.config import attention_of
from verl_prefix.config.driver import is_v1
from verl_prefix.models.recurrent import packing_leak
from verl_prefix.models.support import unsupported_reasons
from verl_prefix.models.vision import is_vision_config
from verl_prefix.tools.plan.compose import Asked, check_batch
from verl_prefix.tools.plan.options import TIMINGS, PlanError
from verl_prefix.tools.plan.predict import PATHS, Predictor, predict
from verl_prefix.tools.plan.training_command import (
    check_prefix,
    read_model,
    read_model_config,
    read_tokenizer,
    refusals,
    state_bytes,
)
from verl_prefix.tools.plan.turns import LEVELS, read_dump
from verl_prefix.tools.plan.verdict import Room, judge, needed_gib, rollout_is_apart, step_gain
from verl_prefix.tools.plan.work import Work, counts_rows, read_work, sizes, splits_groups, steps_of
from verl_prefix.tools.report import Table
from verl_prefix.tools.simulate.command import compute_dtype, read_job, simulated, tables
from verl_prefix.tools.simulate.hardware import GIB, read_hardware


def notes(config: Any, work: Work, leak: str | None, spread: str | None, predicted: Predictor) -> list[str]:
    """Names what keeps prompts from being shared, what is off in ours, and what is wrong with model_engine=dp.

    Args:
        leak: `recurrent.packing_leak`. spread: `stock_path.wrong_when_sharded`.
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
    if spread and max(size.sequence_ranks, size.ref_sequence_ranks) > 1:
        lines.append(
            f"model_engine=dp would be wrong under ulysses_sequence_parallel_size > 1: {spread}. model_engine=prefix "
            "computes whole rows on each rank where it takes verl's own path; with dp set "
            "actor_rollout_ref.{actor,ref}.fsdp_config.ulysses_sequence_parallel_size=1"
        )
    if config.actor_rollout_ref.model.enable_activation_offload and predicted.schedule != "stock":
        ours, stock = (predicted.peaks[path] / GIB for path in (predicted.schedule, "stock"))
        offload = "" if config.actor_rollout_ref.actor.prefix.offload else "offload=true and "
        less = f"; in phases (actor.prefix.schedule=phased) ours adds less with {offload}a smaller wave_tokens"
        lines.append(
            f"actor_rollout_ref.model.enable_activation_offload=True is off in this engine: an update adds {ours:.3g} "
            f"GiB, and under model_engine=dp {stock:.3g} with that offload" + less
        )
    if rollout_is_apart(config) and is_v1(config) and not config.actor_rollout_ref.hybrid_engine:
        lines.append("actor_rollout_ref.hybrid_engine=False needs VERL_LOGGING_LEVEL=WARN in the job's environment")
    if size.rollouts == 1 and not turns:
        return [*lines, "actor_rollout_ref.rollout.n=1: a prompt has one response, nothing to share; set 2 or more"]
    mode, mini = config.trainer.v1.trainer_mode, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if not size.exchange and size.ranks > 1:
        lines.append(
            f"actor_rollout_ref.actor.prefix.exchange=off leaves a prompt's rows on {size.ranks} ranks, and each "
            "shares only what it holds; set it to auto"
        )
    updates = round(size.mini_batches * size.prompts / work.priced)
    if counts_rows(config, work):
        whole = "" if mode.startswith("prefix_") else f" and trainer.v1.trainer_mode=prefix_{mode}"
        lines.append(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} counts rows: a step makes {updates} "
            f"updates, between which sessions are torn; set actor_rollout_ref.actor.prefix.mini_batches=prompts{whole}"
        )
    elif splits_groups(size) and not is_v1(config):
        lines.append(
            f"verl deals rows to {size.mini_batches} mini-batches by length, and each computes their prompts again; "
            f"set actor_rollout_ref.actor.ppo_mini_batch_size to a multiple of the {size.ranks} ranks, without actor."
            "use_prefix_grouper=False, or trainer.balance_batch=False"
        )
    elif splits_groups(size):
        lines.append(
            f"trainer.v1.trainer_mode={mode} spreads a prompt's rows over {size.mini_batches} mini-batches, and each "
            f"computes it again; set trainer.v1.trainer_mode=prefix_{mode}"
        )
    return lines


def of_trees(predicted: Predictor) -> dict[str, Any]:
    """What a value of prefix.trees makes of a step, by the schedule in use."""
    return {
        "tokens": dict(predicted.computed),
        "speedup": predicted.gains[predicted.schedule],
        "added_gib": predicted.peaks[predicted.schedule] / 2**30,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """p5, p50, p95 and mean."""
    cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
    return {"p5": cuts[0], "p50": statistics.median(values), "p95": cuts[18], "mean": statistics.fmean(values)}


def figures(asked: Asked, parts: dict[str, float], gpu: str, simulate: bool, fit_gib: float | None) -> dict[str, Any]:
    """The plan, as JSON can hold it; without figures where the model is refused.

    Args:
        parts: see `options.shares`. gpu: see `read_hardware`. simulate, fit_gib: see `simulated`.

    Raises:
        PlanError: the model cannot be read, or something does not fit it.
    """
    config, turns = asked.config, asked.turns
    check_prefix(config)
    # From here on the model's folder is read.
    roles = config.actor_rollout_ref
    reasons = refusals(config, config.trainer.n_gpus_per_node * config.trainer.nnodes)
    refused = {"unsupported": reasons, "verdict": f"Not possible: {reasons[0]}"} if reasons else {"unsupported": []}
    if reasons and unsupported_reasons(read_model_config(config)):
        return {**refused, "notes": []}
    tokenizer = read_tokenizer(config)
    dump = read_dump(asked.rollouts, tokenizer)
    check_batch(config, several_turns=bool(turns or dump))
    if fit_gib and (turns or dump):
        raise PlanError("--fit searches rows of one prompt, and these are of several turns; leave it out")
    size, empty = sizes(config), read_model(config)
    if simulate and size.sequence_ranks > 1 and is_vision_config(empty.config):
        raise PlanError(
            "--simulate knows no sequence parallelism of pixels; leave it out, or set ulysses_sequence_parallel_size=1"
        )
    shape, state = model_shape(empty, compute_dtype(roles.actor.fsdp_config)), state_bytes(roles, empty)
    leak = packing_leak(empty) if roles.model.use_remove_padding else None
    spread = wrong_when_sharded(empty, attention_of(roles.model))
    work = read_work(
        config, size, shape, asked.messages, tokenizer, asked.responses, rollouts=asked.rollouts, turns=turns or dump
    )
    used, over = roles.actor.prefix.schedule, roles.actor.prefix.trees

    def price(other: Any) -> Predictor:
        steps = steps_of(work, other, sizes(other))
        return predict(other.actor_rollout_ref, steps, leak is not None, spread is not None, state)

    trees = {
        level: predict(roles, [replace(work.with_tokens, over=level)], leak is not None, spread is not None, state)
        for level in (LEVELS if work.turns else LEVELS[::2])
        if work.with_tokens is not None
    }
    predicted = trees.get(over) if work.turns or over == "batch" else None
    predicted = predicted or price(config)
    gains, step_size = predicted.gains, work.steps[0].size
    simulation, room, needed = {}, None, needed_gib(predicted)
    if not any(word.lstrip("+") == "platform=cpu" for word in asked.words):
        room = Room(read_hardware(gpu).capacity / GIB, gpu)
    if simulate:
        first = predicted.first
        budgets = {name: size.micro_batches[name].budget(first) for name in ("update", "old")}
        job = read_job(
            roles, empty.config, groups=first, shown=predicted.shown, budgets=budgets, ranks=size.gpus,
            sequence_ranks=size.sequence_ranks,
        )  # fmt: skip
        simulation = {"simulated": simulated(job, gpu, fit_gib, config.trainer.n_gpus_per_node)}
        path = "phased" + "+offload" * roles.actor.prefix.offload if predicted.phased else "packed"
        needed = simulation["simulated"]["arms"][path]["peak_gib"]
    return {
        **judge(config, work, predicted, trees, price, parts=parts, room=room, needed=needed),
        **refused,
        "notes": notes(config, work, leak, spread, predicted),
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
        "schedule": used,
        "packed_groups": predicted.packed,
        "phased_groups": predicted.phased,
        "speedup": gains[used] | ({"step": step_gain(config, predicted, parts)} if parts else {}),
        "speedup_by_schedule": {schedule: gains[schedule] for schedule in PATHS},
        "parameters": shape.parameters,
        "resident_gib": predicted.resident_gib,
        "added_gib": {name: value / 2**30 for name, value in predicted.peaks.items()},
        **simulation,
    }


def lines(report: dict[str, Any]) -> list[str | Table]:
    """What `build` says, in words and tables; the verdict first, of a command that is refused each reason."""
    reasons = report["unsupported"]
    found: list[str | Table] = [f"# {report['verdict']}", *(f"Not possible: {reason}" for reason in reasons[1:])]
    if not reasons:
        found.append(report["advice"])
    if "speedup" in report:
        found += _figures(report)
    if "simulated" in report:
        found += tables(report["simulated"])
    return [*found, *(f"warning: {note}" for note in report["notes"])]


def _figures(report: dict[str, Any]) -> list[str | Table]:
    rows = {"prompt": "prompt_tokens", "response": "response_tokens", "prompt share of a row": "prefix_share_of_a_row",
            "groups per rank and mini-batch": "groups_per_rank_and_mini_batch"}  # fmt: skip
    lengths = [
        (title, *(f"{report[key][column]:.4g}" for column in ("p5", "p50", "p95", "mean")))
        for title, key in rows.items()
    ]
    gains = [
        (name, *(f"{report['speedup_by_schedule'][path][name]:.2f}" for path in PATHS)) for name in TIMINGS.values()
    ]
    added = report["added_gib"]
    memory = [
        ("added", *(f"{value:.2f}" for value in added.values())),
        ("resident", *(f"{report['resident_gib']:.2f}" for _ in added)),
    ]
    tokens = report["tokens"]
    return [
        Table(("tokens", "p5", "median", "p95", "mean"), lengths, "lengths"),
        Table(("expected speed-up", *PATHS), gains, "FLOPs of verl's path over ours; the slowest rank counts"),
        *([_trees(report)] if report["turns"] else ()),
        Table(("GiB per rank", *added), memory, "weights, gradients, AdamW; what an update adds at its peak"),
        *(f"assumed: {assumption}" for assumption in report["assumed"]),
        f"tokens: {tokens['logical']} logical, {tokens['physical']} computed, {tokens['ratio']:.2f} to 1; "
        f"{tokens['ratio_without_exchange']:.2f} where rows stay on their ranks",
        f"schedule {report['schedule']}: {report['packed_groups']} groups packed, {report['phased_groups']} in phases",
        *([f"{overlong} prompts are over data.max_prompt_length and not counted"]
          if (overlong := report["prompt_tokens"]["overlong"]) else ()),
    ]  # fmt: skip


def _trees(report: dict[str, Any]) -> Table:
    head = ("prefix.trees", *(x for name in TIMINGS.values() for x in (f"tokens of {name}", "speed-up")), "added GiB")
    nothing = (report["tokens"]["logical"], "1.00") * len(TIMINGS)
    rows: list[tuple[object, ...]] = [("(stock)", *nothing, f"{report['added_gib']['stock']:.2f}")]
    for over, one in report["trees"].items():
        cells = (x for name in TIMINGS.values() for x in (one["tokens"][name], f"{one['speedup'][name]:.2f}"))
        rows.append((over + " (one level)" * (over == "off"), *cells, f"{one['added_gib']:.2f}"))
    title = (
        f"rows of turns, {report['turns']:.3g} of a session; updates of a step: {report['updates']}; schedule: "
        f"{report['schedule']}"
    )
    return Table(head, rows, title)
