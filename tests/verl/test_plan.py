"""`verl-prefix plan`: what it reads, counts and refuses. No Ray, no weights; what a run then measures is compared in
examples/results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

os.environ.setdefault("VERL_PLATFORM", "cpu")

import verl  # noqa: E402, F401
from verl.utils import hf_tokenizer  # noqa: E402

from verl_prefix import cli, plan  # noqa: E402
from verl_prefix.testing import write_tiny_model, write_tiny_vlm  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model without its weights, and prompts of equal length."""
    path = tmp_path_factory.mktemp("plan")
    write_tiny_model(path / "model")
    (path / "model" / "model.safetensors").unlink()
    prompts = [[{"role": "user", "content": "the river " * 60}]] * 16
    pq.write_table(pa.table({"prompt": prompts}), path / "train.parquet")
    return path


def overrides(folder: Path, *more: str) -> list[str]:
    return [
        "+platform=cpu", "algorithm.adv_estimator=grpo", f"data.train_files={folder / 'train.parquet'}",
        "data.train_batch_size=8", "data.max_prompt_length=3072", "data.max_response_length=32",
        f"actor_rollout_ref.model.path={folder / 'model'}", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384", "trainer.n_gpus_per_node=2", *more,
    ]  # fmt: skip


def build(folder: Path, *more: str, responses: str | None = "20", shares: str | None = None) -> dict:
    return plan.build("ppo_trainer", overrides(folder, *more), responses, shares)


def test_tokens_groups_and_speedups_of_equal_prompts(folder):
    import ray

    found = build(folder, shares="update=0.5,old=0.1,ref=0.1")
    assert not ray.is_initialized() and found["unsupported"] == []
    prefix = found["prompt_tokens"]["p50"] - 1
    assert found["prompt_tokens"]["p5"] == found["prompt_tokens"]["p95"] and prefix > 100
    assert found["response_tokens"]["mean"] == 20
    # 8 prompts in 2 mini-batches on 2 ranks; the prefix once instead of 4 times.
    assert found["groups_per_rank_and_mini_batch"]["p5"] == found["groups_per_rank_and_mini_batch"]["p95"] == 2
    assert found["tokens"]["ratio"] == pytest.approx((4 * prefix + 80) / (prefix + 80))
    assert found["packed_groups"] == 4 * 8 and found["phased_groups"] == 0
    for name in ("update", "old", "ref"):
        assert 1.5 < found["speedup"][name] < 2 * found["tokens"]["ratio"]
    shares = {"update": 0.5, "old": 0.1, "ref": 0.1}
    after = 0.3 + sum(share / found["speedup"][name] for name, share in shares.items())
    assert found["speedup"]["step"] == pytest.approx(1 / after)


def test_a_small_budget_makes_phases_and_nothing_shared_gains_nothing(folder):
    small = build(folder, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=200")
    assert small["packed_groups"] == 0 and small["phased_groups"] == 4 * 8
    assert small["added_gib"]["phased"] <= build(folder)["added_gib"]["packed"]
    alone = build(folder, "actor_rollout_ref.rollout.n=1")
    assert alone["tokens"]["ratio"] == 1.0
    stock = build(folder, "actor_rollout_ref.actor.prefix.schedule=stock")
    assert stock["speedup"] == {"update": 1.0, "old": 1.0, "ref": 1.0} and stock["tokens"]["ratio"] == 1.0


def test_what_the_driver_refuses_is_said_and_is_the_exit_code(folder, capsys, tmp_path):
    words = overrides(folder, "actor_rollout_ref.model.use_fused_kernels=true", "model_engine=dp")
    assert cli.main(["plan", "--response-lengths", "20,4", "--out", str(tmp_path / "plan.json"), *words]) == 1
    assert "unsupported: actor_rollout_ref.model.use_fused_kernels=True" in capsys.readouterr().out
    assert "use_fused_kernels" in json.loads((tmp_path / "plan.json").read_text())["unsupported"][0]
    assert cli.main(["plan", *overrides(folder)]) == 0


def test_response_lengths_from_rollout_dumps(folder, tmp_path):
    (tmp_path / "1.jsonl").write_text(json.dumps({"output": "a"}) + "\n")
    assert build(folder, responses=str(tmp_path))["response_tokens"]["mean"] == 2  # the letter and the end token
    assert 3 < build(folder, responses="10,3")["response_tokens"]["p5"] < 10


@pytest.mark.parametrize(
    ("more", "responses", "shares", "message"),
    [
        ((), "many", None, "--response-lengths 'many': write TOKENS"),
        ((), "20", "update=0.9,old=0.9", "at most 1 together"),
        ((), "20", "gen=0.5", "write update=0.5"),
        (("data.train_files=/nowhere.parquet",), "20", None, "is not a file here"),
        (("data.prompt_key=question",), "20", None, "has columns"),
        (("data.max_prompt_length=5",), "20", None, "every prompt is longer"),
        (("data.train_batch_size=7",), "20", None, "make the batch a multiple"),
        (("actor_rollout_ref.nonsense=1",), "20", None, "do not compose"),
    ],
)
def test_what_is_missing_is_named(folder, more, responses, shares, message):
    with pytest.raises(ValueError, match=message):
        build(folder, *more, responses=responses, shares=shares)


def test_prompts_with_clips_are_as_long_as_verl_makes_them(tmp_path):
    """Every clip and still of the recipe is 40 x 40 pixels in the end: the tokens can be counted by hand."""
    pytest.importorskip("qwen_vl_utils")
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "video_rlvr"
    model = write_tiny_vlm(tmp_path / "model", family="qwen2_5_vl")

    def run(script: str, *words: object) -> None:
        environment = {"PYTHONPATH": ":".join(sys.path)}
        subprocess.run([sys.executable, recipe / script, *map(str, words)], check=True, timeout=120, env=environment)

    run("make_clips.py", "--output", tmp_path, "--clips", 2, "--stills", 0, "--size", 80)
    limits = ("--max-frames", 8, "--long", "sample", "--min-pixels", 64, "--max-pixels", 1600)
    run("prepare.py", "--input", tmp_path / "questions.json", "--output", tmp_path, "--val-size", 2, *limits)
    words = overrides(tmp_path, "data.image_patch_size=4", f"actor_rollout_ref.model.path={model}")
    found = plan.build("ppo_trainer", words, "20", None)
    text = pq.read_table(tmp_path / "train.parquet")["prompt"].to_pylist()
    tokenizer = hf_tokenizer(model)
    asked = [len(tokenizer(row[0]["content"], add_special_tokens=False).input_ids) for row in text]
    # 8 frames in pairs of 100 patches, four of them one token: 4 x 25 tokens, and the text.
    assert found["prompt_tokens"]["count"] == len(text)
    assert min(asked) + 100 <= found["prompt_tokens"]["p5"] <= found["prompt_tokens"]["p95"] <= max(asked) + 120
    assert found["unsupported"] == [] and found["speedup"]["update"] > 1.5
    for clip in tmp_path.rglob("*.mp4"):
        clip.write_bytes(b"")
    with pytest.raises(plan.PlanError, match="row 0: its images or videos cannot be read"):
        plan.build("ppo_trainer", words, "20", None)
