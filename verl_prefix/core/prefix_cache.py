"""Prefix cache (what suffixes read of their prefixes, detached) and grad cache (gradients that they send back).

Schedule-level shared-prefix reuse: phase A fills the cache, phase B reads it and adds to the grad cache, phase C runs
one prefix backward on what was accumulated. Leaving the context frees all of it, also after an exception.
"""

from collections.abc import Hashable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# What a layer leaves for suffixes: an attention layer by its index, parts of recurrent layers by (part, index).
Key = Hashable
Tensors = tuple[torch.Tensor, ...]


class PrefixCache:
    """Tensors that the layers of a prefix row leave for suffixes, by key: keys and values [P, K, D] of its tokens, or
    states [N, ...] of its prefixes (`core.recurrence`).

    The grad cache is fp32 whatever the model's dtype is (fp64 for fp64), since every wave adds to it.
    """

    def __init__(self) -> None:
        self._leaf: MutableMapping[Key, Tensors] = {}
        self._grad: MutableMapping[Key, Tensors] = {}
        self._anchor: dict[Key, torch.Tensor] = {}
        self._is_open = True  # for what layers leave, until phase C

    def __enter__(self) -> "PrefixCache":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._leaf.clear()
        self._grad.clear()

    def saving(self) -> AbstractContextManager[Any]:
        """Context of phase A's forward."""
        return nullcontext()

    def capture(self, key: Key, *tensors: torch.Tensor, beside: Tensors = ()) -> Tensors:
        """Phase A, and again where gradient checkpointing recomputes it in phase C, which must change nothing.

        Args:
            beside: what the prefix itself goes on with, where it does not read `tensors`.

        Returns:
            The same tensors, then `beside`; in backward through any of them the grad cache joins those of `tensors`.
        """
        if self._is_open:
            self._leaf[key] = tuple(x.detach().requires_grad_(x.requires_grad) for x in tensors)
            self._anchor[key] = torch.empty(0, requires_grad=any(x.requires_grad for x in tensors))
        joined: Tensors = _JoinGradCache.apply(self, key, len(tensors), *tensors, *beside)  # type: ignore[no-untyped-call]
        return joined

    def read(self, key: Key) -> Tensors:
        if key not in self._leaf:
            raise RuntimeError(
                f"the prefix cache has no layer {key}: backward of a wave came after phase C, which frees the cache; "
                "call backward on each wave's loss before the next wave"
            )
        return self._leaf[key]

    def anchor(self, key: Key) -> torch.Tensor:
        """An empty tensor that requires a gradient where what the layer left does. As an input of the function that
        reads it, it makes autograd visit that function in backward, whatever else of its inputs is frozen. The leaves
        themselves would do so too, and the graph of a wave would hold them on the device (`core.offload`)."""
        return self._anchor[key]

    def add_grad(self, key: Key, rows: slice | torch.Tensor, *grads: torch.Tensor) -> None:
        """Phase B: a wave's gradients of the rows (tokens, or prefixes) that it read of each tensor."""
        if key not in self._grad:
            self._grad[key] = tuple(
                torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in self._leaf[key]
            )
        for total, part in zip(self._grad[key], grads, strict=True):
            add_at(total, rows, part)

    def backward(self, root: torch.Tensor) -> None:
        """Phase C: one backward through the prefix graph, which takes each layer's grad cache where it comes to it.

        Args:
            root: the FSDP root's output of phase A, which every layer leads to. It enters with a zero gradient.
        """
        self._end_waves()
        root.backward(torch.zeros_like(root))

    def _end_waves(self) -> None:
        """Between phases B and C: nobody reads what layers left any more."""
        self._is_open = False
        self._leaf.clear()

    def take(self, key: Key) -> Tensors | None:
        """Phase C: what the waves sent back to a layer, which is forgotten; None where no wave read of it."""
        return self._grad.pop(key, None)


class _JoinGradCache(torch.autograd.Function):
    """Identity, where the gradients of the first `num_left` tensors get those that the waves sent back."""

    @staticmethod
    def forward(ctx: Any, cache: PrefixCache, key: Key, num_left: int, *tensors: torch.Tensor) -> Tensors:
        ctx.args = cache, key, [x.dtype for x in tensors[:num_left]]
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        cache, key, dtypes = ctx.args
        joined = list(grads)
        for i, (total, dtype) in enumerate(zip(cache.take(key) or (), dtypes, strict=False)):
            own = grads[i]
            joined[i] = (total if own is None else total.add_(own)).to(dtype)
        return None, None, None, *joined


class ReadRows(torch.autograd.Function):
    """Rows `rows` [n] int64 of what a layer left [N, ...] -> [n, ...]; one may come several times. Gradients add up in
    fp32 (fp64), and go to the grad cache of a wave, else to what was left."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, rows: torch.Tensor, cache: PrefixCache | None, key: Key) -> torch.Tensor:
        ctx.args = rows, cache, key, left.shape, left.dtype
        return left.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, cache, key, shape, dtype = ctx.args
        if cache is not None:
            cache.add_grad(key, rows, grad)
            return None, None, None, None
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros(shape, dtype=wide, device=grad.device).index_add_(0, rows, grad.to(wide))
        return total.to(dtype), None, None, None


def add_at(total: torch.Tensor, rows: slice | torch.Tensor, part: torch.Tensor) -> None:
    """total[rows] += part, where int64 indices may repeat."""
    if isinstance(rows, slice):
        total[rows] += part
    else:
        wide = total.to(torch.promote_types(total.dtype, torch.float32))  # itself where it is
        wide.index_add_(0, rows, part.to(wide.dtype))
        if wide is not total:
            total.copy_(wide)
