"""FLOP, time and memory model of one rank's batch: which path is the cheapest, and what sharing gains.

A pass is forward and backward of one packed row (phases A and C of a set together count as one). Its time is taken as

    seconds = fixed + linear FLOPs * a + attention FLOPs * b + lm_head FLOPs * c

with four rates that `calibration` measures on the model at hand in a few small passes, once for forward alone and once
for forward and backward. FLOPs are those of matmuls; the rate of the layers covers norms, rotary angles and the like.
"""

import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.core.offload import AHEAD
from verl_prefix.core.schedule import LOGITS_CHUNK
from verl_prefix.core.waves import PackedPass, PhasedPass, Plan, first_fit, leaves_room, limit_waves, make_plan


class PassCost(NamedTuple):
    """Tokens that go through the layers, how many of them through lm_head, query-key pairs summed over layers, and
    tokens that skip most of the last layer (`models.last_layer`)."""

    tokens: int
    head_tokens: int
    pairs: float
    skipped: int = 0

    def linear(self, shape: ModelShape) -> float:
        """Forward FLOPs of the layers without attention's pairs."""
        return self.tokens * shape.linear - self.skipped * shape.last


def group_pass(shape: ModelShape, groups: Iterable[Group], prefixes: bool = True, suffixes: bool = True) -> PassCost:
    """One packed row of these groups' strands, suffixes, or both."""
    tokens = head = 0
    pairs = 0.0
    for group in groups:
        if prefixes:
            tokens += group.prefix_len
            head += group.num_strand_outputs
            pairs += sum(shape.pairs(strand.end - strand.start, strand.start) for strand in group.strands)
        if suffixes:
            tokens += group.num_suffix_tokens
            head += group.num_suffix_tokens
            pairs += sum(shape.pairs(n, fork.start) for n, fork in zip(group.suffix_lens, group.forks, strict=True))
    return PassCost(tokens, head, pairs, tokens - head)


def plan_passes(shape: ModelShape, plan: Plan, logits_chunk: int | None = None) -> list[PassCost]:
    """Costs of the passes of a plan.

    Args:
        logits_chunk: for an update, tokens whose logits exist at once on all ranks that share a pass; lm_head runs
            again in backward for the tokens before the last chunk. None: log-probs.
    """
    passes = []
    for planned in plan.passes:
        passes.append(group_pass(shape, planned.groups, suffixes=isinstance(planned, PackedPass)))
        if isinstance(planned, PhasedPass):
            waves = ([piece for _, piece in wave] for wave in planned.waves)
            passes += [group_pass(shape, wave, prefixes=False) for wave in waves]
    if logits_chunk is None:
        return passes
    # One forward more, of three that forward and backward cost.
    return [p._replace(head_tokens=p.head_tokens + max(0, p.head_tokens - logits_chunk) // 3) for p in passes]


def stock_passes(
    shape: ModelShape, groups: Sequence[Group], budget: int, dense_mask: bool, one_row: bool = False
) -> list[PassCost]:
    """Costs of verl's own path: whole rows in micro-batches of up to `budget` tokens, logits of every token.

    Args:
        dense_mask: attention has no varlen form (sdpa, eager): several rows in a micro-batch read a T x T mask.
        one_row: a micro-batch has one row, since packed rows would leak state (`recurrent.packing_leak`).
    """
    lens = [fork.start + 1 + n for g in groups for fork, n in zip(g.forks, g.suffix_lens, strict=True)]
    passes = []
    for batch in first_fit(lens, int, 0 if one_row else budget):
        tokens = sum(batch)
        if dense_mask and len(batch) > 1:
            pairs = float(tokens**2 * len(shape.windows))
        else:
            pairs = sum((shape.pairs(n, 0) for n in batch), 0.0)
        passes.append(PassCost(tokens, tokens, pairs))
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

    def seconds(self, shape: ModelShape, passes: Iterable[PassCost]) -> float:
        seconds = 0.0
        for p in passes:
            seconds += self.fixed + p.linear(shape) * self.linear
            seconds += p.pairs * shape.pair * self.attention + p.head_tokens * shape.head * self.head
        return seconds


def least_gain(shape: ModelShape, passes: Sequence[PassCost], others: Sequence[PassCost]) -> float:
    """The smallest ratio that the time of `passes` can have to that of `others`, whatever the `Rates` (none is
    negative): the smallest of the ratios of the four amounts that take time."""

    def amounts(of: Sequence[PassCost]) -> list[float]:
        of_each = ((1, p.linear(shape), p.head_tokens, p.pairs) for p in of)
        return [sum(column) for column in zip((0,) * 4, *of_each, strict=True)]

    ratios = (x / y for x, y in zip(amounts(passes), amounts(others), strict=True) if y)
    return min(ratios, default=math.inf)


def syncs_once(fsdp: Mapping[str, Any]) -> bool:
    """Whether verl's engine reduces gradients after an update's last pass alone: use_no_sync_for_gradient_accumulation
    of its `fsdp_config`; always in verl's main branch, which has no such key."""
    return bool(fsdp.get("use_no_sync_for_gradient_accumulation", True))


def shard_size(fsdp_size: int, ranks: int) -> int:
    """Ranks that share one copy of the parameters: verl's create_device_mesh (verl/workers/engine/fsdp/utils.py)."""
    return fsdp_size if 0 < fsdp_size < ranks else ranks


# A wave of this many tokens hides its fixed cost: FSDP2 gathers, copies and reduces all parameters, and gradients of
# all prefix tokens are added up. That takes as long as 400 tokens on 8 H100s (simulated: Llama3-8B).
LONG_WAVE = 8192
# Offload is for memory, so its waves are half as long, which costs a fortieth of the update's time (also simulated).
OFFLOAD_WAVE = 4096
# What longer waves may add to the estimated peak of an update.
GROWTH = 1 / 8

# Attention and logits are kept where there is room for this many times what an update is estimated to add: an
# out-of-memory error costs more than kernels that run again.
ROOM_FACTOR = 1.5


@dataclass(frozen=True)
class Memory:
    """The options of a run that decide what an update keeps.

    Args:
        ranks: how many share one copy of the parameters. no_sync: verl's use_no_sync_for_gradient_accumulation.
        checkpointed: gradient checkpointing. logits_chunk, offload: of `PrefixConfig`.
        attention_kept: `PackedForward.keep_attention`. all_logits: a pass has all of its logits at once.
        sequence_ranks: how many share a pass (`core.sequence_parallel`).
        stock_offloads: verl's enable_activation_offload, which is off in ours.
    """

    ranks: int
    checkpointed: bool
    no_sync: bool
    logits_chunk: int | None
    offload: bool
    attention_kept: bool = False
    all_logits: bool = False
    sequence_ranks: int = 1
    stock_offloads: bool = False

    @property
    def chunk(self) -> int:
        """Tokens of one rank whose logits exist at once."""
        return sys.maxsize if self.all_logits else self.logits_chunk or LOGITS_CHUNK

    @property
    def pass_chunk(self) -> int:
        """Tokens of a pass whose logits exist at once, on all ranks that share it."""
        return self.chunk * self.sequence_ranks


def may_keep_attention(shape: ModelShape, checkpointed: bool, option: str) -> bool:
    """Whether updates keep attention's outputs where there is room. They do under gradient checkpointing, whose
    recomputation then runs no attention kernel, but not for a vision model, whose tower no estimate counts.

    Args:
        option: `PrefixConfig.keep_attention`.
    """
    return checkpointed and not shape.tower and option == "auto"


def may_have_all_logits(shape: ModelShape, logits_chunk: int | None, one_copy: bool) -> bool:
    """Whether updates have all logits of a pass at once where there is room; not for a vision model, as above.

    Args:
        logits_chunk: of `PrefixConfig`. one_copy: whether outputs need logits once (`Backend.reads_logits_once`).
    """
    return one_copy and logits_chunk is None and not shape.tower


def peak_bytes(
    shape: ModelShape, plan: Plan | None, stock: Sequence[PassCost], memory: Memory, forward_only: bool = False
) -> float:
    """Bytes that one update adds at its peak to 16 bytes per parameter and rank. With plan None it is verl's own path;
    its log-probs alone (`forward_only`) need one layer at a time, and logits with a copy that entropy makes.

    This is a closed form, within 15 % of `tools.simulate` on the grid of tests/auto/test_cost.py; 16 % below it without
    checkpointing under sequence parallelism, whose copies of heads it leaves out. It adds up what is
    alive at once under FSDP2 in mixed precision, with flash-attn's cross entropy: what layers keep; in backward half of
    a layer's activations again, two gathered layers, and the fp32 gradient of lm_head on its way to the other ranks;
    logits and their gradient; keys, values, recurrent states and their fp32 gradients; a copy of its prefix's state for
    every suffix that starts from it; and unsharded fp32 gradients where several passes share one synchronisation.
    """
    buffers_c = 4 * shape.layer_parameters  # phase C computes no gradient of lm_head
    buffers = 4 * (shape.head / 2) + buffers_c
    held = 4 * shape.parameters * (1 - 1 / memory.ranks)
    n = memory.sequence_ranks
    kv = shape.kv / min(n, shape.kv_heads)  # of the heads that this rank has, of the tokens of all
    state = shape.state / n

    def kept(tokens: float, attention: bool = memory.attention_kept) -> float:
        if not memory.checkpointed:
            return shape.layers * tokens * shape.activations
        return tokens * (shape.layers * shape.boundary + len(shape.windows) * shape.attention * attention)

    def backward(tokens: float, buffers: float = buffers) -> float:
        return tokens * shape.activations * (1.5 if memory.checkpointed else 0.5) + buffers

    def logits(tokens: float) -> float:
        return 2 * shape.logits * tokens

    def chunk(tokens: float) -> float:
        return logits(min(tokens, memory.chunk))

    def forks(groups: Iterable[Group]) -> float:
        """Bytes of the states that suffixes start from; under checkpointing those of one layer, with gradients."""
        suffixes = sum(n > 0 and f.start > 0 for g in groups for n, f in zip(g.suffix_lens, g.forks, strict=True))
        return suffixes * state * (2 / max(shape.recurrent_layers, 1) if memory.checkpointed else 1)

    if plan is None:
        passes = ((p.tokens / n, p.head_tokens / n) for p in stock)
        if forward_only:
            return max((max(logits(head), t * shape.activations) + buffers_c for t, head in passes), default=0.0)
        # verl's offload leaves two layers on the device (verl/utils/activation_offload.py).
        left = min(2 / shape.layers, 1.0) if memory.stock_offloads else 1.0
        peak = max((left * kept(tokens) + max(logits(head), backward(tokens)) for tokens, head in passes), default=0.0)
        return peak + (held if memory.no_sync and len(stock) > 1 else 0.0)
    peaks = []
    for planned in plan.passes:
        prefix = sum(group.prefix_len for group in planned.groups) / n
        # Ranks that share a pass have one slice of the prefixes each, of which one may hold all outputs.
        strand_outputs = min(sum(group.num_strand_outputs for group in planned.groups), prefix)
        if isinstance(planned, PackedPass):
            suffix = sum(group.num_suffix_tokens for group in planned.groups) / n
            tokens = prefix + suffix
            in_pass = kept(tokens) + max(chunk(suffix + strand_outputs), backward(tokens))
            peaks.append(in_pass + forks(planned.groups))
            continue
        states = state * sum(len({fork for fork in g.forks if fork.start}) for g in planned.groups)
        wave = max((sum(g.num_suffix_tokens for _, g in wave) for wave in planned.waves), default=0) / n
        dormant = back = kept(prefix)
        waiting = chunk(strand_outputs) / 2  # logits of phase A, without their gradients
        cached = kv * prefix * n
        if memory.offload:
            dormant, back, cached = 0.0, AHEAD * kept(prefix, False), 2 * cached / max(len(shape.windows), 1)
            waiting = 0.0
        in_wave = kept(wave) + max(chunk(wave), backward(wave))
        in_wave += max((forks(piece for _, piece in wave) for wave in planned.waves), default=0.0)
        phase_b = dormant + waiting + 3 * cached + 2 * states + in_wave
        phase_c = back + 2 * cached + states + max(chunk(strand_outputs), backward(prefix, buffers_c))
        peaks.append(max(phase_b, phase_c))  # phase A has no gradients yet
    several = len(plan.passes) > 1 or bool(plan.waves)
    return max(peaks, default=0.0) + (held if memory.no_sync and several else 0.0)


def plan_batch(
    shape: ModelShape, groups: Sequence[Group], budget: int, schedule: str, wave_tokens: int | None, memory: Memory,
    forward_only: bool = False,
) -> Plan:  # fmt: skip
    """A run's `waves.make_plan`, which chooses the length of waves.

    Where the budget leaves less, a wave has `LONG_WAVE` tokens on each rank that shares it, but no more than the budget
    on all of them, or than `wave_tokens`. That is halved until it adds at most `GROWTH` to the update's estimated peak.
    With offload a wave of an update has at most `OFFLOAD_WAVE` tokens on each rank where `wave_tokens` is None."""
    make = functools.partial(
        make_plan, groups, budget, schedule=schedule, wave_tokens=wave_tokens, offload=memory.offload
    )
    plan = make()
    if not plan.phased:
        return plan
    if memory.offload:
        is_set = wave_tokens is not None and leaves_room(wave_tokens, budget, offload=True)
        return plan if forward_only or is_set else limit_waves(plan, OFFLOAD_WAVE * memory.sequence_ranks)
    most = (1 + GROWTH) * peak_bytes(shape, plan, (), memory)
    tokens = min(LONG_WAVE * memory.sequence_ranks, budget)
    while (longer := make(least_wave=tokens)) != plan:
        if peak_bytes(shape, longer, (), memory) <= most:
            return longer
        tokens //= 2
    return plan
