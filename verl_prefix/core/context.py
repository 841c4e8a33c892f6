"""What the layers of one forward share, and where their attention becomes grouped attention."""

from collections.abc import Callable, Sequence

import torch

from verl_prefix.core.attention import AttentionSite, GroupedAttention, Kept
from verl_prefix.core.calls import AttentionParams
from verl_prefix.core.kernels import choose_kernel
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.prefix_cache import LayerKey, PrefixCache, twice_error
from verl_prefix.core.sequence_parallel import Shards


class ForwardContext:
    """What the layers of one forward share: its packed row, the caches, shards and routes.

    It goes through the model as a keyword argument. So gradient checkpointing, which runs layers again, hands them the
    same one, on whatever thread autograd runs them. It is no dataclass on purpose: FSDP2 copies dataclass inputs for
    each layer, and each copy would count its own calls.

    Args:
        packed_row: the packed row that runs.
        kernel: name for `kernels.choose_kernel`.
        own_cache: in phase A, the cache that receives the layers' keys and values.
        outer_caches: of the phases A around a nested pass, the outermost first; segments read their paths there.
        keep_attention: under gradient checkpointing, keeps attention outputs until backward. Layers that run again
            then run no attention kernel.
        shards: how the packed row's tokens are spread over ranks; None: this rank has all of them.
        head_tokens: [n] int64, which of this rank's tokens go through lm_head; None: all.
        routes: [n, layers, k] int16: the experts that each of this rank's tokens goes to in each of the model's layers.
            Entries of -1 in all k places are filled in: the router chooses, and writes its choice there. Models of
            Hugging Face also fill in entries that name an expert twice. None: routers choose, and nothing is written.

    Attributes:
        kept: attention outputs that wait for backward; None: they are not kept.
        num_calls: number of calls of `attend`, and of recurrent layers, which these count themselves
            (`models.recurrent`). Compared before and after a forward, it shows a model that bypasses them.
    """

    def __init__(
        self, packed_row: PackedRow, kernel: str, own_cache: PrefixCache | None = None,
        outer_caches: Sequence[PrefixCache] = (), keep_attention: bool = False, shards: Shards | None = None,
        head_tokens: torch.Tensor | None = None, routes: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.packed_row = packed_row
        self.kernel = kernel
        self.own_cache = own_cache
        self.outer_caches = tuple(outer_caches)
        self.shards = shards
        self.head_tokens = head_tokens
        self.routes = routes
        self.kept: Kept | None = {} if keep_attention else None
        self.num_calls = 0
        self._layers_run: set[int] = set()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        params: AttentionParams,
    ) -> torch.Tensor:  # fmt: skip
        """A layer's attention, in place of the model's own: q [T, H, D], k and v [T, K, D], sinks [H] -> [T, H, D].

        Under sequence parallelism T counts this rank's tokens of the packed row.

        Raises:
            NoKernel: no kernel can run such inputs, or not the one that was asked for (`kernels.choose_kernel`).
            CannotShare: the layer runs a second time in one forward.
        """
        in_backward = torch._C._current_graph_task_id() >= 0  # where gradient checkpointing runs a layer again
        if layer in self._layers_run and not in_backward:
            raise twice_error(layer)
        self._layers_run.add(layer)
        self.num_calls += 1
        kernel = choose_kernel(self.kernel, q.device.type, q.dtype, q.shape[-1], softcap=params.softcap is not None)
        if self.shards is not None:
            q, k, v = self.shards.to_heads(q, k, v)
            sinks = None if sinks is None else self.shards.heads(sinks)
        if self.own_cache is not None:
            k, v = self.own_cache.capture(layer, k, v)
        anchors = [cache.anchor(layer) for cache in self.outer_caches]
        anchor = next((x for x in anchors if x.requires_grad), None)  # one is enough: see `PrefixCache.anchor`
        out: torch.Tensor = GroupedAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, sinks, anchor, AttentionSite(self.packed_row, kernel, params, self.outer_caches, layer), self.kept
        )
        self.on_attention(layer, q, k, v, sinks=sinks, params=params, out=out)
        return out if self.shards is None else self.shards.to_tokens(out)

    def on_attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        params: AttentionParams, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Does nothing. A subclass overrides it to see the arguments and the result of `GroupedAttention`, of all
        tokens and this rank's heads."""

    def on_recurrence(
        self, key: LayerKey, inputs: Sequence[torch.Tensor],
        whole: Callable[[Sequence[torch.Tensor], int], torch.Tensor], out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Does nothing. A subclass overrides it to see the arguments and the result of `recurrence.shared_scan` or
        `shared_conv`. `whole(inputs, n)` computes one whole row from zeros, after n tokens that change nothing."""
