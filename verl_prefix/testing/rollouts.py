"""Random rollouts, and their rows behind each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from verl_prefix.core.forward import TokenBatch
from verl_prefix.core.groups import Group, group_by_key
from verl_prefix.core.trees import group_trees


@dataclass(frozen=True)
class Rollouts:
    """Rows of a batch. Their loss is the weighted sum of response log-probs: any policy gradient at fixed weights.

    Attributes:
        prompts, responses: int64 tokens of each row. weights: float64, of each response token.
        cuts: of each row, see `core.trees.group_trees`; None: rows share whole prompts alone.
    """

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    weights: list[torch.Tensor]
    cuts: list[list[int]] | None = None


def turn_rollouts(
    first: int | torch.Tensor, sessions: int, turns: int, thinking: int, said: int, tool: int, vocab_size: int,
    seed: int = 0,
) -> Rollouts:  # fmt: skip
    """Sessions of one prompt with a row per turn, cut at ends of messages. A row's prompt has what was said in the
    turns before it and what the tool answered, without the thoughts.

    Args:
        first: the prompt, or its number of random tokens. thinking, said, tool: tokens of each turn.
    """
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
    """A tree search with a row per leaf, cut at ends of turns. A response has a turn for each level.

    Args:
        first, turn: tokens of the prompt, and of a turn. branches: in how many ways a row goes on at each level.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt, responses = torch.randint(vocab_size, (first,), generator=generator), [torch.arange(0)]
    for ways in branches:
        turns = (torch.randint(vocab_size, (turn,), generator=generator) for _ in range(ways * len(responses)))
        responses = [torch.cat([before, next(turns)]) for before in responses for _ in range(ways)]
    weights = [torch.randn(len(r), generator=generator, dtype=torch.float64) for r in responses]
    cuts = [first + level * turn - 1 for level in range(len(branches))]
    return Rollouts([prompt] * len(responses), responses, weights, [cuts] * len(responses))


def flatten(rollouts: Rollouts, device: torch.device | str) -> tuple[TokenBatch, torch.Tensor, list[Group]]:
    """Rows one behind the other: their tokens, float64 weights (0 of a prompt's tokens), and their groups."""
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
