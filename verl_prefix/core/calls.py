"""Segments of a packed row -> kernel calls: which queries read which keys.

In the causal call every segment reads itself. In cross calls segments read the prefix tokens before them, level by
level: neighbours with the same path are one block. Keys of a cross call are copied unless they are one run of tokens.
"""

import functools
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, NamedTuple

import torch


def built_once() -> Any:
    """Declares a dataclass field that holds what is built from the other fields, once for all layers of a pass."""
    return field(default_factory=dict, init=False, repr=False, compare=False)


Run = tuple[int, int]  # start and length
# The tokens before a segment, in their order, as runs of tokens of the prefix source.
Path = tuple[Run, ...]


class Segment(NamedTuple):
    """A strand or a suffix: `length` tokens of a packed row that read `path`, and then themselves."""

    length: int
    path: Path = ()


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
        """A bound of `lens`, of at least 2: for 1 flash attention decodes by other kernels, and a row's bits would
        depend on the longest row beside it."""
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
    """Keys of a call that come from one level of the prefix source. `at`, `tokens` and `grad_at` are slices, or int64
    indices [n].

    A window copies a path's tail once for each segment that reads it. Example: 3 suffixes read the same 4-token tail.
    `tokens` has 12 entries, `copies` is ((3, 4),), and `grad_at` names the 4 tokens once. `summed` adds the 3 copies in
    fp32 first.

    Attributes:
        at: where these keys stand among the call's keys.
        tokens: the tokens of the level whose keys they are.
        grad_at: the tokens of the level to which the gradients that `summed` returns belong. A token may be there
            several times, once for each block that reads it.
        copies: (times, length) of each set of copies, in the order of `tokens`; empty: there are no copies.
        level: 0: the outermost phase A; the last level is the packed row itself.
    """

    at: slice | torch.Tensor
    tokens: slice | torch.Tensor
    grad_at: slice | torch.Tensor
    copies: tuple[tuple[int, int], ...] = ()
    level: int = 0

    def summed(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradients of keys `at` [n, K, D] -> of tokens `grad_at`; sums over copies are in fp32 (fp64)."""
        if not self.copies:
            return grad
        wide = torch.promote_types(grad.dtype, torch.float32)
        sets = zip(grad.split([times * n for times, n in self.copies]), self.copies, strict=True)
        return torch.cat([copies.unflatten(0, (times, n)).sum(0, dtype=wide) for copies, (times, n) in sets])


ALL = slice(None)


class Call(NamedTuple):
    """One kernel call of a layer: which queries read which keys, and how scores are made.

    By default queries and keys are all tokens of the packed row. Where the chosen tokens have gaps, `queries`, `own`
    and `prefixes` hold int64 indices instead of slices, and keys are copies instead of views.

    Attributes:
        spans: which of the call's queries read which of its keys.
        causal: a span's last query reads up to its last key, the query before it up to the key before, and so on.
            False: every query reads all keys of its span.
        scale, softcap: as in `AttentionParams`.
        window: each query reads only the last `window` keys that `causal` lets it read; None: all of them.
        queries: the packed row's tokens that are the call's queries.
        own: where all keys of the packed row stand among the call's keys, in their order; None: the call reads one
            level alone, which may be this packed row's own strands (the last one).
        prefixes: what the call reads of each level of the prefix source.
    """

    spans: Spans
    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    queries: slice | torch.Tensor = ALL
    own: slice | torch.Tensor | None = ALL
    prefixes: tuple[PrefixKeys, ...] = ()

    def keys(self, levels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Keys or values [n, K, D] of the call, of `levels`: [P, K, D] of each phase A around, and last those of the
        packed row itself, [T, K, D]."""
        own = levels[-1]
        if not self.prefixes:  # then `self.own` is all of them
            return own
        if self.own is None:
            (prefix,) = self.prefixes
            return levels[prefix.level][prefix.tokens]
        keys = own.new_empty(self.spans.k[-1], *own.shape[1:])
        keys[self.own] = own
        for prefix in self.prefixes:
            keys[prefix.at] = levels[prefix.level][prefix.tokens]
        return keys


# A path, and (first token in the packed row, number of tokens) of each of the neighbours with that path.
Block = tuple[Path, list[Run]]
# Of a call of several blocks: the most keys, which it copies (16 MiB of keys and values at 8 heads of 128 in bf16, and
# in backward four times as much, where flash-attn repeats them per query head); and the most queries. A block with more
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
    tail_lens = [min(len_of(s.path), params.seen - 1) if far else 0 for s, far in zip(segments, is_far, strict=True)]
    key_ends = tuple(accumulate(n + s.length for n, s in zip(tail_lens, segments, strict=True)))
    own, tails = _after_tails(segments, tail_lens, key_ends, device, level_starts) if any(tail_lens) else (ALL, ())
    spans = Spans((0, *accumulate(s.length for s in segments)), (0, *key_ends))
    window = params.window if any(is_far) else None
    return Call(spans, True, params.scale, window, params.softcap, own=own, prefixes=tails)


def _cross_calls(
    near: Sequence[tuple[int, Segment]], params: AttentionParams, device: torch.device, level_starts: Sequence[int]
) -> Iterator[Call]:
    """Yields the calls in which near segments, each after its first token's number, read their paths; one level after
    the other, since keys of two levels would have to be copied to stand beside each other."""
    for level, (first, end) in enumerate(pairwise((*level_starts, sys.maxsize))):
        parts = [(_part_of(segment.path, first, end), (start, segment.length)) for start, segment in near]
        by_path = groupby((part for part in parts if part[0]), key=lambda part: part[0])
        all_blocks = [(path, [member for _, member in same]) for path, same in by_path]
        for blocks in _blocks_of_calls(all_blocks):
            paths, members = zip(*blocks, strict=True)
            segments_read = list(chain(*members))
            q, k = ((0, *accumulate(map(len_of, runs))) for runs in (members, paths))
            spans = Spans(q, k, q_segments=(0, *accumulate(n for _, n in segments_read)))
            queries, keys = _token_index(segments_read, device), _token_index(list(chain(*paths)), device)
            prefixes = (PrefixKeys(ALL, keys, grad_at=keys, level=level),)
            yield Call(spans, False, params.scale, None, params.softcap, queries, own=None, prefixes=prefixes)


def _part_of(path: Path, first: int, end: int) -> Path:
    """What a path has of tokens `first` to `end` of the prefix source, counted from `first`."""
    bounds = ((max(start, first), min(start + n, end)) for start, n in path)
    return tuple((start - first, until - start) for start, until in bounds if start < until)


# By level: where keys stand in a call, and which of the level's tokens they belong to.
_ByLevel = dict[int, tuple[list[Run], list[Run]]]


def _by_level(runs: Sequence[Run], level_starts: Sequence[int], first: int) -> _ByLevel:
    """Splits runs of tokens of the prefix source, whose keys stand one after the other in a call, from `first` on."""
    by_level: _ByLevel = {}
    level_ends = (*level_starts[1:], sys.maxsize)
    for start, length in runs:
        while length:
            level = bisect_right(level_starts, start) - 1
            n = min(length, level_ends[level] - start)
            at, tokens = by_level.setdefault(level, ([], []))
            at.append((first, n))
            tokens.append((start - level_starts[level], n))
            first, start, length = first + n, start + n, length - n
    return by_level


def _after_tails(
    segments: Sequence[Segment], tail_lens: Sequence[int], key_ends: Sequence[int], device: torch.device,
    level_starts: Sequence[int],
) -> tuple[torch.Tensor, tuple[PrefixKeys, ...]]:  # fmt: skip
    """`own` and `prefixes` of a causal call whose keys are [tail | own] of each segment, a tail being the end of its
    path."""
    ends = list(zip(segments, tail_lens, key_ends, strict=True))
    own = on_device(ranges([(end - s.length, s.length) for s, _, end in ends]), device)
    tails = [(end - s.length - n, last_of(s.path, n)) for s, n, end in ends if n]
    split = [_by_level(tail, level_starts, first) for first, tail in tails]
    siblings = [list(same) for _, same in groupby(range(len(tails)), key=lambda i: tails[i][1])]
    prefixes = []
    for level in sorted({level for by_level in split for level in by_level}):
        at = [run for by_level in split for run in by_level.get(level, ([], []))[0]]
        tokens = [run for by_level in split for run in by_level.get(level, ([], []))[1]]
        shared = [(split[same[0]][level][1], len(same)) for same in siblings if level in split[same[0]]]
        grad_at = _token_index([run for runs, _ in shared for run in runs], device)
        copies = tuple((times, sum(n for _, n in runs)) for runs, times in shared)
        index, chosen = (on_device(ranges(runs), device) for runs in (at, tokens))
        prefixes.append(PrefixKeys(index, chosen, grad_at, copies, level))
    return own, tuple(prefixes)


def _blocks_of_calls(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """Yields the blocks of each cross call: all where no key is copied, else one, or several short ones."""
    first = num_keys = num_queries = 0
    if not _is_one_run([run for path, _ in blocks for run in path]):
        for i, (path, members) in enumerate(blocks):
            num_keys, num_queries = num_keys + len_of(path), num_queries + len_of(members)
            if i > first and (num_keys > _MAX_COPIED or num_queries > _MAX_JOINED):
                yield blocks[first:i]
                first, num_keys, num_queries = i, len_of(path), len_of(members)
    if blocks:
        yield blocks[first:]


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to `device`; the host does not wait for the copy."""
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def ranges(runs: Sequence[Run]) -> torch.Tensor:
    """int64 indices of the tokens of (start, length) runs, one after the other."""
    return torch.cat([torch.arange(0), *(torch.arange(start, start + n) for start, n in runs)])


def _is_one_run(runs: Sequence[Run]) -> bool:
    return all(a + n == b for (a, n), (b, _) in pairwise(runs))


def _token_index(runs: Sequence[Run], device: torch.device) -> slice | torch.Tensor:
    """`ranges` on `device`, or a slice where there are no gaps, so that nothing is copied."""
    return slice(runs[0][0], sum(runs[-1])) if _is_one_run(runs) else on_device(ranges(runs), device)


def end_of(path: Path) -> int:
    """Names a path by its end: the token of the prefix source that follows its last one, 0 where the path is empty. A
    token of the prefix source has one history, so that paths with the same end are equal."""
    return sum(path[-1]) if path else 0


def len_of(runs: Sequence[Run]) -> int:
    """Number of tokens of (start, length) runs."""
    return sum(n for _, n in runs)


def last_of(path: Path, length: int) -> Path:
    """The last `length` tokens of a path."""
    runs: list[Run] = []
    for start, n in reversed(path):
        taken = min(n, length)
        length -= taken
        if taken:
            runs.insert(0, (start + n - taken, taken))
    return tuple(runs)
