"""Rows -> trees: tokens that rows have in common before their cuts are computed once.

    row 0   [ question | answer ]
    row 1   [ question | call ]
    row 2   [ question | call, result | next call ]
    row 3   [ question | other call, result | next call ]

    strand 0 [ question ]              -> row 0 [ answer ]
      strand 1 [ call, result ]        -> row 2 [ next call ]      row 1 lies in strand 1, and has no suffix
      strand 2 [ other call, result ]  -> row 3 [ next call ]

A row's cuts follow from the row itself, as ends of messages do, never from the rows beside it. So rows that merely
happen to agree in some tokens do not share them. Between two cuts, rows share where the tokens of one are the beginning
of the other's. A strand and the only one that follows it are joined: the growing prompts of a session are one strand,
of which each suffix reads a part.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from verl_prefix.core.groups import Fork, Group, Strand, rows_by_key

# A message that ends within this many tokens of a prompt's end is the last one: only the generation prompt follows it.
GENERATION_PROMPT = 16


def cuts_at(ends: Sequence[int], prompt_len: int, shown: int = 0) -> list[int]:
    """Where a row is cut. `ends` are numbers of its first tokens after which other rows may continue differently.

    A cut stands one token before such an end, as a prefix ends before the last prompt token. The end of the prompt is
    one, too, unless one of `ends` stands just before it: what lies between is a generation prompt, which may have
    another form in the next turn's history, and which is short enough to be computed with the response. The first
    `shown` tokens end with an image, and none of them is of a generation prompt.
    """
    cuts = [end - 1 for end in ends]
    if not any(max(prompt_len - GENERATION_PROMPT, shown) <= end <= prompt_len for end in ends):
        cuts.append(prompt_len - 1)
    return cuts


def group_trees(
    tokens: torch.Tensor, offsets: Sequence[int], prompt_lens: Sequence[int], cuts: Sequence[Sequence[int]]
) -> list[Group]:
    """Groups of rows that share what lies before their cuts.

    A cut at n leaves n tokens before it. Rows share these only if they also agree in the next token, whose log-prob the
    last of them gives. So of rows that may first differ in token d the cut is d - 1, as a prefix ends before the last
    prompt token.

    Args:
        tokens: [N] int64 in host memory, all rows one after the other; what else must agree (positions, pixels) is
            mixed into them.
        offsets: first token of each row, and the end.
        prompt_lens: tokens of each row's prompt, at least 1.
        cuts: of each row, in any order; those outside of [1, row length - 2] cut nothing off.

    Returns:
        groups in order of their first rows. A row without response tokens is a group of its own.
    """
    lens = [b - a for a, b in pairwise(offsets)]
    live = [row for row, length in enumerate(lens) if length > prompt_lens[row]]
    ends = {row: [*sorted({n for n in cuts[row] if 0 < n < lens[row] - 1}), lens[row] - 1] for row in live}
    hashes = Hashes(tokens, offsets)
    strands: list[Strand] = []
    forks: dict[int, Fork] = {}
    at = {Fork(-1, 0): live}
    for depth in range(max(map(len, ends.values()), default=0)):
        rows = [row for behind in at.values() for row in behind]
        hash_of = dict(zip(rows, hashes.of(rows, [ends[row][depth] for row in rows]).tolist(), strict=True))
        following: dict[Fork, list[int]] = {}
        for fork, behind in at.items():
            begun: list[int] = []  # strands that begin behind this fork
            known: dict[int, int] = {}  # of those, by the hash of their first `known_end` + 1 tokens
            known_end = -1
            # The longest pieces come first, of equal ones those that go on. A shorter one finds the strand that begins
            # with it.
            pieces = sorted((-ends[row][depth], len(ends[row]) == depth + 1, row) for row in behind)
            for (end, is_last, hashed), places in rows_by_key(
                (-n, last, hash_of[row]) for n, last, row in pieces
            ).items():
                same = [pieces[place][2] for place in places]
                if end != known_end:
                    found = hashes.of([strands[strand].row for strand in begun], end).tolist()
                    known, known_end = dict(zip(reversed(found), reversed(begun), strict=True)), end
                strand = known.get(hashed)
                hashes.check(same, same[0] if strand is None else strands[strand].row, fork.start, end)
                if strand is None and is_last:
                    forks |= dict.fromkeys(same, fork)
                    continue
                if strand is None:
                    strand = known[hashed] = len(strands)
                    begun.append(strand)
                    strands.append(Strand(same[0], fork.start, end, fork.strand))
                if is_last:
                    forks |= dict.fromkeys(same, Fork(strand, end))
                else:
                    following.setdefault(Fork(strand, end), []).extend(same)
        at = following
    return _groups(*_chained(strands, forks), lens, [n - 1 for n in prompt_lens])


def _chained(strands: Sequence[Strand], forks: dict[int, Fork]) -> tuple[list[Strand], dict[int, Fork]]:
    """Joins a strand and the only one that begins at its end. So the growing prompts of a session are one causal
    segment, no part of which copies the keys of the parts before it."""
    following: dict[int, list[int]] = {}
    for number, strand in enumerate(strands):
        if strand.parent >= 0 and strand.start == strands[strand.parent].end:
            following.setdefault(strand.parent, []).append(number)
    place, joined = {-1: -1}, list[Strand]()  # parents come first
    for number, strand in enumerate(strands):
        if following.get(strand.parent) == [number]:
            place[number] = place[strand.parent]
            joined[place[number]] = joined[place[number]]._replace(row=strand.row, end=strand.end)
        else:
            place[number] = len(joined)
            joined.append(strand._replace(parent=place[strand.parent]))
    return joined, {row: fork._replace(strand=place[fork.strand]) for row, fork in forks.items()}


class Hashes:
    """Hashes of the first tokens of rows: sums of a random number per token and place, modulo 2^64."""

    def __init__(self, tokens: torch.Tensor, offsets: Sequence[int]) -> None:
        self.tokens, self.starts = tokens, torch.tensor(offsets[:-1], dtype=torch.int64)
        lens = torch.tensor(offsets, dtype=torch.int64).diff()
        places = torch.arange(len(tokens)) - self.starts.repeat_interleave(lens)
        values = mix(tokens) * (mix(places) | 1)
        self.sums = torch.nn.functional.pad((values ^ (values >> 32)).cumsum(0), (1, 0))

    def of(self, rows: Sequence[int], ends: Sequence[int] | int) -> torch.Tensor:
        """[n] int64, of the first `end` + 1 tokens of each of n rows."""
        starts = self.starts[torch.tensor(rows, dtype=torch.int64)]
        return self.sums[starts + torch.as_tensor(ends, dtype=torch.int64) + 1] - self.sums[starts]

    def check(self, rows: Sequence[int], other: int, start: int, end: int) -> None:
        """Compares tokens [start, end] of `rows` with those of row `other`, whose hash they have.

        Raises:
            RuntimeError: they differ.
        """
        expected = self._between(other, start, end)
        if not all(row == other or torch.equal(self._between(row, start, end), expected) for row in rows):
            raise RuntimeError("two different prefixes have the same 64-bit hash; shuffle the rows and report this")

    def _between(self, row: int, start: int, end: int) -> torch.Tensor:
        first = int(self.starts[row])
        return self.tokens[first + start : first + end + 1]


def mix(x: torch.Tensor) -> torch.Tensor:
    """Well spread int64 values (as by the finaliser of splitmix64)."""
    x = x - 0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)


def mix_rows(tokens: torch.Tensor, offsets: Sequence[int], values: Sequence[int]) -> torch.Tensor:
    """[N] int64: tokens mixed with their row's value, so that rows of different values do not share."""
    lens = torch.tensor(offsets, dtype=torch.int64).diff()
    return mix(tokens) ^ torch.tensor(values, dtype=torch.int64).repeat_interleave(lens)


def _groups(
    strands: Sequence[Strand], forks: dict[int, Fork], lens: Sequence[int], first_outputs: Sequence[int]
) -> list[Group]:
    """Makes one group per strand that nothing stands before, depth first; other rows are groups of their own."""
    # What follows a strand: (token, kind, number), where kind is 0 for a row without a suffix, 1 with one, 2 a strand.
    below: dict[int, list[tuple[int, int, int]]] = {}
    for row, fork in forks.items():
        below.setdefault(fork.strand, []).append((fork.start, int(fork.start < lens[row] - 1), row))
    for number, strand in enumerate(strands):
        below.setdefault(strand.parent, []).append((strand.start, 2, number))
    groups = []
    for _, kind, item in below.get(-1, ()):
        order: list[int] = []
        rows: list[int] = []
        todo = [(0, kind, item)]
        while todo:
            _, kind, item = todo.pop()
            if kind == 2:
                order.append(item)
                todo += sorted(below.get(item, ()), reverse=True)
            else:
                rows.append(item)
        numbers = {-1: -1} | {strand: place for place, strand in enumerate(order)}
        kept = tuple(strands[i]._replace(parent=numbers[strands[i].parent]) for i in order)
        own = tuple(forks[row]._replace(strand=numbers[forks[row].strand]) for row in rows)
        suffix_lens = tuple(lens[row] - 1 - fork.start for row, fork in zip(rows, own, strict=True))
        prefix_len = sum(strand.end - strand.start for strand in kept)
        first = tuple(first_outputs[row] for row in rows)
        groups.append(Group(tuple(rows), prefix_len, suffix_lens, kept, own, first))
    groups += [Group((row,), first, (0,)) for row, first in enumerate(first_outputs) if row not in forks]
    return sorted(groups, key=lambda group: min(group.rows))
