"""verl's asynchronous trainers, whose rollout has resources of its own, for real: Ray, FSDP2 on gloo, HF rollout, stock
and ours. Weights go by verl's checkpoint engine; instead of NCCL's broadcast they take Ray's object store
(`object_store_checkpoint`), which is all that is replaced. Neither vLLM nor CUDA."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from both_arms import both_arms
from musique import RECIPE

from verl_prefix.trace import Trace
from verl_prefix.versions import TESTED_VERL, installed_version

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SEPARATE = [
    "actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.checkpoint_engine.backend=object_store",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=object_store_checkpoint",
    "ray_kwargs.ray_init.num_gpus=3", "ray_kwargs.ray_init.num_cpus=64",
]  # fmt: skip
EXPERIMENTAL = [
    *SEPARATE, "hydra.searchpath=[pkg://verl.trainer.config]", "rollout.n_gpus_per_node=1",
    "trainer.rollout_data_dir=null",  # which one_step_off_policy of verl 0.9.1 fails at
]  # fmt: skip
V1 = [
    *SEPARATE, f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1", "trainer.v1.separate_async.num_warmup_batches=0",
]  # fmt: skip
MODE = "trainer.v1.trainer_mode"
# Steps of 4 prompts on two ranks, and a sync behind each. Without staleness both arms train on the same prompts;
# fully_async_policy of verl 0.9.1 logs a step with the next one, and so the first two of three.
DRIVERS = {
    "one_step_off": (
        {"module": "verl.experimental.one_step_off_policy.main_ppo", "config": "one_step_off_ppo_trainer"},
        EXPERIMENTAL,
    ),
    "fully_async": (
        {"module": "verl.experimental.fully_async_policy.fully_async_main", "config": "fully_async_ppo_trainer"},
        [
            *EXPERIMENTAL, "data.train_batch_size=0", "rollout.total_rollout_steps=12",
            "async_training.staleness_threshold=0", "async_training.trigger_parameter_sync_step=1",
            "algorithm.rollout_correction.bypass_mode=false", "algorithm.rollout_correction.rollout_is=token",
        ],
    ),
    "separate_async": ({}, [*V1, "trainer.v1.separate_async.parameter_sync_step=1"]),
}  # fmt: skip
SEPARATE_ASYNC = pytest.mark.skipif(
    installed_version("verl") not in TESTED_VERL,
    reason="verl's main branch of 2026-08-22 has no hybrid_engine=False there, and rollout.name=hf is one server",
)


@pytest.mark.parametrize("deals", [True, False])
def test_batches_dealt_by_prompt_keep_it_in_one_mini_batch(deals: bool):
    """By verl's own function, for `actor.use_prefix_grouper`; without it rows are dealt by length, and prompts torn."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    ranks, updates, prompts, n = 2, 4, 16, 6
    lens = torch.randint(20, 90, (prompts * n, 1), generator=torch.Generator().manual_seed(0))
    uids = np.repeat([f"prompt {i}" for i in range(prompts)], n).astype(object)
    batch = DataProto.from_dict({"attention_mask": (torch.arange(90) < lens).long()}, {"uid": uids})
    trainer = SimpleNamespace(use_prefix_grouper=deals, actor_rollout_wg=None, _get_dp_size=lambda *_: ranks)
    RayPPOTrainer._balance_batch(trainer, batch, metrics={})
    # Each rank has a slice, and its mini-batches are slices of that.
    found = batch.non_tensor_batch["uid"].reshape(ranks, updates, -1).swapaxes(0, 1).reshape(updates, -1)
    torn = sum(sum(uid in mini_batch for mini_batch in found) > 1 for uid in set(uids))
    assert torn == (0 if deals else prompts)


@pytest.mark.ray
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("one_step_off", marks=pytest.mark.full),
        "fully_async",
        pytest.param("separate_async", marks=[pytest.mark.full, SEPARATE_ASYNC]),
    ],
)
def test_two_steps_and_a_weight_sync_with_step_1_as_stocks(tmp_path: Path, train, monkeypatch, name: str):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]))
    driver, options = DRIVERS[name]
    modes = []
    if name == "separate_async":
        modes = [[f"{MODE}=prefix_separate_async"], [f"{MODE}=separate_async"]]
        monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARN")  # as in the last test
    stock, prefix = both_arms(tmp_path, train, options, *modes, **driver)
    for step in prefix:
        own = {key.removeprefix("actor/"): value for key, value in step.items() if "prefix/" in key}
        assert own["prefix/reuse_fraction"] > 0.4 and own["prefix/groups"] == 4
        assert own["prefix/split_groups"] == 0 == own["prefix/stock_rows"]
        assert own.get("prefix/verify_log_probs", 0) < 1 and ("prefix/verify_log_probs" in own) == (step is prefix[0])
    for key in ("critic/score/mean", "response_length/mean"):
        assert prefix[0][key] == pytest.approx(stock[0][key], rel=5e-6, abs=5e-6), key
    assert stock[0]["actor/grad_norm"] > 0.01, "a step whose rewards are all equal compares nothing"
    for key in ("grad_norm", "pg_loss", "kl_loss", "entropy" if modes else "entropy_loss"):
        assert prefix[0][f"actor/{key}"] == pytest.approx(stock[0][f"actor/{key}"], rel=5e-6, abs=5e-6), key


@pytest.mark.ray
@pytest.mark.full
def test_responses_of_several_versions_and_several_mini_batches_pass_the_self_check(tmp_path: Path, train, monkeypatch):
    """In fully_async_policy's defaults (bypass mode, partial rollouts): the rollout has as much to do as the trainer,
    so that weights change under a prompt's responses. A prompt that is torn would be in two groups."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]))
    driver, _ = DRIVERS["fully_async"]
    options = [
        *EXPERIMENTAL, "data.train_batch_size=0", "rollout.total_rollout_steps=24", "data.max_response_length=800",
        f"{ACTOR}.ppo_mini_batch_size=2", "async_training.require_batches=2", "async_training.staleness_threshold=1",
        "async_training.trigger_parameter_sync_step=2", f"{ROLLOUT}.max_num_seqs=3", f"{ACTOR}.prefix.verify=3",
    ]  # fmt: skip
    (steps,) = both_arms(tmp_path, train, options, arms=["prefix"], num_steps=3, **driver)
    for step in steps:
        assert step["actor/prefix/groups"] == 4 and step["actor/prefix/split_groups"] == 0
        assert step["actor/prefix/verify_log_probs"] < 1 and step["actor/prefix/nonfinite_passes"] == 0
    assert sum(step["fully_async/partial/total_partial_num"] for step in steps) > 0


@SEPARATE_ASYNC
@pytest.mark.ray
@pytest.mark.full
def test_turns_under_separate_async_are_an_update_a_local_step(tmp_path: Path, train, monkeypatch):
    """verl asserts that a local step is one mini-batch of rows; rows of turns are more, which stock cuts by number.
    Without replicas on the trainer's GPUs verl 0.9.1 logs a line that ends the run, unless it is not to be logged."""
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARN")
    paths = [str(HELPERS), str(RECIPE), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    options = [
        *V1, f"{ROLLOUT}.agent.agent_loop_config_path={RECIPE / 'search_turns.yaml'}",
        f"{ROLLOUT}.agent.default_agent_loop=search_turns", f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
        f"{ROLLOUT}.multi_turn.tool_config_path={RECIPE / 'search_tool.yaml'}", f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.calculate_log_probs=true", "data.max_response_length=24", "data.max_prompt_length=700",
        f"{MODE}=prefix_separate_async", "trainer.v1.separate_async.parameter_sync_step=2",
        f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.prefix.mini_batches=prompts",
        f"{ACTOR}.prefix.trace_dir={tmp_path / 'trace'}",
    ]  # fmt: skip
    (steps,) = both_arms(tmp_path, train, options, arms=["prefix"])
    assert Trace(tmp_path / "trace").num_steps == 2 * 2, "optimizer steps of two training steps"
    for step in steps:
        assert step["prefix/reuse_fraction"] > 0.5 and step["prefix/split_groups"] == 0 == step["prefix/stock_rows"]
        assert step["actor/grad_norm"] > 0.01
