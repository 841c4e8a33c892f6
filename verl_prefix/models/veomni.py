"""Models as VeOmni builds them (veomni 0.1.12): what their own code wants otherwise, and what it cannot share.

Its classes are transformers' with forwards of their own (veomni/models/transformers/*/generated): towers and gated
delta nets slice and exchange tokens by VeOmni's parallel state, where `core.sequence_parallel` does it.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from verl_prefix.models.replaced import replaced


@contextmanager
def unsliced() -> Iterator[None]:
    """Context in which VeOmni's own code takes the tokens and patches that it gets for whole rows, which no other rank
    has a part of. Its sizes of data and expert parallelism stay, also where backward runs layers again.

    By itself a tower slices positions of patches, and attention and gated delta nets exchange heads
    (veomni/distributed/parallel_state.py, `ulysses_size`)."""
    module = sys.modules.get("veomni.distributed.parallel_state")
    state = getattr(module, "_PARALLEL_STATE", None)
    if state is None or not state.sp_enabled:
        yield
        return
    alone = copy.copy(state)
    for name, value in dict(ulysses_size=1, cp_size=1, async_enabled=False).items():
        object.__setattr__(alone, name, value)  # a frozen dataclass, which checks sizes against ranks where it is made
    with replaced(module, "_PARALLEL_STATE", alone):
        yield
