"""`response_hidden_states` under heads of one's own, against Hugging Face's value and reward models on whole rows.

A value per response token and a reward behind the last one, in one loss; float64 1e-9 on both and on every gradient.
"""

import pytest
import torch
from api_rows import (
    as_accelerator_prepares,
    batch,
    build,
    float64_norm,  # noqa: F401
    grads,
    inputs,
    lora,
    no_phase_c,
    padded,
    without_gradients,
)
from transformers import LlamaForSequenceClassification, LlamaForTokenClassification, LlamaModel

from verl_prefix import phased_update, response_hidden_states, response_log_probs


@pytest.fixture
def rows():
    return batch()


def model_of(kind, dtype=torch.float64):
    config = build().config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(1)
    return kind(config).to(dtype).eval()


def loss(values, rewards, rows) -> torch.Tensor:
    """Every value and every reward counts, by weights of its own."""
    pairs = zip(values, rows.weights, strict=True)
    return sum((v * w).sum() for v, w in pairs) + (torch.stack(rewards) ** 2).sum()


def by_hf(model, rows) -> tuple[list, list, dict]:
    """The value before each response token, as verl's critic has it, and the reward at the last token."""
    values, rewards = [], []
    for prompt, response in zip(rows.prompts, rows.responses, strict=True):
        scores = model(torch.cat([prompt, response])[None]).logits[0, :, 0]
        values.append(scores[len(prompt) - 1 : -1])
        rewards.append(scores[-1])
    loss(values, rewards, rows).backward()
    return values, rewards, grads(model)


def states_of(model, rows, form, **options) -> list[torch.Tensor]:
    states = response_hidden_states(model, **inputs(form, rows), **options)
    if form != "padded":
        return states
    lens = [len(response) + 1 for response in rows.responses]
    assert states.shape[:2] == (len(lens), padded(rows.responses, False)[0].shape[1] + 1)
    assert not any(row[n:].any() for row, n in zip(states, lens, strict=True))
    return [row[:n] for row, n in zip(states, lens, strict=True)]


def by_us(model, rows, form="tensors", **options) -> tuple[list, list, dict]:
    scores = [model.score(row)[:, 0] for row in states_of(model, rows, form, **options)]
    values, rewards = [row[:-1] for row in scores], [row[-1] for row in scores]
    loss(values, rewards, rows).backward()
    return values, rewards, grads(model)


def error(ours, truth) -> float:
    assert ours[2].keys() == truth[2].keys()
    pairs = [(torch.cat(ours[0]), torch.cat(truth[0])), (torch.stack(ours[1]), torch.stack(truth[1]))]
    pairs += [(ours[2][name], x) for name, x in truth[2].items()]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


OPTIONS = {
    "packed": dict(),
    "padded": dict(form="padded"),
    "phased": dict(schedule="phased", wave_tokens=12),
    "phased, padded, sets of groups": dict(form="padded", schedule="phased", max_tokens=60, wave_tokens=19),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_rewards_are_those_of_whole_rows(options, rows):
    model = model_of(LlamaForTokenClassification)
    assert error(by_us(model, rows, **options), by_hf(model, rows)) < 1e-9


def test_checkpointed_in_waves(rows):
    model = model_of(LlamaForTokenClassification)
    truth = by_hf(model, rows)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert model.dropout.p > 0, "of the head, which is ours here"
    assert error(by_us(model, rows, wave_tokens=12), truth) < 1e-9


def test_dropout_is_refused_where_it_runs(rows):
    model = model_of(LlamaForTokenClassification).train()
    model.model.layers[1].mlp.act_fn = torch.nn.Dropout(0.1)
    message = r"layers.1.mlp.act_fn drops out with p=0.1.*or call model.eval\(\), or call the model on whole rows"
    with pytest.raises(ValueError, match=message):
        response_hidden_states(model, rows.prompts, rows.responses)
    assert len(response_hidden_states(model.eval(), rows.prompts, rows.responses)) == len(rows.responses)
    model.model.layers.train()
    with pytest.raises(ValueError, match=message):
        response_hidden_states(model, rows.prompts, rows.responses)


@pytest.mark.parametrize("change", [lambda model: model, lora])
@pytest.mark.parametrize("wrapped", [as_accelerator_prepares, without_gradients])
def test_wrappers_of_the_models_forward_are_refused_outside_of_their_context(wrapped, change, rows):
    model = change(build(torch.float32)).float()
    args = rows.prompts, rows.responses
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        truth = torch.cat(response_hidden_states(model, *args))
    wrapped(model)
    with pytest.raises(RuntimeError, match=f"{type(model).__name__} has a forward in a wrapper of .*autocast instead"):
        response_hidden_states(model, *args)
    if wrapped is as_accelerator_prepares:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(torch.cat(response_hidden_states(model, *args)), truth)


@pytest.mark.parametrize("change", [lambda model: model, lora])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_on_a_forward_that_does_not_run_are_refused(kind, change, rows):
    model, seen, args = change(build()), [], (rows.prompts, rows.responses)
    getattr(model.get_decoder(), kind)(lambda *_: seen.append(1))
    response_hidden_states(model, *args)
    response_hidden_states(model.get_decoder(), *args)
    assert len(seen) == 2
    getattr(model, kind)(lambda *_: None)
    with pytest.raises(RuntimeError, match="has a hook of test_api_hidden.*from the LlamaModel in it.*put it on that"):
        response_hidden_states(model, *args)


def test_a_reward_model_of_hugging_face(rows):
    """Which reads the last token that is not its padding token."""
    model = model_of(LlamaForSequenceClassification)
    whole = [torch.cat(pair) for pair in zip(rows.prompts, rows.responses, strict=True)]
    model.config.pad_token_id = next(token for token in range(97) if all(token != row[-1] for row in whole))
    with torch.no_grad():
        states = response_hidden_states(model, rows.prompts, rows.responses)
        ours = torch.stack([model.score(row[-1])[0] for row in states])
        truth = torch.stack([model(row[None]).logits[0, 0] for row in whole])
    assert (ours - truth).norm() < 1e-9 * truth.norm()


def test_a_model_without_head_and_one_with_lm_head(rows):
    whole = build()
    bare = LlamaModel(whole.config).double()
    bare.load_state_dict(whole.model.state_dict())
    with torch.no_grad():
        ours = [torch.cat(response_hidden_states(model, rows.prompts, rows.responses)) for model in (bare, whole)]
        truth = [
            bare(torch.cat([p, r])[None]).last_hidden_state[0, len(p) - 1 :]
            for p, r in zip(rows.prompts, rows.responses, strict=True)
        ]
    assert torch.equal(*ours) and (ours[0] - torch.cat(truth)).norm() < 1e-9 * ours[0].norm()


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForTokenClassification, LlamaForSequenceClassification])
def test_log_probs_of_a_model_without_lm_head_name_the_call_that_takes_it(kind, rows):
    model = model_of(kind)
    message = f"model is a {kind.__name__}, which has no lm_head.*or call response_hidden_states"
    with pytest.raises(TypeError, match=message):
        response_log_probs(model, rows.prompts, rows.responses)
    with pytest.raises(TypeError, match=message), phased_update(model, rows.prompts, rows.responses):
        pass


def test_a_left_padded_response_keeps_its_places(rows):
    model = build()
    (prompts, prompt_mask), (ids, mask) = padded(rows.prompts, True), padded(rows.responses, True)
    with torch.no_grad():
        states = response_hidden_states(model, prompts, ids, prompt_mask=prompt_mask, response_mask=mask)
        apart = response_hidden_states(model, rows.prompts, rows.responses)
    for row, own in zip(states, apart, strict=True):
        assert torch.equal(row[row.any(-1)], own)
        assert len(own) == 1 or torch.equal(row[-len(own) :], own)


def test_broken_maths_is_far_off(rows, monkeypatch):
    model = model_of(LlamaForTokenClassification)
    truth = by_hf(model, rows)
    no_phase_c(monkeypatch)
    assert error(by_us(model, rows, **OPTIONS["phased"]), truth) > 100 * 5e-6
