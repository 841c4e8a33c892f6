"""Checks what a caller without verl passes; every error says which value is wrong, and what to pass instead."""

import functools
import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from verl_prefix.core.planning import leaves_room
from verl_prefix.models import support, vision
from verl_prefix.versions import check_transformers_version

# A padded [rows, length] tensor, which comes with a mask, or one sequence per row: a tensor [length] or a list of ints.
Tokens = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[int]]


def prompts_of_rows(num_prompts: int, num_rows: int, groups: Any) -> list[int]:
    """The index of each row's prompt: `groups`, or without them the row's own.

    Raises:
        ValueError: they do not fit together.
    """
    if groups is None:
        if num_prompts != num_rows:
            raise ValueError(
                f"{num_prompts} prompts and {num_rows} responses: pass one prompt per response, or groups, "
                "where row i has prompts[groups[i]]"
            )
        return list(range(num_rows))
    groups = [int(group) for group in groups]
    if len(groups) != num_rows or not set(groups) <= set(range(num_prompts)):
        raise ValueError(
            f"groups={groups} for {num_prompts} prompts and {num_rows} responses: pass one index "
            "into prompts per response"
        )
    return groups


def check_responses(config: Any, responses: Sequence[torch.Tensor]) -> None:
    """Raises ValueError where a response has tokens of images or videos; `config` is that of a vision model."""
    for i, response in enumerate(responses):
        for kind in ("image", "video"):
            if (response == getattr(config, f"{kind}_token_id")).any():
                raise ValueError(
                    f"responses[{i}] has {kind} tokens, and pixels belong to prompts; where tools answer with "
                    "pictures, call the model on whole rows"
                )


def check_model(model: Any, reads_head: bool) -> None:
    """Refuses what is no supported model on one device.

    Args:
        reads_head: whether its lm_head has to run.

    Raises:
        TypeError, ValueError, ImportError: see `response_log_probs`.
    """
    check_transformers_version()
    name = type(model).__name__
    # A DeepSpeed engine has the attributes of its model, but a config of its own.
    if not hasattr(model, "get_output_embeddings") or not hasattr(getattr(model, "config", None), "get_text_config"):
        raise TypeError(
            f"model is a {name}, not a Hugging Face causal LM; pass the model itself, such as accelerator.unwrap_model("
            "model) or ddp.module (and average .grad over ranks before optimizer.step)"
        )
    sharded = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    # DeepSpeed's ZeRO-3 marks parameters, of which a rank has nothing between forwards.
    if sharded or any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise TypeError(
            f"{name} is sharded by {'FSDP' if sharded else 'DeepSpeed ZeRO-3'}, whose ranks must run the same passes; "
            "use verl_prefix.core.runner.PlanRunner with verl_prefix.core.planning.pad_to_same_passes, or the verl "
            "plugin"
        )
    if reads_head and model.get_output_embeddings() is None:
        raise TypeError(
            f"model is a {name}, which has no lm_head to make log-probs; pass the causal LM, or call "
            "response_hidden_states and apply your own head to its result"
        )
    is_training = any(module.training for module in model.modules())  # train() of a part leaves the model's own False
    if reasons := support.unsupported_reasons(model.config, is_training):
        raise ValueError(
            f"shared prefixes are not supported for this {model.config.model_type} model: {'; '.join(reasons)}. "
            f"{'Call the' if support.unsupported_reasons(model.config, False) else 'Call model.eval(), or call the'} "
            "model on whole rows"
        )
    support.check_adapters(model, "call the model on whole rows")
    if is_training:
        runs: Any = model
        if not reads_head:
            runs = vision.inner_model(model) if vision.is_vision_config(model.config) else model.get_decoder()
        support.check_dropout(runs, "call model.eval(), or call the model on whole rows", in_eval=False)


@functools.cache
def warn_of_ranks() -> None:
    """Warns, once per process, that nothing here averages gradients over ranks."""
    warnings.warn(
        f"torch.distributed has {torch.distributed.get_world_size()} ranks, and gradients come from this rank's "
        "rows alone; where the loss is a mean over all rows, average them before optimizer.step():\n\n"
        "    for parameter in model.parameters():\n"
        "        if parameter.grad is not None:\n"
        "            torch.distributed.all_reduce(parameter.grad.div_(torch.distributed.get_world_size()))\n",
        stacklevel=4,
    )


def check_sizes(logits_chunk: int = 1, **bounds: int | None) -> None:
    """Raises ValueError where a number of tokens is not at least 1; those of `bounds` may be None."""
    given = {name: value for name, value in bounds.items() if value is not None}
    for name, value in {"logits_chunk": logits_chunk, **given}.items():
        if not hasattr(value, "__index__") or operator.index(value) < 1:  # also numpy's
            raise ValueError(f"{name}={value!r}: pass a number of tokens >= 1")


def check_waves(max_tokens: int | None, wave_tokens: int | None, offload: bool = False) -> None:
    """Raises ValueError where a wave leaves nothing of `max_tokens` for prefixes."""
    if max_tokens is not None and wave_tokens is not None and not leaves_room(wave_tokens, max_tokens, offload):
        raise ValueError(
            f"wave_tokens={wave_tokens} leaves nothing of max_tokens={max_tokens} for prefixes; pass a smaller "
            "wave_tokens, or None"
        )


def token_rows(name: str, tokens: Tokens, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """The tokens of every row, [length] int64 on the CPU, without padding.

    Args:
        name: of one row, for errors. mask: of padded tokens.

    Raises:
        TypeError, ValueError: tokens and mask do not have a form of `Tokens`.
    """
    if isinstance(tokens, torch.Tensor):
        if mask is None:
            raise ValueError(
                f"{name}s is a tensor {list(tokens.shape)} without {name}_mask; pass the mask "
                f"(torch.ones_like({name}s) if nothing is padded), or a list with one sequence per row"
            )
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"{name}_mask is a {type(mask).__name__}; pass a tensor {list(tokens.shape)}")
        if tokens.ndim != 2 or mask.shape != tokens.shape:
            raise ValueError(
                f"{name}s {list(tokens.shape)} and {name}_mask {list(mask.shape)}: pass two tensors [rows, length]"
            )
        mask, tokens = mask.bool().cpu(), tokens.cpu()
        starts = torch.nn.functional.pad(mask.int(), (1, 0)).diff(dim=-1) == 1
        if (holes := starts.sum(-1) > 1).any():
            raise ValueError(
                f"{name}_mask has a hole in row {int(holes.int().argmax())}: it says where tokens are; what only "
                "the loss skips, leave out of your loss"
            )
        tokens = [row[keep] for row, keep in zip(tokens, mask, strict=True)]
    elif mask is not None:
        raise TypeError(f"{name}_mask is for a padded tensor, and {name}s is a {type(tokens).__name__}; leave it out")
    rows = [torch.as_tensor(row, device="cpu") for row in tokens]
    for i, row in enumerate(rows):
        if row.ndim != 1 or (len(row) and (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool)):
            raise TypeError(f"{name}s[{i}] is {row.dtype} of shape {list(row.shape)}; pass token ids, 1-d and integer")
    return [row.long() for row in rows]
