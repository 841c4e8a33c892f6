"""`prefix.verify`: when the self-check runs, and what happens where it misses."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from verl_prefix.config.actor import SKIP_ZERO_ADVANTAGE
from verl_prefix.config.options import PrefixConfig
from verl_prefix.core.errors import listed
from verl_prefix.core.groups import Group
from verl_prefix.core.plan import Plan
from verl_prefix.engine import dead_rows
from verl_prefix.engine.backend import Backend
from verl_prefix.engine.checks.both_paths import NO_FLAGS, BothPaths, Sample
from verl_prefix.engine.checks.checked_rows import candidates, cheapest
from verl_prefix.engine.checks.self_check import Comparison, Verdict
from verl_prefix.engine.loss import Loss
from verl_prefix.engine.out_of_memory import self_check_advice
from verl_prefix.engine.planner import StockPath
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.shared_passes import SharedPasses
from verl_prefix.engine.together import together
from verl_prefix.models.advice import WITHOUT_SHARING
from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)

# Factors of the check's loss, powers of two: in fp32 and bf16 they change no figure. The smallest one is 1 over the
# scale at which torch's GradScaler starts.
_SMALLER_LOSS, _SMALLEST_LOSS = 2.0**-4, 2.0**-16


class Verification:
    """The self-check of one engine, which all ranks run at once. It checks updates. In an engine for log-probs alone it
    checks batches, which have no gradients to compare.

    Args:
        passes: of the engine.
    """

    def __init__(self, backend: Backend, options: PrefixConfig, passes: SharedPasses) -> None:
        self._backend, self._options, self._passes = backend, options, passes
        self._num_seen = 0  # batches of the checked kind, on either path; a miss is reported with this number
        self._num_settled = 0  # of these, the shared ones that were checked or need no check; `_is_due` goes by it
        self._loss_factor = 1.0  # of the check's loss, whose gradients may overflow in fp16 where the update's do not

    @property
    def _output_name(self) -> str:
        """The output that both paths are compared by: log_probs, or values."""
        return self._backend.output_names(NO_FLAGS)[0]

    def count(self, forward_only: bool) -> None:
        """Counts a batch, on whichever path it will be computed."""
        if self._is_checked_kind(forward_only):
            self._num_seen += 1

    def _is_checked_kind(self, forward_only: bool) -> bool:
        return not (forward_only and self._backend.trains)

    def check(
        self, rows: BatchRows, groups: Sequence[Group], plan: Plan, loss: Loss, forward_only: bool
    ) -> tuple[StockPath | None, dict[str, float]]:
        """Runs the check, if one is due and every rank has a group to check. If a rank has none, or if something is not
        finite on the stock path, the check stays due, and waits for the next batch. Every rank calls it.

        Args:
            rows: the rows that this rank computes.
            groups: of these rows.
            plan: of these groups.

        Returns:
            the stock path for this batch and all later ones if the check missed, else None; and prefix/verify_* of what
            was compared, with the seconds: {} where no check ran.

        Raises:
            RuntimeError: the shared path is off by more than rounding, and prefix.verify_action is raise.
        """
        if not self._is_checked_kind(forward_only):
            return None, {}
        if not self._is_due():
            self._num_settled += 1
            return None, {}
        start = time.perf_counter()
        budget = rows.budget(groups)
        choice = candidates(self._backend, rows, groups, budget)
        if not choice:
            return None, {}
        group = cheapest(choice, len(rows))
        with self_check_advice():
            verdict = self._verdict(rows, group, budget, loss)
        missed = None
        if misses := self._misses(verdict, rows, group, plan, loss):
            missed = self._miss("; ".join(misses))
        elif verdict.not_finite:
            self._wait_for_finite_results(verdict)
        else:
            self._num_settled += 1
        return missed, self._metrics(verdict) | {"timing_s/prefix_verify": time.perf_counter() - start}

    def _wait_for_finite_results(self, verdict: Verdict) -> None:
        """Says once why the check stays due. If outputs are finite and gradients are not, the next loss is smaller."""
        if verdict.outputs is not None:
            self._loss_factor = max(self._loss_factor * _SMALLER_LOSS, _SMALLEST_LOSS)
        warn_once(
            logger,
            "prefix.verify waits for a batch whose results are finite on verl's own path: here %s are not; set "
            "actor_rollout_ref.actor.prefix.verify=off where none will come",
            listed(verdict.not_finite),
            key=self._output_name,
        )

    def _is_due(self) -> bool:
        """Whether this batch is one that `prefix.verify` names."""
        verify = self._options.verify
        if isinstance(verify, str):
            return verify == "first_step" and self._num_settled == 0
        return verify > 0 and self._num_settled % verify == 0

    def _misses(self, verdict: Verdict, rows: BatchRows, group: Group, plan: Plan, loss: Loss) -> list[str]:
        """Returns what the check found wrong: of the few rows of `group` that both paths computed, and of rows that the
        update does not compute, which must have no gradient."""
        misses = []
        if verdict.missed:
            uids = listed(sorted({rows.uids[number] for number in group.rows}))
            misses.append(
                f"{verdict} (this rank compared rows of uid {uids}). The shared-prefix path is wrong for this model; "
                f"set {WITHOUT_SHARING}"
            )
        if self._options.skip_zero_advantage and self._backend.trains:
            if self._has_gradient_of_idle_rows(rows, plan, loss):
                misses.append(f"rows that are left out have a gradient; set {SKIP_ZERO_ADVANTAGE}=False")
        return misses

    def _metrics(self, verdict: Verdict) -> dict[str, float]:
        figures = {self._output_name: verdict.outputs, "attention": verdict.attention}
        if self._backend.trains:
            figures["gradients"] = verdict.gradients
        if self._backend.shape.recurrent_layers:
            figures["recurrence"] = verdict.recurrence
        return {f"prefix/verify_{name}": figure.ratio for name, figure in figures.items() if figure is not None}

    def _has_gradient_of_idle_rows(self, rows: BatchRows, plan: Plan, loss: Loss) -> bool:
        """Whether any row that no pass of the plan computes has a gradient, on any rank: a dead row, or one with an
        empty response."""
        with together("checking rows that are left out", maxima=("has_gradient",)) as agreed:
            in_passes = {number for planned in plan.passes for group in planned.groups for number in group.rows}
            idle = [number for number in range(len(rows)) if number not in in_passes]
            agreed.tell_maximum(
                "has_gradient", dead_rows.has_gradient(loss, rows, idle, self._backend.ranks.data_group)
            )
        return agreed["has_gradient"] > 0

    def _miss(self, why: str) -> StockPath:
        """Ends the run, or returns the path of all batches from now on.

        Log-probs, or values, come before the update that checks. So the updates of this step still go by those of the
        shared path, which the message says.
        """
        batches = "update" if self._backend.trains else "batch of ref"
        message = f"prefix.verify, {batches} {self._num_seen}: {why}"
        if self._options.verify_action == "raise":
            fallback = "actor_rollout_ref.actor.prefix.verify_action=fallback"
            raise RuntimeError(f"{message}, or {fallback} to go on with the stock path. Please report this")
        outputs = self._output_name.replace("_", "-")
        step = f"; updates of this step still go by {outputs} of the shared path" if self._backend.trains else ""
        return StockPath(f"the self-check missed: {message}{step}. Please report this")

    def _verdict(self, rows: BatchRows, group: Group, budget: int, loss: Loss) -> Verdict:
        """Compares both paths on a group of each rank. Top-k distillation also compares its losses."""
        ranks = self._backend.ranks
        num_perturbed = _num_perturbed(len(rows), len(group.rows))
        # Stock passes hold collectives, so that every rank runs equally many.
        (_, most_rows), (fewest_perturbed, _) = ranks.ranges_over_ranks(len(group.rows), num_perturbed)
        sample = Sample.of(rows, group, most_rows, loss, self._loss_factor)
        paths = BothPaths(self._backend, self._passes, sample, budget, self._backend.memory(self._options))
        with self._backend.gradients_aside():
            comparison = Comparison(
                paths.stock, paths.shared, self._backend.rounding_noise, self._backend.gradients(),
                ranks.sum_over_ranks, self._output_name.replace("_", "-"),
            )  # fmt: skip
            verdict = comparison.verdict(fewest_perturbed)
        if verdict.outputs is None:  # on every rank, none of which then has figures of layers
            return verdict
        # Each rank has its own figures of layers; the others are of all ranks together.
        layer_figures: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(layer_figures, (verdict.attention, verdict.recurrence))
        attention, recurrence = map(max, zip(*layer_figures, strict=True))
        return verdict._replace(attention=attention, recurrence=recurrence)


def _num_perturbed(num_rows: int, num_checked: int) -> int:
    """Returns how many stock passes measure rounding: one to three, so that a check takes about an eighth of an update
    of this rank's rows. The passes that are compared (stock, packed, phased) cost about two of these more."""
    return min(3, max(1, num_rows // (8 * num_checked) - 2))
