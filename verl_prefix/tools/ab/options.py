"""The command line of `verl-prefix ab`; what is wrong with it is said before torch and verl are imported."""

import dataclasses
from pathlib import Path

STOCK, REPACKED, TRUTH = "stock", "stock_repacked", "truth"
MADE_UP_STEPS = 5  # of --synthetic, where --steps is not given
ARMS = ("auto", "packed", "phased", REPACKED)  # that are compared with stock: its `schedule`s, and stock again


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line; None and "" leave a value to the trace.

    Raises:
        ValueError: an option cannot be, or does not go with the trace.
    """

    trace: str = ""
    synthetic: tuple[int, int, int, int] | None = None
    model: str = ""
    arms: tuple[str, ...] = ("auto",)
    steps: int | None = None
    ranks: int | None = None
    dtype: str | None = None
    truth_steps: int = 3

    def __post_init__(self) -> None:
        if self.arms == (REPACKED,):
            raise ValueError(f"--arms {REPACKED} is stock again; add one of {', '.join(ARMS[:-1])} to compare")
        if self.trace and not Path(self.trace).is_dir():
            raise ValueError(
                f"--trace {self.trace} is not a folder; record a trace with actor_rollout_ref.actor.prefix.trace_dir, "
                "in a run that resumes no checkpoint (trainer.resume_mode=disable)"
            )
        if self.synthetic and not self.model:
            raise ValueError("--synthetic P,S,G,N needs --model with a model's folder")
        if self.synthetic and self.synthetic[2] == 1:
            raise ValueError("--synthetic with groups of one row has advantages of zero; give G of 2 or more")

    @property
    def judged(self) -> list[str]:
        """The arms that have tolerances to keep: ours."""
        return [name for name in self.arms if name != REPACKED]
