"""Grouped attention: one causal call over all segments, one call from suffix blocks to their prefixes, merged by LSE.

A suffix query's softmax runs over two sets of keys, the prefix and the suffix so far. Each kernel call normalises over
its own set and returns the log-sum-exp of its scores; with both, the outputs combine exactly (the ring-attention rule):

    lse = log(exp(lse_1) + exp(lse_2))      out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

In backward each call gets the merged out and lse, and so returns its own keys' exact share of the gradients. The
prefix's keys and values are never repeated per suffix (Prefix Grouper, arXiv 2506.05433, repeats them).
"""

from types import ModuleType

import torch

from verl_prefix.layout import Layout
from verl_prefix.prefix_cache import PrefixCache


class AttentionPass:
    """What every attention layer of one forward needs; travels through the model as one keyword argument, so that
    recomputation under gradient checkpointing sees the same pass on whatever thread autograd runs it.

    Not a dataclass: FSDP2 rebuilds dataclasses that it finds among a module's inputs, and each layer would count alone.

    Args:
        kernel: name for `kernels.choose_kernel`.
        capture: phase A, the layers hand their keys and values to it.
        cache: a wave, suffixes read their prefixes from it.
    """

    def __init__(
        self, layout: Layout, kernel: str, capture: PrefixCache | None = None, cache: PrefixCache | None = None
    ) -> None:
        self.layout = layout
        self.kernel = kernel
        self.capture = capture
        self.cache = cache
        self.num_calls = 0  # attention layers seen, so that a model that bypasses us is noticed


def merge(out, lse, out_2, lse_2) -> tuple[torch.Tensor, torch.Tensor]:
    """Two partial attentions of the same queries: out [T, H, D], lse [H, T]."""
    # Not torch.logaddexp, and not on strided input: there the last bits depend on an element's place in the tensor, and
    # with it on the schedule.
    lse = lse.contiguous()
    total = torch.maximum(lse, lse_2) + torch.log1p(torch.exp(-(lse - lse_2).abs()))
    weight, weight_2 = ((x - total).exp().transpose(0, 1).unsqueeze(-1) for x in (lse, lse_2))
    return (out * weight + out_2 * weight_2).to(out.dtype), total


class GroupedAttention(torch.autograd.Function):
    """q [T, H, D], k and v [T, K, D] -> out [T, H, D].

    Cross keys are this row's own prefixes, or the prefix cache's, whose gradients then go to its grad cache instead of
    through autograd.
    """

    @staticmethod
    def forward(ctx, q, k, v, layout: Layout, kernel: ModuleType, scale: float, cache: PrefixCache | None, layer: int):
        out, lse = kernel.forward(q, k, v, layout.causal, True, scale)
        if layout.cross is not None:
            queries, keys = _cross_slices(layout)
            prefix_k, prefix_v = (k, v) if cache is None else cache.read(layer)
            out_2, lse_2 = kernel.forward(q[queries], prefix_k[keys], prefix_v[keys], layout.cross, False, scale)
            out[queries], lse[:, queries] = merge(out[queries], lse[:, queries], out_2, lse_2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.args = layout, kernel, scale, cache, layer
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        layout, kernel, scale, cache, layer = ctx.args
        dout = dout.contiguous()
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, layout.causal, True, scale)
        if layout.cross is not None:
            queries, keys = _cross_slices(layout)
            prefix_k, prefix_v = (k, v) if cache is None else cache.read(layer)
            dq_2, dk_2, dv_2 = kernel.backward(
                dout[queries], q[queries], prefix_k[keys], prefix_v[keys], out[queries], lse[:, queries],
                layout.cross, False, scale,
            )  # fmt: skip
            dq[queries] += dq_2
            if cache is None:
                dk[keys] += dk_2
                dv[keys] += dv_2
            else:
                cache.add_grad(layer, keys, dk_2, dv_2)
        return dq, dk, dv, None, None, None, None, None


def _cross_slices(layout: Layout) -> tuple[slice, slice]:
    cross = layout.cross
    queries = slice(layout.num_prefix, layout.num_prefix + cross.q[-1])
    return queries, slice(layout.cross_start, layout.cross_start + cross.k[-1])
