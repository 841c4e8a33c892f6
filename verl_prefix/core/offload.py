"""Keeps a prefix in host memory; the device holds only what the current layer needs, and what the next one will need.

    phase A   the storage of a saved tensor is copied once, on a side stream, to pinned pages, and freed; so are each
              layer's keys and values
    phase B   a layer's keys and values return before a wave reads them; its grad cache comes and goes with the backward
    phase C   storages and grad caches return in reverse order, ahead of backward while there is room, else when it asks

This is schedule-level reuse with dormant offload. On CPU the same code copies to ordinary host memory at once, so that
everything is tested though nothing is gained. This module knows neither model nor plan.
"""

import bisect
import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from verl_prefix.core.host_memory import HostCopies
from verl_prefix.core.prefix_cache import LayerKey, PrefixCache, Tensors

TINY_BYTES = 4 << 10  # a smaller storage frees too little to be worth a copy's latency
AHEAD = 1 / 16  # of all bytes on the host, the share that may be back at a time before backward asks: two of 32 layers


def device_room(device: torch.device) -> int:
    """Bytes that prefetching may take: an eighth of the device stays free for what backward itself allocates."""
    if device.type == "cpu":
        return sys.maxsize
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    stats = module.memory_stats(device)
    return int(free + stats["reserved_bytes.all.current"] - stats["active_bytes.all.current"] - total // 8)


@dataclass(eq=False)
class _Shelved:
    """A layer's tensors, one after the other: on the device, in host memory, or both."""

    dtype: torch.dtype
    like: list[tuple[torch.Size, bool]]  # shape of each tensor, and whether it requires a gradient
    on_device: torch.Tensor | None  # uint8 [n]
    is_newer: bool = True  # the device's copy is newer than the host's
    pieces: list[torch.Tensor] | None = None  # of host memory; None: it was never there
    ready: Any = None  # the event behind a copy to the device

    def tensors(self) -> Tensors:
        assert self.on_device is not None
        parts, start = [], 0
        for shape, requires_grad in self.like:
            end = start + shape.numel() * self.dtype.itemsize
            parts.append(self.on_device[start:end].view(self.dtype).view(shape).requires_grad_(requires_grad))
            start = end
        return tuple(parts)


class Shelf(MutableMapping[LayerKey, Tensors]):
    """Tensors of layers in host memory: the device has those of the layer asked for last, and of the next one.

    Layers are asked for in ascending or in descending order. Some tensors stay on the device: outputs, and states of
    recurrent layers, which are small and held by a wave's graph; tensors of another device or of mixed dtypes; and what
    the host has no room for.

    Args:
        copies: host memory, and copies to it and back.
        written: whether the caller writes to the tensors that it asks for.
    """

    def __init__(self, copies: HostCopies, written: bool) -> None:
        self._copies = copies
        self._written = written
        self._staying: dict[LayerKey, Tensors] = {}
        self._shelved: dict[int, _Shelved] = {}
        self._layers: list[int] = []  # sorted
        self._last = -1

    def __setitem__(self, key: LayerKey, tensors: Tensors) -> None:
        alike = {(x.device, x.dtype) for x in tensors} == {(self._copies.device, tensors[0].dtype)}
        if not isinstance(key, int) or not alike:
            self._staying[key] = tensors
            return
        like = [(x.shape, x.requires_grad) for x in tensors]
        self._shelved[key] = _Shelved(tensors[0].dtype, like, _flat(tensors))
        bisect.insort(self._layers, key)
        self._free_all_but(key)
        self._last = key

    def __getitem__(self, key: LayerKey) -> Tensors:
        if key in self._staying:
            return self._staying[key]
        if key not in self._shelved:
            raise KeyError(key)
        assert isinstance(key, int)
        shelved = self._shelved[key]
        if key != self._last:
            at = self._layers.index(key) + (1 if key > self._last else -1)
            following = self._layers[at] if 0 <= at < len(self._layers) else key
            self._free_all_but(key, following)
            self._load(key)
            with contextlib.suppress(torch.OutOfMemoryError):  # it is loaded again when it is asked for
                self._load(following)
            self._last = key
        self._wait(shelved)
        shelved.is_newer |= self._written
        return shelved.tensors()

    def __delitem__(self, key: LayerKey) -> None:
        if key in self._shelved:
            assert isinstance(key, int)
            self._wait(self._shelved.pop(key))
            self._layers.remove(key)
        else:
            del self._staying[key]

    def __contains__(self, key: object) -> bool:
        return key in self._shelved or key in self._staying

    def __iter__(self) -> Iterator[LayerKey]:
        yield from self._shelved
        yield from self._staying

    def __len__(self) -> int:
        return len(self._shelved) + len(self._staying)

    def clear(self) -> None:
        for shelved in self._shelved.values():
            self._wait(shelved)
        self._shelved, self._staying, self._layers = {}, {}, []

    def _free_all_but(self, *layers: int) -> None:
        """Frees the device of all other layers. What the host lacks of them is copied there first."""
        for layer, shelved in [*self._shelved.items()]:
            if layer in layers or shelved.on_device is None:
                continue
            if shelved.pieces is None:
                shelved.pieces = self._copies.reserve(shelved.on_device.nbytes)
            if shelved.pieces is None:
                self._staying[layer] = self._shelved.pop(layer).tensors()
                self._layers.remove(layer)
                continue
            if shelved.is_newer:
                self._copies.to_host(shelved.pieces, shelved.on_device)
                shelved.is_newer = False
            self._wait(shelved)
            shelved.on_device = None

    def _load(self, layer: int) -> None:
        shelved = self._shelved[layer]
        if shelved.on_device is None:
            assert shelved.pieces is not None
            shelved.on_device, shelved.ready = self._copies.to_device(shelved.pieces)

    def _wait(self, shelved: _Shelved) -> None:
        """Waits for the copy to the device, before its memory is read or freed."""
        self._copies.wait(shelved.ready)
        shelved.ready = None


def _flat(tensors: Tensors) -> torch.Tensor:
    """The bytes of the tensors, one after the other, uint8 [n]."""
    return torch.cat([x.detach().contiguous().view(-1).view(torch.uint8) for x in tensors])


@dataclass(eq=False)
class Dormant:
    """A storage that waits in host memory."""

    source: StorageWeakRef  # while it is held, no other storage can get the address
    nbytes: int
    pieces: list[torch.Tensor]  # of host memory
    num_waiting: int = 0  # saved tensors on it that the graph still holds
    on_device: torch.Tensor | None = None  # uint8 [nbytes]
    ready: Any = None  # an event of the side stream
    is_ahead: bool = False  # on the device before backward asks


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
        super().__init__(Shelf(self._copies, written=False), Shelf(self._copies, written=True))
        self._dormant: dict[tuple[int, int], Dormant] = {}  # in the order of the last save
        self._returning: list[Dormant] = []  # not back yet, the next one last
        self._num_bytes = 0  # of dormant storages
        self._num_ahead = 0  # of those that came back before backward asked
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

    def _end_waves(self) -> None:
        super()._end_waves()
        self._returning = list(self._dormant.values())
        self._num_bytes = sum(dormant.nbytes for dormant in self._returning)
        self._prefetch()

    def _stays(self, tensor: torch.Tensor) -> bool:
        # These stay: parameters, views of them (linear saves weight.t()) and FSDP2's gathered ones, whose storage FSDP2
        # frees and fills; and subclasses (DTensor), which have no storage of their own.
        if type(tensor) is not torch.Tensor or isinstance(tensor._base, torch.nn.Parameter):
            return True
        if tensor.device != self.device or not tensor.is_floating_point():
            return True
        return tensor.untyped_storage().nbytes() < TINY_BYTES  # a small view keeps the whole storage alive

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
        """Counts a storage no longer among those that are back ahead of backward; whether it was."""
        was_ahead, dormant.is_ahead = dormant.is_ahead, False
        self._num_ahead -= was_ahead * dormant.nbytes
        return was_ahead

    def _let_go(self, dormant: Dormant) -> None:
        dormant.num_waiting -= 1
        if dormant.num_waiting == 0:
            self._asked(dormant)
            self._copies.wait(dormant.ready)  # a copy back that nobody asked for may still write
            dormant.on_device, self._has_freed = None, True

    def _prefetch(self) -> None:
        """Brings storages back before backward asks for them. What is back and not yet asked for is at any time one
        storage, or at most `AHEAD` of all bytes."""
        room: int | None = None  # asking the driver takes longer than all else here
        self._has_freed = False
        while self._returning:
            dormant = self._returning[-1]
            if dormant.num_waiting > 0 and dormant.on_device is None:
                if self._num_ahead and self._num_ahead + dormant.nbytes > AHEAD * self._num_bytes:
                    return
                room = (device_room(self.device) if room is None else room) - dormant.nbytes
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
