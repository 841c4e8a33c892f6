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
from collections import Counter
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

from verl_prefix.auto.placement import describe_rows
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.engine import carried_pixels
from verl_prefix.engine.protocol import Engine
from verl_prefix.engine.row_bytes import Row, RowBytes
from verl_prefix.engine.row_table import PADDING, AllRows, describe, describe_pieces
from verl_prefix.engine.rows import NO_TREES, PIXELS, Trees, group_rows, padding_rows, row_keys, uids_of
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
    mine = [0, *agreed] if error is None else [dist.get_rank(everyone) + 1, *[0] * num_agreed]
    reduced = torch.tensor(mine, dtype=torch.float64, device=device or get_device_name())
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=everyone)
    failed, *agreed[:] = map(int, reduced.tolist())
    if error is not None:
        raise error
    if failed:
        raise ExchangeError(f"prefix: rank {failed - 1} failed while {doing}; its own error says why")


Outputs = Mapping[str, torch.Tensor]
Together = Callable[..., AbstractContextManager[list[int]]]


@dataclass
class Exchange:
    """A mini-batch at the rank that computes it. Where rows stay, `rows` is the batch and `give_back` the identity.

    Attributes:
        rows: the rows that this rank computes. keys, groups: theirs. are_cut: as in `group_rows`.
        prompts: names of the prompts of all ranks, or of this rank where rows stay; padding is none.
        metrics: prefix/* and timing_s/* of this rank; `give_back` adds what it took.
        give_back: a model's outputs of `rows`, jagged [rows, tokens] of the same names on every rank -> those of this
            rank's own rows, in the order they came.
    """

    rows: TensorDict
    keys: Sequence[Hashable]
    groups: list[Group]
    are_cut: bool
    prompts: Set[Hashable]
    metrics: dict[str, float]
    give_back: Callable[[Outputs], dict[str, torch.Tensor]]


def open_exchange(engine: Engine, data: TensorDict, custom_loss: bool) -> Exchange:
    """Brings an engine's mini-batch to the ranks that compute it."""
    group = engine.get_data_parallel_group()
    if engine.prefix_config.exchange == "off" or dist.get_world_size(group) == 1:
        group = None
    elif custom_loss:
        text = "prefix.exchange: rows stay on their ranks in updates: a loss that is not verl's own may read %s"
        warn_once(logger, text, "what does not travel (raw_prompt, extra_fields)")
        group = None
    device = torch.device(get_device_name())
    return exchange_rows(data, engine.shape, group, device, everyone=dist.group.WORLD, trees=engine.trees)


def exchange_rows(
    data: TensorDict, shape: ModelShape, group: dist.ProcessGroup | None, device: torch.device,
    everyone: dist.ProcessGroup | None = None, trees: Trees = NO_TREES,
) -> Exchange:  # fmt: skip
    """Brings rows to the ranks that compute them, all of which call this, and then give outputs back.

    Args:
        data: this rank's rows, of which none changes but for its pixels (`carried_pixels`).
        group: the ranks that compute data in parallel; None: rows stay. everyone: these, and the ranks that compute the
            same rows together by sequence parallelism; all fail together. device: where collectives want tensors.
        trees: what rows share besides whole prompts.

    Raises:
        ExchangeError: another rank failed, here or in `give_back`, or ranks do not agree.
    """
    all_together = functools.partial(together, everyone=everyone or group, device=device)
    routes = None if group is None else _Routes(data, shape, group, device, all_together, trees)
    rows = routes.travel() if routes and routes.moves else data
    with all_together("grouping rows"):
        _receive_pixels(rows)
        keys = routes.keys if routes else row_keys(rows)
        are_cut = routes.are_cut if routes else trees.are_cut(uids_of(rows, keys), keys)
        groups = group_rows(rows, keys, trees, are_cut)
    metrics = routes.metrics if routes else {}
    uids = Counter(uid for uid, _ in set(zip(map(str, tu.get(rows, "uid", ())), keys, strict=False)))
    metrics["prefix/split_uids"] = sum(n > 1 for n in uids.values())
    prompts = routes.prompts if routes else _prompts_of(rows, keys)
    give_back = routes.give_back if routes and routes.moves else dict
    return Exchange(rows, keys, groups, are_cut, prompts, metrics, give_back)


def _prompts_of(rows: TensorDict, keys: Sequence[Hashable]) -> Set[Hashable]:
    padding = padding_rows(rows)
    return {uid for row, uid in enumerate(uids_of(rows, keys)) if row not in padding}


class _Routes:
    """Which rows this rank keeps, sends and gets; the same plan is known to all ranks.

    Attributes:
        keys: of the rows that this rank computes, by `row_keys`. are_cut: as in `group_rows`.
        moves: whether any row of any rank travels. prompts: as in `Exchange`.
        metrics: prefix/* and timing_s/* of this rank so far; imbalance and groups are those of all ranks.
    """

    def __init__(
        self, data: TensorDict, shape: ModelShape, group: dist.ProcessGroup, device: torch.device, together: Together,
        trees: Trees,
    ) -> None:  # fmt: skip
        self._data, self._group, self._device, self._together = data, group, device, together
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self.metrics = dict.fromkeys(("prefix/exchanged_mib", "timing_s/prefix_exchange"), 0.0)
        with self._timed():
            with self._together("describing rows", 4) as agreed:
                self._bytes = RowBytes.of_batch(data)
                table = describe(data, shape)
                agreed += [len(table), trees.seen, *_same(self._bytes.layout)]
            most, seen, *layouts = agreed
            trees = trees._replace(seen=bool(seen))  # ranks differ after a batch whose rows stayed
            compatible = layouts[0] == -layouts[1]
            if not compatible:
                logger.warning("prefix.exchange: the ranks' batches have different fields, so that rows stay")
            self._all = AllRows(self._gather(table, most))
            self.prompts = {uid for uid in self._all.uids if uid != PADDING}
            self.are_cut = trees.are_cut(self._all.uids, self._all.keys)
            pieces: list[torch.Tensor] = []
            if self.are_cut:
                with self._together("describing turns", 1) as agreed:
                    own = describe_pieces(data, shape, trees)
                    agreed += [len(own)]
                pieces = self._gather(own, agreed[0])
            with self._together("placing rows", 2) as agreed:
                agreed += _same(self._place(compatible, pieces))
        if agreed[0] != -agreed[1]:
            raise ExchangeError(
                "ranks placed the same rows differently; install the same version of verl_prefix on every node, or set "
                "actor_rollout_ref.actor.prefix.exchange=off"
            )

    def travel(self) -> TensorDict:
        """The rows that this rank computes: its own that stay, then those that arrive, by rank."""
        with self._timed():
            with self._together("sending rows"):
                parcels = [self._bytes.pack([self._for(to, i) for i in rows]) for to, rows in enumerate(self._sent)]
            received = self._swap(parcels)
            with self._together("receiving rows"):
                rows = [self._bytes.row(i, i) for i in self._kept]
                rows += _unpacked(self._bytes, received, self._got, "sent")
                return self._batch(self._with_pixels(rows))

    def give_back(self, output: Outputs) -> dict[str, torch.Tensor]:
        """As `Exchange.give_back`."""
        if not output:
            return {}
        with self._timed():
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

    def _place(self, compatible: bool, pieces: Sequence[torch.Tensor]) -> list[int]:
        """Finds the rank of every row of all ranks, by `pieces` where rows are turns. Where ranks cannot read each
        other's rows (not `compatible`), every row stays."""
        rows, me, first = self._all, self._rank, self._all.starts[self._rank]
        if compatible:
            placement = rows.place_turns(self._size, pieces) if self.are_cut else rows.place(self._size)
        else:
            placement = describe_rows(rows.keys, rows.prefix_costs, rows.suffix_costs, rows.ranks, self._size)
        homes = placement.ranks
        if len(homes) != len(rows.keys) or set(homes) != set(range(self._size)):
            raise ExchangeError(
                f"{len(rows.keys)} rows were placed on ranks {homes}; there are {self._size}, and each needs one"
            )
        self.moves = homes != rows.ranks
        # To each rank, indices into this rank's rows; from each rank, indices into that one's.
        self._sent: list[list[int]] = [[] for _ in range(self._size)]
        self._got: list[list[int]] = [[] for _ in range(self._size)]
        for row, (rank, home) in enumerate(zip(rows.ranks, homes, strict=True)):
            if rank == me:
                self._sent[home].append(row - first)
            if home == me:
                self._got[rank].append(row - rows.starts[rank])
        self._kept, self._sent[me], self._got[me] = self._sent[me], [], []
        self._computed = [first + i for i in self._kept]
        self._computed += [start + i for start, got in zip(rows.starts, self._got, strict=False) for i in got]
        self.keys = [rows.keys[row] for row in self._computed]
        self._holders = {(k, r) for k, r, has in zip(rows.keys, rows.ranks, rows.has_pixels, strict=True) if has}
        self.metrics |= {
            "prefix/placement_imbalance": placement.imbalance,
            "prefix/split_groups": 0 if compatible else placement.split_groups,
            "prefix/cost_split_groups": placement.split_groups if compatible else 0,
            "prefix/exchanged_rows": sum(map(len, self._sent)),
        }
        return homes

    def _for(self, to: int, i: int) -> Row:
        """Row i as it goes to rank `to`: without its pixels where that one has them."""
        row, key = self._bytes.row(i, i), self._all.keys[self._all.starts[self._rank] + i]
        if row.others.get(PIXELS) and (key, to) in self._holders:
            row.others[PIXELS] = {name: x for name, x in row.others[PIXELS].items() if name not in PIXEL_NAMES}
        return row

    def _with_pixels(self, rows: list[Row]) -> list[Row]:
        """Gives rows the pixels that another row of their group has here. No dict of `data` changes: an update of
        several epochs asks for its rows again."""
        if PIXELS not in self._bytes.objects:
            return rows
        seen = [dict(row.others[PIXELS] or {}) for row in rows]
        pixels = ({name: x for name, x in one.items() if name in PIXEL_NAMES} for one in seen)
        held = {key: own for key, own in zip(self.keys, pixels, strict=True) if own}
        for key, one, row in zip(self.keys, seen, rows, strict=True):
            if key in held:  # also where pixels were all that a row had, before they stayed behind
                one = {name: x for name, x in one.items() if name != carried_pixels.CARRIED_BY} | held[key]
            row.others[PIXELS] = one
        return rows

    def _batch(self, rows: Sequence[Row]) -> TensorDict:
        """Rows as verl's batch, with what `data` has once."""
        once = {name: x.data for name, x in self._data.items() if isinstance(x, NonTensorData)}
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


def receive_pixels(data: TensorDict) -> None:
    """Gives rows the pixels that other rows carried for them, on every rank or on none."""
    with together("receiving pixels"):
        _receive_pixels(data)


def _receive_pixels(data: TensorDict) -> None:
    if PIXELS in data.keys():
        carried_pixels.receive_pixels(tu.get(data, PIXELS))


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
