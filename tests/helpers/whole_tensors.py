"""Whole tensors of what FSDP2 shards."""

import asyncio

import torch
from torch.distributed.tensor import DTensor, Shard


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`full` of each, by one collective for all that FSDP2 shards alike: one for each costs more than a pass."""
    found, alike = {}, {}
    for name, x in tensors.items():
        mesh_dims = [i for i, at in enumerate(x.placements) if at == Shard(0)] if isinstance(x, DTensor) else []
        if len(mesh_dims) == 1 and all(at.is_replicate() or at == Shard(0) for at in x.placements):
            alike.setdefault((x.device_mesh.get_group(mesh_dims[0]), x.dtype), []).append(name)
        else:
            found[name] = full(x)
    for (group, dtype), names in alike.items():
        size = group.size()
        chunks = [-(-len(tensors[name]) // size) * tensors[name].shape[1:].numel() for name in names]  # with padding
        mine = torch.zeros(sum(chunks), dtype=dtype)
        for name, to in zip(names, mine.split(chunks), strict=True):
            local = tensors[name].detach().to_local().flatten()
            to[: len(local)] = local
        every = torch.empty(size * len(mine), dtype=dtype)
        torch.distributed.all_gather_into_tensor(every, mine, group=group)
        for name, x in zip(names, every.view(size, -1).split(chunks, dim=1), strict=True):
            found[name] = x.flatten()[: tensors[name].numel()].view(tensors[name].shape).clone()
    return {name: found[name] for name in tensors}


def check_put_together(apart: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """That the hf rollout makes of a mixture's weights, which verl took `apart`, those that they were."""
    from verl_prefix.cpu import rollout  # the ranks of most tests need none

    async def collected() -> dict[str, torch.Tensor]:
        return {name: weight async for name, weight in rollout.fused_experts(apart.items())}

    assert set(apart) != set(weights)
    together = asyncio.run(collected())
    assert list(together) == list(weights)
    assert all(torch.equal(together[name], weight) for name, weight in weights.items())
