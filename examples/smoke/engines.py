"""verl's engine and ours on gloo or NCCL ranks."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from smoke.checks import Checks
from smoke.ranks import Sizes, Variant, on_ranks, save_model
from verl_prefix.cpu.engine import CPUFSDPEngine
from verl_prefix.tools.ab.replay import replay
from verl_prefix.tools.ab.verdict import tolerances


def engines(checks: Checks) -> None:
    """Whole engines, stock, packed and phased, against an fp32 (in the dry run float64) truth, as `verl-prefix ab`."""
    model = save_model(checks, "qwen3-0.6b", 28)
    size = (24, 8, 3, 2) if checks.dry_run else (2401, 256, 8, 1)
    for world in checks.worlds:
        variants: dict[str, dict[str, Any]] = {"default": {}}
        if world == checks.worlds[-1]:
            variants |= {
                "no sync": {"engine": {"use_no_sync_for_gradient_accumulation": True}},
                "offload_policy": {"engine": {"offload_policy": True}},
                # Triton's cross-entropy, where flash-attn is installed, and verl's compiled entropy.
                "temperature, entropy": {
                    "flags": {"temperature": 0.7, "calculate_entropy": True}, "loss": {"entropy_coeff": 0.01},
                },
            }  # fmt: skip
            if world > 1:
                variants["HSDP"] = {"engine": {"fsdp_size": world // 2}}
        dtype = "fp32" if checks.dry_run else "bf16"
        for name, steps in on_ranks(_replay, world, model, size, variants).items():
            for row in tolerances({"dtype": dtype, "judged": ["packed", "phased"], "num_steps": 1, "steps": steps}):
                checks.that(f"{world} ranks, {name}, {row['arm']}: {row['name']}", row["value"], most=row["limit"])


def _replay(rank: int, world: int, model: str, size: Sizes, variants: dict[str, Any]) -> dict:
    steps: dict[str, list[Any]] = {}
    with nullcontext() if torch.cuda.is_available() else _offload_policy_without_a_gpu():
        for name, variant in variants.items():
            source = Variant(model, size, world, variant)
            steps[name] = list(replay(source, source.options, rank))
    return steps


@contextmanager
def _offload_policy_without_a_gpu() -> Iterator[None]:
    """Lets CPUOffloadPolicy run on gloo ranks: nothing is pinned, and our CPU engine does not refuse it."""

    def build(engine, module):
        return super(CPUFSDPEngine, engine)._build_fsdp_module(module)

    with (
        mock.patch.object(CPUFSDPEngine, "_build_fsdp_module", build),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor),
    ):
        yield
