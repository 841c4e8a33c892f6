"""Options of the prefix actor as verl config dataclasses; `config/*/*.yaml` are their Hydra side.

Everything that cannot work is refused in the driver, before a worker starts: verl's `validate_config` builds
`PrefixActorConfig` and calls `validate` there; `driver.check_driver` is called where the config is resolved.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, PolicyLossConfig

from verl_prefix.config.model import (
    check_model_family,
    check_sequence_parallel,
    is_count,
    refuse,
    warn_of_replaced_options,
)
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
SCHEDULES = ("auto", "packed", "phased", "stock")
CHOICES = {
    "schedule": SCHEDULES,
    "exchange": ("auto", "off"),
    "trees": ("uid", "batch", "off"),
    "mini_batches": ("rows", "prompts"),
    "keep_attention": ("auto", "off"),
    "attention": ("auto", "cpu", "flash_attn", "aten", "reference"),
    "verify_action": ("raise", "fallback"),
}

NO_REPLAY = (
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True gives batches routed_experts, and verl's FSDP engine "
    "replays no routes, with a shared prefix or without; set it to False (prefix/moe/* tells the load of experts), or "
    "model_engine=veomni or megatron"
)

logger = logging.getLogger(__name__)


@dataclass
class PrefixConfig(BaseConfig):
    """`actor_rollout_ref.actor.prefix.*`; the keys are documented in config/actor/prefix_actor.yaml.

    Raises:
        ValueError: a value is not one of those listed.
    """

    schedule: str = "auto"
    exchange: str = "auto"
    trees: str = "uid"
    mini_batches: str = "rows"
    wave_tokens: int | None = None
    logits_chunk: int | None = None
    offload: bool = False
    keep_attention: str = "auto"
    attention: str = "auto"
    min_speedup: float = 1.05
    verify: str | int = "first_step"
    verify_action: str = "raise"
    trace_dir: str | None = None
    trace_max_steps: int = 100
    trace_max_gib: float = 8.0

    def __post_init__(self) -> None:
        def check(wrong: object, key: str, why: str) -> None:
            refuse(wrong, f"actor_rollout_ref.actor.prefix.{key}={getattr(self, key)!r}{why}")

        for key, allowed in CHOICES.items():
            check(getattr(self, key) not in allowed, key, f": set one of {', '.join(allowed)}")
        for key in ("wave_tokens", "logits_chunk"):
            tokens = getattr(self, key)
            check(tokens is not None and not is_count(tokens), key, ": set a number of tokens >= 1")
        here = f"with prefix.schedule={self.schedule!r}"
        has_waves = self.schedule in ("auto", "phased")
        if self.wave_tokens is not None:
            advice = "remove it, or set prefix.schedule to auto or phased"
            check(not has_waves, "wave_tokens", f" sets nothing {here}; {advice}")
        check(not isinstance(self.offload, bool), "offload", ": set true or false")
        advice = "set prefix.schedule to auto or phased, or prefix.offload=False"
        check(self.offload and not has_waves, "offload", f" moves nothing {here}; {advice}")
        is_known = self.verify in ("first_step", "off") or is_count(self.verify)
        check(not is_known, "verify", ": set first_step, off, or a number n >= 1 for every n updates")
        falls_back = self.verify_action == "fallback"
        check(falls_back and self.verify == "off", "verify_action", " needs prefix.verify, which is off")
        is_ratio = type(self.min_speedup) in (int, float) and 0 <= self.min_speedup < math.inf
        check(not is_ratio, "min_speedup", ": set a number >= 0 (0: always share)")
        steps, gib = self.trace_max_steps, self.trace_max_gib
        is_bound = is_count(steps) and type(gib) in (int, float) and gib > 0
        advice = "set at least 1 step and more than 0 GiB, or trace_dir=null for no trace"
        check(not is_bound, "trace_max_steps", f", trace_max_gib={gib!r}: {advice}")
        is_default = (steps, gib) == (type(self).trace_max_steps, type(self).trace_max_gib)
        advice = "bound a trace, and trace_dir is null; remove them, or set trace_dir"
        check(self.trace_dir is None and not is_default, "trace_max_steps", f", trace_max_gib={gib} {advice}")


def _role(engine: Any) -> str:
    """The key of the role that an engine config is of; the YAML of ref, in verl, says that it only runs forward."""
    return f"actor_rollout_ref.{'ref' if engine.get('forward_only') else 'actor'}"


@dataclass
class PrefixEngineConfig(FSDPEngineConfig):
    """verl's FSDP2 engine config plus `prefix` and, of the actor, `freeze_vision_tower`, which verl's own FSDP ignores,
    and `ppo_epochs`, which verl's worker keeps to itself. Its strategy is the registry's backend name, always "prefix".
    `backends.fsdp` registers that: our YAML names this class there, and code that builds one imports it from
    there.

    Raises:
        ValueError: an FSDP option that the shared-prefix path cannot honour.
        ImportError: this verl was never tested (see `versions`).
    """

    _mutable_fields = FSDPEngineConfig._mutable_fields | {"strategy", "prefix", "freeze_vision_tower", "ppo_epochs"}

    strategy: str = "prefix"
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    freeze_vision_tower: bool = False
    ppo_epochs: int = 1

    def __post_init__(self) -> None:
        check_versions()
        role = _role(self)
        key = f"{role}.fsdp_config"
        refuse(
            self.strategy not in ("prefix", "fsdp2"),
            f"{key}.strategy={self.strategy!r}: the prefix engine shards with FSDP2 only; set {key}.strategy=fsdp2, or "
            "remove it",
        )
        refuse(
            self.pad_to_length,
            f"{key}.pad_to_length=True, or {role}'s: the prefix engine packs without padding; set both to False: "
            f"{key}.pad_to_length=False {role}.pad_to_length=False",
        )
        refuse(
            self.get("qat") and self.qat.get("enable", False),
            f"{key}.qat.enable=True: nobody has tried quantization-aware training with a shared prefix; set "
            f"{key}.qat.enable=False, or model_engine=dp",
        )
        replay = (self.get("router_replay") or {}).get("mode", "disabled")
        refuse(
            replay != "disabled",
            f"{key}.router_replay.mode={replay}: verl's FSDP engine replays no routes; set {key}.router_replay."
            "mode=disabled, or model_engine=veomni or megatron",
        )
        # verl's own check knows only its own names (verl/workers/config/engine.py), and so does its engine's base class
        # (FSDPEngine._build_fsdp_module), which gets a copy that says fsdp2; the registry's backend name is prefix.
        self.strategy = "fsdp2"
        super().__post_init__()
        self.strategy = "prefix"


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


@dataclass
class PrefixActorConfig(FSDPActorConfig):
    """verl's FSDP actor config plus `prefix`, which it hands to the engine: the engine sees nothing else of it. The
    rollout's `enable_rollout_routing_replay` is here to be refused.

    Raises:
        ValueError: an actor option that would silently undo sharing.
    """

    strategy: str = "fsdp2"
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    fsdp_config: PrefixEngineConfig = field(default_factory=PrefixEngineConfig)
    enable_rollout_routing_replay: bool = False

    def __post_init__(self) -> None:
        key, ours = _role(self.fsdp_config), "actor_rollout_ref.actor.prefix"
        refuse(
            not isinstance(self.prefix, PrefixConfig),
            f"{key}.prefix={self.prefix}: actor and ref share their options; set them in {ours}",
        )
        refuse(
            self.fsdp_config.prefix not in (self.prefix, PrefixConfig()),
            f"{key}.fsdp_config.prefix is filled in from {ours}, and differs from it; set its keys there",
        )
        refuse(self.enable_rollout_routing_replay, NO_REPLAY)
        refuse(
            self.strategy != "fsdp2",
            f"{key}.strategy={self.strategy!r}: model_engine=prefix is verl's FSDP engine with FSDP2; set "
            f"{key}.strategy=fsdp2, or model_engine={'dp' if self.strategy == 'fsdp' else self.strategy} without it",
        )
        refuse(self.shuffle, f"{key}.shuffle=True tears groups apart at mini-batch edges; set {key}.shuffle=False")
        if self.prefix.schedule != "stock":
            refuse(
                self.loss_agg_mode == "seq-mean-token-sum-norm" and self.loss_scale_factor is None,
                f"{key}.loss_agg_mode=seq-mean-token-sum-norm with {key}.loss_scale_factor=null divides by the longest "
                f"row of a pass, so that the loss follows the token budget; set {key}.loss_scale_factor to "
                "data.max_response_length",
            )
            _refuse_losses_of_passes(f"{key}.policy_loss", self.policy_loss)
        super().__post_init__()
        self.engine.strategy = "prefix"
        self.engine.prefix = self.prefix
        self.engine.freeze_vision_tower = self.freeze_vision_tower
        self.engine.ppo_epochs = self.ppo_epochs

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Any = None) -> None:
        """The checks that need the model's config; verl calls this in the driver.

        Raises:
            ValueError: a model family, checkpointing or kernel option that the shared-prefix path does not support.
        """
        super().validate(n_gpus, train_batch_size, model_config)
        self.check(n_gpus, model_config)

    def check(self, n_gpus: int, model_config: Any) -> None:
        """Ours of `validate`."""
        sequence_ranks = self.fsdp_config.ulysses_sequence_parallel_size
        check_sequence_parallel("actor", sequence_ranks, n_gpus=n_gpus, model_config=model_config)
        if self.prefix.schedule != "stock" and self.policy_loss.loss_mode not in LOSSES_OF_ROWS:
            warn_once(
                logger,
                "actor_rollout_ref.actor.policy_loss.loss_mode=%s is not of verl 0.9.1: where it looks at all rows of "
                "a micro-batch (a mean that is not agg_loss's, say), gradients follow prefix.schedule and the token "
                "budget",
                self.policy_loss.loss_mode,
            )
        if model_config is not None and self.prefix.schedule != "stock":
            warn_of_replaced_options(model_config)
            check_model_family(model_config, self.freeze_vision_tower, sequence_ranks)
