"""Nested passes for a deep tree that exceeds the budget. Each token is computed once, in few forwards.

An example with a budget of 100 tokens: a trunk of 40 tokens is followed by three turns. Turns 1 and 2 have 30 tokens
each with their suffixes. Turn 3 has 40, and four suffixes of 10 after it.

    phase A [ trunk ]                   40 tokens are alive, which leaves room for 60
        packed pass [ turn 1 | turn 2 ]     30 + 30 tokens
        phase A [ turn 3 ]              80 tokens are alive, which leaves room for 20
            wave [ suffix | suffix ]        10 + 10 tokens
            wave [ suffix | suffix ]        10 + 10 tokens
        phase C
    phase C

Counted, these passes compute 180 tokens. Phased passes that do not nest would compute 260, and packed passes 300, since
each of them repeats the trunk. Simulated, an update on sessions of 10 turns takes 5.60 s with nested passes, and 6.31 s
with packed passes within the same budget (examples/results/simulated_turns.md).

The tree is read as stretches (`stretches`), and the search takes the cheapest way for each state:

- A state is a stretch, with the number of tokens that are alive before it: those of the phases A around.
- The decision is which stretches a phase A computes: this one, and maybe some after it. Each stretch that follows them
  goes into a packed pass with all after it, if there is room. Else it needs a phase A of its own: the next state.
- The cost is compared first by the tokens alive at once, as far as they exceed the budget; then by the number of
  forwards; then by the tokens alive at once.
- The candidates are few, since a tree has too many sets of stretches. Some are the first stretches along the largest
  branch, which is most likely to exceed the budget. The others are the stretches with more than n tokens in their
  subtrees, since smaller subtrees have room in packed passes. So the way that is found need not be the best one.
- States of later stretches come first, since the cost of a way includes the cost of the ways inside it.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from verl_prefix.core.bins import even_bins
from verl_prefix.core.groups import Group
from verl_prefix.core.plan import PackedPass, PhasedPass, Wave
from verl_prefix.core.split_group import SplitGroup
from verl_prefix.core.stretches import Load, read_stretches

_MOST_TRIED = 8  # phases A of each kind that are tried in one state


class Work(NamedTuple):
    """What it takes to compute a group, compared field by field.

    Attributes:
        tokens: number of tokens that are computed.
        alive: the most tokens that are alive at once.
        forwards: number of forwards, each phase A and each packed pass.
    """

    tokens: int
    alive: int
    forwards: int


class _State(NamedTuple):
    """What the search needs to know of a stretch.

    Attributes:
        stretch: the stretch's number.
        alive_before: number of tokens that are alive before it.
    """

    stretch: int
    alive_before: int


class _Candidate(NamedTuple):
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
    units: list[Load]
    unit_tokens: int
    longest_unit: int
    next: list[int]


class _Cost(NamedTuple):
    """The cost of a way, compared field by field.

    Attributes:
        limit: `peak`, or the budget where that is more.
        forwards: number of its forwards, each phase A and each packed pass.
        peak: the most tokens that are alive at once.
    """

    limit: int
    forwards: int
    peak: int


class _Way(NamedTuple):
    """A way to compute a stretch and all after it: a phase A computes the first stretches, nested passes the rest.

    Attributes:
        stretches: numbers of the stretches that phase A computes.
        inner: stretches after these that need a phase A of their own, each with its way.
        bins: what each packed pass computes.
        cost: of all its passes.
    """

    stretches: frozenset[int]
    inner: "Sequence[tuple[int, _Way]]"
    bins: Sequence[Sequence[Load]]
    cost: _Cost = _Cost(0, 0, 0)


class _Draft(NamedTuple):
    """A way without its packed passes, which take long to make.

    Attributes:
        candidate: what phase A computes.
        alive_after: number of tokens that are alive after phase A.
        fitting: subtrees after phase A that go into packed passes.
        inner: as in `_Way`.
    """

    candidate: _Candidate
    alive_after: int
    fitting: list[Load]
    inner: list[tuple[int, _Way]]


class Nesting:
    """Searches for a way to compute a deep tree, as said above.

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
        self._stretches = read_stretches(group)

    def pass_if_cheaper(self, than: Work) -> PhasedPass | None:
        """The pass of the whole group by the way that is found, if it is less work. Else None, also for a tree whose
        passes cannot nest. Tokens alive at once count as far as they exceed the budget."""
        if not self._stretches:
            return None
        way = self._cheapest_way()
        work = Work(self._group.num_physical_tokens, way.cost.limit, way.cost.forwards)
        is_cheaper = work < than._replace(alive=max(than.alive, self._budget))
        return self._make_pass(self._group, way) if is_cheaper else None

    def deepest(self) -> PhasedPass | None:
        """For the self-check, of a few rows: the pass in which a phase A ends wherever rows leave or strands branch,
        and every suffix has a packed pass. None where passes cannot nest."""
        return self._make_pass(self._group, self._deepest_way(0)) if self._stretches else None

    def _deepest_way(self, number: int) -> _Way:
        run = [number]  # stretches with nothing but the next one after each
        while not (last := self._stretches[run[-1]]).units and len(last.next) == 1:
            run += last.next
        inner = [(i, self._deepest_way(i)) for i in last.next]
        return _Way(frozenset(run), inner, [[unit] for unit in last.units])

    def _cheapest_way(self) -> _Way:
        """The way for the whole tree. This is a loop: a session of some hundred turns has as many stretches after each
        other, more than Python's stack has room for. Passes nest less deeply, so that `_make_pass` can be recursive:
        a phase A fills the budget if it can, and there are about as many levels as the budget fits into a path."""
        ways: dict[_State, _Way] = {}
        for state, candidates in reversed(self._candidates_by_state().items()):
            cheapest: _Way | None = None
            for candidate in candidates:
                draft = self._draft(candidate, state.alive_before + self._kept(candidate), ways)
                if cheapest is None or self._least_cost(draft) < cheapest.cost:
                    way = self._finished(draft)
                    if cheapest is None or way.cost < cheapest.cost:
                        cheapest = way
            assert cheapest is not None
            ways[state] = cheapest
        return ways[_State(0, 0)]

    def _candidates_by_state(self) -> dict[_State, list[_Candidate]]:
        """The phases A to try in each state that can be reached, states of earlier stretches first."""
        found: dict[_State, list[_Candidate]] = {}
        alive_before = [set[int]() for _ in self._stretches]  # how many tokens may be alive before each stretch
        alive_before[0].add(0)
        for number, alive_counts in enumerate(alive_before):
            if not alive_counts:
                continue
            smallest, *larger = self._candidates(number)
            for alive in alive_counts:
                # A phase A that stays alive leaves room for one token of a suffix. The smallest one is always tried:
                # there is a way where one row alone exceeds the budget, too.
                most = self._budget - alive - (0 if self._offload else 1)
                tried = [smallest, *(candidate for candidate in larger if candidate.tokens <= most)]
                found[_State(number, alive)] = tried
                for candidate in tried:
                    alive_after = alive + self._kept(candidate)
                    for following in candidate.next:
                        if not self._has_room(following, alive_after):
                            alive_before[following].add(alive_after)
        return found

    def _candidates(self, number: int) -> list[_Candidate]:
        """What a phase A may compute from stretch `number` on, the fewest stretches first."""
        chosen = {*self._along_largest_branch(number), *self._with_large_subtrees(number)}
        return [self._candidate(sorted(numbers)) for numbers in sorted(chosen, key=len)]

    def _along_largest_branch(self, number: int) -> Iterator[frozenset[int]]:
        """Yields the first stretches along the largest branch from `number` on: as many as fit the budget; and, for
        some n, the first n."""
        branch = [number]
        while following := self._stretches[branch[-1]].next:
            branch.append(max(following, key=self._subtree_tokens))
        num_fit = bisect_right([*accumulate(self._stretches[i].length for i in branch)], self._budget)
        for n in (max(num_fit, 1), *_spread(range(1, len(branch) + 1))):
            yield frozenset(branch[:n])

    def _with_large_subtrees(self, number: int) -> Iterator[frozenset[int]]:
        """Yields, for some n, `number` with all stretches after it whose subtrees have more than n tokens."""
        inside = [number]
        for i in inside:  # which grows: the stretches after `number`, level by level
            inside += self._stretches[i].next
        for least in _spread(sorted({0, *map(self._subtree_tokens, inside)})):
            yield frozenset(i for i in inside if self._subtree_tokens(i) > least or i == number)

    def _candidate(self, numbers: Sequence[int]) -> _Candidate:
        inside, stretches = frozenset(numbers), [self._stretches[i] for i in numbers]
        units = [unit for stretch in stretches for unit in stretch.units]
        unit_lens = [0, *(unit.tokens for unit in units)]
        following = [i for stretch in stretches for i in stretch.next if i not in inside]
        tokens = sum(stretch.length for stretch in stretches)
        return _Candidate(inside, tokens, units, sum(unit_lens), max(unit_lens), following)

    def _subtree_tokens(self, number: int) -> int:
        return self._stretches[number].subtree.tokens

    def _kept(self, candidate: _Candidate) -> int:
        """Tokens of its phase A that stay alive until phase C."""
        return 0 if self._offload else candidate.tokens

    def _room(self, alive: int) -> int:
        """Tokens that a packed pass may have while `alive` tokens are alive."""
        return min(self._budget - alive, self._pass_tokens)

    def _has_room(self, number: int, alive: int) -> bool:
        """Whether a packed pass may compute a stretch and all after it while `alive` tokens are alive."""
        return self._subtree_tokens(number) <= self._room(alive)

    def _draft(self, candidate: _Candidate, alive_after: int, ways: Mapping[_State, _Way]) -> _Draft:
        """The way that begins with a candidate's phase A. ways: of the states after it."""
        fitting = [self._stretches[i].subtree for i in candidate.next if self._has_room(i, alive_after)]
        inner = [(i, ways[_State(i, alive_after)]) for i in candidate.next if not self._has_room(i, alive_after)]
        return _Draft(candidate, alive_after, fitting, inner)

    def _finished(self, draft: _Draft) -> _Way:
        loads = sorted([*draft.candidate.units, *draft.fitting], key=lambda load: load.rows)
        bins = even_bins(loads, lambda load: load.tokens, self._room(draft.alive_after))
        largest = max((sum(load.tokens for load in members) for members in bins), default=0)
        return _Way(draft.candidate.stretches, draft.inner, bins, self._cost(draft, len(bins), largest))

    def _least_cost(self, draft: _Draft) -> _Cost:
        """A lower bound: the cost if packed passes were as few as their tokens allow, and even."""
        # No packed pass has more tokens than this: what has no room beside others is one unit.
        most = max(self._room(draft.alive_after), draft.candidate.longest_unit, 1)
        tokens = draft.candidate.unit_tokens + sum(load.tokens for load in draft.fitting)
        fewest = -(-tokens // most)
        return self._cost(draft, fewest, -(-tokens // max(fewest, 1)))

    def _cost(self, draft: _Draft, num_packed: int, largest: int) -> _Cost:
        """The cost of a way with `num_packed` packed passes, of which the largest has `largest` tokens."""
        inner = [way.cost for _, way in draft.inner]
        # Tokens of phase A itself count until it is done, wherever they wait then.
        peak = max([draft.candidate.tokens, draft.alive_after + largest, *(cost.peak for cost in inner)])
        return _Cost(max(peak, self._budget), 1 + num_packed + sum(cost.forwards for cost in inner), peak)

    def _make_pass(self, group: Group, way: _Way) -> PhasedPass:
        """The pass of a way; `group` is the whole group, or its part that is nested in the phase A around."""
        strand_ends: dict[int, int] = {}  # of each strand, where the tokens end that phase A computes
        for number in sorted(way.stretches):
            strand_ends[self._stretches[number].strand] = self._stretches[number].end
        phase_a_ends = {}  # of each row
        for row, fork in zip(self._group.rows, self._group.forks, strict=True):
            inside = (
                min(end, strand_ends[strand]) for strand, start, end in self._group.strands_before(fork)
                if strand_ends.get(strand, 0) > start
            )  # fmt: skip
            phase_a_ends[row] = next(inside, 0)
        split = SplitGroup(group, phase_a_ends)

        def nested_group(members: Sequence[int]) -> Group:
            rows = {self._group.rows[i] for i in members}
            return split.group_of_nested_pass([i for i, row in enumerate(group.rows) if row in rows])

        in_bins = [nested_group([row for load in loads for row in load.rows]) for loads in way.bins]
        waves = tuple(Wave((part,)) for part in in_bins if not part.num_own_strand_tokens)
        packed = tuple(PackedPass((part,)) for part in in_bins if part.num_own_strand_tokens)
        inner = ((nested_group(self._stretches[number].subtree.rows), inner_way) for number, inner_way in way.inner)
        phased = tuple(self._make_pass(part, inner_way) for part, inner_way in inner)
        phase_a = split.group_of_phase_a()
        return PhasedPass((phase_a,), waves, packed, phased, phase_a.reads_strands)


def _spread(items: Sequence[int]) -> Sequence[int]:
    """At most `_MOST_TRIED` of the items, evenly spread, with the first and the last."""
    if len(items) <= _MOST_TRIED:
        return items
    return [items[i * (len(items) - 1) // (_MOST_TRIED - 1)] for i in range(_MOST_TRIED)]
