"""The functions for use without verl on hybrids: float64 against Hugging Face's own forward of every row."""

import pytest
import torch
import transformers
from families import float64_inside  # noqa: F401

from verl_prefix import phased_update, response_log_probs
from verl_prefix.models.advice import WHOLE_ROWS
from verl_prefix.testing import write_tiny_model


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "bamba"])
def test_log_probs_and_gradients_are_those_of_whole_rows(tmp_path, family, float64_inside):  # noqa: F811
    path = write_tiny_model(tmp_path, family=family)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float64)
    float64_inside(model.train())
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 400, (n,), generator=generator) for n in (75, 30)]
    groups, lens = [0, 1, 0, 0, 1], [9, 4, 2, 12, 7]
    responses = [torch.randint(3, 400, (n,), generator=generator) for n in lens]
    weights = [torch.randn(n, generator=generator, dtype=torch.float64) for n in lens]

    def gradients():
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    def loss(rows, log_probs):
        return sum((row * weights[i]).sum() for i, row in zip(rows, log_probs, strict=True))

    truth = []
    for group, response in zip(groups, responses, strict=True):
        ids = torch.cat([prompts[group], response]).unsqueeze(0)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompts[group]) - 1 : -1]
        truth.append(logits.log_softmax(-1).gather(-1, response.unsqueeze(-1)).squeeze(-1))
    loss(range(5), truth).backward()
    true_gradients = gradients()

    at_once = response_log_probs(model, prompts, responses, groups=groups)
    loss(range(5), at_once).backward()
    found, by_wave = [(at_once, gradients())], {}
    with phased_update(model, prompts, responses, groups=groups, wave_tokens=13) as waves:
        for wave in waves:
            loss(wave.rows, wave.log_probs).backward()
            by_wave.update(zip(wave.rows, wave.log_probs, strict=True))
    found.append(([by_wave[i] for i in range(5)], gradients()))

    for log_probs, grads in found:
        assert all((x - y).abs().max() < 1e-9 for x, y in zip(log_probs, truth, strict=True))
        assert grads.keys() == true_gradients.keys()
        assert max((grads[name] - x).norm() / x.norm() for name, x in true_gradients.items()) < 1e-9


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "bamba"])
def test_other_forwards_of_the_model_between_two_waves(tmp_path, family):
    path = write_tiny_model(tmp_path, family=family)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    prompts, responses = [torch.arange(3, 20)], [torch.arange(5, 9), torch.arange(7, 12)]
    with torch.no_grad():
        truth = response_log_probs(model, prompts, responses, groups=[0, 0])
    with phased_update(model, prompts, responses, groups=[0, 0], wave_tokens=5) as waves:
        for wave in waves:
            with torch.no_grad():
                again = response_log_probs(model, prompts, responses, groups=[0, 0])
            assert all(torch.equal(x, y) for x, y in zip(again, truth, strict=True))
            sum(row.sum() for row in wave.log_probs).backward()
    with (
        pytest.raises(RuntimeError, match=f"ran without a prefix_context; {WHOLE_ROWS}"),
        phased_update(model, prompts, responses, groups=[0, 0]),
    ):
        model(input_ids=prompts[0].unsqueeze(0))
