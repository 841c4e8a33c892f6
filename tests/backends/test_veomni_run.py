"""Two GRPO steps by real verl (Ray, two gloo ranks, HF rollout) in both arms of VeOmni, with experts of a rank each.
Shows neither vLLM nor CUDA.
"""

import os
from pathlib import Path

import pytest
from both_arms import VEOMNI, both_arms
from whole_tensors import check_put_together

pytest.importorskip("veomni")

from transformers import AutoModelForCausalLM  # noqa: E402
from verl.workers.engine.veomni import utils  # noqa: E402

from verl_prefix.testing import write_tiny_model  # noqa: E402

OPTIONS = [
    "trainer.v1.trainer_mode=sync", "actor_rollout_ref.model.external_lib=veomni_cpu",
    "actor_rollout_ref.actor.veomni.expert_parallel_size=2",
    "actor_rollout_ref.actor.veomni.moe_implementation=fused_triton",
    "actor_rollout_ref.actor.veomni.attn_implementation=sdpa",
    # What platform=cpu says to FSDP2.
    "~actor_rollout_ref.actor.fsdp_config", "~actor_rollout_ref.ref.fsdp_config",
]  # fmt: skip


def test_experts_that_verls_veomni_took_apart_are_put_together(tmp_path, monkeypatch) -> None:
    """A rank's experts behind the other's, all gates of each before all ups."""
    monkeypatch.setattr(utils, "get_device_id", lambda: "cpu")

    weights = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path, family="qwen3_moe")).state_dict()
    apart = {}
    for name, weight in weights.items():
        parts = weight.split(2) if "experts." in name else [weight]
        for rank, part in enumerate(parts):
            taken = utils.default_moe_param_handler(name, part, 2 * rank) if "experts." in name else [(name, weight)]
            apart |= dict(taken)
    check_put_together(apart, weights)


@pytest.mark.ray
@pytest.mark.ci
def test_step_1_is_stocks_and_prompts_are_shared(tmp_path: Path, train, monkeypatch) -> None:
    helpers = str(Path(__file__).parents[1] / "helpers")
    monkeypatch.setenv("PYTHONPATH", helpers, prepend=os.pathsep)
    stock, prefix = both_arms(tmp_path, train, OPTIONS, family="qwen3_moe", engines=VEOMNI)
    for step in prefix:
        step = {name.removeprefix("actor/"): value for name, value in step.items()}
        assert step["prefix/reuse_fraction"] > 0.5 and step["prefix/stock_rows"] == 0
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert "prefix/moe/max_vio/max" in step
    assert 0 < prefix[0]["actor/prefix/verify_log_probs"] <= 3
    assert stock[0]["actor/grad_norm"] > 1e-3, "a step whose rewards are all equal compares nothing"
    names = ("critic/score/mean", "response_length/mean", "entropy", "kl_loss", "grad_norm", "pg_loss")
    for name in (name if "/" in name else f"actor/{name}" for name in names):
        print(name, prefix[0][name], stock[0][name])
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
