"""verl's VeOmni engine as a backend, `model_engine=prefix_veomni`: FSDP2 with expert and sequence parallelism.

`hugging_face` has what it shares with verl's FSDP2 engine.

Source: verl/workers/engine/veomni/transformer_impl.py, VeOmniEngine and VeOmniEngineWithLMHead.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from verl.workers.engine import EngineRegistry
from verl.workers.engine.veomni.transformer_impl import VeOmniEngineWithLMHead

from verl_prefix.auto.cost import Memory
from verl_prefix.auto.shape import ModelShape, model_shape
from verl_prefix.backends.hugging_face import HFBackend, check_in_worker, freeze_vision_tower
from verl_prefix.config.actor import check_replayed, role_of
from verl_prefix.config.engines import VEOMNI
from verl_prefix.config.model import is_varlen, refuse_absent_options
from verl_prefix.config.options import PrefixConfig
from verl_prefix.config.veomni import PrefixVeOmniEngineConfig, check_built
from verl_prefix.engine.backend import StockFacts
from verl_prefix.engine.loss import LossFunction
from verl_prefix.engine.prefix_engine import PrefixEngine
from verl_prefix.models import vision


class VeOmniBackend(HFBackend):
    """`engine.backend.Backend` of verl's VeOmniEngine.

    Expert parallelism spans data-parallel ranks: the experts of a layer lie on `expert_parallel_size` ranks. Every
    forward and backward of the layer sends each token to its experts' ranks and back
    (veomni/distributed/moe/moe_layer.py). So all ranks run equally many passes, in step.
    """

    @property
    def dtype(self) -> torch.dtype:
        # verl's VeOmni engine reads the attribute with the same default, and does not set it.
        return getattr(self._engine, "_autocast_dtype", torch.bfloat16)

    @functools.cached_property
    def shape(self) -> ModelShape:
        return model_shape(self._engine.module, self.dtype, self._engine.engine_config.expert_parallel_size)

    @functools.cached_property
    def stock_facts(self) -> StockFacts:
        by_bounds = is_varlen(self.config.get_text_config()._attn_implementation)
        # VeOmni's models run the vision tower once for images and once for videos, on zeros where there are none.
        return StockFacts(
            dense_mask=not by_bounds, separates_rows=False, wrong_when_sharded=None, equal_tower_runs=True,
            row_begins="zeros" if by_bounds else "jumps",
        )  # fmt: skip

    def memory(self, options: PrefixConfig) -> Memory:
        engine = self._engine
        checkpointed = engine.model_config.enable_gradient_checkpointing
        return Memory.of_veomni(engine.engine_config, torch.distributed.get_world_size(), checkpointed, options)

    def run_stock_path(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool
    ) -> dict[str, Any]:
        return self._engine.verls_forward_backward(data, loss_function, forward_only)

    def _gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()  # every backward reduces gradients, as in VeOmniEngine.forward_backward_batch


class PrefixVeOmniEngine(PrefixEngine, VeOmniEngineWithLMHead):
    """verl's VeOmni actor or ref engine that computes a group's prefix once.

    Raises:
        ValueError: at construction, a model or option that the shared-prefix path does not support.
    """

    def __init__(
        self, model_config, engine_config: PrefixVeOmniEngineConfig, optimizer_config, checkpoint_config
    ) -> None:
        self.prefix_config = engine_config.prefix
        check_replayed(engine_config, VEOMNI, model_config.hf_config)
        if self.prefix_config.schedule != "stock":
            refuse_absent_options(model_config, VEOMNI)
            key = f"{role_of(engine_config)}.veomni.ulysses_parallel_size"
            check_in_worker(model_config, key, engine_config.ulysses_parallel_size)
            check_built(model_config.hf_config, engine_config, model_config.local_path)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.set_backend(VeOmniBackend(self), engine_config, model_config)

    def _maybe_apply_async_activation_offload(self, module: torch.nn.Module) -> None:
        """Also freezes the vision tower. verl calls no other method with the model before it shards the model."""
        super()._maybe_apply_async_activation_offload(module)
        freeze_vision_tower(module, self.engine_config)

    def initialize(self) -> None:
        super().initialize()
        if self.engine_config.freeze_vision_tower and vision.has_trained_tower(self.module):
            raise RuntimeError(
                "actor_rollout_ref.actor.freeze_vision_tower=True, and this verl builds its VeOmni model where nobody "
                "can freeze the tower; remove it"
            )


EngineRegistry.register(model_type="language_model", backend="prefix_veomni", device="cuda")(PrefixVeOmniEngine)
