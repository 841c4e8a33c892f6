"""Prices training steps: rows -> mini-batches of ranks, as verl's trainer deals them -> groups of ranks, as the engine
exchanges rows -> passes -> seconds.

All follows from lengths and the config; no engine and no trainer is built.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any

import torch
from verl.trainer.ppo import padding_utils
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_prefix.auto.chooser import Candidates, Decision, Workload, decide
from verl_prefix.auto.cost import PassCost, peak_bytes
from verl_prefix.auto.cost_model import CostModel
from verl_prefix.auto.megatron import State
from verl_prefix.auto.placement import place_rows, row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.config.engines import attention_of, engine_of
from verl_prefix.config.model import is_varlen
from verl_prefix.core.groups import Group
from verl_prefix.core.plan import Plan
from verl_prefix.tools.plan.training_command import Model, Prompt
from verl_prefix.tools.simulate.command import memory_of_engine, state_of_megatron
from verl_prefix.trainer.mini_batches import fill_mini_batches

SEED = 0
PADDING_TOKENS = getattr(padding_utils, "SYNTHETIC_PADDING_SEQ_LEN", 2)  # of a row; 2 in verl's main branch
NUM_STEPS, NUM_ROWS = 4, 4000  # training steps that are priced, fewer where they have as many rows
PATHS = ("auto", "packed", "phased")
PASSES = ("update", "old", "ref")
Batches = list[tuple[Workload, Workload]]  # of each rank: what it computes, and what verl's own path would


@dataclass(frozen=True)
class MicroBatch:
    """The size of one pass of verl's: so many tokens, or, where they are None, so many rows."""

    tokens: int | None
    rows: int = 1

    def budget(self, groups: Sequence[Group]) -> int:
        """Tokens of a pass over rows of `groups`."""
        return self.tokens or self.rows * max((end + 1 for group in groups for end in group.row_ends), default=1)


@dataclass(frozen=True)
class Sizes:
    """One training step by its config.

    Attributes:
        prompts: of a step. rollouts: of a prompt. mini_batches: of a step.
        ranks: that compute data in parallel, each of `slices` GPUs that cut rows, or of `tensor_ranks` that
            have the same ones; in a ref engine of `ref_slices`.
        micro_batches: of the update, and of old and ref log-probs.
        ref_in_actor: the actor's engine computes ref log-probs, as it does with LoRA.
        whole: the trainer keeps a prompt's rows in one mini-batch; by_prompts: those of its turns too.
        exchange: rows travel to the rank that computes their prompt.
    """

    prompts: int
    rollouts: int
    mini_batches: int
    ranks: int
    micro_batches: dict[str, MicroBatch]
    ref_in_actor: bool = False
    whole: bool = True
    by_prompts: bool = False
    exchange: bool = True
    slices: int = 1
    ref_slices: int = 1
    tensor_ranks: int = 1

    @property
    def gpus(self) -> int:
        return self.ranks * self.slices * self.tensor_ranks


@dataclass(frozen=True)
class Step:
    """The rows of one training step, of all ranks.

    Attributes:
        keys: of each row which prompt it has; None: padding. prefixes, suffixes: tokens of each row.
        grids: of each row what it shows a vision model, see `Prompt`; empty: nothing.
        dead: keys of groups without advantage, which our updates leave out.
    """

    size: Sizes
    shape: ModelShape
    keys: Sequence[int | None]
    prefixes: list[int]
    suffixes: list[int]
    grids: Sequence[tuple[tuple[int, int, int], ...]] = ()
    dead: frozenset[int | None] = frozenset()

    def dealt(self) -> list[list[list[int]]]:
        """[rank][mini-batch] -> rows, as the trainer deals them."""
        ranks, steps = self.size.ranks, self.size.mini_batches
        if self.size.whole:
            return [list(rank) for rank in zip(*(self._balanced(rows) for rows in self.filled()), strict=True)]
        size = len(self.keys) // ranks // steps
        balanced = self._balanced(list(range(len(self.keys))))
        return [[rows[k * size : (k + 1) * size] for k in range(steps)] for rows in balanced]

    def filled(self) -> list[list[int]]:
        """Rows of each mini-batch, of a trainer that keeps groups whole."""
        return fill_mini_batches(self.keys, self.size.mini_batches)

    def dealt_to_ref(self, ranks: list[list[int]]) -> list[list[int]]:
        """The same rows in the same order, cut for the ranks of the ref engine."""
        rows = [row for rank in ranks for row in rank]
        size = -(-len(rows) * self.size.ref_slices * self.size.tensor_ranks // self.size.gpus)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _balanced(self, rows: list[int]) -> list[list[int]]:
        lens = torch.tensor([self.prefixes[row] + 1 + self.suffixes[row] for row in rows])
        parts = get_seqlen_balanced_partitions(calculate_workload(lens), self.size.ranks, equal_size=True)
        return [[rows[i] for i in part] for part in parts]

    def groups(self, ranks: list[list[int]], dead: Set[int | None] = frozenset()) -> list[tuple[list[Group], ...]]:
        """Of the rows of each rank: the groups that it computes, and those that verl's own path would."""
        return list(zip(self.computed(ranks, self.size.exchange, dead), self.computed(ranks, False), strict=True))

    def batches(self, groups: list[tuple[list[Group], ...]], name: str) -> Batches:
        """Arguments of `Predictor.add`, of what `groups` returned."""
        budget = self.size.micro_batches[name].budget
        return [(Workload(ours, budget(ours)), Workload(own, budget(own))) for ours, own in groups]

    def computed(
        self, ranks: list[list[int]], exchange: bool, dead: Set[int | None] = frozenset()
    ) -> list[list[Group]]:
        """Groups of each rank, of the rows that it has, or that the engine's exchange brings it, but for `dead`."""
        rows = [row for rank in ranks for row in rank]
        home = [i for i, rank in enumerate(ranks) for _ in rank]
        if exchange and len(ranks) > 1:
            costs = (
                (0.0, 0.0) if self.keys[row] in dead else row_cost(self.shape, self.prefixes[row], self.suffixes[row])
                for row in rows
            )
            prefix_costs, suffix_costs = zip(*costs, strict=True)
            keys = [self.keys[row] for row in rows]
            home = place_rows(keys, prefix_costs, suffix_costs, ranks=home, num_ranks=len(ranks)).ranks
        members: list[dict[int | None, list[int]]] = [{} for _ in ranks]
        for row, rank in zip(rows, home, strict=True):
            members[rank].setdefault(self.keys[row], []).append(row)
        return [
            [Group.of_prompt(tuple(same), self.prefixes[same[0]], tuple(self.suffixes[row] for row in same))
             for key, same in groups.items() if key not in dead]
            for groups in members
        ]  # fmt: skip


class Predictor:
    """Prices training steps.

    Attributes:
        seconds: {path: {pass: total}}, at rates that count FLOPs. peaks: {path: bytes that an update adds}.
        bubbles: {path: the part of an update that stages of a pipeline wait, on the worst rank}.
        bins, logical, packed, phased: groups per rank and mini-batch; tokens; groups of the path in use.
        computed: {pass: tokens that the path in use computes}. resident_gib: of a rank, weights, gradients and moments
            in an update; idle_gib: of these, what stays on the device when the engine's turn is over.
        decisions: of `schedule=auto`, on the old log-probs of every training step, which its updates follow; in bypass
            mode, where there are none, on its updates.
        first: groups of the first mini-batch on the rank that has most tokens of rows after the exchange, without dead
            groups; shown: what their prompts show.
        physical_without: tokens that sharing would compute if rows did not travel between ranks.
    """

    def __init__(self, config: Any, size: Sizes, model: Model) -> None:
        options = config.actor.prefix
        self.schedule: str = options.schedule
        self.memory = memory_of_engine(config, size.gpus)
        self.stock_memory = replace(self.memory, stock_offloads=bool(config.model.get("enable_activation_offload")))
        dense = not is_varlen(attention_of(config.actor, config.model)[1])

        def min_speedup(slices: int) -> float:
            """0 where verl's own path would be `StockFacts.wrong_when_sharded`, which `auto` never takes."""
            return 0 if slices > 1 and model.spread else options.min_speedup

        # Over the ranks that share it: weights, gradients and AdamW's moments.
        state = State(*(x / self.memory.ranks for x in model.state))
        if division := self.memory.division:
            state = state_of_megatron(config, division, model.shape)
        self.resident_gib = sum(state) / 2**30
        # verl frees gradients behind an update, but for Megatron's buffers, which move with the weights.
        section = config.actor[engine_of(config.actor).section]
        weights = state.parameters + (state.gradients if division else 0)
        idle = weights * (not section.get("param_offload")) + state.optimizer * (not section.get("optimizer_offload"))
        self.idle_gib = idle / 2**30
        self.costs = CostModel(
            shape=model.shape, dense_mask=dense, wave_tokens=options.wave_tokens,
            min_speedup=min_speedup(size.slices), memory=self.memory, one_row=model.leak is not None,
        )  # fmt: skip
        self.ref_costs = replace(
            self.costs, memory=replace(self.memory, slices=size.ref_slices),
            min_speedup=min_speedup(size.ref_slices),
        )  # fmt: skip
        self.rates = self.costs.flops()
        self.seconds = {path: dict.fromkeys(PASSES, 0.0) for path in (*PATHS, "stock")}
        self.peaks = dict.fromkeys(self.seconds, 0.0)
        self.bubbles = dict.fromkeys(self.seconds, 0.0)
        self.bins: list[float] = []
        self.decisions: list[Decision] = []
        self.first: Sequence[Group] = []
        self.shown: list[tuple[tuple[int, int, int], ...]] = []
        self.logical = self.packed = self.phased = self.physical_without = 0
        self.computed = dict.fromkeys(PASSES, 0)

    @property
    def gains(self) -> dict[str, dict[str, float]]:
        """{path: {pass: speed-up over stock}}."""
        stock = self.seconds["stock"]
        return {path: {name: stock[name] / ours[name] for name in stock} for path, ours in self.seconds.items()}

    def decide(
        self, batches: Batches, log_probs: Decision | None = None, ref_engine: bool = False, forward_only: bool = False
    ) -> tuple[Decision, list[Plan | None]]:
        """The decision of the engine's chooser on a batch, and each rank's plan (None: verl's own path).

        Args:
            ref_engine: by the engine of the ref policy, which measures no update.
        """
        rates = {"forward": self.rates["forward"]} if ref_engine else self.rates
        costs = self.ref_costs if ref_engine else self.costs
        paths = [Candidates(costs, batch, own, forward_only) for batch, own in batches]
        slowest = [max(seconds) for seconds in zip(*(one.seconds(rates) for one in paths), strict=True)]
        runs = all(one.stock_runs for one in paths)
        decision = decide(slowest, costs.min_speedup, log_probs, stock_fits=runs)
        return decision, [one.taken(decision) for one in paths]

    def add(self, name: str, batches: Batches, log_probs: Decision | None = None, ref_engine: bool = False) -> Decision:
        """Adds to every path the seconds of one of `PASSES`, until its last rank is done: log-probs of a training
        step's rows, or the update of a mini-batch after the old log-probs were decided on; see `decide`."""
        update = name == "update"
        costs, kind = self.ref_costs if ref_engine else self.costs, "update" if update else "forward"
        decision, auto = self.decide(batches, log_probs, ref_engine, not update)
        plans: dict[str, list[Plan | None]] = {"auto": auto, "stock": [None] * len(batches)}
        plans |= {path: [costs.plan(*batch, path, not update) for batch, _ in batches] for path in ("packed", "phased")}
        stock = [self.costs.stock_passes(*own) for _, own in batches]
        # verl balances rows over ranks, so that its ranks share the sum, but of one row each.
        own = [costs.timeline(passes, kind, self.rates) for passes in stock]
        seconds = [one.seconds for one in own]
        rows = max(sum(len(group.rows) for group in batch.groups) for _, batch in batches)
        balanced = sum(seconds) / len(seconds) if rows > 1 else max(seconds)
        for path, of_ranks in plans.items():
            ours = [costs.timeline(plan, kind, self.rates) for plan in of_ranks if plan]
            self.seconds[path][name] += max((one.seconds for one in ours), default=balanced)
            if update:
                self.bubbles[path] = max(self.bubbles[path], *(one.bubble for one in ours or own))
        for (batch, _), plan in zip(batches, plans[self.schedule], strict=True):
            logical = sum(group.num_logical_tokens for group in batch.groups)
            self.computed[name] += logical if plan is None else plan.num_physical_tokens
        if update:
            self._count(batches, plans, stock)
        return decision

    def _count(self, batches: Batches, plans: dict[str, list[Plan | None]], stock: list[list[PassCost]]) -> None:
        """Memory of an update by every path; tokens and groups of the path in use."""
        ranks = [batch.groups for batch, _ in batches]
        logical = [sum(group.num_logical_tokens for group in groups) for groups in ranks]
        self.logical += sum(group.num_logical_tokens for _, own in batches for group in own.groups)
        self.first = self.first or ranks[logical.index(max(logical))]
        for path, of_ranks in plans.items():
            pairs = zip(of_ranks, stock, strict=True)
            memory = self.stock_memory if path == "stock" else self.memory
            added = (peak_bytes(self.costs.shape, plan, passes, memory) for plan, passes in pairs)
            self.peaks[path] = max(self.peaks[path], *added)
        live = {row for groups in ranks for group in groups for row in group.rows}
        self.physical_without += sum(
            group.num_physical_tokens for _, own in batches for group in own.groups if group.rows[0] in live
        )
        self.bins += [float(len(groups)) for groups in ranks]
        for plan in plans[self.schedule]:
            self.packed += sum(len(one.groups) for one in plan.packed) if plan else 0
            self.phased += sum(len(one.groups) for one in plan.phased) if plan else 0


def drawn_steps(
    size: Sizes, shape: ModelShape, prompts: list[Prompt], responses: Iterator[int], padding: int, dead: float = 0.0
) -> list[Step]:
    """Some training steps on prompts drawn from these, whose rows share whole prompts. padding: rows that fill each up.
    dead: share of `Step.dead`."""
    draw, num_rows, steps = Random(SEED), size.prompts * size.rollouts, []
    for _ in range(max(1, min(NUM_STEPS, NUM_ROWS // num_rows))):
        keys = [i for i in range(size.prompts) for _ in range(size.rollouts)]
        drawn = draw.choices(prompts, k=size.prompts)
        prefixes, suffixes = [drawn[i].tokens - 1 for i in keys], list(islice(responses, num_rows))
        left_out = frozenset(draw.sample(range(size.prompts), round(dead * size.prompts)) if dead else ())
        grids = [*(drawn[i].grids for i in keys), *[()] * padding]
        prefixes += [PADDING_TOKENS - 2] * padding
        steps.append(Step(size, shape, [*keys, *[None] * padding], prefixes, suffixes + [1] * padding, grids, left_out))
    return steps


def predict(config: Any, steps: Sequence[Step], model: Model, bypass: bool = False) -> Predictor:
    """The `Predictor` after some training steps. config: `actor_rollout_ref`. bypass: there are no old log-probs, which
    are priced all the same."""
    predictor = Predictor(config, steps[0].size, model)
    for step in steps:
        dealt = step.dealt()
        whole = [[row for rows in rank for row in rows] for rank in dealt]
        groups = step.groups(whole)
        old = predictor.add("old", step.batches(groups, "old"))
        if not step.size.ref_in_actor and (of_ref := step.dealt_to_ref(whole)) != whole:
            groups = step.groups(of_ref)
        predictor.add("ref", step.batches(groups, "ref"), ref_engine=not step.size.ref_in_actor)
        for k in range(step.size.mini_batches):
            groups = step.groups([rank[k] for rank in dealt], step.dead)
            update = predictor.add("update", step.batches(groups, "update"), None if bypass else old)
            predictor.decisions += [update] * bypass
        predictor.decisions += [old] * (not bypass)
        if not predictor.shown:
            rows = [group.rows[0] for group in predictor.first]
            predictor.shown = [step.grids[row] if step.grids else () for row in rows]
    return predictor
