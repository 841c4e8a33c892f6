"""The prefix source: all strands of which the segments of a packed row may read, one after the other, as if they were
one long prefix. First come those of the packed rows around it, level by level, the outermost first; then its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl_prefix.core.groups import Fork, Group
from verl_prefix.core.runs import Path


@dataclass(frozen=True, eq=False)
class PrefixSource:
    """Where each strand stands.

    Attributes:
        bounds: the first token of each level, and the end of the last one, which is the packed row's own.
        strand_starts: of each strand, by its `place`, the number of its first token here.
    """

    bounds: tuple[int, ...] = (0, 0)
    strand_starts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, groups: Sequence[Group], offsets: Sequence[int], outer: "PrefixSource | None") -> "PrefixSource":
        """The source of a packed row of `groups`.

        Args:
            offsets: first token of each row in the batch's flat values.
            outer: of the packed row around it.
        """
        starts = dict(outer.strand_starts) if outer else {}
        bounds = outer.bounds if outer else (0,)
        end = bounds[-1]
        for group in groups:
            for strand in group.strands[group.num_outer :]:
                starts[strand.place(offsets)] = end
                end += strand.end - strand.start
        return cls((*bounds, end), starts)

    @property
    def level_starts(self) -> tuple[int, ...]:
        return self.bounds[:-1]

    @property
    def level(self) -> int:
        """The packed row's own level, which is the last one, and so the number of packed rows around it. A sequence of
        caches has the cache of level i at index i."""
        return len(self.level_starts) - 1

    @property
    def own_start(self) -> int:
        """Where the packed row's own strands begin."""
        return self.level_starts[-1]

    def paths(self, group: Group, offsets: Sequence[int]) -> dict[Fork, Path]:
        """The path before each fork of a group, also before the forks of its strands.

        Raises:
            KeyError: the packed rows around lack an outer strand of the group.
        """
        starts = [self.strand_starts[strand.place(offsets)] for strand in group.strands]
        paths = {}
        for fork in {*group.forks, *(strand.fork for strand in group.strands)}:
            path: list[tuple[int, int]] = []
            for strand, start, end in group.strands_before(fork):
                length = end - start
                if path and starts[strand] + length == path[-1][0]:  # the next strand begins where this ends: one run
                    length += path.pop()[1]
                path.append((starts[strand], length))
            paths[fork] = tuple(reversed(path))
        return paths
