"""What the report warns of: options that are off in ours, and what is wrong with model_engine=dp."""

from collections.abc import Iterator
from typing import Any

from verl_prefix.config.driver import is_v1
from verl_prefix.tools.plan.predict import Predictor
from verl_prefix.tools.plan.training_command import Model
from verl_prefix.tools.plan.verdict import rollout_is_apart
from verl_prefix.tools.plan.work import Work
from verl_prefix.tools.simulate.hardware import GIB


def notes(config: Any, work: Work, model: Model, predicted: Predictor) -> Iterator[str]:
    """The warnings, a sentence each."""
    size = work.steps[0].size
    if config.trainer.get("val_only"):
        yield "trainer.val_only=True validates and trains nothing; this is the plan of the training without it"
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
    if model.spread and max(size.slices, size.ref_slices) > 1:
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
