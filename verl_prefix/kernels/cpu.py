"""torch's CPU flash attention, one call per segment. fp64, fp32, bf16 and fp16, any head dim, native GQA."""

import torch


def unavailable() -> str | None:
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return f"torch {torch.__version__} has no aten::_scaled_dot_product_flash_attention_for_cpu"
    return None


def unsupported(device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
    return None if device_type == "cpu" else f"device is {device_type}, not cpu"


def _heads_first(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD.transpose(0, 1).unsqueeze(0)


def forward(q, k, v, spans, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `verl_prefix.kernels`; `spans` pairs query and key segments."""
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    for q0, q1, k0, k1 in spans.parts():
        o, m = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q[q0:q1]), _heads_first(k[k0:k1]), _heads_first(v[k0:k1]), 0.0, causal, scale=scale
        )
        out[q0:q1] = o[0].transpose(0, 1)
        lse[:, q0:q1] = m[0]
    return out, lse


def backward(dout, q, k, v, out, lse, spans, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv like q, k, v, given the merged `out` and `lse`."""
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for q0, q1, k0, k1 in spans:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(dout[q0:q1]),
            _heads_first(q[q0:q1]),
            _heads_first(k[k0:k1]),
            _heads_first(v[k0:k1]),
            _heads_first(out[q0:q1]),
            lse[:, q0:q1].contiguous().unsqueeze(0),
            0.0,
            causal,
            scale=scale,
        )
        for grad, piece in zip(grads, (dq[q0:q1], dk[k0:k1], dv[k0:k1]), strict=True):
            piece.copy_(grad[0].transpose(0, 1))
    return dq, dk, dv
