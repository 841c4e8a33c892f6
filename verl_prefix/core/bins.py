"""Puts items of different sizes into few bins of one size."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


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


def _in_order(items: Sequence[Item], size: Callable[[Item], int], budget: int) -> list[list[Item]]:
    """As `first_fit`, but neighbours stay together where that takes no more bins."""
    bins: list[list[Item]] = []
    used = 0
    for item in items:
        if not bins or used + size(item) > budget:
            bins.append([])
            used = 0
        bins[-1].append(item)
        used += size(item)
    if len(bins) <= max(1, -(-sum(map(size, items)) // max(budget, 1))):
        return bins
    return min(bins, first_fit(items, size, budget), key=len)


def even_bins(items: Sequence[Item], size: Callable[[Item], int], budget: int) -> list[list[Item]]:
    """As `_in_order`, but about equally full: by the smallest of four budgets that needs no more bins."""
    bins = _in_order(items, size, budget)
    even = -(-sum(map(size, items)) // max(len(bins), 1))
    for smaller_budget in (even + (budget - even) * i // 4 for i in range(4 if even < budget else 0)):
        evener = _in_order(items, size, smaller_budget)
        if len(evener) <= len(bins):
            return evener
    return bins
