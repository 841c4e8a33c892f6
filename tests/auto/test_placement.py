"""Placement: rows on ranks by cost (`auto.placement`), and groups in mini-batches (`trainer.mini_batches`)."""

import random
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_prefix.auto.placement import WORTH, Placement, _best_move, _Placed, place_rows, placed_on, row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.trainer.mini_batches import fill_mini_batches

SHAPE = ModelShape(1e3, 1e2, 1.0, (None, 64), 1.0, 1.0, 1.0, 100, tower=10.0)


@st.composite
def batches(draw: st.DrawFn, cheapest: int = 0) -> tuple[list[int], list[float], list[float], list[int], int]:
    """Keys, costs and ranks of rows that lie anywhere; at least one per rank, as verl deals them.

    Args:
        cheapest: the least cost of a prefix.
    """
    num_ranks = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(1, 13), min_size=num_ranks, max_size=24))
    prefixes = [draw(st.integers(cheapest, 5000)) for _ in sizes]
    keys = draw(st.permutations([group for group, size in enumerate(sizes) for _ in range(size)]))
    suffixes = [float(draw(st.integers(0, 3000))) for _ in keys]
    ranks = [draw(st.integers(0, num_ranks - 1)) for _ in keys]
    ranks[:num_ranks] = range(num_ranks)
    return keys, [float(prefixes[key]) for key in keys], suffixes, ranks, num_ranks


def loads(batch, home: list[int]) -> list[float]:
    keys, prefixes, suffixes, _, num_ranks = batch
    found = [0.0] * num_ranks
    for (_, rank), prefix in {(key, rank): p for key, rank, p in zip(keys, home, prefixes, strict=True)}.items():
        found[rank] += prefix
    for rank, suffix in zip(home, suffixes, strict=True):
        found[rank] += suffix
    return found


def splits(keys, home) -> int:
    return sum(count > 1 for count in Counter(key for key, _ in set(zip(keys, home, strict=True))).values())


@given(batches())
def test_every_rank_has_rows_and_what_is_said_of_the_placement_is_true(batch):
    keys, _, _, _, num_ranks = batch
    placed = place_rows(*batch)
    assert placed == place_rows(*batch) and len(placed.ranks) == len(keys)
    assert set(placed.ranks) == set(range(num_ranks))
    found = loads(batch, placed.ranks)
    assert placed.imbalance == (pytest.approx(max(found) * num_ranks / sum(found)) if sum(found) else 1.0)
    assert placed.split_groups == splits(keys, placed.ranks)


@given(batches(cheapest=1))
def test_groups_are_split_only_where_that_is_worth_it(batch):
    """Against groups that go whole, the costliest first, to the rank with the least to do."""
    keys, prefixes, suffixes, _, num_ranks = batch
    placed = place_rows(*batch)
    costs = {key: p for key, p in zip(keys, prefixes, strict=True)}
    for key, suffix in zip(keys, suffixes, strict=True):
        costs[key] += suffix
    whole = [0.0] * num_ranks
    for cost in sorted(costs.values(), reverse=True):
        whole[whole.index(min(whole))] += cost
    longest = max(loads(batch, placed.ranks))
    # A rank without any row gets one, which takes no longer than what others compute.
    if splits(keys, placed.ranks) > sum(not load for load in whole):
        assert longest <= WORTH * max(whole) * (1 + 1e-9)
    assert longest <= max(whole) / WORTH * (1 + 1e-9)


def test_rows_stay_where_groups_are_whole_and_ranks_balanced():
    keys, ranks = [0, 0, 1, 1], [1, 1, 0, 0]
    assert place_rows(keys, [9.0] * 4, [1.0, 2.0, 2.0, 1.2], ranks, 2).ranks == ranks
    # Not balanced: the costliest of three to one rank, the others to the other.
    assert place_rows([0, 1, 2], [5.0, 5.0, 9.0], [1.0] * 3, [0, 1, 1], 2).ranks in ([0, 0, 1], [1, 1, 0])
    # Torn.
    assert len(set(place_rows(keys, [9.0] * 4, [1.0] * 4, [0, 1, 0, 1], 2).ranks[:2])) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=8), st.booleans())
def test_one_row_per_rank_stays(rows, has_pixels):
    keys, ranks = [key for key, _ in rows], [*range(len(rows))][::-1]
    args = keys, [1.7 * key for key in keys], [0.1 * suffix for _, suffix in rows], ranks, len(rows)
    assert place_rows(*args, [has_pixels and key < 4 for key in keys]).ranks == ranks


def test_rows_of_one_picture_stay_where_every_rank_sees_it_anyway():
    ranks = [i % 2 for i in range(8)]
    assert place_rows([0] * 8, [3.0] * 8, [1.0] * 8, ranks, 2, [1] * 8).ranks == ranks


def test_one_long_group_is_split_over_ranks_and_a_prefix_that_costs_more_is_not():
    sixty = place_rows([0] * 60, [10.0] * 60, [5.0] * 60, [i % 4 for i in range(60)], 4)
    assert set(sixty.ranks) == {0, 1, 2, 3} and sixty.split_groups == 1 and sixty.imbalance < 1.05
    dear = place_rows([0] * 4 + [1], [1000.0] * 5, [5.0] * 5, [0, 1, 0, 1, 0], 2)
    assert dear.split_groups == 0


@pytest.mark.parametrize("ranks", [64, 512])
def test_few_and_unequal_rows_are_balanced_as_sessions_of_one_to_twenty_turns_are(ranks):
    rng = random.Random(0)
    keys = [i // 8 for i in range(4 * ranks)]  # half a group's rows per rank
    costs = [rng.randint(1, 20) * 16.0 for _ in keys]
    placed = place_rows(keys, [27.0] * len(keys), costs, [rng.randrange(ranks) for _ in keys], ranks)
    once_each = (sum(costs) + 27.0 * ranks / 2) / ranks
    assert placed.imbalance < 1.06 and placed.longest < 1.15 * once_each


def test_a_group_goes_whole_to_a_rank_that_has_its_pixels():
    keys = [0] * 30 + [1, 1, 2, 2]
    holds = [i == 7 for i in range(30)] + [0, 0, 1, 1]
    ranks = [i % 3 for i in range(34)]
    placed = place_rows(keys, [1.0] * 34, [1.0] * 34, ranks, 3, holds)
    assert set(placed.ranks[:30]) == {ranks[7]} and set(placed.ranks[32:]) <= set(ranks[32:])


def test_a_group_without_pixels_at_hand_goes_anywhere():
    assert place_rows([0, 0, 1], [9.0, 9.0, 1.0], [1.0] * 3, [0, 1, 0], 2, [0, 0, 0]).split_groups == 0


def test_fewer_rows_than_ranks_leave_ranks_empty():
    assert place_rows([0, 1], [5.0] * 2, [1.0] * 2, [2, 0], 3).ranks == [2, 0]
    assert place_rows([0, 1, 1], [99.0] * 3, [1.0] * 3, [2, 2, 0], 4).ranks == [1, 0, 0]
    assert place_rows([], [], [], [], 3).ranks == []


@pytest.mark.parametrize(("keys", "num_ranks"), [([0, 0, 1], 3), ([0, 0, 1, 1], 4), ([0, 0, 0, 1], 4)])
def test_ranks_without_rows_take_those_of_ranks_with_several(keys, num_ranks):
    """None of them came from there, and prefixes are too dear to be computed twice."""
    rows = len(keys)
    placed = place_rows(keys, [1000.0] * rows, [5.0] * rows, [min(i, 1) for i in range(rows)], num_ranks)
    assert set(placed.ranks) == set(range(num_ranks))


def test_the_only_row_of_a_rank_stays_also_where_others_would_leave_their_pixels():
    assert place_rows([0, 0, 1], [1000.0] * 3, [5.0] * 3, [0, 0, 1], 3, [1, 1, 0]).ranks == [2, 0, 1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)), max_size=30), st.randoms())
def test_loads_are_those_of_the_rows_that_ranks_hold(adds, rng):
    prefixes, suffixes = [7.0, 0.0, 3.0, 11.0], [rng.randint(0, 5) * 1.0 for _ in range(90)]
    placed, row = _Placed(prefixes, suffixes, set(), 4), iter(range(90))
    for rank, group, count in adds:
        placed.add(rank, group, [next(row) for _ in range(count)])
        assert placed.loads[placed.least()] == min(placed.loads)
        held = placed.held[rank][group]
        if rng.random() < 0.5:
            placed.remove(rank, group, held[: rng.randint(1, len(held))])
        found = [sum(prefixes[g] + sum(suffixes[i] for i in rows) for g, rows in own.items()) for own in placed.held]
        assert placed.loads == found and placed.loads[placed.least()] == min(found)


@pytest.mark.parametrize("there", [0, 1])
def test_rows_of_the_group_whose_prefix_is_there_already_move_first(there):
    placed = _Placed([10.0, 10.0], [4.0] * 5, set(), 2)
    placed.add(0, 0, [0, 1])
    placed.add(0, 1, [2, 3])
    placed.add(1, there, [4])
    assert _best_move(placed, 0, 1, target=32.0) == (there, [2 * there])
    # Two rows must leave, and the low rank has room for both: still of that group, since the other's prefix costs more.
    assert _best_move(placed, 0, 1, target=28.0) == (there, [2 * there, 2 * there + 1])
    assert _best_move(placed, 0, 1, target=15.0) is None, "no row fits"


def test_rows_that_stay_are_described():
    placed = placed_on([0, 0, 1, 1], [3.0] * 4, [1.0] * 4, [0, 1, 1, 1], 2)
    assert (placed.ranks, placed.split_groups, placed.imbalance) == ([0, 1, 1, 1], 1, pytest.approx(9 * 2 / 13))


def test_a_row_costs_its_share_of_the_layers_the_head_and_the_tower():
    prefix, suffix = row_cost(SHAPE, 100, 10)
    assert prefix == pytest.approx(1e-12 * (100 * 1e3 + SHAPE.pairs(100, 0)))
    assert suffix == pytest.approx(1e-12 * (10 * (1e3 + 1e2) + SHAPE.pairs(10, 100)))
    assert row_cost(SHAPE, 100, 10, patches=7) == (pytest.approx(prefix + 7e-11), suffix)


def large(kind: str, size: int, rows: int) -> tuple[list[int], list[float], list[float], list[int], int]:
    rng = random.Random(0)
    keys = [row // size for row in range(rows)]
    spread = 0.8 if kind == "heavy" else 0.2
    prefixes = [rng.lognormvariate(8, spread) for _ in range(rows // size)]
    order = list(range(rows))
    rng.shuffle(order)
    ranks = [0] * rows
    for place, row in enumerate(order):
        ranks[row] = place // 16
    suffixes = [rng.lognormvariate(6, spread) for _ in keys]
    return keys, [prefixes[key] for key in keys], suffixes, ranks, rows // 16


def place_counted(batch: tuple) -> tuple[Placement, float]:
    """The placement, and how many lines of Python ran for each row: the same on every machine."""
    lines, before = 0, sys.gettrace()

    def trace(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        placed = place_rows(*batch)
    finally:
        sys.settrace(before)
    return placed, lines / len(batch[0])


@pytest.mark.parametrize(
    ("kind", "size"),
    [("heavy", 16), *(pytest.param(*one, marks=pytest.mark.more) for one in (("heavy", 8), ("even", 8), ("even", 16)))],
)
def test_a_large_batch_is_placed_by_as_many_lines_per_row_as_a_small_one(kind, size):
    """65536 rows take 0.2 CPU seconds."""
    batch = large(kind, size, rows=65536)
    _, few = place_counted(large(kind, size, rows=4096))
    placed, many = place_counted(batch)
    assert many < 60 and many < 1.1 * few
    found = loads(batch, placed.ranks)
    longest_row = max(p + s for p, s in zip(batch[1], batch[2], strict=True))
    assert max(found) < 1.35 * max(sum(found) / 4096, longest_row) and min(found) > 0


def test_a_look_at_every_rank_for_every_group_is_counted(monkeypatch):
    monkeypatch.setattr(_Placed, "least", lambda self: min(range(len(self.loads)), key=lambda rank: self.loads[rank]))
    few, many = (place_counted(large("even", 8, rows))[1] for rows in (4096, 16384))
    assert many > 2 * few > 100


@given(st.integers(1, 5), st.lists(st.integers(1, 9), max_size=20), st.randoms(use_true_random=False))
def test_mini_batches_are_equally_long_and_hold_every_row_once(num_mini_batches, sizes, rng):
    keys = [group for group, size in enumerate(sizes) for _ in range(size)]
    keys += [None] * (-len(keys) % num_mini_batches)
    rng.shuffle(keys)
    found = fill_mini_batches(keys, num_mini_batches)
    assert sorted(row for rows in found for row in rows) == list(range(len(keys)))
    assert {len(rows) for rows in found} == {len(keys) // num_mini_batches}


@pytest.mark.parametrize(
    ("sizes", "num_mini_batches", "split"),
    [
        pytest.param([4, 4, 4, 4], 2, 0, id="equal groups"),
        pytest.param([4, 4, 4], 2, 1, id="an odd group"),
        pytest.param([10], 2, 1, id="one giant group"),
        pytest.param([8, 2, 2, 2, 2], 4, 1, id="only the group longer than a mini-batch is split"),
        pytest.param([6, 5, 4, 3], 2, 0, id="longest with shortest"),
        pytest.param([8] * 13 + [7, 6, 5] + [None] * 6, 4, 0, id="failed rollouts and their padding"),
        pytest.param([None] * 6, 3, 0, id="padding rows are no groups"),
        pytest.param([], 3, 0, id="nothing"),
    ],
)
def test_groups_stay_whole_in_mini_batches_where_they_can(sizes, num_mini_batches, split):
    keys = [group if size else None for group, size in enumerate(sizes) for _ in range(size or 1)]
    found = fill_mini_batches(keys, num_mini_batches)
    torn = Counter(
        key for key, _ in {(keys[row], k) for k, rows in enumerate(found) for row in rows} if key is not None
    )
    assert split == sum(count > 1 for count in torn.values())


def test_mini_batches_follow_the_order_in_which_prompts_came():
    keys = [0, 1, 2, 3] * 3
    assert [{keys[row] for row in rows} for rows in fill_mini_batches(keys, 2)] == [{0, 1}, {2, 3}]
