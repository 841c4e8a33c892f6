"""The MuSiQue recipe through real verl (Ray, v1 trainer, FSDP2 on gloo, HF rollout): prepare, train, check rewards.

Runs on the real sample where it lies beside the checkout, else on questions of our own. A tiny random model; does not
exercise vLLM or CUDA.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from verl_prefix.testing import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "musique"
SAMPLE = ROOT.parent / "shared" / "data" / "musique_ans_v1.0_train_sample.jsonl"


def recipe(script: str, *args: object) -> None:
    subprocess.run([sys.executable, RECIPE / script, *map(str, args)], check=True, timeout=120)


def compute_score(*args):
    spec = importlib.util.spec_from_file_location("musique_reward", RECIPE / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score(*args)


@pytest.mark.ray
@pytest.mark.parametrize(("schedule", "ranks"), [("auto", 1), ("phased", 2)])
def test_two_training_steps_on_musique(tmp_path, schedule, ranks):
    questions = SAMPLE
    if not SAMPLE.exists():
        questions = tmp_path / "questions.jsonl"
        recipe("make_questions.py", "--output", questions, "--num", 16, "--seed", 1)
    recipe("prepare.py", "--input", questions, "--output", tmp_path, "--max-paragraphs", 4, "--val-size", 4)
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    texts = [row["prompt"][0]["content"] for row in rows]
    model = write_tiny_model(tmp_path / "model", texts=texts, vocab_size=2048)
    metrics = tmp_path / "metrics.jsonl"
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo", "--config-name=prefix_grpo", "+platform=cpu",
        "+ray_kwargs.ray_init.address=local",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={tmp_path / 'train.parquet'}", f"data.val_files={tmp_path / 'val.parquet'}",
        "data.train_batch_size=4", "data.max_prompt_length=3072", "data.max_response_length=16",
        "data.filter_overlong_prompts=true", "data.dataloader_num_workers=0",
        f"reward.custom_reward_function.path={RECIPE / 'reward.py'}",
        "actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144",
        "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.actor.prefix.schedule={schedule}", f"trainer.n_gpus_per_node={ranks}",
        "trainer.logger=[console,file]", "trainer.total_training_steps=2", "trainer.val_before_train=false",
        "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.resume_mode=disable",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
    ]  # fmt: skip
    environment = os.environ | {
        "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "VERL_FILE_LOGGER_PATH": str(metrics),
        "RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    environment.pop("RAY_ADDRESS", None)
    log = tmp_path / "run.log"
    with log.open("w") as out:
        code = subprocess.run(command, cwd=tmp_path, env=environment, stdout=out, stderr=out, timeout=400).returncode
    assert code == 0, "\n".join(log.read_text(errors="replace").splitlines()[-40:])

    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [step["data"] for step in steps if "actor/grad_norm" in step["data"]]
    assert len(steps) == 2
    for step in steps:
        assert step["prefix/reuse_fraction"] > 0.5 and step["prefix/split_groups"] == 0
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert (step["prefix/waves"] > 0) == (schedule == "phased")

    answers = {text: row["reward_model"]["ground_truth"] for text, row in zip(texts, rows, strict=True)}
    for path in (tmp_path / "rollouts").glob("*.jsonl"):
        rollouts = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rollouts) == 12
        for rollout in rollouts:
            gold = next(gold for text, gold in answers.items() if text in rollout["input"])
            assert rollout["score"] == pytest.approx(compute_score("musique", rollout["output"], gold)["score"])
