"""Merges two partial attentions of the same queries, over different keys, into the attention over all of them.

    lse = log(exp(lse_1) + exp(lse_2))      out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

This is the ring-attention rule: lse is the log-sum-exp of a query's scores.
"""

import functools
from collections.abc import Callable

import torch


def merge(
    out: torch.Tensor, lse: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two partial attentions of the same queries: out [T, H, D], lse [H, T]."""
    # Strided input takes another vector path in torch, and the last bits would depend on the schedule.
    lse = lse.contiguous()
    total = logaddexp(lse, lse_2)
    weight, weight_2 = ((x - total).exp().transpose(0, 1).unsqueeze(-1) for x in (lse, lse_2))
    return (out * weight + out_2 * weight_2).to(out.dtype), total


def merge_at(
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


def logaddexp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """log(exp(a) + exp(b)). Not torch's, whose last bits depend on an element's index in the tensor, and with it on the
    schedule."""
    return torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs()))
