"""Commands of a tiny model for tests of `verl-prefix plan`."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_prefix.testing import write_tiny_model
from verl_prefix.tools.plan import command as plan
from verl_prefix.tools.plan import predict
from verl_prefix.tools.plan.options import Options

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PREFIX = f"{ACTOR}.prefix"


@pytest.fixture(autouse=True)
def one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One training step is priced, not four: where lengths are not drawn all are alike."""
    monkeypatch.setattr(predict, "NUM_STEPS", 1)


def write_folder(path: Path) -> Path:
    """A tiny model without its weights, and prompts of equal length."""
    write_tiny_model(path / "model")
    (path / "model" / "model.safetensors").unlink()
    prompts = [[{"role": "user", "content": "the river " * 60}]] * 16
    pq.write_table(pa.table({"prompt": prompts}), path / "train.parquet")
    return path


def overrides(folder: Path, *more: str) -> list[str]:
    return [
        "algorithm.adv_estimator=grpo", f"data.train_files={folder / 'train.parquet'}",
        "data.train_batch_size=8", "data.max_prompt_length=3072", "data.max_response_length=32",
        f"actor_rollout_ref.model.path={folder / 'model'}", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384", "trainer.n_gpus_per_node=2",
        "trainer.v1.trainer_mode=prefix_sync", *more,
    ]  # fmt: skip


def build(folder: Path, *more: str, responses: str | None = "20,0", shares: str | None = None) -> dict:
    return plan.build(Options(overrides(folder, *more), response_lengths=responses, shares=shares))
