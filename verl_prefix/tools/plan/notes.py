"""What the report warns of: torn prompts, options that are off in ours, and what is wrong with model_engine=dp."""

from collections.abc import Callable, Iterator
from typing import Any

from verl_prefix.config.driver import is_v1
from verl_prefix.tools.plan.predict import Predictor
from verl_prefix.tools.plan.training_command import Model
from verl_prefix.tools.plan.verdict import ACTOR, Price, path_of, rollout_is_apart
from verl_prefix.tools.plan.work import Work, counts_rows, splits_groups
from verl_prefix.tools.simulate.hardware import GIB


def notes(config: Any, work: Work, model: Model, predicted: Predictor, price: Price) -> list[str]:
    """The warnings, a sentence each."""

    def slower(*overrides: str) -> str:
        ours = price(*overrides)
        seconds = [one.seconds[path_of(one)]["update"] for one in (predicted, ours)]
        return f"an update takes {seconds[0] / seconds[1] - 1:.0%} longer"

    return [*_of_options(config, work, model, predicted), *_of_torn_prompts(config, work, slower)]


def _of_options(config: Any, work: Work, model: Model, predicted: Predictor) -> Iterator[str]:
    size = work.steps[0].size
    if work.turns and max(work.prompts) > config.data.max_prompt_length:
        yield (
            f"histories have up to {max(work.prompts)} tokens, and data.max_prompt_length="
            f"{config.data.max_prompt_length} ends their sessions, without a word; raise it"
        )
    if model.leak and any(micro.tokens or micro.rows > 1 for micro in size.micro_batches.values()):
        yield (
            f"model_engine=dp would be wrong for this model: {model.leak}, and a row's state goes on in the next row. "
            "model_engine=prefix computes row by row where it takes verl's own path; with dp set "
            "actor_rollout_ref.model.use_remove_padding=False"
        )
    if model.spread and max(size.sequence_ranks, size.ref_sequence_ranks) > 1:
        yield (
            f"model_engine=dp would be wrong under ulysses_sequence_parallel_size > 1: {model.spread}. "
            "model_engine=prefix computes whole rows on each rank where it takes verl's own path; with dp set "
            "actor_rollout_ref.{actor,ref}.fsdp_config.ulysses_sequence_parallel_size=1"
        )
    if config.actor_rollout_ref.model.enable_activation_offload and predicted.schedule != "stock":
        ours, stock = (predicted.peaks[path] / GIB for path in (predicted.schedule, "stock"))
        offload = "" if config.actor_rollout_ref.actor.prefix.offload else "offload=true and "
        yield (
            f"actor_rollout_ref.model.enable_activation_offload=True is off in this engine: an update adds {ours:.3g} "
            f"GiB, and under model_engine=dp {stock:.3g} with that offload; in phases (actor.prefix.schedule=phased) "
            f"ours adds less with {offload}a smaller wave_tokens"
        )
    if rollout_is_apart(config) and is_v1(config) and not config.actor_rollout_ref.hybrid_engine:
        yield "actor_rollout_ref.hybrid_engine=False needs VERL_LOGGING_LEVEL=WARN in the job's environment"


def _of_torn_prompts(config: Any, work: Work, slower: Callable[..., str]) -> Iterator[str]:
    """slower: says by how much an update is slower than with these overrides."""
    size = work.steps[0].size
    mode, mini = config.trainer.v1.trainer_mode, config.actor_rollout_ref.actor.ppo_mini_batch_size
    whole = [] if mode.startswith("prefix_") else [f"trainer.v1.trainer_mode=prefix_{mode}"]
    if not size.exchange and size.ranks > 1 and (size.rollouts > 1 or work.turns):
        key = f"{ACTOR}.prefix.exchange"
        yield (
            f"{key}=off leaves a prompt's rows on {size.ranks} ranks, and each shares only what it holds: "
            f"{slower(f'{key}=auto')}; set it to auto"
        )
    if counts_rows(config, work):
        remedy = [f"{ACTOR}.prefix.mini_batches=prompts", *whole]
        yield (
            f"{ACTOR}.ppo_mini_batch_size={mini} counts rows: a step makes {work.updates} updates, between which "
            f"sessions are torn: {slower(*remedy)}; set {' and '.join(remedy)}"
        )
    elif splits_groups(size) and not is_v1(config):
        yield (
            f"verl deals rows to {size.mini_batches} mini-batches by length, and each computes their prompts again: "
            f"{slower('trainer.balance_batch=False')}; set {ACTOR}.ppo_mini_batch_size to a multiple of the "
            f"{size.ranks} ranks, without actor.use_prefix_grouper=False, or trainer.balance_batch=False"
        )
    elif splits_groups(size):
        yield (
            f"trainer.v1.trainer_mode={mode} spreads a prompt's rows over {size.mini_batches} mini-batches, and each "
            f"computes it again: {slower(*whole)}; set {whole[0]}"
        )
