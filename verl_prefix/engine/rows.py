"""Rows of verl's batch: how long they are, which belong together, and the groups that they make."""

import hashlib
from collections.abc import Hashable, Sequence

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.core.groups import Group, rows_by_key
from verl_prefix.models.vision import share_pixels

PIXELS = "multi_modal_inputs"


def row_lens(data: TensorDict) -> tuple[list[int], list[int]]:
    """Numbers of tokens of every row's prompt and response, counted as verl does (verl/workers/utils/padding.py): both
    are jagged (v1 trainer), or prompts padded left and responses right (left_right_2_no_padding of the legacy one)."""
    prompts, responses = data["prompts"], data["responses"]
    if prompts.is_nested:
        return prompts.offsets().diff().tolist(), responses.offsets().diff().tolist()
    mask = data["attention_mask"].bool().split([prompts.shape[1], responses.shape[1]], dim=1)
    return mask[0].sum(1).tolist(), mask[1].sum(1).tolist()


def row_keys(data: TensorDict) -> list[bytes]:
    """Digest of every row's uid, pixels, prompt tokens and their positions: rows with the same one belong together.
    Those that hold equal pixels then hold one tensor of them (`vision.share_pixels`)."""
    from verl_prefix.engine.shared_pixels import CARRIED_BY, CARRIES  # here: it loads verl's trainers

    uids, pixels = tu.get(data, "uid", [""] * len(data)), tu.get(data, PIXELS, [None] * len(data))
    # A row whose pixels another one carries goes by that one's name, as it does itself.
    carriers = [(row or {}).get(CARRIES) or (row or {}).get(CARRIED_BY) for row in pixels]
    shown = [c.encode() if c else digest for c, digest in zip(carriers, share_pixels(pixels), strict=True)]
    tokens = zip(row_lens(data)[0], data["input_ids"].unbind(), data["position_ids"].unbind(), strict=True)
    keys = []
    for uid, pixels_name, (prompt_len, *prompt) in zip(uids, shown, tokens, strict=True):
        key = hashlib.blake2b(digest_size=16)
        parts = (x[..., :prompt_len].cpu().contiguous().numpy().tobytes() for x in prompt)
        for part in (str(uid).encode(), pixels_name, *parts):
            key.update(len(part).to_bytes(8, "little") + part)
        keys.append(key.digest())
    return keys


def group_rows(data: TensorDict, keys: Sequence[Hashable]) -> list[Group]:
    """The groups of all rows that this rank computes: of rows with the same key. The engine makes groups here alone.

    Args:
        data: the rows, wherever they came from. keys: theirs by `row_keys`, from where they came.

    Raises:
        ValueError: a row's prompt is empty, or not that of its group: it did not arrive as it left.
    """
    prompt_lens, response_lens = row_lens(data)
    prompts = [row[:n] for row, n in zip(data["input_ids"].unbind(), prompt_lens, strict=True)]
    if 0 in prompt_lens:
        raise ValueError(
            f"row {prompt_lens.index(0)} has an empty prompt; verl needs at least one prompt token per row"
        )
    groups = []
    for rows in rows_by_key(keys).values():
        if not all(torch.equal(prompts[row], prompts[rows[0]]) for row in rows):
            raise ValueError(f"rows {rows} arrived as one group, and their prompts differ")
        groups.append(Group(tuple(rows), prompt_lens[rows[0]] - 1, tuple(response_lens[row] for row in rows)))
    return groups
