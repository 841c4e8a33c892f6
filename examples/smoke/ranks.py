"""Ranks, models and made-up rows of the steps that run engines."""

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from smoke.checks import Checks
from verl_prefix.tools.ab.command import join_ranks
from verl_prefix.tools.ab.source import Options, Source
from verl_prefix.tools.bench.options import build_model
from verl_prefix.trace import StepRows

Sizes = tuple[int, int, int, int]  # P, S, G, groups, as `ab --synthetic`


class Variant(Source):
    """`ab`'s made-up rows for stock, packed and phased, with other options of engine and loss and other batch flags."""

    def __init__(self, model: str, size: Sizes, world: int, changed: dict[str, dict[str, Any]]) -> None:
        self.options = Options(
            synthetic=size, model=model, arms=("packed", "phased"), steps=1, ranks=world, truth_steps=1
        )
        super().__init__(self.options)
        self._flags = changed.get("flags", {})
        for section in ("engine", "loss"):
            self.manifest[section] = self.manifest[section] | changed.get(section, {})

    def rows(self, step: int, rank: int, vocab_size: int) -> StepRows:
        found = super().rows(step, rank, vocab_size)
        found.flags.update(self._flags)
        return found


def save_model(checks: Checks, shape: str, layers: int) -> str:
    """The folder of a random model of this shape; in a dry run of a tiny one."""
    path, dry = checks.out / shape, checks.dry_run
    model = build_model("tiny" if dry else shape, 2 if dry else layers, "cpu" if dry else "cuda", torch.float32, 16384)
    model.save_pretrained(path)
    del model
    free()
    return str(path)


def free() -> None:
    """Gives back what nobody holds: ranks share the GPU with this process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def on_ranks(function: Callable[..., Any], world: int, *args: Any) -> Any:
    """What rank 0 returned of `function(rank, world, *args)`, in JSON."""
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(_rank, (world, scratch, function, args), nprocs=world)
        return json.loads(Path(scratch, "found").read_text())


def _rank(rank: int, world: int, scratch: str, function: Callable[..., Any], args: tuple) -> None:
    join_ranks(rank, world, f"file://{scratch}/rendezvous")
    found = function(rank, world, *args)
    if rank == 0:
        Path(scratch, "found").write_text(json.dumps(found))
    dist.destroy_process_group()
