"""What users set where a model cannot share prefixes."""

from collections.abc import Iterator
from contextlib import contextmanager

from verl_prefix.core.errors import CannotShare

WITHOUT_SHARING = "actor_rollout_ref.actor.prefix.schedule=stock"  # users of verl, whatever their engine
WHOLE_ROWS = f"set {WITHOUT_SHARING}, or without verl call the model on whole rows"


@contextmanager
def advising() -> Iterator[None]:
    """Context, or decorator, of a model's forward: errors of `core` that its layers raise also say what to set."""
    try:
        yield
    except CannotShare as error:
        error.args = (f"{error}; {WHOLE_ROWS}",)
        raise
