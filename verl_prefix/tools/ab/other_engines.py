"""Traces of verl's other engines, as ones of FSDP2: all arms are replayed there, since VeOmni's and Megatron's engines
have no fp32 for a truth."""

import re
from typing import Any

import torch

from verl_prefix.trace import MANIFEST, TraceError


def of_fsdp2(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest, or that of a run on another engine with the options of FSDP2 that mean the same.

    Raises:
        TraceError: the run had an optimizer that FSDP2's does not have.
    """
    if "tensor_model_parallel_size" in manifest["engine"]:
        return _of_megatron(manifest)
    return _of_veomni(manifest) if "expert_parallel_size" in manifest["engine"] else manifest


def _other_optimizer(name: object, engine: str) -> TraceError:
    return TraceError(
        f"{MANIFEST} has actor.optim.optimizer={name} of {engine}, and a replay has AdamW alone; compare whole runs "
        "with `verl-prefix ab --runs STOCK OURS`"
    )


def _of_veomni(manifest: dict[str, Any]) -> dict[str, Any]:
    veomni, optimizer = manifest["engine"], dict(manifest["optimizer"])
    if (name := optimizer.pop("optimizer", "adamw")) != "adamw":
        raise _other_optimizer(name, "VeOmni")
    attention = re.sub("^veomni_(.*)_with_sp$", r"\1", veomni["attn_implementation"])
    override = (manifest["model"].get("override_config") or {}) | {"attn_implementation": attention}
    kept = "fp32" if veomni["mixed_precision"] else "bf16"  # weights and gradients
    precision = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": kept, "buffer_dtype": "fp32"}}
    return manifest | {
        "engine": veomni | precision | {"model_dtype": kept},
        "model": manifest["model"] | {"override_config": override},
        "optimizer": optimizer,
    }


def _of_megatron(manifest: dict[str, Any]) -> dict[str, Any]:
    """Weights in 16 bits beside fp32 ones become fp32 weights and 16 bits in passes. A decay of the learning rate that
    FSDP2's engine has not is left out: a replay takes single steps."""
    megatron, optimizer = manifest["engine"], dict(manifest["optimizer"])
    if (name := optimizer.pop("optimizer", "adam")) != "adam":
        raise _other_optimizer(name, "Megatron")
    optimizer.pop("override_optimizer_config", None)  # where mcore's optimizer lies, and its kernels
    ddp = megatron.get("override_ddp_config") or {}
    reduce_dtype = "fp32" if ddp.get("grad_reduce_in_fp32", True) else "bf16"
    precision = {"param_dtype": megatron["dtype"], "reduce_dtype": reduce_dtype, "buffer_dtype": "fp32"}
    attention = "flash_attention_2" if torch.cuda.is_available() else "sdpa"  # Megatron's own has no name of HF's
    override = {"attn_implementation": attention} | (manifest["model"].get("override_config") or {})
    return manifest | {
        "engine": megatron | {"mixed_precision": precision, "model_dtype": "fp32"},
        "model": manifest["model"] | {"override_config": override},
        "optimizer": optimizer,
    }
