"""What this rank's device has room for: passes of the stock path; what an update keeps and need not compute again."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from verl.utils.device import get_device_name

from verl_prefix.auto.cost import ROOM_FACTOR, Memory, PassCost, may_have_all_logits, may_keep_attention, peak_bytes
from verl_prefix.auto.cost_model import CostModel
from verl_prefix.core.meter import Meter
from verl_prefix.core.plan import Plan
from verl_prefix.engine.backend import Backend

# What an update may keep and then does not compute again, the most first: (attention's outputs, all logits of a pass).
_KEPT = (True, True), (True, False), (False, True), (False, False)


class Headroom:
    """The memory that this rank's device has left, by which an engine decides. Without CUDA nobody knows it, and
    everything is taken to fit.

        capacity = allocated + free + min(cached, largest added)      after an update; the least of all updates
        room     = capacity - max(allocated + gradients to come,      before an update
                                  allocated after the last one)

    "Largest added" is an estimate: `choose_memory` predicts what each update adds, and the largest one counts. Of the
    allocator's cache a capacity has no more, since the rest may be in pieces that no pass can use. `fits` counts the
    whole cache: where that is too much, the stock path runs out of memory as it would in verl's own engine.
    """

    def __init__(self, backend: Backend, costs: CostModel) -> None:
        self._backend, self._costs = backend, costs
        self.least = costs.memory  # what passes keep at least; log-probs keep no more
        self._is_known = get_device_name() == "cuda"
        self._peak_meter = Meter()  # the last one that was to measure a peak
        # In bytes.
        self._capacity: float | None = None  # None: there was no update
        self._allocated_after_last = 0
        self._largest_added = 0.0  # predicted of any update
        self._shares_now = False  # the update that runs has asked `choose_memory`

    def fits(self, passes: Sequence[PassCost]) -> bool:
        """Whether passes of the stock path fit this rank: as an update, or as log-probs in an engine without updates.
        The chooser takes the worst of all ranks."""
        if not self._is_known:
            return True
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        free = torch.cuda.mem_get_info()[0] + cached - self._backend.gradient_bytes()
        shape = self._costs.shape
        return peak_bytes(shape, None, passes, self.least, not self._backend.trains) <= free

    @contextmanager
    def measured_update(self) -> Iterator[None]:
        """Context of an optimizer step with its passes, after which the capacity is measured."""
        self._shares_now = False
        yield
        if self._shares_now and self._is_known:
            cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            self._allocated_after_last = torch.cuda.memory_allocated()
            room = torch.cuda.mem_get_info()[0] + min(self._largest_added, cached)
            capacity = self._allocated_after_last + room
            self._capacity = capacity if self._capacity is None else min(self._capacity, capacity)

    def new_meter(self) -> Meter:
        """Makes what measures an update. It measures the peak of waves, too, until an update has had waves: this resets
        the peak that verl logs (perf/max_memory_allocated_gb)."""
        if self._is_known and not self._peak_meter.phase_b_peak:
            self._peak_meter = Meter(measure_peak=True)
            return self._peak_meter
        return Meter()

    def choose_memory(self, plan: Plan, keep_attention: str, logits_once: bool) -> Memory:
        """Decides what this update keeps, the same on every rank: the most of `_KEPT` that all ranks may keep and have
        room for. Every rank calls it, even if it may keep nothing: nodes may differ in packages and environment
        variables, and so in `logits_once`.

        Args:
            plan: this rank's.
            keep_attention: `prefix.keep_attention`.
            logits_once: `Backend.reads_logits_once`.
        """
        shape, least, ranks = self._costs.shape, self.least, self._backend.ranks
        may_keep = may_keep_attention(shape, least.checkpointed, keep_attention)
        may_have = may_have_all_logits(shape, least.logits_chunk, logits_once)
        room = math.inf
        if self._is_known:  # since the last update more may have been allocated, as another engine's moments of AdamW
            now = torch.cuda.memory_allocated() + self._backend.gradient_bytes()
            room = (self._capacity or 0.0) - max(now, self._allocated_after_last)

        def is_refused(memory: Memory, added_bytes: float) -> bool:
            keeps_more = memory.attention_kept or memory.all_logits
            is_forbidden = (memory.attention_kept and not may_keep) or (memory.all_logits and not may_have)
            has_room = ranks.pipeline_size == 1 and ROOM_FACTOR * added_bytes <= room
            return keeps_more and (is_forbidden or not has_room)

        choices = [replace(least, attention_kept=attention, all_logits=logits) for attention, logits in _KEPT]
        added = [peak_bytes(shape, plan, (), memory) for memory in choices]
        refused = ranks.max_over_ranks([is_refused(*choice) for choice in zip(choices, added, strict=True)])
        chosen = next(i for i, by_any in enumerate(refused) if not by_any)  # nobody refuses the last one
        self._shares_now, self._largest_added = True, max(self._largest_added, added[chosen])
        return choices[chosen]
