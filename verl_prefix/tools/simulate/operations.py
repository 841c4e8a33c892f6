"""Costs of one operation, from its arguments and results: FLOPs, bytes, and whom it talks to."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils.flop_counter import flop_registry

from verl_prefix.auto.shape import query_key_pairs
from verl_prefix.core.calls import Call
from verl_prefix.core.kernels import KERNELS, aten
from verl_prefix.tools.simulate import scans

_BLOCK = 128  # tokens that one thread block of flash attention computes
_NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "detach", "alias"}
_READS_PART = {"index", "index_select", "embedding", "gather"}
_WRITES_PART = {"index_put_", "index_put", "_index_put_impl_", "index_copy_", "index_copy", "index_add_", "index_add",
                "scatter_", "embedding_dense_backward"}  # fmt: skip


class FakeFlashAttention:
    """aten's flash attention as a `core.kernels.Kernel` of any device, where its fake kernels run; `call` is the last
    one, whose spans the operation itself is told in tensors that hold nothing here."""

    __name__ = "simulated"
    call: Call

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.call = call
        return aten.forward(q, k, v, call)

    def backward(
        self, dout: torch.Tensor, saved: tuple[torch.Tensor, ...], call: Call
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.call = call
        return aten.backward(dout, saved, call)

    def unavailable(self) -> str | None:
        return aten.schema_error()

    def unsupported(self, device_type: str, dtype: torch.dtype, head_dim: int, softcap: bool = False) -> str | None:
        return aten.unsupported("cuda", dtype, head_dim, softcap)

    def pairs(self) -> float:
        """Query-key pairs of the last call."""
        spans = self.call.spans
        if not self.call.causal:
            return float(sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1 in spans))
        return sum(query_key_pairs(q1 - q0, (k1 - k0) - (q1 - q0), self.call.window) for q0, q1, k0, k1 in spans)

    def empty_blocks(self, backward: bool) -> int:
        """Blocks per head without a token in the last call, over queries, and in backward over keys. Its grid has for
        every segment as many blocks as the longest needs."""
        spans = self.call.spans
        blocks = [-(-(b - a) // _BLOCK) for a, b in pairwise(spans.k if backward else spans.q)]
        return len(blocks) * max(blocks) - sum(blocks)


KERNEL = KERNELS["simulated"] = FakeFlashAttention()


def merge_into(out: torch.Tensor, lse: torch.Tensor, out_2: torch.Tensor, lse_2: torch.Tensor) -> None:
    """`core.kernels.fused_merge`, which runs on CUDA."""
    scans.launch([out, lse, out_2, lse_2], [out, lse])


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an operation's arguments or results; twice as fast here as a tree map."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_of(value)
    return tensors


def device_of(tensor: torch.Tensor) -> str:
    """Type of its device; of a fake tensor without the operation that `.device` is."""
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type


def _touched(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor; an expanded dimension is read once."""
    shape = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(shape) * tensor.element_size()


def runs_kernel(name: str, args: Sequence[Any]) -> bool:
    """False where nothing is computed or moved: torch leaves memory be that is copied onto itself, as `x[rows] += y`
    ends (aten/src/ATen/native/Copy.cpp)."""
    if name != "copy_":
        return name not in _NO_KERNEL
    to, source = ((x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype) for x in args[:2])
    return to != source


def members_of(func: Any, args: Sequence[Any]) -> list[int]:
    """Ranks that a collective joins."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(value))
        if argument.name == "group_name":
            return dist.get_process_group_ranks(_resolve_process_group(value))
    raise ValueError(f"{func} names no process group")


def flops_of(
    func: Any, name: str, ins: list, args: Any, kwargs: Any, out: Any, vocab_size: int
) -> tuple[str, float, int]:
    """Kind, FLOPs, and bytes that exist during an operation alone; vocab_size: tells logits by shape."""
    if name in ("_flash_attention_forward", "_flash_attention_backward"):
        spans = KERNEL.call.spans
        backward = name.endswith("backward")
        q, k = args[int(backward)], args[1 + int(backward)]
        heads, dim = q.shape[1], q.shape[2]
        flops = 4.0 * heads * dim * KERNEL.pairs() * (2.5 if backward else 1.0)
        if not backward:
            return "attention", flops, 0
        # fp32 dq and its row sums, padded to 128 queries per sequence; dk and dv per query head.
        padded = q.shape[0] + 128 * (len(spans.q) - 1)
        workspace = 4 * padded * heads * (dim + 1)
        if heads != k.shape[1]:
            workspace += 2 * k.shape[0] * heads * dim * k.element_size()
        return "attention", flops, workspace
    if name == scans.KERNEL:
        return args[3] if args[2] else "", args[2], 0
    if name == "_grouped_mm":  # experts' matmuls: every row meets one [in, out] of [experts, in, out]
        return "linear", 2.0 * ins[0].numel() * ins[1].shape[-1], 0
    if (formula := flop_registry.get(func._overloadpacket)) is None:
        return "", 0.0, 0
    flops = float(formula(*args, **kwargs, out_val=out))
    logits = any(vocab_size in x.shape for x in ins)
    return ("attention" if "attention" in name else "lm_head" if logits else "linear"), flops, 0


def bytes_of(name: str, ins: list, outs: list, new: bool, mutates: bool) -> float:
    """Bytes that an operation reads and writes; new: it allocates what it returns."""
    if name in _READS_PART:
        return 2.0 * sum(x.nbytes for x in outs) + sum(_touched(x) for x in ins if not x.is_floating_point())
    if name in _WRITES_PART:
        return 3.0 * sum(x.nbytes for x in ins[1:]) + (2.0 * outs[0].nbytes if new and outs else 0.0)
    if name in ("slice_backward", "select_backward"):
        return float(ins[0].nbytes + outs[0].nbytes)
    if name == scans.KERNEL:  # what it reads, then what it writes
        return float(sum(map(_touched, ins)))
    seen = {(x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape)): x for x in (*ins, *outs)}
    nbytes = float(sum(map(_touched, seen.values())))
    if mutates and not new:  # read and written
        nbytes += sum(x.nbytes for x in outs or ins[:1])
    return nbytes
