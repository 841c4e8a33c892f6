"""Decides what updates keep instead of computing it again in backward, where every rank has room: attention's outputs
and logits."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from verl.utils.device import get_device_name

from verl_prefix.auto.chooser import CostModel
from verl_prefix.auto.cost import ROOM_FACTOR, Memory, may_have_all_logits, may_keep_attention, peak_bytes
from verl_prefix.core.waves import Plan


class Room:
    """Judges by the memory that earlier updates left what the next one may keep.

    Args:
        reduce_max: element-wise maximum over ranks.
    """

    def __init__(self, reduce_max: Callable[[Sequence[float]], Sequence[float]]) -> None:
        self._reduce_max = reduce_max
        self._seen = 0.0 if get_device_name() == "cuda" else math.inf  # bytes that an update may add, by earlier ones
        self._most_added = self._adds = 0.0  # estimates of what the largest and the present one add

    @contextmanager
    def update(self) -> Iterator[None]:
        """Context of an optimizer step with its passes. The allocator still holds what the largest update so far took,
        so the memory that is free on the device is what that update left."""
        self._adds = 0.0
        yield
        if self._adds and get_device_name() == "cuda":
            self._most_added = max(self._most_added, self._adds)
            self._seen = min(self._seen or math.inf, torch.cuda.mem_get_info()[0] + self._most_added)

    def memory(self, plan: Plan, costs: CostModel, option: str, one_copy: bool) -> Memory:
        """What this update keeps, the same on every rank: attention's outputs and all logits of a pass, attention's
        outputs alone, or neither.

        Args:
            plan: this rank's. option: `prefix.keep_attention`. one_copy: `outputs.reads_logits_once`.
        """
        shape, least = costs.shape, costs.memory
        attention = may_keep_attention(shape, least.checkpointed, option)
        all_logits = may_have_all_logits(shape, least.logits_chunk, one_copy)
        if not attention and not all_logits:
            return least
        more = replace(least, attention_kept=attention)
        choices = (replace(more, all_logits=all_logits), more, least)
        adds = [peak_bytes(shape, plan, (), memory) for memory in choices]
        fits = [ROOM_FACTOR * added <= self._seen for added in adds[:-1]]
        (chosen,) = self._reduce_max([float([*fits, True].index(True))])
        self._adds = adds[int(chosen)]
        return choices[int(chosen)]
