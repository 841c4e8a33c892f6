"""What to set after an out-of-memory error, by the phase that had it.

Nothing is repeated: a rank that left the collectives of a pass cannot join them again, and the others wait in them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl_prefix.auto.cost import Memory
from verl_prefix.config.actor import pass_size_key
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.errors import add_note
from verl_prefix.core.forward import LOGITS_CHUNK
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import limit_waves

_PREFIX = "actor_rollout_ref.actor.prefix"  # a critic's are the same


def _checkpointing(role: str, keeps: Memory) -> str:
    """The overrides by which a role checkpoints its layers."""
    if keeps.division:  # Megatron's, which alone divides the model
        recompute = f"{role}.megatron.override_transformer_config.recompute"
        return f"{recompute}_granularity=full, {recompute}_method=uniform and {recompute}_num_layers=1"
    model = "critic.model" if role == "critic" else "actor_rollout_ref.model"
    return f"{model}.enable_gradient_checkpointing=True"


def _settings(plan: Plan, keeps: Memory) -> list[str]:
    """Overrides by which the passes keep less that can be computed again."""
    would_have_chunks = keeps.all_logits and plan.most_outputs > LOGITS_CHUNK * keeps.slices
    settings = []
    if would_have_chunks:
        settings.append(f"{_PREFIX}.logits_chunk={LOGITS_CHUNK}")
    if keeps.attention_kept:
        settings.append(f"{_PREFIX}.keep_attention=off")
    return settings


def _advice(
    phase: str | None, plan: Plan, keeps: Memory, role: str, options: PrefixConfig, forward_only: bool, size_key: str
) -> str:
    """Returns what to set after an error in a phase of a pass; None: outside of passes."""
    if settings := _settings(plan, keeps):
        return f"set {' and '.join(settings)}"
    fewer = f"lower {size_key}"
    if phase is None:  # as where gradients are reduced, or outputs joined
        return fewer
    phased = [] if options.schedule == "phased" else [f"set {_PREFIX}.schedule=phased"]
    # What waits for a backward, as nothing does without one.
    offload = [] if forward_only or options.offload else [f"set {_PREFIX}.offload=True"]
    checkpoints = [] if forward_only or keeps.checkpointed else [f"set {_checkpointing(role, keeps)}"]
    if phase == "packed":
        return ", or ".join([fewer, *phased, *checkpoints])
    if phase in ("nested", "phase_a"):  # during which the graph of a phase A around waits
        return ", or ".join([*offload, *checkpoints, fewer])
    if phase == "phase_c":
        return ", or ".join([*checkpoints, fewer])
    # A wave.
    last_resort = " or ".join([*([fewer] if forward_only else checkpoints), "offload parameters"])
    largest = plan.largest_wave
    if not largest:
        return f"this rank ran a wave without rows, beside waves of other ranks; {last_resort}"
    if limit_waves(plan, largest // 2).largest_wave < largest:
        return f"set {_PREFIX}.wave_tokens={largest // 2} (largest wave: {largest} tokens)"
    return f"the largest wave is one row already; {last_resort}"


@contextmanager
def out_of_memory_advice(
    plan: Plan, keeps: Memory, role: str, options: PrefixConfig, forward_only: bool, counts_tokens: bool
) -> Iterator[None]:
    """Context of a plan's passes, which adds a note on what to set to an OutOfMemoryError.

    Args:
        keeps: what the passes keep.
        role: the engine's, a key that `config.actor.role_of` returns.
        counts_tokens: whether the size of a pass is set in tokens, by `use_dynamic_bsz`; else it is set in rows.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        phase = getattr(error, "prefix_phase", None)
        size_key = pass_size_key(role, forward_only, counts_tokens)
        add_note(error, f"verl_prefix: {_advice(phase, plan, keeps, role, options, forward_only, size_key)}")
        raise


@contextmanager
def self_check_advice() -> Iterator[None]:
    """Context of the self-check, which adds a note on how to do without it to an OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = "the self-check, which also runs verl's own path, and attention in float64"
        add_note(error, f"verl_prefix: that was {what}; set {_PREFIX}.verify=off")
        raise
