"""Cases of several settings, of which as many run as show every pair of values, or every value."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def in_pairs(*settings: Iterable[Any]) -> list[Any]:
    """Every combination of a value of each setting; marked `full` where others have each pair of its values."""
    values = [list(setting) for setting in settings]
    combinations = list(itertools.product(*(range(len(setting)) for setting in values)))
    left = {pair for one in combinations for pair in _pairs(one)}
    chosen = set()
    while left:
        best = max(combinations, key=lambda one: len(left & _pairs(one)))  # the first of those that show most
        chosen.add(best)
        left -= _pairs(best)
    return [
        pytest.param(
            *(setting[i] for setting, i in zip(values, one, strict=True)),
            marks=() if one in chosen else pytest.mark.full,
        )
        for one in combinations
    ]  # fmt: skip


def every_value(cases: Mapping[Any, Mapping[str, Any]], shown: Iterable[Any]) -> set[Any]:
    """The cases that show each value of each option that those of `shown` do not: the first of those that show most."""
    values = {name: {(key, repr(value)) for key, value in options.items()} for name, options in cases.items()}
    left, chosen = set().union(*values.values()).difference(*(values[name] for name in shown)), set()
    while left:
        best = max(values, key=lambda name: len(left & values[name]))
        chosen.add(best)
        left -= values[best]
    return chosen


def _pairs(one: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(one), 2))
