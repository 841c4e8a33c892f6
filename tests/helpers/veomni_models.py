"""Tiny models of VeOmni's own classes on a CPU, with the weights of Hugging Face's."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fla_in_torch import causal_conv1d, of_rows
from transformers import PretrainedConfig, PreTrainedModel
from vision_cases import Case, Turns

from verl_prefix.api.pixels import positions_of_row
from verl_prefix.models import recurrent


def veomni_model(config: PretrainedConfig, like: torch.nn.Module, attention: str = "sdpa") -> PreTrainedModel:
    """VeOmni's model of a config, with kernels of torch and the weights and dtype of `like`."""
    from veomni.arguments import OpsImplementationConfig
    from veomni.models.auto import build_foundation_model

    names = [field.name for field in dataclasses.fields(OpsImplementationConfig)]
    kernels = dict.fromkeys(names, "eager") | dict(attn_implementation=attention, qat_implementation="none")
    ops = OpsImplementationConfig(**kernels)
    model = build_foundation_model(config, torch_dtype="float32", ops_implementation=ops, init_device="cpu")
    assert type(model).__module__.startswith("veomni.models.")
    model.load_state_dict(like.state_dict())
    for mixer in recurrent.mixers(model):
        with_kernels(mixer)
    return model.train().to(next(like.parameters()).dtype)


def with_kernels(mixer: Any) -> None:
    """Gives a gated delta net of VeOmni stand-ins of flash-linear-attention, without which it refuses to run."""
    mixer.chunk_gated_delta_rule = of_rows(sys.modules[type(mixer).__module__].torch_chunk_gated_delta_rule)
    mixer.causal_conv1d_fn = causal_conv1d


class VeomniCase(Case):
    """`Case` of VeOmni's class, which gets positions and bounds as verl's engine for it passes them
    (verl/workers/engine/veomni/transformer_impl.py)."""

    def build(self, path: str, dtype: torch.dtype) -> torch.nn.Module:
        hugging_face = super().build(path, dtype)
        return veomni_model(hugging_face.config, hugging_face)

    def whole(self, ids: torch.Tensor, pixels: dict) -> torch.Tensor:
        positions = positions_of_row(self.model, ids, pixels, 0)[:, None]
        masks = {
            f"{kind}_mask": ids[None] == getattr(self.model.config, f"{kind}_token_id") for kind in ("image", "video")
        }
        bounds = _bounds(len(ids))
        return self.model(
            input_ids=ids[None], position_ids=positions, use_cache=False, **masks, **bounds, **pixels
        ).logits


class VeomniTurns(VeomniCase, Turns):
    """`Turns` of VeOmni's class."""


def whole_rows(model: torch.nn.Module) -> Callable[..., Any]:
    """A text model's own forward, with what verl's engine passes beside `input_ids` [1, T]."""

    def forward(input_ids: torch.Tensor, **options: Any) -> Any:
        positions = torch.arange(input_ids.shape[1])[None]
        return model(input_ids=input_ids, position_ids=positions, **_bounds(input_ids.shape[1]), **options)

    return forward


def _bounds(length: int) -> dict[str, Any]:
    ends = torch.tensor([0, length], dtype=torch.int32)
    return dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=length, max_length_k=length)


def liger_in_torch(patch: pytest.MonkeyPatch) -> None:
    """Parts of Seed-OSS that VeOmni takes from liger_kernel, which needs a GPU: Hugging Face's."""
    from transformers.models.seed_oss import modeling_seed_oss as parts

    def rotated(q: Any, k: Any, cos: Any, sin: Any, position_ids: None, unsqueeze_dim: int) -> Any:
        return parts.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    found = dict(
        rms_norm=dict(LigerRMSNorm=parts.SeedOssRMSNorm), swiglu=dict(LigerSwiGLUMLP=parts.SeedOssMLP),
        rope=dict(liger_rotary_pos_emb=rotated),
    )  # fmt: skip
    for name in ("liger_kernel", "liger_kernel.transformers"):
        patch.setitem(sys.modules, name, ModuleType(name))
    for name, values in found.items():
        patch.setitem(sys.modules, f"liger_kernel.transformers.{name}", SimpleNamespace(**values))


@contextmanager
def float64_positions() -> Iterator[None]:
    """Context in which Hugging Face's towers interpolate positions of patches in float64, as VeOmni's always do."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
