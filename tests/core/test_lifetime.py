"""The prefix graph lives for one set of groups: after phase C, or an exception before it, nothing of it is left."""

import gc
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from runners import random_rollouts, run_shared
from transformers import LlamaConfig, LlamaForCausalLM

from verl_prefix.core import prefix_cache, runner
from verl_prefix.core.forward import PackedForward
from verl_prefix.core.offload import OffloadedPrefixCache

SHAPE = [(41, [9, 17, 5]), (23, [3, 11])]


def build():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture
def tracked(monkeypatch):
    """Weak references to every captured K/V (of the graph and leaf), every grad cache and every phase A output."""
    refs: list[weakref.ref] = []
    capture, add_grad = prefix_cache.PrefixCache.capture, prefix_cache.PrefixCache.add_grad
    prefixes = PackedForward.phase_a

    def spy_capture(self, layer, k, v):
        joined = capture(self, layer, k, v)
        refs.extend(weakref.ref(x) for x in (k, v, *joined, *self._stored.get(layer, ())))
        return joined

    def spy_add_grad(self, layer, *args):
        add_grad(self, layer, *args)
        refs.extend(weakref.ref(x) for x in self._grads[layer])

    def spy_prefixes(self, *args, **options):
        root = prefixes(self, *args, **options)
        refs.append(weakref.ref(root))
        return root

    monkeypatch.setattr(prefix_cache.PrefixCache, "capture", spy_capture)
    monkeypatch.setattr(prefix_cache.PrefixCache, "add_grad", spy_add_grad)
    monkeypatch.setattr(PackedForward, "phase_a", spy_prefixes)
    return refs


def left(refs: list[weakref.ref]) -> int:
    gc.collect()
    return sum(ref() is not None for ref in refs)


def test_nothing_is_left_after_phase_c(tracked):
    run_shared(build(), random_rollouts(SHAPE, 61), "phased", wave_tokens=12)
    assert len(tracked) > 10 and left(tracked) == 0


@pytest.mark.parametrize("where", ["first wave", "last wave", "phase C"])
def test_nothing_is_left_after_an_exception_between_a_and_c(tracked, monkeypatch, where):
    if where == "phase C":

        def fail(*args, **options):
            raise FloatingPointError(where)

        monkeypatch.setattr(torch.autograd, "backward", fail)
        backward = lambda loss: None  # noqa: E731
    else:
        countdown = iter([False, False, True] if where == "last wave" else [True])

        def backward(loss):
            if next(countdown, False):
                raise FloatingPointError(where)

    model, rollouts = build(), random_rollouts(SHAPE, 61)
    real = runner.PlanRunner.__init__
    monkeypatch.setattr(runner.PlanRunner, "__init__", lambda self, f, s, b, **kw: real(self, f, s, backward, **kw))
    with pytest.raises(FloatingPointError, match=where):
        run_shared(model, rollouts, "phased", wave_tokens=20)
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model.lm_head)
    assert len(tracked) > 5 and left(tracked) == 0


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_phase_c_forgets_each_layers_caches_as_it_comes_to_it(monkeypatch, checkpoint, offload):
    model, left, take = build(), [], prefix_cache.PrefixCache.take
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()

    def spy(self, layer):
        grads = take(self, layer)
        left.append((layer, len(self._grads), len(self._stored)))
        return grads

    monkeypatch.setattr(prefix_cache.PrefixCache, "take", spy)
    run_shared(model, random_rollouts(SHAPE, 61), "phased", wave_tokens=12, offload=offload)
    layers = model.config.num_hidden_layers
    assert left == [(layer, layer, 0) for layer in reversed(range(layers))]


def test_a_prefix_graph_has_no_lm_head(monkeypatch):
    model, real = build(), runner.PlanRunner.__init__
    monkeypatch.setattr(
        runner.PlanRunner, "__init__", lambda self, f, s, b, **kw: real(self, f, s, lambda loss: None, **kw)
    )
    run_shared(model, random_rollouts(SHAPE, 61), "phased", wave_tokens=12)
    assert {name for name, p in model.named_parameters() if p.grad is None} == {"lm_head.weight"}


def test_a_cache_keeps_no_more_than_what_waves_read():
    """Values that are a view of a fused projection, as Phi-3's and Megatron's, are kept apart from queries and keys."""
    qkv = torch.randn(5, 8, 4, requires_grad=True)
    with prefix_cache.PrefixCache() as cache:
        k, v = cache.capture(0, qkv[:, 4:6] * 2, qkv[:, 6:])
        kept = cache.read(0)
        assert [x.untyped_storage().nbytes() for x in kept] == [x.nbytes for x in kept]
        assert torch.equal(kept[1], qkv[:, 6:])
        cache.add_grad(0, slice(1, 3), torch.ones(2, 2, 4), torch.full((2, 2, 4), 3.0))
        cache.backward(k.sum() + v.sum())
    sent = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0]).view(5, 1, 1)
    assert not qkv.grad[:, :4].any()
    assert torch.equal(qkv.grad[:, 4:6], (2 * sent).expand(5, 2, 4))
    assert torch.equal(qkv.grad[:, 6:], (3 * sent).expand(5, 2, 4))


@pytest.mark.parametrize("trained", ["all", "lm_head"])
def test_one_backward_is_told_to_be_the_last_phase_c_or_without_it_the_last_wave(trained):
    model, told = build(), []
    model.requires_grad_(trained == "all")
    model.lm_head.requires_grad_(True)
    rollouts = random_rollouts(SHAPE, 61)

    def gradient_sync(last):
        told.append(last)
        return nullcontext()

    grads = []
    for options in (dict(schedule="packed"), dict(schedule="phased", budget=60, wave_tokens=12)):
        model.zero_grad()
        told.clear()
        run_shared(model, rollouts, gradient_sync=gradient_sync, **options)
        grads.append(model.lm_head.weight.grad)
    assert len(told) > 2 and told == [False] * (len(told) - 1) + [True]
    assert torch.allclose(*grads, atol=1e-6)


@pytest.mark.more
def test_fifty_steps_leave_no_tensor_behind():
    model, rollouts = build(), random_rollouts(SHAPE, 61)

    def count_after(steps: int) -> int:
        for _ in range(steps):
            model.zero_grad()
            run_shared(model, rollouts, "phased", wave_tokens=12)
        gc.collect()
        return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())

    assert count_after(3) == count_after(50)


@pytest.mark.parametrize("offload", [False, True])
def test_a_cache_that_an_exceptions_frames_hold_frees_what_waves_sent_back(offload):
    cache = OffloadedPrefixCache(torch.device("cpu"), Counter()) if offload else prefix_cache.PrefixCache()
    with pytest.raises(RuntimeError, match="a wave"), cache:
        cache.capture("layer", torch.ones(3, 1, 2, requires_grad=True))
        cache.add_grad("layer", slice(0, 2), torch.ones(2, 1, 2))
        sent = weakref.ref(cache.take("layer")[0])
        cache.add_grad("layer", slice(0, 2), torch.ones(2, 1, 2))
        kept = weakref.ref(cache._grads["layer"][0])
        leaf = weakref.ref(cache.read("layer")[0])
        assert sent() is None and None not in (kept(), leaf())
        raise RuntimeError("a wave")
    assert kept() is None and leaf() is None
    with pytest.raises(RuntimeError, match="after its pass was left"):
        cache.read("layer")
