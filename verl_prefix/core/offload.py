"""Keeps a prefix in host memory; the device holds only what the current layer needs, and what the next one will need.

    phase A   the storage of a saved tensor is copied once, on a side stream, to pinned pages, and freed; so are each
              layer's keys and values
    phase B   a layer's keys and values return before a wave reads them; its grad cache comes and goes with the backward
    phase C   storages and grad caches return in reverse order, ahead of backward while there is room, else when it asks

This is schedule-level reuse with dormant offload. On CPU the same code copies to ordinary host memory at once, so that
everything is tested though nothing is gained. This module knows neither model nor plan.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from verl_prefix.core.host_memory import HostCopies
from verl_prefix.core.prefix_cache import PrefixCache
from verl_prefix.core.shelf import Shelf

TINY_BYTES = 4 << 10  # a smaller storage frees too little to be worth a copy's latency
# In phase C at most this share of all dormant bytes is back before backward asks for it: of 32 layers, two.
AHEAD = 1 / 16


def device_room(device: torch.device) -> int:
    """Bytes that prefetching may take: an eighth of the device stays free for what backward itself allocates."""
    if device.type == "cpu":
        return sys.maxsize
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    stats = module.memory_stats(device)
    return int(free + stats["reserved_bytes.all.current"] - stats["active_bytes.all.current"] - total // 8)


@dataclass(eq=False)
class Dormant:
    """A storage that the graph has saved, and that waits in host memory. It goes through up to four stages:

    copied       `_find_or_copy` copies it to the host, and the graph holds `_DormantTensor`s in place of its tensors
    ahead        in phase C `_prefetch` brings it back before backward asks for it; not every storage
    asked for    `_unpack` makes a tensor of it for backward, and brings it back now if it is not ahead
    let go of    the graph holds no `_DormantTensor` of it any more, and `_let_go` frees the device
    """

    source: StorageWeakRef  # while it is held, no other storage can get the address
    nbytes: int
    pieces: list[torch.Tensor]  # of host memory
    num_waiting: int = 0  # `_DormantTensor`s of it that the graph still holds
    on_device: torch.Tensor | None = None  # uint8 [nbytes]
    ready: Any = None  # the event behind its copy back
    is_ahead: bool = False  # back, and not yet asked for


class _DormantTensor:
    """What the graph holds of a saved tensor whose storage is dormant. Backward may never ask for it: a part of the
    graph on which nothing depends is only let go of.

    Args:
        let_go: called with the storage once the graph has let go of this.
    """

    def __init__(self, dormant: Dormant, tensor: torch.Tensor, let_go: Callable[[Dormant], None]) -> None:
        self.dormant, self.dtype, self._let_go = dormant, tensor.dtype, let_go
        self.view = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        dormant.num_waiting += 1

    def __del__(self) -> None:
        self._let_go(self.dormant)


# What the graph holds for a saved tensor: the tensor itself, a place in host memory, or the parameter that it was cast
# from, with the dtype of the cast, its size, its stride and its storage offset.
Saved = torch.Tensor | _DormantTensor | tuple[torch.nn.Parameter, torch.dtype, torch.Size, tuple[int, ...], int]


class OffloadedPrefixCache(PrefixCache):
    """A prefix cache in host memory. Between phases A and C, what the prefix graph saved waits there, too.

    Args:
        device: where the model runs; tensors elsewhere stay as they are.
        counts: gets "offloaded_bytes", "prefetched_bytes" and "demand_loads" of saved activations added, and
            "host_bytes" of all that waits.
    """

    keeps_attention = False

    def __init__(self, device: torch.device, counts: Counter[str]) -> None:
        self.device = device
        self.counts = counts
        self._copies = HostCopies(device)
        self._shelves = Shelf(self._copies, written=False), Shelf(self._copies, written=True)
        super().__init__(*self._shelves)
        self._dormant: dict[tuple[int, int], Dormant] = {}  # in the order of the last save
        self._returning: list[Dormant] = []  # not back yet, the next one last
        self._num_bytes = 0  # of all dormant storages
        self._num_ahead = 0  # bytes of those that are ahead
        self._has_freed = False  # since the last prefetch

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self.counts["host_bytes"] += self._copies.num_used
        self._copies.close()
        for dormant in self._dormant.values():
            dormant.pieces, dormant.on_device, dormant.ready = [], None, None
        self._dormant, self._returning = {}, []

    def saving(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def put_away(self) -> None:
        """Frees the device of keys, values and grad caches until one is asked for."""
        for shelf in self._shelves:
            shelf.put_away()

    def _end_waves(self) -> None:
        super()._end_waves()
        self._returning = list(self._dormant.values())
        self._num_bytes = sum(dormant.nbytes for dormant in self._returning)
        self._prefetch()

    def _stays(self, tensor: torch.Tensor) -> bool:
        """Whether the graph holds a saved tensor itself, so that nothing of it goes to the host."""
        # Subclasses stay: parameters, also gathered ones, whose storage FSDP2 frees and fills; and DTensors, which have
        # no storage of their own. Linear saves a view of a parameter, weight.t().
        if type(tensor) is not torch.Tensor or isinstance(tensor._base, torch.nn.Parameter):
            return True
        if tensor.device != self.device or not tensor.is_floating_point():  # indices are small, and calls share them
            return True
        # The storage counts, not the tensor: a small view keeps the whole storage alive.
        return tensor.untyped_storage().nbytes() < TINY_BYTES

    def _pack(self, tensor: torch.Tensor) -> Saved:
        if not self._stays(tensor):
            if (parameter := _parameter_of(tensor)) is not None:
                return parameter, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            if (dormant := self._find_or_copy(tensor)) is not None:
                return _DormantTensor(dormant, tensor, self._let_go)
        return tensor.detach()  # since a graph node that holds its own output is a cycle that nothing collects

    def _unpack(self, saved: Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if isinstance(saved, tuple):
            parameter, dtype, size, stride, offset = saved
            return parameter.detach().to(dtype).as_strided(size, stride, offset)
        dormant = saved.dormant
        if dormant.on_device is None:
            if not dormant.pieces:
                raise RuntimeError("backward through a prefix graph whose OffloadedPrefixCache was left before")
            self._copy_in(dormant)
            self.counts["demand_loads"] += 1
        assert dormant.on_device is not None
        self._copies.wait(dormant.ready)
        tensor = torch.empty(0, dtype=saved.dtype, device=self.device)
        tensor.set_(dormant.on_device.untyped_storage(), *saved.view)
        if self._asked(dormant) or self._has_freed:
            self._prefetch()
        return tensor

    def _asked(self, dormant: Dormant) -> bool:
        """Counts a storage no longer among those that are ahead of backward. Returns whether it was one."""
        was_ahead, dormant.is_ahead = dormant.is_ahead, False
        if was_ahead:
            self._num_ahead -= dormant.nbytes
        return was_ahead

    def _let_go(self, dormant: Dormant) -> None:
        dormant.num_waiting -= 1
        if dormant.num_waiting == 0:
            self._asked(dormant)
            self._copies.wait(dormant.ready)  # a copy back that nobody asked for may still write
            dormant.on_device, self._has_freed = None, True

    def _prefetch(self) -> None:
        """Brings storages back before backward asks for them, as far as the device has room. One of them may be ahead
        in any case, several up to `AHEAD` of all bytes."""
        room: int | None = None  # asked for once, and late: asking the driver takes longer than all else here
        self._has_freed = False
        while self._returning:
            dormant = self._returning[-1]
            if dormant.num_waiting > 0 and dormant.on_device is None:
                if self._num_ahead and self._num_ahead + dormant.nbytes > AHEAD * self._num_bytes:
                    return
                if room is None:
                    room = device_room(self.device)
                room -= dormant.nbytes
                if room < 0:
                    return
                try:
                    self._copy_in(dormant)
                except torch.OutOfMemoryError:  # the free memory is in too small pieces
                    return
                dormant.is_ahead = True
                self._num_ahead += dormant.nbytes
                self.counts["prefetched_bytes"] += dormant.nbytes
            self._returning.pop()

    def _find_or_copy(self, tensor: torch.Tensor) -> Dormant | None:
        """The dormant copy of a tensor's storage; None where the host has no room for it."""
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version  # an older copy lacks what was written since
        dormant = self._dormant.pop(key, None)
        if dormant is None:
            pieces = self._copies.reserve(storage.nbytes())
            if pieces is None:
                return None
            dormant = Dormant(StorageWeakRef(storage), storage.nbytes(), pieces)
            self._copies.to_host(pieces, torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage))
            self.counts["offloaded_bytes"] += dormant.nbytes
        self._dormant[key] = dormant
        return dormant

    def _copy_in(self, dormant: Dormant) -> None:
        dormant.on_device, dormant.ready = self._copies.to_device(dormant.pieces)


def _parameter_of(tensor: torch.Tensor) -> torch.nn.Parameter | None:
    """The trained parameter that autocast cast to `tensor`: backward casts it again, so nothing is stored. None for a
    cast that was written to, or has other strides or another device: casting again would give something else."""
    base = tensor if tensor._base is None else tensor._base
    if base.grad_fn is None or base.grad_fn.name() != "ToCopyBackward0" or base._version:
        return None
    variable = getattr(base.grad_fn.next_functions[0][0], "variable", None)
    if not isinstance(variable, torch.nn.Parameter):
        return None
    return variable if (variable.device, variable.stride()) == (base.device, base.stride()) else None
