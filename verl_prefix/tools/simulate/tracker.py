"""A recorder below autograd: what every operation allocates, computes, moves and waits for, on fake or real tensors.

Time is a roofline per operation on the streams of `accelerator`: the host hands operations over one by one, a stream
runs them in order, a collective or a copy over PCIe also waits for its link. Not modelled: fragmentation of the
allocator, workspaces of NCCL and cuBLAS, kernels that slow each other down.
"""

import contextlib
import gc
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from verl_prefix.core.prefix_cache import LayerKey, PrefixCache
from verl_prefix.tools.simulate.accelerator import CLOCK, Stream
from verl_prefix.tools.simulate.hardware import Hardware
from verl_prefix.tools.simulate.operations import (
    KERNEL,
    bytes_of,
    device_of,
    flops_of,
    members_of,
    runs_kernel,
    tensors_of,
)

OWNERS = (
    "parameters", "gradients", "optimizer", "activations", "prefix cache", "grad cache", "logits", "fsdp buffers",
    "flash workspace",
)  # fmt: skip
_IS_PINNED, _PIN_MEMORY = torch.ops.aten.is_pinned.default, torch.ops.aten._pin_memory.default
_SET_STORAGE = torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset


class Phase(dict[str, float]):
    """Amounts of one phase: seconds ("layer_seconds" of them in layers, where stages have a part each), launches,
    host_syncs, "flops/KIND"; in bytes "collective/NAME", "peak", "peak/OWNER" and "host_peak";
    "peak@SITE" and "peak@SITE/OWNER" by `Tracker.site`; of a pipeline its "bubble". What is not there is 0."""

    def __missing__(self, amount: str) -> float:
        return 0.0


class Tracker(TorchDispatchMode):
    """Records what happens while it is open.

    Args:
        hardware: what is simulated. device: type of the device whose memory counts. vocab_size: tells logits by shape.

    Attributes:
        phases: {name: amounts}; `in_phase` names the one that counts.
        current: bytes on the device. host: bytes of copies on the host.
        site: where in the model the pass is, so that a peak there is a line over the model's depth.
    """

    def __init__(self, hardware: Hardware, device: str, vocab_size: int) -> None:
        super().__init__()
        self.hardware, self.device, self.vocab_size = hardware, device, vocab_size
        self._block = 1 if device == "cpu" else 512  # bytes to which a device's allocator rounds; torch's for CUDA
        self.restart()
        self.current = self.host = 0
        self.site = "before layers"
        self._blocks: dict[int, list[Any]] = {}  # storage -> [bytes, owner; None: on the host, weak reference]
        self._owned: Counter[str] = Counter()
        self._used_until: dict[int, float] = {}  # storage -> when a side stream has read it
        self._pending: list[tuple[float, int, str]] = []  # freed, but a side stream still reads: (until, bytes, owner)
        self._patches = contextlib.ExitStack()
        self._paused = False

    def restart(self) -> None:
        """Forgets all phases; what is on the device stays."""
        self.phases: dict[str, Phase] = defaultdict(Phase)
        self.phase, self.weight = self.phases["setup"], 1.0

    # memory

    def _count(self, nbytes: int, owner: str | None) -> None:
        if owner is None:
            self.host += nbytes
            self.phase["host_peak"] = max(self.phase["host_peak"], self.host)
            return
        self.current += nbytes
        self._owned[owner] += nbytes
        if nbytes > 0:
            self._see_peak(nbytes)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._block) * self._block

    def _see_peak(self, nbytes: int) -> None:
        # Fake tensors' dispatch leaves cycles that hold tensors, which no peak may count.
        at_site = f"peak@{self.site}"
        if self.current > self.phase[at_site] and nbytes > self.current / 500:
            gc.collect(1)
        for peak in (at_site, "peak"):
            if self.current > self.phase[peak]:
                self.phase[peak] = self.current
                for name in OWNERS:
                    self.phase[f"{peak}/{name}"] = self._owned[name]

    def _collect(self) -> None:
        """Gives back what nobody held and no stream reads any more."""
        done = [block for block in self._pending if block[0] <= CLOCK.host]
        self._pending = [block for block in self._pending if block[0] > CLOCK.host]
        for _, nbytes, owner in done:
            self._count(-nbytes, owner)

    def _free(self, key: int) -> None:
        nbytes, owner, _ = self._blocks.pop(key)
        until = self._used_until.pop(key, 0.0)
        if until > CLOCK.host and owner is not None:
            self._pending.append((until, nbytes, owner))
        else:
            self._count(-nbytes, owner)

    def note(self, tensor: torch.Tensor) -> bool:
        """Counts a tensor's storage, for whoever allocates it; False where it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks:
            return False
        self._collect()
        nbytes = self._rounded(storage.nbytes())
        owner = self._owner(tensor) if device_of(tensor) == self.device else None
        self._blocks[key] = [nbytes, owner, weakref.ref(storage, lambda _: self._free(key))]
        self._count(nbytes, owner)
        return True

    def assign(self, tensor: torch.Tensor | None, owner: str) -> None:
        """Says whose a known tensor is from now on."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor is None or (block := self._blocks.get(tensor.untyped_storage()._cdata)) is None or block[1] is None:
            return
        self._owned[block[1]] -= block[0]
        self._owned[owner] += block[0]
        block[1] = owner

    def _owner(self, tensor: torch.Tensor) -> str:
        if tensor.dim() > 1 and tensor.shape[-1] == self.vocab_size:
            return "logits"
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if "/distributed/fsdp/" in name:
                accumulates = frame.f_code.co_name == "to_accumulated_grad_if_needed"
                return "gradients" if accumulates else "fsdp buffers"
            if name.endswith("/core/prefix_cache.py"):
                function = frame.f_code.co_name
                if function in ("add_grad", "take") or (function == "backward" and frame is sys._getframe(2)):
                    return "grad cache"
                if function in ("capture", "read"):
                    return "prefix cache"
            if name.endswith("/torch/optim/optimizer.py"):
                return "optimizer"
            frame = frame.f_back  # type: ignore[assignment]
        return "activations"

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        if (block := self._blocks.get(storage._cdata)) is None:
            return
        nbytes = self._rounded(size)
        before, block[0] = block[0], nbytes
        if nbytes > before:
            self._collect()
        self._count(nbytes - before, block[1])

    def _recorded(self, tensor: torch.Tensor, stream: Stream) -> None:
        key = tensor.untyped_storage()._cdata
        self._used_until[key] = max(self._used_until.get(key, 0.0), stream.time)

    # hooks into what allocates without an operation, and into who owns what

    def __enter__(self) -> "Tracker":
        resize, capture = torch.UntypedStorage.resize_, PrefixCache.capture
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self._resized(storage, size)
            return out

        def captured(cache: PrefixCache, key: LayerKey, *tensors: torch.Tensor, **options: Any) -> Any:
            for x in tensors:
                self.assign(x, "prefix cache")
            return capture(cache, key, *tensors, **options)

        def propagated(propagator: ShardingPropagator, *args: Any) -> Any:
            """DTensor asks fake tensors of its own, of whole parameters, what shape comes out."""
            with mock.patch.object(self, "_paused", True):
                return propagate(propagator, *args)

        patch = mock.patch.object
        enter = self._patches.enter_context
        enter(patch(torch.UntypedStorage, "resize_", resize_))  # FSDP2's way to free and fill what it gathers
        enter(patch(PrefixCache, "capture", captured))  # activations become the prefix cache's
        enter(patch(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagated))
        CLOCK.on_record = self._recorded
        CLOCK.room = lambda: (int(self.hardware.capacity) - self.current, int(self.hardware.capacity))
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._patches.close()
        super().__exit__(*exc_info)

    @contextlib.contextmanager
    def in_phase(self, name: str, weight: float | None = None) -> Iterator[None]:
        """Counts for the phase of this name, `weight` times over (None: as the phase around it), until the device is
        done with it. Of what a phase inside it counts it has the seconds alone."""
        phase, start = self.phases[name], CLOCK.now
        outer, counted = (self.phase, self.weight), Phase(phase)
        self.weight = weight = self.weight if weight is None else weight
        self.phase, self.site = phase, "start"
        gc.collect()
        self._see_peak(0)
        self.site = "before layers"
        yield
        CLOCK.host = CLOCK.now  # no wait of the run: it tells phases apart
        phase["seconds"] += CLOCK.now - start
        for amount, value in phase.items():
            if not amount.startswith(("peak", "host_peak")):
                phase[amount] += (weight - 1.0) * (value - counted[amount])
        self.phase, self.weight = outer

    # time

    def read(self) -> None:
        """The host waits for the current stream, as `.item()` and a copy from pageable memory do."""
        self.phase["host_syncs"] += 1
        CLOCK.host = max(CLOCK.host, CLOCK.stream.time) + 2 * self.hardware.launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked more often than all else; no operation
        kwargs = kwargs or {}
        if func is _IS_PINNED:  # fake tensors know no pinned memory; here a copy that need not be waited for says so
            return False
        if func is _PIN_MEMORY:
            args[0].constant = None  # its known value, with which it would really be copied
            return args[0]
        if DTensor in types:
            return NotImplemented
        # A cached call of set_ would keep its storage alive.
        is_set = func in _SET_STORAGE and isinstance(args[0], FakeTensor)
        with disable_fake_tensor_cache(args[0].fake_mode) if is_set else contextlib.nullcontext():
            out = func(*args, **kwargs)
        if self._paused or func.namespace in ("prim", "profiler"):
            return out
        outs, ins = tensors_of((out,)), tensors_of((*args, *kwargs.values()))
        new = any([self.note(x) for x in outs])
        self._time(func, ins, outs=outs, new=new, args=args, kwargs=kwargs, out=out)
        return out

    def _time(self, func: Any, ins: list, outs: list, new: bool, args: Any, kwargs: Any, out: Any) -> None:
        hardware, phase = self.hardware, self.phase
        namespace, name = func._schema.name.split("::")
        mutates = func._schema.is_mutable
        if namespace in ("c10d", "_c10d_functional"):
            if name != "wait_tensor":
                self._collective(name, max((x.nbytes for x in (*ins, *outs)), default=0), members_of(func, args))
            return
        devices = {device_of(x) for x in (*ins, *outs)}
        if not (new or mutates) or self.device not in devices or not runs_kernel(name, args):
            CLOCK.host += hardware.launch / 5
            return
        if len(devices) > 1 and name in ("_to_copy", "copy_", "_copy_from"):
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            link = "pcie/to_device" if device_of(outs[0]) == self.device else "pcie/to_host"
            self._transfer(link, max(x.nbytes for x in outs) / hardware.pcie)
            if waits:
                self.read()
            return
        kind, flops, workspace = flops_of(
            func, name, ins=ins, args=args, kwargs=kwargs, out=out, vocab_size=self.vocab_size
        )
        nbytes = bytes_of(name, ins, outs=outs, new=new, mutates=mutates) + 2 * workspace
        if workspace:
            self._count(workspace, "flash workspace")
            self._count(-workspace, "flash workspace")
        reached = {
            "attention": hardware.attention_backward if "backward" in name else hardware.attention_forward,
            "recurrent": hardware.matmul_16,
        }.get(kind, hardware.matmul_16 if not ins or ins[0].element_size() <= 2 else hardware.matmul_32)
        seconds = max(flops / reached, nbytes / hardware.memory, hardware.kernel)
        if name.startswith("_flash_attention"):
            heads = ins[0].shape[1]
            seconds += heads * KERNEL.empty_blocks("backward" in name) * hardware.empty_block
        phase["launches"] += 1
        if flops:
            phase[f"flops/{kind}"] += flops
        CLOCK.host += hardware.launch
        CLOCK.stream.time = max(CLOCK.stream.time, CLOCK.host) + seconds

    def _collective(self, name: str, nbytes: int, members: list[int]) -> None:
        ranks = len(members)
        rate = self.hardware.network if max(members) < self.hardware.per_node else self.hardware.nodes
        wire = nbytes * (ranks - 1) / ranks * (2 if "allreduce" in name or "all_reduce" in name else 1)
        self.phase[f"collective/{name.strip('_')}"] += nbytes
        self._transfer("network", wire / rate, launches=4, latency=2 * self.hardware.launch)

    def _transfer(self, link: str, seconds: float, launches: int = 1, latency: float = 0.0) -> None:
        """Keeps the current stream and a link busy, once both are free."""
        CLOCK.host += launches * self.hardware.launch
        stream = CLOCK.stream
        stream.time = CLOCK.links[link] = max(CLOCK.host, stream.time, CLOCK.links[link]) + seconds + latency
