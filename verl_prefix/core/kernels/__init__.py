"""Varlen attention kernels that return (out, lse) and take the merged out and lse back in backward.

A call's keys are a part of the whole softmax. Its backward gets the output and log-sum-exp of the whole, and so returns
the exact gradients of its part. That is what lets two stock kernel calls make one attention (see `attention`).

Every module in `KERNELS` has

    forward(q, k, v, call) -> out, lse
    backward(dout, saved, call) -> dq, dk, dv        saved: (q, k, v, out, lse), the last two merged

with q, out and dout [Tq, H, D], k and v [Tk, K, D], H a multiple of K, and lse [H, Tq] in fp32 (fp64 for fp64 inputs).
Gradients have their tensor's dtype. What else a kernel needs is in `call` (`core.calls.Call`).
"""

import functools
import logging
from typing import Protocol

import torch

from verl_prefix.core.calls import Call
from verl_prefix.core.errors import NoFastKernel, NoKernel, Remedy
from verl_prefix.core.kernels import aten, cpu, flash_attn, reference
from verl_prefix.core.kernels.cuda_rules import is_deterministic, unsupported_by_all
from verl_prefix.core.kernels.package_advice import missing_package

logger = logging.getLogger(__name__)


class Kernel(Protocol):
    """What a module in `KERNELS` offers: the two functions above, and the reasons for which it cannot run.

    `unavailable` is about the machine, `unsupported` about inputs; each returns the reason in words, or None.
    """

    __name__: str

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self, dout: torch.Tensor, saved: tuple[torch.Tensor, ...], call: Call
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def unavailable(self) -> str | None: ...

    def unsupported(self, device_type: str, dtype: torch.dtype, head_dim: int, softcap: bool) -> str | None: ...


KERNELS: dict[str, Kernel] = {"cpu": cpu, "flash_attn": flash_attn, "aten": aten, "reference": reference}


def available_kernels() -> dict[str, str]:
    """Kernel name -> "ok", or why it cannot run on this machine."""
    return {name: kernel.unavailable() or "ok" for name, kernel in KERNELS.items()}


def choose_kernel(name: str, device_type: str, dtype: torch.dtype, head_dim: int, softcap: bool = False) -> Kernel:
    """The kernel by name; chosen once, and again where `is_deterministic` changes.

    Args:
        name: "auto", or a key of `KERNELS`.

    Raises:
        NoKernel: unknown name; the kernel that was asked for cannot run these inputs; or (`NoFastKernel`) "auto" finds
            no fast kernel on CUDA.
    """
    return _chosen(name, device_type, dtype, head_dim, softcap, is_deterministic())


@functools.cache
def _chosen(
    name: str, device_type: str, dtype: torch.dtype, head_dim: int, softcap: bool, deterministic: bool
) -> Kernel:
    """`deterministic` is what `is_deterministic` says, which kernels ask for themselves."""

    def refusal(kernel: Kernel) -> str | None:
        return kernel.unavailable() or kernel.unsupported(device_type, dtype, head_dim, softcap)

    def log(chosen: Kernel) -> Kernel:
        missing = missing_package(head_dim, softcap) if device_type == "cuda" else None
        more = "; {}: {}".format(*missing) if missing else ""
        package = f" ({flash_attn.package(head_dim, softcap)})" if chosen.__name__ == flash_attn.__name__ else ""
        logger.warning("prefix: attention kernel %s: %s%s%s", name, chosen.__name__, package, more)  # workers print it
        return chosen

    if name == "auto":
        # flash_attn is installed to be used: FA3 and FA4 are faster than aten's FA2. A run's self-check compares it.
        for candidate in (cpu, flash_attn, aten):
            if refusal(candidate) is None:
                return log(candidate)
        what = f"{device_type}, {dtype}, head dim {head_dim}{', softcap' if softcap else ''}"
        if device_type == "cuda":
            reason = unsupported_by_all(device_type, dtype, head_dim)
            takes_bf16 = unsupported_by_all(device_type, torch.bfloat16, head_dim) is None
            can_run = takes_bf16 and flash_attn.runs_on_this_gpu()
            remedy: Remedy | None = ("16 bits" if reason else "flash-attn") if can_run else None
            reason = reason or "; ".join(f"{other}: {refusal(KERNELS[other])}" for other in ("flash_attn", "aten"))
            raise NoFastKernel(f"no fast attention kernel for {what} ({reason})", remedy)
        logger.warning("prefix: no fast attention kernel for %s; the dense reference runs, which is slow", what)
        return reference
    if name not in KERNELS:
        raise NoKernel(f"attention kernel {name!r} is unknown; there are auto, {', '.join(KERNELS)}")
    if reason := refusal(KERNELS[name]):
        raise NoKernel(f"attention kernel {name!r} cannot run here: {reason}")
    return log(KERNELS[name]) if name == "flash_attn" else KERNELS[name]  # of which the log names the package
