"""How long an update takes on the stages of a pipeline, and how much of it they wait.

A stage runs its work in a fixed order, that of `backends.pipeline` and of megatron-core's 1F1B, and waits for hidden
states of the stage before and for gradients of the stage behind. Here is when it could do so. With m equal
micro-batches on p stages, and nothing to send, that is the bubble of (p - 1) / (m + p - 1) that arXiv 2104.04473,
section 2.2, has. Log-probs have the rounds of an update here, while `backends.pipeline` runs each of their phased
passes in a round of its own.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """Seconds of a micro-batch.

    Attributes:
        forward, backward: in the layers of all stages together, of which each stage has the same part.
        head_forward, head_backward: in lm_head with the loss, which the last stage has.
        sent: in which a stage sends hidden states to the next stage, or their gradients to the one before, and does
            nothing else.
    """

    forward: float
    backward: float
    head_forward: float = 0.0
    head_backward: float = 0.0
    sent: float = 0.0


class Round(NamedTuple):
    """What runs together.

    Attributes:
        prefixes: those that live together, with phase A as forward and phase C as backward.
        micro_batches: packed passes and waves, which run between these phases.
    """

    prefixes: Sequence[Work]
    micro_batches: Sequence[Work]


class Timeline(NamedTuple):
    """When stages are done, and how much they wait.

    Attributes:
        ends: seconds until each stage is done.
        bubble: the part of the time until the last one is done in which a stage waits or sends, on average.
    """

    ends: tuple[float, ...]
    bubble: float

    @property
    def seconds(self) -> float:
        return max(self.ends)


def _order(rounds: Sequence[Round], behind: int, forward_only: bool) -> Iterator[tuple[bool, int, Work]]:
    """What a stage runs: (whether it is forward, number of the micro-batch, its work).

    Args:
        behind: stages behind this one.
    """
    number = 0
    for prefixes, micro_batches in rounds:
        begun = [*enumerate(prefixes, number)]
        waves = [*enumerate(micro_batches, number + len(begun))]
        number += len(begun) + len(waves)
        yield from ((True, *one) for one in begun)
        warm = len(waves) if forward_only else min(behind, len(waves))
        yield from ((True, *one) for one in waves[:warm])
        if forward_only:
            continue
        for ahead, one in zip(waves[warm:], waves, strict=False):
            yield (True, *ahead)
            yield (False, *one)
        yield from ((False, *one) for one in waves[len(waves) - warm :])
        yield from ((False, *one) for one in reversed(begun))


def timeline(rounds: Sequence[Round], stages: int, forward_only: bool = False) -> Timeline:
    """When the stages are done with these rounds."""
    orders = [[*_order(rounds, stages - 1 - stage, forward_only)] for stage in range(stages)]
    done: list[dict[tuple[bool, int], float]] = [{} for _ in orders]  # by stage; when it was, of what has run
    now, busy, left = [0.0] * stages, 0.0, sum(map(len, orders))
    while left:  # each time some stage goes on: no order of `_order` lets stages wait for each other
        for stage, order in enumerate(orders):
            while len(done[stage]) < len(order):
                is_forward, number, work = order[len(done[stage])]
                other = stage - 1 if is_forward else stage + 1
                ready = done[other].get((is_forward, number)) if 0 <= other < stages else 0.0
                if ready is None:
                    break
                seconds = (work.forward if is_forward else work.backward) / stages
                if stage == stages - 1:
                    seconds += work.head_forward if is_forward else work.head_backward
                sent = work.sent if stage != (stages - 1 if is_forward else 0) else 0.0
                now[stage] = done[stage][is_forward, number] = max(now[stage], ready) + seconds + sent
                busy, left = busy + seconds, left - 1
    end = max(now)
    return Timeline(tuple(now), 1 - busy / (stages * end) if end else 0.0)
