"""The Triton kernel of the LSE merge, in Triton's interpreter, against the torch version; and what Triton's compiler
makes of it for GPUs that are not here."""

import importlib.util
import re
import subprocess
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from verl_prefix.core.kernels import merge as merging

# Imported by tests alone: what conftest freezes at collection triton reports as leaked.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def copied() -> ModuleType:
    """A copy of the module: the one that others import stays as it is."""
    path = Path(merging.__file__).parent / "fused_merge.py"
    spec = importlib.util.spec_from_file_location("copied_merge", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def merge_into(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return copied().merge_into


def parts(num_queries: int, heads: int, dim: int, dtype: torch.dtype, spread: float = 8.0):
    """Views of larger tensors, as attention hands them over: (out, lse, out_2, lse_2)."""
    generator = torch.Generator().manual_seed(num_queries)
    out, out_2 = (torch.randn(num_queries + 5, heads, dim, generator=generator).to(dtype) for _ in range(2))
    lse, lse_2 = (torch.randn(heads, num_queries + 5, generator=generator) * spread for _ in range(2))
    return out[3:-2], lse[:, 3:-2], out_2[:num_queries].contiguous(), lse_2[:, :num_queries].contiguous()


def miss(found: tuple, given: tuple) -> list[float]:
    """Relative errors of (out, lse), against float64."""
    truth = merging.merge(*(x.double() for x in given))
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True)]


SIZES = [(1, 1, 16), (37, 3, 80), (64, 4, 128), (5, 2, 256)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_queries", "heads", "dim"), SIZES)
def test_the_kernel_misses_float64_by_no_more_than_torch_does(merge_into, dtype, num_queries, heads, dim):
    """1.3 times, as of all kernels here. And it writes nothing beside its queries."""
    out, lse, out_2, lse_2 = parts(num_queries, heads, dim, dtype)
    around = [x.clone() for x in (out._base[:3], out._base[-2:], lse._base[:, :3], lse._base[:, -2:])]
    given = [x.clone() for x in (out, lse, out_2, lse_2)]
    by_torch = miss(merging.merge(*given), given)
    merge_into(out, lse, out_2, lse_2)
    eps = torch.finfo(torch.float32).eps  # a single query's log-sum-exp may be the truth in torch
    assert all(ours <= max(1.3 * theirs, eps) for ours, theirs in zip(miss((out, lse), given), by_torch, strict=True))
    for now, before in zip((out._base[:3], out._base[-2:], lse._base[:, :3], lse._base[:, -2:]), around, strict=True):
        assert torch.equal(now, before)


@pytest.mark.parametrize(("num_queries", "heads", "dim"), SIZES)
def test_bf16_is_fp32_but_for_the_last_step(merge_into, num_queries, heads, dim):
    """To the bit. The interpreter cuts fp32 to bf16 where a GPU rounds."""
    half = parts(num_queries, heads, dim, torch.bfloat16)
    whole = [x.float().clone() for x in half]
    merge_into(*half)
    merge_into(*whole)
    cut = (whole[0].view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert torch.equal(half[0].float(), cut) and torch.equal(half[1], whole[1])


def test_far_scores_leave_the_larger_part(merge_into):
    out, lse, out_2, lse_2 = parts(20, 2, 32, torch.float32)
    lse_2 += 200.0
    merge_into(out, lse, out_2, lse_2)
    assert torch.equal(out, out_2) and torch.equal(lse, lse_2)


@pytest.mark.parametrize("broken", ["log-sum-exps exchanged", "of the next head", "parts exchanged"])
def test_a_broken_kernel_is_far_off(merge_into, broken):
    out, lse, out_2, lse_2 = parts(37, 3, 80, torch.float32)
    given = [x.clone() for x in (out, lse, out_2, lse_2)]
    if broken == "log-sum-exps exchanged":
        lse, lse_2 = lse_2, lse
    elif broken == "of the next head":
        lse_2 = lse_2.roll(1, 0)
    else:
        out, out_2 = out_2, out
    merge_into(out, lse, out_2, lse_2)
    assert miss((out, lse), given)[0] > 1e-2


def test_attention_merges_what_the_kernel_writes(monkeypatch, merge_into):
    """To the same bits whether queries are a slice or have gaps. MOCK: tensors of a CPU count as CUDA's."""
    assert merging._fused_merge("cpu") is None
    out, lse, out_2, lse_2 = parts(10, 2, 32, torch.float32)
    calls, found = [], {}
    for fused in (None, lambda *args: (calls.append(1), merge_into(*args))):
        monkeypatch.setattr(merging, "_fused_merge", lambda device_type, fused=fused: fused)
        for queries in (slice(3, 8), torch.arange(3, 8)):
            merged = found[bool(fused), type(queries)] = out.clone(), lse.clone()
            merging.merge_at(queries, *merged, out_2[:5], lse_2[:, :5])
    assert len(calls) == 2 and not torch.equal(found[True, slice][0], out)
    for a, b, by_torch in zip(found[True, slice], found[True, torch.Tensor], found[False, slice], strict=True):
        assert torch.equal(a, b) and torch.allclose(a, by_torch, rtol=1e-5, atol=1e-6)


def test_rows_with_gaps_are_refused(merge_into):
    out, lse, out_2, lse_2 = parts(4, 2, 32, torch.float32)
    with pytest.raises(ValueError, match="has to be contiguous"):
        merge_into(out[..., ::2], lse, out_2[..., ::2], lse_2)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """`compiled(target)` is a module whose `merge_into` compiles for a GPU and launches nothing; and its compilations.

    MOCK: the driver, which names the GPU. Compiler and arguments are the real ones.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def build(backend: str, arch: int | str, warp: int) -> tuple[ModuleType, dict]:
        here = SimpleNamespace(
            get_current_target=lambda: GPUTarget(backend, arch, warp),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
        monkeypatch.setattr(driver, "_active", here)
        module = copied()
        kernel = module._merge
        monkeypatch.setattr(
            kernel, "run", lambda *args, warmup, run=kernel.run, **options: run(*args, warmup=True, **options)
        )
        return module, kernel.device_caches[0][0]

    return build


def resources(kernel, folder: Path) -> dict[str, int]:
    """What a thread takes: registers, and bytes of stack, shared and local memory."""
    from triton import knobs

    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"\b{name}:(\d+)", said)[1]) for name in ("REG", "STACK", "SHARED", "LOCAL")}


@pytest.mark.parametrize(
    "target",
    [
        ("cuda", 90, 32),
        *(
            pytest.param(x, marks=pytest.mark.more)
            for x in (("cuda", 80, 32), ("cuda", 100, 32), ("hip", "gfx942", 64))
        ),
    ],
    ids=str,
)
def test_it_compiles_for_gpus_that_are_not_here_into_registers_alone(compiled, tmp_path, target):
    module, kernels = compiled(*target)
    for dim, dtype in product((64, 128, 192, 256), (torch.bfloat16, torch.float16)):
        module.merge_into(*parts(33, 2, dim, dtype))
    assert len(kernels) == 8
    for kernel in kernels.values():
        if target[0] == "hip":
            found = dict(re.findall(r"\.(\w+_count|private_segment_fixed_size): +(\d+)", kernel.asm["amdgcn"]))
            assert [found[f"{kind}_spill_count"] for kind in ("sgpr", "vgpr")] == ["0", "0"]
            assert found["private_segment_fixed_size"] == "0" and int(found["vgpr_count"]) <= 64
            assert kernel.asm["hsaco"]
        else:
            found = resources(kernel, tmp_path)
            assert found["REG"] <= 64 and found["STACK"] == found["SHARED"] == found["LOCAL"] == 0


def test_it_is_compiled_once_whatever_rows_there_are(compiled):
    """By itself Triton compiles anew for 1, for multiples of 16 and for addresses that are: these would be 12."""
    module, kernels = compiled("cuda", 90, 32)
    for start, rows, more in product((0, 3), (1, 16, 33), (0, 7)):
        out, out_2 = torch.zeros(64, 2, 64), torch.zeros(rows, 2, 64)
        lse, lse_2 = torch.zeros(2, 64 + more), torch.zeros(2, rows + more)[:, more:]
        module.merge_into(out[start : start + rows], lse[:, start : start + rows], out_2, lse_2)
    assert len(kernels) == 1
