"""What a report says of code and machine, and how memory is measured: allocated on CUDA, resident on Linux."""

import ctypes
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

COMMIT = "VERL_PREFIX_COMMIT"  # the clean commit of a copy without .git
RESET_PEAK = Path("/proc/self/clear_refs")


def git_state() -> dict[str, Any]:
    """Commit, and whether files other than results differ from it; outside of git as `COMMIT` says, or None, True."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = subprocess.run(
            [*git, "status", "--porcelain", "--", ":/", ":(exclude,top)examples/results"], capture_output=True
        )
    except (subprocess.CalledProcessError, OSError):  # no checkout, or no git
        known = os.environ.get(COMMIT)
        return {"commit": known, "dirty": not known}
    return {"commit": commit, "dirty": bool(status.returncode or status.stdout)}


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Versions of Python and of the packages; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def device_name(device: str | None = None) -> str:
    """The GPU's name, or the processor's; None: of what there is."""
    if device == "cuda" or (device is None and torch.cuda.is_available()):
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return cpu[1] if cpu else platform.machine()


def reset_peak_mib(device: str) -> float:
    """Forgets the peak; returns MiB in use now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what comes
        RESET_PEAK.write_text("5")  # proc(5): sets VmHWM back to VmRSS
    return memory_mib(device)[0]


def memory_mib(device: str) -> list[float]:
    """In use now, and at the peak."""
    if device == "cuda":
        return [torch.cuda.memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20]
    status = Path("/proc/self/status").read_text()
    return [int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) / 2**10 for field in ("VmRSS", "VmHWM")]
