"""Options of actor and ref on verl's VeOmni engine: `model_engine=prefix_veomni`."""

import math
from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import VeOmniActorConfig, VeOmniEngineConfig

from verl_prefix.config.actor import (
    PrefixActor,
    PrefixEngineOptions,
    check_replayed,
    role_of,
)
from verl_prefix.config.engines import VEOMNI
from verl_prefix.config.model import is_varlen, refuse, refuse_absent_options

# Keys that decide VeOmni's process groups (veomni/distributed/parallel_state.py, init_parallel_state).
VEOMNI_TOPOLOGY = ("fsdp_size", "ulysses_parallel_size", "expert_parallel_size")


@dataclass
class PrefixVeOmniEngineConfig(PrefixEngineOptions, VeOmniEngineConfig):
    """verl's VeOmni engine config plus those of `PrefixEngineOptions`. `backends` registers the engine, where veomni is
    installed: our YAML names this class there.

    Attributes:
        strategy: our engine's name in verl's registry.

    Raises:
        ValueError: an option of VeOmni that the shared-prefix path cannot honour.
        ImportError: this verl or transformers was never tested (see `versions`).
    """

    on = VEOMNI

    strategy: str = "prefix_veomni"

    def check(self, key: str) -> None:
        super().check(key)
        refuse(
            self.enable_async_activation_offload,
            f"{key}.enable_async_activation_offload=True counts forwards of layers, and a prefix and its waves are "
            f"several; set {key}.enable_async_activation_offload=False, and actor.prefix.offload=True to move what "
            "prefixes keep",
        )
        refuse(
            self.enable_reentrant,
            f"{key}.enable_reentrant=True: VeOmni's reentrant checkpoint takes no layers of transformers 5, and ends "
            f"in the first forward, under model_engine=veomni too; set {key}.enable_reentrant=False",
        )
        size, attention = self.ulysses_parallel_size, self.attn_implementation
        refuse(
            size > 1 and not is_varlen(attention),
            f"{key}.attn_implementation={attention} attends within each rank's tokens, and {key}.ulysses_parallel_size="
            f"{size}; set {key}.attn_implementation=flash_attention_2",
        )


@dataclass
class PrefixVeOmniActorConfig(PrefixActor, VeOmniActorConfig):
    """verl's VeOmni actor config plus those of `PrefixActor`.

    Attributes:
        veomni: verl's section of engine options, with ours.

    Raises:
        ValueError: an actor option that would silently undo sharing.
    """

    on = VEOMNI

    strategy: str = "veomni"
    veomni: PrefixVeOmniEngineConfig = field(default_factory=PrefixVeOmniEngineConfig)

    def check_spread(self, n_gpus: int, hf_config: Any) -> None:
        check_replayed(self.veomni, VEOMNI, hf_config)
        check_spread(self.veomni, n_gpus, hf_config)
        device, gpus, wanted = self.veomni.init_device, f"{n_gpus} GPUs", "meta"
        if n_gpus == 1:
            gpus, wanted = "1 GPU", "cuda"  # or another accelerator's name
        refuse(
            device == "cpu" or (device == "meta") is not (wanted == "meta"),
            f"{role_of(self.veomni)}.veomni.init_device={device}: on {gpus} VeOmni builds a model from {wanted} alone; "
            "set that",
        )

    def check_model(self, model_config: Any, hf_config: Any) -> None:
        """As of `PrefixActor`. `use_fused_kernels` stays on, in batches that take verl's own path."""
        refuse_absent_options(model_config, VEOMNI)
        if hf_config is not None:
            check_built(hf_config, self.veomni, model_config["path"])


def check_of_one_process(actor: Any, ref: Any) -> None:
    """Refuses a ref whose `veomni` section differs from the actor's in what a process has once.

    - Process groups: those of the engine that is built first.
    - Kernels of a model's modules: those of the engine that is built last (veomni/ops/dispatch.py, OpSlot.bind).

    Raises:
        ValueError: naming the key.
    """
    kernels = (name for name in ref if str(name).endswith("_implementation") and name != "attn_implementation")
    for name in (*VEOMNI_TOPOLOGY, *kernels):
        key = f"actor_rollout_ref.ref.veomni.{name}"
        refuse(
            ref[name] != actor[name],
            f"{key}={ref[name]}, and the actor's is {actor[name]}: VeOmni has one of them in a process; set {key}="
            f"{actor[name]}",
        )


def check_spread(veomni: Any, n_gpus: int, hf_config: Any) -> None:
    """Refuses sizes by which VeOmni cannot spread parameters and experts over GPUs
    (verl/workers/engine/veomni/transformer_impl.py; veomni/distributed/parallel_state.py, init_parallel_state).

    Args:
        veomni: the section of actor or ref. hf_config: the model's; None: nobody sees it here.

    Raises:
        ValueError: naming the key, its value and one that works.
    """
    from verl_prefix.models.support import num_experts

    key, together = f"{role_of(veomni)}.veomni", veomni.ulysses_parallel_size
    sets, size, experts_on = n_gpus // together, veomni.fsdp_size, veomni.expert_parallel_size
    size = size if 0 < size < sets else sets
    refuse(sets % size, f"{key}.fsdp_size={size} does not divide the {sets} sets of GPUs that have rows; set -1")
    if experts_on == 1:
        return
    text = hf_config and hf_config.get_text_config()
    experts = num_experts(text) if text else experts_on
    works = math.gcd(size * together, experts)
    refuse(
        works % experts_on or not experts,
        f"{key}.expert_parallel_size={experts_on}: a layer's {experts} experts cannot lie evenly on so many of the "
        f"{size * together} GPUs that share the parameters; set {works if experts else 1}",
    )
    refuse(
        veomni.moe_implementation == "eager",
        f"{key}.moe_implementation=eager has all experts on each GPU, and {key}.expert_parallel_size={experts_on}; set "
        f"{key}.moe_implementation=fused",
    )


def check_built(hf_config: Any, veomni: VeOmniEngineConfig, path: str | None = None) -> None:
    """Refuses a model that VeOmni builds in a way that cannot be shared. Also a checkpoint in folder `path` that it
    would not load, and train random weights instead.

    Raises:
        ValueError: naming what stands in the way, or one of the weights and how to write them again.
    """
    from verl_prefix.models.veomni import unread_weight, veomni_reasons

    name = path and unread_weight(hf_config, path)
    refuse(
        name,
        f"actor_rollout_ref.model.path={path}: VeOmni has no parameter of the name {name}, and begins with random "
        "weights, under model_engine=veomni too; write the model again by transformers' save_pretrained(folder, "
        "save_original_format=False), or set model_engine=prefix",
    )
    if reasons := veomni_reasons(hf_config, veomni):
        raise ValueError(
            f"{role_of(veomni)}.veomni: a shared prefix does not support this {hf_config.model_type} model on VeOmni: "
            f"{'; '.join(reasons)}. Or set model_engine=veomni, or actor_rollout_ref.actor.prefix.schedule=stock"
        )
