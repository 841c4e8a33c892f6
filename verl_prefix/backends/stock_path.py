"""The stock path of FSDP2: verl's engine on rows as they come, set so that it computes them right."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.ulysses import slice_input_tensor

from verl_prefix.backends.hugging_face import VerlHFEngine, without_ulysses
from verl_prefix.config.model import is_varlen
from verl_prefix.engine.backend import Ranks, Replay, StockFacts
from verl_prefix.engine.fields import RECORDS, ROUTES, flag
from verl_prefix.engine.loss import LossFunction
from verl_prefix.models.recurrent import packing_leak, sharding_leak
from verl_prefix.models.replaced import replaced
from verl_prefix.models.replay import replayed_routers
from verl_prefix.models.verls_vision import towers_of_tensors
from verl_prefix.models.vision import UNPATCHED
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


class VerlFSDPEngine(VerlHFEngine, Protocol):
    """verl's FSDPEngine itself. Its `scaler` scales losses in fp16, and is None in other dtypes."""

    use_remove_padding: bool
    scaler: Any
    _autocast_dtype: torch.dtype

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[Any, Any]: ...

    def _gather_and_unpad_packed(self, x: torch.Tensor, pad_size: int) -> torch.Tensor: ...

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> AbstractContextManager[Any]: ...


def why_wrong_when_sharded(model: Any, attention: str) -> str | None:
    """Returns why verl's sequence parallelism computes this model wrong, without an error; None where it is right.
    attention: the model's `attn_implementation`."""
    if not is_varlen(attention):
        return f"verl computes attn_implementation={attention} within each rank's tokens"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "verl gives each rank the sinks of all heads"
    if model.config.model_type in UNPATCHED:
        return f"verl gives each rank all tokens of a row of {model.config.model_type}"
    return sharding_leak(model)


class _RoutedMicroBatches:
    """Methods of verl's engine before and after the forward of a micro-batch, which also mind its routes.

    Attributes:
        routes: [t, layers, k] int16, of the tokens in the forward that runs; None: routers choose.
    """

    def __init__(self, engine: VerlFSDPEngine, replay: Replay) -> None:
        self.routes: torch.Tensor | None = None
        self._engine, self._replay = engine, replay
        self._verls_inputs, self._verls_outputs = engine.prepare_model_inputs, engine.prepare_model_outputs

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[Any, Any]:
        """Calls verl's method, and lays out routes as verl lays out tokens."""
        model_inputs, output_args = self._verls_inputs(micro_batch)
        routes = self._routes_of_rows(micro_batch)
        self.routes = None if routes is None else self._laid_out(routes, micro_batch, output_args)
        return model_inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Callable[..., Any] | None
    ) -> Any:
        """Calls verl's method, and adds the routes that were recorded."""
        model_output = self._verls_outputs(output, output_args, micro_batch, logits_processor_func)
        if flag(micro_batch, RECORDS):
            model_output[ROUTES] = self._recorded(micro_batch, output_args)
        return model_output

    def _routes_of_rows(self, micro_batch: TensorDict) -> torch.Tensor | None:
        """Returns the rows' routes, jagged. Where the forward is to record them they are zeros, which are no record
        (`Replay`)."""
        if ROUTES in micro_batch.keys():
            return micro_batch[ROUTES]
        if not flag(micro_batch, RECORDS):  # ref's
            return None
        ids = micro_batch["input_ids"]
        no_record = ids.values().new_zeros(
            len(ids.values()), self._replay.layers, self._replay.chosen, dtype=torch.int16
        )
        return torch.nested.nested_tensor_from_jagged(no_record, ids.offsets())

    def _laid_out(self, routes: torch.Tensor, micro_batch: TensorDict, output_args: Any) -> torch.Tensor:
        """Pads the rows' routes, or packs them and cuts them among ranks, as verl does with tokens."""
        rows = list(routes.unbind())
        if not flag(micro_batch, "use_remove_padding", True):
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).flatten(0, 1)
        padding = rows[0].new_zeros(output_args["pad_size"], *rows[0].shape[1:])
        packed = torch.cat([*rows, padding])
        return slice_input_tensor(packed, 0, padding=False) if self._engine.use_ulysses_sp else packed

    def _recorded(self, micro_batch: TensorDict, output_args: Any) -> torch.Tensor:
        """Undoes `_laid_out`: returns the rows' routes, jagged."""
        assert self.routes is not None
        offsets = micro_batch["input_ids"].offsets()
        if flag(micro_batch, "use_remove_padding", True):  # by bytes, since collectives know no int16
            gathered = self._engine._gather_and_unpad_packed(self.routes.view(torch.uint8), output_args["pad_size"])
            routes = gathered.view(torch.int16)
        else:
            lens = offsets.diff().tolist()
            rows = self.routes.chunk(len(lens))
            routes = torch.cat([row[:length] for row, length in zip(rows, lens, strict=True)])
        return torch.nested.nested_tensor_from_jagged(routes, offsets)


@contextmanager
def replaying(engine: VerlFSDPEngine, replay: Replay) -> Iterator[None]:
    """Context in which verl's `engine` replays the routes of its micro-batches, or records them where these have the
    flag `RECORDS`. verl does neither for FSDP."""
    micro_batches = _RoutedMicroBatches(engine, replay)
    with (
        replayed_routers(engine.module, micro_batches),
        replaced(engine, "prepare_model_inputs", micro_batches.prepare_model_inputs),
        replaced(engine, "prepare_model_outputs", micro_batches.prepare_model_outputs),
    ):
        yield


class FSDPStockPath:
    """The stock path of one engine.

    Args:
        engine: has its model.
        ranks: the engine's.
        unfused: the user asked for verl's fused kernels, which are then off.
        replay: the engine's.

    Attributes:
        facts: what this path does with the model.
    """

    def __init__(self, engine: VerlFSDPEngine, ranks: Ranks, unfused: bool, replay: Replay | None) -> None:
        self._engine, self._ranks, self._unfused, self._replay = engine, ranks, unfused, replay
        self._leak = packing_leak(engine.module)
        attention = engine.module.config.get_text_config()._attn_implementation
        self.facts = StockFacts(
            dense_mask=not is_varlen(attention),
            row_begins="zeros" if is_varlen(attention) else "jumps",
            separates_rows=engine.use_remove_padding and self._leak is not None,
            wrong_when_sharded=None if ranks.sequence_size == 1 else why_wrong_when_sharded(engine.module, attention),
        )

    def run(self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool) -> dict[str, Any]:
        """Computes a batch, without the fused kernels that the user asked for; returns verl's output. Rows are padded
        where packed ones would get wrong positions. Micro-batches have one row where packed rows would leak state. Each
        rank of a sequence-parallel group computes all rows alone where verl's sequence parallelism would be wrong."""
        data = data.copy()
        module = self._engine.module
        if self._unfused:
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
            warn_once(
                logger,
                "prefix: stock path, rows one by one: %s, so that packed rows would leak state into each other",
                self._leak,
            )
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

        The ranks of a sequence-parallel group have the same rows, and each computes their whole loss. So all have the
        same gradients, and FSDP's mean of them is right.

        The budget of a pass is what one rank may have, or the longest rows that stay together on any rank, if that is
        more. It is divided by `sp_size`, since verl multiplies `max_token_len_per_gpu` by it.
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
        """Makes the stock path keep rows apart, by one row in a micro-batch.

        Rows are padded instead where a loss needs its rows together, and where ranks have different numbers of rows:
        only verl can then even out their micro-batches. No token of a row sees padding.
        """
        ((fewest, most),) = self._ranks.ranges_over_ranks(len(data))
        if fewest < most or flag(data, "force_group_size", 1) > 1:
            tu.assign_non_tensor(data, use_remove_padding=False)
        else:
            tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
