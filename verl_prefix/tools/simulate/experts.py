"""Experts as VeOmni has them, on fake tensors: how they are sharded, and what their fused kernels allocate, keep, send.

Read from veomni 0.1.12 (distributed/torch_parallelize.py, distributed/moe, ops/kernels/moe/group_gemm.py). With expert
parallelism a layer's tokens travel twice, forward and backward each, and forward again where a checkpointed layer is
computed again. Every expert gets as many tokens as any other, and all ranks have passes of one length: fake tensors
have no values. No GPU has measured these kernels here.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from verl_prefix.auto.shape import experts_of
from verl_prefix.core.sequence_parallel import AllToAll
from verl_prefix.tools.simulate.scans import launch
from verl_prefix.tools.simulate.tracker import Tracker


def shard(model: Any, mesh: DeviceMesh, expert_mesh: DeviceMesh | None, dtype: torch.dtype, tracker: Tracker) -> None:
    """Shards a model as `parallelize_model_fsdp2` does, and has its experts computed as VeOmni's.

    Args:
        mesh: of all parameters but those of experts. expert_mesh: of those, its last dimension is expert parallel;
            None: experts are sharded like all else.
        dtype: of the computation. Gradients are reduced in fp32.

    Raises:
        ValueError: the model's experts are not gated by one product.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
    kinds = set(model._no_split_modules)
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    group = None if expert_mesh is None else expert_mesh.get_group(expert_mesh.ndim - 1)
    parts = []
    for layer in layers:
        experts = experts_of(layer)
        for one in experts:
            check_gated(one)
            module: Any = one
            if group is not None:
                for name, parameter in list(one.named_parameters(recurse=False)):
                    setattr(one, name, torch.nn.Parameter(parameter.detach()[: len(parameter) // group.size()].clone()))
            module.forward = functools.partial(_experts, one, group, tracker)
            if expert_mesh is not None:
                names = expert_mesh.mesh_dim_names
                assert names is not None
                fully_shard(
                    module, mesh=expert_mesh[names[:-1]], mp_policy=policy, shard_placement_fn=lambda _: Shard(1)
                )
                module.set_gradient_divide_factor(dist.get_world_size())
        fully_shard(layer, mesh=mesh, mp_policy=policy)
        parts.append([layer, *(reversed(experts) if expert_mesh is not None else ())])
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if expert_mesh is not None:
        for (layer, *_), after in zip(parts, parts[1:], strict=False):
            layer.set_modules_to_forward_prefetch(after)
        for before, (layer, *_) in zip(parts, parts[1:], strict=False):
            layer.set_modules_to_backward_prefetch(before)


def check_gated(experts: torch.nn.Module) -> None:
    """Raises ValueError where experts are not gated by one product."""
    if {name for name, _ in experts.named_parameters()} != {"gate_up_proj", "down_proj"}:
        raise ValueError(
            f"--simulate: experts of {type(experts).__name__} have other parameters than gate_up_proj and down_proj, "
            "which fused kernels here take; leave it out"
        )


def _experts(
    experts: Any, group: dist.ProcessGroup | None, tracker: Tracker, hidden: torch.Tensor, chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """A layer's experts on its tokens: hidden [T, H], chosen and weights [T, k] -> [T, H]."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if gate_up.shape[-1] != hidden.shape[-1]:  # VeOmni has them the other way round
        gate_up, down = gate_up.mT, down.mT
    rows, num_local = chosen.numel(), len(gate_up)
    ends = chosen.new_empty(num_local, dtype=torch.int32)
    if group is None:
        places = launch([chosen], [chosen.new_empty(rows)])[0]
        made = Products.apply(Scatter.apply(hidden, places), gate_up, down, ends, weights, places)
        return Gather.apply(made, places, len(hidden))
    num = num_local * group.size()
    mask = hidden.new_zeros(*chosen.shape, num, dtype=torch.int64).scatter_(-1, chosen.unsqueeze(-1), 1)
    mask = mask.permute(2, 1, 0)
    _counts(mask, group, tracker)
    routes = mask.sum(dim=1)
    places = launch([routes.bool()], [chosen.new_empty(rows)])[0]
    sizes = [rows // num + (i < rows % num) for i in range(num)]

    def in_order(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(x.split(sizes))

    received = in_order(sent(hidden.index_select(0, places), group))
    made = Products.apply(received, gate_up, down, ends, None, None)
    back = sent(in_order(made), group)
    of_all = weights.new_zeros(len(hidden), num).scatter_add_(1, chosen, weights)
    of_rows = of_all.T.contiguous().flatten().index_select(0, places)
    back = back * of_rows.unsqueeze(-1)
    total = torch.zeros_like(hidden, dtype=torch.float32)
    return total.scatter_add_(0, places.unsqueeze(1).expand_as(back), back.float()).to(hidden.dtype)


def _counts(mask: torch.Tensor, group: dist.ProcessGroup, tracker: Tracker) -> None:
    """How many rows each rank sends to each: gathered, and read by the host."""
    own = mask.sum(dim=(1, 2))
    tracker.read()
    of_all = own.new_zeros(group.size(), len(own))
    dist.all_gather(list(of_all.unbind()), own, group=group)
    local = of_all[:, : len(own) // group.size()].contiguous()
    local.sum(dim=1)
    tracker.read()
    local.sum(dim=0).to("cpu")
    local.to("cpu")


def sent(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent: torch.Tensor = AllToAll.apply(x, group)
    return sent


class Scatter(torch.autograd.Function):
    """Tokens [T, H] -> rows [T * k, H], a row for every expert that a token meets."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.tokens = len(hidden)
        return _scattered(hidden, places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(grads[0], ctx.saved_tensors[0], ctx.tokens), None


class Gather(torch.autograd.Function):
    """Rows [T * k, H] -> tokens [T, H], summed."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor, tokens: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        return _gathered(rows, places, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scattered(grads[0], ctx.saved_tensors[0]), None, None


def _scattered(hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    scattered: torch.Tensor = launch([hidden, places], [hidden.new_empty(len(places), hidden.shape[1])])[0]
    return scattered


def _gathered(rows: torch.Tensor, places: torch.Tensor, tokens: int) -> torch.Tensor:
    gathered: torch.Tensor = launch([rows, places], [rows.new_empty(tokens, rows.shape[1])])[0]
    return gathered


class Products(torch.autograd.Function):
    """x [n, H], gate_up [E, 2 * I, H], down [E, H, I], rows of each expert end at `ends` [E] -> [n, H].

    Args:
        weights: of each token's experts [T, k], which come before the last product, at `places` of the rows; None: they
            come behind it.

    Gradients of parameters with a `main_grad`, as Megatron's have, are added there.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor,
        weights: torch.Tensor | None, places: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        both = torch._grouped_mm(x, gate_up.mT, offs=ends)
        gate, up = both.chunk(2, dim=-1)
        weighted = acted = torch.nn.functional.silu(gate) * up
        kept: list[Any] = []
        if weights is not None:
            of_rows = launch([weights, places], [weights.new_empty(len(x), 1)])[0]
            weighted = acted * of_rows
            kept = [acted, weighted, of_rows, weights, places]
        ctx.save_for_backward(x, gate_up, down, ends, both, *kept)
        ctx.buffers = [getattr(weight, "main_grad", None) for weight in (gate_up, down)]
        return torch._grouped_mm(weighted, down.mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate_up, down, ends, both, *kept = ctx.saved_tensors
        of_weights, dout = None, grads[0]
        gate, up = both.chunk(2, dim=-1)
        active = torch.nn.functional.silu(gate)
        weighted = kept[1] if kept else active * up
        grad = torch._grouped_mm(dout, down, offs=ends)
        of_down = _weight_gradient(dout, weighted, ends, ctx.buffers[1])
        if kept:
            acted, _, of_rows, weights, places = kept
            of_weights = launch([(acted * grad).sum(-1), places], [torch.empty_like(weights)])[0]
            grad = grad * of_rows
        of_up = active * grad
        of_gate = torch.ops.aten.silu_backward(grad * up, gate)
        of_both = torch.cat([of_gate, of_up], dim=-1)
        of_x = torch._grouped_mm(of_both, gate_up, offs=ends)
        of_gate_up = _weight_gradient(of_both, x, ends, ctx.buffers[0])
        return of_x, of_gate_up, of_down, None, of_weights, None


def _weight_gradient(
    dout: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, buffer: torch.Tensor | None
) -> torch.Tensor | None:
    """Gradient [E, out, in] of experts' matrices from dout [n, out] and x [n, in]; None where `buffer` has it."""
    if buffer is None:
        return torch._grouped_mm(dout.mT, x, offs=ends)
    launch([dout, x], [buffer], 2.0 * dout.numel() * x.shape[1], "linear")
    return None
