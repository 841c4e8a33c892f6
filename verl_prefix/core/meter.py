"""Measures what a `PlanRunner` runs: seconds of its phases, memory of its waves, bytes that offload moved."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl_prefix.core.pass_notes import PassNote


class Meter:
    """What the runs of a `PlanRunner` took.

    Args:
        measure_peak: measures `phase_b_peak`, which needs CUDA. It resets the device's peak statistics, which other
            code may read.

    Attributes:
        phase_b_peak: the most bytes allocated between phase A and its phase C; None: not measured.
        transfers: bytes and counts of `core.offload`.
    """

    def __init__(self, measure_peak: bool = False) -> None:
        self.measure_peak = measure_peak
        self.phase_b_peak: int | None = None
        self.transfers: Counter[str] = Counter()
        self._moments: list[tuple[str, Any, Any]] = []  # phase, start, end

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far by kind of phase: of packed passes and waves with loss and backward, of phases A (which are
        forwards alone), and of phases C. Reading waits for the device."""
        seconds: dict[str, float] = {}
        for phase, start, end in self._moments:
            if isinstance(end, torch.cuda.Event):
                end.synchronize()
            span = end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
            seconds[phase] = seconds.get(phase, 0.0) + span
        return seconds

    @contextmanager
    def phase(self, note: PassNote, device: torch.device) -> Iterator[None]:
        """Context that times a phase, or a part of it, and names it to torch's profiler. Errors inside get the note."""
        start = _now(device)
        with note, torch.profiler.record_function(f"prefix {note.part or note.phase}"):
            yield
        self._moments.append((note.phase, start, _now(device)))

    @contextmanager
    def between_a_and_c(self, device: torch.device) -> Iterator[None]:
        """Context of all passes between phase A and its phase C."""
        if self.measure_peak:
            torch.cuda.reset_peak_memory_stats(device)
        yield
        if self.measure_peak:
            self.phase_b_peak = max(self.phase_b_peak or 0, torch.cuda.max_memory_allocated(device))


def _now(device: torch.device) -> Any:
    """The moment: on CUDA an event, for which the host does not wait; else seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
