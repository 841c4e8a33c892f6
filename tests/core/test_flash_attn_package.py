"""How kernels/flash_attn.py calls the three flash-attn interfaces. MOCK: no machine of ours has a GPU with them, so
functions with their argument names (flash-attn 2.8.3, and its main branch for FA3 and FA4) stand in on the CPU, which
compute by the dense reference. What the real kernels return is not tested here.
"""

import sys
import types

import pytest
import torch

from verl_prefix.core.kernels import choose_kernel, flash_attn, reference
from verl_prefix.core.layout import Spans


def spans(cu_q, cu_k, max_q, max_k):
    found = Spans(tuple(cu_q.tolist()), tuple(cu_k.tolist()))
    assert (max_q, max_k) == (found.max_q, found.max_k)
    return found


def window(causal, left, right, none):
    assert causal or left == none
    assert right == (none if left == none else 0)
    return None if left == none else left + 1


def fa2(module):
    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        pairs = spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        size = window(causal, window_size_left, window_size_right, -1)
        return *reference.forward(q, k, v, pairs, causal, softmax_scale, size, softcap or None), None, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        pairs = spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        size = window(causal, window_size_left, window_size_right, -1)
        args = pairs, causal, softmax_scale, size, softcap or None
        for into, grad in zip((dq, dk, dv), reference.backward(dout, q, k, v, out, softmax_lse, *args), strict=True):
            into.copy_(grad)

    module.__dict__.update(locals())


def fa3(module):
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    ):  # fmt: skip
        pairs = spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        size = window(causal, window_size_left, window_size_right, -1)
        return *reference.forward(q, k, v, pairs, causal, softmax_scale, size, softcap or None), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        pairs = spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        size = window(is_causal, window_size_left, window_size_right, -1)
        args = pairs, is_causal, softmax_scale, size, softcap or None
        for into, grad in zip((dq, dk, dv), reference.backward(dout, q, k, v, out, softmax_lse, *args), strict=True):
            into.copy_(grad)

    module.__dict__.update(locals())


def fa4(module):
    def _flash_attn_fwd(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        causal=False, softcap=None, window_size_left=None, window_size_right=None, return_lse=False,
    ):  # fmt: skip
        pairs = spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        size = window(causal, window_size_left, window_size_right, None)
        assert return_lse
        return *reference.forward(q, k, v, pairs, causal, softmax_scale, size, softcap or None), None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False, dq=None, dk=None, dv=None,
    ):  # fmt: skip
        pairs = spans(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        size = window(causal, window_size_left, window_size_right, None)
        args = pairs, causal, softmax_scale, size, softcap or None
        for into, grad in zip((dq, dk, dv), reference.backward(dout, q, k, v, out, lse, *args), strict=True):
            into.copy_(grad)

    module.__dict__.update(locals())


def old_fa3(module):
    def _flash_attn_forward(q, k, v, cu_seqlens_q=None, window_size=(-1, -1)):
        raise AssertionError("called")

    module._flash_attn_forward = module._flash_attn_backward = _flash_attn_forward


@pytest.fixture
def install(monkeypatch):
    def installed(capability, **modules):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
        for name in (flash_attn._FA2, flash_attn._FA3, flash_attn._FA4, "flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, None)  # None: importing it fails
        for name, fill in modules.items():
            module = types.ModuleType(name)
            fill(module)
            monkeypatch.setitem(sys.modules, getattr(flash_attn, name), module)

    flash_attn._interface.cache_clear()
    yield installed
    flash_attn._interface.cache_clear()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 0.5}], ids=["plain", "window", "softcap"])
@pytest.mark.parametrize(("capability", "modules"), [((8, 0), "_FA2"), ((9, 0), "_FA3"), ((10, 0), "_FA4")])
def test_each_interface_is_called_with_its_own_arguments(install, capability, modules, causal, options):
    if "window" in options and not causal:
        return
    install(capability, **{modules: {"_FA2": fa2, "_FA3": fa3, "_FA4": fa4}[modules]})
    torch.manual_seed(0)
    pairs = Spans((0, 5, 6, 23), (0, 9, 12, 30))
    q, dout = (torch.randn(23, 4, 8) for _ in range(2))
    k, v = (torch.randn(30, 2, 8) for _ in range(2))
    out, lse = flash_attn.forward(q, k, v, pairs, causal, 0.3, **options)
    torch.testing.assert_close((out, lse), reference.forward(q, k, v, pairs, causal, 0.3, **options))
    grads = flash_attn.backward(dout, q, k, v, out, lse, pairs, causal, 0.3, **options)
    torch.testing.assert_close(grads, reference.backward(dout, q, k, v, out, lse, pairs, causal, 0.3, **options))


@pytest.mark.parametrize(
    ("capability", "modules", "chosen"),
    [
        ((9, 0), {"_FA2": fa2, "_FA3": fa3, "_FA4": fa4}, "_FA3"),
        ((9, 0), {"_FA2": fa2, "_FA3": old_fa3}, "_FA2"),
        ((8, 6), {"_FA2": fa2, "_FA3": fa3}, "_FA2"),
        ((12, 0), {"_FA2": fa2, "_FA3": fa3}, "_FA2"),
        ((9, 0), {}, None),
    ],
)
def test_the_newest_interface_that_the_gpu_runs_is_chosen(install, capability, modules, chosen):
    install(capability, **modules)
    found = flash_attn._interface()
    assert (found and found[0]) == (chosen and getattr(flash_attn, chosen))
    assert (flash_attn.unavailable() is None) == (chosen is not None)


def test_on_a_gpu_nothing_falls_back_to_the_dense_reference_unasked(install):
    install((9, 0), _FA2=fa2)
    choose_kernel.cache_clear()
    with pytest.raises(ValueError, match="no fast kernel for cuda, torch.float32.*param_dtype=bf16"):
        choose_kernel("auto", "cuda", torch.float32, 64)
    assert choose_kernel("auto", "cuda", torch.bfloat16, 64, softcap=True) is flash_attn
    choose_kernel.cache_clear()
