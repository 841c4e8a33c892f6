"""Metrics of verl's losses, made the same on every rank: the same names, with equally many values each.

verl joins a metric of all ranks in `Metric.aggregate_dp` (verl/utils/metric/utils.py). It averages values by their
position, refuses different numbers of them, and divides a sum by the ranks that have it. On verl's own path all ranks
run equally many micro-batches, and each has a loss. On the shared path a rank may run dummy passes, or have no token
that counts.

    pass                                       its metrics
    with rows that the loss gets               those of the loss
    with hidden padding alone                  those of the loss, if this rank has no others (`reported_metrics`)
    without a token that counts, where         none: the loss is not called, and is 0 (`Loss.__call__`)
    verl's loss would raise
    with none of these, as a dummy             filled in from the rank's other passes (`even_out`)
    of a rank that has no metrics at all       0 for the sums that other ranks have (`add_missing_sums`)

On the stock path verl's loss would also raise for a micro-batch without a token that counts. Its metrics are `neutral`
there (`Loss.for_stock`).
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from verl.utils.metric import AggregationType, Metric


def reported_metrics(metrics_of_passes: Sequence[dict[str, Any] | None], is_hidden: Sequence[bool]) -> list[dict]:
    """Returns what each pass reports: nothing of hidden padding, unless this rank has no other metrics. verl needs some
    of every rank.

    Args:
        metrics_of_passes: of the loss of each pass; None: the loss was not called.
        is_hidden: whether all rows of the pass are hidden padding.
    """
    passes = list(zip(metrics_of_passes, is_hidden, strict=True))
    has_others = any(metrics is not None and not hidden for metrics, hidden in passes)
    return [{} if hidden and has_others else metrics or {} for metrics, hidden in passes]


def even_out(metrics: dict[str, object], outputs: Sequence[dict[str, Any]], num_passes: int) -> None:
    """Extends every `Metric` to the values of `num_passes` passes, as if dummies had values. A dummy adds 0 to a sum,
    and the rank's own mean to anything else.

    Args:
        metrics: of the rank, changed in place.
        outputs: of its passes with rows.
        num_passes: how many passes every rank runs, with dummies.
    """
    for name, metric in metrics.items():
        if not isinstance(metric, Metric) or not metric.values:
            continue
        num_values = len(metric.values)
        num_with_values = sum(name in output["metrics"] for output in outputs)
        filler = 0.0 if metric.aggregation == AggregationType.SUM else sum(metric.values) / num_values
        values_of_pass = num_values // num_with_values  # a loss may add several values of a name
        metric.extend([filler] * (values_of_pass * (num_passes - num_with_values)))


def add_missing_sums(metrics: dict[str, object], process_group: Any) -> None:
    """Gives a rank zeros for the sums that other ranks have and it has not, since no token of its rows counts. Every
    rank calls it, after `even_out`.

    Args:
        metrics: of the rank, changed in place.
        process_group: the ranks that compute data in parallel.
    """
    sums = {name: x for name, x in metrics.items() if isinstance(x, Metric) and x.aggregation == AggregationType.SUM}
    sums_by_rank: list[dict[str, Metric]] = [{}] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(sums_by_rank, sums, process_group)
    for sums_of_rank in sums_by_rank:
        for name, metric in sums_of_rank.items():
            if name not in metrics:
                metrics[name] = neutral(metric)


def neutral(metric: Metric) -> Metric:
    """Returns a metric that is aggregated like this one, has as many values, and changes no extreme: infinite where the
    minimum or maximum counts, and 0 in sums and means."""
    value = {AggregationType.MIN: inf, AggregationType.MAX: -inf}.get(metric.aggregation, 0.0)
    same_kind = metric.init_list()
    same_kind.extend([value] * len(metric.values))
    return same_kind
