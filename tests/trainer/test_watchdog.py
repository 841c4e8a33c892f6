"""The watchdog without Ray: what ends a job, and what does not."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from verl_prefix.trainer import watchdog
from verl_prefix.trainer.watchdog import VARIABLE, Watchdog, stall_minutes

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """A watchdog's clock, which stands still until a test lets seconds pass."""

    def __init__(self) -> None:
        self.now, self.asleep, self.ended, self.closed = 0.0, False, False, False
        self.changed = threading.Condition()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self.changed:
            until, self.asleep = self.now + seconds, True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.now >= until or self.closed)
            if self.closed:
                sys.exit()  # of this thread

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Lets this time pass; whether the watchdog, which looks at the end of it, ended the job."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.asleep or self.ended, 300)
            self.now, self.asleep = self.now + seconds, False
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.asleep or self.ended, 300)
            return self.ended

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    yield clock
    clock.close()


def test_a_phase_that_takes_too_long_ends_the_job_and_is_named(clock, caplog):
    dog = Watchdog(120.0, end=clock.end)
    dog.enter("the rollout of step 3")
    assert not clock.wait(120) and clock.wait(15)
    assert "the rollout of step 3 takes longer than 2.2 minutes" in caplog.text and VARIABLE in caplog.text


def test_every_phase_has_the_whole_limit(clock):
    dog = Watchdog(120.0, end=clock.end)
    for i in range(11):
        dog.enter(f"phase {i}")
        assert not clock.wait(100)
    assert clock.wait(100)


def test_a_lost_worker_ends_the_job_at_once(clock, caplog):
    dog = Watchdog(0, end=clock.end)
    dog.enter("the rollout of step 1")
    assert not clock.wait(10**9)  # 0 is no limit
    dog.lost = lambda: "agent loop worker 0 of 1 died"
    assert clock.wait(15)
    assert "agent loop worker 0 of 1 died during the rollout of step 1" in caplog.text


def test_it_ends_the_process_with_the_stacks_of_all_threads():
    code = (
        "import time; from verl_prefix.trainer.watchdog import Watchdog\n"
        "def waits_for_ever(): dog.limit_s = 0.01; time.sleep(600)\n"
        "dog = Watchdog(0, poll_s=0.05); dog.enter('the weight update after step 2'); waits_for_ever()"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1
    assert "the weight update after step 2 takes longer than" in result.stderr
    assert "in waits_for_ever" in result.stderr and "its last checkpoint" in result.stderr


def test_once_it_is_stopped_nothing_ends_the_job(clock):
    dog = Watchdog(120.0, end=clock.end)
    assert not clock.wait(15)
    dog.lost = lambda: "agent loop worker 0 of 1 died"
    dog.stop()
    with clock.changed:
        clock.now += 1000
        clock.changed.notify_all()
    dog.thread.join(300)
    assert not dog.thread.is_alive() and not clock.ended


def test_an_error_while_it_asks_who_is_alive_leaves_the_limit_in_force(clock, caplog):

    def lost():
        raise RuntimeError("no connection to Ray")

    dog = Watchdog(120.0, end=clock.end)
    dog.lost = lost
    assert not clock.wait(60) and not clock.wait(60) and clock.wait(60)
    assert caplog.text.count("no connection to Ray") == 1 and "takes longer than" in caplog.text


@pytest.mark.parametrize(("text", "minutes"), [("0", 0.0), ("2.5", 2.5), (None, 0.0)])
def test_minutes_come_from_the_environment(monkeypatch, text, minutes):
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    assert stall_minutes() == minutes


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1h", ""])
def test_other_words_are_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=f"{VARIABLE}='{text}': set a number of minutes"):
        stall_minutes()


def test_a_healthy_run_logs_nothing(clock, caplog):
    with caplog.at_level(logging.DEBUG):
        Watchdog(60, end=clock.end).enter("step")
        assert not clock.wait(15) and not clock.wait(15)
    assert not caplog.records
