"""Varlen attention kernels that return (out, lse) and take the merged out and lse back in backward.

A backward that is handed the output and log-sum-exp of the whole softmax, of which its own keys are a part, gives this
part's exact gradients. That is what lets two stock kernel calls make one attention (see `attention`).

Every kernel module has

    forward(q, k, v, spans, causal, scale, window, softcap) -> out, lse
    backward(dout, q, k, v, out, lse, spans, causal, scale, window, softcap) -> dq, dk, dv

with q [Tq, H, D], k and v [Tk, K, D], H a multiple of K, and lse [H, Tq] in fp32 (fp64 for fp64 inputs). Causal: a
segment's last query reads up to its last key, the one before it up to the one before, and so on; a window (causal only)
leaves each query that many keys. softcap: scores become softcap * tanh(scores / softcap).
"""

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from verl_prefix.core.kernels import aten, cpu, flash_attn, reference

logger = logging.getLogger(__name__)

KERNELS: dict[str, ModuleType] = {"cpu": cpu, "flash_attn": flash_attn, "aten": aten, "reference": reference}


@dataclass(frozen=True)
class Spans:
    """Pairs of a query segment and the key segment that it reads, as cumulative bounds from the first token on.

    `q` and `k` hold n + 1 increasing ints for n pairs; no segment is empty, since an empty one kills the CPU kernel.
    `q_parts` refines `q` where a query segment is made of several rows: a kernel that goes part by part computes each
    row alike whatever rows stand beside it, to the bit.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    q_parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.q) == len(self.k), (self.q, self.k)
        for bounds in (self.q, self.k):
            assert all(b > a for a, b in zip(bounds, bounds[1:], strict=False)), f"empty segment in {bounds}"

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        return zip(self.q, self.q[1:], self.k, self.k[1:], strict=False)

    def parts(self) -> Iterator[tuple[int, int, int, int]]:
        """As iteration, but by `q_parts`: (query start, query end, key start, key end)."""
        if not self.q_parts:
            yield from self
            return
        pair = 0
        for start, end in zip(self.q_parts, self.q_parts[1:], strict=False):
            pair += start == self.q[pair + 1]
            yield start, end, self.k[pair], self.k[pair + 1]

    @functools.cached_property
    def max_q(self) -> int:
        return max(b - a for a, b in zip(self.q, self.q[1:], strict=False))

    @functools.cached_property
    def max_k(self) -> int:
        return max(b - a for a, b in zip(self.k, self.k[1:], strict=False))

    def cu_seqlens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [n + 1] on `device`, built once for all layers."""
        cache = self.__dict__.setdefault("_cu_seqlens", {})
        if device not in cache:
            cache[device] = tuple(torch.tensor(b, dtype=torch.int32, device=device) for b in (self.q, self.k))
        return cache[device]


def available_kernels() -> dict[str, str]:
    """Kernel name -> "ok", or why it cannot run on this machine."""
    return {name: kernel.unavailable() or "ok" for name, kernel in KERNELS.items()}


@functools.cache
def choose_kernel(name: str, device_type: str, dtype: torch.dtype, head_dim: int, softcap: bool = False) -> ModuleType:
    """The kernel for `prefix.attention`.

    Args:
        name: "auto", or a key of `KERNELS`.

    Raises:
        ValueError: unknown name, or the kernel that was asked for cannot run these inputs.
    """
    if name == "auto":
        for candidate in (cpu, flash_attn, aten):
            if candidate.unavailable() is None and candidate.unsupported(device_type, dtype, head_dim, softcap) is None:
                logger.warning("prefix.attention=auto: %s", candidate.__name__)  # a level that workers print, once
                return candidate
        what = f"{device_type}, {dtype}, head dim {head_dim}{', softcap' if softcap else ''}"
        if device_type == "cuda":
            reasons = "; ".join(
                f"{other}: {kernel.unavailable() or kernel.unsupported(device_type, dtype, head_dim, softcap)}"
                for other, kernel in (("flash_attn", flash_attn), ("aten", aten))
            )
            raise ValueError(
                f"prefix.attention=auto: no fast kernel for {what} ({reasons}); set "
                "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16, install flash-attn, or set "
                "prefix.attention=reference, which is dense and slow"
            )
        logger.warning("prefix.attention=auto: no fast kernel for %s; the dense reference runs, which is slow", what)
        return reference
    if name not in KERNELS:
        raise ValueError(f"prefix.attention={name!r} is unknown; set one of {['auto', *KERNELS]}")
    kernel = KERNELS[name]
    reason = kernel.unavailable() or kernel.unsupported(device_type, dtype, head_dim, softcap)
    if reason:
        raise ValueError(f"prefix.attention={name!r} cannot run here: {reason}; set prefix.attention=auto")
    return kernel
