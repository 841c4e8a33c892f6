"""The rows of a self-check on both paths: the stock path, and the shared one."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.auto.cost import Memory
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.group_parts import renumbered
from verl_prefix.core.groups import Group
from verl_prefix.core.nesting import Nesting
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import make_plan
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.loss import Loss, LossFunction, is_call_with_logits
from verl_prefix.engine.outputs import FLAGS
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.shared_passes import SharedPasses

NO_FLAGS = dict.fromkeys(FLAGS, False)  # verl then asks for log-probs or values alone


class Sample(NamedTuple):
    """The rows that are checked.

    Attributes:
        group: the group of these rows, by their numbers in `rows`.
        rows: the rows for the shared path.
        stock_rows: the rows for the stock path. It takes one row at a time, since the budget may have no room for
            logits of several.
        loss: the loss by whose gradients both paths are compared.
    """

    group: Group
    rows: BatchRows
    stock_rows: BatchRows
    loss: LossFunction

    @classmethod
    def of(cls, batch: BatchRows, group: Group, num_stock_rows: int, loss: Loss, loss_factor: float) -> "Sample":
        """Takes the rows of `group` out of a batch. The stock path gets the last row again and again, until there are
        `num_stock_rows` rows; the repeated ones have weight 0. The loss is a mean over rows, times `loss_factor`."""
        num_repeated = num_stock_rows - len(group.rows)
        rows = batch.select(group.rows)
        stock_rows = batch.select([*group.rows, *group.rows[-1:] * num_repeated])
        weights = [loss_factor / len(rows)] * len(rows)
        rows.data["verify_weight"] = torch.tensor(weights)
        stock_rows.data["verify_weight"] = torch.tensor(weights + [0.0] * num_repeated)
        distills = batch.flag("distillation_use_topk")
        flags = NO_FLAGS | {"return_model_output": True, "distillation_use_topk": distills}
        tu.assign_non_tensor(rows.data, **flags)
        tu.assign_non_tensor(stock_rows.data, **flags, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
        numbers = {number: new_number for new_number, number in enumerate(group.rows)}
        function = functools.partial(_topk_loss, loss.function) if distills and loss.function else _weighted_loss
        return cls(renumbered(group, numbers), rows, stock_rows, function)


class BothPaths:
    """Runs a sample on either path. Each run returns the outputs of the sample's responses, [tokens]. Unless the engine
    has no updates, it also accumulates the gradients of their loss.

    Args:
        passes: of the engine.
        budget: tokens of one pass.
        memory: what shared passes keep.
    """

    def __init__(self, backend: Backend, passes: SharedPasses, sample: Sample, budget: int, memory: Memory) -> None:
        self._backend, self._passes, self._sample = backend, passes, sample
        self._budget, self._memory = budget, memory
        self._forward_only = not backend.trains

    def stock(self) -> torch.Tensor:
        """Runs the stock path."""
        sample = self._sample
        return self._outputs(self._backend.run_stock_path(sample.stock_rows.data, sample.loss, self._forward_only))

    def shared(self, schedule: str, context_type: Callable[..., ForwardContext]) -> torch.Tensor:
        """Runs the passes of `plan_to_check`."""
        sample = self._sample
        plan = plan_to_check(sample.group, self._budget, schedule, nests=self._backend.ranks.pipeline_size == 1)
        loss = Loss(sample.loss, reads={"temperature", "verify_weight"})
        output, _ = self._passes.run(
            sample.rows, [sample.group], plan, self._memory, loss, self._forward_only,
            context_type=context_type,
        )  # fmt: skip
        return self._outputs(output)

    def _outputs(self, output: Mapping[str, Any]) -> torch.Tensor:
        """Takes the responses' outputs out of verl's output."""
        if not self._backend.ranks.has_outputs:
            return torch.zeros(0)
        lens = self._sample.rows.response_lens
        rows = _compared_outputs(output["model_output"])[: len(lens)]
        return torch.cat([_of_response(row, length) for row, length in zip(rows, lens, strict=True)])


def plan_to_check(group: Group, budget: int, schedule: str, nests: bool) -> Plan:
    """Returns the plan by which a group is checked, "packed" or "phased". In a phased one several waves read one
    prefix, so that their gradients add up in it. The phased plan of a tree has nested passes, if passes may nest.

    Args:
        nests: see `make_plan`.
    """
    if nests and schedule == "phased":
        deepest = Nesting(group, budget, pass_tokens=1, offload=False).deepest()  # a pass for each suffix
        if deepest is not None:
            return Plan((deepest,))
    return make_plan([group], budget, schedule, wave_tokens=1, nests=nests)


def _compared_outputs(model_output: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns what is compared of each row: log-probs or values. Top-k distillation adds its losses to these."""
    names = ("log_probs", "values", "distillation_losses")
    outputs = [model_output[name].unbind() for name in names if name in model_output]
    return [torch.stack(row_outputs).sum(0) for row_outputs in zip(*outputs, strict=True)]


def _of_response(row: torch.Tensor, length: int) -> torch.Tensor:
    """Returns a row's outputs of its response: a token's output stands at the token before."""
    return row[len(row) - length - 1 : len(row) - 1]


def _topk_loss(runs_loss: LossFunction, **given: Any) -> Any:
    """The loss in top-k distillation, where verl also calls a loss with logits. Such a call goes to the run's own."""
    return runs_loss(**given) if is_call_with_logits(given) else _weighted_loss(**given)


def _weighted_loss(
    data: TensorDict, model_output: Mapping[str, torch.Tensor], **_: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss by which gradients are compared. The first tokens of a response count most, since they read most of
    their prefix."""
    response_lens = BatchRows(data).response_lens
    rows = _compared_outputs(model_output)
    loss = 0.0 * next(iter(model_output.values())).values().sum()
    for row, length, row_weight in zip(rows, response_lens, data["verify_weight"], strict=True):
        token_weights = 1 / torch.arange(1, length + 1, device=row.device)
        loss = loss - row_weight * (_of_response(row, length) * token_weights).sum()
    return loss, {}
