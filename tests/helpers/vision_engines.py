"""Engines of verl and ours on tiny batches with images and video."""

import contextlib
import copy
import functools
from collections import Counter

import engines
import torch

from verl_prefix.api.pixels import positions_of_row
from verl_prefix.models import verls_vision, vision
from verl_prefix.testing import visual_prompt

# Every prompt as (what it consists of, response lengths, uid): numbers are text tokens, pairs and triples are the grids
# of an image (height, width) and a video (frames, height, width) in patches, of which four make a token.
IMAGE = ([5, (4, 8), 7], [9, 4, 6, 11], "image")
VIDEO = ([3, (3, 4, 4), 6], [5, 12, 3], "video")
BOTH = ([4, (4, 4), 2, (2, 4, 8), 3, (8, 4), 5], [7, 2, 8], "both")
TEXT = ([21], [6, 3, 10], "text")
ONE = ([6, (4, 4), 2], [3], "one")
BATCHES = {
    "mixed": {0: [IMAGE, TEXT, VIDEO, BOTH], 1: [VIDEO, BOTH, ([17], [8, 5], "other text"), ONE]},
    # verl runs the tower once for images and once for videos: ranks that differ in that would wait for each other.
    "text_rank": {0: [IMAGE, TEXT], 1: [TEXT, ([13], [4, 9], "other text")]},
    "text": {0: [TEXT, ([9], [5, 5, 8, 2], "more text")], 1: [([13], [4, 9], "other text")]},
    "one_text_row": {0: [([5, (4, 8), 7], [9, 4, 6, 11, 3, 8, 5], "image")], 1: [([13], [4], "text")]},
    "kinds": {0: [(BOTH[0], [7, 2, 8, 5], "both")], 1: [IMAGE]},
    # Of these, every second row.
    "scattered": {0: [IMAGE, TEXT, VIDEO, BOTH], 1: [IMAGE, TEXT, VIDEO, BOTH]},
}  # fmt: skip


def seen_by(config, parts: list) -> list:
    """The parts of a prompt (see `visual_prompt`); for GLM-V, of which images alone are supported, a video is an
    image of as many patches."""
    if not config.model_type.startswith("glm"):
        return parts
    return [(part[0] * part[1], part[2]) if isinstance(part, tuple) and len(part) == 3 else part for part in parts]


def _nested(tensors):
    return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)


@functools.cache
def _meta_model(path: str):
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path))


def _turns(config, generator: torch.Generator) -> list[tuple[str, torch.Tensor, torch.Tensor, dict, int]]:
    """(uid, prompt, response, pixels, session) of a row per turn, whose messages end in token 2: two sessions of three
    turns per uid, each turn with an image more, and the next prompt behind its response."""
    end, header, rows = torch.tensor([2]), torch.tensor([8, 9]), []

    def some(length: int) -> torch.Tensor:
        return torch.cat([torch.randint(10, config.text_config.vocab_size, (length,), generator=generator), end])

    for uid in "ab":
        text, pixels = visual_prompt([4, (4, 8), 3], config, generator)
        question = torch.cat([text, end])
        for session in range(2):
            history, images = question, [pixels]
            for turn in range(3):
                prompt, response = torch.cat([history, header]), some(5 + turn)
                shown = {name: torch.cat([one[name] for one in images]) for name in ("pixel_values", "image_grid_thw")}
                rows.append((uid, prompt, response, shown, session))
                text, seen = visual_prompt([2, (4, 4 + 4 * (turn % 2)), 3], config, generator)
                history, images = torch.cat([prompt, response, text, end]), [*images, seen]
    return rows


def _batch(rank: int, config, path: str, options: dict):
    """Rows in verl's jagged form, not sorted by group; every row has its own copy of the pixels, as verl delivers."""
    from verl.utils import tensordict_utils as tu

    scattered = options.get("batch") == "scattered" or options.get("scattered", False)
    generator = torch.Generator().manual_seed(100 if scattered else 100 + rank)
    rows = _turns(config, generator) if "turns" in options else []
    sessions = [session for *_, session in rows]
    rows = [row[:4] for row in rows]
    for parts, lens, uid in [] if rows else BATCHES[options.get("batch", "mixed")][rank]:
        prompt, pixels = visual_prompt(seen_by(config, parts), config, generator)
        for length in lens:
            response = torch.randint(7, config.text_config.vocab_size, (length,), generator=generator)
            rows.append((uid, prompt, response, copy.deepcopy(pixels)))
    # Same prompt and same tokens as `image`, another picture: the last row of the group is alone.
    if (rank == 0 or scattered) and not sessions and rows[3][3]:
        other = torch.randn(rows[3][3]["pixel_values"].shape, generator=generator)
        rows[3] = (*rows[3][:3], rows[3][3] | {"pixel_values": other})
    order = torch.randperm(len(rows), generator=generator).tolist()
    data_ranks = torch.distributed.get_world_size() // options.get("ulysses", 1)
    order = order[rank::data_ranks] if scattered else order
    rows, sessions = [rows[i] for i in order], [sessions[i] for i in order if sessions]

    def noise(scale, shift):
        return _nested(torch.randn(len(r[2]), generator=generator) * scale + shift for r in rows)

    ids = [torch.cat([r[1], r[2]]) for r in rows]
    positions = [positions_of_row(_meta_model(path), x, r[3], 0) for x, r in zip(ids, rows, strict=True)]
    for x, (uid, _, response, _) in zip(ids, rows, strict=True):
        if uid in options.get("sampled_by", ()):  # by the model, behind its first token
            response[1] = x[1 - len(response)] = options["sampled"]
    masks = _nested(torch.ones(len(r[2]), dtype=torch.int64) for r in rows)
    fields = {
        "prompts": _nested(r[1] for r in rows),
        "responses": _nested(r[2] for r in rows),
        "input_ids": _nested(ids),
        # torch's own takes the four axes for what is ragged where all rows are as long.
        "position_ids": tu.nested_tensor_from_tensor_list(positions),
        "loss_mask": masks,
        "response_mask": masks,
        "advantages": noise(1.0, 1.0),
        "old_log_probs": noise(0.3, -6.0),
        "uid": [r[0] for r in rows],
        "multi_modal_inputs": [r[3] for r in rows],
    }
    if sessions:
        fields["session_id"] = sessions
    flags = {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": options.get("budget", 4000),
        "use_remove_padding": options.get("use_remove_padding", True),
        "calculate_entropy": True,
        "temperature": 1.0,
        "global_batch_size": 20,
    }
    data = engines._padded(fields, flags) if options.get("padded") else tu.get_tensordict(fields, flags)
    return engines.without_advantage(data, options["dead"]) if "dead" in options else data


class _Seen:
    """What the tower of an engine's model did."""

    def __init__(self, engine) -> None:
        self.count = Counter()
        model = vision.vision_model(engine.module)
        self.tower = model.model.visual

    def __enter__(self) -> Counter:
        self.handle = self.tower.register_forward_hook(self.forward, with_kwargs=True)
        return self.count

    def __exit__(self, *exc_info) -> None:
        self.handle.remove()

    def forward(self, module, args, kwargs, output) -> None:
        self.count["calls"] += 1
        self.count["patches"] += int(kwargs["grid_thw"].prod(-1).sum())
        features = getattr(output, "pooler_output", output)
        if features.requires_grad:
            features.register_hook(self.backward)

    def backward(self, grad) -> None:
        self.count["backwards"] += 1


def _measure(backend: str, path: str, rank: int, options: dict) -> dict:
    """As `engines._measure`. Stock may need `towers_of_tensors`, which ours opens itself, and has the layers' own
    attention, where ours under sequence parallelism has left verl's in their class."""
    if not backend.startswith("prefix") and options.get("frozen_tower"):
        options = options | {"trained": "^(?!.*visual)"}
    engine = engines._engine(backend, path, options)
    with contextlib.ExitStack() as stack:
        if not backend.startswith("prefix"):
            stack.enter_context(verls_vision.towers_of_tensors(engine.module))
            stack.enter_context(verls_vision.own_attention(engine.module))
        return _measured(engine, backend, path, rank, options)


def _measured(engine, backend: str, path: str, rank: int, options: dict) -> dict:
    data = _batch(rank, engine.model_config.hf_config, path, options)
    result = {}
    with engine.eval_mode(disable_auto_offload=True), _Seen(engine) as result["inferred"]:
        inferred = engine.infer_batch(data.copy())
    result |= {name: torch.cat(engines._responses(x, data)) for name, x in inferred["model_output"].items()}
    result["lens"] = inferred["model_output"]["log_probs"].offsets().diff()
    if options.get("on_policy"):
        data["old_log_probs"] = _nested(engines._responses(inferred["model_output"]["log_probs"].float(), data))
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        if (
            checked := backend.startswith("prefix") and options.get("verify") != "off"
        ):  # the self-check has passes of its own
            first = engine.forward_backward_batch(data.copy(), engines._loss(options))
            engine.optimizer_zero_grad()
        with _Seen(engine) as result["updated"]:
            output = engine.forward_backward_batch(data.copy(), engines._loss(options))
        trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        grads = engines.whole({name: p if p.grad is None else p.grad for name, p in trained.items()})
        result["grads"] = {name: grad * (trained[name].grad is not None) for name, grad in grads.items()}
        result["grad_norm"] = engine.optimizer_step()
    loss = torch.tensor(sum(output["loss"]), dtype=torch.float64)
    torch.distributed.all_reduce(loss)  # with us a rank computes other rows than those that it was given
    result["loss"] = loss.item() / options.get("ulysses", 1)
    result["metrics"] = (first if checked else output)["metrics"]
    result["params"] = engines.whole(dict(engine.module.named_parameters()))
    return result
