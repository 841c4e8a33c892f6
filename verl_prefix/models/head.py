"""lm_head on few tokens at a time, so that few logits exist at once."""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from verl_prefix.core.forward import HeadFn


class ChunkedHead:
    """Replaces lm_head's forward: returns what `of_head` makes of the logits of at most `chunk` tokens at a time.

    Args:
        forward: the forward that it replaces: the class's, or one that others put on the instance.
        of_head: as in `core.forward.Model.token_outputs`.
        chunk: tokens.

    Attributes:
        result: what it returned last.
    """

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], of_head: HeadFn | None, chunk: int) -> None:
        self.forward, self.of_head, self.chunk = forward, of_head, chunk
        self.result: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [1, n, hidden size] -> [1, n, k]."""
        self.result = self._of_chunks(hidden)
        return self.result

    def _of_chunks(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.of_head is None:
            return hidden.sum(-1, keepdim=True)
        which = torch.arange(hidden.shape[1], device=hidden.device)
        # Backward begins with the last chunk, whose logits are kept: they take no more memory than a recomputation's.
        first = len(which) % self.chunk or min(len(which), self.chunk)
        sizes = [first, *[self.chunk] * ((len(which) - first) // self.chunk)]
        *earlier, last = zip(which.split(sizes), hidden[0].split(sizes), strict=True)
        chunks = [*(checkpoint(self._of, *x, use_reentrant=False) for x in earlier), self._of(*last)]
        return torch.cat([x.unsqueeze(0) for x in chunks], dim=1)  # no view, which FSDP2's hooks would warn of

    def _of(self, which: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        assert self.of_head is not None
        return self.of_head(which, self.forward(hidden))
