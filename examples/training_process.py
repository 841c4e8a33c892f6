"""A training of verl's in processes of its own: its environment, what it has in memory, and its end."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
# What Ray calls the processes whose memory is measured, in the stock arm or in ours.
ROLES = {
    "training ranks": ("ray::WorkerDict",),
    "TransferQueue": ("ray::SimpleStorageUnit",),
    "agent loop": ("ray::AgentLoopWorkerTQ", "ray::SharedPixelsWorker"),
}


@contextmanager
def process_group(command: list[str], env: dict[str, str], log_path: Path) -> Iterator[subprocess.Popen]:
    """Run `command` in its own session; on leaving, end it and everything that it started, Ray's daemons included."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command], env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        session = process.pid
        try:
            yield process
        finally:
            # Ray gives its workers process groups of their own, but they stay in the session.
            left = [p for p in psutil.process_iter() if _session(p) == session]
            for p in left:
                _ignore_gone(p.terminate)
            for p in psutil.wait_procs(left, timeout=10)[1]:
                _ignore_gone(p.kill)
            process.wait()


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, PermissionError):
        return None


def _ignore_gone(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        pass


def memory_mib(session: int) -> dict[str, float]:
    """MiB in use now by each of `ROLES` in a session; of the ranks, the largest's."""
    in_use = dict.fromkeys(ROLES, 0.0)
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        title, used = " ".join(process.info["cmdline"] or ()), process.info["memory_info"]
        for role, names in ROLES.items():
            if used and title.startswith(names) and _session(process) == session:
                in_use[role] = max(in_use[role], used.rss / 2**20)
    return in_use


def environment(metrics: Path, ranks: int = 1) -> dict[str, str]:
    """A training's environment variables; verl's file logger writes to `metrics`. Its `ranks` use all cores: Ray gives
    a worker one thread, unless OMP_NUM_THREADS says how many."""
    env = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Spinning at barriers, two processes on the same cores slow each other down many times over.
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # FSDP2 copies weights into new memory in every pass: half as long in huge pages.
    env.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    env.setdefault("OMP_NUM_THREADS", str(max(1, (psutil.cpu_count(logical=False) or 1) // ranks)))
    env.pop("RAY_ADDRESS", None)
    return env
