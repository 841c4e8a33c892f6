"""Rounding noise, the unit of the self-check: how it is made, and errors that are measured by it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Figure(NamedTuple):
    """How far the shared path is off.

    Attributes:
        ratio: in units of rounding noise; never a NaN (`ratio_of`).
        limit: the largest ratio that is right.
        where: what is off most.
    """

    ratio: float
    limit: float
    where: str

    @property
    def missed(self) -> bool:
        return self.ratio > self.limit

    def __str__(self) -> str:
        return f"{self.where} by {self.ratio:.3g} times rounding noise (at most {self.limit:g})"


def ratio_of(error: float, noise: float) -> float:
    """Returns the ratio of two norms, given their squares. 0 / 0 is 0, as where responses are empty. A NaN becomes
    infinity, which no later maximum hides."""
    ratio = (error / max(noise, 1e-300)) ** 0.5
    return math.inf if math.isnan(ratio) else ratio


def sum_of_squares(x: torch.Tensor) -> float:
    return x.double().square().sum().item()


class Rounding:
    """Rounds tensors differently each time, by a random state of its own."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def disturb(self, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        """Returns x, off by up to one rounding step `eps`; None: that of x's dtype."""
        if x.device not in self._generators:
            self._generators[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        step = torch.finfo(x.dtype).eps if eps is None else eps
        from_minus_1_to_1 = 2 * torch.rand(x.shape, device=x.device, generator=self._generators[x.device]) - 1
        return (x * (1 + step * from_minus_1_to_1)).to(x.dtype)


@contextmanager
def disturbed_outputs(
    attention: Sequence[torch.nn.Module], recurrent: Sequence[torch.nn.Module], dtype: torch.dtype, seed: int
) -> Iterator[None]:
    """Context in which every output of these modules is off by up to one rounding step of `dtype`, differently each
    time. So is the output's gradient and, in fp32, the input of recurrent mixers.

    Args:
        attention: modules that return a tensor, or a tuple that begins with one.
        recurrent: mixers that return the same; their input is the first argument, or `hidden_states`.
        seed: of a random state that the run does not share.
    """
    eps = torch.finfo(dtype).eps
    rounding = Rounding(seed)

    def disturb_output(module: torch.nn.Module, args: tuple, output: Any) -> Any:
        out = rounding.disturb(output[0] if isinstance(output, tuple) else output, eps)
        if out.requires_grad:
            out.register_hook(lambda grad: rounding.disturb(grad, eps))
        return (out, *output[1:]) if isinstance(output, tuple) else out

    def disturb_input(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (rounding.disturb(args[0], eps), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": rounding.disturb(kwargs["hidden_states"], eps)}

    handles = [module.register_forward_hook(disturb_output) for module in [*attention, *recurrent]]
    # In fp32 a scan rounds more inside (decays are differences of sums) than its output is rounded.
    if dtype == torch.float32:
        handles += [module.register_forward_pre_hook(disturb_input, with_kwargs=True) for module in recurrent]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
