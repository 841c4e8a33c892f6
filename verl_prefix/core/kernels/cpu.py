"""torch's CPU flash attention: forward one call per segment, backward one per span, and more under a window.

fp64, fp32, bf16 and fp16, any head dim, native GQA.
"""

from collections.abc import Iterable, Iterator

import torch

from verl_prefix.core.calls import Call

# Queries of one call under a sliding window: such a call reads at most this many keys more than the window.
_BLOCK = 256


def unavailable() -> str | None:
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return f"torch {torch.__version__} has no aten::_scaled_dot_product_flash_attention_for_cpu"
    return None


def unsupported(device_type: str, dtype: torch.dtype, head_dim: int, softcap: bool) -> str | None:
    if softcap:
        return "it has no softcap"
    return None if device_type == "cpu" else f"device is {device_type}, not cpu"


def _heads_first(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD.transpose(0, 1).unsqueeze(0)


def _kernel_calls(
    spans: Iterable[tuple[int, int, int, int]], call: Call, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, bool, torch.Tensor | None]]:
    """(query slice, key slice, is_causal, mask [q, k] or None) of each call of torch's kernel."""
    window = call.window
    for q0, q1, k0, k1 in spans:
        q_len, k_len = q1 - q0, k1 - k0
        if window is None or (q_len == k_len <= window):
            yield slice(q0, q1), slice(k0, k1), call.causal, None
            continue
        for start in range(0, q_len, _BLOCK):
            end = min(start + _BLOCK, q_len)
            # The last query reads the last key.
            last = torch.arange(start, end).unsqueeze(1) + k_len - q_len
            first_key = max(0, int(last[0]) - window + 1)
            key = torch.arange(first_key, int(last[-1]) + 1)
            hidden = (key > last) | (key <= last - window)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            yield slice(q0 + start, q0 + end), slice(k0 + first_key, k0 + int(last[-1]) + 1), False, mask


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """See `core.kernels`."""
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    for query, key, is_causal, mask in _kernel_calls(call.spans.by_segment(), call, q.dtype):
        parts = (_heads_first(x) for x in (q[query], k[key], v[key]))
        o, m = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *parts, 0.0, is_causal, attn_mask=mask, scale=call.scale
        )
        out[query] = o[0].transpose(0, 1)
        lse[:, query] = m[0]
    return out, lse


def backward(
    dout: torch.Tensor, saved: tuple[torch.Tensor, ...], call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `core.kernels`."""
    q, k, v, out, lse = saved
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
    for query, key, is_causal, mask in _kernel_calls(call.spans, call, q.dtype):
        parts = (_heads_first(x) for x in (dout[query], q[query], k[key], v[key], out[query]))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *parts, lse[:, query].contiguous().unsqueeze(0), 0.0, is_causal, attn_mask=mask, scale=call.scale
        )
        dq[query], grad_k, grad_v = (grad[0].transpose(0, 1) for grad in grads)
        dk[key] += grad_k
        dv[key] += grad_v
    return dq, dk.to(k.dtype), dv.to(v.dtype)
