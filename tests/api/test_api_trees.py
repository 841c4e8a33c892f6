"""The standalone API on rows that share more or less than a prompt, against HF's own forward of every whole row."""

import itertools
import logging

import pytest
import torch
from api_pixels import together
from api_rows import build, by_hf, error, float64_norm, grads, unpadded, weighted  # noqa: F401
from dialogues import ROWS, VOCAB, rollouts, thinking_kept, thinking_stripped
from families import float64_inside  # noqa: F401
from transformers import AutoTokenizer
from vision_cases import FAMILIES, Turns, paths  # noqa: F401

from verl_prefix import message_ends, phased_update, response_hidden_states, response_log_probs
from verl_prefix.core.plan import PhasedPass
from verl_prefix.core.planning import make_plan
from verl_prefix.models.messages import end_tokens
from verl_prefix.testing import write_tiny_model
from verl_prefix.testing.rollouts import flatten

OPTIONS = dict(temperature=0.7, return_entropy=True)


def forks_of(rows) -> list[list[int]]:
    """Those by which rows are cut where `dialogues` cuts them."""
    return [[cut + 1 for cut in cuts if cut + 1 <= len(p) + len(r)]
            for cuts, p, r in zip(rows.cuts, rows.prompts, rows.responses, strict=True)]  # fmt: skip


def computed_tokens(line: str) -> int:
    """Of the log line that says what is shared."""
    return int(line.split(": ")[1].split()[0])


def run(model, rows, **options):
    found = response_log_probs(model, rows.prompts, rows.responses, forks=forks_of(rows), **OPTIONS, **options)
    weighted(*found, rows.weights).backward()
    return *([x.detach() for x in column] for column in found), grads(model)


def run_waves(model, rows, num=None, **options):
    """num: of waves, after which the caller asks for no other; None: until there are no more."""
    found = {}
    with phased_update(model, rows.prompts, rows.responses, forks=forks_of(rows), **OPTIONS, **options) as waves:
        for wave in itertools.islice(waves, num):
            weighted(wave.log_probs, wave.entropy, [rows.weights[row] for row in wave.rows]).backward()
            found |= {row: (a, b) for row, a, b in zip(wave.rows, wave.log_probs, wave.entropy, strict=True)}
    empty = torch.zeros(0, dtype=torch.float64)
    columns = [[found.get(row, (empty, empty))[i].detach() for row in range(len(rows.prompts))] for i in (0, 1)]
    return *columns, grads(model)


@pytest.mark.parametrize("rows", ROWS)
def test_trees_equal_hf(rows):
    model, rows = build(vocab_size=VOCAB), rollouts(rows)
    truth = by_hf(model, rows)
    assert error(run(model, rows, schedule="packed"), truth) < 1e-9
    assert error(run(model, rows, schedule="phased", max_tokens=90, wave_tokens=20), truth) < 1e-9
    assert error(run_waves(model, rows, wave_tokens=20), truth) < 1e-9
    assert error(run_waves(model, rows, max_tokens=90, wave_tokens=20, offload=True), truth) < 1e-9


@pytest.mark.parametrize("rows", [thinking_stripped, thinking_kept])
def test_no_gradient_is_lost_where_nobody_asks_for_a_wave_after_the_last(rows):
    """As by `zip(losses, waves)`. Phases C of passes that nest in one another follow the last wave, too."""
    model, rows = build(vocab_size=VOCAB), rollouts(rows)
    plan = make_plan(flatten(rows, torch.device("cpu"))[2], 40, "phased", wave_tokens=9)
    assert isinstance(plan.passes[-1].nested[-1], PhasedPass)
    ours = run_waves(model, rows, num=plan.num_losses, max_tokens=40, wave_tokens=9)
    assert error(ours, by_hf(model, rows)) < 1e-9


@pytest.mark.parametrize("ends", [False, True], ids=["", "ends of rows"])
@pytest.mark.parametrize("rows", [thinking_stripped, thinking_kept])
def test_hidden_states_equal_hf(rows, ends, caplog):
    """ends: rows may also part behind their own ends."""
    model, rows = build(vocab_size=VOCAB), rollouts(rows)
    whole = zip(forks_of(rows), rows.prompts, rows.responses, strict=True)
    forks = [[*cuts, *[len(p) + len(r)] * ends] for cuts, p, r in whole]
    with caplog.at_level(logging.INFO, logger="verl_prefix"):
        response_log_probs(model, rows.prompts, rows.responses, forks=forks)
        ours = response_hidden_states(model, rows.prompts, rows.responses, forks=forks)
    tokens = [computed_tokens(line) for line in caplog.messages if "trees" in line]
    assert tokens[1] == tokens[0] + len(ours), "of each row the last token more"
    for prompt, response, states in zip(rows.prompts, rows.responses, ours, strict=True):
        whole = model.model(torch.cat([prompt, response])[None]).last_hidden_state[0, len(prompt) - 1 :]
        assert torch.allclose(states, whole, rtol=0, atol=1e-9)


def test_what_is_shared_is_said(caplog):
    model, rows = build(vocab_size=VOCAB), rollouts(thinking_kept)
    with caplog.at_level(logging.INFO, logger="verl_prefix"), torch.no_grad():
        response_log_probs(model, rows.prompts, rows.responses, forks=forks_of(rows))
    # Two sessions share the first message; all else of a session is its last row.
    lens = [len(p) + len(r) - 1 for p, r in zip(rows.prompts, rows.responses, strict=True)]
    (line,) = [record.getMessage() for record in caplog.records if "trees" in record.getMessage()]
    computed = computed_tokens(line)
    assert line == f"8 rows in 1 trees: {computed} of {sum(lens)} tokens are computed"
    assert max(lens) < computed < 2 * max(lens)


def test_groups_do_not_share():
    model, rows = build(vocab_size=VOCAB), rollouts(thinking_stripped)
    with pytest.warns(UserWarning, match="nothing is shared"):
        response_log_probs(model, rows.prompts, rows.responses, forks=forks_of(rows), groups=range(len(rows.prompts)))


@pytest.mark.parametrize(
    ("forks", "message"),
    [
        ([[1]], "forks of 1 rows, and there are 9 responses"),
        ([[0]] + [[]] * 8, r"forks\[0\] has 0, and the row has"),
        ([[]] * 8 + [[10**6]], r"forks\[8\] has 1000000"),
    ],
)
def test_forks_of_other_rows_are_refused(forks, message):
    model, rows = build(vocab_size=VOCAB), rollouts(thinking_stripped)
    with pytest.raises(ValueError, match=message):
        response_log_probs(model, rows.prompts, rows.responses, forks=forks)


@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=pytest.mark.more if x.endswith("_moe") else ()) for x in FAMILIES]
)
def test_a_turn_s_images_are_seen_once(family, paths, float64_inside, monkeypatch):  # noqa: F811
    case = Turns(paths[family])
    float64_inside(case.model)
    forks = [[cut + 1 for cut in cuts] for cuts in case.cuts]

    def measured(run):
        case.model.zero_grad()
        found = torch.cat([x.detach() for x in run()])
        return found, {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}

    def ours(**options):
        rows = case.rollouts
        found = response_log_probs(
            case.model, rows.prompts, rows.responses, pixels=together(case.pixels), forks=forks, **options
        )
        sum((a * w).sum() for a, w in zip(found, rows.weights, strict=True)).backward()
        return found

    truth = measured(case.truth)
    seen = []
    forward = type(case.model.model.visual).forward
    monkeypatch.setattr(
        type(case.model.model.visual), "forward",
        lambda tower, patches, *args, **kwargs: seen.append(len(patches)) or forward(tower, patches, *args, **kwargs),
    )  # fmt: skip
    for options in (dict(schedule="packed"), dict(schedule="phased", wave_tokens=12)):
        seen.clear()
        found = measured(lambda options=options: ours(**options))
        assert found[1].keys() == truth[1].keys()
        pairs = [(found[0], truth[0]), *((found[1][name], x) for name, x in truth[1].items())]
        assert max(((a - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in pairs) < 1e-9
        shown = {bytes(patch.numpy().tobytes()) for row in case.pixels for patch in row["pixel_values"]}
        assert max(seen) == len(shown), "a patch for each that is different"


def test_a_cut_inside_an_image_is_refused(paths):  # noqa: F811
    case = Turns(paths["qwen3_vl"])
    forks = [[8]] * len(case.rollouts.prompts)  # of the question, whose image begins behind four tokens and a mark
    with pytest.raises(ValueError, match="cut inside an image"):
        response_log_probs(
            case.model, case.rollouts.prompts, case.rollouts.responses, pixels=together(case.pixels), forks=forks
        )


def test_images_that_differ_are_not_shared(paths):  # noqa: F811
    """The same tokens, and other pixels in one of two sessions."""
    case = Turns(paths["qwen3_vl"])
    forks = [[cut + 1 for cut in cuts] for cuts in case.cuts]
    rows = case.rollouts

    def log_probs():
        with torch.no_grad():
            return response_log_probs(
                case.model, rows.prompts, rows.responses, pixels=together(case.pixels), forks=forks
            )

    before = log_probs()
    case.pixels[0] = case.pixels[0] | {"pixel_values": case.pixels[0]["pixel_values"] + 0.5}
    after = log_probs()
    with torch.no_grad():
        (truth,) = case.truth()[:1]
    assert torch.allclose(after[0], truth, rtol=0, atol=1e-9) and (before[0] - after[0]).abs().max() > 1e-4
    assert all(torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(before[1:], after[1:], strict=True))


def test_messages_end_where_the_template_says(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model(tmp_path / "model"))
    chat = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "that"}]
    ids = tokenizer.apply_chat_template([*chat, *chat[:1]], add_generation_prompt=True, return_dict=False)
    (ends,) = message_ends(tokenizer, [ids])
    texts = [tokenizer.decode(ids[:end]) for end in ends]
    assert [text[-14:] for text in texts] == ["what<|im_end|>", "that<|im_end|>", "what<|im_end|>"]


TEMPLATES = {
    "llama 3": ("<|head|>{{ m['role'] }}<|/head|>\n\n{{ m['content'] }}<|eot|>", ["<|eot|>"]),
    "gemma": ("<start>{{ m['role'] }}\n{{ m['content'] }}<end>\n", ["<end>"]),
    "mistral": (
        "{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]{% else %} {{ m['content'] }}</s>{% endif %}",
        ["[/INST]", "</s>"],
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_ends_of_messages_of_other_templates(tmp_path, name):
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model(tmp_path / "model"))
    message, ends = TEMPLATES[name]
    special = ["<|head|>", "<|/head|>", "<|eot|>", "<start>", "<end>", "[INST]", "[/INST]", "</s>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = "{% for m in messages %}" + message + "{% endfor %}"
    assert {*tokenizer.convert_ids_to_tokens(end_tokens(tokenizer))} == {*ends, tokenizer.eos_token}


@pytest.mark.parametrize(
    ("template", "warns"),
    [
        ("{{ raise_exception('a system message comes first') }}", True),
        ("{{ messages[9].content.missing }}", True),
        ("<|im_start|>{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", False),
        ("<|im_start|>user{% for m in messages[1:] %}{{ m['content'] }}{% endfor %}", False),
    ],
    ids=["raises", "fails", "changes contents", "drops a message"],
)
def test_a_template_without_messages_to_find_leaves_the_end_of_text(tmp_path, caplog, template, warns):
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model(tmp_path / "model"))
    tokenizer.chat_template = template
    assert end_tokens(tokenizer) == {tokenizer.eos_token_id}
    assert ["prefix.trees" in line and "chat_template" in line for line in caplog.messages] == [True] * warns
