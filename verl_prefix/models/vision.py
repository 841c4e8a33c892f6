"""Pixels of a group, which are held, moved and seen by the vision tower once, with the group's prefix.

    rollouts -> `trainer.shared_pixels` one row of a prompt carries the pixels to the actor
    rows -> `share_pixels`   rows with the same pixels hold the same tensors; their digest is part of the group key
    pass -> `PixelBatch.of`  the pixels of the pass's groups, and where their tokens stand in the packed row
    pass -> `forward`        the tower once per packed pass or phase A, on the pixels of all its groups at once

A wave has no visual tokens, since responses are text, and never runs the tower. Every other pass runs it exactly once,
on a few zeros where it has no pixels, so that all ranks run the tower's FSDP2 collectives equally often. verl's own
forward runs the tower once for images and once for videos, and on zeros where a micro-batch has neither
(verl/models/transformers/qwen2_vl.py, qwen3_vl.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary
from transformers.modeling_outputs import CausalLMOutputWithPast

from verl_prefix.core.groups import Group
from verl_prefix.core.trees import mix
from verl_prefix.models.advice import WHOLE_ROWS
from verl_prefix.models.logits import check_runs_in_parts
from verl_prefix.models.replaced import replaced

UNPATCHED = ("glm4v_moe", "glm46v")  # GLM-4.5V and GLM-4.6V, whose forward verl leaves to transformers
MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", *UNPATCHED)

# Names of a row's pixels, as verl's agent loop has them from the model's processor: (kind, patches [n, patch size],
# grid [m, 3]). What else the processor makes (timestamps) is in the row's position ids already.
PIXEL_KINDS = (("image", "pixel_values", "image_grid_thw"), ("video", "pixel_values_videos", "video_grid_thw"))
PIXEL_NAMES = tuple(name for _, *names in PIXEL_KINDS for name in names)
# Beside a row's pixels, the row's own key in TransferQueue; in place of pixels, the key of the row that has them.
CARRIES, CARRIED_BY = "verl_prefix.carries", "verl_prefix.carried_by"

RowPixels = dict[str, Any] | None  # a row's pixels by name; None or empty: it has none

_digests = WeakIdKeyDictionary()  # of tensors while they live: after `share_pixels` a group's rows have the same ones


def is_vision_config(config: Any) -> bool:
    """True for the config of a model whose tower runs once per group."""
    return getattr(config, "model_type", None) in MODEL_TYPES


def vision_model(model: Any) -> Any:
    """The model with tower and lm_head, without what LoRA puts around it; None for a text model."""
    if not is_vision_config(model.config):
        return None
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def inner_model(model: Any) -> Any:
    """A vision model's tower and text model, without lm_head and what LoRA puts around: what `AutoModel` gives."""
    seeing = vision_model(model)
    return getattr(seeing, "model", seeing)


def tower_of(model: Any) -> torch.nn.Module:
    """The vision tower and its merger.

    Raises:
        ValueError: this model has none that we know.
    """
    if not is_vision_config(model.config):
        raise ValueError(f"freeze_vision_tower=True, and a {model.config.model_type} model has none; remove it")
    tower: torch.nn.Module = inner_model(model).visual
    return tower


def has_trained_tower(model: Any) -> bool:
    """Whether any parameter of the model's vision tower is trained."""
    return any(parameter.requires_grad for parameter in tower_of(model).parameters())


def _digest(tensor: torch.Tensor) -> bytes:
    import xxhash  # of verl's dependency `datasets`

    if tensor not in _digests:
        values = tensor.detach().cpu().contiguous()
        digest = xxhash.xxh3_128(f"{values.dtype} {list(values.shape)}".encode())
        digest.update(values.view(torch.uint8).numpy().data)
        _digests[tensor] = digest.digest()
    return _digests[tensor]


def pixel_digests(rows: Sequence[RowPixels]) -> list[bytes]:
    """Returns a digest of each row's pixels, with their dtypes and shapes; it is empty without pixels.

    Args:
        rows: verl's `multi_modal_inputs`: one dict per row, empty or None for text alone.
    """
    return [b"".join(name.encode() + _digest(x) for name, x in _pixels_of(row).items()) for row in rows]


def share_pixels(rows: Sequence[RowPixels]) -> list[bytes]:
    """Lets rows with the same pixels hold the same tensors, so that the copies are freed: changes the rows' dicts.
    Returns their `pixel_digests`."""
    held: dict[bytes, torch.Tensor] = {}
    for row in rows:
        if row:
            row.update({name: held.setdefault(_digest(x), x) for name, x in _pixels_of(row).items()})
    return pixel_digests(rows)


def _pixels_of(row: RowPixels) -> dict[str, torch.Tensor]:
    return {name: row[name] for name in PIXEL_NAMES if row and torch.is_tensor(row.get(name))}


def tree_tokens(
    input_ids: torch.Tensor, positions: torch.Tensor, offsets: Sequence[int], rows: Sequence[RowPixels], config: Any
) -> torch.Tensor:
    """[N] int64, equal where tokens, their positions and what they show are equal, for `core.trees.group_trees`.

    Args:
        input_ids, positions: [N] and [4, N] int64, in host memory. rows: as in `pixel_digests`.
    """
    mixed = input_ids.clone()
    for axis in positions:
        mixed = mix(mixed) ^ axis
    for row, start, end in zip(rows, offsets, offsets[1:], strict=False):
        for kind, values, grid in PIXEL_KINDS:
            if not row or row.get(values) is None:
                continue
            lens = row[grid].prod(-1)
            shown = [int.from_bytes(_digest(x)[:7], "little") for x in row[values].split(lens.tolist())]
            lens //= config.vision_config.spatial_merge_size**2
            tokens = (input_ids[start:end] == getattr(config, f"{kind}_token_id")).nonzero()[:, 0]
            each = torch.tensor(shown).repeat_interleave(lens)
            tokens = tokens[: len(each)]  # a model may sample more of them behind these, which show nothing
            if len(each) == len(tokens):  # else `check_pixels` says what is wrong
                mixed[start + tokens] = mix(mixed[start + tokens]) ^ each
    return mixed


def shown_lens(prompts: Sequence[torch.Tensor], config: Any) -> list[int]:
    """For each prompt [n] int64, the number of its tokens up to and with the last one of an image or video; or 0."""
    if not is_vision_config(config):
        return [0] * len(prompts)
    tokens = torch.tensor([getattr(config, f"{kind}_token_id") for kind, *_ in PIXEL_KINDS])
    seen = (torch.isin(prompt.cpu(), tokens).nonzero()[-1:, 0] for prompt in prompts)
    return [int(last) + 1 if len(last) else 0 for last in seen]


def num_tower_runs(row: RowPixels) -> int:
    """How often verl's own forward runs the tower on a row with FSDP2: for images, for videos, or on zeros."""
    return sum((row or {}).get(values) is not None for _, values, _ in PIXEL_KINDS) or 1


def num_patches(row: RowPixels) -> int:
    """Number of patches of the row's images and videos; 0 where it has none."""
    return sum(len(row[values]) for _, values, _ in PIXEL_KINDS if row and row.get(values) is not None)


class PixelBatch:
    """Pixels of a batch's rows, and the tokens that stand for them. The rows have passed `check_pixels`.

    Args:
        rows: one per row of the batch, as in `pixel_digests`.
        input_ids: [N] int64, the batch's flat tokens; on the CPU, where visual tokens are looked up without waiting.
        offsets: first token of each row.
        config: the model's; it names the tokens that images and videos stand for.
    """

    def __init__(self, rows: Sequence[RowPixels], input_ids: torch.Tensor, offsets: Sequence[int], config: Any) -> None:
        self.rows = rows
        self.input_ids = input_ids
        self.offsets = offsets
        self.config = config

    def of(
        self, groups: Sequence[Group], device: torch.device, tokens: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Arguments of `forward` for a packed row that begins with the strands of `groups`: `patches` [n, patch size],
        `grid` [m, 3], and `indices` [k] int64, where in the row the tower's k features belong; nothing without pixels.

        Args:
            tokens: [t] int64, in host memory: which of the packed row's tokens this rank has under sequence
                parallelism. `indices` then count among these, and `chosen` [k] int64 are the features that go there.

        Raises:
            ValueError: a row is cut inside an image or clip.
        """
        patches, grids, indices = [], [], []
        start = 0
        for group in groups:
            for strand in group.strands[group.num_outer :]:
                for kind, values, grid in PIXEL_KINDS:
                    positions = self._tokens(strand.row, kind, strand.start, strand.end)
                    if len(positions):
                        row = self.rows[strand.row] or {}
                        ends = [0, *row[grid].prod(-1).cumsum(0).tolist()]  # of each image or clip, in patches
                        before = len(self._tokens(strand.row, kind, 0, strand.start))
                        first, last = (self._number(row[grid], n) for n in (before, before + len(positions)))
                        patches.append(row[values][ends[first] : ends[last]])
                        grids.append(row[grid][first:last])
                        indices.append(positions + start)
                start += strand.end - strand.start
        if not patches:
            return {}
        tensors = {"patches": torch.cat(patches), "grid": torch.cat(grids), "indices": torch.cat(indices)}
        if tokens is not None:
            order = tensors["indices"].argsort()
            at = torch.searchsorted(tensors["indices"][order], tokens).clamp(max=len(order) - 1)
            feature = order[at]
            is_seen = tensors["indices"][feature] == tokens
            tensors |= {"indices": is_seen.nonzero()[:, 0], "chosen": feature[is_seen]}
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    def _tokens(self, row: int, kind: str, start: int, end: int) -> torch.Tensor:
        """[n] int64: which of the row's tokens [start, end) stand for images or videos, counted from `start`."""
        first = int(self.offsets[row])
        tokens = self.input_ids[first + start : first + end]
        return torch.nonzero(tokens == getattr(self.config, f"{kind}_token_id"))[:, 0]

    def _number(self, grid: torch.Tensor, num_tokens: int) -> int:
        """How many images or clips make the first `num_tokens` features."""
        ends = [0, *_num_features(grid, self.config).cumsum(0).tolist()]
        if num_tokens not in ends:
            raise ValueError(
                f"a row is cut inside an image or clip: after {num_tokens} of their tokens, and they end at {ends[1:]}"
            )
        return ends.index(num_tokens)


def check_pixels(inputs: RowPixels, prefix: torch.Tensor, config: Any, name: str) -> None:
    """Checks that the visual tokens of a row's prefix, [n] int64, are as many as the features that its pixels make.

    Raises:
        ValueError: they are not, or a GLM row has a video. The message begins with `name`.
    """
    inputs = inputs or {}
    if config.model_type.startswith("glm") and inputs.get("pixel_values_videos") is not None:
        raise ValueError(
            f"{name} has a video, which a {config.model_type} model marks by tokens of images: videos of GLM are not "
            "supported, train it on images"
        )
    for kind, values, grid in PIXEL_KINDS:
        num_tokens = int((prefix == getattr(config, f"{kind}_token_id")).sum())
        num_features = int(_num_features(inputs[grid], config).sum()) if inputs.get(values) is not None else 0
        if num_tokens != num_features:
            raise ValueError(
                f"{name}: its prompt has {num_tokens} {kind} tokens before the last one, and its {values} make "
                f"{num_features} features. Pass prompts as the processor expands them, ending in text; where tools "
                f"answer with pictures, {WHOLE_ROWS}"
            )


def _num_features(grid: torch.Tensor, config: Any) -> torch.Tensor:
    """[m]: features that the tower makes of each image or clip."""
    return grid.prod(-1) // config.vision_config.spatial_merge_size**2


def forward(
    model: Any,
    input_ids: torch.Tensor,
    keep: torch.Tensor,
    tower: bool,
    patches: Any = None,
    grid: Any = None,
    indices: Any = None,
    chosen: torch.Tensor | None = None,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """Replaces the model's own forward on one packed row. It is called through the model, so that FSDP2's hooks run.

    Args:
        input_ids: [1, T] int64. keep: [n] int64, the tokens that go through lm_head.
        tower: whether this pass runs the tower; a wave does not.
        patches, grid, indices, chosen: see `PixelBatch.of`.
        kwargs: for the text model: position ids, mask, and what its attention needs.

    Returns:
        `logits` [1, n, vocabulary], or what lm_head was replaced by.

    Raises:
        RuntimeError: the model of tower and text has hooks or a forward of others, which would be left out.
    """
    check_runs_in_parts(model.model, input_ids.device)
    embeds: torch.Tensor = model.get_input_embeddings()(input_ids)
    if torch.is_grad_enabled() and any(p.requires_grad for p in model.model.visual.parameters()):
        # In a pass without the tower, too: a wave sends gradients back to prefixes that the tower has seen, and ranks
        # without such prefixes have to run the same backward.
        embeds.requires_grad_()
    if tower:
        visual = model.model.visual
        seen = patches is not None
        if not seen:
            patches, grid = black_image(model.config.vision_config, embeds)
        with gathered_positions(visual):
            output = visual(patches.type(visual.dtype), grid_thw=grid)
        features, deepstack = output.pooler_output, getattr(output, "deepstack_features", None)
        if chosen is not None:
            features, deepstack = features[chosen], deepstack and [x[chosen] for x in deepstack]
        if not seen:
            embeds = embeds + sum(0.0 * x.mean() for x in (features, *(deepstack or ())))
        else:
            embeds = embeds.index_copy(1, indices, features.to(embeds.dtype).unsqueeze(0))
            if deepstack:  # the text model adds them by a mask, which takes them in the order of the packed row
                kwargs["visual_pos_masks"] = torch.zeros_like(input_ids, dtype=torch.bool).index_fill(1, indices, True)
                kwargs["deepstack_visual_embeds"] = [x[indices.argsort()] for x in deepstack]
    elif torch.is_grad_enabled():
        # From pass to pass FSDP2 keeps gradients in another dtype, and it reduces a shard's gradients in one dtype. So
        # parameters of the tower that are in one shard with text layers need a gradient in a wave, too: zero.
        embeds = embeds + sum(0.0 * p.flatten()[0] for p in _in_parents_shard(model.model.visual) if p.requires_grad)
    kwargs |= dict(input_ids=None, inputs_embeds=embeds)  # PEFT passes them too
    # Under sequence parallelism verl would cut the text model's inputs over the ranks, but they are cut already: see
    # patch_vlm_for_ulysses_input_slicing in verl/models/transformers/monkey_patch.py.
    with replaced(model.model.language_model, "_needs_initial_slice", False):
        hidden = model.model.language_model(**kwargs).last_hidden_state
    return CausalLMOutputWithPast(logits=model.lm_head(hidden[:, keep]))


def _in_parents_shard(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters of a module that are in its parents' FSDP2 shard, as some of its children alone have shards of their
    own."""
    sharded = [m for m in module.modules() if isinstance(m, FSDPModule)]
    inside = {id(p) for m in sharded for p in m.parameters()}
    return [p for p in module.parameters() if sharded and id(p) not in inside]


def black_image(config: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches [n, patch size] and grid [1, 3] of an image of four tokens, all zeros."""
    side = 2 * config.spatial_merge_size
    patch = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return like.new_zeros(side**2, patch), torch.tensor([[1, side, side]], device=like.device)


@contextmanager
def gathered_positions(visual: Any) -> Iterator[None]:
    """Context in which a GLM tower looks positions up by the forward of their table, in which FSDP2 gathers it. By
    itself the tower reads the table's weight, which is then a shard: under FSDP2 verl's own engine fails there."""
    if (embeddings := getattr(visual, "embeddings", None)) is None:
        yield
        return
    table = embeddings.position_embedding

    def forward(hidden: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        weight = table(torch.arange(table.num_embeddings, device=hidden.device))
        positions = SimpleNamespace(weight=weight)
        read = SimpleNamespace(position_embedding=positions, interpolated_method=embeddings.interpolated_method)
        embedded: torch.Tensor = type(embeddings).forward(read, hidden, *args)
        return embedded

    with replaced(embeddings, "forward", forward):
        yield
