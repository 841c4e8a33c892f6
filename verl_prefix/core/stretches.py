"""A tree of strands as stretches, of which `nesting` decides where each is computed.

    strand 0     [ ------ 0 ------ | ----- 1 ----- ]
    row a                            leaves after stretch 0
    strand 1                       [ ----- 2 ----- ]
    rows b, c                                        leave after stretches 1 and 2

A strand has several stretches where rows leave it, or other strands begin, before its end.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from verl_prefix.core.group_parts import units_of
from verl_prefix.core.groups import Fork, Group


class Load(NamedTuple):
    """What one pass computes whole: a unit, or a stretch with all after it.

    Attributes:
        tokens: number of its tokens.
        rows: which of the group's rows, counted from 0.
    """

    tokens: int
    rows: tuple[int, ...]


@dataclass(eq=False)
class Stretch:
    """Tokens of a strand that have no fork between them.

    Attributes:
        strand: the strand's number.
        end: the stretch ends before token `end` of the strand's row.
        length: number of its tokens.
        units: each unit that leaves the strand at the stretch's end.
        next: numbers of the stretches that follow, which are higher than its own number.
        subtree: the stretch with all after it.
    """

    strand: int
    end: int
    length: int
    units: list[Load]
    next: list[int] = field(default_factory=list)
    subtree: Load = Load(0, ())


def read_stretches(group: Group) -> list[Stretch]:
    """The stretches of a group, each after the stretch that it follows. There are none if `_units_by_fork` has none, or
    if the whole tree is one stretch: then nothing can nest."""
    units = _units_by_fork(group)
    ends = [{strand.end} for strand in group.strands]  # of the stretches of each strand
    for fork in (*units, *(strand.fork for strand in group.strands)):
        if fork.strand >= 0:
            ends[fork.strand].add(fork.start)
    stretches = list[Stretch]()
    number_at: dict[Fork, int] = {}  # number of the stretch that ends at a fork
    for i, strand in enumerate(group.strands):
        before, start = number_at.get(strand.fork), strand.start
        for end in sorted(ends[i]):
            number = number_at[Fork(i, end)] = len(stretches)
            if before is not None:
                stretches[before].next.append(number)
            stretches.append(Stretch(i, end, end - start, units.get(Fork(i, end), [])))
            before, start = number, end
    for stretch in reversed(stretches):
        after = [*stretch.units, *(stretches[number].subtree for number in stretch.next)]
        rows = tuple(row for load in after for row in load.rows)
        stretch.subtree = Load(stretch.length + sum(load.tokens for load in after), rows)
    return stretches if units and len(stretches) > 1 else []


def _units_by_fork(group: Group) -> dict[Fork, list[Load]]:
    """Each unit of a group, by the fork of its suffix. There are none if in some unit a row with outputs leaves the
    path before that fork, or if a unit has no strand before it."""
    units: dict[Fork, list[Load]] = {}
    output_lens = group.output_lens
    for start, end in units_of(group):
        with_suffix = max(range(start, end), key=lambda i: group.suffix_lens[i])  # one row of a unit has one
        path = {strand: until for strand, _, until in group.strands_before(group.forks[with_suffix])}
        forks = [group.forks[i] for i in range(start, end) if output_lens[i]]
        if not path or any(fork.start > path.get(fork.strand, 0) for fork in forks):
            return {}
        unit = Load(group.suffix_lens[with_suffix], tuple(range(start, end)))
        units.setdefault(group.forks[with_suffix], []).append(unit)
    return units
