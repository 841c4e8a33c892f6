"""`make gpu-smoke`: what only GPUs can show, in the order in which it would break; ten minutes on one node.

Every step runs in a process of its own; the first that fails ends it. gpu_smoke.json names what was checked with the
values found, after every step. `--dry-run` runs every step on gloo ranks with tiny models; the checks that need a GPU
are named as skipped there. Not yet run on a GPU.
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600
Interval = tuple[float, float]


class Checks:
    """What a step checked; `on_gpu` checks are named as skipped in a dry run."""

    def __init__(self, dry_run: bool, out: Path) -> None:
        self.dry_run, self.out = dry_run, out
        self.found: list[dict[str, Any]] = []

    def that(self, name: str, value: float, least: float = -math.inf, most: float = math.inf) -> None:
        """Raises AssertionError where the value is not between the two."""
        self.found.append({"check": name, "value": value, "least": least, "most": most})
        assert least <= value <= most, f"{name} is {value:.4g}, and must be {least:g} to {most:g}"

    def on_gpu(self, name: str, value: float, least: float = -math.inf, most: float = math.inf) -> None:
        if self.dry_run:
            self.found.append({"check": name, "skipped": "needs a GPU"})
        else:
            self.that(name, value, least, most)

    @property
    def worlds(self) -> list[int]:
        """Ranks to run on: 1, 2, 8 where there are so many GPUs; the last is the most."""
        return [1, 2] if self.dry_run else [n for n in (1, 2, 8) if n <= torch.cuda.device_count()]


def kernels(checks: Checks) -> None:
    """Each kernel by the noise floor of a dense bf16 computation, against dense float64."""
    from verl_prefix.core.kernels import aten, cpu, flash_attn
    from verl_prefix.core.layout import Spans

    device, heads, dim, long = ("cpu", (4, 2), 32, 2048) if checks.dry_run else ("cuda", (32, 8), 128, 65536)
    modules = [cpu] if checks.dry_run else [kernel for kernel in (flash_attn, aten) if not kernel.unavailable()]
    assert modules, f"no kernel runs here: {aten.unavailable()}; {flash_attn.unavailable()}"
    cases = {
        "suffixes of one token read prefixes (max_q 1)": (Spans((0, 1, 2, 3), (0, 700, 1500, 1900)), False),
        "suffixes of one token beside longer ones": (Spans((0, 1, 2, 131, 132), (0, 1, 2, 131, 132)), True),
        f"a prefix of {long} tokens": (Spans((0, long), (0, long)), True),
    }
    for kernel in modules:
        for case, (spans, causal) in cases.items():
            torch.manual_seed(0)
            q = torch.randn(spans.q[-1], heads[0], dim, device=device, dtype=torch.bfloat16)
            k, v = (torch.randn(spans.k[-1], heads[1], dim, device=device, dtype=torch.bfloat16) for _ in range(2))
            dout = torch.randn_like(q)
            dout[:-128] = 0  # what is compared; a dense truth of every query would not fit
            scale = dim**-0.5
            out, lse = kernel.forward(q, k, v, spans, causal, scale, None, None)
            found = out[-128:], *kernel.backward(dout, q, k, v, out, lse, spans, causal, scale, None, None)
            truth, rounded = (_dense(dout, q, k, v, spans, causal, dtype) for dtype in (torch.float64, torch.bfloat16))
            for name, true, low, ours in zip(("out", "dq", "dk", "dv"), truth, rounded, found, strict=True):
                error, noise = (((x.double() - true).norm() / true.norm()).item() for x in (ours, low))
                # As tests/gpu: the dense reference rounds once, a flash kernel its probabilities as well.
                checks.that(f"{kernel.__name__}, {case}: error of {name}", error, most=2 * noise + 2**-9)


def _dense(dout, q, k, v, spans, causal: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """The last 128 outputs, and the gradients of q, k and v where only those count, of dense attention in `dtype`."""
    compute = torch.promote_types(dtype, torch.float32)
    q, k, v = leaves = [x.detach().to(compute).requires_grad_() for x in (q, k, v)]
    outs = []
    for q_start, q_end, k_start, k_end in spans:
        start = max(q_start, len(q) - 128)
        if start >= q_end:
            continue
        keys, values = (x[k_start:k_end].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[start:q_end], keys) * q.shape[-1] ** -0.5
        if causal:
            ends = torch.arange(k_end - k_start, device=q.device)
            behind = torch.arange(start, q_end, device=q.device) - q_end + (k_end - k_start)
            scores = scores.masked_fill(ends > behind[:, None], -math.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1).to(dtype).to(compute), values).to(dtype))
    out = torch.cat(outs)
    grads = torch.autograd.grad(out, leaves, dout[-128:].to(dtype))
    return [x.detach().to(dtype) for x in (out, *grads)]


def engines(checks: Checks) -> None:
    """Whole engines, stock, packed and phased, against an fp32 (in the dry run float64) truth, as `verl-prefix ab`."""
    from verl_prefix.tools.ab.verdict import tolerances

    model = _save_model(checks, "qwen3-0.6b", 28)
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
        for name, steps in _on_ranks(checks, _replay, world, model, size, variants).items():
            for row in tolerances({"dtype": dtype, "judged": ["packed", "phased"], "num_steps": 1, "steps": steps}):
                checks.that(f"{world} ranks, {name}, {row['arm']}: {row['name']}", row["value"], most=row["limit"])


def _source(model: str, size: tuple[int, int, int, int], variant: dict[str, Any], world: int):
    from verl_prefix.tools.ab.source import Options, Source

    options = Options(synthetic=size, model=model, arms=("packed", "phased"), steps=1, ranks=world, truth_steps=1)
    source = Source(options)
    for section in ("engine", "loss"):
        source.manifest[section] = source.manifest[section] | variant.get(section, {})
    rows = source.rows

    def with_flags(*args: Any):
        found = rows(*args)
        found.flags.update(variant.get("flags", {}))
        return found

    source.rows = with_flags
    return source, options


def _replay(rank: int, world: int, model: str, size: tuple[int, int, int, int], variants: dict[str, Any]) -> dict:
    from verl_prefix.tools.ab.replay import replay

    steps: dict[str, list[Any]] = {name: [] for name in variants}
    with nullcontext() if torch.cuda.is_available() else _offload_policy_without_a_gpu():
        for name, variant in variants.items():
            source, options = _source(model, size, variant, world)
            replay(source, options, rank, steps[name].append)
    return steps


@contextmanager
def _offload_policy_without_a_gpu():
    """Lets CPUOffloadPolicy run on gloo ranks: nothing is pinned, and our CPU engine does not refuse it."""
    from verl_prefix.cpu.engine import CPUEngineMixin

    def build(engine, module):
        return super(CPUEngineMixin, engine)._build_fsdp_module(module)

    with (
        mock.patch.object(CPUEngineMixin, "_build_fsdp_module", build),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor),
    ):
        yield


def grpo(checks: Checks) -> None:
    """Two GRPO steps through verl with vLLM, which sleeps and wakes (the dry run: with the demo's rollout)."""
    _train(checks, "tiny", 2)


def video(checks: Checks) -> None:
    """One GRPO step of a Qwen2.5-VL on generated clips."""
    _train(checks, "qwen2_5_vl", 1)


def _train(checks: Checks, name: str, num_steps: int) -> None:
    if not checks.dry_run and importlib.util.find_spec("vllm") is None:
        checks.found.append({"check": "GRPO steps", "skipped": "vllm is not installed"})
        return
    sys.path.insert(0, str(ROOT / "examples"))
    import demo

    from verl_prefix.testing import write_tiny_model, write_tiny_vlm

    output = checks.out / name
    size = replace(demo.SIZES[name], steps=num_steps)
    questions, data = demo.prepare(output, None, size)
    texts = questions.read_text().splitlines()
    # vLLM's kernels on a GPU want heads of 64 at least.
    wide = {} if checks.dry_run else {"head_dim": 64}
    model = (
        write_tiny_model(output / "model", texts=texts, **wide) if name == "tiny"
        else write_tiny_vlm(output / "model", family=name, texts=texts)
    )  # fmt: skip
    rollout = "hf" if checks.dry_run else "vllm"
    arguments = [*demo.overrides(model, data, rollout, 1, size), *demo.ARMS["prefix"]]
    if not checks.dry_run:
        arguments.remove("+platform=cpu")
        arguments += ["actor_rollout_ref.rollout.gpu_memory_utilization=0.3"]
        arguments += ["actor_rollout_ref.rollout.tensor_model_parallel_size=1"]
        arguments += ["actor_rollout_ref.rollout.enforce_eager=true"]
        if importlib.util.find_spec("flash_attn") is None:
            arguments += ["+actor_rollout_ref.model.override_config.attn_implementation=sdpa"]
    metrics, log = output / "metrics.jsonl", output / "verl.log"
    metrics.unlink(missing_ok=True)
    env = os.environ | ({"VERL_PLATFORM": "cpu"} if checks.dry_run else {}) | {
        "VERL_FILE_LOGGER_PATH": str(metrics), "HYDRA_FULL_ERROR": "1", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    env.pop("RAY_ADDRESS", None)
    if checks.dry_run:
        env.pop("CUDA_VISIBLE_DEVICES", None)  # Ray counts the platform's ranks as GPUs, and would miss them there
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments, f"hydra.run.dir={output / 'hydra'}"]
    with demo.process_group(command, env, log) as process:
        code = process.wait()
    assert code == 0, f"verl ended with {code}; the end of {log}:\n" + log.read_text(errors="replace")[-3000:]
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    checks.that("training steps", len(steps), num_steps, num_steps)
    for number, step in enumerate(steps, start=1):
        checks.that(f"step {number}: prefix/reuse_fraction", step["prefix/reuse_fraction"], least=0.3)
        checks.that(f"step {number}: gradient norm", step["actor/grad_norm"], 1e-12, 1e6)
        # What vLLM sampled with are the actor's weights, those after an update too.
        gap = step["training/rollout_probs_diff_mean"]
        checks.that(f"step {number}: rollout's probabilities beside the actor's", gap, most=0.02)
    checks.that("self-check of step 1", steps[0]["prefix/verify_log_probs"], most=3.0)


def profiled(checks: Checks) -> None:
    """A packed and a phased update at Qwen3-8B's width, on all ranks: what waits, what it holds, how fast it is."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl_prefix.auto.shape import model_shape
    from verl_prefix.tools.bench.measure import update_flops
    from verl_prefix.tools.bench.options import Size

    layers = 2 if checks.dry_run else 4
    model = _save_model(checks, "qwen3-8b", layers)
    prompt, response, rows = (24, 8, 3) if checks.dry_run else (8193, 1024, 8)
    arms = _on_ranks(checks, _profile, checks.worlds[-1], model, (prompt, response, rows, 1))
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


def _profile(rank: int, world: int, model: str, size: tuple[int, int, int, int]) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    from verl_prefix.tools.ab.arm import Arm, response_part
    from verl_prefix.tools.ab.source import synthetic_budget

    cuda = torch.cuda.is_available()
    source, _ = _source(model, size, {}, world)
    found: dict[str, Any] = {"budget": synthetic_budget(size)}
    for name in ("stock", "packed", "phased"):
        arm = Arm(name, source.manifest)
        rows = source.rows(0, rank, arm.engine.model_config.hf_config.vocab_size)
        old = torch.cat(response_part(arm.infer(rows)["log_probs"], rows)).float().cpu()
        rows.jagged["old_log_probs"] = old, rows.jagged["responses"][1]
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
        _free()
    return found


@contextmanager
def _no_sync_in_layers(model: torch.nn.Module):
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
from verl_prefix.core.groups import Group
from verl_prefix.tools.simulate.depth import simulate
from verl_prefix.tools.simulate.hardware import GPUS
from verl_prefix.tools.simulate.job import Arm, Job
group = Group(tuple(range({rows})), {prompt - 1}, ({response},) * {rows})
job = Job(transformers.AutoConfig.from_pretrained({model!r}), (group,), {budget}, {world},
          wave_tokens={budget // 8}, checkpointing=False)
arms = [Arm("packed"), Arm("phased")]
found = simulate(job, arms, GPUS["h100"], log_probs=False)
print(json.dumps({{arm.name: max(phase["peak"] for phase in phases.values()) for arm, phases in zip(arms, found)}}))
"""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "VERL_PLATFORM": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _save_model(checks: Checks, shape: str, layers: int) -> str:
    from verl_prefix.tools.bench.options import build_model

    path = checks.out / shape
    dry = checks.dry_run
    model = build_model("tiny" if dry else shape, 2 if dry else layers, "cpu" if dry else "cuda", torch.float32, 16384)
    model.save_pretrained(path)
    del model
    _free()
    return str(path)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _on_ranks(checks: Checks, function: Callable[..., Any], world: int, *args: Any) -> Any:
    """What rank 0 returned of `function(rank, world, *args)`."""
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(_rank, (world, scratch, function, args), nprocs=world)
        return json.loads(Path(scratch, "found").read_text())


def _rank(rank: int, world: int, scratch: str, function: Callable[..., Any], args: tuple) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, f"file://{scratch}/rendezvous", rank=rank, world_size=world)
    found = function(rank, world, *args)
    if rank == 0:
        Path(scratch, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


STEPS = {"kernels": kernels, "engines": engines, "grpo": grpo, "video": video, "profile": profiled}


def run_step(name: str, dry_run: bool, out: Path) -> int:
    """One step, in this process; its checks go to NAME.json, and what ended it, if anything did."""
    checks, failure = Checks(dry_run, out), None
    try:
        STEPS[name](checks)
    except AssertionError as error:
        failure = str(error)
    (out / f"{name}.json").write_text(json.dumps({"checks": checks.found, "failure": failure}))
    return int(failure is not None)


def run(dry_run: bool, out: Path, start_step: Callable[[str, float], int]) -> dict[str, Any]:
    """The report. start_step: (name, seconds that are left) -> exit code of the step, which wrote NAME.json."""
    from verl_prefix.files import write_whole
    from verl_prefix.tools.report import provenance

    report = {**provenance("verl_prefix.gpu_smoke/1"), "dry_run": dry_run, "holds": False, "steps": {}}
    start = time.monotonic()
    for name in STEPS:
        began = time.monotonic()
        code = start_step(name, LIMIT_S - (began - start))
        path = out / f"{name}.json"
        step = json.loads(path.read_text()) if path.exists() else {"checks": [], "failure": f"it ended with {code}"}
        report["steps"][name] = {"seconds": time.monotonic() - began, **step}
        failed = bool(code or step["failure"])
        report["holds"] = not failed and len(report["steps"]) == len(STEPS)
        write_whole(out / "gpu_smoke.json", json.dumps(report, indent=1) + "\n")
        skipped = sum("skipped" in check for check in step["checks"])
        made = len(step["checks"]) - skipped
        print(f"{name}: {made} checks, {skipped} skipped, {step['failure'] or 'all hold'}", flush=True)
        if failed:
            break
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="gloo ranks and tiny models, without a GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_smoke", help="folder of gpu_smoke.json")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    out = args.out.resolve()
    if args.dry_run:
        os.environ.update(VERL_PLATFORM="cpu", CUDA_VISIBLE_DEVICES="")
    elif not torch.cuda.is_available():
        parser.error("torch.cuda.is_available() is False; add --dry-run to try the steps on a CPU")
    if args.step:
        return run_step(args.step, args.dry_run, out)
    sys.path.insert(0, str(ROOT / "examples"))
    import demo

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    def start_step(name: str, seconds: float) -> int:
        command = [sys.executable, __file__, "--step", name, "--out", str(out), *["--dry-run"] * args.dry_run]
        log = out / f"{name}.log"
        with demo.process_group(command, dict(os.environ), log) as process:
            try:
                code = process.wait(timeout=None if args.dry_run else max(seconds, 1))
            except subprocess.TimeoutExpired:
                code = 124
        if code:
            print(log.read_text(errors="replace")[-4000:])
        return code

    return int(not run(args.dry_run, out, start_step)["holds"])


if __name__ == "__main__":
    sys.exit(main())
