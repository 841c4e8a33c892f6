"""Segments of a packed row -> kernel calls.

In the causal call every segment reads itself. In cross calls segments read the prefix tokens before them, level by
level: neighbours with the same path are one block. Keys of a cross call are copied unless they are one run of tokens.

With a sliding window a segment is near or far. A near one fits the window together with its path, and is read as if
there were no window. A far one does not, and no kernel takes a window per segment: it is in no cross call. Instead the
last `window - 1` tokens of its path, its tail, are copied to stand before its own keys in the causal call.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from verl_prefix.core.calls import ALL, AttentionParams, Call, PrefixKeys, Spans
from verl_prefix.core.runs import (
    Path,
    Run,
    Segment,
    bounds_of,
    is_one_run,
    last_of,
    len_of,
    on_device,
    part_of,
    ranges,
    token_index,
)

Item = TypeVar("Item")
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

    Args:
        level_starts: the first token of each level of the prefix source, the packed row itself last.
    """
    builder = _CallBuilder(params, device, level_starts)
    is_far = [len_of(segment.path) + segment.length > params.seen for segment in segments]
    yield builder.causal_call(segments, is_far)
    starts = bounds_of(segment.length for segment in segments)[:-1]
    placed = zip(starts, segments, is_far, strict=True)
    yield from builder.cross_calls([(start, segment) for start, segment, far in placed if not far])


class _CallBuilder:
    """Makes the calls of one packed row, by the arguments of `calls_of`."""

    def __init__(self, params: AttentionParams, device: torch.device, level_starts: Sequence[int]) -> None:
        self._params, self._device = params, device
        self._level_bounds = list(pairwise((*level_starts, sys.maxsize)))  # first token of each level, and its end

    def causal_call(self, segments: Sequence[Segment], is_far: Sequence[bool]) -> Call:
        """The call in which every segment reads itself, and a far segment also its tail."""
        params = self._params
        num_tail = params.seen - 1
        tails = [last_of(segment.path, num_tail) if is_far[i] else () for i, segment in enumerate(segments)]
        lens = [segment.length for segment in segments]
        spans = Spans(q=bounds_of(lens), k=bounds_of(len_of(tails[i]) + n for i, n in enumerate(lens)))
        own_at: slice | torch.Tensor = ALL
        if any(tails):
            own_keys = [(end - length, length) for end, length in zip(spans.k[1:], lens, strict=True)]
            own_at = token_index(own_keys, self._device)
        window = params.window if any(is_far) else None
        prefixes = tuple(self._keys_of_tails(tails, spans.k[:-1]))
        return Call(spans, True, params.scale, window, params.softcap, own_at=own_at, prefixes=prefixes)

    def _keys_of_tails(self, tails: Sequence[Path], starts: Sequence[int]) -> Iterator[PrefixKeys]:
        """Yields the prefix keys of a call whose keys are [tail | own] of each segment, level by level, as in the
        example at `PrefixKeys`.

        Args:
            tails: of each segment; empty where it is near.
            starts: where the keys of each segment begin among the call's keys.
        """
        readers = _joined(zip(tails, starts, strict=True))  # of each tail: where the keys of its segments begin
        for level, (first, end) in enumerate(self._level_bounds):
            at, tokens, grad_tokens, copies = list[Run](), list[Run](), list[Run](), list[tuple[int, int]]()
            for tail, tail_starts in readers:
                if part := part_of(tail, first, end):
                    length, num_before = len_of(part), len_of(part_of(tail, 0, first))
                    at += [(start + num_before, length) for start in tail_starts]
                    tokens += part * len(tail_starts)
                    grad_tokens += part
                    copies.append((len(tail_starts), length))
            if at:
                index, chosen = on_device(ranges(at), self._device), on_device(ranges(tokens), self._device)
                yield PrefixKeys(index, chosen, token_index(grad_tokens, self._device), tuple(copies), level)

    def cross_calls(self, near: Sequence[tuple[int, Segment]]) -> Iterator[Call]:
        """Yields the calls in which near segments read their paths. Each call reads one level, since keys of two levels
        would have to be copied to stand beside each other.

        Args:
            near: near segments, each after the number of its first token in the packed row.
        """
        for level, (first, end) in enumerate(self._level_bounds):
            parts = [(part_of(segment.path, first, end), (start, segment.length)) for start, segment in near]
            for blocks in _blocks_of_calls(_joined(parts)):
                yield self._cross_call(blocks, level)

    def _cross_call(self, blocks: Sequence[Block], level: int) -> Call:
        """The call in which each block reads its path in `level`."""
        query_runs = [run for _, members in blocks for run in members]
        key_runs = [run for path, _ in blocks for run in path]
        spans = Spans(
            q=bounds_of(len_of(members) for _, members in blocks),
            k=bounds_of(len_of(path) for path, _ in blocks),
            q_segments=bounds_of(length for _, length in query_runs),
        )
        queries, keys = token_index(query_runs, self._device), token_index(key_runs, self._device)
        prefixes = (PrefixKeys(ALL, keys, grad_tokens=keys, level=level),)
        scale, softcap = self._params.scale, self._params.softcap
        return Call(spans, False, scale, None, softcap, queries, own_at=None, prefixes=prefixes)


def _joined(items: Iterable[tuple[Path, Item]]) -> list[tuple[Path, list[Item]]]:
    """Joins neighbours that have the same path. Items without a path are left out."""
    joined: list[tuple[Path, list[Item]]] = []
    for path, item in items:
        if joined and joined[-1][0] == path:
            joined[-1][1].append(item)
        elif path:
            joined.append((path, [item]))
    return joined


def _blocks_of_calls(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """Yields the blocks of each cross call: of all blocks if their keys are one run, since a slice needs no copy. Else
    neighbours share a call, up to `_MAX_COPIED` keys and `_MAX_JOINED` queries; a longer block has one of its own."""
    if not blocks:
        return
    first = num_keys = num_queries = 0  # of the next call: its first block, and what its blocks so far have
    if not is_one_run([run for path, _ in blocks for run in path]):
        for i, (path, members) in enumerate(blocks):
            num_keys, num_queries = num_keys + len_of(path), num_queries + len_of(members)
            if i > first and (num_keys > _MAX_COPIED or num_queries > _MAX_JOINED):
                yield blocks[first:i]
                first, num_keys, num_queries = i, len_of(path), len_of(members)
    yield blocks[first:]
