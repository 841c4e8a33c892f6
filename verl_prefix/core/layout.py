"""Groups -> one packed row: every prefix first, all suffix blocks after them; positions; and back to rows.

    row:     [ P of group 0 | P of group 1 | ... | S S S of group 0 | S S of group 1 | ... ]
    causal call:  every segment (prefix or suffix) reads itself
    cross call:   the suffix block of a group reads the group's prefix

With this order the cross call's inputs are plain slices. Nothing is copied but token ids: everything is an index into
the batch's flat values, so positions continue the original ones and outputs scatter back to where they belong.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch

from verl_prefix.core.groups import Group


def _built_once() -> Any:
    """A field that holds what was made of the others, for all layers of a pass."""
    return field(default_factory=dict, init=False, repr=False, compare=False)


class Segment(NamedTuple):
    """A prefix, or one row's suffix, which reads `prefix_len` tokens of the prefix source from `prefix_start` on: the
    source's prefix number `prefix`, counted from 0; -1 where there is none. `rows` of the batch have these tokens."""

    length: int
    prefix_start: int = 0
    prefix_len: int = 0
    prefix: int = -1
    rows: int = 1


class Forks(NamedTuple):
    """Pairs of a suffix and the prefix that it continues, each by its number: the layout's `suffixes` [n] int64, the
    source's `prefixes` [n] int64."""

    suffixes: torch.Tensor
    prefixes: torch.Tensor


@dataclass(frozen=True)
class Spans:
    """Pairs of a query segment and the key segment that it reads, as cumulative bounds from the first token on.

    `q` and `k` hold n + 1 increasing ints for n pairs; no segment is empty, since an empty one kills the CPU kernel.
    `q_parts` refines `q` where a query segment is made of several rows: a kernel that goes part by part computes each
    row alike whatever rows stand beside it, to the bit.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    q_parts: tuple[int, ...] = ()
    _cu_seqlens: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = _built_once()

    def __post_init__(self) -> None:
        assert len(self.q) == len(self.k), (self.q, self.k)
        for bounds in (self.q, self.k):
            assert all(b > a for a, b in pairwise(bounds)), f"empty segment in {bounds}"

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        return zip(self.q, self.q[1:], self.k, self.k[1:], strict=False)

    def parts(self) -> Iterator[tuple[int, int, int, int]]:
        """As iteration, but by `q_parts`: (query start, query end, key start, key end)."""
        pair = 0
        for start, end in pairwise(self.q_parts or self.q):
            pair += start == self.q[pair + 1]
            yield start, end, self.k[pair], self.k[pair + 1]

    @functools.cached_property
    def lens(self) -> list[int]:
        """Of the query segments."""
        return [b - a for a, b in pairwise(self.q)]

    @functools.cached_property
    def max_q(self) -> int:
        return max(self.lens)

    @functools.cached_property
    def max_k(self) -> int:
        return max(b - a for a, b in pairwise(self.k))

    def cu_seqlens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [n + 1] on `device`, built once for all layers."""
        if device not in self._cu_seqlens:
            q, k = (on_device(torch.tensor(bounds, dtype=torch.int32), device) for bounds in (self.q, self.k))
            self._cu_seqlens[device] = q, k
        return self._cu_seqlens[device]


class Keys(NamedTuple):
    """Tokens `tokens` of the prefix source, which are keys `at` of a call: slices, or int64 indices [n]."""

    at: slice | torch.Tensor
    tokens: slice | torch.Tensor


@dataclass(frozen=True)
class Call:
    """One kernel call of a layer: queries `queries` of the layout, and the keys that they read.

    `own`: which of the call's keys the layout's own [T] are, in their order; None: none. `prefix`: those of the prefix
    source, or None. Where the tokens have gaps, indices stand for slices, and copies for views.
    """

    spans: Spans
    queries: slice | torch.Tensor
    own: slice | torch.Tensor | None
    prefix: Keys | None
    causal: bool
    window: int | None = None

    def keys(self, own: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        """Keys or values [n, K, D] of the call, from the layout's own [T, K, D] and the prefix source's [P, K, D]."""
        if self.prefix is None:
            return own
        if self.own is None:
            return prefix[self.prefix.tokens]
        keys = own.new_empty(self.spans.k[-1], *own.shape[1:])
        keys[self.own] = own
        keys[self.prefix.at] = prefix[self.prefix.tokens]
        return keys


ALL = slice(None)


@dataclass(frozen=True)
class Layout:
    """One packed row of T tokens, of which the first `num_prefix` are prefixes.

    `index` [T] (int64) says which token of the batch's flat values each one is. A segment's prefix is counted in the
    prefix source: this row itself, or for a wave (which has no prefixes) the prefix row of phase A. `read` [n] (int64)
    are the suffix tokens whose outputs are read; None: all.
    """

    index: torch.Tensor
    num_prefix: int
    segments: tuple[Segment, ...]
    read: torch.Tensor | None = None
    _calls: dict[tuple[int | None, torch.device], tuple[Call, ...]] = _built_once()
    _forks: dict[torch.device, Forks] = _built_once()

    @property
    def num_tokens(self) -> int:
        return len(self.index)

    @property
    def multiplicity(self) -> torch.Tensor:
        """[T] int64: how often each token counts in the logical batch, 0 in a dummy."""
        return torch.cat([torch.full((segment.length,), segment.rows) for segment in self.segments])

    @functools.cached_property
    def num_prefixes(self) -> int:
        """Prefixes among the segments, which they open."""
        return sum(end <= self.num_prefix for end in accumulate(segment.length for segment in self.segments))

    @functools.cached_property
    def scans(self) -> tuple[Spans, Spans]:
        """Prefixes, and suffixes, each as the segments of a row of their own, which read themselves."""
        parts = self.segments[: self.num_prefixes], self.segments[self.num_prefixes :]
        bounds = [(0, *accumulate(segment.length for segment in part)) for part in parts]
        return Spans(bounds[0], bounds[0]), Spans(bounds[1], bounds[1])

    def forks(self, device: torch.device) -> Forks:
        """Suffixes that continue a prefix; built once."""
        if device not in self._forks:
            suffixes = self.segments[self.num_prefixes :]
            pairs = [(i, suffix.prefix) for i, suffix in enumerate(suffixes) if suffix.prefix >= 0]
            self._forks[device] = Forks(*on_device(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T, device))
        return self._forks[device]

    @property
    def suffix_index(self) -> torch.Tensor:
        """[n]: where the suffix tokens that are read, and so the log-probs of their successors, stand in the batch."""
        return self.index[self.num_prefix :] if self.read is None else self.index[self.read]

    def reading(self, is_read: torch.Tensor) -> "Layout":
        """The layout whose outputs are those of the batch's tokens `is_read` [N] (bool), of one token at least: a
        backward needs something to start from."""
        read = self.num_prefix + is_read[self.index[self.num_prefix :]].nonzero()[:, 0]
        return replace(self, read=read if len(read) else torch.tensor([self.num_prefix]))

    def calls(self, window: int | None, device: torch.device) -> tuple[Call, ...]:
        """A layer's kernel calls, the first over all queries, where a query sees `window` tokens, itself included
        (None: all before it); built once.

        A row that the window covers whole is read as without one. The suffix of any other row is far: it reads its
        last `window - 1` prefix keys in the causal call, behind a copy of them, since no kernel takes a window per row.
        """
        if (window, device) not in self._calls:
            self._calls[window, device] = tuple(self._calls_of(window, device))
        return self._calls[window, device]

    def _calls_of(self, window: int | None, device: torch.device) -> Iterator[Call]:
        segments = self.segments
        seen = sys.maxsize if window is None else window
        far = [s.prefix_len + s.length > seen for s in segments]
        tail_lens = [min(s.prefix_len, seen - 1) if is_far else 0 for s, is_far in zip(segments, far, strict=True)]
        starts = (0, *accumulate(s.length for s in segments))
        key_ends = tuple(accumulate(n + s.length for n, s in zip(tail_lens, segments, strict=True)))
        own: slice | torch.Tensor = ALL
        tails = None
        if any(tail_lens):  # the call's keys are [tail | own] of each segment
            ends = list(zip(segments, tail_lens, key_ends, strict=True))
            own = on_device(_ranges([(end - s.length, s.length) for s, _, end in ends]), device)
            at = on_device(_ranges([(end - s.length - n, n) for s, n, end in ends]), device)
            tokens = on_device(_ranges([(s.prefix_start + s.prefix_len - n, n) for s, n, _ in ends]), device)
            tails = Keys(at, tokens)
        yield Call(Spans(starts, (0, *key_ends)), ALL, own, tails, causal=True, window=window if any(far) else None)
        near = [(starts[i], s) for i, s in enumerate(segments) if s.prefix_len and not far[i]]
        if near:
            blocks = [(pair, list(rows)) for pair, rows in groupby(near, key=lambda item: item[1][1:3])]
            pairs = [pair for pair, _ in blocks]
            spans = Spans(
                (0, *accumulate(sum(s.length for _, s in rows) for _, rows in blocks)),
                (0, *accumulate(prefix_len for _, prefix_len in pairs)),
                q_parts=(0, *accumulate(s.length for _, s in near)),
            )
            queries = _token_index([(start, s.length) for start, s in near], device)
            yield Call(spans, queries, None, Keys(ALL, _token_index(pairs, device)), causal=False)


def pass_order(groups: Sequence[Group]) -> list[Group]:
    """Groups to compute, those without a prefix last, so that the suffix blocks that read a prefix stay one slice."""
    return sorted((g for g in groups if g.num_suffix_tokens), key=lambda group: group.prefix_len == 0)


def prefix_starts(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """First token of each group's prefix in a row of them all, and its number among those with tokens, else -1."""
    starts = accumulate((group.prefix_len for group in groups), initial=0)
    numbers = accumulate((group.prefix_len > 0 for group in groups), initial=0)
    return [
        (start, number if group.prefix_len else -1)
        for group, start, number in zip(groups, starts, numbers, strict=False)
    ]


def build_layout(
    groups: Sequence[Group],
    offsets: Sequence[int],
    starts: Sequence[tuple[int, int]] | None = None,
    suffixes: bool = True,
) -> Layout:
    """The packed row of `groups`, best in `pass_order`. Where that is nothing, a dummy: one token of the batch that
    reads itself, which keeps a rank's collectives in step.

    Args:
        offsets: first token of each row in the batch's flat values (nested `offsets()`).
        starts: None for a row with its prefixes. For a wave: the `prefix_starts` of its groups in the prefix row of
            phase A; the wave then has suffixes only and reads the prefix cache.
        suffixes: False for phase A: prefixes alone.
    """
    prefixes = [group for group in groups if group.prefix_len and starts is None]
    pieces = [
        (int(offsets[group.rows[0]]), Segment(group.prefix_len, rows=sum(n > 0 for n in group.suffix_lens)))
        for group in prefixes
    ]
    num_prefix = sum(group.prefix_len for group in prefixes)
    if suffixes:
        pieces += [
            (int(offsets[row]) + group.prefix_len, Segment(suffix_len, start, group.prefix_len, number))
            for group, (start, number) in zip(groups, prefix_starts(groups) if starts is None else starts, strict=True)
            for row, suffix_len in zip(group.rows, group.suffix_lens, strict=True)
            if suffix_len
        ]
    if not pieces:
        return Layout(torch.zeros(1, dtype=torch.int64), 0, (Segment(1, rows=0),))
    index = _ranges([(start, segment.length) for start, segment in pieces])
    return Layout(index, num_prefix, tuple(segment for _, segment in pieces))


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor's copy on `device`, for which the host does not wait."""
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _ranges(pieces: Sequence[tuple[int, int]]) -> torch.Tensor:
    """int64 indices of (start, length) pieces, one after the other."""
    return torch.cat([torch.arange(start, start + length) for start, length in pieces])


def _token_index(pieces: Sequence[tuple[int, int]], device: torch.device) -> slice | torch.Tensor:
    """`_ranges` on `device`, or a slice where there are no gaps, so that nothing is copied."""
    if all(a + n == b for (a, n), (b, _) in pairwise(pieces)):
        return slice(pieces[0][0], sum(pieces[-1]))
    return on_device(_ranges(pieces), device)
