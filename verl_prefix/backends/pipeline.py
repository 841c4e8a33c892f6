"""Runs a plan on the stages of a Megatron pipeline.

A plan's phased passes run in rounds (`Plan.rounds`). A round has three steps:

    phases A    one after the other, each from the first stage to the last
    1F1B        mcore's own schedule; its micro-batches are the waves of all these phases A, and in the first round the
                packed passes before them
    phases C    one after the other, each from the last stage to the first

So the pipeline fills and drains once for a round, and not once for each pass. Only hidden states, their gradients and
shapes travel. What suffixes read of a prefix stays on its stage, and so do the gradients that they send back.

The graphs of a round's prefixes live at once. With `offload` there is one round, whose graphs wait on the host: the
device then has keys and values of no more prefixes than the pipeline has stages. Without backward each prefix has a
round of its own.

Source: megatron-core 0.16.1, megatron/core/pipeline_parallel/schedules.py
(forward_backward_pipelining_without_interleaving), p2p_communication.py.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch

from verl_prefix.backends.megatron_runner import MegatronRunner
from verl_prefix.core.forward import TokenBatch
from verl_prefix.core.offload import OffloadedPrefixCache
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.pass_notes import NotesOfBackwards, PassNote
from verl_prefix.core.plan import PackedPass, PhasedPass, Plan
from verl_prefix.core.prefix_cache import PrefixCache
from verl_prefix.core.runner import PhaseA, packed_row_of
from verl_prefix.models.mcore import unwrapped
from verl_prefix.models.mcore_pipeline import Neighbours, run_1f1b


class _Begun(NamedTuple):
    """A phased pass between its phases A and C.

    Attributes:
        planned: the pass.
        phase_a: its phase A, which has run.
        received: the hidden states that the previous stage has sent; None on the first stage.
    """

    planned: PhasedPass
    phase_a: PhaseA
    received: torch.Tensor | None


class _MicroBatch(NamedTuple):
    """A micro-batch of the 1F1B: a packed pass, or a wave.

    Attributes:
        packed_row: its packed row.
        caches: the caches that a wave reads; none for a packed pass.
        note: which pass it is, for errors.
    """

    packed_row: PackedRow
    caches: tuple[PrefixCache, ...]
    note: PassNote

    @classmethod
    def of(cls, planned: PackedPass, batch: TokenBatch, outer: PhaseA | None = None, part: str = "") -> "_MicroBatch":
        note = PassNote(planned.phase, planned.groups, part)
        with note:
            packed_row = packed_row_of(planned, batch, outer)
        return cls(packed_row, outer.caches if outer else (), note)


@dataclass(eq=False)
class PipelineRunner(MegatronRunner):
    """A runner for several stages, each of which has a part of the layers. Every stage has the same plan."""

    def _scale_auxiliary_losses(self, plan: Plan, device: torch.device) -> None:
        """Does nothing: mcore's schedule (`run_1f1b`) scales the losses by its number of micro-batches."""

    def _run_passes(self, batch: TokenBatch, plan: Plan) -> None:
        """Runs the passes in rounds."""
        assert plan.depth < 2, "stages run phases A apart, and would leave out what is nested in them"
        rounds: Sequence[Sequence[PhasedPass]] = plan.rounds
        if self.backward is None:  # nothing of a prefix is needed after its waves
            rounds = [[], *([phased] for phased in plan.phased)]  # the first round has packed passes alone
        packed: Sequence[PackedPass] = plan.packed
        neighbours = Neighbours(unwrapped(self.module))
        with self.forward.model.grouped_attention():
            for phased in rounds:
                self._run_round(batch, packed, phased, neighbours)
                packed = []  # all packed passes have run in the first round

    def _run_round(
        self, batch: TokenBatch, packed: Sequence[PackedPass], phased: Sequence[PhasedPass], neighbours: Neighbours
    ) -> None:
        """Runs phases A, then packed passes and waves by one 1F1B, then phases C.

        Each phase C frees its graph and its hidden states before the next phase C begins: `begun.pop()` gives up the
        last reference to them. So no other local variable here may refer to a pass in `begun`.
        """
        device = batch.input_ids.device
        with ExitStack() as open_caches:
            begun = [self._begin(batch, planned, neighbours, open_caches) for planned in phased]
            micro_batches = _micro_batches(batch, packed, begun)
            groups = [group for micro_batch in micro_batches for group in micro_batch.packed_row.groups]
            with ExitStack() as measured:
                if begun:
                    measured.enter_context(self.meter.between_a_and_c(device))
                measured.enter_context(self.meter.phase(PassNote("wave" if begun else "packed", groups), device))
                self._run_1f1b(batch, micro_batches)
            micro_batches.clear()  # they would keep the caches of phases A
            while begun:
                self._phase_c(begun.pop(), neighbours, device)

    def _begin(self, batch: TokenBatch, planned: PhasedPass, neighbours: Neighbours, open_caches: ExitStack) -> _Begun:
        """Runs a phase A, between receiving hidden states from the previous stage and sending them to the next one.
        `open_caches` will free its cache."""
        cache = open_caches.enter_context(self.prefix_cache(batch.input_ids.device))
        received = neighbours.receive_hidden()
        neighbours.take(received)
        phase_a = self.phase_a(batch, planned, cache)
        neighbours.send_hidden(phase_a.output)
        if isinstance(cache, OffloadedPrefixCache):
            cache.put_away()
            _free_but_keep_shape(phase_a.output)
            if received is not None:
                _free_but_keep_shape(received)
        return _Begun(planned, phase_a, received)

    def _run_1f1b(self, batch: TokenBatch, micro_batches: Sequence[_MicroBatch]) -> None:
        """Runs forwards and backwards of packed passes and waves in mcore's order."""
        waiting = iter(micro_batches)
        caches = itertools.chain(*(micro_batch.caches for micro_batch in micro_batches))
        offloaded = {cache for cache in caches if isinstance(cache, OffloadedPrefixCache)}
        with NotesOfBackwards() as backwards:

            def forward() -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
                """Returns this stage's output of the next micro-batch, and the function by which the last stage
                computes the loss from its output."""
                micro_batch = next(waiting)
                for cache in offloaded:
                    if cache not in micro_batch.caches:
                        cache.put_away()
                with micro_batch.note:
                    outputs = self.forward.packed(batch, micro_batch.packed_row, micro_batch.caches).outputs
                backwards.follow(outputs, micro_batch.note)
                return outputs, functools.partial(self._loss, micro_batch)

            run_1f1b(self.module, forward, len(micro_batches), forward_only=self.backward is None)

    def _loss(self, micro_batch: _MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        """Computes a micro-batch's loss, on the last stage."""
        assert self.step is not None
        if micro_batch.packed_row.is_dummy:
            return outputs.sum() * 0.0
        with micro_batch.note:
            return self.step(micro_batch.packed_row, outputs)

    def _phase_c(self, begun: _Begun, neighbours: Neighbours, device: torch.device) -> None:
        """Runs the backward of a phase A, between receiving a gradient from the next stage and sending one to the
        previous stage. A stage that trains no layer has no backward, but the next stage sends it a gradient, too."""
        if self.backward is None:
            return
        output = begun.phase_a.output
        (cache,) = begun.phase_a.caches
        grad = neighbours.receive_gradient(output)
        if output.requires_grad:
            with self.meter.phase(PassNote("phase_c", begun.planned.groups), device):
                cache.backward(output, grad)
        neighbours.send_gradient(begun.received)


def _micro_batches(batch: TokenBatch, packed: Sequence[PackedPass], begun: Sequence[_Begun]) -> list[_MicroBatch]:
    """Returns packed passes, then the waves of phased passes, as micro-batches."""
    micro_batches = [_MicroBatch.of(planned, batch) for planned in packed]
    for planned, phase_a, _ in begun:
        for number, wave in enumerate(planned.waves, start=1):
            micro_batches.append(_MicroBatch.of(wave, batch, phase_a, f"wave {number} of {len(planned.waves)}"))
    return micro_batches


def _free_but_keep_shape(hidden: torch.Tensor) -> None:
    """Frees the memory of hidden states that wait for their phase C. Autograd and the receipt of gradients still need
    the tensor's shape, but no values: what backward reads has been copied to the host."""
    hidden.data = hidden.new_empty(()).expand_as(hidden)
