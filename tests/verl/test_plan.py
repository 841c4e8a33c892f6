"""`verl-prefix plan`: what it reads, counts and refuses. No Ray, no weights; what a run then measures is compared in
examples/results."""

import json
import os
import shutil
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


def test_figures_of_whole_groups_are_not_promised_under_another_trainer(folder, capsys):
    key = "trainer.v1.trainer_mode=prefix_sync"
    assert cli.main(["plan", "--response-lengths", "20", *overrides(folder)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("note: "))
    assert "trainer.v1.trainer_mode=sync" in line and line.endswith(key)
    spread, whole = build(folder), build(folder, key)
    assert [f"note: {note}" for note in spread.pop("notes")] == [line] and whole.pop("notes") == []
    assert spread == whole
    assert build(folder, "trainer.n_gpus_per_node=1")["notes"] == []


def test_ref_is_priced_with_its_own_micro_batches(folder):
    ref = "actor_rollout_ref.ref.log_prob"

    def gains(*more: str) -> dict:
        return build(folder, *more)["speedup_by_schedule"]["packed"]

    tokens = gains(f"{ref}_max_token_len_per_gpu=200")
    assert tokens["ref"] < tokens["old"] == gains()["old"] == gains()["ref"]
    rows = gains(f"{ref}_use_dynamic_bsz=false", f"{ref}_micro_batch_size_per_gpu=1")
    assert rows["ref"] < rows["old"] == tokens["old"]
    # With LoRA the actor computes ref too.
    adapter = gains("actor_rollout_ref.model.lora_rank=8", f"{ref}_max_token_len_per_gpu=200")
    assert adapter["ref"] == adapter["old"]


def test_a_missing_micro_batch_is_refused_where_its_pass_runs(folder):
    rows = ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false",)
    assert build(folder, *rows)["unsupported"] == []  # no KL, no ref
    for more in (rows, ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=null",)):
        (reason,) = build(folder, "actor_rollout_ref.actor.use_kl_loss=true", *more)["unsupported"]
        unit = "micro_batch_size" if more is rows else "max_token_len"
        assert reason.startswith(f"actor_rollout_ref.ref.log_prob_{unit}_per_gpu=null")
    other = ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",)
    (reason,) = build(folder, *other, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1")["unsupported"]
    assert reason.startswith("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False, and")


TOOLS = """
from verl.tools.function_tool import function_tool

@function_tool
def {name}(city: str) -> str:
    \"\"\"Tells how high the water of a river is.

    Args:
        city: Where it is measured.
    \"\"\"
    return city
"""
SCHEMA = """
tools:
  - class_name: verl.tools.base_tool.BaseTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: tides
        description: Tells when the sea is highest.
        parameters: {type: object, properties: {}, required: []}
"""


def show_tools(model: Path) -> None:
    """Makes the model's chat template print its tools first."""
    template = model / "chat_template.jinja"
    template.write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + template.read_text())


def test_prompts_hold_the_schemas_of_their_tools(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    show_tools(tmp_path / "model")
    (tmp_path / "tools.py").write_text(TOOLS.format(name="water_level"))
    (tmp_path / "tools.yaml").write_text(SCHEMA)
    model = f"actor_rollout_ref.model.path={tmp_path / 'model'}"
    alone = build(folder, model)["prompt_tokens"]["p50"]
    assert alone == build(folder)["prompt_tokens"]["p50"]
    turns = "actor_rollout_ref.rollout.multi_turn"
    native, function = f"{turns}.tool_config_path={tmp_path}/tools.yaml", f"data.function_tool_path={tmp_path}/tools.py"
    one, other, both = (
        build(folder, model, *keys)["prompt_tokens"]["p50"] - alone
        for keys in ((native,), (function,), (native, function))
    )
    # Two lists become one: their brackets and a comma make the difference.
    assert one > 20 and other > 20 and abs(both - one - other) <= 3
    with pytest.raises(plan.PlanError, match="data.function_tool_path=/nowhere.py: these tools cannot be loaded"):
        build(folder, model, "data.function_tool_path=/nowhere.py")


def test_response_lengths_from_rollout_dumps(folder, tmp_path):
    (tmp_path / "1.jsonl").write_text(json.dumps({"output": "a"}) + "\n")
    assert build(folder, responses=str(tmp_path))["response_tokens"]["mean"] == 2  # the letter and the end token
    assert 3 < build(folder, responses="10,3")["response_tokens"]["p5"] < 10
    wide = build(folder, responses="31,1e308")["response_tokens"]
    assert (wide["p5"], wide["p95"]) == (1, 32)


@pytest.mark.parametrize(
    ("more", "responses", "shares", "message"),
    [
        ((), "many", None, "--response-lengths 'many': write TOKENS"),
        ((), "20", "update=0.9,old=0.9", "at most 1 together"),
        ((), "20", "gen=0.5", "write update=0.5"),
        ((), "20", "update=-0.5", "--shares 'update=-0.5': write update=0.5"),
        ((), "20", "update=nan", "--shares 'update=nan': write update=0.5"),
        ((), "0", None, "--response-lengths '0': write a mean of 1 to 32 tokens"),
        ((), "-5", None, "--response-lengths '-5': write a mean"),
        ((), "inf", None, "--response-lengths 'inf': write a mean"),
        ((), "nan", None, "--response-lengths 'nan': write a mean"),
        ((), "33", None, "--response-lengths '33': .*data.max_response_length"),
        ((), "20,inf", None, "--response-lengths '20,inf': .* finite STD"),
        ((), "20,-1", None, "--response-lengths '20,-1': .* finite STD"),
        (("actor_rollout_ref.model.tokenizer_path=/none",), "20", None, "model.tokenizer_path=/none cannot be read"),
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


def test_a_model_or_an_out_that_is_not_there_is_one_line_and_exit_code_2(folder, tmp_path, capsys, monkeypatch):
    def refused(*words: str) -> str:
        capsys.readouterr()
        assert cli.main(["plan", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    missing = [*overrides(folder), f"actor_rollout_ref.model.path={tmp_path}/none"]
    assert f"actor_rollout_ref.model.path={tmp_path}/none cannot be read here" in refused(*missing)
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    tokenizer = f"actor_rollout_ref.model.tokenizer_path={folder / 'model'}"
    broken = [*overrides(folder), tokenizer, f"actor_rollout_ref.model.path={tmp_path}/model"]
    assert f"actor_rollout_ref.model.path={tmp_path}/model cannot be read here" in refused(*broken)
    monkeypatch.setattr(plan, "build", lambda *_: pytest.fail("the work is done before --out is looked at"))
    for out, wrong in (
        (tmp_path / "none" / "plan.json", f"is in {tmp_path}/none, which is no folder"),
        (tmp_path, "is a folder"),
    ):
        assert f"--out {out} {wrong}" in refused("--out", str(out), *overrides(folder))


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
    show_tools(Path(model))
    (tmp_path / "tools.py").write_text(TOOLS.format(name="river_depth"))
    shown = plan.build("ppo_trainer", [*words, f"data.function_tool_path={tmp_path}/tools.py"], "20", None)
    assert shown["prompt_tokens"]["p50"] > found["prompt_tokens"]["p50"] + 20
    for clip in tmp_path.rglob("*.mp4"):
        clip.write_bytes(b"")
    with pytest.raises(plan.PlanError, match="row 0: its images or videos cannot be read"):
        plan.build("ppo_trainer", words, "20", None)
