"""Products and exchanges of tensor-parallel ranks on fake tensors: what they allocate, keep, compute and send.

Read from megatron-core 0.16.1 (tensor_parallel/layers.py, mappings.py and cross_entropy.py) and
verl/utils/megatron/tensor_parallel.py.
"""

from typing import Any

import torch
import torch.distributed as dist

from verl_prefix.tools.simulate.scans import launch


class Product(torch.autograd.Function):
    """x [1, t or T, in], weights [out, in] -> [1, T, out] each; gradients of weights go to their buffer.

    Args:
        group: whose ranks have other parts of the weights, and sum the gradient of x; None: it is no sum.
        tokens: T, where x is this rank's part of them; 0: x is whole.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup | None, tokens: int, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.tokens = group, tokens
        ctx.buffers = [weight.main_grad for weight in weights]  # type: ignore[attr-defined]
        whole = _gather(x, group, tokens) if tokens else x
        return tuple(torch.nn.functional.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        whole = _gather(x, ctx.group, ctx.tokens) if ctx.tokens else x
        dx = None
        for grad, weight, buffer in zip(grads, weights, ctx.buffers, strict=True):
            part = grad @ weight
            dx = part if dx is None else dx.add_(part)
            launch([grad, whole], [buffer], 2.0 * grad.numel() * weight.shape[1], "linear")
        assert dx is not None
        if ctx.tokens:
            dx = _scatter(dx, ctx.group)
        elif ctx.group is not None:
            dist.all_reduce(dx, group=ctx.group)
        return dx, None, None, *(None for _ in weights)


def _gather(x: torch.Tensor, group: Any, tokens: int) -> torch.Tensor:
    """[..., t, n] -> [..., T, n]; t is T over the ranks, rounded up."""
    ranks, flat = dist.get_world_size(group), x.reshape(-1, x.shape[-1])
    whole = flat.new_empty(ranks * len(flat), x.shape[-1])
    dist.all_gather_into_tensor(whole, flat, group=group)
    return whole[:tokens].view(*x.shape[:-2], tokens, x.shape[-1])


def _scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[..., T, n] -> [..., t, n], summed over ranks."""
    ranks, flat = dist.get_world_size(group), x.reshape(-1, x.shape[-1])
    own = flat.new_empty(-(-len(flat) // ranks), x.shape[-1])
    if len(own) * ranks != len(flat):
        flat = torch.nn.functional.pad(flat, (0, 0, 0, len(own) * ranks - len(flat)))
    dist.reduce_scatter_tensor(own, flat, group=group)
    return own.view(*x.shape[:-2], len(own), x.shape[-1])


class Exchanged(torch.autograd.Function):
    """Gathers tokens (`tokens` of them), or sums them and leaves each rank its own (None)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, tokens: int | None) -> torch.Tensor:
        ctx.group, ctx.tokens, ctx.length = group, tokens, x.shape[-2]
        return _scatter(x, group) if tokens is None else _gather(x, group, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        return (_gather(grad, ctx.group, ctx.length) if ctx.tokens is None else _scatter(grad, ctx.group)), None, None


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(total := x.clone(), group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class Gathered(torch.autograd.Function):
    """[..., t, n] -> [..., T, n], whose gradient is on every rank whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, tokens: int) -> torch.Tensor:
        ctx.length = x.shape[-2]
        return _gather(x, group, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        own = grads[0].new_empty(*grads[0].shape[:-2], ctx.length, grads[0].shape[-1])
        return launch([own], [own])[0], None, None


class LogProbs(torch.autograd.Function):
    """logits [n, this rank's part of the vocabulary], labels [n] -> [n] fp32, by vocab_parallel_cross_entropy: softmax
    in fp32 is kept, and becomes the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        softmax = logits.float()
        highest = softmax.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        softmax.sub_(highest.unsqueeze(-1))
        own = softmax.gather(-1, labels.unsqueeze(-1))[:, 0]
        dist.all_reduce(own, group=group)
        total = softmax.exp_().sum(-1)
        dist.all_reduce(total, group=group)
        softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax)
        ctx.dtype = logits.dtype
        return own - total.log()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (softmax,) = ctx.saved_tensors
        return softmax.mul_(grads[0].unsqueeze(-1)).to(ctx.dtype), None, None


class Entropy(torch.autograd.Function):
    """logits [n, this rank's part of the vocabulary] -> [n], by verl's vocab_parallel_entropy."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        highest = logits.amax(-1, keepdim=True)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        softmax = (logits - highest).exp_()
        total = softmax.sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        softmax.div_(total)
        (mean,) = launch([softmax, logits], [torch.empty_like(total)])
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(logits, softmax, mean)
        return (highest + total.log() - mean).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, softmax, mean = ctx.saved_tensors
        softmax = softmax * (logits - mean) * grads[0].unsqueeze(-1)
        return softmax.neg_(), None


def outputs_of(logits: torch.Tensor, labels: torch.Tensor, entropy: bool, group: dist.ProcessGroup) -> torch.Tensor:
    """`_lm_head_logits_processor` of verl's engine, of logits whose temperature is divided by in place, whatever it is:
    log-prob, and entropy where it is wanted, of a copy of the logits: [n, 1 or 2] fp32."""
    with torch.no_grad():
        launch([logits], [logits])
    if not entropy:
        return LogProbs.apply(logits, labels, group).unsqueeze(-1)
    kept = logits.clone()
    return torch.stack([LogProbs.apply(kept, labels, group), Entropy.apply(logits, group).float()], dim=-1)
