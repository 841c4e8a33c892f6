"""Rows -> groups: rollouts whose prompts are the same, token for token, position for position and pixel for pixel.

Every row has a prefix and a suffix, also one that is alone: what a row computes does not depend on how many others
share its prefix. `waves` decides what runs together.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

RowKey = TypeVar("RowKey", bound=Hashable)


class Strand(NamedTuple):
    """Tokens [start, end) of row `row`, computed once for all rows that share them and every token before them.

    The row's `start` tokens before them end in strand `parent`; -1: there are none, and `start` is 0."""

    row: int
    start: int
    end: int
    parent: int = -1


class Fork(NamedTuple):
    """Where a row's suffix begins: after the row's first `start` tokens, which end in strand `strand` (-1: none)."""

    strand: int
    start: int


@dataclass(frozen=True)
class Group:
    """Rows of one batch that share prefixes: a tree, whose `strands` are computed once, and whose leaves are suffixes.

    A group of one prompt is a tree of one strand; its `strands`, `forks` and `first_outputs` may be left out. Rows of a
    deeper tree (`trees`) stand depth first. A row may lie wholly in strands. Its suffix is then empty, and the next row
    that has a suffix begins with its tokens.

    Attributes:
        rows: row indices of the batch.
        prefix_len: P, tokens of all strands; 0: nothing to share.
        suffix_lens: S per row.
        strands: parents first.
        forks: one per row.
        first_outputs: per row, the index of its last prompt token; the row reads outputs from that token on.
    """

    rows: tuple[int, ...]
    prefix_len: int
    suffix_lens: tuple[int, ...]
    strands: tuple[Strand, ...] = ()
    forks: tuple[Fork, ...] = ()
    first_outputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.forks:
            return
        one = (Strand(self.rows[0], 0, self.prefix_len),) if self.prefix_len else ()
        object.__setattr__(self, "strands", one)
        object.__setattr__(self, "forks", (Fork(len(one) - 1, self.prefix_len),) * len(self.rows))
        object.__setattr__(self, "first_outputs", (self.prefix_len,) * len(self.rows))

    @property
    def is_shared(self) -> bool:
        """True where a strand is computed once for several rows."""
        return len(self.rows) > 1 and self.prefix_len > 0

    @property
    def output_lens(self) -> tuple[int, ...]:
        """Outputs that each row reads, one per response token; 0 for an empty response: nothing to compute."""
        columns = zip(self.forks, self.suffix_lens, self.first_outputs, strict=True)
        return tuple(fork.start + n - first for fork, n, first in columns)

    @property
    def num_strand_outputs(self) -> int:
        """Number of strand tokens whose outputs rows read; a token counts once."""
        read: dict[int, set[int]] = {}
        for fork, first in zip(self.forks, self.first_outputs, strict=True):
            for strand, start, end in self.path(fork) if fork.start > first else ():
                read.setdefault(strand, set()).update(range(max(start, first), end))
        return sum(map(len, read.values()))

    @property
    def num_suffix_tokens(self) -> int:
        return sum(self.suffix_lens)

    @property
    def num_physical_tokens(self) -> int:
        """Number of tokens that are computed; strands count once."""
        return self.prefix_len + self.num_suffix_tokens

    @property
    def num_logical_tokens(self) -> int:
        """Number of tokens that the stock actor computes: every row's suffix and all tokens before it."""
        return sum(fork.start for fork in self.forks) + self.num_suffix_tokens

    def path(self, fork: Fork) -> Iterator[tuple[int, int, int]]:
        """Yields (strand, start, end) of each piece of a row's tokens before its fork, the last piece first."""
        strand, end = fork
        while strand >= 0:
            yield strand, self.strands[strand].start, end
            strand, end = self.strands[strand].parent, self.strands[strand].start

    def units(self) -> Iterator[tuple[int, int]]:
        """Yields ranges of `rows` that stay together: a row with a suffix, and the rows without one just before it (or
        behind the last one)."""
        start = 0
        last = max((i for i, n in enumerate(self.suffix_lens) if n), default=-1)
        for i, suffix_len in enumerate(self.suffix_lens):
            if suffix_len and i < last:
                yield start, i + 1
                start = i + 1
        yield start, len(self.rows)

    def of(self, places: Sequence[int]) -> "Group":
        """The group with all strands, and only its rows at `places`. A row without a suffix needs the rest of its
        unit."""
        return replace(
            self,
            rows=tuple(self.rows[i] for i in places),
            suffix_lens=tuple(self.suffix_lens[i] for i in places),
            forks=tuple(self.forks[i] for i in places),
            first_outputs=tuple(self.first_outputs[i] for i in places),
        )

    def pruned(self) -> "Group":
        """The group with only those tokens of strands that its rows need; each strand names one of these rows."""
        needed = [(0, -1)] * len(self.strands)  # the end, and a row that has all before it
        for row, fork, num_outputs in zip(self.rows, self.forks, self.output_lens, strict=True):
            for strand, _, end in self.path(fork) if num_outputs else ():
                if end > needed[strand][0]:
                    needed[strand] = end, row
        kept = [i for i, (end, _) in enumerate(needed) if end]
        number = {-1: -1} | {i: n for n, i in enumerate(kept)}
        strands = tuple(
            Strand(row, self.strands[i].start, end, number[self.strands[i].parent])
            for i, (end, row) in enumerate(needed)
            if end
        )
        forks = tuple(fork._replace(strand=number.get(fork.strand, -1)) for fork in self.forks)
        prefix_len = sum(strand.end - strand.start for strand in strands)
        return replace(self, prefix_len=prefix_len, strands=strands, forks=forks)

    def renumbered(self, numbers: Mapping[int, int]) -> "Group":
        """The group with other numbers for its rows."""
        strands = tuple(strand._replace(row=numbers[strand.row]) for strand in self.strands)
        return replace(self, rows=tuple(numbers[row] for row in self.rows), strands=strands)


def group_by_key(keys: Iterable[Hashable], prompt_lens: Sequence[int], response_lens: Sequence[int]) -> list[Group]:
    """Groups the rows of a batch that have the same key, in order of their first rows.

    Args:
        keys: of each row, what must be equal where rows share: its prompt's tokens, and positions, pixels or a uid
            where tokens do not decide.
        prompt_lens, response_lens: each row's numbers of tokens, at least one of a prompt.

    Raises:
        ValueError: a prompt is empty.
    """
    if 0 in prompt_lens:
        raise ValueError(f"row {prompt_lens.index(0)} has an empty prompt; pass at least one prompt token per row")
    return [
        Group(tuple(rows), prompt_lens[rows[0]] - 1, tuple(response_lens[row] for row in rows))
        for rows in rows_by_key(keys).values()
    ]


def rows_by_key(keys: Iterable[RowKey]) -> dict[RowKey, list[int]]:
    """Indices of the rows that have each key, keys in the order of their first rows."""
    rows: dict[RowKey, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows
