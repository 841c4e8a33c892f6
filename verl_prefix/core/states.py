"""States of recurrent layers: after which paths of a packed row a layer leaves a state, and where segments start."""

import functools
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
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


class Starts(NamedTuple):
    """Segments that start from states of one level of the prefix source.

    Attributes:
        segments: [n] int64, which of the strands or suffixes.
        numbers: [n] int64, from which state of the level each of them starts.
    """

    level: int
    segments: torch.Tensor
    numbers: torch.Tensor


class StateIndex:
    """Numbers of the states that a recurrent layer leaves in a packed row, one after each of `paths`.

    Args:
        strands, suffixes: segments of the packed row.
        own_start: where the packed row's own strands begin in the prefix source.
        paths: `PackedRow.state_paths`, in the order of their ends.
        outer_states: the states of the packed rows around, the outermost first.

    Attributes:
        suffixes: the suffixes, which read themselves, as spans that count from the first suffix's first token.
        numbers: number of the state after each path, by the path's `end_of`, in ascending order.
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
        self._starts: dict[tuple[SegmentKind, torch.device], list[Starts]] = {}
        self._last_tokens: dict[tuple[int, torch.device], torch.Tensor] = {}

    @functools.cached_property
    def rounds(self) -> list[tuple[list[ScanRun], Spans]]:
        """The strands, cut where a path with a state ends, in rounds: a round starts from states of earlier rounds.

        Returns:
            of each round its runs, also as spans. All layers get the same objects, so that kernels can store what they
            derive from them.
        """
        rounds: list[list[ScanRun]] = []
        round_of: dict[int, int] = {}  # by the end of each run
        cuts, strands = [*self.numbers], self._segments["strands"]
        strand_bounds = accumulate((strand.length for strand in strands), initial=self._own_start)
        for strand, (start, end) in zip(strands, pairwise(strand_bounds), strict=True):
            after = end_of(strand.path)
            for cut in cuts[bisect_right(cuts, start) : bisect_right(cuts, end)]:
                # A run is in round 0 if it continues nothing, or a strand of a packed row around.
                number = round_of[cut] = round_of.get(after, -1) + 1
                if number == len(rounds):
                    rounds.append([])
                rounds[number].append(ScanRun(start, cut, after))
                start = after = cut
            assert start == end, "no segment continues the end of this strand"
        bounds_of_rounds = [bounds_of(run.end - run.start for run in runs) for runs in rounds]
        return [(runs, Spans(q=bounds, k=bounds)) for runs, bounds in zip(rounds, bounds_of_rounds, strict=True)]

    def starts(self, of: SegmentKind, device: torch.device) -> list[Starts]:
        """From which states strands or suffixes start, by level; built once. Segments that start from zeros are in no
        entry. Nor are strands that continue a strand of this packed row, which `rounds` handles."""
        if (of, device) not in self._starts:
            ends = [(i, end_of(segment.path)) for i, segment in enumerate(self._segments[of])]
            starts = []
            for level, index in enumerate([*self._outer_states, self] if of == "suffixes" else self._outer_states):
                if pairs := [(i, index.numbers[end]) for i, end in ends if end in index.numbers]:
                    segments, numbers = on_device(torch.tensor(pairs, dtype=torch.int64).T, device)
                    starts.append(Starts(level, segments, numbers))
            assert of == "strands" or sum(len(found.numbers) for found in starts) == sum(end > 0 for _, end in ends)
            self._starts[of, device] = starts
        return self._starts[of, device]

    def last_tokens(self, length: int, device: torch.device) -> torch.Tensor:
        """[M, length] int64: the last `length` inputs on each path with a state, as indices of three parts: a zero,
        which stands where a path is shorter; the packed row's T inputs; and for each strand the `length` inputs before
        it, which it inherits if it continues an outer strand. Built once.

        For example, `length` is 2, and strand 1 continues an outer strand:

            zero   strand 0   strand 1   suffixes   before strand 0   before strand 1
            0      1          2 3 4      5 6 7 8    9 10              11 12

            path ends after strand 0                  [0, 1]
            path ends after strand 1's first token    [12, 2]
            path ends after strand 1                  [3, 4]
        """
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
