"""verl's FSDP2 engine on CPU."""

from typing import Any

import torch
import torch.distributed as dist
import verl.utils.model
from torch import nn
from transformers import AutoModelForTokenClassification
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_prefix.cpu import is_selected
from verl_prefix.models.replaced import replaced

# Before any engine sets it: an actor and its ref model live in one process.
_HOST_THREADS = torch.get_num_threads()


class CPUFSDPEngine(FSDPEngineWithLMHead):
    """verl's engine of ``model_engine=dp actor_rollout_ref.actor.strategy=fsdp2``. Before another ``FSDPEngine`` among
    the bases of a class, it is a mixin with what differs on a CPU."""

    def initialize(self) -> None:
        """Share the machine's cores among the ranks, then build the model."""
        torch.set_num_threads(max(1, _HOST_THREADS // dist.get_world_size()))
        super().initialize()

    def _build_module(self) -> nn.Module:
        """Build value models with the attention of their config: verl's loader asks for flash attention 2."""
        with replaced(verl.utils.model, "load_valuehead_model", _load_value_model):
            return super()._build_module()

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Build without ``CPUOffloadPolicy(pin_memory=True)``, which needs an accelerator.

        Raises:
            ValueError: the user asks for that policy.
        """
        config = self.engine_config
        if config.offload_policy:
            raise ValueError(
                "fsdp_config.offload_policy=True moves parameters from an accelerator to the host, and the platform is "
                "cpu; set fsdp_config.offload_policy=False"
            )
        forward_only = config.forward_only
        # The engine config is frozen, and the stock method offloads whatever is forward-only (the ref model).
        object.__setattr__(config, "forward_only", False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            object.__setattr__(config, "forward_only", forward_only)


class CPUFSDPValueEngine(CPUFSDPEngine, FSDPEngineWithValueHead):
    """verl's critic of ``critic.strategy=fsdp2``."""


def _load_value_model(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
    attention = model_config._attn_implementation
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, attn_implementation=attention,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip


if is_selected():
    EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")(CPUFSDPValueEngine)
    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(CPUFSDPEngine)
