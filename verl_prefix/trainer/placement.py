"""Placement: whole groups on DP ranks and in mini-batches of equal row counts, balanced by what sharing costs.

verl hands rank r the r-th contiguous slice of the reordered batch (`BatchData.chunk` in verl/protocol.py) and
`TrainingWorker.train_mini_batch` walks that slice in order in chunks of equal size. One such chunk is a bin here, and a
row order fixes all bins. The k-th bins of all ranks form the k-th global mini-batch and run at the same time, so a
step takes the sum over k of the costliest k-th bin. Pure functions on lengths; nothing here knows verl or a tensor.
"""

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

# Cost of one token outside attention in units of L^2: 6 times the hidden size of a 7B model, as in verl's
# `calculate_workload` (verl/utils/seqlen_balancing.py).
LINEAR_COST = 24576


@dataclass(frozen=True)
class Placement:
    """A row order and what it is worth.

    Attributes:
        order: row indices, rank by rank and inside a rank mini-batch by mini-batch; every row exactly once.
        bin_costs: `bin_costs[rank][k]` is the cost of the rank's k-th mini-batch.
        num_groups: groups in the batch, single-row groups included, fillers not.
        split_groups: groups that lie in more than one bin; their prefix is computed once per bin.
        imbalance: time of the step over its time with perfect balance; 1.0 is perfect, 1.2 waits 20 % longer.
    """

    order: list[int]
    bin_costs: list[list[int]]
    num_groups: int
    split_groups: int
    imbalance: float


@dataclass(frozen=True)
class _Piece:
    """Rows of one group that stay together."""

    rows: tuple[int, ...]
    cost: int
    group: int


_PieceOf = Callable[[Sequence[int], int], _Piece]


@dataclass
class _Bin:
    """One mini-batch of one rank: `room` rows are still free."""

    room: int
    cost: int = 0
    pieces: list[_Piece] = field(default_factory=list)

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.cost += piece.cost
        self.room -= len(piece.rows)

    def remove(self, piece: _Piece) -> None:
        self.pieces.remove(piece)
        self.cost -= piece.cost
        self.room += len(piece.rows)


def shared_workload(prefix_len: int, suffix_lens: Sequence[int], *, linear_cost: int = LINEAR_COST) -> int:
    """Relative FLOPs of one prefix and its suffixes when the prefix is computed once.

    The unit is that of verl's `calculate_workload`, `24576 * L + L^2` (L^2/2 causal pairs, counted twice): the prefix
    attends to itself (P^2/2 pairs), a suffix to the prefix and to itself (S*P + S^2/2 pairs). With one suffix it is
    verl's value for L = P + S.
    """
    attention = prefix_len**2 + sum(2 * length * prefix_len + length**2 for length in suffix_lens)
    return linear_cost * (prefix_len + sum(suffix_lens)) + attention


def place(
    keys: Sequence[Hashable | None],
    prefix_lens: Sequence[int],
    suffix_lens: Sequence[int],
    dp_size: int,
    num_mini_batches: int = 1,
    *,
    linear_cost: int = LINEAR_COST,
) -> Placement:
    """Orders rows so that groups stay whole and the ranks of each mini-batch finish together.

    Groups go, those with most rows first, to the cheapest bin that has room for them whole. A group is split only where
    no bin has room, over as few bins as possible; where that happens bins are also filled one by one with row counts
    that add up, and the packing with fewer pieces stays. Swaps of equally long groups then even out the costs.

    Args:
        keys: group key of each row, any order; None marks a filler row (padding) that belongs to no group. Rows of one
            key with different prefix lengths come from different prompts and are different groups.
        prefix_lens: prefix tokens P of each row.
        suffix_lens: suffix tokens S of each row.
        dp_size: number of DP ranks.
        num_mini_batches: mini-batches that each rank walks through in one step.
        linear_cost: see `shared_workload`.

    Raises:
        ValueError: the rows do not divide evenly into `dp_size * num_mini_batches` bins.
    """
    num_rows, num_bins = len(keys), dp_size * num_mini_batches
    if num_bins < 1 or num_rows % num_bins:
        raise ValueError(
            f"{num_rows} rows do not divide into {dp_size} ranks x {num_mini_batches} mini-batches of equal row count; "
            "pad the batch to a multiple first (verl: upsample_batch_to_divisible_size)"
        )

    def piece_of(rows: Sequence[int], group: int) -> _Piece:
        suffixes = [suffix_lens[row] for row in rows]
        return _Piece(tuple(rows), shared_workload(prefix_lens[rows[0]], suffixes, linear_cost=linear_cost), group)

    members: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(("filler", row) if key is None else ("group", key, prefix_lens[row]), []).append(row)
    capacity = num_rows // num_bins
    # A group longer than a bin is split whatever we do: full bins first, and the rest competes like a group.
    pieces = [
        piece_of(rows[start : start + capacity], group)
        for group, rows in enumerate(members.values())
        for start in range(0, len(rows), capacity)
    ]
    pieces.sort(key=lambda piece: (-len(piece.rows), -piece.cost, piece.rows))

    bins = [_Bin(capacity) for _ in range(num_bins)]
    _cheapest_bin_first(pieces, bins, piece_of)
    if _num_pieces(bins) > len(pieces):
        fullest = [_Bin(capacity) for _ in range(num_bins)]
        _fullest_bin_first(pieces, fullest, piece_of)
        bins = min(bins, fullest, key=_num_pieces)
    _swap(bins)
    grid = _arrange(bins, dp_size)

    bin_costs = [[b.cost for b in rank] for rank in grid]
    total = sum(map(sum, bin_costs))
    critical = sum(max(costs) for costs in zip(*bin_costs, strict=True))
    return Placement(
        order=[row for rank in grid for b in rank for piece in b.pieces for row in piece.rows],
        bin_costs=bin_costs,
        num_groups=sum(name[0] == "group" for name in members),
        split_groups=sum(count > 1 for count in _pieces_of_group(bins).values()),
        imbalance=critical * dp_size / total if total else 1.0,
    )


def _num_pieces(bins: list[_Bin]) -> int:
    return sum(len(b.pieces) for b in bins)


def _pieces_of_group(bins: list[_Bin]) -> Counter[int]:
    return Counter(piece.group for b in bins for piece in b.pieces)


def _cheapest_bin_first(pieces: list[_Piece], bins: list[_Bin], piece_of: _PieceOf) -> None:
    """Puts each piece into the cheapest bin that has room for it whole, or splits it at once."""
    heap: list[tuple[int, int]] = []
    heap_size = 0
    for piece in pieces:
        size = len(piece.rows)
        if size != heap_size:
            heap = [(b.cost, i) for i, b in enumerate(bins) if b.room >= size]
            heapq.heapify(heap)
            heap_size = size
        if not heap:
            _split(piece, bins, piece_of)
            heap_size = 0
            continue
        _, i = heap[0]
        bins[i].add(piece)
        if bins[i].room >= size:
            heapq.heapreplace(heap, (bins[i].cost, i))
        else:
            heapq.heappop(heap)


def _fullest_bin_first(pieces: list[_Piece], bins: list[_Bin], piece_of: _PieceOf) -> None:
    """Fills one bin after the other as far as whole pieces can, large ones first, and splits what is left over."""
    by_size: dict[int, list[_Piece]] = {}
    for piece in reversed(pieces):
        by_size.setdefault(len(piece.rows), []).append(piece)
    sizes = sorted(by_size, reverse=True)

    def fill(i: int, room: int, dead_ends: set[tuple[int, int]]) -> dict[int, int] | None:
        """Counts of pieces of each of `sizes[i:]` that fill `room` rows exactly; None: there are none."""
        if room == 0:
            return {}
        if i == len(sizes) or (i, room) in dead_ends:
            return None
        for count in range(min(len(by_size[sizes[i]]), room // sizes[i]), -1, -1):
            rest = fill(i + 1, room - count * sizes[i], dead_ends)
            if rest is not None:
                return {sizes[i]: count} | rest
        dead_ends.add((i, room))
        return None

    for b in bins:
        dead_ends: set[tuple[int, int]] = set()
        counts = next(found for room in range(b.room, -1, -1) if (found := fill(0, room, dead_ends)) is not None)
        for size, count in counts.items():
            for _ in range(count):
                b.add(by_size[size].pop())
    for size in sizes:
        for piece in reversed(by_size[size]):
            _split(piece, bins, piece_of)


def _split(piece: _Piece, bins: list[_Bin], piece_of: _PieceOf) -> None:
    """Cuts a piece over the emptiest bins: filling the largest rooms takes the fewest."""
    rows = piece.rows
    while rows:
        target = max(bins, key=lambda b: (b.room, -b.cost))
        part, rows = rows[: target.room], rows[target.room :]
        target.add(piece_of(part, piece.group))


def _swap(bins: list[_Bin]) -> None:
    """Exchanges equally long groups of the costliest bin and a cheaper one while the costlier of the two drops.

    Stops at 1 % above the mean. Pieces of split groups stay, so that two of them never meet in one bin.
    """
    num_pieces = _pieces_of_group(bins)

    def best_swap(high: _Bin, low: _Bin) -> tuple[_Piece, _Piece] | None:
        gap = high.cost - low.cost
        table: dict[int, list[tuple[int, int]]] = {}
        for cost, i in sorted((p.cost, i) for i, p in enumerate(low.pieces) if num_pieces[p.group] == 1):
            table.setdefault(len(low.pieces[i].rows), []).append((cost, i))
        best, best_miss = None, gap
        for piece in high.pieces:
            if num_pieces[piece.group] > 1:
                continue
            costs = table.get(len(piece.rows), [])
            # Moving `gap / 2` of cost makes both bins equal; moving 0 or `gap` changes nothing.
            middle = bisect.bisect_left(costs, (piece.cost - gap // 2, 0))
            for cost, i in costs[max(middle - 1, 0) : middle + 1]:
                miss = abs(2 * (piece.cost - cost) - gap)
                if miss < best_miss:
                    best, best_miss = (piece, low.pieces[i]), miss
        return best

    mean = sum(b.cost for b in bins) / len(bins)
    for _ in range(4 * len(bins)):
        high = max(bins, key=lambda b: b.cost)
        if high.cost <= 1.01 * mean:
            return
        lows = sorted((b for b in bins if b.cost < high.cost), key=lambda b: b.cost)
        found = next(((low, swap) for low in lows if (swap := best_swap(high, low))), None)
        if found is None:
            return
        low, (down, up) = found
        high.remove(down)
        low.remove(up)
        high.add(up)
        low.add(down)


def _arrange(bins: list[_Bin], dp_size: int) -> list[list[_Bin]]:
    """Assigns bins to `[rank][k]` so that ranks get similar totals.

    Mini-batches follow the order of their first rows and not the cost: bins are balanced already, and mini-batches of
    similarly long groups would train on short and long prompts by turns.
    """
    in_order = sorted(bins, key=lambda b: min((piece.rows for piece in b.pieces), default=()))
    mini_batches = [in_order[start : start + dp_size] for start in range(0, len(bins), dp_size)]
    grid: list[list[_Bin]] = [[] for _ in range(dp_size)]
    for mini_batch in mini_batches:
        # The log-prob passes run a rank's mini-batches as one batch: totals matter there.
        for rank, b in zip(
            sorted(grid, key=lambda rank: sum(b.cost for b in rank)),
            sorted(mini_batch, key=lambda b: -b.cost),
            strict=True,
        ):
            rank.append(b)
    return grid
