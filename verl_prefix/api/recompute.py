"""Outputs of rows without a graph. Their backward computes them again, wave by wave: phases A, B and C inside autograd.

This is gradient checkpointing of a whole batch. One wave's graph at a time is alive, beside the prefixes' graph; the
price is one more forward. Every parameter gets its gradient once, as from any graph.
"""

import functools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, NoReturn

import torch
from torch.autograd.function import once_differentiable

from verl_prefix.api.rows import Batch, row_lens, split_rows
from verl_prefix.core.plan import Plan
from verl_prefix.core.runner import PlanRunner


def outputs_by_row(runner: PlanRunner, batch: Batch, plan: Plan) -> Generator[dict[int, torch.Tensor]]:
    """Yields `Batch.by_row` of every pass and wave. The caller runs a backward before it asks for the next one; phase C
    follows the last."""
    with runner.forward.model.grouped_attention():
        for planned in plan.passes:
            with runner.forwards(batch.tokens, planned) as forwards:
                for done in forwards:
                    yield batch.by_row(done)


def autocast_of(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Makes contexts with the autocast that `device` has now, for a backward that runs outside of it. They cache no
    casts of weights: those of a forward without gradients would have none in a later forward, either."""
    kind = device.type
    return functools.partial(
        torch.autocast,
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=False,
    )


def recomputed_by_row(model: torch.nn.Module, runner: PlanRunner, batch: Batch, plan: Plan) -> dict[int, torch.Tensor]:
    """`Batch.by_row` of a whole phased plan; a backward from there runs the plan again."""
    if not plan.passes:
        return {}
    lens = row_lens(batch.groups)
    return split_rows(_PhasedOutputs.apply(model, runner, batch, plan, lens, *_trainable(model)), lens)


class _PhasedOutputs(torch.autograd.Function):
    """Runs a phased plan of a model with these trainable parameters. Returns outputs [n, k] of all rows, one after the
    other as in `lens`."""

    @staticmethod
    def forward(
        ctx: Any,
        model: torch.nn.Module,
        runner: PlanRunner,
        batch: Batch,
        plan: Plan,
        lens: dict[int, int],
        *parameters: torch.nn.Parameter,
    ) -> torch.Tensor:
        ctx.args = model, runner, batch, plan, lens, parameters
        ctx.versions = [parameter._version for parameter in parameters]
        by_row = {row: x for rows in outputs_by_row(runner, batch, plan) for row, x in rows.items()}
        ctx.bound = _bound(model, batch.device)
        outputs = torch.cat([by_row[row] for row in lens])
        ctx.save_for_backward(outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        model, runner, batch, plan, lens, parameters = ctx.args
        # Versions are exact: they show even the step of a small learning rate, which rounding hides in the outputs.
        now = _trainable(model)
        if [*map(id, parameters)] != [*map(id, now)] or ctx.versions != [parameter._version for parameter in now]:
            _changed("a parameter was changed, or whether it is trained")
        grads, before = split_rows(grad, lens), split_rows(ctx.saved_tensors[0], lens)
        with _leaves(model, parameters) as leaves, torch.enable_grad():
            with closing(outputs_by_row(runner, batch, plan)) as waves:
                for rows in waves:
                    _check_same(rows, before, batch.dtype, ctx.bound)
                    torch.autograd.backward(list(rows.values()), [grads[row] for row in rows])
        return None, None, None, None, None, *(leaf.grad for leaf in leaves)


def _trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _bound(model: torch.nn.Module, device: torch.device) -> float:
    """The largest relative difference that two runs of the same computation may show: that of half the digits of its
    coarsest dtype, and 3 % at most.

    On a CPU two runs are bitwise equal. On CUDA, where atomics add in another order each time, their last digits may
    differ. Another adapter, a dropout mask or other weights change the first digits. bf16 has but two digits, so that a
    change as small as rounding is not seen.
    """
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if torch.is_autocast_enabled(device.type):
        kinds.add(torch.get_autocast_dtype(device.type))
    return min(math.sqrt(max(torch.finfo(kind).eps for kind in kinds)), 0.03)


def _check_same(
    rows: dict[int, torch.Tensor], before: dict[int, torch.Tensor], dtype: torch.dtype, bound: float
) -> None:
    """Raises RuntimeError where a wave's outputs are not those that it had in the forward."""
    with torch.no_grad():
        old = torch.cat([before[row].flatten() for row in rows]).to(dtype)
        difference = (torch.cat([x.flatten() for x in rows.values()]).to(dtype) - old).square().mean().sqrt()
        # Log-probs near 0 are rounded as the logits that they are made of, which are larger: hence the 1. NaN is not
        # raised here, since the loss has it already.
        if difference > bound * old.square().mean().sqrt().clamp(min=1.0):
            _changed(f"in rows {sorted(rows)} outputs are off by {difference.item():.2g} (root mean square)")


def _changed(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what}: the backward of a call with schedule='phased' runs the model again, and it is not as it was in the "
        "call. Call optimizer.step(), change weights, switch or merge adapters and call train() or eval() after the "
        "backward, or pass schedule='packed'"
    )


@contextmanager
def _leaves(model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Context in which the model computes with leaves that share the parameters' memory. A backward inside fills the
    leaves' `.grad`. The parameters' own hooks and `.grad` then see the sum of all waves and phase C, once."""
    leaves = {id(parameter): torch.nn.Parameter(parameter.detach()) for parameter in parameters}
    slots = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in leaves
    ]
    for held, name, parameter in slots:
        held[name] = leaves[id(parameter)]
    try:
        yield list(leaves.values())
    finally:
        for held, name, parameter in slots:
            held[name] = parameter
