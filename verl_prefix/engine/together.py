"""`together`: a piece of work that every rank does, and that fails on all ranks where it fails on one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from verl.utils.device import get_device_name


class ExchangeError(RuntimeError):
    """Rows or outputs are not where they belong, or another rank failed."""


@contextmanager
def together(doing: str, num_agreed: int = 0) -> Iterator[list[int]]:
    """Runs what is inside, then finds out whether it went well on every rank, copies included.

    Yields:
        an empty list to fill with `num_agreed` integers below 2**53, which become their maxima over ranks.

    Raises:
        ExchangeError: another rank failed. An error of this rank is raised as it is.
    """
    agreed: list[int] = []
    error: Exception | None = None
    try:
        yield agreed
    except Exception as failure:  # whatever it is, the others wait to hear of it; raised again below
        error = failure
    mine = [0, *agreed] if error is None else [dist.get_rank() + 1, *[0] * num_agreed]
    reduced = torch.tensor(mine, dtype=torch.float64, device=get_device_name())
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    failed, *agreed[:] = map(int, reduced.tolist())
    if error is not None:
        raise error
    if failed:
        raise ExchangeError(f"prefix: rank {failed - 1} failed while {doing}; its own error says why")
