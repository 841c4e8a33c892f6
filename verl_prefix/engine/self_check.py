"""Self-check of a run: one group through the shared-prefix path and through the stock path, on the run's own weights.

Two comparisons, both by the noise floor: what ours misses is measured in units of what rounding alone does.

- log-probs, which see everything (positions, layout, hook-up), against the stock path; the unit is how far the stock
  path moves when every attention output is rounded differently.
- every layer's attention output against dense float64 attention on the same queries, keys and values; the unit is what
  the rounding of probabilities and output to the model's dtype does, and of a log-sum-exp to fp32. In bf16 this sees
  errors of one percent in the kernel, which log-probs of a bf16 model hide.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from verl_prefix.core.attention import AttentionParams
from verl_prefix.core.layout import Layout

# A perturbed pass rounds once per layer differently; ours does at its matmuls, too, whose shapes differ from stock's.
MAX_LOG_PROBS = 3.0
# Two partial outputs and their sum are rounded where a single call rounds once: sqrt(3).
MAX_ATTENTION = 2.0

_QUERIES = 16  # of each end of a segment


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
        sinks: torch.Tensor | None, params: AttentionParams, out: torch.Tensor,
    ) -> None:  # fmt: skip
        prefix_len = layout.num_prefix  # of the one group, whatever its segments say
        error = noise = 0.0
        start = 0
        for segment in layout.segments:
            behind = prefix_len if segment.prefix_len else 0
            own = torch.arange(segment.length, device=q.device)
            query = torch.cat([own[:_QUERIES], own[_QUERIES:][-_QUERIES:]])
            keys, values = (torch.cat([x[:behind], x[start : start + segment.length]]) for x in (k, v))
            with torch.autocast(q.device.type, enabled=False):  # which would round the scores as well
                truth, rounded = _dense(q[start + query], keys, values, sinks, params, query + behind)
            error += (out[start + query] - truth).square().sum().item()
            noise += (rounded - truth).square().sum().item()
            start += segment.length
        ratio = (error / max(noise, 1e-300)) ** 0.5
        ratio = float("inf") if ratio != ratio else ratio  # a later layer must not hide it
        if ratio > self.worst:
            self.worst, self.layer = ratio, layer


def _dense(q, k, v, sinks, params: AttentionParams, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries at `position` among the keys, [n, H, D]: in float64, and with probabilities and output
    rounded to q's dtype. One key head at a time, since keys may be many."""
    behind = position.unsqueeze(1) - torch.arange(k.shape[0], device=q.device)
    hidden = behind < 0 if params.window is None else (behind < 0) | (behind >= params.window)
    per_key_head = q.shape[1] // k.shape[1]
    truth, rounded = torch.empty_like(q, dtype=torch.float64), torch.empty_like(q)
    for head in range(q.shape[1]):
        for out in (truth, rounded):
            compute = torch.promote_types(out.dtype, torch.float32)
            keys, values = (x[:, head // per_key_head].to(compute) for x in (k, v))
            logits = q[:, head].to(compute) @ keys.T * params.scale
            if params.softcap is not None:
                logits = params.softcap * torch.tanh(logits / params.softcap)
            logits = logits.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                logits = torch.cat([logits, sinks[head].to(compute).expand(len(q), 1)], -1)
            # As kernels do: by a log-sum-exp of fp32 at most, whose rounding counts in fp32, the more the larger it is.
            probs = (logits - logits.logsumexp(-1, keepdim=True)).exp()[:, : k.shape[0]].to(out.dtype).to(compute)
            out[:, head] = (probs @ values).to(out.dtype)
    return truth, rounded


@contextmanager
def rounding_noise(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While open, every attention output is off by up to one rounding step of `dtype`, differently each time."""
    eps = torch.finfo(dtype).eps
    generators: dict[torch.device, torch.Generator] = {}  # the run's own random state stays as it is

    def disturb(module: torch.nn.Module, args: tuple, output: tuple) -> tuple:
        out = output[0]
        # Parameters may wait on another device (fsdp_config.offload_policy).
        generator = generators.setdefault(out.device, torch.Generator(out.device).manual_seed(0))
        factor = 1 + eps * (2 * torch.rand(out.shape, device=out.device, generator=generator) - 1)
        return (out * factor).to(out.dtype), *output[1:]

    attention = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]
    handles = [module.register_forward_hook(disturb) for module in attention]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check(
    stock: Callable[[], torch.Tensor],
    ours: Callable[[str, AttentionCheck | None], torch.Tensor],
    rounding_noise: Callable[[], AbstractContextManager],
    reduce_sum: Callable[[list[float]], list[float]] = lambda values: values,
    num_perturbed: int = 3,
) -> Verdict:
    """Compares one group's response log-probs; those of all ranks together, since few tokens say little.

    Args:
        stock: [n] log-probs by the stock path, without gradients.
        ours: the same by schedule "packed" or "phased", whose attention passes get the check to inspect.
        rounding_noise: while open, attention outputs are rounded differently each time.
        reduce_sum: element-wise sum over ranks.
        num_perturbed: stock passes with noise.
    """
    attention = AttentionCheck()
    found = [ours("packed", attention), ours("phased", None)]
    truth = stock()
    with rounding_noise():
        perturbed = [stock() for _ in range(num_perturbed)]

    def sum_of_squares(x: torch.Tensor) -> float:
        return x.double().square().sum().item()

    # Log-probs of low precision have a grid, on which small noise may change nothing.
    grid = torch.finfo(truth.dtype).eps ** 2 * sum_of_squares(truth)
    noise = sum(sum_of_squares(x.double() - truth) for x in perturbed) / len(perturbed) + grid
    *errors, noise = reduce_sum([*(sum_of_squares(x.double() - truth) for x in found), noise])
    # A NaN must not get lost in max().
    worst = max(errors) if all(error == error for error in errors) else float("nan")
    log_probs = (worst / noise) ** 0.5 if noise else 0.0  # no noise: empty responses on every rank
    return Verdict(log_probs, attention.worst, attention.layer)
