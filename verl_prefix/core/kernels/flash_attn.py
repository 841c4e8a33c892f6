"""The flash-attn packages, in the newest interface that runs the inputs on this GPU: FA4 (flash_attn.cute) on sm_100 to
sm_11x, FA3 (flash_attn_interface, of tag v2.7.4 or newer) on sm_90, else FA2 (flash_attn 2.7.4 or newer). bf16 and
fp16, head dim up to 256, softcap. Packages are imported when a kernel is chosen, since that takes seconds.

No machine of ours has run this file: its tests bind every call to the packages' own signatures and stand in for what
they compute (tests/core/test_flash_attn_package.py).
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from verl_prefix.core.calls import Call
from verl_prefix.core.kernels.cuda_rules import is_deterministic, unsupported_by_all

logger = logging.getLogger(__name__)

FA2, FA3, FA4 = "flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute.interface"
# module -> forward and backward function, and the compute capabilities for which it is the choice. FA4's backward has
# neither a softcap nor a deterministic form on sm_120, and FA2 has both.
_INTERFACES = {
    FA4: ("_flash_attn_fwd", "_flash_attn_bwd", (10, 0), (12, 0)),
    FA3: ("_flash_attn_forward", "_flash_attn_backward", (9, 0), (10, 0)),
    FA2: ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward", (8, 0), (99, 0)),
}
_COMMON_ARGS = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "softcap"}
_OTHER_ARGS = set(
    "q k v out dout lse softmax_lse dq dk dv dropout_p alibi_slopes causal is_causal deterministic".split()
)
# Arguments of FA3 up to v2.8.3.post1 that we do not use, and for which it has no defaults.
_UNUSED_ARGS = set(
    "k_new v_new qv cu_seqlens_k_new seqused_q seqused_k sequed_q sequed_k page_table kv_batch_idx leftpad_k "
    "rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale".split()
)


@functools.cache
def _arguments(function: Callable[..., Any]) -> dict[str, bool]:
    """Names of the function's arguments -> whether each has a default."""
    function = getattr(function, "_init_fn", function)  # behind torch.library.custom_op
    return {name: p.default is not p.empty for name, p in inspect.signature(function).parameters.items()}


def _has_arguments(function: Callable[..., Any]) -> bool:
    arguments = _arguments(function)
    window = {"window_size_left", "window_size_right"} if "window_size" not in arguments else {"window_size"}
    required = {name for name, has_default in arguments.items() if not has_default}
    return (_COMMON_ARGS | window) <= set(arguments) and required <= _COMMON_ARGS | window | _OTHER_ARGS | _UNUSED_ARGS


def _call(function: Callable[..., Any], *tensors: torch.Tensor, **options: object) -> Any:
    """Calls the function by its own names of options, with None for required arguments that we do not use."""
    arguments = _arguments(function)
    if "window_size" in arguments:  # FA3 up to v2.8.3.post1
        options["window_size"] = (options.pop("window_size_left"), options.pop("window_size_right"))
    if "is_causal" in arguments:
        options["is_causal"] = options.pop("causal")
    given = {*list(arguments)[: len(tensors)], *options}
    needed = {name for name, has_default in arguments.items() if not has_default} - given
    return function(*tensors, **options, **dict.fromkeys(needed))


class _Interface(NamedTuple):
    module: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]


@functools.cache
def _installed() -> list[_Interface]:
    """Installed interfaces that this GPU runs and whose arguments we know, newest first."""
    capability, found = torch.cuda.get_device_capability(), []
    for name, (forward_name, backward_name, low, end) in _INTERFACES.items():
        if not low <= capability < end:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # not installed, or built for another torch
            logger.info("prefix: %s cannot be imported: %s", name, error)
            continue
        run, run_backward = (getattr(module, function, None) for function in (forward_name, backward_name))
        if run is not None and run_backward is not None and _has_arguments(run) and _has_arguments(run_backward):
            found.append(_Interface(name, run, run_backward))
        else:
            logger.warning("prefix: %s has other arguments than we know and is left out", name)
    return found


def _refusal(module: str, head_dim: int, softcap: bool) -> str | None:
    """Why an interface does not run such inputs, forward and backward, by its own checks: `_validate_head_dims` and
    `_flash_attn_bwd` in flash_attn/cute/interface.py (flash-attn-4 4.0.0b36), `mha_bwd` in hopper/flash_api.cpp (FA3 at
    0251105a, August 2026)."""
    if module == FA4 and 128 < head_dim != 256:
        return f"head dim is {head_dim}, not up to 128, or 256"
    if module == FA4 and head_dim == 256 and softcap:
        return "it has no softcap in a backward of head dim 256"
    if module == FA3 and head_dim > 192 and is_deterministic():
        return f"head dim is {head_dim}, and its deterministic backward takes up to 192"
    return None


def _choose(head_dim: int, softcap: bool) -> _Interface | None:
    return next((x for x in _installed() if _refusal(x.module, head_dim, softcap) is None), None)


def package(head_dim: int, softcap: bool) -> str | None:
    """The module that runs such inputs; None: no module does."""
    return (chosen := _choose(head_dim, softcap)) and chosen.module


def missing_best(head_dim: int, softcap: bool) -> str | None:
    """The module that would be the choice on this CUDA device for such inputs, and is missing or has arguments that we
    do not know. None: the choice is there, or it is FA2, which `aten` has as well; or the device is no Nvidia one."""
    if torch.version.hip:
        return None
    capability = torch.cuda.get_device_capability()
    runs = (name for name, (*_, low, end) in _INTERFACES.items() if low <= capability < end)
    best = next((name for name in runs if _refusal(name, head_dim, softcap) is None), None)
    return None if best in (FA2, None, *(one.module for one in _installed())) else best


def runs_on_this_gpu() -> bool:
    """Whether a package, installed or not, is the choice for this CUDA device's compute capability."""
    capability = torch.cuda.get_device_capability()
    return any(low <= capability < end for *_, low, end in _INTERFACES.values())


def unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    return None if _installed() else "no flash-attn package that this GPU runs is installed"


def unsupported(device_type: str, dtype: torch.dtype, head_dim: int, softcap: bool) -> str | None:
    reason = unsupported_by_all(device_type, dtype, head_dim)
    if reason is None and _choose(head_dim, softcap) is None:
        return "; ".join(f"{one.module}: {_refusal(one.module, head_dim, softcap)}" for one in _installed())
    return reason


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """See `core.kernels`."""
    name, run, _ = _interface_for(q, call.softcap)
    extras: dict[str, dict[str, object]] = {FA2: {"dropout_p": 0.0}, FA3: {}, FA4: {"return_lse": True}}
    out, lse, *_ = _call(run, q, k, v, **extras[name], **_options(name, call, q.device))
    return out, lse


def backward(
    dout: torch.Tensor, saved: tuple[torch.Tensor, ...], call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `core.kernels`."""
    q, k, v, out, lse = saved
    name, _, run = _interface_for(q, call.softcap)
    lse = lse.contiguous()
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    extras = {"dropout_p": 0.0} if name == FA2 else {}
    tensors = (q, k, v, out, dout, lse) if name == FA4 else (dout, q, k, v, out, lse)
    options = extras | _options(name, call, q.device)
    _call(run, *tensors, deterministic=is_deterministic(), dq=dq, dk=dk, dv=dv, **options)
    return dq, dk, dv


def _interface_for(q: torch.Tensor, softcap: float | None) -> _Interface:
    interface = _choose(q.shape[-1], softcap is not None)
    assert interface is not None  # `choose_kernel` has asked `unsupported`
    return interface


def _options(name: str, call: Call, device: torch.device) -> dict[str, object]:
    """Arguments that forward and backward of every interface have in common."""
    spans, window = call.spans, call.window
    cu_q, cu_k = spans.cu_seqlens(device)
    none = None if name == FA4 else -1
    left, right = (none, none) if window is None else (window - 1, 0)
    return dict(
        causal=call.causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=spans.max_q, max_seqlen_k=spans.max_k,
        softmax_scale=call.scale, window_size_left=left, window_size_right=right, softcap=call.softcap or 0.0,
    )  # fmt: skip
