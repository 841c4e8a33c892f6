"""PrefixFSDPEngine: verl's FSDP2 engine with `forward_backward_batch` overridden, and nothing else of substance.

verl hands the engine a rank's whole mini-batch. The stock engine cuts it into micro-batches of rows; ours groups the
rows, plans passes over groups (`waves`), runs them (`schedule`) and computes log-probs, entropy and loss of each pass
with verl's own functions, on suffix tokens only. Source: verl/workers/engine/fsdp/transformer_impl.py, FSDPEngine.
"""

import copy
import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import postprocess_batch_func

from verl_prefix.auto.chooser import Gate
from verl_prefix.config import PrefixEngineConfig, check_model_options
from verl_prefix.core import faults, waves
from verl_prefix.core.groups import Group
from verl_prefix.core.schedule import Schedule
from verl_prefix.cpu.engine import CPUEngineMixin
from verl_prefix.engine.mini_batch import MiniBatch, even_out, group_batch, row_lens
from verl_prefix.engine.self_check import Verdict, check
from verl_prefix.engine.trace_writer import open_trace
from verl_prefix.models import hookup as models
from verl_prefix.models import vision

logger = logging.getLogger(__name__)


class PrefixFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 actor or ref engine that computes a group's prefix once.

    Raises:
        ValueError: at construction, a model or option that the shared-prefix path does not support.
    """

    def __init__(self, model_config, engine_config: PrefixEngineConfig, optimizer_config, checkpoint_config) -> None:
        self.prefix_config = engine_config.prefix
        self._phase_b_peak: int | None = None
        self._wave_limit: int | None = None  # suffix tokens of a wave, since one ran out of memory
        self._gate: Gate | None = None
        self._updates = 0
        self._fallback_reason: str | None = None
        self._said: set[str] = set()
        if self.prefix_config.schedule != "stock":
            check_model_options(model_config)
            models.check_supported(model_config.hf_config)
        # The base class branches on its own strategy names (_build_fsdp_module); the caller's config stays as it is.
        engine_config = copy.copy(engine_config)
        object.__setattr__(engine_config, "strategy", "fsdp2")
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._trace = open_trace(self)

    def initialize(self) -> None:
        super().initialize()
        if self.prefix_config.schedule != "stock":
            models.check_dropout(self.module)
        if self.prefix_config.schedule == "auto":
            self._gate = Gate(
                models.model_shape(self.module, self._autocast_dtype),
                dense_mask="flash" not in self.module.config._attn_implementation,
                logits_chunk=self.prefix_config.logits_chunk,
                min_speedup=self.prefix_config.min_speedup,
                profile_path=self.prefix_config.cost_profile,
                writes_profile=torch.distributed.get_rank() == 0,
                measured_on=f"{self._device_name()}, {self._autocast_dtype}, {self.module.config.model_type}, "
                f"{sum(parameter.numel() for parameter in self.module.parameters())} parameters",
                reduce_max=self._reduce_max,
                schedule=self._schedule,
                zero_grad=self.optimizer_zero_grad,
            )

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

    def train_batch(self, data: TensorDict, loss_function: Callable) -> dict[str, object]:
        """One optimizer step, as verl's; recorded first where `prefix.trace_dir` says so."""
        if self._trace is not None:
            self._trace.record(data, loss_function, self._reduce_max)
        return super().train_batch(data, loss_function)

    def load_checkpoint(self, *args, **kwargs) -> None:
        """As verl's."""
        super().load_checkpoint(*args, **kwargs)
        if self._trace is not None:
            self._trace.resumed = True

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, object]:
        """A rank's mini-batch: same contract as FSDPEngine.forward_backward_batch, rows in the order they came."""
        if "multi_modal_inputs" in data.keys():
            # Here: Ray may unpickle that module's worker first, whose import of verl loads this module halfway through.
            from verl_prefix.engine.shared_pixels import receive_pixels

            receive_pixels(tu.get(data, "multi_modal_inputs"))
        reason = self._stock_reason(data)
        if reason is None:
            groups, split_uids = group_batch(data)
            plan = self._plan(groups, self._budget(data), forward_only)
            if plan is None:
                reason = (
                    f"prefix.min_speedup={self.prefix_config.min_speedup} is more than sharing is predicted to gain"
                )
        if reason is not None:
            self._say_once(f"prefix: stock path, {reason}")
            output = super().forward_backward_batch(data, loss_function, forward_only)
            output["metrics"]["prefix/stock_rows"] = [float(len(data))]
            output["metrics"]["prefix/reuse_fraction"] = [0.0]
            if self._gate is not None and self._gate.speedup:
                output["metrics"]["prefix/predicted_speedup"] = [self._gate.speedup]
            return output

        start = time.perf_counter()
        prepared = self._prepared(data)
        verdict = None if forward_only else self._verify(prepared, groups)
        verify_seconds = time.perf_counter() - start
        if self._fallback_reason:
            return self.forward_backward_batch(data, loss_function, forward_only)
        data = prepared
        if self._wave_limit is not None:
            plan = faults.limit_waves(plan, self._wave_limit)
        plan = waves.agree(plan, self._reduce_max)
        (job, schedule), plan, retries = faults.run_or_halve(
            lambda plan: self._run(data, plan, loss_function, forward_only),
            plan, self.module, torch.distributed.get_world_size(),
        )  # fmt: skip
        if retries:
            self._wave_limit = faults.largest_wave(plan)
        output = postprocess_batch_func(*job.outputs(plan), data=data)
        num_passes = sum(1 if work.waves is None else len(work.waves) for work in plan.works)
        even_out(output["metrics"], num_passes)
        self._phase_b_peak = self._phase_b_peak or schedule.phase_b_peak
        output["metrics"].update(_metrics(groups, plan, split_uids, schedule))
        output["metrics"]["prefix/oom_retries"] = [float(retries)]
        output["metrics"]["prefix/nonfinite_passes"] = [float(job.num_not_finite)]
        if self._phase_b_peak and not forward_only:
            output["metrics"]["prefix/phase_b_peak_gib"] = [self._phase_b_peak / 2**30]
        if self._gate is not None and self._gate.speedup:
            output["metrics"]["prefix/predicted_speedup"] = [self._gate.speedup]
        if verdict is not None:
            output["metrics"]["prefix/verify_log_probs"] = [verdict.log_probs]
            output["metrics"]["prefix/verify_attention"] = [verdict.attention]
            output["metrics"]["timing_s/prefix_verify"] = [verify_seconds]
        return output

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            logger.warning(text)
            self._said.add(text)

    def _prepared(self, data: TensorDict) -> TensorDict:
        """A copy with what FSDPEngine.forward_backward_batch adds for the loss."""
        data = data.copy()
        batch_num_tokens = data["loss_mask"].sum().to(get_device_id())
        torch.distributed.all_reduce(batch_num_tokens, group=self.get_data_parallel_group())
        tu.assign_non_tensor(
            data,
            sp_size=1,
            batch_num_tokens=batch_num_tokens.item(),
            dp_size=self.get_data_parallel_size(),
            # Our passes are row lists whatever this was: verl restores the row order only under dynamic batch size.
            use_dynamic_bsz=True,
        )
        return data

    def _plan(self, groups: Sequence[Group], budget: int, forward_only: bool) -> waves.Plan | None:
        """This rank's plan; None: the stock path is as cheap."""
        options = self.prefix_config
        if self._gate is None:
            return waves.make_plan(groups, budget, options.schedule, options.wave_tokens, options.offload)
        device = torch.device(get_device_name())
        return self._gate.choose(groups, budget, options.wave_tokens, options.offload, device, forward_only)

    def _schedule(self, outputs: Callable, step: Callable, backward: Callable | None, **options: object) -> Schedule:
        return Schedule(
            self.module,
            outputs=outputs,
            step=step,
            backward=backward,
            gradient_sync=lambda last: (
                nullcontext() if backward is None else self._gradient_sync_context(is_last_micro_batch=last)
            ),
            forward_context=self._autocast,
            kernel=self.prefix_config.attention,
            logits_chunk=self.prefix_config.logits_chunk,
            **options,
        )

    def _run(
        self, data: TensorDict, plan: waves.Plan, loss_function: Callable | None, forward_only: bool,
        inspect: Callable | None = None,
    ) -> tuple[MiniBatch, Schedule]:  # fmt: skip
        job = MiniBatch(self, data, loss_function, forward_only)
        schedule = self._schedule(
            job.token_outputs,
            job.step,
            None if forward_only else self._backward,
            offload=self.prefix_config.offload,
            measure_peak=self._measures_phase_b_peak(forward_only),
            inspect=inspect,
        )
        with torch.no_grad() if forward_only else nullcontext():
            schedule.run(job.tokens, plan)
        return job, schedule

    def _verify(self, data: TensorDict, groups: Sequence[Group]) -> Verdict | None:
        """The self-check where it is due: two rows of the smallest group, on every rank at once.

        Raises:
            RuntimeError: ours is off by more than rounding, and prefix.verify_action is raise.
        """
        self._updates += 1
        verify = self.prefix_config.verify
        due = {"first_step": self._updates == 1, "off": False}
        if not (due[verify] if verify in due else self._updates % verify == 1 % verify):
            return None
        candidates = self._checkable(data, [group for group in groups if group.num_suffix_tokens] or groups)
        if not candidates:
            self._say_once("prefix.verify waits for a batch in which every rank has a prompt with pixels")
            self._updates -= 1
            return None
        group = _sample(candidates)
        rows = tu.index_select_tensor_dict(data, list(group.rows))
        one_pass = dict(max_token_len_per_gpu=2**30, calculate_entropy=False, calculate_sum_pi_squared=False)
        tu.assign_non_tensor(rows, **one_pass)
        group = replace(group, rows=tuple(range(len(group.rows))))

        def responses(output: dict) -> torch.Tensor:
            log_probs = output["model_output"]["log_probs"].unbind()
            _, lens = row_lens(rows)
            return torch.cat([row[len(row) - n - 1 : len(row) - 1] for row, n in zip(log_probs, lens, strict=True)])

        def stock() -> torch.Tensor:
            return responses(FSDPEngineWithLMHead.forward_backward_batch(self, rows.copy(), None, forward_only=True))

        def ours(schedule: str, inspect: Callable | None) -> torch.Tensor:
            plan = waves.agree(waves.make_plan([group], 2**62, schedule), self._reduce_max)
            job, _ = self._run(rows, plan, None, True, inspect)
            return responses(postprocess_batch_func(*job.outputs(plan), data=rows))

        noise = functools.partial(models.rounding_noise, self.module, self._autocast_dtype)
        verdict = check(stock, ours, noise, self._reduce_sum)
        attention = min(verdict.attention, 1e12) if verdict.attention == verdict.attention else 1e12
        attention = self._reduce_max([round(1e3 * attention)])[0] / 1e3
        verdict = verdict._replace(attention=attention)
        if verdict.missed:
            message = f"prefix.verify, update {self._updates}: {verdict}"
            if self.prefix_config.verify_action == "raise":
                raise RuntimeError(
                    f"{message}. The shared-prefix path is wrong for this model; set model_engine=dp and report it, or "
                    "actor_rollout_ref.actor.prefix.verify_action=fallback to go on with the stock path"
                )
            self._fallback_reason = f"the self-check missed: {message}"
        return verdict

    def _checkable(self, data: TensorDict, groups: Sequence[Group]) -> Sequence[Group]:
        """Groups for the self-check, whose stock pass must run a vision tower equally often on every rank: verl's runs
        once for images and once for videos."""
        if not vision.is_vision_config(self.module.config):
            return groups
        rows = tu.get(data, "multi_modal_inputs") or [None] * len(data)
        found = {n: [group for group in groups if vision.num_kinds(rows[group.rows[0]]) == n] for n in (1, 2)}
        lacking = self._reduce_max([int(not chosen) for chosen in found.values()])
        return next((chosen for chosen, lacks in zip(found.values(), lacking, strict=True) if not lacks), [])

    def _measures_phase_b_peak(self, forward_only: bool) -> bool:
        """In the first update alone: it resets the peak that verl logs as perf/max_memory_allocated_gb."""
        return get_device_name() == "cuda" and not forward_only and self._phase_b_peak is None

    def _stock_reason(self, data: TensorDict) -> str | None:
        """Why this batch goes to verl's own path, or None."""
        if self.prefix_config.schedule == "stock":
            return "prefix.schedule=stock"
        if self._fallback_reason:
            return self._fallback_reason
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

    def _reduce_sum(self, values: list[float]) -> list[float]:
        sums = torch.tensor(values, dtype=torch.float64, device=get_device_id())
        torch.distributed.all_reduce(sums, group=self.get_data_parallel_group())
        return sums.tolist()

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if get_device_name() == "cuda" else get_device_name()

    def _backward(self, loss: torch.Tensor) -> None:
        loss = loss if self.scaler is None else self.scaler.scale(loss)
        loss.backward()

    def _autocast(self):
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


def _sample(groups: Sequence[Group]) -> Group:
    """Rows for the self-check: of the cheapest group whose longest rows have enough response tokens to compare."""
    enough, most = 32, 8

    def longest(group: Group) -> Group:
        order = sorted(range(len(group.rows)), key=lambda i: -group.suffix_lens[i])
        count = next((n for n in range(2, most) if sum(group.suffix_lens[i] for i in order[:n]) >= enough), most)
        rows, lens = zip(*((group.rows[i], group.suffix_lens[i]) for i in order[:count]), strict=True)
        return Group(rows, group.prefix_len, lens)

    sampled = [longest(group) for group in groups]
    shared = [group for group in sampled if len(group.rows) > 1 and group.prefix_len] or sampled
    return min(shared, key=lambda group: (-min(group.num_suffix_tokens, enough), group.num_physical_tokens))


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
