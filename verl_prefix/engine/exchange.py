"""Exchange: rows of a mini-batch travel to the rank that computes their group, and their outputs travel back.

    rank 0: a0 b0 c0 d0  ->  a0 a1 d0 d1      verl's trainers spread a prompt's rows over ranks; where a row is computed
    rank 1: a1 b1 c1 d1      b0 b1 c0 c1      changes neither sums over ranks nor what the row gives back

It takes at most sixteen collectives, all of tensors, by all ranks that compute data in parallel. After each piece of
work a collective says whether every rank got through it (`together`). So an error on one rank is an error on all, and
no rank waits for another in vain.
"""

import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.carried_pixels import receive_pixels
from verl_prefix.engine.grouping import NO_TREES, TreeRule, group_rows
from verl_prefix.engine.routes import Routes
from verl_prefix.engine.row_bytes import Row, RowBytes
from verl_prefix.engine.row_table import PADDING, AllRows, describe, describe_pieces
from verl_prefix.engine.rows import PIXELS, BatchRows
from verl_prefix.engine.together import ExchangeError, together
from verl_prefix.models.vision import CARRIED_BY, PIXEL_NAMES
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


Outputs = Mapping[str, torch.Tensor]
Together = Callable[..., AbstractContextManager[list[int]]]


@dataclass
class Exchange:
    """A mini-batch at the rank that computes it. Where rows stay, `rows` are the batch's, and come back at once.

    Attributes:
        rows: the rows that this rank computes. groups: theirs.
        trees: what they share, for this batch and those that follow.
        uids: those of the mini-batch, without padding: by 64-bit hashes of all ranks, or of this rank where rows stay.
        metrics: prefix/* and timing_s/* of this rank; `give_back` adds what it took.
    """

    rows: BatchRows
    groups: list[Group]
    trees: TreeRule
    uids: Set[Hashable]
    metrics: dict[str, float]
    _travel: "_Travel | None" = None

    def give_back(self, outputs: Outputs | None) -> dict[str, torch.Tensor]:
        """Sends outputs back to where their rows came from, in the order they came. Every rank calls it.

        Args:
            outputs: of `rows`, jagged [rows, tokens], of the same names on every rank; {}: nobody wants any; None: this
                rank has none, and others do.
        """
        if self._travel is None:
            return dict(outputs or {})
        return {} if outputs == {} else self._travel.give_back(outputs)


def open_exchange(backend: Backend, option: str, rows: BatchRows, trees: TreeRule, is_custom: bool) -> Exchange:
    """Brings a mini-batch to the ranks that compute it.

    Args:
        option: `prefix.exchange`. is_custom: the loss is a user's.
    """
    group: dist.ProcessGroup | None = backend.ranks.data
    if option == "off" or backend.ranks.data_size == 1:
        group = None
    elif is_custom:
        text = "prefix.exchange: rows stay on their ranks in updates: a loss that is not verl's own may read %s"
        warn_once(logger, text, "what does not travel (raw_prompt, extra_fields)")
        group = None
    device = torch.device(get_device_name())
    return exchange_rows(rows, backend.shape, group, device, everyone=dist.group.WORLD, trees=trees)


def exchange_rows(
    rows: BatchRows, shape: ModelShape, group: dist.ProcessGroup | None, device: torch.device,
    everyone: dist.ProcessGroup | None = None, trees: TreeRule = NO_TREES,
) -> Exchange:  # fmt: skip
    """Brings rows to the ranks that compute them, all of which call this, and then give outputs back.

    Args:
        rows: this rank's, none of which changes.
        group: the ranks that have different rows; None: rows stay. everyone: these and their copies; all fail together.
        device: where collectives want tensors. trees: what rows share besides whole prompts.

    Raises:
        ExchangeError: another rank failed, here or in `give_back`, or ranks do not agree.
    """
    all_together = functools.partial(together, everyone=everyone or group, device=device)
    travel = None if group is None else _Travel(rows, group, device, all_together)
    are_cut = travel.plan(shape, trees) if travel else None
    rows = travel.rows() if travel and travel.routes.moves else rows
    with all_together("grouping rows"):
        rows = rows.replaced(receive_pixels(rows.data))
        if are_cut is None:
            are_cut = trees.are_cut(rows.uids, rows.keys)
        groups = group_rows(rows, trees, are_cut)
    trees = trees._replace(had_turns=are_cut)
    if travel is None:
        uids = {uid for row, uid in enumerate(rows.uids) if row not in rows.padding}
        return Exchange(rows, groups, trees, set(uids), {})
    hashes = {uid for uid in travel.table.uids if uid != PADDING}
    return Exchange(rows, groups, trees, hashes, travel.metrics, travel if travel.routes.moves else None)


class _Travel:
    """One rank's rows on their way there and back.

    Attributes:
        table: all ranks' rows. routes: theirs. Both from `plan` on.
        metrics: prefix/* and timing_s/* of this rank so far; imbalance and groups are those of all ranks.
    """

    table: AllRows
    routes: Routes

    def __init__(self, rows: BatchRows, group: dist.ProcessGroup, device: torch.device, together: Together) -> None:
        self._rows, self._group, self._device, self._together = rows, group, device, together
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self.metrics = dict.fromkeys(("prefix/exchanged_mib", "timing_s/prefix_exchange"), 0.0)

    def plan(self, shape: ModelShape, trees: TreeRule) -> bool:
        """Tells all ranks of all rows, and finds each a rank. Returns whether rows are cut, as in `group_rows`."""
        with self._timed():
            with self._together("describing rows", 4) as agreed:
                self._bytes = RowBytes.of_batch(self._rows.data)
                own = describe(self._rows, shape)
                agreed += [len(own), trees.had_turns, *_same(self._bytes.layout)]
            most, seen, *layouts = agreed
            trees = trees._replace(had_turns=bool(seen))  # ranks differ after a batch whose rows stayed
            compatible = layouts[0] == -layouts[1]
            if not compatible:
                logger.warning("prefix.exchange: the ranks' batches have different fields, so that rows stay")
            self.table = AllRows(self._gather(own, most))
            are_cut = trees.are_cut(self.table.uids, self.table.keys)
            pieces: list[torch.Tensor] = []
            if are_cut:
                with self._together("describing turns", 1) as agreed:
                    own = describe_pieces(self._rows, shape, trees)
                    agreed += [len(own)]
                pieces = self._gather(own, agreed[0])
            with self._together("placing rows", 2) as agreed:
                agreed += _same(self._place(compatible, pieces if are_cut else None))
        if agreed[0] != -agreed[1]:
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
        self.routes = Routes(table, homes, self._rank, self._size)
        self.metrics |= {
            "prefix/placement_imbalance": placement.imbalance,
            "prefix/split_groups": 0 if compatible else placement.split_groups,
            "prefix/cost_split_groups": placement.split_groups if compatible else 0,
            "prefix/exchanged_rows": sum(map(len, self.routes.sent)),
        }
        return homes

    def rows(self) -> BatchRows:
        """Sends rows; returns those that this rank computes, in the order of `Routes.computed`."""
        with self._timed():
            with self._together("sending rows"):
                sent = enumerate(self.routes.sent)
                parcels = [self._bytes.pack([self._for(to, i) for i in rows]) for to, rows in sent]
            received = self._swap(parcels)
            with self._together("receiving rows"):
                rows = [self._bytes.row(i, i) for i in self.routes.kept]
                rows += _unpacked(self._bytes, received, self.routes.got, "sent")
                keys = [self.table.keys[row] for row in self.routes.computed]
                return BatchRows(self._batch(self._with_pixels(rows, keys)), keys)

    def give_back(self, output: Outputs | None) -> dict[str, torch.Tensor]:
        """As `Exchange.give_back`. A rank without outputs takes part in what all ranks do."""
        routes, lens = self.routes, self.table.lens
        with self._timed():
            with self._together("returning outputs", 2) as agreed:
                out, at = RowBytes(output or {}), itertools.count(len(routes.kept))
                if output is None:
                    parcels, agreed[:] = [out.pack([])] * self._size, [0, -NOBODYS]
                else:
                    _check_lens(output, [lens[row] for row in routes.computed], "were computed")
                    parcels = [out.pack([out.row(next(at), i) for i in rows]) for rows in routes.got]
                    agreed += _same(out.layout)
            if agreed[0] != -agreed[1]:
                raise ExchangeError(f"ranks computed different outputs; this one has {', '.join(output or ())}")
            received = self._swap(parcels)
            with self._together("receiving outputs"):
                if output is None:
                    return {}
                rows = [out.row(at, i) for at, i in enumerate(routes.kept)]
                rows += _unpacked(out, received, routes.sent, "gave back outputs of")
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
        with self._together("making room for rows"):
            received = torch.empty(sum(got), dtype=torch.uint8, device=self._device)
            parcel = torch.cat(list(parcels)).to(self._device)
        dist.all_to_all_single(received, parcel, got, sent, group=self._group)
        self.metrics["prefix/exchanged_mib"] += sum(sent) / 2**20
        return received.cpu().split(got)


NOBODYS = 2**48  # no digest of `_same` is as large


def _same(value: object) -> list[int]:
    """A digest and its negative. Their maxima over ranks are each other's negative where all have the same value."""
    digest = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest(), "little")
    return [digest, -digest]


def _unpacked(values: RowBytes, parcels: Sequence[torch.Tensor], expected: list[list[int]], did: str) -> list[Row]:
    """The rows that arrived from all ranks, checked to be those that were `expected` of each. `did`: for the error."""
    arrived: list[Row] = []
    for rank, origins in enumerate(expected):
        rows = values.unpack(parcels[rank])
        if (came := [row.origin for row in rows]) != origins:
            raise ExchangeError(f"rank {rank} {did} its rows {came}, and {origins} were to travel")
        arrived += rows
    return arrived


def _check_lens(output: Mapping[str, Any], lens: Sequence[int], told: str) -> None:
    if wrong := [name for name, x in output.items() if x.offsets().diff().tolist() != lens]:
        raise ExchangeError(f"{', '.join(wrong)} do not have the {len(lens)} rows that {told}, or not their lengths")
