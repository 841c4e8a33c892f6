"""What attention kernels for CUDA have in common: inputs that none of them runs, and when backward is deterministic."""

import os

import torch


def is_deterministic() -> bool:
    """Whether a kernel's backward must give the same bits each time: by torch's mode, or by a variable of the
    environment. One is that which transformers reads for its own calls of flash-attn
    (modeling_flash_attention_utils.py), and which verl hands on to workers. The other is TransformerEngine's, which
    megatron-core demands with `deterministic_mode`. Sums over rows that share a token (`prefix_cache.add_at`) heed
    torch's mode alone."""
    return (
        torch.are_deterministic_algorithms_enabled()
        or os.getenv("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
        or os.getenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"
    )


def unsupported_by_all(device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why no CUDA flash attention, aten's included, runs such inputs, in words, or None."""
    if device_type != "cuda":
        return f"device is {device_type}, not cuda"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"dtype is {dtype}, not bfloat16 or float16"
    if head_dim % 8 or head_dim > 256:
        return f"head dim is {head_dim}, not a multiple of 8 up to 256"
    return None
