"""What the core reads of its indices, by count alone: those of fake tensors have no values.

How many tokens go through lm_head, are read and sent follows from lengths; which ones they are costs nothing.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from verl_prefix.core import forward
from verl_prefix.core.forward import _OUTPUTS, PackedForward
from verl_prefix.core.groups import Group
from verl_prefix.core.layout import Layout
from verl_prefix.core.prefix_cache import PrefixCache, ReadPrefix
from verl_prefix.core.sequence_parallel import Shards


class CountedForward(PackedForward):
    """The forward, which on fake tensors knows by count alone what rows read of strands."""

    def _gather_outputs(self, outputs: torch.Tensor, layout: Layout, caches: Sequence[PrefixCache]) -> torch.Tensor:
        if layout.output_index is None or not isinstance(layout.places, FakeTensor):
            return super()._gather_outputs(outputs, layout, caches)
        total, left = (
            len(layout.output_index.row_tokens),
            sum(map(functools.partial(_read_around, layout), layout.groups)),
        )
        own_read = outputs.index_select(0, outputs.new_empty(total - left, dtype=torch.int64))
        if not left:
            return own_read
        levels = zip(layout.levels, caches, strict=False)  # of several, the innermost stands for all
        cache = [cache for level, cache in levels if level.output_index is not None][-1]
        (of_strands,) = cache.read(_OUTPUTS)
        at = outputs.new_empty(left, dtype=torch.int64)
        read = ReadPrefix.apply(of_strands, at, cache, _OUTPUTS)
        return torch.cat([own_read, read])


def _read_around(layout: Layout, group: Group) -> int:
    """How many outputs rows read of strands that packed rows around this one compute."""
    return sum(
        max(end - max(start, first), 0)
        for fork, first in zip(group.forks, group.first_outputs, strict=True)
        for strand, start, end in group.strands_before(fork)
        if strand < group.num_outer
    )


class CountedShards(Shards):
    """Shards of a row, which on fake tensors know by count alone which tokens of a rank go through lm_head."""

    def spread_head(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(-(-len(tokens) // self.size)), torch.arange(len(tokens))


_head_tokens: Any = vars(Layout)["head_tokens"].func


def _counted_head_tokens(layout: Layout) -> torch.Tensor:
    """`Layout.head_tokens`, of fake tokens by their number."""
    if layout.output_index is None or not isinstance(layout.places, FakeTensor):
        whole: torch.Tensor = _head_tokens(layout)
        return whole
    kept = sum(group.num_own_strand_outputs for group in layout.groups) if layout.num_strand_tokens else 0
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
