"""Prompts of the HF rollout: tokens, and for a vision model pixels and positions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from verl.utils.tokenizer import build_multimodal_processor_inputs, get_processor_token_id

from verl_prefix.models.vision import PIXEL_NAMES, share_pixels


@dataclass(frozen=True)
class Prompt:
    """A prompt of L tokens; two are equal where their tokens and pixels are.

    Attributes:
        digest: stands for the pixels; empty without any. pixels: arguments of the model's forward.
        positions: int64 [4, L], of a vision model: each token's number, then mRoPE's time, height and width.
    """

    tokens: tuple[int, ...]
    digest: bytes = b""
    pixels: dict[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    positions: torch.Tensor | None = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)


def read_prompt(
    tokens: Sequence[int],
    processor: Any,
    images: list[Any] | None,
    videos: list[Any] | None,
    processor_kwargs: dict[str, Any] | None,
) -> Prompt:
    """Return a prompt with the pixels and positions that verl's agent loop computes for its rows
    (verl/experimental/agent_loop/agent_loop.py), so that the actor sees the same.

    Args:
        tokens: the prompt, with one visual token for each feature of the vision tower.
        processor: verl's, with the model's `get_rope_index`; None for a text model.
        images, videos: decoded media in the order of their tokens; videos with their metadata.

    Raises:
        ValueError: media without a processor.
    """
    tokens = tuple(tokens)
    if not hasattr(processor, "get_rope_index"):
        if images or videos:
            raise ValueError(
                "rollout.name=hf got images or videos, and the model has no processor that it can use for them; check "
                "that its folder has one, that torchvision is installed, and what verl warns of at the start"
            )
        return Prompt(tokens)
    pixels = {}
    if images or videos:
        # The text is expanded already, and pixels do not depend on it.
        inputs = build_multimodal_processor_inputs(
            processor, text=[""], images=images, videos=videos, mm_processor_kwargs=processor_kwargs
        )
        pixels = {name: inputs[name] for name in PIXEL_NAMES if name in inputs}
    ids = torch.tensor([tokens])
    kinds = torch.zeros_like(ids)
    for name, kind in (("image", 1), ("video", 2)):
        kinds[ids == get_processor_token_id(processor, name)] = kind
    grids = {name: pixels.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    axes, _ = processor.get_rope_index(input_ids=ids, mm_token_type_ids=kinds, **grids)
    positions = torch.cat([torch.arange(len(tokens)).expand(1, -1), axes[:, 0]])
    return Prompt(tokens, share_pixels([pixels])[0], pixels, positions)


def pad_left(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Return [..., L] rows as [..., B, length], with zeros in front."""
    return torch.stack([torch.nn.functional.pad(row, (length - row.shape[-1], 0)) for row in rows], dim=-2)
