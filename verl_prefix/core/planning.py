"""Makes plans: which groups share a pass, how suffixes fall into waves, and the same counts on every rank.

A budget counts physical tokens: tokens that are computed. All functions here are pure functions of lengths, but for
`pad_to_same_passes` and what it calls, which have collectives.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from verl_prefix.core.bins import first_fit
from verl_prefix.core.group_parts import pruned, units_of, with_rows
from verl_prefix.core.groups import Group
from verl_prefix.core.nesting import Nesting, Work
from verl_prefix.core.plan import OnePass, PackedPass, Pass, PhasedPass, Plan, Wave


def live_in_pass_order(groups: Sequence[Group]) -> list[Group]:
    """The groups with suffix tokens, those without a prefix last: so the suffixes that read a prefix have no gaps
    between them, and are one slice."""
    live = (group for group in groups if group.num_suffix_tokens)
    return sorted(live, key=lambda group: group.num_own_strand_tokens == 0)


def make_plan(
    groups: Sequence[Group],
    budget: int,
    schedule: str,
    wave_tokens: int | None = None,
    offload: bool = False,
    least_wave: int = 1,
    nests: bool = True,
) -> Plan:
    """Makes one rank's plan. The tokens that are alive at once fit the budget, with these exceptions:

    - a row that exceeds the budget alone;
    - a wave within `least_wave`, whatever prefixes leave of the budget;
    - in a tree whose passes do not nest, the strands of a piece with its longest suffix;
    - on a pipeline of several stages, the phased passes that are alive at once. Callers limit these by `Plan.at_once`.

    Args:
        groups: all groups of the rank's rows.
        budget: physical tokens of one pass (verl's ppo_max_token_len_per_gpu).
        schedule: "packed": all groups in packed passes; a group that exceeds the budget is cut into pieces. "phased":
            phase A, waves, phase C for all. "auto": packed where the whole group fits the budget, phased where it does
            not.
        wave_tokens: the most suffix tokens of one wave, and the most tokens of a nested packed pass. Waves are smaller
            where prefixes, whose graph stays alive, leave less of the budget. None: what prefixes leave. A number is
            ignored where `leaves_room` is False: a budget may follow from a batch, when it is too late to refuse an
            option. So callers ask `leaves_room`, and refuse the number or warn of it.
        offload: prefixes wait in host memory during the waves, and do not count.
        least_wave: tokens that a wave may always have, whatever prefixes leave; not in passes that nest others.
        nests: a group may become nested passes, where these compute fewer tokens than its pieces; or as many, and they
            fit the budget better or are fewer forwards. False on a pipeline of several stages, which runs phases A
            apart.

    Raises:
        ValueError: the schedule is none of these, or `wave_tokens` is below 1.
    """
    if wave_tokens is not None and wave_tokens < 1:
        raise ValueError(f"wave_tokens={wave_tokens}: a wave has 1 token or more; None: what prefixes leave")
    if schedule not in ("packed", "phased", "auto"):
        raise ValueError(f"schedule={schedule!r}: a plan is packed, phased or auto")
    live = live_in_pass_order(groups)
    to_pack, to_phase = list[Group](), list[Group]()
    for group in live:
        if schedule == "packed" or (schedule == "auto" and group.num_physical_tokens <= budget):
            to_pack.append(group)
        else:
            to_phase.append(group)
    pieces = [piece for group in to_pack for piece in _pieces(group, budget)]
    bins = first_fit(pieces, lambda group: group.num_physical_tokens, budget)
    packed = (PackedPass(tuple(live_in_pass_order(members))) for members in bins)
    if wave_tokens is not None and not leaves_room(wave_tokens, budget, offload):
        wave_tokens = None
    phased = _phased_passes(to_phase, _Limits(budget, wave_tokens, offload, least_wave), nests)
    plan = Plan((*packed, *phased), idle_groups=tuple(group for group in groups if not group.num_suffix_tokens))
    return replace(plan, recomputed_tokens=plan.num_physical_tokens - sum(group.num_physical_tokens for group in live))


class _Limits(NamedTuple):
    """How large phased passes may be, by arguments of `make_plan`."""

    budget: int
    wave_tokens: int | None
    offload: bool
    least_wave: int

    def waves(self, groups: Sequence[Group]) -> tuple[Wave, ...]:
        """Waves in what the strands of `groups` leave of the budget."""
        resident = 0 if self.offload else sum(group.num_own_strand_tokens for group in groups)
        room = max(self.budget - resident, self.least_wave)
        return make_waves(groups, room if self.wave_tokens is None else min(self.wave_tokens, room))


def _phased_passes(groups: Sequence[Group], limits: _Limits, nests: bool) -> list[PhasedPass]:
    """The phased passes of a plan, those of deep trees last.

    For example, the budget is 100, prompts have prefixes of 30, 30 and 20 tokens, the longest suffix has 45. Without
    `wave_tokens` the prefixes of a pass may have 50 (`prefix_room`), and 55 beside the longest suffix: one pass has the
    prefixes 30 and 20, another has 30 (`_phased_sets`). Their waves may have 50 and 70 tokens (`_Limits.waves`).
    """
    budget, wave_tokens, offload, _ = limits
    room = prefix_room(budget, wave_tokens, offload)
    pieces, phased, deep = list[Group](), list[PhasedPass](), list[PhasedPass]()
    for group in groups:
        cut = _pieces(group, room, suffixes=False)
        nesting = Nesting(group, budget, wave_tokens, offload) if nests else None
        nested = nesting and nesting.pass_if_cheaper(than=_work_of_pieces(cut, limits))
        if nested:
            deep.append(nested)
        else:
            pieces += cut
    for members in _phased_sets(pieces, room, sys.maxsize if offload else budget):
        ordered = tuple(live_in_pass_order(members))
        reads_strands = any(group.reads_strands for group in ordered)
        phased.append(PhasedPass(ordered, limits.waves(ordered), reads_strands=reads_strands))
    return [*phased, *deep]


def _work_of_pieces(pieces: Sequence[Group], limits: _Limits) -> Work:
    """Of a group whose pieces are each a phased pass. Alive are at least a piece's strands with its longest suffix."""

    def alive(piece: Group) -> int:
        strands, longest = piece.num_own_strand_tokens, max(piece.suffix_lens)
        return max(strands, longest) if limits.offload else strands + longest

    tokens = sum(piece.num_physical_tokens for piece in pieces)
    return Work(tokens, max(map(alive, pieces)), sum(1 + len(limits.waves([piece])) for piece in pieces))


def leaves_room(wave_tokens: int, budget: int, offload: bool) -> bool:
    """Whether waves of `wave_tokens` leave some of the budget to prefixes; with `offload`, whether a wave fits it."""
    return wave_tokens <= budget if offload else wave_tokens < budget


def prefix_room(budget: int, wave_tokens: int | None, offload: bool) -> int:
    """Tokens of the budget that the strands of a phased pass may have, beside its waves."""
    if offload:
        return budget
    return budget - wave_tokens if wave_tokens and leaves_room(wave_tokens, budget, offload) else budget // 2


class _UnitReads(NamedTuple):
    """The tokens of a unit, of which pieces count.

    Attributes:
        suffix_tokens: number of tokens of its suffix; 0 where suffixes do not count.
        strands: what its rows read, as of `Group.strands_before`.
    """

    suffix_tokens: int
    strands: list[tuple[int, int, int]]


class _Cut(NamedTuple):
    """A way to cut units into pieces, from one unit on. The least is the best, compared field by field.

    Attributes:
        tokens: tokens of all pieces.
        num_pieces: number of pieces.
        largest: in trees, tokens of the largest piece; 0 with one prompt.
        num_left: number of units after the first piece.
    """

    tokens: int
    num_pieces: int
    largest: int
    num_left: int


def _pieces(group: Group, budget: int, suffixes: bool = True) -> list[Group]:
    """Cuts the group between rows into pieces that fit the budget; with `suffixes=False` only their strands have to.

    A piece has at least one suffix, however long that suffix and its path are. Of all cuts between neighbouring units
    the best has, compared in this order, the fewest tokens to compute; the fewest pieces; in trees, the smallest
    largest piece; the longest first pieces.
    """
    if (group.num_physical_tokens if suffixes else group.num_own_strand_tokens) <= budget:
        return [group]
    is_tree = len(group.strands) > 1
    if not suffixes and not is_tree:  # one piece would have the whole strand in any case
        return [group]
    units, output_lens = list(units_of(group)), group.output_lens
    reads = []
    for start, end in units:
        suffix_tokens = sum(group.suffix_lens[start:end]) if suffixes else 0
        forks = [group.forks[i] for i in range(start, end) if output_lens[i]]
        reads.append(_UnitReads(suffix_tokens, [strand for fork in forks for strand in group.strands_before(fork)]))
    pieces = _best_cut(reads, budget, is_tree)
    if len(pieces) == 1:
        return [group]
    return [pruned(with_rows(group, range(units[first][0], units[last][1]))) for first, last in pieces]


def _best_cut(units: Sequence[_UnitReads], budget: int, is_tree: bool) -> list[tuple[int, int]]:
    """The first and the last unit of each piece of the best cut. It is found from the last unit backwards: a cut is its
    first piece, and the best cut of the units after that."""
    num_units = len(units)
    best = {num_units: _Cut(0, 0, 0, 0)}  # from each unit on
    for first in reversed(range(num_units)):
        cuts = []
        for end, tokens in enumerate(_tokens_of_pieces(units[first:], budget), start=first + 1):
            after = best[end]
            largest = max(tokens, after.largest) if is_tree else 0
            cuts.append(_Cut(tokens + after.tokens, 1 + after.num_pieces, largest, num_units - end))
        best[first] = min(cuts)
    pieces, first = [], 0
    while first < num_units:
        end = num_units - best[first].num_left
        pieces.append((first, end - 1))
        first = end
    return pieces


def _tokens_of_pieces(units: Sequence[_UnitReads], budget: int) -> Iterator[int]:
    """Yields the tokens of a piece of the first unit, of the first two, and so on, as long as the budget lets the piece
    grow. The first unit may exceed it, and a unit that adds no token always fits."""
    tokens = 0
    read_until = dict[int, int]()  # of each strand, where the tokens end that the piece has
    for unit in units:
        added = unit.suffix_tokens
        for strand, start, end in unit.strands:
            known = read_until.get(strand, start)
            added += max(end - known, 0)
            read_until[strand] = max(end, known)
        if tokens and added and tokens + added > budget:
            return
        tokens += added
        yield tokens


def make_waves(groups: Sequence[Group], wave_tokens: int) -> tuple[Wave, ...]:
    """Suffixes of `groups` in order, in waves of at most `wave_tokens` tokens, or of one suffix."""
    members: list[dict[int, list[int]]] = [{}] if groups else []  # of each wave: by a group's number, as in `with_rows`
    used = 0  # tokens of the last wave
    for number, group in enumerate(groups):
        for start, end in units_of(group):
            num_tokens = sum(group.suffix_lens[start:end])
            if used and used + num_tokens > wave_tokens:
                members.append({})
                used = 0
            used += num_tokens
            members[-1].setdefault(number, []).extend(range(start, end))
    suffixes = [replace(group, num_outer=len(group.strands)) for group in groups]  # phase A computes all strands
    return tuple(Wave(tuple(with_rows(suffixes[i], chosen) for i, chosen in wave.items())) for wave in members)


def _phased_sets(groups: Sequence[Group], room: int, budget: int) -> Iterator[list[Group]]:
    """Yields sets of groups, each for one phased pass. A set's strands fit `room`, and with the longest suffix the
    budget, unless one group alone exceeds it."""
    for members in first_fit(groups, lambda group: group.num_own_strand_tokens, room):
        longest = max(n for group in members for n in group.suffix_lens)
        yield from first_fit(members, lambda group: group.num_own_strand_tokens, min(room, budget - longest))


def limit_waves(plan: Plan, tokens: int) -> Plan:
    """The plan with waves of at most `tokens` suffix tokens, or of one row. No pass's largest wave grows.

    Args:
        plan: from `make_plan`, before `pad_to_same_passes`.
    """

    def limited(planned: PhasedPass) -> PhasedPass:
        waves = planned.waves
        if any(wave.num_tokens > tokens for wave in waves):
            # A row of a wave leaves the tree where it leaves phase A, so its fork is the same in `planned.groups`.
            rows = {row for wave in waves for piece in wave.groups for row in piece.rows}
            parts = [
                with_rows(group, [i for i, row in enumerate(group.rows) if row in rows]) for group in planned.groups
            ]
            waves = make_waves([part for part in parts if part.rows], tokens)
        return replace(planned, waves=waves, phased=tuple(map(limited, planned.phased)))

    return replace(plan, passes=(*plan.packed, *map(limited, plan.phased)))


def pad_to_same_passes(plan: Plan, reduce_max: Callable[[Sequence[float]], Sequence[float]]) -> Plan:
    """Adds dummies to the plan, so that every rank runs the same passes in the same order.

    Args:
        plan: this rank's plan.
        reduce_max: element-wise maximum over ranks of a list, equally long on every rank.
    """
    packed, phased = plan.packed, _largest_first(plan.phased)
    # The limit is negated, so that the maximum is the smallest limit.
    limit = math.inf if plan.at_once is None else plan.at_once
    num_packed, num_phased, negated = reduce_max([len(packed), len(phased), -limit])
    phased = _same_shapes(_padded(phased, int(num_phased), PhasedPass()), reduce_max)
    passes: tuple[Pass, ...] = (*_padded(packed, int(num_packed), PackedPass()), *phased)
    at_once = int(-negated) if math.isfinite(negated) else None
    return replace(plan, passes=passes or (PackedPass(),), at_once=at_once)


def _same_shapes(
    phased: Sequence[PhasedPass], reduce_max: Callable[[Sequence[float]], Sequence[float]]
) -> list[PhasedPass]:
    """Pads the phased passes of one nesting depth, equally many on every rank: each gets as many nested passes of each
    kind as it has on any rank."""
    if not phased:
        return []
    own = [_Shape(one.reads_strands, len(one.waves), len(one.packed), len(one.phased)) for one in phased]
    most = iter(reduce_max([count for shape in own for count in shape]))
    shapes = [_Shape(*map(int, islice(most, len(shape)))) for shape in own]
    padded, inner = list[PhasedPass](), list[PhasedPass]()
    for planned, shape in zip(phased, shapes, strict=True):
        waves = _padded(planned.waves, shape.num_waves, Wave())
        packed = _padded(planned.packed, shape.num_packed, PackedPass())
        padded.append(PhasedPass(planned.groups, waves, packed, reads_strands=bool(shape.reads_strands)))
        inner += _padded(_largest_first(planned.phased), shape.num_phased, PhasedPass())
    all_inner = iter(_same_shapes(inner, reduce_max))
    pairs = zip(padded, shapes, strict=True)
    return [replace(planned, phased=tuple(islice(all_inner, shape.num_phased))) for planned, shape in pairs]


class _Shape(NamedTuple):
    """What is the same of a phased pass on every rank: whether it `reads_strands`, and its nested passes by kind."""

    reads_strands: int
    num_waves: int
    num_packed: int
    num_phased: int


def _largest_first(phased: Sequence[PhasedPass]) -> list[PhasedPass]:
    """Sorts phased passes, so that ranks run their deepest ones beside each other."""
    return sorted(phased, key=lambda planned: (-planned.depth, -len(planned.nested)))


def _padded(passes: Sequence[OnePass], length: int, dummy: OnePass) -> tuple[OnePass, ...]:
    return (*passes, *[dummy] * (length - len(passes)))
