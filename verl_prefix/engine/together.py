"""`together`: a piece of work that every rank does, and that fails on all ranks where it fails on one."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from verl.utils.device import get_device_id


class RankError(RuntimeError):
    """Another rank failed, or ranks do not agree on rows or outputs."""


_NO_DIGEST = 2**48  # larger than any digest, which has 48 bits


class Agreement:
    """Integers whose maxima over ranks are wanted, and values that should be the same on all ranks. Each rank tells its
    own inside of a `together`; after it, each knows of all ranks:

        with together("counting rows", maxima=("rows",), same=("version",)) as agreed:
            agreed.tell_maximum("rows", len(rows))
            agreed.tell_same("version", version)
        most_rows, is_one_version = agreed["rows"], agreed.is_same("version")

    Args:
        maxima: names of integers from 0 to 2**53, whose maxima over ranks are wanted.
        same: names of values that should be the same on all ranks.
    """

    def __init__(self, maxima: Sequence[str], same: Sequence[str]) -> None:
        self._maxima = dict.fromkeys(maxima, 0)
        # A digest d and -d: max(d) == -max(-d) over ranks if and only if all ranks have the same digest. A rank that
        # tells none sends 0 and -2**48, which lose against any other.
        self._digests = dict.fromkeys(same, (0, -_NO_DIGEST))

    def tell_maximum(self, name: str, value: int) -> None:
        """Tells this rank's integer, 0 if it never does."""
        self._maxima[name] = value

    def tell_same(self, name: str, value: object) -> None:
        """Tells this rank's value. A rank that never calls this is not compared."""
        digest = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest(), "little")
        self._digests[name] = digest, -digest

    def __getitem__(self, name: str) -> int:
        """The maximum over ranks after the `together`; inside of it, this rank's integer."""
        return self._maxima[name]

    def is_same(self, name: str) -> bool:
        """Whether all ranks that told a value told the same. At least one rank must tell one."""
        largest, minus_smallest = self._digests[name]
        return largest == -minus_smallest

    def values(self) -> list[int]:
        """Returns what this rank told, as integers, equally many on every rank."""
        return [*self._maxima.values(), *(x for pair in self._digests.values() for x in pair)]

    def take_maxima(self, maxima: Sequence[int]) -> None:
        """Puts maxima over ranks in place of this rank's `values`."""
        integers = iter(maxima)
        self._maxima = {name: next(integers) for name in self._maxima}
        self._digests = {name: (next(integers), next(integers)) for name in self._digests}


@contextmanager
def together(doing: str, maxima: Sequence[str] = (), same: Sequence[str] = ()) -> Iterator[Agreement]:
    """Runs its body, then finds out whether the body went well on every rank, model-parallel ones too. The body has no
    collective, and no other `together`: a rank that fails earlier would leave the other ranks waiting there.

    Args:
        doing: what the body does, for the error.
        maxima: of the `Agreement`.
        same: of the `Agreement`.

    Yields:
        the `Agreement`, which the body tells this rank's integers and values.

    Raises:
        RankError: another rank failed. An error of this rank is raised as it is.
    """
    agreed = Agreement(maxima, same)
    error: Exception | None = None
    try:
        yield agreed
    except Exception as failure:  # whatever it is, the other ranks wait to hear of it; raised again below
        error = failure
    failed = 0 if error is None else dist.get_rank() + 1
    try:
        reduced = torch.tensor([failed, *agreed.values()], dtype=torch.float64, device=get_device_id())
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        failed, *maxima_of_all = map(int, reduced.tolist())
    except RuntimeError as failure:  # the device's, or of a rank that is gone
        if error is not None:
            raise error from failure
        raise
    if error is not None:
        raise error
    if failed:
        raise RankError(f"prefix: rank {failed - 1} failed while {doing}; its own error says why")
    agreed.take_maxima(maxima_of_all)
