"""What goes wrong inside a pass, in the run's own words: phase, wave, groups and rank; and the one repair there is.

    any exception    leaves with a note that says where it was
    not finite       counted and logged once per mini-batch; verl then skips the update, as it does for the stock actor
    OOM in a wave    one rank alone: waves half as large from then on, once a mini-batch; several ranks: fails with what
                     to set. A rank that left the middle of FSDP's collectives cannot join them again, and the others
                     wait in them.

Knows neither verl nor losses.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from verl_prefix.core.groups import Group
from verl_prefix.core.waves import Plan, make_waves

logger = logging.getLogger(__name__)
T = TypeVar("T")
WAVES = "phase_b"
ADVICE = {
    "packed": "lower {tokens}, or set actor_rollout_ref.actor.prefix.schedule=phased",
    "phase_a": "set actor_rollout_ref.actor.prefix.offload=True, gradient checkpointing, or lower {tokens}",
    "phase_c": "set gradient checkpointing, or lower {tokens}",
}
_MANY = 8  # rows of a message
_running: ContextVar["during | None"] = ContextVar("running", default=None)


def add_note(error: BaseException, note: str) -> None:
    """`BaseException.add_note`, and in Python 3.10, which has none, a longer message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


class during(AbstractContextManager):
    """Context of one pass: what is raised inside gets a note, and `where()` says the same while it runs.

    Args:
        phase: "packed", "phase_a", "phase_b" or "phase_c".
        groups: those that the pass computes; none for a dummy.
        part: which of how many, as "wave 2 of 5".
    """

    def __init__(self, phase: str, groups: Sequence[Group], part: str = "") -> None:
        self.phase = phase
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        rows = [list(group.rows) for group in groups]
        held = (
            f"{len(groups)} groups of rows {_some(rows)}, {sum(g.prefix_len for g in groups)} prefix and "
            f"{sum(g.num_suffix_tokens for g in groups)} suffix tokens"
        )
        self.where = f"{phase}{', ' if part else ''}{part}, rank {rank}: {held if groups else 'a dummy without rows'}"

    def __enter__(self) -> "during":
        self._token = _running.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _running.reset(self._token)
        self.note(error)

    def note(self, error: BaseException | None) -> None:
        """Says on an error where it was, once."""
        if error is None or isinstance(error, GeneratorExit) or hasattr(error, "prefix_phase"):
            return
        add_note(error, f"verl_prefix was in {self.where}")
        error.prefix_phase = self.phase


class noted(AbstractContextManager):
    """Context of code that a pass is handed out to while it runs: what is raised there gets the pass's note."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if running := _running.get():
            running.note(error)


def where() -> str:
    """The running pass, as the note of an error would name it."""
    running = _running.get()
    return running.where if running else "outside of a pass"


def _some(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:_MANY])) + (f" and {len(items) - _MANY} more" if len(items) > _MANY else "")


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor holds a NaN or an infinity; the device is asked once."""
    return bool(torch.stack([torch.isfinite(x).all() for x in tensors]).all())


def rows_not_finite(values: Sequence[torch.Tensor]) -> list[int]:
    """Indices of the rows (float tensors of any shape) that hold a NaN or an infinity."""
    return [i for i, row in enumerate(values) if not torch.isfinite(row).all()]


def say_not_finite(loss: float, bad: Mapping[str, Sequence[int]], names: Sequence[str]) -> None:
    """Logs one pass whose loss or outputs are not finite.

    Args:
        bad: rows of the pass that are not finite, per tensor: log-probs and the like, and what the loss reads.
        names: what to call the rows of the pass.
    """
    told = [f"{name} of rows {_some([names[i] for i in rows])}" for name, rows in bad.items() if rows]
    logger.error(
        "not finite in %s: loss %s; %s. verl skips an update whose gradient norm is not finite; later passes of this "
        "mini-batch are counted in prefix/nonfinite_passes and not logged",
        where(), loss, "; ".join(told) or "all that it was made of is finite",
    )  # fmt: skip


def run_or_halve(run: Callable[[Plan], T], plan: Plan, model: torch.nn.Module, num_ranks: int) -> tuple[T, Plan, int]:
    """Runs a plan; after an OOM in a wave, on one rank, once more from the start with waves half as large.

    What the mini-batch had accumulated is dropped, so its gradients are those of the second run alone.

    Args:
        run: all passes of a plan, with fresh state of its own at every call.
        model: the FSDP2 root.
        num_ranks: how many ranks run collectives together.

    Returns:
        what `run` returned, the plan that ran, and how often it was repeated.

    Raises:
        torch.OutOfMemoryError: with a note on what to set, where repeating is not possible or failed too.
    """
    accumulated = any(parameter.grad is not None for parameter in model.parameters())
    try:
        return run(plan), plan, 0
    except torch.OutOfMemoryError as error:
        largest, smaller = _halve(plan)
        phase, cause = getattr(error, "prefix_phase", ""), str(error)
        key = f"actor_rollout_ref.actor.prefix.wave_tokens={max(largest // 2, 1)}"
        if phase in ADVICE:
            add_note(error, ADVICE[phase].format(tokens="ppo_max_token_len_per_gpu or micro_batch_size_per_gpu"))
        if phase != WAVES:
            raise
        if smaller is None:
            add_note(error, "the largest wave is one row already; set gradient checkpointing or offload parameters")
            raise
        if num_ranks > 1 or accumulated or not hasattr(FSDPModule, "reset_iter_state"):
            reason = (
                f"{num_ranks} ranks run together, and one that left cannot join their collectives again"
                if num_ranks > 1
                else "gradients of an earlier batch would be lost"
                if accumulated
                else f"torch {torch.__version__} cannot reset FSDP2 after an error (FSDPModule.reset_iter_state)"
            )
            add_note(error, f"not repeated with smaller waves: {reason}. Set {key} (largest wave: {largest} tokens)")
            raise
    # Only here, behind the handler, nothing holds the frames of the failed pass and their graphs.
    logger.warning("OOM in a wave, repeating the mini-batch with %s: %s", key, cause)
    drop_gradients(model)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return run(smaller), smaller, 1


def _halve(plan: Plan) -> tuple[int, Plan | None]:
    """Suffix tokens of the largest wave, and the plan with waves of half that; None where no wave becomes smaller."""
    largest = largest_wave(plan)
    smaller = limit_waves(plan, largest // 2)
    return largest, smaller if largest_wave(smaller) < largest else None


def limit_waves(plan: Plan, tokens: int) -> Plan:
    """The plan with waves of at most `tokens` suffix tokens, or one row; as it is where none is larger."""
    if largest_wave(plan) <= tokens:
        return plan
    works = (
        work if work.waves is None else replace(work, waves=make_waves(work.groups, tokens)) for work in plan.works
    )
    return replace(plan, works=tuple(works))


def largest_wave(plan: Plan) -> int:
    """Suffix tokens of the plan's largest wave; 0 without waves."""
    waves = [wave for work in plan.works for wave in work.waves or ()]
    return max((sum(piece.num_suffix_tokens for _, piece in wave) for wave in waves), default=0)


def drop_gradients(model: torch.nn.Module) -> None:
    """Takes an FSDP2 root out of the middle of a forward or backward, without any gradient left in it.

    torch's `reset_iter_state` forgets the collectives and shards the parameters; gradients that wait unsharded for the
    last backward of an accumulation stay in FSDP2's own fields, and would be added to the next run's.
    """
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
        states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
        for parameter in (p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
    for parameter in model.parameters():
        parameter.grad = None
