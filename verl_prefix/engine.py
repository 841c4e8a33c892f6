"""PrefixFSDPEngine: verl's FSDP2 engine with `forward_backward_batch` overridden, and nothing else of substance.

verl hands the engine a rank's whole mini-batch. The stock engine cuts it into micro-batches of rows; ours groups the
rows, plans passes over groups (`waves`), runs them (`schedule`) and computes log-probs, entropy and loss of each pass
with verl's own functions, on suffix tokens only. Source: verl/workers/engine/fsdp/transformer_impl.py, FSDPEngine.
"""

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree, postprocess_batch_func

from verl_prefix import models, waves
from verl_prefix.config import PrefixEngineConfig, check_model_options
from verl_prefix.cpu.engine import CPUEngineMixin
from verl_prefix.groups import Group, group_rows
from verl_prefix.layout import Layout
from verl_prefix.schedule import Schedule, TokenBatch

logger = logging.getLogger(__name__)


class PrefixFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 actor or ref engine that computes a group's prefix once.

    Raises:
        ValueError: at construction, a model or option that the shared-prefix path does not support.
    """

    def __init__(self, model_config, engine_config: PrefixEngineConfig, optimizer_config, checkpoint_config) -> None:
        self.prefix_config = engine_config.prefix
        self._phase_b_peak: int | None = None
        if self.prefix_config.schedule != "stock":
            check_model_options(model_config)
            models.check_supported(model_config.hf_config)
        # The base class branches on its own strategy names (_build_fsdp_module); the caller's config stays as it is.
        engine_config = copy.copy(engine_config)
        object.__setattr__(engine_config, "strategy", "fsdp2")
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def initialize(self) -> None:
        super().initialize()
        if self.prefix_config.schedule != "stock":
            models.check_dropout(self.module)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, object]:
        """A rank's mini-batch: same contract as FSDPEngine.forward_backward_batch, rows in the order they came."""
        if reason := self._stock_reason(data):
            logger.info("prefix: stock path, %s", reason)
            output = super().forward_backward_batch(data, loss_function, forward_only)
            output["metrics"]["prefix/stock_rows"] = [float(len(data))]
            output["metrics"]["prefix/reuse_fraction"] = [0.0]
            return output

        budget = self._budget(data)
        data = data.copy()
        group = self.get_data_parallel_group()
        batch_num_tokens = data["loss_mask"].sum().to(get_device_id())
        torch.distributed.all_reduce(batch_num_tokens, group=group)
        tu.assign_non_tensor(
            data,
            sp_size=1,
            batch_num_tokens=batch_num_tokens.item(),
            dp_size=self.get_data_parallel_size(),
            # Our passes are row lists whatever this was: verl restores the row order only under dynamic batch size.
            use_dynamic_bsz=True,
        )
        groups, split_uids = _group(data)
        options = self.prefix_config
        plan = waves.make_plan(groups, budget, options.schedule, options.wave_tokens, options.offload)
        plan = waves.agree(plan, self._reduce_max)

        job = _Batch(self, data, loss_function, forward_only)
        schedule = Schedule(
            self.module,
            outputs=job.token_outputs,
            step=job.step,
            backward=None if forward_only else self._backward,
            gradient_sync=lambda last: (
                nullcontext() if forward_only else self._gradient_sync_context(is_last_micro_batch=last)
            ),
            forward_context=self._autocast,
            kernel=self.prefix_config.attention,
            logits_chunk=self.prefix_config.logits_chunk,
            offload=self.prefix_config.offload,
            measure_peak=self._measures_phase_b_peak(forward_only),
        )
        with torch.no_grad() if forward_only else nullcontext():
            schedule.run(job.tokens, plan)

        output = postprocess_batch_func(*job.outputs(plan), data=data)
        num_passes = sum(1 if work.waves is None else len(work.waves) for work in plan.works)
        _even_out(output["metrics"], num_passes)
        self._phase_b_peak = self._phase_b_peak or schedule.phase_b_peak
        output["metrics"].update(_metrics(groups, plan, split_uids, schedule))
        if self._phase_b_peak and not forward_only:
            output["metrics"]["prefix/phase_b_peak_gib"] = [self._phase_b_peak / 2**30]
        return output

    def _measures_phase_b_peak(self, forward_only: bool) -> bool:
        """In the first update alone: it resets the peak that verl logs as perf/max_memory_allocated_gb."""
        return get_device_name() == "cuda" and not forward_only and self._phase_b_peak is None

    def _stock_reason(self, data: TensorDict) -> str | None:
        """Why this batch goes to verl's own path, or None."""
        if self.prefix_config.schedule == "stock":
            return "prefix.schedule=stock"
        if "prompts" not in data.keys() or "responses" not in data.keys():
            return "the batch has no prompts and responses (not an RL batch)"
        if tu.get_non_tensor_data(data, "force_group_size", 1) > 1:
            return "force_group_size keeps rows together by their order"
        if tu.get_non_tensor_data(data, "distillation_use_topk", False):
            return "top-k distillation needs logits of every token"
        return None

    def _budget(self, data: TensorDict) -> int:
        """Physical tokens of one pass: verl's token budget, or what its micro-batch of longest rows would hold."""
        if tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
            return int(data["max_token_len_per_gpu"])
        return int(data["micro_batch_size_per_gpu"]) * int(data["input_ids"].offsets().diff().max())

    def _reduce_max(self, values: list[int]) -> list[int]:
        counts = torch.tensor(values, device=get_device_id())
        torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX, group=self.get_data_parallel_group())
        return counts.tolist()

    def _backward(self, loss: torch.Tensor) -> None:
        loss = loss if self.scaler is None else self.scaler.scale(loss)
        loss.backward()

    def _autocast(self):
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


class _Batch:
    """One mini-batch on its way through the schedule: logits -> verl's per-token outputs -> loss, rows and outputs."""

    def __init__(self, engine: PrefixFSDPEngine, data: TensorDict, loss_function: Callable | None, forward_only: bool):
        self.engine = engine
        self.data = data
        self.loss_function = loss_function
        self.forward_only = forward_only
        device = get_device_id()
        input_ids, position_ids = data["input_ids"], data["position_ids"]
        self.tokens = TokenBatch(
            input_ids.values().to(device), position_ids.values().to(device), input_ids.offsets().tolist()
        )
        temperature = torch.as_tensor(data["temperature"], dtype=torch.float32, device=device).expand(len(data))
        self._token_temperature = temperature.repeat_interleave(input_ids.offsets().diff().to(device))
        flags = ("calculate_entropy", "calculate_sum_pi_squared")
        self._keeps_model_output = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        self._flags = {flag: tu.get_non_tensor_data(data, flag, False) for flag in flags}
        self._offsets: dict[int, torch.Tensor] = {}
        self.names: list[str] = []
        self.dtype = torch.float32
        self._outputs: list[dict] = []
        self._rows: list[list[int]] = []

    def token_outputs(self, place: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """verl's prepare_model_outputs on suffix tokens: [n, k] of `self.dtype`, one column per name in `self.names`.

        Args:
            place: [n] places of the tokens in the batch's flat values. logits: [n, vocabulary].
        """
        temperature = self.data["temperature"]
        output_args = {
            "temperature_is_one": not isinstance(temperature, torch.Tensor) and float(temperature) == 1.0,
            "temperature_rmpad": self._token_temperature[place],
            # A suffix token's label is the next token of its own row, which a roll of the packed row would not give.
            "input_ids_rmpad_rolled": self.tokens.input_ids[place + 1],
            "pad_size": 0,
        }
        # One offsets tensor per length: a recomputed jagged tensor is the same size only if its offsets are the same.
        offsets = self._offsets.setdefault(len(place), torch.tensor([0, len(place)], device=place.device))
        one_row = torch.nested.nested_tensor_from_jagged(self.tokens.input_ids[place], offsets)
        tokens = tu.get_tensordict({"input_ids": one_row}, self._flags)
        outputs = self.engine.prepare_model_outputs(_Logits(logits.unsqueeze(0)), output_args, tokens, None)
        self.names = list(outputs)
        self.dtype = functools.reduce(torch.promote_types, (x.dtype for x in outputs.values()))
        return torch.stack([x.values().to(self.dtype) for x in outputs.values()], dim=-1)

    def step(self, groups: Sequence[Group], layout: Layout, outputs: torch.Tensor) -> torch.Tensor:
        """Stands for FSDPEngineWithLMHead.forward_step behind the model; outputs [suffix tokens, k]."""
        rows = [row for group in groups for row in group.rows]
        micro_batch = tu.index_select_tensor_dict(self.data, rows).to(get_device_id())
        model_output = self._model_output(groups, layout, outputs, micro_batch["input_ids"].offsets())
        if self.loss_function is None:
            loss, metrics = torch.ones((), device=outputs.device), {}
        else:
            loss, metrics = self.loss_function(
                model_output=model_output, data=micro_batch, dp_group=self.engine.get_data_parallel_group()
            )
        output = {"loss": loss.detach().item(), "metrics": metrics}
        if self._keeps_model_output:
            output["model_output"] = detach_tree(model_output)
        self._outputs.append(output)
        self._rows.append(rows)
        return loss

    def _model_output(
        self, groups: Sequence[Group], layout: Layout, outputs: torch.Tensor, offsets: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Every suffix token's outputs at its place in its row, zeros in the prompt: verl's nested full-length form."""
        rows = [row for group in groups for row in group.rows]
        suffix_lens = torch.tensor([n for group in groups for n in group.suffix_lens], device=offsets.device)
        starts = torch.tensor([self.tokens.offsets[row] for row in rows], device=offsets.device)
        place = layout.suffix_index.to(offsets.device) + (offsets[:-1] - starts).repeat_interleave(suffix_lens)
        full = outputs.new_zeros(int(offsets[-1]), outputs.shape[-1]).index_copy(0, place, outputs)
        return {
            name: torch.nested.nested_tensor_from_jagged(column, offsets)
            for name, column in zip(self.names, full.unbind(-1), strict=True)
        }

    def outputs(self, plan: waves.Plan) -> tuple[list[dict], list[list[int]]]:
        """The passes' outputs and their rows. Rows with an empty response, which no pass had, follow where their
        outputs are wanted, or where a rank has no other row: the metrics of all ranks need the same keys."""
        if plan.idle_rows and (self._keeps_model_output or not self._outputs):
            device = self.tokens.input_ids.device
            if not self._outputs:  # names and dtype are those that any one token gets
                vocab_size = self.engine.module.config.get_text_config().vocab_size
                logits = torch.zeros((1, vocab_size), dtype=self.engine._autocast_dtype, device=device)
                self.token_outputs(torch.tensor([-1], device=device), logits)
            with torch.no_grad():
                nothing = torch.zeros((0, len(self.names)), dtype=self.dtype, device=device)
                self.step(plan.idle_rows, Layout(torch.zeros(0, dtype=torch.int64), 0, ()), nothing)
        return self._outputs, self._rows


class _Logits:
    """What prepare_model_outputs reads of a HF output."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def _group(data: TensorDict) -> tuple[list[Group], int]:
    prompts = data["prompts"].unbind()
    positions = [row[..., : len(prompt)] for row, prompt in zip(data["position_ids"].unbind(), prompts, strict=True)]
    uids = [str(uid) for uid in tu.get(data, "uid")] if "uid" in data.keys() else None
    return group_rows(prompts, data["responses"].offsets().diff().tolist(), uids, positions)


def _even_out(metrics: dict[str, object], num_passes: int) -> None:
    """Gives every `Metric` one value per pass: verl averages them over ranks by position (Metric.aggregate_dp), and a
    rank's dummy passes have none. A dummy adds 0 to a sum and the rank's own mean to anything else."""
    for metric in metrics.values():
        if isinstance(metric, Metric) and metric.values:
            filler = 0.0 if metric.aggregation == AggregationType.SUM else sum(metric.values) / len(metric.values)
            metric.extend([filler] * (num_passes - len(metric.values)))


def _metrics(groups: Sequence[Group], plan: waves.Plan, split_uids: int, schedule: Schedule) -> dict[str, list[float]]:
    """This rank's prefix/* metrics of one mini-batch; verl averages them over ranks and mini-batches."""
    logical = sum(group.num_logical_tokens for group in groups)
    sharing = [group for group in groups if len(group.rows) > 1 and group.prefix_len]
    saved = logical - plan.num_physical_tokens
    values = {
        "prefix/groups": len(sharing),
        "prefix/stock_rows": sum(len(g.rows) for g in groups) - sum(len(g.rows) for g in sharing),
        "prefix/tokens_saved": saved,
        "prefix/reuse_fraction": saved / max(logical, 1),
        "prefix/recomputed_groups": plan.split_groups,
        "prefix/split_uids": split_uids,
        "prefix/packed_passes": sum(work.waves is None for work in plan.works),
        "prefix/waves": sum(len(work.waves or ()) for work in plan.works),
        "prefix/offloaded_gib": schedule.transfers["offloaded_bytes"] / 2**30,
        **{f"timing_s/prefix_{phase}": value for phase, value in schedule.seconds.items()},
    }
    return {name: [float(value)] for name, value in values.items()}


class PrefixFSDPEngineCPU(CPUEngineMixin, PrefixFSDPEngine):
    """The same on gloo ranks without an accelerator."""


EngineRegistry.register(model_type="language_model", backend="prefix", device="cuda")(PrefixFSDPEngine)
EngineRegistry.register(model_type="language_model", backend="prefix", device="cpu")(PrefixFSDPEngineCPU)
