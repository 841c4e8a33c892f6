"""Finds where the messages of a chat end, by the tokenizer's chat template. There rows of turns may part."""

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

_CHAT = {"user": "question", "assistant": "answer"}


def end_tokens(tokenizer: Any) -> set[int]:
    """Tokens that end a message by the tokenizer's chat template, and the token that ends a text. The template is tried
    on a question and an answer. If it changes or leaves out one of these, no token of that message is found; if it
    fails, none but the text's. Without a tokenizer there are none."""
    eos = getattr(tokenizer, "eos_token_id", None)
    ends: set[int] = set() if eos is None else {eos}
    if getattr(tokenizer, "chat_template", None):
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        special |= set(tokenizer.all_special_ids)
        chat, text = [{"role": role, "content": content} for role, content in _CHAT.items()], ""
        try:
            text = tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception as error:  # jinja2's, or whatever the template's own code meets
            logger.warning(
                "prefix.trees: chat_template of the tokenizer fails on a question and its answer, so rows part at no "
                "ends of messages but eos: %s", error
            )  # fmt: skip
        for content in _CHAT.values():
            _, found, behind = text.rpartition(content)
            tokens = tokenizer(behind, add_special_tokens=False)["input_ids"] if found else []
            ends |= {*[token for token in tokens if token in special][:1]}
    return ends


def message_ends(prompts: Sequence[Sequence[int] | torch.Tensor], tokens: Collection[int]) -> list[list[int]]:
    """For each prompt, how many tokens it has up to the end of each message, by one of `tokens` (`end_tokens`)."""
    wanted = torch.tensor(sorted(tokens), dtype=torch.int64)
    return [(torch.isin(torch.as_tensor(p).cpu(), wanted).nonzero()[:, 0] + 1).tolist() for p in prompts]
