"""Measures the layers of a packed pass against references: dense attention, and recurrences on whole rows.

Each figure is an error in units of rounding noise; `self_check` explains the units, and compares whole passes.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from verl_prefix.core.calls import AttentionParams
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.runs import ranges
from verl_prefix.engine.checks.noise import Figure, Rounding, ratio_of, sum_of_squares

# Two partial outputs and their sum are rounded where a single call rounds once: sqrt(3).
MAX_ATTENTION = 2.0
MAX_RECURRENCE = 3.0
_SHIFT = 29  # tokens before a row that moves: neither a divisor nor a multiple of a kernel's chunk
_QUERIES = 16  # compared at each end of a segment


class LayerProbe:
    """Measures the layers of one group's packed passes.

    Attributes:
        worst_attention: the largest figure of any attention layer.
        worst_recurrence: the largest figure of any recurrent layer.
    """

    def __init__(self) -> None:
        self.worst_attention = Figure(0.0, MAX_ATTENTION, "")
        self.worst_recurrence = Figure(0.0, MAX_RECURRENCE, "")
        self._rounding = Rounding()

    @torch.no_grad()
    def recurrence(
        self,
        key: Hashable,
        packed_row: PackedRow,
        inputs: Sequence[torch.Tensor],
        whole: Callable[[Sequence[torch.Tensor], int], torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Compares each segment's outputs with those of a whole row, which begins with the segment's path.

        Args:
            key: names the layer.
            inputs: of the layer, [T, ...] each.
            whole: (inputs of a row, n) -> its outputs, if n neutral tokens stand before it.
            out: the layer's outputs, [T, ...].
        """
        for path, segment in _segments(packed_row):
            row = [torch.cat([x[path.to(x.device)], x[segment]]) for x in inputs]
            truth = whole(row, 0)[len(path) :]
            moved = whole([self._rounding.disturb(x) for x in row], _SHIFT)[len(path) :]
            ratio = ratio_of(sum_of_squares(out[segment] - truth), sum_of_squares(moved - truth))
            figure = Figure(ratio, MAX_RECURRENCE, f"{key} differs from whole rows")
            self.worst_recurrence = max(self.worst_recurrence, figure)

    @torch.no_grad()
    def attention(
        self,
        layer: int,
        packed_row: PackedRow,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        """Compares the layer's output `out` with dense attention, for the first and last `_QUERIES` queries of each
        segment."""
        error = noise = 0.0
        for path, segment in _segments(packed_row):
            tokens = torch.arange(segment.start, segment.stop, device=q.device)
            queries = torch.cat([tokens[:_QUERIES], tokens[_QUERIES:][-_QUERIES:]])
            keys, values = (torch.cat([x[path.to(x.device)], x[segment]]) for x in (k, v))
            with torch.autocast(q.device.type, enabled=False):  # autocast would round the scores as well
                position = queries - segment.start + len(path)
                args = q[queries], keys, values, sinks, params, position
                truth, rounded = _dense(*args, torch.float64), _dense(*args, q.dtype)
            error += sum_of_squares(out[queries] - truth)
            noise += sum_of_squares(rounded - truth)
        where = f"attention of layer {layer} differs from dense float64"
        self.worst_attention = max(self.worst_attention, Figure(ratio_of(error, noise), MAX_ATTENTION, where))


class ProbedContext(ForwardContext):
    """A packed pass of one group whose layers a probe measures."""

    def __init__(self, *args: Any, probe: LayerProbe, **options: Any) -> None:
        super().__init__(*args, **options)
        self._probe = probe

    def on_attention(self, layer: int, *args: Any, **options: Any) -> None:
        self._probe.attention(layer, self.packed_row, *args, **options)

    def on_recurrence(self, key: Hashable, *args: Any) -> None:
        self._probe.recurrence(key, self.packed_row, *args)


def _segments(packed_row: PackedRow) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yields the tokens of each segment's path, [n] int64, and the slice of its own tokens."""
    start = 0
    for segment in packed_row.segments:
        yield ranges(segment.path), slice(start, start + segment.length)
        start += segment.length


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    params: AttentionParams,
    position: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes attention of queries at `position` among the keys, [n, H, D], with probabilities and output rounded to
    `dtype`. It converts one key head at a time, since keys may be many."""
    distance = position.unsqueeze(1) - torch.arange(k.shape[0], device=q.device)
    hidden = distance < 0 if params.window is None else (distance < 0) | (distance >= params.window)
    per_key_head = q.shape[1] // k.shape[1]
    compute = torch.promote_types(dtype, torch.float32)
    out = torch.empty_like(q, dtype=dtype)
    for key_head in range(k.shape[1]):
        keys, values = (x[:, key_head].to(compute) for x in (k, v))
        for head in range(key_head * per_key_head, (key_head + 1) * per_key_head):
            logits = q[:, head].to(compute) @ keys.T * params.scale
            if params.softcap is not None:
                logits = params.softcap * torch.tanh(logits / params.softcap)
            logits = logits.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                logits = torch.cat([logits, sinks[head].to(compute).expand(len(q), 1)], -1)
            # Kernels, too, go by a log-sum-exp of fp32 at most. In fp32 its rounding counts, more for a larger one.
            probs = (logits - logits.logsumexp(-1, keepdim=True)).exp()[:, : k.shape[0]].to(dtype).to(compute)
            out[:, head] = (probs @ values).to(dtype)
    return out
