"""The only file that knows transformers: attention hook-up, and which models are refused.

Our attention is registered with transformers' AttentionInterface, and a pass selects it only for its own duration, so
verl's own paths keep the implementation that the user chose.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from verl_prefix.auto.cost import ModelShape
from verl_prefix.core.attention import AttentionPass, GroupedAttention, Scores
from verl_prefix.core.kernels import choose_kernel
from verl_prefix.models import vision

ATTENTION_NAME = "verl_prefix"

# Config attributes of layers that carry state from token to token other than by attention over K/V.
_STATEFUL = ("mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size", "linear_conv_kernel_dim", "conv_L_cache")

# Config attributes by which a model changes logits behind lm_head: there the outputs need all logits at once.
_AFTER_LM_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def unsupported_reasons(config: PretrainedConfig) -> list[str]:
    """What of this model the shared-prefix path cannot compute, as `attribute=value` phrases; empty if all is well."""
    text = config.get_text_config()
    reasons = []
    layer_types = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    if others := layer_types - {"full_attention", "sliding_attention"}:
        reasons.append(f"layer_types has {sorted(others)}")
    for name in (*_STATEFUL, "attention_chunk_size", "num_kv_shared_layers", "use_bidirectional_attention"):
        if getattr(text, name, None):
            reasons.append(f"{name}={getattr(text, name)}")
    if rope_types := _rope_types(text) & {"dynamic", "longrope"}:
        reasons.append(f"rope_type={rope_types.pop()}, whose angles depend on the longest row of a pass")
    if getattr(text, "qk_nope_head_dim", None) or getattr(text, "kv_lora_rank", None):
        reasons.append("multi-head latent attention (kv_lora_rank)")
    if getattr(text, "attention_dropout", 0.0):
        reasons.append(f"attention_dropout={text.attention_dropout}")
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("is_encoder_decoder=True")
    towers = [name for name in ("vision_config", "audio_config") if getattr(config, name, None) is not None]
    if towers and not vision.is_vision_config(config):
        reasons.append(f"a vision or audio tower; those of {', '.join(vision.MODEL_TYPES)} are supported")
    return reasons


def check_dropout(model: torch.nn.Module) -> None:
    """Raises ValueError where a dropout mask would be drawn once for a group instead of once per row."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            raise ValueError(
                f"{name} drops out with p={module.p}, and rows of a group would share its mask; set it to 0 in "
                "the model's config or LoRA adapter, or model_engine=dp"
            )


def checkpointing(model: torch.nn.Module) -> bool | None:
    """None: layers are not checkpointed. False: they are, and their forward runs again in backward. True: the same by
    reentrant checkpointing, where what a wave reads of the prefix cache would get no gradient."""
    funcs = [
        module._gradient_checkpointing_func
        for module in model.modules()
        if module.training and getattr(module, "gradient_checkpointing", False)
    ]
    return any(getattr(func, "keywords", {}).get("use_reentrant", True) for func in funcs) if funcs else None


def _rope_types(text: PretrainedConfig) -> set[str]:
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    return {str(x.get("rope_type", x.get("type", "default"))) for x in by_layer_type or [rope]}


def _window(text: PretrainedConfig, layer: int) -> int | None:
    """The sliding window that the config gives this layer."""
    if layer_types := getattr(text, "layer_types", None):
        return text.sliding_window if layer_types[layer] == "sliding_attention" else None
    return getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None


def check_supported(config: PretrainedConfig) -> None:
    """Raises ValueError where the shared-prefix path would not compute what the stock path computes."""
    if reasons := unsupported_reasons(config):
        raise ValueError(
            f"shared-prefix training does not support this {config.model_type} model: {'; '.join(reasons)}. "
            "Set model_engine=dp, or actor_rollout_ref.actor.prefix.schedule=stock"
        )


def empty_model(path: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a config on torch's meta device: shapes without weights."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    auto_class = AutoModelForImageTextToText if vision.is_vision_config(config) else AutoModelForCausalLM
    with torch.device("meta"):
        return auto_class.from_config(config, trust_remote_code=trust_remote_code)


def model_shape(model: PreTrainedModel, dtype: torch.dtype) -> ModelShape:
    """FLOPs and bytes per token, from the modules (also on the meta device, also sharded by FSDP2). Those of a vision
    tower, which sharing saves too, do not count.

    Args:
        dtype: what activations are computed in.
    """
    text = _text_config(model)
    lm_head = model.get_output_embeddings()
    body = model if (seeing := vision.vision_model(model)) is None else seeing.model.language_model
    weights = sum(m.weight.numel() for m in body.modules() if isinstance(m, torch.nn.Linear) and m is not lm_head)
    # Experts are [experts, in, out] parameters, of which a token meets `num_experts_per_tok`.
    chosen = getattr(text, "num_experts_per_tok", None) or 0
    weights += sum(p.numel() / p.shape[0] * chosen for p in body.parameters() if p.dim() == 3)
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
        windows=tuple(_window(text, layer) for layer in range(layers)),
        activations=kept * dtype.itemsize,
        boundary=text.hidden_size * dtype.itemsize,
        kv=2.0 * layers * kv_heads * head_dim * dtype.itemsize,
        vocab_size=text.vocab_size,
    )


def grouped_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    prefix_pass: AttentionPass | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D], s_aux (sinks) [H]
    -> [1, T, H, D].

    Raises:
        RuntimeError: the model asks for something that `unsupported_reasons` did not foresee.
    """
    wanted = _window(module.config.get_text_config(), module.layer_idx)
    if (
        prefix_pass is None or attention_mask is not None or dropout or sliding_window != wanted or query.shape[0] != 1
    ):  # fmt: skip
        raise RuntimeError(
            f"{type(module).__name__} layer {module.layer_idx} called the shared-prefix attention with "
            f"prefix_pass={prefix_pass is not None}, attention_mask={attention_mask is not None}, dropout={dropout}, "
            f"sliding_window={sliding_window} (its config says {wanted}), batch {query.shape[0]}; "
            "set model_engine=dp and report this model"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if torch.is_autocast_enabled(q.device.type):  # as SDPA does: norms may have left fp32 queries beside bf16 values
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    kernel = choose_kernel(prefix_pass.kernel, q.device.type, q.dtype, q.shape[-1], softcap is not None)
    scores = Scores(q.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    prefix_pass.num_calls += 1
    if prefix_pass.capture is not None:
        prefix_pass.capture.capture(module.layer_idx, k, v)
    out = GroupedAttention.apply(
        q, k, v, s_aux, prefix_pass.layout, kernel, scores, prefix_pass.cache, module.layer_idx
    )
    if prefix_pass.inspect is not None:
        prefix_pass.inspect(module.layer_idx, prefix_pass.layout, q, k, v, s_aux, scores, out)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(grouped_attention_forward))


def _text_config(model: torch.nn.Module) -> PretrainedConfig:
    return model.config.get_text_config()


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Selects our attention for a forward and its backward (gradient checkpointing calls the layers again there)."""
    config = _text_config(model)
    chosen = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        with nullcontext() if vision.vision_model(model) is None else vision.own_attention(model):
            yield
    finally:
        config._attn_implementation = chosen


@contextmanager
def rounding_noise(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """While open, every attention output is off by up to one rounding step of `dtype`, differently each time."""
    eps = torch.finfo(dtype).eps
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)  # the run's own random state stays as it is

    def disturb(module: torch.nn.Module, args: tuple, output: tuple) -> tuple:
        out = output[0]
        factor = 1 + eps * (2 * torch.rand(out.shape, device=device, generator=generator) - 1)
        return (out * factor).to(out.dtype), *output[1:]

    attention = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]
    handles = [module.register_forward_hook(disturb) for module in attention]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def token_outputs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    keep: torch.Tensor,
    job: AttentionPass,
    outputs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    chunk_tokens: int,
    pixels: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """What `outputs` makes of the logits of one packed row, [n, k]; call it inside `grouped_attention`.

    lm_head runs inside the model's forward, so that FSDP2 has its weight unsharded, on at most `chunk_tokens` tokens at
    a time; more than one chunk is checkpointed, so that never more than chunk_tokens x vocabulary logits exist. Where
    the model changes logits behind lm_head, or a forward hook of lm_head may, they exist all at once.

    Args:
        input_ids: [T] int64. position_ids: [T] or [4, T] int64. keep: [n] int64, the tokens that go through lm_head.
        outputs: (rows of `keep` [m] int64, their logits [m, vocabulary]) -> [m, k].
        pixels: of a vision model, `PixelBatch.of` this row.

    Raises:
        RuntimeError: some attention layer did not go through our attention.
    """
    calls = job.num_calls
    lm_head = model.get_output_embeddings()
    head_forward = lm_head.forward  # what `chunked` stands in for: the class's, or one that others put on the instance
    rows = torch.arange(len(keep), device=keep.device)

    def chunked(hidden: torch.Tensor) -> torch.Tensor:
        def chunk(rows_chunk: torch.Tensor, hidden_chunk: torch.Tensor) -> torch.Tensor:
            return outputs(rows_chunk, head_forward(hidden_chunk))

        pieces = list(zip(rows.split(chunk_tokens), hidden[0].split(chunk_tokens), strict=True))
        if len(pieces) == 1:
            return chunk(*pieces[0]).unsqueeze(0)
        return torch.cat([checkpoint(chunk, *piece, use_reentrant=False) for piece in pieces]).unsqueeze(0)

    scales = (getattr(_text_config(model), name, None) for name in _AFTER_LM_HEAD)
    # FSDP2's own hooks reshard weights; any other may read or change logits, which `chunked` would hide from it.
    hooks = (getattr(hook, "__module__", None) or "" for hook in lm_head._forward_hooks.values())
    whole = any(scale not in (None, 1, 1.0) for scale in scales) or any(
        not module.startswith("torch.distributed.") for module in hooks
    )
    inputs = dict(
        input_ids=input_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(-2),
        attention_mask=None,
        use_cache=False,
        prefix_pass=job,
    )
    with ExitStack() as replaced:
        if not whole:
            replaced.enter_context(_forward_replaced(lm_head, chunked))
        if (seeing := vision.vision_model(model)) is None:
            inputs["logits_to_keep"] = keep
        else:
            replaced.enter_context(_forward_replaced(seeing, functools.partial(vision.forward, seeing)))
            inputs |= dict(keep=keep, tower=job.cache is None, **pixels)
        logits = model(**inputs).logits[0]
    layers = _text_config(model).num_hidden_layers
    if job.num_calls - calls != layers:
        raise RuntimeError(
            f"{job.num_calls - calls} of {layers} layers of {type(model).__name__} used the shared-prefix attention; "
            "its code bypasses transformers' attention interface: set model_engine=dp"
        )
    return outputs(rows, logits) if whole else logits


@contextmanager
def _forward_replaced(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    patched = vars(module).get("forward")  # by accelerate, or whoever else patches instances
    module.forward = forward
    try:
        yield
    finally:
        if patched is None:
            del module.forward
        else:
            module.forward = patched
