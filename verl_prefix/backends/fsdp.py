"""verl's FSDP2 engine as a backend, with sequence parallelism (Ulysses): `model_engine=prefix`.

Source: verl/workers/engine/fsdp/transformer_impl.py, FSDPEngine and FSDPEngineWithLMHead.
"""

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.device import get_device_id
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_prefix.auto.cost import Memory
from verl_prefix.backends.hugging_face import HFBackend, check_in_worker, freeze_vision_tower
from verl_prefix.backends.stock_path import FSDPStockPath
from verl_prefix.backends.verl_engines import VerlFSDPEngine
from verl_prefix.config.actor import check_replayed, role_of
from verl_prefix.config.engines import CRITIC, FSDP2
from verl_prefix.config.fsdp import PrefixEngineConfig, refuse_optimizer_of_fsdp1, refuse_value_head
from verl_prefix.config.model import warn_of_replaced_options
from verl_prefix.config.options import PrefixConfig
from verl_prefix.cpu.engine import CPUFSDPEngine
from verl_prefix.engine.backend import StockFacts
from verl_prefix.engine.loss import LossFunction
from verl_prefix.engine.prefix_engine import PrefixEngine
from verl_prefix.models import vision


class PrefixCriticEngineConfig(PrefixEngineConfig):
    """Config of a critic. verl sends it to workers. A worker that unpickles it imports this module, and so registers
    the engine; in config/ it would not."""

    on, of_critic = CRITIC, True


class FSDPBackend(HFBackend):
    """`engine.backend.Backend` of verl's FSDPEngine.

    Args:
        turned_off_fused: the user asked for verl's fused kernels, which our engine has turned off.
    """

    _engine: VerlFSDPEngine

    def __init__(self, engine: VerlFSDPEngine, turned_off_fused: bool) -> None:
        super().__init__(engine)
        self._turned_off_fused = turned_off_fused

    @functools.cached_property
    def _stock_path(self) -> FSDPStockPath:
        return FSDPStockPath(self._engine, self.ranks, self._turned_off_fused, self.replay)

    @property
    def dtype(self) -> torch.dtype:
        return self._engine._autocast_dtype

    @property
    def stock_facts(self) -> StockFacts:
        return self._stock_path.facts

    def run_stock_path(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool
    ) -> dict[str, Any]:
        return self._stock_path.run(data, loss_function, forward_only)

    def memory(self, options: PrefixConfig) -> Memory:
        engine = self._engine
        checkpointed = engine.model_config.enable_gradient_checkpointing
        world = torch.distributed.get_world_size()
        return Memory.of_fsdp(engine.engine_config, world, checkpointed, self.ranks.sequence_size, options)

    def _backward(self, loss: torch.Tensor) -> None:
        scaler = self._engine.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def _gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        return self._engine._gradient_sync_context(is_last_micro_batch=last)


class ValueBackend(FSDPBackend):
    """`engine.backend.Backend` of verl's FSDPEngineWithValueHead."""

    ignores_routes = True  # a batch has routes of the actor's experts

    def output_names(self, flags: Mapping[str, bool]) -> list[str]:
        return ["values"]

    def logits_like(self) -> torch.Tensor:
        return torch.zeros((1, 1), dtype=self.dtype, device=get_device_id())


def _without_replaced_options(model_config: Any) -> Any:
    """Returns a copy of the model's config in which options that the shared path replaces are off.

    verl's fused kernels compute log-probs of all tokens, and read the whole lm_head, which FSDP2 has sharded. verl's
    activation offload counts forwards of layers, of which the shared path has more, and makes gradient checkpointing
    reentrant.
    """
    verls_model_config = copy.copy(model_config)
    verls_model_config.__dict__.update(use_fused_kernels=False, enable_activation_offload=False)  # the config is frozen
    return verls_model_config


def _named_fsdp2(engine_config: PrefixEngineConfig) -> PrefixEngineConfig:
    """Returns a copy of the engine's config whose strategy has the name that verl's `_build_fsdp_module` knows."""
    verls_config = copy.copy(engine_config)
    verls_config.strategy = "fsdp2"
    return verls_config


class PrefixFSDPEngine(PrefixEngine, FSDPEngineWithLMHead):
    """verl's FSDP2 actor or ref engine that computes a group's prefix once.

    Raises:
        ValueError: at construction, a model or option that the shared-prefix path does not support.
    """

    _backend_class: type[FSDPBackend] = FSDPBackend

    def __init__(self, model_config, engine_config: PrefixEngineConfig, optimizer_config, checkpoint_config) -> None:
        self.prefix_config = engine_config.prefix
        check_replayed(engine_config, FSDP2, model_config.hf_config)
        verls_model_config, turned_off_fused = model_config, False
        if self.prefix_config.schedule != "stock":
            model_key = "critic.model" if engine_config.of_critic else "actor_rollout_ref.model"
            warn_of_replaced_options(model_config, model_key)
            size_key = f"{role_of(engine_config)}.{engine_config.on.section}.ulysses_sequence_parallel_size"
            check_in_worker(model_config, size_key, engine_config.ulysses_sequence_parallel_size, model_key)
            verls_model_config = _without_replaced_options(model_config)
            turned_off_fused = bool(model_config.use_fused_kernels)
        super().__init__(verls_model_config, _named_fsdp2(engine_config), optimizer_config, checkpoint_config)
        self.set_backend(self._backend_class(self, turned_off_fused), engine_config, model_config)

    def load_checkpoint(self, local_path: str | None, *args: Any, **kwargs: Any) -> None:
        """Loads a checkpoint by verl's method.

        Raises:
            ValueError: the checkpoint has an optimizer state of FSDP1, and the method would load it.
        """
        if self.checkpoint_manager.should_load_optimizer:
            refuse_optimizer_of_fsdp1(local_path, role_of(self.engine_config))
        super().load_checkpoint(local_path, *args, **kwargs)

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        freeze_vision_tower(module, self.engine_config)
        return module

    def _build_lora_module(self, module: torch.nn.Module) -> torch.nn.Module:
        module = super()._build_lora_module(module)
        if self.engine_config.freeze_vision_tower and vision.has_trained_tower(module):
            raise ValueError(
                "actor_rollout_ref.actor.freeze_vision_tower=True, and LoRA adapts the tower; set "
                "actor_rollout_ref.model.exclude_modules='.*visual.*'"
            )
        return module


class PrefixFSDPValueEngine(PrefixFSDPEngine, FSDPEngineWithValueHead):
    """verl's FSDP2 critic that computes a group's prefix once.

    Raises:
        ValueError: as `PrefixFSDPEngine`, and once the model is built, one with trl's value head.
    """

    _backend_class = ValueBackend

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Does nothing: a critic has no adapter to disable. verl enters this context for batches with the flag
        `no_lora_adapter`, with which an actor computes ref."""
        yield

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        if self.prefix_config.schedule != "stock":
            refuse_value_head(hasattr(module, "v_head"), self.model_config)
        return module


class PrefixFSDPEngineCPU(CPUFSDPEngine, PrefixFSDPEngine):
    """`PrefixFSDPEngine` on gloo ranks without an accelerator."""


class PrefixFSDPValueEngineCPU(CPUFSDPEngine, PrefixFSDPValueEngine):
    """`PrefixFSDPValueEngine` on gloo ranks without an accelerator."""


EngineRegistry.register(model_type="language_model", backend="prefix", device="cuda")(PrefixFSDPEngine)
EngineRegistry.register(model_type="language_model", backend="prefix", device="cpu")(PrefixFSDPEngineCPU)
EngineRegistry.register(model_type="value_model", backend="prefix", device="cuda")(PrefixFSDPValueEngine)
EngineRegistry.register(model_type="value_model", backend="prefix", device="cpu")(PrefixFSDPValueEngineCPU)
