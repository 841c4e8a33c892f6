"""Deep trees that do not fit a budget: which strands a phase A computes, and which passes are nested in it.

    trunk, that three turns follow        phase A [ trunk ]
    trunk - turn 1                            packed pass [ turn 1 and its suffixes | turn 2 and its suffixes ]
          - turn 2                            phase A [ first half of turn 3 ]
          - turn 3, long                          packed pass [ what follows ]
                                              phase C
                                          phase C

Every token is computed once. What is alive at once is the strands of the phases A around, and one pass among them.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from verl_prefix.core.groups import Fork, Group
from verl_prefix.core.plan import PackedPass, PhasedPass, first_fit

_MOST_TRIED = 8  # tops of each kind that are tried for one strand


_Leaf = tuple[int, tuple[int, ...]]  # tokens, and rows, counted from 0 in the group


class _Run(NamedTuple):
    """Tokens of a strand between two places where rows leave it or strands begin; then what follows.

    Attributes:
        strand, end, length: it ends before token `end` of the strand's row.
        units: (suffix tokens, rows) of each unit that leaves the strand at its end.
        next: numbers of the runs that follow.
    """

    strand: int
    end: int
    length: int
    units: list[tuple[int, range]]
    next: list[int]


class _Top(NamedTuple):
    """Runs that a phase A may compute.

    Attributes:
        runs: their numbers. tokens: of these, those that stay alive.
        units: each unit that leaves these runs.
        next: the first runs after these.
    """

    runs: frozenset[int]
    tokens: int
    units: list[_Leaf]
    next: list[int]


class _Cut(NamedTuple):
    """How a run and all that follows it is computed: its first runs by a phase A, the rest by passes that are nested.

    Attributes:
        most: the most tokens that are alive at once. forwards: number of all its passes.
        top: numbers of the runs of phase A. inner: runs after these that need a phase A of their own, with their cuts.
        leaves: each unit, or run with all that follows, that packed passes compute.
        room: tokens of a packed pass among them.
    """

    most: int
    forwards: int
    top: frozenset[int]
    inner: "tuple[tuple[int, _Cut], ...]"
    leaves: tuple[_Leaf, ...]
    room: int


class Nesting:
    """The cheapest way to compute a deep tree with every token once, by number of forwards.

    Args:
        group: the tree.
        budget: tokens that may be alive at once, unless one row alone has more.
        pass_tokens: the most tokens of a packed pass or wave; None: what is left of the budget.
        offload: strands of phases A wait in host memory, and do not count.
    """

    def __init__(self, group: Group, budget: int, pass_tokens: int | None, offload: bool) -> None:
        longest = max(fork.start + n for fork, n in zip(group.forks, group.suffix_lens, strict=True))
        self._group, self._offload = group, offload
        self._budget = budget if offload else max(budget, longest)
        self._most = pass_tokens or sys.maxsize
        self._runs: list[_Run] = []
        self._is_tree = self._read_runs()
        if self._is_tree:
            self._sizes = [run.length + sum(n for n, _ in run.units) for run in self._runs]
            self._rows = [tuple(row for _, rows in run.units for row in rows) for run in self._runs]
            for number in reversed(range(len(self._runs))):
                for following in self._runs[number].next:
                    self._sizes[number] += self._sizes[following]
                    self._rows[number] += self._rows[following]

    @functools.cached_property
    def cut(self) -> _Cut | None:
        """The way; None where the group has no strands, or rows that do not follow each other."""
        return self._best() if self._is_tree else None

    def is_better(self, tokens: int, forwards: int) -> bool:
        """Than a way to compute the group in so many tokens and forwards."""
        return self.cut is not None and (self._group.num_physical_tokens, self.cut.forwards) < (tokens, forwards)

    def passes(self) -> PhasedPass:
        """The pass of the whole group."""
        assert self.cut is not None
        return self._pass(self._group, self.cut)

    def deepest(self) -> PhasedPass | None:
        """The pass in which every strand has a phase A of its own, and every suffix a packed pass; None: see `cut`."""

        def cut(number: int) -> _Cut:
            run = self._runs[number]
            leaves = tuple((tokens, tuple(rows)) for tokens, rows in run.units)
            return _Cut(0, 0, frozenset((number,)), tuple((i, cut(i)) for i in run.next), leaves, 1)

        return self._pass(self._group, cut(0)) if self._is_tree else None

    def _read_runs(self) -> bool:
        group = self._group
        at: dict[int, dict[int, list[tuple[int, range]]]] = {}  # of each strand: units, by where they leave it
        for start, end in group.units():
            last = max(range(start, end), key=lambda i: group.suffix_lens[i])
            path = {strand: until for strand, _, until in group.strands_before(group.forks[last])}
            forks = [group.forks[i] for i in range(start, end) if group.output_lens[i]]
            if not path or any(fork.start > path.get(fork.strand, 0) for fork in forks):
                return False
            strand, place = group.forks[last]
            at.setdefault(strand, {}).setdefault(place, []).append((group.suffix_lens[last], range(start, end)))
        begins: dict[int, set[int]] = {}
        for one in group.strands:
            begins.setdefault(one.parent, set()).add(one.start)
        number_of: dict[Fork, int] = {}
        for strand, one in enumerate(group.strands):
            units = at.get(strand, {})
            before, start = number_of.get(Fork(one.parent, one.start)), one.start
            for end in sorted({*units, *begins.get(strand, ()), one.end}):
                number = number_of[Fork(strand, end)] = len(self._runs)
                if before is not None:
                    self._runs[before].next.append(number)
                self._runs.append(_Run(strand, end, end - start, units.get(end, []), []))
                before, start = number, end
        return len(begins.get(-1, ())) == 1 and len(self._runs) > 1

    def _tops(self, number: int) -> list[_Top]:
        """What a phase A may compute from run `number` on, the fewest runs first: the first ones of the largest branch;
        or all before which more than so many tokens follow."""
        chain = [number]
        while self._runs[chain[-1]].next:
            chain.append(max(self._runs[chain[-1]].next, key=lambda i: self._sizes[i]))
        tops = {frozenset(chain[:end]) for end in _spread(range(1, len(chain) + 1))}
        inside = [number]
        for one in inside:
            inside += self._runs[one].next
        for least in _spread(sorted({0, *(self._sizes[i] for i in inside)})):
            tops.add(frozenset(i for i in inside if self._sizes[i] > least or i == number))
        return [self._top(sorted(top)) for top in sorted(tops, key=lambda top: (len(top), min(top)))]

    def _top(self, numbers: Sequence[int]) -> _Top:
        inside, runs = frozenset(numbers), [self._runs[i] for i in numbers]
        tokens = 0 if self._offload else sum(run.length for run in runs)
        units = [(tokens, tuple(rows)) for run in runs for tokens, rows in run.units]
        return _Top(inside, tokens, units, [i for run in runs for i in run.next if i not in inside])

    def _best(self) -> _Cut:
        """Of the whole tree. A loop, since a session of some hundred turns is deeper than Python's stack: first which
        tokens may be alive before each run, then the best cut of each run, the last ones first."""
        ways: list[tuple[int, int, list[_Top]]] = []  # run, tokens alive before it, and the tops that may come next
        alive_before: list[set[int]] = [{0}, *(set[int]() for _ in self._runs[1:])]
        for number, found in enumerate(alive_before):
            tops = self._tops(number) if found else []
            for alive in found:
                fit = [*tops[:1], *(top for top in tops[1:] if alive + top.tokens < self._budget)]
                ways.append((number, alive, fit))
                for top in fit:
                    for following in self._apart(top, alive + top.tokens):
                        alive_before[following].add(alive + top.tokens)
        best: dict[tuple[int, int], _Cut] = {}
        for number, alive, tops in reversed(ways):
            cuts = (self._cut(top, alive + top.tokens, best) for top in tops)
            best[number, alive] = min(cuts, key=lambda cut: (max(cut.most, self._budget), cut.forwards, cut.most))
        return best[0, 0]

    def _room(self, alive: int) -> int:
        """Tokens of a packed pass beside `alive` ones."""
        return min(self._budget - alive, self._most)

    def _apart(self, top: _Top, alive: int) -> list[int]:
        """The runs after `top` that no packed pass has room for, with all that follows; alive: with those of `top`."""
        room = self._room(alive)
        return [i for i in top.next if self._sizes[i] > room]

    def _cut(self, top: _Top, alive: int, best: Mapping[tuple[int, int], _Cut]) -> _Cut:
        """alive: with those of `top`. best: of the runs that follow, by the tokens that are alive before them."""
        room = self._room(alive)
        leaves = [*top.units, *((self._sizes[i], self._rows[i]) for i in top.next if self._sizes[i] <= room)]
        inner = [(i, best[i, alive]) for i in self._apart(top, alive)]
        leaves.sort(key=lambda leaf: leaf[1])
        bins = _even_bins(leaves, room)
        largest = max((sum(tokens for tokens, _ in one) for one in bins), default=0)
        most = max([alive + largest, *(cut.most for _, cut in inner)])
        forwards = 1 + len(bins) + sum(cut.forwards for _, cut in inner)
        return _Cut(most, forwards, top.runs, tuple(inner), tuple(leaves), room)

    def _pass(self, group: Group, cut: _Cut) -> PhasedPass:
        """`group`: the whole one, or what `Group.below` made of it for the phase A around."""
        ends: dict[int, int] = {}  # of each strand, where the tokens end that phase A computes
        for number in sorted(cut.top):
            ends[self._runs[number].strand] = self._runs[number].end
        upto = {}
        for row, fork in zip(self._group.rows, self._group.forks, strict=True):
            inside = (
                min(end, ends[strand]) for strand, start, end in self._group.strands_before(fork)
                if ends.get(strand, 0) > start
            )  # fmt: skip
            upto[row] = next(inside, 0)

        def below(members: Sequence[int]) -> Group:
            rows = {self._group.rows[i] for i in members}
            return group.below(upto, [i for i, row in enumerate(group.rows) if row in rows])

        bins = _even_bins(cut.leaves, cut.room)
        packed = [PackedPass((below([row for _, rows in leaves for row in rows]),)) for leaves in bins]
        phased = [self._pass(below(self._rows[number]), one) for number, one in cut.inner]
        top = group.top(upto)
        return PhasedPass((top,), (), top.reads_strands, (*packed, *phased))


def _spread(items: Sequence[int]) -> Sequence[int]:
    """A few of many, evenly, with the first and the last."""
    if len(items) <= _MOST_TRIED:
        return items
    return [items[i * (len(items) - 1) // (_MOST_TRIED - 1)] for i in range(_MOST_TRIED)]


def _bins(leaves: Sequence[_Leaf], room: int) -> list[list[_Leaf]]:
    """Leaves in few bins that have room. Neighbours, which read the same path, stay together where that takes no more
    of them."""
    bins: list[list[_Leaf]] = []
    used = room
    for leaf in leaves:
        if used + leaf[0] > room:
            bins.append([])
            used = 0
        bins[-1].append(leaf)
        used += leaf[0]
    if len(bins) <= max(1, -(-sum(tokens for tokens, _ in leaves) // max(room, 1))):
        return bins
    return min(bins, first_fit(leaves, lambda leaf: leaf[0], room), key=len)


def _even_bins(leaves: Sequence[_Leaf], room: int) -> list[list[_Leaf]]:
    """As few bins as `_bins`, in less room where that does."""
    bins = _bins(leaves, room)
    even = -(-sum(tokens for tokens, _ in leaves) // max(len(bins), 1))
    rooms = (even + (room - even) * i // 4 for i in range(4 if even < room else 0))
    tried = (_bins(leaves, less) for less in rooms)
    return next((found for found in tried if len(found) <= len(bins)), bins)
