"""Who drives: which of verl's trainers reads a config, and what cannot work under it."""

import logging
import os
import warnings

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass

from verl_prefix.config import megatron, veomni
from verl_prefix.config.actor import NO_ROUTES, SKIP_ZERO_ADVANTAGE, WEIGHTS
from verl_prefix.config.engines import CRITIC, FSDP2, VEOMNI, copies_of, engine_of, slices_of, trains_adapters
from verl_prefix.config.model import (
    check_dealt,
    check_sequence_parallel,
    is_count,
    read_hf_config,
    refuse,
)
from verl_prefix.core.planning import leaves_room
from verl_prefix.versions import IN_RAY, TESTED_VERL, installed_version

BYPASS = "algorithm.rollout_correction.bypass_mode"
TRACES = "actor_rollout_ref.actor.prefix.trace_dir"


def has_critic(config: DictConfig) -> bool:
    """verl's need_critic, which warns wherever nobody asked for a critic."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(need_critic(config))


def check_driver(config: DictConfig, in_job: bool = True) -> None:
    """Refuses, before workers start, what cannot work under the driver that reads this config.

    Args:
        in_job: this process has the job's environment.

    Raises:
        ValueError: naming what to set.
    """
    if "rollout" in config:
        _check_separate_rollout(config)
    if "actor_rollout_ref" in config and "ref" in config.actor_rollout_ref:
        engine = engine_of(config.actor_rollout_ref.actor)
        refuse(
            in_job and engine.missing,
            f"model_engine={engine.name}, and {engine.package} is not installed: {engine.missing}",
        )
        replay = OmegaConf.select(config, engine.key("actor", "router_replay.mode"))
        refuse(replay == "R2" and OmegaConf.select(config, BYPASS), NO_ROUTES["R2"])
        _check_ref(config)
        _check_waves(config)
    if OmegaConf.select(config, "distillation.enabled"):
        _check_distillation(config)
    key = "actor_rollout_ref.actor.prefix.mini_batches"
    by, mode = OmegaConf.select(config, key), OmegaConf.select(config, "trainer.v1.trainer_mode")
    mode_is_ours, v1 = str(mode).startswith("prefix_"), is_v1(config)
    if v1 and mode in ("separate_async", "prefix_separate_async"):
        _check_separate_async(config, in_job)
    for one, other in ((key, "prompts"), (WEIGHTS, "sessions")):
        refuse(
            OmegaConf.select(config, one) == other and not (mode_is_ours and v1),
            f"{one}={other} with trainer.use_v1={OmegaConf.select(config, 'trainer.use_v1')} and "
            f"trainer.v1.trainer_mode={mode}: verl's own trainers count rows; set trainer.use_v1=true and "
            "trainer.v1.trainer_mode=prefix_sync (or prefix_colocate_async, prefix_separate_async) under "
            f"verl.trainer.main_ppo, or {one}=rows",
        )
    refuse(
        mode_is_ours and not v1,
        f"trainer.v1.trainer_mode={mode} is for verl.trainer.main_ppo with trainer.use_v1=true; remove it, since here "
        "actor.use_prefix_grouper is what keeps prompts whole in mini-batches, or use that trainer",
    )
    why = by == "prompts" and has_critic(config) and _cut_otherwise(config)
    refuse(why, f"{key}=prompts, and {why} algorithm.adv_estimator=grpo and critic.enable=null, or {key}=rows")


def _check_distillation(config: DictConfig) -> None:
    """Refuses options that only make sense for a loss of advantages alone."""
    for key, allowed, why in (
        (SKIP_ZERO_ADVANTAGE, False, "leaves out rows that have a gradient"),
        (TRACES, None, "records no loss"),
        (WEIGHTS, "rows", "weighs advantages, and not the teacher's losses"),
    ):
        value = OmegaConf.select(config, key)
        told = "null" if allowed is None else allowed
        refuse(
            value not in (None, allowed),
            f"{key}={value} {why} under distillation.enabled=True; set {key}={told}, or distillation.enabled=False",
        )


def _cut_otherwise(config: DictConfig) -> str:
    """Why a critic's mini-batches would not be the actor's, and what to set; "": they are."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    if critic.get("_target_") != CRITIC.target:
        return "verl cuts its own critic's mini-batches by rows, some of which would be padding alone; set"
    pairs = {"critic.ppo_mini_batch_size": (critic.ppo_mini_batch_size, actor.ppo_mini_batch_size)}
    pairs[f"critic.fsdp.{CRITIC.slices}"] = CRITIC.size(critic, CRITIC.slices), copies_of(actor)
    differ = (f"{key}={ours} is not the actor's {its}; set {its}," for key, (ours, its) in pairs.items() if ours != its)
    return next(differ, "")


def has_ref(config: DictConfig) -> bool:
    """Whether a ref engine of ours is built."""
    roles = config.actor_rollout_ref
    return _builds_ref(config) and roles.ref.get("_target_") == roles.actor.get("_target_")


def has_verls_ref(config: DictConfig) -> bool:
    """Whether a ref engine of verl's own is built."""
    return _builds_ref(config) and not has_ref(config)


def _builds_ref(config: DictConfig) -> bool:
    needs = "algorithm" in config and need_reference_policy(config)
    return needs and not trains_adapters(config.actor_rollout_ref.model)


def _check_waves(config: DictConfig) -> None:
    """Refuses `wave_tokens` that leave nothing of a pass to prefixes, in updates, log-probs (old, ref) or the critic.

    A pass may be a number of rows. Then it has at most that many of the longest rows that the config allows. A batch
    may have shorter rows, and passes too small for the waves: there the engine ignores `wave_tokens`.
    """
    roles, prefix = config.actor_rollout_ref, config.actor_rollout_ref.actor.prefix
    if not is_count(prefix.wave_tokens) or prefix.schedule not in ("auto", "phased"):
        return  # no such waves, or refused by `PrefixConfig`
    prompt, response = (OmegaConf.select(config, f"data.max_{part}_length") or 0 for part in ("prompt", "response"))
    budgets = []
    # As ActorRolloutRefWorker.init_model reads them.
    bypass = OmegaConf.select(config, BYPASS)  # without old log-probs
    for role in ("actor", *([] if bypass else ["rollout"]), *(["ref"] if has_ref(config) else [])):
        section, of_role = roles[role], "" if role == "actor" else "log_prob_"
        counts_tokens = section[f"{of_role}use_dynamic_bsz"]
        key = f"{of_role or 'ppo_'}{'max_token_len' if counts_tokens else 'micro_batch_size'}_per_gpu"
        told, factor = f"actor_rollout_ref.{role}.{key}={section[key]}", prompt + response
        if counts_tokens:
            _, factor = slices_of(role, roles.ref if role == "ref" else roles.actor)
            told += _on(factor)
        else:
            told += f" rows of data.max_prompt_length={prompt} + max_response_length={response}"
        budgets.append(((section[key] or 0) * factor, told))
    if "critic" in config and has_critic(config) and config.critic.get("_target_") == CRITIC.target:
        keys = {"+critic.ppo_infer_max_token_len_per_gpu": config.critic.get("ppo_infer_max_token_len_per_gpu", 32768)}
        if not is_v1(config):
            keys["critic.ppo_max_token_len_per_gpu"] = config.critic.ppo_max_token_len_per_gpu
        factor = CRITIC.size(config.critic, CRITIC.slices)
        budgets += [(tokens * factor, f"{key}={tokens}{_on(factor)}") for key, tokens in keys.items()]
    budget, told = min((one for one in budgets if one[0]), key=lambda one: one[0], default=(0, ""))
    refuse(
        budget and not leaves_room(prefix.wave_tokens, budget, prefix.offload),
        f"actor_rollout_ref.actor.prefix.wave_tokens={prefix.wave_tokens} "
        f"{'is over' if prefix.offload else 'leaves nothing for prefixes of'} the {budget} tokens of a pass ({told}); "
        f"set a smaller number ({max(budget // 4, 1)}, say), or null",
    )


def _on(ranks: int) -> str:
    return f" on {ranks} GPUs" if ranks > 1 else ""


def _check_ref(config: DictConfig) -> None:
    """Checks the reference policy. verl builds its config in workers alone, so it is built here to be checked. If ref
    has another number of sequence-parallel ranks than the actor, that number is checked, too."""
    roles = config.actor_rollout_ref
    if not has_ref(config):
        return
    ref = OmegaConf.to_container(roles.ref, resolve=True)
    assert isinstance(ref, dict)
    # As ActorRolloutRefWorker.init_model, which gives these keys the actor's names.
    ref = {name: value for name, value in ref.items() if not str(name).startswith("log_prob_")}
    ref["use_dynamic_bsz"] = True
    omega_conf_to_dataclass(OmegaConf.create(ref))
    shares = roles.actor.prefix.schedule != "stock"
    hf_config = read_hf_config(roles.model) if shares else None
    if (engine := engine_of(roles.ref)) is not FSDP2:
        checks = veomni if engine is VEOMNI else megatron
        checks.check_of_one_process(roles.actor[engine.section], roles.ref[engine.section])
        if hf_config is not None:
            checks.check_built(hf_config, roles.ref[engine.section])
    key, size = slices_of("ref", roles.ref)
    if shares and size != slices_of("actor", roles.actor)[1]:
        check_sequence_parallel(key, size, config.trainer.n_gpus_per_node * config.trainer.nnodes, roles.model)
        if size > 1 and hf_config is not None:
            check_dealt(key, size, hf_config)


def _check_separate_async(config: DictConfig, in_job: bool) -> None:
    """verl's `separate_async` has rollout servers on the trainer's GPUs too, unless `hybrid_engine` is off."""
    key = "actor_rollout_ref.hybrid_engine"
    is_hybrid = OmegaConf.select(config, key)
    refuse(
        is_hybrid and OmegaConf.select(config, "actor_rollout_ref.rollout.name") == "hf",
        f"actor_rollout_ref.rollout.name=hf is one server, and {key}=True wants servers on the trainer's GPUs too; "
        f"set {key}=False where this verl can, and the environment variable VERL_LOGGING_LEVEL=WARN "
        f"{IN_RAY.format('VERL_LOGGING_LEVEL', 'WARN')}",
    )
    level = logging.getLevelName(os.environ.get("VERL_LOGGING_LEVEL", "INFO"))
    refuse(
        in_job and not is_hybrid and installed_version("verl") in TESTED_VERL and level <= logging.INFO,
        f"{key}=False ends verl {TESTED_VERL[-1]} once its servers are up: a line that it logs at INFO has an argument "
        "of print's (flush, in PPOTrainerSeparateAsync._setup); set the environment variable VERL_LOGGING_LEVEL=WARN "
        f"{IN_RAY.format('VERL_LOGGING_LEVEL', 'WARN')}, or {key}=True",
    )


def is_v1(config: DictConfig) -> bool:
    """True under verl's v1 trainers. Its other ones pad their batches: main_ppo with trainer.use_v1=false, and
    one_step_off_policy and fully_async_policy of verl.experimental, whose configs have a `rollout` at the top."""
    return bool(OmegaConf.select(config, "trainer.use_v1")) and "rollout" not in config


def _mini_batches(config: DictConfig) -> tuple[str, int]:
    """How many mini-batches a step has under verl's trainers that pad, and the key and value that say so."""
    key, size = "data.train_batch_size", config.actor_rollout_ref.actor.ppo_mini_batch_size
    if "async_training" in config:
        key, size = "async_training.require_batches", 1
    batch = OmegaConf.select(config, key)
    return f"{key}={batch}", batch // size if batch and size else 0  # verl's own check names what is missing


def keeps_prompts(config: DictConfig) -> bool:
    """The default of `actor.use_prefix_grouper`. By this key verl's trainers that pad batches deal whole prompts to
    ranks, and not rows. It is on if a step has several mini-batches, and the prompts of each divide evenly among the
    ranks."""
    if "actor_rollout_ref" not in config or is_v1(config):  # a part of a config, whose driver is elsewhere
        return False
    actor = config.actor_rollout_ref.actor
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes // copies_of(actor)
    return _mini_batches(config)[1] > 1 and ranks > 0 and actor.ppo_mini_batch_size % ranks == 0


def _check_separate_rollout(config: DictConfig) -> None:
    """Checks of one_step_off_policy and fully_async_policy, of which the latter calls no `validate` of verl's."""
    actor, num_gpus = omega_conf_to_dataclass(config.actor_rollout_ref.actor), config.trainer.n_gpus_per_node
    actor.check(num_gpus * config.trainer.nnodes, config.actor_rollout_ref.model)
    refuse(
        has_critic(config),
        "a critic (algorithm.adv_estimator=gae, or critic.enable=true), which verl does not build under "
        "one_step_off_policy and fully_async_policy; set algorithm.adv_estimator=grpo and critic.enable=null, or train "
        "by verl.trainer.main_ppo (trainer.v1.trainer_mode=separate_async)",
    )
    batches, num = _mini_batches(config)
    key = "actor_rollout_ref.actor.use_prefix_grouper"
    refuse(
        num > 1 and config.trainer.balance_batch and not actor.use_prefix_grouper,
        f"{batches} makes {num} mini-batches of a step, and with trainer.balance_batch=True and {key}=False verl deals "
        "rows to them by length, so that every prompt is torn and computed in each; set trainer.balance_batch=False "
        "(rows stay in order, and this engine balances ranks)",
    )
