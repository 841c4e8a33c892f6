"""Notes on errors: an exception that leaves a pass says in which phase, wave, groups and rank it was raised."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType

import torch

from verl_prefix.core.errors import add_note, listed
from verl_prefix.core.groups import Group

_running: ContextVar["PassNote | None"] = ContextVar("running", default=None)


class PassNote(AbstractContextManager[None]):
    """Context of one pass. An error that is raised inside gets a note of where that was. Meanwhile `current_pass` says
    where it is.

    Args:
        phase: "packed", "phase_a", "wave" or "phase_c".
        groups: the groups that the pass computes; none for a dummy.
        part: which part of the phase, as "wave 2 of 5", if not all of it.
        nested: the pass is inside of a phased one.
    """

    def __init__(self, phase: str, groups: Sequence[Group], part: str = "", nested: bool = False) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        rows = [list(group.rows) for group in groups]
        own, outer = sum(g.num_own_strand_tokens for g in groups), sum(g.num_outer_tokens for g in groups)
        counts = [f"{own} prefix"] if own or not outer else []
        counts += [] if phase in ("phase_a", "phase_c") else [f"{sum(g.num_suffix_tokens for g in groups)} suffix"]
        held = f"{len(groups)} groups of rows {listed(rows)}, {' and '.join(counts)} tokens"
        held += f" after {outer} prefix tokens of phases A" if outer else ""
        self.phase, self.groups, self.part = phase, groups, part
        self._phase_of_error = "nested" if nested and phase == "packed" else phase
        self.where = f"{part or phase}, rank {rank}: {held if groups else 'a dummy without rows'}"

    def __enter__(self) -> None:
        self._token = _running.set(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _running.reset(self._token)
        self.note(error)

    def note(self, error: BaseException | None) -> None:
        """Adds to an error where it was raised, unless it says so already. Its `prefix_phase` is then the phase, or
        "nested" for a nested packed pass."""
        if error is None or isinstance(error, GeneratorExit) or hasattr(error, "prefix_phase"):
            return
        add_note(error, f"verl_prefix was in {self.where}")
        error.prefix_phase = self._phase_of_error  # type: ignore[attr-defined]  # read by engine.out_of_memory


class NotesOfALoop(AbstractContextManager[None]):
    """Context of a caller's loop over forwards: an error of its body gets the note of the pass that runs then."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if running := _running.get():
            running.note(error)


class NotesOfBackwards(AbstractContextManager["NotesOfBackwards"]):
    """Context in which others run the backwards of several passes, as the schedule of a pipeline does: an error gets
    the note of the pass whose backward runs then.

    A plain attribute holds that pass: on CUDA hooks run in autograd's own thread, which has other context variables.
    """

    def __init__(self) -> None:
        self._running: PassNote | None = None

    def follow(self, output: torch.Tensor, annotated: PassNote) -> None:
        """Follows the pass `annotated`, whose backward begins at `output`."""

        def begin(_: torch.Tensor) -> None:
            self._running = annotated
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

        if output.requires_grad:
            output.register_hook(begin)

    def _end(self) -> None:
        self._running = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._running is not None:
            self._running.note(error)


def current_pass() -> str:
    """The running pass, as the note of an error would name it."""
    running = _running.get()
    return running.where if running else "outside of a pass"
