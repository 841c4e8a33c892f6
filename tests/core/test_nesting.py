"""Passes that are nested in phases A: random deep trees against HF's own forward of every whole row."""

import functools
from dataclasses import replace

import pytest
import torch
from dialogues import ROWS, Dialogue, rollouts
from families import build, float64_inside  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from nesting import BROKEN
from runners import run_shared, run_stock
from short_chunks import short_chunks
from tree_models import FAMILIES, equal_hf, error, measure, small  # noqa: F401

from verl_prefix.core import runner as core_runner
from verl_prefix.core.groups import Fork, Group, Strand
from verl_prefix.core.nesting import Nesting
from verl_prefix.core.packed_row import pack_groups
from verl_prefix.core.plan import PackedPass, PhasedPass, Plan
from verl_prefix.core.planning import make_plan
from verl_prefix.testing.rollouts import flatten, turn_rollouts


def deep(d: Dialogue) -> None:
    """A search whose branches are dialogues: rows leave anywhere, also inside of responses."""
    prompt = d.some(9)

    def grow(turns: list[torch.Tensor], depth: int) -> None:
        ends = [len(prompt) - 1]
        for turn in turns:
            ends.append(ends[-1] + len(turn))
        if depth == 0 or len(turns) and int(torch.randint(4, (1,), generator=d.generator)) == 0:
            d.row(prompt, response=torch.cat([*turns, d.some(1, 7)]), cuts=ends)
        for _ in range(depth and int(torch.randint(1, 4, (1,), generator=d.generator))):
            grow([*turns, d.some(1, 9)], depth - 1)

    grow([], 4)


deep_rows = [*ROWS, deep]


def plan_of(batch, budget: int, schedule: str = "phased", **options) -> Plan:
    groups = flatten(batch, torch.device("cpu"))[2]
    return make_plan(groups, budget, schedule, **options)


def test_the_example_of_nesting():
    """In the docstring of verl_prefix/core/nesting.py."""
    turn_1, turn_2, turn_3 = Strand(0, 40, 60, 0), Strand(2, 40, 60, 0), Strand(4, 40, 80, 0)
    forks = (*[Fork(1, 60)] * 2, *[Fork(2, 60)] * 2, *[Fork(3, 80)] * 4)
    strands = (Strand(0, 0, 40), turn_1, turn_2, turn_3)
    group = Group((*range(8),), (65,) * 4 + (90,) * 4, strands, forks, (40,) * 8)
    (trunk,) = make_plan([group], 100, "auto").passes
    assert trunk.num_tokens == 40 and [(one.num_tokens, one.groups[0].rows) for one in trunk.packed] == [
        (60, (*range(4),))
    ]
    (inner,) = trunk.phased
    assert inner.num_tokens == 40 and [wave.groups[0].rows for wave in inner.waves] == [(4, 5), (6, 7)]
    assert not trunk.waves and inner.nested == inner.waves
    plans = [make_plan([group], 100, *options) for options in (("auto",), ("packed",))]
    plans.append(make_plan([group], 100, "auto", nests=False))
    assert [plan.num_physical_tokens for plan in plans] == [180, 300, 260]


@settings(max_examples=300)
@given(
    rows=st.sampled_from(deep_rows), seed=st.integers(0, 2**20), budget=st.integers(8, 300),
    schedule=st.sampled_from(["phased", "auto"]), wave_tokens=st.none() | st.integers(1, 40), offload=st.booleans(),
)  # fmt: skip
def test_what_nests_is_computed_once_and_fits(rows, seed, budget, schedule, wave_tokens, offload):
    batch = rollouts(rows, seed)
    options = dict(wave_tokens=wave_tokens, offload=offload)
    groups = flatten(batch, torch.device("cpu"))[2]
    plan, cut = (make_plan(groups, budget, schedule, nests=nests, **options) for nests in (True, False))
    assert plan.num_physical_tokens <= cut.num_physical_tokens
    rows_of = sorted(row for one in plan.passes for group in one.groups for row in group.rows)
    assert rows_of == sorted(row for one in cut.passes for group in one.groups for row in group.rows)
    seen = []
    longest = max(map(sum, zip(map(len, batch.prompts), map(len, batch.responses), strict=True)))

    def walk(one: PackedPass | PhasedPass, alive: int) -> None:
        if isinstance(one, PackedPass):
            seen.extend(row for group in one.groups for row in group.rows)
            assert alive + one.num_tokens <= max(budget, longest)
            return
        for nested in one.nested:
            walk(nested, alive if offload else alive + sum(group.num_own_strand_tokens for group in one.groups))

    for one in plan.passes:
        if isinstance(one, PhasedPass) and one.depth > 1:
            walk(one, 0)
            assert sum(each.num_tokens for each in Plan((one,)).all_passes) == _whole(groups, one).num_physical_tokens
            wanted = sorted(row for group in one.groups for row in group.rows)
            assert sorted(seen) == wanted
            seen.clear()


def _whole(groups, one):
    return next(group for group in groups if group.rows[0] in one.groups[0].rows)


def test_a_session_is_planned_however_many_turns_it_has():
    """Of each turn what it thought is not in the next one's history: every row leaves the one strand elsewhere."""
    turns, said, thought = 300, 5, 6
    forks = tuple(Fork(0, said * turn) for turn in range(1, turns + 1))
    strand, firsts = Strand(turns - 1, 0, said * turns), tuple(fork.start for fork in forks)
    group = Group(tuple(range(turns)), tuple(first + thought for first in firsts), (strand,), forks, firsts)
    plan = make_plan([group], 200, "auto")
    assert plan.depth > 1 and plan.num_physical_tokens == turns * (said + thought)


def test_phases_a_of_a_long_session_fill_the_budget_where_prefixes_wait_on_the_host():
    """Else hundreds of phases A of one turn would be in one another, more than Python's stack has room for."""
    turns, said = 600, 10
    forks = tuple(Fork(0, said * turn) for turn in range(1, turns + 1))
    strand, firsts = Strand(turns - 1, 0, said * turns), tuple(fork.start for fork in forks)
    group = Group(tuple(range(turns)), tuple(first + 1 for first in firsts), (strand,), forks, firsts)
    plan = make_plan([group], 160, "auto", offload=True)
    assert plan.num_physical_tokens == turns * (said + 1)
    assert plan.depth <= 2 + turns * said / 160


@pytest.mark.parametrize("offload", [False, True])
def test_a_phase_a_fits_the_budget_wherever_its_strands_wait(offload):
    """Eight branches of 100 tokens after a prompt of 60, two rows each."""
    strands = (Strand(0, 0, 60), *(Strand(2 * i, 60, 160, 0) for i in range(8)))
    forks = tuple(Fork(1 + i // 2, 160) for i in range(16))
    group = Group(tuple(range(16)), (170,) * 16, strands, forks, (160,) * 16)
    plan = make_plan([group], 200, "phased", offload=offload)
    assert plan.num_physical_tokens == 60 + 8 * 100 + 16 * 10
    assert max(sum(group.num_own_strand_tokens for group in each.groups) for each in plan.all_passes) <= 200


def test_a_tree_whose_strands_leave_no_room_for_its_longest_suffix_nests():
    """In one phased pass 50 tokens of strands would be alive with a suffix of 60."""
    strands = (Strand(0, 0, 10), Strand(0, 10, 30, 0), Strand(2, 10, 30, 0))
    forks = (Fork(1, 30), Fork(1, 30), Fork(2, 30), Fork(2, 30))
    group = Group((0, 1, 2, 3), (90, 35, 35, 35), strands, forks, (30,) * 4)
    plan = make_plan([group], 100, "auto")
    assert plan.depth > 1 and plan.num_physical_tokens == 125
    assert make_plan([group], 120, "phased").depth == 1, "where there is room, no more forwards"


def test_packed_passes_in_a_phase_a_are_even():
    """Four sessions of 800 tokens after a prompt: two passes of two sessions, not three in one and one in another."""
    batch = turn_rollouts(200, 4, 5, 30, 10, 40, 1 << 30)
    (one,) = plan_of(batch, 1640).phased
    assert [(nested.num_tokens, len(nested.groups)) for nested in one.nested] == [(800, 1), (800, 1)]


RUNS = {
    "nested": dict(budget=40),
    "nested deeper": dict(budget=24),
    "checkpointed": dict(budget=30),
    "reentrant": dict(budget=30),
    "kept attention": dict(budget=30, keep_attention=True),
    "offloaded": dict(budget=24, offload=True),
    "chunks": dict(budget=30, logits_chunk=3),
}
MARKS = {"qwen3": ()} | dict.fromkeys(("qwen3.5", "granite4-h", "gpt-oss-window-9"), pytest.mark.more)
CHECKPOINTED = {"checkpointed": False, "reentrant": True, "kept attention": False}


@pytest.mark.parametrize("num_groups", [1, 0], ids=["rows", "dummy"])
def test_an_error_of_a_nested_packed_pass_says_that_it_is_nested(monkeypatch, num_groups):
    """By which `engine.out_of_memory` knows that a phase A around it waits. MOCK: packing fails."""

    def fail(groups, offsets, phase, outer):
        if phase == "packed":
            raise RuntimeError("injected")
        return pack_groups(groups, offsets, phase, outer)

    monkeypatch.setattr(core_runner, "pack_groups", fail)
    model, batch = build("qwen3", torch.float64), rollouts(deep, 5)
    plan = plan_of(batch, 40, offload=False)
    if not num_groups:  # of a rank whose tree is less deep than another's
        plan = Plan((replace(plan.phased[0], packed=(PackedPass(),)),))
    monkeypatch.setattr("runners.make_plan", lambda *args, **options: plan)
    with pytest.raises(RuntimeError, match="injected") as raised:
        run_shared(model, batch, "phased", budget=40)
    assert raised.value.prefix_phase == "nested" and not plan.packed


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=MARKS.get(one, pytest.mark.full)) for one in FAMILIES],
)
def test_nested_passes_equal_hf(family, float64_inside):  # noqa: F811
    model = build(family, torch.float64)
    float64_inside(model)
    batch = rollouts(deep, 5)
    errors = {}
    with short_chunks():
        truth = measure(model, lambda: run_stock(model, batch))
        for name, options in RUNS.items():
            assert plan_of(batch, options["budget"], offload=options.get("offload", False)).depth > 1
            if name in CHECKPOINTED:
                kind = {"use_reentrant": CHECKPOINTED[name]}
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)
            ours = measure(model, lambda options=options: run_shared(model, batch, "phased", **options))
            model.gradient_checkpointing_disable()
            errors[name] = error(ours, truth)
    assert max(errors.values()) < 1e-9, errors


@pytest.mark.parametrize("draws", [15, pytest.param(100, marks=pytest.mark.full)])
def test_any_deep_rows_in_any_nesting_equal_hf(small, draws):  # noqa: F811
    @settings(max_examples=draws)
    @given(
        rows=st.sampled_from(deep_rows), seed=st.integers(0, 2**20), budget=st.integers(8, 120),
        wave_tokens=st.none() | st.integers(1, 40), share_read=st.floats(0, 1), offload=st.booleans(),
    )  # fmt: skip
    def run(**drawn) -> None:
        equal_hf(small, schedule="phased", **drawn)

    run()


# Each misses by 100 tolerances at least, or the tests above prove nothing.
@pytest.mark.parametrize("broken", BROKEN)
def test_broken_nesting_is_far_off(monkeypatch, broken):
    model, batch = build("qwen3", torch.float64), rollouts(deep, 5)
    assert plan_of(batch, 24).depth > 2
    truth = measure(model, lambda: run_stock(model, batch))
    broken(monkeypatch)
    ours = measure(model, functools.partial(run_shared, model, batch, "phased", budget=24))
    assert error(ours, truth) > 100 * 5e-6


def test_nothing_is_nested_where_one_level_computes_as_little_in_as_few_passes():
    for rows in ROWS:
        batch = rollouts(rows)
        assert plan_of(batch, 10**6) == make_plan(flatten(batch, torch.device("cpu"))[2], 10**6, "phased")


def test_the_deepest_passes_of_a_long_session_nest_only_where_rows_leave_it():
    """600 strands after each other: one row leaves in the middle, two at the end."""
    strands = tuple(Strand(1, 4 * i, 4 * i + 4, i - 1) for i in range(600))
    forks = Fork(299, 1200), Fork(599, 2400), Fork(599, 2400)
    group = Group((0, 1, 2), (1203, 2403, 2405), strands, forks, first_outputs=(1200, 2400, 2400))
    nested = Nesting(group, 1, 1, offload=False).deepest()
    assert nested.depth == 2 and nested.num_tokens == 1200
    assert [wave.num_tokens for wave in Plan((nested,)).waves] == [3, 3, 5]
