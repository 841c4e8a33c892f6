"""Runs of tokens, of which paths consist, and indices of their tokens."""

import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

Run = tuple[int, int]  # start and length
# The tokens before a segment, in their order, as runs of tokens of the prefix source.
Path = tuple[Run, ...]


class Segment(NamedTuple):
    """A strand or a suffix: `length` tokens of a packed row that read `path`, and then themselves."""

    length: int
    path: Path = ()


def len_of(runs: Sequence[Run]) -> int:
    """Number of tokens of (start, length) runs."""
    return sum(n for _, n in runs)


def bounds_of(lens: Iterable[int]) -> tuple[int, ...]:
    """0, then the end of each of some neighbours with these lengths."""
    return (0, *accumulate(lens))


def end_of(path: Sequence[Run]) -> int:
    """The token of the prefix source after the path's last token; 0 where the path is empty. It names the path: a token
    of the prefix source has one history, so paths with the same end are equal."""
    start, length = path[-1] if path else (0, 0)
    return start + length


def last_of(path: Path, length: int) -> Path:
    """The last `length` tokens of a path."""
    runs: list[Run] = []
    for start, n in reversed(path):
        taken = min(n, length)
        length -= taken
        if taken:
            runs.insert(0, (start + n - taken, taken))
    return tuple(runs)


def part_of(path: Path, first: int, end: int = sys.maxsize) -> Path:
    """The part of a path that lies in tokens `first` to `end` of the prefix source, shifted so that `first` is 0."""
    bounds = ((max(start, first), min(start + n, end)) for start, n in path)
    return tuple((start - first, until - start) for start, until in bounds if start < until)


def ranges(runs: Sequence[Run]) -> torch.Tensor:
    """int64 indices of the tokens of (start, length) runs, one after the other."""
    # `cat` takes no empty list, so an empty range stands first.
    return torch.cat([torch.arange(0), *(torch.arange(start, start + n) for start, n in runs)])


def is_one_run(runs: Sequence[Run]) -> bool:
    """Whether each of some runs begins where the one before it ends."""
    return all(start + n == next_start for (start, n), (next_start, _) in pairwise(runs))


def token_index(runs: Sequence[Run], device: torch.device) -> slice | torch.Tensor:
    """`ranges` on `device`, or a slice where there are no gaps, so that nothing is copied."""
    return slice(runs[0][0], end_of(runs)) if is_one_run(runs) else on_device(ranges(runs), device)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a host tensor to `device`; the host does not wait for the copy."""
    return tensor.to(device) if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
