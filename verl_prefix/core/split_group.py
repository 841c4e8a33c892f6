"""A group, split between a phase A and the passes that are nested in it. A strand within which phase A stops is two
strands in nested passes: an outer strand, and one of their own.

    group         strands 0 [0, 10), 1 [10, 20)                               forks at 20
    phase A       strands 0 [0, 10), 1 [10, 16)                               forks at 16
    nested pass   outer strands 0 [0, 10), 1 [10, 16); own strand 2 [16, 20)  forks at 20
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from verl_prefix.core.group_parts import pruned, with_rows
from verl_prefix.core.groups import Fork, Group, Strand


class SplitGroup:
    """Makes the groups of a phase A, and of the passes that are nested in it.

    Args:
        group: may be that of a nested pass itself; phases A around it have computed its outer strands.
        phase_a_ends: how many of each row's first tokens the phase A and those around it compute, by the row's number.
    """

    def __init__(self, group: Group, phase_a_ends: Mapping[int, int]) -> None:
        self._group = group
        # Where phase A stops in each strand: at the strand's start, if phase A computes none of the strand.
        self._ends = [
            strand.end if i < group.num_outer else max(strand.start, min(strand.end, phase_a_ends[strand.row]))
            for i, strand in enumerate(group.strands)
        ]
        # The strands up to these ends, without empty strands; and their new numbers by the old ones.
        self._strands, self._number_in_a = list[Strand](), {-1: -1}
        for i, (strand, end) in enumerate(zip(group.strands, self._ends, strict=True)):
            if end > strand.start:
                self._number_in_a[i] = len(self._strands)
                self._strands.append(strand._replace(end=end, parent=self._number_in_a[strand.parent]))

    def group_of_phase_a(self) -> Group:
        """The group of the phase A: a row's fork is where the row leaves the tokens that phase A computes."""
        group, ends = self._group, self._ends
        forks = []
        for fork in group.forks:
            before = group.strands_before(fork)
            inside = (Fork(self._number_in_a[i], min(end, ends[i])) for i, start, end in before if ends[i] > start)
            forks.append(next(inside, Fork(-1, 0)))
        return replace(group, strands=tuple(self._strands), forks=tuple(forks))

    def group_of_nested_pass(self, members: Sequence[int]) -> Group:
        """The group of a nested pass that computes some rows; `members` as in `with_rows`."""
        strands = [*self._strands]
        # By a strand's old number, the new number of what follows phase A in it. Parents have theirs before children.
        number_after_a: dict[int, int] = {}

        def number_before(fork: Fork) -> int:
            """The new number of the strand that is left at `fork`."""
            is_in_phase_a = fork.strand < 0 or fork.start <= self._ends[fork.strand]
            return (self._number_in_a if is_in_phase_a else number_after_a)[fork.strand]

        for i, (strand, end) in enumerate(zip(self._group.strands, self._ends, strict=True)):
            if end < strand.end:
                number_after_a[i] = len(strands)
                parent = self._number_in_a[i] if i in self._number_in_a else number_before(strand.fork)
                strands.append(strand._replace(start=max(end, strand.start), parent=parent))
        forks = tuple(fork._replace(strand=number_before(fork)) for fork in self._group.forks)
        split = replace(self._group, strands=tuple(strands), forks=forks, num_outer=len(self._strands))
        return pruned(with_rows(split, members))
