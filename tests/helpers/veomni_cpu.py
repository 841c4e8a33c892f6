"""What verl's VeOmni engine lacks on a CPU, as stand-ins: grouped GEMMs, flash and linear attention, fp32, gloo's
limits.

VeOmni itself runs unpatched on GPUs alone. What is replaced here is no code of ours, and both arms have it. Importing
this module replaces it for the process; a worker imports it by

    ... actor_rollout_ref.model.external_lib=veomni_cpu
"""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fla_in_torch import causal_conv1d, of_rows
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen3_5 import modeling_qwen3_5
from veomni import ops
from veomni.arguments import MixedPrecisionConfig
from veomni.distributed import torch_parallelize
from veomni.ops import kernel_registry
from veomni.ops.kernels import moe
from veomni.ops.kernels.attention import flash
from verl.workers.engine import EngineRegistry
from verl.workers.engine.veomni import transformer_impl as verls

from verl_prefix.backends.veomni import PrefixVeOmniEngine


def _pieces(cumsum: torch.Tensor) -> Iterator[slice]:
    ends = cumsum.tolist()
    return (slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def _gemm_by_expert(
    a: torch.Tensor, b: torch.Tensor, cumsum_M: torch.Tensor, transpose_a: bool = False, transpose_b: bool = False,
    **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """VeOmni's group_gemm_same_nk: tokens [T, in] of experts one after the other, by weights [experts, ...]."""
    assert not transpose_a
    pieces = zip(_pieces(cumsum_M), b, strict=True)
    return torch.cat([a[rows] @ (weight.t() if transpose_b else weight) for rows, weight in pieces])


def _gemm_of_gradients(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, cumsum_K: torch.Tensor, transpose_a: bool, transpose_b: bool,
    **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """VeOmni's group_gemm_same_mn: into c [experts, m, n] goes a.T @ b of each expert's tokens."""
    assert transpose_a and not transpose_b
    return c.copy_(torch.stack([a[rows].t() @ b[rows] for rows in _pieces(cumsum_K)]))


def _scatter(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(index.numel(), x.shape[1])
    out[index.flatten().long()] = x.repeat_interleave(index.shape[1], 0)
    return out


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None, query_length: int,
    softmax_scale: float | None, sliding_window: int | None, softcap: float | None, is_causal: bool = True,
    cu_seq_lens_q: torch.Tensor | None = None, s_aux: torch.Tensor | None = None, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """transformers' `_flash_attention_forward` of packed rows: query and result [1, T, H, D], key and value
    [1, T, K, D], bounds of rows [rows + 1]."""
    assert attention_mask is None and softcap is None and s_aux is None and cu_seq_lens_q is not None
    row = torch.bucketize(torch.arange(query_length), cu_seq_lens_q[1:], right=True)
    behind = torch.arange(query_length).unsqueeze(1) - torch.arange(query_length)
    seen = row.unsqueeze(1) == row
    if is_causal:
        seen &= behind >= 0
    if sliding_window is not None:
        seen &= behind < sliding_window
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


class _Dist:
    """torch.distributed for VeOmni's experts: gloo wants as many dimensions on both sides."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_gather_into_tensor(out: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> Any:
        return dist.all_gather_into_tensor(out.view(-1), x, group=group)


def sum_alone(model: torch.nn.Module) -> torch.nn.Module:
    """gloo multiplies nothing while it sums, and FSDP2 divides by itself where told so. In a group of one it would
    then not divide at all."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module):
                group.force_sum_reduction_for_comms = group.mesh_info.shard_mesh_size > 1
    return model


def _groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    return [x for x in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] if x is not None]


def _built(init_device: str, **options: Any) -> torch.nn.Module:
    """One rank builds its whole model on "cuda", the only device that VeOmni lets it."""
    return _build(init_device="meta" if init_device == "meta" else "cpu", **options)


def _parallelized(*args: Any, **kwargs: Any) -> torch.nn.Module:
    return sum_alone(_parallelize(*args, **kwargs))


def _in_fp32(enable: bool) -> MixedPrecisionConfig:
    return MixedPrecisionConfig(enable=enable, param_dtype="float32", reduce_dtype="float32")


def _fused_moe(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Without VeOmni's assertion that experts are in half precision."""
    return moe._fused_moe_forward(*args, **kwargs)


def _stand_in(name: str, **functions: Any) -> None:
    """A module of VeOmni's Triton kernels, whose import asks a GPU what it is."""
    module = ModuleType(f"{moe.__name__}._kernels.kernel.{name}")
    vars(module).update(functions)
    sys.modules[module.__name__] = module


_stand_in("group_gemm", group_gemm_same_nk=_gemm_by_expert, group_gemm_same_mn=_gemm_of_gradients)
_stand_in(
    "moe", expert_histogram=lambda index, n: torch.bincount(index.flatten(), minlength=n), moe_scatter=_scatter,
    moe_gather=lambda x, index: x[index.flatten().long()].view(*index.shape, -1).sum(1), moe_add_gather=None,
)  # fmt: skip
from veomni.distributed.moe import moe_layer  # noqa: E402

_build, _parallelize = verls.build_foundation_model, verls.build_parallelize_model
verls.build_foundation_model = _built
verls.build_parallelize_model = _parallelized
torch_parallelize.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(pin_memory=False)
verls.MixedPrecisionConfig, verls.VeOmniEngine._autocast_dtype = _in_fp32, torch.float32
moe_layer.dist = _Dist()
ops.fused_moe_forward = _fused_moe
moe.is_fused_moe_available = lambda: True
kernel_registry.HardwareRequirement.is_satisfied = lambda self: True
for _op, _kernel in (
    ("causal_conv1d", causal_conv1d),
    ("chunk_gated_delta_rule", of_rows(modeling_qwen3_5.torch_chunk_gated_delta_rule)),
):
    kernel_registry.KERNEL_REGISTRY.register(
        kernel_registry.KernelSpec(
            name="fla", op_name=_op, variant="standard", factory=lambda kernel=_kernel: kernel,
            hardware=kernel_registry.HardwareRequirement("any"),
        ),
        force=True,
    )  # fmt: skip
flash._flash_attention_forward = _attend
flash._load_veomni_local_flash_kernel = lambda name: SimpleNamespace(
    flash_attn_func=_attend, flash_attn_varlen_func=_attend
)
EngineRegistry.register("language_model", backend="veomni", device="cpu")(verls.VeOmniEngineWithLMHead)
EngineRegistry.register("language_model", backend="prefix_veomni", device="cpu")(PrefixVeOmniEngine)
