"""The path of a batch: shared, by a plan, or verl's own, for a reason that is logged once and counted in metrics."""

import functools
import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import torch
from verl.utils.device import get_device_name

from verl_prefix.auto.calibration import measure
from verl_prefix.auto.chooser import Batch, Chooser, CostModel
from verl_prefix.auto.cost import PassCost, Rates
from verl_prefix.config.actor import tokens_key
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.groups import Group, leave_out
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import leaves_room
from verl_prefix.core.schedule import Schedule
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.headroom import Headroom
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.rows import BatchRows
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)


class Stock(NamedTuple):
    """A batch goes to verl's own path, for `reason`."""

    reason: str


class Paths:
    """Plans an engine's batches, once the engine has its model.

    Args:
        schedule: makes a schedule of (outputs, step, forward_only). headroom: of this rank's device.
        role: the engine's, as of `config.actor.role_of`.

    Attributes:
        always: verl's own path, where every batch takes it; or None.
        costs: what decides between paths, unless prefix.schedule is stock.
    """

    def __init__(
        self, backend: Backend, options: PrefixConfig, schedule: Callable[..., Schedule], headroom: Headroom,
        role: str,
    ) -> None:  # fmt: skip
        self.options, self._role = options, role
        self.always = Stock("prefix.schedule=stock") if options.schedule == "stock" else None
        self._chooser: Chooser | None = None
        self._told_waves = self._told_bubble = False
        self._bubble: float | None = None  # of the last planned batch
        if self.always is not None:
            return
        self._stock = stock = backend.stock_facts
        self.costs = costs = CostModel(
            shape=backend.shape,
            dense_mask=stock.dense_mask,
            wave_tokens=options.wave_tokens,
            # Where verl's path cannot be sharded, each rank of a slice group computes every token.
            min_speedup=0 if stock.why_not_sharded else options.min_speedup,
            memory=backend.memory(options),
            one_row=stock.one_row,
        )
        if options.schedule != "auto":
            return

        def rates(budget: int, batch_tokens: int, forward_only: bool) -> Rates:
            return measure(
                costs.shape, budget, batch_tokens=batch_tokens, device=torch.device(get_device_name()),
                schedule=functools.partial(schedule, logits_chunk=costs.memory.chunk),
                gradients_aside=backend.gradients_aside, forward_only=forward_only,
            )  # fmt: skip

        known: dict[str, Rates] = {}
        deterministic = backend.deterministic or torch.are_deterministic_algorithms_enabled()
        if deterministic or costs.memory.stages > 1:
            # No clock, which would choose differently from run to run, or would measure how long a pipeline fills.
            flops = costs.flops()
            known = {"forward": flops["forward"]} if backend.has_no_updates else flops
        self._chooser = Chooser(
            costs, known, measure=rates, reduce_max=backend.ranks.max_over_ranks,
            stock_fits=functools.partial(headroom.fits, costs),
        )  # fmt: skip

    def why_stock(self, rows: BatchRows, loss: Loss) -> Stock | None:
        """verl's own path, if this batch takes it whatever its lengths are; else None.

        It is the same on every rank, since the batches of all ranks have the same fields and flags.
        """
        data = rows.data
        if self.always is not None:
            return self.always
        if "prompts" not in data.keys() or "responses" not in data.keys():
            return Stock("the batch has no prompts and responses (not an RL batch)")
        mask = data["loss_mask"]
        if mask.is_nested and 0 < len(mask.values()) == len(data["input_ids"].values()):
            return Stock("loss_mask is of prompts, too, whose outputs are not computed")
        if rows.flag("force_group_size", 1) > 1:
            return Stock("force_group_size keeps rows together by their order")
        if rows.flag("distillation_use_topk") and not loss.distills:
            return Stock("a loss that is not verl's own reads logits, and may need those of every token")
        return None

    def plan(
        self, rows: BatchRows, groups: Sequence[Group], forward_only: bool, dead: Set[int] = frozenset()
    ) -> Plan | Stock:
        """This rank's plan, or verl's own path.

        Args:
            rows: this rank's own, which verl's path would compute. groups: of the rows that ours computes.
            dead: rows that ours leaves out; their groups are idle.
        """
        groups, idle = leave_out(groups, dead) if dead else (groups, [])
        # `groups` may be of other rows than `rows`: a budget reads the batch's flags, and of groups lengths alone.
        batch, own = (Batch(each, rows.budget(each)) for each in (groups, rows.alone))
        if not (self._stock.why_not_sharded or self.costs.one_row):
            self._tell_long_rows(rows, own.budget, forward_only)
        self._tell_waves(batch.budget)
        if self._chooser is None:
            plan: Plan | None = self.costs.plan(*batch, self.options.schedule, forward_only)
        else:
            plan = self._chooser.choose(*batch, forward_only, own)
        self._see_bubble(plan or self.costs.stock_passes(*own), forward_only)
        if plan is None and not forward_only and self._chooser and self._chooser.log_probs is not None:
            return Stock("the update follows its log-probs, which took it, since both must round alike")
        if plan is None:
            return Stock(f"prefix.min_speedup={self.options.min_speedup} is more than sharing is predicted to gain")
        return replace(plan, idle_groups=(*plan.idle_groups, *idle))

    def metrics(self) -> dict[str, float]:
        """prefix/* about the path that the last planned batch took."""
        speedup = self._chooser and self._chooser.speedup
        bubble = {} if self._bubble is None else {"prefix/predicted_bubble": self._bubble}
        return bubble | ({"prefix/predicted_speedup": speedup} if speedup else {})

    def _see_bubble(self, path: Plan | Sequence[PassCost], forward_only: bool) -> None:
        """Predicts how much of a batch the stages of a pipeline wait, and says it once of an update."""
        if self.costs.memory.stages == 1:
            return
        self._bubble = self.costs.timeline(path, "forward" if forward_only else "update", self.costs.flops()).bubble
        if not (forward_only or self._told_bubble) and torch.distributed.get_rank() == 0:
            self._told_bubble = True
            logger.warning(
                "prefix: stages of the pipeline are expected to wait %.0f%% of an update", 100 * self._bubble
            )

    def _tell_long_rows(self, rows: BatchRows, budget: int, forward_only: bool) -> None:
        """Says where a row alone is over the budget."""
        if any(a + b > budget for a, b in zip(rows.prompt_lens, rows.response_lens, strict=True)):
            warn_once(
                logger,
                "prefix: a row alone is over the %d tokens of a pass (%s, of all ranks that share it), where verl's "
                "engine would end; raise it",
                budget,
                tokens_key(self._role, forward_only),
            )

    def _tell_waves(self, budget: int) -> None:
        """Says once where a plan does not heed `prefix.wave_tokens`."""
        waves, offload = self.options.wave_tokens, self.options.offload
        if waves is not None and not leaves_room(waves, budget, offload) and not self._told_waves:
            self._told_waves = True
            logger.warning(
                "prefix: prefix.wave_tokens=%d %s the %d tokens of a pass, and is not heeded in such; set a smaller "
                "number, or null", waves, "is over" if offload else "leaves nothing for prefixes of", budget,
            )  # fmt: skip
