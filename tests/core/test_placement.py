import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_prefix.trainer.placement import LINEAR_COST, Placement, _Bin, _Piece, _swap, place, shared_workload


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int | None], list[int], list[int], int, int]:
    """Uneven groups in random order plus the filler rows that make the row count divide into the bins."""
    dp_size, num_mini_batches = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(1, 13), max_size=24))
    prefixes = [draw(st.integers(0, 5000)) for _ in sizes]
    rows: list[tuple[int | None, int]] = [
        (group, prefix) for group, (size, prefix) in enumerate(zip(sizes, prefixes, strict=True)) for _ in range(size)
    ]
    fillers = -len(rows) % (dp_size * num_mini_batches) + draw(st.integers(0, 2)) * dp_size * num_mini_batches
    rows = draw(st.permutations(rows + [(None, 126)] * fillers))
    suffixes = [draw(st.integers(0, 3000)) for _ in rows]
    return [key for key, _ in rows], [prefix for _, prefix in rows], suffixes, dp_size, num_mini_batches


def bins_of(placement: Placement, dp_size: int, num_mini_batches: int) -> list[list[int]]:
    """Rows of each bin as verl slices them: KVBatchMeta.chunk per rank, then make_iterator in order."""
    size = len(placement.order) // (dp_size * num_mini_batches)
    return [placement.order[start : start + size] for start in range(0, len(placement.order), size)] if size else []


@settings(deadline=None)
@given(batches())
def test_every_row_is_placed_exactly_once_and_the_same_way_each_time(batch):
    keys = batch[0]
    placement = place(*batch)
    assert sorted(placement.order) == list(range(len(keys)))
    assert placement == place(*batch)


@settings(deadline=None)
@given(batches())
def test_stats_describe_the_bins_that_verl_cuts_from_the_order(batch):
    keys, prefixes, suffixes, dp_size, num_mini_batches = batch
    placement = place(*batch)
    costs, num_bins_of_group = [], {}
    for rows in bins_of(placement, dp_size, num_mini_batches):
        groups = {}
        for row in rows:
            groups.setdefault(("filler", row) if keys[row] is None else keys[row], []).append(row)
        costs.append(
            sum(shared_workload(prefixes[rows[0]], [suffixes[row] for row in rows]) for rows in groups.values())
        )
        for group in groups:
            num_bins_of_group[group] = num_bins_of_group.get(group, 0) + 1
    if keys:
        assert [cost for rank in placement.bin_costs for cost in rank] == costs
        critical = sum(max(rank[k] for rank in placement.bin_costs) for k in range(num_mini_batches))
        assert placement.imbalance == (pytest.approx(critical * dp_size / sum(costs)) if sum(costs) else 1.0)
    assert placement.num_groups == len(set(keys) - {None})
    assert placement.split_groups == sum(count > 1 for count in num_bins_of_group.values())


@settings(deadline=None)
@given(batches())
def test_rows_of_a_group_are_consecutive_inside_a_bin(batch):
    keys, _, _, dp_size, num_mini_batches = batch
    for rows in bins_of(place(*batch), dp_size, num_mini_batches):
        runs = [keys[row] for i, row in enumerate(rows) if i == 0 or keys[row] != keys[rows[i - 1]]]
        real = [key for key in runs if key is not None]
        assert len(real) == len(set(real))


@settings(deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(2, 9),
    st.randoms(use_true_random=False),
)
def test_equal_groups_whose_size_divides_the_bins_stay_whole(dp_size, num_mini_batches, groups_per_bin, size, rng):
    num_groups = dp_size * num_mini_batches * groups_per_bin
    rows = [(group, group * 37 % 1000) for group in range(num_groups) for _ in range(size)]
    rng.shuffle(rows)
    suffixes = [rng.randint(1, 4000) for _ in rows]
    placement = place([key for key, _ in rows], [p for _, p in rows], suffixes, dp_size, num_mini_batches)
    assert (placement.num_groups, placement.split_groups) == (num_groups, 0)


@pytest.mark.parametrize(
    ("sizes", "dp_size", "num_mini_batches", "split"),
    [
        pytest.param([4, 4, 4], 2, 1, 1, id="an odd group must be split over two ranks"),
        pytest.param([8] * 6, 4, 1, 2, id="bins of 12 hold one group of 8: the other two are halved"),
        pytest.param([10], 2, 1, 1, id="one giant group"),
        pytest.param([8, 2, 2, 2, 2], 4, 1, 1, id="only the group longer than a bin is split"),
        pytest.param([5, 4, 3, 3, 3, 2], 2, 1, 0, id="uneven groups that fill both bins exactly"),
        pytest.param([6, 5, 4, 3], 2, 1, 0, id="largest with smallest"),
        pytest.param([5, 3, 3, 3, 2, 2], 2, 1, 0, id="the cheapest bin first would split one"),
        pytest.param([7, 7, 7, 7], 2, 2, 0, id="one group per bin"),
        pytest.param([1] * 12, 3, 2, 0, id="nothing to keep together"),
    ],
)
def test_no_more_groups_are_split_than_must_be(sizes, dp_size, num_mini_batches, split):
    keys = [group for group, size in enumerate(sizes) for _ in range(size)]
    placement = place(keys, [100] * len(keys), [50] * len(keys), dp_size, num_mini_batches)
    assert placement.split_groups == split


def test_a_group_is_split_over_as_few_bins_as_possible():
    sizes = [7, 6, 5, 5, 5]
    keys = [group for group, size in enumerate(sizes) for _ in range(size)] + [None] * 4
    placement = place(keys, [100] * 32, [50] * 32, dp_size=4)
    bins = [{keys[row] for row in rows} for rows in bins_of(placement, 4, 1)]
    assert sorted(sum(group in b for b in bins) for group in range(5)) == [1, 1, 1, 1, 2]


def test_a_group_longer_than_a_bin_fills_whole_bins():
    keys = ["giant"] * 8 + ["a"] * 2 + ["b"] * 2 + ["c"] * 2 + ["d"] * 2
    placement = place(keys, [100] * 16, [50] * 16, dp_size=4)
    giant_per_bin = sorted(sum(keys[row] == "giant" for row in rows) for rows in bins_of(placement, 4, 1))
    assert giant_per_bin == [0, 0, 4, 4]


def test_failed_rollouts_and_their_padding_split_nothing():
    sizes = [8] * 13 + [7, 6, 5]
    keys = [group for group, size in enumerate(sizes) for _ in range(size)] + [None] * 6
    placement = place(keys, [300] * 128, [200] * 128, dp_size=4, num_mini_batches=2)
    assert (placement.num_groups, placement.split_groups) == (16, 0)


def test_padding_rows_are_not_groups():
    placement = place([None] * 6, [126] * 6, [1] * 6, dp_size=3, num_mini_batches=2)
    assert (placement.num_groups, placement.split_groups, placement.imbalance) == (0, 0, 1.0)


def test_rows_of_one_uid_with_other_prompts_are_other_groups():
    placement = place(["uid"] * 4, [10, 10, 90, 90], [5] * 4, dp_size=2)
    assert (placement.num_groups, placement.split_groups) == (2, 0)


def test_the_prefix_is_charged_once_per_group_and_bin():
    whole = place(["a"] * 4, [1000] * 4, [10] * 4, dp_size=1)
    split = place(["a"] * 4, [1000] * 4, [10] * 4, dp_size=2)
    prefix_cost = LINEAR_COST * 1000 + 1000**2
    assert sum(map(sum, split.bin_costs)) - sum(map(sum, whole.bin_costs)) == prefix_cost


def test_one_suffix_costs_what_verl_charges_for_the_whole_row():
    prefix, suffix = 1203, 317
    assert shared_workload(prefix, [suffix]) == 24576 * (prefix + suffix) + (prefix + suffix) ** 2
    assert shared_workload(prefix, [suffix] * 8) < 8 * shared_workload(prefix, [suffix])


def test_long_prefixes_are_spread_over_ranks():
    keys = [group for group in range(4) for _ in range(2)]
    placement = place(keys, [4000, 4000, 4000, 4000, 10, 10, 10, 10], [100] * 8, dp_size=2)
    assert placement.imbalance == 1.0


def test_mini_batches_do_not_sort_groups_by_length():
    prefixes = [9000, 100, 9000, 100]
    keys = [group for group in range(4) for _ in range(3)]
    placement = place(keys, [prefixes[key] for key in keys], [7] * 12, dp_size=2, num_mini_batches=2)
    for k in range(2):
        assert len({rank[k] for rank in placement.bin_costs}) == 2, "one long and one short group per mini-batch"


def test_ranks_have_similar_totals_for_the_log_prob_passes():
    suffixes = [1000, 800, 600, 400]
    placement = place(list(range(4)), [0] * 4, suffixes, dp_size=2, num_mini_batches=2, linear_cost=1)
    costs = sorted(sum(rank) for rank in placement.bin_costs)
    assert costs == sorted(length + length**2 + other + other**2 for length, other in ((1000, 400), (800, 600)))


def test_a_mini_batch_of_long_groups_is_not_always_the_first():
    placement = place(list(range(4)), [10, 10, 900, 900], [5] * 4, dp_size=2, num_mini_batches=2)
    assert sorted(placement.order[::2]) == [0, 1]


@pytest.mark.parametrize(
    ("costly", "cheap"),
    [
        (
            [_Piece((0, 1), 100, group=0), _Piece((5, 6, 7), 50, group=2)],
            [_Piece((2,), 10, group=0), _Piece((3, 4), 40, group=1)],
        ),
        ([_Piece((0, 1), 100, group=1), _Piece((2,), 10, group=0)], [_Piece((3, 4), 10, group=0)]),
    ],
)
def test_swaps_never_bring_two_pieces_of_a_split_group_into_one_bin(costly, cheap):
    bins = [_Bin(0, sum(piece.cost for piece in pieces), list(pieces)) for pieces in (costly, cheap)]
    _swap(bins)
    assert [b.pieces for b in bins] == [costly, cheap]


@pytest.mark.parametrize("smallest", [8, 5])
def test_balance_beats_rows_in_their_given_order(smallest):
    rng = random.Random(3)
    keys, prefixes, suffixes = [], [], []
    for group in range(64):
        prefix, typical = int(rng.lognormvariate(6, 0.4)), rng.lognormvariate(6, 0.4)
        for _ in range(rng.randint(smallest, 8)):
            keys.append(group)
            prefixes.append(prefix)
            suffixes.append(1 + int(typical * rng.lognormvariate(0, 0.5)))
    fillers = -len(keys) % 16
    keys, prefixes, suffixes = keys + [None] * fillers, prefixes + [126] * fillers, suffixes + [1] * fillers
    placement = place(keys, prefixes, suffixes, dp_size=8, num_mini_batches=2)
    in_order = [
        sum(
            shared_workload(prefixes[rows[0]], [suffixes[row] for row in rows])
            for key in dict.fromkeys(keys[start : start + len(keys) // 16])
            for rows in [[row for row in range(start, start + len(keys) // 16) if keys[row] == key]]
        )
        for start in range(0, len(keys), len(keys) // 16)
    ]
    naive = sum(max(in_order[k::2]) for k in range(2)) * 8 / sum(in_order)
    assert placement.split_groups == 0
    assert placement.imbalance - 1 < (naive - 1) / 2


def test_ten_thousand_rows_over_a_thousand_bins_are_placed():
    rng = random.Random(0)
    keys = [row // 8 for row in range(10240)]
    placement = place(
        keys, [key * 37 % 3000 for key in keys], [rng.randint(1, 3000) for _ in keys], dp_size=128, num_mini_batches=8
    )
    assert sorted(placement.order) == list(range(10240))
    # Bins of 10 rows hold one whole group of 8; the 256 groups that are left over must be split.
    assert placement.split_groups == 256


def test_an_empty_batch_is_placed():
    assert place([], [], [], dp_size=2, num_mini_batches=3).order == []


def test_rows_that_do_not_divide_into_bins_are_refused():
    with pytest.raises(ValueError, match="7 rows do not divide into 2 ranks x 3 mini-batches"):
        place(["a"] * 7, [5] * 7, [5] * 7, dp_size=2, num_mini_batches=3)
