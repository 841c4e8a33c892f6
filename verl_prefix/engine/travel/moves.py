"""Moves: which rank computes each row of a mini-batch, as all ranks decide it before any row travels."""

import logging
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from verl.utils.device import get_device_id

from verl_prefix.auto.placement import Placement
from verl_prefix.auto.shape import ModelShape
from verl_prefix.engine.backend import Ranks
from verl_prefix.engine.grouping import TreeRule
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.together import RankError, together
from verl_prefix.engine.travel.row_bytes import RowCodec
from verl_prefix.engine.travel.row_table import PADDING, RowTable, describe
from verl_prefix.engine.travel.session_pieces import describe_pieces
from verl_prefix.models.vision import share_pixels
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


class Moves:
    """Where the rows of all ranks are computed, and what this rank does for that. A number is a row's index in the
    batch of one rank, a table row its index in the table.

    Args:
        table: the rows of all ranks.
        homes: the rank that computes each of them.
        ranks: this rank, among those that exchange rows.
        placement_metrics: prefix/* of the placement, which is that of all ranks.

    Attributes:
        any_travels: whether any row of any rank travels.
        kept: numbers of this rank's rows that stay.
        sent: for each rank, numbers of this rank's rows that go there.
        got: for each rank, the numbers there of its rows that come here.
        table_rows: table rows that this rank computes: first those that stay, then those that arrive, by rank.
        metrics: prefix/*, of the placement and of this rank's rows.
    """

    def __init__(
        self, table: RowTable, homes: Sequence[int], ranks: Ranks, placement_metrics: Mapping[str, float]
    ) -> None:
        self.table, self.ranks = table, ranks
        self.any_travels = homes != table.sources
        rank = ranks.data_rank
        self.kept: list[int] = []
        self.sent: list[list[int]] = [[] for _ in range(ranks.data_size)]
        self.got: list[list[int]] = [[] for _ in range(ranks.data_size)]
        for table_row, (source, home) in enumerate(zip(table.sources, homes, strict=True)):
            number = table_row - table.starts[source]
            if source == home == rank:
                self.kept.append(number)
            elif source == rank:
                self.sent[home].append(number)
            elif home == rank:
                self.got[source].append(number)
        self.table_rows = [table.starts[rank] + number for number in self.kept]
        for source, numbers in enumerate(self.got):
            self.table_rows += [table.starts[source] + number for number in numbers]
        # The keys of rows that stay where they are and have pixels, each with its rank.
        rows = zip(table.keys, table.sources, homes, table.has_pixels, strict=True)
        self._holders = {(key, home) for key, source, home, has_pixels in rows if has_pixels and home == source}
        self.metrics = {**placement_metrics, "prefix/exchanged_rows": sum(map(len, self.sent))}

    def finds_pixels(self, number: int, home: int) -> bool:
        """Whether a row that stays on rank `home` has the pixels of this rank's row `number`."""
        return (self.table.keys[self.table.starts[self.ranks.data_rank] + number], home) in self._holders


def decide_moves(given: BatchRows, ranks: Ranks, shape: ModelShape, tree_rule: TreeRule) -> Moves:
    """Tells all ranks of all rows, and finds a rank for each row. Every rank calls it.

    Args:
        given: the rows that verl handed over on this rank. Rows with equal pixels then hold one tensor of them.
        tree_rule: sees all rows. Ranks may differ in `cuts_rows` before, after a batch whose rows stayed on their
            ranks.

    Raises:
        RankError: another rank failed, or ranks placed rows differently.
    """
    with together("describing rows", maxima=("num_rows", "cuts_rows"), same=("format",)) as described:
        share_pixels(given.pixels)  # in place
        descriptions = describe(given, shape)
        described.tell_maximum("num_rows", len(descriptions))
        described.tell_maximum("cuts_rows", tree_rule.cuts_rows)
        described.tell_same("format", RowCodec.of_batch(given.data).format)
    can_travel = described.is_same("format")
    if not can_travel:
        warn_once(logger, "prefix: rows stay on their ranks, since the ranks' batches have different fields")
    table = RowTable(_gather(descriptions, described["num_rows"], ranks))
    tree_rule.cuts_rows = bool(described["cuts_rows"])
    tree_rule.see(table.uids, table.keys)
    pieces = _gather_pieces(given, ranks, shape, tree_rule) if tree_rule.cuts_rows else None
    with together("placing rows", same=("homes",)) as placed:
        placement = _place(table, pieces, can_travel, ranks.data_size)
        placed.tell_same("homes", placement.ranks)
        homes = placement.ranks
        # verl's rows of padding have one prompt, which nobody splits.
        homes_of_padding = {home for uid, home in zip(table.uids, homes, strict=True) if uid == PADDING}
        split_groups = placement.split_groups - (len(homes_of_padding) > 1)
        metrics = {
            "prefix/placement_imbalance": placement.imbalance,
            "prefix/split_groups": 0 if can_travel else split_groups,
            "prefix/cost_split_groups": split_groups if can_travel else 0,
        }
        moves = Moves(table, homes, ranks, metrics)
    if not placed.is_same("homes"):
        raise RankError(
            "ranks placed the same rows differently; install the same version of verl_prefix on every node, or set "
            "actor_rollout_ref.actor.prefix.exchange=off"
        )
    return moves


def _gather_pieces(given: BatchRows, ranks: Ranks, shape: ModelShape, tree_rule: TreeRule) -> list[torch.Tensor]:
    """Returns the pieces of each rank's rows, as `describe_pieces` makes them."""
    with together("describing turns", maxima=("num_pieces",)) as described:
        pieces = describe_pieces(given, shape, tree_rule)
        described.tell_maximum("num_pieces", len(pieces))
    return _gather(pieces, described["num_pieces"], ranks)


def _gather(table: torch.Tensor, most: int, ranks: Ranks) -> list[torch.Tensor]:
    """Returns the int64 tables of all ranks. Each rank sends a row with the length of its table, and then the table,
    padded to `most` rows."""
    padded = torch.zeros(most + 1, table.shape[1], dtype=torch.int64)
    padded[0, 0] = len(table)
    padded[1 : len(table) + 1] = table
    device = get_device_id()
    tables = torch.empty(ranks.data_size, *padded.shape, dtype=torch.int64, device=device)
    dist.all_gather(list(tables), padded.to(device), group=ranks.data_group)
    return [gathered[1 : gathered[0, 0] + 1] for gathered in tables.cpu()]


def _place(table: RowTable, pieces: Sequence[torch.Tensor] | None, can_travel: bool, num_ranks: int) -> Placement:
    """Finds the rank of each row.

    Args:
        pieces: of all ranks' rows; None: no rows are turns.
    """
    if not can_travel:
        placement = table.as_it_is(num_ranks)
    elif pieces is None:
        placement = table.by_group(num_ranks)
    else:
        placement = table.by_session(num_ranks, pieces)
    homes = placement.ranks
    if len(homes) != len(table.keys) or set(homes) != set(range(num_ranks)):
        raise RankError(
            f"{len(table.keys)} rows were placed on data-parallel ranks {homes}; there are {num_ranks}, and each needs "
            "one"
        )
    return placement
