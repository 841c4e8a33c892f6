"""verl's Megatron engine as a backend, `model_engine=prefix_megatron`: tensor, sequence, expert, pipeline, context and
data parallelism.

Source: verl/workers/engine/megatron/transformer_impl.py, MegatronEngine and MegatronEngineWithLMHead; megatron-core
0.16.1, megatron/core/pipeline_parallel/schedules.py (forward_backward_no_pipelining).
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

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
from verl_prefix.backends.megatron_runner import MegatronRunner
from verl_prefix.backends.pipeline import PipelineRunner
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
from verl_prefix.engine.backend import Backend, Ranks, Replay, StockFacts, VerlEngine
from verl_prefix.engine.checks.gradients import Gradients
from verl_prefix.engine.checks.noise import disturbed_outputs
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
    router_counts,
    unsupported_reasons,
    unwrapped,
)
from verl_prefix.models.replaced import replaced
from verl_prefix.models.support import check_supported


class VerlMegatronEngine(VerlEngine, Protocol):
    """verl's MegatronEngineWithLMHead; its `module` is a list of one."""

    param_dtype: torch.dtype
    _distillation_use_topk_active: bool

    def get_context_parallel_group(self) -> torch.distributed.ProcessGroup: ...

    def _lm_head_logits_processor(self, *tensors: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]: ...

    def _routed_num_tokens(self, data: TensorDict) -> torch.Tensor: ...


class MegatronBackend(Backend):
    """verl's MegatronEngine.

    Ranks of a tensor-parallel set and of a pipeline have the same rows and run the same plan; each has its heads, its
    part of every matrix and of the vocabulary, or its layers. The last stage alone has outputs and losses. Ranks of
    context parallelism have the same rows as well, and cut packed rows by `core.sequence_parallel`; the stock path,
    with which the self-check compares, cuts each row in zigzag there. Expert parallelism spans ranks that have
    different rows, as with VeOmni, and ranks of context parallelism.
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

    @property
    def _gradient_buffers(self) -> list[torch.Tensor]:
        return [buffer.grad_data for buffer in (*self._module.buffers, *self._module.expert_parallel_buffers)]

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
        return replace(shape_of_config(self.config, self.dtype), last=0.0)  # `models.mcore` runs all of the last layer

    def aligned_routes(self, data: TensorDict) -> TensorDict:
        """Aligns routes of R3. Tokens that verl sends where their router says get -1: the last one of each row, and all
        of a row whose response is masked. Others go where their record says, though that may be one expert several
        times."""
        if self._engine.engine_config.router_replay.mode != "R3":
            return data
        ids = data["input_ids"]
        routes = align_r3_router_replay_data(data[ROUTES], ids)
        is_free = ~build_r3_replay_mask(ids, data["response_mask"]).values().to(routes.device)
        values = routes.values().masked_fill(is_free[:, None, None], -1)
        aligned = data.exclude(ROUTES)
        aligned[ROUTES] = torch.nested.nested_tensor_from_jagged(values, routes.offsets())
        return aligned

    @property
    def stock_facts(self) -> StockFacts:
        return StockFacts(dense_mask=False, separates_rows=False, wrong_when_sharded=None, row_begins="places")

    @functools.cached_property
    def replay(self) -> Replay | None:
        """Whether and how routers are replayed. Routes of a rollout (R3) have all layers. Those that verl records (R2)
        have only layers with experts."""
        mode = self._engine.engine_config.router_replay.mode
        config = unwrapped(self._module).config
        layers = config.num_layers if mode == "R3" else len(layers_with_experts(config))
        return None if mode == "disabled" else Replay(mode, layers, config.moe_router_topk)

    @property
    def counts_last_tokens(self) -> bool:
        return counts_tokens(self._module)

    def memory(self, options: PrefixConfig) -> Memory:
        return Memory.of_megatron(self._engine.engine_config, torch.distributed.get_world_size(), options)

    def gradient_bytes(self) -> float:
        if not self.trains:
            return 0.0
        # mcore's buffers stay, but between updates param_offload frees their memory.
        freed = (grads for grads in self._gradient_buffers if not grads.untyped_storage().nbytes())
        return float(sum(grads.nbytes for grads in freed))

    def _hooked_model(self) -> MegatronModel:
        return MegatronModel(self._module)

    def _runner(
        self, forward: PackedForward, step: Step, forward_only: bool, offload: bool, meter: Meter
    ) -> PlanRunner:
        backward = None if forward_only else self._backward
        runner_type = PipelineRunner if self.ranks.pipeline_size > 1 else MegatronRunner
        return runner_type(forward, step, backward, offload=offload, meter=meter, module=self._module)

    def _backward(self, loss: torch.Tensor) -> None:
        """Scales a loss and runs its backward, where there is no pipeline. In one mcore's schedule does both."""
        scale = unwrapped(self._module).config.grad_scale_func
        (loss if scale is None else scale(loss)).backward()

    def model_metrics(self, runner: PlanRunner) -> dict[str, float]:
        assert isinstance(runner.forward.model, MegatronModel)
        config = unwrapped(self._module).config
        if config.num_moe_experts is None or runner.backward is None:
            return {}
        loads = runner.forward.model.expert_loads
        return loads.metrics(self.ranks.sum_over_ranks, config.num_layers, config.num_moe_experts)

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def output_names(self, flags: Mapping[str, bool]) -> list[str]:
        return policy_outputs(flags)

    def token_outputs(
        self, logits: torch.Tensor, tokens: TensorDict, temperature: torch.Tensor, unscaled: bool,
        processor: Callable[..., Any] | None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Calls verl's vocabulary-parallel functions, as does every rank of a tensor-parallel set."""
        labels = tokens["input_ids"].values()
        # verl's losses would pad the teacher's rows and cut them for context parallelism; here they are those of this
        # rank's tokens. mcore hands on logits in fp32 (Float16Module.forward). verl's function writes over them and the
        # temperature.
        with replaced(losses, "preprocess_thd_engine", lambda rows, **_: (rows.values().unsqueeze(0),)):
            outputs = self._engine._lm_head_logits_processor(
                logits.float().unsqueeze(0), labels.unsqueeze(0), temperature.unsqueeze(0), **flags_of(tokens),
                logits_processor_func=processor, batch=tokens, data_format="thd",
            )  # fmt: skip
        return {name: x[0] for name, x in outputs.items()}

    def reads_logits_once(self, flags: Mapping[str, bool]) -> bool:
        return False  # a copy in fp32, and the gradient

    def logits_like(self) -> torch.Tensor:
        size = unwrapped(self._module).output_layer.output_size_per_partition
        return torch.zeros((1, size), dtype=self.dtype, device=get_device_id())

    def begin_shared_path(self, rows: BatchRows) -> None:
        """Says whether the loss is top-k distillation, after which verl's `optimizer_step` empties the allocator's
        cache."""
        self._engine._distillation_use_topk_active = rows.flag("distillation_use_topk")

    def run_stock_path(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool
    ) -> dict[str, Any]:
        data = data.copy()
        fused = self._engine.engine_config.use_fused_kernels  # as verl's engine was built
        tu.assign_non_tensor(data, use_fused_kernels=fused)
        return self._engine.verls_forward_backward(data, loss_function, forward_only)

    def gradients(self) -> Gradients:
        layers = unwrapped(self._module).decoder.layers
        (most,) = self.ranks.max_over_ranks([len(layers)])  # stages may have different numbers
        missing = [torch.nn.Module()] * (int(most) - len(layers))
        parts = {f"layer {i} of a stage": layer for i, layer in enumerate([*layers, *missing])}
        return Gradients(self._module, {}, parts, self._local_grad, self._clear)

    def _local_grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Returns this rank's part of a gradient. With the distributed optimizer it is what lies in this rank's shard
        of the buffer. The rest is not reduced, so that it depends on which tokens this rank computes. Of a buffer of
        100 on 4 ranks, rank 1 has [25, 50): of a gradient that lies at [40, 70) its first 10."""
        grad: torch.Tensor | None = getattr(parameter, "main_grad", None)
        if grad is None:
            return torch.zeros_like(parameter)
        group = self._module.param_to_bucket_group[parameter]
        if not group.ddp_config.use_distributed_optimizer:
            return grad.detach()
        buffer = group.param_to_bucket[parameter].grad_data
        size = len(buffer) // group.intra_distributed_optimizer_instance_size
        start = group.intra_distributed_optimizer_instance_rank * size
        start -= grad.storage_offset() - buffer.storage_offset()
        return grad.detach().flatten()[max(start, 0) : max(start + size, 0)]

    def _clear(self) -> None:
        if self.trains:
            self._module.zero_grad_buffer()

    def rounding_noise(self, seed: int) -> AbstractContextManager[None]:
        layers = unwrapped(self._module).decoder.layers
        return disturbed_outputs([layer.self_attention for layer in layers], [], self.dtype, seed)

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """Also keeps what routers have counted. Inside, no loss balances experts, since such losses depend on how rows
        fall into passes, and routers' biases stay, which mcore moves whenever gradients are reduced."""
        if not self.trains:
            yield
            return
        config = unwrapped(self._module).config
        coefficient = config.moe_aux_loss_coeff
        no_balance = [0.0] * len(coefficient) if isinstance(coefficient, list) else 0.0
        with (
            self._kept_aside(),
            replaced(config, "moe_router_bias_update_rate", 0.0),
            replaced(config, "moe_aux_loss_coeff", no_balance),
            replaced(self._engine, "_routed_num_tokens", functools.partial(_rows_times, self.ranks.sequence_size)),
        ):
            yield

    @contextmanager
    def _kept_aside(self) -> Iterator[None]:
        """Context that begins without gradients, and ends with the gradients and the counts of routers that were there
        before. Inside, counts have no effect."""
        counts = router_counts(self._module)
        # Where an update begins there are no gradients, and nothing is copied.
        kept = [(x, x.cpu()) for x in (*self._gradient_buffers, *counts) if x.any()]
        self._clear()
        try:
            yield
        finally:
            self._clear()
            for count in counts:
                count.zero_()
            for x, values in kept:
                x.copy_(values)


def _rows_times(sequence_size: int, data: TensorDict) -> torch.Tensor:
    """Stands in for verl's `_routed_num_tokens` of a batch. Where Megatron-Bridge divides gradients by tokens, verl
    counts n // sequence_size tokens of a micro-batch of n, and so loses the rest. Of rows * sequence_size there is no
    rest."""
    return torch.tensor(len(data) * sequence_size, device=data["input_ids"].device)


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
            verls_config = copy.copy(engine_config)  # the caller's stays as it is
            verls_config.__dict__.update(use_fused_kernels=False)  # they make log-probs of all tokens
        super().__init__(model_config, verls_config, optimizer_config, checkpoint_config)
        self.set_backend(MegatronBackend(self), engine_config, model_config)


EngineRegistry.register(model_type="language_model", backend="prefix_megatron", device="cuda")(PrefixMegatronEngine)
