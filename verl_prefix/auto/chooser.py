"""schedule=auto: the cheapest path for a batch (stock, packed, or a mix with phases), the same on every rank.

Sharing short prompts can cost more than it saves. What a path costs is predicted by `cost`: with rates measured on this
model and device, or with FLOPs where no rates would choose otherwise. The engine asks a `Chooser`, which asks
`Candidates` and `decide`; `verl-prefix plan` asks these two for every rank of a run.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from verl_prefix.auto.cost import Memory, Rates, peak_bytes
from verl_prefix.auto.pipeline import Round, Timeline, Work, timeline
from verl_prefix.auto.shape import ModelShape, PassCost
from verl_prefix.core.groups import Group
from verl_prefix.core.plan import PackedPass, Plan
from verl_prefix.core.planning import leaves_room, limit_waves, make_plan, prefix_room

# A wave of so many tokens hides its fixed cost: FSDP2 gathers, copies and reduces all parameters, and gradients of all
# prefix tokens are added up. That takes as long as 400 tokens on 8 H100s (simulated: Llama3-8B).
LONG_WAVE = 8192
# Short passes fill a pipeline of several stages better. What a pass costs there beside its tokens is, by simulations on
# H100s (Qwen3-8B, -32B, -30B-A3B and -235B-A22B, DeepSeek-V3): as much as SHORT tokens; and TRAFFIC bytes for each
# parameter of a rank's experts, in each of which a device computes FLOPS_PER_BYTE. SHORTEST is the least budget. Tokens
# are of each rank that shares a pass.
SHORT, TRAFFIC, FLOPS_PER_BYTE, SHORTEST = 128, {"forward": 2, "update": 10}, 240, 2048
# With offload, which is for memory, waves are half as long. That costs a fortieth of an update's time (also simulated).
OFFLOAD_WAVE = 4096
# What longer waves may add to the estimated peak of an update.
GROWTH = 1 / 8


@dataclass(frozen=True)
class CostModel:
    """The facts of a run that decide between paths.

    Attributes:
        shape: of the model. memory: what updates keep at least.
        dense_mask, one_row: of verl's own path, see `ModelShape.stock_passes`.
        wave_tokens: of `PrefixConfig`.
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
        return self.shape.stock_passes(groups, budget, dense_mask=self.dense_mask, one_row=self.one_row)

    def plan(self, groups: Sequence[Group], budget: int, schedule: str, forward_only: bool = False) -> Plan:
        """A rank's plan by one schedule: "packed", "phased" or "auto", see `planning.make_plan`.

        Waves for which the budget leaves little are made longer: up to `LONG_WAVE` tokens on each rank that shares one,
        but not over the budget or `wave_tokens`. This length is halved until longer waves add at most `GROWTH` to the
        update's estimated peak. With offload, and `wave_tokens` None, waves of an update have at most `OFFLOAD_WAVE`
        tokens on each rank.

        On a pipeline of several stages the budget is halved, down to `SHORTEST`, as long as shorter passes make its
        stages wait less. A stage keeps its part of the layers alone: prefixes of so many passes live together that
        an update is estimated to add no more than one pass of the whole budget would with all layers. Every rank
        chooses for itself."""
        return self.timed_plan(groups, budget, schedule, forward_only)[0]

    def timed_plan(
        self, groups: Sequence[Group], budget: int, schedule: str, forward_only: bool
    ) -> tuple[Plan, Timeline | None]:
        """`plan`, and what it takes by FLOPs; None with one stage, where nothing depends on it."""
        whole = budget
        best, time = self._plan(groups, budget, schedule, forward_only, budget), None
        if self.memory.stages == 1:
            return best, time
        kind, rates = "forward" if forward_only else "update", self.flops()
        time = self.timeline(best, kind, rates)
        while (budget := budget // 2) >= SHORTEST * self.memory.slices:
            shorter = self._plan(groups, budget, schedule, forward_only, whole)
            if shorter.passes == best.passes:
                continue
            took = self.timeline(shorter, kind, rates)
            if took.seconds > time.seconds:
                break
            best, time = shorter, took
        return best, time

    def _at_once(self, plan: Plan, room: int, budget: int) -> Plan:
        """The plan of a pipeline in as few rounds as keep no more on a stage than a pass of the whole budget, with all
        layers, would; prefixes of `room` tokens with all layers always fit."""
        memory, num = self.memory, len(plan.phased)
        if memory.stages == 1 or memory.offload or not plan.phased:
            return plan
        longest = max(sum(group.num_own_strand_tokens for group in one.groups) for one in plan.phased)
        least = memory.stages * max(room, longest) // max(longest, 1)
        most = peak_bytes(self.shape, Plan((PackedPass((Group.of_prompt((0,), 0, (budget,)),)),)), (), memory)

        def of(rounds: int) -> Plan:
            return replace(plan, at_once=-(-num // rounds))

        fewer = range(1, -(-num // least))  # than what always fits
        return of(1 + bisect_left(fewer, True, key=lambda n: peak_bytes(self.shape, of(n), (), memory) <= most))

    def _plan(self, groups: Sequence[Group], budget: int, schedule: str, forward_only: bool, whole: int) -> Plan:
        """`plan` by one budget of `whole` and its halves."""
        memory = self.memory
        room = prefix_room(whole, self.wave_tokens, memory.offload)

        def make(least_wave: int = 1) -> Plan:
            made = make_plan(groups, budget, schedule, self.wave_tokens, memory.offload, least_wave, memory.stages == 1)
            return self._at_once(made, room, whole)

        plan = make()
        if not plan.waves:  # which alone `make` can make longer
            return plan
        if memory.offload:
            is_set = self.wave_tokens is not None and leaves_room(self.wave_tokens, budget, offload=True)
            return plan if forward_only or is_set else limit_waves(plan, OFFLOAD_WAVE * memory.slices)
        most = (1 + GROWTH) * peak_bytes(self.shape, plan, (), memory)
        tokens = min(LONG_WAVE * memory.slices, budget)
        while (longer := make(least_wave=tokens)) != plan:
            if peak_bytes(self.shape, longer, (), memory) <= most:
                return longer
            tokens //= 2
        return plan

    @property
    def _layers(self) -> float:
        """Forward, backward of twice its FLOPs, and under checkpointing another forward, over forward."""
        return 4.0 if self.memory.checkpointed else 3.0

    def flops(self) -> dict[str, Rates]:
        """Rates that count FLOPs: backward is two forwards; checkpointing runs the layers, not lm_head, once more."""
        layers, memory = {"forward": 1.0, "update": self._layers}, self.memory

        def fixed(kind: str) -> float:
            if not (division := memory.division) or division.stages == 1:
                return 0.0
            experts = self.shape.expert_parameters / (division.experts * division.expert_tensor)
            traffic = TRAFFIC[kind] * FLOPS_PER_BYTE * experts * division.tensor  # FLOPs are of all these ranks
            return memory.slices * (layers[kind] * SHORT * self.shape.linear + traffic)

        amounts = {"forward": (1.0, 1.0, 1.0), "update": (self._layers, self._layers, 3.0)}
        return {kind: Rates(*(x * 1e-12 for x in (fixed(kind), *of))) for kind, of in amounts.items()}

    def timeline(self, path: Plan | Sequence[PassCost], kind: str, rates: Mapping[str, Rates]) -> Timeline:
        """What a path takes, on all stages of a pipeline.

        Args:
            path: a plan, or stock's passes. kind: "forward", of log-probs, or "update".
        """
        if self.memory.stages == 1:
            chunk = self.memory.pass_chunk if kind == "update" else None
            passes = self.shape.passes_of(path, chunk) if isinstance(path, Plan) else path
            return Timeline((rates[kind].seconds(self.shape, passes),), 0.0)
        return timeline(self.rounds(path, kind, rates), self.memory.stages, kind == "forward")

    def rounds(
        self, path: Plan | Sequence[PassCost], kind: str, rates: Mapping[str, Rates], sent: float = 0.0
    ) -> list[Round]:
        """What the stages of a pipeline run; see `timeline`. sent: seconds of a token's hidden states on the wire."""
        once = 1.0 if kind == "forward" else 1 / self._layers
        of_head = 1.0 if kind == "forward" else 1 / 3

        def works(passes: Sequence[PassCost]) -> list[Work]:
            parts = ((*rates[kind].parts(self.shape, one), one.tokens * sent) for one in passes)
            return [Work(x * once, x * (1 - once), y * of_head, y * (1 - of_head), wire) for x, y, wire in parts]

        if not isinstance(path, Plan):
            return [Round((), works(path))]
        rounds, chunk = [], self.memory.pass_chunk if kind == "update" else None
        packed = self.shape.passes_of(replace(path, passes=(*path.packed,)), chunk)
        for phased in path.rounds:
            each = [self.shape.passes_of(Plan((one,)), chunk) for one in phased]
            waves = [wave for _, *waves in each for wave in waves]
            rounds.append(Round(works([prefix for prefix, *_ in each]), works([*packed, *waves])))
            packed = []
        return rounds


class Batch(NamedTuple):
    """A rank's rows in groups, and `budget`, the physical tokens of one pass over them."""

    groups: Sequence[Group]
    budget: int


class Decision(NamedTuple):
    """The choice, the same on every rank.

    Attributes:
        stock: the batch takes the stock path.
        packed: if it does not, packed passes alone are cheaper than the mix.
        speedup: predicted seconds of stock over those of the cheaper of our two.
    """

    stock: bool
    packed: bool
    speedup: float


class Candidates:
    """One rank's paths for a batch: stock's passes, and two sharing plans.

    Args:
        batch: what this rank computes where rows share.
        own: what verl's path would compute here, where `batch` are rows that came from other ranks; None: the same.

    Attributes:
        stock: passes of verl's own path. stock_runs: False where a row is longer than the budget, which verl refuses
            (rearrange_micro_batches).
        mixed: the plan that is packed where a whole group fits the budget, and phased where it does not.
        packed: the plan that cuts such groups.
    """

    def __init__(self, costs: CostModel, batch: Batch, own: Batch | None = None, forward_only: bool = False) -> None:
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
        stages each of the two has a plan of its own, and FLOPs count, whatever the rates are."""
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
        log_probs: for an update, the decision on the log-probs before it. The update takes the stock path if and only
            if they did, since old log-probs and update must round alike.
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
        speedup: predicted for the last batch; None: there was none, or the stock path alone computes any of it.
        log_probs: the last decision on log-probs, which updates follow; None: there was none.
    """

    costs: CostModel
    rates: dict[str, Rates]
    measure: Callable[[int, int, bool], Rates]
    reduce_max: Callable[[Sequence[float]], Sequence[float]]
    stock_fits: Callable[[Sequence[PassCost]], bool] = lambda passes: True
    speedup: float | None = field(default=None, init=False)
    log_probs: Decision | None = field(default=None, init=False)

    def choose(
        self, groups: Sequence[Group], budget: int, forward_only: bool, own: Batch | None = None, leads: bool = True
    ) -> Plan | None:
        """This rank's plan; None: the stock path. A model without lm_head gains by sharing alone: a batch in which no
        rank's rows share takes the stock path, and nothing is measured for it.

        Args:
            own: see `Candidates`.
            leads: updates follow what is decided of these log-probs.
        """
        if not self.costs.min_speedup:
            return self.costs.plan(groups, budget, "auto", forward_only)
        batch = Batch(groups, budget)
        paths = Candidates(self.costs, batch, own, forward_only)
        gains = self.costs.shape.head > 0 or any(group.is_shared for group in groups)
        rates = self._known_rates(paths, own or batch, forward_only, gains)
        lacks_room = float(not (paths.stock_runs and self.stock_fits(paths.stock)))
        *seconds, any_gains, lacks_room = self.reduce_max([*paths.seconds(rates), float(gains), lacks_room])
        least = self.costs.min_speedup if any_gains else math.inf
        decision = decide(seconds, least, None if forward_only else self.log_probs, not lacks_room)
        if forward_only and leads:
            self.log_probs = decision
        stock, *shared = seconds
        self.speedup = None if stock and not min(shared) else decision.speedup  # None: dead rows alone, which stock has
        return paths.taken(decision)

    def _known_rates(self, paths: Candidates, own: Batch, forward_only: bool, gains: bool) -> dict[str, Rates]:
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
