"""Groups -> one packed row: first all strands, then all suffixes.

    packed row    [ P of group 0 | P of group 1 | ... | S S S of group 0 | S S of group 1 | ... ]
    causal call   every segment (a strand or a suffix) reads itself
    cross calls   every segment reads the tokens before it: its path

A packed row knows the place of each of its tokens in the batch. So tokens keep their positions, and outputs go back to
where they belong. In groups of one prompt, cross calls read slices of the prefixes, and no key or value is copied.
In deeper trees keys are copied, unless all keys of a call are one run. They are also copied where a window cuts a path:
what remains of it is read in the causal call (`call_builder`).

Where passes nest, segments read strands of the packed rows around theirs as well (`prefix_source`). A cross call reads
those of one packed row.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from verl_prefix.core.call_builder import calls_of
from verl_prefix.core.calls import AttentionParams, Call, built_once
from verl_prefix.core.groups import Group
from verl_prefix.core.output_index import OutputIndex, RowReads, index_outputs
from verl_prefix.core.prefix_source import PrefixSource
from verl_prefix.core.runs import Path, Segment, end_of, ranges
from verl_prefix.core.states import StateIndex

# What a packed row has: strands and suffixes; strands alone; or suffixes alone.
Phase = Literal["packed", "phase_a", "wave"]


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One packed row of T tokens.

    Attributes:
        places: [T] int64, where each token stands in the batch's flat values.
        segments: the strands, then the suffixes.
        groups: the groups of which it computes strands, suffixes or both; none in a dummy.
        source: the prefix source, by whose tokens paths count.
        output_index: the outputs that rows read; None: there are none, as in a dummy, and in a phase A of groups of one
            prompt.
        state_paths: paths that end in this packed row's strands and that some segment continues, in the order of their
            ends. A recurrent layer leaves a state after each.
        outer: of a nested pass, the packed row of the phase A around it; None: nothing is around it.
        num_strands: how many of the first segments are strands.
        phase: which forward it is for; the same on every rank, also where this rank has a dummy.
    """

    places: torch.Tensor
    segments: tuple[Segment, ...]
    groups: tuple[Group, ...] = ()
    source: PrefixSource = PrefixSource()
    output_index: OutputIndex | None = None
    state_paths: tuple[Path, ...] = ()
    outer: "PackedRow | None" = None
    num_strands: int = 0
    phase: Phase = "packed"
    _calls: dict[tuple[AttentionParams, torch.device], tuple[Call, ...]] = built_once()

    @property
    def is_dummy(self) -> bool:
        """Whether it has one token, and no rows: it keeps a rank's collectives in step."""
        return not self.groups

    @property
    def num_tokens(self) -> int:
        return len(self.places)

    @functools.cached_property
    def num_strand_tokens(self) -> int:
        """How many of the first tokens are of strands."""
        return sum(segment.length for segment in self.segments[: self.num_strands])

    @property
    def levels(self) -> "tuple[PackedRow, ...]":
        """The packed row of each level: those around this packed row, the outermost first, each of which has a cache;
        and itself."""
        return (*self.outer.levels, self) if self.outer else (self,)

    @functools.cached_property
    def state_index(self) -> StateIndex:
        """The states that recurrent layers leave in this packed row, and the states that its segments start from."""
        strands, suffixes = self.segments[: self.num_strands], self.segments[self.num_strands :]
        outer_states = [level.state_index for level in self.levels[:-1]]
        return StateIndex(strands, suffixes, self.source.own_start, self.state_paths, outer_states)

    @property
    def output_places(self) -> torch.Tensor:
        """[n] int64: the place in the batch of each output that rows read, which gives the next token's log-prob."""
        return self.places[:0] if self.output_index is None else self.output_index.places

    @functools.cached_property
    def head_tokens(self) -> torch.Tensor:
        """[m] int64: tokens of the packed row that go through lm_head, in ascending order. Where no output is read, the
        last token does: backward starts there."""
        if self.output_index is None:
            return torch.arange(self.num_tokens - 1, self.num_tokens)
        return self.output_index.tokens_at(self.source.level)

    def with_outputs(self, is_read: torch.Tensor) -> "PackedRow":
        """The packed row that reads only outputs of the batch's tokens `is_read` [N] (bool). One output of its own
        always stays, since a backward needs a start. A packed row without outputs stays as it is."""
        index = self.output_index
        return self if index is None else replace(self, output_index=index.only(is_read, self.source.level))

    def calls(self, params: AttentionParams, device: torch.device) -> tuple[Call, ...]:
        """A layer's kernel calls, the first over all queries; built once for all layers of the same `params`."""
        if (params, device) not in self._calls:
            self._calls[params, device] = tuple(calls_of(self.segments, params, device, self.source.level_starts))
        return self._calls[params, device]


def pack_groups(
    groups: Sequence[Group], offsets: Sequence[int], phase: Phase = "packed", outer: PackedRow | None = None
) -> PackedRow:
    """Builds the packed row of `groups`. Without anything to compute it is a dummy: one token of the batch that reads
    itself. So is a phase A of prompts of one token.

    Args:
        groups: in any order. In the order of `planning.live_in_pass_order`, the suffixes that read a prefix are
            neighbours, so that no cross call of groups of one prompt copies its queries.
        offsets: first token of each row in the batch's flat values (nested `offsets()`).
        phase: which forward it is for; a phase A has no suffixes.
        outer: of a nested pass, the packed row of the phase A around it; it and those around it have the outer strands
            of these groups.
    """
    source = PrefixSource.of(groups, offsets, outer.source if outer else None)
    strands, suffixes, rows = [], [], []  # segments, each after the place of its first token; what each row reads
    for group in groups:
        paths = source.paths(group, offsets)
        for strand in group.strands[group.num_outer :]:
            strands.append((strand.place(offsets), Segment(strand.end - strand.start, paths[strand.fork])))
        output_lens = group.output_lens
        for i, row in enumerate(group.rows):
            first_place, fork, suffix_len = int(offsets[row]), group.forks[i], group.suffix_lens[i]
            rows.append(RowReads(first_place + group.first_outputs[i], output_lens[i], suffix_len, paths[fork]))
            if suffix_len:
                suffixes.append((first_place + fork.start, Segment(suffix_len, paths[fork])))
    has_suffixes = phase != "phase_a"
    computed = [*strands, *suffixes] if has_suffixes else strands
    if not computed:
        first_token = torch.zeros(1, dtype=torch.int64)
        return PackedRow(first_token, (Segment(1),), source=source, outer=outer, phase=phase)
    # Suffixes that a phase A does not compute continue its paths all the same.
    state_paths = {segment.path for _, segment in [*strands, *suffixes] if end_of(segment.path) > source.own_start}
    return PackedRow(
        places=ranges([(place, segment.length) for place, segment in computed]),
        segments=tuple(segment for _, segment in computed),
        groups=tuple(groups),
        source=source,
        output_index=index_outputs(rows, source, has_suffixes),
        state_paths=tuple(sorted(state_paths, key=end_of)),
        outer=outer,
        num_strands=len(strands),
        phase=phase,
    )
