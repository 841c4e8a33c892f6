"""Mamba-2's scan in torch, from given states. It stands in for mamba_ssm's mamba_chunk_scan_combined where that cannot
run.

State space duality (arXiv 2405.21060, section 6): a chunk is computed as attention with decaying weights, and the state
connects one chunk with the next. transformers' own torch path can only start from zero states.
"""

import torch
import torch.nn.functional as F


def chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_states: torch.Tensor | None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [n, t, H, P] of x's dtype, and final states [n, H, P, N] in fp32 (fp64 for fp64 inputs).

    Args:
        x: [n, t, H, P]. dt: [n, t, H], before softplus and `dt_bias` [H]. A, D: [H]. B, C: [n, t, G, N], of which each
            serves H / G heads. initial_states: [n, H, P, N]; None: zeros.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    heads = x.shape[2]
    dt = F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(*dt_limit)
    decay = dt * A.to(wide)  # logarithms, [n, t, H]
    source = x.to(wide) * dt.unsqueeze(-1)
    B, C = (y.to(wide).repeat_interleave(heads // y.shape[2], 2) for y in (B, C))
    state = x.new_zeros(len(x), heads, x.shape[3], B.shape[3], dtype=wide) if initial_states is None else initial_states
    outputs = []
    with torch.autocast(x.device.type, enabled=False):  # which would round states and their products
        for start in range(0, x.shape[1], chunk_size):
            now = slice(start, start + chunk_size)
            total = decay[:, now].cumsum(1)
            between = total.unsqueeze(2) - total.unsqueeze(1)  # [n, to, from, H]
            later = torch.ones(between.shape[1:3], dtype=torch.bool, device=x.device).triu(1)
            weights = torch.einsum("nihs,njhs->nijh", C[:, now], B[:, now])
            weights = weights * between.masked_fill(later[..., None], float("-inf")).exp()
            out = torch.einsum("nijh,njhp->nihp", weights, source[:, now])
            out = out + torch.einsum("nihs,nhps->nihp", C[:, now] * total.exp().unsqueeze(-1), state)
            left = (total[:, -1:] - total).exp().unsqueeze(-1)
            state = state * total[:, -1].exp()[..., None, None]
            state = state + torch.einsum("njhp,njhs->nhps", source[:, now] * left, B[:, now])
            outputs.append(out)
    return (torch.cat(outputs, 1) + D.to(wide).unsqueeze(-1) * x.to(wide)).to(x.dtype), state
