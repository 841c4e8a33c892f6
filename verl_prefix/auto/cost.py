"""FLOP, time and memory model of one rank's batch: which path is the cheapest, and what sharing gains.

A pass is forward and backward of one packed row (phases A and C of a set together count as one). Its time is taken as

    seconds = fixed + linear FLOPs * a + attention FLOPs * b + lm_head FLOPs * c

with four rates that `calibrate` measures on the model at hand in a few small passes, once for forward alone and once
for forward and backward. FLOPs are those of matmuls; norms, rotary angles and the like ride on the rate of the layers.
"""

import dataclasses
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from verl_prefix.core.groups import Group
from verl_prefix.core.waves import Plan, first_fit


@dataclass(frozen=True)
class ModelShape:
    """What a token costs, forward, in FLOPs and bytes (`models.hookup.model_shape`).

    Args:
        linear: FLOPs per token of all layers' matmuls; of a mixture of experts, those of the chosen experts.
        head: FLOPs per token of lm_head. pair: per query-key pair of one layer's attention.
        windows: sliding window of every layer, None where it sees everything.
        activations: bytes per token that one layer keeps for backward. boundary: bytes per token of its input alone.
        kv: bytes per token of all layers' keys and values. vocab_size: logits per token, fp32 and thrice in backward.
    """

    linear: float
    head: float
    pair: float
    windows: tuple[int | None, ...]
    activations: float
    boundary: float
    kv: float
    vocab_size: int

    @functools.cached_property
    def _layers_by_window(self) -> tuple[tuple[int | None, int], ...]:
        return tuple(Counter(self.windows).items())

    def pairs(self, length: int, behind: int) -> float:
        """Query-key pairs of all layers, of `length` queries with `behind` keys before them."""
        return sum(layers * _pairs(length, behind, window) for window, layers in self._layers_by_window)


class Pass(NamedTuple):
    """Tokens through the layers, of those through lm_head, and query-key pairs summed over layers."""

    tokens: int
    head_tokens: int
    pairs: float


def _pairs(length: int, behind: int, window: int | None) -> float:
    """Query-key pairs of `length` queries that see themselves and up to `behind` keys before them."""
    if window is None or behind + length <= window:
        return length * behind + length * (length + 1) / 2
    growing = max(0, min(length, window - behind))  # queries that still see everything
    return growing * behind + growing * (growing + 1) / 2 + (length - growing) * window


def _group_pass(shape: ModelShape, groups: Iterable[Group], prefixes: bool, suffixes: bool) -> Pass:
    tokens = head = 0
    pairs = 0.0
    for group in groups:
        if prefixes:
            tokens += group.prefix_len
            pairs += shape.pairs(group.prefix_len, 0)
        if suffixes:
            tokens += group.num_suffix_tokens
            head += group.num_suffix_tokens
            pairs += sum(shape.pairs(n, group.prefix_len) for n in group.suffix_lens)
    return Pass(tokens, head, pairs)


def plan_passes(shape: ModelShape, plan: Plan, logits_chunk: int | None = None) -> list[Pass]:
    """What a plan of `waves.make_plan` computes.

    Args:
        logits_chunk: of an update; a pass with more tokens for lm_head runs it again in backward.
    """
    passes = []
    for work in plan.works:
        if work.waves is None:
            passes.append(_group_pass(shape, work.groups, prefixes=True, suffixes=True))
        else:
            passes.append(_group_pass(shape, work.groups, prefixes=True, suffixes=False))
            passes += [_group_pass(shape, (g for _, g in wave), prefixes=False, suffixes=True) for wave in work.waves]
    if logits_chunk is None:
        return passes
    # One forward more, of three that forward and backward cost.
    return [p if p.head_tokens <= logits_chunk else p._replace(head_tokens=p.head_tokens * 4 // 3) for p in passes]


def stock_passes(shape: ModelShape, groups: Sequence[Group], budget: int, dense_mask: bool) -> list[Pass]:
    """What verl's own path computes: whole rows in micro-batches of up to `budget` tokens, logits of every token.

    Args:
        dense_mask: attention has no varlen form (sdpa, eager): several rows in a micro-batch read a T x T mask.
    """
    lens = [group.prefix_len + 1 + n for group in groups for n in group.suffix_lens]
    passes = []
    for batch in first_fit(lens, int, budget):
        tokens = sum(batch)
        if dense_mask and len(batch) > 1:
            pairs = tokens**2 * len(shape.windows)
        else:
            pairs = sum(shape.pairs(n, 0) for n in batch)
        passes.append(Pass(tokens, tokens, pairs))
    return passes


@dataclass(frozen=True)
class Rates:
    """Seconds per pass, and per forward FLOP of layers, attention and lm_head, backward included where it runs.

    The default counts FLOPs alone: good for ratios where nothing was measured.
    """

    fixed: float = 0.0
    linear: float = 1e-12
    attention: float = 1e-12
    head: float = 1e-12

    def seconds(self, shape: ModelShape, passes: Iterable[Pass]) -> float:
        return sum(
            self.fixed
            + p.tokens * shape.linear * self.linear
            + p.pairs * shape.pair * self.attention
            + p.head_tokens * shape.head * self.head
            for p in passes
        )


@dataclass(frozen=True)
class Profile:
    """Measured rates of a model on a device (`measured_on`, in words); None: not measured yet."""

    forward: Rates | None = None
    update: Rates | None = None
    measured_on: str = ""

    @classmethod
    def read(cls, path: str | Path) -> "Profile":
        """Raises ValueError where the file is not one that `write` wrote."""
        try:
            fields = json.loads(Path(path).read_text())
            rates = {name: fields[name] and Rates(**fields[name]) for name in ("forward", "update")}
            for value in (x for one in rates.values() if one for x in dataclasses.astuple(one)):
                if not (isinstance(value, float) and 0 <= value < float("inf")):
                    raise ValueError(f"a rate is {value!r}")
            return cls(**rates, measured_on=fields["measured_on"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not a cost profile ({error}); delete it, and it is measured anew") from error

    def write(self, path: str | Path) -> None:
        """Whole or not at all."""
        unfinished = Path(f"{path}.unfinished")
        unfinished.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        unfinished.rename(path)


def calibrate(
    shape: ModelShape, run: Callable[[Sequence[Group]], None], max_tokens: int, unit: int, rounds: int = 3
) -> Rates:
    """Measures the rates in small packed passes; the fastest of `rounds` counts.

    Args:
        run: computes these groups in one packed pass and waits for the device. Row i starts at the batch's token
            `i * unit` at most; see `calibration_rows`.
        max_tokens: of one pass. unit: tokens of a segment, at least 2.
    """
    many = max(2, min(16, max_tokens // unit))
    few = max(1, many // 4)
    # Prefix segments with a suffix of one token: next to no lm_head.
    short = [Group((i,), unit - 1, (1,)) for i in range(many)]
    long = [Group((0,), many * unit - 1, (1,))]
    suffixes = [Group((i,), 0, (unit,)) for i in range(few)]
    probes = {"few": short[:few], "many": short, "long": long, "head": suffixes}
    run(short)  # warm-up
    seconds = dict.fromkeys(probes, float("inf"))
    for _ in range(rounds):
        for name, groups in probes.items():
            start = time.perf_counter()
            run(groups)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    passes = [_group_pass(shape, groups, prefixes=True, suffixes=True) for groups in probes.values()]
    amounts = [(1.0, p.tokens * shape.linear, p.pairs * shape.pair, p.head_tokens * shape.head) for p in passes]
    return Rates(*_nonnegative_solution(torch.tensor(amounts).double(), torch.tensor(list(seconds.values())).double()))


def _nonnegative_solution(amounts: torch.Tensor, seconds: torch.Tensor) -> list[float]:
    """Rates of the columns; one that noise makes negative is 0, and the others explain the seconds without it."""
    scale = amounts.amax(0)
    kept = list(range(amounts.shape[1]))
    while kept:
        found = torch.linalg.lstsq((amounts / scale)[:, kept], seconds.unsqueeze(1)).solution[:, 0] / scale[kept]
        if (found >= 0).all():
            break
        kept.remove(kept[int(torch.argmin(found * scale[kept]))])
    rates = dict(zip(kept, found.tolist(), strict=True))
    return [rates.get(column, 0.0) for column in range(amounts.shape[1])]


def calibration_rows(max_tokens: int, unit: int) -> tuple[int, list[int]]:
    """(tokens, offsets of the first tokens of rows) of the batch that `calibrate`'s groups index."""
    many = max(2, min(16, max_tokens // unit))
    return many * unit + 1, [i * unit for i in range(many + 1)]


def peak_bytes(shape: ModelShape, plan: Plan | None, stock: Sequence[Pass], checkpointed: bool, chunk: int) -> float:
    """Bytes that one update adds at its peak to model, gradients and optimizer; plan None: verl's own path.

    A rough model: activations of the largest pass (with checkpointing, the layers' inputs and one layer's activations),
    logits in fp32 with their gradient and softmax, and for phases the prefix graph, the prefix cache and its gradients.
    """
    layers = len(shape.windows)

    def alive(tokens: int) -> float:
        one_layer = shape.activations * tokens
        return layers * shape.boundary * tokens + one_layer if checkpointed else layers * one_layer

    def logits(tokens: int) -> float:
        return 12.0 * shape.vocab_size * tokens

    if plan is None:
        return max(alive(p.tokens) + logits(p.head_tokens) for p in stock)
    peaks = []
    for work in plan.works:
        prefix = sum(group.prefix_len for group in work.groups)
        if work.waves is None:
            suffix = sum(group.num_suffix_tokens for group in work.groups)
            peaks.append(alive(prefix + suffix) + logits(min(suffix, chunk)))
            continue
        kept = layers * shape.boundary * prefix if checkpointed else layers * shape.activations * prefix
        wave = max((sum(g.num_suffix_tokens for _, g in wave) for wave in work.waves), default=0)
        peaks.append(kept + 3 * shape.kv * prefix + alive(wave) + logits(min(wave, chunk)))
    return max(peaks, default=0.0)
