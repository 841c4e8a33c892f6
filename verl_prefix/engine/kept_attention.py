"""Decides whether updates keep attention's outputs from forward to recomputation: where every rank has room."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from verl.utils.device import get_device_name

from verl_prefix.auto.chooser import CostModel
from verl_prefix.auto.cost import ROOM_FACTOR, may_keep_attention, peak_bytes
from verl_prefix.core.waves import Plan


class KeptAttention:
    """Judges by the memory that earlier updates left whether the next one has room.

    Args:
        option: `prefix.keep_attention`. reduce_max: element-wise maximum over ranks.
    """

    def __init__(self, option: str, reduce_max: Callable[[Sequence[float]], Sequence[float]]) -> None:
        self._option, self._reduce_max = option, reduce_max
        # Bytes that an update may add, judged by earlier ones; estimates of what the largest and the present one add.
        self._seen_room = 0.0 if get_device_name() == "cuda" else math.inf
        self._most_added = self._adds = 0.0

    @contextmanager
    def update(self) -> Iterator[None]:
        """Context of an optimizer step with its passes. The allocator still holds what the largest update so far took,
        so the memory that is free on the device is what that update left."""
        self._adds = 0.0
        yield
        if self._adds and get_device_name() == "cuda":
            self._most_added = max(self._most_added, self._adds)
            room = torch.cuda.mem_get_info()[0] + self._most_added
            self._seen_room = min(self._seen_room or math.inf, room)

    def fits(self, plan: Plan, costs: CostModel) -> bool:
        """Whether every rank has room in this update, given `plan` and the plans of the other ranks."""
        if not may_keep_attention(costs.shape, costs.memory.checkpointed, self._option):
            return False
        adds = [peak_bytes(costs.shape, plan, (), replace(costs.memory, attention_kept=kept)) for kept in (False, True)]
        (any_lacks_room,) = self._reduce_max([float(ROOM_FACTOR * adds[True] > self._seen_room)])
        self._adds = adds[not any_lacks_room]
        return not any_lacks_room
