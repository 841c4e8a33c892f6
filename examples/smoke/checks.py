"""What a step of gpu-smoke checked, and what it found."""

import math
from pathlib import Path
from typing import Any

import torch


class Checks:
    """What a step checked; `on_gpu` checks are named as skipped in a dry run."""

    def __init__(self, dry_run: bool, out: Path) -> None:
        self.dry_run, self.out = dry_run, out
        self.found: list[dict[str, Any]] = []

    def that(self, name: str, value: float, least: float = -math.inf, most: float = math.inf) -> None:
        """Raises AssertionError where the value is not between the two."""
        self.found.append({"check": name, "value": value, "least": least, "most": most})
        assert least <= value <= most, f"{name} is {value:.4g}, and must be {least:g} to {most:g}"

    def skip(self, name: str, why: str) -> None:
        self.found.append({"check": name, "skipped": why})

    def on_gpu(self, name: str, value: float, least: float = -math.inf, most: float = math.inf) -> None:
        if self.dry_run:
            self.skip(name, "needs a GPU")
        else:
            self.that(name, value, least, most)

    @property
    def worlds(self) -> list[int]:
        """Ranks to run on: 1, 2, 8 where there are so many GPUs; the last is the most."""
        return [1, 2] if self.dry_run else [n for n in (1, 2, 8) if n <= torch.cuda.device_count()]
