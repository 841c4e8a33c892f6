"""Models as VeOmni builds them (veomni 0.1.12): what their own code wants otherwise, and what it cannot share.

Its classes are transformers' with forwards of their own (veomni/models/transformers/*/generated): towers and gated
delta nets slice and exchange tokens by VeOmni's parallel state, where `core.sequence_parallel` does it.
"""

import copy
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PretrainedConfig

from verl_prefix.models.recurrent import is_recurrent

# Text models that VeOmni has a class of. Of other types it builds none, or one whose layers read more of a row than
# keys, values and states (deepseek_v4, glm_moe_dsa).
TEXT_TYPES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "seed_oss", "gemma3_text", "qwen3_5_text",
    "qwen3_5_moe_text",
)  # fmt: skip
# Models with a tower, and the tokens that verl's engine takes for images and videos, whatever the model's config says
# (verl/workers/engine/veomni/utils.py, VL_TYPE2INDEX).
_QWEN_VL, _QWEN3_5 = (151655, 151656), (248056, 248057)
VISUAL_TOKENS = {
    "qwen2_5_vl": _QWEN_VL, "qwen3_vl": _QWEN_VL, "qwen3_vl_moe": _QWEN_VL, "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
}  # fmt: skip
# Keys of verl's engine config that have to be "fla": VeOmni's gated delta nets refuse packed rows otherwise.
_KERNELS = ("causal_conv1d_implementation", "chunk_gated_delta_rule_implementation")


def is_veomni(model: Any) -> bool:
    """Whether the model's class, below FSDP2's, is one of VeOmni's own."""
    return any(kind.__module__.startswith("veomni.models.") for kind in type(model).__mro__)


def veomni_reasons(config: PretrainedConfig, engine_config: Mapping[str, Any]) -> list[str]:
    """What stands in the way of a model on VeOmni's engine alone, as `field=value` phrases, beside
    `support.unsupported_reasons`; none: it can share prefixes there.

    Args:
        engine_config: verl's for VeOmni, by key.
    """
    if (backend := os.environ.get("MODELING_BACKEND", "veomni")) != "veomni":
        return [f"MODELING_BACKEND={backend}, with which VeOmni builds classes of others; unset it"]
    kind, reasons = config.model_type, []
    if kind not in (*TEXT_TYPES, *VISUAL_TOKENS):
        known = ", ".join((*TEXT_TYPES, *VISUAL_TOKENS))
        return [f"model_type={kind}; of VeOmni's models those of {known} are supported"]
    for name, token in zip(("image", "video"), VISUAL_TOKENS.get(kind, ()), strict=False):
        if (own := getattr(config, f"{name}_token_id")) != token:
            reasons.append(f"{name}_token_id={own}, where verl's engine puts features in place of token {token}")
    if is_recurrent((text := config.get_text_config()).model_type):
        found = ((key, engine_config.get(key, "eager")) for key in _KERNELS)
        reasons += [f"{key}={value}; set fla" for key, value in found if value != "fla"]
        size, names = engine_config.get("ulysses_parallel_size", 1), ("linear_num_key_heads", "linear_num_value_heads")
        heads = ((name, getattr(text, name)) for name in names)
        reasons += [f"{name}={n}, which ulysses_parallel_size={size} does not divide" for name, n in heads if n % size]
    return reasons


def unread_weight(config: PretrainedConfig, path: str) -> str | None:
    """A weight of the checkpoint in folder `path` for which VeOmni finds no parameter; None where we know of none. The
    parameter that should have got it begins with random values.

    Qwen2.5-VL has names of transformers before 4.52 on the hub. VeOmni's loader reads their renaming from the model's
    class (veomni/models/module_utils.py, _convert_weight_key), where transformers 5 has none.
    """
    if config.model_type != "qwen2_5_vl":
        return None
    files = [*Path(path).glob("*.safetensors.index.json"), *Path(path).glob("*.safetensors")]
    for file in files[:1]:
        if file.suffix == ".json":
            names = list(json.loads(file.read_text())["weight_map"])
        else:
            with safe_open(file, "pt") as weights:
                names = list(weights.keys())
        return next((name for name in names if name.startswith("visual.")), None)
    return None


@contextmanager
def unsliced() -> Iterator[None]:
    """Context in which VeOmni's own code takes the tokens and patches that it gets for whole rows, which no other rank
    has a part of. Its sizes of data and expert parallelism stay, also where backward runs layers again.

    By itself a tower slices positions of patches, and attention and gated delta nets exchange heads
    (veomni/distributed/parallel_state.py, `ulysses_size`)."""
    module: Any = sys.modules.get("veomni.distributed.parallel_state")
    state = getattr(module, "_PARALLEL_STATE", None)
    if state is None or not state.sp_enabled:
        yield
        return
    alone = copy.copy(state)
    object.__setattr__(
        alone, "ulysses_size", 1
    )  # a frozen dataclass, which checks sizes against ranks where it is made
    with module.use_parallel_state(alone):
        yield
