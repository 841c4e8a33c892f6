"""Placement: which rank computes which rows of a mini-batch, by what sharing costs. Row counts play no part.

    rows of all ranks                     a group, whole, on one rank
    rank 0: a b c d    rank 1: a b c d -> rank 0: a a d d    rank 1: b b c c

A group is one rank's. It is split, and its prefix computed on each rank that has some of its rows, in two cases alone:
where that shortens the pass by 5 %, and where a rank would have no row at all, and so nothing that verl's metrics could
be made of. Pure and deterministic: every rank finds the same from the same numbers.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field, replace

from verl_prefix.auto.cost import Rates, group_pass
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group, rows_by_key

# Of the predicted time of a pass: what shortens it by less is not worth moving or splitting a group.
WORTH = 0.95


@dataclass(frozen=True)
class Placement:
    """Ranks for rows.

    Attributes:
        ranks: the rank that computes each row.
        longest: cost of the costliest rank.
        imbalance: that over the cost of the average rank.
        split_groups: groups on several ranks.
    """

    ranks: list[int]
    longest: float
    imbalance: float
    split_groups: int


def row_cost(shape: ModelShape, prefix_len: int, suffix_len: int, patches: int = 0) -> tuple[float, float]:
    """Cost of a row's prefix, which its group pays once, and of its suffix; FLOPs by another name.

    FLOPs, not seconds: ranks measure rates of their own, and all must find the same.

    Args:
        patches: of the row's pixels, which the vision tower sees once per group.
    """
    one = [Group((0,), prefix_len, (suffix_len,))]
    prefix, suffix = group_pass(shape, one, suffixes=False), group_pass(shape, one, prefixes=False)
    rates = Rates()
    tower = patches * shape.tower * rates.linear
    return rates.seconds(shape, [prefix]) + tower, rates.seconds(shape, [suffix])


@dataclass
class _Piece:
    """Rows of one group on one rank; `bound` where the group must stay whole on a rank that has its pixels."""

    group: int
    prefix: float
    rows: list[int]
    bound: bool


@dataclass
class _Rank:
    load: float = 0.0
    pieces: list[_Piece] = field(default_factory=list)


def place_rows(
    keys: Sequence[Hashable],
    prefix_costs: Sequence[float],
    suffix_costs: Sequence[float],
    ranks: Sequence[int],
    num_ranks: int,
    holds_pixels: Sequence[int] | None = None,
) -> Placement:
    """Places the rows of all ranks.

    Groups go, the costliest first, to the rank with the least to do. Rows stay where they are if groups are whole there
    and no rank has much more to do than the costliest one would have after that.

    Args:
        keys: group of each row. prefix_costs, suffix_costs: see `row_cost`; of a group, the largest prefix cost counts.
        ranks: where each row is.
        holds_pixels: true for rows that have their group's pixels; such a group goes whole to a rank that has them.
    """
    here = describe_rows(keys, prefix_costs, suffix_costs=suffix_costs, ranks=ranks, num_ranks=num_ranks)
    if len(keys) < num_ranks:  # verl has no such batch
        return here
    groups = list(rows_by_key(keys).values())
    prefixes = [max([prefix_costs[row] for row in rows]) for rows in groups]
    costs = [p + sum([suffix_costs[row] for row in rows]) for p, rows in zip(prefixes, groups, strict=True)]
    holds_pixels = holds_pixels or [0] * len(keys)
    holders = [sorted({ranks[row] for row in rows if holds_pixels[row]}) for rows in groups]

    placed = [_Rank() for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for group in sorted(range(len(groups)), key=lambda group: (-costs[group], groups[group][0])):
        bound = holders[group]
        target = min(bound, key=lambda rank: (placed[rank].load, rank)) if bound else _least(heap, placed)
        placed[target].load += costs[group]
        placed[target].pieces.append(_Piece(group, prefixes[group], groups[group], bool(bound)))
        heapq.heappush(heap, (placed[target].load, target))
    _split_while_it_pays(placed, suffix_costs)

    rank_of = {row: rank for rank, one in enumerate(placed) for piece in one.pieces for row in piece.rows}
    home = [rank_of[row] for row in range(len(keys))]
    if not here.split_groups and max(one.load for one in placed) > WORTH * here.longest:
        home = list(ranks)
    visual = {row for rows, held in zip(groups, holders, strict=True) if held for row in rows}
    _fill_empty_ranks(
        home, ranks, suffix_costs=suffix_costs, num_ranks=num_ranks, visual=visual, holds_pixels=holds_pixels
    )
    return describe_rows(keys, prefix_costs, suffix_costs=suffix_costs, ranks=home, num_ranks=num_ranks)


def describe_rows(
    keys: Sequence[Hashable],
    prefix_costs: Sequence[float],
    suffix_costs: Sequence[float],
    ranks: Sequence[int],
    num_ranks: int,
) -> Placement:
    """The placement in which every row stays where it is."""
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


def _least(heap: list[tuple[float, int]], placed: Sequence[_Rank]) -> int:
    """The rank with the least to do; `heap` has loads and ranks, some of them of the past."""
    while heap[0][0] != placed[heap[0][1]].load:
        heapq.heappop(heap)
    return heap[0][1]


def _split_while_it_pays(placed: list[_Rank], suffix_costs: Sequence[float]) -> None:
    """Moves rows of the costliest ranks to those with the least to do, as often as that shortens the pass by 5 %."""
    steps = 8  # of 5 % at once, fewer where so many cannot be reached
    while steps:
        target = WORTH**steps * max(one.load for one in placed)
        before = [_Rank(one.load, list(one.pieces)) for one in placed]
        if sum(one.load for one in placed) >= target * len(placed) or not _shorten(placed, suffix_costs, target):
            placed[:] = before
            steps //= 2


def _shorten(placed: list[_Rank], suffix_costs: Sequence[float], target: float) -> bool:
    """Moves rows until no rank's load is above `target`; False where that cannot be reached."""
    heap = [(one.load, rank) for rank, one in enumerate(placed)]
    heapq.heapify(heap)
    above = sorted((rank for rank, one in enumerate(placed) if one.load > target), key=lambda r: (-placed[r].load, r))
    for high in above:
        while placed[high].load > target:
            low = _least(heap, placed)
            move = _best_move(placed[high], placed[low], suffix_costs, target)
            if move is None:
                return False
            _apply(placed[high], placed[low], suffix_costs, *move)
            heapq.heappush(heap, (placed[low].load, low))
            heapq.heappush(heap, (placed[high].load, high))
    return True


def _best_move(
    high: _Rank, low: _Rank, suffix_costs: Sequence[float], target: float
) -> tuple[_Piece, list[int]] | None:
    """Rows of one piece that fit beside what `low` has, and relieve `high` enough at the least price, or else most."""
    excess, room = high.load - target, target - low.load
    there = {piece.group for piece in low.pieces}
    moves = []
    for piece in high.pieces:
        price = 0.0 if piece.group in there else piece.prefix
        if piece.bound or price >= room:
            continue
        rows, relief = [], 0.0
        for row in sorted(piece.rows, key=lambda row: (-suffix_costs[row], row)):
            if relief >= excess:
                break
            if price + relief + suffix_costs[row] <= room:
                rows.append(row)
                relief += suffix_costs[row]
        if not rows or not relief:
            continue
        if len(rows) == len(piece.rows):
            relief += piece.prefix
        moves.append(((1.0, -price) if relief >= excess else (0.0, relief), (piece, rows)))
    return max(moves, key=lambda move: move[0])[1] if moves else None


def _apply(high: _Rank, low: _Rank, suffix_costs: Sequence[float], piece: _Piece, rows: list[int]) -> None:
    leaving = set(rows)
    rest = [row for row in piece.rows if row not in leaving]
    cost = sum(suffix_costs[row] for row in rows)
    # New pieces: those before are kept, in case that this leads nowhere.
    high.pieces.remove(piece)
    high.load -= cost
    if rest:
        high.pieces.append(replace(piece, rows=rest))
    else:
        high.load -= piece.prefix
    low.load += cost
    there = next((one for one in low.pieces if one.group == piece.group), None)
    if there is None:
        low.load += piece.prefix
    else:
        low.pieces.remove(there)
        rows = there.rows + rows
    low.pieces.append(replace(piece, rows=rows))


def _fill_empty_ranks(
    home: list[int],
    ranks: Sequence[int],
    suffix_costs: Sequence[float],
    num_ranks: int,
    visual: Set[int],
    holds_pixels: Sequence[int],
) -> None:
    """Gives every rank that has no row one of its own, or else of others: it would wait otherwise. One that leaves its
    group's pixels is the last choice."""
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
