"""Refuses models and settings that the shared-prefix path cannot compute, and says why; knows the windows of layers."""

import functools
import inspect
import math
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from verl_prefix.models.advice import WITHOUT_SHARING
from verl_prefix.models.logits import written_elsewhere
from verl_prefix.models.recurrent import is_recurrent
from verl_prefix.models.vision import MODEL_TYPES, is_vision_config

# Fields of configs whose layers carry a state from token to token.
_STATEFUL = ("mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size", "linear_conv_kernel_dim", "conv_L_cache")
# Fields of configs with layers whose attention leaves earlier tokens out by chunks or an index, reads other keys and
# values than the layer's own, or later tokens; or with layers that run several times in one forward, or call attention
# several times.
_OTHERS = (
    "attention_chunk_size", "num_kv_shared_layers", "use_bidirectional_attention", "index_topk", "L_cycles",
    "n_recurrent_loops", "lambda_std_dev",
)  # fmt: skip
# Types whose classes promise transformers' attention interface, from 5.11 on, and whose layers do not keep that.
_BROKEN_PROMISES = ("moshi", "nemotron")
# Types whose layers leave their window to the mask: the call of attention does not carry it.
_WINDOWS_IN_MASKS = ("phimoe", "qwen2_moe")
# Types that count positions from behind their padding token's index.
_PADDED_POSITIONS = (
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
# Layer types that models with supported recurrent layers name.
_RECURRENT_LAYERS = {"linear_attention", "conv", "mamba", "attention"}


def unsupported_reasons(config: PretrainedConfig, training: bool = True) -> list[str]:
    """What the shared-prefix path cannot compute of a model, in words, mostly `field=value`; none: it is supported.

    Args:
        training: also count what acts in training alone: dropout.
    """
    text = config.get_text_config(decoder=True)
    reasons = []
    has_states = is_recurrent(text.model_type)
    layer_types = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    known = {"full_attention", "sliding_attention"} | (_RECURRENT_LAYERS if has_states else set())
    if unknown := layer_types - known:
        reasons.append(f"layer_types has {sorted(unknown)}")
    for name in _OTHERS if has_states else (*_STATEFUL, *_OTHERS):
        if values := _of_layers(text, name):
            reasons.append(f"{name}={values[0]}")
    if (ranks := _of_layers(text, "kv_lora_rank")) and not _is_transformers(text):
        reasons.append(f"kv_lora_rank={ranks[0]} in code from outside of transformers")
    # Models that attend both ways or not declare both fields. gpt_neox has the first alone, and does not read it.
    if all(hasattr(type(text), name) for name in ("is_decoder", "add_cross_attention")) and not text.is_decoder:
        reasons.append("is_decoder=False, with which tokens attend to later ones")
    if text.model_type in _PADDED_POSITIONS:
        reasons.append(f"model_type={text.model_type}, whose positions begin behind pad_token_id={text.pad_token_id}")
    if text.model_type in _WINDOWS_IN_MASKS:
        windows = {layer_window(text, layer) for layer in range(text.num_hidden_layers)} - {None, 0}
        reasons += [f"sliding_window={window}, which layers of this type leave to their mask" for window in windows]
    if has_states and (getattr(text, "time_step_limit", None) or (0.0,))[0] > 0:
        reasons.append(f"time_step_limit={text.time_step_limit}, with which padding would decay a state")
    if has_states and getattr(text, "hidden_act", "silu") not in ("silu", "swish"):
        reasons.append(f"hidden_act={text.hidden_act}, which kernels of causal convolutions do not know")
    if rope_types := _rope_types(text) & {"dynamic", "longrope"}:
        reasons.append(f"rope_type={rope_types.pop()}, whose angles depend on the longest row of a pass")
    if training:
        reasons += [f"{name}={value}" for name, value in dropouts(config).items()]
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("is_encoder_decoder=True")
    if (towers := _towers(config)) and not is_vision_config(config):
        told = ("two towers, " if len(towers) > 1 else "") + " and ".join(towers)
        reasons.append(f"{told}; towers of {', '.join(MODEL_TYPES)} are supported")
    return reasons or _class_reasons(config)


def _class_reasons(config: PretrainedConfig) -> list[str]:
    """What transformers' class of the model says against it. The class is imported, and no model is built. Classes from
    outside of transformers need not say such things: their first pass does (`hookup`)."""
    if is_vision_config(config) or not _is_transformers(config):
        return []
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None:
        return [f"model_type={config.model_type}, of which transformers has no causal language model"]
    if is_recurrent(config.get_text_config().model_type):
        return []
    if "logits_to_keep" not in inspect.signature(model.forward).parameters and not written_elsewhere(model.forward):
        return [f"{model.__name__}, whose forward takes no logits_to_keep"]
    if not model._supports_attention_backend or config.model_type in _BROKEN_PROMISES:
        return [f"{model.__name__}, whose class does not promise to call transformers' attention interface"]
    if not model._supports_flash_attn:
        return [f"{model.__name__}, whose attention flash attention cannot compute, and so neither can ours"]
    return []


def _is_transformers(config: PretrainedConfig) -> bool:
    """Whether the config's class is one of transformers, and so is the model's."""
    return type(config).__module__.startswith("transformers.")


def _declares(config: PretrainedConfig, name: str) -> bool:
    """Whether the config's class has a field, which the model may then read: a config.json may hold fields of other
    models. Code from outside of transformers may read one that nobody declares."""
    kind: Any = type(config)
    return name in _arguments(kind) or hasattr(kind, name) or not _is_transformers(config)


@functools.cache
def _arguments(kind: Any) -> set[str]:
    return {*inspect.signature(kind).parameters, *kind.attribute_map}


def _of_layers(text: PretrainedConfig, name: str) -> list[Any]:
    """The values of a field that is set, from every layer's config: where layers differ in it, newer transformers raise
    if the whole config is asked."""
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    return [value for layer in layers if (value := getattr(layer, name, None))]


def _towers(config: PretrainedConfig) -> list[str]:
    """A model's towers in words: section, type, and what is known to stand in the way of sharing."""
    towers = []
    for name in ("vision_config", "audio_config"):
        if (section := getattr(config, name, None)) is not None:
            known = []
            if name == "vision_config" and not hasattr(section, "spatial_merge_size"):
                known.append("no spatial_merge_size, by which a grid of patches becomes tokens")
            if config.model_type == "gemma3":  # no field says so
                known.append("tokens of an image attend both ways")
            told = f" ({'; '.join(known)})" if known else ""
            towers.append(f"{name} of type {getattr(section, 'model_type', '') or type(section).__name__}{told}")
    return towers


def dealt(text: PretrainedConfig) -> tuple[dict[str, int], dict[str, int]]:
    """What sequence parallelism deals to ranks inside the layers of a text model, by name: (numbers that must be
    multiples of the number of ranks, numbers that may also divide it, since what is dealt is then repeated)."""
    heads = {"heads": text.num_attention_heads}
    shared = {"key heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads}
    if not is_recurrent(text.model_type):
        return heads, shared
    if hasattr(text, "linear_num_value_heads"):
        heads["heads of linear attention"] = text.linear_num_value_heads
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        # OLMo-Hybrid's keys and values have a convolution each.
        channels = math.gcd(keys, values) if text.model_type == "olmo_hybrid" else 2 * keys + values
    elif hasattr(text, "mamba_n_heads"):
        heads["heads of Mamba"], shared["groups of Mamba"] = text.mamba_n_heads, text.mamba_n_groups
        channels = int(text.mamba_expand * text.hidden_size) + 2 * text.mamba_n_groups * text.mamba_d_state
    else:
        channels = text.hidden_size
    return heads | {"channels of convolutions": channels}, shared


def num_experts(text: PretrainedConfig) -> int:
    """Experts of a layer of a text model; 0: it has none."""
    counts = (getattr(text, name, None) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    return next((count for count in counts if count), 0)


def check_supported(config: PretrainedConfig, key: str = "actor_rollout_ref.model") -> None:
    """Raises ValueError where the shared-prefix path would not compute what the stock path computes. key: that of the
    model's section."""
    if reasons := unsupported_reasons(config):
        off = [f"+{key}.override_config.{name}=0.0" for name in dropouts(config)]
        told = "Stock trains with this dropout, but here rows of a group would share its mask; turn it off with "
        raise ValueError(
            f"shared-prefix training does not support this {config.model_type} model: {'; '.join(reasons)}. "
            f"{told + ' '.join(off) + '. ' if off else ''}Set {WITHOUT_SHARING}"
        )


def dropouts(config: PretrainedConfig) -> dict[str, float]:
    """Rates of dropout and jitter above 0, by the config's field: `attention_dropout`, or
    `text_config.attention_dropout` of a section. Those of heads that an actor does not have (classifier_dropout,
    summary_first_dropout) do not count, nor do those that the config's class does not declare."""
    names = getattr(config, "sub_configs", None) or {}
    sections = {"": config} | {f"{name}.": getattr(config, name, None) for name in names}
    return {
        prefix + name: value
        for prefix, section in sections.items()
        if section is not None
        for name, value in vars(section).items()
        if ("drop" in name or "jitter" in name) and not name.startswith(("classifier", "summary"))
        and type(value) in (int, float) and value > 0
        and _declares(section, name)
    }  # fmt: skip


def check_adapters(model: torch.nn.Module, instead: str = f"set {WITHOUT_SHARING}") -> None:
    """Raises ValueError where an adapter of PEFT needs whole rows: it puts learned tokens, or keys and values, before
    each of them, or searches each for the tokens that switch it on."""
    configs = getattr(model, "peft_config", None) or {}
    types = {name: getattr(config.peft_type, "value", config.peft_type) for name, config in configs.items()}
    if learned := [f"{name}: {types[name]}" for name, config in configs.items() if config.is_prompt_learning]:
        raise ValueError(
            f"PEFT prompt learning is not supported ({', '.join(learned)}): its learned prompt is none of the tokens "
            f"here, and would be left out; train LoRA, or {instead}"
        )
    invoked = {name: getattr(config, "alora_invocation_tokens", None) for name, config in configs.items()}
    if told := [f"{name}: alora_invocation_tokens={tokens}" for name, tokens in invoked.items() if tokens]:
        raise ValueError(
            f"aLoRA of PEFT is not supported ({', '.join(told)}): it searches each row of the batch for these tokens, "
            f"and here many rows are in one, or a prompt and its responses apart; train LoRA without them, or {instead}"
        )


def check_dropout(model: torch.nn.Module, instead: str = WITHOUT_SHARING, in_eval: bool = True) -> None:
    """Raises ValueError where a dropout mask would be drawn once for a group instead of once per row. in_eval: also of
    modules that are in eval mode now."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0 and (module.training or in_eval):
            raise ValueError(
                f"{name} drops out with p={module.p}, and rows of a group would share its mask; set it to 0 in "
                f"the model's config or LoRA adapter, or {instead}"
            )


def checkpointing(model: torch.nn.Module) -> bool:
    """Whether backward runs layers of the model again, as far as its modules show it: by transformers' gradient
    checkpointing, or torch's `checkpoint_wrapper`."""
    return any(
        isinstance(module, CheckpointWrapper) or (module.training and getattr(module, "gradient_checkpointing", False))
        for module in model.modules()
    )


def _rope_types(text: PretrainedConfig) -> set[str]:
    ropes = _of_layers(text, "rope_parameters") or _of_layers(text, "rope_scaling")
    by_layer_type = [value for rope in ropes for value in rope.values() if isinstance(value, dict)]
    return {str(x.get("rope_type", x.get("type", "default"))) for x in by_layer_type or ropes}


def layer_window(text: PretrainedConfig, layer: int) -> int | None:
    """The sliding window that the config gives this layer, by fields that its class declares."""
    if getattr(text, "is_heterogeneous", False):
        text = text.per_layer_config[layer]

    def field(name: str, default: Any) -> Any:
        return getattr(text, name, default) if _declares(text, name) else default

    if layer_types := field("layer_types", None):
        return getattr(text, "sliding_window", None) if layer_types[layer] == "sliding_attention" else None
    return field("sliding_window", None) if field("use_sliding_window", True) else None
