"""Runs a plan, in the phases of README.md: packed passes; and phases A, B and C, where B is passes nested in A and C.

B needs the memory of one nested pass at a time, and A and C happen once however many there are. This module knows
neither verl nor losses: what a forward returns goes to `step` where `run` computes a whole plan, or to a caller of
`forwards` that calls backward itself (`api`).
"""

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_prefix.core.forward import PackedForward, PassOutputs, TokenBatch
from verl_prefix.core.meter import Meter
from verl_prefix.core.offload import OffloadedPrefixCache
from verl_prefix.core.packed_row import PackedRow, pack_groups
from verl_prefix.core.pass_notes import NotesOfALoop, PassNote
from verl_prefix.core.plan import PackedPass, Pass, PhasedPass, Plan, Wave
from verl_prefix.core.prefix_cache import PrefixCache

# step(packed_row, outputs), the fields of a `PassOutputs` -> the loss of the packed row's rows
Step = Callable[[PackedRow, torch.Tensor], torch.Tensor]


@dataclass(eq=False)
class PhaseA:
    """A phase A that is done, until its phase C.

    Attributes:
        packed_row: its packed row.
        output: the model's, see `PackedForward.phase_a`.
        caches: the caches of the phases A around it, and its own, which is the last.
    """

    packed_row: PackedRow
    output: torch.Tensor
    caches: tuple[PrefixCache, ...]


@dataclass(eq=False)
class PlanRunner:
    """Runs the passes of a plan: packed passes, and phases A, B and C.

    Attributes:
        forward: how a packed row runs through the model.
        step: gets each pass's packed row and outputs, stores what it needs and returns the loss, already scaled so that
            losses of passes add up. It is not called for a dummy, so it must not run collectives. Only for `run`.
        backward: only for `run`: what to do with a loss; None: a forward-only run, which the caller wraps in
            `torch.no_grad`.
        gradient_sync: context of a packed pass's forward and backward, and of a phase C, given whether its backward is
            the run's last (verl's `_gradient_sync_context`). A forward-only run enters it, too.
        offload: phased only, with gradients: prefixes wait in host memory (`core.offload`), without kept attention.
        meter: measures the phases.
    """

    forward: PackedForward
    step: Step | None = None
    backward: Callable[[torch.Tensor], None] | None = None
    gradient_sync: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext()
    offload: bool = False
    meter: Meter = field(default_factory=Meter)

    def run(self, batch: TokenBatch, plan: Plan) -> None:
        """Runs all passes of `plan` in order, which must be the same on every rank; needs `step`."""
        assert self.step is not None
        with self.forward.model.grouped_attention():
            for i, planned in enumerate(plan.passes):
                with self.forwards(batch, planned, last=i == len(plan.passes) - 1) as forwards:
                    for packed_row, outputs in forwards:
                        with self.forward.context():
                            loss = outputs.sum() * 0.0 if packed_row.is_dummy else self.step(packed_row, outputs)
                        if self.backward is not None:
                            self.backward(loss)

    @contextmanager
    def forwards(self, batch: TokenBatch, planned: Pass, last: bool = True) -> Iterator[Iterator[PassOutputs]]:
        """Context of one pass, inside `grouped_attention`. Entering runs phase A. Each iteration yields one forward: of
        the packed pass, or of a nested one; phases A and C of nested passes run when the iteration reaches
        them. Leaving runs phase C. `last`: the run has no pass after this one, for `gradient_sync`.

        The caller runs a forward's backward before it asks for the next forward: contexts of this generator
        (`gradient_sync`, `meter`) stay open at the yield. After an exception, and where no prefix has a gradient, there
        is no phase C. On leaving, everything of the prefix is freed in any case.

        Raises:
            RuntimeError: on leaving, where the iterator was not exhausted, as after a break: gradients lack the rest.
        """
        if isinstance(planned, PackedPass):
            with closing(self._packed(batch, planned, last)) as packed, NotesOfALoop():
                yield packed
                _check_exhausted(packed)
            return
        with self._phases_a_and_c(batch, planned, None, last) as phase_a:
            nested = closing(self._nested(batch, planned, phase_a, last))
            with nested as forwards, NotesOfALoop(), self.meter.between_a_and_c(batch.input_ids.device):
                yield forwards
                _check_exhausted(forwards)

    @contextmanager
    def _phases_a_and_c(
        self, batch: TokenBatch, planned: PhasedPass, outer: PhaseA | None, last: bool
    ) -> Iterator[PhaseA]:
        """Context whose entering runs phase A, and whose leaving runs phase C."""
        device = batch.input_ids.device
        with self.prefix_cache(device) as cache:
            phase_a = self.phase_a(batch, planned, cache, outer)
            yield phase_a
            if phase_a.output.requires_grad:
                with self.meter.phase(PassNote("phase_c", planned.groups), device), self.gradient_sync(last):
                    cache.backward(phase_a.output)

    def _packed(
        self, batch: TokenBatch, planned: PackedPass, last: bool, outer: PhaseA | None = None, part: str = ""
    ) -> Generator[PassOutputs]:
        """Yields the one forward of a packed pass."""
        note = PassNote(planned.phase, planned.groups, part, nested=outer is not None)
        with note:
            packed_row = packed_row_of(planned, batch, outer)
        with self.meter.phase(note, batch.input_ids.device), self.gradient_sync(last):
            yield self.forward.packed(batch, packed_row, outer.caches if outer else ())

    def _nested(self, batch: TokenBatch, planned: PhasedPass, phase_a: PhaseA, last: bool) -> Generator[PassOutputs]:
        """Yields the forwards of all passes that are nested in the phase A `phase_a`."""
        # Where phase A's output has no gradient, for example when only lm_head is trained, there is no phase C. The
        # last backward here may then be the run's last.
        last = last and not phase_a.output.requires_grad
        num_waves = len(planned.waves)
        for number, nested in enumerate(planned.nested, start=1):
            is_last = last and number == len(planned.nested)
            if isinstance(nested, PackedPass):
                part = f"wave {number} of {num_waves}" if isinstance(nested, Wave) else ""
                yield from self._packed(batch, nested, is_last, phase_a, part)
            else:
                with self._phases_a_and_c(batch, nested, phase_a, is_last) as inner:
                    yield from self._nested(batch, nested, inner, is_last)

    def prefix_cache(self, device: torch.device) -> PrefixCache:
        """A cache for one phased pass, which its context frees."""
        offloads = self.offload and torch.is_grad_enabled()
        return OffloadedPrefixCache(device, self.meter.transfers) if offloads else PrefixCache()

    def phase_a(
        self, batch: TokenBatch, planned: PhasedPass, cache: PrefixCache, outer: PhaseA | None = None
    ) -> PhaseA:
        """Runs the prefixes of a pass, which `cache` gets."""
        caches = outer.caches if outer else ()
        note = PassNote(planned.phase, planned.groups)
        with note:
            packed_row = packed_row_of(planned, batch, outer)
        with self.meter.phase(note, batch.input_ids.device), cache.saving():
            output = self.forward.phase_a(batch, packed_row, cache, planned.reads_strands, caches)
        return PhaseA(packed_row, output, (*caches, cache))


def _check_exhausted(forwards: Generator[PassOutputs]) -> None:
    if inspect.getgeneratorstate(forwards) != inspect.GEN_CLOSED:
        raise RuntimeError(
            "the forwards of a pass were left before their end, so that gradients may lack rows; go through all of "
            "them, as by a for loop"
        )


def packed_row_of(planned: Pass, batch: TokenBatch, outer: PhaseA | None = None) -> PackedRow:
    """The packed row of a packed pass, or of a phase A. The pass may be nested in the phase A `outer`."""
    packed_row = pack_groups(planned.groups, batch.offsets, planned.phase, outer.packed_row if outer else None)
    return packed_row if batch.is_read is None else packed_row.with_outputs(batch.is_read)
