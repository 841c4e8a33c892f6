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
from verl_prefix.core.forward import PackedForward
from verl_prefix.core.groups import Group
from verl_prefix.core.output_index import num_own_strand_outputs
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.prefix_cache import OUTPUTS, PrefixCache, ReadPrefix
from verl_prefix.core.sequence_parallel import Shards


class CountedForward(PackedForward):
    """The forward, which on fake tensors knows by count alone what rows read of strands."""

    def gather_outputs(
        self, outputs: torch.Tensor, packed_row: PackedRow, caches: Sequence[PrefixCache]
    ) -> torch.Tensor:
        index = packed_row.output_index
        if index is None or not isinstance(packed_row.places, FakeTensor):
            return super().gather_outputs(outputs, packed_row, caches)
        total, left = (
            len(index.packed_tokens),
            sum(map(functools.partial(_read_around, packed_row), packed_row.groups)),
        )
        if total == len(outputs) and not left:
            return outputs
        own_read = outputs.index_select(0, outputs.new_empty(total - left, dtype=torch.int64))
        if not left:
            return own_read
        levels = zip(packed_row.levels, caches, strict=False)  # of several, the innermost stands for all
        cache = [cache for level, cache in levels if level.output_index is not None][-1]
        (of_strands,) = cache.read(OUTPUTS)
        at = outputs.new_empty(left, dtype=torch.int64)
        read = ReadPrefix.apply(of_strands, at, cache, OUTPUTS)
        return torch.cat([own_read, read])


def _read_around(packed_row: PackedRow, group: Group) -> int:
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


_head_tokens: Any = vars(PackedRow)["head_tokens"].func


def _counted_head_tokens(packed_row: PackedRow) -> torch.Tensor:
    """`PackedRow.head_tokens`, of fake tokens by their number."""
    if packed_row.output_index is None or not isinstance(packed_row.places, FakeTensor):
        whole: torch.Tensor = _head_tokens(packed_row)
        return whole
    kept = sum(num_own_strand_outputs(group) for group in packed_row.groups) if packed_row.num_strand_tokens else 0
    if packed_row.num_tokens > packed_row.num_strand_tokens:
        pairs = (pair for g in packed_row.groups for pair in zip(g.suffix_lens, g.output_lens, strict=True))
        kept += sum(min(pair) for pair in pairs)
    return torch.arange(kept)


@contextlib.contextmanager
def known_by_count() -> Iterator[None]:
    """Context in which a `CountedForward` runs: its packed rows and shards are counted too."""
    with (
        mock.patch.object(PackedRow, "head_tokens", property(_counted_head_tokens)),
        mock.patch.object(forward, "Shards", CountedShards),
    ):
        yield
