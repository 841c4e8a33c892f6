"""Compiled decoder layers: one compilation serves packed passes, phase A and waves; attention stays outside of it."""

import torch
import torch._dynamo.testing
from transformers import LlamaConfig, LlamaForCausalLM

from verl_prefix.testing import random_rollouts, run_shared, run_stock


def test_compiled_layers_compute_the_same_and_are_compiled_once():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2, head_dim=16, initializer_range=0.1, attn_implementation="sdpa",
        )
    )  # fmt: skip
    batch = random_rollouts([(23, [9, 17, 5]), (41, [3, 4, 11, 7, 6])], 97)
    truth = torch.cat(run_stock(model, batch))
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter, dynamic=True)
    frames = []
    for options in (dict(schedule="packed"), dict(schedule="phased", wave_tokens=19), dict(schedule="phased")):
        model.zero_grad()
        ours = torch.cat(run_shared(model, batch, **options))
        frames.append(counter.frame_count)
        assert (ours - truth).norm() < 5e-6 * truth.norm()
        for name, parameter in model.named_parameters():
            assert (parameter.grad - grads[name]).norm() < 5e-6 * grads[name].norm(), name
    assert frames[0] > 0 and len(set(frames)) == 1
    torch._dynamo.reset()
