"""Dense attention that materialises a block of scores at a time: any device, dtype, head dim and softcap; slow."""

from collections.abc import Iterator

import torch

from verl_prefix.core.calls import Call

_MAX_SCORES = 2**25  # of one block, over all heads


def unavailable() -> str | None:
    return None


def unsupported(device_type: str, dtype: torch.dtype, head_dim: int, softcap: bool) -> str | None:
    return None


def _by_kv_head(x_THD: torch.Tensor, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, H, D] -> [K, H / K, T, D]"""
    by_kv_head: torch.Tensor = x_THD.unflatten(1, (num_kv_heads, -1))
    return by_kv_head.permute(1, 2, 0, 3).to(dtype)


def _blocks(q: torch.Tensor, call: Call) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """(query slice, key slice, hidden [q, k] or None) of each block."""
    for q0, q1, k0, k1 in call.spans.by_segment():
        step = max(1, _MAX_SCORES // (q.shape[1] * (k1 - k0)))
        for start in range(q0, q1, step):
            end = min(start + step, q1)
            hidden = None
            if call.causal:
                last = torch.arange(start, end, device=q.device).unsqueeze(1) + k1 - q1  # the last reads the last key
                key = torch.arange(k0, k1, device=q.device)
                hidden = key > last if call.window is None else (key > last) | (key <= last - call.window)
            yield slice(start, end), slice(k0, k1), hidden


def _scores(
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor | None, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Scores, and their derivative by the scaled product of q and k."""
    scores = q @ k.transpose(-1, -2) * scale
    slope: torch.Tensor | float = 1.0
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent**2
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf")), slope


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """See `core.kernels`."""
    compute, num_kv = torch.promote_types(q.dtype, torch.float32), k.shape[1]
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=compute)
    with torch.autocast(q.device.type, enabled=False):  # which would round scores and probabilities again
        for query, key, hidden in _blocks(q, call):
            qs, ks, vs = (_by_kv_head(x, num_kv, compute) for x in (q[query], k[key], v[key]))
            scores, _ = _scores(qs, ks, hidden=hidden, scale=call.scale, softcap=call.softcap)
            m = scores.logsumexp(-1)
            o = (scores - m.unsqueeze(-1)).exp() @ vs
            out[query] = o.flatten(0, 1).transpose(0, 1).to(out.dtype)
            lse[:, query] = m.flatten(0, 1)
    return out, lse


def backward(
    dout: torch.Tensor, saved: tuple[torch.Tensor, ...], call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `core.kernels`."""
    q, k, v, out, lse = saved
    compute, num_kv = torch.promote_types(q.dtype, torch.float32), k.shape[1]
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=compute) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        for query, key, hidden in _blocks(q, call):
            qs, ks, vs, dos, os = (
                _by_kv_head(x, num_kv, compute) for x in (q[query], k[key], v[key], dout[query], out[query])
            )
            scores, slope = _scores(qs, ks, hidden=hidden, scale=call.scale, softcap=call.softcap)
            probs = (scores - lse[:, query].unflatten(0, (num_kv, -1)).unsqueeze(-1)).exp()
            dscores = probs * (dos @ vs.transpose(-1, -2) - (dos * os).sum(-1, keepdim=True)) * slope * call.scale
            dq[query] = (dscores @ ks).flatten(0, 1).transpose(0, 1).to(dq.dtype)
            dk[key] += (dscores.transpose(-1, -2) @ qs).sum(1).transpose(0, 1)
            dv[key] += (probs.transpose(-1, -2) @ dos).sum(1).transpose(0, 1)
    return dq, dk.to(k.dtype), dv.to(v.dtype)
