"""Memory in use and at its peak: allocated on CUDA, resident on Linux."""

import ctypes
from pathlib import Path

import torch

RESET_PEAK = Path("/proc/self/clear_refs")


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
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(status[field].removesuffix("kB")) / 2**10 for field in ("VmRSS", "VmHWM")]
