"""Recurrent layers (linear attention, state spaces, short convolutions): a suffix starts from its prefix's state.

    scan          strands -> a state [M, ...] after each state path; what continues such a path starts from its state
    convolution   [tail | P] [tail | S] [tail | S]      tail: the last width - 1 inputs before the segment, or zeros

Attention hands on the keys and values of P tokens; these layers hand on one state. A packed pass computes prefixes and
suffixes in one graph. In a phased pass phase A leaves its states in the prefix cache, and waves read them. Either way
the gradients of all suffixes that start from one state add up in fp32 (fp64) before the one prefix backward.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from verl_prefix.core.calls import Spans
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.prefix_cache import LayerKey, ReadPrefix
from verl_prefix.core.runs import end_of
from verl_prefix.core.states import SegmentKind


class Scanned(NamedTuple):
    """Results of a scan of n segments.

    Attributes:
        outputs: [t, ...], of their tokens.
        states: [n, ...], after the last token of each.
    """

    outputs: torch.Tensor
    states: torch.Tensor


# (inputs [t, ...] each, their n segments, states [n, ...] from which these start; None: zeros) -> Scanned
Scan = Callable[[Sequence[torch.Tensor], Spans, torch.Tensor | None], Scanned]


def shared_scan(
    forward_context: ForwardContext, key: LayerKey, inputs: Sequence[torch.Tensor], scan: Scan, neutral: Sequence[float]
) -> torch.Tensor:
    """Outputs [T, ...] of a recurrence over the pass's segments, whose suffixes start from their prefix's state.

    Args:
        key: the layer's, for the prefix cache.
        inputs: [T, ...] each, of every token.
        scan: the recurrence.
        neutral: one value per input; a token of these inputs leaves the state as it is. For `on_recurrence` alone.
    """
    packed_row = forward_context.packed_row
    suffixes, device = packed_row.state_index.suffixes, inputs[0].device
    num_strand_tokens = packed_row.num_strand_tokens
    parts, states = [], None
    if num_strand_tokens:
        inherited = _initial_states(forward_context, key, "strands", device)
        outputs, states = _scan_strands(packed_row, inputs, scan, inherited)
        if forward_context.own_cache is not None:
            outputs = forward_context.own_cache.capture(key, states, other_outputs=(outputs,))[-1]
        parts.append(outputs)
    if suffixes.lens:
        initial = _initial_states(forward_context, key, "suffixes", device, states)
        parts.append(scan([x[num_strand_tokens:] for x in inputs], suffixes, initial).outputs)
    out = torch.cat(parts)

    def whole(row: Sequence[torch.Tensor], shift: int) -> torch.Tensor:
        pairs = zip(row, neutral, strict=True)
        filled = [torch.cat([x.new_full((shift, *x.shape[1:]), fill), x]) for x, fill in pairs]
        length = len(filled[0])
        return scan(filled, Spans((0, length), (0, length)), None).outputs[shift:]

    forward_context.on_recurrence(key, inputs, whole, out)
    return out


def _scan_strands(
    packed_row: PackedRow, inputs: Sequence[torch.Tensor], scan: Scan, inherited: torch.Tensor | None
) -> Scanned:
    """Outputs of all strands' tokens, and the states after the packed row's `state_paths`, in their order.

    Args:
        inherited: [strands, ...], the states from which strands start that continue strands of passes around; None:
            there are no such strands.
    """
    outputs: dict[int, torch.Tensor] = {}  # of each run, by its start
    states: dict[int, torch.Tensor] = {}  # by the end of the path after which each is
    first, strands = packed_row.source.own_start, packed_row.segments[: packed_row.num_strands]
    if inherited is not None:
        # Zeros after no path, and after one that ends in this packed row: a round replaces these before runs read them.
        states = {end_of(strand.path): state for strand, state in zip(strands, inherited, strict=True)}
    for runs, spans in packed_row.state_index.rounds:
        # Without passes around, all runs of the first round start from zeros, all others from states.
        initial = torch.stack([states[run.after] for run in runs]) if states else None
        run_inputs = [torch.cat([x[run.start - first : run.end - first] for run in runs]) for x in inputs]
        scanned = scan(run_inputs, spans, initial)
        for run, out, state in zip(runs, scanned.outputs.split(spans.lens), scanned.states, strict=True):
            outputs[run.start], states[run.end] = out, state
    return Scanned(
        torch.cat([outputs[start] for start in sorted(outputs)]),
        torch.stack([states[end] for end in packed_row.state_index.numbers]),
    )


def shared_conv(
    forward_context: ForwardContext, key: LayerKey, x: torch.Tensor, width: int,
    conv: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Causal convolution [T, D] of the pass's segments x [T, D], whose suffixes see the end of their prefix.

    Args:
        key: the layer's, for the prefix cache.
        width: tokens that an output sees, itself included.
        conv: the convolution of t tokens, with zeros in front of them: [t, D] -> [t, D].
    """
    packed_row, tail_len = forward_context.packed_row, width - 1
    num_strands = packed_row.num_strands
    tails = inherited = None
    if num_strands:
        inherited = _initial_states(forward_context, key, "strands", x.device)
        tails = _last_inputs(packed_row, x, tail_len, inherited)
        if forward_context.own_cache is not None:
            # Strands below go on from the `tails` that are not captured: autograd sends the gradients of these.
            x = forward_context.own_cache.capture(key, tails, other_outputs=(x,))[-1]
    segments = x.split([segment.length for segment in packed_row.segments])
    before = [x.new_zeros(tail_len, x.shape[-1])] * len(segments)
    for i, strand in enumerate(packed_row.segments[:num_strands]):
        if end_of(strand.path) > packed_row.source.own_start:
            assert tails is not None
            before[i] = tails[packed_row.state_index.numbers[end_of(strand.path)]]
        elif strand.path:
            assert inherited is not None
            before[i] = inherited[i]
    if (before_suffixes := _initial_states(forward_context, key, "suffixes", x.device, tails)) is not None:
        before[num_strands:] = before_suffixes.unbind()
    with_tails = conv(torch.cat([part for pair in zip(before, segments, strict=True) for part in pair]))
    lens = [n for segment in segments for n in (tail_len, len(segment))]
    out = torch.cat(with_tails.split(lens)[1::2])  # without what stands in place of the tails
    forward_context.on_recurrence(key, [x], lambda row, shift: conv(row[0]), out)
    return out


def _last_inputs(packed_row: PackedRow, x: torch.Tensor, tail_len: int, inherited: torch.Tensor | None) -> torch.Tensor:
    """[M, tail_len, D]: the last inputs of x [T, D] on each of the packed row's `state_paths`, with zeros in front
    where there are fewer; `inherited` [strands, tail_len, D] are the inputs before strands that continue strands of
    passes around."""
    index = packed_row.state_index.last_tokens(tail_len, x.device)
    after_zeros = torch.cat([x.new_zeros(1, x.shape[-1]), x])
    if inherited is not None:
        after_zeros = torch.cat([after_zeros, inherited.flatten(0, 1)])
    return after_zeros.index_select(0, index.flatten()).view(*index.shape, x.shape[-1])


def _initial_states(
    forward_context: ForwardContext, key: LayerKey, of: SegmentKind, device: torch.device,
    own: torch.Tensor | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """The state [n, ...] from which each of the pass's n strands or suffixes starts. It is zeros for a segment that
    starts from no state, and for a strand that continues another strand of this pass. None: all are zeros.

    Args:
        own: [M, ...], states that the packed row's own strands leave; None where no segment starts from these.
    """
    packed_row, caches = forward_context.packed_row, forward_context.outer_caches
    total = packed_row.num_strands if of == "strands" else len(packed_row.state_index.suffixes.lens)
    initial = None
    for level, segments, numbers in packed_row.state_index.starts(of, device):
        cache = caches[level] if level < packed_row.source.level else None
        states = own if cache is None else cache.read(key)[0]
        chosen: torch.Tensor = ReadPrefix.apply(states, numbers, cache, key)  # type: ignore[no-untyped-call]
        if len(chosen) == total:
            return chosen
        initial = chosen.new_zeros(total, *chosen.shape[1:]) if initial is None else initial
        initial = initial.index_copy(0, segments, chosen)
    return initial
