"""Tests run tiny models: more threads than one only wait for each other, most of all beside other jobs."""

import os
from collections.abc import Callable
from multiprocessing import forkserver
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of the processes that tests start

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def spawn() -> Callable[..., None]:
    """`torch.multiprocessing.spawn` whose processes come from one that has imported verl, under VERL_PLATFORM=cpu.

    The import takes 12 CPU seconds, most ranks less. They have the environment and the modules of the session's first
    call: what a test sets or patches in its own process does not reach them.
    """
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["verl.workers.engine_workers", "verl_prefix.tools.ab.replay"])

    def run(fn: Callable[..., None], args: tuple = (), nprocs: int = 1) -> None:
        with (
            mock.patch.dict(os.environ, VERL_PLATFORM="cpu"),
            mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process),
        ):
            mp.start_processes(fn, args, nprocs, start_method="forkserver")

    return run
