"""Compiled decoder layers: one compilation serves packed passes, phase A and waves; attention and recurrences stay
outside of it."""

import pytest
import torch
import torch._dynamo.testing
from families import build
from runners import random_rollouts, run_shared, run_stock


@pytest.mark.more
@pytest.mark.parametrize("family", ["llama3", "granite4-h"])
def test_compiled_layers_compute_the_same_and_are_compiled_once(family):
    torch._dynamo.reset()
    model = build(family)
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
