"""Dense attention that materialises the scores of one segment pair at a time: any device, dtype and head dim; slow."""

import torch


def unavailable() -> str | None:
    return None


def unsupported(device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
    return None


def _by_kv_head(x_THD: torch.Tensor, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, H, D] -> [K, H / K, T, D]"""
    return x_THD.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).to(dtype)


def _scores(q, k, causal: bool, scale: float) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def forward(q, k, v, spans, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `verl_prefix.kernels`."""
    compute = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=compute)
    for q0, q1, k0, k1 in spans:
        num_kv = k.shape[1]
        qs, ks, vs = (_by_kv_head(x, num_kv, compute) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        scores = _scores(qs, ks, causal, scale)
        m = scores.logsumexp(-1)
        o = (scores - m.unsqueeze(-1)).exp() @ vs
        out[q0:q1] = o.flatten(0, 1).transpose(0, 1).to(out.dtype)
        lse[:, q0:q1] = m.flatten(0, 1)
    return out, lse


def backward(dout, q, k, v, out, lse, spans, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv like q, k, v, given the merged `out` and `lse`."""
    compute = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for q0, q1, k0, k1 in spans:
        num_kv = k.shape[1]
        qs, ks, vs, dos, os = (
            _by_kv_head(x, num_kv, compute) for x in (q[q0:q1], k[k0:k1], v[k0:k1], dout[q0:q1], out[q0:q1])
        )
        probs = (_scores(qs, ks, causal, scale) - lse[:, q0:q1].unflatten(0, (num_kv, -1)).unsqueeze(-1)).exp()
        dscores = probs * (dos @ vs.transpose(-1, -2) - (dos * os).sum(-1, keepdim=True)) * scale
        dq[q0:q1] = (dscores @ ks).flatten(0, 1).transpose(0, 1).to(dq.dtype)
        dk[k0:k1] = (dscores.transpose(-1, -2) @ qs).sum(1).transpose(0, 1).to(dk.dtype)
        dv[k0:k1] = (probs.transpose(-1, -2) @ dos).sum(1).transpose(0, 1).to(dv.dtype)
    return dq, dk, dv
