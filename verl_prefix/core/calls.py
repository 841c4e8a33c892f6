"""Segments of a packed row -> kernel calls: which queries read which keys.

In the causal call every segment reads itself. In cross calls segments read the prefix tokens before them, level by
level: neighbours with the same path are one block. Keys of a cross call are copied unless they are one run of tokens.
Where a path and its segment together are longer than a sliding window, the segment is in no cross call. Instead the
last `window - 1` tokens of its path are copied before it in the causal call.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, NamedTuple

import torch

from verl_prefix.core.runs import (
    Path,
    Run,
    Segment,
    is_one_run,
    last_of,
    len_of,
    on_device,
    part_of,
    ranges,
    token_index,
)


def built_once() -> Any:
    """Declares a dataclass field that holds what is built from the other fields, once for all layers of a pass."""
    return field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Spans:
    """Bounds of a kernel call: queries q[i] to q[i + 1] read keys k[i] to k[i + 1].

    No span is empty, since an empty one crashes the CPU kernel.

    Attributes:
        q, k: n + 1 increasing ints for n spans, from 0 on.
        q_segments: bounds of the segments among the queries; spans have several each. The reference kernel, and the CPU
            kernel in its forward, take one segment at a time, so that the rows beside a row do not change its bits.
            Empty: as `q`.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    q_segments: tuple[int, ...] = ()
    _cu_seqlens: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = built_once()

    def __post_init__(self) -> None:
        assert len(self.q) == len(self.k), (self.q, self.k)
        for bounds in (self.q, self.k):
            assert all(b > a for a, b in pairwise(bounds)), f"empty segment in {bounds}"

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields (query start, query end, key start, key end) of each span."""
        return zip(self.q, self.q[1:], self.k, self.k[1:], strict=False)

    def by_segment(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields (query start, query end, key start, key end) of each segment, with the keys of its span."""
        span = 0
        for start, end in pairwise(self.q_segments or self.q):
            if start == self.q[span + 1]:
                span += 1
            yield start, end, self.k[span], self.k[span + 1]

    @functools.cached_property
    def lens(self) -> list[int]:
        """Numbers of queries of each span."""
        return [b - a for a, b in pairwise(self.q)]

    @functools.cached_property
    def max_q(self) -> int:
        """The queries of the longest span, but at least 2: for 1 query flash attention takes other kernels, made for
        decoding, whose bits differ."""
        return max(2, *self.lens)

    @functools.cached_property
    def max_k(self) -> int:
        return max(b - a for a, b in pairwise(self.k))

    def cu_seqlens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Bounds `q` and `k`, each int32 [n + 1] on `device`, built once for all layers."""
        if device not in self._cu_seqlens:
            q, k = (on_device(torch.tensor(bounds, dtype=torch.int32), device) for bounds in (self.q, self.k))
            self._cu_seqlens[device] = q, k
        return self._cu_seqlens[device]


class AttentionParams(NamedTuple):
    """How a layer turns queries and keys into attention scores, apart from causality.

    Attributes:
        scale: a score is this times the product of query and key.
        window: tokens that a query sees, itself included; None: all before it.
        softcap: scores become softcap * tanh(scores / softcap); None: they stay.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    @property
    def seen(self) -> int:
        """The most tokens that a query sees, itself included."""
        return sys.maxsize if self.window is None else self.window


class PrefixKeys(NamedTuple):
    """Keys of a call that come from one level of the prefix source. `at`, `strand_tokens` and `grad_tokens` are slices,
    or int64 indices [n].

    A window copies a path's tail once for each segment that reads it. Example: 3 suffixes read the same 4-token tail.
    `strand_tokens` has 12 entries, `copies` is ((3, 4),), and `grad_tokens` names the 4 tokens once. `summed` adds the
    3 copies in fp32 first.

    Attributes:
        at: where these keys stand among the call's keys.
        strand_tokens: the tokens of the level whose keys they are.
        grad_tokens: the tokens of the level to which the gradients that `summed` returns belong. A token may be there
            several times, once for each block that reads it.
        copies: (times, length) of each set of copies, in the order of `strand_tokens`; empty: there are no copies.
        level: 0: the outermost phase A; the last level is the packed row itself.
    """

    at: slice | torch.Tensor
    strand_tokens: slice | torch.Tensor
    grad_tokens: slice | torch.Tensor
    copies: tuple[tuple[int, int], ...] = ()
    level: int = 0

    def summed(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradients of keys `at` [n, K, D] -> of `grad_tokens`; sums over copies are in fp32 (fp64)."""
        if not self.copies:
            return grad
        wide = torch.promote_types(grad.dtype, torch.float32)
        sets = zip(grad.split([times * n for times, n in self.copies]), self.copies, strict=True)
        return torch.cat([copies.unflatten(0, (times, n)).sum(0, dtype=wide) for copies, (times, n) in sets])


ALL = slice(None)


class Call(NamedTuple):
    """One kernel call of a layer: which queries read which keys, and how scores are made.

                                      queries    own_at          prefixes
        causal call                   ALL        ALL             none
        causal call, window, far      ALL        where they      tails of paths, one entry for each level
          segments                               stand
        cross call                    chosen     None            one entry, of its level

    Tokens are slices, and keys views; or, where the chosen tokens have gaps, int64 indices, and keys copies.

    Attributes:
        spans: which of the call's queries read which of its keys.
        causal: a span's last query reads up to its last key, the query before it up to the key before, and so on.
            False: every query reads all keys of its span.
        scale, softcap: as in `AttentionParams`.
        window: each query reads only the last `window` keys that `causal` lets it read; None: all of them.
        queries: the packed row's tokens that are the call's queries.
        own_at: where all keys of the packed row stand among the call's keys, in their order; None: nowhere. The call
            then reads one level alone, which may be this packed row's own strands (the last one).
        prefixes: what the call reads of each level of the prefix source.
    """

    spans: Spans
    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    queries: slice | torch.Tensor = ALL
    own_at: slice | torch.Tensor | None = ALL
    prefixes: tuple[PrefixKeys, ...] = ()

    def keys(self, levels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Keys or values [n, K, D] of the call, of `levels`: [P, K, D] of each phase A around, and last those of the
        packed row itself, [T, K, D]."""
        own = levels[-1]
        if not self.prefixes:  # then `own_at` is all of them
            return own
        if self.own_at is None:
            (prefix,) = self.prefixes
            return levels[prefix.level][prefix.strand_tokens]
        keys = own.new_empty(self.spans.k[-1], *own.shape[1:])
        keys[self.own_at] = own
        for prefix in self.prefixes:
            keys[prefix.at] = levels[prefix.level][prefix.strand_tokens]
        return keys


# A path, and (first token in the packed row, number of tokens) of each of the neighbours with that path.
Block = tuple[Path, list[Run]]
# Limits of a call of several blocks: its keys, which are copied (16 MiB of keys and values at 8 heads of 128 in bf16,
# and in backward four times as much, where flash-attn repeats them per query head); and its queries. A block with more
# keeps a GPU busy by itself, and may need no copy.
_MAX_COPIED, _MAX_JOINED = 2**12, 2**9


def calls_of(
    segments: Sequence[Segment], params: AttentionParams, device: torch.device, level_starts: Sequence[int]
) -> Iterator[Call]:
    """Yields a layer's kernel calls on a packed row, the causal call over all queries first.

    A segment that fits the window together with its path is near: it is read as if there were no window. Any other
    segment is far. No kernel takes a window per segment. So the last `window - 1` keys of a far segment's path are
    copied to stand before its own keys, and the causal call reads both.

    Args:
        level_starts: the first token of each level of the prefix source, the packed row itself last.
    """
    is_far = [len_of(s.path) + s.length > params.seen for s in segments]
    yield _causal_call(segments, is_far, params, device, level_starts)
    starts = accumulate((s.length for s in segments), initial=0)
    near = [(start, s) for start, s, far in zip(starts, segments, is_far, strict=False) if s.path and not far]
    yield from _cross_calls(near, params, device, level_starts)


def _causal_call(
    segments: Sequence[Segment], is_far: Sequence[bool], params: AttentionParams, device: torch.device,
    level_starts: Sequence[int],
) -> Call:  # fmt: skip
    """The call in which every segment reads itself, and a far segment the tail of its path."""
    tails = [last_of(s.path, params.seen - 1) if far else () for s, far in zip(segments, is_far, strict=True)]
    key_ends = tuple(accumulate(len_of(tail) + s.length for tail, s in zip(tails, segments, strict=True)))
    spans = Spans((0, *accumulate(s.length for s in segments)), (0, *key_ends))
    own_at: slice | torch.Tensor = ALL
    if any(tails):
        own_at = token_index([(end - s.length, s.length) for end, s in zip(key_ends, segments, strict=True)], device)
    window = params.window if any(is_far) else None
    prefixes = _keys_of_tails(tails, spans.k, device, level_starts)
    return Call(spans, True, params.scale, window, params.softcap, own_at=own_at, prefixes=prefixes)


def _keys_of_tails(
    tails: Sequence[Path], starts: Sequence[int], device: torch.device, level_starts: Sequence[int]
) -> tuple[PrefixKeys, ...]:
    """The keys of a call whose keys are [tail | own] of each segment, where a window sees only the tail of its path.

    Args:
        tails: of each segment, the end of its path; empty where the call reads no more than the segment itself.
        starts: where the keys of each segment begin among the call's keys.
        level_starts: the first token of each level of the prefix source, the packed row itself last.
    """
    placed = [(tail, start) for tail, start in zip(tails, starts, strict=False) if tail]
    prefixes = []
    for level, (first, end) in enumerate(pairwise((*level_starts, sys.maxsize))):
        at, tokens, grad_tokens, copies = list[Run](), list[Run](), list[Run](), list[tuple[int, int]]()
        for tail, siblings in groupby(placed, key=lambda each: each[0]):
            if part := part_of(tail, first, end):
                before, length = len_of(part_of(tail, 0, first)), len_of(part)
                sibling_runs = [(start + before, length) for _, start in siblings]
                at += sibling_runs
                tokens += part * len(sibling_runs)
                grad_tokens += part
                copies.append((len(sibling_runs), length))
        if at:
            index, chosen = (on_device(ranges(runs), device) for runs in (at, tokens))
            prefixes.append(PrefixKeys(index, chosen, token_index(grad_tokens, device), tuple(copies), level))
    return tuple(prefixes)


def _cross_calls(
    near: Sequence[tuple[int, Segment]], params: AttentionParams, device: torch.device, level_starts: Sequence[int]
) -> Iterator[Call]:
    """Yields the calls in which near segments, each after its first token's number, read their paths; one level after
    the other, since keys of two levels would have to be copied to stand beside each other."""
    for level, (first, end) in enumerate(pairwise((*level_starts, sys.maxsize))):
        parts = [(part_of(segment.path, first, end), (start, segment.length)) for start, segment in near]
        by_path = groupby((part for part in parts if part[0]), key=lambda part: part[0])
        all_blocks = [(path, [member for _, member in same]) for path, same in by_path]
        for blocks in _blocks_of_calls(all_blocks):
            paths, members = zip(*blocks, strict=True)
            segments_read = list(chain(*members))
            q, k = ((0, *accumulate(map(len_of, runs))) for runs in (members, paths))
            spans = Spans(q, k, q_segments=(0, *accumulate(n for _, n in segments_read)))
            queries, keys = token_index(segments_read, device), token_index(list(chain(*paths)), device)
            prefixes = (PrefixKeys(ALL, keys, grad_tokens=keys, level=level),)
            yield Call(spans, False, params.scale, None, params.softcap, queries, own_at=None, prefixes=prefixes)


def _blocks_of_calls(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """Yields the blocks of each cross call: of all blocks if their keys are one run, since a slice needs no copy. Else
    neighbours share a call, up to `_MAX_COPIED` keys and `_MAX_JOINED` queries; a longer block has one of its own."""
    first = num_keys = num_queries = 0
    if not is_one_run([run for path, _ in blocks for run in path]):
        for i, (path, members) in enumerate(blocks):
            num_keys, num_queries = num_keys + len_of(path), num_queries + len_of(members)
            if i > first and (num_keys > _MAX_COPIED or num_queries > _MAX_JOINED):
                yield blocks[first:i]
                first, num_keys, num_queries = i, len_of(path), len_of(members)
    if blocks:
        yield blocks[first:]
