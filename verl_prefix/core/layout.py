"""Groups -> one packed row: first all strands, then all suffixes; and its outputs -> rows.

    packed row    [ P of group 0 | P of group 1 | ... | S S S of group 0 | S S of group 1 | ... ]
    causal call   every segment (a strand or a suffix) reads itself
    cross calls   every segment reads the tokens before it: its path

A packed row says of each of its tokens where that stands in the batch. So positions stay the original ones, and outputs
go back to where they belong. In groups of one prompt, cross calls read slices of the prefixes, and only token ids are
copied. In deeper trees, and where a window cuts a path, keys are copied.

Where passes nest, segments read strands of the packed rows around theirs as well. The prefix source is then all of them
one after the other: the strands of the outermost, and so on, and at last the packed row's own.
"""

import functools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from verl_prefix.core.calls import (
    AttentionParams,
    Call,
    Path,
    Segment,
    Spans,
    built_once,
    calls_of,
    end_of,
    last_of,
    on_device,
    ranges,
)
from verl_prefix.core.groups import Fork, Group

# What a packed row has: strands and suffixes; strands alone; suffixes alone, whose strands a phase A computes.
Kind = Literal["packed", "phase_a", "wave"]


class Reads(NamedTuple):
    """Outputs that rows read: one for each response token, or fewer after `Layout.reading`.

    Attributes:
        places: [n] int64, where in the batch each stands.
        tokens: [n] int64, the token of the packed row that computes it; below 0: token -1 - x of the prefix source, in
            a packed row around this one.
    """

    places: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """One packed row of T tokens.

    Paths count tokens of the prefix source: the strands of the packed rows around this one, then its own.

    Attributes:
        places: [T] int64, where each token stands in the batch's flat values.
        num_strand_tokens: the first tokens, which are strands.
        segments: the strands, then the suffixes.
        groups: those whose rows it computes; none in a dummy.
        strand_starts: where each strand begins in the prefix source, by the place of its first token; strands of the
            packed rows around this one, too.
        reads: outputs that rows read; None: those of all suffix tokens.
        state_paths: paths that end in this packed row's strands and after which a recurrent layer leaves a state, since
            segments continue them, in the order of their ends.
        around: of a wave or a nested pass, the packed row of the phase A around it; else None.
        num_strands: the first segments, which are strands.
        kind: what it has, as the packed rows beside it on other ranks; also of a dummy.
    """

    places: torch.Tensor
    num_strand_tokens: int
    segments: tuple[Segment, ...]
    groups: tuple[Group, ...] = ()
    strand_starts: Mapping[int, int] = field(default_factory=dict)
    reads: Reads | None = None
    state_paths: tuple[Path, ...] = ()
    around: "Layout | None" = None
    num_strands: int = 0
    kind: Kind = "packed"
    _calls: dict[tuple[AttentionParams, torch.device], tuple[Call, ...]] = built_once()
    _continued: dict[tuple[bool, torch.device], list[tuple[int, torch.Tensor, torch.Tensor]]] = built_once()
    _last_tokens: dict[tuple[int, torch.device], torch.Tensor] = built_once()

    @property
    def num_tokens(self) -> int:
        return len(self.places)

    @property
    def sources(self) -> "tuple[Layout, ...]":
        """The packed rows around this one, the outermost first, and this one: one for each level."""
        return (*(self.around.sources if self.around else ()), self)

    @functools.cached_property
    def level_starts(self) -> tuple[int, ...]:
        """The first token of each of `sources` in the prefix source."""
        return tuple(accumulate((one.num_strand_tokens for one in self.sources[:-1]), initial=0))

    @property
    def own_start(self) -> int:
        """Where this packed row's own strands begin in the prefix source."""
        return self.level_starts[-1]

    @property
    def multiplicity(self) -> torch.Tensor:
        """[T] int64: how many rows with outputs contain each token; 0 in a dummy."""
        counts = []
        for group in self.groups if self.num_strand_tokens else ():
            steps = [torch.zeros(strand.end - strand.start + 1, dtype=torch.int64) for strand in group.strands]
            for fork, num_outputs in zip(group.forks, group.output_lens, strict=True):
                for strand, start, end in group.strands_before(fork) if num_outputs else ():
                    steps[strand][0] += 1
                    steps[strand][end - start] -= 1
            counts += [step.cumsum(0)[:-1] for step in steps[group.outer :]]
        of_suffixes = torch.full((self.num_tokens - self.num_strand_tokens,), int(bool(self.groups)))
        return torch.cat([*counts, of_suffixes])

    @functools.cached_property
    def suffixes(self) -> Spans:
        """The suffixes, which read themselves, as spans of their tokens alone."""
        bounds = (0, *accumulate(segment.length for segment in self.segments[self.num_strands :]))
        return Spans(bounds, bounds)

    @functools.cached_property
    def scan_rounds(self) -> list[tuple[list[tuple[int, int, int]], Spans]]:
        """The strands, cut where a path of `state_paths` ends, in rounds: a round starts from states of earlier ones.

        Returns:
            of each round, (start, end, end of the path that it continues; 0: none) of each of its runs of tokens of the
            prefix source, and these as spans. All layers get the same objects, so that kernels can store what they
            derive from them.
        """
        rounds: list[list[tuple[int, int, int]]] = []
        round_of: dict[int, int] = {}
        ends, end = list(self.state_numbers), self.own_start
        for segment in self.segments[: self.num_strands]:
            start, path_end, end = end, end_of(segment.path), end + segment.length
            for cut in ends[bisect_right(ends, start) : bisect_right(ends, end)]:
                round_of[cut] = round_of.get(path_end, -1) + 1  # paths around this packed row are all known
                if round_of[cut] == len(rounds):
                    rounds.append([])
                rounds[round_of[cut]].append((start, cut, path_end))
                start = path_end = cut
            assert start == end, "no segment continues the end of this strand"
        bounds = [(0, *accumulate(end - start for start, end, _ in runs)) for runs in rounds]
        return [(runs, Spans(one, one)) for runs, one in zip(rounds, bounds, strict=True)]

    @functools.cached_property
    def state_numbers(self) -> dict[int, int]:
        """Numbers of `state_paths`, by the `end_of` each."""
        return {end_of(path): number for number, path in enumerate(self.state_paths)}

    def continued(self, suffixes: bool, device: torch.device) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Which suffixes continue strands, or which strands those of packed rows around this one: for each of `sources`
        that has their states its number, then numbers of suffixes or strands, and of the state from which each starts;
        both [n] int64, built once."""
        if (suffixes, device) not in self._continued:
            chosen = self.segments[self.num_strands :] if suffixes else self.segments[: self.num_strands]
            ends = [(i, end_of(segment.path)) for i, segment in enumerate(chosen)]
            found = []
            for part, source in enumerate(self.sources if suffixes else self.sources[:-1]):
                pairs = [(i, source.state_numbers[end]) for i, end in ends if end in source.state_numbers]
                if pairs:
                    numbers, states = on_device(torch.tensor(pairs, dtype=torch.int64).T, device)
                    found.append((part, numbers, states))
            assert not suffixes or sum(len(one[1]) for one in found) == sum(end > 0 for _, end in ends)
            self._continued[suffixes, device] = found
        return self._continued[suffixes, device]

    def last_tokens(self, length: int, device: torch.device) -> torch.Tensor:
        """[states, length] int64: the last tokens of each of `state_paths`, built once. Those of this packed row are
        counted from 1. Those before them are numbers below 0, of the inputs before the strand that the path begins
        with here: -1 - x for input x of [strands, length]. Where there are fewer, zeros stand in front."""
        if (length, device) not in self._last_tokens:
            firsts = accumulate((one.length for one in self.segments[: self.num_strands]), initial=self.own_start)
            strand_of = {first: i for i, first in enumerate(firsts)}
            tails = []
            for path in self.state_paths:
                own_tokens = _tokens_from(path, self.own_start)
                own = ranges(last_of(path, min(length, own_tokens))) - self.own_start + 1
                strand = strand_of[next(max(start, self.own_start) for start, n in path if start + n > self.own_start)]
                before = -1 - strand * length - torch.arange(length)
                before = before if self.segments[strand].path else torch.zeros_like(before)
                tails.append(torch.cat([before[len(own) :], own]))
            self._last_tokens[length, device] = on_device(torch.stack(tails), device)
        return self._last_tokens[length, device]

    @property
    def read_places(self) -> torch.Tensor:
        """[n] int64: where in the batch the outputs stand that rows read; each gives the next token's log-prob."""
        return self.places[self.num_strand_tokens :] if self.reads is None else self.reads.places

    @functools.cached_property
    def head_tokens(self) -> torch.Tensor:
        """[m] int64: tokens of the packed row that go through lm_head, in ascending order."""
        if self.reads is None:
            return torch.arange(self.num_strand_tokens, self.num_tokens)
        own: torch.Tensor = self.reads.tokens[self.reads.tokens >= 0].unique()
        return own

    def reading(self, is_read: torch.Tensor) -> "Layout":
        """The layout that reads fewer outputs: those of the batch's tokens `is_read` [N] (bool). One of this packed row
        is always among them, since a backward needs something to start from."""
        places = self.read_places
        own = torch.arange(self.num_strand_tokens, self.num_tokens) if self.reads is None else self.reads.tokens
        chosen = is_read[places]
        if not (chosen & (own >= 0)).any():
            chosen[(own >= 0).nonzero()[0]] = True
        return replace(self, reads=Reads(places[chosen], own[chosen]))

    def calls(self, params: AttentionParams, device: torch.device) -> tuple[Call, ...]:
        """A layer's kernel calls, the first over all queries; built once for all layers of the same `params`."""
        if (params, device) not in self._calls:
            self._calls[params, device] = tuple(calls_of(self.segments, params, device, self.level_starts))
        return self._calls[params, device]


def pass_order(groups: Sequence[Group]) -> list[Group]:
    """Groups with suffix tokens, those without a prefix last. So the suffixes that read a prefix have no gaps between
    them, and are one slice."""
    return sorted((g for g in groups if g.num_suffix_tokens), key=lambda group: group.num_strand_tokens == 0)


class _Row(NamedTuple):
    """A row of a packed row.

    Attributes:
        offset: the place of its first token.
        fork_start: number of tokens before its suffix, which strands have.
        first_output: the first of its tokens whose output it reads.
        path: where the tokens before its suffix are.
    """

    offset: int
    fork_start: int
    suffix_len: int
    first_output: int
    path: Path


def build_layout(
    groups: Sequence[Group], offsets: Sequence[int], kind: Kind = "packed", around: Layout | None = None
) -> Layout:
    """Builds the packed row of `groups`, best in `pass_order`. Where there is nothing to compute it is a dummy: one
    token of the batch that reads itself, which keeps a rank's collectives in step.

    Args:
        offsets: first token of each row in the batch's flat values (nested `offsets()`).
        around: for a wave or a nested pass: the packed row of the phase A around it, which has strands of these groups.
    """
    strand_starts = dict(around.strand_starts) if around else {}
    own_start = end = around.own_start + around.num_strand_tokens if around else 0
    strands, suffixes, rows = [], [], []
    for group in groups:
        places = [int(offsets[strand.row]) + strand.start for strand in group.strands]
        own = [*zip(places, group.strands, strict=True)][group.outer :] if kind != "wave" else []
        for place, strand in own:
            strand_starts[place] = end
            end += strand.end - strand.start
        paths = _paths(group, [strand_starts[place] for place in places])
        for place, strand in own:
            strands.append((place, Segment(strand.end - strand.start, paths[Fork(strand.parent, strand.start)])))
        for row, fork, suffix_len, first_output in zip(
            group.rows, group.forks, group.suffix_lens, group.first_outputs, strict=True
        ):
            rows.append(_Row(int(offsets[row]), fork.start, suffix_len, first_output, paths[fork]))
            if suffix_len:
                suffixes.append((int(offsets[row]) + fork.start, Segment(suffix_len, paths[fork])))
    computed = [*strands, *(suffixes if kind != "phase_a" else ())]
    if not computed:
        return Layout(torch.zeros(1, dtype=torch.int64), 0, (Segment(1),), strand_starts=strand_starts, kind=kind)
    state_paths = {segment.path for _, segment in [*strands, *suffixes] if end_of(segment.path) > own_start}
    return Layout(
        places=ranges([(place, segment.length) for place, segment in computed]),
        num_strand_tokens=end - own_start,
        segments=tuple(segment for _, segment in computed),
        groups=tuple(groups),
        strand_starts=strand_starts,
        reads=_reads(rows, own_start, end - own_start, suffixes=kind != "phase_a"),
        state_paths=tuple(sorted(state_paths, key=end_of)) if kind != "wave" else (),
        around=around,
        num_strands=len(strands),
        kind=kind,
    )


def _paths(group: Group, starts: Sequence[int]) -> dict[Fork, Path]:
    """The path before each fork, also of strands, of a group whose strands begin at tokens `starts` of the prefix
    source."""
    paths = {}
    for fork in {*group.forks, *(Fork(strand.parent, strand.start) for strand in group.strands)}:
        path: list[tuple[int, int]] = []
        for strand, begin, end in group.strands_before(fork):
            length = end - begin
            if path and starts[strand] + length == path[-1][0]:  # the next strand begins where this one ends: one run
                length += path.pop()[1]
            path.append((starts[strand], length))
        paths[fork] = tuple(reversed(path))
    return paths


def _reads(rows: Sequence[_Row], own_start: int, num_strand_tokens: int, suffixes: bool) -> Reads | None:
    """The outputs that rows read; None where they read those of all suffix tokens, or nothing.

    Args:
        own_start: where the packed row's own strands begin in the prefix source.
        suffixes: False for phase A: of what others compute, it reads nothing.
    """
    if all(row.fork_start == row.first_output for row in rows):
        return None
    places, tokens, own = [], [], num_strand_tokens
    for offset, start, suffix_len, first, path in rows:
        own_tokens = _tokens_from(path, own_start)
        num = max(start - first, 0)  # outputs of strands
        num = num if suffixes else min(num, own_tokens)
        of_strands, around = ranges(last_of(path, num)), max(num - own_tokens, 0)
        in_suffix = torch.arange(suffix_len if suffixes else 0)[max(first - start, 0) :]
        places += [offset + start - num + torch.arange(num), offset + start + in_suffix]
        tokens += [-1 - of_strands[:around], of_strands[around:] - own_start, own + in_suffix]
        own += suffix_len
    return Reads(torch.cat(places), torch.cat(tokens)) if any(map(len, tokens)) else None


def _tokens_from(path: Path, first: int) -> int:
    """How many tokens of a path are token `first` of the prefix source or come after it; they are its last ones."""
    return sum(min(n, start + n - first) for start, n in path if start + n > first)
