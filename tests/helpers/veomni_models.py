"""Tiny models of VeOmni's own classes on a CPU, with the weights of Hugging Face's."""

import dataclasses
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig, PreTrainedModel
from vision_cases import Case

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
    """Gives a gated delta net of VeOmni what flash-linear-attention would compute on a GPU: without it the mixer refuses
    to run."""
    mixer.chunk_gated_delta_rule = _varlen(sys.modules[type(mixer).__module__].torch_chunk_gated_delta_rule)
    mixer.causal_conv1d_fn = causal_conv1d


def _varlen(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The mixer's own rule in torch, which takes rows, behind the interface of
    fla.ops.gated_delta_rule.chunk_gated_delta_rule, which takes them one behind the other."""

    def chunk_gated_delta_rule(
        *inputs: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial_state: torch.Tensor | None,
        output_final_state: bool, use_qk_l2norm_in_kernel: bool, cu_seqlens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        options = dict(output_final_state=True, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        states = [None] * len(cu_seqlens) if initial_state is None else initial_state.split(1)
        found = [
            rule(*(x[:, a:b] for x in inputs), g=g[:, a:b], beta=beta[:, a:b], initial_state=state, **options)
            for (a, b), state in zip(pairwise(cu_seqlens.tolist()), states, strict=False)
        ]
        return torch.cat([out for out, _ in found], 1), torch.cat([state for _, state in found])

    chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule.chunk"
    return chunk_gated_delta_rule


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: None, activation: str, seq_idx: None = None, backend: str = "triton",
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """That of fla/modules/convolution.py, of one row: x [1, T, C], weight [C, width] -> [1, T, C], no state."""
    assert (activation, backend) == ("silu", "triton") and (cu_seqlens is None or len(cu_seqlens) == 2)
    padded = F.pad(x.mT, (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))).mT, None


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
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
        rows = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=len(ids), max_length_k=len(ids))
        return self.model(
            input_ids=ids[None], position_ids=positions, use_cache=False, **masks, **rows, **pixels
        ).logits
