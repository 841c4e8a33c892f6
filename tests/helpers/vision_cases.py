"""Tiny vision models, their rows, and passes over them by Hugging Face and by us."""

import copy
import dataclasses
from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from families import float64_inside  # noqa: F401
from runners import run_shared
from transformers import AutoModelForImageTextToText
from vision_engines import seen_by

from verl_prefix.api.pixels import positions_of_row
from verl_prefix.models import vision
from verl_prefix.testing import Rollouts, visual_prompt, write_tiny_model

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v")
# (what the prompt consists of, response lengths), see `visual_prompt`.
SHAPE = [
    ([5, (4, 8), 7], [9, 4, 6]),
    ([3, (3, 4, 4), 6], [5, 12]),
    ([4, (4, 4), 2, (2, 4, 8), 3, (8, 4), 5], [7, 2, 8]),
    ([21], [6, 3]),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(tmp / family, family=family, initializer_range=0.1) for family in FAMILIES}


class Case:
    """A model, rows with pixels, and both ways to compute them."""

    def __init__(self, path: str, dtype: torch.dtype = torch.float64) -> None:
        self.model = self.build(path, dtype)
        generator = torch.Generator().manual_seed(0)
        vocab_size = self.model.config.text_config.vocab_size
        rows = [
            (prompt, response, torch.randn(len(response), generator=generator, dtype=torch.float64), pixels, cuts)
            for prompt, response, pixels, cuts in self.rows(generator, vocab_size)
        ]
        rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
        self.pixels = [row[3] for row in rows]
        self.rollouts = Rollouts(*([row[i] for row in rows] for i in range(3)))
        self.cuts = [row[4] for row in rows]
        self.ids = [torch.cat([row[0], row[1]]) for row in rows]

    def build(self, path: str, dtype: torch.dtype) -> torch.nn.Module:
        model = AutoModelForImageTextToText.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
        )
        return model.train().to(dtype)  # transformers keeps weights of some routers in fp32, and their gradients

    def whole(self, ids: torch.Tensor, pixels: dict) -> torch.Tensor:
        """Logits [1, T, vocabulary] of a whole row by the model's own forward."""
        kinds = (ids == self.model.config.image_token_id) + 2 * (ids == self.model.config.video_token_id)
        return self.model(input_ids=ids[None], mm_token_type_ids=kinds[None], use_cache=False, **pixels).logits

    def rows(self, generator: torch.Generator, vocab_size: int) -> Iterator[tuple]:
        """(prompt, response, pixels, cuts); here groups of one prompt."""
        for parts, lens in SHAPE:
            prompt, pixels = visual_prompt(seen_by(self.model.config, parts), self.model.config, generator)
            for n in lens:
                response = torch.randint(7, vocab_size, (n,), generator=generator)
                yield prompt, response, copy.deepcopy(pixels), [len(prompt) - 1]

    def truth(self) -> list[torch.Tensor]:
        found = []
        for ids, pixels, response, weight in zip(
            self.ids, self.pixels, self.rollouts.responses, self.rollouts.weights, strict=True
        ):
            log_probs = (
                self.whole(ids, pixels)[0, -len(response) - 1 : -1].log_softmax(-1).gather(-1, response[:, None])[:, 0]
            )
            loss = (log_probs * weight).sum()
            if loss.requires_grad:  # of text alone, where the tower alone is trained, it does not
                loss.backward()
            found.append(log_probs.detach())
        return found

    def ours(self, edit=lambda tokens: tokens, **options) -> list[torch.Tensor]:
        def with_pixels(tokens, plan):
            positions = [positions_of_row(self.model, *row, 0) for row in zip(self.ids, self.pixels, strict=True)]
            batch = vision.PixelBatch(self.pixels, tokens.input_ids, tokens.offsets, self.model.config)
            return edit(dataclasses.replace(tokens, position_ids=torch.cat(positions, dim=1), pixels=batch))

        return run_shared(self.model, self.rollouts, edit=with_pixels, **options)


class Turns(Case):
    """Rows of turns, each with an image or a clip more, in sessions that share the first one."""

    def rows(self, generator: torch.Generator, vocab_size: int) -> Iterator[tuple]:
        def some(length: int) -> torch.Tensor:
            return torch.randint(7, vocab_size, (length,), generator=generator)

        config, values = self.model.config, ("pixel_values", "image_grid_thw")
        question = visual_prompt([4, (4, 8), 3], config, generator)
        for _ in range(2):
            messages, pixels = [question[0]], [question[1]]
            for turn in range(3):
                history, header = torch.cat(messages), some(2)
                cuts = [end - 1 for end in accumulate(map(len, messages))]
                response = some(5 + turn)
                shown = {name: torch.cat([one[name] for one in pixels]) for name in values}
                yield torch.cat([history, header]), response, shown, cuts
                tool, seen = visual_prompt([2, (4, 4 + 4 * (turn % 2)), 3], config, generator)
                messages += [torch.cat([header, response]), tool]
                pixels.append(seen)
