"""A device "sim" that exists for fake tensors alone: streams with a clock, autocast, and nothing that computes.

torch lets Python stand in for a device's runtime (`_setup_privateuseone_for_python_backend`), which a CPU build has for
no other device. Registered once per process; all else holds inside `fake_accelerator`.
"""

import contextlib
import functools
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _cast
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from verl_prefix.core import host_memory, offload
from verl_prefix.core.kernels import merge as merging
from verl_prefix.tools.simulate import operations

DEVICE = "sim"
_AUTOCAST = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm")  # those of CUDA's list that models here call


class Event:
    """A moment of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = 0.0

    def record(self, stream: "Stream | None" = None) -> "Event":
        self.time = (stream or CLOCK.stream).time
        return self

    def synchronize(self) -> None:
        CLOCK.host = max(CLOCK.host, self.time)


class Stream:
    """A queue of kernels: `time` is when the last of them ends."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = 0.0
        CLOCK.streams.append(self)

    def wait_event(self, event: "Event | Stream") -> None:
        self.time = max(self.time, event.time)

    wait_stream = wait_event

    def record_event(self) -> Event:
        return Event().record(self)


class Clock:
    """Seconds of the host, of the streams, and of the links that they share."""

    def start(self) -> None:
        self.streams: list[Stream] = []
        self.host: float = 0.0
        self.links: dict[str, float] = defaultdict(float)  # when each has moved what it was given
        self.on_record: Callable[[torch.Tensor, Stream], None] = lambda tensor, stream: None
        self.room: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.stream = Stream()

    @property
    def now(self) -> float:
        """Seconds until host and device are done with all that they were given."""
        return max(self.host, *(stream.time for stream in self.streams))


CLOCK = Clock()
CLOCK.start()


class _Module(_DummyBackendModule):
    """`torch.sim`, as far as FSDP2, autocast and the offload ask."""

    Stream, Event = Stream, Event

    def current_stream(self, device: Any = None) -> Any:
        return CLOCK.stream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return mock.patch.object(CLOCK, "stream", stream or CLOCK.stream)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return CLOCK.room()

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {"reserved_bytes.all.current": 0, "active_bytes.all.current": 0}


def _in_autocast_dtype(op: Any) -> Callable[..., torch.Tensor]:
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        autocast = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(autocast)):
            args, kwargs = _cast((args, kwargs), DEVICE, torch.get_autocast_dtype(DEVICE))
            return op(*args, **kwargs)

    return run


@functools.cache
def _register() -> tuple[torch.library.Library, torch.library.Library]:
    """Returns what the registrations live as long as."""
    _setup_privateuseone_for_python_backend(DEVICE, _Module())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _AUTOCAST:
        aten.impl(name, _in_autocast_dtype(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")

    # An op with a kernel on CPU and CUDA decomposes on a device that has none (silu_backward into six others). Fake
    # tensors never come to the kernel that keeps it whole.
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a fake tensor reached a kernel")

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        whole = name.startswith("aten::") and has(name, "CompositeImplicitAutograd") and has(name, "CPU")
        if whole and not has(name, "PrivateUse1"):
            aten.impl(name.removeprefix("aten::"), never, "PrivateUse1")
    return every, aten


_make_tensor = torch.tensor


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """`torch.tensor` makes no fake tensor on a Python backend; as there, data comes from the host."""
    made = _make_tensor(data, device="cpu", **kwargs)
    device = torch.device(torch.empty(0).device if device is None else device)  # empty knows the default device
    if device.type == DEVICE:
        made.constant = None  # type: ignore[attr-defined]  # known value, with which it would really be copied
    return made.to(device)


def _real_type(value: object) -> type:
    """`type` of what a fake tensor stands for: a plain tensor, where it is no parameter."""
    return torch.Tensor if type(value) is FakeTensor and not isinstance(value, torch.nn.Parameter) else type(value)


@contextlib.contextmanager
def fake_accelerator(
    ranks: int, replicas: int = 1, expert_ranks: int = 1
) -> Iterator[tuple[DeviceMesh, DeviceMesh | None]]:
    """Inside, tensors are fake, and this is rank 0 of `replicas` times `ranks`.

    Yields FSDP2's mesh, as verl's create_device_mesh makes it (verl/workers/engine/fsdp/utils.py), and that of experts
    which `expert_ranks` share, the last dimension (veomni/distributed/parallel_state.py); None: nobody shares them.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _register()
    CLOCK.start()
    dist.init_process_group(f"cpu:fake,{DEVICE}:fake", rank=0, world_size=ranks * replicas, store=FakeStore())
    gc.freeze()  # `tracker` collects often
    try:
        shape, names = ((ranks,), ("fsdp",)) if replicas == 1 else ((replicas, ranks), ("ddp", "fsdp"))
        mesh, of_experts = init_device_mesh(DEVICE, shape, mesh_dim_names=names), None
        if expert_ranks > 1:
            shape, names = (*shape[:-1], ranks // expert_ranks, expert_ranks), (*names, "ep")
            of_experts = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
        with (
            # torch makes no tensor of data on a Python backend, and knows no streams but its own.
            mock.patch.object(torch, "tensor", _tensor),
            mock.patch.object(torch.Tensor, "record_stream", lambda *record: CLOCK.on_record(*record), create=True),
            mock.patch.object(torch.accelerator, "current_stream", lambda *_: CLOCK.stream),
            # Ours ask for a plain tensor, for CUDA, and for this machine's memory.
            mock.patch.object(offload, "type", _real_type, create=True),
            mock.patch.object(merging, "_fused_merge", lambda device_type: operations.merge_into),
            mock.patch.object(host_memory, "host_room", lambda: 1 << 60),
            torch.autograd.set_multithreading_enabled(False),  # an error on another thread aborts
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            yield mesh, of_experts
    finally:
        gc.unfreeze()
        host_memory.host_pages.cache_clear()
        dist.destroy_process_group()
