"""Metrics of a plan whose passes ran."""

from collections import Counter
from collections.abc import Sequence

from verl_prefix.core.group_parts import leave_out
from verl_prefix.core.groups import Group
from verl_prefix.core.plan import Plan
from verl_prefix.core.runner import PlanRunner
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.metrics.metric_table import GROUP_TOKENS
from verl_prefix.engine.rows import BatchRows

_SECONDS = {"wave": "phase_b"}  # of core's phases those whose seconds have another name in metrics


def plan_metrics(
    rows: BatchRows, groups: Sequence[Group], plan: Plan, runner: PlanRunner, loss: Loss
) -> dict[str, float]:
    """Returns this rank's metrics of one mini-batch, in which rows of padding share nothing.

    Args:
        groups: of all rows, dead ones among them: these count as saved tokens, and as rows of no pass.
    """
    groups = rows.without_padding(groups)
    computed = sum(
        planned.tokens_of(group) for planned in plan.all_passes for group in rows.without_padding(planned.groups)
    )
    num_logical = sum(group.num_logical_tokens for group in groups)
    in_passes, _ = leave_out(groups, rows.dead)
    phases = Counter(planned.phase for planned in plan.all_passes if planned.groups)  # dummies have none
    metrics: dict[str, float] = {
        "prefix/attention_kept": runner.forward.keep_attention,
        "prefix/groups": sum(group.is_shared for group in in_passes),
        "prefix/stock_rows": sum(len(group.rows) for group in in_passes if not group.is_shared),
        "prefix/tree_depth": max(
            (len([*group.strands_before(fork)]) for group in groups for fork in group.forks), default=0
        ),
        "prefix/tokens_saved": num_logical - computed,
        "prefix/pass_depth": plan.depth,
        "prefix/recomputed_tokens": plan.recomputed_tokens,
        "prefix/packed_passes": phases["packed"],
        "prefix/waves": phases["wave"],
        "prefix/offloaded_gib": runner.meter.transfers["host_bytes"] / 2**30,
    }
    for phase, seconds in runner.meter.seconds.items():
        metrics[f"timing_s/prefix_{_SECONDS.get(phase, phase)}"] = seconds
    if peak := runner.meter.phase_b_peak:
        metrics["prefix/phase_b_peak_gib"] = peak / 2**30
    if loss.is_known:
        # Under a custom loss rows stay on their ranks in updates, and travel for log-probs. Then the tokens of both are
        # not comparable.
        metrics[GROUP_TOKENS] = sum(group.num_physical_tokens for group in groups)
    return metrics
