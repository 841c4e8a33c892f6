"""One rank's mini-batch on each path, as verl's engines run it, on fake tensors.

The runner, attention, Hugging Face model, verl's FSDP2 wrapping and torch's AdamW are the real ones. Simulated
here are the lines of verl's engine around them: stock's micro-batches of whole rows, autocast, the gradient
synchronisation, the log-probs of logits; with flash-attn's cross entropy, whose kernel needs a GPU, in words of torch.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import adam

from verl_prefix.auto.cost import Memory, PassCost, may_have_all_logits, may_keep_attention
from verl_prefix.auto.cost_model import CostModel
from verl_prefix.auto.shape import ModelShape, model_shape
from verl_prefix.core.bins import first_fit
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.forward import LOGITS_CHUNK, TokenBatch
from verl_prefix.core.groups import Group
from verl_prefix.core.meter import Meter
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.pass_notes import PassNote
from verl_prefix.core.plan import Plan
from verl_prefix.core.runner import PlanRunner
from verl_prefix.core.runs import Segment
from verl_prefix.models import hookup, vision
from verl_prefix.models.recurrent import packing_leak
from verl_prefix.tools.simulate import experts, scans
from verl_prefix.tools.simulate.counted import CountedForward, CountedShards, known_by_count
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.megatron import MegatronModel
from verl_prefix.tools.simulate.model import FakeHookedModel, build_model, outputs_of, tell_sites, with_adapters
from verl_prefix.tools.simulate.operations import KERNEL
from verl_prefix.tools.simulate.thin import RATES, thin, thinned
from verl_prefix.tools.simulate.tower import TowerPixels, num_patches, prepare_tower
from verl_prefix.tools.simulate.tracker import Tracker

BACKWARD = "backward"  # the phase inside those of passes, where a pipeline's stages run them


def memory_of(job: Job, arm: Arm) -> Memory:
    """Options of an arm of ours, with the least that it may keep."""
    return replace(job.memory, offload=arm.offload)


def plan_of(job: Job, shape: ModelShape, arm: Arm, budget: int, forward_only: bool = False) -> Plan:
    """The plan of an arm of ours, as the engine makes it."""
    costs = CostModel(shape, False, job.wave_tokens, min_speedup=0, memory=memory_of(job, arm))
    return costs.plan(job.groups, budget, arm.path, forward_only)


class _Meter(Meter):
    """Tells the tracker its phases, behind `prefix`, of which groups stand for several by `weights`."""

    def __init__(self, tracker: Tracker, prefix: str, weights: dict[tuple[Group, ...], float]) -> None:
        super().__init__()
        self.tracker, self.prefix, self.weights = tracker, prefix, weights

    @contextlib.contextmanager
    def phase(self, note: PassNote, device: torch.device) -> Iterator[None]:
        weight = self.weights.get(tuple(note.groups), 1.0)
        with self.tracker.in_phase(self.prefix + note.phase, weight), super().phase(note, device):
            yield


class Simulation:
    """A job's model on a device, and its passes; on "sim" as FSDP2 shards it.

    Args:
        meshes: of `fake_accelerator`; None: nothing is sharded.
        device: "sim" inside `fake_accelerator`, or "cpu" without meshes: then all is real, or fake, as the caller has
            it.
    """

    def __init__(self, job: Job, tracker: Tracker, meshes: Any, device: str, kernel: str = KERNEL.__name__) -> None:
        self.job, self.tracker, self.device, self.kernel = job, tracker, device, kernel
        self.transfers: Counter[str] = Counter()  # of the last run
        memory, division = job.memory, job.memory.division
        with torch.device(device):
            model = build_model(job).train()
        if kernel == KERNEL.__name__:
            scans.stand_in(model)
        seeing = vision.is_vision_config(job.config)
        if seeing:
            prepare_tower(model)
        if memory.checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if job.freeze_tower:
            vision.tower_of(model).requires_grad_(False)
        if job.lora is not None:
            model.enable_input_require_grads()
            model = with_adapters(model, job.lora, job.master, device)
        self.outputs_of, self.megatron = outputs_of, None
        whole = model_shape(model, job.dtype) if division else None
        if division:
            self.megatron = MegatronModel(model, division, job.dtype, tracker)
            self.outputs_of = self.megatron.outputs_of
        elif meshes is not None and memory.veomni:
            experts.shard(model, meshes[0], expert_mesh=meshes[1], dtype=job.dtype, tracker=tracker)
        elif meshes is not None:
            from torch.distributed.fsdp import MixedPrecisionPolicy
            from verl.utils.fsdp_utils import apply_fsdp2

            policy = MixedPrecisionPolicy(param_dtype=job.dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
            apply_fsdp2(
                model, dict(mesh=meshes[0], mp_policy=policy, reshard_after_forward=job.reshard), {"wrap_policy": {}}
            )
        self.model, self.hooked = model, FakeHookedModel(model)
        self.shape = whole or model_shape(model, job.dtype, memory.expert_ranks)
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.assign(tensor, "parameters")
            if tensor.requires_grad:  # FSDP2 calls these hooks on its shards
                tensor.register_post_accumulate_grad_hook(lambda shard: tracker.assign(shard.grad, "gradients"))
        rows = sorted(
            (row, end + 1, outputs)
            for group in job.groups
            for row, end, outputs in zip(group.rows, group.row_ends, group.output_lens, strict=True)
        )
        self.lengths = [length for _, length, _ in rows]
        self.suffixes = [outputs for *_, outputs in rows]
        self.offsets = list(accumulate(self.lengths, initial=0))
        ids = torch.zeros(self.offsets[-1], dtype=torch.int64, device=device)
        positions = ids.new_zeros(4, len(ids)) if seeing else torch.zeros_like(ids)
        shown = job.grids or ((),) * len(job.groups)
        self.grids = [grids for g, grids in zip(job.groups, shown, strict=True) for _ in g.rows]
        tell_sites(model, tracker)
        self.pixels = TowerPixels(self.grids, job.config) if seeing else None
        every = division.tensor if division else 1  # tensor-parallel ranks are next to each other
        sharing = range(0, memory.slices * every, every)
        self.group = dist.new_group(sharing) if memory.slices > 1 else None
        self.tokens = TokenBatch(ids, positions, self.offsets, self.pixels)

    def optimizer(self) -> torch.optim.Optimizer | MegatronModel:
        """AdamW with its moments, as after a first step."""
        if self.megatron:
            return self.megatron
        groups = [{"params": parameters} for parameters in self._trained()]
        optimizer = torch.optim.AdamW(groups, lr=1e-6, foreach=True)
        for p in (p for group in groups for p in group["params"]):
            state = optimizer.state[p]
            state["step"] = torch.zeros(())
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.empty_like(p)
                self.tracker.assign(state[name], "optimizer")
        return optimizer

    def _trained(self) -> list[list[torch.nn.Parameter]]:
        """The trained parameters of each mesh; experts may have one of their own."""
        of_meshes: dict[Any, list[torch.nn.Parameter]] = {}
        for p in self.model.parameters():
            if p.requires_grad:
                of_meshes.setdefault(getattr(p, "device_mesh", None), []).append(p)
        return list(of_meshes.values())

    def step(self, optimizer: torch.optim.Optimizer | MegatronModel) -> None:
        """The norm of all gradients, and the optimizer's step."""
        # Fake tensors have no values: AdamW's step count is read as 1.
        with self.tracker.in_phase("optimizer"), mock.patch.object(adam, "_get_value", lambda x: 1.0):
            if not self.megatron:
                for parameters in self._trained():
                    torch.nn.utils.clip_grad_norm_(parameters, max_norm=1.0)
                self.tracker.read()  # verl asks whether the norm is finite
            optimizer.step()
            optimizer.zero_grad()

    def run(self, arm: Arm, update: bool) -> None:
        """The mini-batch forward and backward, or its log-probs with their entropy."""
        budget = self.job.budget if update else self.job.log_prob_budget or self.job.budget
        with torch.set_grad_enabled(update), contextlib.ExitStack() as stack:
            is_stock = arm.path.startswith("stock")
            if self.megatron or is_stock:  # ours alone shortens the last layer, and only that of Hugging Face
                stack.enter_context(mock.patch.object(hookup, "on_head_tokens", contextlib.nullcontext))
            if self.megatron:  # its routers see all tokens
                stack.enter_context(
                    mock.patch.object(self.hooked.expert_loads, "counting", lambda *_: contextlib.nullcontext())
                )
            (self._stock if is_stock else self._shared)(arm, budget, update)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device, dtype=self.job.dtype, enabled=self.job.dtype != torch.float32)

    @contextlib.contextmanager
    def _gradient_sync(self, update: bool, last: bool) -> Iterator[None]:
        """As FSDPEngine._gradient_sync_context."""
        defer = update and self.job.memory.no_sync and not last
        if defer:
            self.model.set_requires_gradient_sync(False)
        yield
        if defer:
            self.model.set_requires_gradient_sync(True)

    def _backward(self, loss: torch.Tensor) -> None:
        with self.tracker.in_phase(BACKWARD) if self.job.memory.stages > 1 else contextlib.nullcontext():
            loss.backward()

    def _log_probs(self, index: torch.Tensor, logits: torch.Tensor, update: bool) -> torch.Tensor:
        labels = self.tokens.input_ids[index + 1]
        return self.outputs_of(logits, labels, self.job.entropy or not update, self.job.temperature)

    def _shared(self, arm: Arm, budget: int, update: bool) -> None:
        job, memory = self.job, self.job.memory
        whole = plan_of(job, job.shape or self.shape, arm=arm, budget=budget, forward_only=not update)
        plan, weights = thinned(whole, self.shape, self._seeing, job.kept if update else 1, memory.no_sync)
        may_keep = memory.stages == 1 and may_keep_attention(self.shape, memory.checkpointed, job.keep_attention)
        may_have_all = may_have_all_logits(self.shape, memory.logits_chunk, logits_once=job.reads_logits_once)
        all_logits = update and arm.all_logits and may_have_all
        forward = CountedForward(
            self.hooked,
            lambda index, logits: self._log_probs(index, logits, update),
            context=self._autocast,
            kernel=self.kernel,
            logits_chunk=replace(memory_of(job, arm), all_logits=all_logits).chunk,
            keep_attention=update and arm.keeps_attention and may_keep,
            sequence_group=self.group,
        )
        runner = PlanRunner(
            forward,
            lambda packed_row, outputs: outputs.sum(),
            self._backward if update else None,
            lambda last: self._gradient_sync(update, last),
            offload=arm.offload,
            meter=_Meter(self.tracker, "" if update else "log_probs/", weights),
        )
        with known_by_count():
            runner.run(self.tokens, plan)
        self.tracker.read()  # losses and metrics of all passes
        self.transfers = runner.meter.transfers

    def _stock(self, arm: Arm, budget: int, update: bool) -> None:
        job = self.job
        batches = first_fit(range(len(self.lengths)), lambda row: self.lengths[row], budget)
        most = 1 if packing_leak(self.model) else arm.rows
        if most is not None:
            batches = [b[i : i + most] for b in batches for i in range(0, len(b), most)]
        chosen = thin(batches, self._cost_of_rows, job.kept if update else 1, job.memory.no_sync and update)
        phase = "micro_batch" if update else "log_probs/micro_batch"
        with (
            # Recurrent layers run the model's code: verl hands them a packed row as it is.
            mock.patch.object(hookup, "shared_states", contextlib.nullcontext),
            mock.patch.object(self.hooked, "check_calls", lambda calls: None),
            self.hooked.grouped_attention(),
        ):
            for i, (batch, weight) in enumerate(chosen):
                with self.tracker.in_phase(phase, weight), self._gradient_sync(update, i == len(chosen) - 1):
                    loss = self._micro_batch(arm, batch, update)
                    if update:
                        self._backward(loss)
                    del loss

    def _cost_of_rows(self, rows: list[int]) -> float:
        tokens = [self.lengths[row] for row in rows]
        pairs = sum(self.shape.pairs(n, 0) for n in tokens)
        return RATES.seconds(self.shape, [PassCost(sum(tokens), sum(tokens), pairs)]) + self._seeing(rows)

    def _seeing(self, rows: Sequence[int]) -> float:
        """Seconds of the tower on what these rows show."""
        return sum(num_patches(self.grids[row]) for row in rows) * self.shape.tower * RATES.linear

    def _micro_batch(self, arm: Arm, batch: list[int], update: bool) -> torch.Tensor:
        job, lengths = self.job, [self.lengths[row] for row in batch]
        pieces = [torch.arange(self.offsets[row], self.offsets[row + 1]) for row in batch]
        index = torch.cat(pieces)
        packed_row = PackedRow(index, tuple(map(Segment, lengths)))
        attention = ForwardContext(packed_row, self.kernel)
        if self.group is not None:
            attention.shards = shards = CountedShards(self.group, packed_row, torch.device(self.device))
            index = index[shards.local_tokens]
        index = index.to(self.device)
        ids, positions = self.tokens.input_ids[index], self.tokens.position_ids[..., index]
        pixels = self.pixels.at(batch, lengths, index.device) if self.pixels else {}
        with self._autocast():
            if arm.path == "stock":
                with contextlib.ExitStack() as stack:
                    inputs: dict[str, Any] = dict(pixels)
                    if seeing := vision.vision_model(self.model):  # verl's forward does what ours does
                        forward = functools.partial(vision.forward, seeing)
                        stack.enter_context(mock.patch.object(seeing, "forward", forward))
                        inputs |= dict(keep=slice(None), tower=True)
                    logits = self.model(
                        input_ids=ids.unsqueeze(0), position_ids=positions.unsqueeze(-2), attention_mask=None,
                        use_cache=False, prefix_context=attention, **inputs,
                    ).logits  # fmt: skip
                # On Megatron's engine a view, whose gradient is none of its own.
                logits = logits.squeeze(0) if self.megatron else logits[0]
                outputs = self.outputs_of(logits, ids.roll(-1), job.entropy or not update, job.temperature)
                del logits
            else:
                ends = zip(batch, accumulate(lengths), strict=True)
                kept = [torch.arange(end - self.suffixes[row] - 1, end - 1) for row, end in ends]
                head_tokens = torch.cat(kept)
                if attention.shards is not None:
                    head_tokens, _ = attention.shards.spread_head(head_tokens)
                attention.head_tokens = head_tokens = head_tokens.to(self.device)
                outputs = self.hooked.token_outputs(
                    ids, positions, attention,
                    of_head=lambda which, logits: self._log_probs(index[head_tokens[which]], logits, update),
                    logits_chunk=job.memory.logits_chunk or LOGITS_CHUNK, pixels=pixels,
                )  # fmt: skip
            if attention.shards is not None:
                outputs = attention.shards.gather(outputs, torch.arange(len(outputs) * job.memory.slices))
            self.tracker.read()  # verl's engine reads every pass's loss
            return outputs.sum()
