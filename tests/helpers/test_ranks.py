"""Jobs on warm ranks fail alone: the next one finds ranks that work, and the error names the rank and why."""

import os
import re
import time
from multiprocessing.connection import wait

import pytest
import ranks as helper
import torch
from ranks import RankError


def _sum(*args: int) -> float:
    total = torch.tensor(float(torch.distributed.get_rank() + sum(args)))
    torch.distributed.all_reduce(total)
    return total.item()


def _raises(_) -> None:
    assert torch.distributed.get_rank() == 0, "this rank alone"
    _sum()


def _ends(_) -> None:
    if torch.distributed.get_rank() == 1:
        os._exit(7)
    _sum()


def _hangs(_) -> None:
    _sum()
    if torch.distributed.get_rank() == 1:
        time.sleep(3600)


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (_raises, "rank 1 of 2 raised\n.*in _raises\n.*AssertionError: this rank alone"),
        (_ends, "rank 1 of 2 ended with exit code 7"),
        (_hangs, "^rank 1 of 2 did not answer in 600 s:\n.* in _hangs"),
    ],
)
def test_a_job_that_fails_fails_alone(ranks, monkeypatch, job, told):
    """The ten minutes are over once rank 0 has met the one that hangs, and answered."""
    assert ranks(2, 1)(_sum, 2) == [7.0, 7.0]
    if job is _hangs:
        monkeypatch.setattr(helper, "wait", lambda pipes, _: wait(pipes, None if len(pipes) == 2 else 0))
    with pytest.raises(RankError) as raised:
        ranks(2)(job, later=1)
    monkeypatch.undo()
    assert re.search(told, str(raised.value), re.DOTALL), raised.value
    assert ranks(2)(_sum, 3) == [9.0, 9.0]
