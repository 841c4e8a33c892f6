"""Gradients that a run has gathered, while passes run that are none of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule


@contextmanager
def gradients_aside(model: torch.nn.Module) -> Iterator[None]:
    """While open, the model's parameters have no gradients; then those that they had before, sharded ones too, and what
    passes left is dropped. Nothing is copied.

    FSDP2 modules are sharded first: with reshard_after_forward=False they hold gathered parameters behind a forward,
    and gradients belong to the sharded ones.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    parameters = list(model.parameters())
    gathered = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, gathered, strict=True):
            parameter.grad = grad
