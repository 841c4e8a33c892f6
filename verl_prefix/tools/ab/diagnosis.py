"""Diagnosis of an engine that is off: the first layer's output, log-probs or gradient of a step that differs."""

import functools
import math
import re
from typing import Any

import torch

from verl_prefix.tools.ab.arm import STOCK, Arm, errors_by_parameter, relative_error
from verl_prefix.trace import StepRows

# ||difference|| / ||stock's|| of a layer's outputs above which it is named.
DIVERGED = {"fp32": 5e-6, "bf16": 6e-2}


def _depth(name: str) -> float:
    """Order in which backward reaches a module: what follows the decoder layers first, then layers from the last."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", name)
    return float(layer[1]) if layer else -1.0 if "embed" in name else float("inf")


def _layer_outputs(arm: Arm, rows: StepRows, start: list[torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Every decoder layer's output at the batch's flat tokens: [N] whether the engine computed it, and [N, hidden]. Our
    last layer computes it whole only of tokens of lm_head (`models.last_layer`)."""
    num_tokens = len(rows.jagged["input_ids"][0])
    layers = {n: m for n, m in arm.engine.module.named_modules() if re.search(r"(?:^|\.)layers\.\d+$", n)}
    outputs: dict[str, tuple[torch.Tensor, ...]] = {}
    cursors, (*_, last) = dict.fromkeys(layers, 0), layers

    def keep(name: str, _module, _args, kwargs: dict[str, Any], output: Any) -> None:
        hidden = (output[0] if isinstance(output, tuple) else output).detach()[0].double().cpu()
        ours = kwargs.get("prefix_context")
        tokens = (
            torch.arange(cursors[name], cursors[name] + len(hidden)) if ours is None else ours.packed_row.places.cpu()
        )
        cursors[name] += len(hidden)
        if ours is not None and name == last:
            tokens, hidden = (x[ours.head_tokens.cpu()] for x in (tokens, hidden))
        none = torch.zeros(num_tokens, dtype=torch.bool), torch.zeros(num_tokens, hidden.shape[-1], dtype=torch.float64)
        computed, values = outputs.setdefault(name, none)
        computed[tokens], values[tokens] = True, hidden

    hooks = [m.register_forward_hook(functools.partial(keep, n), with_kwargs=True) for n, m in layers.items()]
    try:
        with arm.at(start):  # ours in the update's passes; stock row by row, which is the order of the flat tokens
            flags = dict(use_dynamic_bsz=False, micro_batch_size_per_gpu=1) if arm.name == STOCK else {}
            with arm.engine.eval_mode():
                arm.engine.infer_batch(arm.data(rows, **flags))
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def first_diverging(
    arm: Arm, stock: Arm, rows: StepRows, start: list[torch.Tensor], *, dtype: str, limits: dict[str, float]
) -> dict[str, Any] | None:
    """The first quantity of a step, in the order in which it is computed, in which an arm is off: layer outputs,
    log-probs, gradients; None where each is within its limit.

    Call it right after both arms computed `rows` from the weights `start`.

    Args:
        limits: `verdict.same_weights_limits`; a figure without one is named only where it is not a number.
    """
    ours, theirs = (_layer_outputs(engine, rows, start) for engine in (arm, stock))
    for layer, (known, reference) in theirs.items():
        both = ours[layer][0] & known
        error = relative_error([(ours[layer][1][both], reference[both])])
        if not error <= DIVERGED[dtype]:  # NaN is not, either
            return {"quantity": "layer output", "layer": layer, "error": error}
    for name in ("log_probs", "infer_log_probs"):
        if not (error := relative_error([(getattr(arm, name), getattr(stock, name))])) <= limits.get(name, math.inf):
            return {"quantity": name, "layer": "lm_head", "error": error}
    worst = limits.get("worst_grad", math.inf)
    errors = zip(errors_by_parameter(arm, stock), arm.names, strict=True)
    diverged = [(_depth(name), error, name) for error, name in errors if not error <= worst]
    if not diverged:
        return None
    _, error, name = max(diverged)
    return {"quantity": "gradient", "layer": name, "error": error}
