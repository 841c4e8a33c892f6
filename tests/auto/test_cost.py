"""The cost model counts what runs, finds rates that it is given, and every rank takes the same cheapest path."""

import dataclasses
import json
from pathlib import Path

import families
import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import transformers
from omegaconf import OmegaConf
from runners import random_rollouts, run_shared
from torch.utils.flop_counter import FlopCounterMode

from verl_prefix.auto import calibration, chooser, cost, cost_model, shape
from verl_prefix.auto.cost import PassCost, Rates
from verl_prefix.auto.megatron import State
from verl_prefix.auto.shape import ModelShape, model_shape
from verl_prefix.core.groups import Fork, Group, Strand
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.planning import make_plan
from verl_prefix.testing.rollouts import flatten, search_rollouts, turn_rollouts
from verl_prefix.tools.plan.predict import Predictor, Sizes
from verl_prefix.tools.plan.training_command import Model
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.model import whole_shape
from verl_prefix.tools.simulate.passes import plan_of

SHAPE = ModelShape(
    linear=2e6, head=1e6, pair=500.0, windows=(None, 8), activations=100.0, boundary=10.0, kv=5.0, vocab_size=50
)


@hypothesis.given(st.integers(1, 40), st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_are_those_that_the_mask_leaves(length, behind, window):
    query = torch.arange(behind, behind + length).unsqueeze(1)
    key = torch.arange(behind + length)
    seen = (key <= query) & (key > query - (window or 10**6))
    assert shape.query_key_pairs(length, behind, window) == seen.sum()


def test_passes_of_a_plan_count_each_token_once():
    groups = [Group.of_prompt((0, 1, 2), 20, (5, 6, 7)), Group.of_prompt((3,), 10, (4,))]
    packed = SHAPE.passes_of(make_plan(groups, 10**6, "packed"))
    assert [p.tokens for p in packed] == [52] and packed[0].head_tokens == 22
    phased = SHAPE.passes_of(make_plan(groups, 10**6, "phased", wave_tokens=11))
    assert sum(p.tokens for p in phased) == 52 and sum(p.head_tokens for p in phased) == 22
    assert sum(p.pairs for p in phased) == packed[0].pairs
    twice = SHAPE.passes_of(make_plan(groups, 10**6, "packed"), logits_chunk=10)
    assert [(p.tokens, p.head_tokens) for p in twice] == [(52, 22 + 12 // 3)]
    stock = SHAPE.stock_passes(groups, budget=60, dense_mask=False)
    assert sum(p.tokens for p in stock) == 3 * 21 + 18 + 11 + 4 and len(stock) == 2
    assert sum(p.pairs for p in SHAPE.stock_passes(groups, 60, dense_mask=True)) > sum(p.pairs for p in stock)
    alone = SHAPE.stock_passes(groups, 60, dense_mask=True, one_row=True)
    assert len(alone) == sum(len(group.rows) for group in groups) > len(stock)
    assert [sum(column) for column in zip(*alone, strict=True)] == [sum(column) for column in zip(*stock, strict=True)]


@pytest.mark.parametrize(
    ("config_class", "fields"),
    [
        ("LlamaConfig", {}),
        ("Qwen3Config", dict(tie_word_embeddings=True)),
        ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
        ("DeepseekV3Config", families.MLA | dict(q_lora_rank=24)),
    ],
)
def test_flops_are_those_of_the_matmuls_that_run(config_class, fields):
    sizes = dict(vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4)
    config = getattr(transformers, config_class)(**sizes | dict(num_key_value_heads=2, head_dim=16) | fields)
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    batch = random_rollouts([(30, [8, 9, 10])], 97)
    with FlopCounterMode(display=False) as counter:
        run_shared(model, batch, "packed", train=False)
    shape = model_shape(model, torch.float32)
    # torch does not count the CPU attention kernels; rotary angles are a small matmul, which the model leaves out.
    linear = 56 * shape.linear - 29 * shape.last
    assert counter.get_total_flops() == pytest.approx(linear + 27 * shape.head, rel=1e-2)
    assert (shape.last > 0) == (config_class in ("LlamaConfig", "Qwen3Config"))
    kv_heads, head_dim = (4, 16 + 8) if config_class == "DeepseekV3Config" else (2, 16)
    assert (shape.windows, shape.pair) == ((None,) * 3, 4.0 * 4 * head_dim)
    assert shape.kv == 2.0 * 3 * kv_heads * head_dim * 4


TREES = {
    "turns": turn_rollouts(30, 2, 4, thinking=6, said=3, tool=5, vocab_size=97),
    "kept thinking": turn_rollouts(30, 2, 4, thinking=0, said=9, tool=5, vocab_size=97),
    "search": search_rollouts(30, 8, (2, 1, 3), vocab_size=97),
}


@pytest.mark.parametrize("options", [("packed", 10**6), ("packed", 90), ("phased", 100, 20)], ids=str)
@pytest.mark.parametrize("name", TREES)
def test_flops_of_trees_are_those_of_the_matmuls_and_kernel_calls_that_run(monkeypatch, name, options):
    """Linear layers by torch's counter; of attention, which it does not count on a CPU, the pairs that kernels get."""
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model, rollouts, pairs, read = transformers.LlamaForCausalLM(config), TREES[name], [], PackedRow.calls

    def calls(packed_row, *args):
        found = read(packed_row, *args)
        pairs.extend(
            shape.query_key_pairs(q1 - q0, k1 - k0 - (q1 - q0), None) if call.causal else (q1 - q0) * (k1 - k0)
            for call in found
            for q0, q1, k0, k1 in call.spans
        )
        return found

    monkeypatch.setattr(PackedRow, "calls", calls)
    with FlopCounterMode(display=False) as counter:
        run_shared(model, rollouts, *options, train=False)
    found, groups = model_shape(model, torch.float32), flatten(rollouts, "cpu")[2]
    passes = found.passes_of(make_plan(groups, options[1], *options[:1], *options[2:]))
    assert sum(pairs) == sum(p.pairs for p in passes)
    expected = sum(p.linear(found) + p.head_tokens * found.head for p in passes)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(("chunk", "rows"), [(10, [7, 10, 10, 10, 7]), (9, [9, 9, 9, 9, 9]), (27, [27])])
def test_lm_head_runs_twice_but_for_the_last_chunk(monkeypatch, chunk, rows):
    """Forward, then the others once more, in backward's order, as `passes_of` counts them."""
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    seen, forward = [], model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: (seen.append(len(hidden)), forward(hidden))[1])
    batch = random_rollouts([(30, [8, 9, 10])], 97)
    run_shared(model, batch, "packed", logits_chunk=chunk)
    assert seen == rows
    groups = [Group.of_prompt((0, 1, 2), 30, (8, 9, 10))]
    passes = SHAPE.passes_of(make_plan(groups, 10**6, "packed"), logits_chunk=chunk)
    assert [p.head_tokens for p in passes] == [27 + (sum(seen) - 27) // 3]


@hypothesis.given(*(st.floats(1e-12, 1e-9) for _ in range(3)), st.floats(0, 1e-2))
def test_calibration_finds_the_rates_of_a_device(linear, attention, head, fixed):
    true, clock = Rates(fixed, linear, attention, head), [0.0]

    def run(groups):
        clock[0] += true.seconds(SHAPE, [SHAPE.pass_of(groups)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration.time, "perf_counter", lambda: clock[0])
        found = calibration.calibrate(SHAPE, run, max_tokens=512, unit=64)
    batch = [PassCost(2000, 300, 4e5), PassCost(100, 100, 5e3)]
    assert found.seconds(SHAPE, batch) == pytest.approx(true.seconds(SHAPE, batch), rel=0.05)


@hypothesis.given(st.integers(64, 10**5), st.integers(1, 10**6))
def test_measuring_takes_a_small_part_of_a_batch(most, batch_tokens):
    max_tokens, rounds = calibration.effort(most, 64, batch_tokens)
    many = []

    def run(groups):
        many.append(sum(group.num_physical_tokens for group in groups))

    calibration.calibrate(SHAPE, run, max_tokens, max(2, min(64, max_tokens // 8)), rounds)
    assert 64 <= max_tokens <= most and 1 <= rounds <= 3
    assert sum(many) <= max(batch_tokens / 20, 3.5 * 64)
    if batch_tokens >= 20 * 8.5 * most:
        assert (max_tokens, rounds) == (most, 3)


def make_chooser(rates, reduce_max=lambda values: values, min_speedup=1.05, wave_tokens=None, measure=None):
    costs = cost_model.CostModel(SHAPE, False, wave_tokens, min_speedup, cost.Memory(1, False, False, 4096, False))
    return chooser.Chooser(costs, dict(rates), measure, reduce_max)


def chosen_plan(made, groups, budget, forward_only, **options):
    return made.choose(chooser.Workload(groups, budget), forward_only, **options)[0]


LONG, SHORT = [Group.of_prompt(tuple(range(8)), 400, (50,) * 8)], [Group.of_prompt((0, 1), 4, (300, 300))]
FLOPS = {"forward": Rates(), "update": Rates()}


def test_long_prefixes_are_shared_and_short_ones_go_to_stock():
    chosen = chosen_plan(make_chooser(FLOPS), LONG, 4000, forward_only=False)
    assert len(chosen.passes) == len(chosen.packed) == 1
    assert chosen_plan(make_chooser(FLOPS), SHORT, 4000, forward_only=False) is None
    always = make_chooser({}, min_speedup=0)
    assert chosen_plan(always, SHORT, 4000, forward_only=False) is not None


def test_a_batch_without_anything_to_compute_predicts_no_speedup():
    """As where all its rows are dead (`prefix.skip_zero_advantage`): the stock path still computes them."""
    made = make_chooser(FLOPS)
    long = chooser.Workload(LONG, 4000)
    assert made.choose(long, forward_only=False)[1].speedup > 1
    plan, without_live_rows = made.choose(chooser.Workload([], 4000), forward_only=False, own=long)
    assert plan is not None and without_live_rows.speedup is None


def test_the_reason_for_stocks_path_is_what_decided_it():
    alone, shape = [Group.of_prompt((i,), 300, (9,)) for i in range(4)], dataclasses.replace(SHAPE, head=0)
    made = make_chooser(FLOPS, min_speedup=0.1)
    critics = dataclasses.replace(made, costs=dataclasses.replace(made.costs, shape=shape))
    cases = [
        (critics, alone, True, "no rows of this batch share a prompt"),
        (critics, LONG, False, "the update follows its log-probs"),
        (make_chooser(FLOPS), SHORT, True, "prefix.min_speedup="),
    ]
    for one, groups, forward_only, why in cases:
        plan, decision = one.choose(chooser.Workload(groups, 4000), forward_only)
        assert plan is None and decision.why_stock.startswith(why)


def test_what_does_not_fit_is_cut_or_phased_by_cost():
    """700 of 800 tokens fit a pass: a second prefix costs less than many waves only where passes cost much."""
    for fixed, phased in ((0.0, True), (1.0, False)):
        rates = Rates(fixed=fixed)
        chosen = chosen_plan(
            make_chooser({"forward": rates, "update": rates}, wave_tokens=60), LONG, 650, forward_only=False
        )
        assert bool(chosen.phased) == phased


def test_update_follows_the_old_log_probs_and_both_are_decided_by_the_cost_of_both():
    made = make_chooser(FLOPS)
    assert chosen_plan(made, LONG, 4000, forward_only=True) is not None
    assert chosen_plan(made, SHORT, 4000, forward_only=False) is not None
    assert chosen_plan(made, SHORT, 4000, forward_only=True) is None
    assert chosen_plan(made, LONG, 4000, forward_only=False) is None
    only_passes_cost = Rates(fixed=1.0, linear=0.0, attention=0.0, head=0.0)
    assert (
        chosen_plan(make_chooser({"forward": Rates(), "update": only_passes_cost}), LONG, 4000, forward_only=True)
        is None
    )


def test_no_update_follows_the_log_probs_of_ref():
    made = make_chooser(FLOPS)
    assert chosen_plan(made, LONG, 4000, forward_only=True, update_follows=False) is not None
    assert made.log_probs is None and chosen_plan(made, SHORT, 4000, forward_only=False) is None
    assert chosen_plan(made, SHORT, 4000, forward_only=True) is None
    assert chosen_plan(made, LONG, 4000, forward_only=True, update_follows=False) is not None
    assert chosen_plan(made, LONG, 4000, forward_only=False) is None, "as the old log-probs"


def test_ranks_decide_alike():
    """Rank 0 would gain much, rank 1 nothing: the slowest rank's seconds decide for both."""
    seen = []
    for groups in (LONG, SHORT):
        one = make_chooser(FLOPS, lambda values: seen.append(values) or values, wave_tokens=60)
        chosen_plan(one, groups, 650, forward_only=False)
    assert len(seen[0]) == len(seen[1])
    agreed = [max(column) for column in zip(*seen, strict=True)]
    choosers = [make_chooser(FLOPS, lambda values: agreed, wave_tokens=60) for _ in range(2)]
    plans = [
        chosen_plan(one, groups, 650, forward_only=False) for one, groups in zip(choosers, (LONG, SHORT), strict=True)
    ]
    assert (plans[0] is None) == (plans[1] is None)


# GiB that an update adds, by tools/simulate (torch 2.13, transformers 5.10): Llama3-8B on 8 ranks, two groups of four,
# P 6000, S 1000, budget 14,100, waves of 2,000. (arm, checkpointed, no_sync, attention kept) -> GiB.
SIMULATED = {
    ("stock", True, False, False): 10.54, ("stock", True, True, False): 36.72,
    ("packed", True, False, False): 7.16, ("packed", True, True, False): 32.23,
    ("packed", True, False, True): 9.56, ("packed", True, True, True): 34.71,
    ("phased", True, False, False): 11.74, ("phased", True, True, False): 37.19,
    ("phased", True, False, True): 15.21, ("phased", True, True, True): 40.66,
    ("phased+offload", True, False, False): 4.99, ("phased+offload", True, True, False): 29.73,
    ("phased+offload", True, False, True): 4.99, ("phased+offload", True, True, True): 30.22,
    ("stock", False, False, False): 90.93, ("stock", False, True, False): 117.11,
    ("packed", False, False, False): 63.17, ("packed", False, True, False): 89.11,
    ("phased", False, False, False): 89.28, ("phased", False, True, False): 114.73,
    ("phased+offload", False, False, False): 15.76, ("phased+offload", False, True, False): 41.20,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama3_8b() -> shape.ModelShape:
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        return shape.model_shape(transformers.LlamaForCausalLM(config), torch.bfloat16)


@pytest.mark.parametrize(("arm", "checkpointed", "no_sync", "kept"), SIMULATED)
def test_the_peak_is_within_15_per_cent_of_the_simulated_one(llama3_8b, arm, checkpointed, no_sync, kept):
    groups = [Group.of_prompt(tuple(range(i, i + 4)), 6000, (1000,) * 4) for i in (0, 4)]
    path, _, offload = arm.partition("+")
    plan = None if path == "stock" else make_plan(groups, 14100, path, 2000, bool(offload))
    stock = llama3_8b.stock_passes(groups, 14100, dense_mask=False)
    memory = cost.Memory(8, checkpointed, no_sync, 4096, bool(offload), kept)
    found = cost.peak_bytes(llama3_8b, plan, stock, memory) / 2**30
    assert found == pytest.approx(SIMULATED[arm, checkpointed, no_sync, kept], rel=0.15)


@pytest.mark.parametrize(("path", "checkpointed", "temperature", "simulated"), [
    ("packed", True, 1.0, 17.36), ("packed", True, 0.7, 20.19), ("packed", False, 1.0, 126.76),
    ("packed", False, 0.7, 130.21), ("phased", True, 1.0, 15.80), ("phased", True, 0.7, 17.08),
    ("phased", False, 1.0, 101.58), ("phased", False, 0.7, 103.08),
])  # fmt: skip
def test_the_peak_with_all_logits_is_within_15_per_cent_of_the_simulated_one(
    llama3_8b, path, checkpointed, temperature, simulated
):
    """GiB by tools/simulate, as above: four groups of eight, P 2000, S 1000, budget 20,100, waves of 8,000. A
    temperature other than 1 makes a second copy of logits, which the estimate counts in any case."""
    groups = [Group.of_prompt(tuple(range(i, i + 8)), 2000, (1000,) * 8) for i in range(0, 32, 8)]
    memory = cost.Memory(8, checkpointed, False, None, False, attention_kept=checkpointed, all_logits=True)
    found = cost.peak_bytes(llama3_8b, make_plan(groups, 20100, path, 8000), (), memory) / 2**30
    assert found == pytest.approx(simulated, rel=0.15)


@pytest.mark.parametrize(("path", "offload", "slices", "tokens"), [
    ("packed", False, 1, 2 * (600 + 40)), ("phased", False, 1, 2 * 600), ("phased", True, 1, 2 * 600),
    ("packed", False, 4, 2 * (250 + 10)), ("phased", True, 4, 2 * 250),
])  # fmt: skip
def test_strand_tokens_that_a_row_reads_count_among_logits(llama3_8b, path, offload, slices, tokens):
    """By shapes: 600 of 1000 tokens go through lm_head, too, of which each of four ranks may have all of its 250. In
    phases their logits wait until phase C, with offload on the host, and get their gradient there."""
    strands, forks = (Strand(0, 0, 1000),), (Fork(0, 1000),) * 2
    logits_alone = dataclasses.replace(
        llama3_8b, activations=0.0, boundary=0.0, kv=0.0, parameters=0.0, layer_parameters=0.0, head=0.0
    )  # fmt: skip
    memory = cost.Memory(8, True, False, None, offload, all_logits=True, slices=slices)

    group = Group((0, 1), (1020, 1020), strands, forks, (400, 1000))
    plan = make_plan([group], 4000, path, 40, offload)
    assert cost.peak_bytes(logits_alone, plan, (), memory) == tokens * llama3_8b.logits


@pytest.mark.parametrize("checkpointed", [True, False])
def test_verls_offload_leaves_two_layers_of_stock_on_the_device(llama3_8b, checkpointed):
    """By shapes, on the batch above. Under gradient checkpointing ours with `prefix.offload` adds less than that."""
    groups = [Group.of_prompt(tuple(range(i, i + 4)), 6000, (1000,) * 4) for i in (0, 4)]
    stock = llama3_8b.stock_passes(groups, 14100, dense_mask=False)
    memory = cost.Memory(8, checkpointed, False, 4096, True)
    offloads = dataclasses.replace(memory, stock_offloads=True)
    before, after = (cost.peak_bytes(llama3_8b, None, stock, one) for one in (memory, offloads))
    a_layer = llama3_8b.boundary if checkpointed else llama3_8b.activations
    assert before - after == pytest.approx(30 * 14002 * a_layer, rel=1e-3)
    ours = cost.peak_bytes(llama3_8b, make_plan(groups, 14100, "phased", 2000, True), (), offloads)
    assert ours < after or not checkpointed


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def simulations() -> dict[str, list[tuple]]:
    """Of groups and of trees: (job, shape, groups, simulated seconds and GiB by path) of committed simulations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import simulate_tables
        import simulate_turns

        groups, turns = (
            json.loads((EXAMPLES / "results" / f"simulated_{name}.json").read_text()) for name in ("tables", "turns")
        )
        found = {"groups": [], "trees": []}
        for name, (shape, _, ranks, size, budget, checkpointed) in simulate_tables.SETTINGS.items():
            job = simulate_tables.job_of(shape, ranks, size, budget, checkpointed)
            arms = groups["shapes"][name]["arms"]
            found["groups"].append((job, {path: arms[path] for path in ("stock", "packed", "phased")}))
        for name, rollouts in simulate_turns.settings().items():
            of_name = turns["settings"][name]
            job = Job(
                simulate_tables.config_of("qwen3-8b"),
                tuple(flatten(rollouts, "cpu")[2]),
                of_name["budget"],
                cost.Memory(8),
            )
            arms = {path: of_name["arms"][f"tree, {path}"] for path in ("packed", "phased")}
            for path, arm in arms.items():
                plan = plan_of(job, whole_shape(job), Arm(path), job.budget)
                assert plan.num_physical_tokens == arm["tokens"], "make -C examples/results simulated-turns"
            found["trees"].append((job, {"stock": of_name["arms"]["stock"], **arms}))
    return {kind: [(job, whole_shape(job), arms) for job, arms in some] for kind, some in found.items()}


def predicted(job: Job, found: shape.ModelShape) -> dict[str, float]:
    """Speed-ups of an update, as `verl-prefix plan` says them."""
    costs = cost_model.CostModel(found, False, None, 1.05, job.memory)
    plans = {path: costs.plan(job.groups, job.budget, path) for path in ("packed", "phased")}
    passes = {path: found.passes_of(plan, job.memory.pass_chunk) for path, plan in plans.items()}
    stock = costs.flops()["update"].seconds(found, costs.stock_passes(job.groups, job.budget))
    return {path: stock / costs.flops()["update"].seconds(found, of_path) for path, of_path in passes.items()}


def test_speedups_of_trees_are_predicted_as_well_as_those_of_groups(simulations):
    """And the schedule that is predicted to be faster costs no more of simulated time than it may with groups."""
    errors, regrets = {}, {}
    for kind, some in simulations.items():
        errors[kind], regrets[kind] = [], []
        for job, found, arms in some:
            speedups = predicted(job, found)
            seconds = {path: arms[path]["update_seconds"] for path in speedups}
            errors[kind] += [arms["stock"]["update_seconds"] / seconds[path] / speedups[path] for path in seconds]
            regrets[kind].append(seconds[max(speedups, key=speedups.get)] / min(seconds.values()))
        assert len(errors[kind]) == 2 * len(some) > 6
    assert min(errors["groups"]) <= min(errors["trees"]) and max(errors["trees"]) <= max(errors["groups"])
    assert max(regrets["trees"]) <= max(regrets["groups"])


def test_the_peak_of_trees_is_within_15_per_cent_of_the_simulated_one(simulations):
    """Where an update begins with its largest pass, gradients are not there yet, which the estimate counts."""
    for job, found, arms in simulations["trees"]:
        gradients, resident = (n * found.parameters / job.memory.ranks / 2**30 for n in (4, 16))
        memory = dataclasses.replace(job.memory, attention_kept=True)
        for path in ("packed", "phased"):
            plan = cost_model.CostModel(found, False, None, 1.05, memory).plan(job.groups, job.budget, path)
            peak = cost.peak_bytes(found, plan, (), memory) / 2**30
            added = arms[path]["peak_gib"] - resident
            assert 0.85 * added <= peak <= 1.15 * (added + gradients), path


def test_waves_hide_their_own_cost_for_an_eighth_of_memory(llama3_8b):
    """One group of P 10240, S 2048, whose budget of one row leaves waves of one response."""
    groups, rows = [Group.of_prompt(tuple(range(8)), 10240, (2048,) * 8)], 2048
    memory = {name: cost.Memory(8, name != "activations", False, 4096, name == "offload")
              for name in ("checkpointed", "activations", "offload")}  # fmt: skip

    def waves(name, budget=12289, wave_tokens=None):
        plan = cost_model.CostModel(llama3_8b, False, wave_tokens, 1.05, memory[name]).plan(groups, budget, "phased")
        (one,) = plan.phased
        return [wave.num_tokens for wave in one.waves], plan

    found, longer = waves("checkpointed")
    assert found == [2 * rows] * 4
    shortest = make_plan(groups, 12289, "phased")
    before, after, too_long = (cost.peak_bytes(llama3_8b, plan, (), memory["checkpointed"]) for plan in (
        shortest, longer, make_plan(groups, 12289, "phased", least_wave=8192)))  # fmt: skip
    assert before < after <= before * 9 / 8 < too_long
    assert waves("offload")[0] == waves("offload", budget=20000)[0] == [2 * rows] * 4, "it is for memory"
    offloads = cost_model.CostModel(llama3_8b, False, None, 1.05, memory["offload"])
    log_probs = offloads.plan(groups, 12289, "phased", forward_only=True)
    assert len(log_probs.waves) == 2, "log-probs keep nothing that would wait in host memory"
    assert waves("activations")[0] == [rows] * 8, "a response more has activations of a tenth of all"
    assert waves("checkpointed", wave_tokens=rows)[0] == [rows] * 8, "as the user says"
    for most in (2 * rows, 4 * rows):
        assert waves("checkpointed", wave_tokens=most)[0] == [2 * rows] * 4, "no shorter than without the key"
    assert waves("checkpointed", budget=3000)[0] == [rows] * 8, "no wave is longer than the budget"
    assert waves("checkpointed", budget=20000)[0] == [4 * rows] * 2, "as the budget leaves"
    for name in ("checkpointed", "offload"):
        assert waves(name, 20000, wave_tokens=20001) == waves(name, 20000), "no wave leaves nothing for prefixes"
    assert waves("checkpointed", 20000, wave_tokens=20000) == waves("checkpointed", 20000)
    assert waves("offload", 20000, wave_tokens=20000)[0] == [8 * rows]


def make_predictor():
    prefix = {"schedule": "auto", "logits_chunk": 4096, "wave_tokens": None, "offload": False, "min_speedup": 1.05}
    sequences = {"ulysses_sequence_parallel_size": 1}
    actor = {"prefix": prefix, "fsdp_config": sequences} | sequences
    config = OmegaConf.create({"actor": actor, "model": {"enable_gradient_checkpointing": False}})
    return Predictor(config, Sizes(1, 1, 1, 2, {}), Model(None, SHAPE, State(0, 0, 0), None, None))


def test_plan_decides_on_ref_as_the_engine_that_computes_it():
    """An engine of its own never measures an update; with LoRA the actor's computes ref, and decides by both."""
    only_passes_cost = Rates(fixed=1.0, linear=0.0, attention=0.0, head=0.0)
    predictor = make_predictor()
    predictor.rates = {"forward": Rates(), "update": only_passes_cost}
    assert not predictor.decide([(chooser.Workload(LONG, 4000),) * 2], ref_engine=True)[0].stock
    assert predictor.decide([(chooser.Workload(LONG, 4000),) * 2], ref_engine=False)[0].stock


LENGTHS = st.tuples(st.integers(1, 800), st.integers(1, 800), st.integers(1, 8))
RATES = st.builds(Rates, *[st.floats(0.0, 1e-9)] * 4)


@hypothesis.given(
    st.lists(LENGTHS, min_size=1, max_size=4), st.integers(200, 8000), st.tuples(RATES, RATES), st.booleans()
)
@hypothesis.example([(60, 700, 8)] * 2, 8000, (Rates(), Rates()), True)
def test_plan_says_what_the_engine_does(lengths, budget, rates, has_log_probs):
    """`verl-prefix plan` and the engines of two ranks on the same batches: old log-probs, then the update."""
    groups = [Group.of_prompt(tuple(range(g)), p, (s,) * g) for p, s, g in lengths]
    ranks = [groups, groups[: len(groups) // 2 + 1]]
    predictor = make_predictor()
    predictor.rates = dict(zip(("forward", "update"), rates, strict=True))
    engines, log_probs = [make_chooser(predictor.rates) for _ in ranks], None
    for forward_only in [True, False] if has_log_probs else [False]:
        seen = []
        for groups in ranks:  # what each rank gives to the collective
            one = make_chooser(predictor.rates, lambda values, seen=seen: seen.append(values) or values)
            chosen_plan(one, groups, budget, forward_only)
        agreed = [max(column) for column in zip(*seen, strict=True)]
        choices = []
        for engine, groups in zip(engines, ranks, strict=True):
            engine.reduce_max = lambda values, agreed=agreed: agreed
            choices.append(engine.choose(chooser.Workload(groups, budget), forward_only))
        log_probs, predicted = predictor.decide(
            [(chooser.Workload(groups, budget),) * 2 for groups in ranks], log_probs
        )
        assert predicted == [plan for plan, _ in choices]
        assert {decision.speedup for _, decision in choices} == {log_probs.speedup}


MIN_SPEEDUPS = st.sampled_from([0.5, 1.0, 1.05, 2.0])


@hypothesis.given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(100, 2000), RATES, RATES, MIN_SPEEDUPS)
@hypothesis.example([(700, 90, 8)] * 3, 800, Rates(), Rates(fixed=1.0), 2.0)
@hypothesis.example(
    [(1, 99, 1), (99, 1, 2)], 100, Rates(0.0, 0.0, 0.0, 0.0), Rates(0.0, 0.0, 0.0, 4.3272773257458697e-10), 0.5
)
def test_what_is_not_measured_would_be_chosen_at_any_rates(lengths, budget, forward, update, min_speedup):
    """On two ranks, of which the second computes the rows of the first beside its own."""
    groups = [Group.of_prompt(tuple(range(g)), p, (s,) * g) for p, s, g in lengths]
    costs = make_chooser(FLOPS, min_speedup=min_speedup).costs
    own = [None, chooser.Workload(groups[1:], budget)]
    ranks = [chooser.Candidates(costs, chooser.Workload(groups, budget), one) for one in own]
    if not all(paths.is_certain() for paths in ranks):
        return
    priced = [paths.seconds({"forward": forward, "update": update}) for paths in ranks]
    slowest = [max(seconds) for seconds in zip(*priced, strict=True)]
    hypothesis.assume(slowest[1] > 1e-9)
    assert chooser.decide(slowest, min_speedup * (1 - 1e-9))[:2] == (False, False)


def test_rates_are_measured_where_the_choice_depends_on_them_alone():
    def measures(groups, budget, **options):
        asked = []
        one = make_chooser({}, measure=lambda *args: asked.append(args[2]) or Rates(), **options)
        for forward_only in (True, False):
            chosen_plan(one, groups, budget, forward_only)
        return asked

    assert measures(LONG, 900) == [], "one pass for four of stock's, and less of all that passes do"
    assert measures(LONG, 4000) == [True, False], "one pass on either path: as fast if passes cost most"
    assert measures(LONG, 700, wave_tokens=300) == [True, False], "two packed passes, or three with phases"
    assert measures(SHORT, 500) == [True, False]


@pytest.mark.parametrize(("slices", "head_tokens"), [(1, 8000 + (8000 - 4096) // 3), (2, 8000)])
def test_logits_in_chunks_run_again_by_each_ranks_tokens(slices, head_tokens):
    memory = cost.Memory(2, False, False, 4096, False, slices=slices)
    costs = cost_model.CostModel(SHAPE, False, None, 1.05, memory)
    paths = chooser.Candidates(costs, chooser.Workload([Group.of_prompt((0, 1), 1000, (4000, 4000))], 10**5))
    assert [one.head_tokens for one in paths.passes["update"][1]] == [head_tokens]


def test_stock_is_not_taken_where_it_does_not_fit_on_one_rank():
    assert chosen_plan(make_chooser(FLOPS, min_speedup=9.0), SHORT, 1000, True) is None
    alone = make_chooser(FLOPS, min_speedup=9.0)
    alone.stock_fits = lambda passes: sum(p.head_tokens for p in passes) < 600
    assert chosen_plan(alone, SHORT, 1000, True) is not None and chosen_plan(alone, SHORT, 1000, False) is not None
    told = make_chooser(FLOPS, lambda values: [*values[:-1], 1.0], min_speedup=9.0)
    assert chosen_plan(told, SHORT, 1000, True) is not None, "another rank lacks room"
    longest = max(end + 1 for group in SHORT for end in group.row_ends)
    row_by_row, short = (make_chooser(FLOPS, min_speedup=9.0) for _ in range(2))
    assert chosen_plan(row_by_row, SHORT, longest, True) is None
    assert chosen_plan(short, SHORT, longest - 1, True) is not None, "verl refuses a row that is longer than its budget"
