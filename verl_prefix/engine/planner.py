"""How a batch is computed: by a plan of shared passes, or on the stock path, for a reason that is logged once."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from verl.utils.device import get_device_name

from verl_prefix.auto.calibration import measure
from verl_prefix.auto.chooser import Chooser, Decision, Workload
from verl_prefix.auto.cost import PassCost, Rates
from verl_prefix.auto.cost_model import CostModel
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.group_parts import leave_out
from verl_prefix.core.groups import Group
from verl_prefix.core.kernels.cuda_rules import is_deterministic
from verl_prefix.core.plan import Plan
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.plan_advice import tell_of_bubble, tell_of_long_rows, tell_of_wave_tokens
from verl_prefix.engine.rows import BatchRows


@dataclass(frozen=True)
class StockPath:
    """The decision that a batch takes the stock path.

    Attributes:
        reason: why, for the log.
        metrics: prefix/* that were predicted of the batch.
    """

    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)

    def after(self, metrics: Mapping[str, float]) -> "StockPath":
        """Returns the decision with metrics of what was done before it."""
        return replace(self, metrics={**metrics, **self.metrics})


@dataclass(frozen=True)
class SharedPath:
    """How a batch is computed by shared passes.

    Attributes:
        plan: this rank's passes.
        metrics: prefix/* that were predicted of the batch.
    """

    plan: Plan
    metrics: Mapping[str, float] = field(default_factory=dict)


def cost_model_of(backend: Backend, options: PrefixConfig) -> CostModel:
    """Makes the cost model of an engine that has its model."""
    stock_facts = backend.stock_facts
    return CostModel(
        shape=backend.shape,
        dense_mask=stock_facts.dense_mask,
        wave_tokens=options.wave_tokens,
        # Where the stock path cannot be sharded, each rank of a sequence-parallel group computes every token there.
        # Then sharing always gains, and no speedup is asked for.
        min_speedup=0 if stock_facts.wrong_when_sharded else options.min_speedup,
        memory=backend.memory(options),
        one_row=stock_facts.separates_rows,
    )


class Planner:
    """Plans an engine's batches, once the engine has its model.

    Args:
        costs: the engine's, by `cost_model_of`.
        stock_fits: whether passes of the stock path fit this rank's device (`Headroom.fits`).
        role: the engine's, a key that `config.actor.role_of` returns.
    """

    def __init__(
        self,
        backend: Backend,
        options: PrefixConfig,
        costs: CostModel,
        stock_fits: Callable[[Sequence[PassCost]], bool],
        role: str,
    ) -> None:
        self._backend, self._options, self._costs, self._role = backend, options, costs, role
        self._stock_facts = backend.stock_facts
        self._chooser = self._new_chooser(stock_fits) if options.schedule == "auto" else None

    def _new_chooser(self, stock_fits: Callable[[Sequence[PassCost]], bool]) -> Chooser:
        """Makes what chooses between paths. Every rank calls it."""
        backend, costs = self._backend, self._costs

        new_runner = functools.partial(
            backend.new_runner, kernel=self._options.attention, logits_chunk=costs.memory.chunk
        )

        def rates(budget: int, batch_tokens: int, forward_only: bool) -> Rates:
            return measure(
                costs.shape, budget, batch_tokens=batch_tokens, device=torch.device(get_device_name()),
                new_runner=new_runner, gradients_aside=backend.gradients_aside, forward_only=forward_only,
            )  # fmt: skip

        known: dict[str, Rates] = {}
        # If any rank must be deterministic, all are, since measuring runs collectives. Nodes may differ in the
        # environment variable that asks for it.
        (deterministic,) = backend.ranks.max_over_ranks([backend.deterministic or is_deterministic()])
        if deterministic or backend.ranks.pipeline_size > 1:
            # No clock, which would choose differently from run to run, or would measure how long a pipeline fills.
            flops = costs.flops()
            known = flops if backend.trains else {"forward": flops["forward"]}
        return Chooser(costs, known, measure=rates, reduce_max=backend.ranks.max_over_ranks, stock_fits=stock_fits)

    def only_stock_path(self, given: BatchRows, loss: Loss) -> StockPath | None:
        """Returns the stock path if this batch can take no other; None: `plan` decides.

        Every rank gets the same answer, since this reads only what all ranks have alike: whether masks are of responses
        or of whole rows, for example. Other fields may differ (`moves.decide_moves`).
        """
        data = given.data
        if "prompts" not in data.keys() or "responses" not in data.keys():
            return StockPath("the batch has no prompts and responses (not an RL batch)")
        mask = data["loss_mask"]
        if mask.is_nested and 0 < len(mask.values()) == len(data["input_ids"].values()):
            return StockPath("loss_mask is of prompts, too, whose outputs are not computed")
        if given.flag("force_group_size", 1) > 1:
            return StockPath("force_group_size keeps rows together by their order")
        if given.flag("distillation_use_topk") and not loss.takes_logits:
            return StockPath("distillation_use_topk without verl's loss: another one may need logits of every token")
        return None

    def plan(
        self,
        given: BatchRows,
        computed: BatchRows,
        groups: Sequence[Group],
        forward_only: bool,
        update_follows: bool = True,
    ) -> SharedPath | StockPath:
        """Plans a batch on this rank, or says that the batch takes the stock path. Every rank calls it.

        Args:
            given: the rows that the stock path would compute here. Their flags give budgets.
            computed: the rows that this rank computes, after the exchange. Groups of dead rows are idle.
            groups: of `computed`.
            update_follows: whether an update of these log-probs' rows must take the same path. None does of ref's.
        """
        groups, idle = leave_out(groups, computed.dead) if computed.dead else (groups, [])
        # A budget follows from the batch's flags and the lengths of groups, which may be of rows from other ranks.
        shared = Workload(groups, given.budget(groups))
        stock = Workload(given.single_rows, given.budget(given.single_rows))
        if not (self._stock_facts.wrong_when_sharded or self._stock_facts.separates_rows):
            tell_of_long_rows(given, stock.budget, self._role, forward_only)
        if groups:  # else no row of this rank says how long a pass is
            tell_of_wave_tokens(self._options, shared.budget, self._role)
        if self._chooser is None:
            plan: Plan | None = self._costs.plan(*shared, self._options.schedule, forward_only)
            decision = Decision(False, False, None)
        else:
            plan, decision = self._chooser.choose(shared, forward_only, own=stock, update_follows=update_follows)
        path = self._costs.stock_passes(*stock) if plan is None else plan
        metrics = self._predicted_bubble(path, forward_only)
        if decision.speedup:
            metrics["prefix/predicted_speedup"] = decision.speedup
        if plan is None:
            return StockPath(decision.why_stock, metrics)
        return SharedPath(replace(plan, idle_groups=(*plan.idle_groups, *idle)), metrics)

    def _predicted_bubble(self, path: Plan | Sequence[PassCost], forward_only: bool) -> dict[str, float]:
        """Returns the share of a batch's time in which the stages of a pipeline are expected to wait, as a metric; {}
        with one stage."""
        if self._backend.ranks.pipeline_size == 1:
            return {}
        bubble = self._costs.timeline(path, "forward" if forward_only else "update", self._costs.flops()).bubble
        if not forward_only:
            tell_of_bubble(bubble, self._role)
        return {"prefix/predicted_bubble": bubble}
