"""examples/trl_grpo.py against TRL's own GRPOTrainer over several steps on CPU: losses, gradients, weights, in fp32.

`make test-trl` has trl; elsewhere nothing here runs. SGD, since Adam turns noise in a gradient near zero into a step.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

trl = pytest.importorskip("trl")

from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig  # noqa: E402

from verl_prefix.core import prefix_cache  # noqa: E402
from verl_prefix.models.hookup import HookedModel  # noqa: E402
from verl_prefix.testing import write_tiny_model  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import trl_grpo  # noqa: E402

PROMPTS = [" ".join(f"The {i + 7 * j}. river meets the {j}. town." for j in range(20 + i)) for i in range(8)]
OPTIONS = dict(
    per_device_train_batch_size=8, gradient_accumulation_steps=1, num_generations=4, max_completion_length=12,
    max_steps=3, gradient_checkpointing=False, optim="sgd", learning_rate=0.1, logging_steps=1, disable_tqdm=True,
)  # fmt: skip
MORE = dict(beta=0.04, num_iterations=2, max_steps=4, temperature=0.8, entropy_coef=0.01)
CASES = {
    "packed": (OPTIONS, dict()),
    "packed, KL and entropy, two updates a rollout": (OPTIONS | MORE, dict()),
    "phased": (OPTIONS | MORE, dict(max_tokens=200)),
    "phased, checkpointed": (OPTIONS | MORE | dict(gradient_checkpointing=True), dict(max_tokens=500)),
    "groups torn apart": (OPTIONS | dict(per_device_train_batch_size=4, gradient_accumulation_steps=2), dict()),
    "sequence level, fp32 lm_head": (OPTIONS | dict(importance_sampling_level="sequence", loss_type="grpo",
                                                    cast_lm_head_to_fp32=True), dict()),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", texts=PROMPTS)


def both(model, options, ours, **more) -> dict:
    trainers = (
        trl_grpo.train(trl_grpo.SharedPrefixGRPOTrainer, model, PROMPTS, options, **ours, **more),
        trl_grpo.train(trl.GRPOTrainer, model, PROMPTS, options, **more),
    )
    assert all(len(t.seen) == options["max_steps"] * options["gradient_accumulation_steps"] for t in trainers)
    return trl_grpo.compare(*trainers)


def close(found: dict) -> None:
    assert found["same_completions"]
    assert found["loss"] < 5e-6 and max(found["grads"]) < 5e-6 and found["weights"] < 5e-6


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_weights_are_those_of_stock(model, case):
    close(both(model, *CASES[case]))


@pytest.mark.parametrize("ours", [dict(), dict(max_tokens=200)], ids=["packed", "phased"])
def test_lora_with_the_adapter_disabled_as_reference(model, ours):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    close(both(model, OPTIONS | dict(beta=0.04), ours, peft_config=config))


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}], ids=str)
def test_two_ranks_average_as_ddp_does(options):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        EXAMPLES / "trl_grpo.py", "--group", "4", "--max-tokens", "600", "--options", json.dumps(options),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    close(json.loads(done.stdout.splitlines()[-1]))


def test_a_prompt_is_computed_once_in_forwards_with_and_without_gradients(model, monkeypatch):
    sizes = []
    forward = HookedModel.token_outputs
    monkeypatch.setattr(
        HookedModel, "token_outputs", lambda m, ids, *args, **kw: sizes.append(len(ids)) or forward(m, ids, *args, **kw)
    )
    options = OPTIONS | MORE | dict(max_steps=1, logging_steps=1)
    trainer = trl_grpo.train(trl_grpo.SharedPrefixGRPOTrainer, model, PROMPTS, options)
    rows = trainer.generated
    prompts = {
        tuple(row[mask.bool()].tolist()) for row, mask in zip(rows["prompt_ids"], rows["prompt_mask"], strict=True)
    }
    once = sum(len(prompt) - 1 for prompt in prompts) + int(rows["completion_mask"].sum())
    assert len(prompts) == 2 and sizes == [once] * 3  # old log-probs, reference, update


def temperature_forgotten(monkeypatch):
    monkeypatch.setattr(
        trl_grpo, "response_log_probs", lambda *args, temperature, **options: trl_grpo_log_probs(*args, **options)
    )


def prefix_detached(monkeypatch):
    monkeypatch.setattr(prefix_cache.PrefixCache, "add_grad", lambda *args: None)


trl_grpo_log_probs = trl_grpo.response_log_probs


@pytest.mark.parametrize("sabotage", [temperature_forgotten, prefix_detached])
def test_broken_maths_is_far_off(model, sabotage, monkeypatch):
    options = OPTIONS | MORE | dict(max_steps=1)
    sabotage(monkeypatch)
    assert both(model, options, dict(max_tokens=200))["grads"][0] > 100 * 5e-6


def refused(model, match, **options):
    with pytest.raises(ValueError, match=match):
        trl_grpo.train(trl_grpo.SharedPrefixGRPOTrainer, model, PROMPTS, OPTIONS | options)


def test_an_auxiliary_loss_is_refused_by_name(model, tmp_path):
    sizes = dict(hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2, num_experts=4)
    config = Qwen3MoeConfig(**sizes, vocab_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    refused(str(tmp_path), r"router_aux_loss_coef=0.001: .* set GRPOConfig\(router_aux_loss_coef=0.0\)")


@pytest.mark.parametrize(("flag", "name"), [("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DeepSpeed")])
def test_sharded_parameters_are_refused_by_name(model, flag, name, monkeypatch):
    """The flag alone: neither runs without an accelerator."""
    init = trl.GRPOTrainer.__init__
    monkeypatch.setattr(
        trl.GRPOTrainer,
        "__init__",
        lambda self, *args, **kwargs: (init(self, *args, **kwargs), setattr(self, flag, True))[0],
    )
    refused(model, f"{name} shards parameters.*launch with DDP, or train with the verl plugin")


def test_images_are_refused_by_name(model):
    trainer = trl_grpo.train(trl_grpo.SharedPrefixGRPOTrainer, model, PROMPTS, OPTIONS | dict(max_steps=1))
    ids = torch.ones(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="num_images, pixel_values: this trainer takes text alone"):
        trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, ids, 2, pixel_values=torch.zeros(1), num_images=[1, 0]
        )
