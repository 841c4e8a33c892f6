"""Sets a run's gradients aside while other passes run, which must not add to them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule


@contextmanager
def gradients_aside(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the model's parameters have no gradients.

    On leaving they get back those that they had, sharded ones too; gradients from passes inside are dropped. Nothing is
    copied. FSDP2 modules are resharded first: with reshard_after_forward=False they still hold gathered parameters
    after a forward, while gradients belong to the sharded ones.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    parameters = list(model.parameters())
    kept = [parameter.grad for parameter in parameters]
    model.zero_grad()
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad
