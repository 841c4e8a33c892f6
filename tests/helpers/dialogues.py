"""Rows as agents make them, of random tokens: kinds of trees."""

from collections.abc import Callable
from itertools import accumulate

import torch

from verl_prefix.testing import Rollouts

VOCAB = 128


class Dialogue:
    """Rows as agents make them, of random tokens."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = []

    def some(self, low: int, high: int | None = None) -> torch.Tensor:
        length = low if high is None else int(torch.randint(low, high, (1,), generator=self.generator))
        return torch.randint(3, VOCAB, (length,), generator=self.generator)

    def row(self, *prompt: torch.Tensor, response: torch.Tensor, cuts: list[int] | None = None) -> None:
        """Cut before the last token of each message of the prompt; None: before the prompt's last token."""
        ends = [*accumulate(map(len, prompt))]
        self.rows.append((torch.cat(prompt), response, [end - 1 for end in ends] if cuts is None else cuts))

    def rollouts(self) -> Rollouts:
        order = torch.randperm(len(self.rows), generator=self.generator).tolist()
        prompts, responses, cuts = zip(*(self.rows[i] for i in order), strict=True)
        weights = [torch.randn(len(r), generator=self.generator, dtype=torch.float64) for r in responses]
        return Rollouts([*prompts], [*responses], weights, [*cuts])


def system_over_prompts(d: Dialogue) -> None:
    system = d.some(19)
    for _ in range(3):
        question = d.some(3, 9)
        for _ in range(3):
            d.row(system, question, response=d.some(2, 12))


def thinking_stripped(d: Dialogue) -> None:
    """A row per call, whose prompt has the answers before it without their thoughts."""
    system, header = d.some(11), d.some(2)
    for _ in range(3):
        history = [system]
        for _ in range(3):
            answer = d.some(3, 7)
            thoughts = d.some(2, 8)
            d.row(*history, header, response=torch.cat([thoughts, answer]))
            history += [torch.cat([header, answer]), d.some(3, 9)]


def thinking_kept(d: Dialogue) -> None:
    """A row per call, whose prompt goes on behind the row before it: a response is inside the next prompt."""
    system, header = d.some(11), d.some(2)
    for _ in range(2):
        history = [system]
        for _ in range(4):
            response = d.some(3, 9)
            ends = [end - 1 for end in accumulate(map(len, history))]
            d.row(*history, header, response=response, cuts=ends)
            history += [torch.cat([header, response]), d.some(3, 9)]


def tree_search(d: Dialogue) -> None:
    """Rows that share turns of their responses."""
    prompt = d.some(15)

    def grow(turns: list[torch.Tensor], depth: int) -> None:
        if depth == 0:
            ends = [end - 1 for end in accumulate(map(len, [prompt, *turns]))]
            d.row(prompt, response=torch.cat(turns), cuts=ends[:-1])
            return
        for _ in range(2):
            grow([*turns, d.some(2, 8)], depth - 1)

    grow([], 3)


def accidents(d: Dialogue) -> None:
    """Of two tokens, so that rows agree anywhere, are equal, or lie within others; some have an empty response."""
    for _ in range(16):
        prompt = torch.randint(2, (int(torch.randint(1, 7, (1,), generator=d.generator)),), generator=d.generator)
        response = torch.randint(2, (int(torch.randint(0, 9, (1,), generator=d.generator)),), generator=d.generator)
        d.row(torch.zeros(3, dtype=torch.int64), prompt, response=response, cuts=[2, len(prompt) + 2, len(prompt) + 5])


def one_prompt(d: Dialogue) -> None:
    for _ in range(2):
        prompt = d.some(4, 20)
        for _ in range(3):
            d.row(prompt, response=d.some(2, 12))


ROWS = [one_prompt, system_over_prompts, thinking_stripped, thinking_kept, tree_search, accidents]


def rollouts(rows: Callable[[Dialogue], None], seed: int = 0) -> Rollouts:
    dialogue = Dialogue(seed)
    rows(dialogue)
    return dialogue.rollouts()
