"""Metrics of a training step: counts and seconds are the step's, of all its ranks and mini-batches.

verl averages what an engine reports over both. Of timing_s/* it takes the minimum, since it finds "min" in "timing"
(reduce_metrics, verl/utils/metric/utils.py). So each rank reports the total once, with the step's last mini-batch.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.engine.rows import padding_rows

logger = logging.getLogger(__name__)

# The sum over ranks is reported, since each rank counts its own.
COUNTS = [
    f"prefix/{name}"
    for name in (
        "groups", "stock_rows", "log_prob_stock_rows", "tokens_saved", "recomputed_groups", "packed_passes", "waves",
        "split_uids", "exchanged_rows", "exchanged_mib", "nonfinite_passes",
    )
]  # fmt: skip
# The maximum over ranks is reported: of seconds, since ranks wait for the slowest (as verl's own seconds do), of peaks,
# and of what every rank knows of all.
MOST = [
    *(f"timing_s/prefix_{name}" for name in ("exchange", "packed", "phase_a", "phase_b", "phase_c", "verify")),
    *(f"prefix/{name}" for name in ("split_groups", "cost_split_groups", "phase_b_peak_gib")),
]
# Counted, but not reported: tokens that stock computes, and that ours would compute if every group were one pass.
_TOKENS, GROUP_TOKENS = "tokens of rows", "tokens of groups"
# And of the first batch what `rows.tokens_by_trees` counts.
TREE_TOKENS = {name: f"tokens of trees: {name}" for name in ("stock", "off", "uid", "batch")}
_SUMS = (*COUNTS, _TOKENS, GROUP_TOKENS, *TREE_TOKENS.values())
_TORN = 0.02  # the share of a step's tokens from which the log says what torn groups cost, or other trees would save
Reduce = Callable[[Sequence[float]], Sequence[float]]


class StepMetrics:
    """Adds up an engine's metrics until a step is over.

    Args:
        reduce_sum, reduce_max: element-wise over all ranks. sequence_ranks: how many ranks compute the same rows, each
            of which counts them.
        trees: of `PrefixConfig`. epochs: how often a step goes through its rows, in equally many
            mini-batches, by the config; a trainer that sends another number is miscounted.
    """

    def __init__(self, reduce_sum: Reduce, reduce_max: Reduce, sequence_ranks: int, trees: str, epochs: int) -> None:
        self._trees, self._epochs = trees, epochs
        self._reduce_sum, self._reduce_max, self._sequence_ranks = reduce_sum, reduce_max, sequence_ranks
        self._log_prob_stock_rows = 0.0
        self._log_prob_total: Mapping[str, float] = {}  # of the last log-probs
        self._is_first_step = True
        self._start_step()

    def _start_step(self) -> None:
        self._step: dict[str, float] = {}
        self._prompts: list[Set[Hashable]] = [frozenset()]  # of its mini-batches, the last of which is under way

    def meet(self, prompts: Set[Hashable]) -> None:
        """Sees the prompts of an update's mini-batch, to count those whose rows lie in several of an epoch."""
        self._prompts[-1] = prompts

    def _torn(self) -> Set[Hashable]:
        """Prompts with rows in several mini-batches of an epoch of the step, which is over."""
        num = -(-len(self._prompts) // self._epochs)
        epochs = (self._prompts[start : start + num] for start in range(0, len(self._prompts), num))
        counts = (Counter(itertools.chain(*epoch)) for epoch in epochs)
        return {prompt for count in counts for prompt, times in count.items() if times > 1}

    def report(self, metrics: Mapping[str, float], data: TensorDict, forward_only: bool) -> dict[str, list[float]]:
        """What a rank reports after a batch whose own metrics are `metrics`.

        Log-probs are a step of their own; since verl's v1 trainer drops their metrics, the next update says how many of
        their rows did not share.

        Args:
            data: the batch as verl handed it over, which says with `update_lr_scheduler` (TrainingWorker.
                train_mini_batch) whether a step ends; a caller who does not say ends one with every batch.
        """
        step, num_torn = {} if forward_only else self._step, 0
        totals = {name: float(value) for name, value in metrics.items() if name in _SUMS or name in MOST}
        lens = data["input_ids"].offsets().diff().tolist()
        tokens = sum(lens) - len(lens) - sum(lens[row] - 1 for row in padding_rows(data))
        for name, value in (totals | {_TOKENS: tokens}).items():
            step[name] = step.get(name, 0.0) + value
        reported = {name: value for name, value in metrics.items() if name not in totals}
        if forward_only:
            self._log_prob_stock_rows += metrics["prefix/stock_rows"]
        elif not tu.get_non_tensor_data(data, "update_lr_scheduler", True):
            self._prompts.append(frozenset())
            return {name: [float(value)] for name, value in reported.items()}
        else:
            step["prefix/log_prob_stock_rows"] = self._log_prob_stock_rows
            num_torn = len(self._torn())
            step["prefix/split_groups"] = step.get("prefix/split_groups", 0.0) + num_torn
            self._log_prob_stock_rows = 0.0
            self._start_step()
        # Of all names, so that ranks never send different numbers of values.
        sums = self._reduce_sum([step.get(name, 0.0) for name in _SUMS])
        total = {name: value / self._sequence_ranks for name, value in zip(_SUMS, sums, strict=True)}
        *most, torn_anywhere = self._reduce_max([*(step.get(name, 0.0) for name in MOST), num_torn])
        self._see_torn_groups(total, int(torn_anywhere), forward_only)
        self._tell_trees(*(total[name] for name in TREE_TOKENS.values()))
        total |= zip(MOST, most, strict=True)
        reported |= {name: total[name] for name in (*COUNTS, *MOST) if name in step}
        reported["prefix/reuse_fraction"] = total["prefix/tokens_saved"] / max(total[_TOKENS], 1)
        return {name: [float(value)] for name, value in reported.items()}

    def _see_torn_groups(self, total: Mapping[str, float], num_torn: int, forward_only: bool) -> None:
        """Says once, after the first step that shares, that the trainer put rows of prompts into several mini-batches.
        Log-probs of the same rows saw these prompts whole, and tell what it costs; bypass mode has none."""
        if forward_only:
            self._log_prob_total = total
        if forward_only or not self._is_first_step or not total["prefix/groups"]:  # verl's path computes every row
            return
        whole, self._is_first_step = self._log_prob_total, False
        tokens, again, cost = whole.get(GROUP_TOKENS, 0.0), total[GROUP_TOKENS], ""
        if tokens and again and total[_TOKENS] == whole[_TOKENS]:
            more = again - tokens
            if more <= _TORN * tokens:
                return
            cost = f", {more:.0f} tokens more than {tokens:.0f} at this step (+{100 * more / tokens:.0f}%)"
        if num_torn and torch.distributed.get_rank() == 0:
            logger.warning(
                "prefix: prompts with rows in several mini-batches, each of which computes them: %d%s. Set trainer.v1."
                "trainer_mode=prefix_sync (or prefix_colocate_async, prefix_separate_async) and, where an agent loop "
                "returns a row per turn, also actor_rollout_ref.actor.prefix.mini_batches=prompts. Under trainer."
                "use_v1=false and verl.experimental leave actor_rollout_ref.actor.use_prefix_grouper and trainer."
                "balance_batch at their defaults, and make ppo_mini_batch_size a multiple of the ranks",
                num_torn, cost,
            )  # fmt: skip

    def _tell_trees(self, stock: float, off: float, uid: float, batch: float) -> None:
        """Says of the first batch what each value of prefix.trees computes, where rows are turns or prompts begin
        alike. Under `off` a session's rows are on several ranks, and would be on one under the others."""
        scattered = self._trees == "off" and torch.distributed.get_world_size() > self._sequence_ranks
        most = "at most " if scattered else ""
        if uid != off and torch.distributed.get_rank() == 0:
            logger.warning(
                "prefix: rows of turns: of %d tokens prefix.trees=off (whole prompts alone) computes %d, uid %s%d, "
                "batch %s%d; %s is on", stock, off, most, uid, most, batch, self._trees
            )  # fmt: skip
        elif self._trees != "batch" and 0 < batch < (1 - _TORN) * off and torch.distributed.get_rank() == 0:
            logger.warning(
                "prefix: prompts begin alike: of %d tokens %d are computed, and with prefix.trees=batch %d",
                stock, off, batch,
            )  # fmt: skip
