"""Rows -> groups -> packed row, and the plans that every rank must pad_to_same_passes on."""

import math
from dataclasses import replace
from itertools import accumulate

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from verl_prefix.core.bins import first_fit
from verl_prefix.core.call_builder import calls_of
from verl_prefix.core.calls import AttentionParams
from verl_prefix.core.group_parts import pruned
from verl_prefix.core.groups import Fork, Group, Strand, group_by_key
from verl_prefix.core.output_index import num_own_strand_outputs
from verl_prefix.core.packed_row import pack_groups
from verl_prefix.core.plan import PackedPass, PhasedPass, Plan, Wave
from verl_prefix.core.planning import (
    leaves_room,
    limit_waves,
    live_in_pass_order,
    make_plan,
    make_waves,
    pad_to_same_passes,
)
from verl_prefix.core.prefix_cache import add_at
from verl_prefix.core.runs import Segment
from verl_prefix.core.states import StateIndex
from verl_prefix.core.trees import group_trees

CPU = torch.device("cpu")
SHAPES = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(0, 20), min_size=1, max_size=6)), min_size=1, max_size=6
)


def groups_of(shape):
    groups, row = [], 0
    for prompt_len, suffix_lens in shape:
        groups.append(Group.of_prompt(tuple(range(row, row + len(suffix_lens))), prompt_len - 1, tuple(suffix_lens)))
        row += len(suffix_lens)
    return groups


def offsets_of(groups):
    lens = [group.num_own_strand_tokens + 1 + n for group in groups for n in group.suffix_lens]
    return [0, *torch.tensor(lens).cumsum(0).tolist()]


def positions_of(places):
    """A slice or indices as a list."""
    return list(range(places.start or 0, places.stop)) if isinstance(places, slice) else places.tolist()


def test_rows_of_one_key_form_a_group_in_the_order_of_first_rows():
    groups = group_by_key(["a", 7, "a", ("a", 7)], [3, 2, 3, 1], [2, 1, 4, 0])
    assert groups == [
        Group.of_prompt((0, 2), 2, (2, 4)),
        Group.of_prompt((1,), 1, (1,)),
        Group.of_prompt((3,), 0, (0,)),
    ]


def test_what_is_shared_and_where_it_stands_in_a_pass():
    alone, nothing, one = (
        Group.of_prompt((0,), 5, (2,)),
        Group.of_prompt((1, 2), 0, (2, 2)),
        Group.of_prompt((3, 4), 1, (1, 1)),
    )
    assert [group.is_shared for group in (alone, nothing, one)] == [False, False, True]
    assert live_in_pass_order([nothing, Group.of_prompt((5,), 9, (0,)), one, alone]) == [one, alone, nothing]


def test_a_strand_that_only_empty_responses_need_is_pruned():
    strands = Strand(0, 0, 3), Strand(1, 3, 5, parent=0)
    group = Group((0, 1), (5, 5), strands, forks=(Fork(0, 3), Fork(1, 5)), first_outputs=(3, 5))
    assert group.output_lens == (2, 0) and num_own_strand_outputs(group) == 0
    in_strand = replace(
        group, row_ends=(5, 7), strands=(strands[0], Strand(1, 3, 7, parent=0)), forks=(Fork(0, 3), Fork(1, 7))
    )
    assert in_strand.output_lens == (2, 2) and num_own_strand_outputs(in_strand) == 2, "tokens 5 and 6"
    assert [Plan(passes).most_outputs for passes in ((), (PackedPass((in_strand,)),))] == [0, 4]
    pruned_group = pruned(group)
    assert (pruned_group.num_own_strand_tokens, pruned_group.strands, pruned_group.forks) == (
        3,
        strands[:1],
        (Fork(0, 3), Fork(-1, 5)),
    )


def test_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        group_by_key("ab", [1, 0], [1, 1])
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        group_trees(torch.arange(4), [0, 2, 4], [1, 0], [[], []])


def test_prefixes_that_leave_no_room_for_a_suffix_do_not_share_a_pass():
    groups = [Group.of_prompt((2 * i, 2 * i + 1), 25, (70, 70)) for i in range(2)]
    for schedule in ("phased", "auto"):
        assert [len(one.groups) for one in make_plan(groups, 100, schedule).phased] == [1, 1]
    assert [len(one.groups) for one in make_plan(groups, 140, "phased").phased] == [2]


def test_an_unknown_schedule_and_waves_without_tokens_are_refused():
    with pytest.raises(ValueError, match="schedule='pack': a plan is packed, phased or auto"):
        make_plan([], 100, "pack")
    with pytest.raises(ValueError, match="wave_tokens=0: a wave has 1 token or more"):
        make_plan([], 100, "phased", wave_tokens=0)


def test_a_bin_takes_the_smallest_item_that_just_fits():
    assert first_fit([2, 5, 3], int, 5) == [[5], [3, 2]]


def test_dummies_of_a_rank_without_groups_read_no_strands():
    asked: list = []
    padded = pad_to_same_passes(
        Plan(()), lambda values: asked.append(values) or ([0, 1, -math.inf] if len(asked) == 1 else values)
    )
    assert [one.reads_strands for one in padded.passes] == [False] and asked == [[0, 0, -math.inf], [False, 0, 0, 0]]


def test_the_longest_phased_passes_of_two_ranks_run_together():
    """The other rank has one, of three waves: the wave of our shorter one has no partner there."""
    most = iter([[0, 1, -math.inf], [False, 3, 0, 0, False, 0, 0, 0]])
    wave = Wave()
    plan = Plan((PhasedPass(waves=(wave,)), PhasedPass(waves=(wave,) * 3)))
    padded = pad_to_same_passes(plan, lambda values: [max(*pair) for pair in zip(values, next(most), strict=True)])
    assert [len(one.waves) for one in padded.phased] == [3, 1]


def test_what_fits_a_budget_to_the_token_is_whole_and_one_token_less_cuts_it_in_two():
    group = Group.of_prompt((0, 1), 6, (2, 2))
    whole, cut = make_plan([group], 10, "auto"), make_plan([group], 9, "packed")
    assert whole.passes == (PackedPass((group,)),) and whole.recomputed_tokens == 0
    assert len(cut.packed) == 2 and cut.recomputed_tokens == group.num_own_strand_tokens
    # Strands beside a wave of 4 tokens have 6 of the 10; those that wait in host memory have none.
    two = [Group.of_prompt((0, 1), 4, (2, 2)), Group.of_prompt((2, 3), 3, (2, 2))]
    assert [len(make_plan(two, n, "phased", wave_tokens=4).phased) for n in (10, 11)] == [2, 1]
    assert [len(make_plan([group], n, "phased", offload=True).waves) for n in (3, 4)] == [2, 1]
    # Where nobody says how long a wave is, strands have half of it.
    assert [len(make_plan(two, n, "phased").phased) for n in (13, 14)] == [2, 1]
    pieces = make_plan([Group.of_prompt((0, 1, 2, 3), 0, (4,) * 4)], 8, "packed").packed
    assert [[piece.rows for piece in one.groups] for one in pieces] == [[(0, 1)], [(2, 3)]], "no more than have to be"


def test_prompts_of_one_key_have_one_length():
    with pytest.raises(ValueError, match=r"rows \[0, 2\] have one key, and prompts of \[5, 6\] tokens"):
        group_by_key(["a", "b", "a"], [5, 5, 6], [3, 3, 3])


@pytest.mark.parametrize("keys", ["ab", "abcd"])
def test_as_many_keys_as_rows_are_asked_for(keys):
    with pytest.raises(ValueError, match=f"{len(keys)} keys for 3 rows; pass one for each row"):
        group_by_key(keys, [5, 5, 5], [3, 3, 3])
    with pytest.raises(ValueError, match=f"{len(keys)} response_lens for 3 rows; pass one for each row"):
        group_by_key("abc", [5, 5, 5], [3] * len(keys))


@hypothesis.given(SHAPES)
def test_layout_holds_each_prefix_once_and_every_suffix_at_its_original_place(shape):
    groups = live_in_pass_order(groups_of(shape))
    hypothesis.assume(groups)
    offsets = offsets_of(groups_of(shape))
    packed_row = pack_groups(groups, offsets)
    assert packed_row.num_strand_tokens == sum(g.num_own_strand_tokens for g in groups)
    assert (
        packed_row.num_tokens
        == sum(g.num_physical_tokens for g in groups)
        == packed_row.calls(AttentionParams(1.0), CPU)[0].spans.q[-1]
    )
    expected = [
        offsets[row] + group.num_own_strand_tokens + i
        for group in groups
        for row, n in zip(group.rows, group.suffix_lens, strict=True)
        for i in range(n)
    ]
    assert packed_row.output_places.tolist() == expected
    sharing = [group for group in groups if group.num_own_strand_tokens]
    _, *crosses = packed_row.calls(AttentionParams(1.0), CPU)
    assert len(crosses) == bool(sharing)
    for cross in (call.spans for call in crosses):
        assert [b - a for a, b in zip(cross.k, cross.k[1:], strict=False)] == [g.num_own_strand_tokens for g in sharing]
        assert [b - a for a, b in zip(cross.q, cross.q[1:], strict=False)] == [g.num_suffix_tokens for g in sharing]
        assert (
            pack_groups(groups, offsets, "phase_a").places.tolist()
            == packed_row.places[: packed_row.num_strand_tokens].tolist()
        )


@hypothesis.given(SHAPES, st.integers(1, 60))
def test_waves_hold_every_suffix_once_in_order_within_the_budget(shape, wave_tokens):
    groups = live_in_pass_order(groups_of(shape))
    waves = make_waves(groups, wave_tokens)
    seen = [row for wave in waves for piece in wave.groups for row in piece.rows]
    assert seen == [row for group in groups for row in group.rows]
    starts = [sum(group.num_own_strand_tokens for group in groups[:i]) for i in range(len(groups))]
    for wave in waves:
        lens = [n for piece in wave.groups for n in piece.suffix_lens]
        assert sum(lens) <= wave_tokens or sum(n > 0 for n in lens) == 1
        offsets = offsets_of(groups_of(shape))
        source = pack_groups(groups, offsets, "phase_a")
        packed_row = pack_groups(wave.groups, offsets, "wave", source)
        assert packed_row.num_strand_tokens == 0 and packed_row.num_tokens == sum(lens)
        numbers = [next(i for i, group in enumerate(groups) if piece.rows[0] in group.rows) for piece in wave.groups]
        assert [groups[i].strands for i in numbers] == [piece.strands for piece in wave.groups]
        pieces = zip(numbers, wave.groups, strict=True)
        sharing = [i for i, piece in pieces if piece.num_suffix_tokens and piece.strands]
        keys = [starts[i] + token for i in sharing for token in range(groups[i].num_own_strand_tokens)]
        found = [
            positions_of(p.strand_tokens)
            for call in packed_row.calls(AttentionParams(1.0), CPU)[1:]
            for p in call.prefixes
        ]
        assert found == ([keys] if keys else [])


def keys_read(packed_row, window, prefix_place):
    """{query: sorted places in the batch of the keys that it reads}; prefix_place: of each prefix source token."""
    found = {query: [] for query in range(packed_row.num_tokens)}
    for call in packed_row.calls(AttentionParams(1.0, window), CPU):
        keys = torch.full((call.spans.k[-1],), -1)
        if call.own_at is not None:
            keys[call.own_at] = packed_row.places
        levels = [*prefix_place.tensor_split(packed_row.source.level_starts[1:])]
        if packed_row.outer:
            levels[-1] = packed_row.places
        for prefix in call.prefixes:
            keys[prefix.at] = levels[prefix.level][prefix.strand_tokens]
            grad = torch.arange(1.0, len(keys) + 1, dtype=torch.float64)[prefix.at]
            wanted, total = torch.zeros(2, len(levels[prefix.level]), dtype=torch.float64)
            wanted.index_add_(0, torch.arange(len(wanted))[prefix.strand_tokens], grad)
            add_at(total, prefix.grad_tokens, prefix.summed(grad))
            assert torch.equal(total, wanted), "gradients of a token's copies are not its own"
        assert (keys >= 0).all() and torch.equal(call.keys(levels), keys)
        queries = torch.arange(packed_row.num_tokens)[call.queries].tolist()
        for q0, q1, k0, k1 in call.spans.by_segment():
            for i, query in enumerate(queries[q0:q1], start=q0):
                end = k1 - (q1 - 1 - i) if call.causal else k1
                start = k0 if call.window is None else max(k0, end - call.window)
                found[query] = keys[start:end].tolist() + found[query]
    return [found[query] for query in range(packed_row.num_tokens)]


@hypothesis.given(SHAPES, st.one_of(st.none(), st.integers(1, 40)), st.integers(1, 60))
def test_every_query_reads_the_last_window_tokens_of_its_own_row(shape, window, wave_tokens):
    groups = live_in_pass_order(groups_of(shape))
    hypothesis.assume(groups)
    offsets = offsets_of(groups_of(shape))
    starts = [(offsets[g.rows[0]], g) for g in groups]
    first = {place: g for start, g in starts for place in range(start, start + g.num_own_strand_tokens)}

    def expected(place):
        """The row's tokens up to `place`, where a shared prefix lies in the group's first row."""
        row = next(row for row in range(len(offsets) - 1) if offsets[row] <= place < offsets[row + 1])
        group = next(g for g in groups if row in g.rows)
        start = offsets[group.rows[0]]
        if place in first:
            tokens = list(range(start, place + 1))
        else:
            suffix_start = offsets[row] + group.num_own_strand_tokens
            tokens = [*range(start, start + group.num_own_strand_tokens), *range(suffix_start, place + 1)]
        return tokens if window is None else tokens[-window:]

    packed = pack_groups(groups, offsets)
    assert keys_read(packed, window, packed.places) == [expected(place) for place in packed.places.tolist()]
    if not any(group.num_own_strand_tokens for group in groups):
        return
    prefixes = pack_groups(groups, offsets, "phase_a")
    assert keys_read(prefixes, window, prefixes.places) == [expected(place) for place in prefixes.places.tolist()]
    for wave in make_waves(groups, wave_tokens):
        packed_row = pack_groups(wave.groups, offsets, "wave", prefixes)
        assert keys_read(packed_row, window, prefixes.places) == [
            expected(place) for place in packed_row.places.tolist()
        ]


def test_a_layout_reads_what_it_is_told_to_and_at_least_one_token_of_its_own():
    """Of three rows, whose suffixes begin at 4, 11 and 18 of the batch, the last one of a single token."""
    groups = [Group.of_prompt((0, 1), 4, (2, 2)), Group.of_prompt((2,), 4, (1,))]
    packed_row, is_read = pack_groups(groups, [0, 7, 14, 20]), torch.zeros(20, dtype=torch.bool)
    one = pack_groups(groups[1:], [0, 7, 14, 20])
    is_read[[5, 18]] = True
    found = packed_row.with_outputs(is_read)
    assert found.output_index.places.tolist() == [5, 18] and found.head_tokens.tolist() == [9, 12]
    for chosen in (is_read, ~is_read):
        assert one.with_outputs(chosen).output_index.places.tolist() == [18]
    assert packed_row.with_outputs(~is_read).output_index.places.tolist() == [4, 11, 12]
    nothing = packed_row.with_outputs(torch.zeros_like(is_read))
    assert nothing.output_index.places.tolist() == [4] and nothing.head_tokens.tolist() == [8]
    source = pack_groups(groups[1:], [0, 7, 14, 20], "phase_a")
    (wave,) = make_waves(groups[1:], 99)
    wave = pack_groups(wave.groups, [0, 7, 14, 20], "wave", source).with_outputs(torch.zeros_like(is_read))
    assert wave.output_index.places.tolist() == [18] and wave.head_tokens.tolist() == [0]


def test_the_first_example_of_the_readme():
    """Two rows of one prompt in verl_prefix/core/README.md, packed and phased."""
    groups, offsets = group_by_key("aa", [9, 9], [3, 4]), [0, 12]
    packed = pack_groups(groups, offsets)
    assert packed.places.tolist() == [*range(11), *range(20, 24)] and packed.head_tokens.tolist() == [*range(8, 15)]
    assert packed.segments == (Segment(8), Segment(3, ((0, 8),)), Segment(4, ((0, 8),)))
    causal, cross = packed.calls(AttentionParams(1.0), CPU)
    assert causal.spans.q == causal.spans.k == (0, 8, 11, 15)
    assert cross.queries == slice(8, 15) and [*cross.spans] == [(0, 7, 0, 8)]
    (planned,) = make_plan(groups, 15, "phased").passes
    (wave,) = planned.waves
    phase_a = pack_groups(planned.groups, offsets, "phase_a")
    in_wave = pack_groups(wave.groups, offsets, "wave", phase_a)
    assert phase_a.segments == (Segment(8),) and in_wave.places.tolist() == [8, 9, 10, *range(20, 24)]
    causal, cross = in_wave.calls(AttentionParams(1.0), CPU)
    assert causal.spans.q == causal.spans.k == (0, 3, 7)
    (cached,) = cross.prefixes
    assert cross.queries == slice(0, 7) and (cached.level, cached.strand_tokens) == (0, slice(0, 8))


def test_the_example_of_the_readme():
    """Segments, paths and calls in verl_prefix/core/README.md."""
    question, call_a, call_b = range(9), range(20, 25), range(30, 34)
    before = question, [*question, *call_a], [*question, *call_a], [*question, *call_b]
    rows = [[*tokens, 3 * i + 40, 3 * i + 41, 3 * i + 42] for i, tokens in enumerate(before)]
    offsets = [0, *accumulate(map(len, rows))]
    cuts = [8], [8, 13], [8, 13], [8, 12]
    (group,) = group_trees(torch.tensor([x for row in rows for x in row]), offsets, [9, 14, 14, 13], cuts)
    packed_row = pack_groups([group], offsets)
    assert [one.length for one in packed_row.segments] == [8, 5, 4, 3, 3, 3, 3] and packed_row.num_strands == 3
    prompt, to_a, to_b = ((0, 8),), ((0, 13),), ((0, 8), (13, 4))
    assert [one.path for one in packed_row.segments] == [(), prompt, prompt, prompt, to_a, to_a, to_b]
    causal, cross = packed_row.calls(AttentionParams(1.0), CPU)
    assert causal.spans.q == causal.spans.k == (0, 8, 13, 17, 20, 23, 26, 29)
    assert cross.queries == slice(8, 29) and cross.spans.q == (0, 12, 18, 21) and cross.spans.k == (0, 8, 21, 33)


def test_the_example_of_last_tokens():
    """In the docstring of `StateIndex.last_tokens`, behind an outer strand of 10 tokens."""
    outer = ((0, 10),)
    strands = [Segment(1), Segment(3, outer)]
    paths = [((10, 1),), ((0, 10), (11, 1)), ((0, 10), (11, 3))]
    states = StateIndex(strands, [Segment(4, paths[-1])], 10, paths, [])
    assert states.last_tokens(2, CPU).tolist() == [[0, 1], [12, 2], [3, 4]]


def test_siblings_tails_are_added_to_one_run_of_tokens():
    """A prompt's rows under a window: what they send back is summed, and no index repeats."""
    packed_row = pack_groups([Group.of_prompt((0, 1, 2), 20, (9, 8, 7))], [0, 30, 60, 90])
    (call,) = packed_row.calls(AttentionParams(1.0, window=6), CPU)
    (prefix,) = call.prefixes
    assert prefix.copies == ((3, 5),) and prefix.grad_tokens == slice(15, 20)


def test_a_call_of_several_blocks_copies_at_most_16_mib_of_keys_and_values():
    """At 8 heads of 128 in bf16. Each of ten rows reads a strand of its own behind a system prompt."""
    segments = [Segment(3, path=((0, 500), (500 + 1000 * i, 1000))) for i in range(10)]
    _, *crosses = calls_of(segments, AttentionParams(1.0), CPU, (0,))
    assert sum(len(call.spans.lens) for call in crosses) == 10
    assert max(call.spans.k[-1] for call in crosses) * 8 * 128 * 2 * 2 <= 16 << 20


def test_short_blocks_are_joined_in_a_call_and_long_ones_copy_no_keys():
    """Turns of 100 or of 400 tokens, each of which reads another part of one strand."""
    for length, joined in ((100, [5, 1]), (400, [1] * 6)):
        segments = [Segment(600), *(Segment(length, ((0, 100 * i),)) for i in range(1, 7))]
        _, *crosses = calls_of(segments, AttentionParams(1.0), CPU, (0,))
        assert [len(call.spans.lens) for call in crosses] == joined
        assert all(
            isinstance(call.prefixes[0].strand_tokens, slice) == (n == 1)
            for call, n in zip(crosses, joined, strict=True)
        )


def test_a_nested_pass_copies_no_key_of_a_chain():
    """A session of one strand, whose first 500 tokens a phase A computes; two rows leave what follows."""
    segments = [Segment(6000, ((0, 500),)), Segment(4, ((0, 5500),)), Segment(3, ((0, 6500),))]
    _, *crosses = calls_of(segments, AttentionParams(1.0), CPU, (0, 500))
    assert [(call.queries, one.level, one.strand_tokens) for call in crosses for one in call.prefixes] == [
        (slice(0, 6007), 0, slice(0, 500)),
        (slice(6000, 6004), 1, slice(0, 5000)),
        (slice(6004, 6007), 1, slice(0, 6000)),
    ]


@hypothesis.given(
    SHAPES, st.integers(1, 200), st.sampled_from(["packed", "phased", "auto"]), st.none() | st.integers(1, 250),
    st.booleans(),
)  # fmt: skip
@hypothesis.example([(90, [50, 50]), (80, [60, 40])], 100, "phased", 99, False)
@hypothesis.example([(90, [50, 50]), (80, [60, 40])], 100, "phased", 100, False)
@hypothesis.example([(90, [50, 50]), (80, [60, 40])], 100, "phased", 150, True)
def test_plan_computes_every_live_row_once_within_the_budget(shape, budget, schedule, wave_tokens, offload):
    groups = groups_of(shape)
    plan = make_plan(groups, budget, schedule, wave_tokens, offload)
    rows = sorted(row for one in plan.passes for group in one.groups for row in group.rows)
    idle = [row for group in plan.idle_groups for row in group.rows]
    assert sorted(rows + idle) == list(range(sum(len(g.rows) for g in groups)))
    for packed in plan.packed:
        tokens = sum(group.num_physical_tokens for group in packed.groups)
        assert tokens <= budget or sum(n > 0 for group in packed.groups for n in group.suffix_lens) == 1
    for phased in plan.phased:
        prefixes = sum(group.num_own_strand_tokens for group in phased.groups)
        is_heeded = wave_tokens is not None and leaves_room(wave_tokens, budget, offload)
        room = budget if offload else budget - wave_tokens if is_heeded else budget // 2
        assert prefixes <= room or len(phased.groups) == 1
        for wave in phased.waves:
            lens = [n for piece in wave.groups for n in piece.suffix_lens if n]
            is_one_row = len(lens) == 1 and (offload or len(phased.groups) == 1)
            assert prefixes * (not offload) + sum(lens) <= budget or is_one_row
            assert not is_heeded or sum(lens) <= wave_tokens or len(lens) == 1
    if schedule == "auto":
        assert plan.recomputed_tokens == 0, "auto runs what does not fit in phases, and never computes a prefix twice"


@hypothesis.given(st.lists(SHAPES, min_size=2, max_size=4), st.integers(5, 100), st.sampled_from(["packed", "auto"]))
def test_every_rank_runs_the_same_passes_and_waves(shapes, budget, schedule):
    plans = [make_plan(groups_of(shape), budget, schedule) for shape in shapes]
    # The collective: what every rank would contribute, call by call.
    counts: list[list[list[int]]] = []
    for plan in plans:
        calls: list[list[int]] = []
        pad_to_same_passes(plan, lambda values, calls=calls: calls.append(values) or values)
        counts.append(calls[:1])
    first = [max(column) for column in zip(*(calls[0] for calls in counts), strict=True)]

    second: list[list[int]] = []
    for plan in plans:
        answers = iter([first])
        pad_to_same_passes(plan, lambda values, answers=answers: next(answers, None) or second.append(values) or values)
    agreed = []
    for plan in plans:
        answers = iter([first, [max(column) for column in zip(*second, strict=True)] if second else []])
        agreed.append(pad_to_same_passes(plan, lambda values, answers=answers: next(answers)))
    forms = {(len(plan.packed), *(len(one.waves) for one in plan.phased)) for plan in agreed}
    assert len(forms) == 1 and forms != {(0,)}


def test_limited_waves_are_no_longer_than_they_were():
    """The first prompt leaves 100 tokens of the budget to its waves, the second one 900."""
    groups = [Group.of_prompt((0, 1, 2), 900, (50, 50, 50)), Group.of_prompt((3, 4, 5), 100, (400, 400, 400))]
    plan = make_plan(groups, 1000, "phased")
    assert [wave.num_tokens for wave in plan.waves] == [100, 50, 800, 400]
    limited = limit_waves(plan, 500)
    assert [wave.num_tokens for wave in limited.waves] == [100, 50, 400, 400, 400]
