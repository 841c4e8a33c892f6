"""The last decoder layer: of tokens that lm_head does not see, only keys and values are read, by other tokens."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from verl_prefix.core.attention import AttentionPass
from verl_prefix.models.recurrent import replaced

_NAMES = ("q_proj", "o_proj", "out_proj", "mlp", "feed_forward")


def head_only(model: PreTrainedModel) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Modules of the last layer that only tokens of lm_head need: the projections of queries and of attention's output,
    and the MLP; each behind its parent. There are none in a layer with experts, whose routers count every token, with a
    convolution, or compiled (torch would run the other layers in as many pieces as the last one)."""
    *_, layer = getattr(model.get_decoder(), "layers", None) or [None]
    if layer is None or layer._compiled_call_impl or any(p.dim() > 2 for p in layer.parameters()):
        return []
    return [(parent, child) for parent in layer.modules() for name, child in parent.named_children() if name in _NAMES]


@contextmanager
def on_head_tokens(model: PreTrainedModel) -> Iterator[None]:
    """Context in which modules `head_only` run on `AttentionPass.head_tokens` alone. A hook of the parent takes the
    pass, also where gradient checkpointing runs it again. Inside another such context it does nothing."""
    with ExitStack() as undo:
        for parent, module in head_only(model):
            if isinstance(module.forward, _OnHeadTokens):
                continue
            call = _OnHeadTokens(module.forward)
            undo.callback(parent.register_forward_pre_hook(call.take_pass, prepend=True, with_kwargs=True).remove)
            undo.enter_context(replaced(module, "forward", call))
        yield


class _OnHeadTokens:
    """Replaces a module's forward."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.forward = forward
        self.attention_pass: AttentionPass | None = None

    def take_pass(self, parent: torch.nn.Module, args: object, kwargs: Mapping[str, Any]) -> None:
        self.attention_pass = kwargs.get("prefix_pass")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, n] -> [1, T, m]; zeros for other tokens."""
        tokens = None if self.attention_pass is None else self.attention_pass.head_tokens
        if tokens is None or len(tokens) == x.shape[1]:
            return self.forward(x)
        found = self.forward(x.index_select(1, tokens))
        return found.new_zeros(1, x.shape[1], found.shape[-1]).index_copy_(1, tokens, found)
