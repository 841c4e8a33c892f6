"""Grouped attention: a causal call, in which segments read themselves, and cross calls, in which they read their
paths, merged by their log-sum-exps (LSE).

A suffix query's softmax runs over two sets of keys, the prefix and the suffix so far. Each kernel call normalises over
its own set and returns the log-sum-exp of its scores. From these the outputs combine exactly (the ring-attention rule):

    lse = log(exp(lse_1) + exp(lse_2))      out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

In backward each call gets the merged out and lse, and so returns its own keys' exact share of the gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl_prefix.core.calls import AttentionParams, Call
from verl_prefix.core.kernels import Kernel, choose_kernel
from verl_prefix.core.layout import Layout
from verl_prefix.core.prefix_cache import LayerKey, PrefixCache, add_at, ran_twice
from verl_prefix.core.sequence_parallel import Shards

# By layer: outputs [T, H, D] and log-sum-exps [H, T] of attention, kept until gradient checkpointing runs it again.
Kept = dict[int, tuple[torch.Tensor, torch.Tensor]]


class ForwardContext:
    """What the layers of one forward share: its packed row, the caches, shards and routes.

    It goes through the model as a keyword argument. So gradient checkpointing, which runs layers again, hands them the
    same one, on whatever thread autograd runs them. It is no dataclass on purpose: FSDP2 copies dataclass inputs for
    each layer, and each copy would count its own calls.

    Args:
        layout: the packed row that runs.
        kernel: name for `kernels.choose_kernel`.
        own_cache: in phase A, the cache that receives the layers' keys and values.
        outer_caches: of the phases A around a nested pass, the outermost first; segments read their paths there.
        keep_attention: under gradient checkpointing, keeps attention outputs until backward. Layers that run again
            then run no attention kernel.

    `PackedForward` sets `shards`, `head_tokens` and `routes` before the model runs.

    Attributes:
        shards: how the packed row's tokens are spread over ranks; None: this rank has all of them.
        head_tokens: [n] int64, this rank's tokens that go through lm_head; None: all of them.
        routes: [n, layers, k] int16: the experts that each of this rank's tokens goes to in each of the model's layers.
            An entry that names k different experts is used. Any other is filled in: the router chooses, and writes its
            choice there. (On Megatron any entry with a negative number is filled in.) None: routers choose, and
            nothing is written.
        kept: attention outputs that wait for backward; None: they are not kept.
        num_calls: number of calls of `attend`, and of recurrent layers, which these count themselves
            (`models.recurrent`). Compared before and after a forward, it shows a model that bypasses them.
    """

    def __init__(
        self,
        layout: Layout,
        kernel: str,
        own_cache: PrefixCache | None = None,
        outer_caches: Sequence[PrefixCache] = (),
        keep_attention: bool = False,
    ) -> None:
        self.layout = layout
        self.kernel = kernel
        self.own_cache = own_cache
        self.outer_caches = tuple(outer_caches)
        self.shards: Shards | None = None
        self.head_tokens: torch.Tensor | None = None
        self.routes: torch.Tensor | None = None
        self.kept: Kept | None = {} if keep_attention else None
        self.num_calls = 0
        self._layers_run: set[int] = set()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        params: AttentionParams,
    ) -> torch.Tensor:  # fmt: skip
        """A layer's attention, in place of the model's own: q [T, H, D], k and v [T, K, D], sinks [H] -> [T, H, D].

        Under sequence parallelism T counts this rank's tokens of the packed row.

        Raises:
            NoKernel: no kernel can run such inputs, or not the one that was asked for (`kernels.choose_kernel`).
            CannotShare: the layer runs a second time in one forward.
        """
        in_backward = torch._C._current_graph_task_id() >= 0  # where gradient checkpointing runs a layer again
        if layer in self._layers_run and not in_backward:
            raise ran_twice(layer)
        self._layers_run.add(layer)
        self.num_calls += 1
        kernel = choose_kernel(self.kernel, q.device.type, q.dtype, q.shape[-1], softcap=params.softcap is not None)
        if self.shards is not None:
            q, k, v = self.shards.to_heads(q, k, v)
            sinks = None if sinks is None else self.shards.heads(sinks)
        if self.own_cache is not None:
            k, v = self.own_cache.capture(layer, k, v)
        for cache in self.outer_caches:
            cache.read(layer)  # raises where phase A left nothing
        anchor = self.outer_caches[-1].anchors[layer] if self.outer_caches else None
        out: torch.Tensor = GroupedAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, sinks, self.layout, kernel, params, self.outer_caches, layer, self.kept, anchor
        )
        self.on_attention(layer, q, k, v, sinks=sinks, params=params, out=out)
        return out if self.shards is None else self.shards.to_tokens(out)

    def on_attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        params: AttentionParams, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Does nothing. A subclass overrides it to see the arguments and the result of `GroupedAttention`, of all
        tokens and this rank's heads."""

    def on_recurrence(
        self, key: LayerKey, inputs: Sequence[torch.Tensor],
        whole: Callable[[Sequence[torch.Tensor], int], torch.Tensor], out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Does nothing. A subclass overrides it to see the arguments and the result of `recurrence.shared_scan` or
        `shared_conv`. `whole(inputs, n)` computes one whole row from zeros, after n tokens that change nothing."""


def merge(
    out: torch.Tensor, lse: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two partial attentions of the same queries: out [T, H, D], lse [H, T]."""
    # Strided input takes another vector path in torch, and the last bits would depend on the schedule.
    lse = lse.contiguous()
    total = _logaddexp(lse, lse_2)
    weight, weight_2 = ((x - total).exp().transpose(0, 1).unsqueeze(-1) for x in (lse, lse_2))
    return (out * weight + out_2 * weight_2).to(out.dtype), total


def _merge_at(
    queries: slice | torch.Tensor, out: torch.Tensor, lse: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor
) -> None:
    """Merges a second partial attention of some queries into `out` [T, H, D] and `lse` [H, T].

    The Triton kernel merges a slice of queries in place, and indices in a copy. Both are by one kernel: the rows beside
    a row decide whether its queries are a slice, and they must not change its bits.
    """
    part, part_lse = out[queries], lse[:, queries]
    fused = _fused_merge(out.device.type)
    if fused is None or lse.dtype != torch.float32:
        part, part_lse = merge(part, part_lse, out_2, lse_2)
    else:
        fused(part, part_lse, out_2, lse_2)
        if isinstance(queries, slice):
            return
    out[queries], lse[:, queries] = part, part_lse


@functools.cache
def _fused_merge(device_type: str) -> Callable[..., None] | None:
    """The Triton kernel that merges in place; None on devices other than CUDA, and where triton is not installed."""
    if device_type != "cuda":
        return None
    try:
        from verl_prefix.core.kernels.fused_merge import merge_into
    except ImportError:
        return None
    return merge_into


def _logaddexp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # Not torch.logaddexp: its last bits depend on an element's index in the tensor, and with it on the schedule.
    return torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs()))


class GroupedAttention(torch.autograd.Function):
    """q [T, H, D], k and v [T, K, D], sinks [H] or None -> out [T, H, D].

    Prefix keys come from `caches`, or are the packed row's own. Gradients of keys from `caches` go to the grad caches
    instead of through autograd; `anchor` is `anchors[layer]` of the innermost cache. A sink (gpt-oss) is one more score
    per head, without a value: it joins the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        layout: Layout, kernel: Kernel, params: AttentionParams, caches: Sequence[PrefixCache], layer: int,
        kept: Kept | None, anchor: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        if kept is not None and layer in kept:  # gradient checkpointing runs the layer again
            out, lse = kept.pop(layer)
        else:
            calls = layout.calls(params, q.device)
            all_k, all_v = zip(*(cache.read(layer) for cache in caches), (k, v), strict=True)
            for call in calls:
                keys, values = call.keys(all_k), call.keys(all_v)
                out_2, lse_2 = kernel.forward(q[call.queries], keys, values, call)
                if call is calls[0]:
                    out, lse = out_2, lse_2
                else:
                    _merge_at(call.queries, out, lse=lse, out_2=out_2, lse_2=lse_2)
            if sinks is not None:
                total = _logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
                out *= (lse - total).exp().transpose(0, 1).unsqueeze(-1)
                lse = total
            if kept is not None:
                kept[layer] = out.detach(), lse
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.args = layout, kernel, params, caches, layer
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        layout, kernel, params, caches, layer = ctx.args
        calls = layout.calls(params, q.device)
        all_k, all_v = zip(*(cache.read(layer) for cache in caches), (k, v), strict=True)
        dout = dout.contiguous()
        for call in calls:
            at, keys, values = call.queries, call.keys(all_k), call.keys(all_v)
            dq_call, dk_call, dv_call = kernel.backward(dout[at], (q[at], keys, values, out[at], lse[:, at]), call)
            if call is calls[0]:
                dq, dk, dv = dq_call, dk_call[call.own_at], dv_call[call.own_at]
                of_strands = _StrandGradients(dk, dv, layout, calls)
            else:
                dq[at] += dq_call
            for prefix in call.prefixes:
                grads = (prefix.summed(grad[prefix.at]) for grad in (dk_call, dv_call))
                if prefix.level == layout.level:  # this packed row; other levels have left autograd
                    of_strands.add(prefix.grad_at, *grads)
                elif ctx.needs_input_grad[-1]:  # of the anchor: is anything before it trained?
                    caches[prefix.level].add_grad(layer, prefix.grad_at, *grads)
        of_strands.write_back()
        dsinks = None
        if sinks is not None:
            share = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()
            dsinks = -(share * (dout * out).sum(-1, dtype=lse.dtype).transpose(0, 1)).sum(-1).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None, None, None, None, None


class _StrandGradients:
    """Gradients of keys and values of a packed row's own strands, which cross calls add to those of the causal call.

    They add up in fp32, as those of waves in the grad cache, unless one call reads one slice: then in place.

    Args:
        dk, dv: [T, K, D], of the causal call.
    """

    def __init__(self, dk: torch.Tensor, dv: torch.Tensor, layout: Layout, calls: Sequence[Call]) -> None:
        read = [prefix.grad_at for call in calls for prefix in call.prefixes if prefix.level == layout.level]
        adds_up = len(read) > 1 or any(isinstance(at, torch.Tensor) for at in read)
        wide = torch.promote_types(dk.dtype, torch.float32) if adds_up else dk.dtype
        self._of_row = [x[: layout.num_strand_tokens] for x in (dk, dv)]  # strands are its first tokens
        self._sums = [x.to(wide) for x in self._of_row]

    def add(self, at: slice | torch.Tensor, *grads: torch.Tensor) -> None:
        """Adds the gradients of a call, of the strands' tokens `at`."""
        for total, grad in zip(self._sums, grads, strict=True):
            add_at(total, at, grad)

    def write_back(self) -> None:
        """Writes what has added up into `dk` and `dv`."""
        for of_row, total in zip(self._of_row, self._sums, strict=True):
            if total is not of_row:
                of_row.copy_(total)
