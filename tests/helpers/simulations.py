"""Simulations of tiny and of large models."""

import contextlib
import io
import itertools
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from verl_prefix import cli
from verl_prefix.testing import write_tiny_model
from verl_prefix.tools.simulate import depth as simulator
from verl_prefix.tools.simulate.hardware import GPUS
from verl_prefix.tools.simulate.job import Arm, Job
from verl_prefix.tools.simulate.passes import Simulation

H100 = GPUS["h100"]


def two_of_8(*values: tuple[object, object]) -> list:
    """What three settings of two values make; test-more has two that have every value of each."""
    return [
        pytest.param(*one, marks=pytest.mark.full if len({*map(tuple.index, values, one)}) == 2 else ())
        for one in itertools.product(*values)
    ]


def with_memory(job: Job, **changed: object) -> Job:
    """The job with other options of its `Memory`."""
    return replace(job, memory=replace(job.memory, **changed))


def planned(words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `verl-prefix plan`."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.main(["plan", *words])
    return code, out.getvalue(), err.getvalue()


def training_command(folder: Path, **model: str) -> list[str]:
    """Overrides that train a tiny model on prompts of one length, both written to `folder`."""
    write_tiny_model(folder / "model", **model)
    prompts = [[{"role": "user", "content": "the river " * 60}]] * 16
    pq.write_table(pa.table({"prompt": prompts}), folder / "train.parquet")
    role = "actor_rollout_ref"
    return [
        "algorithm.adv_estimator=grpo", f"data.train_files={folder / 'train.parquet'}", "data.train_batch_size=8",
        "data.max_prompt_length=256", "data.max_response_length=32", f"{role}.model.path={folder / 'model'}",
        f"{role}.rollout.n=4", f"{role}.actor.ppo_mini_batch_size=8", f"{role}.actor.use_dynamic_bsz=true",
        f"{role}.actor.ppo_max_token_len_per_gpu=1024", "trainer.n_gpus_per_node=2",
    ]  # fmt: skip


def without_step(job: Job, arms: list[Arm], amount: str, log_probs: bool = True) -> list[dict[str, float]]:
    """An amount of each arm's phases, without the optimizer's step, which runs no layers."""

    def no_step(simulation: Simulation, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        simulation.tracker.phases["optimizer"].clear()

    with mock.patch.object(Simulation, "step", no_step):
        found = simulator._run(job, arms, H100, log_probs)
    return [{name: phase[amount] for name, phase in phases.items()} for phases in found]
