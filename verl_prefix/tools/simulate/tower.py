"""The vision tower of a simulated model: its pixels, and what it reads of their grids' values, which fake tensors lack.

The tower and `models.vision` are the real ones. transformers' own functions of the grid run on real numbers, and the
tower gets fake tensors of their sizes; its attention is flash attention over the spans that those numbers say.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, PretrainedConfig
from transformers.vision_utils import (
    get_vision_bilinear_indices_and_weights,
    get_vision_cu_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from verl_prefix.core.calls import Call, Spans
from verl_prefix.core.groups import Group
from verl_prefix.core.kernels import Kernel, choose_kernel
from verl_prefix.tools.simulate.operations import KERNEL

ATTENTION = "simulated_flash"  # transformers hands whole rows and their bounds to what has flash in its name
_MARKED = ("fullatt_block_indexes", "deepstack_visual_indexes")  # blocks of another kind than the others

Grids = tuple[tuple[int, int, int], ...]  # frames, rows and columns of patches of each image or video


def num_patches(grids: Grids) -> int:
    return sum(math.prod(grid) for grid in grids)


def num_features(grids: Grids, config: Any) -> int:
    """Tokens of a prompt that show these; config: of the vision model."""
    return num_patches(grids) // config.vision_config.spatial_merge_size**2


class TowerPixels:
    """As `models.vision.PixelBatch`, of rows whose prompts begin with what they show.

    Args:
        grids: of each row. config: of the model.
    """

    def __init__(self, grids: Sequence[Grids], config: Any) -> None:
        self.grids, self.config = grids, config

    def of(self, groups: Sequence[Group], device: torch.device, tokens: Any = None) -> dict[str, torch.Tensor]:
        return self.at([group.rows[0] for group in groups], [group.num_own_strand_tokens for group in groups], device)

    def at(self, rows: Sequence[int], lengths: Iterable[int], device: torch.device) -> dict[str, torch.Tensor]:
        """Arguments of `models.vision.forward` for a packed row: of these rows, one piece of so many tokens each."""
        c, start = self.config.vision_config, 0
        positions: list[torch.Tensor] = []
        grids: list[tuple[int, int, int]] = []
        for row, length in zip(rows, lengths, strict=True):
            grids += self.grids[row]
            positions.append(torch.arange(start, start + num_features(self.grids[row], self.config)))
            start += length
        if not grids:
            return {}
        size = c.in_channels * c.temporal_patch_size * c.patch_size**2
        inputs = {"patches": torch.zeros(num_patches(tuple(grids)), size), "indices": torch.cat(positions)}
        inputs = {name: x.to(device, non_blocking=True) for name, x in inputs.items()}
        grid = inputs["grid"] = torch.tensor(grids, device=device)
        grid.rows = tuple(grids)  # type: ignore[attr-defined]
        return inputs


def prepare_tower(model: Any) -> None:
    """Gives a vision model's tower its attention, and values of its grid where tensors are fake.

    Args:
        model: with `model.visual`, as `models.vision.vision_model` returns it.
    """
    model.model.visual.config._attn_implementation = ATTENTION
    model.model.visual.register_forward_pre_hook(_with_values, with_kwargs=True)
    text = model.model.language_model
    if process := getattr(text, "_deepstack_process", None):

        def deepstack(hidden: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            """The original, with an index instead of a mask, whose number of tokens is no value of a fake tensor."""
            if not isinstance(hidden, FakeTensor):
                return process(hidden, mask, features)
            index = torch.arange(len(features), device=hidden.device)
            for _ in ("read", "write"):
                index[:1].cpu()  # a mask is counted on the host
            return process(hidden.squeeze(0), index, features).unsqueeze(0)

        text._deepstack_process = deepstack


def _with_values(tower: Any, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook of a tower: what it would compute of its grid, as its keyword arguments."""
    (patches,), grid, config = args, kwargs["grid_thw"], tower.config
    if not isinstance(patches, FakeTensor):
        return None
    side = math.isqrt(len(patches))  # of the black image in a pass without pixels, if it is that
    merge = config.spatial_merge_size
    values: dict[str, torch.Tensor] = {}
    with _disable_current_modes():
        real = torch.tensor(getattr(grid, "rows", ((1, side, side),)))
        values["position_ids"] = get_vision_position_ids(real, merge)
        values["cu_seqlens"] = get_vision_cu_seqlens(real)
        if hasattr(config, "window_size"):
            windows = get_vision_window_index(real, merge, config.window_size, config.patch_size)
            values["window_index"], values["cu_window_seqlens"] = windows
        elif hasattr(tower, "num_grid_per_side"):
            bilinear = get_vision_bilinear_indices_and_weights(real, tower.num_grid_per_side, merge)
            values["bilinear_indices"], values["bilinear_weights"] = bilinear
        bounds = {name: tuple(x.tolist()) for name, x in values.items() if name.startswith("cu_")}
    for name, value in values.items():
        grid.cpu()  # each of them is made of what the host reads
        kwargs[name] = torch.empty(value.shape, dtype=value.dtype, device=patches.device)
        if name in bounds:
            kwargs[name].bounds = bounds[name]
    return args, kwargs


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Kernel, call: Call
    ) -> torch.Tensor:
        out, lse = kernel.forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.args = kernel, call
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kernel, call = ctx.args
        grads = kernel.backward(dout.contiguous(), ctx.saved_tensors, call)
        return *grads, None, None


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: None,
    scaling: float, cu_seq_lens_q: torch.Tensor, max_length_q: torch.Tensor, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention interface, as a tower calls it: [1, H, T, D] each -> [1, T, H, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    bounds = getattr(cu_seq_lens_q, "bounds", None) or tuple(cu_seq_lens_q.tolist())
    spans = Spans(bounds, bounds)
    spans._cu_seqlens[q.device] = cu_seq_lens_q, cu_seq_lens_q
    max_length_q.cpu()  # flash attention takes a number
    name = "cpu" if q.device.type == "cpu" else KERNEL.__name__
    kernel = choose_kernel(name, q.device.type, q.dtype, q.shape[-1])
    return _FlashAttention.apply(q, k, v, kernel, Call(spans, causal=False, scale=scaling)).unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attend)


def kinds_of_blocks(config: PretrainedConfig) -> tuple[int, int]:
    """Numbers of the tower's marked blocks (see `_MARKED`) and of its others; without a tower none."""
    if (tower := getattr(config, "vision_config", None)) is None:
        return 0, 0
    marked = len(next((getattr(tower, name) for name in _MARKED if hasattr(tower, name)), ()))
    return marked, tower.depth - marked


def deepstack_layers(config: PretrainedConfig) -> int:
    """Text layers that a tower's blocks add to."""
    return len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", ()))


def with_blocks(config: PretrainedConfig, marked: int, others: int) -> PretrainedConfig:
    """A copy whose tower has so many blocks, the marked ones evenly spread."""
    config = copy.deepcopy(config)
    if tower := getattr(config, "vision_config", None):
        tower.depth = marked + others
        for name in [name for name in _MARKED if hasattr(tower, name)][:1]:
            setattr(tower, name, [(i + 1) * tower.depth // marked - 1 for i in range(marked)])
    return config
