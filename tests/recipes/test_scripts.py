"""Each launch script's overrides, as bash expands them, compose in verl's config and pass the driver's checks."""

import os
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from verl.utils.config import validate_config
from verl.utils.import_utils import load_extern_object

from verl_prefix.testing import write_tiny_model

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MUSIQUE, VIDEO = "musique/run_qwen3_8b_fsdp2.sh", "video_rlvr/run_qwen2_5_vl_7b_fsdp2.sh"
both = pytest.mark.parametrize("script", [MUSIQUE, VIDEO])


def launched(script: str, tmp_path: Path, *args: str, **knobs: str) -> list[str]:
    """Run the script with a python3 that writes its arguments down; return those that follow the module's name."""
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > '{tmp_path}/args'\n")
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
    assert (actor._target_ == "verl_prefix.config.PrefixActorConfig") == (engine == "prefix")
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
