"""The video recipe through real verl (Ray, v1 trainer, FSDP2 on gloo, HF rollout): clips decoded from file, trained on.

Generated clips and stills, a tiny random Qwen3-VL, the prefix engine on two ranks; `make demo-video` has Qwen2.5-VL too
and stock beside it. Does not exercise vLLM or CUDA.
"""

import json
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
    subprocess.run([sys.executable, RECIPE / script, *map(str, args)], check=True, timeout=300, env=environment)


@pytest.mark.ray
@pytest.mark.full
def test_clips_train_through_verl_with_the_pixels_that_the_rollout_saw(tmp_path, train):
    recipe("make_clips.py", "--output", tmp_path, "--clips", 2, "--stills", 3, "--size", 112)
    recipe(
        "prepare.py", "--input", tmp_path / "questions.json", "--output", tmp_path, "--val-size", 5,
        "--min-pixels", 64, "--max-pixels", 1600, "--image-max-pixels", 1600,
    )  # fmt: skip
    model = write_tiny_vlm(
        tmp_path / "model", family="qwen3_vl", texts=(tmp_path / "questions.json").read_text().split("\n")
    )
    steps, log = train(
        RECIPE, model, "data.max_prompt_length=1024", "data.image_patch_size=4",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        # A random model earns nothing: the entropy alone gives a gradient.
        "actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.actor.prefix.schedule=phased", "trainer.n_gpus_per_node=2",
    )  # fmt: skip
    assert "(SharedPixelsWorker pid=" in log
    for step in steps:
        assert step["actor/grad_norm"] > 0 and step["critic/score/mean"] >= 0
        assert step["prefix/reuse_fraction"] > 0.5 and step["prefix/split_groups"] == 0 and step["prefix/waves"] > 0
        # Another clip's pixels change these probabilities by 5e-4.
        assert step["training/rollout_probs_diff_max"] < 1e-6
    rollouts = [json.loads(line) for path in (tmp_path / "rollouts").glob("*.jsonl") for line in path.open()]
    answers = {row["reward_model"]["ground_truth"] for row in pq.read_table(tmp_path / "train.parquet").to_pylist()}
    assert len(rollouts) == 24 and {rollout["gts"] for rollout in rollouts} <= answers
