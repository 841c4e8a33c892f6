"""Segments of a packed row -> kernel calls: which queries read which keys.

In the causal call every segment reads itself. In cross calls segments read the prefix tokens before them: neighbours
with the same path are one block, and a block's path is copied where it is not one run of tokens.
"""

import functools
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
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

    @property
    def path_len(self) -> int:
        return sum(length for _, length in self.path)


@dataclass(frozen=True)
class Spans:
    """Bounds of a kernel call: queries q[i] to q[i + 1] read keys k[i] to k[i + 1].

    No span is empty, since an empty one crashes the CPU kernel.

    Attributes:
        q, k: n + 1 increasing ints for n spans, from 0 on.
        q_parts: `q` refined to one part per segment. The reference kernel, and the CPU kernel in its forward, go part
            by part, so that the rows beside a row do not change its bits. Empty: as `q`.
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
        """Yields (query start, query end, key start, key end) of each span."""
        return zip(self.q, self.q[1:], self.k, self.k[1:], strict=False)

    def parts(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields the same of each part: its queries, and the keys of its span."""
        span = 0
        for start, end in pairwise(self.q_parts or self.q):
            span += start == self.q[span + 1]
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


class PrefixKeys(NamedTuple):
    """Keys of a call that come from one part of the prefix source: a prefix cache, or the packed row itself. `at`,
    `tokens` and `grad_at` are slices, or int64 indices [n].

    Attributes:
        at: where they stand among the call's keys.
        tokens: which tokens of the part they are.
        grad_at: where what `summed` returns is added in the part. A token may be there several times, once for each
            block that reads it.
        copies: (times, length) of each set of copies, in the order of `tokens`; empty: there are none.
        part: of the prefix source, counted from the outermost cache; the last one is the packed row.
    """

    at: slice | torch.Tensor
    tokens: slice | torch.Tensor
    grad_at: slice | torch.Tensor
    copies: tuple[tuple[int, int], ...] = ()
    part: int = 0

    def summed(self, grad: torch.Tensor) -> torch.Tensor:
        """Gradients of keys `at` [n, K, D] -> of tokens `grad_at`; sums over copies are in fp32 (fp64)."""
        if not self.copies:
            return grad
        wide = torch.promote_types(grad.dtype, torch.float32)
        blocks = zip(grad.split([times * n for times, n in self.copies]), self.copies, strict=True)
        return torch.cat([block.unflatten(0, (times, n)).sum(0, dtype=wide) for block, (times, n) in blocks])


ALL = slice(None)


class Call(NamedTuple):
    """One kernel call of a layer: which queries read which keys, and how scores are made.

    By default queries and keys are all tokens of the packed row. Where the chosen tokens have gaps, `queries`, `own`
    and `prefixes` hold int64 indices instead of slices, and keys are copies instead of views; copies, too, where they
    come from several parts of the prefix source.

    Attributes:
        spans: which of the call's queries read which of its keys.
        causal: a span's last query reads up to its last key, the query before it up to the key before, and so on.
            False: every query reads all keys of its span.
        scale, softcap: as in `AttentionParams`.
        window: each query reads only the last `window` keys that `causal` lets it read; None: all of them.
        queries: the packed row's tokens that are the call's queries.
        own: where the packed row's own keys stand among the call's, in their order; None: the call reads none of them.
        prefixes: what the call reads of each part of the prefix source.
    """

    spans: Spans
    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None
    queries: slice | torch.Tensor = ALL
    own: slice | torch.Tensor | None = ALL
    prefixes: tuple[PrefixKeys, ...] = ()

    def keys(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Keys or values [n, K, D] of the call, from those [P, K, D] of each part of the prefix source; the last part
        is the packed row."""
        own = parts[-1]
        if not self.prefixes:  # then `self.own` is all of them
            return own
        if self.own is None and len(self.prefixes) == 1:
            return parts[self.prefixes[0].part][self.prefixes[0].tokens]
        keys = own.new_empty(self.spans.k[-1], *own.shape[1:])
        if self.own is not None:
            keys[self.own] = own
        for prefix in self.prefixes:
            keys[prefix.at] = parts[prefix.part][prefix.tokens]
        return keys


def calls_of(
    segments: Sequence[Segment], params: AttentionParams, device: torch.device, starts: Sequence[int] = (0,)
) -> Iterator[Call]:
    """Yields a layer's kernel calls on a packed row, the first over all queries.

    Args:
        starts: the first token of each part of the prefix source, the packed row itself last.

    A segment that fits the window together with its path is near: it is read as if there were no window. Any other is
    far. No kernel takes a window per segment. So the last `window - 1` keys of a far segment's path are copied to stand
    before its own keys, and the causal call reads both.
    """
    seen = sys.maxsize if params.window is None else params.window
    far = [s.path_len + s.length > seen for s in segments]
    bounds = (0, *accumulate(s.length for s in segments))
    tail_lens = [min(s.path_len, seen - 1) if is_far else 0 for s, is_far in zip(segments, far, strict=True)]
    key_ends = tuple(accumulate(n + s.length for n, s in zip(tail_lens, segments, strict=True)))
    own, tails = _after_tails(segments, tail_lens, key_ends, device, starts) if any(tail_lens) else (ALL, ())
    window = params.window if any(far) else None
    yield Call(Spans(bounds, (0, *key_ends)), True, params.scale, window, params.softcap, own=own, prefixes=tails)
    near = [(bounds[i], s) for i, s in enumerate(segments) if s.path and not far[i]]
    for blocks in _of_one_call([list(block) for _, block in groupby(near, key=lambda item: item[1].path)], starts):
        paths = [block[0][1].path for block in blocks]
        members = [member for block in blocks for member in block]
        spans = Spans(
            (0, *accumulate(sum(s.length for _, s in block) for block in blocks)),
            (0, *accumulate(block[0][1].path_len for block in blocks)),
            q_parts=(0, *accumulate(s.length for _, s in members)),
        )
        queries = _token_index([(start, s.length) for start, s in members], device)
        found = _by_part([run for path in paths for run in path], starts)
        prefixes = []
        for part, (at, tokens) in found.items():
            keys = _token_index(tokens, device)
            prefixes.append(PrefixKeys(ALL if len(found) == 1 else _token_index(at, device), keys, keys, part=part))
        yield Call(
            spans, False, params.scale, softcap=params.softcap, queries=queries, own=None, prefixes=tuple(prefixes)
        )


def _by_part(runs: Sequence[Run], starts: Sequence[int], first: int = 0) -> dict[int, tuple[list[Run], list[Run]]]:
    """Runs of tokens of the prefix source, which stand one after the other among a call's keys, by the part that has
    them: where they stand, from `first` on, and which of the part's tokens they are."""
    found: dict[int, tuple[list[Run], list[Run]]] = {}
    ends = (*starts[1:], sys.maxsize)
    for start, length in runs:
        while length:
            part = bisect_right(starts, start) - 1
            n = min(length, ends[part] - start)
            at, tokens = found.setdefault(part, ([], []))
            at.append((first, n))
            tokens.append((start - starts[part], n))
            first, start, length = first + n, start + n, length - n
    return found


def _after_tails(
    segments: Sequence[Segment], tail_lens: Sequence[int], key_ends: Sequence[int], device: torch.device,
    starts: Sequence[int],
) -> tuple[torch.Tensor, tuple[PrefixKeys, ...]]:  # fmt: skip
    """`own` and `prefixes` of a causal call whose keys are [tail | own] of each segment, a tail being the end of its
    path."""
    ends = list(zip(segments, tail_lens, key_ends, strict=True))
    own = on_device(ranges([(end - s.length, s.length) for s, _, end in ends]), device)
    tails = [(end - s.length - n, last_of(s.path, n)) for s, n, end in ends if n]
    split = [_by_part(tail, starts, first) for first, tail in tails]
    siblings = [list(same) for _, same in groupby(range(len(tails)), key=lambda i: tails[i][1])]
    prefixes = []
    for part in sorted({part for of_tail in split for part in of_tail}):
        at = [run for of_tail in split for run in of_tail.get(part, ([], []))[0]]
        tokens = [run for of_tail in split for run in of_tail.get(part, ([], []))[1]]
        shared = [(split[same[0]][part][1], len(same)) for same in siblings if part in split[same[0]]]
        grad_at = _token_index([run for runs, _ in shared for run in runs], device)
        copies = tuple((times, sum(n for _, n in runs)) for runs, times in shared)
        index, chosen = (on_device(ranges(runs), device) for runs in (at, tokens))
        prefixes.append(PrefixKeys(index, chosen, grad_at, copies, part))
    return own, tuple(prefixes)


Block = list[tuple[int, Segment]]  # segments with the same path, each after its first token in the packed row
# The most keys that a call of several blocks may copy: 16 MiB of keys and values at 8 heads of 128 in bf16, and in
# backward four times as much, where flash-attn repeats them per query head. The keys of one block may need no copy.
_MAX_COPIED = 2**12


def _of_one_call(blocks: Sequence[Block], starts: Sequence[int]) -> Iterator[Sequence[Block]]:
    """Yields the blocks of each call: all where no key is copied, else those of up to `_MAX_COPIED` keys, or one."""
    first, num_keys = 0, 0
    runs = [run for block in blocks for run in block[0][1].path]
    if blocks and not (_is_one_run(runs) and len(_by_part(runs, starts)) == 1):
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


def ranges(runs: Sequence[Run]) -> torch.Tensor:
    """int64 indices of the tokens of (start, length) runs, one after the other."""
    return torch.cat([torch.arange(0), *(torch.arange(start, start + n) for start, n in runs)])


def _is_one_run(runs: Sequence[Run]) -> bool:
    return all(a + n == b for (a, n), (b, _) in pairwise(runs))


def _token_index(runs: Sequence[Run], device: torch.device) -> slice | torch.Tensor:
    """`ranges` on `device`, or a slice where there are no gaps, so that nothing is copied."""
    return slice(runs[0][0], sum(runs[-1])) if _is_one_run(runs) else on_device(ranges(runs), device)


def end_of(path: Path) -> int:
    """The token of the prefix source that follows the last one of a path; 0 where the path is empty.

    It names the path: a token of the prefix source has one history, so that paths with the same end are equal.
    """
    return sum(path[-1]) if path else 0


def last_of(path: Path, length: int) -> Path:
    """The last `length` tokens of a path."""
    runs: list[Run] = []
    for start, n in reversed(path):
        taken = min(n, length)
        length -= taken
        if taken:
            runs.insert(0, (start + n - taken, taken))
    return tuple(runs)
