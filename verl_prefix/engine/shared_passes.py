"""Runs a plan's passes by core's runner, with verl's outputs and losses."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from verl_prefix.auto.cost import Memory
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.groups import Group
from verl_prefix.core.meter import Meter
from verl_prefix.core.plan import Plan
from verl_prefix.core.planning import pad_to_same_passes
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.dead_rows import num_dead
from verl_prefix.engine.fields import RECORDS
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.metrics.pass_metrics import plan_metrics
from verl_prefix.engine.pass_results import PassResults
from verl_prefix.engine.rows import BatchRows


class SharedPasses:
    """Runs shared passes on an engine's model, for its mini-batches and for its self-check."""

    def __init__(self, backend: Backend, options: PrefixConfig) -> None:
        self._backend, self._options = backend, options

    def run(
        self,
        rows: BatchRows,
        groups: Sequence[Group],
        plan: Plan,
        memory: Memory,
        loss: Loss,
        forward_only: bool,
        *,
        meter: Meter | None = None,
        hides_padding: bool = False,
        context_type: Callable[..., ForwardContext] = ForwardContext,
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Runs all passes of this rank's plan. Every rank calls it.

        Args:
            rows: the rows that this rank computes, with the fields that verl adds for a loss.
            groups: of these rows, with idle groups.
            plan: of these groups.
            memory: what the passes keep.
            meter: what measures the passes.
            hides_padding: rows of padding are hidden from the loss (`PassResults`).
            context_type: as in `core.forward.PackedForward`.

        Returns:
            verl's output of the rows, and metrics.
        """
        plan = pad_to_same_passes(plan, self._backend.ranks.max_over_ranks)
        # Routers count a row's last token in updates, which replay the routes that log-probs record (R2).
        last_tokens = self._backend.counts_last_tokens and (not forward_only or rows.flag(RECORDS))
        results = PassResults(
            self._backend, rows, loss, forward_only, hides_padding=hides_padding, last_tokens=last_tokens
        )
        runner = self._backend.new_runner(
            results.token_outputs.of_logits,
            results.step,
            forward_only,
            offload=self._options.offload,
            meter=meter,
            kernel=self._options.attention,
            keep_attention=memory.attention_kept,
            logits_chunk=memory.chunk,
            context_type=context_type,
        )
        with torch.no_grad() if forward_only else nullcontext(), _reporting_not_finite(results):
            runner.run(results.token_outputs.tokens, plan.with_last_tokens() if last_tokens else plan)
        output, num_not_finite = results.finish(plan)
        metrics = plan_metrics(rows, groups, plan, runner, loss) | self._backend.model_metrics(runner)
        metrics["prefix/nonfinite_passes"] = num_not_finite
        if self._options.skip_zero_advantage and not forward_only:
            metrics["prefix/zero_advantage_rows"] = num_dead(rows, plan)
        return output, metrics


@contextmanager
def _reporting_not_finite(results: PassResults) -> Iterator[None]:
    """Context of passes: on an error the log names rows with values that are not finite. mcore looks for NaN in
    gradients, and does not say in which rows."""
    try:
        yield
    except torch.OutOfMemoryError:  # to look for such rows needs memory, which there is none of
        raise
    except RuntimeError:
        with suppress(RuntimeError, ValueError):  # after an error of the device no value can be read
            results.report_not_finite()
        raise
