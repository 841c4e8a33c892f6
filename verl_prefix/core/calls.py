"""What one kernel call is: which queries read which keys (`call_builder` makes them of segments)."""

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from verl_prefix.core.runs import on_device


def built_once() -> Any:
    """Declares a dataclass field that holds what is built from the other fields, once for all layers of a pass."""
    return field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Spans:
    """Bounds of a kernel call: queries q[i] to q[i + 1] read keys k[i] to k[i + 1].

    No span is empty, since an empty one crashes the CPU kernel.

    Attributes:
        q, k: n + 1 increasing ints for n spans, from 0 on.
        q_segments: bounds of the segments among the queries: all of `q`, and more. The reference kernel, and the CPU
            kernel in its forward, take one segment at a time, so that the rows beside a row do not change its bits.
            Empty: as `q`.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    q_segments: tuple[int, ...] = ()
    _cu_seqlens: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = built_once()

    def __post_init__(self) -> None:
        assert len(self.q) == len(self.k), (self.q, self.k)
        for bounds in (self.q, self.k, self.q_segments):
            assert all(b > a for a, b in pairwise(bounds)), f"empty span or segment in {bounds}"
        assert not self.q_segments or {*self.q} <= {*self.q_segments}, (self.q, self.q_segments)

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

    A window copies a path's tail once for each segment that reads it. For example, 3 suffixes of 2 tokens read the same
    tail, the tokens 6 to 9 of level 0:

        keys of the call    [ tail own | tail own | tail own ]
        at                    0..3       6..9       12..15
        strand_tokens         6..9       6..9       6..9          with `copies` ((3, 4),): three times 4 tokens
        grad_tokens           6..9                                the 3 copies' gradients, which `summed` adds in fp32

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

                                      queries    own_at             prefixes
        causal call                   ALL        ALL                none
        the same with far segments    ALL        where they stand   tails of paths, one entry for each level
        cross call                    chosen     None               one entry, of its level

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

    def keys(self, by_level: Sequence[torch.Tensor]) -> torch.Tensor:
        """Keys or values [n, K, D] of the call, from those of each level: [P, K, D] of each phase A around, and last
        [T, K, D] of the packed row itself."""
        own = by_level[-1]
        if not self.prefixes:  # then `own_at` is all of them
            return own
        if self.own_at is None:
            (prefix,) = self.prefixes
            return by_level[prefix.level][prefix.strand_tokens]
        keys = own.new_empty(self.spans.k[-1], *own.shape[1:])
        keys[self.own_at] = own
        for prefix in self.prefixes:
            keys[prefix.at] = by_level[prefix.level][prefix.strand_tokens]
        return keys
