"""`response_log_probs(schedule="phased")`, whose backward runs the waves, against HF rows and `phased_update`.

Tolerances and models are those of test_api.
"""

import pytest
import torch
from api_rows import (  # noqa: F401
    BOUNDS,
    TEMPERATURE,
    TOLERANCE,
    batch,
    build,
    by_hf,
    error,
    float64_norm,
    grads,
    inputs,
    lora,
    no_phase_c,
    peak_bytes,
    pre_hook,
    prefix_detached,
    run_phased,
    suffix_share_of_prefix_gradient_lost,
    unpadded,
    weighted,
)

from verl_prefix import phased_update, response_log_probs
from verl_prefix.api import recompute
from verl_prefix.api.rows import LogProbs, split_rows


def log_probs(model, rows, form="tensors", **options):
    options = dict(temperature=TEMPERATURE, return_entropy=True, schedule="phased") | options
    found = response_log_probs(model, **inputs(form, rows), **options)
    return [unpadded(x, rows.responses) for x in found] if options["return_entropy"] else found


def run(model, rows, form="tensors", **options):
    found = log_probs(model, rows, form, **options)
    assert all(p.grad is None for p in model.parameters())
    weighted(*found, rows.weights).backward()
    return *([x.detach() for x in column] for column in found), grads(model)


@pytest.mark.parametrize(
    ("form", "dtype"), [("padded", torch.float64), ("groups", torch.float64), ("ints", torch.float32)]
)
def test_equals_hf(form, dtype):
    rows = batch()
    ours = run(build(dtype), rows, form, wave_tokens=12)
    assert ours[0][0].dtype == dtype
    assert error(ours, by_hf(build(), rows)) < TOLERANCE[dtype]


@pytest.mark.parametrize("bounds", [x for x in BOUNDS if x != "offload"])
def test_memory_bounds_change_nothing(bounds):
    model, rows = build(), batch()
    ours = run(model, rows, "padded", **BOUNDS[bounds])
    assert error(ours, by_hf(model, rows)) < 1e-9
    assert error(ours, run_phased(model, rows, **BOUNDS[bounds])) < 1e-9


@pytest.mark.parametrize("change", [lora, pre_hook], ids=["lora", "lm_head hook"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_checkpointing_adapters_and_hooks_equal_hf(change, checkpointed):
    model, rows = change(build()).train(), batch()
    truth = by_hf(model, rows)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert error(run(model, rows, wave_tokens=12), truth) < 1e-9


def test_tied_embeddings_and_frozen_layers_equal_hf():
    model, rows = build(tie_word_embeddings=True), batch()
    model.model.layers[0].requires_grad_(False)
    assert error(run(model, rows, wave_tokens=12), by_hf(model, rows)) < 1e-9


def test_a_loss_of_the_whole_batch_that_no_wave_knows():
    """A softmax over all rows, squared: the gradient of a token depends on every other row."""

    def loss(found):
        return (torch.stack([x.sum() for x in found if len(x)]).softmax(0) ** 2).sum() * 1e3

    model, rows = build(), batch()
    loss(log_probs(model, rows, return_entropy=False, wave_tokens=12)).backward()
    ours = grads(model)
    loss(log_probs(model, rows, return_entropy=False, schedule="packed")).backward()
    for name, truth in grads(model).items():
        assert (ours[name] - truth).norm() / truth.norm() < 1e-9, name


def test_the_result_is_a_tensor_like_any_other():
    """Two calls in one loss, `torch.autograd.grad`, and hooks of parameters, which see whole gradients, once."""
    model, rows = build(), batch()
    weight = model.model.layers[1].mlp.up_proj.weight

    def loss(schedule):
        options = dict(return_entropy=False, schedule=schedule)
        first, second = (log_probs(model, rows, temperature=t, **options) for t in (1.0, 2.0))
        return sum((a * w + b**2).sum() for a, b, w in zip(first, second, rows.weights, strict=True)) + weight.sum()

    found = [torch.autograd.grad(loss(schedule), weight)[0] for schedule in ("phased", "packed")]
    assert all(p.grad is None for p in model.parameters())
    assert (found[0] - found[1]).norm() / found[1].norm() < 1e-9

    seen = []
    weight.register_hook(lambda grad: seen.append(grad) or 3 * grad)
    weight.grad = torch.ones_like(weight)
    log_probs(model, rows, return_entropy=False)[0].sum().backward()
    assert len(seen) == 1 and torch.equal(weight.grad, 1 + 3 * seen[0])


def test_autocast_holds_in_backward_too():
    model, rows = build(torch.float32), batch()
    options = dict(**inputs("tensors", rows), wave_tokens=12)
    weights = [w.float() for w in rows.weights]
    with torch.autocast("cpu", torch.bfloat16):
        found = response_log_probs(model, **options, schedule="phased")
    sum((x * w).sum() for x, w in zip(found, weights, strict=True)).backward()
    ours = grads(model)
    with torch.autocast("cpu", torch.bfloat16), phased_update(model, **options) as waves:
        for wave in waves:
            sum((x * weights[row]).sum() for row, x in zip(wave.rows, wave.log_probs, strict=True)).backward()
    for name, truth in grads(model).items():
        assert torch.equal(ours[name], truth), name


def test_memory_is_that_of_waves():
    """Peak of forward and backward over 16 rows of 48 tokens: one graph holds all of them."""
    rows = batch([(48, [48] * 16)])

    def peak(**options):
        model = build(torch.float32, num_hidden_layers=4)
        return peak_bytes(
            lambda: sum(x.sum() for x in log_probs(model, rows, return_entropy=False, **options)).backward()
        )

    assert peak(wave_tokens=48) < 0.4 * peak(schedule="packed")


def test_auto_is_phased_where_one_graph_is_refused():
    model, rows = build().train(), batch()
    args = inputs("tensors", rows)

    def is_phased(**options):
        node = response_log_probs(model, **args, **options)[0].grad_fn
        return "_PhasedOutputs" in str(node.next_functions[0][0].next_functions)

    assert not is_phased() and not is_phased(max_tokens=10**4) and is_phased(max_tokens=60)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert is_phased()


def test_nothing_to_compute_and_nothing_to_train():
    model, rows = build(), batch()
    assert [len(x) for x in response_log_probs(model, [[1, 2]] * 2, [[], []], schedule="phased")] == [0, 0]
    with torch.no_grad():
        assert not log_probs(model, rows, return_entropy=False)[0].requires_grad
    assert not log_probs(model.requires_grad_(False), rows, return_entropy=False)[0].requires_grad


# Wrong on purpose: each must miss by 100 fp32 tolerances at least.


def incoming_gradient_one_token_late(monkeypatch):
    backward = recompute._PhasedOutputs.backward
    monkeypatch.setattr(
        recompute._PhasedOutputs, "backward", staticmethod(lambda ctx, grad: backward(ctx, grad.roll(1, 0)))
    )


def rows_in_another_order(monkeypatch):
    def split(outputs, lens):  # in the call; in backward as it is
        return split_rows(outputs, dict(reversed(lens.items())) if torch.is_grad_enabled() else lens)

    monkeypatch.setattr(recompute, "split_rows", split)


@pytest.mark.parametrize(
    "sabotage",
    [
        prefix_detached, no_phase_c, suffix_share_of_prefix_gradient_lost, incoming_gradient_one_token_late,
        rows_in_another_order,
    ],
)  # fmt: skip
def test_broken_maths_is_far_off(sabotage, monkeypatch):
    model, rows = build(), batch([(23, [9, 3, 5]), (41, [3, 1, 11])])
    truth = by_hf(model, rows)
    sabotage(monkeypatch)
    found = log_probs(model, rows, wave_tokens=12, attention="cpu")
    weighted(*found, rows.weights).backward()
    ours = grads(model)
    assert max(((ours[name] - x).norm() / x.norm()).item() for name, x in truth[2].items()) > 100 * 5e-6


# What cannot be kept is said.


def test_bad_use_says_what_to_do():
    model, rows = build(), batch()
    args = inputs("tensors", rows)
    with pytest.raises(ValueError, match="schedule='waves': pass 'auto', 'packed' .* or 'phased'"):
        response_log_probs(model, **args, schedule="waves")
    with pytest.raises(ValueError, match="wave_tokens=9 leaves nothing of max_tokens=9"):
        response_log_probs(model, **args, schedule="phased", max_tokens=9, wave_tokens=9)
    found = response_log_probs(model, **args, schedule="phased")
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"a parameter was changed.*Call optimizer.step\(\).* after the backward"):
        found[0].sum().backward()


def two_adapters(model, zero=False):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=zero)
    model = peft.get_peft_model(model, config)
    model.add_adapter("other", config)
    return model.double()


def frozen_weights_changed():
    model = lora(build())
    return model, lambda: [p.data.mul_(1.1) for p in model.parameters() if not p.requires_grad]


def adapter_switched():
    model = two_adapters(build())
    return model, lambda: model.set_adapter("other")


def adapter_switched_before_either_was_trained():
    """Both are zero: outputs are the same, and gradients would go to the wrong one."""
    model = two_adapters(build(), zero=True)
    return model, lambda: model.set_adapter("other")


def adapter_disabled():
    model = lora(build())
    return model, lambda: model.base_model.disable_adapter_layers()


def adapter_weights_set_through_data():
    model = lora(build())
    return model, lambda: [p.data.neg_() for name, p in model.named_parameters() if "lora_A" in name]


def training_with_dropout():
    model = build()
    model.model.layers[1].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
    return model.eval(), lambda: model.train()


CHANGES = [
    frozen_weights_changed, adapter_switched, adapter_switched_before_either_was_trained, adapter_disabled,
    adapter_weights_set_through_data, training_with_dropout,
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_before_the_backward_is_an_error(change, dtype):
    (model, act), rows = change(), batch()
    model.to(dtype)
    found = response_log_probs(model, **inputs("tensors", rows), schedule="phased", wave_tokens=12)
    act()
    with pytest.raises(RuntimeError, match="runs the model again, and it is not as it was.* after the backward"):
        torch.cat(found).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_what_changes_no_output_is_no_error():
    """train() without dropout, an adapter disabled for a reference and enabled again."""
    model, rows = two_adapters(build()).eval(), batch()
    found = log_probs(model, rows, wave_tokens=12)
    with torch.no_grad(), model.disable_adapter():
        log_probs(model, rows, wave_tokens=12)
    model.train()
    weighted(*found, rows.weights).backward()
    ours = grads(model)
    truth = by_hf(model, rows)[2]
    assert truth.keys() <= ours.keys()
    assert max(((ours[name] - x).norm() / x.norm()).item() for name, x in truth.items()) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_no_error(dtype, monkeypatch):
    """As of sums in another order: every logit is off by about its last digit."""
    model, rows = build(dtype), batch()
    found = log_probs(model, rows, wave_tokens=12)
    apply, eps = LogProbs.apply, torch.finfo(dtype).eps
    seen = []

    def noisy(logits, *args):
        clean = apply(logits, *args)
        outputs = clean
        while torch.equal(outputs, clean):  # of one token noise may round to nothing
            outputs = apply(logits * (1 + eps * torch.randn_like(logits)), *args)
        seen.append((outputs - clean).detach().square().mean().sqrt().item())
        return outputs

    monkeypatch.setattr(LogProbs, "apply", noisy)
    sum(x.sum() for x in found[0]).backward()
    assert model.lm_head.weight.grad is not None and min(seen) > eps / 10
