"""A shelf: tensors of layers that wait in host memory, of which the device has what the current layer needs."""

import bisect
import contextlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from verl_prefix.core.host_memory import HostCopies
from verl_prefix.core.prefix_cache import LayerKey, Tensors


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
        self._last = -1  # the layer that came last, stored or asked for; -1: none, before the first layer

    def __setitem__(self, key: LayerKey, tensors: Tensors) -> None:
        alike = all(x.device == self._copies.device and x.dtype == tensors[0].dtype for x in tensors)
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
            following = self._following(key)
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

    def put_away(self) -> None:
        """Frees the device of all layers until one is asked for."""
        self._free_all_but()
        self._last = -1

    def _following(self, layer: int) -> int:
        """The layer that is asked for after `layer`, in the direction from the last one; at the end `layer` itself."""
        at = self._layers.index(layer) + (1 if layer > self._last else -1)
        return self._layers[at] if 0 <= at < len(self._layers) else layer

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
