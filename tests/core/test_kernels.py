"""Kernels against autograd on the dense formula, in float64, and what is said where one cannot run."""

import pytest
import torch

from verl_prefix.core import context
from verl_prefix.core.calls import AttentionParams, Call, Spans
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.kernels import aten, available_kernels, choose_kernel, cpu, reference
from verl_prefix.core.kernels import merge as merging
from verl_prefix.core.packed_row import PackedRow
from verl_prefix.core.prefix_cache import PrefixCache
from verl_prefix.core.runs import Segment
from verl_prefix.models.advice import advising

SPANS = {
    True: Spans((0, 5, 6, 23), (0, 5, 6, 23)),
    False: Spans((0, 5, 6, 23), (0, 9, 10, 17), q_segments=(0, 2, 5, 6, 23)),
}


def dense(q, k, v, spans, causal, scale, window=None, softcap=None):
    """[T, H, D] by torch's own softmax attention, segment by segment, with repeated kv heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outs = []
    for q0, q1, k0, k1 in spans:
        last = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)  # the key at which each query stands
        behind = last.unsqueeze(1) - torch.arange(k1 - k0)
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1]) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:
            scores = scores.masked_fill((behind < 0) | (behind >= (window or 10**6)), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[k0:k1]))
    return torch.cat(outs)


def check(kernel, spans, causal, heads=(6, 2), head_dim=8, **options):
    torch.manual_seed(0)
    q = torch.randn(spans.q[-1], heads[0], head_dim, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(spans.k[-1], heads[1], head_dim, dtype=torch.float64, requires_grad=True) for _ in range(2))
    truth = dense(q, k, v, spans, causal, 0.3, **options)
    dout = torch.randn_like(truth)
    grads = torch.autograd.grad(truth, (q, k, v), dout)
    with torch.no_grad():
        call = Call(spans, causal, 0.3, **options)
        out, lse = kernel.forward(q, k, v, call)
        found = kernel.backward(dout, (q, k, v, out, lse), call)
    torch.testing.assert_close(out, truth.detach(), rtol=1e-9, atol=1e-12)
    for ours, true in zip(found, grads, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kernel", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("head_dim", [8, 17, 96])
def test_kernel_equals_dense_attention(kernel, causal, heads, head_dim):
    check(kernel, SPANS[causal], causal, heads, head_dim)


@pytest.mark.parametrize("kernel", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("window", [1, 2, 7, 16, 17, 40])
def test_a_window_counts_back_from_the_last_key(kernel, window, monkeypatch):
    monkeypatch.setattr(cpu, "_BLOCK", 5)
    monkeypatch.setattr(reference, "_MAX_SCORES", 100)
    # Segments that read themselves, and segments behind a tail of keys.
    check(kernel, Spans((0, 5, 6, 23, 31), (0, 5, 12, 29, 52)), True, window=window)


@pytest.mark.parametrize("causal", [True, False])
def test_softcap(causal):
    check(reference, SPANS[causal], causal, softcap=0.7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_autocast_rounds_nothing_inside_the_dense_kernel(dtype):
    torch.manual_seed(0)
    q, dout = (torch.randn(23, 6, 8).to(dtype) for _ in range(2))
    k, v = (torch.randn(23, 2, 8).to(dtype) for _ in range(2))

    def run():
        call = Call(SPANS[True], True, 0.3, softcap=0.7)
        out, lse = reference.forward(q, k, v, call)
        return out, lse, *reference.backward(dout, (q, k, v, out, lse), call)

    outside = run()
    with torch.autocast("cpu", torch.bfloat16):
        inside = run()
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_merge_of_two_key_sets_is_attention_over_both():
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, 2, 8, dtype=torch.float64) for _ in range(3))

    def attend(a, b):
        return reference.forward(q, k[a:b], v[a:b], Call(Spans((0, 7), (0, b - a)), False, 0.3))

    parts = [attend(0, 3), attend(3, 7)]
    out, lse = merging.merge(*parts[0], *parts[1])
    torch.testing.assert_close((out, lse), attend(0, 7), rtol=1e-12, atol=1e-12)


def test_empty_segments_never_reach_a_kernel():
    for q, q_segments in (((0, 3, 3), ()), ((0, 3, 5), (0, 3, 3, 5))):
        with pytest.raises(AssertionError, match="empty span or segment"):
            Spans(q, (0, 3, 5), q_segments=q_segments)
    with pytest.raises(AssertionError, match="0, 2, 5"):  # the segment from 2 on would read keys of two spans
        Spans((0, 3, 5), (0, 3, 5), q_segments=(0, 2, 5))


def test_installed_torch_has_the_cuda_op_schemas_that_we_call():
    assert aten.schema_error() is None


def test_kernel_choice_says_what_is_wrong():
    assert choose_kernel("auto", "cpu", torch.float32, 64) is cpu
    assert available_kernels()["cpu"] == "ok"
    assert (
        aten.unsupported("cuda", torch.float32, 64, softcap=False) == "dtype is torch.float32, not bfloat16 or float16"
    )
    with pytest.raises(ValueError, match="attention kernel 'magi' is unknown; there are auto, cpu"):
        choose_kernel("magi", "cpu", torch.float32, 64)
    assert choose_kernel("auto", "cpu", torch.float32, 64, softcap=True) is reference
    with pytest.raises(ValueError, match="attention kernel 'cpu' cannot run here: it has no softcap"):
        choose_kernel("cpu", "cpu", torch.float32, 64, softcap=True)
    with pytest.raises(ValueError, match="'aten' cannot run here: .*; set .*prefix.attention=auto"), advising():
        choose_kernel("aten", "cpu", torch.float32, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("queries", [slice(2, 5), torch.tensor([1, 4, 6])], ids=["slice", "indices"])
def test_the_fused_merge_writes_what_the_one_in_torch_does_and_takes_fp32_alone(monkeypatch, queries, dtype):
    """The one in torch stands in for Triton's, whose arithmetic is test_fused_merge.py's."""
    torch.manual_seed(0)
    given = torch.randn(8, 2, 4, dtype=dtype), torch.randn(2, 8, dtype=dtype)
    second = torch.randn(3, 2, 4, dtype=dtype), torch.randn(2, 3, dtype=dtype)
    fused = []

    def into(part, part_lse, *others):
        fused.append(part.dtype)
        for x, merged in zip((part, part_lse), merging.merge(part.clone(), part_lse.clone(), *others), strict=True):
            x.copy_(merged)

    found = []
    for kernel in (None, into):
        monkeypatch.setattr(merging, "_fused_merge", lambda device, kernel=kernel: kernel)
        out, lse = (x.clone() for x in given)
        merging.merge_at(queries, out, lse, *second)
        found.append((out, lse))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and not torch.equal(found[0][0], given[0])
    assert fused == [torch.float32] * (dtype == torch.float32)


def test_a_pass_asks_for_a_kernel_of_its_tensors_and_keeps_nothing_unasked(monkeypatch):
    asked = []
    monkeypatch.setattr(context, "choose_kernel", lambda *args, **options: asked.append((args, options)) or reference)
    packed_row = PackedRow(torch.arange(5), (Segment(5),))
    one, q, k = ForwardContext(packed_row, "reference"), torch.randn(5, 4, 24), torch.randn(5, 2, 24)
    one.attend(0, q, k, k, None, AttentionParams(0.2))
    one.attend(1, q, k, k, None, AttentionParams(0.2, softcap=5.0))
    of = "reference", "cpu", torch.float32, 24
    assert asked == [(of, {"softcap": False}), (of, {"softcap": True})]
    assert one.num_calls == 2 and one.kept is None
    with pytest.raises(RuntimeError, match="layer 3 runs in a nested pass and did not run in phase A"):
        ForwardContext(packed_row, "reference", outer_caches=[PrefixCache()]).attend(
            3, q, k, k, None, AttentionParams(0.2)
        )
