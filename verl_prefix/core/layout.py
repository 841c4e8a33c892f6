"""Groups -> one packed row: first all strands, then all suffixes; and its outputs -> rows.

    packed row    [ P of group 0 | P of group 1 | ... | S S S of group 0 | S S of group 1 | ... ]
    causal call   every segment (a strand or a suffix) reads itself
    cross calls   every segment reads the tokens before it: its path

A packed row says of each of its tokens where that stands in the batch. So positions stay the original ones, and outputs
go back to where they belong. In groups of one prompt, cross calls read slices of the prefixes, and only token ids are
copied. In deeper trees, and where a window cuts a path, keys are copied.
"""

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

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


class Reads(NamedTuple):
    """Outputs that rows read: one for each response token, or fewer after `Layout.reading`.

    Attributes:
        places: [n] int64, where in the batch each stands.
        tokens: [n] int64, the token of the packed row that computes it; below 0: token -1 - x of `source`.
    """

    places: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """One packed row of T tokens.

    Paths count tokens of the prefix source: of this packed row, or of `source`.

    Attributes:
        places: [T] int64, where each token stands in the batch's flat values.
        num_strand_tokens: the first tokens, which are strands.
        segments: the strands, then the suffixes.
        groups: those whose rows it computes; none in a dummy.
        starts: where the strands of each group begin in the prefix source.
        reads: outputs that rows read; None: those of all suffix tokens.
        state_paths: paths after which a recurrent layer leaves a state, since segments continue them, in the order of
            their ends.
        source: of a wave, which has no strands, the packed row of phase A; else None.
        num_strands: the first segments, which are strands.
    """

    places: torch.Tensor
    num_strand_tokens: int
    segments: tuple[Segment, ...]
    groups: tuple[Group, ...] = ()
    starts: tuple[int, ...] = ()
    reads: Reads | None = None
    state_paths: tuple[Path, ...] = ()
    source: "Layout | None" = None
    num_strands: int = 0
    _calls: dict[tuple[AttentionParams, torch.device], tuple[Call, ...]] = built_once()
    _initial_states: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = built_once()
    _last_tokens: dict[tuple[int, torch.device], torch.Tensor] = built_once()

    @property
    def num_tokens(self) -> int:
        return len(self.places)

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
            counts += [step.cumsum(0)[:-1] for step in steps]
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
            of each round, (start, end, end of the path that it continues; 0: none) of each of its runs of tokens, and
            these as spans. All layers get the same objects, so that kernels can store what they derive from them.
        """
        rounds: list[list[tuple[int, int, int]]] = []
        round_of = {0: -1}
        ends, end = list(self.state_numbers), 0
        for segment in self.segments[: self.num_strands]:
            start, path_end, end = end, end_of(segment.path), end + segment.length
            for cut in ends[bisect_right(ends, start) : bisect_right(ends, end)]:
                round_of[cut] = round_of[path_end] + 1
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

    def initial_states(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Which suffixes continue strands, and the number of the state from which each starts; both [n] int64, built
        once."""
        if device not in self._initial_states:
            suffixes, numbers = self.segments[self.num_strands :], (self.source or self).state_numbers
            pairs = [(i, numbers[end_of(suffix.path)]) for i, suffix in enumerate(suffixes) if suffix.path]
            chosen, states = on_device(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T, device)
            self._initial_states[device] = chosen, states
        return self._initial_states[device]

    def last_tokens(self, length: int, device: torch.device) -> torch.Tensor:
        """[states, length] int64: the last tokens of each of `state_paths`, counted from 1, with zeros in front where
        there are fewer; built once."""
        if (length, device) not in self._last_tokens:
            tails = [ranges(last_of(path, length)) + 1 for path in self.state_paths]
            padded = [torch.nn.functional.pad(tail, (length - len(tail), 0)) for tail in tails]
            self._last_tokens[length, device] = on_device(torch.stack(padded), device)
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
            self._calls[params, device] = tuple(calls_of(self.segments, params, device))
        return self._calls[params, device]


def pass_order(groups: Sequence[Group]) -> list[Group]:
    """Groups with suffix tokens, those without a prefix last. So the suffixes that read a prefix have no gaps between
    them, and are one slice."""
    return sorted((g for g in groups if g.num_suffix_tokens), key=lambda group: group.prefix_len == 0)


def build_layout(
    groups: Sequence[Group],
    offsets: Sequence[int],
    source: Layout | None = None,
    numbers: Sequence[int] = (),
    suffixes: bool = True,
) -> Layout:
    """Builds the packed row of `groups`, best in `pass_order`. Where there is nothing to compute it is a dummy: one
    token of the batch that reads itself, which keeps a rank's collectives in step.

    Args:
        offsets: first token of each row in the batch's flat values (nested `offsets()`).
        source: for a wave, which has suffixes alone: the packed row of phase A, whose groups have all rows of these.
        numbers: for a wave: which group of `source` each of `groups` is.
        suffixes: False for phase A, which has strands alone.
    """
    in_wave = source is not None
    *starts, _ = accumulate((group.prefix_len for group in groups), initial=0)
    if source is not None:
        starts = [source.starts[number] for number in numbers]
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
    chosen = [*strands, *(leaves if suffixes else ())]
    if not chosen:
        return Layout(torch.zeros(1, dtype=torch.int64), 0, (Segment(1),), starts=tuple(starts))
    num_strand_tokens = sum(segment.length for _, segment in strands)
    state_paths = {segment.path for _, segment in [*strands, *leaves] if segment.path and not in_wave}
    return Layout(
        ranges([(start, segment.length) for start, segment in chosen]), num_strand_tokens,
        tuple(segment for _, segment in chosen), tuple(groups), tuple(starts),
        reads=_reads(rows, num_strand_tokens, in_wave, suffixes),
        state_paths=tuple(sorted(state_paths, key=end_of)), source=source, num_strands=len(strands),
    )  # fmt: skip


def _paths(group: Group, start: int) -> dict[Fork, Path]:
    """The path before each fork, also of strands, of a group whose strands begin at token `start` of the prefix
    source."""
    starts = [*accumulate((strand.end - strand.start for strand in group.strands), initial=start)]
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


def _reads(
    rows: Sequence[tuple[int, int, int, int, Path]], num_strand_tokens: int, in_wave: bool, suffixes: bool
) -> Reads | None:
    """The outputs that rows read; None where they read those of all suffix tokens, or nothing.

    Args:
        rows: of each row (place of its first token, tokens before its suffix, suffix tokens, the first of its tokens
            whose output it reads, path before its suffix).
    """
    if all(start == first for _, start, _, first, _ in rows):
        return None
    places, tokens, own = [], [], num_strand_tokens
    for offset, start, suffix_len, first, path in rows:
        in_strands = ranges(last_of(path, max(start - first, 0)))
        in_suffix = torch.arange(suffix_len if suffixes else 0)[max(first - start, 0) :]
        places += [offset + first + torch.arange(len(in_strands)), offset + start + in_suffix]
        tokens += [-1 - in_strands if in_wave else in_strands, own + in_suffix]
        own += suffix_len
    return Reads(torch.cat(places), torch.cat(tokens)) if any(map(len, tokens)) else None
