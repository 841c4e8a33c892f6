"""What runs on CUDA alone, in the tools. MOCK: torch's calls of a device that no CPU has; all else is real.

`package/test_cuda_only.py` lists every place, and where it runs.
"""

import importlib.util
import logging
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from verl_prefix import versions
from verl_prefix.models.hookup import ATTENTION_NAME
from verl_prefix.tools import memory as tools_memory
from verl_prefix.tools.bench import arms, memory, report
from verl_prefix.tools.bench.options import Options, Size, build_model

SIZE = Size(37, 11, 5)
MIB = 2**20


@pytest.fixture
def gpu(monkeypatch) -> SimpleNamespace:
    """torch.cuda's calls; `said` holds what was asked of it."""
    said: list = []
    device = SimpleNamespace(said=said, allocated=3 * MIB, peak=9 * MIB, total=80 * 2**30)
    calls = {
        "is_available": lambda: True,
        "get_device_name": lambda: "NVIDIA H100 80GB HBM3",
        "memory_allocated": lambda: device.allocated,
        "max_memory_allocated": lambda: device.peak,
        "reset_peak_memory_stats": lambda: (said.append("reset"), setattr(device, "peak", device.allocated)),
        "synchronize": lambda: said.append("wait"),
        "set_device": lambda rank: said.append(f"device {rank}"),
        "mem_get_info": lambda: (0, device.total),
        "set_per_process_memory_fraction": lambda share: said.append(share),
        "empty_cache": lambda: said.append("empty"),
    }
    for name, call in calls.items():
        monkeypatch.setattr(torch.cuda, name, call)
    return device


def test_the_device_of_a_report_is_the_gpu(gpu):
    assert versions.device_name("cuda") == versions.device_name() == "NVIDIA H100 80GB HBM3"
    assert versions.device_name("cpu") != "NVIDIA H100 80GB HBM3"


def test_memory_is_the_allocators(gpu):
    assert tools_memory.memory_mib("cuda") == [3.0, 9.0]
    assert tools_memory.reset_peak_mib("cuda") == 3.0 and gpu.said == ["reset"]
    assert tools_memory.memory_mib("cuda") == [3.0, 3.0]


@pytest.mark.parametrize(
    ("dtype", "flash_attn", "unavailable", "name"),
    [
        (torch.bfloat16, True, "old", "flash_attention_2"),
        (torch.float16, False, None, ATTENTION_NAME),
        (torch.bfloat16, False, "old", "sdpa"),
        (torch.float32, True, None, "sdpa"),
    ],
)
def test_stock_has_the_best_attention_of_a_gpu(monkeypatch, dtype, flash_attn, unavailable, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: "found" if flash_attn else None)
    monkeypatch.setattr(arms.aten, "unavailable", lambda: unavailable)
    assert arms.stock_attention("cuda", dtype) == name and arms.stock_attention("cpu", dtype) == "sdpa"


@pytest.mark.parametrize("arm", ["stock", "packed"])
def test_an_update_is_timed_when_the_device_has_computed_it(gpu, monkeypatch, arm):
    model, batch = build_model("tiny", 1, "cpu", torch.float32), arms.build_batch(SIZE, 997, "cpu")
    said, expected = gpu.said, arms.run_arm(arms.Case(model, batch, 10**6), arm).loss
    monkeypatch.setattr(LlamaForCausalLM, "device", SimpleNamespace(type="cuda"))
    clock = SimpleNamespace(perf_counter=lambda: said.append("clock") or float(len(said)))
    monkeypatch.setattr(arms, "time", clock)
    done = arms.run_arm(arms.Case(model, batch, 10**6), arm)
    backwards = said.count("clock") // 2 - 1
    assert said == ["wait", "clock"] * (2 * backwards + 2) and backwards == (5 if arm == "stock" else 1)
    assert done.loss == expected and done.seconds == len(said) - 2 and done.forward == done.seconds - 2 * backwards


@pytest.mark.more
def test_capacity_is_searched_under_the_allocators_limit(gpu, monkeypatch):
    """A job that lacks memory is a row that does not train; the limit is lifted, whatever happens."""
    options = replace(Options((SIZE,), shape="tiny", device="cpu", threads=1), capacity=20.0)
    options.device = "cuda"
    tried, model = [], build_model("tiny", 1, "meta", torch.float32)
    monkeypatch.setattr(memory, "build_batch", lambda size, vocab, device: SimpleNamespace(size=size, device=device))

    def run(case, arm):
        assert gpu.said[-1] == (20 / 80 if len(tried) == 0 else "empty") and case.batch.device == "cuda"
        tried.append(case.batch.size.row)
        if case.batch.size.row > 3000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if case.batch.size.row == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(memory, "run_arm", run)
    assert memory.capacity(options, "packed", SIZE, model) == 2560
    assert gpu.said == ["empty", 0.25, *["empty"] * len(tried), 1.0] and max(tried) > 3000
    gpu.said.clear()
    monkeypatch.setattr(memory, "longest_total", lambda trains: trains(7))
    tried.clear()
    with pytest.raises(KeyboardInterrupt):
        memory.capacity(options, "packed", SIZE, model)
    assert gpu.said == ["empty", 0.25, "empty", 1.0]


def test_bench_takes_the_gpu_bf16_and_full_passes(gpu):
    options = Options((SIZE,), shape="tiny", memory=False)
    assert (options.device, options.dtype, options.budget_of(SIZE)) == ("cuda", "bfloat16", 16384)
    assert options.budget_of(Size(9000, 1000, 2)) == 20002


@pytest.mark.parametrize(
    ("device", "dtype", "mfu"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 0.5),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("A GPU", "bfloat16", None),
    ],
)
def test_a_report_of_a_known_gpu_has_the_share_of_its_peak(device, dtype, mfu):
    arm = {"flops": 989e12, "seconds": {"update": [2.0]}}
    report.compare({"config": {"device": "cuda", "dtype": dtype}, "device": device, "rows": [{"arms": {"stock": arm}}]})
    assert arm.get("mfu") == mfu


def test_a_rank_of_ab_takes_its_gpu_and_both_kinds_of_collectives(gpu, monkeypatch, caplog):
    pytest.importorskip("verl")
    from verl_prefix.tools.ab import command

    joined, renaming = [], "torch.fx._symbolic_trace"
    caplog.set_level(logging.WARNING, logger=renaming)
    monkeypatch.setattr(command.dist, "init_process_group", lambda *args, **options: joined.append((args, options)))
    monkeypatch.setattr(command.os, "environ", {})
    command.join_ranks(2, 8, "file:///folder/rendezvous")
    assert gpu.said == ["device 2"]
    assert joined == [(("cpu:gloo,cuda:nccl", "file:///folder/rendezvous"), {"rank": 2, "world_size": 8})]
    assert not logging.getLogger(renaming).isEnabledFor(logging.WARNING)  # torch's own is no news in a rank either


def test_a_pass_of_ab_is_measured_on_the_gpu(gpu, monkeypatch):
    pytest.importorskip("verl")
    from verl_prefix.tools.ab import arm

    figures, clock = {"seconds": {}, "added_gib": {}}, iter([10.0, 12.5])
    monkeypatch.setattr(arm.dist, "barrier", lambda: gpu.said.append("barrier"))
    monkeypatch.setattr(arm, "_reduced", lambda values, op: values)
    monkeypatch.setattr(arm, "time", SimpleNamespace(perf_counter=lambda: gpu.said.append("clock") or next(clock)))
    with arm._measured(figures, "update"):
        gpu.peak = gpu.allocated + 2**29
    assert gpu.said == ["reset", "wait", "barrier", "clock", "wait", "clock"]
    assert figures == {"seconds": {"update": 2.5}, "added_gib": {"update": 0.5}}


@pytest.mark.parametrize("flash_attn", [True, False])
def test_made_up_rows_of_ab_are_bf16_and_fill_a_gpu(gpu, monkeypatch, flash_attn):
    pytest.importorskip("verl")
    from verl_prefix.tools.ab import source

    monkeypatch.setattr(source.importlib.util, "find_spec", lambda _: "found" if flash_attn else None)
    found = source.synthetic_manifest((37, 11, 5))
    assert found["engine"]["mixed_precision"]["param_dtype"] == "bf16" and found["engine"]["use_torch_compile"]
    assert found["engine"]["prefix"]["wave_tokens"] == 16384 // 8
    assert found["stock_row_by_row"] == (not flash_attn) == ("override_config" in found["model"])


def test_ab_leaves_verl_its_platform_where_there_is_a_gpu(gpu, monkeypatch, tmp_path):
    pytest.importorskip("verl")
    from verl_prefix import cli
    from verl_prefix.tools.ab import command

    monkeypatch.setattr(command, "run", lambda options, out: os.environ.get("VERL_PLATFORM"))
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    words = ["ab", "--synthetic", "9,4,2", "--model", str(tmp_path), "--out", str(tmp_path / "out")]
    assert cli.main(words) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(words) == "cpu"
