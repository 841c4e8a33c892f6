"""Segments of a packed row -> kernel calls: which queries read which keys.

In the causal call every segment reads itself. In a cross call blocks of segments read the prefix tokens before them,
which are copied where they are not one run of tokens.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch


def built_once() -> Any:
    """Declares a dataclass field that holds what is built from the other fields, once for all layers of a pass."""
    return field(default_factory=dict, init=False, repr=False, compare=False)


# (start, length) pieces of a row of tokens, in the order in which they are read.
Pieces = tuple[tuple[int, int], ...]


class Segment(NamedTuple):
    """A strand, or one row's suffix. Its tokens read the pieces `path` of the prefix source, and then themselves."""

    length: int
    path: Pieces = ()

    @property
    def path_len(self) -> int:
        return sum(length for _, length in self.path)


@dataclass(frozen=True)
class Spans:
    """Pairs of a query segment and the key segment that it reads, as cumulative bounds from the first token on.

    `q` and `k` hold n + 1 increasing ints for n pairs; no segment is empty, since an empty one crashes the CPU kernel.
    `q_parts` refines `q` where a query segment consists of several rows. The reference kernel, and the CPU kernel in
    its forward, go part by part, so that the rows beside a row do not change its bits.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    q_parts: tuple[int, ...] = ()
    _cu_seqlens: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = built_once()

    def __post_init__(self) -> None:
        assert len(self.q) == len(self.k), (self.q, self.k)
        for bounds in (self.q, self.k):
            assert all(b > a for a, b in pairwise(bounds)), f"empty segment in {bounds}"

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        return zip(self.q, self.q[1:], self.k, self.k[1:], strict=False)

    def parts(self) -> Iterator[tuple[int, int, int, int]]:
        """Iterates by `q_parts` instead of `q`: (query start, query end, key start, key end)."""
        pair = 0
        for start, end in pairwise(self.q_parts or self.q):
            pair += start == self.q[pair + 1]
            yield start, end, self.k[pair], self.k[pair + 1]

    @functools.cached_property
    def lens(self) -> list[int]:
        """Lengths of the query segments."""
        return [b - a for a, b in pairwise(self.q)]

    @functools.cached_property
    def max_q(self) -> int:
        return max(self.lens)

    @functools.cached_property
    def max_k(self) -> int:
        return max(b - a for a, b in pairwise(self.k))

    def cu_seqlens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Bounds `q` and `k`, each int32 [n + 1] on `device`, built once for all layers."""
        if device not in self._cu_seqlens:
            q, k = (on_device(torch.tensor(bounds, dtype=torch.int32), device) for bounds in (self.q, self.k))
            self._cu_seqlens[device] = q, k
        return self._cu_seqlens[device]


class Keys(NamedTuple):
    """Prefix keys of a call: its keys `at` are tokens `tokens` of the prefix source. Slices, or int64 indices [n].

    Where segments have copies of the same keys, `copies` says (times, tokens) of each block of them, and `once` are
    `tokens` without the copies."""

    at: slice | torch.Tensor
    tokens: slice | torch.Tensor
    once: slice | torch.Tensor
    copies: tuple[tuple[int, int], ...] = ()

    def summed(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradients of keys `at` [n, K, D] -> of tokens `once`; sums over copies are in fp32 (fp64)."""
        if not self.copies:
            return grad
        wide = torch.promote_types(grad.dtype, torch.float32)
        blocks = zip(grad.split([times * n for times, n in self.copies]), self.copies, strict=True)
        return torch.cat([block.unflatten(0, copies).sum(0, dtype=wide) for block, copies in blocks])


@dataclass(frozen=True)
class Call:
    """One kernel call of a layer: queries `queries` of the layout, and the keys that they read.

    `own` says which of the call's keys are the layout's own tokens [T], in their order; None: none are. `prefix` says
    which come from the prefix source; None: none do. Where tokens have gaps, `queries`, `own` and `prefix` hold indices
    instead of slices, and keys are copies instead of views.
    """

    spans: Spans
    queries: slice | torch.Tensor
    own: slice | torch.Tensor | None
    prefix: Keys | None
    causal: bool
    window: int | None = None

    def keys(self, own: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        """Keys or values [n, K, D] of the call, from the layout's own [T, K, D] and the prefix source's [P, K, D]."""
        if self.prefix is None:  # then `self.own` is all of them
            return own
        if self.own is None:
            return prefix[self.prefix.tokens]
        keys = own.new_empty(self.spans.k[-1], *own.shape[1:])
        keys[self.own] = own
        keys[self.prefix.at] = prefix[self.prefix.tokens]
        return keys


ALL = slice(None)


def calls_of(segments: Sequence[Segment], window: int | None, device: torch.device) -> Iterator[Call]:
    """Yields a layer's kernel calls on a packed row, the first over all queries.

    A segment that fits the window together with its path is read as if there were no window. Any other is far: no
    kernel takes a window per row, so the last `window - 1` keys of its path are copied to stand before its own keys,
    and the causal call reads both.
    """
    seen = sys.maxsize if window is None else window
    far = [s.path_len + s.length > seen for s in segments]
    tail_lens = [min(s.path_len, seen - 1) if is_far else 0 for s, is_far in zip(segments, far, strict=True)]
    starts = (0, *accumulate(s.length for s in segments))
    key_ends = tuple(accumulate(n + s.length for n, s in zip(tail_lens, segments, strict=True)))
    own: slice | torch.Tensor = ALL
    tails = None
    if any(tail_lens):  # the call's keys are [tail | own] of each segment
        ends = list(zip(segments, tail_lens, key_ends, strict=True))
        own = on_device(ranges([(end - s.length, s.length) for s, _, end in ends]), device)
        at = on_device(ranges([(end - s.length - n, n) for s, n, end in ends]), device)
        paths = [last_of(s.path, n) for s, n, _ in ends if n]
        tokens = on_device(ranges([piece for path in paths for piece in path]), device)
        siblings = [(path, len(list(same))) for path, same in groupby(paths)]
        once = _token_index([piece for path, _ in siblings for piece in path], device)
        tails = Keys(at, tokens, once, tuple((times, sum(n for _, n in path)) for path, times in siblings))
    yield Call(Spans(starts, (0, *key_ends)), ALL, own, tails, causal=True, window=window if any(far) else None)
    near = [(starts[i], s) for i, s in enumerate(segments) if s.path and not far[i]]
    blocks = [list(block) for _, block in groupby(near, key=lambda item: item[1].path)]
    for part in _parts(blocks):
        paths = [block[0][1].path for block in part]
        rows = [row for block in part for row in block]
        spans = Spans(
            (0, *accumulate(sum(s.length for _, s in block) for block in part)),
            (0, *accumulate(block[0][1].path_len for block in part)),
            q_parts=(0, *accumulate(s.length for _, s in rows)),
        )
        queries = _token_index([(start, s.length) for start, s in rows], device)
        keys = _token_index([piece for path in paths for piece in path], device)
        yield Call(spans, queries, None, Keys(ALL, keys, keys), causal=False)


# The most keys that a call of several blocks may copy: 16 MiB of keys and values at 8 heads of 128 in bf16, and in
# backward four times as much, where flash-attn repeats them per query head. A single block may be a run, not copied.
_MAX_COPIED = 2**12


def _parts(blocks: Sequence[list[tuple[int, Segment]]]) -> Iterator[Sequence[list[tuple[int, Segment]]]]:
    """Yields the blocks of each call: all where nothing is copied, else those of up to `_MAX_COPIED` keys, or one."""
    first, num_keys = 0, 0
    if blocks and not _is_run([piece for block in blocks for piece in block[0][1].path]):
        for i, block in enumerate(blocks):
            num_keys += block[0][1].path_len
            if i > first and num_keys > _MAX_COPIED:
                yield blocks[first:i]
                first, num_keys = i, block[0][1].path_len
    if blocks:
        yield blocks[first:]


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to `device`; the host does not wait for the copy."""
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def ranges(pieces: Sequence[tuple[int, int]]) -> torch.Tensor:
    """int64 indices of (start, length) pieces, one after the other."""
    return torch.cat([torch.arange(0), *(torch.arange(start, start + n) for start, n in pieces)])


def _is_run(pieces: Sequence[tuple[int, int]]) -> bool:
    return all(a + n == b for (a, n), (b, _) in pairwise(pieces))


def _token_index(pieces: Sequence[tuple[int, int]], device: torch.device) -> slice | torch.Tensor:
    """`ranges` on `device`, or a slice where there are no gaps, so that nothing is copied."""
    return slice(pieces[0][0], sum(pieces[-1])) if _is_run(pieces) else on_device(ranges(pieces), device)


def end_of(path: Pieces) -> int:
    """The token of the prefix source that follows the last one of a path; 0 where the path is empty."""
    return sum(path[-1]) if path else 0


def last_of(path: Pieces, length: int) -> Pieces:
    """The last `length` tokens of a path."""
    pieces: list[tuple[int, int]] = []
    for start, n in reversed(path):
        taken = min(n, length)
        length -= taken
        if taken:
            pieces.insert(0, (start + n - taken, taken))
    return tuple(pieces)
