"""Jobs on warm ranks fail alone: the next one finds ranks that work, and the error names the rank and why."""

import os
import re
import time

import pytest
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
    if torch.distributed.get_rank() == 1:
        time.sleep(600)


@pytest.mark.parametrize(
    ("job", "seconds", "told"),
    [
        (_raises, 60, "rank 1 of 2 raised\n.*in _raises\n.*AssertionError: this rank alone"),
        (_ends, 60, "rank 1 of 2 ended with exit code 7"),
        (_hangs, 2, "^rank 1 of 2 did not answer in 2 s:\n.* in _hangs"),
    ],
)
def test_a_job_that_fails_fails_alone(ranks, job, seconds, told):
    assert ranks(2, 1)(_sum, 2) == [7.0, 7.0]
    with pytest.raises(RankError) as raised:
        ranks(2)(job, seconds=seconds, later=1)
    assert re.search(told, str(raised.value), re.DOTALL), raised.value
    assert ranks(2)(_sum, 3) == [9.0, 9.0]
