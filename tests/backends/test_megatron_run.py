"""Two GRPO steps by real verl (Ray, two gloo ranks, HF rollout) in both arms of Megatron: tensor and sequence parallel,
context parallel, and with experts of a rank each, also with router replay. Shows neither vLLM nor CUDA.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from both_arms import MEGATRON, both_arms, check_arms

pytest.importorskip("megatron.core")

OPTIONS = [
    "trainer.v1.trainer_mode=sync", "actor_rollout_ref.model.external_lib=megatron_cpu",
    "actor_rollout_ref.actor.megatron.vanilla_mbridge=true",
    # What platform=cpu says to FSDP2.
    "~actor_rollout_ref.actor.fsdp_config", "~actor_rollout_ref.ref.fsdp_config",
]  # fmt: skip
RUNS = {
    "qwen3": ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"],
    "qwen2": ["actor_rollout_ref.actor.megatron.context_parallel_size=2"],
    "qwen3_moe": [
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
        # mbridge takes experts' scores for normalised, as Qwen's own models have them; the tiny one has not.
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_pre_softmax=true",
    ],
}
RUNS["qwen3_moe replayed"] = [*RUNS["qwen3_moe"], "actor_rollout_ref.actor.megatron.router_replay.mode=R2"]
SHARES = importlib.util.find_spec("verl_prefix.backends.megatron") is not None


@pytest.mark.ray
@pytest.mark.parametrize("run", ["qwen3", *(pytest.param(name, marks=pytest.mark.full) for name in [*RUNS][1:])])
def test_step_1_is_stocks_and_prompts_are_shared(tmp_path: Path, run: str, train, monkeypatch) -> None:
    family = run.split()[0]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers"), prepend=os.pathsep)
    monkeypatch.setenv("MEGATRON_CPU_DTYPE", "float32")
    stock, *prefix = both_arms(
        tmp_path,
        train,
        [*OPTIONS, *RUNS[run]],
        family=family,
        vocab_size=1536,  # ranks of tensor parallelism have as many tokens each
        engines=MEGATRON,
        arms=("stock", "prefix")[: 1 + SHARES],
    )
    assert max(step["training/rollout_probs_diff_max"] for step in stock) < 1e-5
    for ours in prefix:
        check_arms(stock, ours, experts=family == "qwen3_moe")
