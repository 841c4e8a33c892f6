"""A stand-in for flash attention on a machine without it: verl's sequence parallelism sits inside transformers' call of
it, and is silently wrong with `attn_implementation=sdpa`. Where this is imported, transformers knows it:

    ... actor_rollout_ref.model.external_lib=varlen
    actor_rollout_ref.model.override_config.attn_implementation=varlen_on_cpu
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations import flash_attention
from verl.models.transformers import monkey_patch

VARLEN_ON_CPU = "varlen_on_cpu"


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, query_length: int,
    position_ids: torch.Tensor, softmax_scale: float | None, sliding_window: int | None, softcap: float | None,
    s_aux: torch.Tensor | None, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """transformers' `_flash_attention_forward` of packed rows, whose positions start at 0: query and result
    [1, T, H, D], key and value [1, T, K, D], position_ids [1, T].

    Raises:
        NotImplementedError: the layer has sinks or a softcap.
    """
    if s_aux is not None or softcap is not None:
        raise NotImplementedError(f"attn_implementation={VARLEN_ON_CPU} has neither sinks nor a softcap; set eager")
    row = (position_ids.reshape(-1) == 0).cumsum(0)
    behind = torch.arange(query_length).unsqueeze(1) - torch.arange(query_length)
    seen = (behind >= 0) & (row.unsqueeze(1) == row)
    if sliding_window is not None:
        seen &= behind < sliding_window
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


# What transformers' and verl's functions call by this name can only fail without the package.
flash_attention._flash_attention_forward = monkey_patch._ulysses_flash_attention_forward
monkey_patch._flash_attention_forward = _dense
AttentionInterface.register(VARLEN_ON_CPU, flash_attention.flash_attention_forward)
