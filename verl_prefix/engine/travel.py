"""Travel: rows go to the rank that computes them, and outputs come back. Nothing else sends rows.

`Moves` is the plan, the same on every rank; `Travel` carries it out.
"""

import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from verl_prefix.auto.shape import ModelShape
from verl_prefix.engine.carried_pixels import PIXELS
from verl_prefix.engine.grouping import TreeRule
from verl_prefix.engine.row_bytes import Row, RowCodec
from verl_prefix.engine.row_table import AllRows, describe, describe_pieces
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.together import ExchangeError, together
from verl_prefix.models.vision import CARRIED_BY, PIXEL_NAMES

logger = logging.getLogger(__name__)

Outputs = Mapping[str, torch.Tensor]


class Moves:
    """One rank's part of the plan. A row of rank r has a number among the rows of r, and one in the table.

    Args:
        table: the rows of all ranks. homes: the rank that computes each of them. rank: this one. num_ranks: of all.

    Attributes:
        any_travels: whether any row of any rank travels.
        kept: this rank's rows that stay, by their numbers here.
        sent: to each rank, this rank's rows, by their numbers here.
        got: from each rank, its rows, by their numbers there.
        computed: the rows that this rank computes, by their numbers in the table: first those that stay, then those
            that arrive, by rank.
    """

    def __init__(self, table: AllRows, homes: Sequence[int], rank: int, num_ranks: int) -> None:
        self.any_travels = homes != table.ranks
        self.sent: list[list[int]] = [[] for _ in range(num_ranks)]
        self.got: list[list[int]] = [[] for _ in range(num_ranks)]
        for row, (source, home) in enumerate(zip(table.ranks, homes, strict=True)):
            number = row - table.starts[source]
            if source == rank:
                self.sent[home].append(number)
            if home == rank:
                self.got[source].append(number)
        self.kept, self.sent[rank], self.got[rank] = self.sent[rank], [], []
        self.computed = [table.starts[rank] + i for i in self.kept]
        self.computed += [start + i for start, got in zip(table.starts, self.got, strict=False) for i in got]


class Travel:
    """One rank's rows on their way there and back.

    Attributes:
        table: all ranks' rows. moves: theirs. Both from `place_rows` on.
        metrics: prefix/* and timing_s/* of this rank so far; imbalance and groups are those of all ranks.
    """

    table: AllRows
    moves: Moves

    def __init__(self, rows: BatchRows, group: dist.ProcessGroup) -> None:
        self._rows, self._group, self._device = rows, group, get_device_name()
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self.metrics = dict.fromkeys(("prefix/exchanged_mib", "timing_s/prefix_exchange"), 0.0)

    def place_rows(self, shape: ModelShape, trees: TreeRule) -> bool:
        """Tells all ranks of all rows, and finds each a rank. Returns whether rows are cut, as in `group_rows`."""
        with self._timed():
            with together("describing rows", 4) as agreed:
                self._bytes = RowCodec.of_batch(self._rows.data)
                own = describe(self._rows, shape)
                agreed += [len(own), trees.cut_before, *_same(self._bytes.layout)]
            most, seen, *layouts = agreed
            trees = trees._replace(cut_before=bool(seen))  # ranks differ after a batch whose rows stayed
            compatible = _agree(layouts)
            if not compatible:
                logger.warning("prefix.exchange: the ranks' batches have different fields, so that rows stay")
            self.table = AllRows(self._gather(own, most))
            are_cut = trees.are_cut(self.table.uids, self.table.keys)
            pieces: list[torch.Tensor] = []
            if are_cut:
                with together("describing turns", 1) as agreed:
                    own = describe_pieces(self._rows, shape, trees)
                    agreed += [len(own)]
                pieces = self._gather(own, agreed[0])
            with together("placing rows", 2) as agreed:
                agreed += _same(self._place(compatible, pieces if are_cut else None))
        if not _agree(agreed):
            raise ExchangeError(
                "ranks placed the same rows differently; install the same version of verl_prefix on every node, or set "
                "actor_rollout_ref.actor.prefix.exchange=off"
            )
        return are_cut

    def _place(self, compatible: bool, pieces: Sequence[torch.Tensor] | None) -> list[int]:
        """Finds the rank of every row of all ranks, by `pieces` where rows are turns. Where ranks cannot read each
        other's rows (not `compatible`), every row stays."""
        table = self.table
        if not compatible:
            placement = table.as_it_is(self._size)
        else:
            placement = table.place(self._size) if pieces is None else table.place_turns(self._size, pieces)
        homes = placement.ranks
        if len(homes) != len(table.keys) or set(homes) != set(range(self._size)):
            raise ExchangeError(
                f"{len(table.keys)} rows were placed on ranks {homes}; there are {self._size}, and each needs one"
            )
        self.moves = Moves(table, homes, self._rank, self._size)
        self.metrics |= {
            "prefix/placement_imbalance": placement.imbalance,
            "prefix/split_groups": 0 if compatible else placement.split_groups,
            "prefix/cost_split_groups": placement.split_groups if compatible else 0,
            "prefix/exchanged_rows": sum(map(len, self.moves.sent)),
        }
        return homes

    def send_rows(self) -> BatchRows:
        """Sends rows; returns those that this rank computes, in the order of `Moves.computed`."""
        with self._timed():
            with together("sending rows"):
                sent = enumerate(self.moves.sent)
                parcels = [self._bytes.pack([self._for(to, i) for i in rows]) for to, rows in sent]
            received = self._swap(parcels)
            with together("receiving rows"):
                rows = [self._bytes.row(i, i) for i in self.moves.kept]
                rows += _unpacked(self._bytes, received, self.moves.got, "sent")
                keys = [self.table.keys[row] for row in self.moves.computed]
                return BatchRows(self._batch(self._with_pixels(rows, keys)), keys)

    def give_back(self, output: Outputs | None) -> dict[str, torch.Tensor]:
        """As `Exchange.give_back`. A rank without outputs takes part in what all ranks do."""
        moves, lens = self.moves, self.table.lens
        with self._timed():
            with together("returning outputs", 2) as agreed:
                out, at = RowCodec(output or {}), itertools.count(len(moves.kept))
                if output is None:
                    parcels, agreed[:] = [out.pack([])] * self._size, [0, -NOBODYS]
                else:
                    _check_lens(output, [lens[row] for row in moves.computed], "were computed")
                    parcels = [out.pack([out.row(next(at), i) for i in rows]) for rows in moves.got]
                    agreed += _same(out.layout)
            if not _agree(agreed):
                raise ExchangeError(f"ranks computed different outputs; this one has {', '.join(output or ())}")
            received = self._swap(parcels)
            with together("receiving outputs"):
                if output is None:
                    return {}
                rows = [out.row(at, i) for at, i in enumerate(moves.kept)]
                rows += _unpacked(out, received, moves.sent, "gave back outputs of")
                back = out.join(sorted(rows, key=lambda row: row.origin))
                _check_lens(back, lens[self.table.starts[self._rank] : self.table.starts[self._rank + 1]], "left")
        return back

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.metrics["timing_s/prefix_exchange"] += time.perf_counter() - start

    def _gather(self, table: torch.Tensor, most: int) -> list[torch.Tensor]:
        """The tables of all ranks. Each rank sends a row with its count and then its table, padded to `most` rows."""
        padded = torch.zeros(most + 1, table.shape[1], dtype=torch.int64)
        padded[0, 0], padded[1 : len(table) + 1] = len(table), table
        every = torch.empty(self._size, *padded.shape, dtype=torch.int64, device=self._device)
        dist.all_gather(list(every), padded.to(self._device), group=self._group)
        return [one[1 : one[0, 0] + 1] for one in every.cpu()]

    @functools.cached_property
    def _holders(self) -> set[tuple[Hashable, int]]:
        """(key, rank) of rows that have their pixels with them."""
        table = self.table
        return {(k, r) for k, r, has in zip(table.keys, table.ranks, table.has_pixels, strict=True) if has}

    def _for(self, to: int, i: int) -> Row:
        """Row i as it goes to rank `to`: without its pixels where that one has them."""
        row, key = self._bytes.row(i, i), self.table.keys[self.table.starts[self._rank] + i]
        if row.others.get(PIXELS) and (key, to) in self._holders:
            row.others[PIXELS] = {name: x for name, x in row.others[PIXELS].items() if name not in PIXEL_NAMES}
        return row

    def _with_pixels(self, rows: list[Row], keys: Sequence[Hashable]) -> list[Row]:
        """Gives rows the pixels that another row of their group has here. No dict of the batch changes: an update of
        several epochs asks for its rows again."""
        if PIXELS not in self._bytes.objects:
            return rows
        seen = [dict(row.others[PIXELS] or {}) for row in rows]
        pixels = ({name: x for name, x in one.items() if name in PIXEL_NAMES} for one in seen)
        held = {key: own for key, own in zip(keys, pixels, strict=True) if own}
        for key, one, row in zip(keys, seen, rows, strict=True):
            if key in held:  # also where pixels were all that a row had, before they stayed behind
                one = {name: x for name, x in one.items() if name != CARRIED_BY} | held[key]
            row.others[PIXELS] = one
        return rows

    def _batch(self, rows: Sequence[Row]) -> TensorDict:
        """Rows as verl's batch, with what the batch has once."""
        once = {name: x.data for name, x in self._rows.data.items() if isinstance(x, NonTensorData)}
        lists = {name: [row.others[name] for row in rows] for name in self._bytes.objects}
        return tu.get_tensordict(self._bytes.join(rows) | lists, once)

    def _swap(self, parcels: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Sends each rank its parcel, uint8; returns what each sent here."""
        sizes = torch.tensor([len(parcel) for parcel in parcels], device=self._device)
        theirs = torch.empty_like(sizes)
        dist.all_to_all_single(theirs, sizes, group=self._group)
        sent, got = sizes.tolist(), theirs.tolist()
        with together("making room for rows"):
            received = torch.empty(sum(got), dtype=torch.uint8, device=self._device)
            parcel = torch.cat(list(parcels)).to(self._device)
        dist.all_to_all_single(received, parcel, got, sent, group=self._group)
        self.metrics["prefix/exchanged_mib"] += sum(sent) / 2**20
        return received.cpu().split(got)


NOBODYS = 2**48  # no digest of `_same` is as large


def _same(value: object) -> list[int]:
    """A digest and its negative, for `_agree`."""
    digest = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest(), "little")
    return [digest, -digest]


def _agree(maxima: Sequence[int]) -> bool:
    """Whether all ranks had the same value: then the maxima of `_same` over ranks are each other's negative."""
    return maxima[0] == -maxima[1]


def _unpacked(values: RowCodec, parcels: Sequence[torch.Tensor], expected: list[list[int]], verb: str) -> list[Row]:
    """The rows that arrived from all ranks, checked to be those that were `expected` of each. `verb`: for the error."""
    arrived: list[Row] = []
    for rank, origins in enumerate(expected):
        rows = values.unpack(parcels[rank])
        if (came := [row.origin for row in rows]) != origins:
            raise ExchangeError(f"rank {rank} {verb} its rows {came}, and {origins} were to travel")
        arrived += rows
    return arrived


def _check_lens(output: Mapping[str, Any], lens: Sequence[int], verb: str) -> None:
    if wrong := [name for name, x in output.items() if x.offsets().diff().tolist() != lens]:
        raise ExchangeError(f"{', '.join(wrong)} do not have the {len(lens)} rows that {verb}, or not their lengths")
