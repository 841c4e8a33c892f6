"""Dormant prefix activations wait in host memory: what phase A saves for backward is off the device until phase C.

    phase A   the storage of a saved tensor is copied once, on a side stream, to pinned pages, and let go
    phase B   the device holds the hot K/V, the parameters and what a wave needs
    phase C   storages return in reverse order, ahead of backward while there is room, else when it asks

Schedule-level reuse with dormant offload. On CPU the same code copies to ordinary host memory at once: nothing is
gained, everything is tested. Knows neither model nor schedule.
"""

import functools
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from verl_prefix.core.prefix_cache import Key, PrefixCache, Tensors

PAGE_BYTES = 64 << 20  # a power of two: torch rounds pinned allocations up to one
TINY_BYTES = 4 << 10  # what a smaller storage frees is not worth a copy's latency
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def host_room() -> int:
    """Bytes of host memory left to take: an eighth of the machine's, or of the container's (cgroup v2), stays free."""
    sizes = {line.split()[0]: int(line.split()[1]) << 10 for line in MEMINFO.read_text().splitlines()}
    room = sizes["MemAvailable:"] - sizes["MemTotal:"] // 8
    limit = CGROUP / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(stat["inactive_file"])
        room = min(room, int(text) - int(text) // 8 - used)
    return room


def device_room(device: torch.device) -> int:
    """Bytes that prefetching may take: an eighth of the device stays free for what backward itself allocates."""
    if device.type == "cpu":
        return sys.maxsize
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    stats = module.memory_stats(device)
    return int(free + stats["reserved_bytes.all.current"] - stats["active_bytes.all.current"] - total // 8)


class HostPages:
    """A device's host memory, in pages of PAGE_BYTES (uint8; pinned but for CPU), and the stream of all its copies.

    Grows to the largest set of groups seen while `host_room` allows, and never shrinks: pinning costs more than a
    copy. One stream orders all copies, so a page that is given back and taken again needs no event.
    """

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)  # torch.cuda
        self.stream = None if device.type == "cpu" else self.module.Stream(device)
        self.free: list[torch.Tensor] = []
        self.num_pages = 0

    def take(self) -> torch.Tensor | None:
        """A page, or None where the host has no room for another."""
        if not self.free and host_room() >= PAGE_BYTES:
            self.free.append(torch.empty(PAGE_BYTES, dtype=torch.uint8, pin_memory=self.stream is not None))
            self.num_pages += 1
        return self.free.pop() if self.free else None


@functools.cache
def host_pages(device: torch.device) -> HostPages:
    """The process's pages for `device`: a schedule lives for one mini-batch, they live on."""
    return HostPages(device)


@dataclass(eq=False)
class Dormant:
    """One storage on the host. `source` keeps its address from meanwhile becoming another storage's."""

    source: StorageWeakRef
    nbytes: int
    pieces: list[torch.Tensor]
    num_waiting: int = 0  # saved tensors on it that backward has not asked for
    on_device: torch.Tensor | None = None  # uint8 [nbytes]
    ready: Any = None  # an event of the side stream


# What the graph holds for a saved tensor: itself, or a dormant storage and (dtype, size, stride, storage offset).
Saved = torch.Tensor | tuple[Dormant, torch.dtype, torch.Size, tuple[int, ...], int]


class OffloadedPrefixCache(PrefixCache):
    """A prefix cache whose prefix graph has its saved activations on the host between phases A and C.

    Args:
        device: where the model runs; tensors elsewhere stay as they are.
        counts: "offloaded_bytes", "prefetched_bytes" and "demand_loads" are added to it.
    """

    def __init__(self, device: torch.device, counts: Counter[str]) -> None:
        super().__init__()
        self.device = device
        self.counts = counts
        self._host = host_pages(device)
        self._pages: list[torch.Tensor] = []
        self._num_used = 0  # bytes of them
        self._hot: set[int] = set()
        self._dormant: dict[tuple[int, int], Dormant] = {}  # in the order of the last save
        self._ahead: list[Dormant] = []  # not back yet, the next one last

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        if self._host.stream is not None:  # it may still write to prefetched memory, which is freed here
            self._host.module.current_stream(self.device).wait_stream(self._host.stream)
        for dormant in self._dormant.values():
            dormant.pieces, dormant.on_device, dormant.ready = [], None, None
        self._dormant, self._ahead = {}, []
        self._host.free += self._pages
        self._pages = []

    def saving(self) -> saved_tensors_hooks:
        """Context of phase A's forward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def capture(self, key: Key, *tensors: torch.Tensor, beside: Tensors = ()) -> Tensors:
        self._hot |= {x.untyped_storage()._cdata for x in tensors}
        return super().capture(key, *tensors, beside=beside)

    def _end_waves(self) -> None:
        super()._end_waves()
        self._ahead = list(self._dormant.values())
        self._prefetch()

    def _stays(self, tensor: torch.Tensor) -> bool:
        # Parameters, views of them (linear saves weight.t()) and FSDP2's gathered ones, whose storage FSDP2 frees and
        # fills; subclasses (DTensor) have no storage of their own.
        if type(tensor) is not torch.Tensor or isinstance(tensor._base, torch.nn.Parameter):
            return True
        if tensor.device != self.device or not tensor.is_floating_point():
            return True
        storage = tensor.untyped_storage()  # a small view keeps all of it alive
        return storage.nbytes() < TINY_BYTES or storage._cdata in self._hot

    def _pack(self, tensor: torch.Tensor) -> Saved:
        dormant = None if self._stays(tensor) else self._find_or_copy(tensor)
        if dormant is None:  # detached: a graph node that holds its own output is a cycle that nothing collects
            return tensor.detach()
        dormant.num_waiting += 1
        return dormant, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())

    def _unpack(self, saved: Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        dormant, dtype, size, stride, offset = saved
        if dormant.on_device is None:
            if not dormant.pieces:
                raise RuntimeError("backward through a prefix graph whose OffloadedPrefixCache was left before")
            self._copy_in(dormant)
            self.counts["demand_loads"] += 1
        assert dormant.on_device is not None
        if dormant.ready is not None:
            self._host.module.current_stream(self.device).wait_event(dormant.ready)
        tensor = torch.empty(0, dtype=dtype, device=self.device)
        tensor.set_(dormant.on_device.untyped_storage(), offset, size, stride)
        dormant.num_waiting -= 1
        if dormant.num_waiting <= 0:
            dormant.on_device = None
            self._prefetch()
        return tensor

    def _prefetch(self) -> None:
        room = device_room(self.device) if self._ahead else 0
        while self._ahead:
            dormant = self._ahead[-1]
            if dormant.num_waiting > 0 and dormant.on_device is None:
                room -= dormant.nbytes
                if room < 0:
                    return
                try:
                    self._copy_in(dormant)
                except torch.OutOfMemoryError:  # the room is in too small pieces
                    return
                self.counts["prefetched_bytes"] += dormant.nbytes
            self._ahead.pop()

    def _find_or_copy(self, tensor: torch.Tensor) -> Dormant | None:
        """The dormant copy of a tensor's storage; None where the host has no room for it."""
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version  # an older copy lacks what was written since
        dormant = self._dormant.pop(key, None)
        if dormant is None:
            pieces = self._reserve(storage.nbytes())
            if pieces is None:
                return None
            dormant = Dormant(StorageWeakRef(storage), storage.nbytes(), pieces)
            source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            self._copy(pieces, source.split([len(piece) for piece in pieces]))
            if self._host.stream is not None:  # the allocator must not reuse it before the copy has read it
                source.record_stream(self._host.stream)
            self.counts["offloaded_bytes"] += dormant.nbytes
        self._dormant[key] = dormant
        return dormant

    def _reserve(self, nbytes: int) -> list[torch.Tensor] | None:
        """`nbytes` of host memory as slices of pages."""
        start, end = self._num_used, self._num_used + nbytes
        while len(self._pages) * PAGE_BYTES < end:
            page = self._host.take()
            if page is None:
                return None
            self._pages.append(page)
        self._num_used = end + -end % 512
        pages = range(start // PAGE_BYTES, -(-end // PAGE_BYTES))
        return [self._pages[i][max(start - i * PAGE_BYTES, 0) : end - i * PAGE_BYTES] for i in pages]

    def _copy_in(self, dormant: Dormant) -> None:
        # Memory of the current stream, where backward reads and frees it; `_copy` lets that stream's past go first.
        on_device = torch.empty(dormant.nbytes, dtype=torch.uint8, device=self.device)
        self._copy(on_device.split([len(piece) for piece in dormant.pieces]), dormant.pieces)
        dormant.on_device = on_device
        dormant.ready = self._host.stream.record_event() if self._host.stream is not None else None

    def _copy(self, into: Iterable[torch.Tensor], source: Iterable[torch.Tensor]) -> None:
        """On the side stream, behind all that the current stream was given so far; on CPU at once."""
        stream = self._host.stream
        if stream is not None:
            stream.wait_stream(self._host.module.current_stream(self.device))
        with self._host.module.stream(stream):
            for piece, part in zip(into, source, strict=True):
                piece.copy_(part, non_blocking=True)
