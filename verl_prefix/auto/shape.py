"""Costs of a model's token, read from its modules and config, without weights."""

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from verl_prefix.models.support import layer_window
from verl_prefix.models.vision import vision_model


@dataclass(frozen=True)
class ModelShape:
    """Costs of a token, forward, in FLOPs and bytes.

    Args:
        linear: FLOPs per token of all layers' matmuls; of a mixture of experts, those of the chosen experts.
        head: FLOPs per token of lm_head. pair: per query-key pair of one layer's attention.
        windows: sliding window of every layer, None where it sees everything.
        activations: bytes per token that one layer keeps for backward. boundary: bytes per token of its input alone.
        attention: bytes per token of one layer's attention output and log-sum-exp.
        kv: bytes per token of all layers' keys and values, of `kv_heads` heads. logits: bytes per token of them.
        tower: FLOPs per patch of a vision tower's matmuls; 0 without one.
        parameters, layer_parameters: numbers of them, and of one layer alone.
    """

    linear: float
    head: float
    pair: float
    windows: tuple[int | None, ...]
    activations: float
    boundary: float
    kv: float
    vocab_size: int
    attention: float = 0.0
    tower: float = 0.0
    logits: float = 0.0
    parameters: float = 0.0
    layer_parameters: float = 0.0
    kv_heads: int = 1

    @functools.cached_property
    def _layers_by_window(self) -> tuple[tuple[int | None, int], ...]:
        return tuple(Counter(self.windows).items())

    def pairs(self, length: int, behind: int) -> float:
        """Query-key pairs of all layers, of `length` queries with `behind` keys before them."""
        pairs = 0.0
        for window, layers in self._layers_by_window:  # a plan asks a hundred thousand times: no generator
            pairs += layers * query_key_pairs(length, behind, window)
        return pairs


def query_key_pairs(length: int, behind: int, window: int | None) -> float:
    """Query-key pairs of `length` queries that see themselves and up to `behind` keys before them."""
    if window is None or behind + length <= window:
        return length * behind + length * (length + 1) / 2
    growing = max(0, min(length, window - behind))  # queries that still see everything
    return growing * behind + growing * (growing + 1) / 2 + (length - growing) * window


def model_shape(model: PreTrainedModel, dtype: torch.dtype) -> ModelShape:
    """FLOPs and bytes per token, from the modules (also on the meta device, also sharded by FSDP2). Those of a vision
    tower, which sharing saves too, stand for themselves.

    Args:
        dtype: what activations are computed in.
    """
    text = model.config.get_text_config()
    lm_head = model.get_output_embeddings()
    seeing: Any = vision_model(model)
    body: torch.nn.Module = model if seeing is None else seeing.model.language_model
    weights = _linear_weights(body, lm_head)
    # Experts are [experts, in, out] parameters, of which a token meets `num_experts_per_tok`.
    chosen = getattr(text, "num_experts_per_tok", None) or 0
    weights += sum((p.numel() / p.shape[0] * chosen for p in body.parameters() if p.dim() == 3), 0.0)
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    # Kept per token and layer: inputs of norms, residuals and projections, q, k, v twice (rotated), out, and the MLP's.
    mlp = (weights / layers / text.hidden_size - 2 * (heads + kv_heads) * head_dim) / 3
    kept = 6 * text.hidden_size + 2 * (heads + 2 * kv_heads) * head_dim + 4 * max(mlp, 0)
    return ModelShape(
        linear=2.0 * weights,
        head=2.0 * lm_head.weight.numel(),
        pair=4.0 * heads * head_dim,
        windows=tuple(layer_window(text, layer) for layer in range(layers)),
        activations=kept * dtype.itemsize,
        boundary=text.hidden_size * dtype.itemsize,
        attention=heads * (head_dim * dtype.itemsize + 4.0),
        kv=2.0 * layers * kv_heads * head_dim * dtype.itemsize,
        vocab_size=text.vocab_size,
        tower=0.0 if seeing is None else 2.0 * _linear_weights(seeing.model.visual),
        logits=float(text.vocab_size * dtype.itemsize),
        parameters=float(sum(p.numel() for p in model.parameters())),
        layer_parameters=sum(p.numel() for p in body.parameters() if p.dim() > 1 and p.shape[0] != text.vocab_size)
        / layers,
        kv_heads=kv_heads,
    )


def _linear_weights(module: torch.nn.Module, lm_head: torch.nn.Module | None = None) -> float:
    linears = (m for m in module.modules() if isinstance(m, torch.nn.Linear) and m is not lm_head)
    return sum((m.weight.numel() for m in linears), 0.0)
