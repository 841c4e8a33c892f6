"""Rates of a model on a device, measured in a few small passes."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from verl_prefix.auto.cost import Rates
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.forward import TokenBatch
from verl_prefix.core.groups import Group
from verl_prefix.core.plan import PackedPass, Plan
from verl_prefix.core.runner import PlanRunner

# The most tokens of a measured segment. The largest measured pass has as many at least, unless the budget is less.
_UNIT = {"cpu": 64, "cuda": 512}
# The most tokens of a measured pass: enough for a device to reach its usual speed.
_PASS = {"cpu": 512, "cuda": 8192}
# Measuring computes at most one token for this many tokens of a batch, or if that is more, a warm-up and one round of
# passes, the largest of `_UNIT` tokens.
_SHARE = 20
_ROUNDS = 3  # at most
_ROUND = 2.5  # passes of the largest size that make as many tokens as a round


def measure(
    shape: ModelShape,
    budget: int,
    batch_tokens: int,
    device: torch.device,
    new_runner: Callable[..., PlanRunner],
    gradients_aside: Callable[[], AbstractContextManager[None]],
    forward_only: bool,
) -> Rates:
    """Rates of packed passes over made-up rows; gradients stay as they are.

    Args:
        shape: of the model. device: where it runs.
        budget: most tokens of a pass. batch_tokens: see `effort`.
        new_runner: makes a `PlanRunner` of the run's kind from (outputs, step, forward_only).
        gradients_aside: context in which the model's parameters have no gradients; those that they had come back.
        forward_only: measure passes without backward. During log-probs gradients may have no memory.
    """
    max_tokens, rounds = effort(min(budget, _PASS[device.type]), _UNIT[device.type], batch_tokens)
    unit = max(2, min(_UNIT[device.type], max_tokens // 8))
    offsets = [i * unit for i in range(_num_segments(max_tokens, unit) + 1)]
    index = torch.arange(offsets[-1] + 1, device=device)
    tokens = TokenBatch(index % shape.vocab_size, index % unit, offsets)
    runner = new_runner(
        lambda _, logits: torch.logsumexp(logits.float(), -1, keepdim=True),
        lambda packed_row, outputs: outputs.sum() * 0.0,
        forward_only,
    )

    def run(groups: Sequence[Group]) -> None:
        runner.run(tokens, Plan((PackedPass(tuple(groups)),)))
        if device.type == "cuda":
            torch.cuda.synchronize()

    with torch.no_grad() if forward_only else gradients_aside():
        return calibrate(shape, run, max_tokens=max_tokens, unit=unit, rounds=rounds)


def effort(most: int, least: int, batch_tokens: int) -> tuple[int, int]:
    """How much to measure for a batch: (tokens of a pass, rounds).

    Args:
        most, least: limits of a pass's tokens; `most` wins where they disagree.
        batch_tokens: tokens that the stock path computes of the batch; the same number on every rank.
    """
    allowed = batch_tokens / _SHARE
    max_tokens = min(most, max(least, int(allowed / (1 + _ROUND))))
    return max_tokens, min(_ROUNDS, max(1, int((allowed - max_tokens) / (_ROUND * max_tokens))))


def calibrate(
    shape: ModelShape, run: Callable[[Sequence[Group]], None], max_tokens: int, unit: int, rounds: int = _ROUNDS
) -> Rates:
    """Measures the rates in small packed passes; the fastest of `rounds` counts.

    Args:
        run: computes these groups in one packed pass and waits for the device. Row i starts at the batch's token
            `i * unit`.
        max_tokens: of one pass. unit: tokens of a segment, at least 2.
    """
    many = _num_segments(max_tokens, unit)
    few = max(1, many // 4)
    # Prefix segments with a suffix of one token: next to no lm_head.
    short = [Group.of_prompt((i,), unit - 1, (1,)) for i in range(many)]
    long = [Group.of_prompt((0,), many * unit - 1, (1,))]
    suffixes = [Group.of_prompt((i,), 0, (unit,)) for i in range(few)]
    probes = {"few": short[:few], "many": short, "long": long, "head": suffixes}
    run(short)  # warm-up
    seconds = dict.fromkeys(probes, float("inf"))
    for _ in range(rounds):
        for name, groups in probes.items():
            start = time.perf_counter()
            run(groups)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    passes = [shape.pass_of(groups) for groups in probes.values()]
    amounts = [(1.0, p.linear(shape), p.pairs * shape.pair, p.head_tokens * shape.head) for p in passes]
    return Rates(*_nonnegative_solution(torch.tensor(amounts).double(), torch.tensor(list(seconds.values())).double()))


def _nonnegative_solution(amounts: torch.Tensor, seconds: torch.Tensor) -> list[float]:
    """Rates by least squares from `amounts` [passes, rates] and `seconds` [passes]. A rate that noise makes negative is
    0, and the others are fitted again."""
    scale = amounts.amax(0)
    kept = [column for column in range(amounts.shape[1]) if scale[column] > 0]  # a model may have no attention
    while kept:
        rates = torch.linalg.lstsq((amounts / scale)[:, kept], seconds.unsqueeze(1)).solution[:, 0] / scale[kept]
        if (rates >= 0).all():
            break
        kept.remove(kept[int(torch.argmin(rates * scale[kept]))])
    by_column = dict(zip(kept, rates.tolist(), strict=True))
    return [by_column.get(column, 0.0) for column in range(amounts.shape[1])]


def _num_segments(max_tokens: int, unit: int) -> int:
    return max(2, min(16, max_tokens // unit))
