"""verl's platform `cpu`: chosen by VERL_PLATFORM=cpu only, configured by `+platform=cpu`, and it trains."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from verl_prefix.testing import write_tiny_model

pytest.importorskip("verl")

from hydra import compose, initialize_config_module  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from torch import nn  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

from verl_prefix.cpu.engine import CPUFSDPEngine  # noqa: E402

PROBE = """
import os, verl
from verl.plugin.platform import PlatformRegistry, get_platform
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.replica import RolloutReplicaRegistry
print("ANSWER", get_platform().device_name, PlatformRegistry.get("cpu").__name__,
      "hf" in RolloutReplicaRegistry._registry, "cpu" in EngineRegistry._engines["language_model"]["fsdp2"],
      "VLLM_CPU_KVCACHE_SPACE" in os.environ)
"""
PROBE_CPU = """
import os, verl
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
print("ANSWER", EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__,
      get_rollout_class("hf").__name__, get_rollout_replica_class("hf").__name__, "OMP_NUM_THREADS" in os.environ,
      os.environ["VLLM_CPU_KVCACHE_SPACE"])
"""


@pytest.fixture
def answer(fresh, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs ``code`` in a fresh interpreter, without this process's platform and thread variables."""

    def run(code: str, **env: str) -> list[str]:
        ours = ("VERL_PLATFORM", "OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE")
        inherited = {k: v for k, v in os.environ.items() if k not in ours}
        done = fresh(code, tmp_path, inherited | env)
        assert done.returncode == 0, done.stderr
        return re.search(r"ANSWER (.*)", done.stdout)[1].split()

    return run


def test_without_the_variable_only_the_name_is_registered(answer) -> None:
    device, platform, *others = answer(PROBE)
    assert device != "cpu"
    assert (platform, *others) == ("CPUPlatform", "False", "False", "False")


@pytest.mark.parametrize(
    "first", ["verl", "verl_prefix.cpu.platform", pytest.param("verl_prefix.cpu.engine", marks=pytest.mark.more)]
)
def test_the_variable_selects_engine_rollout_threads_and_vllms_memory(answer, first: str) -> None:
    """Whatever is imported first: verl imports the plugin, and the plugin the platform, which imports verl."""
    found = answer(f"import {first}\n{PROBE_CPU}", VERL_PLATFORM="cpu")
    assert found == ["CPUFSDPEngine", "HFServerAdapter", "HFReplica", "True", "1"]


class _StockEngine(FSDPEngineWithLMHead):
    """Stands for another engine of verl: says what `_build_fsdp_module` saw."""

    def __init__(self, *, forward_only: bool, offload_policy: bool = False) -> None:
        self.engine_config = SimpleNamespace(forward_only=forward_only, offload_policy=offload_policy)
        self.seen: list[bool] = []

    def _build_fsdp_module(self, module: nn.Module | None) -> None:
        self.seen.append(self.engine_config.forward_only)
        if module is None:
            raise RuntimeError("no module")


class _Engine(CPUFSDPEngine, _StockEngine):
    pass


def test_a_forward_only_engine_is_built_without_offload() -> None:
    built = _Engine(forward_only=True)
    built._build_fsdp_module(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="no module"):
        built._build_fsdp_module(None)
    assert built.seen == [False, False]
    assert built.engine_config.forward_only is True


def test_the_offload_policy_raises_on_cpu() -> None:
    with pytest.raises(ValueError, match="fsdp_config.offload_policy=False"):
        _Engine(forward_only=False, offload_policy=True)._build_fsdp_module(nn.Linear(1, 1))


@pytest.fixture
def hydra() -> Iterator[None]:
    with initialize_config_module("verl.trainer.config", version_base=None):
        yield


def cpu_config(*overrides: str) -> DictConfig:
    return compose("ppo_trainer", overrides=["+platform=cpu", "model_engine=dp", *overrides])


@pytest.mark.usefixtures("hydra")
def test_the_platform_file_sets_what_a_cpu_run_needs_and_no_strategy() -> None:
    config = cpu_config("trainer.n_gpus_per_node=3")
    ours = config.actor_rollout_ref
    assert config.ray_kwargs.ray_init.num_gpus == 3
    assert (config.trainer.device, ours.rollout.name, ours.rollout.dtype) == ("cpu", "hf", "float32")
    assert ours.model.override_config.attn_implementation == "sdpa"
    assert ours.ref.fsdp_config.mixed_precision == ours.actor.fsdp_config.mixed_precision
    assert ours.ref.fsdp_config.forward_only
    stock = compose("ppo_trainer", overrides=["model_engine=dp"])
    assert ours.actor.strategy == stock.actor_rollout_ref.actor.strategy, "model_engine decides the strategy"
    rollout = omega_conf_to_dataclass(ours.rollout)
    assert (rollout.tensor_model_parallel_size, rollout.free_cache_engine) == (1, False)


@pytest.mark.usefixtures("hydra")
def test_the_command_line_wins_over_the_platform_file() -> None:
    overrides = {
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "bf16",
        "actor_rollout_ref.model.override_config.attn_implementation": "eager",
        "ray_kwargs.ray_init.object_store_memory": 123,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 2,
    }
    config = cpu_config(*(f"{key}={value}" for key, value in overrides.items()))
    assert {key: OmegaConf.select(config, key) for key in overrides} == overrides
    assert config.actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype == "bf16"


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(c.isdigit() or c == " " for c in solution_str) / max(len(solution_str), 1)
"""


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_stock_verl_trains_grpo_with_a_ref_policy(tmp_path: Path, ranks: int) -> None:
    """Two gloo ranks show sharding and collectives; they do not show more than one node."""
    prompts = [[{"role": "user", "content": "Count the rivers. " * (3 + i)}] for i in range(4)]
    rows = {"data_source": "toy", "prompt": prompts, "reward_model": [{"style": "rule", "ground_truth": "1"}] * 4}
    pd.DataFrame(rows).to_parquet(tmp_path / "data.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "+platform=cpu", "model_engine=dp"),
        "actor_rollout_ref.actor.strategy=fsdp2",
        "+ray_kwargs.ray_init.address=local",
        f"trainer.n_gpus_per_node={ranks}",
        f"actor_rollout_ref.model.path={write_tiny_model(tmp_path / 'model')}",
        f"data.train_files={tmp_path}/data.parquet",
        f"data.val_files={tmp_path}/data.parquet",
        "data.train_batch_size=2",
        "data.max_prompt_length=128",
        "data.max_response_length=9",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.logger=console",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
    ]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"VERL_PLATFORM": "cpu"}
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    metrics = dict(re.findall(r"(\S+):(-?[\d.e+-]+|nan)(?: - |\s)", run.stdout))
    assert float(metrics["training/rollout_probs_diff_max"]) < 1e-6
    assert float(metrics["actor/kl_loss"]) == pytest.approx(0, abs=1e-9)
    assert float(metrics["actor/grad_norm"]) > 0
