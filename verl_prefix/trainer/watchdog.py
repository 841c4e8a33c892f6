"""Ends a trainer that waits for something that will never come.

verl waits without a limit for rollouts (verl/trainer/ppo/v1/replay_buffer.py polls until a batch's prompts are done,
even if the agent loop worker that had them is dead), and for a weight update that a rollout server lost. The waiting
process cannot notice, so a thread of it does: it logs what was waited for, prints all stacks and exits, which ends the
job. A dead worker of verl's agent loop manager is always noticed. A manager of the user's own may have no
`agent_loop_workers`: nobody watches its workers. A phase of a step that takes too long is noticed if the user sets a
limit.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

from verl_prefix.versions import warn_once

logger = logging.getLogger(__name__)

VARIABLE = "VERL_PREFIX_STALL_MINUTES"
POLL_SECONDS = 15.0


def stall_minutes() -> float:
    """Minutes that one phase of a step may take, from the environment variable `VARIABLE`; 0: no limit.

    Raises:
        ValueError: the environment variable is not a number of minutes.
    """
    text = os.environ.get(VARIABLE, "0")
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 <= minutes < float("inf"):
        raise ValueError(f"{VARIABLE}={text!r}: set a number of minutes, or 0 for no limit")
    return minutes


def _exit() -> None:
    faulthandler.dump_traceback(file=2, all_threads=True)  # Ray replaces sys.stderr, not the descriptor
    os._exit(1)


class Watchdog:
    """A thread that calls `end` once a phase takes longer than `limit_s`, or `lost` names something that is gone.

    Args:
        limit_s: seconds; 0: no limit.
        poll_s: seconds between two looks.
        end: ends the process.

    Attributes:
        lost: names what is gone; None: nothing is. The trainer sets it.
        thread: that which looks.
    """

    def __init__(self, limit_s: float, poll_s: float = POLL_SECONDS, end: Callable[[], None] = _exit) -> None:
        self.limit_s = limit_s
        self.poll_s = poll_s
        self.end = end
        self.lost: Callable[[], str | None] = lambda: None
        self._phase, self._since = "start", time.monotonic()
        self._stopped = False
        self.thread = threading.Thread(target=self._watch, name="verl_prefix watchdog", daemon=True)
        self.thread.start()

    def enter(self, phase: str) -> None:
        """Tells the watchdog that the trainer now begins `phase`."""
        self._phase, self._since = phase, time.monotonic()

    def stop(self) -> None:
        """Tells the watchdog that nothing is left to wait for."""
        self._stopped = True

    def _watch(self) -> None:
        while not self._stopped:
            if problem := self._problem():
                logger.error("prefix: %s; ending this job, which can go on from its last checkpoint", problem)
                return self.end()
            time.sleep(self.poll_s)

    def _problem(self) -> str | None:
        phase, waited = self._phase, time.monotonic() - self._since
        try:
            if lost := self.lost():
                return f"{lost} during {phase}"
        except Exception as error:  # whatever it is, the limit still holds
            warn_once(logger, "prefix: the watchdog cannot see who is alive: %s", repr(error))
        if self.limit_s and waited > self.limit_s:
            return f"{phase} takes longer than {waited / 60:.1f} minutes ({VARIABLE} is the limit)"
        return None
