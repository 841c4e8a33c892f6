"""The cost model counts what runs, finds rates that it is given, and the gate takes the cheapest path on every rank."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from verl_prefix.auto import chooser as gate
from verl_prefix.auto import cost
from verl_prefix.auto.cost import ModelShape, Pass, Profile, Rates
from verl_prefix.core.groups import Group
from verl_prefix.core.waves import make_plan
from verl_prefix.models.hookup import model_shape
from verl_prefix.testing import random_rollouts, run_shared

SHAPE = ModelShape(
    linear=2e6, head=1e6, pair=500.0, windows=(None, 8), activations=100.0, boundary=10.0, kv=5.0, vocab_size=50
)


@hypothesis.given(st.integers(1, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_are_those_that_the_mask_leaves(length, behind, window):
    query = torch.arange(behind, behind + length).unsqueeze(1)
    key = torch.arange(behind + length)
    seen = (key <= query) & (key > query - (window or 10**6))
    assert cost._pairs(length, behind, window) == seen.sum()


def test_passes_of_a_plan_count_each_token_once():
    groups = [Group((0, 1, 2), 20, (5, 6, 7)), Group((3,), 10, (4,))]
    packed = cost.plan_passes(SHAPE, make_plan(groups, 10**6, "packed"))
    assert [p.tokens for p in packed] == [52] and packed[0].head_tokens == 22
    phased = cost.plan_passes(SHAPE, make_plan(groups, 10**6, "phased", wave_tokens=11))
    assert sum(p.tokens for p in phased) == 52 and sum(p.head_tokens for p in phased) == 22
    assert sum(p.pairs for p in phased) == packed[0].pairs
    twice = cost.plan_passes(SHAPE, make_plan(groups, 10**6, "packed"), logits_chunk=21)
    assert [(p.tokens, p.head_tokens) for p in twice] == [(52, 22 * 4 // 3)]
    stock = cost.stock_passes(SHAPE, groups, budget=60, dense_mask=False)
    assert sum(p.tokens for p in stock) == 3 * 21 + 18 + 11 + 4 and len(stock) == 2
    assert sum(p.pairs for p in cost.stock_passes(SHAPE, groups, 60, dense_mask=True)) > sum(p.pairs for p in stock)


@pytest.mark.parametrize(
    ("config_class", "fields"),
    [
        ("LlamaConfig", {}),
        ("Qwen3Config", dict(tie_word_embeddings=True)),
        ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
    ],
)
def test_flops_are_those_of_the_matmuls_that_run(config_class, fields):
    config = getattr(transformers, config_class)(
        vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, **fields,
    )  # fmt: skip
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    batch = random_rollouts([(30, [8, 9, 10])], 97)
    with FlopCounterMode(display=False) as counter:
        run_shared(model, batch, "packed", train=False)
    shape = model_shape(model, torch.float32)
    # torch does not count the CPU attention kernels; rotary angles are a small matmul, which the model leaves out.
    assert counter.get_total_flops() == pytest.approx(56 * shape.linear + 27 * shape.head, rel=1e-2)
    assert (shape.windows, shape.pair, shape.kv) == ((None,) * 3, 4.0 * 4 * 16, 2.0 * 3 * 2 * 16 * 4)


@hypothesis.given(*(st.floats(1e-12, 1e-9) for _ in range(3)), st.floats(0, 1e-2))
@hypothesis.settings(deadline=None)
def test_calibration_finds_the_rates_of_a_device(linear, attention, head, fixed):
    true, clock = Rates(fixed, linear, attention, head), [0.0]

    def run(groups):
        clock[0] += true.seconds(SHAPE, [cost._group_pass(SHAPE, groups, prefixes=True, suffixes=True)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost.time, "perf_counter", lambda: clock[0])
        found = cost.calibrate(SHAPE, run, max_tokens=512, unit=64)
    batch = [Pass(2000, 300, 4e5), Pass(100, 100, 5e3)]
    assert found.seconds(SHAPE, batch) == pytest.approx(true.seconds(SHAPE, batch), rel=0.05)


def test_profile_survives_the_disk_and_says_what_is_wrong(tmp_path):
    profile = Profile(update=Rates(1e-3, 1e-12, 2e-12, 3e-12), measured_on="here")
    profile.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == profile
    for damaged in (
        '{"update": {"speed": 1}}',
        "[]",
        "{",
        (tmp_path / "profile.json").read_text().replace("0.001", "NaN"),
    ):
        (tmp_path / "profile.json").write_text(damaged)
        with pytest.raises(ValueError, match="profile.json is not a cost profile .*; delete it"):
            Profile.read(tmp_path / "profile.json")


def make_gate(profile, reduce_max=lambda values: values, min_speedup=1.05):
    made = gate.Gate(SHAPE, False, 4096, min_speedup, None, False, "here", reduce_max, schedule=None, zero_grad=None)
    made.profile = profile
    return made


def test_a_profile_of_another_device_is_refused_and_ranks_measure_what_one_lacks(tmp_path):
    path = tmp_path / "profile.json"
    Profile(forward=Rates(), update=Rates(), measured_on="there").write(path)

    def read(measured_on, reduce_max=lambda values: values, path=path):
        return gate.Gate(SHAPE, False, 4096, 1.05, str(path), True, measured_on, reduce_max, None, None).profile

    assert read("there") == FLOPS.__class__(Rates(), Rates(), "there")
    assert read("there", lambda missing: [0, 1]).update is None
    with pytest.raises(ValueError, match="was measured on 'there', and this is 'here'; delete the file"):
        read("here")
    with pytest.raises(ValueError, match="create the folder"):
        read("here", path=tmp_path / "missing" / "profile.json")


LONG, SHORT = [Group(tuple(range(8)), 400, (50,) * 8)], [Group((0, 1), 4, (300, 300))]
CPU = torch.device("cpu")
FLOPS = Profile(forward=Rates(), update=Rates())


def test_long_prefixes_are_shared_and_short_ones_go_to_stock():
    chosen = make_gate(FLOPS).choose(LONG, 4000, None, False, CPU, forward_only=False)
    assert [work.waves for work in chosen.works] == [None]
    assert make_gate(FLOPS).choose(SHORT, 4000, None, False, CPU, forward_only=False) is None
    always = make_gate(Profile(), min_speedup=0)
    assert always.choose(SHORT, 4000, None, False, CPU, forward_only=False) is not None


def test_what_does_not_fit_is_cut_or_phased_by_cost():
    """700 of 800 tokens fit a pass: a second prefix costs less than many waves only where passes cost much."""
    for fixed, phased in ((0.0, True), (1.0, False)):
        rates = Rates(fixed=fixed)
        chosen = make_gate(Profile(rates, rates)).choose(LONG, 650, 60, False, CPU, forward_only=False)
        assert any(work.waves is not None for work in chosen.works) == phased


def test_update_follows_the_old_log_probs_and_both_are_decided_by_the_cost_of_both():
    made = make_gate(FLOPS)
    assert made.choose(LONG, 4000, None, False, CPU, forward_only=True) is not None
    assert made.choose(SHORT, 4000, None, False, CPU, forward_only=False) is not None
    assert made.choose(SHORT, 4000, None, False, CPU, forward_only=True) is None
    assert made.choose(LONG, 4000, None, False, CPU, forward_only=False) is None
    only_passes_cost = Rates(fixed=1.0, linear=0.0, attention=0.0, head=0.0)
    assert make_gate(Profile(Rates(), only_passes_cost)).choose(LONG, 4000, None, False, CPU, True) is None


def test_ranks_decide_alike():
    """Rank 0 would gain much, rank 1 nothing: the slowest rank's seconds decide for both."""
    seen = []
    for groups in (LONG, SHORT):
        make_gate(FLOPS, lambda values: seen.append(values) or values).choose(groups, 650, 60, False, CPU, False)
    assert len(seen[0]) == len(seen[1])
    agreed = [max(column) for column in zip(*seen, strict=True)]
    plans = [make_gate(FLOPS, lambda values: agreed).choose(g, 650, 60, False, CPU, False) for g in (LONG, SHORT)]
    assert (plans[0] is None) == (plans[1] is None)
