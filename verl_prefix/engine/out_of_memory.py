"""What to set after an out-of-memory error, by the phase that had it.

Nothing is repeated: a rank that left the collectives of a pass cannot join them again, and the others wait in them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl_prefix.auto.cost import Memory
from verl_prefix.config.actor import tokens_key
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.errors import add_note
from verl_prefix.core.forward import LOGITS_CHUNK
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import limit_waves

_PREFIX = "actor_rollout_ref.actor.prefix"  # a critic's are the same


def _advice(role: str, options: PrefixConfig, keeps: Memory, forward_only: bool) -> tuple[str, dict[str, str]]:
    """Returns what helps a wave that cannot be shorter; and, for each other phase that may have had the error, what to
    set beside `options`."""
    if keeps.division:
        recompute = f"{role}.megatron.override_transformer_config.recompute"
        checkpoints = f"set {recompute}_granularity=full, {recompute}_method=uniform and {recompute}_num_layers=1"
    else:
        model = "critic.model" if role == "critic" else "actor_rollout_ref.model"
        checkpoints = f"set {model}.enable_gradient_checkpointing=True"
    kept = [] if keeps.checkpointed else [checkpoints]
    fewer = f"lower {tokens_key(role, forward_only)}"
    if role != "critic":
        fewer += f" or {'log_prob' if forward_only else 'ppo'}_micro_batch_size_per_gpu"
    by_phase = {"packed": [fewer] + [f"set {_PREFIX}.schedule=phased"] * (options.schedule != "phased")}
    if forward_only:  # nothing waits for a backward
        kept, by_phase["phase_a"] = [fewer], [fewer]
    else:
        by_phase["phase_a"] = [f"set {_PREFIX}.offload=True"] * (not options.offload) + [*kept, fewer]
        by_phase["phase_c"] = [*kept, fewer]
    return " or ".join([*kept, "offload parameters"]), {phase: ", or ".join(x) for phase, x in by_phase.items()}


def _settings(plan: Plan, keeps: Memory) -> list[str]:
    """Overrides by which the passes keep less that can be computed again."""
    in_chunks = keeps.all_logits and plan.most_outputs > LOGITS_CHUNK * keeps.slices
    settings = [f"{_PREFIX}.logits_chunk={LOGITS_CHUNK}"] * in_chunks
    return settings + [f"{_PREFIX}.keep_attention=off"] * keeps.attention_kept


@contextmanager
def out_of_memory_advice(
    plan: Plan, keeps: Memory, role: str, options: PrefixConfig, forward_only: bool
) -> Iterator[None]:
    """Context of a plan's passes: an OutOfMemoryError leaves it with a note on what to set.

    Args:
        keeps: what the passes keep.
        role: the engine's, a key that `config.actor.role_of` returns.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        shortest, by_phase = _advice(role, options, keeps, forward_only)
        largest = plan.largest_wave
        if settings := _settings(plan, keeps):
            advice = f"set {' and '.join(settings)}"
        elif (phase := getattr(error, "prefix_phase", "packed")) in by_phase:
            advice = by_phase[phase]
        elif not largest:
            advice = f"this rank ran a wave without rows, beside waves of other ranks; {shortest}"
        elif limit_waves(plan, largest // 2).largest_wave < largest:
            advice = f"set {_PREFIX}.wave_tokens={largest // 2} (largest wave: {largest} tokens)"
        else:
            advice = f"the largest wave is one row already; {shortest}"
        add_note(error, f"verl_prefix: {advice}")
        raise


@contextmanager
def self_check_advice() -> Iterator[None]:
    """Context of the self-check: an OutOfMemoryError leaves it with a note on how to do without."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = "the self-check, which also runs verl's own path, and attention in float64"
        add_note(error, f"verl_prefix: that was {what}; set {_PREFIX}.verify=off")
        raise
