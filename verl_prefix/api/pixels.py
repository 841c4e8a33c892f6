"""Deals a processor's output for many prompts to its prompts: each one's own pixels, and position ids by these."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_prefix.models.vision import MODEL_TYPES, PIXEL_KINDS, check_pixels, inner_model, is_vision_config


def pixels_of_prompts(
    config: Any, prompts: Sequence[torch.Tensor], given: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Each prompt's part of a processor's output, which holds images and videos in the order of the prompts.

    Args:
        config: the model's. prompts: [length] int64 each. given: the output; None: there are no pixels.

    Raises:
        ValueError: the model takes no pixels, or prompts and pixels do not belong together.
    """
    by_prompt: list[dict[str, Any]] = [{} for _ in prompts]
    if not is_vision_config(config):
        if given is not None:
            raise ValueError(f"pixels are for {', '.join(MODEL_TYPES)}, and this is a {config.model_type} model")
        return by_prompt
    given = given or {}
    for names in PIXEL_KINDS:
        _, values, grid = names
        if (given.get(values) is None) != (given.get(grid) is None):
            raise ValueError(f"pixels need both {values} and {grid}; pass the processor's whole output")
        if given.get(grid) is not None:
            _deal(config, prompts, given, names, by_prompt)
    for i, (prompt, shown) in enumerate(zip(prompts, by_prompt, strict=True)):
        check_pixels(shown, prompt[:-1], config, f"prompts[{i}]")
    return by_prompt


def _deal(
    config: Any, prompts: Sequence[torch.Tensor], given: Mapping[str, Any], names: tuple[str, str, str],
    by_prompt: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Adds the pixels of one kind, by names of `PIXEL_KINDS`, to those of their prompts. Raises ValueError as above."""
    kind, values, grid = names
    grids = torch.as_tensor(given[grid]).cpu()
    num_patches = grids.prod(-1)
    if len(given[values]) != int(num_patches.sum()):
        raise ValueError(
            f"{values} has {len(given[values])} patches, and {grid} names {int(num_patches.sum())}; pass the "
            "processor's whole output"
        )
    ends = [0, *(num_patches // config.vision_config.spatial_merge_size**2).cumsum(0).tolist()]  # in tokens
    patch_ends = [0, *num_patches.cumsum(0).tolist()]
    start, seen = 0, 0
    for i, prompt in enumerate(prompts):
        seen += int((prompt == getattr(config, f"{kind}_token_id")).sum())
        if seen not in ends:
            raise ValueError(
                f"prompts[{i}] ends with {kind} token {seen} of all, inside of or beyond the {kind}s of {grid}, "
                f"which end at {ends[1:]}; pass the processor's output for these prompts, whole and in their order"
            )
        end = ends.index(seen)
        if end > start:
            by_prompt[i][values] = given[values][patch_ends[start] : patch_ends[end]]
            by_prompt[i][grid] = grids[start:end]
            if kind == "video" and given.get("second_per_grid_ts") is not None:
                by_prompt[i]["second_per_grid_ts"] = torch.as_tensor(given["second_per_grid_ts"])[start:end]
        start = end
    if start != len(grids):
        raise ValueError(
            f"{grid} has {len(grids)} {kind}s, and prompts have tokens for {start}; pass the processor's output "
            "for these prompts, one per row, or one per group with `groups`"
        )


def positions_of_row(model: Any, prompt: torch.Tensor, pixels: Mapping[str, Any], num_more: int) -> torch.Tensor:
    """Position ids of a prompt and `num_more` tokens of text behind it: [4, length] int64 (text, time, height, width),
    by the model's own `get_rope_index` on the whole row. Text behind a clip may come before the clip's last frames."""
    config = model.config
    kinds = torch.where(prompt == config.image_token_id, 1, 2 * (prompt == config.video_token_id).int())
    others = {name: value for name, value in pixels.items() if not name.startswith("pixel_values")}
    row, kinds = (torch.nn.functional.pad(x, (0, num_more))[None] for x in (prompt, kinds))  # kind 0 is text
    axes, _ = inner_model(model).get_rope_index(row, mm_token_type_ids=kinds, **others)
    return torch.cat([torch.arange(row.shape[1])[None], axes[:, 0].cpu()])
