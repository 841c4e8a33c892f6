"""Deep trees that do not fit a budget: which strands a phase A computes, and which passes are nested in it.

    trunk, that three turns follow        phase A [ trunk ]
    trunk - turn 1                            packed pass [ turn 1 and its suffixes | turn 2 and its suffixes ]
          - turn 2                            phase A [ first half of turn 3 ]
          - turn 3, long                          packed pass [ what follows ]
                                              phase C
                                          phase C

Every token is computed once. What is alive at once is the strands of the phases A around, and one pass among them.
"""

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from verl_prefix.core.bins import even_bins
from verl_prefix.core.group_parts import units_of
from verl_prefix.core.groups import Fork, Group
from verl_prefix.core.plan import PackedPass, PhasedPass, Wave
from verl_prefix.core.split_group import SplitGroup

_MOST_TRIED = 8  # phases A of each kind that are tried for one stretch


class _Load(NamedTuple):
    """What one pass computes whole: a unit, or a stretch with all after it.

    Attributes:
        tokens: number of its tokens.
        rows: counted from 0 in the group.
    """

    tokens: int
    rows: tuple[int, ...]


class _Stretch(NamedTuple):
    """Tokens of a strand between two tokens at which rows leave it or strands begin.

    Attributes:
        strand, end, length: the stretch ends before token `end` of the strand's row.
        units: each unit that leaves the strand at the stretch's end.
        next: numbers of the stretches that follow.
    """

    strand: int
    end: int
    length: int
    units: list[_Load]
    next: list[int]


class _PhaseAChoice(NamedTuple):
    """Stretches that a phase A may compute.

    Attributes:
        stretches: their numbers.
        tokens: number of their tokens.
        units: each unit that leaves these stretches.
        unit_tokens, longest_unit: tokens of all these units, and of the longest one.
        next: the first stretches after these.
    """

    stretches: frozenset[int]
    tokens: int
    units: list[_Load]
    unit_tokens: int
    longest_unit: int
    next: list[int]


class _Way(NamedTuple):
    """A way to compute a stretch and all after it: a phase A computes the first stretches, nested passes the rest.

    Attributes:
        peak: the most tokens that are alive at once.
        forwards: number of its forwards, each phase A and each packed pass.
        phase_a: numbers of the stretches that phase A computes.
        inner: stretches after these that need a phase A of their own, each with its way.
        bins: what each packed pass computes.
    """

    peak: int
    forwards: int
    phase_a: frozenset[int]
    inner: "tuple[tuple[int, _Way], ...]"
    bins: Sequence[Sequence[_Load]]


class Nesting:
    """Searches for a way to compute a deep tree with every token once, in few forwards. It tries at most `_MOST_TRIED`
    phases A of each kind for a stretch.

    Args:
        group: the tree.
        budget: tokens that may be alive at once, unless one row alone has more.
        pass_tokens: the most tokens of a packed pass or wave; None: what is left of the budget.
        offload: strands wait in host memory after their phase A, and then do not count.
    """

    def __init__(self, group: Group, budget: int, pass_tokens: int | None, offload: bool) -> None:
        self._group, self._offload = group, offload
        self._budget = budget if offload else max(budget, *group.row_ends)
        self._pass_tokens = pass_tokens or sys.maxsize
        self._stretches: list[_Stretch] = []
        self._can_nest = self._read_stretches()
        if self._can_nest:
            self._subtrees = [_Load(0, ())] * len(self._stretches)  # each stretch with all after it
            for number in reversed(range(len(self._stretches))):  # stretches that follow have higher numbers
                stretch = self._stretches[number]
                after = [*stretch.units, *(self._subtrees[i] for i in stretch.next)]
                rows = tuple(row for load in after for row in load.rows)
                self._subtrees[number] = _Load(stretch.length + sum(load.tokens for load in after), rows)

    def better_than(self, tokens: int, alive: int, forwards: int) -> PhasedPass | None:
        """The pass of the whole group by the best way, if that is better than the pieces, compared by tokens computed,
        then tokens alive at once beyond the budget, then forwards. Else None, as for a tree that cannot be nested
        (`_read_stretches`)."""
        way = self._best() if self._can_nest else None
        if way is None:
            return None
        own = self._group.num_physical_tokens, max(way.peak, self._budget), way.forwards
        return self._pass(self._group, way) if own < (tokens, max(alive, self._budget), forwards) else None

    def deepest(self) -> PhasedPass | None:
        """For `engine.verify`, of a few rows: the pass in which every stretch has a phase A of its own, and every
        suffix a packed pass, nested as deep as the tree is. None where the tree cannot be nested."""

        def way(number: int) -> _Way:
            stretch = self._stretches[number]
            inner = tuple((i, way(i)) for i in stretch.next)
            return _Way(0, 0, frozenset((number,)), inner, [[unit] for unit in stretch.units])

        return self._pass(self._group, way(0)) if self._can_nest else None

    def _read_stretches(self) -> bool:
        """Fills `_stretches`; returns whether the tree can be nested: it has two stretches or more, and in every unit
        the rows without a suffix lie on the path of the row with the longest one."""
        group, outputs = self._group, self._group.output_lens
        leaving: dict[int, dict[int, list[_Load]]] = {}  # of each strand: units, by where they leave it
        for start, end in units_of(group):
            last = max(range(start, end), key=lambda i: group.suffix_lens[i])
            path = {strand: until for strand, _, until in group.strands_before(group.forks[last])}
            forks = [group.forks[i] for i in range(start, end) if outputs[i]]
            if not path or any(fork.start > path.get(fork.strand, 0) for fork in forks):
                return False
            number, at_token = group.forks[last]
            unit = _Load(group.suffix_lens[last], tuple(range(start, end)))
            leaving.setdefault(number, {}).setdefault(at_token, []).append(unit)
        begins: dict[int, set[int]] = {}  # of each strand: where strands that follow it begin
        for strand in group.strands:
            begins.setdefault(strand.parent, set()).add(strand.start)
        number_of: dict[Fork, int] = {}
        for i, strand in enumerate(group.strands):
            units = leaving.get(i, {})
            before, start = number_of.get(strand.fork), strand.start
            for end in sorted({*units, *begins.get(i, ()), strand.end}):
                number = number_of[Fork(i, end)] = len(self._stretches)
                if before is not None:
                    self._stretches[before].next.append(number)
                self._stretches.append(_Stretch(i, end, end - start, units.get(end, []), []))
                before, start = number, end
        return len(self._stretches) > 1

    def _choices(self, number: int) -> list[_PhaseAChoice]:
        """What a phase A may compute from stretch `number` on, the fewest stretches first.

        Candidates are the first n stretches along the largest branch, also the most that fit the budget; and every
        stretch that has, with all after it, more than m tokens.
        """
        branch = [number]
        while self._stretches[branch[-1]].next:
            branch.append(max(self._stretches[branch[-1]].next, key=lambda i: self._subtrees[i].tokens))
        num_fit = bisect_right([*accumulate(self._stretches[i].length for i in branch)], self._budget)
        chosen = {frozenset(branch[:n]) for n in (max(num_fit, 1), *_spread(range(1, len(branch) + 1)))}
        inside = [number]
        for i in inside:  # which grows: the stretches after `number`, level by level
            inside += self._stretches[i].next
        for least in _spread(sorted({0, *(self._subtrees[i].tokens for i in inside)})):
            chosen.add(frozenset(i for i in inside if self._subtrees[i].tokens > least or i == number))
        return [self._choice(sorted(numbers)) for numbers in sorted(chosen, key=lambda each: (len(each), min(each)))]

    def _choice(self, numbers: Sequence[int]) -> _PhaseAChoice:
        inside, stretches = frozenset(numbers), [self._stretches[i] for i in numbers]
        tokens = sum(stretch.length for stretch in stretches)
        units = [unit for stretch in stretches for unit in stretch.units]
        lens = [0, *(unit.tokens for unit in units)]
        following = [i for each in stretches for i in each.next if i not in inside]
        return _PhaseAChoice(inside, tokens, units, sum(lens), max(lens), following)

    def _kept(self, choice: _PhaseAChoice) -> int:
        """Tokens of a phase A that stay alive until its phase C."""
        return 0 if self._offload else choice.tokens

    def _best(self) -> _Way:
        """The way for the whole tree. A loop, since a session of some hundred turns is deeper than Python's stack:
        first how many tokens may be alive before each stretch, then the best way of each stretch, the last ones
        first."""
        tried: list[tuple[int, int, list[_PhaseAChoice]]] = []  # stretch, tokens alive before it, phases A to try
        alive_before: list[set[int]] = [{0}, *(set[int]() for _ in self._stretches[1:])]
        for number, alive_counts in enumerate(alive_before):
            choices = self._choices(number) if alive_counts else []
            for alive in alive_counts:
                # The smallest phase A is always tried: there is a way where one row alone exceeds the budget, too.
                room = self._budget - alive
                fit = (choice for choice in choices[1:] if choice.tokens + (not self._offload) <= room)
                tries = [*choices[:1], *fit]
                tried.append((number, alive, tries))
                for choice in tries:
                    kept = alive + self._kept(choice)
                    for following in self._needing_phase_a(choice, kept):
                        alive_before[following].add(kept)
        best: dict[tuple[int, int], _Way] = {}
        for number, alive, tries in reversed(tried):
            way: _Way | None = None
            for choice in tries:
                way = self._better(way, choice, alive + self._kept(choice), best)
            assert way is not None
            best[number, alive] = way
        return best[0, 0]

    def _room(self, alive: int) -> int:
        """Tokens that a packed pass may have while `alive` tokens are alive."""
        return min(self._budget - alive, self._pass_tokens)

    def _needing_phase_a(self, choice: _PhaseAChoice, alive: int) -> list[int]:
        """The stretches after a phase A that no packed pass has room for, each with all after it.

        Args:
            alive: tokens that are alive after that phase A.
        """
        room = self._room(alive)
        return [i for i in choice.next if self._subtrees[i].tokens > room]

    def _better(
        self, than: _Way | None, choice: _PhaseAChoice, alive: int, best: Mapping[tuple[int, int], _Way]
    ) -> _Way:
        """The way that begins with a phase A; or `than`, where that is as good.

        Args:
            alive: tokens that are alive after that phase A.
            best: ways of the stretches that follow, by the stretch and the tokens that are alive before it.
        """
        room = self._room(alive)
        fit = [i for i in choice.next if self._subtrees[i].tokens <= room]
        inner = tuple((i, best[i, alive]) for i in self._needing_phase_a(choice, alive))

        def way(passes: int, largest: int, bins: Sequence[Sequence[_Load]] = ()) -> _Way:
            peak = max([choice.tokens, alive + largest, *(each.peak for _, each in inner)])
            forwards = 1 + passes + sum(each.forwards for _, each in inner)
            return _Way(peak, forwards, choice.stretches, inner, bins)

        if than is not None and choice.longest_unit <= room:  # else a pass may have more than the room
            # Bins take long to make. There are no fewer than this, and the largest of as few has an even share.
            tokens = choice.unit_tokens + sum(self._subtrees[i].tokens for i in fit)
            fewest = -(-tokens // max(room, 1))
            if self._cost(way(fewest, -(-tokens // max(fewest, 1)))) >= self._cost(than):
                return than
        leaves = sorted([*choice.units, *(self._subtrees[i] for i in fit)], key=lambda leaf: leaf.rows)
        bins = even_bins(leaves, lambda leaf: leaf.tokens, room)
        found = way(len(bins), max((sum(leaf.tokens for leaf in each) for each in bins), default=0), bins)
        return found if than is None else min(than, found, key=self._cost)

    def _cost(self, way: _Way) -> tuple[int, int, int]:
        """First what exceeds the budget, then forwards, then the peak."""
        return max(way.peak, self._budget), way.forwards, way.peak

    def _pass(self, group: Group, way: _Way) -> PhasedPass:
        """The pass of a way; `group` is the whole group, or its part that is nested in the phase A around."""
        strand_ends: dict[int, int] = {}  # of each strand, where the tokens end that phase A computes
        for number in sorted(way.phase_a):
            strand_ends[self._stretches[number].strand] = self._stretches[number].end
        row_ends = {}
        for row, fork in zip(self._group.rows, self._group.forks, strict=True):
            inside = (
                min(end, strand_ends[strand]) for strand, start, end in self._group.strands_before(fork)
                if strand_ends.get(strand, 0) > start
            )  # fmt: skip
            row_ends[row] = next(inside, 0)
        split = SplitGroup(group, row_ends)

        def nested(members: Sequence[int]) -> Group:
            rows = {self._group.rows[i] for i in members}
            return split.nested_pass([i for i, row in enumerate(group.rows) if row in rows])

        in_bins = [nested([row for leaf in each for row in leaf.rows]) for each in way.bins]
        waves = tuple(Wave((each,)) for each in in_bins if not each.num_own_strand_tokens)
        packed = tuple(PackedPass((each,)) for each in in_bins if each.num_own_strand_tokens)
        phased = tuple(self._pass(nested(self._subtrees[number].rows), inner) for number, inner in way.inner)
        of_phase_a = split.phase_a()
        return PhasedPass((of_phase_a,), waves, packed, phased, of_phase_a.reads_strands)


def _spread(items: Sequence[int]) -> Sequence[int]:
    """At most `_MOST_TRIED` of the items, evenly spread, with the first and the last."""
    if len(items) <= _MOST_TRIED:
        return items
    return [items[i * (len(items) - 1) // (_MOST_TRIED - 1)] for i in range(_MOST_TRIED)]
