"""What to set after an out-of-memory error, by the phase that had it.

Nothing is repeated: a rank that left the collectives of a pass cannot join them again, and the others wait in them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl_prefix.auto.cost import Memory
from verl_prefix.core.errors import add_note
from verl_prefix.core.forward import LOGITS_CHUNK
from verl_prefix.core.waves import Plan, largest_wave, limit_waves, most_outputs

_PREFIX = "actor_rollout_ref.actor.prefix"
_CHECKPOINTS = "set actor_rollout_ref.model.enable_gradient_checkpointing=True"
_FEWER = "lower ppo_max_token_len_per_gpu (of log-probs log_prob_max_token_len_per_gpu) or micro_batch_size_per_gpu"
ADVICE = {
    "packed": f"{_FEWER}, or set {_PREFIX}.schedule=phased",
    "phase_a": f"set {_PREFIX}.offload=True, {_CHECKPOINTS}, or {_FEWER}",
    "phase_c": f"{_CHECKPOINTS}, or {_FEWER}",
}


def _settings(plan: Plan, keeps: Memory | None) -> list[str]:
    """Overrides by which the passes keep less that can be computed again."""
    if keeps is None:
        return []
    in_chunks = keeps.all_logits and most_outputs(plan) > LOGITS_CHUNK * keeps.sequence_ranks
    found = [f"{_PREFIX}.logits_chunk={LOGITS_CHUNK}"] * in_chunks
    return found + [f"{_PREFIX}.keep_attention=off"] * keeps.attention_kept


@contextmanager
def out_of_memory_advice(plan: Plan | None, keeps: Memory | None = None) -> Iterator[None]:
    """Context of a plan's passes, or of the self-check's (None): an OutOfMemoryError leaves it with a note on what to
    set.

    Args:
        keeps: what the passes keep.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        largest = largest_wave(plan) if plan else 0
        if plan is None:
            advice = f"that was the self-check, which holds the gradients of two paths; set {_PREFIX}.verify=off"
        elif settings := _settings(plan, keeps):
            advice = f"set {' and '.join(settings)}"
        elif (phase := getattr(error, "prefix_phase", "packed")) in ADVICE:
            advice = ADVICE[phase]
        elif largest_wave(limit_waves(plan, largest // 2)) < largest:
            advice = f"set {_PREFIX}.wave_tokens={largest // 2} (largest wave: {largest} tokens)"
        else:
            advice = f"the largest wave is one row already; {_CHECKPOINTS} or offload parameters"
        add_note(error, f"verl_prefix: {advice}")
        raise
