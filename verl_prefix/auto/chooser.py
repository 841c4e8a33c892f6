"""schedule=auto: the cheapest path for a batch (stock, packed, or a mix with phases), the same on every rank.

Sharing short prompts can cost more than it saves. What a path costs is predicted by `cost`: with rates measured on this
model and device, or with FLOPs where no rates would choose otherwise. The engine asks a `Chooser`; `verl-prefix plan`
asks `candidates`, `price` and `decide`, as the chooser does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from verl_prefix.auto.calibration import Profile
from verl_prefix.auto.cost import Memory, PassCost, Rates, least_gain, plan_batch, plan_passes, stock_passes
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.core.waves import Plan


@dataclass(frozen=True)
class CostModel:
    """The facts of a run that decide between paths.

    Args:
        dense_mask, one_row: see `cost.stock_passes`. wave_tokens: of `PrefixConfig`.
        min_speedup: predicted stock seconds over ours below which a batch goes to the stock path; 0: it never does.
    """

    shape: ModelShape
    dense_mask: bool
    wave_tokens: int | None
    min_speedup: float
    memory: Memory
    one_row: bool = False

    def stock_passes(self, groups: Sequence[Group], budget: int) -> list[PassCost]:
        """A rank's passes on verl's own path."""
        return stock_passes(self.shape, groups, budget=budget, dense_mask=self.dense_mask, one_row=self.one_row)

    def plan(self, groups: Sequence[Group], budget: int, schedule: str, forward_only: bool = False) -> Plan:
        """A rank's plan by one schedule: "packed", "phased", or "auto", see `waves.make_plan`."""
        return plan_batch(
            self.shape, groups, budget=budget, schedule=schedule, wave_tokens=self.wave_tokens, memory=self.memory,
            forward_only=forward_only,
        )  # fmt: skip

    def flops(self) -> Profile:
        """Rates that count FLOPs: backward is two forwards; checkpointing runs the layers, not lm_head, once more."""
        layers = 4.0 if self.memory.checkpointed else 3.0
        return Profile(Rates(), Rates(0.0, *(x * 1e-12 for x in (layers, layers, 3.0))))


class Candidates(NamedTuple):
    """One rank's paths for a batch: stock's passes, and two sharing plans.

    `mixed` is packed where the whole group fits the budget and phased where it does not; `packed` cuts such groups.
    `stock_runs` is False where a row is longer than the budget, which verl refuses (rearrange_micro_batches).
    """

    stock: list[PassCost]
    mixed: Plan
    packed: Plan
    stock_runs: bool = True

    def passes(self, costs: CostModel, update: bool) -> list[list[PassCost]]:
        """The passes of each path, in the order above."""
        chunk = costs.memory.pass_chunk if update else None
        return [self.stock, *(plan_passes(costs.shape, plan, chunk) for plan in (self.mixed, self.packed))]


class Decision(NamedTuple):
    """The choice, the same on every rank.

    `stock`: the batch takes the stock path. `packed`: if it does not, packed passes alone are cheaper than the mix.
    `speedup`: predicted seconds of stock over those of the cheaper of our two."""

    stock: bool
    packed: bool
    speedup: float


class Batch(NamedTuple):
    """A rank's rows in groups, and `budget`, the physical tokens of one pass over them."""

    groups: Sequence[Group]
    budget: int


def candidates(
    costs: CostModel, groups: Sequence[Group], budget: int, own: Batch | None = None, forward_only: bool = False
) -> Candidates:
    """The paths of a rank's batch.

    Args:
        budget: physical tokens of one pass.
        own: what verl's path would compute here, where `groups` are rows that came from other ranks.
    """
    mixed = costs.plan(groups, budget, "auto", forward_only)
    packed = costs.plan(groups, budget, "packed", forward_only) if mixed.phased else mixed
    own = own or Batch(groups, budget)
    stock = costs.stock_passes(*own)
    return Candidates(stock, mixed, packed, stock_runs=all(one.tokens <= own.budget for one in stock))


def price(costs: CostModel, paths: Candidates, profile: Profile) -> list[float]:
    """Seconds of each path: the sum of log-probs and update, as far as their rates are known."""
    seconds = [0.0] * 3
    for update, rates in enumerate((profile.forward, profile.update)):
        if rates is not None:
            by_path = paths.passes(costs, bool(update))
            seconds = [x + rates.seconds(costs.shape, passes) for x, passes in zip(seconds, by_path, strict=True)]
    return seconds


def is_certain(costs: CostModel, paths: Candidates) -> bool:
    """Whether `mixed` is chosen at any rates, in log-probs and in the update, which follows their choice.

    It is where stock's path takes at least `min_speedup` times as much of everything, and `packed` no less of anything.
    What holds on every rank holds for the slowest."""
    kinds = [paths.passes(costs, update) for update in (False, True)]
    return all(
        least_gain(costs.shape, stock, mixed) >= costs.min_speedup and least_gain(costs.shape, packed, mixed) >= 1
        for stock, mixed, packed in kinds
    )


def decide(
    seconds: Sequence[float], min_speedup: float, log_probs: Decision | None = None, stock_fits: bool = True
) -> Decision:
    """Decides the path of a batch; it is never stock where that does not fit.

    Args:
        seconds: `price` of the slowest rank: the element-wise maximum.
        log_probs: for an update, the decision on the log-probs before it. The update takes the stock path if and only
            if they did, since old log-probs and update must round alike.
    """
    stock, mixed, packed = seconds
    speedup = stock / max(min(mixed, packed), 1e-9)
    takes_stock = speedup < min_speedup if log_probs is None else log_probs.stock
    is_packed = packed < (1 - 1e-9) * mixed  # by more than sums are rounded
    return Decision(takes_stock and stock_fits, is_packed and min_speedup > 0, speedup)


@dataclass
class Chooser:
    """Chooses a rank's plan batch by batch, and measures the rates that it needs.

    Args:
        profile: rates that are known.
        measure: (budget, the batch's tokens on the stock path, forward_only) -> rates; it runs collectives.
        reduce_max: element-wise maximum over ranks.
        stock_fits: whether stock's passes fit this rank's device, as an update, or as log-probs in an engine that has
            no updates.

    Attributes:
        speedup: predicted for the last batch.
        log_probs: the last decision on log-probs, which updates follow; None: there was none.
    """

    costs: CostModel
    profile: Profile
    measure: Callable[[int, int, bool], Rates]
    reduce_max: Callable[[Sequence[float]], Sequence[float]]
    stock_fits: Callable[[Sequence[PassCost]], bool] = lambda passes: True
    speedup: float | None = field(default=None, init=False)
    log_probs: Decision | None = field(default=None, init=False)

    def choose(self, groups: Sequence[Group], budget: int, forward_only: bool, own: Batch | None = None) -> Plan | None:
        """This rank's plan; None: the stock path. `own`: see `candidates`."""
        if not self.costs.min_speedup:
            return self.costs.plan(groups, budget, "auto", forward_only)
        paths = candidates(self.costs, groups, budget=budget, own=own, forward_only=forward_only)
        profile = self._profile(paths, own or Batch(groups, budget), forward_only)
        lacks_room = float(not (paths.stock_runs and self.stock_fits(paths.stock)))
        *seconds, lacks_room = self.reduce_max([*price(self.costs, paths, profile), lacks_room])
        before = None if forward_only else self.log_probs
        decision = decide(seconds, self.costs.min_speedup, before, not lacks_room)
        if forward_only:
            self.log_probs = decision
        self.speedup = decision.speedup
        return None if decision.stock else paths.packed if decision.packed else paths.mixed

    def _profile(self, paths: Candidates, own: Batch, forward_only: bool) -> Profile:
        """Rates for this batch. They are measured now where the choice depends on them and they are not known; FLOPs
        stand in while no rates are known and none are needed."""
        kind = "forward" if forward_only else "update"
        if getattr(self.profile, kind) is not None:
            return self.profile
        # The least of all ranks, since all have to run the same passes.
        tokens = sum(group.num_logical_tokens for group in own.groups)
        *least, any_unsure = self.reduce_max([-own.budget, -tokens, float(not is_certain(self.costs, paths))])
        if not any_unsure:
            return self.profile if self.profile.forward or self.profile.update else self.costs.flops()
        budget, tokens = (-int(x) for x in least)
        rates = self.measure(budget, tokens, forward_only)
        self.profile = self.profile._replace(**{kind: rates})
        return self.profile
