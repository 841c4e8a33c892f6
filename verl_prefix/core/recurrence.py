"""Recurrent layers (linear attention, state spaces, short convolutions): a suffix goes on from its prefix's state.

    scan          prefixes from zero -> a state each [N, ...]; every suffix starts from its prefix's
    convolution   [tail | P] [tail | S] [tail | S]      tail: the last width - 1 inputs before the segment, or zeros

Where attention hands on keys and values of P tokens, these layers hand on one state. A packed pass does both in one
graph; in phase A the prefix cache keeps the states, a wave reads them, and the gradients of all forks of a state add up
in fp32 (fp64) before one prefix backward.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from verl_prefix.core.attention import AttentionPass
from verl_prefix.core.groups import rows_by_key
from verl_prefix.core.layout import Forks, Spans
from verl_prefix.core.prefix_cache import Key, PrefixCache


class Scanned(NamedTuple):
    """Results of a scan of n segments: outputs [t, ...] of their tokens, and their final states [n, ...]."""

    outputs: torch.Tensor
    states: torch.Tensor


# (inputs [t, ...] each, their n segments, initial states [n, ...]; None: zeros) -> Scanned
Scan = Callable[[Sequence[torch.Tensor], Spans, torch.Tensor | None], Scanned]


def shared_scan(
    attention_pass: AttentionPass, key: Key, inputs: Sequence[torch.Tensor], scan: Scan, neutral: Sequence[float]
) -> torch.Tensor:
    """Outputs [T, ...] of a recurrence over the pass's segments, whose suffixes start from their prefix's state.

    Args:
        key: the layer's, for the prefix cache. inputs: [T, ...] each, of every token.
        neutral: the inputs of a token that leaves the state as it is.
    """

    def whole(row: Sequence[torch.Tensor], shift: int) -> torch.Tensor:
        filled = [torch.cat([x.new_full((shift, *x.shape[1:]), fill), x]) for x, fill in zip(row, neutral, strict=True)]
        length = len(filled[0])
        return scan(filled, Spans((0, length), (0, length)), None).outputs[shift:]

    prefixes, suffixes = attention_pass.layout.scans
    split = attention_pass.layout.num_prefix
    parts, states = [], None
    if prefixes.lens:
        outputs, states = scan([x[:split] for x in inputs], prefixes, None)
        if attention_pass.capture is not None:
            outputs = attention_pass.capture.capture(key, states, beside=(outputs,))[-1]
        parts.append(outputs)
    if suffixes.lens:
        initial = _continued(attention_pass, key, states, inputs[0].device)
        parts.append(scan([x[split:] for x in inputs], suffixes, initial).outputs)
    out = torch.cat(parts)
    attention_pass.recurred(key, inputs, whole, out)
    return out


def shared_conv(
    attention_pass: AttentionPass, key: Key, x: torch.Tensor, width: int, conv: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Causal convolution [T, D] of the pass's segments x [T, D], whose suffixes see the end of their prefix.

    Args:
        key: the layer's, for the prefix cache. width: tokens that an output sees, itself included.
        conv: causal convolution of one row [t, D] -> [t, D], with zeros in front of it.
    """
    num, tail_len = attention_pass.layout.num_prefixes, width - 1
    pieces = x.split([segment.length for segment in attention_pass.layout.segments])
    tails: torch.Tensor | None = None
    if num:
        tails = torch.stack([F.pad(p[-tail_len:], (0, 0, max(tail_len - len(p), 0), 0)) for p in pieces[:num]])
        if attention_pass.capture is not None:
            x = attention_pass.capture.capture(key, tails, beside=(x,))[-1]
            pieces = x.split([len(piece) for piece in pieces])
    before = [x.new_zeros(tail_len, x.shape[-1])] * len(pieces)
    if (continued := _continued(attention_pass, key, tails, x.device)) is not None:
        before[num:] = continued.unbind()
    row = conv(torch.cat([part for pair in zip(before, pieces, strict=True) for part in pair]))
    lens = [n for piece in pieces for n in (tail_len, len(piece))]
    out = torch.cat(row.split(lens)[1::2])
    attention_pass.recurred(key, [x], lambda row, shift: conv(row[0]), out)
    return out


def _continued(
    attention_pass: AttentionPass, key: Key, states: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """[suffixes, ...]: the state from which each suffix of the pass starts; None where all start from zero.

    Args:
        states: [N, ...], those of this row's own prefixes; None in a wave.
    """
    layout, cache = attention_pass.layout, attention_pass.cache
    forks = layout.forks(device)
    if not len(forks.suffixes):
        return None
    if cache is not None:
        (states,) = cache.read(key)
    num_suffixes = len(layout.segments) - layout.num_prefixes
    starts: torch.Tensor = _Fork.apply(states, forks, num_suffixes, cache, key)  # type: ignore[no-untyped-call]
    return starts


class _Fork(torch.autograd.Function):
    """States [N, ...] -> those that n suffixes start from [n, ...], zeros where a suffix has no prefix. Gradients go to
    the grad cache in a wave, else to the states."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, forks: Forks, num_suffixes: int, cache: PrefixCache | None, key: Key
    ) -> torch.Tensor:
        ctx.args = forks, cache, key, states.shape, states.dtype
        chosen = states.index_select(0, forks.prefixes)
        if len(forks.suffixes) == num_suffixes:
            return chosen
        return states.new_zeros(num_suffixes, *states.shape[1:]).index_copy(0, forks.suffixes, chosen)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        forks, cache, key, shape, dtype = ctx.args
        grad = grad.index_select(0, forks.suffixes)
        if cache is not None:
            cache.add_grad(key, forks.prefixes, grad)
            return None, None, None, None, None
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros(shape, dtype=wide, device=grad.device).index_add_(0, forks.prefixes, grad.to(wide))
        return total.to(dtype), None, None, None, None


# ([n, longest, ...] of each input, states [n, ...] that they start from) -> outputs and final states, alike
RowScan = Callable[[Sequence[torch.Tensor], torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def scan_rows(
    scan: RowScan, fills: Sequence[float], inputs: Sequence[torch.Tensor], segments: Spans,
    initial: torch.Tensor | None,
) -> Scanned:  # fmt: skip
    """A `Scan` by a kernel that takes rows, which are padded behind with `fills`: segments of up to 64 tokens, about a
    kernel's chunk, together, of up to 128, and so on. One long response among many short ones would pad each of them
    to its length."""
    lens = segments.lens
    pieces = [x.split(lens) for x in inputs]
    outputs, states = list(pieces[0]), [inputs[0]] * len(lens)
    starts = None if initial is None else initial.unbind()
    for members in rows_by_key(max(length - 1, 63).bit_length() for length in lens).values():
        longest = max(lens[i] for i in members)
        rows = [
            torch.stack([F.pad(p[i], (0, 0) * (p[i].ndim - 1) + (0, longest - lens[i]), value=fill) for i in members])
            for p, fill in zip(pieces, fills, strict=True)
        ]
        scanned = scan(rows, None if starts is None else torch.stack([starts[i] for i in members]))
        for i, row, state in zip(members, *scanned, strict=True):
            outputs[i], states[i] = row[: lens[i]], state
    return Scanned(torch.cat(outputs), torch.stack(states))
