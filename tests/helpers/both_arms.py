"""Two steps of real verl in both arms."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from musique import RECIPE, recipe

from verl_prefix.testing import write_tiny_model

STOCK = ["model_engine=dp", "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.ref.strategy=fsdp2"]
# What `auto` measures on a busy machine may send rows this short verl's own path.
SHARED = "actor_rollout_ref.actor.prefix.min_speedup=0"
FSDP2 = {"stock": STOCK, "prefix": ["model_engine=prefix", SHARED]}
MEGATRON = {"stock": ["model_engine=megatron"], "prefix": ["model_engine=prefix_megatron", SHARED]}
VEOMNI = {"stock": ["model_engine=veomni"], "prefix": ["model_engine=prefix_veomni", SHARED]}


def both_arms(
    tmp_path: Path,
    train: Callable,
    options: list[str],
    ours: Sequence[str] = (),
    stocks: Sequence[str] = (),
    family: str = "qwen3",
    vocab_size: int = 2048,
    arms: Sequence[str] = ("stock", "prefix"),
    engines: Mapping[str, list[str]] = FSDP2,
    **driver: str | int,
) -> Iterator[list[dict[str, float]]]:
    """Two steps' metrics by stock with `stocks`, then by our engine with `ours`, of a tiny model on MuSiQue questions;
    or by one of these `arms` alone. vocab_size: at most. engines: which of verl's, and ours over it. driver: options of
    `train`."""
    questions = tmp_path / "questions.jsonl"
    recipe("make_questions.py", "--output", questions, "--num", 16, "--seed", 1)
    recipe("prepare.py", "--input", questions, "--output", tmp_path, "--max-paragraphs", 4, "--val-size", 4)
    texts = [row["prompt"][0]["content"] for row in pq.read_table(tmp_path / "train.parquet").to_pylist()]
    model = write_tiny_model(tmp_path / "model", texts=texts, vocab_size=vocab_size, family=family)
    return (
        train(
            RECIPE, model, "data.max_prompt_length=3072", "data.shuffle=false",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144", "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.seed=7", "algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=2",
            "reward.custom_reward_function.path=pkg://verl_prefix.testing",
            "reward.custom_reward_function.name=letter_share", *options, *engine,
            **{"config": "ppo_trainer"} | driver,
        )[0]
        for engine in map({"stock": [*engines["stock"], *stocks], "prefix": [*engines["prefix"], *ours]}.get, arms)
    )  # fmt: skip


def check_arms(stock: list[dict[str, float]], prefix: list[dict[str, float]], experts: bool = False) -> None:
    """That prompts are shared in both steps of ours, and that its first is stock's. experts: whether there are any."""
    for step in prefix:
        step = {name.removeprefix("actor/"): value for name, value in step.items()}
        assert step["prefix/reuse_fraction"] > 0.5 and step["prefix/stock_rows"] == 0
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert ("prefix/moe/max_vio/max" in step) == experts
    assert 0 < prefix[0]["actor/prefix/verify_log_probs"] <= 3
    assert stock[0]["actor/grad_norm"] > 1e-3, "a step whose rewards are all equal compares nothing"
    names = ("critic/score/mean", "response_length/mean", "entropy", "kl_loss", "grad_norm", "pg_loss")
    for name in (name if "/" in name else f"actor/{name}" for name in names):
        print(name, prefix[0][name], stock[0][name])
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
