"""Replaces forwards of a model's modules for a while, and hands them the pass that they run in."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from verl_prefix.core.context import ForwardContext


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Context in which the attribute of an instance, class or module is `value`. Around a replaced forward of a torch
    module, the module's hooks, FSDP2's among them, still run."""
    own = name in vars(owner)  # put there by accelerate, or whoever else
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if own:
            setattr(owner, name, before)


class ContextForward:
    """Base of forwards that need the forward context. Each run is told its own.

    Attributes:
        forward_context: of the run; None: nobody has told it yet.
    """

    forward_context: ForwardContext | None = None

    def end_run(self) -> None:
        """Every subclass calls it once per run, also after an error, so that no other run has this context."""
        self.forward_context = None


@contextmanager
def context_forwards(
    forwards: Mapping[torch.nn.Module, ContextForward], tellers: Iterable[torch.nn.Module], name: str = "forward"
) -> Iterator[None]:
    """Context in which modules run these forwards, or other methods of this `name`, each of which is told the forward
    context wherever it is the argument `prefix_context` of one of the modules `tellers`.

    Gradient checkpointing runs a layer again with its hooks, or, by transformers since 5.23, its forward alone. Some
    layers pass no keyword arguments to the modules in them: those that verl patches, and some of before transformers
    5.22. So both a layer and the modules that it calls are tellers.
    """
    calls = list(forwards.values())

    def tell(module: torch.nn.Module, args: object, kwargs: Mapping[str, Any]) -> None:
        for call in calls if "prefix_context" in kwargs else ():
            call.forward_context = kwargs["prefix_context"]

    with ExitStack() as undo:
        for module, call in forwards.items():
            undo.enter_context(replaced(module, name, call))
        for teller in tellers:
            undo.callback(teller.register_forward_pre_hook(tell, prepend=True, with_kwargs=True).remove)
        yield
