"""The MuSiQue recipe through real verl (Ray, v1 trainer, FSDP2 on gloo, HF rollout): prepare, train, check rewards.

Runs on the real sample where it lies beside the checkout, else on questions of our own. A tiny random model; does not
exercise vLLM or CUDA.
"""

import importlib.util
import json

import pyarrow.parquet as pq
import pytest
from musique import RECIPE, ROOT, recipe

from verl_prefix.testing import write_tiny_model

SAMPLE = ROOT.parent / "shared" / "data" / "musique_ans_v1.0_train_sample.jsonl"


def compute_score(*args):
    spec = importlib.util.spec_from_file_location("musique_reward", RECIPE / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score(*args)


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "ranks", "mode"),
    [("auto", 1, "prefix_sync"), ("phased", 2, "prefix_sync"), ("auto", 2, "sync"), ("auto", 2, "colocate_async")],
)
def test_two_training_steps_on_musique(tmp_path, schedule, ranks, mode, train):
    """With verl's own modes, model_engine=prefix alone: they deal a prompt's rows to both ranks."""
    questions = SAMPLE
    if not SAMPLE.exists():
        questions = tmp_path / "questions.jsonl"
        recipe("make_questions.py", "--output", questions, "--num", 16, "--seed", 1)
    recipe("prepare.py", "--input", questions, "--output", tmp_path, "--max-paragraphs", 4, "--val-size", 4)
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    texts = [row["prompt"][0]["content"] for row in rows]
    model = write_tiny_model(tmp_path / "model", texts=texts, vocab_size=2048)
    steps, _ = train(
        RECIPE, model, "data.max_prompt_length=3072", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144",
        "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.actor.prefix.schedule={schedule}", f"trainer.n_gpus_per_node={ranks}",
        f"trainer.v1.trainer_mode={mode}", "trainer.test_freq=2",
    )  # fmt: skip
    assert steps[-1]["val-core/musique/acc/mean@1"] == 0  # of a random model, which writes no block
    for step in steps:
        step |= {name.removeprefix("actor/"): value for name, value in step.items()}
        assert step["prefix/reuse_fraction"] > 0.5 and step["prefix/split_groups"] == 0
        assert ranks == 1 or step["prefix/exchanged_rows"] > 0
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert (step["prefix/waves"] > 0) == (schedule == "phased")

    answers = {text: row["reward_model"]["ground_truth"] for text, row in zip(texts, rows, strict=True)}
    for path in (tmp_path / "rollouts").glob("*.jsonl"):
        rollouts = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rollouts) == 12
        for rollout in rollouts:
            gold = next(gold for text, gold in answers.items() if text in rollout["input"])
            assert rollout["score"] == pytest.approx(compute_score("musique", rollout["output"], gold)["score"])
