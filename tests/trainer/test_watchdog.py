"""The watchdog without Ray: what ends a job, and what does not."""

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from verl_prefix.trainer.watchdog import VARIABLE, Watchdog, stall_minutes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ended():
    return threading.Event()


def test_a_phase_that_takes_too_long_ends_the_job_and_is_named(ended, caplog):
    dog = Watchdog(0.2, poll_s=0.05, end=ended.set)
    dog.enter("the rollout of step 3")
    assert ended.wait(10)
    assert "the rollout of step 3 takes longer than" in caplog.text and VARIABLE in caplog.text


def test_every_phase_has_the_whole_limit(ended):
    dog = Watchdog(2.0, poll_s=0.05, end=ended.set)
    for i in range(11):
        dog.enter(f"phase {i}")
        time.sleep(0.2)
    assert not ended.is_set()
    assert ended.wait(10)


def test_a_lost_worker_ends_the_job_at_once(ended, caplog):
    dog = Watchdog(0, poll_s=0.05, end=ended.set)
    dog.enter("the rollout of step 1")
    time.sleep(0.3)
    assert not ended.is_set()  # 0 is no limit
    dog.lost = lambda: "agent loop worker 0 of 1 died"
    assert ended.wait(10)
    assert "agent loop worker 0 of 1 died during the rollout of step 1" in caplog.text


def test_it_ends_the_process_with_the_stacks_of_all_threads():
    code = (
        "import time; from verl_prefix.trainer.watchdog import Watchdog\n"
        "def waits_for_ever(): time.sleep(600)\n"
        "Watchdog(0.2, poll_s=0.05).enter('the weight update after step 2'); waits_for_ever()"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "the weight update after step 2 takes longer than" in result.stderr
    assert "in waits_for_ever" in result.stderr and "its last checkpoint" in result.stderr


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


def test_a_healthy_run_logs_nothing(ended, caplog):
    with caplog.at_level(logging.DEBUG):
        Watchdog(60, poll_s=0.05, end=ended.set).enter("step")
        time.sleep(0.3)
    assert not ended.is_set() and not caplog.records
