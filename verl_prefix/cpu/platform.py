"""verl platform `cpu` (verl/plugin/platform): gloo collectives, and Ray "GPUs" that only count workers."""

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_prefix.cpu import is_selected


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _resident(*_args: Any) -> int:
    return psutil.Process().memory_info().rss


# `torch.cpu` with what verl asks of `torch.cuda`; memory in bytes, of this process and of the host.
_DEVICE_MODULE = SimpleNamespace(
    **vars(torch.cpu)
    | {
        # verl/utils/memory_utils.py: the calls below this question reach torch.cuda unconditionally.
        "is_available": lambda: False,
        "current_device": lambda: "cpu",
        "get_device_name": lambda: "CPU",
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        "mem_get_info": lambda *_: (psutil.virtual_memory().available, psutil.virtual_memory().total),
    }
    | dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), _resident)
    | dict.fromkeys(("empty_cache", "set_device", "reset_peak_memory_stats", "ipc_collect"), _nothing)
)


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """verl's device layer on CPU; what concerns streams, allocators and profilers does nothing."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return is_selected()

    def current_device(self) -> str:
        # verl moves tensors with `.to(get_device_id())`; an index would mean an accelerator.
        return "cpu"

    def device_count(self) -> int:
        return 1

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing
    nvtx_range = nullcontext

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        """Return ``"gloo"``; in a verl worker, create the default process group first.

        ``initialize_global_process_group_ray`` (verl/utils/distributed.py) asks for the name to write
        ``cpu:gloo,<device>:<name>``, which names the device cpu twice and which torch refuses. It leaves a group that
        exists alone.
        """
        if os.environ.get("WG_BACKEND") == "ray" and not dist.is_initialized():
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(
                "cpu:gloo", init_method=os.environ.get("DIST_INIT_METHOD"), rank=rank, world_size=world_size
            )
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        # ResourcePoolManager (verl/single_controller/ray/base.py) counts GPU and NPU only; ray.init(num_gpus=N)
        # provides workers' slots with that name.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False
