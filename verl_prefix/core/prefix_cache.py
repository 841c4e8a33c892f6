"""Prefix cache (detached K/V that suffixes read) and grad cache (gradients that suffixes send back), with a lifetime.

Schedule-level shared-prefix reuse: phase A fills the cache, phase B reads it and adds to the grad cache, phase C runs
one prefix backward on what was accumulated. Leaving the context frees all of it, also after an exception.
"""

import torch


class PrefixCache:
    """Keys and values of a prefix row, per attention layer: [P, K, D] each.

    The grad cache is fp32 whatever the model's dtype is (fp64 for fp64), since every wave adds to it.
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._leaf: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._grad: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> "PrefixCache":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for store in (self._live, self._leaf, self._grad):
            store.clear()

    def capture(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Phase A. Recomputation under gradient checkpointing calls it again, which must change nothing."""
        if layer in self._leaf:
            return
        self._leaf[layer] = k.detach(), v.detach()
        self._live[layer] = k, v

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
        """Phase C: one backward through the prefix graph, from every layer's live K/V at once.

        Args:
            root: the FSDP root's output of phase A. It enters with a zero gradient: FSDP2 unshards parameters for
                backward only along a path from the root's output.
        """
        pairs = [(root, torch.zeros_like(root))]
        for layer, grads in self._grad.items():
            pairs += [(x, grad.to(x.dtype)) for x, grad in zip(self._live[layer], grads, strict=True)]
        self._live.clear()
        self._grad.clear()
        # LoRA on other projections leaves keys or values of the first layers without a graph.
        roots, root_grads = zip(*((x, grad) for x, grad in pairs if x.requires_grad), strict=True)
        torch.autograd.backward(roots, root_grads)


def add_at(total: torch.Tensor, tokens: slice | torch.Tensor, part: torch.Tensor) -> None:
    """total[tokens] += part, where int64 indices may repeat."""
    if isinstance(tokens, slice):
        total[tokens] += part
    else:
        wide = total.to(torch.promote_types(total.dtype, torch.float32))
        total.copy_(wide.index_add(0, tokens, part.to(wide.dtype)))
