"""verl's own path: verl's engine on rows as they come, set so that it computes them right."""

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_prefix.config import is_varlen
from verl_prefix.engine.loss import LossFunction
from verl_prefix.models.recurrent import packing_leak, replaced, sharding_leak
from verl_prefix.models.vision import UNPATCHED, towers_of_tensors
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


def wrong_when_sharded(model: Any, attention: str) -> str | None:
    """Why verl's sequence parallelism computes this model wrong, without an error, with an `attn_implementation`;
    None where it is right."""
    if not is_varlen(attention):
        return f"verl computes attn_implementation={attention} within each rank's tokens"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "verl gives each rank the sinks of all heads"
    if model.config.model_type in UNPATCHED:
        return f"verl gives each rank all tokens of a row of {model.config.model_type}"
    return sharding_leak(model)


class StockPath(FSDPEngineWithLMHead):
    """verl's FSDP2 engine for batches that go verl's own path, and reductions over ranks."""

    _unfused = False  # whether the user asked for verl's fused kernels, which are then off

    @functools.cached_property
    def whole_rows(self) -> str | None:
        """Why verl's own path would be wrong where the ranks of a group share rows, so that each computes them alone;
        None where it is right."""
        if self.ulysses_sequence_parallel_size == 1:
            return None
        return wrong_when_sharded(self.module, self.module.config.get_text_config()._attn_implementation)

    def stock_batch(self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool) -> dict[str, Any]:
        """Computes a batch on verl's own path, without the fused kernels that the user asked for. Its micro-batches
        have one row where packed rows would leak state, and each rank of a group computes them alone where verl's
        sequence parallelism would be wrong."""
        data = data.copy()
        if self._unfused:
            tu.assign_non_tensor(data, use_fused_kernels=False)
        packs = tu.get_non_tensor_data(data, "use_remove_padding", True)
        if packs and self.module.config.model_type in UNPATCHED:
            text = "prefix: stock path, rows padded: flash attention in transformers would take positions of "
            warn_once(logger, text + "three axes for those of packed rows")
            tu.assign_non_tensor(data, use_remove_padding=False)
        elif packs and (leak := packing_leak(self.module)):
            text = "prefix: stock path, rows one by one: %s, so that packed rows would leak state into each other"
            warn_once(logger, text, leak)
            self._separate_rows(data)
        alone = self._alone(data) if self.whole_rows else nullcontext()
        with towers_of_tensors(self.module), alone:
            return super().forward_backward_batch(data, loss_function, forward_only)

    @contextmanager
    def _alone(self, data: TensorDict) -> Iterator[None]:
        """Context in which verl's engine computes without sequence parallelism. The ranks of a group have the same
        rows, and so the same gradients, of which FSDP takes the mean. A pass has a rank's token budget, or the longest
        row (or rows that stay together) of any rank. verl multiplies it by `sp_size`."""
        group = get_ulysses_sequence_parallel_group()
        if tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
            together = data["input_ids"].offsets().diff().split(tu.get_non_tensor_data(data, "force_group_size", 1))
            (longest,) = self.reduce_max([max(int(lens.sum()) for lens in together)])
            budget = max(int(data["max_token_len_per_gpu"]), int(longest))
            tu.assign_non_tensor(data, max_token_len_per_gpu=-(-budget // self.ulysses_sequence_parallel_size))
        text = "prefix: stock path, each rank computes whole rows: %s, under sequence parallelism"
        warn_once(logger, text, self.whole_rows)
        set_ulysses_sequence_parallel_group(None)
        try:
            with replaced(self, "use_ulysses_sp", False):
                yield
        finally:
            set_ulysses_sequence_parallel_group(group)

    def _separate_rows(self, data: TensorDict) -> None:
        """Makes verl's own path keep rows apart: one row in a micro-batch; or padded rows (no token of a row sees
        padding) where a loss needs its rows together, or where ranks have different numbers of rows, since only verl
        can then even out their micro-batches."""
        most, fewest = self.reduce_max([len(data), -len(data)])
        if most + fewest or tu.get_non_tensor_data(data, "force_group_size", 1) > 1:
            tu.assign_non_tensor(data, use_remove_padding=False)
        else:
            tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)

    def reduce_max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks, those that compute rows together included, so that all of them decide
        alike; exact for integers below 2**53."""
        return _reduce(values, torch.distributed.ReduceOp.MAX)

    def reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks."""
        return _reduce(values, torch.distributed.ReduceOp.SUM)


def _reduce(values: Sequence[float], op: torch.distributed.ReduceOp.RedOpType) -> list[float]:
    reduced = torch.tensor(values, dtype=torch.float64, device=get_device_id())
    torch.distributed.all_reduce(reduced, op=op)
    return reduced.tolist()
