"""torch's own CUDA varlen flash attention (aten), torch 2.11 to 2.13. bf16 and fp16, head dim up to 256.

The ops are private to torch. Their argument names are checked, so that a torch that changed them is reported.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl_prefix.core.calls import Call
from verl_prefix.core.kernels.cuda_rules import is_deterministic, unsupported_by_all

_FORWARD_ARGS = (
    "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale window_size_left "
    "window_size_right seqused_k alibi_slopes"
).split()
_BACKWARD_ARGS = (
    "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused scale "
    "window_size_left window_size_right"
).split()


def schema_error() -> str | None:
    """How this torch's op schemas differ from those that this file calls, in words, or None. Runs on any machine."""
    for name, wanted in (("_flash_attention_forward", _FORWARD_ARGS), ("_flash_attention_backward", _BACKWARD_ARGS)):
        op = getattr(torch.ops.aten, name, None)
        if op is None:
            return f"torch {torch.__version__} has no aten::{name}"
        args = [a.name for a in op.default._schema.arguments]
        if args[: len(wanted)] != wanted:
            return f"torch {torch.__version__} has aten::{name}({', '.join(args)}), not ({', '.join(wanted)})"
    return None


def unavailable() -> str | None:
    if not torch.cuda.is_available():
        return schema_error() or "torch.cuda.is_available() is False"
    if torch.version.hip or not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without CUDA flash attention"
    capability = torch.cuda.get_device_capability()
    return schema_error() or (
        f"the GPU is sm_{capability[0]}{capability[1]}, older than sm_80" if capability < (8, 0) else None
    )


def unsupported(device_type: str, dtype: torch.dtype, head_dim: int, softcap: bool) -> str | None:
    return "it has no softcap" if softcap else unsupported_by_all(device_type, dtype, head_dim)


def _args(call: Call, device: torch.device) -> tuple[object, ...]:
    """Arguments from `cum_seq_q` to `is_causal`."""
    return *call.spans.cu_seqlens(device), call.spans.max_q, call.spans.max_k, 0.0, call.causal


def _options(call: Call) -> dict[str, float]:
    window = {} if call.window is None else {"window_size_left": call.window - 1, "window_size_right": 0}
    return {"scale": call.scale, **window}


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """See `core.kernels`."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *_args(call, q.device), False, **_options(call))
    return out, lse


def backward(
    dout: torch.Tensor, saved: tuple[torch.Tensor, ...], call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `core.kernels`."""
    q, k, v, out, lse = saved
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state: there is no dropout
    with _deterministic_as_asked():
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), *_args(call, q.device), unread, unread, **_options(call)
        )
    return dq, dk, dv


@contextmanager
def _deterministic_as_asked() -> Iterator[None]:
    """Makes aten's flash backward deterministic where `is_deterministic`. Under verl's full_determinism torch's mode is
    "warn", in which this op does not take its deterministic form."""
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error" if is_deterministic() else mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
