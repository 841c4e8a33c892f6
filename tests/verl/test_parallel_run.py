"""Two GRPO steps by real verl (Ray, FSDP2 on two gloo ranks, HF rollout) in both arms: sequence parallel, with LoRA, a
mixture of experts. Stock is never sequence parallel. Shows neither vLLM nor CUDA.
"""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_exchange_run import PREFIX, STOCK
from test_musique_run import RECIPE, recipe

from verl_prefix.testing import write_tiny_model

ULYSSES = [f"actor_rollout_ref.{role}.fsdp_config.ulysses_sequence_parallel_size=2" for role in ("actor", "ref")] + [
    "actor_rollout_ref.model.override_config.attn_implementation=varlen_on_cpu"
]
# verl draws an adapter's first matrix from a seed of the process, unless told otherwise.
LORA = [
    "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.model.lora.merge=true", "actor_rollout_ref.actor.fsdp_config.full_determinism=true",
]  # fmt: skip
# A step of a tiny model is over in the time that rates are measured to.
SHARED = "actor_rollout_ref.actor.prefix.min_speedup=0"
# Family, options of both arms, options of ours.
RUNS = {
    "ulysses": ("qwen3", [], ULYSSES),
    "lora": ("qwen3", LORA, []),
    "moe": ("qwen3_moe", [], []),
    "moe_lora_ulysses": ("qwen3_moe", LORA, ULYSSES),
}


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.parametrize("run", RUNS)
def test_step_1_is_stocks_and_prompts_are_shared(tmp_path: Path, run: str, train) -> None:
    family, both, ours = RUNS[run]
    questions = tmp_path / "questions.jsonl"
    recipe("make_questions.py", "--output", questions, "--num", 16, "--seed", 1)
    recipe("prepare.py", "--input", questions, "--output", tmp_path, "--max-paragraphs", 4, "--val-size", 4)
    texts = [row["prompt"][0]["content"] for row in pq.read_table(tmp_path / "train.parquet").to_pylist()]
    model = write_tiny_model(tmp_path / "model", texts=texts, vocab_size=2048, family=family)
    stock, prefix = (
        train(
            RECIPE, model, "data.max_prompt_length=3072", "data.shuffle=false",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144", "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.seed=7", "algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=2",
            "reward.custom_reward_function.path=pkg://verl_prefix.testing",
            "reward.custom_reward_function.name=letter_share", "trainer.v1.trainer_mode=sync", *both, *engine,
            config="ppo_trainer",
        )[0]
        for engine in (STOCK, [*PREFIX, SHARED, *ours])
    )  # fmt: skip
    for step in prefix:
        step = {name.removeprefix("actor/"): value for name, value in step.items()}
        assert step["prefix/reuse_fraction"] > 0.5 and step["prefix/stock_rows"] == 0
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert ("prefix/moe/max_vio/max" in step) == (family == "qwen3_moe")
    assert 0 < prefix[0]["actor/prefix/verify_log_probs"] <= 3
    assert stock[0]["actor/grad_norm"] > 1e-3, "a step whose rewards are all equal compares nothing"
    names = ("critic/score/mean", "response_length/mean", "entropy", "kl_loss", "grad_norm", "pg_loss")
    for name in (name if "/" in name else f"actor/{name}" for name in names):
        print(run, name, prefix[0][name], stock[0][name])
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
