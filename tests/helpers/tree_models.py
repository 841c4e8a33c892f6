"""What tests of trees compare: errors of a model's log-probs and gradients, a small model in float64, and families."""

import sys

import pytest
import torch
from dialogues import VOCAB
from float64_torch import Float64Torch
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
