"""The last decoder layer: of tokens that lm_head does not see, only keys and values are read, by other tokens."""

import functools
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
    """Context in which modules `head_only` run on `AttentionPass.head_tokens` alone. Inside another it does nothing.

    Hooks hand the pass on wherever it comes as an argument: to the layer, and to its attention, which runs before the
    MLP. Gradient checkpointing runs the layer with its hooks again, or its forward alone, as transformers does since
    5.23.
    """
    with ExitStack() as undo:
        calls: list[_OnHeadTokens] = []
        told: set[torch.nn.Module] = set()
        for parent, module in head_only(model):
            if isinstance(module.forward, _OnHeadTokens):
                continue
            calls.append(_OnHeadTokens(module.forward))
            told |= {parent, *parent.children()}
            undo.enter_context(replaced(module, "forward", calls[-1]))
        for module in told:
            hook = functools.partial(_hand_on, calls)
            undo.callback(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
        yield


def _hand_on(calls: list["_OnHeadTokens"], module: torch.nn.Module, args: object, kwargs: Mapping[str, Any]) -> None:
    for call in calls if "prefix_pass" in kwargs else ():
        call.attention_pass = kwargs["prefix_pass"]


class _OnHeadTokens:
    """Replaces a module's forward. Each run takes the pass that it was told; none runs in another's."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.forward = forward
        self.attention_pass: AttentionPass | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, n] -> [1, T, m]; zeros for other tokens.

        Raises:
            RuntimeError: nobody told the pass, such as where others checkpoint the forward of a layer whose MLP runs
                first.
        """
        attention_pass, self.attention_pass = self.attention_pass, None
        if attention_pass is None:
            raise RuntimeError("a module of the last layer ran without a prefix_pass; set model_engine=dp")
        tokens = attention_pass.head_tokens
        if tokens is None or len(tokens) == x.shape[1]:
            return self.forward(x)
        found = self.forward(x.index_select(1, tokens))
        return found.new_zeros(1, x.shape[1], found.shape[-1]).index_copy_(1, tokens, found)
