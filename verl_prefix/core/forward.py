"""One packed row through the model: its tokens forward, and of their logits what the loss needs."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from verl_prefix.core.context import ForwardContext
from verl_prefix.core.groups import Group
from verl_prefix.core.output_index import OutputIndex
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.prefix_cache import OUTPUTS, PrefixCache, ReadPrefix
from verl_prefix.core.runs import on_device
from verl_prefix.core.sequence_parallel import Shards

# (places of tokens in the batch [n], their logits [n, vocabulary]) -> what the loss needs of each [n, k]: its outputs.
LogitsFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# As `LogitsFn`, but its first argument [n] counts among the forward's `head_tokens`: a model knows no places.
HeadFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOGITS_CHUNK = 4096  # tokens whose logits exist at once, where nobody says otherwise


class PassOutputs(NamedTuple):
    """A packed pass after its forward.

    Attributes:
        packed_row: its packed row, with the groups whose rows it computes; none in a dummy, whose loss is zero.
        outputs: [n, k], the outputs that rows read, in the order of `packed_row.output_places`.
    """

    packed_row: PackedRow
    outputs: torch.Tensor


class Pixels(Protocol):
    """Images and videos of a vision model's rows (`models.vision.PixelBatch`)."""

    def of(self, groups: Sequence[Group], device: torch.device, tokens: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Visual arguments of the model's forward, for a packed row that begins with the own strands of `groups`; with
        `tokens` ([t] int64, in host memory) only for these tokens of the packed row."""


class Model(Protocol):
    """A model as `PackedForward` calls it (`models.hookup.HookedModel` for models of Hugging Face).

    Attributes:
        is_early_stage: it is an earlier stage of a pipeline, whose outputs are hidden states for the next stage.
    """

    is_early_stage: bool

    def grouped_attention(self) -> AbstractContextManager[None]:
        """While open, attention layers call `ForwardContext.attend` of the forward's pass."""

    def token_outputs(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, forward_context: ForwardContext,
        of_head: HeadFn | None, logits_chunk: int, pixels: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Runs a packed row [T] forward; returns the outputs [n, k] of `forward_context.head_tokens` [n]. Either these
        require a gradient on all ranks, whatever their tokens are, or on none: that decides whether there is a phase C.

        With `of_head` None nobody reads the result. It is [n, 1], mostly without lm_head, and depends on each layer's
        attention: phase C walks its graph, and a layer that is not in it loses the gradients that waves sent."""


@dataclass(frozen=True)
class TokenBatch:
    """Flat tokens of a batch's rows.

    Attributes:
        input_ids: [N] int64.
        position_ids: [N] or [4, N] (text, time, height, width) int64.
        offsets: first token of each row.
        pixels: of a vision model's rows.
        is_read: [N] bool in host memory: tokens whose outputs the loss reads; None: all of responses. lm_head runs on
            these, and on one other where a backward, or a rank beside this one, needs it.
        routes: [N, layers, k] int16 in host memory, as of `ForwardContext`; None: routers choose.
        records: each forward copies the routes that its tokens took to `routes`, which must be given. A token that
            several rows share gets its routes in one row alone (`Strand.row`): whoever made the batch copies them to
            the other rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    offsets: Sequence[int]
    pixels: Pixels | None = None
    is_read: torch.Tensor | None = None
    routes: torch.Tensor | None = None
    records: bool = False


@dataclass(eq=False)
class PackedForward:
    """Runs packed rows forward through one model.

    Attributes:
        model: hooked up for grouped attention; see `Model`.
        of_logits: makes outputs (log-prob, entropy) of the logits of at most `logits_chunk` tokens at a time.
        context: context of one forward and its loss, not of backward (autocast).
        kernel: name for `kernels.choose_kernel`.
        logits_chunk: tokens whose logits exist at once.
        keep_attention: of `ForwardContext`.
        context_type: `ForwardContext`, or a subclass that looks at its layers.
        sequence_group: ranks that compute every packed row together (see `core.sequence_parallel`); None: this rank
            alone.
    """

    model: Model
    of_logits: LogitsFn
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    kernel: str = "auto"
    logits_chunk: int = LOGITS_CHUNK
    keep_attention: bool = False
    context_type: Callable[..., ForwardContext] = ForwardContext
    sequence_group: dist.ProcessGroup | None = None

    def phase_a(
        self, batch: TokenBatch, packed_row: PackedRow, cache: PrefixCache, runs_head: bool,
        outer_caches: Sequence[PrefixCache],
    ) -> torch.Tensor:  # fmt: skip
        """The forward of a packed row of strands, which stores in `cache` what suffixes read.

        Args:
            runs_head: whether lm_head runs: `PhasedPass.reads_strands`.
            outer_caches: caches of the phases A in which it is nested, the outermost first.

        Returns:
            [m, k], where the backward of phase C starts: outputs of the packed row's `head_tokens`; on an early stage
            of a pipeline, hidden states.
        """
        with self.context():
            result = self._run(batch, packed_row, outer_caches, own_cache=cache, runs_head=runs_head)
            if packed_row.output_index is None or self.model.is_early_stage:
                return result
            return cache.capture(OUTPUTS, result)[0]

    def packed(self, batch: TokenBatch, packed_row: PackedRow, outer_caches: Sequence[PrefixCache]) -> PassOutputs:
        """The forward of a packed pass; `outer_caches` are those of the phases A around it, the outermost first."""
        with self.context():
            outputs = self._run(batch, packed_row, outer_caches)
            return PassOutputs(packed_row, self.gather_outputs(outputs, packed_row, outer_caches))

    def gather_outputs(
        self, outputs: torch.Tensor, packed_row: PackedRow, caches: Sequence[PrefixCache]
    ) -> torch.Tensor:
        """Outputs [m, k] of a packed row's `head_tokens` -> the outputs that rows read [n, k]."""
        index = packed_row.output_index
        if self.model.is_early_stage or index is None:
            return outputs
        is_own = index.level_of == packed_row.source.level
        if is_own.all() and torch.equal(index.packed_tokens, packed_row.head_tokens):  # always in groups of one prompt
            return outputs
        return _gather_from_levels(outputs, packed_row, index, caches)

    def _run(
        self, batch: TokenBatch, packed_row: PackedRow, outer_caches: Sequence[PrefixCache],
        own_cache: PrefixCache | None = None, runs_head: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """Runs the model on a packed row; returns outputs [m, k] of its `head_tokens`, or what `Model.token_outputs`
        returns in their place where lm_head does not run.

            outputs are read here                   lm_head runs, with `of_logits`
            on other ranks alone                    lm_head runs, with `_sum_logits`
            on no rank (`runs_head` is False)       lm_head does not run
        """
        device = batch.input_ids.device
        share = _Share.of(packed_row, self.sequence_group, device)
        routes = None if batch.routes is None else on_device(batch.routes[share.places], device)
        places, head_tokens = on_device(share.places, device), on_device(share.head_tokens, device)
        keeps_attention = self.keep_attention and (own_cache is None or own_cache.keeps_attention)
        forward_context = self.context_type(
            packed_row, self.kernel, own_cache, outer_caches, keeps_attention and torch.is_grad_enabled(),
            shards=share.shards, head_tokens=head_tokens, routes=routes,
        )  # fmt: skip
        of_logits = _sum_logits if packed_row.output_index is None else self.of_logits
        head_places = places[head_tokens]

        def of_head(which: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return of_logits(head_places[which], logits)

        result = self.model.token_outputs(
            batch.input_ids[places], batch.position_ids[..., places], forward_context, of_head if runs_head else None,
            self.logits_chunk, pixels=batch.pixels.of(packed_row.groups, device, share.tokens) if batch.pixels else {},
        )  # fmt: skip
        if batch.records and not packed_row.is_dummy:
            _record(batch, forward_context)
        return result if self.model.is_early_stage else share.gather(result)


def _gather_from_levels(
    outputs: torch.Tensor, packed_row: PackedRow, index: OutputIndex, caches: Sequence[PrefixCache]
) -> torch.Tensor:
    """`PackedForward.gather_outputs` in deeper trees, where several rows may read the same output, and rows may read
    outputs of phases A around."""
    gathered = outputs.new_empty(len(index.places), outputs.shape[-1])
    for level in index.level_of.unique().tolist():
        is_here = index.level_of == level
        computed = packed_row.levels[level].head_tokens
        at = on_device(torch.searchsorted(computed, index.packed_tokens[is_here]), outputs.device)
        if level == packed_row.source.level:
            part = outputs[at]
        else:
            (of_phase_a,) = caches[level].read(OUTPUTS)
            part = ReadPrefix.apply(of_phase_a, at, caches[level], OUTPUTS)  # type: ignore[no-untyped-call]
        gathered = gathered.index_copy(0, on_device(is_here.nonzero()[:, 0], outputs.device), part)
    return gathered


class _Share(NamedTuple):
    """The tokens of a packed row that this rank computes: all of them, or one of several `shards`.

    Attributes:
        places: [t] int64, of these tokens in the batch.
        head_tokens: [m] int64, which of these tokens go through lm_head.
        tokens: [t] int64, which of the packed row's tokens these are; None: all.
        gather: outputs [m, k] of `head_tokens` -> [n, k] of those of all ranks.
    """

    places: torch.Tensor
    head_tokens: torch.Tensor
    shards: Shards | None = None
    tokens: torch.Tensor | None = None
    gather: Callable[[torch.Tensor], torch.Tensor] = lambda outputs: outputs

    @classmethod
    def of(cls, packed_row: PackedRow, group: dist.ProcessGroup | None, device: torch.device) -> "_Share":
        """This rank's share among the ranks of `group`, which together run lm_head on all `head_tokens`."""
        if group is None:
            return cls(packed_row.places, packed_row.head_tokens)
        shards = Shards(group, packed_row, device)
        head_tokens, gathered_at = shards.spread_head(packed_row.head_tokens)
        gather = functools.partial(shards.gather, gathered_at=gathered_at)
        return cls(packed_row.places[shards.local_tokens], head_tokens, shards, shards.local_tokens, gather)


def _record(batch: TokenBatch, forward_context: ForwardContext) -> None:
    """Writes the routes of a pass into the batch's routes, at the places of the packed row's tokens alone. Each rank
    that shares the packed row gets all its routes."""
    assert batch.routes is not None and forward_context.routes is not None
    routes, shards = forward_context.routes, forward_context.shards
    if shards is not None:
        routes = shards.whole(routes.view(torch.uint8)).view(torch.int16)  # as bytes, since NCCL has no int16
    batch.routes[forward_context.packed_row.places] = routes.cpu()


def _sum_logits(places: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The `LogitsFn` of packed rows without outputs that are read, beside ranks whose packed rows have some: it gives a
    gradient to the same parameters as theirs."""
    return logits.sum(-1, keepdim=True)
