"""Prices training steps: rows -> groups on ranks and in mini-batches, as `trainer` places them -> passes -> seconds.

What `plan` shows; under a trainer other than `prefix_sync` a rank holds less of a group, and shares less. Pure
functions of lengths; the config is read, not built.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from verl_prefix.auto.calibration import Profile
from verl_prefix.auto.chooser import CostModel, Decision, decide, price
from verl_prefix.auto.cost import PassCost, Rates, peak_bytes, plan_passes, stock_passes
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.core.waves import Plan, make_plan
from verl_prefix.trainer.placement import place

SEED = 0
NUM_STEPS, NUM_ROWS = 4, 4000  # training steps that are priced, fewer where they have as many rows
PATHS = ("auto", "packed", "phased")
PASSES = ("update", "old", "ref")


@dataclass(frozen=True)
class MicroBatch:
    """The size of one pass of verl's: so many tokens, or, where they are None, so many rows."""

    tokens: int | None
    rows: int = 1

    def budget(self, groups: list[Group]) -> int:
        """Tokens of a pass over rows of `groups`."""
        return self.tokens or self.rows * max(g.prefix_len + 1 + max(g.suffix_lens) for g in groups)


@dataclass(frozen=True)
class Sizes:
    """One training step by its config; `micro_batches`: those of update, old and ref, which the actor's engine computes
    too where it has LoRA."""

    prompts: int
    rollouts: int
    mini_batches: int
    ranks: int
    micro_batches: dict[str, MicroBatch]
    ref_in_actor: bool = False


def _bins(size: Sizes, prompts: list[int], suffixes: list[int]) -> list[list[list[Group]]]:
    """[rank][mini-batch] -> groups, as the prefix_sync trainer places them."""
    keys = [i for i in range(size.prompts) for _ in range(size.rollouts)]
    prefixes = [prompts[i] - 1 for i in keys]
    order = place(keys, prefixes, suffixes, size.ranks, size.mini_batches).order
    per_bin = len(order) // (size.ranks * size.mini_batches)
    found: list[list[list[Group]]] = []
    for start in range(0, len(order), per_bin):
        members: dict[int, list[int]] = {}
        for row in order[start : start + per_bin]:
            members.setdefault(keys[row], []).append(row)
        groups = [
            Group(tuple(rows), prefixes[rows[0]], tuple(suffixes[row] for row in rows)) for rows in members.values()
        ]
        if start // per_bin % size.mini_batches == 0:
            found.append([])
        found[-1].append(groups)
    return found


class Predictor:
    """Prices training steps.

    Attributes:
        seconds: {path: {pass: total}}, in seconds if the rates are measured. peaks: {path: bytes that an update adds}.
        bins, logical, physical, packed, phased: groups per rank and mini-batch; tokens and groups of the path in use.
        first: groups of the first mini-batch on the rank where it costs stock most.
    """

    def __init__(self, config: Any, shape: ModelShape) -> None:
        options, model = config.actor.prefix, config.model
        self.schedule: str = options.schedule
        self.checkpointed = bool(model.enable_gradient_checkpointing)
        dense = (model.get("override_config") or {}).get("attn_implementation") in ("sdpa", "eager")
        self.costs = CostModel(
            shape=shape, dense_mask=dense, logits_chunk=options.logits_chunk, wave_tokens=options.wave_tokens,
            offload=options.offload, min_speedup=options.min_speedup,
        )  # fmt: skip
        # One backward is two forwards; checkpointing runs the layers, not lm_head, forward once more.
        layers = 4.0 if self.checkpointed else 3.0
        forward, update = Rates(linear=1.0, attention=1.0, head=1.0), Rates(linear=layers, attention=layers, head=3.0)
        self.profile, path = Profile(forward, update), options.cost_profile and Path(options.cost_profile)
        read = Profile.read(path) if path and path.exists() else Profile()
        self.measured = read.forward is not None and read.update is not None  # one kind alone goes with no FLOPs
        if self.measured:
            self.profile = read
        self.seconds = {path: dict.fromkeys(PASSES, 0.0) for path in (*PATHS, "stock")}
        self.peaks = dict.fromkeys(self.seconds, 0.0)
        self.bins: list[float] = []
        self.first: list[Group] = []
        self.logical = self.physical = self.packed = self.phased = 0

    def decide(
        self, ranks: list[list[Group]], budgets: list[int], log_probs: Decision | None = None, ref_engine: bool = False
    ) -> tuple[Decision, list[Plan | None]]:
        """The decision of the engine's chooser on a batch, and each rank's plan (None: verl's own path).

        Args:
            ref_engine: by the engine of the ref policy, which measures no update.
        """
        profile = Profile(self.profile.forward) if ref_engine and not self.measured else self.profile
        prices = [price(self.costs, groups, budget, profile) for groups, budget in zip(ranks, budgets, strict=True)]
        slowest = [max(seconds) for seconds in zip(*(one.seconds for one in prices), strict=True)]
        decision = decide(slowest, self.costs.min_speedup, log_probs)
        return decision, [None if decision.stock else one.packed if decision.packed else one.mixed for one in prices]

    def _price(
        self, name: str, ranks: list[list[Group]], budgets: list[int], auto: list[Plan | None]
    ) -> dict[str, list[Plan | None]]:
        """Adds the seconds of one of `PASSES` to every path's, until its last rank is done; returns their plans."""
        shape, update = self.costs.shape, name == "update"
        rates = self.profile.update if update else self.profile.forward
        assert rates is not None
        stock = [rates.seconds(shape, self._stock(*pair)) for pair in zip(ranks, budgets, strict=True)]
        balanced = sum(stock) / len(stock)  # verl balances rows over ranks, so that its ranks share the sum
        plans: dict[str, list[Plan | None]] = {"auto": auto, "stock": [None] * len(ranks)}
        for path in ("packed", "phased"):
            plans[path] = [
                make_plan(groups, budget, path, self.costs.wave_tokens, self.costs.offload)
                for groups, budget in zip(ranks, budgets, strict=True)
            ]
        for path, found in plans.items():
            passes = [plan_passes(shape, plan, self.costs.logits_chunk if update else None) for plan in found if plan]
            self.seconds[path][name] += max((rates.seconds(shape, p) for p in passes), default=balanced)
        return plans

    def _stock(self, groups: list[Group], budget: int) -> list[PassCost]:
        return stock_passes(self.costs.shape, groups, budget, self.costs.dense_mask)

    def infer(self, name: str, ranks: list[list[Group]], budgets: list[int], ref_engine: bool = False) -> Decision:
        """Log-probs of a training step's rows: "old" or "ref"; by an engine of its own if `ref_engine`."""
        decision, plans = self.decide(ranks, budgets, ref_engine=ref_engine)
        self._price(name, ranks, budgets, plans)
        return decision

    def update(self, ranks: list[list[Group]], budgets: list[int], log_probs: Decision) -> None:
        """One mini-batch, after the old log-probs were decided on."""
        if not self.first:
            self.first = max(ranks, key=lambda groups: sum(group.num_logical_tokens for group in groups))
        plans = self._price("update", ranks, budgets, self.decide(ranks, budgets, log_probs)[1])
        for path, found in plans.items():
            for groups, budget, plan in zip(ranks, budgets, found, strict=True):
                added = peak_bytes(
                    self.costs.shape, plan, self._stock(groups, budget), self.checkpointed, self.costs.logits_chunk
                )
                self.peaks[path] = max(self.peaks[path], added)
        for groups, plan in zip(ranks, plans[self.schedule], strict=True):
            logical = sum(group.num_logical_tokens for group in groups)
            self.bins.append(float(len(groups)))
            self.logical += logical
            self.physical += logical if plan is None else plan.num_physical_tokens
            if plan is not None:
                self.packed += sum(len(planned.groups) for planned in plan.packed)
                self.phased += sum(len(planned.groups) for planned in plan.phased)


def predict(config: Any, size: Sizes, shape: ModelShape, lengths: list[int], responses: Iterator[int]) -> Predictor:
    """The `Predictor` after some training steps on prompts drawn from `lengths`; config: `actor_rollout_ref`."""
    predictor, draw = Predictor(config, shape), Random(SEED)
    num_rows = size.prompts * size.rollouts
    for _ in range(max(1, min(NUM_STEPS, NUM_ROWS // num_rows))):
        prompts = draw.choices(lengths, k=size.prompts)
        bins = _bins(size, prompts, list(islice(responses, num_rows)))
        whole = [[group for groups in rank for group in groups] for rank in bins]
        budgets = {name: [size.micro_batches[name].budget(groups) for groups in whole] for name in ("old", "ref")}
        log_probs = predictor.infer("old", whole, budgets["old"])
        predictor.infer("ref", whole, budgets["ref"], ref_engine=not size.ref_in_actor)
        for k in range(size.mini_batches):
            ranks = [rank[k] for rank in bins]
            predictor.update(ranks, [size.micro_batches["update"].budget(groups) for groups in ranks], log_probs)
    return predictor
