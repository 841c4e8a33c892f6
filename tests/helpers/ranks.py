"""Ranks that stay up: processes of one gloo group that run one job after the other, each with its own outcome."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LATER = 10  # seconds that the others have to answer where one rank has failed, unless a job says how many


class RankError(RuntimeError):
    """Says which rank failed, by what traceback, exit code or, where it hangs, in which call."""


class Ranks:
    """`world` warm processes. `ranks(job, *args)` is what `job(*first, *args)` returns on each, computed once.

    After a job that fails, hangs or ends a rank, all of them are new: what a failure leaves behind reaches no other.
    """

    def __init__(
        self, world: int, first: tuple, folder: Callable[[], Path], warm: Callable[[], AbstractContextManager]
    ):
        self.world, self.first, self._folder, self._warm = world, first, folder, warm
        self._up: list[tuple[multiprocessing.Process, Connection]] = []
        self._done: dict[tuple, list[Any]] = {}

    def __call__(self, job: Callable[..., Any], *args: Any, seconds: float = 600, later: float = LATER) -> list[Any]:
        __tracebackhide__ = True
        if (job, args) not in self._done:
            self._done[job, args] = self._run(pickle.dumps((job, (*self.first, *args))), seconds, later)
        return self._done[job, args]

    def close(self) -> None:
        for process, pipe in self._up:
            pipe.close()
            process.terminate()  # coverage writes what it saw
            process.join(10)
            process.kill()
            process.join()
        self._up = []

    def _run(self, job: bytes, seconds: float, later: float) -> list[Any]:
        __tracebackhide__ = True  # what went wrong stands in the message
        if not self._up:
            self._start()
        for _, pipe in self._up:
            pipe.send_bytes(job)
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._up)}
        end = time.monotonic() + seconds
        while waiting and (ready := wait(waiting, max(0, end - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    found[rank], error = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self._up[rank][0].join(LATER)
                    error = f"ended with exit code {self._up[rank][0].exitcode}"
                if error and not failed:
                    end = min(end, time.monotonic() + later)
                if error:
                    failed[rank] = error
        if not failed and waiting:
            failed = {rank: f"did not answer in {seconds} s:\n{self._stack(rank)}" for rank in waiting.values()}
        if failed:
            self.close()
            raise RankError("\n".join(f"rank {rank} of {self.world} {error}" for rank, error in failed.items()))
        return [found[rank] for rank in range(self.world)]

    def _start(self) -> None:
        self.folder, context = self._folder(), multiprocessing.get_context("forkserver")
        with self._warm():
            for rank in range(self.world):
                ours, theirs = multiprocessing.Pipe()
                process = context.Process(target=_serve, args=(rank, self.world, self.folder, theirs), daemon=True)
                process.start()
                theirs.close()
                self._up.append((process, ours))

    def _stack(self, rank: int) -> str:
        os.kill(self._up[rank][0].pid, signal.SIGUSR1)
        stack, end = self.folder / f"stack.{rank}", time.monotonic() + 60
        while not stack.read_text().endswith("in <module>\n") and time.monotonic() < end:
            time.sleep(0.1)
        return stack.read_text()


def _serve(rank: int, world: int, folder: Path, pipe: Connection) -> None:
    import torch  # by ranks alone: the process that deals files to others reads this file too

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), VERL_PLATFORM="cpu")
    faulthandler.register(signal.SIGUSR1, (folder / f"stack.{rank}").open("w"))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            job, args = pickle.loads(message)
            torch.manual_seed(0)  # whatever jobs there were before
            answer = pickle.dumps((job(*args), ""))
        except BaseException:
            answer = pickle.dumps((None, f"raised\n{traceback.format_exc()}"))
        pipe.send_bytes(answer)
