"""Gives hidden states instead of logits, for heads that the caller owns."""

from types import SimpleNamespace
from typing import Any

import torch

from verl_prefix.models import vision
from verl_prefix.models.advice import WHOLE_ROWS
from verl_prefix.models.hookup import HookedModel
from verl_prefix.models.logits import check_contexts, hooks_elsewhere


class HiddenStateModel(HookedModel):
    """A `core.forward.Model` whose "logits" are the decoder's last hidden states [1, n, hidden size], all at once. The
    model may have any head, which does not run.

    Raises:
        RuntimeError: the model's forward, which does not run, is in a wrapper that `check_contexts` refuses, or has
            hooks.
    """

    def _needs_all_logits(self, lm_head: object, of_head: object) -> bool:
        return True

    def logits(self, inputs: dict[str, Any], keep: torch.Tensor, seen: dict[str, Any]) -> torch.Tensor:
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        sees = vision.is_vision_config(self.model.config)
        inner = vision.inner_model(self.model) if sees else self.model.get_decoder()
        for whole in (self.model, base):
            if whole is inner:  # without a head it runs itself, or `vision.forward` checks it
                continue
            check_contexts(whole, keep.device)
            if elsewhere := next(hooks_elsewhere(whole), None):
                raise RuntimeError(
                    f"{type(whole).__name__} has a hook of {elsewhere}. Hidden states come from the "
                    f"{type(inner).__name__} in it, and would leave the hook out; put it on that one, or {WHOLE_ROWS}"
                )
        if not sees:
            hidden: torch.Tensor = inner(**inputs).last_hidden_state[:, keep]
            return hidden
        headless: Any = SimpleNamespace(
            config=inner.config, model=inner, get_input_embeddings=inner.get_input_embeddings,
            lm_head=lambda hidden: hidden,
        )  # fmt: skip
        return vision.forward(headless, keep=keep, **seen, **inputs).logits
