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

from verl_prefix.auto.cost import ModelShape, Pass, Profile, Rates, peak_bytes, plan_passes, stock_passes
from verl_prefix.core import waves
from verl_prefix.core.groups import Group
from verl_prefix.trainer.placement import place

SEED = 0
NUM_STEPS, NUM_ROWS = 4, 4000  # training steps that are priced, fewer where they have as many rows
PATHS = ("auto", "packed", "phased")


@dataclass(frozen=True)
class MicroBatch:
    """What one pass of verl's holds: so many tokens, or, where they are None, so many rows."""

    tokens: int | None
    rows: int = 1

    def budget(self, groups: list[Group]) -> int:
        """Tokens of a pass over rows of `groups`."""
        return self.tokens or self.rows * max(g.prefix_len + 1 + max(g.suffix_lens) for g in groups)


@dataclass(frozen=True)
class Sizes:
    """What the config says about one training step; `micro_batches`: those of update, old and ref."""

    prompts: int
    rollouts: int
    mini_batches: int
    ranks: int
    micro_batches: dict[str, MicroBatch]


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


@dataclass(frozen=True)
class PricedPath:
    """One way to compute a mini-batch: seconds until its last rank is done, and each rank's plan (None: verl's)."""

    seconds: float
    plans: list[waves.Plan | None]


class Predictor:
    """Prices training steps.

    Attributes:
        seconds: {path: {pass: total}}, in seconds if the rates are measured. peaks: {path: bytes that an update adds}.
        bins, logical, physical, packed, phased: groups per rank and mini-batch; tokens and groups of the path in use.
    """

    def __init__(self, config: Any, shape: ModelShape) -> None:
        self.options, self.shape = config.actor.prefix, shape
        model = config.model
        self.checkpointed = bool(model.enable_gradient_checkpointing)
        self.dense = (model.get("override_config") or {}).get("attn_implementation") in ("sdpa", "eager")
        # One backward is two forwards; checkpointing runs the layers, not lm_head, forward once more.
        layers = 4.0 if self.checkpointed else 3.0
        forward, update = Rates(linear=1.0, attention=1.0, head=1.0), Rates(linear=layers, attention=layers, head=3.0)
        profile = self.options.cost_profile and Path(self.options.cost_profile)
        self.measured = bool(profile and profile.exists())
        if self.measured:
            measured = Profile.read(profile)
            forward, update = measured.forward or forward, measured.update or update
        self.rates = {"update": update, "old": forward, "ref": forward}
        self.seconds = {path: dict.fromkeys(self.rates, 0.0) for path in (*PATHS, "stock")}
        self.peaks = dict.fromkeys(self.seconds, 0.0)
        self.bins: list[float] = []
        self.logical = self.physical = self.packed = self.phased = 0

    def _paths(self, name: str, ranks: list[list[Group]], budgets: list[int]) -> dict[str, PricedPath]:
        """Every path's price, that of auto as `auto.chooser.Gate.choose` takes it."""
        options, rates = self.options, self.rates[name]

        def path(schedule: str) -> PricedPath:
            plans = [
                waves.make_plan(groups, budget, schedule, options.wave_tokens, options.offload)
                for groups, budget in zip(ranks, budgets, strict=True)
            ]
            return PricedPath(max(rates.seconds(self.shape, plan_passes(self.shape, plan)) for plan in plans), plans)

        stock = [rates.seconds(self.shape, self._stock(*pair)) for pair in zip(ranks, budgets, strict=True)]
        # verl balances rows over ranks, so that its ranks share the sum.
        found = {"stock": PricedPath(sum(stock) / len(stock), [None] * len(ranks))}
        found |= {"packed": path("packed"), "phased": path("phased")}
        auto = path("auto")
        if options.min_speedup:
            auto = min(auto, found["packed"], key=lambda p: p.seconds)
            auto = found["stock"] if max(stock) / auto.seconds < options.min_speedup else auto
        return found | {"auto": auto}

    def _stock(self, groups: list[Group], budget: int) -> list[Pass]:
        return stock_passes(self.shape, groups, budget, self.dense)

    def infer(self, name: str, ranks: list[list[Group]], budgets: list[int]) -> None:
        """Log-probs of a training step's rows: "old" or "ref"."""
        for path, priced in self._paths(name, ranks, budgets).items():
            self.seconds[path][name] += priced.seconds

    def update(self, ranks: list[list[Group]], budgets: list[int]) -> None:
        """One mini-batch."""
        paths = self._paths("update", ranks, budgets)
        for name, path in paths.items():
            self.seconds[name]["update"] += path.seconds
            for groups, budget, plan in zip(ranks, budgets, path.plans, strict=True):
                added = peak_bytes(
                    self.shape, plan, self._stock(groups, budget), self.checkpointed, self.options.logits_chunk
                )
                self.peaks[name] = max(self.peaks[name], added)
        for groups, plan in zip(ranks, paths[self.options.schedule].plans, strict=True):
            logical = sum(group.num_logical_tokens for group in groups)
            self.bins.append(float(len(groups)))
            self.logical += logical
            self.physical += logical if plan is None else plan.num_physical_tokens
            for work in plan.works if plan else ():
                self.packed += len(work.groups) if work.waves is None else 0
                self.phased += len(work.groups) if work.waves is not None else 0


def predict(config: Any, size: Sizes, shape: ModelShape, lengths: list[int], responses: Iterator[int]):
    """The `Predictor` after some training steps on prompts drawn from `lengths`; config: `actor_rollout_ref`."""
    found, draw = Predictor(config, shape), Random(SEED)
    num_rows = size.prompts * size.rollouts
    for _ in range(max(1, min(NUM_STEPS, NUM_ROWS // num_rows))):
        prompts = draw.choices(lengths, k=size.prompts)
        bins = _bins(size, prompts, list(islice(responses, num_rows)))
        for k in range(size.mini_batches):
            ranks = [rank[k] for rank in bins]
            found.update(ranks, [size.micro_batches["update"].budget(groups) for groups in ranks])
        whole = [[group for groups in rank for group in groups] for rank in bins]
        for name in ("old", "ref"):
            found.infer(name, whole, [size.micro_batches[name].budget(groups) for groups in whole])
    return found
