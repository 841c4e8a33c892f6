"""Prefix cache (what suffixes read of their prefixes, detached) and grad cache (gradients that they send back).

Schedule-level shared-prefix reuse: phase A fills the cache, phase B reads it and adds to the grad cache, phase C runs
one prefix backward on what was accumulated. Leaving the context frees all of it, also after an exception.
"""

from collections.abc import Hashable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Names what is left for suffixes: an attention layer's index, (part, index) of a recurrent layer, or "outputs".
Key = Hashable
Tensors = tuple[torch.Tensor, ...]


class PrefixCache:
    """Tensors that the layers of a prefix row leave for suffixes, by key: keys and values [P, K, D] of its tokens, or
    states [N, ...] of its prefixes (`core.recurrence`).

    The grad cache is fp32 whatever the model's dtype is (fp64 for fp64), since every wave adds to it.

    Attributes:
        anchors: by key, an empty tensor that requires a gradient if what is kept of the layer does. `GroupedAttention`
            takes it as an input, so that autograd visits that function in backward even where its other inputs are
            frozen. The tensors themselves would do so too, but then a wave's graph would hold them on the device
            (`core.offload`).
    """

    def __init__(self) -> None:
        self._leaf: MutableMapping[Key, Tensors] = {}
        self._grad: MutableMapping[Key, Tensors] = {}
        self.anchors: dict[Key, torch.Tensor] = {}
        self._is_open = True  # `capture` stores what layers leave, until phase C
        self._in_update = torch.is_grad_enabled()

    def __enter__(self) -> "PrefixCache":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._leaf.clear()
        self._grad.clear()

    def saving(self) -> AbstractContextManager[Any]:
        """Context of phase A's forward."""
        return nullcontext()

    def capture(self, key: Key, *tensors: torch.Tensor, beside: Tensors = ()) -> Tensors:
        """Stores what a layer leaves, in phase A. In phase C gradient checkpointing calls it again: it stores nothing.

        Reentrant checkpointing runs the layers of phase A without gradients, and only phase C shows which tensors need
        one. So all of them get one.

        Args:
            beside: what the prefix's own forward goes on with, where that is not `tensors`.

        Returns:
            The same tensors, then `beside`. Backward through any of them adds the grad cache to the gradients of
            `tensors`.

        Raises:
            RuntimeError: there is something under this key already.
        """
        if self._is_open:
            if key in self._leaf:
                raise ran_twice(key)
            unknown = self._in_update and not torch.is_grad_enabled()
            leaves = tuple(x.detach().requires_grad_(unknown or x.requires_grad) for x in tensors)
            self._leaf[key] = leaves
            self.anchors[key] = torch.empty(0, requires_grad=any(x.requires_grad for x in leaves))
        joined: Tensors = _JoinGradCache.apply(self, key, len(tensors), *tensors, *beside)  # type: ignore[no-untyped-call]
        return joined

    def read(self, key: Key) -> Tensors:
        if key not in self._leaf:
            raise RuntimeError(
                f"the prefix cache has no layer {key}: backward of a wave came after phase C, which frees the cache; "
                "call backward on each wave's loss before the next wave"
            )
        return self._leaf[key]

    def add_grad(self, key: Key, rows: slice | torch.Tensor, *grads: torch.Tensor) -> None:
        """Phase B: adds a wave's gradients of the rows (tokens, or states) that it read of each tensor."""
        if key not in self._grad:
            self._grad[key] = tuple(
                torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in self.read(key)
            )
        for total, part in zip(self._grad[key], grads, strict=True):
            add_at(total, rows, part)

    def backward(self, root: torch.Tensor) -> None:
        """Phase C: runs one backward through the prefix graph, which takes each layer's grad cache as it gets there.

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
        """Phase C: removes and returns what the waves sent back to a layer; None where no wave read it."""
        return self._grad.pop(key, None)


def ran_twice(key: Key) -> RuntimeError:
    """An error for a model that runs a layer several times in one forward, or several layers under one index."""
    return RuntimeError(
        f"layer {key} ran twice in one forward, and what is kept of a layer is of one run; set model_engine=dp, or "
        "call the model on whole rows"
    )


class _JoinGradCache(torch.autograd.Function):
    """Identity, whose backward adds what the waves sent back to the gradients of the first `num_left` tensors."""

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
    """Selects rows `rows` [n] int64 of what a layer left [N, ...] -> [n, ...]; a row may come several times. Gradients
    add up in fp32 (fp64). In a wave they go to the grad cache, else through autograd to what was left."""

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
        wide = total.to(torch.promote_types(total.dtype, torch.float32))  # `total` itself where it is wide
        wide.index_add_(0, rows, part.to(wide.dtype))
        if wide is not total:
            total.copy_(wide)
