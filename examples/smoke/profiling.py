"""What an update waits for, holds and takes, at Qwen3-8B's width."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from smoke.checks import Checks
from smoke.ranks import Sizes, Variant, free, on_ranks, save_model
from verl_prefix.auto.shape import model_shape
from verl_prefix.tools.ab.arm import Arm
from verl_prefix.tools.ab.source import synthetic_budget
from verl_prefix.tools.bench.measure import update_flops
from verl_prefix.tools.bench.options import Size

Interval = tuple[float, float]


def profiled(checks: Checks) -> None:
    """A packed and a phased update at Qwen3-8B's width, on all ranks: what waits, what it holds, how fast it is."""
    layers = 2 if checks.dry_run else 4
    model = save_model(checks, "qwen3-8b", layers)
    prompt, response, rows = (24, 8, 3) if checks.dry_run else (8193, 1024, 8)
    arms = on_ranks(_profile, checks.worlds[-1], model, (prompt, response, rows, 1))
    budget, stock, size = arms.pop("budget"), arms.pop("stock"), Size(prompt - 1, response, rows)
    with torch.device("meta"):
        shape = model_shape(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)), torch.bfloat16)
    peaks = {} if checks.dry_run else _simulated_peaks(model, prompt, response, rows, budget, checks.worlds[-1])
    for name, arm in arms.items():
        flops = update_flops(shape, size, "stock", budget) / update_flops(shape, size, name, budget)
        faster = stock["seconds"] / arm["seconds"]
        checks.that(f"{name}: seconds of an update", arm["seconds"], least=0)
        checks.that(f"{name}: speed-up over stock", faster, least=0)
        checks.that(f"{name}: reuse_fraction", arm["reuse"], least=0.3)
        checks.on_gpu(f"{name}: part of the update that NCCL is waited for", arm["exposed"], most=0.03)
        checks.on_gpu(f"{name}: peak over the simulation's", arm["peak"] / peaks.get(name, math.nan), 0.85, 1.15)
        checks.on_gpu(f"{name}: speed-up over the FLOP ratio", faster / flops, least=0.9)


def _profile(rank: int, world: int, model: str, size: Sizes) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    source = Variant(model, size, world, {})
    found: dict[str, Any] = {"budget": synthetic_budget(size)}
    for name in ("stock", "packed", "phased"):
        arm = Arm(name, source.manifest)
        rows = source.rows(0, rank, arm.engine.model_config.hf_config.vocab_size)
        rows.jagged["old_log_probs"] = arm.responses(arm.infer(rows), rows).float(), rows.jagged["responses"][1]
        # With the optimizer's state, which is part of the peak.
        seconds = [arm.passes(rows, infer=False)["seconds"]["update"] for _ in range(3)][1:]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
        with profile(activities=activities) as profiler, _no_sync_in_layers(arm.engine.module):
            arm.passes(rows, infer=False)
        events = [e for e in profiler.events() if not cuda or e.device_type == torch.autograd.DeviceType.CUDA]
        found[name] = {
            "seconds": min(seconds),
            "exposed": exposed((e.name, e.time_range.start, e.time_range.end) for e in events),
            "peak": torch.cuda.max_memory_allocated() if cuda else 0,
            "reuse": arm.values.get("prefix/reuse_fraction", 0.0),
        }
        del arm
        free()
    return found


@contextmanager
def _no_sync_in_layers(model: torch.nn.Module) -> Iterator[None]:
    """While open, a layer that waits for the device raises (on a GPU)."""
    mode = torch.cuda.set_sync_debug_mode if torch.cuda.is_available() else lambda mode: None
    handles = []
    for layer in model.model.layers:
        handles.append(layer.register_forward_pre_hook(lambda *args: mode("error")))
        handles.append(layer.register_forward_hook(lambda *args: mode("default")))
    try:
        yield
    finally:
        mode("default")
        for handle in handles:
            handle.remove()


def exposed(spans: Iterable[tuple[str, float, float]]) -> float:
    """Part of the time from the first start to the last end in which NCCL kernels run and no other does."""
    spans = list(spans)
    network = _union((a, b) for name, a, b in spans if name.startswith("nccl"))
    other = _union((a, b) for name, a, b in spans if not name.startswith("nccl"))
    total = max((b for _, _, b in spans), default=0) - min((a for _, a, _ in spans), default=0)
    length = sum(b - a for a, b in _union([*network, *other])) - sum(b - a for a, b in other)
    return length / total if total else 0.0


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _simulated_peaks(model: str, prompt: int, response: int, rows: int, budget: int, world: int) -> dict[str, float]:
    """Bytes, by `plan --simulate`'s simulator, in a process of its own: it registers a device with torch."""
    code = f"""
import json, transformers
from verl_prefix.auto.cost import Memory
from verl_prefix.core.groups import Group
from verl_prefix.tools.simulate.depth import simulate
from verl_prefix.tools.simulate.hardware import GPUS
from verl_prefix.tools.simulate.job import Arm, Job
group = Group.of_prompt(tuple(range({rows})), {prompt - 1}, ({response},) * {rows})
job = Job(transformers.AutoConfig.from_pretrained({model!r}), (group,), {budget},
          Memory({world}, checkpointed=False), wave_tokens={budget // 8})
arms = [Arm("packed"), Arm("phased")]
found = simulate(job, arms, GPUS["h100"], log_probs=False)
print(json.dumps({{arm.name: max(phase["peak"] for phase in phases.values()) for arm, phases in zip(arms, found)}}))
"""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "VERL_PLATFORM": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
