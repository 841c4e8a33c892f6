"""What the core reads of its indices, by count alone: those of fake tensors have no values.

How many tokens go through lm_head, are read and sent follows from lengths; which ones they are costs nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from verl_prefix.core import forward
from verl_prefix.core.forward import _OUTPUTS, PackedForward
from verl_prefix.core.layout import Layout
from verl_prefix.core.prefix_cache import PrefixCache, ReadPrefix
from verl_prefix.core.sequence_parallel import Shards


class CountedForward(PackedForward):
    """The forward, which on fake tensors knows by count alone what rows read of strands."""

    def _read(self, outputs: torch.Tensor, layout: Layout, cache: PrefixCache | None) -> torch.Tensor:
        if layout.reads is None or not isinstance(layout.places, FakeTensor):
            return super()._read(outputs, layout, cache)
        total, own = len(layout.reads.tokens), outputs.shape[0]
        left = total - own if cache is not None else 0
        own_read = outputs.index_select(0, outputs.new_empty(total - left, dtype=torch.int64))
        if cache is None or not left:
            return own_read
        (of_strands,) = cache.read(_OUTPUTS)
        at = outputs.new_empty(left, dtype=torch.int64)
        read = ReadPrefix.apply(of_strands, at, cache, _OUTPUTS)
        return torch.cat([own_read, read])


class CountedShards(Shards):
    """Shards of a row, which on fake tensors know by count alone which tokens of a rank go through lm_head."""

    def head_tokens(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(-(-len(tokens) // self.size)), torch.arange(len(tokens))


_head_tokens: Any = vars(Layout)["head_tokens"].func


def _counted_head_tokens(layout: Layout) -> torch.Tensor:
    """`Layout.head_tokens`, of fake tokens by their number."""
    if layout.reads is None or not isinstance(layout.places, FakeTensor):
        whole: torch.Tensor = _head_tokens(layout)
        return whole
    kept = sum(group.num_strand_outputs for group in layout.groups) if layout.num_strand_tokens else 0
    if layout.num_tokens > layout.num_strand_tokens:
        pairs = (pair for g in layout.groups for pair in zip(g.suffix_lens, g.output_lens, strict=True))
        kept += sum(min(pair) for pair in pairs)
    return torch.arange(kept)


@contextlib.contextmanager
def known_by_count() -> Iterator[None]:
    """Context in which a `CountedForward` runs: its layouts and shards are counted too."""
    with (
        mock.patch.object(Layout, "head_tokens", property(_counted_head_tokens)),
        mock.patch.object(forward, "Shards", CountedShards),
    ):
        yield
