"""Kernels of gated delta nets on fake tensors: what flash-linear-attention and causal_conv1d allocate, keep and launch.

    forward   2 l2norm, cumsum, zeros, kkt_solve, w_u, zeros, states, o
    backward  w_u, states, dv, dh, dqkwg, sum, wy, 2 add, cumsum, 2 l2norm

Read from flash-linear-attention 0.6.0 (fla/ops/gated_delta_rule/chunk.py, fla/modules) and causal_conv1d 1.7.0. A
kernel is an operation that computes nothing; the tracker charges it by roofline, which does not see that a scan goes
chunk by chunk. No GPU has measured these kernels here.
"""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from verl_prefix.auto.shape import DELTA_CHUNK, conv_flops, scan_flops
from verl_prefix.models.recurrent import GatedDeltaNet, mixer_of

# Text models whose recurrent layers all have stand-ins here.
MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
KERNEL = "simulated_kernel"

# Of a kernel's FLOPs forward, as their gradients take: two products for every one. A backward also makes w, u and the
# states between chunks again, two of the four kernels with products: in all 2.5 times a forward.
_GRADIENT = 2.0
_SHARE = 1 / 4  # equal ones, since memory bounds all four
_SUMMED = 132  # rows of a norm's partial weight gradients: one of each multiprocessor of an H100

_library = torch.library.Library("verl_prefix", "DEF")
_library.define(f"{KERNEL}(Tensor[] reads, Tensor(a!)[] writes, float flops, str kind) -> ()")
_library.impl(KERNEL, lambda reads, writes, flops, kind: None, "Meta")


def launch(
    reads: Sequence[torch.Tensor | None], writes: list[Any], flops: float = 0.0, kind: str = "recurrent"
) -> list[Any]:
    """A kernel that reads and writes these tensors; returns those that it writes. kind: of its FLOPs, see `Phase`."""
    given = ([x for x in tensors if x is not None] for tensors in (reads, writes))
    getattr(torch.ops.verl_prefix, KERNEL)(*given, flops, kind)
    return writes


def _l2norm(x: torch.Tensor) -> list[torch.Tensor]:
    return launch([x], [torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)])


def _cumsum(g: torch.Tensor) -> torch.Tensor:
    return launch([g], [torch.empty_like(g)])[0]


class _DeltaRule(torch.autograd.Function):
    """chunk_gated_delta_rule: q, k [1, T, H, K], v [1, T, H, V], g and beta [1, T, H], states [n, H, K, V] -> outputs,
    and final states in fp32."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        initial: torch.Tensor | None, final: bool, segments: int, flops: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        (q, q_rstd), (k, k_rstd) = _l2norm(q), _l2norm(k)
        g = _cumsum(g)
        A = k.new_zeros(*k.shape[:3], DELTA_CHUNK)
        launch([k, g, beta], [A], flops * _SHARE)
        w, u = launch([k, v, g, beta, A], [torch.empty_like(k), torch.empty_like(v)], flops * _SHARE)
        state = k.new_zeros(segments, k.shape[2], k.shape[3], v.shape[3], dtype=torch.float32) if final else None
        written = [_of_chunks(k, u, segments), torch.empty_like(u), state]
        h, v_new, _ = launch([k, w, u, g, initial], written, flops * _SHARE)
        (out,) = launch([q, k, v_new, h, g], [torch.empty_like(v)], flops * _SHARE)
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, g, beta, A, initial)
        ctx.args = segments, flops
        return out, state

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dstate: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, q_rstd, k, k_rstd, v, g, beta, A, initial = ctx.saved_tensors
        dout = dout.contiguous()
        dq, dk, *others = _delta_rule_backward(q, k, v, g, beta, A, initial, dout, dstate, *ctx.args)
        (dq,) = launch([q, q_rstd, dq], [torch.empty_like(q)])
        (dk,) = launch([k, k_rstd, dk], [torch.empty_like(k)])
        return dq, dk, *others, None, None, None


def _of_chunks(k: torch.Tensor, v: torch.Tensor, segments: int) -> torch.Tensor:
    """A state of every chunk; half a chunk of every segment but one is empty on average."""
    chunks = -(-(k.shape[1] + DELTA_CHUNK // 2 * (segments - 1)) // DELTA_CHUNK)
    return k.new_empty(1, chunks, k.shape[2], k.shape[3], v.shape[3])


def _delta_rule_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, A: torch.Tensor,
    initial: torch.Tensor | None, dout: torch.Tensor, dstate: torch.Tensor | None, segments: int, flops: float,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """A function of its own, whose buffers are gone before the norms' gradients."""
    gradient = _GRADIENT * _SHARE * flops
    w, u = launch([k, v, g, beta, A], [torch.empty_like(k), torch.empty_like(v)], flops * _SHARE)
    written: list[Any] = [_of_chunks(k, u, segments), torch.empty_like(u)]
    h, v_new = launch([k, w, u, g, initial], written, flops * _SHARE)
    (dv,) = launch([q, k, g, dout], [torch.empty_like(dout)], gradient)
    dinitial = None if initial is None else torch.empty_like(initial, dtype=torch.float32)
    written = [torch.empty_like(h), dinitial, torch.empty_like(dv)]
    dh, _, dv = launch([q, k, w, g, initial, dstate, dout, dv], written, gradient)
    written = [torch.empty_like(x) for x in (q, k, w, g[None])]
    dq, dk, dw, dg = launch([q, k, v_new, w, g, h, dv, dout, dh], written, gradient)
    dg = dg.sum(0)
    written = [torch.empty_like(x) for x in (k, v, beta, g)]
    dk2, du, dbeta, dg2 = launch([k, v, beta, g, A, dw, dv], written, gradient)
    return dq, dk.add_(dk2), du, _cumsum(dg.add_(dg2)), dbeta, dinitial


class _Conv(torch.autograd.Function):
    """causal_conv1d_fn with its activation: x [1, C, T], weight [C, width]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, flops: float
    ) -> torch.Tensor:
        x = x if 1 in x.stride()[1:] else x.contiguous()
        (out,) = launch([x, weight, bias], [torch.empty_like(x)], flops)
        ctx.save_for_backward(x, weight, bias)
        ctx.flops = flops
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dout = dout if 1 in dout.stride()[1:] else dout.contiguous()
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        launch([x, weight, bias, dout], [dx, dweight, dbias], _GRADIENT * ctx.flops)
        return dx, dweight.to(weight.dtype), None if dbias is None else dbias.to(bias.dtype), None


class _GatedNorm(torch.autograd.Function):
    """FusedRMSNormGated: x and gate [t, D], weight [D]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        out, rstd = launch([x, gate, weight], [torch.empty_like(x), x.new_empty(len(x), dtype=torch.float32)])
        ctx.save_for_backward(x, gate, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, gate, weight, rstd = ctx.saved_tensors
        dx, dgate = torch.empty_like(x), torch.empty_like(gate)
        dweight = weight.new_empty(_SUMMED, len(weight), dtype=torch.float32)
        launch([x, gate, weight, rstd, dout.contiguous()], [dx, dgate, dweight])
        return dx, dgate, dweight.sum(0).to(weight.dtype)


_known: deque[torch.Tensor] = deque(maxlen=4)  # bounds of segments whose chunks fla has counted, as its tensor_cache


def _rule_of(mixer: GatedDeltaNet) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    per_token = scan_flops(mixer)

    def chunk_gated_delta_rule(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        initial_state: torch.Tensor | None = None, output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None, **options: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        if cu_seqlens is not None and not any(cu_seqlens is one for one in _known):
            cu_seqlens.cpu()  # the host counts chunks
            _known.append(cu_seqlens)
        segments = 1 if cu_seqlens is None else len(cu_seqlens) - 1
        flops = per_token * q.shape[1] * v.shape[2] / mixer.module.num_v_heads  # of this rank's heads
        return _DeltaRule.apply(q, k, v, g, beta, initial_state, output_final_state, segments, flops)

    return chunk_gated_delta_rule


def _conv_of(mixer: GatedDeltaNet) -> Callable[..., torch.Tensor]:
    per_token = conv_flops(mixer.module.conv1d) / mixer.module.conv1d.in_channels
    return lambda x, weight, bias=None, **_: _Conv.apply(x, weight, bias, per_token * x.shape[1] * x.shape[-1])


def _norm_of(norm: Any) -> Callable[..., torch.Tensor]:
    return lambda x, gate: _GatedNorm.apply(x, gate, norm.weight)


def stand_in(model: torch.nn.Module) -> None:
    """Gives the gated delta nets of a model the kernels of this module."""
    _known.clear()
    for mixer in map(mixer_of, model.modules()):
        if isinstance(mixer, GatedDeltaNet):
            # Since transformers 5.15 they are of the Python module, and so of all mixers, which are alike.
            for (owner, name, _), kernel in (
                (mixer.rule(), _rule_of(mixer)), (mixer.kernel("causal_conv1d_fn"), _conv_of(mixer)),
            ):  # fmt: skip
                setattr(owner, name, kernel)
            mixer.module.norm.forward = _norm_of(mixer.module.norm)


def without_package(model_class: type) -> AbstractContextManager[None]:
    """While open, a model is built as where flash-linear-attention is not installed, whose norm asks for a GPU."""
    return mock.patch.object(sys.modules[model_class.__module__], "FusedRMSNormGated", None, create=True)
