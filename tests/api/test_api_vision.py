"""`response_log_probs` and `phased_update` on rows with images and videos, against HF's own forward of every whole row.

Models, rows and tolerance (float64, 1e-9) are those of test_vision; pixels come in as a processor has them.
"""

import functools

import pytest
import torch
from api_pixels import by_api, by_waves, together
from api_rows import as_accelerator_prepares, without_gradients
from families import float64_inside  # noqa: F401
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor
from vision_cases import FAMILIES, Case, paths  # noqa: F401

from verl_prefix import response_hidden_states, response_log_probs
from verl_prefix.api import pixels as api_pixels
from verl_prefix.models import vision
from verl_prefix.testing import write_tiny_vlm


def measured(case: Case, run) -> tuple[torch.Tensor, dict]:
    found = torch.cat(run())
    grads = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
    case.model.zero_grad()
    return found, grads


def error(ours: tuple, truth: tuple) -> float:
    assert ours[1].keys() == truth[1].keys()
    pairs = [(ours[0], truth[0]), *((ours[1][name], x) for name, x in truth[1].items())]
    return max(((a - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in pairs)


# What others have by themselves: models/test_vision.py has them all.
ONCE = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")
SOME = [family if family in ONCE else pytest.param(family, marks=pytest.mark.full) for family in FAMILIES]


@pytest.mark.parametrize("family", SOME)
def test_equals_the_models_own_forward(family, paths, float64_inside, monkeypatch):  # noqa: F811
    case = Case(paths[family])
    float64_inside(case.model)
    truth = measured(case, case.truth)
    assert any("visual" in name for name in truth[1])
    seen = []
    forward = type(case.model.model.visual).forward
    monkeypatch.setattr(
        type(case.model.model.visual), "forward",
        lambda tower, patches, *args, **kwargs: seen.append(len(patches)) or forward(tower, patches, *args, **kwargs),
    )  # fmt: skip
    assert error(measured(case, lambda: by_api(case)), truth) < 1e-9
    once = {tuple(p.tolist()): sum(len(x[n]) for n in x if n.startswith("pixel")) for p, x in
            zip(case.rollouts.prompts, case.pixels, strict=True)}  # fmt: skip
    assert seen == [sum(once.values())]
    assert error(measured(case, lambda: by_api(case, schedule="phased", max_tokens=60, wave_tokens=19)), truth) < 1e-9
    assert error(measured(case, lambda: by_waves(case)), truth) < 1e-9


def halved(module, args, output):
    output.logits = output.logits * 0.5


def test_lora_equals_hf(paths, float64_inside):  # noqa: F811
    peft = pytest.importorskip("peft")
    case = Case(paths["qwen2_5_vl"])
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "qkv"], init_lora_weights=False)
    case.model = peft.get_peft_model(case.model, config).double()
    float64_inside(case.model)
    truth = measured(case, case.truth)
    assert any("visual" in name for name in truth[1])
    assert error(measured(case, lambda: by_api(case)), truth) < 1e-9
    assert error(measured(case, lambda: by_waves(case)), truth) < 1e-9


def test_a_hook_that_changes_logits(paths, float64_inside):  # noqa: F811
    case = Case(paths["qwen3_vl"])
    float64_inside(case.model)
    plain = measured(case, case.truth)
    case.model.register_forward_hook(halved)
    truth = measured(case, case.truth)
    assert (truth[0] - plain[0]).norm() > 1e-3 * plain[0].norm()
    assert error(measured(case, lambda: by_api(case)), truth) < 1e-9
    assert error(measured(case, lambda: by_waves(case)), truth) < 1e-9


def test_a_forward_of_others_is_refused(paths):  # noqa: F811
    case = Case(paths["qwen3_vl"])
    forward = case.model.forward
    case.model.forward = lambda *args, **options: forward(*args, **options)
    with pytest.raises(RuntimeError, match="has a forward of test_api_vision.*use a forward hook instead"):
        by_api(case)


def hook(inner):
    inner.register_forward_hook(lambda module, args, output: output)


def pre_hook(inner):
    inner.register_forward_pre_hook(lambda module, args: args)


def forward(inner):
    inner.forward = functools.partial(lambda run, *args, **options: run(*args, **options), inner.forward)


@pytest.mark.parametrize("put", [hook, pre_hook, forward])
def test_what_others_put_around_tower_and_text_is_refused(put, paths):  # noqa: F811
    case = Case(paths["qwen2_5_vl"])
    put(case.model.model)
    args = case.rollouts.prompts, case.rollouts.responses
    for use in (response_log_probs, response_hidden_states):
        with pytest.raises(RuntimeError, match="Qwen2_5_VLModel has a hook or forward of test_api_vision.*whole rows"):
            use(case.model, *args, pixels=together(case.pixels))


def test_wrappers_of_a_forward_that_does_not_run_are_refused_outside_of_their_context(paths):  # noqa: F811
    case = Case(paths["qwen2_5_vl"], torch.float32)
    args = case.rollouts.prompts, case.rollouts.responses
    pixels = together(case.pixels)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        truth = [use(case.model, *args, pixels=pixels) for use in (response_log_probs, response_hidden_states)]
    as_accelerator_prepares(case.model)
    for use, found in zip((response_log_probs, response_hidden_states), truth, strict=True):
        with pytest.raises(RuntimeError, match="in a wrapper of accelerate.utils.operations.*accelerator.autocast"):
            use(case.model, *args, pixels=pixels)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(torch.cat(use(case.model, *args, pixels=pixels)), torch.cat(found))
        with pytest.raises(RuntimeError, match="in a wrapper of torch.utils._contextlib.*without their decorator"):
            use(without_gradients(Case(paths["qwen2_5_vl"]).model), *args, pixels=pixels)


def images_of_other_prompts(case, monkeypatch):
    case.pixels = [p | {"pixel_values": p["pixel_values"].flip(0)} if "pixel_values" in p else p for p in case.pixels]


def text_positions(case, monkeypatch):
    monkeypatch.setattr(
        "verl_prefix.api.rows.positions_of_row", lambda model, prompt, _, n: torch.arange(len(prompt) + n).expand(4, -1)
    )


@pytest.mark.parametrize("sabotage", [images_of_other_prompts, text_positions])
def test_broken_maths_is_far_off(sabotage, paths, monkeypatch):  # noqa: F811
    case = Case(paths["qwen3_vl"], torch.float32)
    truth = measured(case, case.truth)
    sabotage(case, monkeypatch)
    assert error(measured(case, lambda: by_api(case)), truth) > 100 * 5e-6


@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.startswith("glm")])  # of images alone
def test_a_processors_output_goes_in_as_it_comes(family, tmp_path):
    """Of two prompts, left padded, one with a picture and one with a clip at its own rate; per row and per group."""
    pytest.importorskip("torchvision")
    path = write_tiny_vlm(tmp_path / "model", family=family)
    processor = AutoProcessor.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    ).eval()
    picture = torch.randint(256, (3, 16, 32), dtype=torch.uint8)
    clip = torch.randint(256, (6, 3, 16, 16), dtype=torch.uint8)
    pads = (processor.image_token, processor.video_token)
    text = [f"what is <|vision_start|>{pad}<|vision_end|> the river" for pad in pads]
    options = dict(return_tensors="pt", padding=True, padding_side="left")
    if family == "qwen2_5_vl":
        options["videos_kwargs"] = dict(fps=4.0, do_sample_frames=False)
    else:
        options["video_metadata"] = [dict(total_num_frames=6, fps=4.0, frames_indices=list(range(6)))]
        options["do_sample_frames"] = False
    out = processor(text=text, images=[picture], videos=[clip], **options)
    responses = torch.randint(7, 40, (4, 5))
    rows = dict(prompts=out["input_ids"], prompt_mask=out["attention_mask"], pixels=out)
    ours = response_log_probs(
        model, **rows, responses=responses, response_mask=torch.ones_like(responses), groups=[0, 0, 1, 1]
    )
    for i, response in enumerate(responses):
        prompt, kind = i // 2, ("image", "video")[i // 2]
        own = {n: x for n, x in out.items() if n in vision.PIXEL_NAMES and (kind == "video") == ("video" in n)}
        if kind == "video" and "second_per_grid_ts" in out:
            own["second_per_grid_ts"] = out["second_per_grid_ts"]
        # Without its padding, which HF's recurrent layers read in a batch of one row.
        ids = torch.cat([out["input_ids"][prompt][out["attention_mask"][prompt].bool()], response])[None]
        kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **own).logits[0, -6:-1]
        truth = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        # HF's norms are fp32 inside.
        assert (ours[i] - truth).abs().max() < 1e-5, kind


def test_hidden_states_of_a_vision_model_give_its_logits(paths):  # noqa: F811
    case = Case(paths["qwen2_5_vl"], torch.float32)
    rows = case.rollouts
    args = dict(prompts=rows.prompts, responses=rows.responses, pixels=together(case.pixels))
    headless = AutoModel.from_config(case.model.config, attn_implementation="sdpa").float()
    headless.load_state_dict(case.model.model.state_dict())
    with torch.no_grad():
        states, log_probs = (f(case.model, **args) for f in (response_hidden_states, response_log_probs))
        assert torch.equal(torch.cat(response_hidden_states(headless, **args)), torch.cat(states))
        (text,) = response_hidden_states(headless, [[8, 9]], [[10, 11]])
        assert torch.allclose(text, headless(torch.tensor([[8, 9, 10, 11]])).last_hidden_state[0, 1:], atol=1e-5)
        for state, response, row in zip(states, rows.responses, log_probs, strict=True):
            logits = case.model.lm_head(state[:-1])
            assert torch.allclose(logits.log_softmax(-1).gather(-1, response[:, None])[:, 0], row, atol=1e-5)


def test_pixels_that_do_not_belong_to_the_prompts_are_named(paths):  # noqa: F811
    case = Case(paths["qwen3_vl"], torch.float32)
    rows, pixels = case.rollouts, together(case.pixels)

    def refused(message, **changes):
        args = dict(prompts=rows.prompts, responses=rows.responses, pixels=pixels) | changes
        with pytest.raises(ValueError, match=message):
            response_log_probs(case.model, **args)

    refused("pixels need both pixel_values and image_grid_thw", pixels={"pixel_values": pixels["pixel_values"]})
    refused("pixel_values has 7 patches, and image_grid_thw names", pixels=pixels | {"pixel_values": torch.zeros(7, 9)})
    refused(r"prompts\[\d\] ends with video token \d+ of all.*whole and in their order",
            pixels=pixels | {"video_grid_thw": pixels["video_grid_thw"].flip(0)})  # fmt: skip
    refused("image_grid_thw has .* images, and prompts have tokens for", prompts=[[1, 2]] * len(rows.prompts))
    refused(r"responses\[0\] has image tokens", responses=[[case.model.config.image_token_id]] * len(rows.prompts))
    with pytest.raises(ValueError, match="pixels are for qwen2_5_vl, qwen3_vl, .*, and this is a llama model"):
        api_pixels.pixels_of_prompts(type("C", (), dict(model_type="llama")), [], {})


def test_no_rows(paths):  # noqa: F811
    model = Case(paths["qwen2_5_vl"]).model
    assert response_log_probs(model, [], []) == response_hidden_states(model, [], []) == []


def prompt_with_a_clip(model, *frames_of_seconds: float) -> tuple[list[int], dict]:
    """A prompt of Qwen2.5-VL with a clip of three frames, as a processor has the pixels of one row per number of
    seconds between them."""
    config, n = model.config, len(frames_of_seconds)
    tower = config.vision_config
    patch = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    clip, grid = torch.randn(3 * 16, patch, dtype=torch.float64), torch.tensor([[3, 4, 4]])
    prompt = [8, config.vision_start_token_id, *[config.video_token_id] * 12, config.vision_end_token_id, 9, 10]
    pixels = dict(pixel_values_videos=clip.repeat(n, 1), video_grid_thw=grid.repeat(n, 1))
    return prompt, pixels | {"second_per_grid_ts": list(frames_of_seconds)}


def test_a_response_goes_on_behind_text_though_the_clip_before_it_ends_later(paths, float64_inside):  # noqa: F811
    case = Case(paths["qwen2_5_vl"])
    float64_inside(case.model)
    prompt, pixels = prompt_with_a_clip(case.model, 9.0)
    response = torch.tensor([11, 12, 13])
    with torch.no_grad():
        (ours,) = response_log_probs(case.model, [prompt], [response], pixels=pixels)
        logits = case.whole(torch.cat([torch.tensor(prompt), response]), pixels)[0, -4:-1]
    assert torch.allclose(ours, logits.log_softmax(-1).gather(-1, response[:, None])[:, 0], rtol=0, atol=1e-9)


def test_clips_with_other_times_do_not_share(paths):  # noqa: F811
    """Same tokens, same pixels, another `second_per_grid_ts`: other positions."""
    model = Case(paths["qwen2_5_vl"]).model

    def log_probs(*seconds):
        torch.manual_seed(0)
        prompt, pixels = prompt_with_a_clip(model, *seconds)
        args = [prompt] * len(seconds), [[11, 12, 13]] * len(seconds)
        with torch.no_grad():
            return response_log_probs(model, *args, pixels=pixels)

    with pytest.warns(UserWarning, match="no two of 2 rows have the same prompt"):
        both = log_probs(1.0, 4.0)
    assert torch.allclose(both[0], log_probs(1.0)[0], atol=1e-9)
    assert torch.allclose(both[1], log_probs(4.0)[0], atol=1e-9)
    assert not torch.allclose(*both, rtol=0, atol=1e-6)
