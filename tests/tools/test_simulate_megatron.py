"""Megatron's ranks in a simulation: what travels, what is computed, and what a rank holds, by shapes."""

from dataclasses import replace

import pytest
import torch
from helpers.simulations import H100, two_of_8, with_memory
from omegaconf import OmegaConf
from transformers import AutoConfig

from verl_prefix.auto.cost import Memory, peak_bytes
from verl_prefix.auto.cost_model import LONG_WAVE, CostModel
from verl_prefix.auto.megatron import Division
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.groups import Group
from verl_prefix.tools.simulate import depth
from verl_prefix.tools.simulate.accelerator import CLOCK, DEVICE, fake_accelerator
from verl_prefix.tools.simulate.command import dtypes, memory_of_engine, state_of_megatron
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.model import whole_shape
from verl_prefix.tools.simulate.passes import memory_of, plan_of
from verl_prefix.tools.simulate.tracker import Tracker

LAYERS, TOP, HIDDEN = 2, 2, 128
SIZES = dict(
    hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=1024,
)  # fmt: skip
DENSE = AutoConfig.for_model("llama", **SIZES)
MOE = AutoConfig.for_model("qwen3_moe", **SIZES, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=TOP)
ROWS = Group.of_prompt((0, 1), 255, (128, 128))
TOKENS, OUTPUTS = 255 + 2 * 128, 2 * 128
PACKED = Arm("packed", keeps_attention=False)


def job_of(config, division: Division, **options) -> Job:
    return Job(config, (ROWS,), 512, Memory(division.tensor, division=division, **options), division.data)


def amounts(job: Job, *names: str) -> list[float]:
    phases = depth._run(job, [PACKED], H100, log_probs=False)[0]
    return [sum(phase[amount] for name, phase in phases.items() if name != "optimizer") for amount in names]


@pytest.mark.parametrize(("checkpointing", "times"), [(False, 6), (True, 8)])
def test_ranks_gather_the_tokens_that_they_share(checkpointing, times):
    """Ahead of attention and MLP: forward, its input again in backward, and the gradient behind it; again forward where
    layers are computed again. Once ahead of lm_head, and once ahead of the embedding's gradient. bf16; a token more,
    where ranks do not divide them."""
    job = job_of(DENSE, Division(4, 2, True), checkpointed=checkpointing)
    tokens = TOKENS + TOKENS % 2
    assert amounts(job, "collective/allgather_base") == [(times * LAYERS + 2) * tokens * HIDDEN * 2]


def test_ranks_sum_what_they_do_not_share():
    """Without sequence parallelism: behind embedding, attention and MLP forward, ahead of these two backward, and ahead
    of lm_head backward; of the vocabulary three numbers per output in fp32."""
    job = job_of(DENSE, Division(4, 2, False), checkpointed=False)
    sent = (4 * LAYERS + 1) * TOKENS * HIDDEN * 2 + OUTPUTS * HIDDEN * 2 + 3 * OUTPUTS * 4
    kinds = [f"collective/{kind}" for kind in ("allgather_base", "reduce_scatter_base", "allreduce")]
    assert amounts(job, *kinds) == [0, 0, sent]


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.more), 2])
def test_rows_travel_to_their_experts_and_back(tensor):
    """Twice forward and twice backward; each rank those of its own tokens."""
    job = job_of(MOE, Division(8, tensor, tensor > 1, 4), checkpointed=False)
    tokens = -(-TOKENS // tensor)
    sent, computed = amounts(job, "collective/alltoall_base", "flops/linear")
    assert sent == 4 * LAYERS * tokens * TOP * HIDDEN * 2
    if tensor > 1:
        shared = with_memory(
            job, division=replace(job.memory.division, expert_tensor=tensor)
        )  # every expert by several ranks
        found = amounts(shared, "collective/alltoall_base", "flops/linear")
        assert found == [sent, pytest.approx(computed, rel=1e-9)]
    alone = job_of(MOE, Division(8, tensor, tensor > 1), checkpointed=False)
    assert amounts(alone, "collective/alltoall_base") == [0]


@pytest.mark.parametrize("both", [True, pytest.param(False, marks=pytest.mark.more)])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=lambda config: config.model_type)
def test_ranks_compute_together_what_one_computes(config, both):
    """Matrices and attention by a rank's share; but for the router, and for tokens that pad. `both` ways of sharing at
    once, or each."""
    whole = job_of(config, Division(8), checkpointed=False)
    tensor = with_memory(whole, division=Division(8, 2, True))
    each = (tensor, 2), (with_memory(whole, slices=2), 2)
    kinds = [f"flops/{kind}" for kind in ("linear", "attention", "lm_head")]
    computed = amounts(whole, *kinds)
    for job, ranks in [(with_memory(tensor, slices=2), 4)] if both else each:
        assert [ranks * of_rank for of_rank in amounts(job, *kinds)] == pytest.approx(computed, rel=0.01)


def test_context_parallel_ranks_are_apart_by_tensor_parallel_ones():
    """Ranks 0 and 2 of four: with two in a node their all-to-alls leave it, and nothing else of a pass does. On links
    so slow that nothing else counts."""
    job = job_of(DENSE, Division(4, 2, True), checkpointed=False, slices=2)
    slow = replace(H100, network=1e6, nodes=1e5)
    in_one, in_two = (
        depth._run(job, [PACKED], replace(slow, per_node=n), log_probs=False)[0]["packed"] for n in (4, 2)
    )
    wire = in_one["collective/alltoall_base"] / 2  # the other half stays
    later = wire / slow.nodes - wire / slow.network
    assert in_two["seconds"] - in_one["seconds"] == pytest.approx(later, rel=0.01)


def test_the_optimizer_reduces_gradients_and_gathers_weights_once():
    division = Division(8, 2, True, 2)
    job = job_of(MOE, division)
    step = depth._run(job, [PACKED], H100, log_probs=False)[0]["optimizer"]
    said = division.state(whole_shape(job))
    assert step["collective/reduce_scatter_base"] == pytest.approx(said.gradients, rel=0.01)
    assert step["collective/allgather_base"] == pytest.approx(said.parameters, rel=0.01)
    assert step["peak/optimizer"] == pytest.approx(said.optimizer, rel=0.01)


def test_products_of_experts_run_at_the_rate_of_their_dtype():
    """One of [n, in] and [1, in, out] takes as long as one of matrices."""
    with fake_accelerator(1), Tracker(H100, DEVICE, 7) as tracker:
        x, weight = (torch.empty(4096, 4096, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        ends = torch.empty(1, dtype=torch.int32, device=DEVICE)
        seconds = []
        for product in (lambda: x @ weight, lambda: torch._grouped_mm(x, weight.unsqueeze(0), offs=ends)):
            start = CLOCK.now
            with tracker.in_phase("product"):
                product()
            seconds.append(CLOCK.now - start)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.1)


@pytest.mark.parametrize("path", [pytest.param(x, marks=pytest.mark.more) for x in ("packed", "stock", "phased")])
def test_stages_run_their_part_of_every_pass(path):
    """Two stages and four equal passes, the last stage the slower one: it waits for the first pass, and the first stage
    for the last one's gradient. One micro-batch of verl's has the two rows of a group."""
    layers, arm = 6, replace(PACKED, path=path)
    config = AutoConfig.for_model("llama", **SIZES | {"num_hidden_layers": layers})
    groups = tuple(Group.of_prompt((2 * i, 2 * i + 1), 255, (128, 128)) for i in range(4))
    one = Job(config, groups, 2 * (256 + 128), Memory(2, division=Division(4, 2, True)), 2)
    job = replace(with_memory(one, division=replace(one.memory.division, world=8, stages=2)), replicas=4)
    whole = replace(one, shape=whole_shape(one))
    shallow = replace(whole, config=AutoConfig.for_model("llama", **SIZES | {"num_hidden_layers": layers - 1}))
    of_whole, less = (depth._run(each, [arm], H100, log_probs=False)[0] for each in (whole, shallow))
    of_stages = depth.simulate(job, [arm], H100)[0]
    assert set(of_stages) == {"pipeline", "log_probs/pipeline", "optimizer"}
    names = [name for name in of_whole if name not in ("setup", "optimizer")]
    for amount in ("flops/linear", "flops/lm_head", "collective/allgather_base"):
        assert 2 * of_stages["pipeline"][amount] == sum(of_whole[name][amount] for name in names)
    seconds, fewer = (sum(phases[name]["seconds"] for name in names) for phases in (of_whole, less))
    of_layers = layers * (seconds - fewer)
    tokens = 2 * (256 + 128) if path == "stock" else TOKENS
    hop = tokens * HIDDEN * 2 / 2 / H100.network  # bf16, of a rank's half of the tokens
    if path != "phased":
        passes = of_layers / 2 + (seconds - of_layers) + 4 * hop
        expected = passes + of_layers / 2 / 4 + hop
        assert of_stages["pipeline"]["seconds"] == pytest.approx(expected, rel=0.03)
    assert seconds / 2 < of_stages["pipeline"]["seconds"] < seconds
    assert 0 < of_stages["pipeline"]["bubble"] < 0.5
    assert of_stages["pipeline"]["peak"] > sum(job.memory.division.state(whole_shape(job)))


@pytest.mark.more  # the cost model of one stage is below
def test_stages_compute_the_layers_of_a_block_again():
    """`recompute_num_layers` of each stage: three are all that it has, and one leaves two whose activations stay."""
    config, peaks = AutoConfig.for_model("llama", **SIZES | {"num_hidden_layers": 6}), {}
    for case in (("uniform", 1), ("block", 3), ("block", 1)):
        names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        transformer = dict(zip(names, ("full", *case), strict=True))
        keys = {"pipeline_model_parallel_size": 2, "override_transformer_config": transformer}
        job = Job(config, (ROWS,), 1024, Memory.of_megatron(keys, 2, PrefixConfig()), 2)
        peaks[case] = depth.simulate(job, [Arm("stock")], H100, log_probs=False)[0]["pipeline"]["peak"]
    assert peaks["uniform", 1] == peaks["block", 3]
    shape = whole_shape(job)
    kept = 4 * (shape.activations - shape.boundary) * 2 * (256 + 128)  # of four layers, a micro-batch of the two rows
    assert peaks["block", 1] - peaks["block", 3] == pytest.approx(kept)


def test_a_pipeline_of_few_layers_is_refused():
    with pytest.raises(ValueError, match="2 pipeline stages .* at least 5 layers each, and the model has 2"):
        depth.simulate(job_of(DENSE, Division(2, stages=2)), [PACKED], H100)


LLAMA3_8B = AutoConfig.for_model(
    "llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, vocab_size=128256, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize(("checkpointing", "sequence", "context"), two_of_8((True, False), (True, False), (1, 2)))
def test_the_peak_is_within_15_per_cent_of_the_simulated_one(checkpointing, sequence, context):
    division = Division(8, 2, sequence)
    group = Group.of_prompt(tuple(range(8)), 4095, (1024,) * 8)
    memory = Memory(2, checkpointing, slices=context, division=division)
    job = Job(LLAMA3_8B, (group,), 12288, memory, 4)
    shape = whole_shape(job)
    job = replace(job, shape=shape)
    arms = [Arm("stock"), PACKED, replace(PACKED, path="phased")]
    room = replace(H100, capacity=400 * 2**30)
    for arm, phases in zip(arms, depth.simulate(job, arms, room, log_probs=False), strict=True):
        peak = max(phase["peak"] for name, phase in phases.items() if name not in ("setup", "optimizer"))
        held = sum(phases["optimizer"][f"peak/{owner}"] for owner in ("parameters", "gradients", "optimizer"))
        is_stock = arm.path == "stock"
        plan = None if is_stock else plan_of(job, shape, arm, job.budget)
        stock = shape.stock_passes(job.groups, job.budget, dense_mask=False) if is_stock else ()
        assert peak_bytes(shape, plan, stock, memory_of(job, arm)) == pytest.approx(peak - held, rel=0.15)


def test_recomputation_is_read_and_waves_are_long():
    def memory(**transformer) -> Memory:
        options = PrefixConfig()
        return Memory.of_megatron({"override_transformer_config": transformer}, 8, options)

    assert not memory().checkpointed and not memory(recompute_granularity="selective").checkpointed
    full = memory(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=4)
    assert (full.checkpointed, full.span, full.block) == (True, 4, None)
    block = memory(recompute_granularity="full", recompute_method="block", recompute_num_layers=10)
    assert (block.checkpointed, block.span, block.block) == (True, 1, 10)
    shape, rows = whole_shape(Job(LLAMA3_8B, (), 1)), [Group.of_prompt(tuple(range(8)), 8191, (1024,) * 8)]
    stock = shape.stock_passes(rows, 9216, dense_mask=False)
    kept = [
        peak_bytes(shape, None, stock, one) for one in (memory(recompute_granularity="full"), full, block, memory())
    ]
    assert kept[0] < kept[2] < kept[3] and kept[1] != kept[0]
    rows = [Group.of_prompt(tuple(range(8)), 32767, (1024,) * 8)]
    memory_of_waves = replace(memory(recompute_granularity="full"), logits_chunk=512)
    (phased,) = CostModel(shape, False, None, 1.0, memory_of_waves).plan(rows, 34000, "phased").phased
    assert max(wave.num_tokens for wave in phased.waves) == LONG_WAVE


@pytest.mark.parametrize(
    ("optim", "ddp", "gradient", "moments"),
    [
        ({}, {}, 4, 12),
        ({}, {"grad_reduce_in_fp32": False}, 2, 12),
        ({"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16", "exp_avg_dtype": "bf16"}, {}, 2, 10),
        ({"main_grads_dtype": "bf16", "exp_avg_dtype": "bf16"}, {}, 4, 12),  # of that optimizer alone
        ({"override_optimizer_config": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}}, {}, 4, 6),
    ],
)
def test_what_a_rank_holds_is_read_from_a_training_config(optim, ddp, gradient, moments):
    megatron = {
        "dtype": "bfloat16", "tensor_model_parallel_size": 2, "sequence_parallel": True, "override_ddp_config": ddp,
        "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1, "use_distributed_optimizer": True,
        "context_parallel_size": 2,
    }  # fmt: skip
    actor = {"megatron": megatron, "optim": optim, "prefix": PrefixConfig()}
    config = OmegaConf.create({"actor": actor, "model": {"enable_gradient_checkpointing": True}})
    memory = memory_of_engine(config, 8)
    assert memory.division == Division(8, 2, True, 4) and not memory.checkpointed and memory.slices == 2
    shape = whole_shape(job_of(MOE, memory.division))
    numbers = memory.division.numbers(shape)
    expected = (2 * numbers.parameters, gradient * numbers.gradients, moments * numbers.optimizer)
    assert state_of_megatron(config, memory.division, shape) == expected
    assert dtypes(config.actor) == (torch.bfloat16, torch.bfloat16)
