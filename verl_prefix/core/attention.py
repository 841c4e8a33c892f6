"""Grouped attention: a causal call, in which segments read themselves, and cross calls, in which they read their
paths, merged by their log-sum-exps (LSE). Sliding windows move some of the paths to the causal call (`call_builder`).

A suffix query's softmax runs over two sets of keys, the prefix and the suffix so far. Each kernel call normalises over
its own set and returns the log-sum-exp of its scores. From these the outputs combine exactly (`kernels.merge`). In
backward each call gets the merged out and lse, and so returns its own keys' exact share of the gradients.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from verl_prefix.core.calls import AttentionParams, Call
from verl_prefix.core.kernels import Kernel
from verl_prefix.core.kernels.merge import logaddexp, merge_at
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.prefix_cache import PrefixCache, add_at

# By layer: outputs [T, H, D] and log-sum-exps [H, T] of attention, kept until gradient checkpointing runs it again.
Kept = dict[int, tuple[torch.Tensor, torch.Tensor]]


class AttentionSite(NamedTuple):
    """Where attention happens: in `layer`, on `packed_row`, with `params`, by `kernel`. Segments read keys of their own
    packed row, and of `caches`: those of the phases A around it, the outermost first."""

    packed_row: PackedRow
    kernel: Kernel
    params: AttentionParams
    caches: Sequence[PrefixCache]
    layer: int


class GroupedAttention(torch.autograd.Function):
    """q [T, H, D], k and v [T, K, D], sinks [H] or None -> out [T, H, D].

    Gradients of keys from caches go to the grad caches, not through autograd. `anchor` is that of a cache that needs
    gradients, if one does (`PrefixCache.anchor`). A sink (gpt-oss) is one more score per head, without a value: it
    joins the log-sum-exp. `kept` has the results of attention that gradient checkpointing runs again. A kept output
    shares storage with what the layer got, so a layer must not write into attention's output.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        anchor: torch.Tensor | None, site: AttentionSite, kept: Kept | None,
    ) -> torch.Tensor:  # fmt: skip
        packed_row, kernel, params, _, layer = site
        if kept is not None and layer in kept:  # gradient checkpointing runs the layer again
            out, lse = kept.pop(layer)
        else:
            causal, *crosses = packed_row.calls(params, q.device)
            all_k, all_v = _by_level(site, k, v)
            out, lse = kernel.forward(q, causal.keys(all_k), causal.keys(all_v), causal)
            for call in crosses:
                part = kernel.forward(q[call.queries], call.keys(all_k), call.keys(all_v), call)
                merge_at(call.queries, out, lse, *part)
            if sinks is not None:
                total = logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
                out *= (lse - total).exp().transpose(0, 1).unsqueeze(-1)
                lse = total
            if kept is not None:
                kept[layer] = out.detach(), lse
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.site = site
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        site: AttentionSite = ctx.site
        dout = dout.contiguous()
        backward_of = functools.partial(_backward_of, site.kernel, dout, q, *_by_level(site, k, v), out, lse)
        causal, *crosses = site.packed_row.calls(site.params, q.device)
        dq, *causal_grads = backward_of(causal)
        key_gradients = _KeyGradients(site, causal, crosses, causal_grads)
        for call in crosses:
            dq_call, *grads = backward_of(call)
            dq[call.queries] += dq_call  # few terms, so not in fp32: a query is in one cross call of each level
            key_gradients.send(call, grads)
        dk, dv = key_gradients.of_own_keys()
        dsinks = None
        if sinks is not None:
            share = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()
            dsinks = -(share * (dout * out).sum(-1, dtype=lse.dtype).transpose(0, 1)).sum(-1).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None


def _by_level(site: AttentionSite, k: torch.Tensor, v: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys of each level of the prefix source, those k, v of the packed row itself last; and values likewise."""
    pairs = [*(cache.read(site.layer) for cache in site.caches), (k, v)]
    return [keys for keys, _ in pairs], [values for _, values in pairs]


def _backward_of(
    kernel: Kernel, dout: torch.Tensor, q: torch.Tensor, all_k: list[torch.Tensor], all_v: list[torch.Tensor],
    out: torch.Tensor, lse: torch.Tensor, call: Call,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dq of the call's queries, and dk, dv of all its keys."""
    at = call.queries
    return kernel.backward(dout[at], (q[at], call.keys(all_k), call.keys(all_v), out[at], lse[:, at]), call)


class _KeyGradients:
    """Gradients of the keys and values that a layer's calls read. Gradients of the packed row's own keys begin as the
    causal call's, and cross calls add to the gradients of its strands. Gradients of other prefix keys go to grad
    caches.

    Where several additions may meet in one token of a strand, gradients of 16 bits add up in an fp32 copy, as waves do
    in the grad cache. Else they add up in place.

    Args:
        causal_grads: dk and dv [n, K, D] of the causal call.
    """

    def __init__(
        self, site: AttentionSite, causal: Call, crosses: Sequence[Call], causal_grads: Sequence[torch.Tensor]
    ) -> None:
        self._site, packed_row = site, site.packed_row
        prefixes = [prefix for call in (causal, *crosses) for prefix in call.prefixes]
        read = [prefix.grad_tokens for prefix in prefixes if prefix.level == packed_row.source.level]
        self._own = [grad[causal.own_at] for grad in causal_grads]  # dk and dv of the packed row's own keys
        adds_up = len(read) > 1 or any(isinstance(at, torch.Tensor) for at in read)
        wide = torch.promote_types(self._own[0].dtype, torch.float32)
        self._is_copied = adds_up and self._own[0].dtype != wide
        self._strand_totals = [grad[: packed_row.num_strand_tokens] for grad in self._own]  # views of `_own`
        if self._is_copied:
            self._strand_totals = [total.to(wide) for total in self._strand_totals]
        self.send(causal, causal_grads)

    def send(self, call: Call, grads: Sequence[torch.Tensor]) -> None:
        """Adds dk and dv of a call's prefix keys to those of this packed row's strands, or to grad caches."""
        packed_row, _, _, caches, layer = self._site
        for prefix in call.prefixes:
            parts = (prefix.summed(grad[prefix.at]) for grad in grads)
            if prefix.level == packed_row.source.level:
                for total, part in zip(self._strand_totals, parts, strict=True):
                    add_at(total, prefix.grad_tokens, part)
            elif caches[prefix.level].anchor(layer).requires_grad:
                caches[prefix.level].add_grad(layer, prefix.grad_tokens, *parts)

    def of_own_keys(self) -> list[torch.Tensor]:
        """dk and dv [T, K, D] of the packed row's own keys, after every call was sent."""
        if self._is_copied:
            for grad, total in zip(self._own, self._strand_totals, strict=True):
                grad[: len(total)] = total
        return self._own
