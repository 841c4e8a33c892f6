"""Vision models of transformers 5 under verl 0.9.1: what its own path lacks there, and what ours takes back."""

import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

from verl_prefix.models.replaced import replaced
from verl_prefix.models.veomni import is_veomni
from verl_prefix.models.vision import UNPATCHED, black_image, gathered_positions, vision_model


@contextmanager
def towers_of_tensors(model: torch.nn.Module) -> Iterator[None]:
    """Context in which verl's own path runs on a vision model.

    verl 0.9.1 takes a tower's output for the features themselves: always with GLM-4.1V, on text alone with Qwen2.5-VL
    (verl/models/transformers/glm4v.py, qwen2_vl.py). Towers of transformers 5 return more, so here they return features
    alone. The forwards of `UNPATCHED` run no tower on text alone, for which other ranks would wait; here they do.
    VeOmni's models have forwards of their own, and lack nothing.
    """
    model_type = getattr(model.config, "model_type", None)
    inner: Any = vision_model(model).model if model_type in ("glm4v", "qwen2_5_vl", *UNPATCHED) else None
    if inner is None or is_veomni(inner):
        yield
        return
    visual, run, run_tower = inner.visual, inner.forward, inner.visual.forward

    def with_tower(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if kwargs.get("pixel_values") is not None:
            return run(input_ids, **kwargs)
        embeds = inner.get_input_embeddings()(input_ids)
        patches, grid = black_image(inner.config.vision_config, embeds)
        features = visual(patches.type(visual.dtype), grid_thw=grid).pooler_output
        return run(**kwargs | {"inputs_embeds": embeds + 0.0 * features.mean()})

    with (
        gathered_positions(visual),
        replaced(inner, "forward", with_tower)
        if model_type in UNPATCHED
        else replaced(visual, "forward", lambda *args, **kwargs: run_tower(*args, **kwargs).pooler_output),
    ):
        yield


@contextmanager
def own_attention(model: torch.nn.Module) -> Iterator[None]:
    """Context in which text layers of a vision model have the attention forward of transformers.

    Under remove-padding verl puts another into the class, which calls flash attention itself on repeated keys and
    values (verl/models/transformers/monkey_patch.py), so that no attention function of ours would be called.
    """
    modules = () if vision_model(model) is None else model.modules()
    with ExitStack() as stack:
        for cls in {type(m) for m in modules if hasattr(m, "layer_idx") and hasattr(m, "is_causal")}:
            if cls.forward.__module__ != cls.__module__:
                stack.enter_context(replaced(cls, "forward", _own_forward(cls.__module__, cls.__name__)))
        yield


@functools.cache
def _own_forward(module_name: str, class_name: str) -> Any:
    """The forward that transformers' file gives a class, whatever others have put in its place.

    verl keeps no original of a forward that it replaces, and may replace it before any code of ours runs: a critic, or
    verl's engine in the same process, comes first. A forward of our own would have to follow each version's rotary
    angles. The module's compiled code still has it.
    """
    spec: Any = importlib.util.find_spec(module_name)
    code: CodeType = spec.loader.get_code(module_name)
    for name in (class_name, "forward"):
        code = next(part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name)
    defaults = (None,) * (code.co_argcount - 2)  # behind self and the hidden states
    return FunctionType(code, vars(sys.modules[module_name]), "forward", defaults)
