"""Metrics of verl's losses, made the same on every rank: the same names, with equally many values each.

verl joins a metric of all ranks in `Metric.aggregate_dp` (verl/utils/metric/utils.py). It averages values by their
position, refuses different numbers of them, and divides a sum by the ranks that have it. On verl's own path all ranks
run equally many micro-batches, and each has a loss. On ours a rank may run dummy passes, or have no token that counts.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from verl.utils.metric import AggregationType, Metric


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
