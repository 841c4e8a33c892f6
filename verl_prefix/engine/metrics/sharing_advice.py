"""What the log says once of prompts that share less than they could, and what to set."""

import logging
from collections.abc import Mapping

import torch

from verl_prefix.config.options import PrefixConfig
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.grouping import tokens_by_trees
from verl_prefix.engine.metrics.metric_table import GROUP_TOKENS, ROW_TOKENS, SPLIT_PROMPTS, TREE_TOKENS
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

    def tree_tokens(self, exchange: Exchange) -> dict[str, float]:
        """Counts the tokens that each value of prefix.trees would compute of the first batch, of later ones nothing.
        Every rank calls it."""
        if not self._counts_trees:
            return {}
        self._counts_trees = False
        with together("counting tokens"):
            tokens = tokens_by_trees(exchange.computed, exchange.tree_rule, exchange.groups)
        return {TREE_TOKENS[name]: number for name, number in tokens.items()}

    def tell(self, totals: Mapping[str, float], forward_only: bool) -> None:
        """Gives the warnings that are due after a batch of log-probs, or after a step."""
        self._tell_of_split_prompts(totals, forward_only)
        self._tell_of_trees(**{name: totals[metric] for name, metric in TREE_TOKENS.items()})

    def _tell_of_split_prompts(self, totals: Mapping[str, float], forward_only: bool) -> None:
        """Says once, after the first step that shares, which prompts the trainer put into several mini-batches.

        What that costs follows from the last log-probs of the same rows, which saw their prompts whole. Without any, as
        in bypass mode without ref, the cost is not said.
        """
        if forward_only:
            self._log_prob_totals = totals
        if forward_only or not self._is_first_step or not totals["prefix/groups"]:  # verl's path computes every row
            return
        log_probs, self._is_first_step = self._log_prob_totals, False
        row_tokens, tokens_of_epoch = totals[ROW_TOKENS] / self._epochs, totals[GROUP_TOKENS] / self._epochs
        tokens, cost = log_probs.get(GROUP_TOKENS, 0.0), ""
        if tokens and tokens_of_epoch and row_tokens == log_probs[ROW_TOKENS]:
            more = tokens_of_epoch - tokens
            if more <= _WORTH_TELLING * tokens:
                return
            cost = f", {more:.0f} tokens more than {tokens:.0f} in an epoch of this step (+{100 * more / tokens:.0f}%)"
        # Where rows do not travel, as under a custom loss, which counts no group tokens, a rank counts its own prompts.
        is_of_one_rank = self._ranks.data_size > 1 and (self._options.exchange == "off" or not tokens_of_epoch)
        least = "at least " if is_of_one_rank else ""
        if totals[SPLIT_PROMPTS] and torch.distributed.get_rank() == 0:
            logger.warning(
                "prefix: prompts with rows in several mini-batches, each of which computes them: %s%d%s. Set trainer."
                "v1.trainer_mode=prefix_sync (or prefix_colocate_async, prefix_separate_async) and, where an agent "
                "loop returns a row per turn, also actor_rollout_ref.actor.prefix.mini_batches=prompts. Under trainer."
                "use_v1=false and verl.experimental leave actor_rollout_ref.actor.use_prefix_grouper and trainer."
                "balance_batch at their defaults, and make ppo_mini_batch_size a multiple of the ranks",
                least, int(totals[SPLIT_PROMPTS]), cost,
            )  # fmt: skip

    def _tell_of_trees(self, stock: float, off: float, uid: float, batch: float) -> None:
        """Says of the first batch what each value of prefix.trees computes, where rows are turns or prompts begin
        alike. Under `off` a session's rows lie on several ranks. Under the others they would lie on one, and might
        share more: then the numbers are upper bounds. Later batches are not counted: all numbers are 0."""
        if torch.distributed.get_rank():
            return
        scattered = self._options.trees == "off" and self._ranks.data_size > 1
        most = "at most " if scattered else ""
        if uid != off:
            logger.warning(
                "prefix: rows of turns: of %d tokens prefix.trees=off (whole prompts alone) computes %d, uid %s%d, "
                "batch %s%d; %s is on", stock, off, most, uid, most, batch,
                self._options.trees,
            )  # fmt: skip
        elif self._options.trees != "batch" and 0 < batch < (1 - _WORTH_TELLING) * off:
            logger.warning(
                "prefix: prompts begin alike: of %d tokens %d are computed, and with prefix.trees=batch %d",
                stock, off, batch,
            )  # fmt: skip
