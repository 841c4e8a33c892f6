"""Errors of core, to which `models.advice` adds what the user can set instead, and how messages are made."""

from collections.abc import Sequence
from typing import Literal

Remedy = Literal["16 bits", "flash-attn"]
_MANY = 8  # items that a message lists


class CannotShare(RuntimeError):
    """A model's layers run otherwise than a shared prefix needs."""


class NoKernel(ValueError):
    """The attention kernel that was asked for is unknown, or cannot run a layer's inputs."""


class NoFastKernel(NoKernel):
    """No fast attention kernel for a GPU can run a layer's inputs. The slow `reference` can, where it is asked for.

    Args:
        remedy: with what a fast kernel would run the inputs: if they had 16 bits, or with the package flash-attn; None:
            no fast kernel takes them at all.
    """

    def __init__(self, message: str, remedy: Remedy | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an error. Python 3.10 has no notes: there the note is appended to the message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def listed(items: Sequence[object]) -> str:
    """Items in words, the first few of many."""
    return ", ".join(map(str, items[:_MANY])) + (f" and {len(items) - _MANY} more" if len(items) > _MANY else "")
