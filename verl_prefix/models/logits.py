"""Finds who changes or reads logits between lm_head and the model's output. For them all logits of a pass have to exist
at once, and outputs of tokens are made of what they leave."""

from collections.abc import Callable, Iterator

import torch
from transformers import PretrainedConfig, PreTrainedModel

# Fields of configs by which models of transformers change logits behind lm_head.
_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
# Where code comes from that hands logits on as they are, `_SCALES` apart. accelerate's casts what is not fp32.
_HANDS_ON = ("transformers.", "torch.", "peft.", "verl.", "veomni.", "liger_kernel.", "accelerate.utils.operations.")


def scales_logits(config: PretrainedConfig) -> bool:
    """Whether a text model's own code changes logits behind lm_head, by its config."""
    return any(getattr(config, name, None) not in (None, 1, 1.0) for name in _SCALES)


def written_elsewhere(call: Callable[..., object]) -> str | None:
    """The Python module of a function, or of one that it wraps, if that may change logits; None: it hands them on."""
    seen: object = call
    while seen is not None:
        seen = getattr(seen, "__func__", getattr(seen, "func", seen))  # of a method, or of a partial
        module = getattr(seen, "__globals__", {}).get("__name__") or type(seen).__module__
        if not f"{module}.".startswith(_HANDS_ON):
            return str(module)
        seen = getattr(seen, "__wrapped__", None)
    return None


def readers(model: PreTrainedModel, lm_head: torch.nn.Module) -> list[str]:
    """Hooks and forwards that others put around `lm_head`, and that see its logits, in words. FSDP2's hooks, which
    reshard weights, are not among them."""
    name = next((name for name, module in model.named_modules() if module is lm_head), "")
    parents = name.split(".")[:-1]
    around = [model.get_submodule(".".join(parents[:n])) for n in range(len(parents) + 1)]
    forwards = ((type(module).__name__, written_elsewhere(module.forward)) for module in around)
    return [f"a hook of {elsewhere}" for elsewhere in _hooks(lm_head, *around)] + [
        f"the forward of {kind}, by {elsewhere}," for kind, elsewhere in forwards if elsewhere
    ]


def _hooks(*modules: torch.nn.Module) -> Iterator[str]:
    """Python modules of others that have hooks on outputs of these modules, or of every module."""
    owners = [*((module, "") for module in modules), (torch.nn.modules.module, "_global")]
    for owner, prefix in owners:
        for kind in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            yield from filter(None, map(written_elsewhere, getattr(owner, prefix + kind).values()))
