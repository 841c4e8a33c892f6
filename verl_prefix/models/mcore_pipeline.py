"""The stages of a Megatron pipeline: what they send each other, and mcore's own schedule of micro-batches.

Source: megatron-core 0.16.1, megatron/core/pipeline_parallel/p2p_communication.py, schedules.py.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from verl_prefix.models.mcore import unwrapped
from verl_prefix.models.replaced import replaced


class Neighbours:
    """The stages before and behind this one, of a model's pipeline.

    Args:
        model: the GPTModel of this stage, without mcore's wrappers.
    """

    def __init__(self, model: Any) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        self._first, self._last = group.rank() == 0, group.rank() == group.size() - 1
        self._model, self._p2p = model, P2PCommunicator(pp_group=group, config=model.config)

    def receive_hidden(self) -> torch.Tensor | None:
        """Receives hidden states, as the stage before returned them; None on the first. Their shape travels first."""
        found: torch.Tensor | None = self._p2p.recv_forward((1, 1, self._model.config.hidden_size), self._first)
        return found

    def take(self, hidden: torch.Tensor | None) -> None:
        """Gives the next forward these hidden states as its input."""
        self._model.set_input_tensor(hidden)

    def send_hidden(self, output: torch.Tensor) -> None:
        """Sends hidden states to the next stage, if there is one."""
        self._p2p.send_forward(output, self._last)

    def receive_gradient(self, output: torch.Tensor) -> torch.Tensor | None:
        """Receives the gradient of what `send_hidden` sent; None on the last stage."""
        found: torch.Tensor | None = self._p2p.recv_backward(tuple(output.shape), self._last)
        return found

    def send_gradient(self, received: torch.Tensor | None) -> None:
        """Sends the gradient of what `receive_hidden` returned."""
        self._p2p.send_backward(None if received is None else received.grad, self._first)


def run_1f1b(
    module: Any, forward: Callable[[], tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]], number: int,
    forward_only: bool,
) -> None:  # fmt: skip
    """Runs micro-batches by mcore's own schedule, without what it does once after the last.

    Args:
        module: the model, within mcore's wrappers. number: of micro-batches. forward_only: without backwards.
        forward: runs the next one; returns the stage's output, and the function by which the last stage computes its
            loss from it.
    """
    if not number:
        return
    config = unwrapped(module).config

    def step(batches: object, model: object) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        output, loss_of = forward()
        # mcore divides by their number, and multiplies by ranks of context parallelism, as `Shards.gather` has done.
        return output, lambda found: (loss_of(found) * number / config.context_parallel_size, {})

    with ExitStack() as stack:
        for name in ("finalize_model_grads_func", "no_sync_func", "grad_sync_func"):
            stack.enter_context(replaced(config, name, None))
        get_forward_backward_func()(
            forward_step_func=step, data_iterator=[None], model=[module], num_microbatches=number,
            seq_length=1, micro_batch_size=1, forward_only=forward_only,
        )  # fmt: skip


def gather_routes(routes: torch.Tensor, device: torch.device) -> None:
    """Gives each stage of a pipeline the routes of all layers, of which it has those of its own, and zeros.

    Args:
        routes: [N, layers, k] int16 in host memory, written over.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return
    every, stages = routes.view(torch.uint8).to(device), parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.all_reduce(every, torch.distributed.ReduceOp.MAX, group=stages)
    routes.copy_(every.cpu().view(torch.int16))
