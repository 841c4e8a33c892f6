"""flash-linear-attention's two kernels of gated delta nets, in torch, as VeOmni calls them."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F


def of_rows(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of transformers, which takes rows, behind the interface of
    fla.ops.gated_delta_rule.chunk_gated_delta_rule, which takes them one behind the other."""

    def chunk_gated_delta_rule(
        *inputs: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor | None,
        output_final_state: bool, use_qk_l2norm_in_kernel: bool, cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        options = dict(output_final_state=True, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        states = [None] * len(cu_seqlens) if initial_state is None else initial_state.split(1)
        found = [
            rule(*(x[:, a:b] for x in inputs), g=g[:, a:b], beta=beta[:, a:b], initial_state=state, **options)
            for (a, b), state in zip(pairwise(cu_seqlens.tolist()), states, strict=False)
        ]
        return torch.cat([out for out, _ in found], 1), torch.cat([state for _, state in found])

    chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule.chunk"
    return chunk_gated_delta_rule


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: None, activation: str, seq_idx: None = None, backend: str = "triton",
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """That of fla/modules/convolution.py: x [1, T, C], rows one behind the other, weight [C, width] -> [1, T, C], no
    state."""
    assert (activation, backend) == ("silu", "triton")
    rows = x.mT.split([x.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist(), -1)
    padded = (F.pad(row, (weight.shape[-1] - 1, 0)) for row in rows)
    return F.silu(
        torch.cat([F.conv1d(row, weight.unsqueeze(1), bias, groups=len(weight)) for row in padded], -1)
    ).mT, None
