"""verl's Megatron engine as a backend, `model_engine=prefix_megatron`: tensor, sequence, expert, pipeline, context and
data parallelism.

Source: verl/workers/engine/megatron/transformer_impl.py, MegatronEngine and MegatronEngineWithLMHead; megatron-core
0.16.1, megatron/core/pipeline_parallel/schedules.py (forward_backward_no_pipelining).
"""

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.distillation.megatron import losses
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.megatron.router_replay_utils import align_r3_router_replay_data, build_r3_replay_mask
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from verl_prefix.auto.cost import Memory
from verl_prefix.auto.shape import ModelShape, shape_of_config
from verl_prefix.backends.megatron_check import MegatronSelfCheck, gradient_buffers
from verl_prefix.backends.megatron_runner import MegatronRunner
from verl_prefix.backends.pipeline import PipelineRunner
from verl_prefix.backends.verl_engines import VerlMegatronEngine
from verl_prefix.config.engines import heads_of
from verl_prefix.config.megatron import (
    PrefixMegatronEngineConfig,
    check_built,
    check_model_options,
    check_spread,
)
from verl_prefix.config.model import check_dealt
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.forward import PackedForward
from verl_prefix.core.meter import Meter
from verl_prefix.core.runner import PlanRunner, Step
from verl_prefix.engine.backend import Backend, Ranks, Replay, StockFacts
from verl_prefix.engine.checks.gradients import Gradients
from verl_prefix.engine.fields import ROUTES
from verl_prefix.engine.loss import LossFunction
from verl_prefix.engine.outputs import flags_of, policy_outputs
from verl_prefix.engine.prefix_engine import PrefixEngine
from verl_prefix.engine.rows import BatchRows
from verl_prefix.models.advice import WITHOUT_SHARING
from verl_prefix.models.mcore import (
    MegatronModel,
    counts_tokens,
    is_last_stage,
    layers_with_experts,
    unsupported_reasons,
    unwrapped,
)
from verl_prefix.models.replaced import replaced
from verl_prefix.models.support import check_supported


class MegatronBackend(Backend):
    """`engine.backend.Backend` of verl's MegatronEngine.

    All ranks of a model-parallel set have the same rows and run the same plan:

    - A tensor-parallel rank has its heads, and its part of every matrix and of the vocabulary.
    - A stage of the pipeline has its layers. The last stage alone has outputs and losses.
    - A context-parallel rank has its part of each packed row (`core.sequence_parallel`). The stock path cuts each row
      in zigzag there.

    Expert parallelism spans data-parallel ranks, as with VeOmni, and context-parallel ranks.
    """

    after_not_finite = (
        "verl's Megatron engine takes gradients that are not finite into the weights, or ends the job under "
        "megatron.dtype=float16"
    )

    def __init__(self, engine: VerlMegatronEngine) -> None:
        self._engine = engine
        self.trains: bool = not engine.engine_config.forward_only
        self.deterministic = bool(engine.engine_config.override_transformer_config.get("deterministic_mode"))
        size = engine.get_data_parallel_size()
        sequence_group = engine.get_context_parallel_group()
        sequence_size = sequence_group.size()
        self.ranks = Ranks(
            engine.get_data_parallel_group(), engine.get_data_parallel_rank(), size,
            model_size=torch.distributed.get_world_size() // size, sequence_size=sequence_size,
            sequence_group=sequence_group if sequence_size > 1 else None,
            pipeline_size=engine.engine_config.pipeline_model_parallel_size, has_outputs=is_last_stage(),
            is_writer=engine.is_mp_src_rank_with_outputs(),
        )  # fmt: skip

    @property
    def _module(self) -> Any:
        (module,) = self._engine.module
        return module

    # What the model is, and what updates keep: for plans and their memory.

    def check_model(self) -> None:
        if reasons := unsupported_reasons(self._module):
            raise ValueError(
                f"a shared prefix does not support this Megatron model: {'; '.join(reasons)}; set {WITHOUT_SHARING}"
            )

    @property
    def dtype(self) -> torch.dtype:
        return self._engine.param_dtype

    @property
    def config(self) -> Any:
        return self._engine.model_config.hf_config

    @functools.cached_property
    def shape(self) -> ModelShape:
        return replace(shape_of_config(self.config, self.dtype), last=0.0)  # the last layer computes all tokens

    def memory(self, options: PrefixConfig) -> Memory:
        return Memory.of_megatron(self._engine.engine_config, torch.distributed.get_world_size(), options)

    def gradient_bytes(self) -> float:
        if not self.trains:
            return 0.0
        # mcore keeps its buffers, but param_offload frees their memory between updates.
        freed = (grads for grads in gradient_buffers(self._module) if not grads.untyped_storage().nbytes())
        return float(sum(grads.nbytes for grads in freed))

    def reads_logits_once(self, flags: Mapping[str, bool]) -> bool:
        return False  # verl's function makes a copy in fp32 and the gradient

    # How passes run, and what becomes of their logits.

    def begin_shared_path(self, rows: BatchRows) -> None:
        """Sets whether the loss is top-k distillation. verl's `optimizer_step` then empties the allocator's cache."""
        self._engine._distillation_use_topk_active = rows.flag("distillation_use_topk")

    def _hooked_model(self) -> MegatronModel:
        return MegatronModel(self._module)

    def _runner(
        self, forward: PackedForward, step: Step, forward_only: bool, offload: bool, meter: Meter
    ) -> PlanRunner:
        backward = None if forward_only else self._backward
        runner_type = PipelineRunner if self.ranks.pipeline_size > 1 else MegatronRunner
        return runner_type(forward, step, backward, offload=offload, meter=meter, module=self._module)

    def _backward(self, loss: torch.Tensor) -> None:
        """Scales a loss and runs its backward. In a pipeline mcore's schedule does both instead."""
        scale = unwrapped(self._module).config.grad_scale_func
        (loss if scale is None else scale(loss)).backward()

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def output_names(self, flags: Mapping[str, bool]) -> list[str]:
        return policy_outputs(flags)

    def token_outputs(
        self, logits: torch.Tensor, tokens: TensorDict, temperature: torch.Tensor, unscaled: bool,
        processor: Callable[..., Any] | None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Calls verl's vocabulary-parallel functions. Every rank of a tensor-parallel set calls them together."""
        labels = tokens["input_ids"].values()
        # verl's losses would pad the teacher's rows and cut them for context parallelism. Here the teacher's rows have
        # this rank's tokens alone, so that nothing is left to do but to unpack them. verl's function expects logits in
        # fp32, as mcore returns them (Float16Module.forward). It writes over the logits and the temperature.
        with replaced(losses, "preprocess_thd_engine", lambda rows, **_: (rows.values().unsqueeze(0),)):
            outputs = self._engine._lm_head_logits_processor(
                logits.float().unsqueeze(0), labels.unsqueeze(0), temperature.unsqueeze(0), **flags_of(tokens),
                logits_processor_func=processor, batch=tokens, data_format="thd",
            )  # fmt: skip
        return {name: x[0] for name, x in outputs.items()}

    def logits_like(self) -> torch.Tensor:
        size = unwrapped(self._module).output_layer.output_size_per_partition
        return torch.zeros((1, size), dtype=self.dtype, device=get_device_id())

    @property
    def counts_last_tokens(self) -> bool:
        return counts_tokens(self._module)

    def model_metrics(self, runner: PlanRunner) -> dict[str, float]:
        assert isinstance(runner.forward.model, MegatronModel)
        config = unwrapped(self._module).config
        if config.num_moe_experts is None or runner.backward is None:
            return {}
        loads = runner.forward.model.expert_loads
        return loads.metrics(self.ranks.sum_over_ranks, config.num_layers, config.num_moe_experts)

    # The stock path.

    def run_stock_path(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool
    ) -> dict[str, Any]:
        data = data.copy()
        fused = self._engine.engine_config.use_fused_kernels  # as verl's engine was built
        tu.assign_non_tensor(data, use_fused_kernels=fused)
        return self._engine.verls_forward_backward(data, loss_function, forward_only)

    @property
    def stock_facts(self) -> StockFacts:
        return StockFacts(dense_mask=False, separates_rows=False, wrong_when_sharded=None, row_begins="places")

    # Expert routes, on both paths.

    @functools.cached_property
    def replay(self) -> Replay | None:
        """As `Backend` says. Routes of a rollout (R3) have all layers. Routes that verl records (R2) have only layers
        with experts."""
        mode = self._engine.engine_config.router_replay.mode
        if mode == "disabled":
            return None
        config = unwrapped(self._module).config
        layers = config.num_layers if mode == "R3" else len(layers_with_experts(config))
        return Replay(mode, layers, config.moe_router_topk)

    def aligned_routes(self, data: TensorDict) -> TensorDict:
        """Aligns the routes of R3 with tokens. Some tokens get -1, since verl lets their router choose: the last token
        of each row, and all tokens of a row whose response is masked. Every other token goes where its record says,
        even if the record names one expert several times."""
        if self._engine.engine_config.router_replay.mode != "R3":
            return data
        ids = data["input_ids"]
        routes = align_r3_router_replay_data(data[ROUTES], ids)
        is_free = ~build_r3_replay_mask(ids, data["response_mask"]).values().to(routes.device)
        values = routes.values().masked_fill(is_free[:, None, None], -1)
        aligned = data.exclude(ROUTES)
        aligned[ROUTES] = torch.nested.nested_tensor_from_jagged(values, routes.offsets())
        return aligned

    # For the self-check.

    @functools.cached_property
    def _self_check(self) -> MegatronSelfCheck:
        return MegatronSelfCheck(self._engine, self.ranks, self.trains)

    def gradients(self) -> Gradients:
        return self._self_check.gradients()

    def rounding_noise(self, seed: int) -> AbstractContextManager[None]:
        return self._self_check.rounding_noise(seed)

    def gradients_aside(self) -> AbstractContextManager[None]:
        return self._self_check.gradients_aside()


class PrefixMegatronEngine(PrefixEngine, MegatronEngineWithLMHead):
    """verl's Megatron actor or ref engine that computes a group's prefix once.

    Raises:
        ValueError: at construction, a model or option that the shared-prefix path does not support.
    """

    def __init__(
        self, model_config, engine_config: PrefixMegatronEngineConfig, optimizer_config, checkpoint_config
    ) -> None:
        self.prefix_config = engine_config.prefix
        verls_config = engine_config
        if self.prefix_config.schedule != "stock":
            hf_config = model_config.hf_config
            check_model_options(model_config)
            check_supported(hf_config)
            check_spread(engine_config, torch.distributed.get_world_size(), hf_config)
            for key, size, before in heads_of({"megatron": engine_config}):
                check_dealt(key, size, hf_config, before)
            check_built(hf_config, engine_config)
            verls_config = copy.copy(engine_config)  # the caller's config stays as it is
            verls_config.__dict__.update(use_fused_kernels=False)  # fused kernels compute log-probs of all tokens
        super().__init__(model_config, verls_config, optimizer_config, checkpoint_config)
        self.set_backend(MegatronBackend(self), engine_config, model_config)


EngineRegistry.register(model_type="language_model", backend="prefix_megatron", device="cuda")(PrefixMegatronEngine)
