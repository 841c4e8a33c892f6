"""Finds where the messages of a chat end, by the tokenizer's own template. That is where rows of turns may part."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

_CONTENTS = ("question", "answer")


def end_tokens(tokenizer: Any) -> set[int]:
    """Tokens that end a message of the tokenizer's chat template, or a whole text; without a tokenizer none."""
    eos = getattr(tokenizer, "eos_token_id", None)
    ends: set[int] = set() if eos is None else {eos}
    if getattr(tokenizer, "chat_template", None):
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        special |= set(tokenizer.all_special_ids)
        roles = zip(("user", "assistant"), _CONTENTS, strict=True)
        chat = [{"role": role, "content": content} for role, content in roles]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        for content in _CONTENTS:
            behind = tokenizer(text.rpartition(content)[2], add_special_tokens=False)["input_ids"]
            ends |= {*[token for token in behind if token in special][:1]}
    return ends


def message_ends(prompts: Sequence[Sequence[int] | torch.Tensor], tokens: Collection[int]) -> list[list[int]]:
    """For each prompt, after how many tokens a message ends: each place just after one of `tokens` (`end_tokens`)."""
    wanted = torch.tensor(sorted(tokens), dtype=torch.int64)
    return [(torch.isin(torch.as_tensor(p).cpu(), wanted).nonzero()[:, 0] + 1).tolist() for p in prompts]
