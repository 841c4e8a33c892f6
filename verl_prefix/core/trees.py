"""Rows -> trees: tokens that rows have in common before their cuts are computed once.

    row 0   [ question | answer ]
    row 1   [ question | call ]
    row 2   [ question | call, result | next call ]
    row 3   [ question | other call, result | next call ]

    strand 0 [ question ]              -> row 0 [ answer ]
      strand 1 [ call, result ]        -> row 2 [ next call ]      row 1 lies in strand 1, and has no suffix
      strand 2 [ other call, result ]  -> row 3 [ next call ]

A row's cuts follow from the row itself, as ends of messages do, never from the rows beside it. So rows that agree in
a few tokens by chance do not share them. Where one row is cut and another is not, each computes what follows. Rows
that leave one fork are compared up to each one's next cut, or its end. A run that ends at a cut is a strand, and a
shorter run with which it begins lies in it. A row's last run opens no strand: what nobody goes on from is a suffix. A
strand and the only strand that follows it are joined: the growing prompts of a session are one strand, and each suffix
reads a part of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import torch

from verl_prefix.core.groups import Fork, Group, Strand, check_prompts, rows_by_key

# A message that ends within so many tokens of a prompt's end is the last message: a generation prompt follows it.
GENERATION_PROMPT = 16


def cuts_at(ends: Sequence[int], prompt_len: int, shown: int = 0) -> list[int]:
    """Where a row is cut: one token before each end, as a prefix ends before the last prompt token.

    The end of the prompt counts as an end, too, unless another end lies just before it. Between the two ends is then a
    generation prompt. In the next turn's history it may look different, and it is short: it is computed with the
    response.

    Args:
        ends: numbers of the row's first tokens after which other rows may continue differently.
        shown: number of the row's first tokens up to its last image, which are no generation prompt.
    """
    cuts = [end - 1 for end in ends]
    if not any(max(prompt_len - GENERATION_PROMPT, shown) <= end <= prompt_len for end in ends):
        cuts.append(prompt_len - 1)
    return cuts


def group_trees(
    tokens: torch.Tensor, offsets: Sequence[int], prompt_lens: Sequence[int], cuts: Sequence[Sequence[int]]
) -> list[Group]:
    """Groups rows that share what lies before their cuts.

    Rows share the n tokens before a cut only if token n is equal too, since the output of token n - 1 predicts it. So
    where rows may first differ in token d, the cut is at d - 1.

    Args:
        tokens: [N] int64 in host memory, all rows one after the other. What else must agree (positions, pixels) is
            mixed into them.
        offsets: first token of each row, and the end.
        prompt_lens: tokens of each row's prompt, at least 1.
        cuts: of each row, in any order; cuts outside of [1, row length - 2] are left out.

    Returns:
        groups in order of their first rows. A row without response tokens is a group of its own.

    Raises:
        ValueError: a prompt is empty.
        RuntimeError: two different prefixes have the same hash.
    """
    check_prompts(prompt_lens)
    lens = [b - a for a, b in pairwise(offsets)]
    live = [row for row, length in enumerate(lens) if length > prompt_lens[row]]
    # Of each row: its cuts, and its end. The last token is never computed: nothing reads its output.
    ends = {row: [*sorted({n for n in cuts[row] if 0 < n < lens[row] - 1}), lens[row] - 1] for row in live}
    hashes = Hashes(tokens, offsets)
    strands: list[Strand] = []
    forks: dict[int, Fork] = {}
    rows_at = {Fork(-1, 0): live}  # by the fork that they have reached
    for depth in range(max(map(len, ends.values()), default=0)):
        going_on = [row for rows in rows_at.values() for row in rows]
        hash_of = dict(zip(going_on, hashes.of(going_on, [ends[row][depth] for row in going_on]).tolist(), strict=True))
        following: dict[Fork, list[int]] = {}
        for fork, rows in rows_at.items():
            branches = _branches({row: (ends[row][depth], len(ends[row]) == depth + 1) for row in rows}, hash_of)
            for branch, reached_fork in _follow(branches, fork, strands, hashes):
                if branch.is_last:
                    forks |= dict.fromkeys(branch.rows, reached_fork)
                else:
                    following.setdefault(reached_fork, []).extend(branch.rows)
        rows_at = following
    return _groups(*_chained(strands, forks), lens, [n - 1 for n in prompt_lens])


class _Branch(NamedTuple):
    """Rows that leave a fork with the same tokens, as far as their next cut or their end.

    Attributes:
        end: number of the rows' tokens up to there.
        is_last: whether the rows end there.
        hash: of their first `end` + 1 tokens.
    """

    end: int
    is_last: bool
    hash: int
    rows: list[int]


def _branches(ends: Mapping[int, tuple[int, bool]], hash_of: Mapping[int, int]) -> Iterator[_Branch]:
    """Yields the branches of a fork, the longest first: so a shorter branch finds the strand that begins with its
    tokens. Of equally long branches, those of rows that go on come first.

    Args:
        ends: `end` and `is_last` of each row that leaves the fork.
        hash_of: each row's hash.
    """
    alone = [_Branch(*ends[row], hash_of[row], [row]) for row in ends]
    alone.sort(key=lambda branch: (-branch.end, branch.is_last, branch.rows))
    for members in rows_by_key((branch.end, branch.is_last, branch.hash) for branch in alone).values():
        yield alone[members[0]]._replace(rows=[alone[i].rows[0] for i in members])


def _follow(
    branches: Iterable[_Branch], fork: Fork, strands: list[Strand], hashes: "Hashes"
) -> Iterator[tuple[_Branch, Fork]]:
    """Yields each branch of `fork` with the fork that its rows reach. If a strand begins with the branch's tokens, the
    rows reach a fork in that strand. If not, the branch of rows that go on is appended to `strands` as a new strand,
    and rows that end stay at `fork`: their tokens become suffixes."""
    siblings: list[int] = []  # strands that begin at this fork, each at least as long as the branches to come
    for end, equally_long in groupby(branches, lambda branch: branch.end):
        sibling_hashes = hashes.of([strands[strand].row for strand in siblings], end).tolist()
        # By the hash of their first `end` + 1 tokens; of several with the same hash the first one counts.
        strand_of = dict(zip(reversed(sibling_hashes), reversed(siblings), strict=True))
        for branch in equally_long:
            strand = strand_of.get(branch.hash)
            same_row = branch.rows[0] if strand is None else strands[strand].row
            hashes.check(branch.rows, same_row, fork.start, end)
            if strand is None and not branch.is_last:
                strand = strand_of[branch.hash] = len(strands)
                siblings.append(strand)
                strands.append(Strand(branch.rows[0], fork.start, end, fork.strand))
            yield branch, fork if strand is None else Fork(strand, end)


def _chained(strands: Sequence[Strand], forks: dict[int, Fork]) -> tuple[list[Strand], dict[int, Fork]]:
    """Joins a strand and the only strand that begins at its end. So the growing prompts of a session are one segment of
    the causal call, and no part of it copies the keys of the parts before it."""
    following: dict[int, list[int]] = {}
    for number, strand in enumerate(strands):
        if strand.parent >= 0 and strand.start == strands[strand.parent].end:
            following.setdefault(strand.parent, []).append(number)
    numbers, joined = {-1: -1}, list[Strand]()  # new numbers of strands by the old ones; parents come first
    for number, strand in enumerate(strands):
        if following.get(strand.parent) == [number]:
            chain = numbers[number] = numbers[strand.parent]
            joined[chain] = joined[chain]._replace(row=strand.row, end=strand.end)
        else:
            numbers[number] = len(joined)
            joined.append(strand._replace(parent=numbers[strand.parent]))
    return joined, {row: fork._replace(strand=numbers[fork.strand]) for row, fork in forks.items()}


class Hashes:
    """Hashes of the first tokens of rows: sums of a random number per token and position, modulo 2^64.

    Args:
        tokens: [N] int64 in host memory, all rows one after the other.
        offsets: first token of each row, and the end.
    """

    def __init__(self, tokens: torch.Tensor, offsets: Sequence[int]) -> None:
        self.tokens, self.starts = tokens, torch.tensor(offsets[:-1], dtype=torch.int64)
        lens = torch.tensor(offsets, dtype=torch.int64).diff()
        positions = torch.arange(len(tokens)) - self.starts.repeat_interleave(lens)
        values = mix(tokens) * (mix(positions) | 1)
        self.sums = torch.nn.functional.pad((values ^ _shifted(values, 32)).cumsum(0), (1, 0))

    def of(self, rows: Sequence[int], ends: Sequence[int] | int) -> torch.Tensor:
        """[n] int64: hashes of the first `end` + 1 tokens of each of n rows."""
        starts = self.starts[torch.tensor(rows, dtype=torch.int64)]
        return self.sums[starts + torch.as_tensor(ends, dtype=torch.int64) + 1] - self.sums[starts]

    def check(self, rows: Sequence[int], other: int, start: int, end: int) -> None:
        """Compares tokens [start, end] of `rows` with those of row `other`, whose hash they have.

        Raises:
            RuntimeError: they differ.
        """
        expected = self._between(other, start, end)
        if not all(row == other or torch.equal(self._between(row, start, end), expected) for row in rows):
            raise RuntimeError(
                f"rows {sorted({*rows, other})} have the same 64-bit hash of their first {end + 1} tokens, and differ "
                "in them; leave one of them out, and report this"
            )

    def _between(self, row: int, start: int, end: int) -> torch.Tensor:
        first = int(self.starts[row])
        return self.tokens[first + start : first + end + 1]


def mix(x: torch.Tensor) -> torch.Tensor:
    """A hash of each int64 value, by the finaliser of splitmix64: different values have different hashes."""
    x = x - 0x61C8864680B583EB
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts int64 values right, and zeros in from the left; torch's own shift repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix_rows(tokens: torch.Tensor, offsets: Sequence[int], values: Sequence[int]) -> torch.Tensor:
    """[N] int64: tokens mixed with their row's value, so that rows of different values do not share."""
    lens = torch.tensor(offsets, dtype=torch.int64).diff()
    return mix(tokens) ^ torch.tensor(values, dtype=torch.int64).repeat_interleave(lens)


_WITHIN, _WITH_SUFFIX, _STRAND = range(3)  # kinds of what follows a strand: a row without a suffix, with one, a strand


def _groups(
    strands: Sequence[Strand], forks: dict[int, Fork], lens: Sequence[int], first_outputs: Sequence[int]
) -> list[Group]:
    """Makes a group of each strand without a parent and all after it, depth first, and of each other row."""
    # What follows a strand: (first token, kind, number of the row or strand).
    below: dict[int, list[tuple[int, int, int]]] = {}
    for row, fork in forks.items():
        below.setdefault(fork.strand, []).append(
            (fork.start, _WITH_SUFFIX if fork.start < lens[row] - 1 else _WITHIN, row)
        )
    for number, strand in enumerate(strands):
        below.setdefault(strand.parent, []).append((strand.start, _STRAND, number))
    groups = []
    for _, kind, item in below.get(-1, ()):
        order: list[int] = []
        rows: list[int] = []
        todo = [(0, kind, item)]
        while todo:
            _, kind, item = todo.pop()
            if kind == _STRAND:
                order.append(item)
                todo += sorted(below.get(item, ()), reverse=True)
            else:
                rows.append(item)
        numbers = {-1: -1} | {strand: number for number, strand in enumerate(order)}
        groups.append(
            Group(
                rows=tuple(rows),
                row_ends=tuple(lens[row] - 1 for row in rows),
                strands=tuple(strands[i]._replace(parent=numbers[strands[i].parent]) for i in order),
                forks=tuple(forks[row]._replace(strand=numbers[forks[row].strand]) for row in rows),
                first_outputs=tuple(first_outputs[row] for row in rows),
            )
        )
    groups += [Group.of_prompt((row,), first, (0,)) for row, first in enumerate(first_outputs) if row not in forks]
    return sorted(groups, key=lambda group: min(group.rows))
