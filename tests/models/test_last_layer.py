"""The last layer runs on tokens of lm_head where nothing else needs it. Every test that compares with a model's own
forward runs through this, too."""

import functools

import pytest
import torch
from families import build
from runners import random_rollouts, run_shared, run_stock
from schedules import errors, measure
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from verl_prefix.models import last_layer
from verl_prefix.models.hookup import HookedModel

SHAPE = [(23, [9, 17, 5]), (41, [3, 4, 11, 7, 6])]  # 62 prefix tokens and 62 of suffixes; the model has 4 layers


def seen(model, **options) -> list[tuple[str, int, int]]:
    """(module, layer, tokens) of what runs in an update."""
    found = []
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for name, module in dict(q=attention.q_proj, k=attention.k_proj, o=attention.o_proj, mlp=layer.mlp).items():
            inner = module.down_proj if name == "mlp" else module
            forward = inner.forward  # `on_head_tokens` replaces that of the MLP alone, and calls this one
            spy = lambda x, f=forward, n=name, i=number: found.append((n, i, x.shape[1])) or f(x)  # noqa: E731
            inner.forward = spy
    run_shared(model, random_rollouts(SHAPE, 97), **options)
    return found


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize(
    ("options", "passes"),
    [
        (dict(schedule="packed"), [(124, 62)]),
        (dict(schedule="phased"), [(62, 1), (62, 62)]),
        (dict(schedule="phased", wave_tokens=31), [(62, 1), (31, 31), (31, 31)]),
    ],
    ids=str,
)
def test_the_last_layer_runs_on_tokens_of_lm_head(options, passes, checkpointed):
    model = build("llama3")
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    times = 2 if checkpointed else 1
    found = seen(model, **options)
    for layer in range(4):
        for name in ("q", "k", "o", "mlp"):
            of_all = [tokens for tokens, _ in passes]
            wanted = of_all if name == "k" or layer < 3 else [tokens for _, tokens in passes]
            assert sorted(n for one, i, n in found if (one, i) == (name, layer)) == sorted(wanted * times), (
                name,
                layer,
            )


@pytest.mark.parametrize("schedule", ["packed", "phased"])
@pytest.mark.parametrize("wrapped", ["layer", "self_attn", "mlp"])
def test_what_torch_wraps_for_checkpointing_runs_again_on_its_own_tokens(wrapped, schedule):
    model, rollouts = build("llama3").double(), random_rollouts(SHAPE, 97)
    layers, layer = model.model.layers, model.model.layers[-1]
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    if wrapped == "layer":
        layers[-1] = wrap(layer)
    else:
        setattr(layer, wrapped, wrap(getattr(layer, wrapped)))
    truth = measure(model, lambda: run_stock(model, rollouts))
    ours = measure(model, lambda: run_shared(model, rollouts, schedule, wave_tokens=31))
    assert max(errors(ours, truth).values()) < 1e-6  # HF's fp32 norms


def shifted(monkeypatch):
    call = last_layer._OnHeadTokens.__call__

    def wrong(self, x):
        forward_context = self.forward_context
        own = forward_context.head_tokens
        forward_context.head_tokens = (own - 1).clamp(min=0)
        try:
            return call(self, x)
        finally:
            forward_context.head_tokens = own

    monkeypatch.setattr(last_layer._OnHeadTokens, "__call__", wrong)


def keys_too(monkeypatch):
    found = last_layer.head_only

    def and_keys(model):
        attention = model.model.layers[-1].self_attn
        return [*found(model), (attention, attention.k_proj)]

    monkeypatch.setattr(last_layer, "head_only", and_keys)


@pytest.mark.parametrize(
    ("sabotage", "schedule"), [(shifted, "packed"), (keys_too, "packed"), (keys_too, "phased")]
)  # a wave skips nothing
def test_what_skips_a_token_that_is_read_is_far_off(monkeypatch, sabotage, schedule):
    model, rollouts = build("llama3").double(), random_rollouts([(23, [9, 17, 5]), (41, [3, 11])], 97)
    truth = measure(model, lambda: run_stock(model, rollouts))
    sabotage(monkeypatch)
    ours = measure(model, lambda: run_shared(model, rollouts, schedule, wave_tokens=31))
    assert max(errors(ours, truth).values()) > 100 * 5e-6


@pytest.mark.parametrize("family", ["qwen3-moe", "lfm2", "llama3"])
def test_layers_that_run_whole(family):
    """Experts, a convolution, and what is compiled."""
    model = build(family)
    layer = model.model.layers[-1]
    if family == "lfm2":
        assert len(last_layer.head_only(model)) == 3, "this one ends in attention"
        del model.model.layers[-1]
    if family == "llama3":
        assert len(last_layer.head_only(model)) == 3
        layer.compile()
    assert last_layer.head_only(model) == []


@pytest.mark.parametrize(
    ("layers", "told"), [(2, "prefix_context=False"), (1, "a Linear of the last layer ran without a prefix_context")]
)
def test_a_forward_without_a_pass_is_refused(layers, told):
    model = build("llama3")
    del model.model.layers[layers:]
    with HookedModel(model).grouped_attention(), pytest.raises(RuntimeError, match=told):
        model(input_ids=torch.arange(5)[None])


def test_a_context_inside_another_changes_nothing():
    model = build("llama3")
    layer, hooked = model.model.layers[-1], HookedModel(model)
    with hooked.grouped_attention():
        outer, hooks = layer.mlp.forward, len(layer._forward_pre_hooks)
        assert hooks == len(layer.self_attn._forward_pre_hooks) == 1
        with hooked.grouped_attention():
            assert layer.mlp.forward is outer and len(layer._forward_pre_hooks) == hooks
        assert layer.mlp.forward is outer and isinstance(outer, last_layer._OnHeadTokens)
    assert "forward" not in vars(layer.mlp) and not layer._forward_pre_hooks
