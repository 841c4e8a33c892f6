"""Tiny models that are written on the spot instead of downloaded, and prompts with pixels for them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

# Text and media of a message stay in their order, as in Qwen-VL's own templates.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% else %}<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Fields = dict[str, Any]
_FOUR_EXPERTS: Fields = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
_ROUTED: Fields = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, first_k_dense_replace=1)
# Values of another size than keys.
_LATENT: Fields = dict(
    num_key_value_heads=4, head_dim=16, q_lora_rank=48, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=16,
    v_head_dim=20, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=64,
    first_k_dense_replace=1,
)  # fmt: skip
_EXPERTS: dict[str, Fields] = {
    "qwen3_moe": _FOUR_EXPERTS,
    "qwen3_vl_moe": _FOUR_EXPERTS,
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=25),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=64),
    "deepseek_v3": _LATENT,
    "glm4_moe": _ROUTED,
    "glm4v_moe": _ROUTED,
    "qwen2_moe": _FOUR_EXPERTS | dict(shared_expert_intermediate_size=64),
}
_DELTA_NET: Fields = dict(
    layer_types=["linear_attention", "full_attention"], linear_conv_kernel_dim=4, linear_key_head_dim=16,
    linear_value_head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
_SHARED_EXPERT = _FOUR_EXPERTS | dict(shared_expert_intermediate_size=64)
_MAMBA: Fields = dict(
    mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=2, mamba_d_state=16, mamba_expand=2, mamba_d_conv=4,
    mamba_chunk_size=32,
)  # fmt: skip
# One recurrent layer and one of attention.
_RECURRENT: dict[str, Fields] = {
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": _DELTA_NET | _SHARED_EXPERT,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": _DELTA_NET | _SHARED_EXPERT,
    "olmo_hybrid": _DELTA_NET | dict(linear_num_key_heads=4),
    "lfm2": dict(layer_types=["conv", "full_attention"], conv_L_cache=3),
    "granitemoehybrid": _MAMBA
    | dict(layer_types=["mamba", "attention"], num_local_experts=0, shared_intermediate_size=256),
    "bamba": _MAMBA | dict(attn_layer_indices=[1]),
}
_DEEPSTACK: Fields = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
_TOWERS: dict[str, Fields] = {
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": _DEEPSTACK,
    "qwen3_vl_moe": _DEEPSTACK,
    "qwen3_5": {"num_position_embeddings": 64},
    "qwen3_5_moe": {"num_position_embeddings": 64},
    "glm4v": {"patch_size": 14, "image_size": 56},  # verl's own forward names the size of its patches
    "glm4v_moe": {"image_size": 16},
    "glm46v": {"image_size": 16},
}
_FAMILIES = {"qwen2", "qwen3", "llama", "phi3", "seed_oss", *_EXPERTS, *_RECURRENT, *_TOWERS}
_VISION_TOKENS = {
    "<|vision_start|>": "vision_start_token_id",
    "<|vision_end|>": "vision_end_token_id",
    "<|image_pad|>": "image_token_id",
    "<|video_pad|>": "video_token_id",
}
_TEXTS = (
    "system user assistant: read the paragraphs and answer the question with a short phrase.",
    "The river rises in the north, flows through the old town and reaches the sea near the harbour.",
    "Who wrote the book that the film of 1987 is based on? In which country was its author born?",
    "0 1 2 3 4 5 6 7 8 9 10 12 25 100 1900 1987 2024, Answer: yes. Answer: no.",
)


def write_tiny_model(
    path: str | Path,
    *,
    texts: list[str] | None = None,
    family: str = "qwen3",
    seed: int = 0,
    vocab_size: int = 512,
    **overrides: Any,
) -> str:
    """Writes a random Hugging Face model and its tokenizer to ``path``; returns ``str(path)``.

    Two layers, 4 query and 2 kv heads of size 32, about 0.4M fp32 parameters in safetensors, 8192 positions. The
    tokenizer is a byte-level BPE trained on ``texts``, with ``<|im_start|>``/``<|im_end|>`` chat markup, eos
    ``<|im_end|>`` and pad ``<|endoftext|>``. The same arguments write the same bytes.

    Args:
        texts: what the tokenizer is trained on; a few built-in sentences if None.
        family: a dense text model (``"qwen3"``, with normalised queries and keys; ``"qwen2"``, ``"llama"``,
            ``"phi3"``; ``"seed_oss"``, with dropout); of four experts ``"qwen3_moe"``, ``"qwen2_moe"``,
            ``"glm4_moe"``, ``"mixtral"``, ``"gpt_oss"`` (sinks, every other layer with a window) or
            ``"deepseek_v3"`` (latent attention); with one recurrent layer, whose state lasts, ``"qwen3_5_text"``,
            ``"qwen3_next"``, ``"olmo_hybrid"``, ``"lfm2"``, ``"granitemoehybrid"`` or ``"bamba"``; with a vision tower
            of two blocks ``"qwen2_5_vl"``, ``"qwen3_vl"`` and ``"qwen3_vl_moe"`` (deepstack), ``"qwen3_5"`` and
            ``"qwen3_5_moe"`` (recurrent as well), and of images alone ``"glm4v"``, ``"glm4v_moe"`` and ``"glm46v"``.
            The tokenizers of these have the special tokens of images and videos.
        vocab_size: upper bound of the vocabulary, at least 259 (256 bytes and 3 special tokens).
        overrides: fields of the model's configuration, of a vision model those of its text layers, such as
            ``num_hidden_layers=3``.

    Raises:
        ValueError: ``family`` is unknown or ``vocab_size`` is below 259.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if family not in _FAMILIES:
        raise ValueError(f"family={family!r} is unknown; use one of {sorted(_FAMILIES)}")
    if vocab_size < 259:
        raise ValueError(f"vocab_size={vocab_size} cannot hold 256 bytes and 3 special tokens; use 259 or more")
    tokenizer = _tokenizer(_TEXTS if texts is None else texts, vocab_size, _VISION_TOKENS if family in _TOWERS else ())
    fields: Fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    fields |= _EXPERTS.get(family, {}) | _RECURRENT.get(family, {}) | overrides
    auto_class = AutoModelForCausalLM
    if family in _TOWERS:
        auto_class, fields = AutoModelForImageTextToText, _with_tower(family, fields, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # as drawn, a state would be gone after a token or two
                torch.nn.init.uniform_(parameter, -3.0, 1.0)
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    return str(path)


def _tokenizer(texts: Iterable[str], vocab_size: int, special_tokens: Iterable[str]) -> Any:
    """A byte-level BPE that is trained on `texts`."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size, min_frequency=0, show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special_tokens],
    )  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe.to_str()), eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
    )  # fmt: skip


def _with_tower(family: str, fields: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Fields of the whole model's configuration, from those of its text layers."""
    # Rotary angles of time, height and width, for head_dim 32.
    rope: Fields = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    rope |= {"partial_rotary_factor": 1.0} if family in (*_RECURRENT, "glm4v_moe") else {}
    ids = dict(zip(_VISION_TOKENS.values(), tokenizer.convert_tokens_to_ids(list(_VISION_TOKENS)), strict=True))
    tower: Fields = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4)
    tower |= dict(out_hidden_size=fields["hidden_size"], **_TOWERS[family])
    text = fields | {"rope_parameters": rope}
    return dict(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)


def visual_prompt(
    parts: Sequence[int | tuple[int, ...]], config: Any, generator: torch.Generator
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Tokens of a prompt with images and videos, and random pixels, as the processors of Qwen2.5-VL and of Qwen3-VL and
    Qwen3.5 expand them (the latter mark each frame of a video).

    Args:
        parts: what the prompt consists of: a number of random text tokens, an image's (height, width), or a video's
            (frames, height, width), in patches, of which a square of four makes a token.

    Returns:
        tokens [length] int64, and the fields of verl's `multi_modal_inputs`.
    """
    tower, tokens = config.vision_config, []
    pixels: dict[str, list[torch.Tensor]] = {}
    patch = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    for part in parts:
        if isinstance(part, int):
            tokens += torch.randint(7, config.text_config.vocab_size, (part,), generator=generator).tolist()
            continue
        *frames, height, width = part
        kind, values = ("video", "pixel_values_videos") if frames else ("image", "pixel_values")
        num_frames, per_frame = (frames or [1])[0], height * width // tower.spatial_merge_size**2
        for count in [per_frame * num_frames] if config.model_type == "qwen2_5_vl" else [per_frame] * num_frames:
            pads = [getattr(config, f"{kind}_token_id")] * count
            tokens += [config.vision_start_token_id, *pads, config.vision_end_token_id]
        pixels.setdefault(values, []).append(torch.randn(num_frames * height * width, patch, generator=generator))
        pixels.setdefault(f"{kind}_grid_thw", []).append(torch.tensor([[num_frames, height, width]]))
    return torch.tensor(tokens), {name: torch.cat(pieces) for name, pieces in pixels.items()}


def write_tiny_vlm(path: str | Path, *, family: str, **overrides: Any) -> str:
    """Writes a tiny model that reads text, images and videos, and its processor, to ``path``; returns ``str(path)``.

    As `write_tiny_model` with a vision family, and patches of 4 x 4 pixels. The model never samples a visual token,
    which verl could not tell from one of the prompt: hidden channel 0 is the same in all text, and pulls those logits
    down.

    Args:
        family: one of Qwen with a tower.
        overrides: arguments of `write_tiny_model`.

    Raises:
        ImportError: torchvision, which the video processors need, is not installed.
    """
    import transformers
    from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    processor_class = getattr(transformers, PROCESSOR_MAPPING_NAMES[family])
    video_class = getattr(transformers, f"Qwen{2 if family == 'qwen2_5_vl' else 3}VLVideoProcessor")
    write_tiny_model(path, family=family, **overrides)
    tokenizer = AutoTokenizer.from_pretrained(path)
    # The sizes leave the pixels as qwen_vl_utils has scaled them.
    size = dict(shortest_edge=64, longest_edge=2**24)
    patches = dict(patch_size=4, temporal_patch_size=2, merge_size=2, size=size)
    processor_class(
        image_processor=Qwen2VLImageProcessor(**patches),
        tokenizer=tokenizer,
        video_processor=video_class(**patches),
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path)
    visual = tokenizer.convert_tokens_to_ids(list(_VISION_TOKENS))
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0.5
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[visual, 0] = -10.0
    model.save_pretrained(path)
    return str(path)
