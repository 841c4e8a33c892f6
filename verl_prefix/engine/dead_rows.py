"""Dead rows: rows without gradient, which no pass of an update computes under `prefix.skip_zero_advantage`."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from verl.utils.device import get_device_id

from verl_prefix.config.actor import SKIP_ZERO_ADVANTAGE, gradient_without_advantage
from verl_prefix.core.plan import Plan
from verl_prefix.engine.loss import Kind, Loss
from verl_prefix.engine.pass_results import micro_batch_of
from verl_prefix.engine.rows import BatchRows

_CHECKED_AT_ONCE = 8  # rows


def find_dead(loss: Loss, rows: BatchRows) -> frozenset[int]:
    """Returns the numbers of dead rows: where response_mask is 1 their advantages are 0, so that they have no loss and
    no gradient. If any value that the loss reads is not finite on this rank, or if outputs are wanted back, none of the
    rank's rows is dead.

    Raises:
        ValueError: rows without advantage have a gradient in this loss.
    """
    if not isinstance(loss.function, functools.partial) or loss.kind is not Kind.POLICY or loss.takes_logits:
        raise ValueError(
            f"{SKIP_ZERO_ADVANTAGE}=True needs verl's ppo_loss with one of its own policy losses, and this is another "
            f"loss; set {SKIP_ZERO_ADVANTAGE}=False"
        )
    if why := gradient_without_advantage(loss.function.keywords["config"]):
        raise ValueError(
            f"{SKIP_ZERO_ADVANTAGE}=True leaves out rows that have a gradient under {why}, or set "
            f"{SKIP_ZERO_ADVANTAGE}=False"
        )
    data = rows.data
    if rows.flag("return_model_output") or loss.needs_masked_outputs(data):
        return frozenset()
    pairs = zip(data["advantages"].unbind(), data["response_mask"].unbind(), strict=True)
    return frozenset(number for number, (advantages, mask) in enumerate(pairs) if not (advantages * mask).any())


def num_dead(rows: BatchRows, plan: Plan) -> int:
    """Counts the dead rows in idle groups, but for padding and for rows with empty responses."""
    idle = (row for group in plan.idle_groups for row in group.rows)
    dead = rows.dead - rows.padding
    return sum(row in dead and rows.response_lens[row] > 0 for row in idle)


def has_gradient(loss: Loss, rows: BatchRows, numbers: Sequence[int], process_group: Any) -> bool:
    """Whether verl's loss of the rows with these `numbers` has a gradient in any of their outputs. No model runs.

    The loss is computed of a few rows at a time, twice: with log-probs equal to the old ones, where nothing is clipped,
    and 0.1 above these, where the ratio is off 1. Each rank stops at its first rows with a gradient: these losses have
    no collectives.
    """
    for start in range(0, len(numbers), _CHECKED_AT_ONCE):
        batch = rows.select(numbers[start : start + _CHECKED_AT_ONCE])
        micro_batch = micro_batch_of(loss, batch.data, [*range(len(batch))])
        old = batch.at_suffixes("old_log_probs").to(get_device_id())
        for shift in (0.0, 0.1):
            values = {"log_probs": (old + shift).requires_grad_(), "entropy": (0 * old).requires_grad_()}
            offsets = micro_batch["input_ids"].offsets()
            outputs = {n: torch.nested.nested_tensor_from_jagged(x, offsets) for n, x in values.items()}
            pass_loss = loss(outputs, micro_batch, process_group).loss
            gradients = torch.autograd.grad(pass_loss, [*values.values()], allow_unused=True)
            if any(gradient is not None and gradient.any() for gradient in gradients):
                return True
    return False
