"""Which outputs rows read, and where each is computed: in a suffix, or in deeper trees also in a strand."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from verl_prefix.core.groups import Group
from verl_prefix.core.prefix_source import PrefixSource
from verl_prefix.core.runs import Path, Run, last_of, len_of, part_of, ranges


class OutputIndex(NamedTuple):
    """Where the outputs that rows read are computed: one for each response token, or fewer after `only`.

    Attributes:
        places: [n] int64, the place in the batch of each output.
        level_of: [n] int64, the level of the prefix source whose packed row computes each.
        packed_tokens: [n] int64, the token of that packed row that computes each.
    """

    places: torch.Tensor
    level_of: torch.Tensor
    packed_tokens: torch.Tensor

    def only(self, is_read: torch.Tensor, level: int) -> "OutputIndex":
        """The outputs of the batch's tokens `is_read` [N] (bool), and in any case one that `level` computes."""
        chosen, is_own = is_read[self.places], self.level_of == level
        if not (chosen & is_own).any():
            chosen[is_own.nonzero()[0]] = True
        return OutputIndex(self.places[chosen], self.level_of[chosen], self.packed_tokens[chosen])

    def tokens_at(self, level: int) -> torch.Tensor:
        """[m] int64: the tokens of the packed row of `level` that compute outputs, in ascending order, each once."""
        tokens = self.packed_tokens[self.level_of == level]
        return tokens.bincount().nonzero()[:, 0]  # as `unique`, which sorts and so takes longer


class RowReads(NamedTuple):
    """Which outputs a row reads.

    Attributes:
        place: where the first token whose output is read stands in the batch.
        num_outputs: as many neighbouring tokens are read.
        suffix_len: number of the row's tokens after its fork, which a packed row without suffixes does not compute.
        path: the row's tokens before its fork.
    """

    place: int
    num_outputs: int
    suffix_len: int
    path: Path


def index_outputs(rows: Sequence[RowReads], source: PrefixSource, has_suffixes: bool) -> OutputIndex | None:
    """Finds where the outputs that rows read are computed. A packed row without suffixes reads only outputs that it
    computes itself; None: there are none.

    Args:
        rows: all rows of a packed row, in the order of their suffixes there.
        source: of the packed row.
    """
    # Suffixes are numbered as if they followed all strands in the prefix source. So path and suffix hold all of a row's
    # tokens in one numbering, and the last of these compute its outputs. Such a number less the start of its level is
    # the token's index in its packed row.
    suffix_start = source.bounds[-1]
    places, tokens = list[Run](), list[Run]()
    for place, num_outputs, suffix_len, path in rows:
        if has_suffixes:
            whole_row = (*path, (suffix_start, suffix_len))
            suffix_start += suffix_len
            tokens += last_of(whole_row, num_outputs)
            places.append((place, num_outputs))
        else:
            num_before_fork = max(num_outputs - suffix_len, 0)
            num_own = min(num_before_fork, len_of(part_of(path, source.own_start)))
            tokens += last_of(path, num_own)
            places.append((place + num_before_fork - num_own, num_own))
    source_tokens, starts = ranges(tokens), torch.tensor(source.level_starts)
    if not len(source_tokens):
        return None
    level_of = torch.searchsorted(starts, source_tokens, right=True) - 1
    return OutputIndex(ranges(places), level_of, source_tokens - starts[level_of])


def num_own_strand_outputs(group: Group) -> int:
    """Number of tokens of the group's own strands whose outputs rows read. A token counts once."""
    read = set[tuple[int, int, int]]()  # strand, first token, end
    for fork, first in zip(group.forks, group.first_outputs, strict=True):
        if fork.start > first:
            for strand, start, end in group.strands_before(fork):
                if strand >= group.num_outer:
                    read.add((strand, max(start, first), end))
    count, counted_until = 0, dict[int, int]()
    for strand, start, end in sorted(read):
        first_new = max(start, counted_until.get(strand, 0))
        if end > first_new:
            count += end - first_new
            counted_until[strand] = end
    return count
