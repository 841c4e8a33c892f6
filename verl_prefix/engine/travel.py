"""Travel: rows go to the rank that computes them, and outputs come back. Nothing else sends rows.

`Moves` is a rank's part of a placement, which all ranks find alike; `Travel` carries it out.
"""

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
from verl_prefix.engine.row_bytes import RowCodec, TravellingRow
from verl_prefix.engine.row_table import RowTable, describe
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.session_pieces import describe_pieces
from verl_prefix.engine.together import RankError, together
from verl_prefix.models.vision import CARRIED_BY, PIXEL_NAMES
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)

Outputs = Mapping[str, torch.Tensor]


class Moves:
    """One rank's part of a placement. A row of rank r has a number among the rows of r, and one in the table.

    Args:
        table: the rows of all ranks.
        homes: for each of them the rank that computes it.
        rank: this rank, among those that exchange rows.
        num_ranks: how many these are.

    Attributes:
        any_travels: whether any row of any rank travels.
        kept: this rank's rows that stay, by their numbers here.
        sent: to each rank, this rank's rows, by their numbers here.
        got: from each rank, its rows, by their numbers there.
        computed: the rows that this rank computes, by their numbers in the table: first those that stay, then those
            that arrive, by rank.
        holders: (key, rank) of all ranks' rows that stay and have their pixels with them.
    """

    def __init__(self, table: RowTable, homes: Sequence[int], rank: int, num_ranks: int) -> None:
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
        self.computed = [table.starts[rank] + number for number in self.kept]
        self.computed += [start + number for start, got in zip(table.starts, self.got, strict=False) for number in got]
        rows = zip(table.keys, table.ranks, homes, table.has_pixels, strict=True)
        self.holders = {(key, home) for key, source, home, has in rows if has and home == source}


class Travel:
    """One rank's rows on their way there and back.

    Attributes:
        table: all ranks' rows; from `decide_moves` on, as the next two.
        moves: where this rank's rows go.
        is_cut: whether rows are cut, as in `group_rows`.
        metrics: prefix/* and timing_s/* of this rank so far; imbalance and groups are those of all ranks.
    """

    table: RowTable
    moves: Moves
    is_cut: bool

    def __init__(self, rows: BatchRows, process_group: dist.ProcessGroup) -> None:
        self._rows, self._process_group, self._device = rows, process_group, get_device_name()
        self._size, self._rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        self.metrics = dict.fromkeys(("prefix/exchanged_mib", "timing_s/prefix_exchange"), 0.0)

    def decide_moves(self, shape: ModelShape, tree_rule: TreeRule) -> None:
        """Tells all ranks of all rows, and finds a rank for each row. Every rank calls it.

        Raises:
            RankError: another rank failed, or ranks placed rows differently.
        """
        with self._timed():
            compatible, was_cut = self._gather_rows(shape, tree_rule.was_cut)
            tree_rule = tree_rule._replace(was_cut=was_cut)
            self.is_cut = tree_rule.cuts_rows(self.table.uids, self.table.keys)
            pieces = self._gather_pieces(shape, tree_rule) if self.is_cut else None
            with together("placing rows", same=("homes",)) as placed:
                placed.same("homes", self._find_homes(compatible, pieces))
        if not placed.is_same("homes"):
            raise RankError(
                "ranks placed the same rows differently; install the same version of verl_prefix on every node, or set "
                "actor_rollout_ref.actor.prefix.exchange=off"
            )

    def _gather_rows(self, shape: ModelShape, was_cut: bool) -> tuple[bool, bool]:
        """Makes the table of all ranks' rows. Returns whether ranks can read each other's rows, and whether an earlier
        batch of any rank was cut: ranks may differ in that after a batch whose rows stayed."""
        with together("describing rows", maxima=("num_rows", "was_cut"), same=("format",)) as described:
            self._codec = RowCodec.of_batch(self._rows.data)
            own = describe(self._rows, shape)
            described.maximum("num_rows", len(own))
            described.maximum("was_cut", was_cut)
            described.same("format", self._codec.format)
        compatible = described.is_same("format")
        if not compatible:
            warn_once(logger, "prefix.exchange: the ranks' batches have different fields, so that rows stay")
        self.table = RowTable(self._gather(own, described["num_rows"]))
        return compatible, bool(described["was_cut"])

    def _gather_pieces(self, shape: ModelShape, tree_rule: TreeRule) -> list[torch.Tensor]:
        """The pieces of all ranks' rows, by rank, as `describe_pieces` makes them."""
        with together("describing turns", maxima=("num_pieces",)) as described:
            own = describe_pieces(self._rows, shape, tree_rule)
            described.maximum("num_pieces", len(own))
        return self._gather(own, described["num_pieces"])

    def _find_homes(self, compatible: bool, pieces: Sequence[torch.Tensor] | None) -> list[int]:
        """Finds the rank of every row of all ranks, and so `moves`, by `pieces` where rows are turns. Where ranks
        cannot read each other's rows (not `compatible`), every row stays."""
        table = self.table
        if not compatible:
            placement = table.as_it_is(self._size)
        else:
            placement = table.by_group(self._size) if pieces is None else table.by_session(self._size, pieces)
        homes = placement.ranks
        if len(homes) != len(table.keys) or set(homes) != set(range(self._size)):
            raise RankError(
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
        """Sends rows; returns those that this rank computes, in the order of `Moves.computed`. Every rank calls it.

        Raises:
            RankError: another rank failed, or sent other rows than `moves` says.
        """
        codec, moves = self._codec, self.moves
        with self._timed():
            with together("sending rows"):
                parcels = [
                    codec.pack([self._without_known_pixels(number, to) for number in numbers])
                    for to, numbers in enumerate(moves.sent)
                ]
            self.metrics["prefix/exchanged_mib"] = sum(map(len, parcels)) / 2**20
            received = self._swap(parcels)
            with together("receiving rows"):
                rows = [codec.row(number, number) for number in moves.kept]
                rows += _unpacked(codec, received, moves.got, "its rows")
                keys = [self.table.keys[row] for row in moves.computed]
                return BatchRows(self._batch(self._with_pixels(rows, keys)), keys)

    def give_back(self, outputs: Outputs | None) -> dict[str, torch.Tensor]:
        """As `Exchange.give_back`. A rank without outputs sends nothing, and takes part in all collectives."""
        moves, lens = self.moves, self.table.lens
        with self._timed():
            with together("returning outputs", same=("format",)) as agreed:
                codec, at = RowCodec(outputs or {}), itertools.count(len(moves.kept))
                parcels = [codec.pack([])] * self._size
                if outputs is not None:
                    _check_lens(outputs, [lens[row] for row in moves.computed])
                    parcels = [codec.pack([codec.row(next(at), number) for number in numbers]) for numbers in moves.got]
                    agreed.same("format", codec.format)
            if not agreed.is_same("format"):
                raise RankError(f"ranks computed different outputs; this one has {', '.join(outputs or ())}")
            received = self._swap(parcels)
            with together("receiving outputs"):
                if outputs is None:
                    return {}
                rows = [codec.row(at, number) for at, number in enumerate(moves.kept)]
                rows += _unpacked(codec, received, moves.sent, "outputs of rows")
                back = codec.join(sorted(rows, key=lambda row: row.origin))
                _check_lens(back, lens[self.table.starts[self._rank] : self.table.starts[self._rank + 1]])
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
        tables = torch.empty(self._size, *padded.shape, dtype=torch.int64, device=self._device)
        dist.all_gather(list(tables), padded.to(self._device), group=self._process_group)
        return [of_rank[1 : of_rank[0, 0] + 1] for of_rank in tables.cpu()]

    def _without_known_pixels(self, number: int, to: int) -> TravellingRow:
        """This rank's row as it goes to rank `to`: without its pixels, where a row that stays there has them."""
        row, key = self._codec.row(number, number), self.table.keys[self.table.starts[self._rank] + number]
        if row.others.get(PIXELS) and (key, to) in self.moves.holders:
            row.others[PIXELS] = {name: x for name, x in row.others[PIXELS].items() if name not in PIXEL_NAMES}
        return row

    def _with_pixels(self, rows: list[TravellingRow], keys: Sequence[Hashable]) -> list[TravellingRow]:
        """Gives rows the pixels that another row of their group has here. No dict of the batch changes: an update of
        several epochs asks for its rows again."""
        if PIXELS not in self._codec.others:
            return rows
        shown = [dict(row.others[PIXELS] or {}) for row in rows]
        pixels = ({name: x for name, x in visual.items() if name in PIXEL_NAMES} for visual in shown)
        held = {key: own for key, own in zip(keys, pixels, strict=True) if own}
        for key, visual, row in zip(keys, shown, rows, strict=True):
            if key in held:  # also where pixels were all that a row had, before they stayed behind
                visual = {name: x for name, x in visual.items() if name != CARRIED_BY} | held[key]
            row.others[PIXELS] = visual
        return rows

    def _batch(self, rows: Sequence[TravellingRow]) -> TensorDict:
        """Joins rows to a batch of verl, which also gets what this rank's batch has once."""
        once = {name: x.data for name, x in self._rows.data.items() if isinstance(x, NonTensorData)}
        lists = {name: [row.others[name] for row in rows] for name in self._codec.others}
        return tu.get_tensordict(self._codec.join(rows) | lists, once)

    def _swap(self, parcels: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Sends each rank its parcel, uint8; returns what each sent here."""
        sizes = torch.tensor([len(parcel) for parcel in parcels], device=self._device)
        theirs = torch.empty_like(sizes)
        dist.all_to_all_single(theirs, sizes, group=self._process_group)
        sent, got = sizes.tolist(), theirs.tolist()
        with together("making room for rows"):
            received = torch.empty(sum(got), dtype=torch.uint8, device=self._device)
            parcel = torch.cat(list(parcels)).to(self._device)
        dist.all_to_all_single(received, parcel, got, sent, group=self._process_group)
        return received.cpu().split(got)


def _unpacked(
    codec: RowCodec, parcels: Sequence[torch.Tensor], expected: list[list[int]], what: str
) -> list[TravellingRow]:
    """Returns the rows that arrived from all ranks, and checks that they are the `expected` ones of each rank, by
    their numbers there. what: names them in the error."""
    arrived: list[TravellingRow] = []
    for rank, origins in enumerate(expected):
        rows = codec.unpack(parcels[rank])
        if (came := [row.origin for row in rows]) != origins:
            raise RankError(f"rank {rank} sent {what} {came}, and {origins} were to travel")
        arrived += rows
    return arrived


def _check_lens(outputs: Mapping[str, Any], lens: Sequence[int]) -> None:
    if wrong := [name for name, x in outputs.items() if x.offsets().diff().tolist() != lens]:
        raise RankError(f"{', '.join(wrong)} do not have the {len(lens)} rows of this rank, or not their lengths")
