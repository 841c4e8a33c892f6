"""Exchange: rows of a mini-batch travel to the rank that computes their group, and their outputs travel back.

    rank 0: a0 b0 c0 d0  ->  a0 a1 d0 d1      verl's trainers spread a prompt's rows over ranks; where a row is computed
    rank 1: a1 b1 c1 d1      b0 b1 c0 c1      changes neither sums over ranks nor what the row gives back

Each way takes the same collectives on every rank, all of tensors. Rows and tables go through the group of ranks that
have different rows (`Ranks.data_group`). After each piece of work that may fail on one rank `together` asks all ranks
of the job, model-parallel ones too, whether it went well. So an error on one rank is an error on all, and no rank waits
for another in vain. Outside of that is only what ranks do alike: making and sending tables, and sending rows.
"""

import itertools
import logging
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tensordict.tensorclass import NonTensorData
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from verl_prefix.core.groups import Group
from verl_prefix.engine import dead_rows
from verl_prefix.engine.backend import Backend, Ranks
from verl_prefix.engine.fields import PIXEL_INPUTS
from verl_prefix.engine.grouping import TreeRule, group_rows
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.together import RankError, together
from verl_prefix.engine.travel.moves import Moves, decide_moves
from verl_prefix.engine.travel.pixels import leave_out_pixels, put_back_pixels, receive_pixels
from verl_prefix.engine.travel.row_bytes import RowCodec, TravellingRow
from verl_prefix.engine.travel.row_table import PADDING, uid_hashes
from verl_prefix.models.vision import share_pixels
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)

Outputs = Mapping[str, torch.Tensor]
SECONDS = "timing_s/prefix_exchange"


@dataclass(frozen=True)
class Exchange:
    """The rows of a mini-batch that this rank computes, and the way back of their outputs.

    Attributes:
        computed: the rows that this rank computes. Where no row travels they are the given ones.
        groups: of these rows.
        uids: `uid_hashes` of the rows of all ranks, or of this rank alone where ranks exchange none. Padding's is left
            out.
        moves: by which rows have travelled; None: no row of any rank has.
        metrics: prefix/* of this rank, and the seconds until its rows were there.
    """

    computed: BatchRows
    groups: list[Group]
    uids: Set[int]
    moves: Moves | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def give_back(self, outputs: Outputs | None) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Sends outputs back to where their rows came from, in the order they came. Every rank calls it.

        Args:
            outputs: of `computed`, jagged [rows, tokens], of the same names on every rank; {}: nobody wants any; None:
                this rank has none, and other ranks do. Such a rank sends nothing, and takes part in all collectives.

        Returns:
            the outputs of the rows that verl handed over, and a metric: the seconds of both ways.
        """
        if self.moves is None or outputs == {}:
            return dict(outputs or {}), {}
        start = time.perf_counter()
        returned = _return_outputs(outputs, self.moves)
        return returned, {SECONDS: self.metrics[SECONDS] + time.perf_counter() - start}


def open_exchange(
    backend: Backend,
    given: BatchRows,
    loss: Loss,
    *,
    exchange_option: str,
    tree_rule: TreeRule,
    skips_dead: bool,
) -> Exchange:
    """Brings a mini-batch's rows to the ranks that compute them. Every rank calls it, and then `Exchange.give_back`,
    unless the batch takes the stock path after all.

    Args:
        given: the rows that verl handed over on this rank.
        exchange_option: `prefix.exchange`.
        tree_rule: what rows share besides whole prompts. It sees the rows, and remembers whether they are turns.
        skips_dead: dead rows are found (`dead_rows`), and cost nothing where rows are placed.

    Raises:
        RankError: another rank failed, here or in `give_back`, or ranks do not agree.
    """
    if skips_dead:
        with together("finding rows without gradient"):
            given = given.with_dead(dead_rows.find_dead(loss, given))
    if not _rows_may_travel(backend.ranks, exchange_option, loss):
        return _keep_rows(given, tree_rule)
    start = time.perf_counter()
    moves = decide_moves(given, backend.ranks, backend.shape, tree_rule)
    computed, sent_mib = _send_rows(given, moves) if moves.any_travels else (given, 0.0)
    metrics = moves.metrics | {"prefix/exchanged_mib": sent_mib, SECONDS: time.perf_counter() - start}
    with together("grouping rows"):
        computed = computed.with_data(receive_pixels(computed.data))
        groups = group_rows(computed, tree_rule)
    uids = {*moves.table.uids} - {PADDING}
    return Exchange(computed, groups, uids, moves if moves.any_travels else None, metrics)


def _keep_rows(given: BatchRows, tree_rule: TreeRule) -> Exchange:
    """Groups the rows where they are: ranks exchange nothing in this mini-batch."""
    with together("grouping rows"):
        given = given.with_data(receive_pixels(given.data))
        share_pixels(given.pixels)  # in place
        tree_rule.see(given.uids, given.keys)
        groups = group_rows(given, tree_rule)
    return Exchange(given, groups, {*uid_hashes(given)} - {PADDING})


def _rows_may_travel(ranks: Ranks, option: str, loss: Loss) -> bool:
    """Whether ranks exchange rows in this batch, the same on all ranks."""
    if option == "off" or ranks.data_size == 1:
        return False
    if not loss.is_known:
        unknown_loss = "this loss may read what does not travel (raw_prompt, extra_fields)"
        warn_once(logger, f"prefix: rows stay on their ranks, since {unknown_loss}")
        return False
    return True


def _send_rows(given: BatchRows, moves: Moves) -> tuple[BatchRows, float]:
    """Sends rows to the ranks that compute them. Returns those that this rank computes, in the order of
    `Moves.table_rows`, and how many MiB it sent. Every rank calls it.

    Raises:
        RankError: another rank failed, or sent other rows than `moves` says.
    """
    with together("sending rows"):
        codec = RowCodec.of_batch(given.data)
        parcels = [
            codec.pack([_row_to_send(codec, number, home, moves) for number in numbers])
            for home, numbers in enumerate(moves.sent)
        ]
    received = _swap(parcels, moves.ranks)
    with together("receiving rows"):
        rows = [codec.row(number, number=number) for number in moves.kept]
        rows += _unpacked(codec, received, moves.got, "its rows")
        keys = [moves.table.keys[table_row] for table_row in moves.table_rows]
        if PIXEL_INPUTS in codec.others:
            rows = put_back_pixels(rows, keys)
        # verl's batch of these rows, which also gets what this rank's batch has once.
        once = {name: x.data for name, x in given.data.items() if isinstance(x, NonTensorData)}
        others = {name: [row.others[name] for row in rows] for name in codec.others}
        computed = BatchRows(tu.get_tensordict(codec.join(rows) | others, once), keys)
        dead = {number for number, table_row in enumerate(moves.table_rows) if moves.table.is_dead[table_row]}
        computed = computed.with_dead(dead)
    return computed, sum(map(len, parcels)) / 2**20


def _row_to_send(codec: RowCodec, number: int, home: int, moves: Moves) -> TravellingRow:
    """Takes out a row as it travels to `home`."""
    row = codec.row(number, number=number)
    return leave_out_pixels(row) if moves.finds_pixels(number, home) else row


def _return_outputs(outputs: Outputs | None, moves: Moves) -> dict[str, torch.Tensor]:
    """Sends outputs of rows to the ranks that sent the rows. Returns those of this rank's batch; {} on a rank without
    outputs. Every rank calls it."""
    table, rank = moves.table, moves.ranks.data_rank
    with together("returning outputs", same=("format",)) as agreed:
        codec = RowCodec(outputs or {})
        parcels = [codec.pack([])] * len(moves.got)
        if outputs is not None:
            _check_lens(outputs, [table.lens[table_row] for table_row in moves.table_rows])
            arrived = itertools.count(len(moves.kept))  # indices of the rows that arrived, among those computed here
            parcels = []
            for numbers in moves.got:
                rows = [codec.row(next(arrived), number=number) for number in numbers]
                parcels.append(codec.pack(rows))
            agreed.tell_same("format", codec.format)
    if not agreed.is_same("format"):
        raise RankError(f"ranks computed different outputs; this one has {codec.format}")
    received = _swap(parcels, moves.ranks)
    with together("receiving outputs"):
        if outputs is None:
            return {}
        rows = [codec.row(computed, number=number) for computed, number in enumerate(moves.kept)]
        rows += _unpacked(codec, received, moves.sent, "outputs of rows")
        returned = codec.join(sorted(rows, key=lambda row: row.number))
        _check_lens(returned, table.lens[table.starts[rank] : table.starts[rank + 1]])
    return returned


def _swap(parcels: Sequence[torch.Tensor], ranks: Ranks) -> Sequence[torch.Tensor]:
    """Sends each rank its parcel, uint8; returns what each rank sent here."""
    device = get_device_id()
    sizes = torch.tensor([len(parcel) for parcel in parcels], device=device)
    received_sizes = torch.empty_like(sizes)
    dist.all_to_all_single(received_sizes, sizes, group=ranks.data_group)
    sent, got = sizes.tolist(), received_sizes.tolist()
    with together("making room for rows"):
        received = torch.empty(sum(got), dtype=torch.uint8, device=device)
        parcel = torch.cat(list(parcels)).to(device)
    dist.all_to_all_single(received, parcel, got, sent, group=ranks.data_group)
    return received.cpu().split(got)


def _unpacked(
    codec: RowCodec, parcels: Sequence[torch.Tensor], expected: list[list[int]], what: str
) -> list[TravellingRow]:
    """Returns the rows that arrived from all ranks, and checks their numbers.

    Args:
        expected: the numbers of each rank's rows.
        what: names the rows in the error.
    """
    arrived: list[TravellingRow] = []
    for rank, numbers in enumerate(expected):
        rows = codec.unpack(parcels[rank])
        if (came := [row.number for row in rows]) != numbers:
            raise RankError(f"data-parallel rank {rank} sent {what} {came}, and {numbers} were to travel")
        arrived += rows
    return arrived


def _check_lens(outputs: Mapping[str, Any], lens: Sequence[int]) -> None:
    if wrong := [name for name, x in outputs.items() if x.offsets().diff().tolist() != lens]:
        raise RankError(f"{', '.join(wrong)} do not have the {len(lens)} rows of this rank, or not their lengths")
