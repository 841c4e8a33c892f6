"""Exchange: rows of a mini-batch travel to the rank that computes their group, and their outputs travel back.

    rank 0: a0 b0 c0 d0  ->  a0 a1 d0 d1      verl's trainers spread a prompt's rows over ranks; where a row is computed
    rank 1: a1 b1 c1 d1      b0 b1 c0 c1      changes neither sums over ranks nor what the row gives back

It takes at most sixteen collectives (`travel`), all of tensors, by all ranks that compute data in parallel. After each
piece of work a collective says whether every rank got through it (`together`). So an error on one rank is an error on
all, and no rank waits for another in vain.
"""

import logging
from collections.abc import Hashable, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.carried_pixels import receive_pixels
from verl_prefix.engine.grouping import TreeRule, group_rows
from verl_prefix.engine.row_table import PADDING
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.together import together
from verl_prefix.engine.travel import Outputs, Travel
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


@dataclass
class Exchange:
    """The rows of a mini-batch that this rank computes, and their outputs' way back. Where no row travels they are the
    rows that it has.

    Attributes:
        rows: the rows. groups: theirs.
        trees: what they share, for this batch and those that follow.
        uids: of all ranks' rows but padding, as 64-bit hashes; of this rank's alone where ranks exchange nothing.
        metrics: prefix/* and timing_s/* of this rank; `give_back` adds what it took.
    """

    rows: BatchRows
    groups: list[Group]
    trees: TreeRule
    uids: Set[Hashable]
    metrics: dict[str, float]
    _travel: Travel | None = None

    def give_back(self, outputs: Outputs | None) -> dict[str, torch.Tensor]:
        """Sends outputs back to where their rows came from, in the order they came. Every rank calls it.

        Args:
            outputs: of `rows`, jagged [rows, tokens], of the same names on every rank; {}: nobody wants any; None: this
                rank has none, and others do.
        """
        if self._travel is None:
            return dict(outputs or {})
        return {} if outputs == {} else self._travel.give_back(outputs)


def open_exchange(backend: Backend, option: str, rows: BatchRows, trees: TreeRule, is_unknown: bool) -> Exchange:
    """Brings a mini-batch to the ranks that compute it.

    Args:
        option: `prefix.exchange`. is_unknown: the loss is not one of `LOSSES_OF_ROWS`.
    """
    group: dist.ProcessGroup | None = backend.ranks.data
    if option == "off" or backend.ranks.data_size == 1:
        group = None
    elif is_unknown:
        text = "prefix.exchange: rows stay on their ranks in updates: this loss may read %s"
        warn_once(logger, text, "what does not travel (raw_prompt, extra_fields)")
        group = None
    return exchange_rows(rows, backend.shape, group, trees)


def exchange_rows(rows: BatchRows, shape: ModelShape, group: dist.ProcessGroup | None, trees: TreeRule) -> Exchange:
    """Brings rows to the ranks that compute them, all of which call this, and then give outputs back.

    Args:
        rows: this rank's. trees: what they share besides whole prompts.
        group: the ranks that have different rows; None: rows stay.

    Raises:
        ExchangeError: another rank failed, here or in `give_back`, or ranks do not agree.
    """
    travel = None if group is None else Travel(rows, group)
    are_cut = travel.plan(shape, trees) if travel else None
    rows = travel.rows() if travel and travel.routes.moves else rows
    with together("grouping rows"):
        rows = rows.replaced(receive_pixels(rows.data))
        if are_cut is None:
            are_cut = trees.are_cut(rows.uids, rows.keys)
        groups = group_rows(rows, trees, are_cut)
    trees = trees._replace(cut_before=are_cut)
    if travel is None:
        uids = {uid for row, uid in enumerate(rows.uids) if row not in rows.padding}
        return Exchange(rows, groups, trees, set(uids), {})
    hashes = {uid for uid in travel.table.uids if uid != PADDING}
    return Exchange(rows, groups, trees, hashes, travel.metrics, travel if travel.routes.moves else None)
