"""The video recipe through real verl (Ray, v1 trainer, FSDP2 on gloo, HF rollout): clips decoded from file, trained on.

Generated clips and stills, a tiny random Qwen3-VL, the prefix engine on two ranks; `make demo-video` has Qwen2.5-VL too
and stock beside it. Does not exercise vLLM or CUDA.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("qwen_vl_utils")

from verl_prefix.testing import write_tiny_vlm  # noqa: E402

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "video_rlvr"


def recipe(script: str, *args: object) -> None:
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, RECIPE / script, *map(str, args)], check=True, timeout=120, env=environment)


def test_clips_train_through_verl_with_the_pixels_that_the_rollout_saw(tmp_path):
    recipe("make_clips.py", "--output", tmp_path, "--clips", 2, "--stills", 3, "--size", 112)
    recipe(
        "prepare.py", "--input", tmp_path / "questions.json", "--output", tmp_path, "--val-size", 5,
        "--min-pixels", 64, "--max-pixels", 1600,
    )  # fmt: skip
    model = write_tiny_vlm(
        tmp_path / "model", family="qwen3_vl", texts=(tmp_path / "questions.json").read_text().split("\n")
    )
    metrics = tmp_path / "metrics.jsonl"
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo", "--config-name=prefix_grpo", "+platform=cpu",
        "+ray_kwargs.ray_init.address=local",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={tmp_path / 'train.parquet'}", f"data.val_files={tmp_path / 'val.parquet'}",
        "data.train_batch_size=4", "data.max_prompt_length=1024", "data.max_response_length=16",
        "data.filter_overlong_prompts=true", "data.dataloader_num_workers=0", "data.image_patch_size=4",
        f"reward.custom_reward_function.path={RECIPE / 'reward.py'}",
        "actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        # A random model earns nothing: the entropy alone gives a gradient.
        "actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.actor.prefix.schedule=packed", "trainer.n_gpus_per_node=2",
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

    assert "(SharedPixelsWorker pid=" in log.read_text(errors="replace")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [step["data"] for step in steps if "actor/grad_norm" in step["data"]]
    assert len(steps) == 2
    for step in steps:
        assert step["actor/grad_norm"] > 0 and step["critic/score/mean"] >= 0
        assert step["prefix/reuse_fraction"] > 0.5 and step["prefix/split_groups"] == 0
        # Another clip's pixels change these probabilities by 5e-4.
        assert step["training/rollout_probs_diff_max"] < 1e-6
    rollouts = [json.loads(line) for path in (tmp_path / "rollouts").glob("*.jsonl") for line in path.open()]
    answers = {row["reward_model"]["ground_truth"] for row in pq.read_table(tmp_path / "train.parquet").to_pylist()}
    assert len(rollouts) == 24 and {rollout["gts"] for rollout in rollouts} <= answers
