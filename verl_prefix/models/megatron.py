"""Models as megatron-core builds them from text, and what its engine cannot share, beside `support`.

verl has two bridges that make an mcore model of a Hugging Face config: Megatron-Bridge, and mbridge under
`vanilla_mbridge=True`.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from verl_prefix.models.support import num_experts

# Text models that either bridge builds as a GPTModel, of layers that a shared prefix knows.
TEXT_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")
# Of them, those with multi-head latent attention.
LATENT_TYPES = ("deepseek_v3",)
# Of them, those for which mbridge chooses a loss of routers that nobody asked for (mbridge/models/glm4moe.py). It is 0
# without moe_aux_loss_coeff, which mbridge does not set for them. Other types get no such loss.
BALANCED_BY_MBRIDGE = {"glm4_moe": "seq_aux_loss"}
# Of them, those whose routers get biases that nobody asked for, from either bridge. The value is the rate at which
# these move, moe_router_bias_update_rate.
BIASED = {"deepseek_v3": 1e-3, "glm4_moe": 0.0}


def spread_sizes(config: PretrainedConfig, pads_vocab: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes, by the config's field, that have to be multiples of tensor parallelism, and those that have to be of
    experts' tensor parallelism (megatron/core/tensor_parallel/layers.py, divide).

    Args:
        pads_vocab: the bridge pads the vocabulary; mbridge does not.
    """
    text = config.get_text_config()
    names = [] if config.model_type in ("qwen3_moe", "mixtral") else ["intermediate_size"]  # of dense layers
    names += [] if pads_vocab else ["vocab_size"]
    experts = "intermediate_size" if config.model_type == "mixtral" else "moe_intermediate_size"
    of_experts = [experts] if num_experts(text) else []
    # A model without such a field is refused by its type.
    dense, sparse = ({x: getattr(text, x) for x in fields if hasattr(text, x)} for fields in (names, of_experts))
    return dense, sparse


def megatron_reasons(config: PretrainedConfig, override: Mapping[str, Any]) -> list[str]:
    """What stands in the way of a model on verl's Megatron engine alone, as `field=value` phrases; none: it can share
    prefixes there.

    Args:
        override: `override_transformer_config`.
    """
    kind = config.model_type
    if kind not in TEXT_TYPES:
        return [f"model_type={kind}; of megatron-core's models those of {', '.join(TEXT_TYPES)} are supported"]
    reasons = []
    if kind in LATENT_TYPES and override.get("apply_rope_fusion"):
        reasons.append("apply_rope_fusion=True, whose kernel for latent attention takes positions from rows' bounds")
    if override.get("multi_latent_attention", kind in LATENT_TYPES) is not (kind in LATENT_TYPES):
        reasons.append(f"multi_latent_attention={override['multi_latent_attention']}, which it is not")
    return reasons
