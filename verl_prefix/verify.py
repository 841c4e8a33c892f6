"""Self-check of a run: one group through the shared-prefix path and through the stock path, on the run's own weights.

Two comparisons, both by the noise floor: what ours misses is measured in units of what rounding alone does.

- log-probs, which see everything (positions, layout, hook-up), against the stock path; the unit is how far the stock
  path moves when every attention output is rounded differently.
- every layer's attention output against dense float64 attention on the same queries, keys and values; the unit is what
  the rounding of probabilities and output to the model's dtype does. In bf16 this sees errors of one percent in the
  kernel, which log-probs of a bf16 model hide.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from verl_prefix.attention import Scores
from verl_prefix.layout import Layout

# A perturbed pass rounds once per layer differently; ours does at its matmuls, too, whose shapes differ from stock's.
MAX_LOG_PROBS = 3.0
# Two partial outputs and their sum are rounded where a single call rounds once: sqrt(3).
MAX_ATTENTION = 2.0

_QUERIES = 16  # of each end of a suffix, and of the prefix's end


class Verdict(NamedTuple):
    """Both figures in units of rounding noise, and the layer with the larger attention error."""

    log_probs: float
    attention: float
    layer: int

    @property
    def missed(self) -> bool:
        return not (self.log_probs <= MAX_LOG_PROBS and self.attention <= MAX_ATTENTION)

    def __str__(self) -> str:
        return (
            f"log-probs differ from the stock path's by {self.log_probs:.3g} times rounding noise (at most "
            f"{MAX_LOG_PROBS:g}), attention of layer {self.layer} from dense float64 by {self.attention:.3g} times (at "
            f"most {MAX_ATTENTION:g})"
        )


class AttentionCheck:
    """An `AttentionPass.inspect` for packed passes of one group; `worst` ratio and its `layer`."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.layer = -1

    @torch.no_grad()
    def __call__(
        self, layer: int, layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        sinks: torch.Tensor | None, scores: Scores, out: torch.Tensor,
    ) -> None:  # fmt: skip
        prefix_len = layout.num_prefix
        error = noise = 0.0
        start = 0
        for segment in layout.segments:
            behind = prefix_len if segment.prefix_len else 0
            own = torch.arange(segment.length, device=q.device)
            query = torch.cat([own[:_QUERIES], own[_QUERIES:][-_QUERIES:]])
            keys, values = (torch.cat([x[:behind], x[start : start + segment.length]]) for x in (k, v))
            truth, rounded = _dense(q[start + query], keys, values, sinks, scores, query + behind)
            error += (out[start + query] - truth).square().sum().item()
            noise += (rounded - truth).square().sum().item()
            start += segment.length
        ratio = (error / max(noise, 1e-300)) ** 0.5
        if not ratio <= self.worst:
            self.worst, self.layer = ratio, layer


def _dense(q, k, v, sinks, scores: Scores, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries at `position` among the keys, [n, H, D]: in float64, and with probabilities and output
    rounded to q's dtype."""
    results = []
    for compute in (torch.float64, torch.promote_types(q.dtype, torch.float32)):
        repeat = q.shape[1] // k.shape[1]
        heads = [
            x.to(compute).transpose(0, 1) for x in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1))
        ]
        logits = heads[0] @ heads[1].transpose(-1, -2) * scores.scale
        if scores.softcap is not None:
            logits = scores.softcap * torch.tanh(logits / scores.softcap)
        behind = position.unsqueeze(1) - torch.arange(k.shape[0], device=q.device)
        hidden = behind < 0 if scores.window is None else (behind < 0) | (behind >= scores.window)
        logits = logits.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.to(compute)[:, None, None].expand(-1, logits.shape[1], 1)
            logits = torch.cat([logits, column], -1)
        probs = logits.softmax(-1)[..., : k.shape[0]]
        if compute != torch.float64:
            probs = probs.to(q.dtype).to(compute)
        out = (probs @ heads[2]).transpose(0, 1)
        results.append(out.to(q.dtype) if compute != torch.float64 else out)
    return results[0], results[1]


def check(
    stock: Callable[[], torch.Tensor],
    ours: Callable[[str, AttentionCheck | None], torch.Tensor],
    rounding_noise: Callable[[], AbstractContextManager],
) -> Verdict:
    """Compares one group's response log-probs.

    Args:
        stock: [n] log-probs by the stock path, without gradients.
        ours: the same by schedule "packed" or "phased", whose attention passes get the check to inspect.
        rounding_noise: while open, attention outputs are rounded differently each time (`models.rounding_noise`).
    """
    attention = AttentionCheck()
    found = [ours("packed", attention), ours("phased", None)]
    truth = stock()
    with rounding_noise():
        perturbed = [stock(), stock()]

    if not truth.numel():  # only empty responses
        return Verdict(0.0, attention.worst, attention.layer)

    def mean_square(x: torch.Tensor) -> float:
        return x.double().square().mean().item()

    # Log-probs of low precision have a grid, on which small noise may change nothing.
    grid = torch.finfo(truth.dtype).eps ** 2 * mean_square(truth)
    noise = sum(mean_square(x.double() - truth) for x in perturbed) / len(perturbed) + grid
    worst = max(mean_square(x.double() - truth) for x in found)
    return Verdict((worst / noise) ** 0.5, attention.worst, attention.layer)
