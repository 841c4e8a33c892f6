"""Outputs of rows without a graph, whose backward makes it wave by wave: phases A, B and C inside of autograd.

As gradient checkpointing, a whole batch at a time: what is alive is one wave's graph beside the prefixes', and the
price is one more forward. Gradients leave as those of any graph do: once, to the parameters that came in.
"""

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from verl_prefix.api.rows import Batch
from verl_prefix.core.schedule import Schedule
from verl_prefix.core.waves import Plan


def outputs_by_row(schedule: Schedule, batch: Batch, plan: Plan) -> Generator[dict[int, torch.Tensor]]:
    """`Batch.by_row` of every pass and wave; a backward of them comes before the next, phase C behind the last."""
    with schedule.model.grouped_attention():
        for planned in plan.passes:
            with schedule.forwards(batch.tokens, planned) as forwards:
                for done in forwards:
                    yield batch.by_row(done)


def autocast_of(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Autocast as it is now on `device`, for a backward that runs elsewhere. Casts of weights are not kept: those of a
    forward without gradients would lack them in a later one."""
    kind = device.type
    return functools.partial(
        torch.autocast,
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=False,
    )


def recomputed_by_row(model: torch.nn.Module, schedule: Schedule, batch: Batch, plan: Plan) -> dict[int, torch.Tensor]:
    """`Batch.by_row` of a whole phased plan; a backward from there runs the plan again."""
    if not plan.passes:
        return {}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flat = _PhasedOutputs.apply(model, schedule, batch, plan, *trainable)
    lens = {row: n for group in batch.groups for row, n in zip(group.rows, group.suffix_lens, strict=True) if n}
    rows = sorted(lens)
    return dict(zip(rows, flat.split([lens[row] for row in rows]), strict=True))


class _PhasedOutputs(torch.autograd.Function):
    """A phased plan of a model with these trainable parameters -> [n, k], rows with a response in increasing order."""

    @staticmethod
    def forward(
        ctx: Any,
        model: torch.nn.Module,
        schedule: Schedule,
        batch: Batch,
        plan: Plan,
        *parameters: torch.nn.Parameter,
    ) -> torch.Tensor:
        ctx.args = model, schedule, batch, plan, parameters
        ctx.versions = [parameter._version for parameter in parameters]
        found: dict[int, torch.Tensor] = {}
        for rows in outputs_by_row(schedule, batch, plan):
            found |= rows
        ctx.lens = {row: len(found[row]) for row in sorted(found)}
        return torch.cat([found[row] for row in ctx.lens])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        model, schedule, batch, plan, parameters = ctx.args
        if ctx.versions != [parameter._version for parameter in parameters]:
            raise RuntimeError(
                "a parameter was changed between response_log_probs(schedule='phased') and its backward, which runs "
                "the model again; call optimizer.step() after the backward"
            )
        grads = dict(zip(ctx.lens, grad.split(list(ctx.lens.values())), strict=True))
        with _leaves(model, parameters) as leaves, torch.enable_grad():
            with closing(outputs_by_row(schedule, batch, plan)) as waves:
                for rows in waves:
                    torch.autograd.backward(list(rows.values()), [grads[row] for row in rows])
        return None, None, None, None, *(leaf.grad for leaf in leaves)


@contextmanager
def _leaves(model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """While open, the model computes with leaves in the parameters' memory: a backward inside fills their `.grad`, so
    that hooks of the parameters, and `.grad` of theirs, see the sum of all waves and phase C, once."""
    leaves = {id(parameter): torch.nn.Parameter(parameter.detach()) for parameter in parameters}
    places = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in leaves
    ]
    for held, name, parameter in places:
        held[name] = leaves[id(parameter)]
    try:
        yield list(leaves.values())
    finally:
        for held, name, parameter in places:
            held[name] = parameter
