"""Exchange: rows of a mini-batch travel to the rank that computes their group, and their outputs travel back.

    rank 0: a0 b0 c0 d0  ->  a0 a1 d0 d1      verl's trainers spread a prompt's rows over ranks; where a row is computed
    rank 1: a1 b1 c1 d1      b0 b1 c0 c1      changes neither sums over ranks nor what the row gives back

Each way takes a fixed number of collectives, all of tensors. Rows and tables go through the group of ranks that have
different rows (`Ranks.data`; see `travel`). After each piece of work `together` asks all ranks of the job, copies too,
whether it went well. So an error on one rank is an error on all, and no rank waits for another in vain. Only sending
tables and rows, and making buffers for tables, is outside of that.
"""

import logging
from collections.abc import Hashable, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl_prefix.core.groups import Group
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.carried_pixels import receive_pixels
from verl_prefix.engine.grouping import TreeRule, group_rows
from verl_prefix.engine.loss import Loss
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
        computed: the rows.
        groups: of these rows.
        tree_rule: what they share, for this batch and those that follow.
        uids: 64-bit hashes of all ranks' uids, without padding's. Where ranks exchange nothing, this rank's uids
            themselves.
        metrics: prefix/* and timing_s/* of this rank; `give_back` adds what it took.
    """

    computed: BatchRows
    groups: list[Group]
    tree_rule: TreeRule
    uids: Set[Hashable]
    metrics: dict[str, float]
    _travel: Travel | None = None

    def give_back(self, outputs: Outputs | None) -> dict[str, torch.Tensor]:
        """Sends outputs back to where their rows came from, in the order they came. Every rank calls it.

        Args:
            outputs: of `computed`, jagged [rows, tokens], of the same names on every rank; {}: nobody wants any; None:
                this rank has none, and others do.
        """
        if self._travel is None:
            return dict(outputs or {})
        return {} if outputs == {} else self._travel.give_back(outputs)


def open_exchange(
    backend: Backend, option: str, batch: BatchRows, tree_rule: TreeRule, loss: Loss, skips_dead: bool
) -> Exchange:
    """Brings a mini-batch's rows to the ranks that compute them. Every rank calls it, and then `Exchange.give_back`,
    unless the batch takes the stock path after all.

    Args:
        option: `prefix.exchange`.
        tree_rule: what rows share besides whole prompts.
        skips_dead: dead rows are found (`Loss.find_dead`), and cost nothing where rows are placed.

    Raises:
        RankError: another rank failed, here or in `give_back`, or ranks do not agree.
    """
    ranks, travel = _exchanging_ranks(backend, option, loss), None
    if skips_dead:  # for the costs by which rows are placed
        with together("finding rows without gradient"):
            batch = batch.with_dead(loss.find_dead(batch))
    computed = batch
    if ranks is not None:
        travel = Travel(batch, ranks)
        travel.decide_moves(backend.shape, tree_rule)
        computed = travel.send_rows() if travel.moves.any_travels else batch
    with together("grouping rows"):
        computed = computed.with_data(receive_pixels(computed.data))
        if skips_dead:  # again, since rows that arrive bring no mark
            computed = computed.with_dead(loss.find_dead(computed))
        is_cut = travel.is_cut if travel else tree_rule.cuts_rows(computed.uids, computed.keys)
        groups = group_rows(computed, tree_rule, is_cut)
    tree_rule = tree_rule._replace(was_cut=is_cut)
    if travel is None:
        uids = {uid for row, uid in enumerate(computed.uids) if row not in computed.padding}
        return Exchange(computed, groups, tree_rule, uids, {})
    hashes = {uid for uid in travel.table.uids if uid != PADDING}
    return Exchange(computed, groups, tree_rule, hashes, travel.metrics, travel if travel.moves.any_travels else None)


def _exchanging_ranks(backend: Backend, option: str, loss: Loss) -> dist.ProcessGroup | None:
    """Returns the ranks that exchange rows; None: rows stay."""
    if option == "off" or backend.ranks.data_size == 1:
        return None
    if loss.is_unknown:
        why = "this loss may read what does not travel (raw_prompt, extra_fields)"
        warn_once(logger, f"prefix.exchange: rows stay on their ranks where this loss is computed: {why}")
        return None
    return backend.ranks.data
