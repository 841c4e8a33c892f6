"""Budgets: which groups share a pass, how suffixes fall into waves, and the same counts on every rank.

A budget counts physical tokens, those that are computed. Pure functions of lengths; `agree` is the one collective.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from verl_prefix.core.groups import Group
from verl_prefix.core.layout import pass_order

Item = TypeVar("Item")


@dataclass(frozen=True)
class Work:
    """Groups that run together: one packed pass if `waves` is None, else phase A, the waves, and phase C.

    A wave lists (index into `groups`, the piece of that group whose suffixes it holds). Empty `groups`: a dummy with no
    rows, which keeps this rank's collectives in step.
    """

    groups: tuple[Group, ...] = ()
    waves: tuple[tuple[tuple[int, Group], ...], ...] | None = None


@dataclass(frozen=True)
class Plan:
    """All passes of one batch, packed ones first. `split_groups` counts groups whose prefix is computed repeatedly."""

    works: tuple[Work, ...]
    split_groups: int = 0
    idle_rows: tuple[Group, ...] = field(default=())

    @property
    def num_physical_tokens(self) -> int:
        return sum(group.num_physical_tokens for work in self.works for group in work.groups)


def _pieces(group: Group, budget: int) -> list[Group]:
    """The group cut so that each piece fits the budget; a piece has one suffix at least, however long that is."""
    pieces, start, used = [], 0, 0
    for end, suffix_len in enumerate(group.suffix_lens):
        if used and suffix_len and group.prefix_len + used + suffix_len > budget:
            pieces.append(group.piece(start, end))
            start, used = end, 0
        used += suffix_len
    return [*pieces, group.piece(start, len(group.rows))]


def first_fit(items: Sequence[Item], size: Callable[[Item], int], budget: int) -> list[list[Item]]:
    """First-fit decreasing: few bins, each within the budget unless a single item exceeds it."""
    bins: list[list[Item]] = []
    used: list[int] = []
    num_full = 0  # the first bins, which have no room for the smallest item
    smallest = min(map(size, items), default=0)
    for item in sorted(items, key=size, reverse=True):
        needed = size(item)
        while num_full < len(bins) and used[num_full] + smallest > budget:
            num_full += 1
        i = next((i for i in range(num_full, len(bins)) if used[i] + needed <= budget), len(bins))
        if i == len(bins):
            bins.append([])
            used.append(0)
        bins[i].append(item)
        used[i] += needed
    return bins


def make_waves(groups: Sequence[Group], wave_tokens: int) -> tuple[tuple[tuple[int, Group], ...], ...]:
    """Suffixes of `groups` in order, in waves of at most `wave_tokens` tokens (one suffix at least)."""
    waves: list[list[tuple[int, Group]]] = [[]] if groups else []
    used = 0
    for index, group in enumerate(groups):
        for row, suffix_len in enumerate(group.suffix_lens):
            if used and suffix_len and used + suffix_len > wave_tokens:
                waves.append([])
                used = 0
            used += suffix_len
            last = waves[-1][-1] if waves[-1] else None
            if last and last[0] == index:
                waves[-1][-1] = (index, group.piece(row - len(last[1].rows), row + 1))
            else:
                waves[-1].append((index, group.piece(row, row + 1)))
    return tuple(tuple(wave) for wave in waves)


def make_plan(
    groups: Sequence[Group], budget: int, schedule: str, wave_tokens: int | None = None, offload: bool = False
) -> Plan:
    """One rank's plan. What is alive at once fits the budget, unless one row alone exceeds it.

    Args:
        budget: physical tokens of one pass (verl's ppo_max_token_len_per_gpu).
        schedule: "packed": every group in as few packed passes as its pieces need. "phased": phase A, waves, phase C
            for all. "auto": packed where the whole group fits the budget, phased where it does not.
        wave_tokens: suffix tokens of one wave; None: what the prefixes of phase A, whose graph stays alive, leave of
            the budget.
        offload: during the waves the prefixes wait in host memory, and count for nothing.
    """
    live = pass_order(groups)
    fits = [schedule == "packed" or (schedule == "auto" and g.num_physical_tokens <= budget) for g in live]
    pieces = [_pieces(group, budget) for group, fit in zip(live, fits, strict=True) if fit]
    packed = first_fit([p for cut in pieces for p in cut], lambda group: group.num_physical_tokens, budget)
    phased = [group for group, fit in zip(live, fits, strict=True) if not fit]
    works = [Work(tuple(pass_order(members))) for members in packed]
    room = budget if offload else budget - wave_tokens if wave_tokens else budget // 2
    for members in first_fit(phased, lambda group: group.prefix_len, room):
        ordered = tuple(pass_order(members))
        resident = 0 if offload else sum(group.prefix_len for group in ordered)
        works.append(Work(ordered, make_waves(ordered, wave_tokens or budget - resident)))
    return Plan(
        tuple(works),
        split_groups=sum(len(cut) > 1 for cut in pieces),
        idle_rows=tuple(group for group in groups if not group.num_suffix_tokens),
    )


def agree(plan: Plan, reduce_max: Callable[[list[int]], list[int]]) -> Plan:
    """The plan with dummies added, so that every rank runs the same passes and waves in the same order.

    Args:
        reduce_max: element-wise maximum over ranks of a list of ints (equally long on every rank).
    """
    packed = [work for work in plan.works if work.waves is None]
    phased = sorted((work for work in plan.works if work.waves is not None), key=lambda work: -len(work.waves))
    num_packed, num_phased = reduce_max([len(packed), len(phased)])
    packed += [Work()] * (num_packed - len(packed))
    phased += [Work(waves=())] * (num_phased - len(phased))
    if phased:
        num_waves = reduce_max([len(work.waves) for work in phased])
        phased = [
            Work(work.groups, work.waves + ((),) * (count - len(work.waves)))
            for work, count in zip(phased, num_waves, strict=True)
        ]
    if not packed and not phased:
        packed = [Work()]
    return Plan((*packed, *phased), plan.split_groups, plan.idle_rows)
