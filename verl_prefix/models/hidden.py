"""Gives hidden states instead of logits, for heads that the caller owns."""

from types import SimpleNamespace
from typing import Any

import torch

from verl_prefix.models import vision
from verl_prefix.models.hookup import HookedModel
from verl_prefix.models.logits import check_contexts


class HiddenStateModel(HookedModel):
    """A `core.forward.Model` whose "logits" are the decoder's last hidden states [1, n, hidden size], all at once. The
    model may have any head, which does not run.

    Raises:
        RuntimeError: the model's forward is in a wrapper whose context is not on.
    """

    def _needs_all_logits(self, lm_head: object, of_head: object) -> bool:
        return True

    def logits(self, inputs: dict[str, Any], keep: torch.Tensor, seen: dict[str, Any]) -> torch.Tensor:
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        for whole in (self.model, base):
            check_contexts(whole, keep.device)
        if not vision.is_vision_config(self.model.config):
            hidden: torch.Tensor = self.model.get_decoder()(**inputs).last_hidden_state[:, keep]
            return hidden
        inner = vision.inner_model(self.model)
        headless: Any = SimpleNamespace(
            config=inner.config, model=inner, get_input_embeddings=inner.get_input_embeddings,
            lm_head=lambda hidden: hidden,
        )  # fmt: skip
        return vision.forward(headless, keep=keep, **seen, **inputs).logits
