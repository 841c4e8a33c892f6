"""The stock path of FSDP2: verl's own engine on whole rows, set so that it computes them right."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.backends.hugging_face import without_ulysses
from verl_prefix.backends.stock_replay import replaying
from verl_prefix.backends.verl_engines import VerlFSDPEngine
from verl_prefix.config.model import is_varlen
from verl_prefix.engine.backend import Ranks, Replay, StockFacts
from verl_prefix.engine.fields import flag
from verl_prefix.engine.loss import LossFunction
from verl_prefix.models.recurrent import packing_leak, sharding_leak
from verl_prefix.models.replaced import replaced
from verl_prefix.models.verls_vision import towers_of_tensors
from verl_prefix.models.vision import UNPATCHED
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


def why_wrong_when_sharded(model: Any, attention: str) -> str | None:
    """Returns why verl's sequence parallelism computes this model wrong, without an error; None where it is right.

    Args:
        attention: the model's `attn_implementation`.
    """
    if not is_varlen(attention):
        return f"verl computes attn_implementation={attention} within each rank's tokens"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "verl gives each rank the sinks of all heads"
    if model.config.model_type in UNPATCHED:
        return f"verl gives each rank all tokens of a row of {model.config.model_type}"
    return sharding_leak(model)


class FSDPStockPath:
    """The stock path of one engine.

    Args:
        engine: verl's engine, which has built its model.
        ranks, replay: the backend's.
        turned_off_fused: the user asked for verl's fused kernels, which our engine has turned off.

    Attributes:
        facts: what this path does with the model.
    """

    def __init__(self, engine: VerlFSDPEngine, ranks: Ranks, turned_off_fused: bool, replay: Replay | None) -> None:
        self._engine, self._ranks, self._turned_off_fused, self._replay = engine, ranks, turned_off_fused, replay
        self._leak = packing_leak(engine.module)
        attention = engine.module.config.get_text_config()._attn_implementation
        self.facts = StockFacts(
            dense_mask=not is_varlen(attention),
            row_begins="zeros" if is_varlen(attention) else "jumps",
            separates_rows=engine.use_remove_padding and self._leak is not None,
            wrong_when_sharded=None if ranks.sequence_size == 1 else why_wrong_when_sharded(engine.module, attention),
        )

    def run(self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool) -> dict[str, Any]:
        """Computes a batch, without fused kernels if `turned_off_fused`; returns verl's output.

        Where verl would compute the model wrong, its way through the batch changes:

        - Packed rows would get wrong positions: rows are padded.
        - Packed rows would leak state into each other: rows are separated (`_separate_rows`).
        - Sequence parallelism would be wrong: each rank computes whole rows (`_without_ulysses`).
        """
        data = data.copy()
        module = self._engine.module
        if self._turned_off_fused:
            tu.assign_non_tensor(data, use_fused_kernels=False)
        packs = flag(data, "use_remove_padding", True)
        if packs and module.config.model_type in UNPATCHED:
            warn_once(
                logger,
                "prefix: stock path, rows padded: flash attention in transformers would take positions of three axes "
                "for those of packed rows",
            )
            tu.assign_non_tensor(data, use_remove_padding=False)
        elif packs and self._leak:
            self._separate_rows(data)
        with (
            towers_of_tensors(module),
            self._without_ulysses(data) if self.facts.wrong_when_sharded else nullcontext(),
            replaying(self._engine, self._replay) if self._replay else nullcontext(),
        ):
            return self._engine.verls_forward_backward(data, loss_function, forward_only)

    @contextmanager
    def _without_ulysses(self, data: TensorDict) -> Iterator[None]:
        """Context in which verl's engine computes without sequence parallelism.

        The ranks of a sequence-parallel group have the same rows, and each rank computes their whole loss. So all have
        the same gradients, and FSDP's mean over ranks is right.

        A pass may have as many tokens as one rank may have. Where a group of rows that must stay together is longer on
        any rank, a pass may have as many tokens as that group. verl multiplies `max_token_len_per_gpu` by `sp_size`, so
        it is divided here.
        """
        if flag(data, "use_dynamic_bsz", True):
            group_size = flag(data, "force_group_size", 1)
            kept_together = data["input_ids"].offsets().diff().split(group_size)
            (longest,) = self._ranks.max_over_ranks([max(int(lens.sum()) for lens in kept_together)])
            budget = max(int(data["max_token_len_per_gpu"]), int(longest))
            tu.assign_non_tensor(data, max_token_len_per_gpu=-(-budget // self._ranks.sequence_size))
        warn_once(
            logger,
            "prefix: stock path, each rank computes whole rows: %s, under sequence parallelism",
            self.facts.wrong_when_sharded,
        )
        with replaced(self._engine, "use_ulysses_sp", False), without_ulysses():
            yield

    def _separate_rows(self, data: TensorDict) -> None:
        """Keeps rows apart: a micro-batch has one row.

        Rows are padded instead where the loss needs several rows together. Rows are also padded where ranks have
        different numbers of rows: verl then gives all ranks equally many micro-batches, which it does not do where each
        row is one. No token of a row sees padding.
        """
        ((fewest, most),) = self._ranks.ranges_over_ranks(len(data))
        if fewest < most or flag(data, "force_group_size", 1) > 1:
            how = "rows padded"
            tu.assign_non_tensor(data, use_remove_padding=False)
        else:
            how = "rows one by one"
            tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
        warn_once(
            logger, "prefix: stock path, %s: %s, so that packed rows would leak state into each other", how, self._leak
        )
