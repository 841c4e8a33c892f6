"""Rows of turns under real verl: an agent loop that returns a row per call, stock and ours, on one and two ranks. Real
verl, Ray, FSDP2 on gloo and HF rollout; neither vLLM nor CUDA.
"""

import os
from pathlib import Path

import pytest
import yaml
from both_arms import both_arms

HELPERS = Path(__file__).parents[1] / "helpers"  # where `turn_loop` is


@pytest.mark.ray
@pytest.mark.parametrize(
    ("ranks", "mode"), [(2, "prefix_sync"), pytest.param(1, "sync", marks=pytest.mark.full)], ids=["2ranks", "1rank"]
)
def test_turns_share_by_default_and_step_1_is_stocks(tmp_path: Path, train, monkeypatch, ranks: int, mode: str):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]))
    loops = tmp_path / "loops.yaml"
    loops.write_text(yaml.safe_dump([{"name": "turns", "_target_": "turn_loop.TurnLoop"}]))
    rollout = "actor_rollout_ref.rollout"
    options = [
        f"{rollout}.agent.agent_loop_config_path={loops}", f"{rollout}.agent.default_agent_loop=turns",
        f"{rollout}.n=2", f"{rollout}.calculate_log_probs=true", "data.max_response_length=24",
        f"trainer.n_gpus_per_node={ranks}",
        # Mini-batches count rows: one step of 4 prompts x 2 sessions x 4 turns at most.
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    ]  # fmt: skip
    ours = [f"trainer.v1.trainer_mode={mode}"]
    stock, prefix = both_arms(tmp_path, train, options, ours, ["trainer.v1.trainer_mode=sync"])
    prefix = [{name.removeprefix("actor/"): value for name, value in step.items()} for step in prefix]
    for step in prefix:
        assert step["prefix/reuse_fraction"] > 0.5
    for name in ("critic/score/mean", "response_length/mean"):
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
    assert stock[0]["actor/grad_norm"] > 0.01, "a step whose rewards are all equal compares nothing"
    for name in ("grad_norm", "pg_loss", "entropy", "kl_loss"):
        assert prefix[0][name] == pytest.approx(stock[0][f"actor/{name}"], rel=5e-6, abs=5e-6), name
