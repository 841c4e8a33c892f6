"""What a rank computes of a batch, and in which order: a plan of passes."""

from dataclasses import dataclass, replace

from verl_prefix.core.groups import Group

# One phase-B micro-batch: for each of its groups, (number among the phased pass's groups, that group with only those
# rows whose suffixes the wave computes).
Wave = tuple[tuple[int, Group], ...]


@dataclass(frozen=True)
class PackedPass:
    """Groups whose prefixes and suffixes are one graph. Without groups it is a dummy, which keeps this rank's
    collectives in step."""

    groups: tuple[Group, ...] = ()


@dataclass(frozen=True)
class PhasedPass:
    """Groups whose prefixes run together in phases A and C, and the waves between. Without groups, or with an empty
    wave, there are dummies as in `PackedPass`.

    Attributes:
        groups: those whose prefixes phase A computes.
        waves: phase B, in its order.
        reads_strands: on some rank rows read outputs of strands; then lm_head runs in phase A on every rank.
    """

    groups: tuple[Group, ...] = ()
    waves: tuple[Wave, ...] = ()
    reads_strands: bool = False


@dataclass(frozen=True)
class Plan:
    """All passes of one rank's batch.

    Attributes:
        passes: packed ones first.
        split_groups: number of groups whose prefix is computed more than once.
        idle_groups: those without response tokens, which no pass computes.
        at_once: on a pipeline of several stages, how many phased passes have their prefixes in memory at once; None:
            all.
    """

    passes: tuple[PackedPass | PhasedPass, ...]
    split_groups: int = 0
    idle_groups: tuple[Group, ...] = ()
    at_once: int | None = None

    @property
    def packed(self) -> list[PackedPass]:
        return [one for one in self.passes if isinstance(one, PackedPass)]

    @property
    def phased(self) -> list[PhasedPass]:
        return [one for one in self.passes if isinstance(one, PhasedPass)]

    @property
    def waves(self) -> list[Wave]:
        return [wave for one in self.phased for wave in one.waves]

    @property
    def num_physical_tokens(self) -> int:
        return sum(group.num_physical_tokens for one in self.passes for group in one.groups)

    @property
    def rounds(self) -> list[list[PhasedPass]]:
        """Phased passes by `at_once`; one empty round where there are none."""
        phased, size = self.phased, self.at_once or max(len(self.phased), 1)
        return [phased[start : start + size] for start in range(0, len(phased), size)] or [[]]

    def with_last_tokens(self) -> "Plan":
        """The plan that also computes the last token of each row, whose output nobody reads: a `TokenBatch.is_read`
        leaves it out. Passes are longer by a token per row."""

        def longer(group: Group) -> Group:
            return replace(group, suffix_lens=tuple(n + 1 for n in group.suffix_lens))

        passes: list[PackedPass | PhasedPass] = []
        for one in self.passes:
            groups = tuple(map(longer, one.groups))
            if isinstance(one, PackedPass):
                passes.append(replace(one, groups=groups))
            else:
                waves = tuple(tuple((number, longer(group)) for number, group in wave) for wave in one.waves)
                passes.append(replace(one, groups=groups, waves=waves))
        return replace(self, passes=tuple(passes))


def largest_wave(plan: Plan) -> int:
    """Suffix tokens of the plan's largest wave; 0 without waves."""
    return max((sum(piece.num_suffix_tokens for _, piece in wave) for wave in plan.waves), default=0)


def most_outputs(plan: Plan) -> int:
    """The most tokens of one forward of the plan that can go through lm_head."""
    packed = (sum(g.num_suffix_tokens + g.num_strand_outputs for g in one.groups) for one in plan.packed)
    phase_a = (sum(g.num_strand_outputs for g in one.groups) for one in plan.phased)
    return max(*packed, *phase_a, largest_wave(plan), 0)
