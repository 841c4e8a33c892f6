"""Hidden states instead of logits, for heads that the caller owns."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from verl_prefix.core.attention import AttentionPass
from verl_prefix.models import vision
from verl_prefix.models.hookup import HookedModel


class HiddenStateModel(HookedModel):
    """A `core.schedule.Model` whose "logits" are the decoder's last hidden states; the model may have any head."""

    def token_outputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        keep: torch.Tensor,
        attention_pass: AttentionPass,
        outputs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
        logits_chunk: int,
        pixels: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """As `HookedModel.token_outputs`, but `outputs` gets hidden states [n, hidden size], all at once."""
        inputs = self.inputs(input_ids, position_ids, attention_pass)
        calls = attention_pass.num_calls
        if (seeing := vision.vision_model(self.model)) is None:
            hidden = self.model.get_decoder()(**inputs).last_hidden_state[0, keep]
        else:
            headless: Any = SimpleNamespace(
                config=seeing.config, model=seeing.model, get_input_embeddings=seeing.get_input_embeddings,
                lm_head=lambda hidden: hidden,
            )  # fmt: skip
            tower = attention_pass.cache is None
            hidden = vision.forward(headless, keep=keep, tower=tower, **pixels, **inputs).logits[0]
        self.check_calls(attention_pass.num_calls - calls)
        return hidden.sum(-1, keepdim=True) if outputs is None else outputs(torch.arange(len(keep)), hidden)
