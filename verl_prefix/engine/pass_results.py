"""Results of a mini-batch's passes: verl's outputs, losses and metrics, joined as verl joins its micro-batches'."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.utils import postprocess_batch_func

from verl_prefix.core.errors import listed
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.pass_notes import current_pass
from verl_prefix.core.plan import Plan
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.fields import ROUTES, TEACHER
from verl_prefix.engine.loss import Loss, PassLoss
from verl_prefix.engine.metrics.even_metrics import add_missing_sums, even_out, reported_metrics
from verl_prefix.engine.outputs import TokenOutputs
from verl_prefix.engine.row_outputs import RowOutputs
from verl_prefix.engine.rows import BatchRows, select_rows

logger = logging.getLogger(__name__)


class _PassRows(NamedTuple):
    """The rows of a pass, and their outputs.

    Attributes:
        numbers: of the rows, in the mini-batch.
        model_output: their outputs, jagged [rows, tokens] by name.
        for_loss: those of the rows that the loss gets, on the device.
        output_for_loss: the outputs of these.
    """

    numbers: list[int]
    model_output: dict[str, torch.Tensor]
    for_loss: TensorDict
    output_for_loss: dict[str, torch.Tensor]


class _Result(NamedTuple):
    """What is kept of a pass.

    Attributes:
        numbers: of its rows.
        loss: detached, [].
        metrics: `PassLoss.metrics`.
        is_hidden: whether all its rows are hidden padding.
        outputs: of the rows, jagged [rows, tokens] by name; None: they are not wanted back.
        finite: whether the loss, the outputs, and all that the loss read are finite, [] bool.
        bad_rows: by name of an output, which rows have one that is not finite, [rows] bool.
        where: the pass, for the log.
    """

    numbers: list[int]
    loss: torch.Tensor
    metrics: dict[str, Any] | None
    is_hidden: bool
    outputs: dict[str, torch.Tensor] | None
    finite: torch.Tensor
    bad_rows: dict[str, torch.Tensor]
    where: str


def micro_batch_of(loss: Loss, data: TensorDict, numbers: Sequence[int]) -> TensorDict:
    """Takes the rows of one pass to the device. verl's own loss reads some tensors row by row, for their lengths alone
    (no_padding_2_padding). These stay on the host, or the device would be idle for some 0.1 ms a row."""
    on_host = select_rows(data, numbers)
    micro_batch = on_host.to(get_device_id())
    if loss.is_verls:
        micro_batch.clear_device_()
        for name in {"prompts", "responses", "attention_mask"} & set(micro_batch.keys()):
            micro_batch[name] = on_host[name]
    return micro_batch


class PassResults:
    """Results of a mini-batch's passes, which the runner hands to `step`. Every rank reports the same metrics of the
    loss (`even_metrics`).

    Args:
        rows: the mini-batch's, on this rank.
        hides_padding: rows of padding are hidden from the loss, whose metrics are means over rows (verl#7771).
        last_tokens: see `TokenOutputs`.

    Attributes:
        token_outputs: what makes outputs of tokens.
    """

    def __init__(
        self,
        backend: Backend,
        rows: BatchRows,
        loss: Loss,
        forward_only: bool,
        *,
        hides_padding: bool,
        last_tokens: bool,
    ) -> None:
        # The loss of top-k distillation reads what `token_outputs` made of the teacher's rows, and not these.
        is_topk = loss.is_verls and rows.flag("distillation_use_topk")
        self._data = rows.data.exclude(ROUTES, *(TEACHER if is_topk else ()))
        tu.assign_non_tensor(self._data, use_dynamic_bsz=True)  # else verl joins outputs in the order of passes
        self._backend, self._loss = backend, loss
        self._forward_only = forward_only
        self._returns_outputs = forward_only or rows.flag("return_model_output")  # on every rank or on none
        needs_masked_outputs = self._returns_outputs or loss.needs_masked_outputs(rows.data)
        self.token_outputs = TokenOutputs(
            backend, rows, needs_masked_outputs=needs_masked_outputs, last_tokens=last_tokens, processor=loss.function
        )
        self._row_outputs = RowOutputs(rows, self.token_outputs)
        self._hidden = rows.padding if hides_padding else set[int]()  # numbers of rows that the loss does not get
        self._results: list[_Result] = []

    def step(self, packed_row: PackedRow, outputs: torch.Tensor) -> torch.Tensor:
        """Does what verl's forward_step does after the model: returns the loss of a pass, and keeps its results.

        Args:
            outputs: [outputs that are read, k].
        """
        rows = self._rows_of(packed_row, outputs)
        pass_loss = self._loss(rows.output_for_loss, rows.for_loss, self._backend.ranks.data_group)
        # A NaN that the loss masks counts too: its gradient is NaN times zero.
        values = [pass_loss.loss.detach(), outputs, *self._loss.floats(rows.for_loss).values()]
        finite = torch.stack([torch.isfinite(x).all() for x in values]).all()
        self._keep(rows, pass_loss, finite)
        return pass_loss.loss

    def _rows_of(self, packed_row: PackedRow, outputs: torch.Tensor) -> _PassRows:
        """Makes verl's rows of a pass. The loss gets those that are no hidden padding, or all if there is no other."""
        numbers = [row for group in packed_row.groups for row in group.rows]
        micro_batch = micro_batch_of(self._loss, self._data, numbers)
        model_output = self._row_outputs.of_pass(packed_row, outputs, micro_batch["input_ids"].offsets())
        seen = [i for i, number in enumerate(numbers) if number not in self._hidden]
        if len(seen) in (0, len(numbers)):
            return _PassRows(numbers, model_output, micro_batch, model_output)
        seen_output = {}
        for name, values in model_output.items():
            rows = values.unbind()
            seen_output[name] = tu.nested_tensor_from_tensor_list([rows[i] for i in seen])
        return _PassRows(numbers, model_output, select_rows(micro_batch, seen), seen_output)

    def _keep(self, rows: _PassRows, pass_loss: PassLoss, finite: torch.Tensor) -> None:
        """Keeps a pass's results; its outputs only if they are wanted, since those of all rows are large."""
        outputs = {name: values.detach() for name, values in rows.model_output.items()}
        result = _Result(
            numbers=rows.numbers,
            loss=pass_loss.loss.detach(),
            metrics=pass_loss.metrics,
            is_hidden=self._hidden.issuperset(rows.numbers),
            outputs=outputs if self._returns_outputs else None,
            finite=finite,
            bad_rows={name: _has_bad_value(values) for name, values in outputs.items()},
            where=current_pass(),
        )
        self._results.append(result)

    def finish(self, plan: Plan) -> tuple[dict[str, Any], int]:
        """Ends the run: returns verl's output of all passes, and how many of them had anything not finite. Every rank
        calls it. On a stage of a pipeline before the last one there is no loss and no metric, and "model_output" is
        None if the last stage returns outputs (see `Exchange.give_back`)."""
        ranks = self._backend.ranks
        if ranks.has_outputs:
            self._add_idle_groups(plan)
            output, num_not_finite = self._joined(plan)
        else:
            output, num_not_finite = {"model_output": None if self._returns_outputs else {}, "metrics": {}}, 0
        if self._loss.needs_a_token:
            add_missing_sums(output["metrics"], ranks.data_group)
        if output["model_output"] and self.token_outputs.tokens.records:
            output["model_output"][ROUTES] = self.token_outputs.recorded(plan)
        return output, num_not_finite

    def _add_idle_groups(self, plan: Plan) -> None:
        """Makes a result of the idle groups, which no pass computes. It is needed in two cases.

        - Outputs are wanted back. verl then needs an output of every row, though an idle row's is empty.
        - This rank has no other rows. Then the loss is called with the idle ones, since every rank must report the same
          metrics. Where no token counts the loss may be NaN. That NaN is not reported: it is no defect of the run.
        """
        is_alone = not self._results
        if not plan.idle_groups or not (self._returns_outputs or is_alone):
            return
        with torch.no_grad(), self._backend.autocast():
            nothing = PackedRow(torch.zeros(0, dtype=torch.int64), (), plan.idle_groups)
            rows = self._rows_of(nothing, self.token_outputs.empty())
            pass_loss = PassLoss(torch.zeros(()), None)
            if is_alone or self._loss.function is None:
                pass_loss = self._loss(rows.output_for_loss, rows.for_loss, self._backend.ranks.data_group)
        self._keep(rows, pass_loss, torch.tensor(True))

    def _joined(self, plan: Plan) -> tuple[dict[str, Any], int]:
        """Joins all results to verl's output; returns it, and how many of them had anything not finite."""
        metrics_of_passes = reported_metrics(
            [result.metrics for result in self._results], [result.is_hidden for result in self._results]
        )
        outputs = []
        for result, metrics in zip(self._results, metrics_of_passes, strict=True):
            output: dict[str, Any] = {"loss": result.loss.item(), "metrics": metrics}
            if result.outputs is not None:
                output["model_output"] = result.outputs
            outputs.append(output)
        joined = postprocess_batch_func(outputs, [result.numbers for result in self._results], data=self._data)
        even_out(joined["metrics"], outputs, plan.num_losses)
        return joined, self.report_not_finite()

    def report_not_finite(self) -> int:
        """Logs the rows of the first pass with anything not finite; returns how many such passes there are."""
        not_finite = [result for result in self._results if not result.finite]
        if not_finite:
            self._log_not_finite(not_finite[0])
        return len(not_finite)

    def _log_not_finite(self, result: _Result) -> None:
        """Logs in which rows something is not finite."""
        uids = tu.get(self._data, "uid", [None] * len(self._data))
        read = select_rows(self._data, result.numbers)
        fields = {name: [not torch.isfinite(x).all() for x in read[name].unbind()] for name in self._loss.floats(read)}
        problems = []
        # A critic's outputs have the name of a field, "values".
        found: list[tuple[str, Any]] = [*result.bad_rows.items()]
        found += [(f"the batch's {name}", is_bad) for name, is_bad in fields.items()]
        for name, is_bad in found:
            if bad := [f"{row} (uid {uids[row]})" for row, bad in zip(result.numbers, is_bad, strict=True) if bad]:
                problems.append(f"{name} of rows {listed(bad)}")
        logger.error(
            "not finite in %s: loss %s; %s. %s; rows are numbered as this rank computes them, and later passes of this "
            "mini-batch are counted in prefix/nonfinite_passes and not logged",
            result.where,
            result.loss.item(),
            "; ".join(problems) or "all that it was made of is finite",
            "verl takes such outputs as they are" if self._forward_only else self._backend.after_not_finite,
        )


def _has_bad_value(rows: Any) -> torch.Tensor:
    """Whether each row of a jagged tensor [rows, tokens] has a value that is not finite: [rows] bool. The host does not
    wait for the device."""
    num_bad: torch.Tensor = torch.nn.functional.pad((~torch.isfinite(rows.values())).cumsum(0), (1, 0))
    return num_bad[rows.offsets()].diff() > 0
