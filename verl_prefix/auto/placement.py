"""Placement: which rank computes which rows of a mini-batch, by what sharing costs. Row counts play no part.

    rows of all ranks                     a group, whole, on one rank
    rank 0: a b c d    rank 1: a b c d -> rank 0: a a d d    rank 1: b b c c

A group belongs to one rank. Split, its prefix is computed on every rank that has some of its rows. It is split where
that shortens the pass by 5 %, and where a rank would have no row, and so nothing to make verl's metrics of; it stays
split where nothing is gained by moving rows. The functions are pure and deterministic: every rank finds the same
placement from the same numbers.
"""

import copy
import heapq
from collections import Counter
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass

from verl_prefix.auto.cost import Rates
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group, rows_by_key

# Rows are moved, and groups are split, where that brings the predicted time of a pass down to this share.
WORTH = 0.95
ROUNDING = 1 - 1e-9  # sums of the same costs in another order
FEW = 8  # rows per rank, up to which placing them one by one is tried as well


@dataclass(frozen=True)
class Placement:
    """Which rank computes which row.

    Attributes:
        ranks: the rank that computes each row.
        longest: cost of the costliest rank.
        imbalance: `longest` over the cost of the average rank.
        split_groups: groups on several ranks.
    """

    ranks: list[int]
    longest: float
    imbalance: float
    split_groups: int

    @property
    def mean(self) -> float:
        """Cost of the average rank."""
        return self.longest / self.imbalance


def row_cost(shape: ModelShape, prefix_len: int, suffix_len: int, patches: int = 0) -> tuple[float, float]:
    """Cost of a row's prefix, which its group pays once, and of its suffix, in units of 1e12 FLOPs. Ranks measure rates
    of their own, so that placements by seconds would differ.

    Args:
        patches: number of patches of the row's pixels, which go through the vision tower once per group.
    """
    one = [Group.of_prompt((0,), prefix_len, (suffix_len,))]
    prefix, suffix = shape.pass_of(one, suffixes=False), shape.pass_of(one, prefixes=False)
    rates = Rates()
    tower = patches * shape.tower * rates.linear
    return rates.seconds(shape, [prefix]) + tower, rates.seconds(shape, [suffix])


class _Placed:
    """Rows of groups on ranks, and what they cost.

    Args:
        prefixes: cost of each group's prefix.
        suffix_costs: cost of each row's suffix.
        whole: groups that must stay on one rank.

    Attributes:
        held: {group: its rows on the rank} of each rank.
        loads: cost of each rank.
    """

    def __init__(
        self, prefixes: Sequence[float], suffix_costs: Sequence[float], whole: Set[int], num_ranks: int
    ) -> None:
        self.prefixes, self.suffix_costs, self.whole = prefixes, suffix_costs, whole
        self.held: list[dict[int, list[int]]] = [{} for _ in range(num_ranks)]
        self.loads = [0.0] * num_ranks
        self._heap = [(0.0, rank) for rank in range(num_ranks)]  # (load, rank), among them loads of the past

    def copy(self) -> "_Placed":
        other = copy.copy(self)
        other.held, other.loads, other._heap = [dict(one) for one in self.held], list(self.loads), list(self._heap)
        return other

    def least(self) -> int:
        """The rank with the least to do."""
        while self._heap[0][0] != self.loads[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def add(self, rank: int, group: int, rows: list[int]) -> None:
        there = self.held[rank].pop(group, [])
        self.held[rank][group] = there + rows
        self._change(rank, self._cost(rows) + (0.0 if there else self.prefixes[group]))

    def remove(self, rank: int, group: int, rows: list[int]) -> None:
        leaving = set(rows)
        rest = [row for row in self.held[rank].pop(group) if row not in leaving]
        if rest:
            self.held[rank][group] = rest
        self._change(rank, -self._cost(rows) - (0.0 if rest else self.prefixes[group]))

    def _cost(self, rows: list[int]) -> float:
        return sum([self.suffix_costs[row] for row in rows])

    def _change(self, rank: int, cost: float) -> None:
        self.loads[rank] += cost
        heapq.heappush(self._heap, (self.loads[rank], rank))


def place_rows(
    keys: Sequence[Hashable],
    prefix_costs: Sequence[float],
    suffix_costs: Sequence[float],
    ranks: Sequence[int],
    num_ranks: int,
    holds_pixels: Sequence[int] | None = None,
) -> Placement:
    """Places the rows of all ranks.

    Each group goes to the rank with the least to do, the costliest group first. Then groups are split while that pays.
    Where rows are few, they are also placed one by one, and that placement is taken if it is 5 % shorter. But if every
    rank has rows, all of them stay where they are in two cases: groups are whole there, and moving rows would not
    shorten the pass by 5 %; or moving them would lessen neither the cost of the costliest rank nor the sum over ranks,
    as with one row per rank. A rank without rows gets one.

    Args:
        keys: group of each row.
        prefix_costs, suffix_costs: of each row, see `row_cost`; a group's prefix costs as much as its costliest one.
        ranks: where each row is. num_ranks: how many ranks there are.
        holds_pixels: true for rows that have their group's pixels; such a group goes whole to a rank that has them.
    """
    here = placed_on(keys, prefix_costs, suffix_costs=suffix_costs, ranks=ranks, num_ranks=num_ranks)
    groups = list(rows_by_key(keys).values())
    prefixes = [max([prefix_costs[row] for row in rows]) for rows in groups]
    costs = [p + sum([suffix_costs[row] for row in rows]) for p, rows in zip(prefixes, groups, strict=True)]
    holds_pixels = holds_pixels or [0] * len(keys)
    holders = [sorted({ranks[row] for row in rows if holds_pixels[row]}) for rows in groups]

    placed = _Placed(prefixes, suffix_costs, {group for group, held in enumerate(holders) if held}, num_ranks)
    for group in sorted(range(len(groups)), key=lambda group: (-costs[group], groups[group][0])):
        bound = holders[group]
        target = min(bound, key=lambda rank: (placed.loads[rank], rank)) if bound else placed.least()
        placed.add(target, group, groups[group])
    placed = _split_while_it_pays(placed)
    if len(keys) <= FEW * num_ranks:
        scattered = _scattered(_Placed(prefixes, suffix_costs, placed.whole, num_ranks), groups, holders)
        placed = scattered if max(scattered.loads) <= WORTH * max(placed.loads) else placed

    rank_of = {row: rank for rank, held in enumerate(placed.held) for rows in held.values() for row in rows}
    home = [rank_of[row] for row in range(len(keys))]
    if not here.split_groups and max(placed.loads) > WORTH * here.longest:
        home = list(ranks)
    visual = {row for rows, held in zip(groups, holders, strict=True) if held for row in rows}
    fill_empty_ranks(
        home, ranks, suffix_costs=suffix_costs, num_ranks=num_ranks, visual=visual, holds_pixels=holds_pixels
    )
    moved = placed_on(keys, prefix_costs, suffix_costs=suffix_costs, ranks=home, num_ranks=num_ranks)
    gains = moved.longest < ROUNDING * here.longest or moved.mean < ROUNDING * here.mean
    return moved if gains or len(set(ranks)) < num_ranks else here


def placed_on(
    keys: Sequence[Hashable],
    prefix_costs: Sequence[float],
    suffix_costs: Sequence[float],
    ranks: Sequence[int],
    num_ranks: int,
) -> Placement:
    """The placement in which every row is computed on its rank of `ranks`."""
    loads = [0.0] * num_ranks
    split = 0
    for rows in rows_by_key(keys).values():
        homes = {ranks[row] for row in rows}
        split += len(homes) > 1
        for rank in homes:
            loads[rank] += max([prefix_costs[row] for row in rows])
        for row in rows:
            loads[ranks[row]] += suffix_costs[row]
    longest, total = max(loads), sum(loads)
    return Placement(list(ranks), longest, longest * num_ranks / total if total else 1.0, split)


def _scattered(placed: _Placed, groups: Sequence[list[int]], holders: Sequence[list[int]]) -> _Placed:
    """Places rows one by one, the costliest first, each on the rank that then has the least to do; on a rank without
    rows of its group it costs its prefix, too. This beats splitting groups where rows are few and unequal, as in agent
    runs. Groups that are bound to `holders` go there whole."""
    rows = []
    for group, members in enumerate(groups):
        if bound := holders[group]:
            placed.add(min(bound, key=lambda rank: (placed.loads[rank], rank)), group, members)
        else:
            rows += [(-placed.suffix_costs[row], row, group) for row in members]
    homes: list[set[int]] = [set() for _ in groups]
    for _, row, group in sorted(rows):
        least = placed.least()
        own = min(homes[group], key=lambda rank: (placed.loads[rank], rank), default=least)
        price = 0.0 if least in homes[group] else placed.prefixes[group]
        target = own if homes[group] and placed.loads[own] <= placed.loads[least] + price else least
        placed.add(target, group, [row])
        homes[group].add(target)
    return placed


def _split_while_it_pays(placed: _Placed) -> _Placed:
    """Moves rows of the costliest ranks to those with the least to do, as often as that shortens the pass by 5 %."""
    steps = 8  # of 5 % each, tried at once; fewer where that many cannot be reached
    while steps:
        target, shorter = WORTH**steps * max(placed.loads), placed.copy()
        if sum(placed.loads) < target * len(placed.loads) and _shorten(shorter, target):
            placed = shorter
        else:
            steps //= 2
    return placed


def _shorten(placed: _Placed, target: float) -> bool:
    """Moves rows until no rank's load is above `target`; False where that cannot be reached."""
    above = [rank for rank, load in enumerate(placed.loads) if load > target]
    for high in sorted(above, key=lambda rank: (-placed.loads[rank], rank)):
        while placed.loads[high] > target:
            low = placed.least()
            if (move := _best_move(placed, high, low, target)) is None:
                return False
            placed.remove(high, *move)
            placed.add(low, *move)
    return True


def _best_move(placed: _Placed, high: int, low: int, target: float) -> tuple[int, list[int]] | None:
    """(group, rows) to move from `high` to `low`, which has room for them; None: there are no such rows. Of moves that
    bring `high` down to `target` it is the one with the least extra cost; without any, the one that relieves most."""
    excess, room = placed.loads[high] - target, target - placed.loads[low]
    moves = []
    for group, held in placed.held[high].items():
        price = 0.0 if group in placed.held[low] else placed.prefixes[group]
        if group in placed.whole or price >= room:
            continue
        rows, relief = [], 0.0
        for row in sorted(held, key=lambda row: (-placed.suffix_costs[row], row)):
            if relief >= excess:
                break
            if price + relief + placed.suffix_costs[row] <= room:
                rows.append(row)
                relief += placed.suffix_costs[row]
        if not rows or not relief:
            continue
        if len(rows) == len(held):
            relief += placed.prefixes[group]
        moves.append(((1.0, -price) if relief >= excess else (0.0, relief), (group, rows)))
    return max(moves, key=lambda move: move[0])[1] if moves else None


def fill_empty_ranks(
    home: list[int],
    ranks: Sequence[int],
    suffix_costs: Sequence[float],
    num_ranks: int,
    visual: Set[int],
    holds_pixels: Sequence[int],
) -> None:
    """Changes `home`, so that every rank has a row: one that came from it, or else one of others.

    A row that would leave its group's pixels is the last choice. Nothing changes where rows are fewer than ranks; the
    exchange raises then (`moves`). It does not happen in verl's batches.

    Args:
        home: the rank that computes each row. ranks: where each row is.
        visual: rows of groups that have pixels. holds_pixels: see `place_rows`.
    """
    if len(home) < num_ranks:
        return
    counts = Counter(home)
    empty = [rank for rank in range(num_ranks) if not counts[rank]]
    own = rows_by_key(ranks)
    for rank in empty:
        spare = [row for row in own.get(rank, ()) if counts[home[row]] > 1]
        spare = [row for row in spare if holds_pixels[row] or row not in visual]
        spare = spare or [row for row in range(len(home)) if counts[home[row]] > 1]
        row = max(
            spare,
            key=lambda row: (row not in visual, not holds_pixels[row], counts[home[row]], suffix_costs[row], -row),
        )
        counts[home[row]] -= 1
        counts[rank] += 1
        home[row] = rank
