"""A tiny config of every model type that is supported, by the names of its fields."""

import copy
import re
from typing import Any
from unittest import mock

from families import COMMON, GLM4_MOE, MLA
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# What a field of this name becomes in any type that has it, where it is not None by default.
_SMALL = dict(
    n_embd=48, n_inner=64, n_head=4, n_layer=4, n_positions=512, rotary_dim=8, num_layers=4, ffn_dim=64,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2,
    num_experts_per_token=2, moe_topk=2, moe_k=2, top_k_experts=2, n_group=1, topk_group=1,
    moe_intermediate_size=32, shared_expert_intermediate_size=32, moe_shared_expert_intermediate_size=32,
    expert_ffn_hidden_size=32, ffn_hidden_size=64, shared_intermediate_size=64, intermediate_size_mlp=64,
    num_shared_experts=1, n_shared_experts=1, moe_num_shared_experts=1, moe_layer_start_index=1, num_dense_layers=1,
    first_k_dense_replace=1, kv_lora_rank=20, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    sliding_window=9, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16, swa_v_head_dim=16,
    kv_channels=16, query_pre_attn_scalar=16, audio_vocab_size=128,
)  # fmt: skip
_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "num_attention_heads_per_layer", "moe_layer_freq")
_PER_LAYER_TYPE = dict.fromkeys(("full_attention", "sliding_attention"), dict(rope_type="default", rope_theta=1e4))
_GEMMA4 = dict(
    global_head_dim=32, num_global_key_value_heads=1, vocab_size_per_layer_input=128, hidden_size_per_layer_input=0,
    num_kv_shared_layers=0, sliding_window=9, layer_types=["sliding_attention"] * 3 + ["full_attention"],
)  # fmt: skip
# Fields of a type that those do not fit.
_FIELDS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": dict(
        rope_parameters=_PER_LAYER_TYPE, layer_types=["sliding_attention", "full_attention"] * 2, logit_scale=0.5
    ),
    "deepseek_v2": MLA,
    "emu3": dict(text_config=COMMON),
    "dots1": GLM4_MOE | dict(n_shared_experts=1, n_group=1, topk_group=1),
    "fuyu": dict(text_config=COMMON | dict(model_type="persimmon", hidden_size=64)),
    "gemma4": dict(text_config=COMMON | _GEMMA4),
    "gemma4_text": _GEMMA4,
    "helium": dict(head_dim=12),
}


_BERT = dict(model_type="bert")
_PAIR = dict(encoder=dict(model_type="vit"), decoder=_BERT)
_MUSIC = dict(text_encoder=dict(model_type="t5"), audio_encoder=dict(model_type="encodec"))
_ONE_VOCABULARY = dict(model_type="gemma4_text", hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
# Sections of a type that has no config without them.
_SECTIONS: dict[str, dict[str, Any]] = {
    "encoder-decoder": _PAIR,
    "gemma4_assistant": dict(text_config=_ONE_VOCABULARY),
    "musicgen": _MUSIC | dict(decoder=dict(model_type="musicgen_decoder")),
    "musicgen_melody": _MUSIC | dict(decoder=dict(model_type="musicgen_melody_decoder")),
    "nougat": _PAIR,
    "rag": dict(question_encoder=dict(model_type="dpr"), generator=_BERT),
    "speech-encoder-decoder": _PAIR,
    "vision-encoder-decoder": _PAIR,
    "vision-text-dual-encoder": dict(vision_config=dict(model_type="vit"), text_config=_BERT),
}


def default_config(model_type: str) -> PretrainedConfig | None:
    """A config as transformers makes it; None for a type that needs another package, or a download."""
    sections = copy.deepcopy(_SECTIONS.get(model_type, {}))  # a config takes parts out of them
    try:
        with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            return CONFIG_MAPPING[model_type](**sections)
    except (ImportError, OSError):
        return None


def tiny_config(model_type: str) -> PretrainedConfig:
    """A config of four layers, of all kinds that the type's own has."""
    config_class = CONFIG_MAPPING[model_type]
    default = vars(default_config(model_type))
    default = default | {name: default.get(of) for name, of in config_class.attribute_map.items()}
    fields: dict[str, Any] = {name: value for name, value in COMMON.items() if name in default}
    fields |= {name: value for name, value in _SMALL.items() if type(default.get(name)) is int}
    for name in _LISTS:
        if isinstance(values := default.get(name), list | tuple) and len(values) > 4:
            fields[name] = (list(dict.fromkeys(values)) * 4)[:4]
    fields |= {name: 0.0 for name, value in default.items() if re.search("drop|jitter", name) and type(value) is float}
    if "qk_rope_head_dim" in fields:
        fields |= dict(head_dim=fields["qk_rope_head_dim"], num_key_value_heads=4)
    return config_class(**fields | _FIELDS.get(model_type, {}))
