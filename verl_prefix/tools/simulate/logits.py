"""Logits of a simulated run: what verl's engine makes of them, and a model that has no values to compare."""

from typing import Any

import torch

from verl_prefix.models.hookup import HookedModel


class FakeHookedModel(HookedModel):
    def hands_on(self, made: torch.Tensor | None, logits: torch.Tensor) -> bool:
        """True: fake tensors have no values to compare."""
        return True


class _CrossEntropy(torch.autograd.Function):
    """flash_attn.ops.triton.cross_entropy: reads logits once, and writes their gradient over them where it may."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, inplace: bool) -> torch.Tensor:
        loss, lse = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
        logits.amax(-1)
        ctx.save_for_backward(logits, lse, labels)
        ctx.inplace = inplace
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, _, _ = ctx.saved_tensors
        scale = dloss.unsqueeze(-1).to(logits.dtype)
        return logits.mul_(scale) if ctx.inplace else logits * scale, None, None


def outputs_of(logits: torch.Tensor, labels: torch.Tensor, entropy: bool, temperature: float) -> torch.Tensor:
    """`prepare_model_outputs` of verl's engine: log-prob, and entropy where it is wanted: [n, 1 or 2] fp32."""
    from verl.utils.torch_functional import entropy_from_logits

    if temperature != 1.0:
        logits = logits / temperature
    columns = [entropy_from_logits(logits).float()] if entropy else []
    return torch.stack([-_CrossEntropy.apply(logits, labels, not entropy), *columns], dim=-1)
