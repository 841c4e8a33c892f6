"""On-policy distillation by verl's own trainer, stock and ours: real verl, Ray, FSDP2 on two gloo ranks and HF rollout.

The teacher's server is a stand-in (`helpers/cpu_teacher.py`): verl's own are vLLM's and sglang's. Shows neither, nor
CUDA.
"""

import os
from pathlib import Path

import pytest
import torch
from both_arms import both_arms
from transformers import AutoModelForCausalLM

HELPERS = Path(__file__).parents[1] / "helpers"
LOSSES = {
    "topk_alone": ["loss_mode=forward_kl_topk", "use_task_rewards=false", "use_policy_gradient=false"],
    "topk": ["loss_mode=forward_kl_topk", "use_policy_gradient=false"],
    "k1_as_reward": ["loss_mode=k1", "use_task_rewards=false", "use_policy_gradient=true"],  # as in verl's scripts
}
SUMS = ("distillation/loss", "distillation/loss_min", "distillation/loss_max", "distillation/teacher_mass_max")


@pytest.mark.ray
@pytest.mark.full
@pytest.mark.parametrize("loss", LOSSES)
def test_prompts_are_shared_and_step_1_is_stocks(tmp_path: Path, train, monkeypatch, loss: str) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "cpu_teacher")
    teacher, key = tmp_path / "teacher", "distillation.teacher_models.teacher_model"
    options = [
        "trainer.v1.trainer_mode=sync", "distillation.enabled=true", "distillation.n_gpus_per_node=1",
        "distillation.nnodes=1", "ray_kwargs.ray_init.num_gpus=3", f"{key}.model_path={teacher}",
        f"{key}.inference.name=sglang",
        f"{key}.inference.tensor_model_parallel_size=1", f"{key}.inference.max_model_len=4096",
        "distillation.distillation_loss.topk=8",
        *(f"distillation.distillation_loss.{option}" for option in LOSSES[loss]),
    ]  # fmt: skip
    arms = both_arms(tmp_path, train, options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.manual_seed(5)
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    model.save_pretrained(teacher)
    stock, prefix = arms
    for step in prefix:
        assert step["actor/prefix/reuse_fraction"] > 0.5 and step["actor/prefix/stock_rows"] == 0
        assert step["actor/prefix/exchanged_rows"] > 0
    assert 0 < prefix[0]["actor/prefix/verify_log_probs"] <= 3
    assert stock[0]["actor/grad_norm"] > 1e-3 and (loss != "topk_alone") == ("actor/kl_loss" in stock[0])
    names = [name for name in (*(f"actor/{name}" for name in SUMS), "actor/kl_loss") if name in stock[0]]
    for name in (*names, "actor/grad_norm", "actor/entropy", "critic/score/mean", "response_length/mean"):
        print(name, prefix[0][name], stock[0][name])
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
