"""`prefix.verify`: when the self-check runs, on which rows, and what happens where it misses."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.auto.cost import Memory
from verl_prefix.config.actor import SKIP_ZERO_ADVANTAGE
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.errors import listed
from verl_prefix.core.group_parts import renumbered
from verl_prefix.core.groups import Group
from verl_prefix.core.nesting import Nesting
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import make_plan
from verl_prefix.engine import dead_rows
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.checks.checked_rows import candidates, cheapest
from verl_prefix.engine.checks.self_check import Comparison, Verdict
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.out_of_memory import self_check_advice
from verl_prefix.engine.outputs import FLAGS
from verl_prefix.engine.planner import SharedPath, StockPath
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.together import together
from verl_prefix.models.advice import WITHOUT_SHARING

_NO_FLAGS = dict.fromkeys(FLAGS, False)


class _Sample(NamedTuple):
    """The rows that are checked.

    Attributes:
        group: their group, by their numbers in `rows`.
        rows: the rows for our passes.
        for_stock: the rows for the stock path. It takes one at a time, since the budget may have no room for logits of
            more.
        loss: the loss by whose gradients both paths are compared.
    """

    group: Group
    rows: BatchRows
    for_stock: BatchRows
    loss: Callable[..., Any]

    @classmethod
    def of(cls, batch: BatchRows, group: Group, num_for_stock: int, loss: Loss) -> "_Sample":
        """Takes the rows of `group` out of a batch. The stock path gets its last row again and again, until there are
        `num_for_stock` rows; the repeated ones have weight 0."""
        repeated = group.rows[-1:] * (num_for_stock - len(group.rows))
        rows, for_stock = batch.select(group.rows), batch.select([*group.rows, *repeated])
        flags, function = _NO_FLAGS | {"return_model_output": True}, _weighted_loss
        if batch.flag("distillation_use_topk"):
            flags["distillation_use_topk"] = True
            function = functools.partial(_weighted_loss, processor=loss.function)
        for selected in (rows, for_stock):
            tu.assign_non_tensor(selected.data, **flags)
            weights = [float(number < len(rows)) / len(rows) for number in range(len(selected))]
            selected.data["verify_weight"] = torch.tensor(weights)
        tu.assign_non_tensor(for_stock.data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
        numbers = {number: new_number for new_number, number in enumerate(group.rows)}
        return cls(renumbered(group, numbers), rows, for_stock, function)


class Verification:
    """The self-check of one engine, which all ranks run at once. It checks updates. In an engine for log-probs alone it
    checks batches, which have no gradients to compare.

    Args:
        run_plan: `PrefixEngine.run_plan`.

    Attributes:
        failure: why every batch takes the stock path, after a check missed under prefix.verify_action=fallback; else
            None.
    """

    def __init__(self, backend: Backend, options: PrefixConfig, run_plan: Callable[..., tuple[dict, dict]]) -> None:
        self._backend, self._options, self._run_plan = backend, options, run_plan
        self.failure: StockPath | None = None
        self._num_batches = 0  # of the checked kind, on either path: the log names the last one by this number
        self._num_settled = 0  # of these, the shared ones that were checked or need no check, by which one is due

    @property
    def _compared(self) -> str:
        """The output that both paths are compared by: log_probs, or values."""
        return self._backend.output_names(_NO_FLAGS)[0]

    def count(self, forward_only: bool) -> None:
        """Counts a batch, on whichever path it will be computed."""
        if self._is_checked_kind(forward_only):
            self._num_batches += 1

    def _is_checked_kind(self, forward_only: bool) -> bool:
        return not (forward_only and self._backend.trains)

    def check(
        self, rows: BatchRows, groups: Sequence[Group], plan: Plan, loss: Loss, forward_only: bool
    ) -> dict[str, float]:
        """Runs the check, if one is due and every rank has a group to check. If a rank has none, the check stays due,
        and waits for the next batch. Every rank calls it.

        Args:
            rows: the rows that this rank computes.
            groups: of these rows.
            plan: of these groups.

        Returns:
            prefix/verify_* and the seconds; {} where nothing was checked.

        Raises:
            RuntimeError: ours is off by more than rounding, and prefix.verify_action is raise.
        """
        if not self._is_checked_kind(forward_only):
            return {}
        metrics = dict[str, float]()
        if self._is_due():
            start, budget = time.perf_counter(), rows.budget(groups)
            if not (choice := candidates(self._backend, rows, groups, budget)):
                return {}
            metrics = self._checked(rows, cheapest(choice, len(rows)), budget, plan, loss)
            metrics["timing_s/prefix_verify"] = time.perf_counter() - start
        self._num_settled += 1
        return metrics

    def _is_due(self) -> bool:
        """Whether this batch is one that `prefix.verify` names."""
        verify = self._options.verify
        if isinstance(verify, str):
            return verify == "first_step" and self._num_settled == 0
        return verify > 0 and self._num_settled % verify == 0

    def _checked(self, rows: BatchRows, group: Group, budget: int, plan: Plan, loss: Loss) -> dict[str, float]:
        """Compares both paths on a few rows of a group. Then checks the rows that the update does not compute: they
        must have no gradient. Returns prefix/verify_*.

        No pass of the check has more tokens than the budget, unless one row alone does. Where verl's sequence
        parallelism is wrong, each rank computes whole rows, and rows that are checked fit a rank's budget.
        """
        with self_check_advice():
            verdict = self._verdict(rows, group, budget, loss)
        misses = []
        if verdict.missed:
            uids = listed(sorted({rows.uids[number] for number in group.rows}))
            misses.append(
                f"{verdict} (this rank compared rows of uid {uids}). The shared-prefix path is wrong for this model; "
                f"set {WITHOUT_SHARING}"
            )
        if self._options.skip_zero_advantage and self._backend.trains:
            if self._has_gradient_of_idle_rows(rows, plan, loss):
                misses.append(f"rows that are left out have a gradient; set {SKIP_ZERO_ADVANTAGE}=False")
        if misses:
            self._miss("; ".join(misses))
        figures = verdict._asdict()
        figures[self._compared] = figures.pop("outputs")
        if not self._backend.shape.recurrent_layers:
            del figures["recurrence"]
        return {f"prefix/verify_{name}": figure.ratio for name, figure in figures.items()}

    def _has_gradient_of_idle_rows(self, rows: BatchRows, plan: Plan, loss: Loss) -> bool:
        """Whether any row that no pass of the plan computes has a gradient, on any rank: a dead row, or one with an
        empty response."""
        with together("checking rows that are left out", maxima=("has_gradient",)) as agreed:
            in_passes = {number for pass_ in plan.passes for group in pass_.groups for number in group.rows}
            idle = [number for number in range(len(rows)) if number not in in_passes]
            agreed.maximum("has_gradient", dead_rows.has_gradient(loss, rows, idle, self._backend.ranks.data))
        return agreed["has_gradient"] > 0

    def _miss(self, why: str) -> None:
        """Ends the run, or sends all batches from now on to the stock path."""
        batches = "update" if self._backend.trains else "batch of ref"
        message = f"prefix.verify, {batches} {self._num_batches}: {why}"
        if self._options.verify_action == "raise":
            fallback = "actor_rollout_ref.actor.prefix.verify_action=fallback"
            raise RuntimeError(f"{message}, or {fallback} to go on with the stock path. Please report this")
        self.failure = StockPath(f"the self-check missed: {message}. Please report this")

    def _verdict(self, rows: BatchRows, group: Group, budget: int, loss: Loss) -> Verdict:
        """Compares both paths on a group of each rank. Top-k distillation also compares its losses."""
        ranks, num_perturbed = self._backend.ranks, _num_perturbed(len(rows), len(group.rows))
        # Stock passes hold collectives, so that every rank runs as many.
        (_, most_rows), (fewest_perturbed, _) = ranks.ranges_over_ranks(len(group.rows), num_perturbed)
        sample, memory = _Sample.of(rows, group, most_rows, loss), self._backend.memory(self._options)
        paths = _BothPaths(self._backend, self._run_plan, sample, budget, memory)
        with self._backend.gradients_aside():
            verdict = Comparison(
                paths.stock, paths.ours, self._backend.rounding_noise, self._backend.gradients(),
                ranks.sum_over_ranks, self._compared.replace("_", "-"),
            ).verdict(fewest_perturbed)  # fmt: skip
        # The other figures are of all ranks together.
        layer_figures: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(layer_figures, (verdict.attention, verdict.recurrence))
        attention, recurrence = map(max, zip(*layer_figures, strict=True))
        return verdict._replace(attention=attention, recurrence=recurrence)


class _BothPaths:
    """Runs a sample on either path. Each run returns the outputs of the sample's responses, [tokens]. Unless the engine
    has no updates, it also accumulates the gradients of their loss.

    Args:
        run_plan: `PrefixEngine.run_plan`.
        budget: tokens of one pass.
        memory: what our passes keep.
    """

    def __init__(
        self, backend: Backend, run_plan: Callable[..., tuple[dict, dict]], sample: _Sample, budget: int, memory: Memory
    ) -> None:
        self._backend, self._run_plan, self._sample = backend, run_plan, sample
        self._budget, self._memory = budget, memory

    def stock(self) -> torch.Tensor:
        """Runs the stock path."""
        data, forward_only = self._sample.for_stock.data, not self._backend.trains
        return self._outputs(self._backend.run_stock_path(data, self._sample.loss, forward_only))

    def ours(self, schedule: str, context_type: Callable[..., ForwardContext]) -> torch.Tensor:
        """Runs the passes of `plan_to_check`."""
        rows, group, forward_only = self._sample.rows, self._sample.group, not self._backend.trains
        plan = plan_to_check(group, self._budget, schedule, nests=self._backend.ranks.stages == 1)
        loss = Loss(self._sample.loss, fields={"temperature", "verify_weight"})
        path = SharedPath(plan, self._memory)
        output, _ = self._run_plan(rows, [group], path, loss, forward_only, context_type=context_type)
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
    deepest = Nesting(group, budget, 1, offload=False).deepest() if nests and schedule == "phased" else None
    return Plan((deepest,)) if deepest else make_plan([group], budget, schedule, wave_tokens=1, nests=nests)


def _compared_outputs(model_output: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns what is compared of each row: log-probs or values. Top-k distillation adds its losses to these."""
    names = ("log_probs", "values", "distillation_losses")
    outputs = [model_output[name].unbind() for name in names if name in model_output]
    return [torch.stack(row_outputs).sum(0) for row_outputs in zip(*outputs, strict=True)]


def _of_response(row: torch.Tensor, length: int) -> torch.Tensor:
    """Returns a row's outputs of its response: a token's output stands at the token before."""
    return row[len(row) - length - 1 : len(row) - 1]


def _weighted_loss(
    data: TensorDict, model_output: Mapping[str, torch.Tensor] | None = None,
    processor: Callable[..., Any] | None = None, **others: Any,
) -> Any:  # fmt: skip
    """The loss by which gradients are compared. The first tokens of a response count most, since they read most of
    their prefix. Where verl calls it with logits, it is the loss's own `processor`."""
    if model_output is None:
        assert processor is not None
        return processor(data=data, **others)
    lens, loss = BatchRows(data).response_lens, 0.0 * next(iter(model_output.values())).values().sum()
    for row, length, row_weight in zip(_compared_outputs(model_output), lens, data["verify_weight"], strict=True):
        token_weights = 1 / torch.arange(1, length + 1, device=row.device)
        loss = loss - row_weight * (_of_response(row, length) * token_weights).sum()
    return loss, {}


def _num_perturbed(num_rows: int, num_checked: int) -> int:
    """Returns how many stock passes measure rounding: one to three, so that a check takes about an eighth of an update
    of this rank's rows. The passes that are compared (stock, packed, phased) cost about two of these more."""
    return min(3, max(1, num_rows // (8 * num_checked) - 2))
