"""What a rank computes of a batch, and in which order: a plan of passes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from verl_prefix.core.groups import Group
from verl_prefix.core.output_index import num_own_strand_outputs
from verl_prefix.core.packed_row import Phase

OnePass = TypeVar("OnePass", bound="_PassBase")


@dataclass(frozen=True)
class _PassBase:
    """The groups of a pass. A pass whose own forward has no tokens is a dummy, which keeps this rank's collectives in
    step."""

    groups: tuple[Group, ...] = ()
    phase: ClassVar[Phase]

    def tokens_of(self, group: Group) -> int:
        """Number of tokens that the pass's own forward computes of one of its groups."""
        return group.num_own_strand_tokens if self.phase == "phase_a" else group.num_physical_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the pass's own forward computes, without those of nested passes."""
        return sum(map(self.tokens_of, self.groups))

    def with_last_tokens(self: OnePass) -> OnePass:
        """The pass that also computes each row's last token."""
        longer = [replace(group, row_ends=tuple(end + 1 for end in group.row_ends)) for group in self.groups]
        return replace(self, groups=tuple(longer))


@dataclass(frozen=True)
class PackedPass(_PassBase):
    """Groups whose prefixes and suffixes are one graph. Each group has only those rows that the pass computes."""

    phase: ClassVar[Phase] = "packed"
    depth: ClassVar[int] = 1


@dataclass(frozen=True)
class Wave(PackedPass):
    """A packed pass that is nested in a phased one, and computes suffixes alone, on every rank."""

    phase: ClassVar[Phase] = "wave"
    depth: ClassVar[int] = 0


@dataclass(frozen=True)
class PhasedPass(_PassBase):
    """Groups whose prefixes run together in phases A and C, and the passes that are nested in it, which are phase B.

    Nested passes read strands of phase A, and of all phases A around it. Waves compute suffixes alone; other nested
    passes also compute the strands that follow those of phase A. Groups here have the rows of all nested passes.
    For deep trees `SplitGroup` makes these groups, and those of the nested passes.

    Attributes:
        waves: the nested passes that compute suffixes alone; in groups of one prompt there are no others.
        packed, phased: the other nested passes, of which phased ones have phases A and C of their own.
        reads_strands: rows of this or another rank read outputs of phase A. Then lm_head runs in it on every rank.
    """

    phase: ClassVar[Phase] = "phase_a"
    waves: tuple[Wave, ...] = ()
    packed: tuple[PackedPass, ...] = ()
    phased: "tuple[PhasedPass, ...]" = ()
    reads_strands: bool = False

    @property
    def nested(self) -> "tuple[Pass, ...]":
        """Phase B: all nested passes, in the order in which they run."""
        return (*self.waves, *self.packed, *self.phased)

    @property
    def depth(self) -> int:
        """How many passes are nested in one another, this pass among them; waves do not count."""
        return 1 + max((planned.depth for planned in self.nested), default=0)

    def with_last_tokens(self) -> "PhasedPass":
        waves = tuple(wave.with_last_tokens() for wave in self.waves)
        packed = tuple(planned.with_last_tokens() for planned in self.packed)
        phased = tuple(planned.with_last_tokens() for planned in self.phased)
        return replace(super().with_last_tokens(), waves=waves, packed=packed, phased=phased)


Pass = PackedPass | PhasedPass


@dataclass(frozen=True)
class Plan:
    """All passes of one rank's batch.

    Attributes:
        passes: packed passes come first.
        recomputed_tokens: tokens that are computed once more, since the budget cuts their group.
        idle_groups: groups that no pass computes: without response tokens, or left out by `leave_out`.
        at_once: on a pipeline of several stages, how many phased passes may be between their phases A and C at the same
            time, with their prefixes in memory; None: all.
    """

    passes: tuple[Pass, ...]
    recomputed_tokens: int = 0
    idle_groups: tuple[Group, ...] = ()
    at_once: int | None = None

    @property
    def packed(self) -> list[PackedPass]:
        return [planned for planned in self.passes if isinstance(planned, PackedPass)]

    @property
    def phased(self) -> list[PhasedPass]:
        return [planned for planned in self.passes if isinstance(planned, PhasedPass)]

    @property
    def all_passes(self) -> list[Pass]:
        """All passes, also nested passes; each phased pass stands before the passes that are nested in it."""
        return [each for planned in self.passes for each in _with_nested(planned)]

    @property
    def waves(self) -> list[Wave]:
        return [planned for planned in self.all_passes if isinstance(planned, Wave)]

    @property
    def num_losses(self) -> int:
        """Number of forwards that end in a loss: packed passes, waves among them."""
        return sum(isinstance(planned, PackedPass) for planned in self.all_passes)

    @property
    def depth(self) -> int:
        """How many passes are nested in one another, without waves; 0: there are no passes."""
        return max((planned.depth for planned in self.passes), default=0)

    @property
    def num_physical_tokens(self) -> int:
        return sum(planned.num_tokens for planned in self.all_passes)

    @property
    def largest_wave(self) -> int:
        """Suffix tokens of the largest wave; 0 without waves."""
        return max((wave.num_tokens for wave in self.waves), default=0)

    @property
    def most_outputs(self) -> int:
        """The most tokens of one forward that can go through lm_head."""
        outputs = [0]
        for planned in self.all_passes:
            outputs.append(sum(num_own_strand_outputs(group) for group in planned.groups))
            if isinstance(planned, PackedPass):
                outputs[-1] += sum(group.num_suffix_tokens for group in planned.groups)
        return max(outputs)

    @property
    def rounds(self) -> list[list[PhasedPass]]:
        """For pipelines: phased passes in rounds of `at_once`; an empty round where there are no phased passes."""
        phased = self.phased
        if not phased or self.at_once is None:
            return [phased]
        return [phased[start : start + self.at_once] for start in range(0, len(phased), self.at_once)]

    def with_last_tokens(self) -> "Plan":
        """The plan that also computes the last token of each of its rows, for routers that count it. Nobody may read
        its output: a `TokenBatch.is_read` has to leave it out. Passes are longer by a token per row."""
        return replace(self, passes=tuple(planned.with_last_tokens() for planned in self.passes))


def _with_nested(planned: Pass) -> Iterator[Pass]:
    yield planned
    if isinstance(planned, PhasedPass):
        for nested in planned.nested:
            yield from _with_nested(nested)
