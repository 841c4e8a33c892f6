"""Rows -> groups: rollouts whose prompts are the same, token for token, position for position and pixel for pixel.

A row alone in its group is cut into prefix and suffix as well, so that what a row of one prompt computes does not
depend on how many rows share its prefix (README.md says how far). `planning` decides which groups run together.
"""

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

RowKey = TypeVar("RowKey", bound=Hashable)


class Fork(NamedTuple):
    """Where a row leaves the strands of its group, or where one strand leaves another.

    Attributes:
        strand: index of the strand that is left; -1: none, since no token comes before.
        start: number of tokens before the fork, all of which strands have. What leaves begins after them.
    """

    strand: int
    start: int


class Strand(NamedTuple):
    """A run of tokens that is computed once, for all rows that share it and every token before it.

    Attributes:
        row: a row that has the strand.
        start, end: the strand's tokens are this row's tokens start to end.
        parent: index of the strand that holds token `start - 1`; -1 where `start` is 0.
    """

    row: int
    start: int
    end: int
    parent: int = -1

    @property
    def fork(self) -> Fork:
        """Where it leaves its parent."""
        return Fork(self.parent, self.start)

    def place(self, offsets: Sequence[int]) -> int:
        """The place in the batch of the strand's first token. It names the strand in all packed rows, so a nested pass
        has its outer strands with the same `row` as the phase A around it: else `PrefixSource.paths` raises KeyError.

        Args:
            offsets: first token of each row in the batch's flat values.
        """
        return int(offsets[self.row]) + self.start


@dataclass(frozen=True)
class Group:
    """Rows of one batch that share tokens: a tree of strands, with the rows' suffixes as its leaves.

    `of_prompt` makes a group of one prompt, which has one strand. Deeper trees come from `trees`, with their rows depth
    first. The rows of an agent's session, one for each turn, are such a tree. A row without a suffix has an empty
    response, or in deeper trees lies in strands; then the next row that has one begins with the same tokens.

    A row's fork is where the strands of this group end for it. So a row has other forks in other groups of a plan. For
    example, a row shares its first 10 tokens. A phase A computes 6 of them, and a nested pass the other 4. The row's
    fork is at 6 in the group of phase A, and at 10 in the group of the nested pass.

    Attributes:
        rows: numbers of the rows in the batch.
        row_ends: how many of each row's first tokens are computed: all but the last one, whose output nobody reads. A
            row has the same end in all groups of a plan (`Plan.with_last_tokens` adds the last token).
        strands: each stands after its parent; none where no token comes before the suffixes. Each strand that this pass
            computes ends where some row's suffix or another strand begins.
        forks: of each row, where its suffix begins.
        first_outputs: of each row, the index of its last prompt token: the first token whose output the row reads.
        num_outer: how many of the first strands phases A around this pass have computed: all of them in a wave.
    """

    rows: tuple[int, ...]
    row_ends: tuple[int, ...]
    strands: tuple[Strand, ...]
    forks: tuple[Fork, ...]
    first_outputs: tuple[int, ...]
    num_outer: int = 0

    @classmethod
    def of_prompt(cls, rows: tuple[int, ...], prefix_len: int, suffix_lens: tuple[int, ...]) -> "Group":
        """The group of rows that share one prompt: their first `prefix_len` tokens, or nothing where that is 0."""
        strands = (Strand(rows[0], 0, prefix_len),) if prefix_len else ()
        forks = (Fork(len(strands) - 1, prefix_len),) * len(rows)
        return cls(rows, tuple(prefix_len + n for n in suffix_lens), strands, forks, (prefix_len,) * len(rows))

    @functools.cached_property
    def suffix_lens(self) -> tuple[int, ...]:
        """Number of tokens of each row after its fork."""
        return tuple(end - fork.start for end, fork in zip(self.row_ends, self.forks, strict=True))

    @functools.cached_property
    def num_own_strand_tokens(self) -> int:
        """Number of tokens of the group's own strands, without the outer ones: those that this pass computes. In a
        group of one prompt it is P, and 0 in its waves."""
        return sum(strand.end - strand.start for strand in self.strands[self.num_outer :])

    @property
    def num_outer_tokens(self) -> int:
        """Number of tokens of the outer strands: the first `num_outer`."""
        return sum(strand.end - strand.start for strand in self.strands[: self.num_outer])

    @property
    def is_shared(self) -> bool:
        """Whether several rows, with responses or without, share tokens that this pass computes."""
        return len(self.rows) > 1 and self.num_own_strand_tokens > 0

    @property
    def output_lens(self) -> tuple[int, ...]:
        """Number of outputs of each row: one for each response token; one more after `Plan.with_last_tokens`."""
        return tuple(end - first for end, first in zip(self.row_ends, self.first_outputs, strict=True))

    @property
    def reads_strands(self) -> bool:
        """Whether some row reads outputs of tokens of the group's own strands."""
        pairs = zip(self.forks, self.first_outputs, strict=True)
        return any(fork.start > first and fork.strand >= self.num_outer for fork, first in pairs)

    @property
    def num_suffix_tokens(self) -> int:
        """Number of tokens after forks. A phase A computes none of them. Nested passes compute fewer, if some of them
        are strands there."""
        return sum(self.suffix_lens)

    @property
    def num_physical_tokens(self) -> int:
        """Number of tokens that are computed. Strands count once."""
        return self.num_own_strand_tokens + self.num_suffix_tokens

    @property
    def num_logical_tokens(self) -> int:
        """Number of tokens without sharing: every row's suffix and all tokens before it."""
        return sum(self.row_ends)

    def strands_before(self, fork: Fork) -> Iterator[tuple[int, int, int]]:
        """Yields (strand, start, end) for each strand before a row's fork, the last strand first: the row reads its
        tokens start to end of that strand."""
        number, end = fork
        while number >= 0:
            strand = self.strands[number]
            yield number, strand.start, end
            number, end = strand.fork


def group_by_key(keys: Iterable[Hashable], prompt_lens: Sequence[int], response_lens: Sequence[int]) -> list[Group]:
    """Groups the rows of a batch that have the same key, in order of their first rows.

    Args:
        keys: of each row; rows with equal keys share a prompt. A key stands for the prompt's tokens, and for its
            positions, pixels or uid where tokens do not decide.
        prompt_lens, response_lens: tokens of each row's prompt, at least one, and of its response.

    Raises:
        ValueError: there are not as many keys, prompts and responses, a prompt is empty, or prompts of one key have
            other lengths.
    """
    check_prompts(prompt_lens)
    by_key, groups = rows_by_key(keys), []
    if (num_keys := sum(map(len, by_key.values()))) != len(prompt_lens):
        raise ValueError(f"{num_keys} keys for {len(prompt_lens)} rows; pass one for each row")
    if len(response_lens) != len(prompt_lens):
        raise ValueError(f"{len(response_lens)} response_lens for {len(prompt_lens)} rows; pass one for each row")
    for rows in by_key.values():
        if len(lens := {prompt_lens[row] for row in rows}) > 1:
            raise ValueError(f"rows {rows} have one key, and prompts of {sorted(lens)} tokens")
        groups.append(Group.of_prompt(tuple(rows), lens.pop() - 1, tuple(response_lens[row] for row in rows)))
    return groups


def check_prompts(prompt_lens: Sequence[int]) -> None:
    """Raises ValueError where a prompt is empty."""
    if 0 in prompt_lens:
        raise ValueError(f"row {prompt_lens.index(0)} has an empty prompt; pass at least one prompt token per row")


def rows_by_key(keys: Iterable[RowKey]) -> dict[RowKey, list[int]]:
    """Indices of the rows with each key; keys are in the order of their first rows."""
    rows: dict[RowKey, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows
