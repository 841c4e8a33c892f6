"""Prefix cache (detached K/V that suffixes read) and grad cache (gradients that suffixes send back), with a lifetime.

Schedule-level shared-prefix reuse: phase A fills the cache, phase B reads it and adds to the grad cache, phase C runs
one prefix backward on what was accumulated. Leaving the context frees all of it, also after an exception.
"""

from typing import Any

import torch


class PrefixCache:
    """Keys and values of a prefix row, per attention layer: [P, K, D] each.

    The grad cache is fp32 whatever the model's dtype is (fp64 for fp64), since every wave adds to it.
    """

    def __init__(self) -> None:
        self._leaf: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._grad: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._is_open = True  # for keys and values, until phase C

    def __enter__(self) -> "PrefixCache":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._leaf.clear()
        self._grad.clear()

    def capture(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Phase A, and again where gradient checkpointing recomputes it in phase C, which must change nothing.

        Returns:
            The same keys and values for the prefix's own attention; in backward the grad cache joins them.
        """
        if self._is_open:
            self._leaf[layer] = k.detach(), v.detach()
        joined: tuple[torch.Tensor, torch.Tensor] = _JoinGradCache.apply(k, v, self, layer)  # type: ignore[no-untyped-call]
        return joined

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self._leaf:
            raise RuntimeError(
                f"the prefix cache has no layer {layer}: backward of a wave came after phase C, which frees the cache; "
                "call backward on each wave's loss before the next wave"
            )
        return self._leaf[layer]

    def add_grad(self, layer: int, tokens: slice | torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Phase B: a wave's gradients of the prefix tokens that it read."""
        if layer not in self._grad:
            k, v = self._leaf[layer]
            wide = torch.promote_types(k.dtype, torch.float32)
            self._grad[layer] = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for total, part in zip(self._grad[layer], (dk, dv), strict=True):
            add_at(total, tokens, part)

    def backward(self, root: torch.Tensor) -> None:
        """Phase C: one backward through the prefix graph, which takes each layer's grad cache where it comes to it.

        Args:
            root: the FSDP root's output of phase A, which every layer leads to. It enters with a zero gradient.
        """
        self._end_waves()
        root.backward(torch.zeros_like(root))

    def _end_waves(self) -> None:
        """Between phases B and C: nobody reads keys and values any more."""
        self._is_open = False
        self._leaf.clear()

    def take(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Phase C: a layer's grad cache, which is forgotten; None where no wave read its keys and values."""
        return self._grad.pop(layer, None)


class _JoinGradCache(torch.autograd.Function):
    """Identity on a layer's keys and values, whose gradients get those that the waves sent back."""

    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, cache: PrefixCache, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.args = cache, layer
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cache, layer = ctx.args
        if (grads := cache.take(layer)) is not None:
            dk, dv = (grad.add_(own).to(own.dtype) for grad, own in zip(grads, (dk, dv), strict=True))
        return dk, dv, None, None


def add_at(total: torch.Tensor, tokens: slice | torch.Tensor, part: torch.Tensor) -> None:
    """total[tokens] += part, where int64 indices may repeat."""
    if isinstance(tokens, slice):
        total[tokens] += part
    else:
        wide = total.to(torch.promote_types(total.dtype, torch.float32))
        total.copy_(wide.index_add(0, tokens, part.to(wide.dtype)))
