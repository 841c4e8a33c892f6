"""Metrics of a training step: counts and seconds are the step's, of all its ranks and mini-batches.

verl averages what an engine reports over ranks and mini-batches. But it takes the maximum of names with "max"
(prefix/moe/max_vio/*, prefix/moe/avg_vio/max), and the minimum of timing_s/*, since it finds "min" in "timing"
(reduce_metrics, verl/utils/metric/utils.py). So counts and seconds are summed here and reported once, with the step's
last mini-batch. Every other metric is reported with each mini-batch.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set

import torch

from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.groups import Group
from verl_prefix.core.plan import Plan
from verl_prefix.core.runner import PlanRunner
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.exchange import Exchange
from verl_prefix.engine.grouping import tokens_by_trees
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.together import together

logger = logging.getLogger(__name__)

# The sum over ranks is reported, since each rank counts its own.
COUNTS = [
    f"prefix/{name}"
    for name in (
        "groups", "stock_rows", "log_prob_stock_rows", "tokens_saved", "recomputed_tokens", "packed_passes", "waves",
        "split_uids", "exchanged_rows", "exchanged_mib", "nonfinite_passes", "zero_advantage_rows",
    )
]  # fmt: skip
# Of mini-batches the largest is reported; the others of a step add up.
_PEAK = "prefix/phase_b_peak_gib"
# The maximum over ranks is reported: of seconds, since ranks wait for the slowest (as verl's own seconds do), of peaks,
# and of what every rank knows of all.
MOST = [
    *(f"timing_s/prefix_{name}" for name in ("exchange", "packed", "phase_a", "phase_b", "phase_c", "verify")),
    *(f"prefix/{name}" for name in ("split_groups", "cost_split_groups")), _PEAK,
]  # fmt: skip
_SECONDS = {"wave": "phase_b"}  # of core's phases those whose seconds have another name in metrics
# Counted, but not reported: tokens that stock computes, and that ours would compute if every group were one pass.
_TOKENS, GROUP_TOKENS = "tokens of rows", "tokens of groups"
# And of the first batch what `grouping.tokens_by_trees` counts.
TREE_TOKENS = {name: f"tokens of trees: {name}" for name in ("stock", "off", "uid", "batch")}
_SUMS = (*COUNTS, _TOKENS, GROUP_TOKENS, *TREE_TOKENS.values())
# The share of a step's tokens from which the log says what split prompts cost, or other trees would save.
_WORTH_TELLING = 0.02


class StepMetrics:
    """Adds up an engine's metrics until a step is over.

    Args:
        epochs: how often a step goes through its rows, in equally many mini-batches, by the config; a trainer that
            sends another number is miscounted.
    """

    def __init__(self, backend: Backend, options: PrefixConfig, epochs: int) -> None:
        self._ranks, self._options, self._epochs = backend.ranks, options, epochs
        self._is_first_batch = not backend.has_no_updates  # True until the first batch was counted
        self._log_prob_stock_rows = 0.0
        self._log_prob_total: Mapping[str, float] = {}  # of the last log-probs
        self._is_first_step = True
        self._start_step()

    def _start_step(self) -> None:
        self._step: dict[str, float] = {}
        self._uids: list[Set[Hashable]] = [frozenset()]  # of its mini-batches, the last of which is under way

    def count_rows(self, exchange: Exchange, forward_only: bool) -> dict[str, float]:
        """Counts a mini-batch's rows, before it is known whether they share. Returns metrics of them.

        Prompts of an update are kept, to count those whose rows lie in several mini-batches of an epoch. For the first
        batch all ranks count the tokens that each value of `prefix.trees` would compute.
        """
        rows, metrics = exchange.computed, dict[str, float]()
        if not forward_only and self._options.mini_batches == "rows":  # "prompts" splits them on purpose
            self._uids[-1] = exchange.uids
        keys_of_uid = Counter(uid for uid, _ in {*zip(rows.uids, rows.keys, strict=True)})
        metrics["prefix/split_uids"] = sum(n > 1 for n in keys_of_uid.values()) if "uid" in rows.data.keys() else 0
        if self._is_first_batch:
            self._is_first_batch = False
            with together("counting tokens"):
                tokens = tokens_by_trees(rows, exchange.tree_rule, exchange.groups)
            metrics |= {TREE_TOKENS[name]: number for name, number in tokens.items()}
        return metrics

    def _split_prompts(self) -> Set[Hashable]:
        """Finds prompts with rows in several mini-batches of an epoch of the step, which is over."""
        num = -(-len(self._uids) // self._epochs)
        epochs = (self._uids[start : start + num] for start in range(0, len(self._uids), num))
        counts = (Counter(itertools.chain(*epoch)) for epoch in epochs)
        return {prompt for count in counts for prompt, times in count.items() if times > 1}

    def report(self, metrics: Mapping[str, float], batch: BatchRows, forward_only: bool) -> dict[str, list[float]]:
        """Returns what a rank reports after a batch whose own metrics are `metrics`.

        Log-probs are a step of their own, whose metrics verl's v1 trainer drops. So the next update says how many of
        their rows did not share.

        Args:
            batch: as verl handed it over. Its flag `update_lr_scheduler` (TrainingWorker.train_mini_batch) says whether
                a step ends. Without the flag every batch ends one.
        """
        counted = {name: float(value) for name, value in metrics.items() if name in _SUMS or name in MOST}
        reported = {name: value for name, value in metrics.items() if name not in counted}
        lens = [end - start for start, end in itertools.pairwise(batch.offsets)]
        counted[_TOKENS] = sum(n - 1 for row, n in enumerate(lens) if row not in batch.padding)
        if forward_only:
            self._log_prob_stock_rows += metrics["prefix/stock_rows"]
            reported |= self._over_ranks(counted, 0, forward_only)
        else:
            for name, value in counted.items():
                before = self._step.get(name, 0.0)
                self._step[name] = max(before, value) if name == _PEAK else before + value
            if batch.flag("update_lr_scheduler", True):
                reported |= self._over_ranks(*self._close_step(), forward_only)
            else:
                self._uids.append(frozenset())
        return {name: [float(value)] for name, value in reported.items()}

    def _close_step(self) -> tuple[dict[str, float], int]:
        """Ends a step: returns what this rank counted in it, and how many prompts were split in it."""
        step, num_split = self._step, len(self._split_prompts())
        step["prefix/log_prob_stock_rows"] = self._log_prob_stock_rows
        step["prefix/split_groups"] = step.get("prefix/split_groups", 0.0) + num_split
        self._log_prob_stock_rows = 0.0
        self._start_step()
        return step, num_split

    def _over_ranks(self, step: Mapping[str, float], num_split: int, forward_only: bool) -> dict[str, float]:
        """Returns a step's counts of all ranks, as metrics. Also says what split prompts cost, and what other trees
        would save."""
        # Of all names, so that ranks never send different numbers of values.
        sums = self._ranks.sum_over_ranks([step.get(name, 0.0) for name in _SUMS])
        total = {name: value / self._ranks.copies for name, value in zip(_SUMS, sums, strict=True)}
        *most, split_anywhere = self._ranks.max_over_ranks([*(step.get(name, 0.0) for name in MOST), num_split])
        self._warn_of_split_prompts(total, int(split_anywhere), forward_only)
        self._warn_of_trees(**{name: total[metric] for name, metric in TREE_TOKENS.items()})
        total |= zip(MOST, most, strict=True)
        reported = {name: total[name] for name in (*COUNTS, *MOST) if name in step}
        return reported | {"prefix/reuse_fraction": total["prefix/tokens_saved"] / max(total[_TOKENS], 1)}

    def _warn_of_split_prompts(self, total: Mapping[str, float], num_split: int, forward_only: bool) -> None:
        """Says once, after the first step that shares, which prompts the trainer put into several mini-batches.

        What that costs follows from the last log-probs of the same rows, which saw their prompts whole. Without any, as
        in bypass mode without ref, the cost is not said.
        """
        if forward_only:
            self._log_prob_total = total
        if forward_only or not self._is_first_step or not total["prefix/groups"]:  # verl's path computes every row
            return
        log_probs, self._is_first_step = self._log_prob_total, False
        tokens, again, cost = log_probs.get(GROUP_TOKENS, 0.0), total[GROUP_TOKENS], ""
        if tokens and again and total[_TOKENS] == log_probs[_TOKENS]:
            more = again - tokens
            if more <= _WORTH_TELLING * tokens:
                return
            cost = f", {more:.0f} tokens more than {tokens:.0f} at this step (+{100 * more / tokens:.0f}%)"
        if num_split and torch.distributed.get_rank() == 0:
            logger.warning(
                "prefix: prompts with rows in several mini-batches, each of which computes them: %d%s. Set trainer.v1."
                "trainer_mode=prefix_sync (or prefix_colocate_async, prefix_separate_async) and, where an agent loop "
                "returns a row per turn, also actor_rollout_ref.actor.prefix.mini_batches=prompts. Under trainer."
                "use_v1=false and verl.experimental leave actor_rollout_ref.actor.use_prefix_grouper and trainer."
                "balance_batch at their defaults, and make ppo_mini_batch_size a multiple of the ranks",
                num_split, cost,
            )  # fmt: skip

    def _warn_of_trees(self, stock: float, off: float, uid: float, batch: float) -> None:
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


def plan_metrics(
    rows: BatchRows, groups: Sequence[Group], plan: Plan, runner: PlanRunner, loss: Loss
) -> dict[str, float]:
    """Returns this rank's prefix/* metrics of one mini-batch, in which rows of padding share nothing."""
    groups = rows.without_padding(groups)
    computed = sum(one.tokens_of(group) for one in plan.all_passes for group in rows.without_padding(one.groups))
    num_logical = sum(group.num_logical_tokens for group in groups)
    shared = [group for group in groups if group.is_shared]
    peak = runner.meter.phase_b_peak
    # Under a custom loss rows stay on their ranks in updates, and travel for log-probs. Then the tokens of both are not
    # comparable.
    group_tokens = {} if loss.is_unknown else {GROUP_TOKENS: sum(group.num_physical_tokens for group in groups)}
    return {
        **group_tokens,
        **({_PEAK: peak / 2**30} if peak else {}),
        "prefix/attention_kept": runner.forward.keep_attention,
        "prefix/groups": len(shared),
        "prefix/stock_rows": sum(len(group.rows) for group in groups if not group.is_shared),
        "prefix/tree_depth": max(
            (len([*group.strands_before(fork)]) for group in groups for fork in group.forks), default=0
        ),
        "prefix/tokens_saved": num_logical - computed,
        "prefix/pass_depth": plan.depth,
        "prefix/recomputed_tokens": plan.recomputed_tokens,
        "prefix/packed_passes": plan.num_losses - len(plan.waves),
        "prefix/waves": len(plan.waves),
        "prefix/offloaded_gib": runner.meter.transfers["host_bytes"] / 2**30,
        **{f"timing_s/prefix_{_SECONDS.get(phase, phase)}": taken for phase, taken in runner.meter.seconds.items()},
    }


def num_dead(rows: BatchRows, plan: Plan) -> int:
    """Counts the dead rows in idle groups, but for padding and for rows with empty responses."""
    idle = (row for group in plan.idle_groups for row in group.rows)
    dead = rows.dead - rows.padding
    return sum(row in dead and rows.response_lens[row] > 0 for row in idle)
