"""Cases of several settings, of which CI runs as many as show every pair of values."""

import itertools
from collections.abc import Iterable, Sequence
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


def _pairs(one: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(one), 2))
