"""Errors of core, and how messages are made."""

from collections.abc import Sequence

_MANY = 8  # items that a message lists


# `models.advice` appends to these errors which option the user can set instead.
class CannotShare(RuntimeError):
    """A model's layers run otherwise than a shared prefix needs."""


class NoKernel(ValueError):
    """The attention kernel that was asked for is unknown, or cannot run a layer's inputs."""


class NoFastKernel(NoKernel):
    """No fast attention kernel for a GPU can run a layer's inputs. The slow `reference` can, where it is asked for.

    Args:
        in_16_bits: the inputs have 16 bits. Fast kernels take no others.
    """

    def __init__(self, message: str, in_16_bits: bool = True) -> None:
        super().__init__(message)
        self.in_16_bits = in_16_bits


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an error. Python 3.10 has no notes: there the note is appended to the message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def listed(items: Sequence[object]) -> str:
    """Items in words, the first few of many."""
    return ", ".join(map(str, items[:_MANY])) + (f" and {len(items) - _MANY} more" if len(items) > _MANY else "")
