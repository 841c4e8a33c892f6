"""Part of a model is trained: packed and phased against HF's own forward of every whole row, float64 and 1e-9.

A wave's queries, keys and values may need no gradient where its prefix's do: a vision tower below frozen layers. Such a
gradient must not get lost, and what is frozen must get none.
"""

import itertools
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from api_pixels import by_api, by_waves
from families import build, float64_inside  # noqa: F401
from runners import random_rollouts, run_shared, run_stock
from vision_cases import Case, paths  # noqa: F401

from verl_prefix import response_log_probs
from verl_prefix.core.attention import AttentionSite, GroupedAttention
from verl_prefix.core.calls import AttentionParams
from verl_prefix.core.context import ForwardContext
from verl_prefix.core.groups import Fork, Group, Strand
from verl_prefix.core.kernels import cpu
from verl_prefix.core.packed_row import pack_groups
from verl_prefix.core.planning import make_waves
from verl_prefix.core.prefix_cache import PrefixCache

SHAPE = [(23, [9, 17, 5]), (7, [13, 4]), (1, [6, 30])]
TEXT = ["mistral-window-8", "gpt-oss-window-9", "qwen3-moe", "lfm2", "granite4-h"]
SCHEDULES = {"packed": {}, "phased": dict(wave_tokens=19), "offload": dict(wave_tokens=19, offload=True)}
BOTH = ("qwen3", "qwen3.5")
BY_API = {"api": {}, "api_phased": dict(schedule="phased", wave_tokens=19)}


def layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts and "visual" not in parts else -1


# pattern -> whether a parameter is trained, by its name
PATTERNS = {
    "frozen_embeddings": lambda name: "embed_tokens" not in name,
    "upper_layers": lambda name: layer_of(name) >= 1 or "lm_head" in name,
    "lower_layer": lambda name: layer_of(name) == 0,
    "lm_head": lambda name: "lm_head" in name,
    "values_of_a_layer": lambda name: layer_of(name) == 1 and ("v_proj" in name or "norm" in name),
}
TOWER_PATTERNS = {
    "tower": lambda name: "visual" in name,
    "tower_and_upper_layer": lambda name: "visual" in name or layer_of(name) == 1,
    "all_but_the_tower": lambda name: "visual" not in name,
    "tower_and_lm_head": lambda name: "visual" in name or "lm_head" in name,
}


def freeze(model, is_trained) -> None:
    head = model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(f"{name} lm_head" if parameter is head else name))  # may be tied
    assert any(parameter.requires_grad for parameter in model.parameters())


def adapted(model, layers: list[int]):
    """Adapters on some layers, without the zeros that they begin with."""
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj", "in_proj_qkv"], layers_to_transform=layers
    )
    model = peft.get_peft_model(model, config).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def measured(model, run) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    log_probs = torch.cat(run())
    return log_probs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(model, truth, ours) -> None:
    log_probs, gradients = measured(model, truth)
    found, own = measured(model, ours)
    zeros = {name for name, x in own.items() if not x.any()}  # of what only dummies reach
    assert gradients.keys() <= own.keys() and own.keys() - gradients.keys() <= zeros
    worst = {name: ((own[name] - x).norm() / x.norm().clamp(min=1e-9)).item() for name, x in gradients.items()}
    worst["log-probs"] = ((found - log_probs).norm() / log_probs.norm()).item()
    assert len(worst) > 1 and max(worst.values()) < 1e-9, max(worst.items(), key=lambda item: item[1])


def through_api(model, rollouts, options: dict) -> list[torch.Tensor]:
    found = response_log_probs(model, rollouts.prompts, rollouts.responses, **options)
    sum((x * weight).sum() for x, weight in zip(found, rollouts.weights, strict=True)).backward()
    return [x.detach() for x in found]


def by_schedule(model, rollouts, schedule: str):
    if schedule in BY_API:
        return lambda: through_api(model, rollouts, BY_API[schedule])
    name = "packed" if schedule == "packed" else "phased"
    return lambda: run_shared(model, rollouts, name, **SCHEDULES[schedule])


def _marked(*run: object) -> Any:
    """A family, a schedule and what is trained. Of others than qwen3 make test has phases, without the host or the API
    in between, in which a layer alone is trained, or all above it."""
    alone = run[0] == "qwen3" or (run[1] == "phased" and run[2] in ("upper_layers", "lower_layer", [1]))
    return pytest.param(*run, marks=() if alone else pytest.mark.more)


@pytest.mark.parametrize(
    ("family", "schedule", "pattern"),
    [
        _marked(*run, pattern)
        for run in (*itertools.product(BOTH, [*SCHEDULES, *BY_API]), *itertools.product(TEXT, ["phased"]))
        for pattern in PATTERNS
    ],
)  # fmt: skip
def test_text_models(family, schedule, pattern, float64_inside):  # noqa: F811
    model = build(family, torch.float64)
    float64_inside(model)
    freeze(model, PATTERNS[pattern])
    rollouts = random_rollouts(SHAPE, model.config.vocab_size)
    check(model, lambda: run_stock(model, rollouts), by_schedule(model, rollouts, schedule))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_reentrant_checkpointing(pattern, float64_inside):  # noqa: F811
    """Phase A sees no layer's gradients, those of frozen layers included."""
    model = build("qwen3", torch.float64).train()
    float64_inside(model)
    freeze(model, PATTERNS[pattern])
    model.enable_input_require_grads()  # without it stock has no gradients of layers either
    model.gradient_checkpointing_enable({"use_reentrant": True})
    rollouts = random_rollouts(SHAPE, model.config.vocab_size)
    check(model, lambda: run_stock(model, rollouts), by_schedule(model, rollouts, "phased"))


@pytest.mark.parametrize(
    ("family", "schedule", "layers"), [_marked(*run) for run in itertools.product(BOTH, SCHEDULES, [[0], [1], [2, 3]])]
)
def test_adapters_on_some_layers(family, schedule, layers, float64_inside):  # noqa: F811
    model = build(family, torch.float64)
    float64_inside(model)
    model = adapted(model, layers)
    rollouts = random_rollouts(SHAPE, model.config.vocab_size)
    check(model, lambda: run_stock(model, rollouts), by_schedule(model, rollouts, schedule))


@pytest.mark.parametrize(
    "pattern",
    [pytest.param(x, marks=pytest.mark.more if x in ("tower", "tower_and_lm_head") else ()) for x in TOWER_PATTERNS],
)
@pytest.mark.parametrize(
    ("family", "checkpointed"),
    [
        # test_vision_engine.py trains the same parts of Qwen2.5-VL.
        pytest.param("qwen2_5_vl", False, marks=pytest.mark.full), ("qwen3_vl", False),
        pytest.param("qwen3_vl", True, marks=pytest.mark.more), pytest.param("qwen3_5", False, marks=pytest.mark.more),
    ],
)  # fmt: skip
def test_vision_models(family, checkpointed, pattern, paths, float64_inside):  # noqa: F811
    case = Case(paths[family])
    float64_inside(case.model)
    freeze(case.model, TOWER_PATTERNS[pattern])
    if checkpointed:
        case.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for schedule, options in SCHEDULES.items():
        name = "packed" if schedule == "packed" else "phased"
        check(case.model, case.truth, lambda name=name, options=options: case.ours(schedule=name, **options))
    if not checkpointed:
        check(case.model, case.truth, lambda: by_api(case, schedule="phased", max_tokens=60, wave_tokens=19))
        check(case.model, case.truth, lambda: by_waves(case))


@pytest.mark.parametrize("anchored", [True, False])
def test_a_wave_that_needs_no_gradient_sends_back_those_of_its_prefix(anchored):
    """Against autograd on the dense formula. Without the anchor autograd never visits the wave's attention."""
    generator = torch.Generator().manual_seed(0)
    group, prefix_len = Group.of_prompt((0, 1), 7, (3, 2)), 7
    rows = torch.randn(3, prefix_len + 5, 2, 8, generator=generator, dtype=torch.float64)  # q, k, v of all tokens
    prefix = [x[:prefix_len].clone().requires_grad_() for x in rows[1:]]
    cache = PrefixCache()
    cache.capture(0, *prefix)
    (wave,) = make_waves([group], 99)
    wave = pack_groups(wave.groups, [0, 20], "wave", pack_groups([group], [0, 20], "phase_a"))
    q, k, v = (x[prefix_len:] for x in rows)
    anchor = cache.anchor(0) if anchored else None
    out = GroupedAttention.apply(
        q, k, v, None, anchor, AttentionSite(wave, cpu, AttentionParams(0.3), (cache,), 0), None
    )
    assert out.requires_grad == anchored
    if not anchored:
        return
    dout = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    out.backward(dout)
    found, lens = cache.take(0), [3, 2]
    dense = []
    for own in zip(*(x.split(lens) for x in (q, k, v)), strict=True):
        keys, values = (torch.cat([a, b]) for a, b in zip(prefix, own[1:], strict=True))
        hidden = torch.ones(len(own[0]), len(keys), dtype=torch.bool).triu(prefix_len + 1)
        scores = torch.einsum("qhd,khd->hqk", own[0], keys) * 0.3
        dense.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values))
    for ours, true in zip(found, torch.autograd.grad(torch.cat(dense), prefix, dout), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-12)


def test_a_wave_of_nested_passes_sends_back_the_gradients_of_the_one_level_that_needs_them():
    """The outer prefix is trained, as by what it shows, and the inner one is not; the wave itself is frozen."""
    generator = torch.Generator().manual_seed(0)
    strands, offsets = (Strand(0, 0, 4), Strand(0, 4, 7, 0)), [0, 20]
    of_rows = dict(rows=(0, 1), row_ends=(10, 9), first_outputs=(7, 7))
    outer = pack_groups([Group(strands=strands[:1], forks=(Fork(0, 4),) * 2, **of_rows)], offsets, "phase_a")
    inner = Group(strands=strands, forks=(Fork(1, 7),) * 2, num_outer=1, **of_rows)
    wave = pack_groups([replace(inner, num_outer=2)], offsets, "wave", pack_groups([inner], offsets, "phase_a", outer))
    q, k, v = torch.randn(3, 7 + 5, 2, 8, generator=generator, dtype=torch.float64)
    trained, caches = [x[:4].clone().requires_grad_() for x in (k, v)], (PrefixCache(), PrefixCache())
    caches[0].capture(0, *trained)
    caches[1].capture(0, k[4:7], v[4:7])
    params = AttentionParams(0.3)
    out = ForwardContext(wave, "cpu", outer_caches=caches).attend(0, q[7:], k[7:], v[7:], None, params)
    dout = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    out.backward(dout)
    dense = []
    for begin, end in ((7, 10), (10, 12)):
        keys, values = (torch.cat([x, y[4:7], y[begin:end]]) for x, y in zip(trained, (k, v), strict=True))
        hidden = torch.ones(end - begin, len(keys), dtype=torch.bool).triu(7 + 1)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], keys) * 0.3
        dense.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values))
    torch.testing.assert_close(out, torch.cat(dense), rtol=1e-9, atol=1e-12)
    for ours, true in zip(caches[0].take(0), torch.autograd.grad(torch.cat(dense), trained, dout), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-12)
    assert caches[1].take(0) is None
