"""Each launch script's overrides, as bash expands them, compose in verl's config, pass the driver's checks and have a
plan; so do the settings of verl's own scripts. Models are folders at their true shape, without weights."""

import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from transformers import AutoConfig, AutoProcessor
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.config import validate_config
from verl.utils.import_utils import load_extern_object

from verl_prefix import cli
from verl_prefix.models.support import unsupported_reasons
from verl_prefix.testing import write_tiny_model, write_tiny_vlm
from verl_prefix.tools.plan import command as plan
from verl_prefix.tools.plan import figures, verdict
from verl_prefix.tools.plan.compose import compose_config
from verl_prefix.tools.plan.options import Options, PlanError
from verl_prefix.tools.plan.training_command import refusals

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MUSIQUE, VIDEO = "musique/run_qwen3_8b_fsdp2.sh", "video_rlvr/run_qwen2_5_vl_7b_fsdp2.sh"
both = pytest.mark.parametrize("script", [MUSIQUE, VIDEO])


def launched(script: str, tmp_path: Path, *args: str, **knobs: str) -> list[str]:
    """Run the script with a python3 that writes its arguments down; return those that follow the module's name."""
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(f"#!/bin/sh\n[ $1 = -c ] && exit ${{NO_WANDB:-0}}\nprintf '%s\\0' \"$@\" > '{tmp_path}/args'\n")
    fake.chmod(0o755)
    env = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), **knobs}
    subprocess.run(["bash", RECIPES / script, *args], check=True, env=env, capture_output=True, cwd=tmp_path)
    flags, module, *overrides = (tmp_path / "args").read_text().removesuffix("\0").split("\0")
    assert (flags, module) == ("-m", "verl.trainer.main_ppo")
    return overrides


def composed(overrides: list[str]) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


@both
@pytest.mark.parametrize("engine", ["prefix", "dp"])
def test_every_override_exists_and_the_driver_accepts_the_config(tmp_path, script, engine):
    model = write_tiny_model(tmp_path / "model")
    overrides = launched(script, tmp_path, f"actor_rollout_ref.model.path={model}", MODEL_ENGINE=engine)
    # "+" would add a misspelt key as well; verl leaves chat template arguments open.
    added = {MUSIQUE: ["+data.apply_chat_template_kwargs.enable_thinking=False"], VIDEO: []}
    assert [o for o in overrides if o.startswith("+")] == added[script]
    assert overrides[-1] == f"actor_rollout_ref.model.path={model}"
    keys = [override.split("=")[0] for override in overrides[:-1]]
    assert len(keys) == len(set(keys))

    config = composed(overrides)
    validate_config(config, use_reference_policy=True, use_critic=False)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert actor.strategy == config.actor_rollout_ref.ref.strategy == "fsdp2"
    assert (actor._target_ == "verl_prefix.config.fsdp.PrefixActorConfig") == (engine == "prefix")
    assert config.trainer.v1.trainer_mode == {"prefix": "prefix_sync", "dp": "sync"}[engine]
    assert (rollout.name, rollout.n, rollout.tensor_model_parallel_size) == ("vllm", 8, 2)
    lengths = config.data.max_prompt_length, config.data.max_response_length
    assert lengths == {MUSIQUE: (4096, 512), VIDEO: (2048, 512)}[script]
    assert rollout.max_model_len == sum(lengths) and actor.use_dynamic_bsz and actor.use_kl_loss
    score = load_extern_object(config.reward.custom_reward_function.path, config.reward.custom_reward_function.name)
    if script == MUSIQUE:
        assert score("musique", "<answer>Rome</answer>", ["Rome"])["score"] == 1
    else:
        assert (config.data.image_key, config.data.video_key) == ("images", "videos")  # what prepare.py writes
        response = "<think>x</think><answer>B</answer>"
        assert score("video_rlvr", response, "B", {"problem_type": "multiple choice"})["score"] == 1


@both
def test_every_logger_that_is_there_logs(tmp_path, script):
    """wandb where it is installed and has a key or a mode: else wandb.init would end the run."""

    def loggers(**knobs: str) -> list[str]:
        return composed(launched(script, tmp_path, **knobs)).trainer.logger

    assert loggers() == loggers(WANDB_API_KEY="", WANDB_MODE="") == ["console", "file"]
    netrc = tmp_path / ".netrc"
    for text, others in (("machine api.wandb.ai\n  login user\n", ["wandb"]), ("machine api-wandb-ai.example\n", [])):
        netrc.write_text(text)
        assert loggers() == ["console", "file", *others]
    netrc.unlink()
    for knob in (dict(WANDB_API_KEY="a" * 40), dict(WANDB_MODE="offline")):
        assert loggers(**knob) == ["console", "file", "wandb"]
        assert loggers(**knob, NO_WANDB="1") == ["console", "file"]
    assert loggers(WANDB_MODE="offline", LOGGER="[console]") == ["console"]


@both
def test_a_key_of_wandb_is_in_no_trace(tmp_path, script):
    """The scripts trace what they run (set -x)."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "python3"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    env = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "WANDB_API_KEY": "secret"}
    done = subprocess.run(["bash", RECIPES / script], check=True, env=env, capture_output=True, cwd=tmp_path, text=True)
    assert "+ python3 -m verl" in done.stderr and "secret" not in done.stderr


@both
def test_qwen3_5_in_a_recipe(tmp_path, script):
    """The recipe's own command with another model; stock row by row where flash-linear-attention is missing."""
    hybrid, recipe = "run_qwen3_5_9b_fsdp2.sh", Path(script).parent.name
    own, ours = launched(script, tmp_path), launched(hybrid, tmp_path, recipe)
    # Once in each: else its prompt opens <think>, and no clip's response would have the whole block.
    no_thinking = "+data.apply_chat_template_kwargs.enable_thinking=False"
    assert ours.count(no_thinking) == 1
    changed = {new for old, new in zip(own, ours[: len(own)], strict=True) if old != new}
    assert ours[len(own) :] == ([no_thinking] if script == VIDEO else [])
    names = {"actor_rollout_ref.model.path=Qwen/Qwen3.5-9B", "trainer.experiment_name=qwen3_5_9b_fsdp2_prefix"}
    assert changed == names | ({"data.image_patch_size=16"} if script == VIDEO else set())
    packed, alone = (launched(hybrid, tmp_path, recipe, MODEL_ENGINE="dp", NO_WANDB=x) for x in ("0", "1"))
    assert alone[: len(packed)] == packed and len(alone) == len(packed) + 6
    last = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"
    assert launched(hybrid, tmp_path, recipe, last, MODEL_ENGINE="dp", NO_WANDB="1") == [*alone, last]
    config = composed(alone).actor_rollout_ref
    for role, keys in (("actor", "ppo_"), ("rollout", "log_prob_"), ("ref", "log_prob_")):
        found = config[role]
        assert found[f"{keys}micro_batch_size_per_gpu"] == 1
        assert found["use_dynamic_bsz" if role == "actor" else "log_prob_use_dynamic_bsz"] is False
    if script == VIDEO:
        preset = launched(hybrid, tmp_path, recipe, "--preset", "video_r1", last, MODEL_ENGINE="dp", NO_WANDB="1")
        assert "actor_rollout_ref.actor.grad_clip=5" in preset and preset[-1] == last
    else:
        searching = launched(hybrid, tmp_path, recipe, SEARCH="turns", MODEL_ENGINE="dp")
        assert "actor_rollout_ref.rollout.multi_turn.format=qwen3_coder" in searching
        with pytest.raises(subprocess.CalledProcessError) as error:
            launched(hybrid, tmp_path, recipe, SEARCH="turns", MODEL_ENGINE="dp", NO_WANDB="1")
        assert b"Install flash-linear-attention, or set MODEL_ENGINE=prefix." in error.value.stderr
    with pytest.raises(subprocess.CalledProcessError) as error:
        launched(hybrid, tmp_path, "gsm8k")
    assert b"Unsupported recipe 'gsm8k'. Expected 'musique' or 'video_rlvr'." in error.value.stderr


@pytest.mark.parametrize(
    ("search", "loop", "lengths", "thinking"),
    [("True", "tool_agent", (1024, 4096), False), ("turns", "search_turns", (6144, 1024), True)],
)
def test_the_search_of_the_musique_script(tmp_path, search, loop, lengths, thinking):
    model = write_tiny_model(tmp_path / "model")
    overrides = launched(MUSIQUE, tmp_path, f"actor_rollout_ref.model.path={model}", SEARCH=search, PYTHONPATH="/a:/b")
    config = composed(overrides)
    validate_config(config, use_reference_policy=True, use_critic=False)
    rollout = config.actor_rollout_ref.rollout
    assert (config.data.max_prompt_length, config.data.max_response_length) == lengths
    assert rollout.max_model_len == sum(lengths)
    actor = config.actor_rollout_ref.actor
    assert (actor.ppo_mini_batch_size, actor.prefix.mini_batches) == (64, "prompts" if thinking else "rows")
    assert config.data.apply_chat_template_kwargs.enable_thinking is thinking
    turns, folder = rollout.multi_turn, RECIPES / "musique"
    assert (turns.enable, turns.format, turns.max_assistant_turns) == (True, "hermes", 5)
    assert Path(turns.tool_config_path) == Path(config.data.tool_config_path) == folder / "search_tool.yaml"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH == f"{folder}:/a:/b"
    own = {entry.name: entry._target_ for entry in OmegaConf.load(rollout.agent.agent_loop_config_path)}
    assert rollout.agent.default_agent_loop == loop and loop in _agent_loop_registry | own
    if search == "turns":
        module, name = own[loop].split(".")
        assert f"class {name}(ToolAgentLoop):" in (folder / f"{module}.py").read_text()
        knobs = {"MODEL_ENGINE": "dp", "MAX_TURNS": "4", "PPO_MINI_BATCH_SIZE": "32"}
        stock = composed(launched(MUSIQUE, tmp_path, f"actor_rollout_ref.model.path={model}", SEARCH=search, **knobs))
        validate_config(stock, use_reference_policy=True, use_critic=False)
        stock = stock.actor_rollout_ref
        assert (stock.rollout.multi_turn.max_assistant_turns, stock.actor.ppo_mini_batch_size) == (4, 4 * 32)
    plain = launched(MUSIQUE, tmp_path)
    assert not any("multi_turn" in override or "agent." in override for override in plain)
    names = [composed(words).trainer.experiment_name for words in (overrides, plain)]
    assert names == [f"qwen3_8b_fsdp2_prefix_search{'_turns' * thinking}", "qwen3_8b_fsdp2_prefix"]
    assert composed(launched(MUSIQUE, tmp_path, SEARCH=search, EXPERIMENT_NAME="x")).trainer.experiment_name == "x"
    alone = composed(launched(MUSIQUE, tmp_path, SEARCH=search))
    assert alone.ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH == str(folder)  # an empty entry is the cwd


def test_an_unknown_search_is_refused(tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as error:
        launched(MUSIQUE, tmp_path, SEARCH="true")
    assert b"Unsupported SEARCH=true. Expected 'False', 'True' or 'turns'." in error.value.stderr


def test_the_preset_of_video_r1(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    overrides = launched(VIDEO, tmp_path, "--preset", "video_r1", f"actor_rollout_ref.model.path={model}")
    assert "actor_rollout_ref.model.path=Video-R1/Qwen2.5-VL-7B-COT-SFT" in overrides
    keys = [override.split("=")[0] for override in overrides[:-1]]
    assert len(keys) == len(set(keys))
    config = composed(overrides)
    validate_config(config, use_reference_policy=True, use_critic=False)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (actor.kl_loss_coef, actor.grad_clip, actor.optim.lr_scheduler_type) == (0.04, 5, "cosine")
    assert (actor.kl_loss_type, actor.loss_agg_mode) == ("low_var_kl", "seq-mean-token-mean")
    assert (config.data.max_response_length, config.data.train_batch_size, actor.ppo_mini_batch_size) == (768, 16, 16)
    # Every GPU has two prompts, without which verl may fail; see the recipe's Limits.
    assert config.data.train_batch_size >= 2 * config.trainer.n_gpus_per_node * config.trainer.nnodes
    assert (actor.optim.lr, rollout.n, rollout.temperature) == (1e-6, 8, 1.0)
    assert config.trainer.experiment_name == "qwen2_5_vl_7b_fsdp2_prefix_video_r1"
    score = get_custom_reward_fn(config)("v", "<answer>B</answer>", "B", {"problem_type": "multiple choice"})
    assert (score["score"], score["acc"], score["format"]) == (0.5, 1, 0)
    with pytest.raises(subprocess.CalledProcessError) as error:
        launched(VIDEO, tmp_path, "--preset", "video_r2")
    assert b"Unsupported --preset video_r2. Expected 'video_r1'." in error.value.stderr


@both
def test_engine_and_placement_are_all_that_differs(tmp_path, script):
    name = Path(script).stem.removeprefix("run_")
    prefix, dp = (launched(script, tmp_path, MODEL_ENGINE=engine) for engine in ("prefix", "dp"))
    assert set(prefix) ^ set(dp) == {
        "model_engine=prefix",
        "model_engine=dp",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "trainer.v1.trainer_mode=prefix_sync",
        "trainer.v1.trainer_mode=sync",
        f"trainer.experiment_name={name}_prefix",
        f"trainer.experiment_name={name}_dp",
    }


@both
def test_knobs_reach_the_config_and_the_command_line_has_the_last_word(tmp_path, script):
    data = tmp_path / "my data"
    overrides = launched(
        script, tmp_path, "trainer.total_epochs=3", DATA_DIR=str(data), ROLLOUT_N="5", MAX_PROMPT_LENGTH="1000"
    )
    config = composed(overrides)
    assert config.data.train_files == str(data / "train.parquet")
    assert config.trainer.total_epochs == 3 and config.actor_rollout_ref.rollout.n == 5
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 4 * 1512


@both
def test_an_unknown_engine_is_refused(tmp_path, script):
    with pytest.raises(subprocess.CalledProcessError) as error:
        launched(script, tmp_path, MODEL_ENGINE="megatron")
    assert b"Expected 'prefix' or 'dp'" in error.value.stderr


def text(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, **others: Any) -> dict[str, Any]:
    sizes = dict(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocab)
    return dict(hidden_size=hidden, intermediate_size=mlp) | sizes | others


def tower(depth: int, hidden: int, mlp: int, out: int) -> dict[str, int]:
    return dict(depth=depth, hidden_size=hidden, intermediate_size=mlp, num_heads=16, out_hidden_size=out)


# transformers' model type, and the shape that the model's config.json publishes; {}: transformers' default.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B": ("qwen3", text(4096, 12288, 36, 32, 8, 151936, head_dim=128)),
    "Qwen3-4B": ("qwen3", text(2560, 9728, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=True)),
    "Llama-3-8B": ("llama", text(4096, 14336, 32, 32, 8, 128256)),
    "Qwen2.5-7B": ("qwen2", text(3584, 18944, 28, 28, 4, 152064)),
    "Qwen2.5-32B": ("qwen2", text(5120, 27648, 64, 40, 8, 152064)),
    "Qwen2.5-72B": ("qwen2", text(8192, 29568, 80, 64, 8, 152064)),
    "Mistral-Nemo-12B": ("mistral", text(5120, 14336, 40, 32, 8, 131072, head_dim=128, sliding_window=None)),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        text(2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
             num_experts_per_tok=8),
    ),
    "Qwen2.5-VL-7B": (
        "qwen2_5_vl",
        dict(
            text_config=text(3584, 18944, 28, 28, 4, 152064, rope_parameters=dict(
                rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24])),
            vision_config=tower(32, 1280, 3420, 3584),
        ),
    ),
    "Qwen3-VL-8B": (
        "qwen3_vl",
        dict(text_config=text(4096, 12288, 36, 32, 8, 151936, head_dim=128),
             vision_config=tower(27, 1152, 4304, 4096)),
    ),
    "Seed-OSS-36B": ("seed_oss", text(5120, 27648, 64, 80, 8, 155136, head_dim=128, attention_dropout=0.1)),
    "GLM-4.1V-9B": ("glm4v", {}),
    "Qwen3-VL-30B-A3B": (
        "qwen3_vl_moe",
        dict(text_config=text(2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
                              num_experts_per_tok=8),
             vision_config=tower(27, 1152, 4304, 2048)),
    ),
    "Qwen3.5-27B": (
        "qwen3_5",
        dict(text_config=text(5120, 17408, 64, 24, 4, 248320, head_dim=256, linear_num_value_heads=48),
             vision_config=tower(27, 1152, 4304, 5120)),
    ),
    "Qwen3.5-2B": (
        "qwen3_5",
        dict(text_config=text(2048, 6144, 24, 8, 2, 248320, head_dim=256, linear_num_value_heads=16,
                              tie_word_embeddings=True),
             vision_config=tower(24, 1024, 4096, 2048), tie_word_embeddings=True),
    ),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe", dict(vision_config=tower(27, 1152, 4304, 2048))),
    "Qwen3.5-122B-A10B": (
        "qwen3_5_moe",
        dict(text_config=text(3072, 8192, 48, 32, 2, 248320, head_dim=256, linear_num_value_heads=64,
                              moe_intermediate_size=1024, shared_expert_intermediate_size=1024),
             vision_config=tower(27, 1152, 4304, 3072)),
    ),
    "DeepSeek-V4-Flash": ("deepseek_v4", {}),
    "Qwen3-235B-A22B": (
        "qwen3_moe",
        text(4096, 12288, 94, 64, 4, 151936, head_dim=128, moe_intermediate_size=1536, num_experts=128,
             num_experts_per_tok=8),
    ),
    "Moonlight-16B-A3B": (
        "deepseek_v3",
        text(2048, 11264, 27, 16, 16, 163840, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
             num_experts_per_tok=6, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=None),
    ),
    "DeepSeek-V3-671B": ("deepseek_v3", {}),
    "Qwen3-0.6B": ("qwen3", text(1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True)),
    "Qwen3-Next-80B-A3B": ("qwen3_next", {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the folder of one of MODELS: config.json, a tokenizer, and a processor where the model sees."""
    tiny, home = {}, tmp_path_factory.mktemp("models")

    def write(name: str) -> Path:
        kind, fields = MODELS[name]
        family = kind if "_vl" in kind else "llama"
        if family != "llama":
            pytest.importorskip("qwen_vl_utils")
        if family not in tiny:
            tiny[family] = home / family
            (write_tiny_model if family == "llama" else write_tiny_vlm)(tiny[family], family=family)
        if not (home / name).exists():
            shutil.copytree(tiny[family], home / name, ignore=shutil.ignore_patterns("*.safetensors"))
            AutoConfig.for_model(kind, **fields).save_pretrained(home / name)
        return home / name

    return write


@pytest.fixture(scope="module")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """Questions of about 400 tokens, or ones about a picture."""
    home = tmp_path_factory.mktemp("data")

    def write(pictures: bool) -> Path:
        path = home / f"{pictures}.parquet"
        content = ("<image>" if pictures else "") + "the river " * 200
        columns: dict[str, list] = {"prompt": [[{"role": "user", "content": content}]] * 8}
        if pictures:
            png = io.BytesIO()
            Image.new("RGB", (56, 56)).save(png, "png")
            columns["images"] = [[{"bytes": png.getvalue()}]] * 8
        pq.write_table(pa.table(columns), path)
        return path

    return write


@pytest.mark.parametrize(
    ("script", "name"),
    [
        pytest.param(MUSIQUE, "Qwen3-8B", marks=pytest.mark.more),
        pytest.param(MUSIQUE, "Llama-3-8B", marks=pytest.mark.more),
        pytest.param(VIDEO, "Qwen2.5-VL-7B", marks=pytest.mark.more),
    ],
)
def test_a_recipes_command_has_a_plan_without_a_gpu(tmp_path, folder_of, train_file, script, name):
    data = train_file(script == VIDEO)

    def planned(engine: str) -> dict[str, Any]:
        model = str(folder_of(name))
        words = launched(script, tmp_path, MODEL_ENGINE=engine, MODEL_PATH=model, TRAIN_FILE=str(data))
        return plan.build(Options(["python3", "-m", "verl.trainer.main_ppo", *words], response_lengths="64"))

    found = planned("prefix")
    assert found["unsupported"] == [] == found["notes"]
    assert found["parameters"] / 1e9 == pytest.approx({"Qwen3-8B": 8.19, "Llama-3-8B": 8.03}.get(name, 8.29), abs=0.01)
    assert found["prompt_tokens"]["p50"] > 400 and found["tokens"]["ratio"] > 3 and found["speedup"]["update"] > 2.5
    stock = planned("dp")
    assert "trainer.v1.trainer_mode=prefix_sync, update " in stock["advice"]
    assert 1.5 < stock["tokens"]["ratio"] <= found["tokens"]["ratio"]  # several mini-batches


@pytest.mark.more
def test_readme_quotes_the_verdict_of_this_recipe(tmp_path, folder_of, capsys):
    """On a machine without its data: `--prompt-lengths 2400`."""
    words = launched(MUSIQUE, tmp_path, MODEL_ENGINE="dp", MODEL_PATH=str(folder_of("Qwen3-8B")))
    assert cli.main(["plan", "--prompt-lengths", "2400", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    verdict = "\n".join(lines[:3])
    assert verdict.startswith("Worth it: ") and f"```\n{verdict}\n```" in (RECIPES.parent / "README.md").read_text()
    tools = (RECIPES.parent / "verl_prefix" / "tools" / "README.md").read_text()
    (sample,) = re.findall(r"```text\n(Worth it: .+?)\n```", tools, flags=re.S)
    assert sample.startswith(verdict) and set(sample.splitlines()) <= set(lines)


@pytest.mark.more
def test_the_page_of_engines_quotes_the_verdict_of_its_megatron_command(tmp_path, folder_of, capsys):
    page = (RECIPES.parent / "verl_prefix" / "config" / "engines.md").read_text()
    (command,) = re.findall(r"```bash\n# run_megatron.sh\n(.+?)```", page, flags=re.S)
    script = tmp_path / "run_megatron.sh"
    script.write_text(command.replace("Qwen/Qwen3-8B", str(folder_of("Qwen3-8B"))))
    assert cli.main(["plan", "--prompt-lengths", "2400", str(script)]) == 0
    verdict = "\n".join(capsys.readouterr().out.splitlines()[:3])
    assert verdict.startswith("Worth it: ") and f"```text\n{verdict}\n```" in page


def test_a_simulation_gets_what_prompts_show(monkeypatch, tmp_path, folder_of, train_file):
    """The pixels of every group of the costliest rank, in the patches of its processor."""
    jobs = []
    arms = {name: {"peak_gib": 1.0} for name in ("packed", "phased")}
    monkeypatch.setattr(figures, "simulated", lambda job, *_: jobs.append(job) or {"arms": arms})
    model, data = folder_of("Qwen2.5-VL-7B"), train_file(True)
    words = launched(VIDEO, tmp_path, "actor_rollout_ref.actor.freeze_vision_tower=True", MODEL_PATH=str(model),
                     TRAIN_FILE=str(data))  # fmt: skip
    plan.build(Options(words, response_lengths="64", simulate=True))
    (job,) = jobs
    assert job.config.vision_config.depth == 32 and job.freeze_tower
    patch = AutoProcessor.from_pretrained(model).image_processor.patch_size
    assert job.grids == (((1, 56 // patch, 56 // patch),),) * len(job.groups) and len(job.groups) == 8


class Settings(NamedTuple):
    """What a script sets, as far as a plan reads it. batch: prompts, prompts per mini-batch, responses per prompt;
    lengths: tokens of prompt and response; passes: tokens or rows; gpus: per node, nodes; refused: in these words;
    engine: verl's."""

    model: str
    batch: tuple[int, int, int]
    lengths: tuple[int, int]
    passes: str
    gpus: tuple[int, int] = (8, 1)
    others: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    engine: str = "dp"


FUSED, LORA = "model.use_fused_kernels=True", "model.lora_rank=64"
NO_KL, GROUPER = "actor.use_kl_loss=False", "actor.use_prefix_grouper=True"
LOG_PROB_ROWS = "rollout.log_prob_micro_batch_size_per_gpu"
ULYSSES = "actor.fsdp_config.ulysses_sequence_parallel_size"
TEACHERS = "distillation.teacher_models"
BY_TEACHER = (
    NO_KL, "distillation.enabled=True", "distillation.n_gpus_per_node=4", "distillation.nnodes=1",
    "distillation.distillation_loss.loss_mode=k1", "distillation.distillation_loss.use_task_rewards=False",
)  # fmt: skip
# verl's FSDP scripts with several responses per prompt: github.com/verl-project/verl, tag v0.9.0, examples/; and of
# distillation, of its main branch of 2026-08-22 (1dda039).
SCRIPTS = {
    "on_policy_distillation_trainer/run_qwen3_8b_fsdp": Settings(
        "Qwen3-8B", (128, 128, 1), (1024, 2048), "24576 tokens",
        others=(*BY_TEACHER, f"{TEACHERS}.teacher_model.model_path=Qwen/Qwen3-32B"),
    ),
    "on_policy_distillation_trainer/run_qwen3_8b_mopd_fsdp": Settings(
        "Qwen3-VL-8B", (128, 128, 1), (1024, 2048), "24576 tokens",
        others=(*BY_TEACHER, f"+{TEACHERS}.gsm8k.key=openai/gsm8k", f"+{TEACHERS}.gsm8k.model_path=Qwen/Qwen3-32B",
                f"+{TEACHERS}.geo3k.key=hiyouga/geometry3k", f"+{TEACHERS}.geo3k.model_path=Qwen/Qwen3-VL-32B"),
    ),
    "grpo_trainer/run_qwen3_8b_fsdp": Settings("Qwen3-8B", (1024, 256, 5), (1024, 2048), "24576 tokens"),
    "grpo_trainer/run_qwen3_4b_fsdp": Settings(
        "Qwen3-4B", (512, 256, 5), (1024, 1024), "3000 tokens", others=("rollout.log_prob_max_token_len_per_gpu=4096",)
    ),
    "grpo_trainer/run_qwen3_30b_a3b_fsdp": Settings("Qwen3-30B-A3B", (512, 128, 8), (2048, 4096), "32768 tokens"),
    "grpo_trainer/run_qwen2_5_32b_fsdp": Settings(
        "Qwen2.5-32B", (1024, 128, 5), (1024, 1024), "2 rows", (8, 2), ("model.use_remove_padding=False",)
    ),
    "grpo_trainer/run_mistral_nemo_12b_skyworkrm_fsdp": Settings(
        "Mistral-Nemo-12B", (512, 128, 5), (4096, 2048), "10 rows", others=(NO_KL,)
    ),
    "grpo_trainer/run_qwen2_5_vl_7b_fsdp": Settings(
        "Qwen2.5-VL-7B", (512, 128, 5), (1024, 2048), "24576 tokens", others=(FUSED,)
    ),
    "grpo_trainer/run_qwen3_vl_8b_fsdp": Settings(
        "Qwen3-VL-8B", (512, 128, 5), (1024, 2048), "24576 tokens", others=(FUSED,)
    ),
    "grpo_trainer/run_qwen3_vl_30b_a3b_fsdp": Settings(
        "Qwen3-VL-30B-A3B", (512, 128, 5), (1024, 2048), "10 rows",
        others=(FUSED, f"{ULYSSES}=2", f"{LOG_PROB_ROWS}=2"),
    ),
    "grpo_trainer/run_seed_oss_36b_fsdp": Settings(
        "Seed-OSS-36B", (64, 8, 2), (512, 1024), "16384 tokens", others=(FUSED,),
        refused=("attention_dropout=0.1",),
    ),
    "grpo_trainer/run_glm4_1v_9b_fsdp": Settings(
        "GLM-4.1V-9B", (512, 128, 5), (1024, 2048), "10 rows", others=(f"{LOG_PROB_ROWS}=20",)
    ),
    "grpo_trainer/run_qwen3_5_27b_fsdp": Settings(
        "Qwen3.5-27B", (64, 16, 5), (1024, 2048), "1 rows", others=("actor.fsdp_config.offload_policy=True",),
    ),
    "grpo_trainer/run_qwen3_next_80b_a3b_fsdp": Settings(
        "Qwen3-Next-80B-A3B", (16, 8, 16), (2048, 20480), "2816 tokens", (8, 4),
        (f"{ULYSSES}=8", "model.enable_activation_offload=True",
         "+actor.fsdp_config.mixed_precision.reduce_dtype=bf16"),
    ),
    "prefix_grouper/run_qwen3_8b_fsdp": Settings(
        "Qwen3-8B", (1024, 256, 5), (512, 1024), "12288 tokens", others=(GROUPER, "model.use_remove_padding=False"),
    ),
    "cispo_trainer/run_qwen3_8b_fsdp": Settings(
        "Qwen3-8B", (1024, 256, 5), (1024, 2048), "24576 tokens", others=("actor.policy_loss.loss_mode=cispo",)
    ),
    "gmpo_trainer/run_qwen3_8b_fsdp": Settings(
        "Qwen3-8B", (1024, 256, 5), (1024, 2048), "24576 tokens", others=("actor.policy_loss.loss_mode=geo_mean",),
        refused=("actor.policy_loss.loss_mode=geo_mean",),
    ),
    "gdpo_trainer/run_qwen3_8b_fsdp": Settings("Qwen3-8B", (128, 32, 4), (2048, 2048), "24576 tokens", others=(NO_KL,)),
    "otb_trainer/run_qwen3_8b_fsdp": Settings(
        "Qwen3-8B", (128, 128, 8), (1024, 2048), "24576 tokens", others=(NO_KL, "actor.calculate_sum_pi_squared=True")
    ),
    "remax_trainer/run_qwen2.5_math_7b_sync_fsdp": Settings(
        "Qwen2.5-7B", (128, 64, 4), (1024, 2048), "24576 tokens",
        others=(NO_KL, "actor.ulysses_sequence_parallel_size=2"),
    ),
    "profile/run_qwen2_5_7b_torch_profile": Settings("Qwen2.5-7B", (32, 16, 4), (1024, 1024), "8192 tokens"),
    "tuning/lora/run_qwen3_8b_fsdp": Settings(
        "Qwen3-8B", (64, 32, 5), (512, 1024), "12288 tokens", (2, 1), (LORA, "model.lora_alpha=32")
    ),
    "tuning/lora/run_qwen2_5_vl_7b_fsdp": Settings(
        "Qwen2.5-VL-7B", (512, 128, 5), (1024, 2048), "24576 tokens",
        others=(LORA, "model.target_modules=all-linear", "model.exclude_modules=.*visual.*"),
    ),
    "gpg_trainer/run_qwen3_8b_fsdp": Settings(
        "Qwen3-8B", (1024, 256, 5), (1024, 2048), "24576 tokens", others=(NO_KL, "actor.policy_loss.loss_mode=gpg")
    ),
    "gspo_trainer/run_qwen3_8b_fsdp": Settings(
        "Qwen3-8B", (512, 128, 16), (2048, 8192), "20480 tokens",
        others=(NO_KL, "actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean"),
    ),
    "reinforce_plus_plus_trainer/run_qwen3_8b_fsdp": Settings(
        "Qwen3-8B", (1024, 1024, 8), (1024, 2048), "24576 tokens", others=(NO_KL,)
    ),
    "remax_trainer/run_qwen3_8b_fsdp": Settings(
        "Qwen3-8B", (1024, 256, 4), (1024, 2048), "24576 tokens", others=(NO_KL,)
    ),
    "rloo_trainer/run_qwen3_8b_fsdp": Settings(
        "Qwen3-8B", (1024, 256, 5), (1024, 2048), "24576 tokens", others=(NO_KL,)
    ),
    "profile/run_qwen2_5_vl_7b_torch_memory": Settings(
        "Qwen2.5-VL-7B", (512, 128, 5), (1024, 2048), "24576 tokens"
    ),
    "tuning/lora/run_qwen3_8b_from_adapter_fsdp": Settings(
        "Qwen3-8B", (1024, 256, 5), (512, 1024), "12288 tokens", others=("model.lora_adapter_path=/an/adapter",)
    ),
    "grpo_trainer/run_qwen3_5_2b_openr1_fsdp": Settings(
        "Qwen3.5-2B", (64, 16, 5), (2048, 1536), "1 rows",
        others=("actor.fsdp_config.offload_policy=True", "model.use_remove_padding=False"),
    ),
    "grpo_trainer/run_qwen3_5_2b_video_fsdp": Settings(
        "Qwen3.5-2B", (128, 16, 5), (2048, 1024), "1 rows",
        others=("actor.fsdp_config.offload_policy=True", "model.use_remove_padding=False"),
    ),
    "grpo_trainer/run_qwen3_5_35b_fsdp": Settings(
        "Qwen3.5-35B-A3B", (64, 16, 5), (1024, 2048), "1 rows", others=("actor.fsdp_config.offload_policy=True",),
    ),
    "tuning/scaling/run_qwen2_5_72b_fsdp": Settings(
        "Qwen2.5-72B", (1024, 256, 5), (1024, 2048), "24576 tokens", (8, 4)
    ),
}  # fmt: skip

# verl's VeOmni scripts, of its main branch of 2026-08-22 (1dda039), examples/.
GSPO = ("actor.use_kl_loss=False", "actor.policy_loss.loss_mode=gspo")
OFFLOADED = ("actor.veomni.param_offload=True", "actor.veomni.optimizer_offload=True")
EP, SP = "actor.veomni.expert_parallel_size", "actor.veomni.ulysses_parallel_size"
DISTILLED = ("model.use_fused_kernels=True", "distillation.enabled=True", "actor.use_kl_loss=False")
# VeOmni's delta nets refuse packed rows without flash-linear-attention's kernels, with a shared prefix or without.
NO_KERNELS = ("causal_conv1d_implementation=eager",)
VEOMNI = {
    "grpo_trainer/run_qwen3_30b_veomni": Settings(
        "Qwen3-30B-A3B", (16, 8, 4), (2048, 8192), "1 rows", others=(*OFFLOADED, f"{EP}=1"), engine="veomni"
    ),
    "grpo_trainer/run_qwen3_vl_30b_moe_veomni": Settings(
        "Qwen3-VL-30B-A3B", (64, 32, 8), (1024, 2048), "1 rows", (8, 2),
        (*OFFLOADED, "actor.veomni.fsdp_size=16", "actor.veomni.attn_implementation=veomni_flash_attention_2_with_sp"),
        engine="veomni",
    ),
    "grpo_trainer/run_qwen3_5_35b_a3b_veomni": Settings(
        "Qwen3.5-35B-A3B", (128, 32, 8), (1024, 2048), "1 rows", (8, 2), (*GSPO, *OFFLOADED, f"{SP}=2"),
        NO_KERNELS, "veomni",
    ),
    "grpo_trainer/run_qwen3_5-122b-a10b_veomni": Settings(
        "Qwen3.5-122B-A10B", (128, 32, 8), (1024, 2048), "1 rows", (8, 8),
        (*GSPO, *OFFLOADED, f"{SP}=2", f"{EP}=8", "actor.veomni.moe_implementation=fused_triton",
         "actor.veomni.cross_entropy_loss_implementation=liger_kernel"),
        NO_KERNELS, "veomni",
    ),
    "grpo_trainer/run_deepseek_v4_veomni": Settings(
        "DeepSeek-V4-Flash", (128, 64, 8), (2048, 8192), "2560 tokens", (8, 8),
        (*GSPO, f"{SP}=4", f"{EP}=8", "actor.veomni.attn_implementation=eager", "actor.pad_to_length=True",
         "actor.veomni.router_replay.mode=R3", "rollout.enable_rollout_routing_replay=True"),
        ("actor.veomni.pad_to_length=True", "deepseek_v4 model: layer_types"), "veomni",
    ),
    "router_replay/run_qwen3_5_35b_a3b_veomni": Settings(
        "Qwen3.5-35B-A3B", (128, 32, 8), (1024, 2048), "1 rows", (8, 2),
        (*GSPO, *OFFLOADED, f"{SP}=2", "actor.veomni.router_replay.mode=R2"), ("actor.veomni.router_replay.mode=R2",),
        "veomni",
    ),
    "on_policy_distillation_trainer/run_qwen3_0.6b_opd_veomni": Settings(
        "Qwen3-0.6B", (14, 14, 1), (512, 1024), "8192 tokens", (7, 1), DISTILLED, engine="veomni"
    ),
    "on_policy_distillation_trainer/run_qwen3_8b_mopd_veomni": Settings(
        "Qwen3-VL-8B", (128, 128, 1), (1024, 2048), "24576 tokens", others=(*DISTILLED, *OFFLOADED), engine="veomni"
    ),
}  # fmt: skip

# verl's Megatron scripts of the same commit, examples/, without `grad_offload`, a key that verl 0.9.1 has no more.
REPLAY = "actor.megatron.router_replay.mode=R3", "rollout.enable_rollout_routing_replay=True"
RECOMPUTED = tuple(
    f"+actor.megatron.override_transformer_config.{key}"
    for key in ("recompute_method=uniform", "recompute_granularity=full", "recompute_num_layers=1")
)
OFF_GPU = ("actor.megatron.param_offload=True", "actor.megatron.optimizer_offload=True")
EXPERTS = tuple(
    f"+actor.megatron.override_transformer_config.{key}" for key in ("moe_router_dtype=fp32", "moe_permute_fusion=True")
)


def spread(tensor: int, pipeline: int = 1, experts: int = 1, of_experts: int | None = None) -> tuple[str, ...]:
    """Keys of sizes: of tensor, pipeline, expert and experts' tensor parallelism; ref follows."""
    sizes = {"tensor_model": tensor, "pipeline_model": pipeline, "expert_model": experts, "expert_tensor": of_experts}
    return tuple(f"actor.megatron.{name}_parallel_size={size}" for name, size in sizes.items() if size is not None)


def of_megatron(
    model: str, batch: tuple[int, int, int], lengths: tuple[int, int], passes: str, others: tuple[str, ...],
    refused: tuple[str, ...] = (), gpus: tuple[int, int] = (8, 1),
) -> Settings:  # fmt: skip
    return Settings(model, batch, lengths, passes, gpus, others, refused, "megatron")


EIGHT_B, LONG, SHORT = spread(2, 2), (2048, 8192), (1024, 2048)
MEGATRON = {
    "dppo_trainer/run_qwen3_30b_a3b_megatron": of_megatron(
        "Qwen3-30B-A3B", (256, 32, 16), LONG, "30720 tokens",
        (*spread(2, 1, 8, 1), *RECOMPUTED, *OFF_GPU, *EXPERTS, NO_KL, "actor.policy_loss.loss_mode=dppo_tv",
         "actor.loss_agg_mode=seq-mean-token-sum-norm"),
        ("actor.loss_agg_mode=seq-mean-token-sum-norm",),
    ),
    "gspo_trainer/run_qwen3_30b_a3b_megatron": of_megatron(
        "Qwen3-30B-A3B", (256, 32, 16), LONG, "30720 tokens",
        (*spread(2, 1, 8, 1), *RECOMPUTED, *OFF_GPU, *EXPERTS, *GSPO, "actor.loss_agg_mode=seq-mean-token-mean",
         "+actor.megatron.override_transformer_config.apply_rope_fusion=True"),
    ),
    "tuning/scaling/run_qwen2_5_32b_megatron": of_megatron(
        "Qwen2.5-32B", (512, 256, 5), (2048, 6144), "32768 tokens", (*spread(8), *OFF_GPU)
    ),
    "on_policy_distillation_trainer/run_qwen3_8b_megatron": of_megatron(
        "Qwen3-8B", (128, 128, 1), SHORT, "24576 tokens",
        (*spread(2), *OFF_GPU, "distillation.enabled=True", NO_KL, "distillation.n_gpus_per_node=4"),
    ),
    "gpg_trainer/run_qwen3_8b_megatron": of_megatron(
        "Qwen3-8B", (1024, 256, 5), SHORT, "24576 tokens", (*EIGHT_B, NO_KL, "actor.policy_loss.loss_mode=gpg"),
    ),
    "grpo_trainer/run_qwen3_8b_megatron": of_megatron(
        "Qwen3-8B", (1024, 256, 5), SHORT, "24576 tokens", EIGHT_B
    ),
    "grpo_trainer/run_qwen3_30b_a3b_megatron": of_megatron(
        "Qwen3-30B-A3B", (512, 16, 8), LONG, "30720 tokens",
        (*spread(4, 2, 2), "actor.megatron.virtual_pipeline_model_parallel_size=2", *RECOMPUTED, NO_KL, FUSED),
        ("virtual_pipeline_model_parallel_size=2",),
    ),
    "grpo_trainer/run_qwen3_235b_a22b_megatron": of_megatron(
        "Qwen3-235B-A22B", (128, 128, 16), (8192, 4096), "12288 tokens", (*spread(4, 8, 4), *RECOMPUTED, *OFF_GPU),
        ("expert_tensor_parallel_size=4",), (8, 8),
    ),
    "grpo_trainer/run_moonlight_16b_a3b_megatron": of_megatron(
        "Moonlight-16B-A3B", (192, 64, 5), SHORT, "16 rows", spread(4, 3, 4, 1), gpus=(8, 3)
    ),
    "grpo_trainer/run_deepseek_v3_671b_megatron": of_megatron(
        "DeepSeek-V3-671B", (96, 32, 8), LONG, "10240 tokens",
        (*spread(8, 12, 8, 1), *RECOMPUTED, *OFF_GPU, FUSED,
         "+actor.megatron.override_transformer_config.apply_rope_fusion=False"),
        gpus=(8, 12),
    ),
    "router_replay/run_qwen3_30b_a3b_megatron": of_megatron(
        "Qwen3-30B-A3B", (3, 3, 8), (512, 512), "3 rows",
        (*spread(1, 6, 8, 1), *RECOMPUTED, *OFF_GPU, NO_KL, *REPLAY), gpus=(8, 6),
    ),
    "tuning/lora/run_qwen3_30b_a3b_megatron": of_megatron(
        "Qwen3-30B-A3B", (128, 16, 4), (1024, 1024), "2048 tokens",
        (*spread(2, 2, 4, 1), "actor.megatron.context_parallel_size=2", *RECOMPUTED, *OFF_GPU, "model.lora.rank=32"),
        ("model.lora.rank=32",),
    ),
    "grpo_trainer/run_qwen2-7b_math_megatron_fsdp": of_megatron(
        "Qwen2.5-7B", (32, 16, 2), (512, 512), "2 rows", (*spread(4), "actor.megatron.use_megatron_fsdp=True"),
        ("actor.megatron.use_megatron_fsdp=True",),
    ),
    "grpo_trainer/run_qwen3_5_35b_megatron": of_megatron(
        "Qwen3.5-35B-A3B", (32, 32, 5), SHORT, "1 rows",
        (*spread(2, 1, 8, 1), *RECOMPUTED, *OFF_GPU, "actor.megatron.vanilla_mbridge=True",
         "+actor.megatron.override_transformer_config.moe_z_loss_coeff=0.001"),
        ("moe_z_loss_coeff=0.001",) * 2,
    ),
    "grpo_trainer/run_qwen3_5_122b_a10b_megatron": of_megatron(
        "Qwen3.5-122B-A10B", (128, 64, 6), (3240, 4096), "1 rows",
        (*spread(2, 2, 8, 1), *RECOMPUTED, *OFF_GPU, NO_KL, "actor.megatron.vanilla_mbridge=True"),
        ("qwen3_5_moe model",), (8, 4),
    ),
    "grpo_trainer/run_qwen2_5_vl_7b_megatron": of_megatron(
        "Qwen2.5-VL-7B", (512, 128, 5), SHORT, "24576 tokens", (*EIGHT_B, FUSED),
        ("qwen2_5_vl model",) * 2,
    ),
    "grpo_trainer/run_qwen3_vl_8b_megatron": of_megatron(
        "Qwen3-VL-8B", (512, 128, 5), SHORT, "24576 tokens", (*EIGHT_B, FUSED),
        ("qwen3_vl model",) * 2,
    ),
    "grpo_trainer/run_qwen3_vl_30b_a3b_megatron": of_megatron(
        "Qwen3-VL-30B-A3B", (512, 128, 5), SHORT, "4096 tokens",
        (*spread(2, 1, 8, 1), "actor.megatron.context_parallel_size=2", *RECOMPUTED, *OFF_GPU, *EXPERTS),
        ("qwen3_vl_moe model",) * 2,
    ),
    "grpo_trainer/run_deepseek_v4_flash_megatron": of_megatron(
        "DeepSeek-V4-Flash", (8, 8, 8), (2048, 10240), "12288 tokens",
        (*spread(1, 8, 8, 1), *OFF_GPU, FUSED, NO_KL, *REPLAY), ("deepseek_v4 model",) * 2, (8, 8),
    ),
}  # fmt: skip
EVERY = SCRIPTS | VEOMNI | MEGATRON
VEOMNI_KEY = "actor_rollout_ref.actor.veomni"

# On FSDP2 and VeOmni, of text, and of pictures; the others are left to test-more.
TELLING = (
    "on_policy_distillation_trainer/run_qwen3_8b_fsdp",
    "grpo_trainer/run_qwen3_30b_veomni",
    "grpo_trainer/run_qwen3_vl_8b_fsdp",
)
# Of grpo's but for the estimator or a loss that is let through, or for the model's size; and the one that takes as long
# as all others, a step of 40 million tokens.
ALIKE = (
    "cispo_trainer/run_qwen3_8b_fsdp", "gpg_trainer/run_qwen3_8b_fsdp", "gpg_trainer/run_qwen3_8b_megatron",
    "gspo_trainer/run_qwen3_8b_fsdp", "gspo_trainer/run_qwen3_30b_a3b_megatron", "rloo_trainer/run_qwen3_8b_fsdp",
    "remax_trainer/run_qwen3_8b_fsdp", "reinforce_plus_plus_trainer/run_qwen3_8b_fsdp",
    "grpo_trainer/run_qwen2_5_32b_fsdp", "grpo_trainer/run_qwen3_4b_fsdp", "tuning/scaling/run_qwen2_5_32b_megatron",
    "tuning/scaling/run_qwen2_5_72b_fsdp", "grpo_trainer/run_qwen3_8b_megatron",
)  # fmt: skip


def _marks(script: str) -> tuple | pytest.MarkDecorator:
    """VeOmni has a plan in test_plan.py, too."""
    quick = script in TELLING and "veomni" not in script
    return () if quick else pytest.mark.full if script in ALIKE else pytest.mark.more


PAGE = (RECIPES.parent / "examples" / "results" / "verl_scripts.md").read_text().splitlines()


@pytest.mark.parametrize(("kind", "scripts"), [("", SCRIPTS), ("VeOmni ", VEOMNI), ("Megatron ", MEGATRON)])
def test_the_page_counts_what_it_lists(kind, scripts):
    lines = [line for line in PAGE if line.startswith("| ") and line.split()[1] in scripts]
    refused = [line for line in lines if "refused" in line]
    unshared = [line for line in lines if "unshared" in line]
    accepted = len(lines) - len(refused)
    counts = (
        f"{len(lines)} {kind}scripts: {accepted} accepted, {len(unshared)} of them without sharing, and {len(refused)} "
        "refused"
    )
    assert any(line.startswith(counts) for line in PAGE) and len(lines) == len(scripts)


def command_of(settings: Settings, model: Path, data: Path) -> list[str]:
    """The words of a training command with these settings."""
    (prompts, mini_batch, n), (prompt, response), (gpus, nodes) = settings.batch, settings.lengths, settings.gpus
    size, unit = settings.passes.split()
    by_tokens = unit == "tokens"
    passes = "max_token_len_per_gpu" if by_tokens else "micro_batch_size_per_gpu"
    actor = (
        "model.use_remove_padding=True", "model.enable_gradient_checkpointing=True", f"model.path={model}",
        "actor.optim.lr=1e-6", f"actor.ppo_mini_batch_size={mini_batch}",
        f"actor.use_dynamic_bsz={by_tokens}", f"actor.ppo_{passes}={size}", "actor.use_kl_loss=True",
        "rollout.name=vllm", f"rollout.n={n}",
        "rollout.gpu_memory_utilization=0.6", "rollout.tensor_model_parallel_size=2",
        f"rollout.log_prob_{passes}={size}", f"ref.log_prob_{passes}={size}", *settings.others,
    )  # fmt: skip
    if settings.engine == "dp":
        actor += "actor.strategy=fsdp2", "actor.fsdp_config.param_offload=False", "ref.fsdp_config.param_offload=True"
    elsewhere = [word for word in actor if word.lstrip("+").startswith("distillation.")]
    actor = [word for word in actor if word not in elsewhere]
    return [
        "python3", "-m", "verl.trainer.main_ppo", f"model_engine={settings.engine}", *elsewhere,
        "algorithm.adv_estimator=grpo", f"data.train_files={data}",
        "data.val_files=['/a.parquet', '/b.parquet']", f"data.train_batch_size={prompts}", "data.truncation=error",
        f"data.max_prompt_length={prompt}", f"data.max_response_length={response}", "data.filter_overlong_prompts=True",
        *("+" * word.startswith("+") + f"actor_rollout_ref.{word.removeprefix('+')}" for word in actor),
        'trainer.logger=["console","wandb"]', "trainer.project_name=verl_grpo", "trainer.balance_batch=True",
        f"trainer.n_gpus_per_node={gpus}", f"trainer.nnodes={nodes}", "trainer.save_freq=20", "$@",
    ]  # fmt: skip


def outcome(settings: Settings, found: dict[str, Any]) -> str:
    """In words of verl_scripts.md."""
    if settings.refused:
        return "refused: " + ", ".join(dict.fromkeys(settings.refused))
    shared = found["packed_groups"] + found["phased_groups"]
    return f"accepted, {found['speedup']['update']:.2f}" if shared else "accepted, unshared"


@pytest.mark.parametrize("script", [pytest.param(script, marks=_marks(script)) for script in EVERY])
def test_verls_own_settings_have_a_plan_or_are_refused_by_key(monkeypatch, folder_of, train_file, script):
    """Of TELLING with advice, for which as many other settings have a plan."""
    if script not in TELLING:
        monkeypatch.setattr(verdict, "_gaining", lambda *_, **__: [])
    settings = EVERY[script]
    folder = folder_of(settings.model)
    words = command_of(settings, folder, train_file("VL" in settings.model))
    longest = next(word.partition("=")[2] for word in words if word.startswith("data.max_response_length="))
    if settings.refused and settings.engine == "megatron":  # many are of models that take long to plan
        config = compose_config("ppo_trainer", words)
        found: dict[str, Any] = {"unsupported": refusals(config, settings.gpus[0] * settings.gpus[1])}
    else:
        found = plan.build(Options(words, response_lengths=f"{longest},0"))
    text = outcome(settings, found)
    reasons = " ".join(found["unsupported"])
    kernels = re.findall(r"(\w+_implementation)=eager; set fla", reasons)
    off = re.findall(r"\+\S+=0\.0", reasons) + [f"{VEOMNI_KEY}.{name}=fla" for name in kernels]
    if off and len(settings.refused) == 1:
        other = plan.build(Options([*words, *off], response_lengths=f"{longest},0"))
        assert other["unsupported"] == []
        text += f"; with the overrides that it names {outcome(settings._replace(refused=()), other)}"
    assert f"| {script} | {settings.model} | {text} |" in PAGE
    assert len(found["unsupported"]) == len(settings.refused)
    pairs = zip(settings.refused, found["unsupported"], strict=True)
    assert all(key in reason for key, reason in pairs), found["unsupported"]
    if "verdict" not in found:
        return
    assert settings.refused or not unsupported_reasons(AutoConfig.from_pretrained(folder))
    assert ("speedup" in found) == (not settings.refused)
    if settings.refused:
        return
    # As its name has it; a tower of 0.7 billion is not in a name.
    named = float(re.search(r"([\d.]+)B", settings.model)[1])
    assert found["parameters"] / 1e9 == pytest.approx(named, rel=0.2)
    assert min(found["speedup"].values()) >= 0.99


@pytest.mark.parametrize("word", ["+actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
                                  "+actor_rollout_ref.model.lora.merge=True"])  # fmt: skip
def test_a_key_that_a_script_adds_twice_is_named(folder_of, train_file, word):
    """Of grpo_trainer/run_gpt_oss_20b_fsdp and tuning/lora/run_qwen3_8b_merge_fsdp, which verl 0.9 itself refuses."""
    settings = SCRIPTS["tuning/lora/run_qwen3_8b_fsdp"]
    key = word.removeprefix("+").partition("=")[0]
    with pytest.raises(PlanError, match=f"do not compose: Could not append to config.* '{key}'"):
        plan.build(Options([*command_of(settings, folder_of(settings.model), Path("x")), word]))


def test_a_model_that_needs_code_of_its_own_is_named(tmp_path, train_file):
    """Of grpo_trainer/run_minicpm_o_2_6_fsdp."""
    code = {"AutoConfig": "configuration_minicpm.MiniCPMOConfig"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "minicpmo", "auto_map": code}))
    (tmp_path / "tokenizer.json").touch()
    words = command_of(SCRIPTS["grpo_trainer/run_glm4_1v_9b_fsdp"], tmp_path, train_file(False))
    with pytest.raises(PlanError, match="model.path=.* contains custom code"):
        plan.build(Options(words))


def test_options_that_verls_own_class_does_not_take_are_named(folder_of, train_file):
    """Of sapo_trainer/run_qwen3_{8b,30b_a3b}_fsdp: tau_pos and tau_neg are the actor's, not its policy_loss's."""
    settings = SCRIPTS["tuning/lora/run_qwen3_8b_fsdp"]
    words = command_of(settings, folder_of(settings.model), train_file(False))
    found = plan.build(Options([*words, "+actor_rollout_ref.actor.policy_loss.tau_pos=1.0"]))
    assert any("tau_pos" in reason for reason in found["unsupported"]), found["unsupported"]
