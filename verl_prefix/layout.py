"""Groups -> one packed row: every prefix first, all suffix blocks after them; positions; and back to rows.

    row:     [ P of group 0 | P of group 1 | ... | S S S of group 0 | S S of group 1 | ... ]
    causal:  every segment (prefix or suffix) reads itself
    cross:   the suffix block of a group reads the group's prefix

With this order the cross call's inputs are plain slices. Nothing is copied but token ids: everything is an index into
the batch's flat values, so positions continue the original ones and outputs scatter back to where they belong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from verl_prefix.groups import Group
from verl_prefix.kernels import Spans


@dataclass(frozen=True)
class Layout:
    """One packed row of T tokens, of which the first `num_prefix` are prefixes.

    `index` [T] (int64) says which token of the batch's flat values each one is. `causal` covers all T tokens. `cross`
    pairs suffix blocks with prefixes: its query bounds count from token `num_prefix` on, its key bounds from token
    `cross_start` of the prefixes on (0 unless a wave leaves out the first prefixes); None where nothing is shared.
    """

    index: torch.Tensor
    num_prefix: int
    causal: Spans
    cross: Spans | None
    cross_start: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.index)

    @property
    def suffix_index(self) -> torch.Tensor:
        """[T - num_prefix]: where the suffix tokens, and thus the log-probs of their successors, stand in the batch."""
        return self.index[self.num_prefix :]


def pass_order(groups: Sequence[Group]) -> list[Group]:
    """Groups to compute, those without a prefix last, so that the suffix blocks that read a prefix stay one slice."""
    return sorted((g for g in groups if g.num_suffix_tokens), key=lambda group: group.prefix_len == 0)


def build_layout(groups: Sequence[Group], offsets: Sequence[int], prefix_starts: Sequence[int] | None = None) -> Layout:
    """The packed row of `groups`, which must be in `pass_order`.

    Args:
        offsets: first token of each row in the batch's flat values (nested `offsets()`).
        prefix_starts: None for a row with its prefixes. For a wave: where each group's prefix starts in the prefix
            row of phase A; the wave then has suffixes only and reads the prefix cache. Neighbours in the wave must be
            neighbours there.
    """
    segments: list[tuple[int, int]] = []
    if prefix_starts is None:
        segments = [(int(offsets[g.rows[0]]), g.prefix_len) for g in groups if g.prefix_len]
    num_prefix = sum(length for _, length in segments)
    segments += [
        (int(offsets[row]) + group.prefix_len, suffix_len)
        for group in groups
        for row, suffix_len in zip(group.rows, group.suffix_lens, strict=True)
        if suffix_len
    ]
    bounds = (0, *accumulate(length for _, length in segments))
    cross, cross_start = None, 0
    sharing = [i for i, group in enumerate(groups) if group.prefix_len and group.num_suffix_tokens]
    if sharing:
        cross_q = (0, *accumulate(groups[i].num_suffix_tokens for i in sharing))
        cross_k = (0, *accumulate(groups[i].prefix_len for i in sharing))
        rows = (n for i in sharing for n in groups[i].suffix_lens if n)
        cross = Spans(cross_q, cross_k, q_parts=(0, *accumulate(rows)))
        if prefix_starts is not None:
            cross_start = prefix_starts[sharing[0]]
            assert [prefix_starts[i] - cross_start for i in sharing] == list(cross_k[:-1]), "gap between prefixes"
    return Layout(_index(segments), num_prefix, Spans(bounds, bounds), cross, cross_start)


def prefix_layout(groups: Sequence[Group], offsets: Sequence[int]) -> Layout:
    """Phase A: the prefixes of `groups`, in this order, and nothing else; at least one group has a prefix."""
    segments = [(int(offsets[group.rows[0]]), group.prefix_len) for group in groups if group.prefix_len]
    bounds = (0, *accumulate(length for _, length in segments))
    return Layout(_index(segments), bounds[-1], Spans(bounds, bounds), None)


def _index(segments: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([torch.arange(start, start + length) for start, length in segments])


def dummy_layout() -> Layout:
    """One token of the batch that reads itself: keeps a rank's collectives in step where it has nothing to compute."""
    return Layout(torch.zeros(1, dtype=torch.int64), 0, Spans((0, 1), (0, 1)), None)
