"""Which passes of a mini-batch run in a simulation, and for how many each stands."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from verl_prefix.auto.cost import Rates
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.core.plan import PackedPass, Pass, PhasedPass, Plan, Wave

Item = TypeVar("Item")

RATES = Rates()


def thin(
    items: Sequence[Item], cost: Callable[[Item], float], kept: int, last_alone: bool = False
) -> list[tuple[Item, float]]:
    """About `kept` of the items, in their order, and how many times each counts: the costliest of all, and of every
    further share of them by cost the costliest, which stands for its share.

    Args:
        last_alone: the last item does what no other does, and counts once.
    """
    if last_alone and items:
        return [*thin(items[:-1], cost, kept), (items[-1], 1.0)]
    order = sorted(range(len(items)), key=lambda i: -cost(items[i]))
    size = -(-len(order) // kept)
    shares = [order[start : start + size] for start in range(0, len(order), size)] if order else []
    weights = {share[0]: sum(cost(items[i]) for i in share) / cost(items[share[0]]) for share in shares}
    return [(items[i], weights[i]) for i in sorted(weights)]


def thinned(
    plan: Plan, shape: ModelShape, seeing: Callable[[Sequence[int]], float], kept: int, last_alone: bool
) -> tuple[Plan, dict[tuple[Group, ...], float]]:
    """The plan with about `kept` of its packed passes, of its phased ones, and of each one's nested passes; and how
    many times those count that have these groups.

    Args:
        seeing: seconds of a vision tower on these rows. last_alone: as of `thin`, for the whole plan.
    """
    weights: dict[tuple[Group, ...], float] = {}

    def cost(one: Pass) -> float:
        inside = Plan((one,))
        # A phase A shows pixels to its waves.
        with_pixels = (each for each in inside.all_passes if not isinstance(each, Wave))
        shown = seeing([group.rows[0] for each in with_pixels for group in each.groups])
        return shown + RATES.seconds(shape, shape.passes_of(inside))

    def chosen(
        packed: Sequence[PackedPass], phased: Sequence[PhasedPass], kept: int, weight: float, last_alone: bool
    ) -> tuple[list[PackedPass], list[PhasedPass]]:
        chosen_packed, chosen_phased = list[PackedPass](), list[PhasedPass]()
        for one, part in thin(packed, cost, kept, last_alone and not phased):
            weights[one.groups] = weight * part
            chosen_packed.append(one)
        costliest = max(phased, key=cost, default=None)
        for each, part in thin(phased, cost, kept, last_alone):
            weights[each.groups] = weight * part
            # The costliest phases have the peak; every further ones tell what a wave of theirs costs.
            most = kept if each is costliest else -(-kept // 2)
            nested, deeper = chosen((*each.waves, *each.packed), each.phased, most, weight * part, False)
            waves = tuple(one for one in nested if isinstance(one, Wave))
            others = tuple(one for one in nested if not isinstance(one, Wave))
            chosen_phased.append(replace(each, waves=waves, packed=others, phased=tuple(deeper)))
        return chosen_packed, chosen_phased

    chosen_packed, chosen_phased = chosen(plan.packed, plan.phased, kept, 1.0, last_alone)
    return replace(plan, passes=(*chosen_packed, *chosen_phased)), weights
