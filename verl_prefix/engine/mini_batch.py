"""One mini-batch on its way through the schedule: rows in; verl's outputs, losses and metrics of every pass out."""

import logging
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric

from verl_prefix.core.errors import current_pass, listed
from verl_prefix.core.groups import Group
from verl_prefix.core.layout import Layout
from verl_prefix.core.schedule import Schedule
from verl_prefix.core.waves import Plan
from verl_prefix.engine.loss import Loss, LossFunction
from verl_prefix.engine.outputs import TokenOutputs
from verl_prefix.engine.protocol import Engine
from verl_prefix.engine.rows import padding_rows

logger = logging.getLogger(__name__)


class _Pass(NamedTuple):
    """A pass that is done: its output as verl wants it, whether all of it was finite ([] bool), where it ran, and
    whether any of its tokens counts."""

    rows: list[int]
    output: dict[str, Any]
    finite: torch.Tensor
    where: str
    counts: bool


class MiniBatch:
    """One mini-batch, whose passes the schedule hands to `step`.

    Attributes:
        token_outputs: what makes outputs of tokens, then of rows.
        num_not_finite: passes whose loss or outputs were not finite, once `outputs` was asked for.
    """

    def __init__(self, engine: Engine, data: TensorDict, loss_function: LossFunction | None, forward_only: bool):
        self._engine, self._data = engine, data
        self._loss = Loss(loss_function)
        self._keeps_model_output = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        reads_masked = self._keeps_model_output or self._loss.reads_masked(data)
        self.token_outputs = TokenOutputs(engine, data, reads_masked)
        # Rows that no loss is told of: means over rows are among its metrics (verl#7771).
        hides = not forward_only and engine.prefix_config.mini_batches == "prompts"
        self._padding = padding_rows(data) if hides else set[int]()
        self._passes: list[_Pass] = []
        self.num_not_finite = 0

    def step(self, groups: Sequence[Group], layout: Layout, outputs: torch.Tensor) -> torch.Tensor:
        """Does what FSDPEngineWithLMHead.forward_step does after the model; outputs [suffix tokens, k]."""
        rows = [row for group in groups for row in group.rows]
        micro_batch = self._loss.rows(self._data, rows)
        model_output = self.token_outputs.of_rows(groups, layout, outputs, micro_batch["input_ids"].offsets())
        read, told = model_output, [i for i, row in enumerate(rows) if row not in self._padding]
        if 0 < len(told) < len(rows):
            micro_batch = self._loss.rows(self._data, [rows[i] for i in told])
            unbound = {name: values.unbind() for name, values in model_output.items()}
            read = {name: tu.nested_tensor_from_tensor_list([x[i] for i in told]) for name, x in unbound.items()}
        loss, metrics, counts = self._loss(read, micro_batch, self._engine.get_data_parallel_group())
        # A NaN that the loss masks counts too: its gradient is NaN times zero.
        values = [loss.detach(), outputs, *self._loss.floats(micro_batch).values()]
        finite = torch.stack([torch.isfinite(x).all() for x in values]).all()
        model_output = {name: values.detach() for name, values in model_output.items()}
        output = {"loss": loss.detach(), "metrics": metrics, "model_output": model_output}
        self._passes.append(_Pass(rows, output, finite, where=current_pass(), counts=counts and bool(told)))
        return loss

    def outputs(self, plan: Plan) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """The passes' outputs and their rows; asked once. Rows with an empty response are in no pass. They get a step
        of their own where their outputs are wanted, or where a rank has no other row, since the metrics of all ranks
        need the same keys, and equally many values of each (`even_out`)."""
        if plan.idle_groups and (self._keeps_model_output or not self._passes):
            with torch.no_grad(), self._engine.autocast():
                nothing = Layout(torch.zeros(0, dtype=torch.int64), 0, ())
                self.step(plan.idle_groups, nothing, self.token_outputs.of_no_tokens())
            if len(self._passes) > 1:
                self._passes[-1].output["metrics"] = {}
        if any(one.counts for one in self._passes):
            for one in self._passes:
                one.output["metrics"] = one.output["metrics"] if one.counts else {}
        not_finite = [one for one in self._passes if not one.finite]
        self.num_not_finite = len(not_finite)
        if not_finite:
            self._tell(not_finite[0])
        for one in self._passes:
            one.output["loss"] = one.output["loss"].item()
            if not self._keeps_model_output:
                del one.output["model_output"]
        return [one.output for one in self._passes], [one.rows for one in self._passes]

    def _tell(self, one: _Pass) -> None:
        """Names the rows of a pass that was not finite; verl then skips the update, as it does for the stock actor."""
        uids = tu.get(self._data, "uid", [None] * len(self._data))
        read = tu.index_select_tensor_dict(self._data, one.rows)
        problems, fields = [], {name: read[name] for name in self._loss.floats(read)}
        for name, values in (one.output["model_output"] | fields).items():
            pairs = zip(one.rows, values.unbind(), strict=True)
            if bad := [f"{row} (uid {uids[row]})" for row, x in pairs if not torch.isfinite(x).all()]:
                problems.append(f"{name} of rows {listed(bad)}")
        logger.error(
            "not finite in %s: loss %s; %s. verl skips an update whose gradient norm is not finite; later passes "
            "of this mini-batch are counted in prefix/nonfinite_passes and not logged",
            one.where,
            one.output["loss"].item(),
            "; ".join(problems) or "all that it was made of is finite",
        )


def even_out(metrics: dict[str, object], num_passes: int) -> None:
    """Gives every `Metric` one value per pass: verl averages them over ranks by position (Metric.aggregate_dp), and a
    rank's dummy passes have none. A dummy adds 0 to a sum and the rank's own mean to anything else."""
    for metric in metrics.values():
        if isinstance(metric, Metric) and metric.values:
            filler = 0.0 if metric.aggregation == AggregationType.SUM else sum(metric.values) / len(metric.values)
            metric.extend([filler] * (num_passes - len(metric.values)))


def plan_metrics(groups: Sequence[Group], plan: Plan, schedule: Schedule, padding: Set[int]) -> dict[str, float]:
    """This rank's prefix/* metrics of one mini-batch, in which `padding` rows share nothing."""
    groups = [group for group in groups if padding.isdisjoint(group.rows)]
    passes = [group for one in plan.passes for group in one.groups if padding.isdisjoint(group.rows)]
    num_logical = sum(group.num_logical_tokens for group in groups)
    shared = [group for group in groups if group.is_shared]
    peak = schedule.meter.phase_b_peak
    return {
        **({"prefix/phase_b_peak_gib": peak / 2**30} if peak else {}),
        "prefix/attention_kept": schedule.keep_attention,
        "prefix/groups": len(shared),
        "prefix/stock_rows": sum(len(group.rows) for group in groups if not group.is_shared),
        "prefix/tree_depth": max((len([*group.path(fork)]) for group in groups for fork in group.forks), default=0),
        "prefix/tokens_saved": num_logical - sum(group.num_physical_tokens for group in passes),
        "prefix/recomputed_groups": plan.split_groups,
        "prefix/packed_passes": len(plan.packed),
        "prefix/waves": len(plan.waves),
        "prefix/offloaded_gib": schedule.meter.transfers["host_bytes"] / 2**30,
        **{f"timing_s/prefix_{phase}": seconds for phase, seconds in schedule.meter.seconds.items()},
    }
