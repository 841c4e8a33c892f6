"""A stand-in for flash attention on a machine without it, for tests: verl's sequence parallelism sits inside
transformers' call of it, and is silently wrong with `attn_implementation=sdpa`.

    ... +platform=cpu actor_rollout_ref.model.override_config.attn_implementation=varlen_on_cpu
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from verl.models.transformers import monkey_patch

VARLEN_ON_CPU = "varlen_on_cpu"


def varlen_on_cpu(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over packed rows, whose positions start at 0: query [1, H, T, D], key and value
    [1, K, T, D], position_ids [1, T] -> [1, T, H, D]; with verl's all-to-all around it.

    Raises:
        NotImplementedError: the layer has sinks or a softcap.
    """
    if s_aux is not None or softcap is not None:
        raise NotImplementedError(f"attn_implementation={VARLEN_ON_CPU} has neither sinks nor a softcap; set sdpa")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = monkey_patch._ulysses_flash_attention_forward(
        q, k, v, attention_mask, q.shape[1], position_ids=position_ids, scale=scaling, window=sliding_window
    )
    return out, None


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, query_length: int,
    position_ids: torch.Tensor, scale: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of packed rows, [1, T, H, D]."""
    row = (position_ids.reshape(-1) == 0).cumsum(0)
    behind = torch.arange(query_length).unsqueeze(1) - torch.arange(query_length)
    seen = (behind >= 0) & (row.unsqueeze(1) == row)
    if window is not None:
        seen &= behind < window
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True).transpose(1, 2)


def register_varlen() -> None:
    """Makes `varlen_on_cpu` an attention implementation of transformers, in this process."""
    # verl's function calls transformers' by this name, which without the package can only fail.
    monkey_patch._flash_attention_forward = _dense
    AttentionInterface.register(VARLEN_ON_CPU, varlen_on_cpu)
