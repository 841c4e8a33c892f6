"""PPO with a critic under real verl, stock and ours: Ray, FSDP2 on gloo and HF rollout. Actor and critic are different
models."""

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from both_arms import both_arms
from musique import RECIPE
from transformers import AutoModelForTokenClassification

from verl_prefix.testing import write_tiny_model

# Means over passes, which on several ranks have other rows in each arm.
OF_PASSES = ("critic/vpred_mean", "critic/vf_clipfrac")
ILL = "critic/vf_explained_var"  # divides by the variance of returns, which are all but equal here


def _arms(
    tmp_path: Path, train, ranks: int, options: list[str], ours: list[str], stocks: list[str]
) -> tuple[list[dict], list[dict]]:
    arms = both_arms(
        tmp_path, train,
        [
            "algorithm.adv_estimator=gae", f"critic.model.path={tmp_path / 'critic'}", "critic.optim.lr=1e-3",
            "actor_rollout_ref.rollout.n=4", f"trainer.n_gpus_per_node={ranks}", *options,
        ],
        ours, ["critic.strategy=fsdp2", *stocks],
    )  # fmt: skip
    texts = [row["prompt"][0]["content"] for row in pq.read_table(tmp_path / "train.parquet").to_pylist()]
    path = write_tiny_model(tmp_path / "critic", texts=texts, vocab_size=2048, family="llama")
    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3)  # verl draws one, in each arm another
    model.save_pretrained(path)
    stock, prefix = arms
    return stock, prefix


def _check(stock: list[dict], prefix: list[dict], ranks: int) -> None:
    for step in prefix:
        assert step["critic/prefix/reuse_fraction"] > 0.5 and step["critic/prefix/stock_rows"] == 0
        assert step["critic/prefix/log_prob_stock_rows"] == 0
        mine = {name.removeprefix("actor/"): value for name, value in step.items()}
        assert mine["prefix/reuse_fraction"] == pytest.approx(step["critic/prefix/reuse_fraction"])
    assert 0 < prefix[0]["critic/prefix/verify_values"] <= 3 and "critic/prefix/verify_log_probs" not in prefix[0]
    assert stock[0]["critic/grad_norm"] > 1e-3 and stock[0]["actor/grad_norm"] > 1e-3
    names = [name for name in stock[0] if name.startswith("critic/") and not name.startswith("critic/perf/")]
    names = [name for name in names if name != ILL and (ranks == 1 or name not in OF_PASSES)]
    assert {"critic/vf_loss", "critic/values/mean", "critic/grad_norm", "critic/returns/mean"} <= {*names}
    for name in (*names, *(f"actor/{name}" for name in ("grad_norm", "pg_loss", "entropy", "kl_loss"))):
        print(name, prefix[0][name], stock[0][name])
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name


@pytest.mark.ray
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.more), pytest.param(1, marks=pytest.mark.full)])
def test_a_critic_shares_and_step_1_is_stocks(tmp_path: Path, train, ranks: int):
    _check(*_arms(tmp_path, train, ranks, [], [], []), ranks)


@pytest.mark.ray
@pytest.mark.full
def test_turns_in_mini_batches_of_prompts_share_and_step_1_is_stocks(tmp_path: Path, train, monkeypatch):
    """As test_turns_run.py, whose rows verl takes in one update."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(RECIPE), *filter(None, [os.environ.get("PYTHONPATH")])]))
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    options = [
        f"{rollout}.agent.agent_loop_config_path={RECIPE / 'search_turns.yaml'}",
        f"{rollout}.agent.default_agent_loop=search_turns", f"{rollout}.multi_turn.max_assistant_turns=4",
        f"{rollout}.multi_turn.tool_config_path={RECIPE / 'search_tool.yaml'}", f"{rollout}.n=2",
        "data.max_response_length=24", "data.max_prompt_length=700",
    ]  # fmt: skip
    ours = ["trainer.v1.trainer_mode=prefix_sync", f"{actor}.prefix.mini_batches=prompts"]
    _check(*_arms(tmp_path, train, 2, options, ours, [f"{actor}.ppo_mini_batch_size=16"]), 2)
