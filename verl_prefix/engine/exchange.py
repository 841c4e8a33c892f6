"""Exchange: rows of a mini-batch travel to the rank that computes their group, and their outputs travel back.

    rank 0: a0 b0 c0 d0  ->  a0 a1 d0 d1      verl's trainers spread a prompt's rows over ranks; where a row is computed
    rank 1: a1 b1 c1 d1      b0 b1 c0 c1      changes neither sums over ranks nor what the row gives back

Fourteen collectives at most, of tensors alone, by all ranks that compute data in parallel. What a rank does between two
of them is followed by one that says whether every rank got through (`together`), so that an error on one is an error on
all, and nobody waits.
"""

import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from verl_prefix.auto.placement import describe_rows, place_rows
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.engine.mini_batch import group_batch
from verl_prefix.engine.row_bytes import Row, RowBytes, decode, encode
from verl_prefix.engine.row_table import COLUMNS, PIXELS, AllRows, describe
from verl_prefix.models.vision import PIXEL_NAMES
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


class ExchangeError(RuntimeError):
    """Rows or outputs are not where they belong, or another rank failed."""


@contextmanager
def together(
    doing: str, num_agreed: int = 0, *, everyone: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> Iterator[list[int]]:
    """Runs what is inside, then finds out whether it went well on every rank.

    Args:
        everyone: the ranks, all by default. device: where their collectives want tensors, the engine's by default.

    Yields:
        an empty list; `num_agreed` integers below 2**53 that are put there become their maxima over ranks.

    Raises:
        ExchangeError: another rank failed. Of this rank's own errors, that one.
    """
    agreed: list[int] = []
    error: Exception | None = None
    try:
        yield agreed
    except Exception as failure:  # whatever it is, the others wait to hear of it; raised again below
        error = failure
    mine = [0, *agreed] if error is None else [dist.get_rank(everyone) + 1, *[0] * num_agreed]
    reduced = torch.tensor(mine, dtype=torch.float64, device=device or get_device_name())
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=everyone)
    failed, *agreed[:] = map(int, reduced.tolist())
    if error is not None:
        raise error
    if failed:
        raise ExchangeError(f"prefix: rank {failed - 1} failed while {doing}; its own error says why")


def open_exchange(engine: Any, data: TensorDict, custom_loss: bool) -> "Exchange | NoExchange":
    """An engine's mini-batch on its way to the ranks that compute it."""
    group = engine.get_data_parallel_group()
    if engine.prefix_config.exchange == "off" or dist.get_world_size(group) == 1:
        return NoExchange(data)
    if custom_loss:
        text = "prefix.exchange: rows stay on their ranks in updates: a loss that is not verl's own may read %s"
        warn_once(logger, text, "what does not travel (raw_prompt, extra_fields)")
        return NoExchange(data)
    device = torch.device(get_device_name())
    exchange = Exchange(data, engine.shape, group=group, device=device, everyone=dist.group.WORLD)
    if not exchange.compatible:
        logger.warning("prefix.exchange: the ranks' batches have different fields, so that rows stay")
    return exchange


class NoExchange:
    """A mini-batch whose rows are computed where they are: on one rank, or with prefix.exchange=off. As `Exchange`."""

    def __init__(self, data: TensorDict) -> None:
        self._data = data
        with together("grouping rows"):
            _receive_pixels(data)
            self.groups, self._num_split_uids = group_batch(data)
        self.own_groups = self.groups

    def receive(self) -> tuple[TensorDict, int]:
        return self._data, self._num_split_uids

    def give_back(self, output: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return output

    def metrics(self) -> dict[str, float]:
        return {}

    def num_computed(self) -> tuple[int, int]:
        return sum(group.num_physical_tokens for group in self.groups), len(self._data)


class Exchange:
    """One mini-batch on its way to the ranks that compute it.

    Every rank makes one of its part of the batch, then all ask for `rows` and give outputs back, or none does.

    Args:
        data: this rank's rows; stays as it is.
        group: the ranks that compute data in parallel. everyone: with those that compute the same rows together, by
            sequence parallelism; they fail together. device: where its collectives want tensors.

    Attributes:
        groups: groups of the rows that this rank computes, as indices into `rows()`.
        own_groups: groups of this rank's rows, as indices into `data`.
        moves: whether any row of any rank travels.
        compatible: whether ranks can read each other's rows; where not, none travels.

    Raises:
        ExchangeError: at every call; see there.
    """

    def __init__(
        self, data: TensorDict, shape: ModelShape, group: dist.ProcessGroup, device: torch.device,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        start = time.perf_counter()
        self._data, self._group, self._device = data, group, device
        self._together = functools.partial(together, everyone=everyone or group, device=device)
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._num_bytes = 0
        with self._together("describing rows", 3) as agreed:
            self._bytes = RowBytes.of_batch(data)
            table = describe(data, shape)
            agreed += [len(table), *_same(self._bytes.layout)]
        most, *layouts = agreed
        self.compatible = layouts[0] == -layouts[1]
        self._all = self._gather(table, most)
        with self._together("placing rows", 2) as agreed:
            self._place()
            agreed += _same(self._home)
        if agreed[0] != -agreed[1]:
            raise ExchangeError(
                "ranks placed the same rows differently; install the same version of verl_prefix on every node, or set "
                "actor_rollout_ref.actor.prefix.exchange=off"
            )
        self._seconds = time.perf_counter() - start

    def receive(self) -> tuple[TensorDict, int]:
        """`rows` with their pixels, which are in `groups`, and the number of uids that are several groups."""
        rows = self.rows()
        with self._together("grouping rows"):
            _receive_pixels(rows)
            groups, num_split_uids = group_batch(rows)
            self._check_groups(groups)
        return rows, num_split_uids

    def rows(self) -> TensorDict:
        """The rows that this rank computes: its own that stay, then those that arrive, by rank."""
        if not self.moves:
            return self._data
        start = time.perf_counter()
        with self._together("sending rows"):
            parcels = [
                self._bytes.pack([self._bytes.row(i, i, self._others(i, to)) for i in rows])
                for to, rows in enumerate(self._sent)
            ]
        received = self._swap(parcels)
        with self._together("receiving rows"):
            rows = [self._bytes.row(i, i) for i in self._kept]
            objects = [{name: values[i] for name, values in self._bytes.objects.items()} for i in self._kept]
            arrived = _unpacked(self._bytes, received, self._got, "sent")
            objects += [decode(row.others) for row in arrived]
            batch = self._batch(rows + arrived, self._with_pixels(objects))
        self._seconds += time.perf_counter() - start
        return batch

    def give_back(self, output: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A model's outputs of the rows that this rank computed -> those of its own rows, in the order they came.

        Args:
            output: jagged [rows, tokens], in the order of `rows()`; the same names on every rank.
        """
        if not self.moves or not output:
            return dict(output)
        start = time.perf_counter()
        with self._together("returning outputs", 2) as agreed:
            _check_lens(output, [self._all.lens[row] for row in self._computed], "were computed")
            out, at = RowBytes(output), itertools.count(len(self._kept))
            parcels = [out.pack([out.row(next(at), i) for i in rows]) for rows in self._got]
            agreed += _same(out.layout)
        if agreed[0] != -agreed[1]:
            raise ExchangeError(f"ranks computed different outputs; this one has {', '.join(output)}")
        received = self._swap(parcels)
        with self._together("receiving outputs"):
            rows = [out.row(at, i) for at, i in enumerate(self._kept)]
            rows += _unpacked(out, received, self._sent, "gave back outputs of")
            back = out.join(sorted(rows, key=lambda row: row.origin))
            own = self._all.lens[self._all.starts[self._rank] : self._all.starts[self._rank + 1]]
            _check_lens(back, own, "left")
        self._seconds += time.perf_counter() - start
        return back

    def _check_groups(self, groups: Sequence[Group]) -> None:
        """Compares groups of `rows()`, token by token, with those that were sent here.

        Raises:
            ExchangeError: rows of a group do not share what they were to share.
        """
        if not self.moves:
            return
        pieces = {row: (i, group.prefix_len, n) for i, group in enumerate(groups)
                  for row, n in zip(group.rows, group.suffix_lens, strict=True)}  # fmt: skip
        for group in self.groups:
            expected = [(pieces[group.rows[0]][0], group.prefix_len, n) for n in group.suffix_lens]
            if [pieces[row] for row in group.rows] != expected:
                raise ExchangeError(f"rows {list(group.rows)} arrived as one group, and their prompts differ")

    def metrics(self) -> dict[str, float]:
        """prefix/* and timing_s/* of this rank; imbalance and groups are those of all ranks."""
        return self._metrics | {
            "prefix/exchanged_rows": sum(map(len, self._sent)),
            "prefix/exchanged_mib": self._num_bytes / 2**20,
            "timing_s/prefix_exchange": self._seconds,
        }

    def num_computed(self) -> tuple[int, int]:
        """Tokens that all ranks compute, a group's prefix once per rank that has it; and rows."""
        rows = self._all
        prefixes = {(key, home): n for key, home, n in zip(rows.keys, self._home, rows.prefix_lens, strict=True)}
        return sum(prefixes.values()) + sum(rows.suffix_lens), len(rows.keys)

    def _gather(self, table: torch.Tensor, most: int) -> AllRows:
        """Shares what ranks know: each sends its table behind a row that has its count, and as long as that of the rank
        with `most` rows."""
        padded = torch.zeros(most + 1, COLUMNS, dtype=torch.int64)
        padded[0, 0], padded[1 : len(table) + 1] = len(table), table
        every = torch.empty(self._size, *padded.shape, dtype=torch.int64, device=self._device)
        dist.all_gather(list(every), padded.to(self._device), group=self._group)
        return AllRows([one[1 : one[0, 0] + 1] for one in every.cpu()])

    def _place(self) -> None:
        rows, me = self._all, self._rank
        args = (rows.keys, rows.prefix_costs, rows.suffix_costs, rows.ranks, self._size)
        placement = place_rows(*args, rows.has_pixels) if self.compatible else describe_rows(*args)
        self._home = placement.ranks
        if len(self._home) != len(rows.keys) or not set(self._home) <= set(range(self._size)):
            raise ExchangeError(f"{len(rows.keys)} rows were placed on ranks {self._home}; there are {self._size}")
        self.moves = self._home != rows.ranks
        first, end = rows.starts[me], rows.starts[me + 1]
        # To each rank, indices into this rank's rows; from each rank, indices into that one's.
        self._sent: list[list[int]] = [[] for _ in range(self._size)]
        self._got: list[list[int]] = [[] for _ in range(self._size)]
        for row, (rank, home) in enumerate(zip(rows.ranks, self._home, strict=True)):
            if rank == me:
                self._sent[home].append(row - first)
            if home == me:
                self._got[rank].append(row - rows.starts[rank])
        self._kept, self._sent[me], self._got[me] = self._sent[me], [], []
        self._computed = [first + i for i in self._kept]
        self._computed += [start + i for start, got in zip(rows.starts, self._got, strict=False) for i in got]
        self.groups, self.own_groups = rows.groups(self._computed), rows.groups(range(first, end))
        self._holders = {(k, r) for k, r, has in zip(rows.keys, rows.ranks, rows.has_pixels, strict=True) if has}
        self._metrics = {
            "prefix/placement_imbalance": placement.imbalance,
            "prefix/split_groups": 0 if self.compatible else placement.split_groups,
            "prefix/cost_split_groups": placement.split_groups if self.compatible else 0,
        }

    def _others(self, i: int, to: int) -> bytes:
        """Row i's values that are no tensors; its pixels are left out where rank `to` has them."""
        values = {name: rows[i] for name, rows in self._bytes.objects.items()}
        key = self._all.keys[self._all.starts[self._rank] + i]
        if values.get(PIXELS) and (key, to) in self._holders:
            values[PIXELS] = {name: x for name, x in values[PIXELS].items() if name not in PIXEL_NAMES}
        return encode(values)

    def _with_pixels(self, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Gives rows the pixels that another row of their group has here. No dict of `data` changes: an update of
        several epochs asks for its rows again."""
        if PIXELS not in self._bytes.objects:
            return objects
        from verl_prefix.engine.shared_pixels import CARRIED_BY, CARRIES  # see `_receive_pixels`

        keys = [self._all.keys[row] for row in self._computed]
        rows = [dict(values[PIXELS] or {}) for values in objects]
        pixels = ({name: x for name, x in row.items() if name in PIXEL_NAMES} for row in rows)
        held = {key: own for key, own in zip(keys, pixels, strict=True) if own}
        for key, row, values in zip(keys, rows, objects, strict=True):
            if key in held:  # also where pixels were all that a row had, before they stayed behind
                row = {name: x for name, x in row.items() if name not in (CARRIES, CARRIED_BY)} | held[key]
            values[PIXELS] = row
        return objects

    def _batch(self, rows: Sequence[Row], objects: Sequence[dict[str, Any]]) -> TensorDict:
        """Rows as verl's batch, with what `data` has once."""
        once = {name: x.data for name, x in self._data.items() if isinstance(x, NonTensorData)}
        lists = {name: [values[name] for values in objects] for name in self._bytes.objects}
        return tu.get_tensordict(self._bytes.join(rows) | lists, once)

    def _swap(self, parcels: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Sends each rank its parcel, uint8; returns what each sent here."""
        sizes = torch.tensor([len(parcel) for parcel in parcels], device=self._device)
        theirs = torch.empty_like(sizes)
        dist.all_to_all_single(theirs, sizes, group=self._group)
        sent, got = sizes.tolist(), theirs.tolist()
        with self._together("making room for rows"):
            received = torch.empty(sum(got), dtype=torch.uint8, device=self._device)
            parcel = torch.cat(list(parcels)).to(self._device)
        dist.all_to_all_single(received, parcel, got, sent, group=self._group)
        self._num_bytes += sum(sent)
        return received.cpu().split(got)


def receive_pixels(data: TensorDict) -> None:
    """Gives rows the pixels that other rows carried for them, on every rank or on none."""
    with together("receiving pixels"):
        _receive_pixels(data)


def _receive_pixels(data: TensorDict) -> None:
    if PIXELS in data.keys():
        from verl_prefix.engine import shared_pixels  # here: it loads verl's trainers

        shared_pixels.receive_pixels(tu.get(data, PIXELS))


def _same(value: object) -> list[int]:
    """Two integers whose maxima over ranks are each other's negative where all ranks have the same value."""
    digest = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest(), "little")
    return [digest, -digest]


def _unpacked(values: RowBytes, parcels: Sequence[torch.Tensor], expected: list[list[int]], did: str) -> list[Row]:
    """Rows that arrived, by the rank that `did` so, which are those that were `expected` of it."""
    arrived: list[Row] = []
    for rank, origins in enumerate(expected):
        rows = list(values.unpack(parcels[rank]))
        if (came := [row.origin for row in rows]) != origins:
            raise ExchangeError(f"rank {rank} {did} its rows {came}, and {origins} were to travel")
        arrived += rows
    return arrived


def _check_lens(output: Mapping[str, torch.Tensor], lens: Sequence[int], told: str) -> None:
    if wrong := [name for name, x in output.items() if x.offsets().diff().tolist() != lens]:
        raise ExchangeError(f"{', '.join(wrong)} do not have the {len(lens)} rows that {told}, or not their lengths")
