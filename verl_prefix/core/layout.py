"""Groups -> one packed row: every strand first, all suffixes after them; positions; and back to rows.

    row:     [ P of group 0 | P of group 1 | ... | S S S of group 0 | S S of group 1 | ... ]
    causal call:  every segment (strand or suffix) reads itself
    cross call:   segments that go on behind the same tokens, a block, read these

In groups of one prompt the cross call's inputs are plain slices. Nothing is copied but token ids: everything is an
index into the batch's flat values, so positions continue the original ones and outputs scatter back to where they
belong. In deeper trees a block reads pieces of several strands, which are copied for it.
"""

import functools
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch

from verl_prefix.core.groups import Fork, Group


def _built_once() -> Any:
    """A field that holds what was made of the others, for all layers of a pass."""
    return field(default_factory=dict, init=False, repr=False, compare=False)


# (start, length) pieces of a row of tokens, in the order in which they are read.
Pieces = tuple[tuple[int, int], ...]


class Segment(NamedTuple):
    """A strand, or one row's suffix: tokens that read themselves, and before them the pieces `path` of the prefix
    source."""

    length: int
    path: Pieces = ()

    @property
    def path_len(self) -> int:
        return sum(length for _, length in self.path)

    @property
    def path_end(self) -> int:
        """The token of the prefix source after the last one of the path; 0: it has none."""
        return _after(self.path) if self.path else 0


class Run(NamedTuple):
    """Tokens [start, end) of a strand, which go on from the state before token `after` of their path (0: zeros)."""

    start: int
    end: int
    after: int


class InitialStates(NamedTuple):
    """Pairs of a suffix and the state that it goes on from, each by its number: among the layout's suffixes [n] int64,
    among the source's `states` [n] int64."""

    suffixes: torch.Tensor
    states: torch.Tensor


class Reads(NamedTuple):
    """Outputs that rows read: `places` [n] int64 are where they stand in the batch, `tokens` [n] int64 which token of
    the packed row computes each, or -1 - t for token t of phase A."""

    places: torch.Tensor
    tokens: torch.Tensor


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
    """One packed row of T tokens, of which the first `num_prefix` are strands.

    `index` [T] (int64) says which token of the batch's flat values each one is. Pieces of a segment's path are counted
    in the prefix source: this row itself, or for a wave (which has no strands) `source`, the row of phase A, where the
    strands of `groups` begin at tokens `starts`. `reads` are the outputs that rows read; None: those of all suffix
    tokens, in their order. `states` are the paths in its strands behind which segments go on, in ascending order of
    their last tokens.
    """

    index: torch.Tensor
    num_prefix: int
    segments: tuple[Segment, ...]
    groups: tuple[Group, ...] = ()
    starts: tuple[int, ...] = ()
    reads: Reads | None = None
    states: tuple[Pieces, ...] = ()
    source: "Layout | None" = None
    _calls: dict[tuple[int | None, torch.device], tuple[Call, ...]] = _built_once()
    _initial_states: dict[torch.device, InitialStates] = _built_once()
    _tails: dict[tuple[int, torch.device], torch.Tensor] = _built_once()

    @property
    def num_tokens(self) -> int:
        return len(self.index)

    @property
    def multiplicity(self) -> torch.Tensor:
        """[T] int64: how often each token counts in the logical batch, 0 in a dummy."""
        counts = [torch.full((self.num_tokens - self.num_prefix,), int(bool(self.groups)))]
        for group in reversed(self.groups if self.num_prefix else ()):
            steps = [torch.zeros(strand.end - strand.start + 1, dtype=torch.int64) for strand in group.strands]
            for fork, num_outputs in zip(group.forks, group.output_lens, strict=True):
                for strand, start, end in group.path(fork) if num_outputs else ():
                    steps[strand][0] += 1
                    steps[strand][end - start] -= 1
            counts[:0] = [step.cumsum(0)[:-1] for step in steps]
        return torch.cat(counts)

    @functools.cached_property
    def num_prefixes(self) -> int:
        """Strands among the segments, which they open."""
        return sum(end <= self.num_prefix for end in accumulate(segment.length for segment in self.segments))

    @functools.cached_property
    def suffixes(self) -> Spans:
        """Suffixes as the segments of a row of their own, which read themselves."""
        bounds = (0, *accumulate(segment.length for segment in self.segments[self.num_prefixes :]))
        return Spans(bounds, bounds)

    @functools.cached_property
    def rounds(self) -> list[list[Run]]:
        """The strands as runs of tokens between `states`: each round goes on from states of the rounds before it."""
        rounds: list[list[Run]] = []
        round_of = {0: -1}
        ends, end = list(self.state_numbers), 0
        for segment in self.segments[: self.num_prefixes]:
            start, after, end = end, segment.path_end, end + segment.length
            for cut in ends[bisect_right(ends, start) : bisect_right(ends, end)]:
                round_of[cut] = round_of[after] + 1
                if round_of[cut] == len(rounds):
                    rounds.append([])
                rounds[round_of[cut]].append(Run(start, cut, after))
                start = after = cut
            assert start == end, "nothing goes on behind the end of a strand"
        return rounds

    @functools.cached_property
    def round_spans(self) -> list[Spans]:
        """The runs of each round, as the segments of a row of their own; the same for all layers, whose kernels keep
        what they make of them."""
        bounds = [(0, *accumulate(run.end - run.start for run in runs)) for runs in self.rounds]
        return [Spans(one, one) for one in bounds]

    @functools.cached_property
    def state_numbers(self) -> dict[int, int]:
        """Numbers of the `states`, by the token after the last one of each."""
        return {_after(path): number for number, path in enumerate(self.states)}

    def initial_states(self, device: torch.device) -> InitialStates:
        """Suffixes that go on behind strands; built once."""
        if device not in self._initial_states:
            suffixes, numbers = self.segments[self.num_prefixes :], (self.source or self).state_numbers
            pairs = [(i, numbers[suffix.path_end]) for i, suffix in enumerate(suffixes) if suffix.path]
            self._initial_states[device] = InitialStates(
                *on_device(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T, device)
            )
        return self._initial_states[device]

    def tails(self, length: int, device: torch.device) -> torch.Tensor:
        """[states, length] int64: the last tokens before each of `states`, plus 1, behind zeros where there are fewer;
        built once."""
        if (length, device) not in self._tails:
            rows = [ranges(last_of(path, length)) + 1 for path in self.states]
            padded = [torch.nn.functional.pad(row, (length - len(row), 0)) for row in rows]
            self._tails[length, device] = on_device(torch.stack(padded), device)
        return self._tails[length, device]

    @property
    def read_places(self) -> torch.Tensor:
        """[n]: where the outputs that are read, and so the log-probs of the tokens behind them, stand in the batch."""
        return self.index[self.num_prefix :] if self.reads is None else self.reads.places

    @property
    def keep(self) -> torch.Tensor:
        """[m] int64: tokens whose outputs this row computes, in ascending order."""
        if self.reads is None:
            return torch.arange(self.num_prefix, self.num_tokens)
        own: torch.Tensor = self.reads.tokens[self.reads.tokens >= 0].unique()
        return own

    def reading(self, is_read: torch.Tensor) -> "Layout":
        """The layout whose outputs are those of the batch's tokens `is_read` [N] (bool), of one token of this row at
        least: a backward needs something to start from."""
        index = self.read_places
        own = torch.arange(self.num_prefix, self.num_tokens) if self.reads is None else self.reads.tokens
        chosen = is_read[index]
        if not (chosen & (own >= 0)).any():
            chosen[(own >= 0).nonzero()[0]] = True
        return replace(self, reads=Reads(index[chosen], own[chosen]))

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
            tokens = on_device(ranges([piece for s, n, _ in ends for piece in last_of(s.path, n)]), device)
            tails = Keys(at, tokens)
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
            yield Call(spans, queries, None, Keys(ALL, keys), causal=False)


# Keys that one call copies where a block reads pieces: 0.5 GiB of keys and values at 8 heads of 128 in bf16.
_MAX_COPIED = 2**17


def _parts(blocks: Sequence[list[tuple[int, Segment]]]) -> Iterator[Sequence[list[tuple[int, Segment]]]]:
    """Blocks that read together: all where nothing is copied, else of at most `_MAX_COPIED` keys, or one block."""
    first, num_keys = 0, 0
    if blocks and not _is_run([piece for block in blocks for piece in block[0][1].path]):
        for i, block in enumerate(blocks):
            num_keys += block[0][1].path_len
            if i > first and num_keys > _MAX_COPIED:
                yield blocks[first:i]
                first, num_keys = i, block[0][1].path_len
    if blocks:
        yield blocks[first:]


def pass_order(groups: Sequence[Group]) -> list[Group]:
    """Groups to compute, those without a prefix last, so that the suffix blocks that read a prefix stay one slice."""
    return sorted((g for g in groups if g.num_suffix_tokens), key=lambda group: group.prefix_len == 0)


def build_layout(
    groups: Sequence[Group],
    offsets: Sequence[int],
    source: Layout | None = None,
    places: Sequence[int] = (),
    suffixes: bool = True,
) -> Layout:
    """The packed row of `groups`, best in `pass_order`. Where that is nothing, a dummy: one token of the batch that
    reads itself, which keeps a rank's collectives in step.

    Args:
        offsets: first token of each row in the batch's flat values (nested `offsets()`).
        source: None for a row with its strands. For a wave: the row of phase A, of whose groups these are pieces; the
            wave has suffixes only and reads the prefix cache.
        places: for a wave, the places of its groups among those of `source`.
        suffixes: False for phase A: strands alone.
    """
    in_wave = source is not None
    *starts, _ = accumulate((group.prefix_len for group in groups), initial=0)
    if source is not None:
        starts = [source.starts[place] for place in places]
    strands, leaves, rows = [], [], []
    for group, start in zip(groups, starts, strict=True):
        paths = _paths(group, start)
        for strand in () if in_wave else group.strands:
            path = paths[Fork(strand.parent, strand.start)]
            strands.append((int(offsets[strand.row]) + strand.start, Segment(strand.end - strand.start, path)))
        for row, fork, suffix_len, first in zip(
            group.rows, group.forks, group.suffix_lens, group.first_outputs, strict=True
        ):
            rows.append((int(offsets[row]), fork.start, suffix_len, first, paths[fork]))
            if suffix_len:
                leaves.append((int(offsets[row]) + fork.start, Segment(suffix_len, paths[fork])))
    pieces = [*strands, *(leaves if suffixes else ())]
    if not pieces:
        return Layout(torch.zeros(1, dtype=torch.int64), 0, (Segment(1),), starts=tuple(starts))
    num_prefix = sum(segment.length for _, segment in strands)
    states = {segment.path for _, segment in [*strands, *leaves] if segment.path and not in_wave}
    return Layout(
        ranges([(start, segment.length) for start, segment in pieces]), num_prefix,
        tuple(segment for _, segment in pieces), tuple(groups), tuple(starts),
        reads=_reads(rows, num_prefix, in_wave, suffixes),
        states=tuple(sorted(states, key=_after)), source=source,
    )  # fmt: skip


def _paths(group: Group, start: int) -> dict[Fork, Pieces]:
    """What stands before each fork of the group, whose strands begin at token `start` of the prefix source."""
    starts = [*accumulate((strand.end - strand.start for strand in group.strands), initial=start)]
    paths = {}
    for fork in {*group.forks, *(Fork(strand.parent, strand.start) for strand in group.strands)}:
        path: list[tuple[int, int]] = []
        for strand, begin, end in group.path(fork):
            length = end - begin
            if path and starts[strand] + length == path[-1][0]:  # the strand behind its parent: one piece
                length += path.pop()[1]
            path.append((starts[strand], length))
        paths[fork] = tuple(reversed(path))
    return paths


def _reads(
    rows: Sequence[tuple[int, int, int, int, Pieces]], num_prefix: int, in_wave: bool, suffixes: bool
) -> Reads | None:
    """Of rows: (first token in the batch, tokens before the suffix, suffix tokens, first token whose output is read,
    path before the suffix). None where they read exactly the outputs of suffixes, or nothing."""
    if all(start == first for _, start, _, first, _ in rows):
        return None
    index, tokens, own = [], [], num_prefix
    for offset, start, suffix_len, first, path in rows:
        in_strands = ranges(last_of(path, max(start - first, 0)))
        in_suffix = torch.arange(suffix_len if suffixes else 0)[max(first - start, 0) :]
        index += [offset + first + torch.arange(len(in_strands)), offset + start + in_suffix]
        tokens += [-1 - in_strands if in_wave else in_strands, own + in_suffix]
        own += suffix_len
    return Reads(torch.cat(index), torch.cat(tokens)) if any(map(len, tokens)) else None


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor's copy on `device`, for which the host does not wait."""
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def ranges(pieces: Sequence[tuple[int, int]]) -> torch.Tensor:
    """int64 indices of (start, length) pieces, one after the other."""
    return torch.cat([torch.arange(0), *(torch.arange(start, start + n) for start, n in pieces)])


def _is_run(pieces: Sequence[tuple[int, int]]) -> bool:
    return all(a + n == b for (a, n), (b, _) in pairwise(pieces))


def _token_index(pieces: Sequence[tuple[int, int]], device: torch.device) -> slice | torch.Tensor:
    """`ranges` on `device`, or a slice where there are no gaps, so that nothing is copied."""
    return slice(pieces[0][0], sum(pieces[-1])) if _is_run(pieces) else on_device(ranges(pieces), device)


def _after(path: Pieces) -> int:
    return sum(path[-1])


def last_of(path: Pieces, length: int) -> Pieces:
    """The last `length` tokens of a path."""
    pieces: list[tuple[int, int]] = []
    for start, n in reversed(path):
        taken = min(n, length)
        length -= taken
        if taken:
            pieces.insert(0, (start + n - taken, taken))
    return tuple(pieces)
