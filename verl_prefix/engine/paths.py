"""The path of a batch: shared, by a plan, or verl's own, for a reason that is logged once and counted in metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from verl_prefix.auto.calibration import Profile, measure
from verl_prefix.auto.chooser import Batch, Chooser, CostModel
from verl_prefix.auto.cost import (
    ROOM_FACTOR,
    Memory,
    PassCost,
    Rates,
    may_keep_attention,
    peak_bytes,
    shard_size,
    syncs_once,
)
from verl_prefix.config import NO_REPLAY, PrefixConfig, is_varlen
from verl_prefix.core.groups import Group
from verl_prefix.core.waves import Plan
from verl_prefix.engine.rows import row_lens
from verl_prefix.models.recurrent import packing_leak


class Stock(NamedTuple):
    """A batch goes to verl's own path, for `reason`; `metrics` that were found before."""

    reason: str
    metrics: Mapping[str, float] = MappingProxyType({})


class Paths:
    """Plans an engine's batches.

    Attributes:
        lasting: verl's own path, where every batch takes it from now on; or None.
    """

    def __init__(self, options: PrefixConfig) -> None:
        self.options = options
        self.lasting = Stock("prefix.schedule=stock") if options.schedule == "stock" else None
        self._chooser: Chooser | None = None
        # Bytes that an update may add with attention kept, as updates showed; what the largest and the last one added.
        self._seen_room = 0.0 if get_device_name() == "cuda" else math.inf
        self._most_added = self._adds = 0.0

    def initialize(self, engine: Any) -> None:
        """Called once the engine, a `PrefixFSDPEngine`, has its model, unless prefix.schedule is stock."""
        options, config, module = self.options, engine.engine_config, engine.module
        device = torch.device(get_device_name())
        self._reduce_max = engine.reduce_max
        memory = Memory(
            ranks=shard_size(config.fsdp_size, torch.distributed.get_world_size()),
            checkpointed=engine.model_config.enable_gradient_checkpointing,
            no_sync=syncs_once(config),
            logits_chunk=options.logits_chunk,
            offload=options.offload,
            sequence_ranks=config.ulysses_sequence_parallel_size,
        )
        self._costs = costs = CostModel(
            shape=engine.shape,
            dense_mask=not is_varlen(module.config._attn_implementation),
            wave_tokens=options.wave_tokens,
            min_speedup=options.min_speedup,
            memory=memory,
            one_row=engine.use_remove_padding and packing_leak(module) is not None,
        )
        if options.schedule != "auto":
            return
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        gradients = 0.0 if config.forward_only else 4.0 * trained / memory.ranks

        def rates(budget: int, batch_tokens: int, forward_only: bool) -> Rates:
            return measure(
                costs.shape, budget, batch_tokens=batch_tokens, device=device, schedule=engine.schedule,
                model=module, forward_only=forward_only,
            )  # fmt: skip

        def stock_fits(passes: Sequence[PassCost]) -> bool:
            if device.type != "cuda":
                return True
            cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            room = torch.cuda.mem_get_info()[0] + cached - gradients
            return peak_bytes(costs.shape, None, passes, memory, config.forward_only) <= room

        profile = Profile()
        if config.full_determinism or torch.are_deterministic_algorithms_enabled():
            flops = costs.flops()  # no clock: it would choose otherwise from run to run
            profile = Profile(flops.forward) if config.forward_only else flops
        self._chooser = Chooser(costs, profile, measure=rates, reduce_max=self._reduce_max, stock_fits=stock_fits)

    def stock(self, data: TensorDict) -> Stock | None:
        """verl's own path, where this batch takes it whatever its lengths are; or None.

        Raises:
            ValueError: the batch has routes to replay, which neither path does.
        """
        if "routed_experts" in data.keys():
            raise ValueError(NO_REPLAY)
        if self.lasting is not None:
            return self.lasting
        if "prompts" not in data.keys() or "responses" not in data.keys():
            return Stock("the batch has no prompts and responses (not an RL batch)")
        if tu.get_non_tensor_data(data, "force_group_size", 1) > 1:
            return Stock("force_group_size keeps rows together by their order")
        if tu.get_non_tensor_data(data, "distillation_use_topk", False):
            return Stock("top-k distillation needs logits of every token")
        return None

    def plan(self, data: TensorDict, groups: Sequence[Group], forward_only: bool) -> Plan | Stock:
        """This rank's plan, or verl's own path.

        Args:
            data: this rank's own rows, which verl's path would compute. groups: of the rows that ours computes.
        """
        lens = zip(*row_lens(data), strict=True)
        own_rows = [Group((row,), prompt_len - 1, (n,)) for row, (prompt_len, n) in enumerate(lens)]
        batch, own = (Batch(each, pass_budget(data, each)) for each in (groups, own_rows))
        if self._chooser is None:
            return self._costs.plan(*batch, self.options.schedule, forward_only)
        plan = self._chooser.choose(*batch, forward_only, own)
        return plan or Stock(f"prefix.min_speedup={self.options.min_speedup} is more than sharing is predicted to gain")

    def keeps_attention(self, plan: Plan) -> bool:
        """Whether an update keeps attention's outputs: where every rank has room, by what updates without have left."""
        if not may_keep_attention(self._costs.shape, self._costs.memory.checkpointed, self.options.keep_attention):
            return False
        lacks_room = ROOM_FACTOR * self._added(plan, attention_kept=True) > self._seen_room
        (any_lacks_room,) = self._reduce_max([float(lacks_room)])
        self._adds = self._added(plan, attention_kept=not any_lacks_room)
        return not any_lacks_room

    def see_room(self) -> None:
        """Called behind every optimizer step: the allocator still holds what it took for the largest update until now,
        so that what the device has free was left by that one."""
        if self._adds and get_device_name() == "cuda":
            self._most_added = max(self._most_added, self._adds)
            room = torch.cuda.mem_get_info()[0] + self._most_added
            self._seen_room = min(self._seen_room or math.inf, room)
        self._adds = 0.0

    def _added(self, plan: Plan, attention_kept: bool) -> float:
        """Bytes that an update is estimated to add."""
        return peak_bytes(self._costs.shape, plan, (), replace(self._costs.memory, attention_kept=attention_kept))

    def metrics(self) -> dict[str, float]:
        """prefix/* about the path that a batch took."""
        speedup = self._chooser and self._chooser.speedup
        return {"prefix/predicted_speedup": speedup} if speedup else {}


def pass_budget(data: TensorDict, groups: Sequence[Group]) -> int:
    """Tokens of one pass on the ranks that share it: verl's token budget, or what its micro-batch of longest rows would
    hold."""
    if tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
        return int(data["max_token_len_per_gpu"]) * tu.get_non_tensor_data(data, "sp_size", 1)
    longest = max((group.prefix_len + 1 + n for group in groups for n in group.suffix_lens), default=1)
    return int(data["micro_batch_size_per_gpu"]) * longest
