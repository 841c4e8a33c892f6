"""Every metric that an engine makes, and how its values become the one that a step reports.

verl averages what an engine reports over ranks and mini-batches. But it takes the maximum of names with "max"
(prefix/moe/max_vio/*, prefix/moe/avg_vio/max), and the minimum of timing_s/*, since it finds "min" in "timing"
(reduce_metrics, verl/utils/metric/utils.py). So counts and seconds are reduced here, and reported once, with the step's
last mini-batch. `EACH` leaves a metric to verl: it is reported with each mini-batch, as this rank has it.
"""

from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple


class Over(Enum):
    """How several values become one."""

    SUM = "sum"
    MAX = "maximum"
    NONE = "each is reported"


class Reduction(NamedTuple):
    """How the values of one metric become one.

    Attributes:
        batches: over the mini-batches of a step.
        ranks: over the ranks.
        is_reported: False: the log or another metric is made of it.
        by_last_stage: the last stage of a pipeline alone counts it. Anything else is counted on every stage.
    """

    batches: Over
    ranks: Over
    is_reported: bool = True
    by_last_stage: bool = False


COUNT, EACH = Reduction(Over.SUM, Over.SUM), Reduction(Over.NONE, Over.NONE)
_LARGEST, _UNREPORTED = Reduction(Over.SUM, Over.MAX), Reduction(Over.SUM, Over.SUM, is_reported=False)

# Tokens that verl's path computes, without padding; tokens that ours would compute if every group were one pass.
ROW_TOKENS, GROUP_TOKENS = "tokens of rows", "tokens of groups"
# Prompts with rows in several mini-batches.
SPLIT_PROMPTS = "split prompts"
# Of the first batch, what each value of prefix.trees computes: see `grouping.tokens_by_trees`.
TREE_TOKENS = {name: f"tokens of trees: {name}" for name in ("stock", "off", "uid", "batch")}


def _all(prefix: str, names: str, reduction: Reduction) -> dict[str, Reduction]:
    return {prefix + name: reduction for name in names.split()}


METRICS = {
    # Every rank counts what is its own.
    **_all("prefix/", "groups stock_rows log_prob_stock_rows split_uids zero_advantage_rows tokens_saved", COUNT),
    **_all("prefix/", "exchanged_rows exchanged_mib packed_passes waves recomputed_tokens", COUNT),
    "prefix/nonfinite_passes": COUNT._replace(by_last_stage=True),
    # Every rank knows the count of all ranks.
    **_all("prefix/", "split_groups cost_split_groups", _LARGEST),
    # Ranks wait for the slowest, as in verl's own seconds.
    **_all("timing_s/prefix_", "exchange packed phase_a phase_b phase_c verify", _LARGEST),
    "prefix/phase_b_peak_gib": Reduction(Over.MAX, Over.MAX),
    **_all("prefix/", "tree_depth pass_depth placement_imbalance predicted_speedup predicted_bubble", EACH),
    **_all("prefix/", "attention_kept offloaded_gib moe/max_vio/* moe/avg_vio/*", EACH),
    **_all("prefix/verify_", "log_probs values attention recurrence gradients", EACH),
    **dict.fromkeys((ROW_TOKENS, GROUP_TOKENS, *TREE_TOKENS.values()), _UNREPORTED),
    SPLIT_PROMPTS: _LARGEST._replace(is_reported=False),
}
# And, of the step's sums: tokens_saved / ROW_TOKENS.
REUSE = "prefix/reuse_fraction"


def reduction_of(name: str) -> Reduction:
    """Returns the reduction of a metric.

    Raises:
        ValueError: `METRICS` has no such name.
    """
    for pattern, reduction in METRICS.items():
        if fnmatchcase(name, pattern):
            return reduction
    raise ValueError(f"{name} is no metric of engine.metric_table.METRICS")
