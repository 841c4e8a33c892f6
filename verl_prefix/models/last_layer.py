"""Shortens the last decoder layer: of tokens that do not go through lm_head, others read only its keys and values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from verl_prefix.models.advice import WHOLE_ROWS
from verl_prefix.models.replaced import ContextForward, context_forwards

_NAMES = ("q_proj", "o_proj", "out_proj", "mlp", "feed_forward")


def head_only(model: PreTrainedModel) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """(parent, module) of what only tokens of lm_head need in the last layer: the projections of queries and of
    attention's output, and the MLP.

    There are none in a layer with experts, whose routers count every token; in one with a convolution; and in a
    compiled one, for whose sake torch would run the other layers in as many pieces."""
    *_, layer = getattr(model.get_decoder(), "layers", None) or [None]
    if layer is None or layer._compiled_call_impl or any(p.dim() > 2 for p in layer.parameters()):
        return []
    return [(parent, child) for parent in layer.modules() for name, child in parent.named_children() if name in _NAMES]


@contextmanager
def on_head_tokens(model: PreTrainedModel) -> Iterator[None]:
    """Context in which modules `head_only` run on `ForwardContext.head_tokens` alone. Inside another it is idle."""
    found = [pair for pair in head_only(model) if not isinstance(pair[1].forward, _OnHeadTokens)]
    forwards = {module: _OnHeadTokens(module) for _, module in found}
    # An MLP runs behind the attention of its layer, which is told the pass where the layer is not.
    with context_forwards(forwards, {teller for parent, _ in found for teller in (parent, *parent.children())}):
        yield


class _OnHeadTokens(ContextForward):
    """Replaces a module's forward."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.forward: Callable[[torch.Tensor], torch.Tensor] = module.forward
        self.kind = type(module).__name__

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, n] -> [1, T, m], which is 0 for tokens that do not go through lm_head.

        Raises:
            RuntimeError: nobody told the pass. That happens where others checkpoint the forward of a layer, and its MLP
                runs before its attention.
        """
        forward_context = self.forward_context
        self.end_run()
        if forward_context is None:
            raise RuntimeError(f"a {self.kind} of the last layer ran without a prefix_context; {WHOLE_ROWS}")
        tokens = forward_context.head_tokens
        if tokens is None or len(tokens) == x.shape[1]:
            return self.forward(x)
        found = self.forward(x.index_select(1, tokens))
        return found.new_zeros(1, x.shape[1], found.shape[-1]).index_copy_(1, tokens, found)
