"""Options of actor and ref on verl's Megatron engine: `model_engine=prefix_megatron`."""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from verl.workers.config import McoreActorConfig, McoreEngineConfig

from verl_prefix.config.actor import (
    SKIP_ZERO_ADVANTAGE,
    PrefixActor,
    PrefixEngineOptions,
    role_of,
)
from verl_prefix.config.engines import MEGATRON, copies_of
from verl_prefix.config.model import refuse, refuse_absent_options, warn_of_replaced_options
from verl_prefix.config.transformer_fields import SIZES, TOPOLOGY, refusal

REPLAY = MEGATRON.key("actor", "router_replay.mode")
STOCK = "or model_engine=megatron, or actor_rollout_ref.actor.prefix.schedule=stock"
# Options of megatron-core's gradient buffers (megatron/core/distributed/distributed_data_parallel_config.py) that stand
# for another way to shard, or for a backward that megatron-core's own schedule ends.
DDP_REFUSED = ("use_megatron_fsdp", "use_custom_fsdp", "delay_wgrad_compute")


@dataclass
class PrefixMegatronEngineConfig(PrefixEngineOptions, McoreEngineConfig):
    """verl's Megatron engine config plus those of `PrefixEngineOptions`. `backends` registers the engine, where
    megatron-core is installed: our YAML names this class there.

    Attributes:
        strategy: our engine's name in verl's registry.

    Raises:
        ValueError: an option of Megatron that the shared-prefix path cannot honour.
        ImportError: this verl or transformers was never tested (see `versions`).
    """

    on = MEGATRON

    strategy: str = "prefix_megatron"

    def check(self, key: str) -> None:
        super().check(key)
        refuse(
            self.virtual_pipeline_model_parallel_size is not None,
            f"{key}.virtual_pipeline_model_parallel_size={self.virtual_pipeline_model_parallel_size}: shared passes do "
            "not run by megatron-core's interleaved schedule, which any number chooses, 1 too; set "
            f"{key}.virtual_pipeline_model_parallel_size=null",
        )
        told = {
            "dynamic_context_parallel": "has other ranks for each pass, and a prefix stays with its own",
            "use_megatron_fsdp": "was never tried with a shared prefix",
        }
        for name, why in told.items():
            refuse(self[name], f"{key}.{name}=True {why}; set {key}.{name}=False, or model_engine=megatron")
        refuse(
            not self.use_mbridge,
            f"{key}.use_mbridge=False: verl's Megatron engine asserts it; set {key}.use_mbridge=True",
        )
        if self.prefix.get("schedule") != "stock":
            self.check_overrides(key)

    def check_overrides(self, key: str) -> None:
        """Refuses fields of megatron-core's own configs that a shared pass does not honour.

        Args:
            key: of this section.

        Raises:
            ValueError: naming the first of them.
        """
        for name, value in self.override_transformer_config.items():
            full = f"{key}.override_transformer_config.{name}"
            if name in SIZES:
                refuse(
                    value != self[name],
                    f"{full}={value}, and {key}.{name} is {self[name]}: the latter sets it; remove the former",
                )
            elif why := refusal(name, value):
                raise ValueError(f"{full}={value} {why}, {STOCK}")
        name, value = "cp_comm_type", self.override_transformer_config.get("cp_comm_type")
        refuse(
            self.context_parallel_size > 1 and value not in (None, "a2a"),
            f"{key}.override_transformer_config.{name}={value}: ranks of a shared pass exchange heads all to all; set "
            "a2a, or remove it",
        )
        for name in DDP_REFUSED:
            refuse(
                self.override_ddp_config.get(name),
                f"{key}.override_ddp_config.{name}=True was never tried with a shared prefix; set False",
            )


@dataclass
class PrefixMegatronActorConfig(PrefixActor, McoreActorConfig):
    """verl's Megatron actor config plus those of `PrefixActor`.

    Attributes:
        megatron: verl's section of engine options, with ours.

    Raises:
        ValueError: an actor option that would silently undo sharing.
    """

    on = MEGATRON

    strategy: str = "megatron"
    megatron: PrefixMegatronEngineConfig = field(default_factory=PrefixMegatronEngineConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        key, replay, traces = REPLAY, self.megatron.router_replay.mode, self.prefix.trace_dir
        refuse(
            replay != "disabled" and traces,
            f"actor_rollout_ref.actor.prefix.trace_dir={traces} and {key}={replay}: a trace is replayed on FSDP2, "
            f"where tokens without a record go elsewhere than on Megatron; remove it, or set {key}=disabled",
        )

    def check_spread(self, n_gpus: int, hf_config: Any) -> None:
        check_spread(self.megatron, n_gpus, hf_config)

    def check_model(self, model_config: Any, hf_config: Any) -> None:
        check_model_options(model_config)
        key, optimizer = "actor_rollout_ref.actor.optim.optimizer", self.optim.optimizer
        known = optimizer in ("adam", "sgd")
        refuse(not known, f"{key}={optimizer}: verl builds adam and sgd alone with megatron-core 0.16.1; set one")
        replay = self.megatron.router_replay.mode
        refuse(
            replay != "disabled" and not model_config.get("use_remove_padding"),
            f"{REPLAY}={replay}: verl replays routes of packed rows; set actor_rollout_ref.model.use_remove_padding="
            "True",
        )
        if hf_config is not None:
            check_built(hf_config, self.megatron)


def check_model_options(model_config: Any) -> None:
    """Refuses what is not shared on Megatron: LoRA, layers that predict several tokens, and offload of activations,
    which verl's Megatron engine does not read. Warns of fused kernels, whose place logits in chunks take.

    Args:
        model_config: `actor_rollout_ref.model`, DictConfig or HFModelConfig.

    Raises:
        ValueError: naming the keys.
    """
    refuse_absent_options(model_config, MEGATRON)
    mtp = model_config.get("mtp") or {}
    key = "actor_rollout_ref.model.mtp.enable"
    refuse(
        mtp.get("enable"),
        f"{key}=True trains layers that predict several tokens, and nobody has tried them with a shared prefix; set "
        f"{key}=False, {STOCK}",
    )
    warn_of_replaced_options(model_config)


def check_of_one_process(actor: Any, ref: Any) -> None:
    """Refuses a ref whose `megatron` section differs from the actor's in sizes: megatron-core has one set of process
    groups in a process, those of the engine that is built first (MegatronEngine._init_device_mesh).

    Raises:
        ValueError: naming the key.
    """
    for name in TOPOLOGY:
        key = f"actor_rollout_ref.ref.megatron.{name}"
        refuse(
            ref[name] != actor[name],
            f"{key}={ref[name]}, and the actor's is {actor[name]}: megatron-core has one of them in a process; set "
            f"{key}={'null' if actor[name] is None else actor[name]}",
        )


def check_spread(megatron: Any, n_gpus: int, hf_config: Any) -> None:
    """Refuses sizes by which megatron-core cannot spread matrices and experts over GPUs
    (megatron/core/parallel_state.py, initialize_model_parallel; TransformerConfig.__post_init__). Whether stages divide
    the layers it leaves to megatron-core, whose overrides may make stages unequal.

    Args:
        megatron: the section of actor or ref. hf_config: the model's; None: nobody sees it here.

    Raises:
        ValueError: naming the key, its value and one that works.
    """
    from verl_prefix.models.megatron import spread_sizes
    from verl_prefix.models.support import num_experts

    key, tensor = f"{role_of(megatron)}.megatron", megatron.tensor_model_parallel_size
    stages, context = megatron.pipeline_model_parallel_size, megatron.context_parallel_size
    together = copies_of({"megatron": megatron})
    refuse(
        n_gpus % stages,
        f"{key}.pipeline_model_parallel_size={stages} does not divide {n_gpus} GPUs; set {math.gcd(n_gpus, stages)}",
    )
    refuse(
        n_gpus // stages % context,
        f"{key}.context_parallel_size={context} does not divide the {n_gpus // stages} GPUs of a stage; set "
        f"{math.gcd(n_gpus // stages, context)}",
    )
    refuse(
        n_gpus % together,
        f"{key}.tensor_model_parallel_size={tensor}: {together} GPUs have the same rows, and do not divide {n_gpus} "
        f"GPUs; set {math.gcd(n_gpus // stages // context, tensor)}",
    )
    experts_on, own = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size or tensor
    n_gpus //= stages  # of one stage
    works = math.gcd(n_gpus, experts_on)
    refuse(
        n_gpus % (experts_on * own),
        f"{key}.expert_model_parallel_size={experts_on} times {key}.expert_tensor_parallel_size={own} does not divide "
        f"the {n_gpus} GPUs of a stage; set {works} and {math.gcd(n_gpus // works, own)}",
    )
    if hf_config is None:
        return
    experts = num_experts(hf_config.get_text_config())
    works = math.gcd(n_gpus // own, experts) if experts else 1
    refuse(
        experts_on > 1 and (not experts or experts % experts_on),
        f"{key}.expert_model_parallel_size={experts_on}: a layer's {experts} experts cannot lie evenly on so many "
        f"GPUs; set {works}",
    )
    refuse(
        experts and tensor > 1 and not megatron.sequence_parallel and not megatron.vanilla_mbridge,
        f"{key}.sequence_parallel=False: megatron-core trains experts under tensor parallelism with it alone; set True",
    )
    whole, of_experts = spread_sizes(hf_config, pads_vocab=not megatron.vanilla_mbridge)
    for name, size, numbers in (
        ("tensor_model_parallel_size", tensor, whole), ("expert_tensor_parallel_size", own, of_experts)
    ):  # fmt: skip
        for told, number in numbers.items():
            refuse(
                number % size,
                f"{key}.{name}={size} does not divide {told}={number} of this {hf_config.model_type} model; set "
                f"{math.gcd(number, size)}",
            )


def check_built(hf_config: Any, megatron: McoreEngineConfig) -> None:
    """Refuses a model that megatron-core builds in a way that cannot be shared, losses of its routers that follow how
    rows fall into passes, and replay where there is nothing to replay.

    Raises:
        ValueError: naming what stands in the way.
    """
    from verl_prefix.models.megatron import BALANCED_BY_MBRIDGE, BIASED, megatron_reasons
    from verl_prefix.models.support import num_experts

    key, override = f"{role_of(megatron)}.megatron", megatron.override_transformer_config
    if reasons := megatron_reasons(hf_config, override):
        raise ValueError(
            f"{key}: a shared prefix does not support this {hf_config.model_type} model on Megatron: "
            f"{'; '.join(reasons)}. Set model_engine=prefix where FSDP2 trains it, {STOCK}"
        )
    by_mbridge = megatron.vanilla_mbridge and override.get("moe_aux_loss_coeff")
    unasked = BALANCED_BY_MBRIDGE.get(hf_config.model_type, "none") if by_mbridge else "none"
    balancing = override.get("moe_router_load_balancing_type", unasked)
    balancing = OmegaConf.to_container(balancing) if OmegaConf.is_config(balancing) else balancing
    kinds = [balancing] if isinstance(balancing, str) else list(balancing or ())
    name = f"{key}.override_transformer_config.moe_router_load_balancing_type"
    refuse(
        not set(kinds) <= {"none", "aux_loss", "seq_aux_loss"},
        f"{name}={balancing} balances experts by all tokens of a pass, or of several, and shared passes have other "
        f"tokens; set {name}=none, {STOCK}",
    )
    balanced = set(kinds) != {"none"} and bool(kinds)
    refuse(
        balanced and megatron.prefix.schedule != "packed",
        f"{name}={balancing} is a loss of each pass's tokens together, and phases have parts of them; set "
        f"actor_rollout_ref.actor.prefix.schedule=packed, or {name}=none",
    )
    rate = override.get("moe_router_bias_update_rate", BIASED.get(hf_config.model_type, 1e-3))
    moves = rate and override.get("moe_router_enable_expert_bias", hf_config.model_type in BIASED)
    of_bias = f"{key}.override_transformer_config.moe_router_bias_update_rate"
    for seen, option, value, other in ((balanced, name, balancing, "none"), (moves, of_bias, rate, "0")):
        refuse(
            seen and megatron.prefix.skip_zero_advantage,
            f"{SKIP_ZERO_ADVANTAGE}=True leaves out rows that routers learn from under {option}={value}; set "
            f"{SKIP_ZERO_ADVANTAGE}=False, or {option}={other}",
        )
    context = megatron.context_parallel_size
    refuse(
        balanced and context > 1 and not megatron.vanilla_mbridge,
        f"{name}={balancing} with {key}.context_parallel_size={context}: Megatron-Bridge then weighs the losses of "
        f"passes by their tokens, of which shared ones have fewer; set {key}.vanilla_mbridge=True, or {name}=none",
    )
    fusion = f"{key}.override_transformer_config.moe_router_fusion"
    refuse(
        balanced and override.get("moe_router_fusion"),
        f"{fusion}=True with {name}={balancing}: its kernel does not know how often a token counts; set "
        f"{fusion}=False, or {name}=none",
    )
    replay, mode = f"{key}.router_replay.mode", megatron.router_replay.mode
    refuse(
        mode != "disabled" and not num_experts(hf_config.get_text_config()),
        f"{replay}={mode}: this {hf_config.model_type} model has no experts; set {replay}=disabled",
    )
    refuse(
        mode != "disabled" and override.get("moe_router_fusion"),
        f"{fusion}=True with {replay}={mode}: verl's routers that replay are not fused; set {fusion}=False",
    )
