"""What tests of trees compare: errors of a model's log-probs and gradients, a small model in float64, and families."""

import dataclasses
import sys

import pytest
import torch
import torch.nn.functional as F
from dialogues import VOCAB, rollouts
from float64_torch import Float64Torch
from runners import run_shared, run_stock
from transformers import Qwen3Config, Qwen3ForCausalLM

FAMILIES = [
    "qwen3", "mistral-window-8", "gemma3-window-9", "gemma2-window-9", "gpt-oss-window-9", "qwen3-moe", "lfm2",
    "qwen3.5", "qwen3-next", "granite4-h",
]  # fmt: skip
TWINS = ("gemma3-window-9", "qwen3-moe", "qwen3-next")  # of gemma2, qwen3 and qwen3.5


def measure(model, run) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and all gradients as one vector."""
    model.zero_grad()
    log_probs = torch.cat(run())
    return log_probs, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error(ours: tuple[torch.Tensor, ...], truth: tuple[torch.Tensor, ...]) -> float:
    """The larger relative error, of log-probs and of gradients."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, truth, strict=True))


def equal_hf(model, rows, seed, share_read, **options) -> None:
    """Asserts that these rows are as by HF in any plan by `options`. Where only some outputs are read, weights of the
    others are 0."""
    batch = rollouts(rows, seed)
    generator = torch.Generator().manual_seed(seed)
    is_read = [torch.rand(len(w), generator=generator) < share_read for w in batch.weights]
    batch = dataclasses.replace(batch, weights=[w * read for w, read in zip(batch.weights, is_read, strict=True)])
    truth, gradient = measure(model, lambda: run_stock(model, batch))

    def edit(tokens, plan):
        places = [F.pad(read, (len(p) - 1, 1)) for p, read in zip(batch.prompts, is_read, strict=True)]
        return dataclasses.replace(tokens, is_read=torch.cat(places))

    ours, our_gradient = measure(model, lambda: run_shared(model, batch, edit=edit, **options))
    read = torch.cat(is_read)
    assert torch.allclose(ours[read], truth[read], rtol=0, atol=1e-9)
    assert torch.allclose(our_gradient, gradient, rtol=0, atol=1e-9 * max(1, gradient.abs().max().item()))


@pytest.fixture(scope="module")
def small():
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: self.double())  # norms
        patch.setattr(sys.modules[Qwen3ForCausalLM.__module__], "torch", Float64Torch())
        yield Qwen3ForCausalLM(config).double().train()
