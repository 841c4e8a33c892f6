"""What to set after an out-of-memory error, by the phase that had it.

Nothing is repeated: a rank that left the collectives of a pass cannot join them again, and the others wait in them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from verl_prefix.auto.cost import Memory
from verl_prefix.config.actor import pass_size_key
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.errors import add_note
from verl_prefix.core.forward import LOGITS_CHUNK
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import limit_waves

_PREFIX = "actor_rollout_ref.actor.prefix"  # a critic's are the same


@dataclass(frozen=True)
class Advice:
    """What to set after an out-of-memory error in the passes of a plan.

    Attributes:
        plan: this rank's.
        memory: what the passes keep.
        role: the engine's, a key that `config.actor.role_of` returns.
        options: the engine's.
        forward_only: without gradients.
        counts_tokens: whether the size of a pass is set in tokens, by `use_dynamic_bsz`; else it is set in rows.
    """

    plan: Plan
    memory: Memory
    role: str
    options: PrefixConfig
    forward_only: bool
    counts_tokens: bool = True

    @contextmanager
    def on_errors(self) -> Iterator[None]:
        """Context of the passes, which adds the advice to an OutOfMemoryError."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            add_note(error, f"verl_prefix: {self.after(getattr(error, 'prefix_phase', None))}")
            raise

    def after(self, phase: str | None) -> str:
        """Returns what to set after an error in a phase of a pass (`PassNote`); None: outside of passes, as where
        gradients are reduced, or outputs joined."""
        if keep_less := self._keep_less():
            return keep_less
        fewer = f"lower {pass_size_key(self.role, self.forward_only, self.counts_tokens)}"
        is_phased = self.options.schedule == "phased"
        phased = [] if is_phased else [f"set {_PREFIX}.schedule=phased"]
        # What waits for a backward. Without gradients nothing does.
        offload = [] if self.forward_only or self.options.offload else [f"set {_PREFIX}.offload=True"]
        checkpoints = [] if self.forward_only or self.memory.checkpointed else [f"set {self._checkpointing()}"]
        ways = [fewer]  # outside of passes
        match phase:
            case "packed":
                ways = [fewer, *phased, *checkpoints]
            case "nested" | "phase_a":  # the graph of a phase A around waits
                ways = [*offload, *checkpoints, fewer]
            case "phase_c":
                ways = [*checkpoints, fewer]
            case "wave":
                others = [fewer] if self.forward_only else [*offload, *checkpoints]
                ways = [self._shorter_waves([*others, "shard the model over more GPUs"])]
        return ", or ".join(ways)

    def _keep_less(self) -> str:
        """Returns overrides by which the passes keep less that can be computed again; "" where there are none."""
        settings = []
        if self.memory.all_logits and self.plan.most_outputs > LOGITS_CHUNK * self.memory.slices:
            settings.append(f"{_PREFIX}.logits_chunk={LOGITS_CHUNK}")
        if self.memory.attention_kept:
            settings.append(f"{_PREFIX}.keep_attention=off")
        return f"set {' and '.join(settings)}" if settings else ""

    def _checkpointing(self) -> str:
        """Returns the overrides by which the role checkpoints its layers."""
        if self.memory.division:  # Megatron's, which alone divides the model
            recompute = f"{self.role}.megatron.override_transformer_config.recompute"
            return f"{recompute}_granularity=full, {recompute}_method=uniform and {recompute}_num_layers=1"
        model = "critic.model" if self.role == "critic" else "actor_rollout_ref.model"
        return f"{model}.enable_gradient_checkpointing=True"

    def _shorter_waves(self, others: Sequence[str]) -> str:
        """Returns how to shorten waves, or the `others` where that cannot be."""
        largest = self.plan.largest_wave
        if not largest:
            return f"this rank ran a wave without rows, beside waves of other ranks; {' or '.join(others)}"
        if limit_waves(self.plan, largest // 2).largest_wave < largest:
            return f"set {_PREFIX}.wave_tokens={largest // 2} (largest wave: {largest} tokens)"
        return f"the largest wave is one row already; {' or '.join(others)}"


@contextmanager
def self_check_advice() -> Iterator[None]:
    """Context of the self-check, which adds a note on how to do without it to an OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = "the self-check, which also runs verl's own path, and attention in float64"
        add_note(error, f"verl_prefix: that was {what}; set {_PREFIX}.verify=off")
        raise
