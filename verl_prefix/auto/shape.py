"""Costs of a model's tokens and passes, read from its modules and config, without weights."""

import copy
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl_prefix.core.bins import first_fit
from verl_prefix.core.groups import Group
from verl_prefix.core.output_index import num_own_strand_outputs
from verl_prefix.core.plan import PackedPass, Plan
from verl_prefix.models.last_layer import head_only
from verl_prefix.models.recurrent import GatedDeltaNet, Mamba2, Mixer, mixer_of
from verl_prefix.models.support import layer_window
from verl_prefix.models.vision import vision_model

DELTA_CHUNK = 64  # of flash-linear-attention's kernels, and of transformers' own rule


class PassCost(NamedTuple):
    """What one pass computes.

    Attributes:
        tokens: that go through the layers. head_tokens: of them, those that go through lm_head.
        pairs: query-key pairs of attention, summed over layers.
        skipped: tokens that skip most of the last layer (`models.last_layer`).
    """

    tokens: int
    head_tokens: int
    pairs: float
    skipped: int = 0

    def linear(self, shape: "ModelShape") -> float:
        """Forward FLOPs of the layers without attention's pairs."""
        return self.tokens * shape.linear - self.skipped * shape.last


@dataclass(frozen=True)
class ModelShape:
    """Costs of a token, forward, in FLOPs and bytes.

    Attributes:
        linear: FLOPs per token of all layers' matmuls, and of recurrent layers' scans and convolutions. Of a mixture of
            experts the chosen ones count.
        head: FLOPs per token of lm_head; 0 without one, as of a critic.
        pair: FLOPs per query-key pair of one layer's attention.
        windows: sliding window of every attention layer; None: it sees everything.
        activations: bytes per token that an average layer keeps for backward.
        routed: bytes per token that it keeps of experts' inputs and outputs, a row for each that a token meets.
        boundary: bytes per token of a layer's input alone.
        kv: bytes per token of all layers' keys and values.
        vocab_size: of the tokens; of the logits, too, if there is an lm_head.
        last: the part of `linear` that tokens without lm_head skip in the last layer (`models.last_layer`).
        attention: bytes per token of one layer's attention output and log-sum-exp.
        tower: FLOPs per patch of a vision tower's matmuls; 0 without one.
        logits: bytes of a token's logits.
        parameters, layer_parameters: how many the model has, and how many one layer. expert_parameters: of all of them,
            those of experts, which expert parallelism spreads.
        undivided: parameters that tensor parallelism does not divide: norms, routers, and projections to a latent.
        residual: the part of `activations` that it does not divide: inputs of norms, residuals and projections.
        kv_heads: of an attention layer.
        recurrent_layers: layers that have no attention.
        state: bytes in fp32 of a sequence's states in all of them, and of the last inputs of their convolutions.
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
    expert_parameters: float = 0.0
    routed: float = 0.0
    undivided: float = 0.0
    residual: float = 0.0
    kv_heads: int = 1
    recurrent_layers: int = 0
    state: float = 0.0

    @property
    def layers(self) -> int:
        """How many layers there are, recurrent ones among them."""
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

    def pass_of(self, groups: Iterable[Group], prefixes: bool = True, suffixes: bool = True) -> PassCost:
        """One packed row of these groups' strands, suffixes, or both."""
        tokens = head = 0
        pairs = 0.0
        for group in groups:
            if prefixes:
                tokens += group.num_own_strand_tokens
                head += num_own_strand_outputs(group)
                pairs += sum(
                    self.pairs(strand.end - strand.start, strand.start) for strand in group.strands[group.num_outer :]
                )
            if suffixes:
                tokens += group.num_suffix_tokens
                head += group.num_suffix_tokens
                pairs += sum(self.pairs(n, fork.start) for n, fork in zip(group.suffix_lens, group.forks, strict=True))
        return PassCost(tokens, head, pairs, tokens - head)

    def passes_of(self, plan: Plan, logits_chunk: int | None = None) -> list[PassCost]:
        """The passes of a plan; phases A and C of a set count as one.

        Args:
            logits_chunk: for an update, tokens whose logits exist at once on all ranks that share a pass; lm_head runs
                again in backward for the tokens before the last chunk. None: log-probs.
        """
        passes = []
        for planned in plan.all_passes:
            passes.append(self.pass_of(planned.groups, suffixes=isinstance(planned, PackedPass)))
        if logits_chunk is None:
            return passes
        # One forward more, of three that forward and backward cost.
        return [p._replace(head_tokens=p.head_tokens + max(0, p.head_tokens - logits_chunk) // 3) for p in passes]

    def stock_passes(
        self, groups: Sequence[Group], budget: int, dense_mask: bool, one_row: bool = False
    ) -> list[PassCost]:
        """The passes of verl's own path: whole rows in micro-batches of up to `budget` tokens, logits of every token.

        Args:
            dense_mask: attention has no varlen form (sdpa, eager), so that rows in one micro-batch share a T x T mask.
            one_row: a micro-batch has one row, since packed rows would leak state (`recurrent.packing_leak`).
        """
        lens = [end + 1 for group in groups for end in group.row_ends]
        passes = []
        for batch in first_fit(lens, int, 0 if one_row else budget):
            tokens = sum(batch)
            if dense_mask and len(batch) > 1:
                pairs = float(tokens**2 * len(self.windows))
            else:
                pairs = sum((self.pairs(n, 0) for n in batch), 0.0)
            passes.append(PassCost(tokens, tokens, pairs))
        return passes


def query_key_pairs(length: int, behind: int, window: int | None) -> float:
    """Query-key pairs of `length` queries that see themselves and up to `behind` keys before them."""
    if window is None or behind + length <= window:
        return length * behind + length * (length + 1) / 2
    growing = max(0, min(length, window - behind))  # queries that still see everything
    return growing * behind + growing * (growing + 1) / 2 + (length - growing) * window


def model_shape(model: PreTrainedModel, dtype: torch.dtype, expert_ranks: int = 1) -> ModelShape:
    """Reads a model's `ModelShape` from its modules, which may be on the meta device, or sharded by FSDP2. A vision
    tower counts in `tower` and in `parameters` alone.

    Args:
        dtype: of activations.
        expert_ranks: how many ranks share a layer's experts; the model has one rank's.
    """
    text = model.config.get_text_config()
    lm_head = model.get_output_embeddings()
    seeing: Any = vision_model(model)
    body: torch.nn.Module = model if seeing is None else seeing.model.language_model
    weights = _linear_weights(body, lm_head)
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None) or 0
    experts = experts_of(body)
    own_experts = float(sum(p.numel() for one in experts for p in one.parameters()))
    elsewhere = own_experts * (expert_ranks - 1)
    products = [p for one in experts for p in one.parameters() if p.dim() == 3]
    weights += chosen * sum((p.numel() / p.shape[0] for p in products), 0.0)
    mixers = [mixer for mixer in map(mixer_of, body.modules()) if mixer is not None]
    recurrent = {mixer.module.layer_idx for mixer in mixers}
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    windows = tuple(layer_window(text, layer) for layer in range(layers) if layer not in recurrent)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    if latent := getattr(text, "kv_lora_rank", None):  # its values are padded to this, see `models.hookup`
        head_dim = text.qk_nope_head_dim + text.qk_rope_head_dim
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    # Each layer keeps per token: 6 hidden states, as inputs of norms, residuals and projections; those of the MLP; and
    # q, k and v, each twice (q and k before and after rotation). Attention's output has no term of its own.
    mixing = 2.0 * len(windows) * (heads + kv_heads) * head_dim * text.hidden_size
    if latent:
        mixing = sum(_linear_weights(m) for m in body.modules() if hasattr(m, "kv_b_proj"))
    mixing += sum(_linear_weights(mixer.module) for mixer in mixers)
    mlps = max(weights - mixing, 0) / text.hidden_size / 3
    residual = 6.0 * layers * text.hidden_size
    kept = residual + 4 * mlps + 2.0 * len(windows) * (heads + 2 * kv_heads) * head_dim
    kept += sum(kept_by(mixer) for mixer in mixers)
    return ModelShape(
        linear=2.0 * weights + sum(scan_flops(mixer) + sum(map(conv_flops, _convolutions(mixer))) for mixer in mixers),
        head=0.0 if lm_head is None else 2.0 * lm_head.weight.numel(),
        last=2.0 * sum(_linear_weights(module) for _, module in head_only(model)),
        pair=4.0 * heads * head_dim,
        windows=windows,
        activations=kept / layers * dtype.itemsize,
        boundary=text.hidden_size * dtype.itemsize,
        attention=heads * (head_dim * dtype.itemsize + 4.0),
        kv=2.0 * len(windows) * kv_heads * head_dim * dtype.itemsize,
        vocab_size=text.vocab_size,
        tower=0.0 if seeing is None else 2.0 * _linear_weights(seeing.model.visual),
        logits=float((1 if lm_head is None else text.vocab_size) * dtype.itemsize),
        parameters=sum(p.numel() for p in model.parameters()) + elsewhere,
        layer_parameters=(
            sum(p.numel() for p in body.parameters() if p.dim() > 1 and p.shape[0] != text.vocab_size) + elsewhere
        )
        / layers,
        expert_parameters=own_experts + elsewhere,
        routed=2.0 * chosen * text.hidden_size * len(experts) / layers * dtype.itemsize,
        undivided=float(sum(p.numel() for name, p in body.named_parameters() if is_undivided(name, p))),
        residual=residual / layers * dtype.itemsize,
        kv_heads=kv_heads,
        recurrent_layers=len(recurrent),
        state=sum(_state_bytes(mixer) for mixer in mixers),
    )


# Matrices that every rank of a tensor-parallel group has whole, and vectors of which each has a part.
_WHOLE = ("gate", "router", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa")
_CUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def shape_of_config(config: PretrainedConfig, dtype: torch.dtype) -> ModelShape:
    """`model_shape` of the whole text model of a config, for an engine whose ranks have parts of it."""
    with torch.device("meta"):
        # Of a copy, since `from_config` writes to it.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
        return model_shape(model, dtype)


def is_undivided(name: str, parameter: torch.Tensor) -> bool:
    """Whether tensor parallelism leaves a parameter whole, by its name, as megatron-core with TransformerEngine does
    (models/gpt/gpt_layer_specs.py)."""
    module, _, own = name.rpartition(".")
    module = module.rpartition(".")[2]
    if parameter.dim() == 1:
        return module not in _CUT and own != "sinks"
    return module in _WHOLE


def conv_flops(conv: torch.nn.Conv1d) -> float:
    """FLOPs per token of a depthwise convolution."""
    return 2.0 * conv.weight.numel()


def scan_flops(mixer: Mixer) -> float:
    """FLOPs per token of a mixer's scan.

    A head of the gated delta rule (arXiv 2412.06464, section 3.3) has keys of size K and values of size V. For each
    chunk of c tokens it makes three c x c products over K and two over V, and uses its K x V state three times. Solving
    the triangular system in between takes 1 % of that. A head of Mamba-2 (arXiv 2405.21060, section 6) makes a c x c
    product over its head dim, and uses its state twice; the heads of a group share one product over the state size.
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
    """How many numbers per token a mixer keeps for backward, beside its input: inputs of its convolution, inputs and
    outputs of its scan (by flash-linear-attention or mamba_ssm), its gates, and what it multiplies by them."""
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


def experts_of(body: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules of experts: those with a parameter of three dimensions, the first by expert. That of a convolution,
    [channels, 1, width], is none."""
    modules = (module for module in body.modules() if not isinstance(module, torch.nn.Conv1d))
    return [module for module in modules if any(p.dim() == 3 for p in module.parameters(recurse=False))]


def _linear_weights(module: torch.nn.Module, lm_head: torch.nn.Module | None = None) -> float:
    linears = (m for m in module.modules() if isinstance(m, torch.nn.Linear) and m is not lm_head)
    return sum((m.weight.numel() for m in linears), 0.0)
