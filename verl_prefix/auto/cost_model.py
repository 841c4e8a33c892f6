"""What a run's paths cost: plans and verl's own passes, in seconds by measured rates or by FLOPs, and in memory."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from verl_prefix.auto.cost import Memory, Rates, peak_bytes
from verl_prefix.auto.pipeline import Round, Timeline, Work, timeline
from verl_prefix.auto.shape import ModelShape, PassCost
from verl_prefix.core.groups import Group
from verl_prefix.core.plan import PackedPass, Plan
from verl_prefix.core.planning import leaves_room, limit_waves, make_plan, prefix_room

# A wave of so many tokens hides its fixed cost: FSDP2 gathers, copies and reduces all parameters, and gradients of all
# prefix tokens are added up. That takes as long as 400 tokens on 8 H100s (simulated: Llama3-8B).
LONG_WAVE = 8192
# Short passes fill a pipeline of several stages better. But each pass costs something there beside its tokens: as much
# as SHORT tokens, and TRAFFIC bytes for each parameter of a rank's experts. In the time of one such byte a device
# computes FLOPS_PER_BYTE. These numbers are of simulations on H100s (Qwen3-8B, -32B, -30B-A3B and -235B-A22B,
# DeepSeek-V3). SHORTEST is the least budget. SHORT and SHORTEST are tokens of each rank that shares a pass.
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
        update's estimated peak. With offload, and without a `wave_tokens` that fits the budget, waves of an update
        have at most `OFFLOAD_WAVE` tokens on each rank.

        On a pipeline of several stages the budget is halved, down to `SHORTEST` tokens on each rank that shares a pass,
        as long as the plan takes no longer by that. A stage keeps only its part of the layers, so several prefixes may
        live together. They are as many as keep the estimated memory of an update within that of one pass of the whole
        budget with all layers. Every rank chooses for itself."""
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
            rates: of each kind.
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
