"""Router replay on the stock path of FSDP2, where verl has none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.ulysses import slice_input_tensor

from verl_prefix.backends.verl_engines import VerlFSDPEngine
from verl_prefix.engine.backend import Replay
from verl_prefix.engine.fields import RECORDS, ROUTES, flag
from verl_prefix.models.replaced import replaced
from verl_prefix.models.replay import replayed_routers


@contextmanager
def replaying(engine: VerlFSDPEngine, replay: Replay) -> Iterator[None]:
    """Context in which verl's `engine` replays the routes of its micro-batches. It records the routes of a micro-batch
    that has the flag `RECORDS`."""
    micro_batches = _RoutedMicroBatches(engine, replay)
    with (
        replayed_routers(engine.module, micro_batches),
        replaced(engine, "prepare_model_inputs", micro_batches.prepare_model_inputs),
        replaced(engine, "prepare_model_outputs", micro_batches.prepare_model_outputs),
    ):
        yield


class _RoutedMicroBatches:
    """Replaces the two methods that verl's engine calls before and after the forward of a micro-batch.

    The first method sets `routes`, in the order in which verl gives the tokens to the model. Routers read `routes` in
    the forward, and write their own choices into it. The second method brings `routes` back into the order of the rows.

    With rows of 3 and 2 tokens on 2 sequence-parallel ranks, verl packs a0 a1 a2 b0 b1 and one token of padding. The
    second rank computes b0, b1 and the padding: its `routes` are [3, layers, k].

    Attributes:
        routes: [t, layers, k] int16, of the t tokens that this rank computes in the running forward; None: routers
            choose.
    """

    def __init__(self, engine: VerlFSDPEngine, replay: Replay) -> None:
        self.routes: torch.Tensor | None = None
        self._engine, self._replay = engine, replay
        self._verls_inputs, self._verls_outputs = engine.prepare_model_inputs, engine.prepare_model_outputs

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[Any, Any]:
        """Calls verl's method, and sets `routes` for the forward that follows."""
        model_inputs, output_args = self._verls_inputs(micro_batch)
        routes = self._routes_of_rows(micro_batch)
        self.routes = None if routes is None else self._laid_out(routes, micro_batch, output_args)
        return model_inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Callable[..., Any] | None
    ) -> Any:
        """Calls verl's method, and adds the recorded routes to its outputs."""
        model_output = self._verls_outputs(output, output_args, micro_batch, logits_processor_func)
        if flag(micro_batch, RECORDS):
            model_output[ROUTES] = self._recorded(micro_batch, output_args)
        return model_output

    def _routes_of_rows(self, micro_batch: TensorDict) -> torch.Tensor | None:
        """Returns the rows' routes, jagged [rows, tokens, layers, k]; None: routers choose, and nothing is recorded.

        A forward that records gets zeros. A router takes zeros for no record (`Replay`), and writes its choice over
        them.
        """
        if ROUTES in micro_batch.keys():
            return micro_batch[ROUTES]
        if not flag(micro_batch, RECORDS):  # log-probs of ref
            return None
        ids = micro_batch["input_ids"]
        no_record = ids.values().new_zeros(
            len(ids.values()), self._replay.layers, self._replay.chosen, dtype=torch.int16
        )
        return torch.nested.nested_tensor_from_jagged(no_record, ids.offsets())

    def _laid_out(self, routes: torch.Tensor, micro_batch: TensorDict, output_args: Any) -> torch.Tensor:
        """Lays out the rows' routes as verl lays out tokens: padded, or packed and cut among ranks."""
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
        if flag(micro_batch, "use_remove_padding", True):
            as_bytes = self.routes.view(torch.uint8)  # collectives do not take int16
            routes = self._engine._gather_and_unpad_packed(as_bytes, output_args["pad_size"]).view(torch.int16)
        else:
            lens = offsets.diff().tolist()
            padded_rows = self.routes.chunk(len(lens))
            routes = torch.cat([row[:length] for row, length in zip(padded_rows, lens, strict=True)])
        return torch.nested.nested_tensor_from_jagged(routes, offsets)
