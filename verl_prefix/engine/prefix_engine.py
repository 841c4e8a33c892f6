"""PrefixFSDPEngine: verl's FSDP2 engine with a `forward_backward_batch` that shares prefixes.

verl hands the engine a rank's whole mini-batch. The stock engine cuts it into micro-batches of rows; ours groups the
rows, plans passes over groups (`core.waves`), runs them (`core.schedule`) and computes log-probs, entropy and loss of
each pass with verl's own functions, on suffix tokens only. Source: verl/workers/engine/fsdp/transformer_impl.py,
FSDPEngine.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func

from verl_prefix.auto.cost import Memory
from verl_prefix.auto.shape import model_shape
from verl_prefix.config import PrefixEngineConfig, check_dealt, check_sequence_parallel, warn_of_replaced_options
from verl_prefix.core.attention import AttentionPass
from verl_prefix.core.groups import Group
from verl_prefix.core.meter import Meter
from verl_prefix.core.schedule import Schedule
from verl_prefix.core.waves import Plan, pad_to_same_passes
from verl_prefix.cpu.engine import CPUFSDPEngine
from verl_prefix.engine.exchange import open_exchange, receive_pixels, together
from verl_prefix.engine.loss import LossFunction, mode_of_verls_loss, module_of
from verl_prefix.engine.mini_batch import MiniBatch, even_out, plan_metrics
from verl_prefix.engine.out_of_memory import out_of_memory_advice
from verl_prefix.engine.outputs import reads_logits_once
from verl_prefix.engine.paths import Paths, Stock, pass_budget
from verl_prefix.engine.room import Room
from verl_prefix.engine.rows import Trees, check_rows, padding_rows, tokens_by_trees
from verl_prefix.engine.step_metrics import GROUP_TOKENS, TREE_TOKENS, StepMetrics
from verl_prefix.engine.stock_path import StockPath
from verl_prefix.engine.trace_writer import open_trace
from verl_prefix.engine.verify import Verification
from verl_prefix.models import vision
from verl_prefix.models.hookup import HookedModel
from verl_prefix.models.messages import end_tokens
from verl_prefix.models.support import check_dropout, check_supported
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


class PrefixFSDPEngine(StockPath):
    """verl's FSDP2 actor or ref engine that computes a group's prefix once.

    Raises:
        ValueError: at construction, a model or option that the shared-prefix path does not support.
    """

    # Set where verl's FSDP engine builds its module; engines that build their own (veomni) may set neither.
    scaler = None
    _autocast_dtype = torch.bfloat16
    trees: Trees
    _counted = False  # whether `tokens_by_trees` has run

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """A rank's mini-batch: same contract as FSDPEngine.forward_backward_batch, rows in the order they came."""
        tu.assign_non_tensor(data, sp_size=self.ulysses_sequence_parallel_size)
        done = self._sharing(data, loss_function, forward_only)
        if isinstance(done, Stock):
            warn_once(logger, "prefix: stock path, %s", done.reason)
            receive_pixels(data)
            metrics = {**done.metrics, "prefix/stock_rows": len(data) - len(padding_rows(data))}
            done = self.stock_batch(data, loss_function, forward_only), metrics
        output, metrics = done
        output["metrics"].update(self._step_metrics.report(metrics, data, forward_only))
        return output

    def _sharing(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool
    ) -> tuple[dict[str, Any], dict[str, float]] | Stock:
        """verl's output of a mini-batch whose prefixes are shared, and this rank's metrics; or why it is not shared."""
        if stock := self._paths.stock(data) or self._verification.failure:
            return stock
        custom_loss = loss_function is not None and mode_of_verls_loss(loss_function) is None
        if custom_loss and not module_of(loss_function).startswith("verl."):
            warn_once(logger, "prefix: a loss that is not verl's own gets zeros in place of outputs of prompts")
        exchange = open_exchange(self, data, custom_loss)
        groups, metrics = exchange.groups, exchange.metrics
        if not forward_only and self.prefix_config.mini_batches == "rows":  # "prompts" tears them on purpose
            self._step_metrics.meet(exchange.prompts)
        if not (self._counted or self.engine_config.forward_only):
            self._counted = True
            with together("counting tokens"):
                by_trees = tokens_by_trees(exchange.rows, exchange.keys, self.trees, groups)
            metrics |= {TREE_TOKENS[name]: tokens for name, tokens in by_trees.items()}
        self.trees = self.trees._replace(seen=exchange.are_cut)
        plan = self._paths.plan(data, groups, forward_only)
        metrics |= self._paths.metrics()
        if isinstance(plan, Stock):
            return plan._replace(metrics=metrics)
        with together("checking rows"):
            check_rows(exchange.rows, self.module.config)
        rows = self._prepared(exchange.rows)
        if not forward_only or self.engine_config.forward_only:
            with out_of_memory_advice(None):
                metrics.update(self._verification.check(rows, groups, pass_budget(data, groups)))
            if failure := self._verification.failure:
                return failure._replace(metrics=metrics)
        # Only in the first update with waves, since it resets the peak that verl logs as perf/max_memory_allocated_gb.
        measure_peak = get_device_name() == "cuda" and not forward_only and not self._saw_waves
        keeps = self._paths.costs.memory
        if not forward_only:
            keeps = self._room.memory(
                plan, self._paths.costs, self.prefix_config.keep_attention, one_copy=reads_logits_once(data)
            )
        with out_of_memory_advice(plan, keeps):
            output, of_plan = self.run_plan(
                rows, groups, plan, loss_function, forward_only, keeps=keeps, measure_peak=measure_peak
            )
        self._saw_waves |= "prefix/phase_b_peak_gib" in of_plan
        output["model_output"] = exchange.give_back(output["model_output"])
        # These tokens are compared with those of log-probs. A custom loss keeps rows on ranks that they left for
        # log-probs, and mini_batches=prompts tears prompts on purpose.
        if not custom_loss and self.prefix_config.mini_batches == "rows":
            padding = padding_rows(rows)
            metrics[GROUP_TOKENS] = sum(g.num_physical_tokens for g in groups if padding.isdisjoint(g.rows))
        return output, metrics | of_plan

    def run_plan(
        self, data: TensorDict, groups: Sequence[Group], plan: Plan, loss_function: LossFunction | None,
        forward_only: bool, *, pass_type: Callable[..., AttentionPass] = AttentionPass, keeps: Memory | None = None,
        measure_peak: bool = False,
    ) -> tuple[dict[str, Any], dict[str, float]]:  # fmt: skip
        """Runs all passes of this rank's plan; returns verl's output of its rows, and metrics.

        Args:
            data: `_prepared` rows. groups: theirs.
            pass_type: as in `core.schedule.Schedule`. measure_peak: as in `core.meter.Meter`.
            keeps: what the passes keep; None: as little as they need.
        """
        plan, keeps = pad_to_same_passes(plan, self.reduce_max), keeps or self._paths.costs.memory
        mini_batch = MiniBatch(self, data, loss_function, forward_only)
        schedule = self.schedule(
            mini_batch.token_outputs.of_tokens,
            mini_batch.step,
            None if forward_only else self._backward,
            offload=self.prefix_config.offload,
            keep_attention=keeps.attention_kept,
            logits_chunk=keeps.chunk,
            meter=Meter(measure_peak),
            pass_type=pass_type,
        )
        with torch.no_grad() if forward_only else nullcontext():
            schedule.run(mini_batch.token_outputs.tokens, plan)
        output = postprocess_batch_func(*mini_batch.outputs(plan), data=data)
        even_out(output["metrics"], len(plan.packed) + len(plan.waves))
        assert isinstance(schedule.model, HookedModel)
        metrics = plan_metrics(groups, plan, schedule, padding_rows(data))
        metrics |= schedule.model.expert_loads.metrics(self.reduce_sum)
        return output, metrics | {"prefix/nonfinite_passes": mini_batch.num_not_finite}

    def _prepared(self, data: TensorDict) -> TensorDict:
        """A copy with what FSDPEngine.forward_backward_batch adds for the loss."""
        data = data.copy()
        batch_num_tokens = data["loss_mask"].sum().to(get_device_id())
        torch.distributed.all_reduce(batch_num_tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(
            data,
            batch_num_tokens=batch_num_tokens.item(),
            dp_size=self.get_data_parallel_size(),
            # Our passes are row lists whatever this was: verl restores the row order only under dynamic batch size.
            use_dynamic_bsz=True,
        )
        return data

    def schedule(self, outputs: Callable, step: Callable, backward: Callable | None, **options: Any) -> Schedule:
        """A schedule on this engine's model, with its autocast and gradient synchronisation."""
        options = {"logits_chunk": self._paths.costs.memory.chunk} | options
        return Schedule(
            HookedModel(self.module),
            outputs=outputs,
            step=step,
            backward=backward,
            gradient_sync=lambda last: (
                nullcontext() if backward is None else self._gradient_sync_context(is_last_micro_batch=last)
            ),
            forward_context=self.autocast,
            kernel=self.prefix_config.attention,
            sequence_group=self.ulysses_parallel_group,
            **options,
        )

    def _backward(self, loss: torch.Tensor) -> None:
        loss = loss if self.scaler is None else self.scaler.scale(loss)
        loss.backward()

    def autocast(self):
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)

    def train_batch(self, data: TensorDict, loss_function: LossFunction) -> dict[str, Any]:
        """Runs one optimizer step, as verl's; `prefix.trace_dir` has it recorded first. Under `mini_batches=prompts` a
        loss that is a mean over rows divides by the mini-batch's rows, where verl counts n per prompt and padding."""
        if self.prefix_config.mini_batches == "prompts":
            (rows,) = self.reduce_sum([len(data) - len(padding_rows(data))])
            tu.assign_non_tensor(data, global_batch_size=int(rows) // self.ulysses_sequence_parallel_size)
        if self._trace is not None:
            self._trace.record(data, loss_function, self.reduce_max)
        with self._room.update():
            return super().train_batch(data, loss_function)

    def __init__(self, model_config, engine_config: PrefixEngineConfig, optimizer_config, checkpoint_config) -> None:
        self.prefix_config = engine_config.prefix
        self._saw_waves = False  # in an update
        self._verification = Verification(self)
        if self.prefix_config.schedule != "stock":
            warn_of_replaced_options(model_config)
            check_supported(model_config.hf_config)
            role, num_ranks = "ref" if engine_config.forward_only else "actor", torch.distributed.get_world_size()
            size = engine_config.ulysses_sequence_parallel_size
            check_sequence_parallel(role, size, n_gpus=num_ranks, model_config=model_config)
            check_dealt(role, size, model_config.hf_config)
            # verl's fused forward makes log-probs of all tokens, and with FSDP2 it meets a sharded lm_head. Its offload
            # counts forwards of layers, and would replace gradient checkpointing by a reentrant one.
            self._unfused, model_config = bool(model_config.use_fused_kernels), copy.copy(model_config)
            vars(model_config).update(use_fused_kernels=False, enable_activation_offload=False)
        # The base class branches on its own strategy names (_build_fsdp_module); the caller's config stays as it is.
        engine_config = copy.copy(engine_config)
        engine_config.strategy = "fsdp2"
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._trace = open_trace(self)
        self._step_metrics = StepMetrics(
            self.reduce_sum, self.reduce_max, self.ulysses_sequence_parallel_size, self.prefix_config.trees,
            epochs=engine_config.ppo_epochs,
        )  # fmt: skip

    def initialize(self) -> None:
        super().initialize()
        if self.prefix_config.schedule != "stock":
            check_dropout(self.module)
            self.shape = model_shape(self.module, self._autocast_dtype)
            ends = frozenset(end_tokens(self.model_config.tokenizer))
            self.trees = Trees(self.prefix_config.trees, ends, self.model_config.hf_config)
        self._paths = Paths(self)
        self._room = Room(self.reduce_max)

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        if self.engine_config.freeze_vision_tower:
            vision.tower_of(module).requires_grad_(False)
        return module

    def _build_lora_module(self, module: torch.nn.Module) -> torch.nn.Module:
        module = super()._build_lora_module(module)
        frozen = vision.tower_of(module).parameters() if self.engine_config.freeze_vision_tower else ()
        if any(parameter.requires_grad for parameter in frozen):
            raise ValueError(
                "actor_rollout_ref.actor.freeze_vision_tower=True, and LoRA adapts the tower; set "
                "actor_rollout_ref.model.exclude_modules='.*visual.*'"
            )
        return module

    def load_checkpoint(self, *args, **kwargs) -> None:
        """Loads as verl's; after that no trace is recorded."""
        super().load_checkpoint(*args, **kwargs)
        if self._trace is not None:
            self._trace.resumed = True


class PrefixFSDPEngineCPU(CPUFSDPEngine, PrefixFSDPEngine):
    """`PrefixFSDPEngine` on gloo ranks without an accelerator."""


EngineRegistry.register(model_type="language_model", backend="prefix", device="cuda")(PrefixFSDPEngine)
EngineRegistry.register(model_type="language_model", backend="prefix", device="cpu")(PrefixFSDPEngineCPU)
