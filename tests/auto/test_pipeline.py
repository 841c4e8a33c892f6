"""What stages of a pipeline wait: by hand, by the literature's formula, and never in vain."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from verl_prefix.auto.chooser import Candidates, Workload, decide
from verl_prefix.auto.cost import Memory, Rates, peak_bytes
from verl_prefix.auto.cost_model import CostModel
from verl_prefix.auto.megatron import Division
from verl_prefix.auto.pipeline import Round, Work, timeline
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.core.plan import PackedPass, PhasedPass, Plan
from verl_prefix.core.planning import make_plan, pad_to_same_passes

# A token costs what it costs; no pairs and no lm_head, so that a saving of tokens is one of time.
SHAPE = ModelShape(
    linear=1e9, head=0.0, pair=0.0, windows=(None,) * 16, activations=1e5, boundary=1e4, kv=1e3, vocab_size=50
)
STAGES = (1, 2, 4, 8, 16)


def costs(stages: int, shape: ModelShape = SHAPE, min_speedup: float = 1.05, offload: bool = False) -> CostModel:
    memory = Memory(1, True, False, None, offload, division=Division(stages, stages=stages))
    return CostModel(shape, False, None, min_speedup, memory)


def groups_of(number: int, prefix: int, suffix: int, size: int) -> list[Group]:
    return [Group.of_prompt(tuple(range(i * size, (i + 1) * size)), prefix, (suffix,) * size) for i in range(number)]


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("number", [1, 3, 8, 64])
def test_equal_micro_batches_have_the_bubble_of_the_literature(stages, number):
    found = timeline([Round((), [Work(1.0, 2.0)] * number)], stages)
    assert found.seconds == pytest.approx(3.0 * (number + stages - 1) / stages)
    assert found.bubble == pytest.approx((stages - 1) / (number + stages - 1))


def test_two_stages_by_hand():
    """A prefix and two micro-batches; what the last stage has of lm_head is in its times.

    stage 0: A 0-2, F1 2-3, F2 3-4, B1 10-12, B2 16-18, C 20-24
    stage 1: A 2-4, F1 4-6, B1 6-10, F2 10-12, B2 12-16, C 16-20
    """
    found = timeline([Round([Work(4.0, 8.0)], [Work(2.0, 4.0, 1.0, 2.0)] * 2)], 2)
    assert found.ends == (24.0, 20.0) and found.bubble == pytest.approx(1 - (12 + 18) / 48)


@pytest.mark.parametrize(("number", "forward_only"), [(1, False), (1, True), (5, False)])
def test_what_is_sent_takes_time_of_the_stage_that_sends_it(number, forward_only):
    """Of one micro-batch every hop there and back; of several the slowest stage, in the middle, sends both ways."""
    found = timeline([Round((), [Work(3.0, 6.0, sent=0.5)] * number)], 3, forward_only)
    hops = 2 * 0.5 if forward_only else 4 * 0.5
    passes = 3.0 if forward_only else 9.0
    alone = passes + hops
    assert found.ends[2 if forward_only else 0] == alone if number == 1 else alone + (number - 1) * (passes / 3 + 1.0)
    assert found.bubble == pytest.approx(1 - number * passes / (3 * found.seconds))


@pytest.mark.parametrize("stages", STAGES)
def test_log_probs_fill_a_pipeline_once(stages):
    rounds = [Round([Work(3.0, 0.0)], [Work(1.0, 0.0)] * 4)] * 5
    assert timeline(rounds, stages, forward_only=True).seconds == pytest.approx((35 + 3 * (stages - 1)) / stages)


works = st.lists(st.builds(Work, *[st.floats(0, 9)] * 5), max_size=5)


@hypothesis.given(st.lists(st.tuples(works, works), max_size=4), st.integers(1, 7), st.booleans())
def test_stages_never_wait_for_each_other(rounds, stages, forward_only):
    found = timeline([Round(*one) for one in rounds], stages, forward_only)
    every = [work for one in rounds for part in one for work in part]
    least = sum(work.forward / stages + work.head_forward for work in every)
    if not forward_only:
        least += sum(work.backward / stages + work.head_backward for work in every)
    assert found.seconds >= least - 1e-9 and 0 <= found.bubble <= 1


@pytest.mark.parametrize(
    "stages", [1, 4, 16, pytest.param(2, marks=pytest.mark.more), pytest.param(8, marks=pytest.mark.more)]
)
@pytest.mark.parametrize("share", [0.1, 0.5, 2, 8, 16])
@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.more), pytest.param(32, marks=pytest.mark.full)])
def test_auto_is_never_slower_than_stock(stages, share, size):
    for number in (1, 2, 4, 16, 64):
        for suffix in (256, 2048):
            model = costs(stages, min_speedup=1.0)
            paths = Candidates(model, Workload(groups_of(number, int(share * suffix), suffix, size), 16384))
            seconds = paths.seconds(model.flops())
            plan = paths.taken(decide(seconds, 1.0))
            ours = model.timeline(paths.stock if plan is None else plan, "update", model.flops())
            stock = model.timeline(paths.stock, "update", model.flops())
            assert ours.seconds <= 1.02 * stock.seconds  # the choice is of log-probs and update together


@pytest.mark.parametrize(
    ("stages", "prefix", "suffix", "size", "budget", "kept"),
    [
        (4, 4096, 512, 8, 16384, 0.9), (8, 4096, 512, 8, 16384, 0.9),
        (4, 16384, 4096, 16, 32768, 0.85), (8, 16384, 4096, 16, 32768, 0.85),
    ],
)  # fmt: skip
def test_a_pipeline_keeps_what_sharing_gains(stages, prefix, suffix, size, budget, kept):
    """Of fewer tokens, where a rank has 16 prompts, and stock's own stages wait as they do. By tokens alone."""
    groups, model = groups_of(16, prefix, suffix, size), costs(stages)
    rates = {"update": Rates(0.0, 4e-12)}
    stock = model.timeline(model.stock_passes(groups, budget), "update", rates).seconds
    fewer = size * (prefix + suffix) / (prefix + size * suffix)
    ours = [model.plan(groups, budget, schedule) for schedule in ("auto", "packed")]
    assert stock / min(model.timeline(one, "update", rates).seconds for one in ours) > kept * fewer


def test_passes_as_large_as_the_budget_would_lose_it():
    """Of 16 prompts 8 passes: what the token budget alone says."""
    groups = groups_of(16, 4096, 512, 8)
    model, one_stage = costs(8), costs(1)
    stock = model.timeline(model.stock_passes(groups, 16384), "update", model.flops()).seconds
    large = one_stage.plan(groups, 16384, "auto")
    assert stock / model.timeline(large, "update", model.flops()).seconds < 0.75 * 4.5
    assert model.plan(groups, 16384, "auto") != large


@pytest.mark.parametrize("stages", [2, 4, 16])
@pytest.mark.parametrize(("prefix", "suffix", "size", "number", "budget"), [
    (6000, 700, 8, 64, 8192), (15000, 1000, 8, 32, 16384), (16384, 4096, 16, 16, 32768), (900, 100, 8, 64, 8192),
])  # fmt: skip
def test_prefixes_that_live_at_once_keep_what_a_pass_of_a_whole_model_does(
    stages, prefix, suffix, size, number, budget
):
    """Or are those for which a pass of a whole model has room. One that is longer stays whole, however short passes
    become. One round fewer would keep more."""
    groups, model = groups_of(number, prefix, suffix, size), costs(stages)
    plan = model.plan(groups, budget, "phased")
    one_pass = peak_bytes(SHAPE, Plan((PackedPass((Group.of_prompt((0,), 0, (budget,)),)),)), (), model.memory)
    alive = max(sum(group.num_own_strand_tokens for one in phased for group in one.groups) for phased in plan.rounds)
    assert alive / stages <= max(budget // 2, prefix) or peak_bytes(SHAPE, plan, (), model.memory) <= one_pass
    fewer = len(plan.rounds) - 1
    if fewer:
        more = dataclasses.replace(plan, at_once=-(-len(plan.phased) // fewer))
        assert peak_bytes(SHAPE, more, (), model.memory) > one_pass
    assert costs(stages, offload=True).plan(groups, budget, "phased").at_once is None


def test_prefixes_on_the_host_add_two_layers_for_each_stage():
    model = costs(4, offload=True)
    one, four, sixteen = (
        peak_bytes(SHAPE, make_plan(groups_of(number, 6000, 700, 8), 8192, "phased", offload=True), (), model.memory)
        for number in (1, 4, 16)
    )
    assert one < four == sixteen < 1.2 * one


@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize(("prefix", "suffix", "size", "number"), [(8000, 700, 8, 64), (8000, 300, 16, 128)])
def test_longer_waves_add_an_eighth_with_several_stages_too(checkpointed, prefix, suffix, size, number):
    groups = groups_of(number, prefix, suffix, size)
    model = costs(8)
    model = dataclasses.replace(model, memory=dataclasses.replace(model.memory, checkpointed=checkpointed))
    plan = model._plan(groups, 8192, "phased", False, 8192)
    shortest = model._at_once(make_plan(groups, 8192, "phased"), 4096, 8192)
    peaks = [peak_bytes(SHAPE, one, (), model.memory) for one in (plan, shortest)]
    assert peaks[0] <= 1.125 * peaks[1] and (not checkpointed or plan != shortest)


def test_what_an_update_takes_is_told_of_the_updates_plan():
    """Log-probs want longer passes: they drain once."""
    model, batch = costs(4), Workload(groups_of(64, 6000, 700, 8), 8192)
    plans = {kind: model.plan(*batch, "auto", kind == "forward") for kind in ("forward", "update")}
    assert plans["forward"] != plans["update"]
    seconds = [Candidates(model, batch, forward_only=one).seconds(model.flops()) for one in (True, False)]
    assert seconds[0] == seconds[1]
    assert seconds[0][1] == sum(model.timeline(plan, kind, model.flops()).seconds for kind, plan in plans.items())


def test_ranks_have_rounds_alike():
    one = Plan((PackedPass(),) + (PhasedPass(),) * 6, at_once=4)

    def reduce_max(values):  # with a rank of two packed and seven phased passes, of which two live at once
        return [*map(max, values, [2.0, 7.0, -2.0])] if len(values) == 3 else values

    padded = pad_to_same_passes(one, reduce_max)
    assert padded.at_once == 2 and [len(phased) for phased in padded.rounds] == [2, 2, 2, 1]
    assert pad_to_same_passes(Plan((PhasedPass(),)), list).at_once is None
    assert dataclasses.replace(one, at_once=None).rounds == [one.phased]
    assert Plan((PackedPass(),)).rounds == [[]]
