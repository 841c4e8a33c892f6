"""The path of a batch: shared, by a plan, or verl's own, for a reason that is logged once and counted in metrics."""

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from verl_prefix.auto.calibration import Profile, measure
from verl_prefix.auto.chooser import Batch, Chooser, CostModel
from verl_prefix.auto.cost import Memory, PassCost, Rates, peak_bytes, shard_size, syncs_once
from verl_prefix.config import NO_REPLAY, is_varlen
from verl_prefix.core.groups import Group
from verl_prefix.core.waves import Plan, leaves_room
from verl_prefix.engine.protocol import Engine
from verl_prefix.engine.rows import row_lens
from verl_prefix.models.recurrent import packing_leak
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


class Stock(NamedTuple):
    """A batch goes to verl's own path, for `reason`; `metrics` are those found before that was known."""

    reason: str
    metrics: Mapping[str, float] = MappingProxyType({})


class Paths:
    """Plans an engine's batches, once the engine has its model.

    Attributes:
        lasting: verl's own path, where every batch takes it; or None.
        costs: what decides between paths, unless prefix.schedule is stock.
    """

    def __init__(self, engine: Engine) -> None:
        self.options = options = engine.prefix_config
        self.lasting = Stock("prefix.schedule=stock") if options.schedule == "stock" else None
        self._chooser: Chooser | None = None
        self._told_waves = False
        if self.lasting is not None:
            return
        config, module, self._whole_rows = engine.engine_config, engine.module, engine.whole_rows
        device = torch.device(get_device_name())
        memory = Memory(
            ranks=shard_size(config.fsdp_size, torch.distributed.get_world_size()),
            checkpointed=engine.model_config.enable_gradient_checkpointing,
            no_sync=syncs_once(config),
            logits_chunk=options.logits_chunk,
            offload=options.offload,
            sequence_ranks=config.ulysses_sequence_parallel_size,
        )
        self.costs = costs = CostModel(
            shape=engine.shape,
            dense_mask=not is_varlen(module.config._attn_implementation),
            wave_tokens=options.wave_tokens,
            min_speedup=0 if self._whole_rows else options.min_speedup,  # that path computes every token n times
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
            flops = costs.flops()  # no clock, which would choose differently from run to run
            profile = Profile(flops.forward) if config.forward_only else flops
        self._chooser = Chooser(costs, profile, measure=rates, reduce_max=engine.reduce_max, stock_fits=stock_fits)

    def stock(self, data: TensorDict) -> Stock | None:
        """verl's own path, if this batch takes it whatever its lengths are; else None.

        Raises:
            ValueError: the batch has routes of experts to replay, which neither path does.
        """
        if "routed_experts" in data.keys():
            raise ValueError(NO_REPLAY)
        if self.lasting is not None:
            return self.lasting
        if "prompts" not in data.keys() or "responses" not in data.keys():
            return Stock("the batch has no prompts and responses (not an RL batch)")
        mask = data["loss_mask"]
        if mask.is_nested and 0 < len(mask.values()) == len(data["input_ids"].values()):
            return Stock("loss_mask is of prompts, too, whose outputs are not computed")
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
        lens = [*zip(*row_lens(data), strict=True)]
        own_rows = [Group((row,), prompt_len - 1, (n,)) for row, (prompt_len, n) in enumerate(lens)]
        batch, own = (Batch(each, pass_budget(data, each)) for each in (groups, own_rows))
        if not (self._whole_rows or self.costs.one_row) and any(sum(pair) > own.budget for pair in lens):
            key = "log_prob_max_token_len_per_gpu" if forward_only else "ppo_max_token_len_per_gpu"
            warn_once(
                logger,
                "prefix: a row alone is over the %d tokens of a pass (%s, of all ranks that share it), where verl's "
                "engine would end; raise it",
                own.budget,
                key,
            )
        waves, offload = self.options.wave_tokens, self.options.offload
        if waves is not None and not leaves_room(waves, batch.budget, offload) and not self._told_waves:
            self._told_waves = True
            logger.warning(
                "prefix: prefix.wave_tokens=%d %s the %d tokens of a pass, and is not heeded in such; set a smaller "
                "number, or null", waves, "is over" if offload else "leaves nothing for prefixes of", batch.budget,
            )  # fmt: skip
        if self._chooser is None:
            return self.costs.plan(*batch, self.options.schedule, forward_only)
        plan = self._chooser.choose(*batch, forward_only, own)
        if plan is None and not forward_only and self._chooser.log_probs is not None:
            return Stock("the update follows its log-probs, which took it, since both must round alike")
        return plan or Stock(f"prefix.min_speedup={self.options.min_speedup} is more than sharing is predicted to gain")

    def metrics(self) -> dict[str, float]:
        """prefix/* about the path that the last planned batch took."""
        speedup = self._chooser and self._chooser.speedup
        return {"prefix/predicted_speedup": speedup} if speedup else {}


def pass_budget(data: TensorDict, groups: Sequence[Group]) -> int:
    """Tokens of one pass on the ranks that share it: verl's token budget, or what its micro-batch of longest rows would
    hold."""
    if tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
        return int(data["max_token_len_per_gpu"]) * tu.get_non_tensor_data(data, "sp_size", 1)
    rows = ((fork.start, n) for group in groups for fork, n in zip(group.forks, group.suffix_lens, strict=True))
    longest = max((start + 1 + n for start, n in rows), default=1)
    return int(data["micro_batch_size_per_gpu"]) * longest
