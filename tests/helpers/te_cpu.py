"""TransformerEngine as megatron-core calls it, in plain torch on a CPU: so mcore's own classes of its TE layer spec
(megatron/core/extensions/transformer_engine.py) run on gloo ranks, for they subclass or call what is here.

Each signature is that of TransformerEngine 2.16.1, the version of verl's images, read from its sources; the file is
named at each. Nothing here parses or imports them. Kernels, fp8 and overlap of communication are left out.

Importing this module registers it as `transformer_engine`: a process does so before it imports megatron.core.
"""

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

import te_modules
import torch

VERSION = "2.16.1"
MODULES = "Linear", "LayerNormLinear", "GroupedLinear", "RMSNorm", "DotProductAttention"


def apply_rotary_pos_emb(
    t: torch.Tensor, freqs: torch.Tensor, tensor_format: str = "sbhd", start_positions: torch.Tensor | None = None,
    interleaved: bool = False, fused: bool = False, cu_seqlens: torch.Tensor | None = None, cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:  # fmt: skip
    """attention/rope.py; common/fused_rope/fused_rope.cu takes row s of `freqs` [s2, 1, 1, d] for token s of sbhd, and
    begins anew with each row of thd. csrc/extensions/apply_rope.cpp wants angles in fp32."""
    assert fused and start_positions is None and cp_size == 1 and not interleaved
    assert freqs.dtype == torch.float32 and freqs.is_contiguous() and freqs.shape[1:3] == (1, 1)
    if tensor_format == "thd":
        assert cu_seqlens is not None
        parts = t.unsqueeze(1).split(cu_seqlens.diff().tolist())
        return torch.cat([apply_rotary_pos_emb(x, freqs, fused=True) for x in parts]).squeeze(1)
    assert tensor_format == "sbhd" and len(freqs) >= len(t)
    angles, width = freqs[: len(t)], freqs.shape[-1]
    turned, rest = t[..., :width], t[..., width:]
    half_1, half_2 = turned.chunk(2, -1)
    found = turned * angles.cos().to(t.dtype) + torch.cat([-half_2, half_1], -1) * angles.sin().to(t.dtype)
    return torch.cat([found, rest], -1)


def fused_topk_with_score_function(
    logits: torch.Tensor, topk: int, use_pre_softmax: bool, num_groups: int | None, group_topk: int | None,
    scaling_factor: float | None, score_function: str, expert_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """router.py; csrc/extensions/router.cpp wants tokens."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    assert len(logits) > 0 and logits.dtype != torch.float64
    return topk_routing_with_score_function(  # type: ignore[no-any-return]
        logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias
    )


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """router.py: a map of bools, and scores in fp32."""
    from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

    chosen, scores = compute_routing_scores_for_aux_loss(logits, topk, score_function)
    return chosen, scores.float()


def fused_moe_aux_loss(
    probs: torch.Tensor, tokens_per_expert: torch.Tensor, total_num_tokens: int, num_experts: int, topk: int,
    coeff: float,
) -> torch.Tensor:  # fmt: skip
    """router.py; csrc/extensions/router.cpp takes an int of tokens, into which pybind11 turns a tensor of one."""
    kinds = (torch.int32, torch.int64, torch.float32, torch.bfloat16)
    assert probs.dtype == torch.float32 and tokens_per_expert.dtype in kinds and int(total_num_tokens) > 0
    total = int(total_num_tokens)
    found: torch.Tensor = (probs.sum(0) * tokens_per_expert).sum() * num_experts * coeff / (topk * total * total)
    return found


class FP8GlobalStateManager:
    """fp8.py: off."""

    is_fp8_enabled = get_fp8_recipe = staticmethod(lambda: None)


@contextlib.contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _missing(name: str) -> type:
    """A class of TE that mcore names when it is imported, and nobody builds here."""
    return type(name, (), {})


def _register() -> None:
    of_pytorch = {
        **{name: _missing(name) for name in ("LayerNorm", "TransformerLayer")},
        **{name: getattr(te_modules, name) for name in MODULES},
    }  # fmt: skip
    modules: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        ".common": {},
        ".common.recipe": {"DelayedScaling": _missing("DelayedScaling")},
        ".pytorch": of_pytorch,
        ".pytorch.fp8": {"FP8GlobalStateManager": FP8GlobalStateManager, "fp8_autocast": _nothing},
        ".pytorch.attention": {},
        ".pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
        ".pytorch.distributed": {
            "CudaRNGStatesTracker": _missing("CudaRNGStatesTracker"), "activation_recompute_forward": _nothing,
            "checkpoint": None, "get_all_rng_states": dict, "is_fp8_activation_recompute_enabled": bool,
        },
        ".pytorch.module": {},
        ".pytorch.ops": {name: _missing(name) for name in ("Sequential", "FusibleOperation")},
        ".pytorch.module.base": {
            "get_dummy_wgrad": lambda shape, dtype, zero=False: torch.full(shape, 0.0 if zero else torch.nan).to(dtype),
            "TransformerEngineBaseModule": te_modules.Parallel,
        },
        ".pytorch.tensor": {"QuantizedTensor": _missing("QuantizedTensor")},
        ".pytorch.router": {
            f.__name__: f
            for f in (fused_topk_with_score_function, fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss)
        },
    }  # fmt: skip
    for name, values in modules.items():
        module = module_from_spec(ModuleSpec(f"transformer_engine{name}", None, is_package=True))
        vars(module).update(values)
        sys.modules[module.__name__] = module
    for name in modules:
        if name:
            parent, _, child = f"transformer_engine{name}".rpartition(".")
            setattr(sys.modules[parent], child, sys.modules[f"transformer_engine{name}"])


assert not any(name.startswith("megatron.core") for name in sys.modules), "megatron.core is there, without TE"
_register()
