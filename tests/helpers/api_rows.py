"""A small model and rows of groups in every form that the standalone API takes, by Hugging Face and by us."""

import types
from itertools import accumulate

import pytest
import torch
from runners import random_rollouts
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from verl_prefix import phased_update
from verl_prefix.core import prefix_cache
from verl_prefix.core.kernels import cpu

VOCAB = 97
# Ragged groups, a group of one, 1-token prompts, a prefix of one token, an empty response.
SHAPE = [(23, [9, 17, 5]), (1, [6, 4]), (41, [3, 1, 11, 0, 2]), (7, [13]), (2, [8, 3])]
TEMPERATURE = 0.7
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-6}
# Neither fits the batch's 140 or so tokens: several sets of groups, waves of a few rows, logits in chunks.
BOUNDS = {
    "unbounded": {},
    "waves": dict(wave_tokens=12),
    "row_by_row": dict(wave_tokens=1),
    "sets_of_groups": dict(max_tokens=60, wave_tokens=19),
    "one_group_a_set": dict(max_tokens=20, logits_chunk=7),
    "offload": dict(wave_tokens=12, offload=True),
}


@pytest.fixture(autouse=True)
def float64_norm(monkeypatch):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)


def build(dtype: torch.dtype = torch.float64, **overrides):
    torch.manual_seed(0)
    fields = dict(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, initializer_range=0.1, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**fields | overrides)).to(dtype)


def batch(shape=SHAPE):
    """Rows in random order, with a weight per response token for log-probs, and its square for entropies."""
    return random_rollouts(shape, VOCAB, seed=3)


def weighted(log_probs, entropy, weights) -> torch.Tensor:
    return sum(
        (a * w.to(a.dtype) + b * w.to(b.dtype) ** 2).sum() for a, b, w in zip(log_probs, entropy, weights, strict=True)
    )


def grads(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def by_hf(model, rows) -> tuple[list, list, dict]:
    """Log-probs, entropies and gradients of HF's forward of every whole row."""
    found = []
    for prompt, response, weight in zip(rows.prompts, rows.responses, rows.weights, strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        every = logits.log_softmax(-1)
        row = every.gather(-1, response[:, None])[:, 0], -(every.exp() * every).sum(-1)
        weighted(*([x] for x in row), [weight]).backward()
        found.append([x.detach() for x in row])
    return *map(list, zip(*found, strict=True)), grads(model)


def error(ours: tuple, truth: tuple) -> float:
    """The largest relative error: of all log-probs, of all entropies, of the gradient of a parameter."""

    def relative(a, b):
        return ((a - b).norm() / b.norm()).item()

    assert ours[2].keys() == truth[2].keys() and [len(x) for x in ours[0]] == [len(x) for x in truth[0]]
    values = [relative(torch.cat(ours[i]), torch.cat(truth[i])) for i in (0, 1)]
    return max(*values, *(relative(ours[2][name], x) for name, x in truth[2].items()))


def padded(rows, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As TRL has them: prompts padded left, completions right; what lies in the padding must not matter."""
    width = max(len(row) for row in rows) + 2
    ids, mask = torch.full((len(rows), width), -100), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def inputs(form: str, rows) -> dict:
    if form == "tensors":
        return dict(prompts=rows.prompts, responses=rows.responses)
    if form == "ints":
        return dict(prompts=[x.tolist() for x in rows.prompts], responses=[x.tolist() for x in rows.responses])
    if form == "padded":
        (prompts, prompt_mask), (responses, response_mask) = padded(rows.prompts, True), padded(rows.responses, False)
        return dict(prompts=prompts, responses=responses, prompt_mask=prompt_mask, response_mask=response_mask)
    different = sorted({tuple(x.tolist()) for x in rows.prompts})
    groups = [different.index(tuple(x.tolist())) for x in rows.prompts]
    return dict(prompts=different, responses=rows.responses, groups=groups)


def unpadded(values, rows) -> list[torch.Tensor]:
    """Rows of a result; where it is padded, its padding is zero."""
    if isinstance(values, list):
        return values
    for row, response in zip(values, rows, strict=True):
        assert not row[len(response) :].any()
    return [row[: len(response)] for row, response in zip(values, rows, strict=True)]


def run_phased(model, rows, form="tensors", **options):
    found = [[x.new_zeros(0) for x in rows.weights] for _ in range(2)]
    seen = []
    with phased_update(model, **inputs(form, rows), temperature=TEMPERATURE, return_entropy=True, **options) as waves:
        for wave in waves:
            responses = [rows.responses[i] for i in wave.rows]
            log_probs, entropy = unpadded(wave.log_probs, responses), unpadded(wave.entropy, responses)
            weighted(log_probs, entropy, [rows.weights[i] for i in wave.rows]).backward()
            for row, *values in zip(wave.rows, log_probs, entropy, strict=True):
                found[0][row], found[1][row] = (x.detach() for x in values)
            seen += wave.rows
    assert sorted(seen) == [i for i, x in enumerate(rows.responses) if len(x)]
    return *([x.to(log_probs[0].dtype) for x in column] for column in found), grads(model)


def pre_hook(model):  # trl, GRPOConfig.cast_lm_head_to_fp32
    model.lm_head.register_forward_pre_hook(lambda module, args: (0.5 * args[0],))
    return model


def as_accelerator_prepares(model):
    utils = pytest.importorskip("accelerate.utils")
    forward = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
    model.forward = types.MethodType(utils.convert_outputs_to_fp32(forward), model)
    return model


def without_gradients(model):
    model.forward = torch.no_grad()(model.forward)
    return model


def lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


def prefix_detached(monkeypatch):
    monkeypatch.setattr(prefix_cache.PrefixCache, "add_grad", lambda *args: None)


def no_phase_c(monkeypatch):
    monkeypatch.setattr(prefix_cache.PrefixCache, "backward", lambda *args: None)


def suffix_share_of_prefix_gradient_lost(monkeypatch):
    backward = cpu.backward

    def lossy(dout, saved, call):
        dq, dk, dv = backward(dout, saved, call)
        return (dq, dk, dv) if call.causal else (dq, dk * 0, dv * 0)

    monkeypatch.setattr(cpu, "backward", lossy)


def peak_bytes(function) -> int:
    """The most bytes that `function` holds at once on a CPU, temporaries of operators included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
