"""States of recurrent layers: after which paths of a packed row a layer leaves a state, and where segments start."""

import functools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from verl_prefix.core.calls import Spans
from verl_prefix.core.runs import Path, Segment, bounds_of, end_of, last_of, on_device, part_of, ranges

SegmentKind = Literal["strands", "suffixes"]


class ScanRun(NamedTuple):
    """Tokens of the prefix source that a recurrent layer scans in one go, after which it leaves a state.

    Attributes:
        start, end: the tokens [start, end).
        after: the end of the path that they continue; 0: they continue none.
    """

    start: int
    end: int
    after: int


class StateIndex:
    """Numbers of the states that a recurrent layer leaves in a packed row, one after each of `paths`.

    Args:
        strands, suffixes: segments of the packed row.
        own_start: where the packed row's own strands begin in the prefix source.
        paths: `PackedRow.state_paths`.
        outer_states: the states of the packed rows around, the outermost first.

    Attributes:
        suffixes: the suffixes, which read themselves, as spans that count from the first suffix's first token.
        numbers: number of the state after each path, by the path's `end_of`.
    """

    def __init__(
        self, strands: Sequence[Segment], suffixes: Sequence[Segment], own_start: int, paths: Sequence[Path],
        outer_states: Sequence["StateIndex"],
    ) -> None:  # fmt: skip
        self._segments: dict[SegmentKind, Sequence[Segment]] = {"strands": strands, "suffixes": suffixes}
        self._own_start, self._paths, self._outer_states = own_start, paths, outer_states
        bounds = bounds_of(segment.length for segment in suffixes)
        self.suffixes = Spans(q=bounds, k=bounds)
        self.numbers = {end_of(path): number for number, path in enumerate(paths)}
        self._initial: dict[tuple[SegmentKind, torch.device], list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        self._last_tokens: dict[tuple[int, torch.device], torch.Tensor] = {}

    @functools.cached_property
    def rounds(self) -> list[tuple[list[ScanRun], Spans]]:
        """The strands, cut where a path with a state ends, in rounds: a round starts from states of earlier rounds.

        Returns:
            of each round its runs, also as spans. All layers get the same objects, so that kernels can store what they
            derive from them.
        """
        rounds: list[list[ScanRun]] = []
        round_of: dict[int, int] = {}
        ends, end = list(self.numbers), self._own_start
        for segment in self._segments["strands"]:
            start, after, end = end, end_of(segment.path), end + segment.length
            for cut in ends[bisect_right(ends, start) : bisect_right(ends, end)]:
                round_of[cut] = round_of.get(after, -1) + 1  # the path of another packed row has its state already
                if round_of[cut] == len(rounds):
                    rounds.append([])
                rounds[round_of[cut]].append(ScanRun(start, cut, after))
                start = after = cut
            assert start == end, "no segment continues the end of this strand"
        bounds = [bounds_of(run.end - run.start for run in runs) for runs in rounds]
        return [(runs, Spans(q=ends, k=ends)) for runs, ends in zip(rounds, bounds, strict=True)]

    def initial(self, of: SegmentKind, device: torch.device) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Where the initial states of strands or suffixes come from, built once.

        Returns:
            (level, segments, states) for levels of the prefix source: segment `segments[i]` starts from state
            `states[i]` of that level; both [n] int64. Segments that start from zeros are in no entry. Nor are strands
            that continue a strand of this packed row, which `rounds` handles.
        """
        if (of, device) not in self._initial:
            ends = [(i, end_of(segment.path)) for i, segment in enumerate(self._segments[of])]
            levels = [*self._outer_states, self] if of == "suffixes" else self._outer_states
            initial = []
            for level, index in enumerate(levels):
                pairs = [(i, index.numbers[end]) for i, end in ends if end in index.numbers]
                if pairs:
                    segments, states = on_device(torch.tensor(pairs, dtype=torch.int64).T, device)
                    initial.append((level, segments, states))
            assert of == "strands" or sum(len(states) for *_, states in initial) == sum(end > 0 for _, end in ends)
            self._initial[of, device] = initial
        return self._initial[of, device]

    def last_tokens(self, length: int, device: torch.device) -> torch.Tensor:
        """[M, length] int64: the last `length` inputs on each path with a state, as indices of [zero | T | inherited]:
        a zero where the path is shorter; the packed row's T tokens; and [strands, length], flattened, the inputs before
        each strand that continues an outer one. Built once."""
        if (length, device) not in self._last_tokens:
            strands = self._segments["strands"]
            inherited = 1 + sum(segment.length for segments in self._segments.values() for segment in segments)
            bounds = bounds_of(strand.length for strand in strands)
            strand_of = {first: i for i, first in enumerate(bounds[:-1])}
            tails = []
            for path in self._paths:
                runs = part_of(path, self._own_start)
                own = ranges(last_of(runs, length)) + 1
                strand = strand_of[runs[0][0]]
                before = inherited + strand * length + torch.arange(length)
                before = before if strands[strand].path else torch.zeros_like(before)
                tails.append(torch.cat([before[len(own) :], own]))
            self._last_tokens[length, device] = on_device(torch.stack(tails), device)
        return self._last_tokens[length, device]
