"""THE IDEA: a group's prefix is computed once, forward and backward.

    packed   one graph      [ P | S S S S ]                          loss over all suffixes, one backward
    phased   A              [ P ]            forward, keep the graph; its K/V become detached leaves: the prefix cache
             B  wave by wave    [ S S ] [ S S ]  forward and backward; gradients of the cache add up: the grad cache
             C              [ P ]            one backward of the prefix graph from the grad cache

packed is Prefix Grouper (arXiv 2506.05433) with merged attention; phased is schedule-level reuse, for groups that do
not fit one pass: B needs the memory of one wave, and A and C happen once however many waves there are. The stock actor
computes P once per suffix instead. This module knows neither verl nor losses. Logits go to `outputs`. What that returns
goes to `step` where `run` computes a whole plan, or to a caller of `forwards` that calls backward itself (`api`).
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from verl_prefix.core.attention import AttentionPass
from verl_prefix.core.calls import on_device
from verl_prefix.core.errors import annotate_loop_body
from verl_prefix.core.groups import Group
from verl_prefix.core.layout import Layout, build_layout
from verl_prefix.core.meter import Meter
from verl_prefix.core.offload import OffloadedPrefixCache
from verl_prefix.core.prefix_cache import PrefixCache, ReadPrefix
from verl_prefix.core.sequence_parallel import Shards
from verl_prefix.core.waves import PackedPass, PhasedPass, Plan

# (tokens' indices in the batch's flat values [n], their logits [n, vocabulary]) -> what the loss needs [n, k]
Outputs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOGITS_CHUNK = 4096  # tokens whose logits exist at once, where nobody says otherwise
_OUTPUTS = "outputs"  # key of the prefix cache: what `Outputs` made of strands' tokens

# (groups, layout, outputs that its rows read [n, k], in the order of `layout.read_places`) -> loss of these rows
Step = Callable[[Sequence[Group], Layout, torch.Tensor], torch.Tensor]


class PassOutputs(NamedTuple):
    """A packed pass or a wave after its forward, as a Step gets it. One without groups is a dummy: its loss is zero."""

    groups: Sequence[Group]
    layout: Layout
    outputs: torch.Tensor


class Pixels(Protocol):
    """Images and videos of a vision model's rows (`models.vision.PixelBatch`)."""

    def of(self, groups: Sequence[Group], device: torch.device, tokens: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Visual arguments of the model's forward, for a packed row that begins with the prefixes of `groups`. `tokens`
        ([t] int64, in host memory): only for these tokens of the row."""


class Model(Protocol):
    """A model as a schedule calls it (`models.hookup.HookedModel` for those of Hugging Face)."""

    def grouped_attention(self) -> AbstractContextManager[None]:
        """While open, attention layers call `GroupedAttention` with the `AttentionPass` of the forward."""

    def token_outputs(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, head_tokens: torch.Tensor,
        attention_pass: AttentionPass, outputs: Outputs | None, logits_chunk: int, pixels: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Runs a packed row [T] forward; returns what `outputs` makes of the logits of `head_tokens` [n]: [n, k].

        With `outputs` None nobody reads the result. It is [n, 1], without lm_head, and a backward can start from it."""


@dataclass(frozen=True)
class TokenBatch:
    """Flat tokens of a batch's rows.

    `input_ids` is [N] int64; `position_ids` is [N] or [4, N] (text, time, height, width) int64; `offsets` are the rows'
    first tokens. `pixels` belongs to a vision model's rows. `is_read`, [N] bool in host memory, says which of the
    tokens whose outputs rows read go through lm_head; None: all."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    offsets: Sequence[int]
    pixels: Pixels | None = None
    is_read: torch.Tensor | None = None


@dataclass(eq=False)
class Schedule:
    """Runs a plan on one model.

    Args:
        model: hooked up for grouped attention; see `Model`.
        outputs: what to keep of logits, per token (log-prob, entropy); gets at most `logits_chunk` tokens at a time.
        step: gets each pass's groups, layout and outputs, keeps what it needs and returns the loss; only for `run`.
        backward: what to do with a loss; None for a forward-only run, which the caller wraps in `torch.no_grad`.
        forward_context: context of one forward and its loss, not of backward (autocast).
        gradient_sync: context of one backward, given whether it is the run's last (verl's `_gradient_sync_context`).
        kernel: name for `kernels.choose_kernel`.
        offload: phased only, with gradients: prefixes wait in host memory (`core.offload`).
        keep_attention: of `AttentionPass`; with `offload` it does not hold in phase A.
        pass_type: `AttentionPass`, or a subclass that looks at its layers.
        sequence_group: ranks that compute every row together (see `core.sequence_parallel`); None: this rank alone.
        meter: measures the phases.
    """

    model: Model
    outputs: Outputs
    step: Step | None = None
    backward: Callable[[torch.Tensor], None] | None = None
    gradient_sync: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext()
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    kernel: str = "auto"
    logits_chunk: int = LOGITS_CHUNK
    offload: bool = False
    keep_attention: bool = False
    pass_type: Callable[..., AttentionPass] = AttentionPass
    sequence_group: dist.ProcessGroup | None = None
    meter: Meter = field(default_factory=Meter)

    def run(self, tokens: TokenBatch, plan: Plan) -> None:
        """Runs all passes of `plan` in order, which must be the same on every rank; needs `step`."""
        assert self.step is not None
        with self.model.grouped_attention():
            for i, planned in enumerate(plan.passes):
                with self.forwards(tokens, planned, last=i == len(plan.passes) - 1) as forwards:
                    for groups, layout, outputs in forwards:
                        with self.forward_context():
                            loss = self.step(groups, layout, outputs) if groups else outputs.sum() * 0.0
                        if self.backward is not None:
                            self.backward(loss)

    @contextmanager
    def forwards(
        self, tokens: TokenBatch, planned: PackedPass | PhasedPass, last: bool = True
    ) -> Iterator[Iterator[PassOutputs]]:
        """Context of one pass, inside `grouped_attention`: phase A runs on entering, a forward at each iteration, phase
        C on leaving.

        The caller runs a forward's backward before it asks for the next forward. There is no phase C after an exception
        and where no prefix has a gradient. In any case nothing of the prefix is left.
        """
        if isinstance(planned, PackedPass):
            with closing(self._packed(tokens, planned, last)) as packed, annotate_loop_body():
                yield packed
            return
        device = tokens.input_ids.device
        offloads = self.offload and torch.is_grad_enabled()
        with OffloadedPrefixCache(device, self.meter.transfers) if offloads else PrefixCache() as cache:
            layout = build_layout(planned.groups, tokens.offsets, suffixes=False)
            with self.meter.phase("phase_a", planned.groups, device), cache.saving():
                if layout.reads is not None and tokens.is_read is not None:
                    layout = layout.reading(tokens.is_read)
                root = self._prefixes(tokens, planned, layout, cache)
            # Where only lm_head is trained there is no phase C, and the last wave's backward is the last one.
            ends = last and not root.requires_grad
            with closing(self._waves(tokens, planned, layout, cache, ends)) as waves, annotate_loop_body():
                yield waves
            if root.requires_grad:
                with self.meter.phase("phase_c", planned.groups, device), self.gradient_sync(last):
                    cache.backward(root)

    def _packed(self, tokens: TokenBatch, planned: PackedPass, last: bool) -> Generator[PassOutputs]:
        layout = build_layout(planned.groups, tokens.offsets)
        with self.meter.phase("packed", planned.groups, tokens.input_ids.device), self.gradient_sync(last):
            yield self._suffixes(tokens, planned.groups, layout, cache=None)

    def _waves(
        self, tokens: TokenBatch, planned: PhasedPass, source: Layout, cache: PrefixCache, last: bool
    ) -> Generator[PassOutputs]:
        device = tokens.input_ids.device
        with self.meter.waves(device):
            for number, wave in enumerate(planned.waves, start=1):
                groups = [piece for _, piece in wave]
                layout = build_layout(groups, tokens.offsets, source, [place for place, _ in wave])
                part = f"wave {number} of {len(planned.waves)}"
                sync = self.gradient_sync(last and number == len(planned.waves))
                with self.meter.phase("phase_b", groups, device, part), sync:
                    yield self._suffixes(tokens, groups, layout, cache)

    def _prefixes(self, tokens: TokenBatch, planned: PhasedPass, layout: Layout, cache: PrefixCache) -> torch.Tensor:
        """Runs phase A. Its result is the root's output, which FSDP2 needs to start phase C from: of one token, or of
        those strand tokens whose outputs waves read."""
        keep_attention = self.keep_attention and not self.offload
        attention_pass = self.pass_type(layout, self.kernel, capture=cache, keep_attention=keep_attention)
        head_tokens = torch.tensor([layout.num_tokens - 1])
        outputs: Outputs | None = _sum_logits if planned.reads_strands else None
        if layout.reads is not None:
            head_tokens, outputs = layout.head_tokens, self.outputs
        with self.forward_context():
            root = self._forward(tokens, head_tokens, attention_pass, outputs)
            return root if layout.reads is None else cache.capture(_OUTPUTS, root)[0]

    def _suffixes(
        self, tokens: TokenBatch, groups: Sequence[Group], layout: Layout, cache: PrefixCache | None
    ) -> PassOutputs:
        """A forward whose row ends in suffixes: a wave, or without `cache` a packed pass, whose strands come first."""
        if tokens.is_read is not None and groups:
            layout = layout.reading(tokens.is_read)
        attention_pass = self.pass_type(layout, self.kernel, cache=cache, keep_attention=self.keep_attention)
        with self.forward_context():
            outputs = self._forward(tokens, layout.head_tokens, attention_pass, self.outputs if groups else _sum_logits)
            return PassOutputs(groups, layout, self._read(outputs, layout, cache))

    def _read(self, outputs: torch.Tensor, layout: Layout, cache: PrefixCache | None) -> torch.Tensor:
        """Outputs [m, k] of the layout's `head_tokens` -> those that rows read [n, k]. Several rows may read the same
        output, and waves may read those of phase A."""
        if layout.reads is None or torch.equal(layout.reads.tokens, layout.head_tokens):
            return outputs
        device, tokens, is_own = outputs.device, layout.reads.tokens, layout.reads.tokens >= 0
        own = outputs[on_device(torch.searchsorted(layout.head_tokens, tokens[is_own]), device)]
        if is_own.all():
            return own
        assert cache is not None and layout.source is not None
        places = torch.searchsorted(layout.source.head_tokens, -1 - tokens[~is_own])
        (left,) = cache.read(_OUTPUTS)
        read = ReadPrefix.apply(left, on_device(places, device), cache, _OUTPUTS)  # type: ignore[no-untyped-call]
        both = outputs.new_empty(len(tokens), outputs.shape[-1])
        both = both.index_copy(0, on_device(is_own.nonzero()[:, 0], device), own)
        return both.index_copy(0, on_device((~is_own).nonzero()[:, 0], device), read)

    def _forward(
        self, tokens: TokenBatch, head_tokens: torch.Tensor, attention_pass: AttentionPass, outputs: Outputs | None
    ) -> torch.Tensor:
        """What `outputs` makes of the packed row's `head_tokens`: see `Model.token_outputs`."""
        device, layout = tokens.input_ids.device, attention_pass.layout
        own, shards = layout.index, None
        if self.sequence_group is not None:
            shards = attention_pass.shards = Shards(self.sequence_group, layout, device)
            own = layout.index[shards.tokens]
            head_tokens, gathered = shards.head_tokens(head_tokens)
        index, head_tokens = on_device(own, device), on_device(head_tokens, device)
        attention_pass.head_tokens = head_tokens
        places = index[head_tokens]
        prefixes = layout.groups if layout.source is None else ()
        pixels = tokens.pixels and tokens.pixels.of(prefixes, device, shards.tokens if shards else None)
        result = self.model.token_outputs(
            tokens.input_ids[index], tokens.position_ids[..., index], head_tokens=head_tokens,
            attention_pass=attention_pass, outputs=outputs and (lambda which, logits: outputs(places[which], logits)),
            logits_chunk=self.logits_chunk, pixels=pixels or {},
        )  # fmt: skip
        return result if shards is None else shards.gather(result, gathered)


def _sum_logits(index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Outputs of a dummy wave or pass, which gives a gradient to the same parameters as a real one on other ranks."""
    return logits.sum(-1, keepdim=True)
