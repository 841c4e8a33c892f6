"""Grouped attention: a causal call, in which segments read themselves, and cross calls, in which they read their
paths, merged by their log-sum-exps (LSE). Sliding windows move some of the paths to the causal call (`call_builder`).

A suffix query's softmax runs over two sets of keys, the prefix and the suffix so far. Each kernel call normalises over
its own set and returns the log-sum-exp of its scores. From these the outputs combine exactly (`kernels.merge`). In
backward each call gets the merged out and lse, and so returns its own keys' exact share of the gradients.
"""

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
    joins the log-sum-exp. `kept` has the results of attention that gradient checkpointing runs again.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        anchor: torch.Tensor | None, site: AttentionSite, kept: Kept | None,
    ) -> torch.Tensor:  # fmt: skip
        packed_row, kernel, params, caches, layer = site
        if kept is not None and layer in kept:  # gradient checkpointing runs the layer again
            out, lse = kept.pop(layer)
        else:
            causal, *crosses = packed_row.calls(params, q.device)
            levels = [*(cache.read(layer) for cache in caches), (k, v)]
            all_k, all_v = [keys for keys, _ in levels], [values for _, values in levels]
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
        packed_row, kernel, params, caches, layer = ctx.site
        calls = packed_row.calls(params, q.device)
        levels = [*(cache.read(layer) for cache in caches), (k, v)]
        all_k, all_v = [keys for keys, _ in levels], [values for _, values in levels]
        dout = dout.contiguous()

        def backward_of(call: Call) -> tuple[torch.Tensor, ...]:
            """dq of the call's queries, and dk, dv of all its keys."""
            at, keys, values = call.queries, call.keys(all_k), call.keys(all_v)
            grads: tuple[torch.Tensor, ...] = kernel.backward(
                dout[at], (q[at], keys, values, out[at], lse[:, at]), call
            )
            return grads

        def send(call: Call, dk_call: torch.Tensor, dv_call: torch.Tensor) -> None:
            """Adds the gradients of prefix keys to those of this packed row's strands, or to grad caches."""
            for prefix in call.prefixes:
                grads = (prefix.summed(grad[prefix.at]) for grad in (dk_call, dv_call))
                if prefix.level == packed_row.source.level:
                    strand_gradients.add(prefix.grad_tokens, *grads)
                elif caches[prefix.level].anchor(layer).requires_grad:
                    caches[prefix.level].add_grad(layer, prefix.grad_tokens, *grads)

        causal, *crosses = calls
        dq, *causal_grads = backward_of(causal)
        dk, dv = (grad[causal.own_at] for grad in causal_grads)  # apart from the keys of its prefixes
        strand_gradients = _StrandGradients(dk, dv, packed_row, calls)
        send(causal, *causal_grads)
        for call in crosses:
            dq_call, *grads = backward_of(call)
            dq[call.queries] += dq_call
            send(call, *grads)
        strand_gradients.write_back()
        dsinks = None
        if sinks is not None:
            share = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()
            dsinks = -(share * (dout * out).sum(-1, dtype=lse.dtype).transpose(0, 1)).sum(-1).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None


class _StrandGradients:
    """Gradients of keys and values of a packed row's own strands, which cross calls add to those of the causal call.

    They add up in fp32, as those of waves in the grad cache, unless one call reads one slice: then in place.

    Args:
        dk, dv: [T, K, D], of the causal call.
    """

    def __init__(self, dk: torch.Tensor, dv: torch.Tensor, packed_row: PackedRow, calls: Sequence[Call]) -> None:
        own_level = packed_row.source.level
        read = [keys.grad_tokens for call in calls for keys in call.prefixes if keys.level == own_level]
        adds_up = len(read) > 1 or any(isinstance(at, torch.Tensor) for at in read)
        wide = torch.promote_types(dk.dtype, torch.float32) if adds_up else dk.dtype
        self._strand_grads = [x[: packed_row.num_strand_tokens] for x in (dk, dv)]  # strands are its first tokens
        self._totals = [x.to(wide) for x in self._strand_grads]

    def add(self, at: slice | torch.Tensor, *grads: torch.Tensor) -> None:
        """Adds the gradients of a call, of the strands' tokens `at`."""
        for total, grad in zip(self._totals, grads, strict=True):
            add_at(total, at, grad)

    def write_back(self) -> None:
        """Writes what has added up into `dk` and `dv`."""
        for grads, total in zip(self._strand_grads, self._totals, strict=True):
            if total is not grads:
                grads.copy_(total)
