"""Kernels against autograd on the dense formula, in float64, and what is said where one cannot run."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from verl_prefix.core import attention, calls
from verl_prefix.core.attention import AttentionParams, AttentionPass, GroupedAttention, merge
from verl_prefix.core.calls import Spans
from verl_prefix.core.kernels import aten, available_kernels, choose_kernel, cpu, reference
from verl_prefix.core.layout import Layout

SPANS = {
    True: Spans((0, 5, 6, 23), (0, 5, 6, 23)),
    False: Spans((0, 5, 6, 23), (0, 9, 10, 17), q_parts=(0, 2, 5, 6, 23)),
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
        out, lse = kernel.forward(q, k, v, spans, causal, 0.3, **options)
        found = kernel.backward(dout, q, k, v, out, lse, spans, causal, 0.3, **options)
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
        out, lse = reference.forward(q, k, v, SPANS[True], True, 0.3, softcap=0.7)
        return out, lse, *reference.backward(dout, q, k, v, out, lse, SPANS[True], True, 0.3, softcap=0.7)

    outside = run()
    with torch.autocast("cpu", torch.bfloat16):
        inside = run()
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_merge_of_two_key_sets_is_attention_over_both():
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, 2, 8, dtype=torch.float64) for _ in range(3))
    parts = [reference.forward(q, k[a:b], v[a:b], Spans((0, 7), (0, b - a)), False, 0.3) for a, b in ((0, 3), (3, 7))]
    out, lse = merge(*parts[0], *parts[1])
    true_out, true_lse = reference.forward(q, k, v, Spans((0, 7), (0, 7)), False, 0.3)
    torch.testing.assert_close((out, lse), (true_out, true_lse), rtol=1e-12, atol=1e-12)


def test_empty_segments_never_reach_a_kernel():
    with pytest.raises(AssertionError, match="empty segment"):
        Spans((0, 3, 3), (0, 3, 5))


def test_installed_torch_has_the_cuda_op_schemas_that_we_call():
    assert aten.schema_error() is None


def test_kernel_choice_says_what_is_wrong():
    assert choose_kernel("auto", "cpu", torch.float32, 64) is cpu
    assert available_kernels()["cpu"] == "ok"
    assert (
        aten.unsupported("cuda", torch.float32, 64, softcap=False) == "dtype is torch.float32, not bfloat16 or float16"
    )
    with pytest.raises(ValueError, match="prefix.attention='magi' is unknown; set one of"):
        choose_kernel("magi", "cpu", torch.float32, 64)
    assert choose_kernel("auto", "cpu", torch.float32, 64, softcap=True) is reference
    with pytest.raises(ValueError, match="prefix.attention='cpu' cannot run here: it has no softcap"):
        choose_kernel("cpu", "cpu", torch.float32, 64, softcap=True)
    with pytest.raises(ValueError, match="prefix.attention='aten' cannot run here: .*; set prefix.attention=auto"):
        choose_kernel("aten", "cpu", torch.float32, 64)


@hypothesis.given(st.lists(st.integers(1, 3000), min_size=1, max_size=12))
@hypothesis.example([8000, *[5] * 300])
@hypothesis.example([*[5] * 300, 8000])
@hypothesis.example([1500, 3000, *[5] * 40])  # saves too few
@hypothesis.example([300, 1500, *[9] * 40])
def test_a_call_is_cut_where_its_grids_are_smallest(lens):
    def blocks(part) -> int:
        return len(part) * max(-(-n // 128) for n in part)

    cut = calls._cut(lens)
    least = min([blocks(lens), *(blocks(lens[:i]) + blocks(lens[i:]) for i in range(1, len(lens)))])
    assert SPANS[False].runs is None, "the rows of a block keep their parts"
    if (blocks(lens) - least) * 5 > sum(lens):
        assert 0 < cut < len(lens) and blocks(lens[:cut]) + blocks(lens[cut:]) == least
    else:
        assert cut == 0


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("kernel", [cpu, reference], ids=["cpu", "reference"])
def test_two_calls_compute_what_one_does(kernel, window, monkeypatch):
    """A prefix of 400 tokens before 50 suffixes, forward and backward: the same bits, and what dense attention of
    whole rows says. Outputs and gradients of the two in the wrong order are far off."""
    lens = [400, *(1 + i % 3 for i in range(50))]
    segments = tuple(calls.Segment(n, ((0, 400),) if i else ()) for i, n in enumerate(lens))

    def layout() -> Layout:
        return Layout(torch.arange(sum(lens)), 400, segments)

    assert layout().calls(window, torch.device("cpu"))[0].spans.runs is not None
    torch.manual_seed(0)
    tensors = [torch.randn(sum(lens), n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
    weights = torch.randn(sum(lens), 4, 8, dtype=torch.float64)

    def run() -> list[torch.Tensor]:
        params = AttentionParams(8**-0.5, window)
        out = GroupedAttention.apply(*tensors, None, layout(), kernel, params, None, 0)
        return [out, *torch.autograd.grad((out * weights).sum(), tensors)]

    found, truth = run(), [torch.zeros(sum(lens), n, 8, dtype=torch.float64) for n in (4, 4, 2, 2)]
    for i, n in enumerate(lens):
        own = torch.arange(sum(lens[:i]), sum(lens[:i]) + n)
        rows = torch.cat([torch.arange(400), own]) if i else own
        q, k, v = (x.detach()[rows].requires_grad_() for x in tensors)
        whole = dense(q, k, v, Spans((0, len(rows)), (0, len(rows))), True, 8**-0.5, window)[-n:]
        truth[0][own] = whole.detach()
        for total, grad in zip(truth[1:], torch.autograd.grad((whole * weights[own]).sum(), (q, k, v)), strict=True):
            total.index_add_(0, rows, grad)

    def error(found: list[torch.Tensor]) -> float:
        return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True))

    assert error(found) < 1e-12
    cut, cat = calls._cut, torch.cat
    monkeypatch.setattr(calls, "_cut", lambda lens: 0)
    assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))
    monkeypatch.setattr(calls, "_cut", cut)
    monkeypatch.setattr(torch, "cat", lambda parts, dim=0: cat(list(parts)[::-1], dim=dim))
    assert error(run()) > 0.1


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
        for x, merged in zip((part, part_lse), merge(part.clone(), part_lse.clone(), *others), strict=True):
            x.copy_(merged)

    found = []
    for kernel in (None, into):
        monkeypatch.setattr(attention, "_fused_merge", lambda device, kernel=kernel: kernel)
        out, lse = (x.clone() for x in given)
        attention._merge_at(queries, out, lse, *second)
        found.append((out, lse))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and not torch.equal(found[0][0], given[0])
    assert fused == [torch.float32] * (dtype == torch.float32)


def test_a_pass_asks_for_a_kernel_of_its_tensors_and_keeps_nothing_unasked(monkeypatch):
    asked = []
    monkeypatch.setattr(attention, "choose_kernel", lambda *args, **options: asked.append((args, options)) or reference)
    layout = Layout(torch.arange(5), 0, (calls.Segment(5),))
    one, q, k = AttentionPass(layout, "reference"), torch.randn(5, 4, 24), torch.randn(5, 2, 24)
    one.attend(0, q, k, k, None, AttentionParams(0.2))
    one.attend(1, q, k, k, None, AttentionParams(0.2, softcap=5.0))
    of = "reference", "cpu", torch.float32, 24
    assert asked == [(of, {"softcap": False}), (of, {"softcap": True})]
    assert one.num_calls == 2 and one.kept is None
