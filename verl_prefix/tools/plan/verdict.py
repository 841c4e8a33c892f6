"""The first lines of `verl-prefix plan`: whether sharing is worth it, and the one change that would gain most.

It is worth it where `prefix.schedule=auto` shares, by the decision that an engine would make (`chooser.decide`).
Changes are priced as the command itself is.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_reference_policy

from verl_prefix.config.driver import BYPASS, is_v1
from verl_prefix.config.engines import FSDP2, engine_of
from verl_prefix.tools.plan.compose import Asked
from verl_prefix.tools.plan.predict import Predictor
from verl_prefix.tools.plan.work import Work, counts_rows, splits_groups

WORTH = 1.02  # what a change must gain to be worth a word
ROLLOUT = 0.5  # of a stock step, where nobody says what its shares are
ACTOR = "actor_rollout_ref.actor"
Price = Callable[..., Predictor]  # predicts the command with these overrides as well


class Change(NamedTuple):
    """Overrides, and what an update gains with and without them; GiB that a rank needs with them."""

    overrides: list[str]
    update: float
    instead_of: float
    needed_gib: float


def path_of(predicted: Predictor) -> str:
    """The schedule in use; of `stock`, which asks for a verdict on sharing, `auto`."""
    return "auto" if predicted.schedule == "stock" else predicted.schedule


def needed_gib(predicted: Predictor, critic: Predictor | None = None, simulated: float | None = None) -> float:
    """What a rank needs at the peak of an update; with the critic's, which takes turns with it: of the engine whose
    turn it is not, what it does not offload.

    Args:
        simulated: the peak of an update of the actor, where that is known better.
    """
    if simulated is None:
        simulated = predicted.resident_gib + predicted.peaks[path_of(predicted)] / 2**30
    if critic is None:
        return simulated
    of_critic = critic.resident_gib + critic.peaks[critic.schedule] / 2**30
    return max(simulated + critic.idle_gib, of_critic + predicted.idle_gib)


def critic_gains(critic: Predictor, path: str) -> dict[str, float]:
    """Speed-ups of value pass and update of a critic, by the names of `options.CRITIC_TIMINGS`."""
    gains = critic.gains[path]
    return {"values": gains["old"], "critic": gains["update"]}


def step_gain(config: Any, predicted: Predictor, parts: dict[str, float], critic: Predictor | None = None) -> float:
    """Speed-up of a whole step.

    Args:
        critic: predicted of it, where there is one.
        parts: shares of a stock step; empty: `ROLLOUT` of it is no pass of the actor's, or nothing where the rollout
            has GPUs of its own.
    """
    gains = predicted.gains[path_of(predicted)] | {"values": 1.0, "critic": 1.0}
    gains |= critic_gains(critic, critic.schedule) if critic else {}
    if not parts:
        bypass = OmegaConf.select(config, BYPASS)
        passes = ["update", *(["old"] if not bypass else []), *(["ref"] if need_reference_policy(config) else [])]
        stock, ours = (sum(predicted.seconds[path][x] for x in passes) for path in ("stock", path_of(predicted)))
        if critic:
            of_critic = (sum(critic.seconds[path][x] for x in ("old", "update")) for path in ("stock", critic.schedule))
            stock, ours = (a + b for a, b in zip((stock, ours), of_critic, strict=True))
        rollout = 0.0 if rollout_is_apart(config) else ROLLOUT
        return 1 / (rollout + (1 - rollout) * ours / stock)
    return 1 / (1 - sum(parts.values()) + sum(share / gains[name] for name, share in parts.items()))


def rollout_is_apart(config: Any) -> bool:
    """True where other GPUs than the trainer's generate meanwhile."""
    return config.trainer.v1.trainer_mode.endswith("separate_async") if is_v1(config) else "rollout" in config


def is_worth_it(predicted: Predictor) -> bool:
    """True where `auto` shares; where it is told to share at a loss, False."""
    return any(not decision.stock and (decision.speedup or 0) >= 1 for decision in predicted.decisions)


def judge(
    asked: Asked, work: Work, now: Predictor, trees: dict[str, Predictor], price: Price, limit: float, needed: float,
    critic: Predictor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The part of the report that says what to do.

    Args:
        now: predicted of the command. trees: the same by `prefix.trees`. limit: GiB of a GPU; infinite without one.
            needed: GiB of a rank. critic: predicted of it, where there is one.
    """
    config, parts = asked.config, asked.options.parts
    fits, gained = needed <= limit, step_gain(config, now, parts, critic)
    worth = is_worth_it(now) and gained >= 1
    changes = _gaining(config, work, now, trees, price, limit=limit, needed=needed, critic=critic)
    change = changes[0] if changes else None
    step = f"step {gained:.2g}x" if gained >= 1.1 else f"step {gained:.2f}x"
    if not parts and rollout_is_apart(config):
        step = f"trainer's {step} while it need not wait for the rollout, which is apart and not planned"
    elif not parts:
        step = f"step about {step.removeprefix('step ')} if rollout is half of it"
    gain = f"update {now.gains[path_of(now)]['update']:.2f}x, {step}"
    memory = f"{needed:.3g} of {limit:.0f} GiB ({asked.options.gpu})"
    start = "Worth it"
    if work.steps[0].size.rollouts == 1 and not work.turns and config.actor_rollout_ref.actor.prefix.trees != "batch":
        start = "Nothing is shared (a prompt has one response), but lm_head skips prompts"
    if not worth:
        reason = f"{gain}: sharing would be slower" if is_worth_it(now) else _reason(work, now)
        verdict = f"Not worth it{' as it is' if change else ''}: {reason}"
    elif not fits:
        verdict = f"{start}, but does not fit: {gain}, needs {memory}"
    else:
        verdict = f"{start}: {gain}"
        ours = engine_of(config.actor_rollout_ref.actor)
        todo = [f"model_engine={ours.name}"] if asked.engine != ours.name else []
        todo += [f"{ACTOR}.prefix.schedule=auto"] if now.schedule == "stock" else []
        trains = "" if ours is FSDP2 else f"this trains with {ours.verls}: "
        verdict += f": {trains}set {' and '.join(todo)}" if todo else ""
    drawn = " (both of one drawn step; the first line's is of several)" if now not in trees.values() else ""
    first = "Gains most" if fits or not change else f"Fits in {change.needed_gib:.3g} GiB"
    advice = [f"Fits in {memory}"] if worth and fits and limit < math.inf else []
    advice += [
        f"{do}: {' '.join(one.overrides)}, update {one.update:.2f}x, not {one.instead_of:.2f}x"
        + ("prefix.trees=" in one.overrides[0]) * drawn
        for do, one in zip((first, *["Gains too"] * (fits and len(changes))), changes, strict=False)
    ] or ["No change that was tried " + ("gains 2 % more" if fits else "fits: use more GPUs")]
    return {"verdict": verdict, "advice": "\n".join(advice), "worth_it": worth, "needed_gib": needed, "fits": fits,
            "change": change and change._asdict()}  # fmt: skip


def _reason(work: Work, now: Predictor) -> str:
    """Why `auto` does not share."""
    if work.steps[0].size.rollouts == 1 and not work.turns:
        return "a prompt has one response (actor_rollout_ref.rollout.n=1)"
    prompts, responses = (sum(lens) / len(lens) for lens in (work.prompts, work.responses))
    share, best = 100 * prompts / (prompts + responses), max(decision.speedup or 0 for decision in now.decisions)
    return (
        f"prompts are {share:.0f} % of the tokens; sharing them would gain {best:.2f}x, and auto shares from "
        f"{now.costs.min_speedup:g}x on"
    )


def _gaining(
    config: Any, work: Work, now: Predictor, trees: dict[str, Predictor], price: Price,
    limit: float, needed: float, critic: Predictor | None,
) -> list[Change]:  # fmt: skip
    """The changes that fit and gain, each alone, most first; where the command does not fit, all that do."""
    fits, changes = needed <= limit, list[Change]()
    for overrides in _changes(config, work, trees, fits):
        level = overrides[0].partition("prefix.trees=")[2]
        base = trees.get(config.actor_rollout_ref.actor.prefix.trees, trees["off"]) if level else now
        other = trees[level] if level else price(*overrides)
        stock = base.seconds["stock"]["update"]
        update, before = (stock / one.seconds[one.schedule]["update"] for one in (other, base))
        gib = needed_gib(other, critic) * needed / needed_gib(now, critic)  # a simulation may have said more, or less
        if gib <= limit and (update >= WORTH * before or not fits):
            changes.append(Change(overrides, update, before, gib))
    return sorted(changes, key=lambda one: one.instead_of / one.update)


def _changes(config: Any, work: Work, trees: Iterable[str], fits: bool) -> Iterator[list[str]]:
    """Overrides to try: those that keep prompts together or share more, by other values of `trees`; where the command
    does not fit, also those that need less memory."""
    actor, size = config.actor_rollout_ref.actor, work.steps[0].size
    mode = config.trainer.v1.trainer_mode
    whole = [f"trainer.v1.trainer_mode=prefix_{mode}"] if is_v1(config) and not mode.startswith("prefix_") else []
    if counts_rows(config, work):
        yield [f"{ACTOR}.prefix.mini_batches=prompts", *whole]
    elif splits_groups(size):
        yield whole or ["trainer.balance_batch=False"]  # verl's older trainer deals rows by length
    for key, value in {"schedule": "auto", "exchange": "auto", "wave_tokens": "null"}.items():
        if str(actor.prefix[key]) not in (value, "None"):
            yield [f"{ACTOR}.prefix.{key}={value}"]
    now = actor.prefix.trees
    same = (now,) if work.turns or now == "batch" else ("off", "uid")  # which without turns share the same
    yield from ([f"{ACTOR}.prefix.trees={level}"] for level in trees if level not in same)
    # verl's own path, which a batch may take, wants tokens of the longest row, and rows that divide a mini-batch's.
    if actor.use_dynamic_bsz and (tokens := actor.ppo_max_token_len_per_gpu):
        tokens = 2 * tokens if fits else tokens // 2
        if tokens >= config.data.max_prompt_length + config.data.max_response_length:
            yield [f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}"]
    elif not actor.use_dynamic_bsz and (rows := actor.ppo_micro_batch_size_per_gpu):
        rows = 2 * rows if fits else rows // 2
        if rows and actor.ppo_mini_batch_size * size.rollouts % (size.ranks * rows) == 0:
            yield [f"{ACTOR}.ppo_micro_batch_size_per_gpu={rows}"]
    if not fits:
        yield [f"{ACTOR}.prefix.schedule=phased", f"{ACTOR}.prefix.offload=true"]
        yield ["actor_rollout_ref.model.enable_gradient_checkpointing=true"]
