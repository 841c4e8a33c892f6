"""VeOmni's experts in a simulation: what travels, what is computed, and what a rank holds, by shapes."""

import functools
from dataclasses import replace

import pytest
from helpers.simulations import H100, two_of_8, with_memory
from transformers import AutoConfig, PretrainedConfig

from verl_prefix.auto.cost import Memory, peak_bytes
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.tools.simulate import depth
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.model import whole_shape
from verl_prefix.tools.simulate.passes import memory_of, plan_of
from verl_prefix.tools.simulate.tracker import Phase

LAYERS, TOP, HIDDEN = 2, 2, 128
MOE = AutoConfig.for_model(
    "qwen3_moe", hidden_size=HIDDEN, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=LAYERS,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=1024, num_experts=16, num_experts_per_tok=TOP,
)  # fmt: skip
PAIRS = Group.of_prompt((0, 1), 255, (128, 128))
TOKENS = 255 + 2 * 128
JOB = Job(MOE, (PAIRS,), TOKENS, Memory(8, checkpointed=False, veomni=True))
PACKED = Arm("packed", keeps_attention=False, all_logits=False)


def phases_of(job: Job) -> dict[str, Phase]:
    return depth._run(job, [PACKED], H100, log_probs=False)[0]


def amounts(job: Job, amount: str) -> float:
    return sum(phase[amount] for phase in phases_of(job).values())


@pytest.mark.parametrize(("checkpointing", "times"), [pytest.param(False, 4, marks=pytest.mark.more), (True, 6)])
def test_rows_travel_to_their_experts_and_back(checkpointing, times):
    """Twice forward and twice backward, and twice more where layers are computed again: bf16, by shapes."""
    job = with_memory(JOB, expert_ranks=4, checkpointed=checkpointing)
    sent = times * LAYERS * TOKENS * TOP * HIDDEN * 2
    assert amounts(job, "collective/alltoall_base") == sent
    assert amounts(with_memory(job, expert_ranks=1), "collective/alltoall_base") == 0


@pytest.mark.more
def test_experts_compute_the_same_on_every_engine():
    flops = [
        amounts(job, "flops/linear") for job in (with_memory(JOB, veomni=False), JOB, with_memory(JOB, expert_ranks=8))
    ]
    assert flops[1:] == pytest.approx(flops[:1] * 2, rel=1e-9)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.more), 2])
def test_a_rank_gathers_its_own_experts_alone(replicas):
    """What a rank gathers, forward and backward: all but experts whole, of experts its part, or nothing where it has
    that to itself; bf16. It holds as much as without expert parallelism."""
    shape = whole_shape(JOB)
    embedding = 2 * MOE.vocab_size * HIDDEN  # with lm_head, gathered once
    dense = shape.parameters - shape.expert_parameters - embedding - HIDDEN
    for expert_ranks in (1, 4, 8):
        job = replace(with_memory(JOB, expert_ranks=expert_ranks), replicas=replicas)
        gathered = shape.expert_parameters / expert_ranks if expert_ranks < 8 else 0
        # FSDP2 pads rows of a parameter to a multiple of its ranks, which norms and the router have few of.
        expected = 2.0 * (2 * (dense + gathered) + embedding + HIDDEN)
        phases = phases_of(job)
        assert sum(one["collective/allgather_base"] for one in phases.values()) == pytest.approx(expected, rel=0.01)
        held = phases["optimizer"]
        assert held["peak/parameters"] == pytest.approx(4 * shape.parameters / 8, rel=0.05)
        assert held["peak/gradients"] == pytest.approx(4 * shape.parameters / 8, rel=0.05)


def test_experts_of_several_nodes_cost_what_their_links_take():
    """Ranks that share experts are neighbours: eight of them send inside a node of eight, not inside nodes of four."""
    job = with_memory(JOB, expert_ranks=8)
    near, far = (seconds_of(job, replace(H100, per_node=per_node, launch=1e-9, kernel=1e-9)) for per_node in (8, 4))
    assert far > 1.5 * near


def seconds_of(job: Job, hardware) -> float:
    return depth._run(job, [PACKED], hardware, log_probs=False)[0]["packed"]["seconds"]


@functools.cache
def qwen3_30b() -> tuple[PretrainedConfig, ModelShape]:
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128,
        num_experts_per_tok=8, tie_word_embeddings=False,
    )  # fmt: skip
    return config, whole_shape(Job(config, (), 1))


@pytest.mark.more
@pytest.mark.parametrize(
    ("path", "expert_ranks", "checkpointing"), two_of_8(("packed", "phased"), (1, 8), (True, False))
)
def test_the_peak_is_within_15_per_cent_of_the_simulated_one(path, expert_ranks, checkpointing):
    config, shape = qwen3_30b()
    group = Group.of_prompt(tuple(range(8)), 2047, (2048,) * 8)
    job = Job(config, (group,), 16384, Memory(32, checkpointing, veomni=True, expert_ranks=expert_ranks), shape=shape)
    arm = replace(PACKED, path=path)
    phases = depth.simulate(job, [arm], replace(H100, capacity=200 * 2**30), log_probs=False)[0]
    peak = max(phase["peak"] for name, phase in phases.items() if name not in ("setup", "optimizer"))
    found = peak_bytes(shape, plan_of(job, shape, arm, job.budget), (), memory_of(job, arm))
    assert found == pytest.approx(peak - 16 * shape.parameters / job.memory.ranks, rel=0.15)
