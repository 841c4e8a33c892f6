"""Random groups, and the two ways to compute rows: the stock reference row by row, and ours."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from verl_prefix.core.forward import PackedForward, TokenBatch
from verl_prefix.core.groups import Group
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import make_plan, pad_to_same_passes
from verl_prefix.core.runner import PlanRunner
from verl_prefix.models.hookup import HookedModel
from verl_prefix.testing.rollouts import Rollouts, flatten


def random_rollouts(
    shape: Sequence[tuple[int, Sequence[int]]], vocab_size: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Rollouts:
    """One group per (prompt length, response lengths), rows in random order."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for prompt_len, response_lens in shape:
        prompt = torch.randint(vocab_size, (prompt_len,), generator=generator)
        for length in response_lens:
            response = torch.randint(vocab_size, (length,), generator=generator)
            rows.append((prompt, response, torch.randn(length, generator=generator, dtype=dtype)))
    order = torch.randperm(len(rows), generator=generator).tolist()
    return Rollouts(*([rows[i][column] for i in order] for column in range(3)))


def run_stock(model: torch.nn.Module, rollouts: Rollouts, train: bool = True) -> list[torch.Tensor]:
    """The truth: HF's own forward of every whole row by itself. Response log-probs per row; `.grad` if `train`."""
    log_probs = []
    for prompt, response, weight in zip(rollouts.prompts, rollouts.responses, rollouts.weights, strict=True):
        ids = torch.cat([prompt, response]).unsqueeze(0)
        with torch.set_grad_enabled(train):
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            row = logits.log_softmax(-1).gather(-1, response.unsqueeze(-1)).squeeze(-1)
        if train:
            (row * weight.to(row.dtype)).sum().backward()
        log_probs.append(row.detach())
    return log_probs


def run_shared(
    model: torch.nn.Module,
    rollouts: Rollouts,
    schedule: str,
    budget: int = 10**6,
    wave_tokens: int | None = None,
    train: bool = True,
    reduce_max: Callable[[Sequence[float]], Sequence[float]] = lambda counts: counts,
    edit: Callable[[TokenBatch, Plan], TokenBatch] = lambda tokens, plan: tokens,
    plan: Callable[[Sequence[Group]], Plan] | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """`run_stock` by `core.runner.PlanRunner`. Options are fields of it and of its `PackedForward`. Tests break the
    maths by `edit`, which changes the tokens. plan: another one than `make_plan` makes."""
    parameter = next(model.parameters())
    device = parameter.device
    tokens, weights, groups = flatten(rollouts, device)
    flat, offsets = tokens.input_ids, tokens.offsets
    made = plan(groups) if plan else make_plan(groups, budget, schedule, wave_tokens, options.get("offload", False))
    passes = pad_to_same_passes(made, reduce_max)
    log_probs = torch.zeros(len(flat), dtype=parameter.dtype, device=device)

    def outputs(index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, flat[index + 1].unsqueeze(-1))

    def step(packed_row: PackedRow, values: torch.Tensor) -> torch.Tensor:
        index = packed_row.output_places.to(device) + 1
        log_probs[index] = values[:, 0].detach().to(log_probs.dtype)
        return (values[:, 0] * weights[index].to(values.dtype)).sum()

    of_forward = {field.name: options.pop(field.name) for field in fields(PackedForward) if field.name in options}
    forward = PackedForward(HookedModel(model), outputs, **of_forward)
    runner = PlanRunner(forward, step, torch.Tensor.backward if train else None, **options)
    with torch.set_grad_enabled(train):
        runner.run(edit(tokens, passes), passes)
    return [
        log_probs[start + len(prompt) : end]
        for prompt, start, end in zip(rollouts.prompts, offsets, offsets[1:], strict=False)
    ]
