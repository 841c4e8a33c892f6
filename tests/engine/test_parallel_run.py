"""Two GRPO steps by real verl (Ray, FSDP2 on two gloo ranks, HF rollout) in both arms: sequence parallel, with LoRA, a
mixture of experts, recurrent. Stock is never sequence parallel. Shows neither vLLM nor CUDA.
"""

import os
from pathlib import Path

import pytest
from both_arms import both_arms, check_arms

ULYSSES = [f"actor_rollout_ref.{role}.fsdp_config.ulysses_sequence_parallel_size=2" for role in ("actor", "ref")] + [
    "actor_rollout_ref.model.external_lib=varlen",
    "actor_rollout_ref.model.override_config.attn_implementation=varlen_on_cpu",
]
# verl draws an adapter's first matrix from a seed of the process, unless told otherwise.
LORA = [
    "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.model.lora.merge=true", "actor_rollout_ref.actor.fsdp_config.full_determinism=true",
]  # fmt: skip
# verl packs rows, across which this model's state would leak: stock gets each in a micro-batch of its own.
ROW_BY_ROW = [
    "actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    *(f"actor_rollout_ref.{role}.log_prob_{key}" for role in ("rollout", "ref")
      for key in ("use_dynamic_bsz=false", "micro_batch_size_per_gpu=1")),
]  # fmt: skip
# Family, options of both arms, of ours, and of stock.
RUNS = {
    "ulysses": ("qwen3", [], ULYSSES, []),
    "lora": ("qwen3", LORA, [], []),
    "moe": ("qwen3_moe", [], [], []),
    # verl's own path of FSDP2 replays nothing: in a step's first update the same routes are its routers' own.
    "moe_replay": ("qwen3_moe", [], ["actor_rollout_ref.actor.fsdp_config.router_replay.mode=R2"], []),
    "moe_lora_ulysses": ("qwen3_moe", LORA, ULYSSES, []),
    "recurrent": ("qwen3_5", [], [], ROW_BY_ROW),
    # ref's ranks compute rows by themselves.
    "recurrent_ulysses": ("qwen3_5", [], [*ULYSSES[:1], ULYSSES[1].replace("=2", "=1")], ROW_BY_ROW),
}


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.parametrize("run", RUNS)
def test_step_1_is_stocks_and_prompts_are_shared(tmp_path: Path, run: str, train, monkeypatch) -> None:
    helpers = str(Path(__file__).parents[1] / "helpers")
    monkeypatch.setenv("PYTHONPATH", helpers, prepend=os.pathsep)
    family, both, ours, stocks = RUNS[run]
    options = ["trainer.v1.trainer_mode=sync", *both]
    stock, prefix = both_arms(tmp_path, train, options, ours, stocks, family)
    check_arms(stock, prefix, experts=family == "qwen3_moe")
