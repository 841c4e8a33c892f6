"""verl's asynchronous scripts without Megatron: what becomes of each with model_engine=prefix, in verl's own config of
its driver. Models are their config.json alone."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError
from transformers import AutoConfig
from verl.utils.config import validate_config
from verl.workers.engine import EngineRegistry

PAGE = (Path(__file__).resolve().parents[2] / "examples" / "results" / "verl_scripts.md").read_text().splitlines()
FULLY, OFF, E2E = "fully_async_policy/shell/", "one_step_off_policy/shell/", "special_e2e: "
DRIVERS = {
    FULLY: ("verl.experimental.fully_async_policy", "fully_async_ppo_trainer"),
    OFF: ("verl.experimental.one_step_off_policy", "one_step_off_ppo_trainer"),
    E2E: ("verl.trainer", "ppo_trainer"),
}
HEADS = {  # query heads and key heads
    "Qwen2.5-0.5B": ("qwen2", 14, 2), "Qwen2.5-3B": ("qwen2", 16, 2), "Qwen2.5-7B": ("qwen2", 28, 4),
    "Qwen3-0.6B": ("qwen3", 16, 8), "Qwen3-8B": ("qwen3", 32, 8), "Qwen3-30B-A3B": ("qwen3_moe", 32, 4),
    "Qwen3-VL-8B": ("qwen3_vl", 32, 8), "Qwen3-VL-30B-A3B": ("qwen3_vl_moe", 32, 4),
}  # fmt: skip


class Script(NamedTuple):
    """What a script sets, as far as a check reads it. batch: prompts of a step, or mini-batches under FULLY; prompts of
    a mini-batch; responses of a prompt. gpus: of the trainer, and those that share a row."""

    model: str
    batch: tuple[int, int, int]
    gpus: tuple[int, int]
    others: tuple[str, ...]
    outcome: str

    def words(self, driver: str, model: str) -> list[str]:
        (prompts, mini_batch, n), (gpus, slices) = self.batch, self.gpus
        key = "data.train_batch_size"
        if driver == FULLY:
            key = "async_training.require_batches"
        separate = ["actor_rollout_ref.hybrid_engine=False", "hydra.searchpath=[pkg://verl.trainer.config]"]
        return [
            f"{key}={prompts}", f"trainer.n_gpus_per_node={gpus}", f"actor_rollout_ref.rollout.n={n}",
            *(separate if driver != E2E else []), "model_engine=prefix", "algorithm.adv_estimator=grpo",
            *(
                f"actor_rollout_ref.{word}"
                for word in (
                    f"model.path={model}", f"actor.ppo_mini_batch_size={mini_batch}", "actor.use_dynamic_bsz=True",
                    f"actor.ulysses_sequence_parallel_size={slices}",
                    f"ref.ulysses_sequence_parallel_size={slices}",
                )
            ),
            *self.others,
        ]  # fmt: skip


FSDP2 = ("actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",)
FSDP = ("actor_rollout_ref.actor.fsdp_config.strategy=fsdp",)
ACTOR2 = ("actor_rollout_ref.actor.strategy=fsdp2",)
RIGHT = ("algorithm.rollout_correction.bypass_mode=False", "algorithm.rollout_correction.rollout_is=token")
ROWS = (
    "actor_rollout_ref.actor.use_dynamic_bsz=False", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
)  # fmt: skip
ONE, NPU = "accepted", "planned: NPUs"
TORN = "actor.use_prefix_grouper=False"
# github.com/verl-project/verl at 1dda039 (2026-08-22), verl/experimental/; of 0.9.0 they are the same.
SCRIPTS = {
    FULLY + "dapo_7b_math_fsdp2_4_4": Script("Qwen2.5-7B", (4, 32, 16), (4, 1), FSDP2, f"{ONE}, 4 of whole prompts"),
    FULLY + "dapo_7b_math_fsdp2_4_12": Script("Qwen2.5-7B", (4, 32, 16), (12, 1), FSDP2, f"refused: {TORN}"),
    FULLY + "dapo_7b_math_fsdp2_8_8": Script("Qwen2.5-7B", (4, 32, 16), (8, 1), FSDP2, f"{ONE}, 4 of whole prompts"),
    FULLY + "dapo_7b_math_fsdp2_16_16": Script(
        "Qwen2.5-7B", (4, 32, 16), (16, 4), FSDP2, f"{ONE}, 4 of whole prompts"
    ),
    FULLY + "dapo_7b_math_fsdp2_32_32": Script(
        "Qwen2.5-7B", (4, 32, 16), (32, 4), FSDP2, f"{ONE}, 4 of whole prompts"
    ),
    FULLY + "dapo_7b_math_fsdp2_64_64": Script(
        "Qwen2.5-7B", (4, 32, 16), (64, 4), FSDP2, f"{ONE}, 4 of whole prompts"
    ),
    FULLY + "dapo_7b_math_fsdp2_64_64_mis": Script(
        "Qwen2.5-7B", (4, 32, 16), (64, 4), FSDP2 + RIGHT, f"{ONE}, 4 of whole prompts"
    ),
    FULLY + "dapo_7b_async_retool": Script("Qwen2.5-7B", (1, 16, 16), (4, 4), FSDP2, ONE),
    FULLY + "dapo_30b_a3b_base_math_fsdp": Script(
        "Qwen3-30B-A3B", (1, 32, 16), (16, 4), FSDP, "refused: fsdp_config.strategy='fsdp'"
    ),
    FULLY + "dapo_30b_a3b_math_fsdp_npu": Script("Qwen3-30B-A3B", (1, 16, 4), (16, 8), FSDP, NPU),
    FULLY + "geo3k_qwen3vl_30b_a3b_fsdp2_32_32": Script(
        "Qwen3-VL-30B-A3B", (1, 32, 16), (32, 8), ACTOR2, ONE
    ),
    FULLY + "geo3k_qwen3vl_8b_fsdp2_16_16_npu": Script("Qwen3-VL-8B", (2, 64, 4), (16, 1), ACTOR2, NPU),
    OFF + "dapo_7b_math_fsdp2_4_12": Script("Qwen2.5-7B", (512, 32, 12), (12, 4), FSDP2, f"refused: {TORN}"),
    OFF + "dapo_7b_math_fsdp2_sglang_4_12": Script("Qwen2.5-7B", (512, 32, 12), (12, 4), FSDP2, f"refused: {TORN}"),
    OFF + "dapo_7b_math_fsdp2_64_64": Script(
        "Qwen2.5-7B", (512, 32, 16), (64, 4), FSDP2, f"{ONE}, 16 of whole prompts"
    ),
    OFF + "dapo_7b_math_fsdp2_64_64_ris": Script(
        "Qwen2.5-7B", (512, 32, 16), (64, 4), FSDP2 + RIGHT[:1], f"{ONE}, 16 of whole prompts"
    ),
    **{
        OFF + f"grpo_0.6b_gsm8k_fsdp2_{name}2_6": Script(
            "Qwen3-0.6B", (1152, 192, 5), (6, 1), FSDP2 + ROWS, f"{ONE}, 6 of whole prompts"
        )
        for name in ("", "sglang_", "sglang_delta_sharded_")
    },
    OFF + "grpo_3b_gsm8k_fsdp2_2_6": Script(
        "Qwen2.5-3B", (1152, 192, 5), (6, 1), FSDP2 + ROWS, f"{ONE}, 6 of whole prompts"
    ),
    OFF + "grpo_qwen3_8b_gsm8k_fsdp2_8_8_npu": Script("Qwen3-8B", (32, 32, 8), (8, 8), ACTOR2, NPU),
    E2E + "run_v1_colocate_async_disrm": Script(
        "Qwen2.5-0.5B", (8, 8, 4), (8, 1), (*FSDP2, "trainer.v1.trainer_mode=colocate_async"), ONE
    ),
    E2E + "run_v1_separate_async": Script(
        "Qwen2.5-0.5B", (4, 1, 4), (4, 1),
        (*ACTOR2, "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=4"), ONE,
    ),
    E2E + "run_v1_separate_async_ascend": Script("Qwen2.5-0.5B", (64, 16, 16), (4, 1), ACTOR2, NPU),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    home = tmp_path_factory.mktemp("models")

    def write(name: str) -> Path:
        kind, heads, key_heads = HEADS[name]
        config = AutoConfig.for_model(kind)
        text = config.get_text_config()
        text.num_attention_heads, text.num_key_value_heads = heads, key_heads
        config.save_pretrained(home / name)
        return home / name

    return write


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_becomes_of_an_asynchronous_script_is_what_the_page_says(folder_of, script):
    driver = next(driver for driver in DRIVERS if script.startswith(driver))
    package, name = DRIVERS[driver]
    settings = SCRIPTS[script]
    assert f"| {script} | {settings.model} | {settings.outcome} |" in PAGE
    if settings.outcome == NPU:
        assert "npu" not in EngineRegistry._engines["language_model"]["prefix"]
        return
    with initialize_config_dir(f"{importlib.import_module(package).__path__[0]}/config", version_base=None):
        config = compose(name, overrides=settings.words(driver, str(folder_of(settings.model))))
    if settings.outcome.startswith("refused"):
        with pytest.raises(InterpolationResolutionError, match=re.escape(settings.outcome.removeprefix("refused: "))):
            OmegaConf.resolve(config)
        return
    OmegaConf.resolve(config)
    if driver != FULLY:
        validate_config(config, use_reference_policy=False, use_critic=False)
    num = re.search(r", (\d+) of whole prompts", settings.outcome)
    made = settings.batch[0] if driver == FULLY else settings.batch[0] // settings.batch[1]
    assert config.actor_rollout_ref.actor.use_prefix_grouper is bool(num)
    assert driver == E2E or made == int(num[1] if num else 1)


def test_the_page_counts_the_asynchronous_scripts():
    counts = [sum(s.outcome.startswith(word) for s in SCRIPTS.values()) for word in (ONE, "refused", "planned")]
    (line,) = [line for line in PAGE if "asynchronous scripts:" in line]
    assert line.startswith(
        f"{len(SCRIPTS)} asynchronous scripts: {counts[0]} accepted, {counts[1]} refused, {counts[2]} planned"
    )
    listed = [line for line in PAGE if line.startswith(tuple(f"| {driver}" for driver in DRIVERS))]
    assert len(listed) == len(SCRIPTS)
