"""The CUDA kernels under the merge: against the dense float64 reference, by the noise floor.

Needs torch, transformers and pytest alone: `make test-gpu` on a machine with a GPU.
"""

import copy

import pytest
import torch
from runners import random_rollouts, run_shared, run_stock

from verl_prefix.core.calls import Call, Spans
from verl_prefix.core.kernels import aten, flash_attn, reference
from verl_prefix.core.kernels.merge import _fused_merge, merge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch.cuda.is_available() is False"),
]


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 31), (False, None)])
@pytest.mark.parametrize("kernel", [aten, flash_attn], ids=["aten", "flash_attn"])
def test_forward_and_backward_miss_float64_like_a_bf16_reference(kernel, heads, head_dim, causal, window):
    if kernel.unavailable():
        pytest.skip(kernel.unavailable())
    torch.manual_seed(0)
    # Under a window the last segment's queries stand behind a tail of keys.
    keys = (0, 123, 140, 431 if window else 401) if causal else (0, 57, 260, 300)
    spans = Spans((0, 123, 140, 401), keys)
    num_q, num_k = spans.q[-1], spans.k[-1]
    q = torch.randn(num_q, heads[0], head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(num_k, heads[1], head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    dout = torch.randn_like(q)
    call = Call(spans, causal, head_dim**-0.5, window)

    def run(kernel, dtype):
        inputs = [x.to(dtype) for x in (q, k, v)]
        out, lse = kernel.forward(*inputs, call)
        return out, lse, *kernel.backward(dout.to(dtype), (*inputs, out, lse), call)

    truth, floor, ours = run(reference, torch.float64), run(reference, torch.bfloat16), run(kernel, torch.bfloat16)
    for name, true, low, found in zip(("out", "lse", "dq", "dk", "dv"), truth, floor, ours, strict=True):
        assert found.shape == true.shape, name
        error, noise = ((x.double() - true).norm() / true.norm() for x in (found, low))
        # The dense reference computes in fp32 and rounds once; a flash kernel also rounds its probabilities to bf16.
        assert error <= 2 * noise + 2**-9, f"{name}: {error:.2e} against {noise:.2e}"


@pytest.mark.parametrize("options", [dict(schedule="packed"), dict(schedule="phased", wave_tokens=64)], ids=str)
def test_schedules_miss_float64_like_stock_bf16(options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=127, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    rollouts = random_rollouts([(161, [19, 37, 5, 23]), (33, [9, 14, 27])], 127)

    def measure(device_model, run):
        device_model.zero_grad()
        log_probs = torch.cat(run()).double().cpu()
        return log_probs, torch.cat([p.grad.double().flatten().cpu() for p in device_model.parameters()])

    truth = measure(model, lambda: run_stock(model, rollouts))
    low = copy.deepcopy(model).bfloat16().cuda()
    on_cuda = type(rollouts)(*([x.cuda() for x in column] for column in vars(rollouts).values()))
    stock = measure(low, lambda: run_stock(low, on_cuda))
    ours = measure(low, lambda: run_shared(low, on_cuda, kernel="aten", **options))
    for name, true, floor, found in zip(("log_probs", "gradients"), truth, stock, ours, strict=True):
        error, noise = ((x - true).norm() / true.norm() for x in (found, floor))
        assert error <= 1.3 * noise, f"{name}: {error:.2e} against stock's {noise:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_queries", "heads", "dim"), [(1, 4, 64), (1037, 6, 80), (4096, 32, 128)])
def test_the_fused_merge_misses_float64_by_no_more_than_torch_does(dtype, num_queries, heads, dim):
    if _fused_merge("cuda") is None:
        pytest.skip("triton is not installed")
    torch.manual_seed(0)
    out, out_2 = (torch.randn(num_queries, heads, dim, device="cuda").to(dtype) for _ in range(2))
    lse, lse_2 = (torch.randn(heads, num_queries, device="cuda") * 8 for _ in range(2))
    truth = merge(*(x.double() for x in (out, lse, out_2, lse_2)))
    by_torch = merge(out, lse, out_2, lse_2)
    _fused_merge("cuda")(out, lse, out_2, lse_2)
    for found, torchs, true in zip((out, lse), by_torch, truth, strict=True):
        errors = [((x.double() - true).norm() / true.norm()).item() for x in (found, torchs)]
        assert errors[0] <= max(1.3 * errors[1], torch.finfo(torch.float32).eps)
