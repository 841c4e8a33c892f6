"""Ulysses: the ranks of a group share a packed row's tokens in the layers, and its heads inside attention and scans.

    layers     rank 0: [ P P P | S S ]  rank 1: [ P P . | S . ]      its slices of strands and suffixes, padded alike
    attention  rank 0: heads 0 1 of     [ P P P P P | S S S ]        all tokens, as on one rank alone

Prefixes and suffixes are cut apart, since cuts through the whole packed row would give one rank all of lm_head's
tokens. The prefix cache holds this rank's heads of whole prefixes, so that a wave sends only its own tokens. In a
recurrent layer the scan has heads as well, and the convolution has channels, each of which needs no other: their states
stay on their rank.
DeepSpeed-Ulysses: arXiv 2309.14509; verl's is verl/models/transformers/monkey_patch.py.
"""

from typing import Any

import torch
import torch.distributed as dist

from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.runs import on_device


class Shards:
    """One packed row on the n ranks of a group.

    In each attention layer, and again in its backward, a rank of t tokens sends t (2 H + 2 max(K, n)) D (n - 1) / n
    elements. A recurrent layer sends (n - 1) / n of what its convolutions and its scan take and return.

    Args:
        group: the ranks that share the packed row; all of them run the same passes. H is a multiple of n, and K is a
            multiple of n or divides n. The same holds for heads (or channels) and groups of recurrent layers.

    Attributes:
        size, rank: n, and which of the group's ranks this one is.
        local_tokens: [t] int64, this rank's tokens of the packed row. Slices are padded with token 0, whose result
            nobody reads.
    """

    def __init__(self, group: dist.ProcessGroup, packed_row: PackedRow, device: torch.device) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        lens = (packed_row.num_strand_tokens, packed_row.num_tokens - packed_row.num_strand_tokens)
        slice_lens = [-(-length // self.size) for length in lens]
        self._num_local = sum(slice_lens)
        positions = []
        for num_tokens, length, before in zip(lens, slice_lens, (0, slice_lens[0]), strict=True):
            number = torch.arange(num_tokens)
            positions.append(number // max(length, 1) * self._num_local + before + number % max(length, 1))
        # Where every token stands among the tokens of rank 0, then rank 1, and so on.
        self._at_ranks = torch.cat(positions)
        self._at_ranks_on_device = on_device(self._at_ranks, device)
        self.local_tokens = self.local(torch.arange(packed_row.num_tokens))

    def local(self, values: torch.Tensor) -> torch.Tensor:
        """Values of all tokens [T], in host memory -> of this rank's tokens [t], 0 where a slice is padded."""
        padded = values.new_zeros(self.size * self._num_local)
        padded[self._at_ranks] = values
        return padded.view(self.size, self._num_local)[self.rank]

    def spread_head(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of this rank's tokens go through lm_head, so that `tokens` do on all ranks together.

        Args:
            tokens: [n] int64, tokens of the packed row, in ascending order.

        Returns:
            [m] int64, positions among this rank's tokens: of the `tokens` that it has, then of other tokens, none
            twice, up to as many as any rank has. And [n] int64, `gathered_at` for `gather`: where the output of each of
            `tokens` stands among the outputs of all ranks.
        """
        owner, place = self._at_ranks[tokens] // self._num_local, self._at_ranks[tokens] % self._num_local
        counts = owner.bincount(minlength=self.size)
        most = int(counts.max())
        order = owner.argsort(stable=True)
        number = torch.arange(len(tokens)) - (counts.cumsum(0) - counts)[owner[order]]
        gathered_at = torch.empty_like(owner)
        gathered_at[order] = owner[order] * most + number
        mine, is_other = place[owner == self.rank], torch.ones(self._num_local, dtype=torch.bool)
        is_other[mine] = False
        return torch.cat([mine, is_other.nonzero()[: most - len(mine), 0]]), gathered_at

    def gather(self, outputs: torch.Tensor, gathered_at: torch.Tensor) -> torch.Tensor:
        """Outputs [m, k] of every rank -> [n, k] on every rank, by `gathered_at` of `spread_head`.

        Every rank computes the loss of all tokens, and FSDP, as mcore, averages gradients over ranks. So backward
        multiplies the gradients of a rank's own tokens by n."""
        gathered: torch.Tensor = _Gather.apply(outputs, self.group)  # type: ignore[no-untyped-call]
        return gathered.index_select(0, on_device(gathered_at, outputs.device))

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Values [t, ...] of each rank's tokens -> [T, ...] of all tokens."""
        gathered: torch.Tensor = _Gather.apply(values, self.group)  # type: ignore[no-untyped-call]
        return gathered.index_select(0, self._at_ranks_on_device)

    def to_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Tensors [t, H, ...] of this rank's tokens -> [T, H / n, ...] of all tokens, by one all-to-all for each dtype.
        Fewer heads than ranks are repeated: [T, 1, ...]."""
        n = self.size
        whole = [x if x.shape[1] >= n else x.repeat_interleave(n // x.shape[1], 1) for x in tensors]
        by_rank = [x.unflatten(1, (n, -1)) for x in whole]
        of_heads = list(by_rank)
        for dtype in dict.fromkeys(x.dtype for x in by_rank):
            alike = [i for i, x in enumerate(by_rank) if x.dtype == dtype]
            sent = torch.cat([by_rank[i].flatten(2) for i in alike], 2).transpose(0, 1).flatten(0, 1)
            received: torch.Tensor = AllToAll.apply(sent, self.group)  # type: ignore[no-untyped-call]
            columns = received.split([by_rank[i].shape[2:].numel() for i in alike], 1)
            for i, x in zip(alike, columns, strict=True):
                of_heads[i] = x.index_select(0, self._at_ranks_on_device).unflatten(1, by_rank[i].shape[2:])
        return of_heads

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """A tensor [T, H / n, ...] of all tokens -> [t, H, ...] of this rank's tokens, zero where a slice is padded."""
        padded = out.new_zeros(self.size * self._num_local, *out.shape[1:]).index_copy(0, self._at_ranks_on_device, out)
        received: torch.Tensor = AllToAll.apply(padded, self.group)  # type: ignore[no-untyped-call]
        by_rank: torch.Tensor = received.unflatten(0, (self.size, self._num_local))
        return by_rank.transpose(0, 1).flatten(1, 2)

    def heads(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights [H, ...] of all heads -> [H / n, ...] of this rank's heads."""
        return weights.chunk(self.size)[self.rank]


class AllToAll(torch.autograd.Function):
    """Sends [n m, ...] in n blocks, the i-th to rank i -> the blocks that ranks sent here. It is its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        return AllToAll.apply(dx, ctx.group), None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Gathers [m, k] of every rank -> [n m, k]. Backward keeps this rank's part, times n."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = x.new_empty(dist.get_world_size(group), *x.shape)
        dist.all_gather(list(gathered), x.contiguous(), group=group)
        return gathered.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        n = dist.get_world_size(ctx.group)
        return grad.chunk(n)[dist.get_rank(ctx.group)] * n, None
