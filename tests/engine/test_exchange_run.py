"""`model_engine=prefix` alone under verl's own trainers, on two ranks, beside the stock engine: real verl, Ray, FSDP2
on gloo and HF rollout. The trainers deal a prompt's rows to both ranks; the engine brings them together.

Shows neither vLLM nor CUDA. `separate_async` needs a rollout on devices of its own, which no test has.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from test_musique_run import RECIPE, recipe

from verl_prefix.testing import write_tiny_model

# verl's own trainers; the last is the legacy one, whose batches are padded.
TRAINERS = {
    "sync": ["trainer.v1.trainer_mode=sync"],
    # Without a batch ahead, so that both engines see the same prompts at step 1.
    "colocate_async": ["trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0"],
    "legacy": ["trainer.use_v1=false"],
}
STOCK = ["model_engine=dp", "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.ref.strategy=fsdp2"]
PREFIX = ["model_engine=prefix"]


def both_arms(
    tmp_path: Path,
    train: Callable,
    options: list[str],
    ours: Sequence[str] = (),
    stocks: Sequence[str] = (),
    family: str = "qwen3",
) -> Iterator[list[dict[str, float]]]:
    """Two steps' metrics by stock with `stocks`, then by model_engine=prefix with `ours`, of a tiny model on MuSiQue
    questions."""
    questions = tmp_path / "questions.jsonl"
    recipe("make_questions.py", "--output", questions, "--num", 16, "--seed", 1)
    recipe("prepare.py", "--input", questions, "--output", tmp_path, "--max-paragraphs", 4, "--val-size", 4)
    texts = [row["prompt"][0]["content"] for row in pq.read_table(tmp_path / "train.parquet").to_pylist()]
    model = write_tiny_model(tmp_path / "model", texts=texts, vocab_size=2048, family=family)
    return (
        train(
            RECIPE, model, "data.max_prompt_length=3072", "data.shuffle=false",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144", "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.seed=7", "algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=2",
            "reward.custom_reward_function.path=pkg://verl_prefix.testing",
            "reward.custom_reward_function.name=letter_share", *options, *engine,
            config="ppo_trainer",
        )[0]
        for engine in ([*STOCK, *stocks], [*PREFIX, *ours])
    )  # fmt: skip


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_key_shares_all_and_step_1_is_stocks(tmp_path: Path, trainer: str, train) -> None:
    stock, prefix = both_arms(tmp_path, train, TRAINERS[trainer])
    for step in prefix:
        step = {name.removeprefix("actor/"): value for name, value in step.items()}
        assert step["prefix/reuse_fraction"] > 0.5 and step["prefix/split_groups"] == 0
        assert step["prefix/exchanged_rows"] > 0
        assert step["prefix/stock_rows"] == 0
        assert trainer == "legacy" or step["training/rollout_probs_diff_max"] < 1e-5
    for name in ("critic/score/mean", "response_length/mean", "actor/entropy", "actor/kl_loss"):
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
    assert stock[0]["actor/grad_norm"] > 0.01, "a step whose rewards are all equal compares nothing"
    for name in ("actor/grad_norm", "actor/pg_loss"):
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
