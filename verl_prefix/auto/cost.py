"""Time and memory of one rank's batch: which path is the cheapest, and what sharing gains.

A pass is forward and backward of one packed row; phases A and C of a set count as one pass. Its time is taken as

    seconds = fixed + linear FLOPs * a + attention FLOPs * b + lm_head FLOPs * c

`calibration` measures fixed, a, b and c on the model at hand in a few small passes: once for forward alone, once for
forward and backward. FLOPs are those of matmuls; a also covers norms, rotary angles and the like.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_prefix.auto.megatron import Division
from verl_prefix.auto.shape import ModelShape, PassCost
from verl_prefix.core.forward import LOGITS_CHUNK
from verl_prefix.core.groups import Group
from verl_prefix.core.offload import AHEAD
from verl_prefix.core.output_index import num_own_strand_outputs
from verl_prefix.core.plan import PackedPass, PhasedPass, Plan


@dataclass(frozen=True)
class Rates:
    """What passes of one kind take, forward alone or with backward. The default counts FLOPs alone, for ratios.

    Attributes:
        fixed: seconds of a pass.
        linear, attention, head: seconds per forward FLOP of layers, attention's pairs and lm_head.
    """

    fixed: float = 0.0
    linear: float = 1e-12
    attention: float = 1e-12
    head: float = 1e-12

    def seconds(self, shape: ModelShape, passes: Iterable[PassCost]) -> float:
        """What these passes of a model take, one after the other."""
        return sum((sum(self.parts(shape, p)) for p in passes), 0.0)

    def parts(self, shape: ModelShape, one: PassCost) -> tuple[float, float]:
        """What a pass takes in the layers, and in lm_head."""
        layers = self.fixed + one.linear(shape) * self.linear + one.pairs * shape.pair * self.attention
        return layers, one.head_tokens * shape.head * self.head


# Attention's outputs and logits are kept where there is room for so many times what an update is estimated to add: an
# out-of-memory error costs more than kernels that run again.
ROOM_FACTOR = 1.5


@dataclass(frozen=True)
class Memory:
    """The options of a run that decide what an update keeps.

    Attributes:
        ranks: how many share one copy of the parameters; on Megatron's engine, those of one stage.
        checkpointed: gradient checkpointing is on.
        no_sync: gradients are reduced after the last pass of an update alone.
        logits_chunk, offload: of `PrefixConfig`.
        attention_kept: attention's outputs are kept, see `PackedForward.keep_attention`.
        all_logits: a pass has all of its logits at once.
        slices: how many cut a pass among themselves (`core.sequence_parallel`).
        stock_offloads: verl's enable_activation_offload, which our path has not.
        veomni: the engine is verl's VeOmni's.
        expert_ranks: how many share a layer's experts there; each gathers its part alone.
        division: of the model over the ranks of verl's Megatron engine, which gathers no parameters; None: of others,
            which do.
        span: how many layers one checkpoint has.
        block: how many layers are checkpointed, on all stages together; None: all of them.
    """

    ranks: int = 1
    checkpointed: bool = True
    no_sync: bool = False
    logits_chunk: int | None = None
    offload: bool = False
    attention_kept: bool = False
    all_logits: bool = False
    slices: int = 1
    stock_offloads: bool = False
    veomni: bool = False
    expert_ranks: int = 1
    division: Division | None = None
    span: int = 1
    block: int | None = None

    @classmethod
    def of_fsdp(cls, fsdp: Mapping[str, Any], world: int, checkpointed: bool, slices: int, options: Any) -> "Memory":
        """Of verl's FSDP2 engine.

        Args:
            fsdp: its `fsdp_config`. Copies of the parameters are shared as by create_device_mesh
                (verl/workers/engine/fsdp/utils.py). verl's main branch has no use_no_sync_for_gradient_accumulation,
                and always reduces gradients once.
            world: all ranks. checkpointed, slices: see `Memory`. options: `PrefixConfig`.
        """
        size = int(fsdp.get("fsdp_size", -1))
        no_sync = bool(fsdp.get("use_no_sync_for_gradient_accumulation", True))
        ranks = size if 0 < size < world else world
        return cls(ranks, checkpointed, no_sync, options.logits_chunk, options.offload, slices=slices)

    @classmethod
    def of_veomni(cls, veomni: Mapping[str, Any], world: int, checkpointed: bool, options: Any) -> "Memory":
        """Of verl's VeOmni engine, which reduces gradients in every pass.

        Args:
            veomni: its `veomni` config. Copies of the parameters are shared as by VeOmniEngine
                (verl/workers/engine/veomni/transformer_impl.py), whose fsdp_size counts sets of ranks that share a row.
            world: all ranks. options: `PrefixConfig`.
        """
        together, size = int(veomni.get("ulysses_parallel_size", 1)), int(veomni.get("fsdp_size", -1))
        sets = world // together
        return cls(
            (size if 0 < size < sets else sets) * together, checkpointed, False, options.logits_chunk, options.offload,
            slices=together, veomni=True, expert_ranks=int(veomni.get("expert_parallel_size", 1)),
        )  # fmt: skip

    @classmethod
    def of_megatron(cls, megatron: Mapping[str, Any], world: int, options: Any) -> "Memory":
        """Of verl's Megatron engine. What recompute_granularity=selective leaves out counts as kept: attention's inner
        products, which flash attention does not keep either, and parts of MLPs.

        Args:
            megatron: its `megatron` config. world: all ranks. options: `PrefixConfig`.
        """
        transformer = megatron.get("override_transformer_config") or {}
        full = transformer.get("recompute_granularity") == "full"
        layers = int(transformer.get("recompute_num_layers") or 1)  # (megatron/core/transformer/transformer_block.py)
        is_block = transformer.get("recompute_method") == "block"
        division = Division.of(megatron, world)
        return cls(
            division.tensor, full, False, options.logits_chunk, options.offload,
            slices=int(megatron.get("context_parallel_size", 1)), division=division,
            span=1 if is_block else layers, block=layers * division.stages if is_block else None,
        )  # fmt: skip

    @property
    def stages(self) -> int:
        """Of a pipeline."""
        return self.division.stages if self.division else 1

    @property
    def chunk(self) -> int:
        """Tokens of one rank whose logits exist at once."""
        return sys.maxsize if self.all_logits else self.logits_chunk or LOGITS_CHUNK

    @property
    def pass_chunk(self) -> int:
        """Tokens of a pass whose logits exist at once, on all ranks that share it."""
        return self.chunk * self.slices


def may_keep_attention(shape: ModelShape, checkpointed: bool, option: str) -> bool:
    """Whether updates keep attention's outputs where there is room: under gradient checkpointing, which then runs no
    attention kernel again. A vision model's do not, since no estimate counts its tower.

    Args:
        option: `PrefixConfig.keep_attention`.
    """
    return checkpointed and not shape.tower and option == "auto"


def may_have_all_logits(shape: ModelShape, logits_chunk: int | None, logits_once: bool) -> bool:
    """Whether updates have all logits of a pass at once where there is room; not for a vision model, as above.

    Args:
        logits_chunk: of `PrefixConfig`. logits_once: whether outputs need logits once (`Backend.reads_logits_once`).
    """
    return logits_once and logits_chunk is None and not shape.tower


class _Added:
    """Bytes that one rank's part of a pass adds to an update at its peak: the parts of `peak_bytes`."""

    def __init__(self, shape: ModelShape, memory: Memory) -> None:
        self.memory, self.slices = memory, memory.slices
        self.shape = shape = memory.division.part_of(shape) if memory.division else shape
        self.state = shape.state / self.slices  # of one sequence
        experts = shape.expert_parameters / shape.layers
        own = experts / memory.expert_ranks
        self.gathered = 4 * (shape.layer_parameters - experts + own)  # two gathered layers
        self.in_backward = self.gathered
        if memory.veomni:  # which also keeps the embedding gathered; gradients of a layer's experts come all at once
            self.gathered += shape.head
            self.in_backward = self.gathered + 4 * own
        # And the fp32 gradient of lm_head. Phase C has it where rows read outputs of strands, but counts without it.
        self.with_head = 4 * (shape.head / 2) + self.in_backward
        if memory.division:  # which gathers no parameters, and adds every gradient to a buffer that lasts
            self.gathered = self.in_backward = self.with_head = 0.0

    def stock(self, one: PassCost, forward_only: bool) -> float:
        """A pass of verl's own path."""
        tokens, head_tokens = one.tokens / self.slices, one.head_tokens / self.slices
        if forward_only:
            return max(self.logits(head_tokens), tokens * self.shape.activations) + self.gathered
        # verl's offload leaves two layers on the device (verl/utils/activation_offload.py).
        left = min(2 / self.shape.layers, 1.0) if self.memory.stock_offloads else 1.0
        return left * self.kept(tokens) + max(self.logits(head_tokens), self.backward(tokens, self.with_head))

    def packed(self, planned: PackedPass) -> float:
        """A packed pass."""
        prefix, strand_outputs = self.prefix(planned.groups)
        suffix = sum(group.num_suffix_tokens for group in planned.groups) / self.slices
        tokens = prefix + suffix
        in_backward = max(self.chunk(suffix + strand_outputs), self.backward(tokens, self.with_head))
        return self.kept(tokens) + in_backward + self.forks(planned.groups)

    def phased(self, planned: PhasedPass, alive: float) -> float:
        """A nested pass or phase C, whichever adds more; phase A has no gradients yet.

        Args:
            alive: how many prefixes like these live at once, divided by the stages that share their layers.
        """
        shape, memory = self.shape, self.memory
        prefix, strand_outputs = self.prefix(planned.groups)
        states = self.state * sum(len({fork for fork in g.forks if fork.start}) for g in planned.groups)
        dormant = back = alive * self.kept(prefix)
        # Logits of phase A, without their gradients; the last stage has those of all prefixes that live at once.
        waiting = alive * memory.stages * self.chunk(strand_outputs) / 2
        # Keys and values of the heads that this rank has, of the tokens of all ranks that share the pass.
        cached = shape.kv / min(self.slices, shape.kv_heads) * prefix * self.slices
        if memory.offload:
            back = AHEAD * self.kept(prefix, attention=False)
            # Of two layers, for each prefix whose waves run. On a pipeline these are as many as its stages, at most.
            cached *= 2 / max(len(shape.windows), 1) * min(alive, 1.0) * memory.stages
            dormant = waiting = 0.0
        else:
            cached *= alive
        nested = (self.packed(x) if isinstance(x, PackedPass) else self.phased(x, alive) for x in planned.nested)
        between = max(nested, default=0.0)
        in_phase_c = max(self.chunk(strand_outputs), self.backward(prefix, self.in_backward))
        return max(dormant + waiting + 3 * cached + 2 * states + between, back + 2 * cached + states + in_phase_c)

    def prefix(self, groups: Sequence[Group]) -> tuple[float, float]:
        """Tokens of the strands, and of those whose outputs rows read. Ranks that share a pass have one slice of the
        strands each, of which one may hold all outputs."""
        tokens = sum(group.num_own_strand_tokens for group in groups) / self.slices
        return tokens, min(sum(num_own_strand_outputs(group) for group in groups), tokens)

    def kept(self, tokens: float, attention: bool = True) -> float:
        """What layers keep for backward; `attention` False: without attention's outputs, whatever the memory says."""
        shape, memory = self.shape, self.memory
        checkpointed = min(shape.layers if memory.block is None else memory.block, shape.layers)
        if not memory.checkpointed:
            checkpointed = 0
        kept = len(shape.windows) * shape.attention * (attention and memory.attention_kept)
        plain = (shape.layers - checkpointed) * (shape.activations + shape.routed)
        return tokens * (-(-checkpointed // memory.span) * shape.boundary + plain + kept)

    def backward(self, tokens: float, buffers: float) -> float:
        """What backward has of one layer, which checkpointing computes again."""
        layers = self.memory.span + 0.5 if self.memory.checkpointed else 0.5
        if division := self.memory.division:  # whose ranks gather a layer's inputs, and their gradients
            buffers += 2 * tokens * self.shape.boundary * (division.tokens - 1)
        return tokens * self.shape.activations * layers + buffers

    def logits(self, tokens: float) -> float:
        """Logits and their gradient, or a copy of them; on Megatron's engine a copy in fp32
        (tensor_parallel/cross_entropy.py)."""
        return (3 if self.memory.division else 2) * self.shape.logits * tokens

    def chunk(self, tokens: float) -> float:
        """Logits that exist at once."""
        return self.logits(min(tokens, self.memory.chunk))

    def forks(self, groups: Iterable[Group]) -> float:
        """The states that suffixes start from; under checkpointing those of one layer, with gradients."""
        suffixes = sum(n > 0 and f.start > 0 for g in groups for n, f in zip(g.suffix_lens, g.forks, strict=True))
        layers = 2 / max(self.shape.recurrent_layers, 1) if self.memory.checkpointed else 1
        return suffixes * self.state * layers


def peak_bytes(
    shape: ModelShape, plan: Plan | None, stock: Sequence[PassCost], memory: Memory, forward_only: bool = False
) -> float:
    """Bytes that one update adds at its peak to a rank's weights, gradients and moments, which under FSDP2 are 16 bytes
    for each parameter of its share.

    This is a closed form, within 15 % of `tools.simulate` on the grid of tests/auto/test_cost.py; 16 % below it without
    checkpointing under sequence parallelism, whose copies of heads it leaves out. It adds up what is alive at once in
    mixed precision. The list is for FSDP2 with flash-attn's cross entropy, and says what other engines have instead:

    - what layers keep, and in backward half of a layer's activations again;
    - two gathered layers, and the fp32 gradient of lm_head on its way to other ranks; under VeOmni also the embedding,
      and the fp32 gradients of a layer's experts; on Megatron's engine none of these, but a layer's gathered inputs
      and their gradients;
    - logits and their gradient; on Megatron's engine logits and a copy in fp32;
    - keys, values, recurrent states and their fp32 gradients, and for every suffix a copy of the state that it starts
      from;
    - unsharded fp32 gradients, where several passes share one synchronisation.

    Each stage of a pipeline has an equal part of the layers, and keeps at most as many micro-batches as there are
    stages. Together that is what one stage with all layers would keep of one micro-batch. The last stage has the
    logits, and keeps one micro-batch. The prefixes of a round are kept beside these.

    Args:
        shape: of the whole model. memory: options of the run.
        plan: ours; None: verl's own path, by its passes `stock`.
        forward_only: verl's own path computes log-probs alone. They need one layer at a time, and logits with a copy
            that entropy makes.
    """
    added = _Added(shape, memory)
    if plan is None:
        peaks, several = [added.stock(one, forward_only) for one in stock], len(stock) > 1 and not forward_only
    else:
        alive, resident = 1.0, 0.0  # prefixes like a phased pass's, and what packed passes find kept of them
        if memory.stages > 1:
            alive = max(map(len, plan.rounds)) / memory.stages
            if not memory.offload:
                prefixes = (added.kept(added.prefix(one.groups)[0]) for one in plan.phased)
                resident = alive * max(prefixes, default=0.0)
        peaks = [
            added.packed(one) + resident if isinstance(one, PackedPass) else added.phased(one, alive)
            for one in plan.passes
        ]
        several = len(plan.all_passes) > 1
    held = 4 * shape.parameters * (1 - 1 / memory.ranks)
    return max(peaks, default=0.0) + (held if memory.no_sync and several else 0.0)
