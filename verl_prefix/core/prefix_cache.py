"""Prefix cache (what nested passes read of phase A, detached) and grad cache (gradients that they send back).

Phase A fills the prefix cache. Nested passes, as waves, read it and add to the grad cache. Phase C runs one prefix
backward from the grad cache. Leaving the context frees both, also after an exception.
"""

from collections.abc import Hashable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from verl_prefix.core.errors import CannotShare

# What leaves tensors for nested passes: an attention layer's index, (part, index) of a recurrent layer, or `OUTPUTS`.
LayerKey = Hashable
Tensors = tuple[torch.Tensor, ...]
OUTPUTS = "outputs"  # the key of outputs of strand tokens


class PrefixCache:
    """Tensors that phase A leaves for passes nested in it, by layer: keys and values [P, K, D] of all its tokens,
    states [M, ...] of recurrent layers (`core.recurrence`); and outputs [m, k] of some of its tokens.

    The grad cache is fp32 whatever the model's dtype is (fp64 for fp64), since every wave adds to it.

    Args:
        stored, grads: empty mappings that hold the tensors of both caches; None: dicts.
    """

    # Whether phase A keeps what attention returns until phase C, so that checkpointed layers run no kernel again.
    keeps_attention = True

    def __init__(
        self, stored: MutableMapping[LayerKey, Tensors] | None = None,
        grads: MutableMapping[LayerKey, Tensors] | None = None,
    ) -> None:  # fmt: skip
        self._stored: MutableMapping[LayerKey, Tensors] = {} if stored is None else stored
        self._grads: MutableMapping[LayerKey, Tensors] = {} if grads is None else grads
        self._anchors: dict[LayerKey, torch.Tensor] = {}
        self._is_open = True  # `capture` stores what layers leave, until phase C
        self._made_with_grad = torch.is_grad_enabled()  # False in `capture` then means reentrant checkpointing

    def __enter__(self) -> "PrefixCache":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_open = False
        self._stored.clear()
        self._grads.clear()

    def saving(self) -> AbstractContextManager[Any]:
        """Context of phase A's forward."""
        return nullcontext()

    def capture(self, key: LayerKey, *tensors: torch.Tensor, other_outputs: Tensors = ()) -> Tensors:
        """Stores what a layer leaves in phase A. Gradient checkpointing calls it again in phase C; that stores nothing.

        Under reentrant checkpointing layers of phase A run without gradients, so that `requires_grad` says nothing yet.
        All stored tensors then get gradients.

        Args:
            key: the layer's.
            tensors: what suffixes read.
            other_outputs: what the layer returns and nobody reads from the cache, as a scan's outputs beside its
                states. They go through the autograd node of `tensors`: phase C reaches the layer only through them.

        Returns:
            The same tensors, then `other_outputs`. Backward through any of them adds the grad cache to the gradients of
            `tensors`.

        Raises:
            CannotShare: there is something under this key already.
        """
        # A view keeps the whole storage alive until phase C: of values, all that a fused QKV projection has returned.
        tensors = tuple(x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for x in tensors)
        if self._is_open:
            if key in self._stored:
                raise twice_error(key)
            unknown = self._made_with_grad and not torch.is_grad_enabled()
            leaves = tuple(x.detach().requires_grad_(unknown or x.requires_grad) for x in tensors)
            self._stored[key] = leaves
            self._anchors[key] = torch.empty(0, requires_grad=any(x.requires_grad for x in leaves))
        joined: Tensors = _JoinGradCache.apply(self, key, len(tensors), *tensors, *other_outputs)  # type: ignore[no-untyped-call]
        return joined

    def read(self, key: LayerKey) -> Tensors:
        """What a layer left, without its graph.

        Raises:
            CannotShare: it left nothing.
            RuntimeError: phase C has begun, or the cache's context was left.
        """
        self._check(key)
        return self._stored[key]

    def anchor(self, key: LayerKey) -> torch.Tensor:
        """An empty tensor that requires a gradient if the layer's tensors here do; raises as `read` does.

        `GroupedAttention` takes it as an input, so that autograd visits that function in backward even if all its other
        inputs are frozen. The tensors themselves would do so too, but then a wave's graph would hold them on the device
        (`core.offload`)."""
        self._check(key)
        return self._anchors[key]

    def _check(self, key: LayerKey) -> None:
        """Raises as `read` says."""
        if key not in self._stored:
            if self._is_open:
                raise CannotShare(
                    f"layer {key} runs in a nested pass and did not run in phase A, and only layers that run in both "
                    "can share a prefix"
                )
            raise RuntimeError(
                f"the prefix cache has no layer {key}: backward of a wave came after phase C, or after its pass was "
                "left, each of which frees the cache; call backward on each wave's loss before the next wave"
            )

    def add_grad(self, key: LayerKey, at: slice | torch.Tensor, *grads: torch.Tensor) -> None:
        """Before phase C: adds gradients of a nested pass to the grad cache.

        Args:
            key: the layer's.
            at: which tokens or states it has read.
            grads: their gradients, for each tensor of `key`.
        """
        if key not in self._grads:
            self._grads[key] = tuple(
                torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in self.read(key)
            )
        for total, part in zip(self._grads[key], grads, strict=True):
            add_at(total, at, part)

    def backward(self, output: torch.Tensor, grad: torch.Tensor | None = None) -> None:
        """Phase C: runs one backward through the prefix graph.

        Its gradient of zeros only makes autograd walk the graph. Autograd walks tensors, not tokens: a layer's keys and
        values are one tensor of all tokens of the packed row, and the output depends on that tensor. So each layer's
        `_JoinGradCache` is reached, and adds what the waves sent, also to tokens that the output does not depend on.

        Args:
            output: the model's of phase A, which depends on every layer.
            grad: its gradient, where a later stage of a pipeline sends one; None: zeros.
        """
        self._end_waves()
        output.backward(torch.zeros_like(output) if grad is None else grad)

    def _end_waves(self) -> None:
        """Between phases B and C: nobody reads what layers left any more."""
        self._is_open = False
        self._stored.clear()

    def take(self, key: LayerKey) -> Tensors | None:
        """Phase C: removes and returns what the waves sent back to a layer; None where no wave read it."""
        return self._grads.pop(key, None)


def twice_error(key: LayerKey) -> CannotShare:
    """An error for a model that runs a layer several times in one forward, or several layers under one index."""
    return CannotShare(f"layer {key} ran twice in one forward, and only layers that run once can share a prefix")


class _JoinGradCache(torch.autograd.Function):
    """Identity, whose backward adds what the waves sent back to the gradients of the first `num_stored` tensors."""

    @staticmethod
    def forward(ctx: Any, cache: PrefixCache, key: LayerKey, num_stored: int, *tensors: torch.Tensor) -> Tensors:
        ctx.args = cache, key, [x.dtype for x in tensors[:num_stored]]
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        cache, key, dtypes = ctx.args
        joined = list(grads)
        of_waves = cache.take(key)
        if of_waves is not None:
            for i, total in enumerate(of_waves):
                own = grads[i]
                joined[i] = (total if own is None else total.add_(own)).to(dtypes[i])
        return None, None, None, *joined


class ReadPrefix(torch.autograd.Function):
    """stored [m, ...], which a layer left under `key`, at `index` [n] int64, which may repeat -> [n, ...].

    Gradients add up in fp32 (fp64). With a `cache`, that of a phase A around, they go to its grad cache; else through
    autograd to `stored`."""

    @staticmethod
    def forward(
        ctx: Any, stored: torch.Tensor, index: torch.Tensor, cache: PrefixCache | None, key: LayerKey
    ) -> torch.Tensor:
        ctx.args = index, cache, key, stored.shape, stored.dtype
        return stored.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        index, cache, key, shape, dtype = ctx.args
        if cache is not None:
            cache.add_grad(key, index, grad)
            return None, None, None, None
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros(shape, dtype=wide, device=grad.device).index_add_(0, index, grad.to(wide))
        return total.to(dtype), None, None, None


def add_at(total: torch.Tensor, at: slice | torch.Tensor, part: torch.Tensor) -> None:
    """total[at] += part. Indices, int64, may repeat; `total` is then fp32 (fp64)."""
    if isinstance(at, slice):
        total[at] += part
    else:
        total.index_add_(0, at, part.to(total.dtype))
