"""Costs of a model's token, read from its modules and config, without weights."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from verl_prefix.models.last_layer import head_only
from verl_prefix.models.recurrent import GatedDeltaNet, Mamba2, Mixer, mixer_of
from verl_prefix.models.support import layer_window
from verl_prefix.models.vision import vision_model

DELTA_CHUNK = 64  # of flash-linear-attention's kernels, and of transformers' own rule


@dataclass(frozen=True)
class ModelShape:
    """Costs of a token, forward, in FLOPs and bytes.

    Args:
        linear: FLOPs per token of all layers' matmuls, and of recurrent layers' scans and convolutions, which cost the
            same for every token. Of a mixture of experts only the chosen ones count.
        head: FLOPs per token of lm_head. last: those of `linear` that only tokens of lm_head take on our path, in the
            last layer (`models.last_layer`). pair: per query-key pair of one layer's attention.
        windows: sliding window of every attention layer, None where it sees everything.
        activations: bytes per token that an average layer keeps for backward. boundary: bytes per token of its input
            alone. attention: bytes per token of one layer's attention output and log-sum-exp.
        kv: bytes per token of all layers' keys and values, of `kv_heads` heads. logits: bytes per token of them.
        recurrent_layers: layers that have no attention. state: bytes of all their states of one sequence, and of the
            last inputs of their convolutions, in fp32.
        tower: FLOPs per patch of a vision tower's matmuls; 0 without one.
        parameters, layer_parameters: how many the model has, and how many one layer.
    """

    linear: float
    head: float
    pair: float
    windows: tuple[int | None, ...]
    activations: float
    boundary: float
    kv: float
    vocab_size: int
    last: float = 0.0
    attention: float = 0.0
    tower: float = 0.0
    logits: float = 0.0
    parameters: float = 0.0
    layer_parameters: float = 0.0
    kv_heads: int = 1
    recurrent_layers: int = 0
    state: float = 0.0

    @property
    def layers(self) -> int:
        return len(self.windows) + self.recurrent_layers

    @functools.cached_property
    def _layers_by_window(self) -> tuple[tuple[int | None, int], ...]:
        return tuple(Counter(self.windows).items())

    def pairs(self, length: int, behind: int) -> float:
        """Query-key pairs of all attention layers, of `length` queries with `behind` keys before them."""
        pairs = 0.0
        for window, layers in self._layers_by_window:  # no generator, since a plan calls this a hundred thousand times
            pairs += layers * query_key_pairs(length, behind, window)
        return pairs


def query_key_pairs(length: int, behind: int, window: int | None) -> float:
    """Query-key pairs of `length` queries that see themselves and up to `behind` keys before them."""
    if window is None or behind + length <= window:
        return length * behind + length * (length + 1) / 2
    growing = max(0, min(length, window - behind))  # queries that still see everything
    return growing * behind + growing * (growing + 1) / 2 + (length - growing) * window


def model_shape(model: PreTrainedModel, dtype: torch.dtype) -> ModelShape:
    """FLOPs and bytes per token, from the modules (also on the meta device, also sharded by FSDP2). A vision tower,
    which sharing saves too, is counted apart.

    Args:
        dtype: what activations are computed in.
    """
    text = model.config.get_text_config()
    lm_head = model.get_output_embeddings()
    seeing: Any = vision_model(model)
    body: torch.nn.Module = model if seeing is None else seeing.model.language_model
    weights = _linear_weights(body, lm_head)
    # Experts are [experts, in, out] parameters, of which a token meets `num_experts_per_tok`.
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None) or 0
    weights += chosen * sum((p.numel() / p.shape[0] for p in _parameters(body) if p.dim() == 3), 0.0)
    mixers = [mixer for mixer in map(mixer_of, body.modules()) if mixer is not None]
    recurrent = {mixer.module.layer_idx for mixer in mixers}
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    windows = tuple(layer_window(text, layer) for layer in range(layers) if layer not in recurrent)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    if latent := getattr(text, "kv_lora_rank", None):  # its values are padded to this, see `models.hookup`
        head_dim = text.qk_nope_head_dim + text.qk_rope_head_dim
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    # Kept per token and layer: inputs of norms, residuals and projections, and the MLP's; of attention q, k, v twice
    # (rotated) and out.
    mixing = 2.0 * len(windows) * (heads + kv_heads) * head_dim * text.hidden_size
    if latent:
        mixing = sum(_linear_weights(m) for m in body.modules() if hasattr(m, "kv_b_proj"))
    mixing += sum(_linear_weights(mixer.module) for mixer in mixers)
    mlps = max(weights - mixing, 0) / text.hidden_size / 3
    kept = 6.0 * layers * text.hidden_size + 4 * mlps + 2.0 * len(windows) * (heads + 2 * kv_heads) * head_dim
    kept += sum(kept_by(mixer) for mixer in mixers)
    return ModelShape(
        linear=2.0 * weights + sum(scan_flops(mixer) + sum(map(conv_flops, _convolutions(mixer))) for mixer in mixers),
        head=2.0 * lm_head.weight.numel(),
        last=2.0 * sum(_linear_weights(module) for _, module in head_only(model)),
        pair=4.0 * heads * head_dim,
        windows=windows,
        activations=kept / layers * dtype.itemsize,
        boundary=text.hidden_size * dtype.itemsize,
        attention=heads * (head_dim * dtype.itemsize + 4.0),
        kv=2.0 * len(windows) * kv_heads * head_dim * dtype.itemsize,
        vocab_size=text.vocab_size,
        tower=0.0 if seeing is None else 2.0 * _linear_weights(seeing.model.visual),
        logits=float(text.vocab_size * dtype.itemsize),
        parameters=float(sum(p.numel() for p in model.parameters())),
        layer_parameters=sum(p.numel() for p in body.parameters() if p.dim() > 1 and p.shape[0] != text.vocab_size)
        / layers,
        kv_heads=kv_heads,
        recurrent_layers=len(recurrent),
        state=sum(_state_bytes(mixer) for mixer in mixers),
    )


def conv_flops(conv: torch.nn.Conv1d) -> float:
    """FLOPs per token of a depthwise convolution."""
    return 2.0 * conv.weight.numel()


def scan_flops(mixer: Mixer) -> float:
    """FLOPs per token of a mixer's scan.

    In chunks of c tokens a head of the gated delta rule (arXiv 2412.06464, section 3.3; keys of K, values of V) makes
    three c x c products over K and two over V, and uses its K x V state three times; solving the triangular system in
    between takes 1 % of that. A head of Mamba-2 (arXiv 2405.21060, section 6) makes a c x c product over its head dim
    and uses its state twice; the heads of a group share one product over the state size.
    """
    module = mixer.module
    if isinstance(mixer, GatedDeltaNet):
        k, v, chunk = module.head_k_dim, module.head_v_dim, DELTA_CHUNK
        return float(module.num_v_heads * (2.0 * chunk * (3 * k + 2 * v) + 6.0 * k * v))
    if isinstance(mixer, Mamba2):
        state, inner = module.ssm_state_size, module.num_heads * module.head_dim
        return float(2.0 * module.chunk_size * (module.n_groups * state + inner) + 4.0 * state * inner)
    return 0.0


def kept_by(mixer: Mixer) -> float:
    """How many numbers per token a mixer keeps for backward, apart from its input: the inputs of its convolution, the
    inputs and outputs of its scan (by flash-linear-attention or mamba_ssm), its gates, and what it multiplies by them.
    """
    module, channels = mixer.module, float(sum(conv.in_channels for conv in _convolutions(mixer)))
    if isinstance(mixer, GatedDeltaNet):
        keys, values = module.num_v_heads * module.head_k_dim, module.num_v_heads * module.head_v_dim
        return channels + 2 * keys + 4 * values + module.num_v_heads * DELTA_CHUNK
    if isinstance(mixer, Mamba2):
        return 2 * channels + 12 * module.num_heads * module.head_dim  # its norm is in fp32, step by step
    return 6 * channels


def _state_bytes(mixer: Mixer) -> float:
    """Bytes in fp32 of a mixer's state and of its convolutions' last inputs."""
    module, numbers = mixer.module, sum(conv.in_channels * (conv.kernel_size[0] - 1) for conv in _convolutions(mixer))
    if isinstance(mixer, GatedDeltaNet):
        numbers += module.num_v_heads * module.head_k_dim * module.head_v_dim
    elif isinstance(mixer, Mamba2):
        numbers += module.num_heads * module.head_dim * module.ssm_state_size
    return 4.0 * numbers


def _convolutions(mixer: Mixer) -> list[torch.nn.Conv1d]:
    return [child for child in mixer.module.children() if isinstance(child, torch.nn.Conv1d)]


def _parameters(body: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """All parameters but those of convolutions, [channels, 1, width]."""
    for module in body.modules():
        if not isinstance(module, torch.nn.Conv1d):
            yield from module.parameters(recurse=False)


def _linear_weights(module: torch.nn.Module, lm_head: torch.nn.Module | None = None) -> float:
    linears = (m for m in module.modules() if isinstance(m, torch.nn.Linear) and m is not lm_head)
    return sum((m.weight.numel() for m in linears), 0.0)
