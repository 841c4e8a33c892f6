"""What the options of actor and engine of all engines have in common."""

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl.workers.config import PolicyLossConfig

from verl_prefix.config.engines import FSDP2, MEGATRON, VEOMNI, Engine, slices_of
from verl_prefix.config.model import check_model_family, check_sequence_parallel, read_hf_config, refuse
from verl_prefix.config.options import PrefixConfig
from verl_prefix.versions import check_versions, warn_once

# Losses of verl 0.9.1 (verl/trainer/ppo/core_algos.py) that are sums over rows: compute_policy_loss_<mode> makes a loss
# of every token from its own row alone, and agg_loss divides their sum by numbers of the whole mini-batch. bypass_mode
# is vanilla or compute_policy_loss_reinforce, its weights and rejections are those of tokens or rows.
LOSSES_OF_ROWS = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo", "bypass_mode")
# And those that look at all rows of a pass, so that in stock too the gradient follows how rows fall into micro-batches.
LOSSES_OF_PASSES = {
    "geo_mean": "averages over the rows of a pass (torch.mean in compute_policy_loss_geo_mean)",
    "clip_cov": "drops tokens that it draws from a pass, by their covariance in it (compute_policy_loss_clip_cov)",
    "kl_cov": "penalises the tokens of a pass that have the largest covariance in it (compute_policy_loss_kl_cov)",
}

# Of the former, those whose loss of a token is a multiple of its advantage. A row without any has no gradient, and may
# be left out, since agg_loss divides by numbers of the whole mini-batch. dro adds the square of the log-ratio.
MULTIPLES_OF_ADVANTAGE = tuple(mode for mode in LOSSES_OF_ROWS if mode != "dro")
SKIP_ZERO_ADVANTAGE = "actor_rollout_ref.actor.prefix.skip_zero_advantage"
WEIGHTS = "actor_rollout_ref.actor.prefix.loss_weights"

NO_REPLAY = (
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True gives batches routed_experts, which nobody replays: "
    "set it to False, or router_replay.mode=R3 in the actor's section of engine options"
)
# Of modes of router replay: why a batch has no routes.
NO_ROUTES = {
    "R2": "actor_rollout_ref.actor router_replay.mode=R2, and the batch has no routed_experts, which old log-probs "
    "record; compute them (algorithm.rollout_correction.bypass_mode=False), or set mode=disabled",
    "R3": "actor_rollout_ref.actor router_replay.mode=R3, and the batch has no routed_experts; set "
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True and let an agent loop of your own hand on "
    "out.routed_experts in every AgentLoopOutput, or set mode=disabled",
}

logger = logging.getLogger(__name__)


def role_of(engine: Any) -> str:
    """The key of the role that an engine config is of; the YAML of ref, in verl, says that it only runs forward."""
    if engine.get("of_critic"):
        return "critic"
    return f"actor_rollout_ref.{'ref' if engine.get('forward_only') else 'actor'}"


def pass_size_key(role: str, forward_only: bool, counts_tokens: bool = True) -> str:
    """Returns the key of a pass's size.

    Args:
        role: as `role_of` returns it. The actor's log-probs are sized by a key of the rollout.
        counts_tokens: `use_dynamic_bsz`. A critic's passes are always sized by tokens; verl's v1 trainers read one key
            for all of them, and its other trainers read another one for updates.
    """
    if role == "critic":
        of_updates = "" if forward_only else " (critic.ppo_max_token_len_per_gpu with trainer.use_v1=false)"
        return f"+critic.ppo_infer_max_token_len_per_gpu{of_updates}"
    size = "max_token_len_per_gpu" if counts_tokens else "micro_batch_size_per_gpu"
    if not forward_only:
        return f"{role}.ppo_{size}"
    return f"{role if role.endswith('ref') else 'actor_rollout_ref.rollout'}.log_prob_{size}"


def refuse_padding(key: str, engine: Any) -> None:
    """Refuses `pad_to_length`, where `key` is that of the engine's section. By verl's YAML an actor's or ref's own key
    of this name fills the section's in; critics and Megatron have no such key."""
    role = role_of(engine)
    keys = [key] if role == "critic" or engine.on is MEGATRON else [key, role]
    others, both = ("", "it to False") if len(keys) == 1 else (f", or {role}'s", "both to False")
    refuse(
        engine.pad_to_length,
        f"{key}.pad_to_length=True{others}: the prefix engine packs without padding; set {both}: "
        + " ".join(f"{one}.pad_to_length=False" for one in keys),
    )


def refuse_shuffle(key: str, section: Any) -> None:
    """Refuses `shuffle`, by `key` of the section of actor or critic."""
    refuse(section.shuffle, f"{key}.shuffle=True tears groups apart at mini-batch edges; set {key}.shuffle=False")


def refuse_norm_by_pass(key: str, section: Any) -> None:
    """Refuses a loss that divides by a number of its pass."""
    refuse(
        section.loss_agg_mode == "seq-mean-token-sum-norm" and section.loss_scale_factor is None,
        f"{key}.loss_agg_mode=seq-mean-token-sum-norm with {key}.loss_scale_factor=null divides by the longest "
        f"row of a pass, so that the loss follows the token budget; set {key}.loss_scale_factor to "
        "data.max_response_length",
    )


def refuse_replay_of_ref(key: str, engine: Any) -> None:
    """Refuses `router_replay` of ref and critic, whose tokens go where their routers say; `key`: its section's."""
    mode, role = engine.router_replay.get("mode", "disabled"), role_of(engine).rpartition(".")[2]
    refuse(
        mode != "disabled" and role != "actor",
        f"{key}.router_replay.mode={mode}: {role} replays no routes; set {key}.router_replay.mode=disabled",
    )


def check_replayed(engine: Any, on: Engine, hf_config: Any) -> None:
    """Refuses to replay routers that we do not know.

    Args:
        engine: the actor's section of engine options. on: verl's engine.
        hf_config: the model's; None: nobody sees it here.

    Raises:
        ValueError: naming the model and what to set.
    """
    from verl_prefix.models.replay import MODEL_TYPES, VEOMNI_TYPES, why_not_replayed

    key, mode = on.key("actor", "router_replay.mode"), engine.router_replay.mode
    types = VEOMNI_TYPES if on is VEOMNI else MODEL_TYPES
    why = why_not_replayed(hf_config, types) if mode != "disabled" and hf_config is not None else ""
    refuse(why, f"{key}={mode}: {why}; set {key}=disabled")


def _refuse_losses_of_passes(key: str, policy_loss: PolicyLossConfig) -> None:
    mode, correction = policy_loss.loss_mode, policy_loss.rollout_correction or {}
    instead = "or actor_rollout_ref.actor.prefix.schedule=stock (verl's own micro-batches)"
    refuse(
        mode in LOSSES_OF_PASSES,
        f"{key}.loss_mode={mode} {LOSSES_OF_PASSES.get(mode)}, so that gradients follow prefix.schedule and the token "
        f"budget; set {key}.loss_mode to one of {', '.join(LOSSES_OF_ROWS)}, {instead}",
    )
    refuse(
        mode == "bypass_mode" and correction.get("rollout_is") and correction.get("rollout_is_batch_normalize"),
        f"{key}.rollout_correction.rollout_is_batch_normalize=True divides by a mean over one pass of every rank, and "
        f"waits for ranks that have fewer passes (compute_rollout_correction_weights); set it to False, {instead}",
    )


def gradient_without_advantage(actor: Any) -> str:
    """What gives rows without advantage a gradient: a key with its value, and what to set instead; "": nothing does.

    Args:
        actor: dataclass of `actor_rollout_ref.actor`.
    """
    key, mode = "actor_rollout_ref.actor", actor.policy_loss.get("loss_mode", "vanilla")
    if actor.entropy_coeff:
        return f"{key}.entropy_coeff={actor.entropy_coeff}; set it to 0"
    if actor.use_kl_loss:
        in_reward = "algorithm.use_kl_in_reward=True has the divergence in advantages"
        return f"{key}.use_kl_loss=True; set it to False ({in_reward})"
    if mode not in MULTIPLES_OF_ADVANTAGE:
        return f"{key}.policy_loss.loss_mode={mode}; set it to one of {', '.join(MULTIPLES_OF_ADVANTAGE)}"
    return ""


@dataclass
class PrefixEngineOptions:
    """Options that our engine configs add to verl's. This class comes before verl's among the bases.

    `strategy` is our engine's name in verl's registry. verl's own check knows verl's name alone
    (verl/workers/config/engine.py), so `__post_init__` shows it that name.

    Attributes:
        on: verl's engine.
        of_critic: whether it is a critic's.
        prefix: filled in from `actor.prefix`.
        freeze_vision_tower: of the actor. verl's own engines do not read it.
        ppo_epochs: of actor and critic. verl's worker does not hand it to the engine.
    """

    on: ClassVar[Engine]
    of_critic: ClassVar[bool] = False

    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    freeze_vision_tower: bool = False
    ppo_epochs: int = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ours = {"strategy", "prefix", "freeze_vision_tower", "ppo_epochs"}
        cls._mutable_fields = cls._mutable_fields | ours  # type: ignore[attr-defined]

    def __post_init__(self: Any) -> None:
        check_versions()
        self.on.warn_of_untested()
        self.check(f"{role_of(self)}.{self.on.section}")
        self.strategy = self.on.strategy
        super().__post_init__()  # type: ignore[misc]
        self.strategy = self.on.name

    def check(self: Any, key: str) -> None:
        """Refuses, by `key` of the section, options that the shared-prefix path cannot honour."""
        on = self.on
        refuse(
            self.strategy not in (on.name, on.strategy),
            f"{key}.strategy={self.strategy!r}: model_engine={on.name} is of {on.title} only; set {key}.strategy="
            f"{on.strategy}, or remove it",
        )
        refuse_padding(key, self)
        qat = self.get("qat")  # VeOmni has none
        refuse(
            qat and qat.get("enable", False),
            f"{key}.qat.enable=True: nobody has tried quantization-aware training with a shared prefix; set "
            f"{key}.qat.enable=False, or model_engine={on.verls}",
        )
        refuse_replay_of_ref(key, self)


@dataclass
class PrefixActor:
    """What our actor configs add to verl's. This class comes before verl's among the bases, which have `strategy` and a
    section of engine options. The engine sees that section alone, so `prefix` and others are copied into it.

    Attributes:
        on: verl's engine.
        prefix: options of a shared prefix.
        enable_rollout_routing_replay: the rollout's. It is compared with the section's `router_replay.mode`.
    """

    on: ClassVar[Engine]

    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    enable_rollout_routing_replay: bool = False

    def __post_init__(self: Any) -> None:
        engine, on = getattr(self, self.on.section), self.on
        key, ours = role_of(engine), "actor_rollout_ref.actor.prefix"
        engines = {"fsdp2": "prefix for FSDP2"} | {name: name for name in ("megatron", "torchtitan", "veomni")}
        other = f"{engines[self.strategy]} without it" if self.strategy in engines else "dp"  # whose config has more
        refuse(
            self.strategy != on.strategy,
            f"{key}.strategy={self.strategy!r}: model_engine={on.name} is verl's engine of {on.title}; set "
            f"{key}.strategy={on.strategy}, or model_engine={other}",
        )
        refuse(
            not isinstance(self.prefix, PrefixConfig),
            f"{key}.prefix={self.prefix}: actor and ref share their options; set them in {ours}",
        )
        refuse(
            engine.prefix not in (self.prefix, PrefixConfig()),
            f"{key}.{on.section}.prefix is filled in from {ours}, and differs from it; set its keys there",
        )
        self._check_replay(engine.router_replay.mode)
        refuse_shuffle(key, self)
        mode = self.policy_loss.get("loss_mode", "vanilla")
        refuse(
            self.prefix.loss_weights == "sessions" and mode in ("dro", *LOSSES_OF_PASSES),
            f"{WEIGHTS}=sessions scales advantages, and needs a loss that adds up rows, each by its advantage; "
            f"{key}.policy_loss.loss_mode={mode} is not; set it to one of {', '.join(MULTIPLES_OF_ADVANTAGE)}, or "
            f"{WEIGHTS}=rows",
        )
        if self.prefix.schedule != "stock":
            refuse_norm_by_pass(key, self)
            _refuse_losses_of_passes(f"{key}.policy_loss", self.policy_loss)
            why = gradient_without_advantage(self)
            refuse(
                self.prefix.skip_zero_advantage and why,
                f"{SKIP_ZERO_ADVANTAGE}=True leaves out rows that have a gradient under {why}, or set "
                f"{SKIP_ZERO_ADVANTAGE}=False",
            )
        super().__post_init__()  # type: ignore[misc]
        self.engine.strategy = on.name
        self.engine.prefix = self.prefix
        self.engine.freeze_vision_tower = self.freeze_vision_tower
        self.engine.ppo_epochs = self.ppo_epochs

    def _check_replay(self: Any, mode: str) -> None:
        key = self.on.key("actor", "router_replay.mode")
        rollout = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
        refuse(self.enable_rollout_routing_replay and mode == "disabled", NO_REPLAY)
        refuse(
            self.enable_rollout_routing_replay != (mode == "R3"),
            f"{key}={mode} and {rollout}={self.enable_rollout_routing_replay}: R3 replays what rollouts record, and R2 "
            f"what old log-probs record; set {rollout}=True and {key}=R3, or False and R2",
        )

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Any = None) -> None:
        """The checks that need the model's config; verl calls this in the driver.

        Raises:
            ValueError: a model, a number of ranks, or an option of the model or the actor that the shared-prefix path
                does not support.
        """
        super().validate(n_gpus, train_batch_size, model_config)  # type: ignore[misc]
        self.check(n_gpus, model_config)

    def check(self: Any, n_gpus: int, model_config: Any) -> None:
        """Ours of `validate`."""
        key, slices = slices_of("actor", self)
        check_sequence_parallel(key, slices, n_gpus=n_gpus, model_config=model_config)
        # FSDP2's stock path needs nothing of the model, whose type the workers alone may know.
        reads = self.prefix.schedule != "stock" or self.on is not FSDP2 or self.engine.router_replay.mode != "disabled"
        hf_config = read_hf_config(model_config) if reads and model_config is not None else None
        self.check_spread(n_gpus, hf_config)
        if self.prefix.schedule != "stock" and self.policy_loss.loss_mode not in LOSSES_OF_ROWS:
            warn_once(
                logger,
                "actor_rollout_ref.actor.policy_loss.loss_mode=%s is not of verl 0.9.1: where it looks at all rows of "
                "a micro-batch (a mean that is not agg_loss's, say), gradients follow prefix.schedule and the token "
                "budget",
                self.policy_loss.loss_mode,
            )
        if model_config is not None and self.prefix.schedule != "stock":
            self.check_model(model_config, hf_config)
            check_model_family(self, model_config, hf_config)

    def check_spread(self, n_gpus: int, hf_config: Any) -> None:
        """Checks, whatever the schedule is, how VeOmni and Megatron spread the model over GPUs, and whether FSDP2 and
        VeOmni can replay its routers.

        Args:
            hf_config: the model's; None: nobody sees it here. So it is in `check_model`.
        """
        raise NotImplementedError

    def check_model(self, model_config: Any, hf_config: Any) -> None:
        """Checks options of `actor_rollout_ref.model` that mean something else to the shared-prefix path of this
        engine, and how it builds the model."""
        raise NotImplementedError
