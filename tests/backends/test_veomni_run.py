"""Two GRPO steps by real verl (Ray, two gloo ranks, HF rollout) in both arms of VeOmni, with experts of a rank each.
Shows neither vLLM nor CUDA.
"""

import os
from pathlib import Path

import pytest
from both_arms import VEOMNI, both_arms, check_arms
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
def test_step_1_is_stocks_and_prompts_are_shared(tmp_path: Path, train, monkeypatch) -> None:
    helpers = str(Path(__file__).parents[1] / "helpers")
    monkeypatch.setenv("PYTHONPATH", helpers, prepend=os.pathsep)
    stock, prefix = both_arms(tmp_path, train, OPTIONS, family="qwen3_moe", engines=VEOMNI)
    check_arms(stock, prefix, experts=True)
