"""Random rollouts, and the two ways to compute them: the stock reference row by row, and ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from verl_prefix.core.groups import Group, group_by_key
from verl_prefix.core.layout import Layout
from verl_prefix.core.schedule import Schedule, TokenBatch
from verl_prefix.core.trees import group_trees
from verl_prefix.core.waves import Plan, make_plan, pad_to_same_passes
from verl_prefix.models.hookup import HookedModel


@dataclass(frozen=True)
class Rollouts:
    """Rows of a batch: int64 prompt and response tokens, and a weight per response token; with `cuts`, as of
    `core.trees.group_trees`, trees, else groups of one prompt.

    The loss of both runners below is the weighted sum of response log-probs: any policy gradient at fixed weights.
    """

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    weights: list[torch.Tensor]
    cuts: list[list[int]] | None = None


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


def turn_rollouts(
    first: int | torch.Tensor, sessions: int, turns: int, thinking: int, said: int, tool: int, vocab_size: int,
    seed: int = 0,
) -> Rollouts:  # fmt: skip
    """Sessions of one prompt, of `first` random tokens or of these, with a row per turn. A row's prompt has of turns
    before it what was said and what the tool answered, without the thoughts. Cut at ends of messages."""
    generator = torch.Generator().manual_seed(seed)

    def some(length: int) -> torch.Tensor:
        return torch.randint(vocab_size, (length,), generator=generator)

    question, rows = some(first) if isinstance(first, int) else first, []
    for _ in range(sessions):
        prompt, cuts = question, [len(question) - 1]
        for _ in range(turns):
            response = some(thinking + said)
            rows.append((prompt, response, torch.randn(len(response), generator=generator, dtype=torch.float64), cuts))
            prompt = torch.cat([prompt, response[thinking:], some(tool)])
            cuts = [*cuts, len(prompt) - 1]
    prompts, responses, weights, cut = map(list, zip(*rows, strict=True))
    return Rollouts(prompts, responses, weights, cut)


def search_rollouts(first: int, turn: int, branches: Sequence[int], vocab_size: int, seed: int = 0) -> Rollouts:
    """A tree search from a prompt of `first` tokens: a row per leaf, whose response has a turn of `turn` tokens per
    level, each of which goes on in so many ways. Cut at ends of turns."""
    generator = torch.Generator().manual_seed(seed)
    prompt, responses = torch.randint(vocab_size, (first,), generator=generator), [torch.arange(0)]
    for ways in branches:
        turns = (torch.randint(vocab_size, (turn,), generator=generator) for _ in range(ways * len(responses)))
        responses = [torch.cat([before, next(turns)]) for before in responses for _ in range(ways)]
    weights = [torch.randn(len(r), generator=generator, dtype=torch.float64) for r in responses]
    cuts = [first + level * turn - 1 for level in range(len(branches))]
    return Rollouts([prompt] * len(responses), responses, weights, [cuts] * len(responses))


def flatten(rollouts: Rollouts, device: torch.device | str) -> tuple[TokenBatch, torch.Tensor, list[Group]]:
    """Rows behind each other: their tokens, the weight of each in float64 (a prompt's is 0), and their groups."""
    rows = [torch.cat(pair) for pair in zip(rollouts.prompts, rollouts.responses, strict=True)]
    offsets = [0, *accumulate(map(len, rows))]
    # A rank without rows still runs dummies, which need a token.
    flat = torch.cat(rows or [torch.zeros(1, dtype=torch.int64)])
    positions = torch.cat([torch.arange(len(row)) for row in rows or [flat]])
    pairs = zip(rollouts.prompts, rollouts.weights, strict=True)
    padded = [torch.nn.functional.pad(weight.double(), (len(prompt), 0)) for prompt, weight in pairs]
    weights = torch.cat(padded or [torch.zeros(1, dtype=torch.float64)])
    if rollouts.cuts is None:
        keys = [prompt.numpy().tobytes() for prompt in rollouts.prompts]
        groups = group_by_key(keys, [*map(len, rollouts.prompts)], [*map(len, rollouts.responses)])
    else:
        groups = group_trees(flat, offsets, [len(prompt) for prompt in rollouts.prompts], rollouts.cuts)
    return TokenBatch(flat.to(device), positions.to(device), offsets), weights.to(device), groups


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
    **schedule_args: Any,
) -> list[torch.Tensor]:
    """`run_stock` by `core.schedule.Schedule` (`schedule_args`). Tests break the maths by `edit`, which changes the
    tokens."""
    parameter = next(model.parameters())
    device = parameter.device
    tokens, weights, groups = flatten(rollouts, device)
    flat, offsets = tokens.input_ids, tokens.offsets
    plan = pad_to_same_passes(make_plan(groups, budget, schedule, wave_tokens), reduce_max)
    log_probs = torch.zeros(len(flat), dtype=parameter.dtype, device=device)

    def outputs(index: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1).gather(-1, flat[index + 1].unsqueeze(-1))

    def step(groups: Sequence[Group], layout: Layout, values: torch.Tensor) -> torch.Tensor:
        index = layout.read_places.to(device) + 1
        log_probs[index] = values[:, 0].detach().to(log_probs.dtype)
        return (values[:, 0] * weights[index].to(values.dtype)).sum()

    runner = Schedule(HookedModel(model), outputs, step, torch.Tensor.backward if train else None, **schedule_args)
    with torch.set_grad_enabled(train):
        runner.run(edit(tokens, plan), plan)
    return [
        log_probs[start + len(prompt) : end]
        for prompt, start, end in zip(rollouts.prompts, offsets, offsets[1:], strict=False)
    ]
