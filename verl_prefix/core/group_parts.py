"""Parts of groups: some of a group's rows, and the strands that these rows read."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise

from verl_prefix.core.groups import Group, Strand


def units_of(group: Group) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each unit: neighbours in `group.rows` that are never cut apart. A unit is a row with a
    suffix, and the rows without one right before it. Rows after the last suffix belong to the last unit."""
    ends = [i + 1 for i, suffix_len in enumerate(group.suffix_lens) if suffix_len]
    yield from pairwise([0, *ends[:-1], len(group.rows)])


def with_rows(group: Group, members: Sequence[int]) -> Group:
    """The group with all its strands and some of its rows.

    Args:
        members: which of `group.rows`, counted from 0, by whole units.
    """
    return replace(
        group,
        rows=tuple(group.rows[i] for i in members),
        row_ends=tuple(group.row_ends[i] for i in members),
        forks=tuple(group.forks[i] for i in members),
        first_outputs=tuple(group.first_outputs[i] for i in members),
    )


def pruned(group: Group) -> Group:
    """The group without the strand tokens that none of its rows reads, as after `with_rows`. Outer strands that some
    row reads stay whole, as the passes around compute them."""
    # Of each strand: where the tokens end that rows read, and the first row that reads so far.
    read_until = [(0, -1)] * len(group.strands)
    for row, fork, num_outputs in zip(group.rows, group.forks, group.output_lens, strict=True):
        for number, _, end in group.strands_before(fork) if num_outputs else ():
            if end > read_until[number][0]:
                read_until[number] = end, row
    numbers, strands = {-1: -1}, list[Strand]()  # new numbers of strands by the old ones; parents come first
    for i, (strand, (end, row)) in enumerate(zip(group.strands, read_until, strict=True)):
        if end:
            numbers[i] = len(strands)
            shorter = strand if i < group.num_outer else strand._replace(row=row, end=end)
            strands.append(shorter._replace(parent=numbers[strand.parent]))
    forks = tuple(fork._replace(strand=numbers.get(fork.strand, -1)) for fork in group.forks)
    num_outer = sum(0 <= i < group.num_outer for i in numbers)
    return replace(group, strands=tuple(strands), forks=forks, num_outer=num_outer)


def leave_out(groups: Sequence[Group], rows: Set[int]) -> tuple[list[Group], list[Group]]:
    """Splits groups into (computed, idle). Idle are the units all of whose rows are in `rows`."""
    computed, idle = list[Group](), list[Group]()
    for group in groups:
        members: dict[bool, list[int]] = {True: [], False: []}  # by whether their unit is computed
        for start, end in units_of(group):
            members[any(row not in rows for row in group.rows[start:end])] += range(start, end)
        for parts, chosen in ((computed, members[True]), (idle, members[False])):
            if chosen:
                parts.append(group if len(chosen) == len(group.rows) else pruned(with_rows(group, chosen)))
    return computed, idle


def renumbered(group: Group, numbers: Mapping[int, int]) -> Group:
    """The group with other numbers for its rows."""
    strands = tuple(strand._replace(row=numbers[strand.row]) for strand in group.strands)
    return replace(group, rows=tuple(numbers[row] for row in group.rows), strands=strands)
