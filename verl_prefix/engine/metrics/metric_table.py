"""Every metric that an engine makes, and how its values become the one that a step reports.

verl averages what an engine reports over ranks and mini-batches. But it takes the maximum of names with "max"
(prefix/moe/max_vio/*, prefix/moe/avg_vio/max), and the minimum of timing_s/*, since it finds "min" in "timing"
(reduce_metrics, verl/utils/metric/utils.py). So counts and seconds are reduced here, and reported once, with the step's
last mini-batch. `EACH` leaves a metric to verl: it is reported with each mini-batch, as this rank has it.
"""

from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple


class Reduce(Enum):
    """How several values become one."""

    SUM = "sum"
    MAX = "maximum"
    NONE = "each is reported"


class Reduction(NamedTuple):
    """How the values of one metric become one.

    Attributes:
        batches: over the mini-batches of a step.
        ranks: over the ranks.
        by_last_stage: the last stage of a pipeline alone counts it. Anything else is counted on every stage.
    """

    batches: Reduce
    ranks: Reduce
    by_last_stage: bool = False


COUNT = Reduction(Reduce.SUM, Reduce.SUM)
EACH = Reduction(Reduce.NONE, Reduce.NONE)
_LARGEST_RANK = Reduction(Reduce.SUM, Reduce.MAX)

METRICS = {
    # Every rank counts what is its own.
    "prefix/tokens_saved": COUNT,  # tokens of rows that no pass computed
    "prefix/groups": COUNT,  # groups that shared, of passes
    "prefix/stock_rows": COUNT,  # rows that shared nothing, of passes or on the stock path
    "prefix/log_prob_stock_rows": COUNT,  # the same of log-probs since the last update
    "prefix/exchanged_rows": COUNT,  # rows that travelled to another rank
    "prefix/exchanged_mib": COUNT,  # and their MiB
    "prefix/split_uids": COUNT,  # uids whose rows have several prompts on this rank
    "prefix/zero_advantage_rows": COUNT,  # dead rows that no pass computed
    "prefix/packed_passes": COUNT,  # without dummies
    "prefix/waves": COUNT,  # without dummies
    "prefix/recomputed_tokens": COUNT,  # of groups that the budget cut
    "prefix/nonfinite_passes": COUNT._replace(by_last_stage=True),
    # Every rank knows the groups of all ranks if rows may travel. Else it knows the prompts of its own rows, and the
    # most that any rank counts is reported.
    "prefix/cost_split_groups": _LARGEST_RANK,  # on several ranks, for balance
    "prefix/split_groups": _LARGEST_RANK,  # on several ranks since rows do not travel, or in several mini-batches
    # Ranks wait for the slowest, as in verl's own seconds.
    "timing_s/prefix_exchange": _LARGEST_RANK,
    "timing_s/prefix_packed": _LARGEST_RANK,
    "timing_s/prefix_phase_a": _LARGEST_RANK,
    "timing_s/prefix_phase_b": _LARGEST_RANK,  # of waves; on a pipeline also of packed passes, which run among them
    "timing_s/prefix_phase_c": _LARGEST_RANK,
    "timing_s/prefix_verify": _LARGEST_RANK,
    "prefix/phase_b_peak_gib": Reduction(Reduce.MAX, Reduce.MAX),  # of the first update with waves
    # verl takes the mean, or the maximum.
    "prefix/placement_imbalance": EACH,  # predicted time of the slowest rank / of the mean one
    "prefix/tree_depth": EACH,  # most strands that a row goes through
    "prefix/pass_depth": EACH,  # passes inside of one another
    "prefix/predicted_speedup": EACH,  # by `auto`
    "prefix/predicted_bubble": EACH,  # the share of a batch that pipeline stages wait
    "prefix/verify_log_probs": EACH,  # figures of the self-check, see `self_check`
    "prefix/verify_values": EACH,
    "prefix/verify_attention": EACH,
    "prefix/verify_gradients": EACH,
    "prefix/verify_recurrence": EACH,
    "prefix/moe/max_vio/*": EACH,  # the excess of the fullest expert over an even load
    "prefix/moe/avg_vio/*": EACH,  # the mean deviation from an even load
    "prefix/attention_kept": EACH,  # 1 if attention's outputs are kept for backward
    "prefix/offloaded_gib": EACH,  # GiB that waited on the host
}
# And, of the step's sums: tokens_saved / ROW_TOKENS.
REUSE = "prefix/reuse_fraction"

# Counts that are reduced like metrics, and not reported: the log and `REUSE` are made of them.
ROW_TOKENS = "tokens of rows"  # without padding, and without each row's last token, which has no output
GROUP_TOKENS = "tokens of groups"  # that the shared path would compute if every group were one pass
SPLIT_PROMPTS = "split prompts"  # with rows in several mini-batches of an epoch
# Of the first batch: what each value of prefix.trees computes, see `sharing_advice`.
TREE_TOKENS = {name: f"tokens of trees: {name}" for name in ("stock", "off", "uid", "batch")}

REDUCTIONS = METRICS | {
    **dict.fromkeys((ROW_TOKENS, GROUP_TOKENS, *TREE_TOKENS.values()), COUNT),
    SPLIT_PROMPTS: _LARGEST_RANK,
}


def reduction_of(name: str) -> Reduction:
    """Returns the reduction of a metric.

    Raises:
        ValueError: `REDUCTIONS` has no such name.
    """
    for pattern, reduction in REDUCTIONS.items():
        if fnmatchcase(name, pattern):
            return reduction
    raise ValueError(f"{name} is no metric of engine.metrics.metric_table")
