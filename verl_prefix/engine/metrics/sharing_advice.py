"""What the log says once of prompts that share less than they could, and what to set."""

import logging
from collections.abc import Mapping, Sequence

import torch

from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.groups import Group
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.grouping import TreeRule, group_rows
from verl_prefix.engine.metrics.metric_table import GROUP_TOKENS, ROW_TOKENS, SPLIT_PROMPTS, TREE_TOKENS
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.together import together
from verl_prefix.engine.travel.exchange import Exchange

logger = logging.getLogger(__name__)

# The share of a step's tokens from which the log says what split prompts cost, or other trees would save.
_WORTH_TELLING = 0.02


class SharingAdvice:
    """Two warnings of one engine, each given once: after the first step on prompts that the trainer split, after the
    first batch on prefix.trees.

    Its methods take `totals`: counts of all ranks, by the names of `metric_table`.

    Args:
        epochs: how often a step goes through its rows. Log-probs go through them once.
    """

    def __init__(self, backend: Backend, options: PrefixConfig, epochs: int) -> None:
        self._ranks, self._options, self._epochs = backend.ranks, options, epochs
        self._counts_trees = backend.trains  # until the first batch was counted
        self._log_prob_totals: Mapping[str, float] = {}  # of the last log-probs
        self._is_first_step = True

    def tree_tokens(self, exchange: Exchange, tree_rule: TreeRule) -> dict[str, float]:
        """Counts the tokens that each value of prefix.trees would compute of the first batch, of later ones nothing.
        Every rank calls it."""
        if not self._counts_trees:
            return {}
        self._counts_trees = False
        with together("counting tokens"):
            tokens = _tokens_by_trees(exchange.computed, tree_rule, exchange.groups)
        return {TREE_TOKENS[name]: number for name, number in tokens.items()}

    def tell(self, totals: Mapping[str, float], forward_only: bool) -> None:
        """Gives the warnings that are due after a batch of log-probs, or after a step."""
        if forward_only:
            self._log_prob_totals = totals
        elif self._is_first_step and totals["prefix/groups"]:  # on the stock path no prompt is shared anyway
            self._is_first_step = False
            self._tell_of_split_prompts(totals)
        if totals[TREE_TOKENS["stock"]]:  # of the first batch, the only one that is counted
            self._tell_of_trees(**{name: totals[metric] for name, metric in TREE_TOKENS.items()})

    def _tell_of_split_prompts(self, totals: Mapping[str, float]) -> None:
        """Says of the first step that shares how many prompts the trainer put into several mini-batches, and what that
        costs, unless it costs next to nothing."""
        if not totals[SPLIT_PROMPTS] or torch.distributed.get_rank():
            return
        tokens = totals[GROUP_TOKENS] / self._epochs
        whole_tokens = self._tokens_of_whole_prompts(totals)
        cost = ""  # not known
        # With fewer tokens than those of whole prompts a mini-batch took the stock path, and was not counted.
        if whole_tokens and tokens >= whole_tokens:
            more = tokens - whole_tokens
            if more <= _WORTH_TELLING * whole_tokens:
                return
            percent = 100 * more / whole_tokens
            cost = f" ({more:.0f} tokens more than {whole_tokens:.0f} in an epoch of this step, +{percent:.0f}%)"
        # Where rows do not travel, as under a custom loss, which counts no group tokens, a rank counts its own prompts.
        is_of_one_rank = self._ranks.data_size > 1 and (self._options.exchange == "off" or not tokens)
        logger.warning(
            "prefix: %s%d prompts have rows in several mini-batches, each of which computes them again%s. "
            "Set trainer.v1.trainer_mode=prefix_sync (or prefix_colocate_async, prefix_separate_async). "
            "If an agent loop returns a row per turn, also set actor_rollout_ref.actor.prefix.mini_batches=prompts. "
            "Under trainer.use_v1=false and verl.experimental, leave actor_rollout_ref.actor.use_prefix_grouper and "
            "trainer.balance_batch at their defaults, and make ppo_mini_batch_size a multiple of the ranks",
            "at least " if is_of_one_rank else "", int(totals[SPLIT_PROMPTS]), cost,
        )  # fmt: skip

    def _tokens_of_whole_prompts(self, totals: Mapping[str, float]) -> float:
        """Returns the tokens that one epoch of a step would compute if no prompt were split: those of the last
        log-probs, which saw their prompts whole. It is 0 if the log-probs were of other rows, or there were none, as in
        bypass mode without ref."""
        has_same_rows = totals[ROW_TOKENS] / self._epochs == self._log_prob_totals.get(ROW_TOKENS)
        return self._log_prob_totals.get(GROUP_TOKENS, 0.0) if has_same_rows else 0.0

    def _tell_of_trees(self, stock: float, off: float, uid: float, batch: float) -> None:
        """Says of the first batch what each value of prefix.trees computes, where rows are turns or prompts begin
        alike. Under `off` a session's rows lie on several ranks. Under the others they would lie on one, and might
        share more: then the numbers are upper bounds."""
        if torch.distributed.get_rank():
            return
        is_scattered = self._options.trees == "off" and self._ranks.data_size > 1
        most = "at most " if is_scattered else ""
        if uid != off:
            logger.warning(
                "prefix: rows of turns: of %d tokens prefix.trees=off (whole prompts alone) computes %d, uid %s%d, "
                "batch %s%d; %s is on",
                stock, off, most, uid, most, batch, self._options.trees,
            )  # fmt: skip
        elif self._options.trees != "batch" and batch < (1 - _WORTH_TELLING) * off:
            logger.warning(
                "prefix: prompts begin alike: of %d tokens %d are computed, and with prefix.trees=batch %d",
                stock, off, batch,
            )  # fmt: skip


def _tokens_by_trees(rows: BatchRows, tree_rule: TreeRule, groups: Sequence[Group]) -> dict[str, float]:
    """Counts the tokens of these rows that each value of `prefix.trees` computes, as if every group were one pass, and
    those that "stock" computes. Padding does not count. If rows have pixels and are no turns, "batch" gets the number
    of "uid": to count it, each image would be hashed by itself, which takes long for one message of the log.

    Args:
        groups: of these rows, by `tree_rule`.
    """
    groups_by = {tree_rule.scope: groups}
    rules = {scope: TreeRule(scope, tree_rule.ends, tree_rule.config) for scope in ("off", "uid", "batch")}
    for scope, rule in rules.items():
        rule.see(rows.uids, rows.keys)
        if scope in groups_by:
            continue
        if scope == "batch" and any(rows.pixels) and not rules["uid"].cuts_rows:
            groups_by[scope] = groups_by["uid"]
        else:
            groups_by[scope] = group_rows(rows, rule)
    real = {scope: rows.without_padding(groups) for scope, groups in groups_by.items()}
    computed = {scope: float(sum(group.num_physical_tokens for group in groups)) for scope, groups in real.items()}
    return computed | {"stock": float(sum(group.num_logical_tokens for group in real["off"]))}
