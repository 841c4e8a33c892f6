"""schedule=auto: the cheapest path for a batch (stock, packed, or a mix with phases), the same on every rank.

Sharing short prompts can cost more than it saves. What a path costs is predicted by `cost_model`: with rates measured
on this model and device, or with FLOPs where no rates would choose otherwise. The engine asks a `Chooser`, which asks
`Candidates` and `decide`; `verl-prefix plan` asks these two for every rank of a run.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from verl_prefix.auto.cost import Rates
from verl_prefix.auto.cost_model import CostModel
from verl_prefix.auto.shape import PassCost
from verl_prefix.core.groups import Group
from verl_prefix.core.plan import Plan


class Workload(NamedTuple):
    """What a rank computes of a batch: rows in groups, and `budget`, the physical tokens of one pass over them."""

    groups: Sequence[Group]
    budget: int


class Decision(NamedTuple):
    """The choice, the same on every rank.

    Attributes:
        stock: the batch takes the stock path.
        packed: if it does not, packed passes alone are cheaper than the mix.
        speedup: predicted seconds of stock over those of the cheaper of our two; None: nothing was predicted, or all
            rows are dead, so that no plan of ours has a pass, and the stock path alone would compute anything.
        why_stock: why the batch takes the stock path, if it does.
    """

    stock: bool
    packed: bool
    speedup: float | None
    why_stock: str = ""


class Candidates:
    """One rank's paths for a batch: stock's passes, and two sharing plans.

    Args:
        costs: facts of the run.
        batch: what this rank computes where rows share.
        own: what verl's path would compute here, where `batch` are rows that came from other ranks; None: the same.
        forward_only: the batch is of log-probs, and of no update.

    Attributes:
        stock: passes of verl's own path. stock_runs: False where a row is longer than the budget, which verl refuses
            (rearrange_micro_batches).
        mixed: the plan that is packed where a whole group fits the budget, and phased where it does not.
        packed: the plan that cuts such groups.
    """

    def __init__(
        self, costs: CostModel, batch: Workload, own: Workload | None = None, forward_only: bool = False
    ) -> None:
        self.costs = costs
        self._timed = functools.cache(functools.partial(costs.timed_plan, *batch))
        self.mixed = self._timed("auto", forward_only)[0]
        differ = self.mixed.phased or costs.memory.stages > 1  # by lengths of passes
        self.packed = self._timed("packed", forward_only)[0] if differ else self.mixed
        own = own or batch
        self.stock = costs.stock_passes(*own)
        self.stock_runs = all(one.tokens <= own.budget for one in self.stock)

    @functools.cached_property
    def passes(self) -> dict[str, list[list[PassCost]]]:
        """The passes of stock, mixed and packed, in this order: for log-probs ("forward"), and for an "update"."""
        of, plans = self.costs.shape.passes_of, (self.mixed, self.packed)
        chunks = {"forward": None, "update": self.costs.memory.pass_chunk}
        return {kind: [self.stock, *(of(plan, chunk) for plan in plans)] for kind, chunk in chunks.items()}

    def seconds(self, rates: Mapping[str, Rates]) -> list[float]:
        """Seconds of each path: the sum of log-probs and update, as far as their rates are known. With several pipeline
        stages each of the two has a plan of its own, whose time counts FLOPs. Pass `CostModel.flops()` there, since
        stock's time is by `rates`."""
        seconds = [0.0] * 3
        for kind in rates:
            if self.costs.memory.stages == 1:
                of_kind = [rates[kind].seconds(self.costs.shape, passes) for passes in self.passes[kind]]
            else:
                lines = (self._timed(schedule, kind == "forward")[1] for schedule in ("auto", "packed"))
                of_kind = [self.costs.timeline(self.stock, kind, rates).seconds]
                of_kind += [line.seconds for line in lines if line]
            seconds = [x + more for x, more in zip(seconds, of_kind, strict=True)]
        return seconds

    def is_certain(self) -> bool:
        """Whether `mixed` is chosen at any rates, in log-probs and in the update, which follows their choice.

        It is where stock's path takes at least `min_speedup` times as much of everything, and `packed` no less of
        anything. What holds on every rank holds for the slowest."""
        return all(
            self._least_gain(stock, mixed) >= self.costs.min_speedup and self._least_gain(packed, mixed) >= 1
            for stock, mixed, packed in self.passes.values()
        )

    def _least_gain(self, passes: Sequence[PassCost], others: Sequence[PassCost]) -> float:
        """The smallest ratio that the time of `passes` can have to that of `others`, whatever the `Rates` (none is
        negative): the smallest of the ratios of the four amounts that take time."""

        def amounts(of: Sequence[PassCost]) -> list[float]:
            of_each = ((1, p.linear(self.costs.shape), p.head_tokens, p.pairs) for p in of)
            return [sum(column) for column in zip((0,) * 4, *of_each, strict=True)]

        ratios = (x / y for x, y in zip(amounts(passes), amounts(others), strict=True) if y)
        return min(ratios, default=math.inf)

    def taken(self, decision: Decision) -> Plan | None:
        """This rank's plan; None: the stock path."""
        return None if decision.stock else self.packed if decision.packed else self.mixed


def decide(
    seconds: Sequence[float], min_speedup: float, log_probs: Decision | None = None, stock_fits: bool = True
) -> Decision:
    """Decides the path of a batch; it is never stock where that does not fit.

    Args:
        seconds: `Candidates.seconds` of the slowest rank: the element-wise maximum.
        log_probs: for an update, the decision on the log-probs before it. The update takes the path that they took,
            stock or not, since old log-probs and update must round alike. Where stock does not fit, it shares anyway.
        stock_fits: whether the stock path runs on every rank.
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
        costs: facts of the run.
        rates: of log-probs ("forward") and of updates ("update"), those that are known.
        measure: (budget, the batch's tokens on the stock path, forward_only) -> rates; it runs collectives.
        reduce_max: element-wise maximum over ranks.
        stock_fits: whether stock's passes fit this rank's device, as an update, or as log-probs in an engine that has
            no updates.

    Attributes:
        log_probs: the last decision on log-probs that an update follows; None: there was none.
    """

    costs: CostModel
    rates: dict[str, Rates]
    measure: Callable[[int, int, bool], Rates]
    reduce_max: Callable[[Sequence[float]], Sequence[float]]
    stock_fits: Callable[[Sequence[PassCost]], bool] = lambda passes: True
    log_probs: Decision | None = field(default=None, init=False)

    def choose(
        self, batch: Workload, forward_only: bool, own: Workload | None = None, update_follows: bool = True
    ) -> tuple[Plan | None, Decision]:
        """Returns this rank's plan, or None for the stock path; and the decision.

        A model without lm_head gains by sharing alone: a batch in which no rank's rows share takes the stock path if it
        may take it at all, and nothing is measured for it.

        Args:
            batch, own: see `Candidates`.
            update_follows: an update follows, and takes the path of these log-probs if that fits.
        """
        if not self.costs.min_speedup:
            return self.costs.plan(batch.groups, batch.budget, "auto", forward_only), Decision(False, False, None)
        paths = Candidates(self.costs, batch, own, forward_only)
        gains = self.costs.shape.head > 0 or any(group.is_shared for group in batch.groups)
        rates = self._known_rates(paths, own or batch, forward_only, gains)
        lacks_room = float(not (paths.stock_runs and self.stock_fits(paths.stock)))
        *seconds, any_gains, lacks_room = self.reduce_max([*paths.seconds(rates), float(gains), lacks_room])
        least = self.costs.min_speedup if any_gains else math.inf
        followed = None if forward_only else self.log_probs
        decision = decide(seconds, least, followed, not lacks_room)
        if followed is not None:
            why_stock = "the update follows its log-probs, which took it, since both must round alike"
        elif any_gains:
            why_stock = f"prefix.min_speedup={self.costs.min_speedup} is more than sharing is predicted to gain"
        else:
            why_stock = "no rows of this batch share a prompt, and a model without lm_head gains by that alone"
        if forward_only and update_follows:
            self.log_probs = decision
        stock, *shared = seconds
        has_dead_rows_alone = stock > 0 and min(shared) == 0  # which stock computes, and no plan of ours
        speedup = None if has_dead_rows_alone else decision.speedup
        return paths.taken(decision), decision._replace(speedup=speedup, why_stock=why_stock)

    def _known_rates(self, paths: Candidates, own: Workload, forward_only: bool, gains: bool) -> dict[str, Rates]:
        """Rates for this batch. They are measured now if the choice depends on them and they are not known. FLOPs stand
        in for them while none were measured and none are needed."""
        kind = "forward" if forward_only else "update"
        if kind in self.rates:
            return self.rates
        # The least of all ranks, since all have to run the same passes.
        tokens = sum(group.num_logical_tokens for group in own.groups)
        *least, any_unsure = self.reduce_max([-own.budget, -tokens, float(gains and not paths.is_certain())])
        if not any_unsure:
            return self.rates or self.costs.flops()
        budget, tokens = (-int(x) for x in least)
        self.rates[kind] = self.measure(budget, tokens, forward_only)
        return self.rates
