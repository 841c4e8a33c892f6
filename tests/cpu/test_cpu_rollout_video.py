"""The HF rollout of a vision model samples what the model says about its pixels; without Ray, fp32.

Tiny Qwen2.5-VL and Qwen3-VL with their processors, frames made by hand. Does not decode files (tests/recipes) and does
not train (`make demo-video`).
"""

import asyncio
from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("verl")

from PIL import Image  # noqa: E402
from verl.utils.tokenizer import build_multimodal_processor_inputs  # noqa: E402
from verl.workers.config import HFModelConfig, RolloutConfig  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402

from verl_prefix.cpu.server import HFServer  # noqa: E402
from verl_prefix.testing import write_tiny_model, write_tiny_vlm  # noqa: E402

GREEDY = {"temperature": 0.0, "logprobs": True}
VISUAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
Request = tuple[list[int], dict[str, Any], dict[str, torch.Tensor]]


def make_server(path: str) -> HFServer:
    config = RolloutConfig(
        name="hf", tensor_model_parallel_size=1, prompt_length=256, response_length=9, max_num_seqs=32, dtype="float32"
    )
    built = HFServer(config, HFModelConfig(path=path, override_config={"attn_implementation": "sdpa"}))
    with torch.no_grad():
        built.model.lm_head.weight.mul_(4.0)  # peaked, not uniform
    return built


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HFServer:
    return make_server(write_tiny_vlm(tmp_path_factory.mktemp("model"), family=request.param))


def video(seed: int, frames: int = 6, height: int = 16, width: int = 24) -> tuple[torch.Tensor, dict[str, Any]]:
    """Frames [T, 3, H, W] and their metadata, as qwen_vl_utils returns them."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (frames, 3, height, width), generator=generator).float()
    return pixels, {"fps": 8.0, "frames_indices": list(range(0, 4 * frames, 4)), "total_num_frames": 4 * frames}


def picture(seed: int) -> Image.Image:
    values = torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(values.numpy())


def request_of(server: HFServer, text: str, images: list | None = None, videos: list | None = None) -> Request:
    """Prompt tokens, what the agent loop sends with them, and the processor's pixels for the model's own forward."""
    media = [{"type": "image"} for _ in images or []] + [{"type": "video"} for _ in videos or []]
    messages = [{"role": "user", "content": [*media, {"type": "text", "text": text}]}]
    rendered = server.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    found = build_multimodal_processor_inputs(server.processor, text=[rendered], images=images, videos=videos)
    inputs = {name: value for name, value in found.items() if name.endswith("grid_thw") or "pixel" in name}
    if inputs:
        inputs["mm_token_type_ids"] = found["mm_token_type_ids"]
    return found["input_ids"][0].tolist(), {"image_data": images, "video_data": videos}, inputs


def ask(server: HFServer, requests: list[Request], **params: Any) -> list[TokenOutput]:
    """Send all requests at once and return their outputs in order."""
    server.seen.clear()

    async def gather() -> list[TokenOutput]:
        sent = (server.generate(ids, dict(params), request_id="", **media) for ids, media, _ in requests)
        return await asyncio.gather(*sent)

    return asyncio.run(gather())


@pytest.fixture
def mixed(server: HFServer) -> list[Request]:
    """Rows of several lengths; the first two have equal tokens and different pixels."""
    return [
        request_of(server, "what happens?", videos=[video(0)]),
        request_of(server, "what happens?", videos=[video(1)]),
        request_of(server, "no picture at all, but a longer question"),
        request_of(server, "which?", images=[picture(2)]),
        request_of(server, "compare", images=[picture(3), picture(4)], videos=[video(5, 4, 24, 16), video(6)]),
    ]


def full_log_probs(server: HFServer, request: Request, token_ids: list[int]) -> torch.Tensor:
    """Log-probs [S, V] from one forward without a cache; the response holds no visual token."""
    ids, _, inputs = request
    inputs = dict(inputs)
    if inputs:
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(token_ids)))
    with torch.no_grad():
        logits = server.model(torch.tensor([ids + token_ids]), **inputs).logits
    return logits[0, len(ids) - 1 : -1].log_softmax(-1)


def test_greedy_batch_equals_generate_of_each_prompt_alone(server: HFServer, mixed: list[Request]) -> None:
    for (ids, _, inputs), output in zip(mixed, ask(server, mixed, **GREEDY), strict=True):
        prompt = torch.tensor([ids])
        expected = server.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=9, pad_token_id=0,
            eos_token_id=list(server.eos_ids), **inputs,
        )  # fmt: skip
        assert output.token_ids == expected[0, len(ids) :].tolist()


def test_log_probs_are_those_of_a_full_forward_and_pixels_matter(server: HFServer, mixed: list[Request]) -> None:
    outputs = ask(server, mixed, logprobs=True)
    for request, output in zip(mixed, outputs, strict=True):
        tokens = torch.tensor(output.token_ids)[:, None]
        expected = full_log_probs(server, request, output.token_ids).gather(1, tokens)[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=5e-6)
    assert mixed[0][0] == mixed[1][0]
    other = full_log_probs(server, mixed[1], outputs[0].token_ids).gather(
        1, torch.tensor(outputs[0].token_ids)[:, None]
    )
    assert (other[:, 0] - torch.tensor(outputs[0].log_probs)).abs().max() > 1e-3


def test_a_group_shares_its_prefix_and_another_video_does_not_join_it(server: HFServer, mixed: list[Request]) -> None:
    rows: list[int] = []
    hook = server.model.model.language_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: rows.append(kwargs["inputs_embeds"].shape[0]), with_kwargs=True
    )
    tower: list[int] = []
    tower_hook = server.model.model.visual.register_forward_pre_hook(
        lambda _module, args, kwargs: tower.append((args[0] if args else kwargs["hidden_states"]).shape[0]),
        with_kwargs=True,
    )
    outputs = ask(server, [mixed[0]] * 3 + [mixed[1]] * 3, max_tokens=2, ignore_eos=True)
    hook.remove()
    tower_hook.remove()
    assert rows == [2, 6, 6]  # two prefixes, then six rows
    patches = mixed[0][2]["pixel_values_videos"].shape[0]
    assert tower == [2 * patches]
    assert len({tuple(output.token_ids) for output in outputs}) > 1


def test_the_same_requests_give_the_same_samples_alone_and_together(server: HFServer, mixed: list[Request]) -> None:
    together = [output.token_ids for output in ask(server, mixed)]
    assert together == [ask(server, [request])[0].token_ids for request in mixed]


def test_visual_tokens_are_never_sampled(server: HFServer, mixed: list[Request]) -> None:
    visual = server.processor.tokenizer.convert_tokens_to_ids(list(VISUAL))
    for request in mixed:
        log_probs = full_log_probs(server, request, list(range(40, 60)))
        assert log_probs[:, visual].max() < -30


def test_what_cannot_be_read_is_refused(server: HFServer, tmp_path: Any) -> None:
    ids, media, _ = request_of(server, "what happens?", videos=[video(0)])
    with pytest.raises(ValueError, match=r"reads text, images and videos only, and the request has \['audio_data'\]"):
        asyncio.run(server.generate(ids, {}, request_id="", audio_data=[b"x"]))
    text = make_server(write_tiny_model(tmp_path))
    with pytest.raises(ValueError, match="got images or videos, and the model has no processor"):
        asyncio.run(text.generate(ids, {}, request_id="", **media))
