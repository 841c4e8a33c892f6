"""Keys that a call reads of the prefix source, and the copies of them that a sliding window needs."""

import sys
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import torch

from verl_prefix.core.runs import Path, Run, len_of, on_device, part_of, ranges, token_index


class PrefixKeys(NamedTuple):
    """Keys of a call that come from one level of the prefix source. `at`, `tokens` and `grad_at` are slices, or int64
    indices [n].

    A window copies a path's tail once for each segment that reads it. Example: 3 suffixes read the same 4-token tail.
    `tokens` has 12 entries, `copies` is ((3, 4),), and `grad_at` names the 4 tokens once. `summed` adds the 3 copies in
    fp32 first.

    Attributes:
        at: where these keys stand among the call's keys.
        tokens: the tokens of the level whose keys they are.
        grad_at: the tokens of the level to which the gradients that `summed` returns belong. A token may be there
            several times, once for each block that reads it.
        copies: (times, length) of each set of copies, in the order of `tokens`; empty: there are no copies.
        level: 0: the outermost phase A; the last level is the packed row itself.
    """

    at: slice | torch.Tensor
    tokens: slice | torch.Tensor
    grad_at: slice | torch.Tensor
    copies: tuple[tuple[int, int], ...] = ()
    level: int = 0

    def summed(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradients of keys `at` [n, K, D] -> of tokens `grad_at`; sums over copies are in fp32 (fp64)."""
        if not self.copies:
            return grad
        wide = torch.promote_types(grad.dtype, torch.float32)
        sets = zip(grad.split([times * n for times, n in self.copies]), self.copies, strict=True)
        return torch.cat([copies.unflatten(0, (times, n)).sum(0, dtype=wide) for copies, (times, n) in sets])


def keys_of_tails(
    tails: Sequence[Path], starts: Sequence[int], device: torch.device, level_starts: Sequence[int]
) -> tuple[PrefixKeys, ...]:
    """The keys of a call whose keys are [tail | own] of each segment, where a window sees only the tail of its path.

    Args:
        tails: of each segment, the end of its path; empty where the call reads no more than the segment itself.
        starts: where the keys of each segment begin among the call's keys.
        level_starts: the first token of each level of the prefix source, the packed row itself last.
    """
    placed = [(tail, start) for tail, start in zip(tails, starts, strict=False) if tail]
    prefixes = []
    for level, (first, end) in enumerate(pairwise((*level_starts, sys.maxsize))):
        at, tokens, grad_at, copies = list[Run](), list[Run](), list[Run](), list[tuple[int, int]]()
        for tail, siblings in groupby(placed, key=lambda each: each[0]):
            if part := part_of(tail, first, end):
                before, length = len_of(part_of(tail, 0, first)), len_of(part)
                of_siblings = [(start + before, length) for _, start in siblings]
                at += of_siblings
                tokens += part * len(of_siblings)
                grad_at += part
                copies.append((len(of_siblings), length))
        if at:
            index, chosen = (on_device(ranges(runs), device) for runs in (at, tokens))
            prefixes.append(PrefixKeys(index, chosen, token_index(grad_at, device), tuple(copies), level))
    return tuple(prefixes)
