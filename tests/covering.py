"""Few combinations of options in which any few of them meet with every value."""

import itertools
import random
from collections.abc import Mapping, Sequence


def covering(options: Mapping[str, Sequence], strength: int = 2) -> list[dict]:
    """Combinations such that every choice of values of any `strength` options occurs in one; the same at every call.

    Greedy: of some random candidates, each with one missing choice, the one with most of those that are missing.
    """
    draw, names = random.Random(0), list(options)
    missing = {
        tuple(zip(chosen, values, strict=True))
        for chosen in itertools.combinations(names, strength)
        for values in itertools.product(*(range(len(options[name])) for name in chosen))
    }

    def candidate() -> dict:
        return {name: draw.randrange(len(options[name])) for name in names} | dict(min(missing))

    def met(one: dict) -> set:
        return missing & set(itertools.combinations(one.items(), strength))

    found = []
    while missing:
        found.append(max((candidate() for _ in range(50)), key=lambda one: len(met(one))))
        missing -= met(found[-1])
    return [{name: options[name][i] for name, i in one.items()} for one in found]
