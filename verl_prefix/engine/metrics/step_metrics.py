"""Metrics of a training step: what its ranks and mini-batches count becomes one number of each name."""

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Set

from verl_prefix.config.options import PrefixConfig
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.grouping import TreeRule
from verl_prefix.engine.metrics.metric_table import (
    METRICS,
    REDUCTIONS,
    REUSE,
    ROW_TOKENS,
    SPLIT_PROMPTS,
    Reduce,
    reduction_of,
)
from verl_prefix.engine.metrics.sharing_advice import SharingAdvice
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.travel.exchange import Exchange


class StepMetrics:
    """Reduces an engine's metrics until a step is over, by `REDUCTIONS`.

    Args:
        epochs: how often a step goes through its rows, in equally many mini-batches, by the config; a trainer that
            sends another number is miscounted.
    """

    def __init__(self, backend: Backend, options: PrefixConfig, epochs: int) -> None:
        self._ranks, self._epochs = backend.ranks, epochs
        self._keeps_uids = options.mini_batches == "rows"  # "prompts" splits prompts on purpose
        self._advice = SharingAdvice(backend, options, epochs)
        self._log_prob_stock_rows = 0.0
        self._start_step()

    def _start_step(self) -> None:
        self._step: dict[str, float] = {}
        self._uids: list[Set[Hashable]] = [frozenset()]  # of its mini-batches, the last of which is under way

    def count_rows(self, exchange: Exchange, tree_rule: TreeRule, forward_only: bool) -> dict[str, float]:
        """Counts a mini-batch's rows, before it is known whether they share. Returns metrics of them.

        Prompts of an update are kept, to count those whose rows lie in several mini-batches of an epoch. For the first
        batch all ranks count the tokens that each value of `prefix.trees` would compute.
        """
        rows = exchange.computed
        if not forward_only and self._keeps_uids:
            self._uids[-1] = exchange.uids
        keys_of_uid = Counter(uid for uid, _ in {*zip(rows.uids, rows.keys, strict=True)})
        split_uids = sum(n > 1 for n in keys_of_uid.values()) if "uid" in rows.data.keys() else 0
        return {"prefix/split_uids": split_uids, **self._advice.tree_tokens(exchange, tree_rule)}

    def _split_prompts(self) -> Set[Hashable]:
        """Finds prompts with rows in several mini-batches of an epoch of the step, which is over."""
        split: set[Hashable] = set()
        per_epoch = -(-len(self._uids) // self._epochs)
        for start in range(0, len(self._uids), per_epoch):
            num_mini_batches = Counter(itertools.chain(*self._uids[start : start + per_epoch]))
            split |= {uid for uid, num in num_mini_batches.items() if num > 1}
        return split

    def report(self, metrics: Mapping[str, float], given: BatchRows, forward_only: bool) -> dict[str, list[float]]:
        """Returns what a rank reports after a batch whose own metrics are `metrics`.

        Log-probs are a step of their own, whose metrics verl's v1 trainer drops. So the next update says how many of
        their rows did not share.

        Args:
            given: the rows that verl handed over on this rank. Their flag `update_lr_scheduler`
                (TrainingWorker.train_mini_batch) says whether a step ends. Without the flag every batch ends one.

        Raises:
            ValueError: `REDUCTIONS` has no such name.
        """
        reported = {name: value for name, value in metrics.items() if reduction_of(name).ranks is Reduce.NONE}
        counted = {name: float(value) for name, value in metrics.items() if name not in reported}
        lens = [end - start for start, end in itertools.pairwise(given.offsets)]
        counted[ROW_TOKENS] = sum(n - 1 for row, n in enumerate(lens) if row not in given.padding)
        if forward_only:
            self._log_prob_stock_rows += metrics["prefix/stock_rows"]
            reported |= self._over_ranks(counted, forward_only)
        else:
            for name, value in counted.items():
                before = self._step.get(name, 0.0)
                self._step[name] = max(before, value) if REDUCTIONS[name].batches is Reduce.MAX else before + value
            if given.flag("update_lr_scheduler", True):
                reported |= self._over_ranks(self._close_step(), forward_only)
            else:
                self._uids.append(frozenset())
        return {name: [float(value)] for name, value in reported.items()}

    def _close_step(self) -> dict[str, float]:
        """Ends a step: returns what this rank counted in it."""
        step = self._step
        step[SPLIT_PROMPTS] = len(self._split_prompts())
        step["prefix/split_groups"] = step.get("prefix/split_groups", 0.0) + step[SPLIT_PROMPTS]
        step["prefix/log_prob_stock_rows"] = self._log_prob_stock_rows
        self._log_prob_stock_rows = 0.0
        self._start_step()
        return step

    def _over_ranks(self, step: Mapping[str, float], forward_only: bool) -> dict[str, float]:
        """Returns a step's counts of all ranks, as metrics, and lets `SharingAdvice` see them."""
        # Of all names, so that ranks never send different numbers of values.
        summed = [name for name, reduction in REDUCTIONS.items() if reduction.ranks is Reduce.SUM]
        largest = [name for name, reduction in REDUCTIONS.items() if reduction.ranks is Reduce.MAX]
        sums = self._ranks.sum_over_ranks([step.get(name, 0.0) for name in summed])
        maxima = self._ranks.max_over_ranks([step.get(name, 0.0) for name in largest])
        totals = dict(zip(largest, maxima, strict=True))
        for name, value in zip(summed, sums, strict=True):  # each rank of a model-parallel set counted the same
            num_counts = self._ranks.model_size // (self._ranks.pipeline_size if REDUCTIONS[name].by_last_stage else 1)
            totals[name] = value / num_counts
        self._advice.tell(totals, forward_only)
        reported = {name: totals[name] for name in step if name in METRICS}
        return reported | {REUSE: totals["prefix/tokens_saved"] / max(totals[ROW_TOKENS], 1)}
