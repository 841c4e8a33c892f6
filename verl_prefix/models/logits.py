"""Finds who changes or reads logits between lm_head and the model's output. For them all logits of a pass have to exist
at once, and outputs of tokens are made of what they leave."""

from collections.abc import Callable, Iterator

import torch
from transformers import PretrainedConfig, PreTrainedModel

from verl_prefix.models.advice import WHOLE_ROWS

# Fields of configs by which models of transformers change logits behind lm_head.
_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
# Packages whose code does not change logits, but for models that have one of `_SCALES`. accelerate's casts to fp32.
_HANDS_ON = ("transformers.", "torch.", "peft.", "verl.", "veomni.", "liger_kernel.", "accelerate.utils.operations.")
# Modules of wrappers that run a forward in autocast, as accelerator.prepare makes them, and of those in any context.
_AUTOCAST = ("torch.amp.", "accelerate.utils.operations.")
_CONTEXTS = (*_AUTOCAST, "torch.utils._contextlib.")
_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


def scales_logits(config: PretrainedConfig) -> bool:
    """Whether a text model's own code changes logits behind lm_head, by its config."""
    return any(getattr(config, name, None) not in (None, 1, 1.0) for name in _SCALES)


def written_elsewhere(call: Callable[..., object]) -> str | None:
    """The Python module of a function, or of one that it wraps, if that may change logits; None: it hands them on."""
    return next((module for module in _python_modules(call) if not f"{module}.".startswith(_HANDS_ON)), None)


def _python_modules(call: Callable[..., object]) -> Iterator[str]:
    """The Python modules of a function and of those that it wraps."""
    seen: object = call
    while seen is not None:
        seen = getattr(seen, "__func__", getattr(seen, "func", seen))  # of a method, or of a partial
        yield str(getattr(seen, "__globals__", {}).get("__name__") or type(seen).__module__)
        seen = getattr(seen, "__wrapped__", None)


def check_contexts(module: torch.nn.Module, device: torch.device) -> None:
    """Raises RuntimeError where a module's forward is wrapped in autocast, and none is on; or in any other context, on
    or not, since nobody can tell. For use where the module's parts run and its forward does not."""
    in_autocast = torch.is_autocast_enabled(device.type)
    wrappers = [name for name in _python_modules(module.forward) if f"{name}.".startswith(_CONTEXTS)]
    if missed := [name for name in wrappers if not (in_autocast and f"{name}.".startswith(_AUTOCAST))]:
        raise RuntimeError(
            f"{type(module).__name__} has a forward in a wrapper of {missed[0]}, as accelerator.prepare and decorators "
            "make them, and this call runs its parts, outside of the wrapper; call inside accelerator.autocast() or "
            "torch.autocast instead, and inside other contexts without their decorator"
        )


def hooks_elsewhere(module: torch.nn.Module) -> Iterator[str]:
    """Python modules of others that have hooks on a module."""
    hooks = (hook for kind in ("_forward_pre_hooks", *_HOOKS) for hook in getattr(module, kind).values())
    yield from filter(None, map(written_elsewhere, hooks))


def check_runs_in_parts(module: torch.nn.Module, device: torch.device) -> None:
    """Raises RuntimeError where hooks, forwards or wrappers of others on a module would be left out: its parts run, and
    not itself. Hooks of every module do not count: they see the parts."""
    if elsewhere := next(hooks_elsewhere(module), written_elsewhere(module.forward)):
        raise RuntimeError(
            f"{type(module).__name__} has a hook or forward of {elsewhere}. A shared prefix calls its tower and text "
            f"model by themselves, and would leave it out; put a hook on these or on the whole model, or {WHOLE_ROWS}"
        )
    check_contexts(module, device)


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
        for kind in _HOOKS:
            yield from filter(None, map(written_elsewhere, getattr(owner, prefix + kind).values()))
