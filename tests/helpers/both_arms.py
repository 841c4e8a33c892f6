"""Two steps of real verl in both arms."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow.parquet as pq
from musique import RECIPE, recipe

from verl_prefix.testing import write_tiny_model

STOCK = ["model_engine=dp", "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.ref.strategy=fsdp2"]
# What `auto` measures on a busy machine may send rows this short verl's own path.
SHARED = "actor_rollout_ref.actor.prefix.min_speedup=0"
FSDP2 = {"stock": STOCK, "prefix": ["model_engine=prefix", SHARED]}
VEOMNI = {"stock": ["model_engine=veomni"], "prefix": ["model_engine=prefix_veomni", SHARED]}


def both_arms(
    tmp_path: Path,
    train: Callable,
    options: list[str],
    ours: Sequence[str] = (),
    stocks: Sequence[str] = (),
    family: str = "qwen3",
    arms: Sequence[str] = ("stock", "prefix"),
    engines: Mapping[str, list[str]] = FSDP2,
    **driver: str | int,
) -> Iterator[list[dict[str, float]]]:
    """Two steps' metrics by stock with `stocks`, then by our engine with `ours`, of a tiny model on MuSiQue questions;
    or by one of these `arms` alone. engines: which of verl's, and ours over it. driver: options of `train`."""
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
            **{"config": "ppo_trainer"} | driver,
        )[0]
        for engine in map({"stock": [*engines["stock"], *stocks], "prefix": [*engines["prefix"], *ours]}.get, arms)
    )  # fmt: skip
