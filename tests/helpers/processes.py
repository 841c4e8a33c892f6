"""Processes of their own: real verl on a recipe's data (Ray, v1 trainer, FSDP2 on gloo, HF rollout); simulations."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def train(tmp_path: Path, python: str) -> Callable[..., tuple[list[dict[str, Any]], str]]:
    """Two training steps on the recipe's parquet in `tmp_path`; returns the metrics of `num_steps` and verl's log.

    Driver and workers are `python`: see conftest.py.
    """

    def run(
        recipe: Path,
        model: str,
        *overrides: str,
        config: str = "prefix_grpo",
        module: str = "verl.trainer.main_ppo",
        num_steps: int = 2,
    ) -> tuple[list[dict[str, Any]], str]:
        metrics, log = tmp_path / "metrics.jsonl", tmp_path / "run.log"
        metrics.unlink(missing_ok=True)
        command = [
            python, "-m", module, f"--config-name={config}", "+platform=cpu",
            "+ray_kwargs.ray_init.address=local", f"+ray_kwargs.ray_init.runtime_env.py_executable={python}",
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={tmp_path / 'train.parquet'}", f"data.val_files={tmp_path / 'val.parquet'}",
            "data.train_batch_size=4", "data.max_response_length=16",
            "data.filter_overlong_prompts=true", "data.dataloader_num_workers=0",
            f"reward.custom_reward_function.path={recipe / 'reward.py'}",
            "actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "trainer.logger=[console,file]", "trainer.total_training_steps=2", "trainer.val_before_train=false",
            "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.resume_mode=disable",
            f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
            *overrides,
        ]  # fmt: skip
        environment = os.environ | {
            "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "VERL_FILE_LOGGER_PATH": str(metrics),
            "RAY_USAGE_STATS_ENABLED": "0", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        environment.pop("RAY_ADDRESS", None)
        with log.open("w") as out:
            code = subprocess.run(
                command, cwd=tmp_path, env=environment, stdout=out, stderr=out, timeout=1200
            ).returncode
        text = log.read_text(errors="replace")
        assert code == 0, "\n".join(text.splitlines()[-40:])
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        steps = [step["data"] for step in steps if "actor/grad_norm" in step["data"]]
        assert len(steps) == num_steps
        return steps, text

    return run


@pytest.fixture
def warm_commands(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script of examples/ starts with `sys.executable`, and Ray's workers below it, are `python`."""
    helpers = str(Path(__file__).parent)
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv("PYTHONPATH", helpers, prepend=os.pathsep)
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "warm_python.in_workers")
    monkeypatch.setenv("WARM_PYTHON", python)


@pytest.fixture(scope="session")
def elsewhere(warm: Callable[..., AbstractContextManager]) -> Iterator[Callable[..., Any]]:
    """Calls a function in one process of its own: what a simulation makes of torch must not reach other tests."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        with warm():
            pool.submit(int).result(timeout=300)
        yield lambda function, *args: pool.submit(function, *args).result(timeout=300)
