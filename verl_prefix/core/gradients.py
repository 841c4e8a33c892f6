"""Gradients that a run has gathered, while passes run that are none of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def gradients_aside(model: torch.nn.Module) -> Iterator[None]:
    """While open, the model's parameters have no gradients; then those that they had before, sharded ones too, and what
    passes left is dropped. Nothing is copied."""
    parameters = list(model.parameters())
    gathered = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, gathered, strict=True):
            parameter.grad = grad
