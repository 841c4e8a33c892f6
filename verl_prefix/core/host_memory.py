"""Pinned host memory in pages, and the copies of a prefix to it and back, on a stream of their own."""

import functools
import itertools
import logging
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

PAGE_BYTES = 64 << 20  # a power of two: torch rounds pinned allocations up to one
# Bytes that may be on their way to the host. With more the host waits, or over a slow PCIe all would stay on the GPU.
LEAVING_BYTES = 2 << 30
MEMINFO, CGROUPS, OWN_CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def host_room() -> int | None:
    """Bytes of host memory left to take. An eighth stays free: of the machine's, and of each limit of cgroup v2 that
    holds for this process, as its container's or its Slurm job's. None: not known, as on a machine without /proc."""
    if not MEMINFO.exists():
        return None
    sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in MEMINFO.read_text().splitlines()}
    room = sizes["MemAvailable:"] - sizes["MemTotal:"] // 8
    own = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.exists() else []
    names = next((line[len("0::/") :].split("/") for line in own if line.startswith("0::/")), [])  # 0: v2
    for cgroup in itertools.accumulate(names, Path.joinpath, initial=CGROUPS):
        limit = cgroup / "memory.max"
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            used = int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"])
            room = min(room, int(text) - int(text) // 8 - used)
    return room


class HostPages:
    """A device's host memory, in pages of PAGE_BYTES (uint8; pinned but for CPU), and the stream of all its copies.

    It grows to what the largest pass needs, as far as `host_room` allows, and never shrinks: pinning takes longer than
    a copy. One stream orders all copies, so a page that is given back and taken again needs no event.

    Attributes:
        module: torch's module of the device, as torch.cuda.
        stream: of all copies; None on CPU, where a copy is done at once.
        free: pages that nobody holds.
        num_pages: how many there are.
        is_full: the host refused a page, by a limit that `host_room` does not read, as on locked memory. It is not
            asked for more again.
    """

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)  # torch.cuda
        self.stream = None if device.type == "cpu" else self.module.Stream(device)
        self.free: list[torch.Tensor] = []
        self.num_pages = 0
        self.is_full = False

    def take(self) -> torch.Tensor | None:
        """A page, or None where the host has no room for another."""
        if not self.free and not self.is_full and ((room := host_room()) is None or room >= PAGE_BYTES):
            try:
                self.free.append(torch.empty(PAGE_BYTES, dtype=torch.uint8, pin_memory=self.stream is not None))
                self.num_pages += 1
            except RuntimeError as error:
                if not any(text in str(error) for text in ("out of memory", "allocate memory")):
                    raise  # an earlier kernel's, for example
                self.is_full = True
                held = self.num_pages * PAGE_BYTES / 2**30
                logger.warning("prefix: host gives %.1f GiB and no more; the rest stays on the GPU: %s", held, error)
        return self.free.pop() if self.free else None


# The process's pages for a device. They outlive a `PlanRunner`, which lives for one mini-batch.
host_pages = functools.cache(HostPages)


class HostCopies:
    """Host memory that the prefixes of one phased pass hold until `close`, and the copies to it and back.

    Attributes:
        num_used: bytes of it that are reserved.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host = host_pages(device)
        self._pages: list[torch.Tensor] = []
        self.num_used = 0
        self._leaving: deque[tuple[Any, int]] = deque()  # an event behind each copy to the host, and its bytes
        self._num_leaving = 0

    def close(self) -> None:
        """Gives the memory back."""
        if self._host.stream is not None:  # it may still write to prefetched memory, which is freed now
            self._host.module.current_stream(self.device).wait_stream(self._host.stream)
        self._host.free += self._pages
        self._pages = []

    def reserve(self, nbytes: int) -> list[torch.Tensor] | None:
        """`nbytes` of host memory as slices of pages; None where the host has no room for them."""
        start, end = self.num_used, self.num_used + nbytes
        while len(self._pages) * PAGE_BYTES < end:
            page = self._host.take()
            if page is None:
                return None
            self._pages.append(page)
        self.num_used = end + -end % 512  # the next slices begin at a multiple of 512
        pages = range(start // PAGE_BYTES, -(-end // PAGE_BYTES))
        return [self._pages[i][max(start - i * PAGE_BYTES, 0) : end - i * PAGE_BYTES] for i in pages]

    def to_host(self, pieces: list[torch.Tensor], source: torch.Tensor) -> None:
        """Copies `source`, uint8 [n], which the caller may free at once."""
        self._copy(pieces, source.split([len(piece) for piece in pieces]))
        if self._host.stream is None:
            return
        source.record_stream(self._host.stream)  # the allocator must not reuse it before the copy has read it
        self._leaving.append((self._host.stream.record_event(), source.nbytes))
        self._num_leaving += source.nbytes
        while self._num_leaving > LEAVING_BYTES:
            event, nbytes = self._leaving.popleft()
            event.synchronize()
            self._num_leaving -= nbytes

    def to_device(self, pieces: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Copies pieces back; returns uint8 [n], and the event after which it may be read or freed."""
        # Allocated on the current stream, which reads and frees it; `_copy` waits for that stream's earlier work.
        into = torch.empty(sum(map(len, pieces)), dtype=torch.uint8, device=self.device)
        self._copy(into.split([len(piece) for piece in pieces]), pieces)
        return into, None if self._host.stream is None else self._host.stream.record_event()

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for an event of `to_device`."""
        if event is not None:
            self._host.module.current_stream(self.device).wait_event(event)

    def _copy(self, into: Iterable[torch.Tensor], source: Iterable[torch.Tensor]) -> None:
        """Copies on the side stream, after all work that the current stream was given so far; on CPU at once."""
        stream = self._host.stream
        if stream is not None:
            stream.wait_stream(self._host.module.current_stream(self.device))
        with self._host.module.stream(stream):
            for piece, part in zip(into, source, strict=True):
                piece.copy_(part, non_blocking=True)
