"""The repairs there are after an out-of-memory error, on one rank.

where attention was kept     once more without, and none is kept from then on
in a wave                    waves half as large from then on, once a mini-batch
several ranks, or elsewhere  fails with what to set: a rank that left the middle of FSDP's collectives cannot join
                             them again, and the others wait in them
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from verl_prefix.core.errors import add_note
from verl_prefix.core.waves import Plan, largest_wave, limit_waves

logger = logging.getLogger(__name__)
T = TypeVar("T")
WAVES = "phase_b"
ADVICE = {
    "packed": "lower {tokens}, or set actor_rollout_ref.actor.prefix.schedule=phased",
    "phase_a": "set actor_rollout_ref.actor.prefix.offload=True, gradient checkpointing, or lower {tokens}",
    "phase_c": "set gradient checkpointing, or lower {tokens}",
}


def run_or_repair(
    run: Callable[[Plan, bool], T], plan: Plan, keeps_attention: bool, model: torch.nn.Module, num_ranks: int
) -> tuple[T, Plan, int]:
    """Runs a plan; after an OOM, on one rank, once more from the start without attention kept, and after one in a wave
    with waves half as large.

    What the mini-batch had accumulated is dropped, so its gradients are those of the last run alone.

    Args:
        run: all passes of a plan, with fresh state of its own at every call, and whether attention is kept.
        model: the FSDP2 root.
        num_ranks: how many ranks run collectives together.

    Returns:
        what `run` returned, the plan that ran, and how often it was repeated.

    Raises:
        torch.OutOfMemoryError: with a note on what to set, where repeating is not possible or failed too.
    """
    accumulated = any(parameter.grad is not None for parameter in model.parameters())
    try:
        return run(plan, keeps_attention), plan, 0
    except torch.OutOfMemoryError as error:
        phase, cause = getattr(error, "prefix_phase", "a pass"), str(error)
        largest = largest_wave(plan)
        smaller = limit_waves(plan, largest // 2)
        if keeps_attention:
            key, less = "actor_rollout_ref.actor.prefix.keep_attention=off", "without attention kept"
        else:
            key, less = f"actor_rollout_ref.actor.prefix.wave_tokens={max(largest // 2, 1)}", "with smaller waves"
            if phase in ADVICE:
                add_note(error, ADVICE[phase].format(tokens="ppo_max_token_len_per_gpu or micro_batch_size_per_gpu"))
            if phase != WAVES:
                raise
            if largest_wave(smaller) == largest:
                add_note(error, "the largest wave is one row already; set gradient checkpointing or offload parameters")
                raise
        if num_ranks > 1 or accumulated or not hasattr(FSDPModule, "reset_iter_state"):
            reason = (
                f"{num_ranks} ranks run together, and one that left cannot join their collectives again"
                if num_ranks > 1
                else "gradients of an earlier batch would be lost"
                if accumulated
                else f"torch {torch.__version__} cannot reset FSDP2 after an error (FSDPModule.reset_iter_state)"
            )
            add_note(error, f"not repeated {less}: {reason}. Set {key} (largest wave: {largest} tokens)")
            raise
    # Only here, behind the handler, nothing holds the frames of the failed pass and their graphs.
    logger.warning("OOM in %s, repeating the mini-batch with %s: %s", phase, key, cause)
    drop_gradients(model)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if not keeps_attention:
        return run(smaller, False), smaller, 1
    outputs, ran, num_retries = run_or_repair(run, plan, keeps_attention=False, model=model, num_ranks=num_ranks)
    return outputs, ran, num_retries + 1


def drop_gradients(model: torch.nn.Module) -> None:
    """Takes an FSDP2 root out of the middle of a forward or backward, without any gradient left in it.

    torch's `reset_iter_state` forgets the collectives and shards the parameters; gradients that wait unsharded for the
    last backward of an accumulation stay in FSDP2's own fields, and would be added to the next run's.
    """
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
        states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
        for parameter in (p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
    for parameter in model.parameters():
        parameter.grad = None
