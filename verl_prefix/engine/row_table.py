"""Table of all rows of a mini-batch, which every rank has before any travels: which prompt, how long, at what cost."""

import functools
import hashlib
import itertools
import struct
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.auto.placement import row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import Group
from verl_prefix.engine.mini_batch import row_lens
from verl_prefix.models.vision import num_patches, share_pixels

PIXELS = "multi_modal_inputs"
COLUMNS = 8


def describe(data: TensorDict, shape: ModelShape) -> torch.Tensor:
    """int64 [rows, columns] of what all ranks must know: 128 bits of the group, costs as the bits of a double, lengths
    of prefix and suffix, whether the row has its group's pixels, its length."""
    prompt_lens, response_lens = row_lens(data)
    lens = data["input_ids"].offsets().diff().tolist()
    pixels = tu.get(data, PIXELS, [None] * len(data))
    keys = _group_keys(data, prompt_lens, pixels)
    cost = functools.cache(functools.partial(row_cost, shape))
    table = []
    for key, prompt_len, response_len, length, row in zip(keys, prompt_lens, response_lens, lens, pixels, strict=True):
        prefix_len, patches = max(prompt_len - 1, 0), num_patches(row)
        costs = struct.pack("=2d", *cost(prefix_len, response_len, patches))
        table.append([*struct.unpack("=4q", key + costs), prefix_len, response_len, patches > 0, length])
    return torch.tensor(table, dtype=torch.int64).view(-1, COLUMNS)


class AllRows:
    """Columns of all ranks' tables, rank after rank, in lists of one item per row; `starts`: first row of each rank,
    and the end.

    Args:
        tables: of each rank as `describe` makes them.
    """

    def __init__(self, tables: Sequence[torch.Tensor]) -> None:
        key, check, *costs, prefix_lens, suffix_lens, has_pixels, lens = torch.cat(list(tables)).T.contiguous()
        self.keys = list(zip(key.tolist(), check.tolist(), strict=True))
        self.prefix_costs, self.suffix_costs = (x.view(torch.float64).tolist() for x in costs)
        self.prefix_lens, self.suffix_lens = prefix_lens.tolist(), suffix_lens.tolist()
        self.has_pixels, self.lens = has_pixels.tolist(), lens.tolist()
        self.ranks = [rank for rank, table in enumerate(tables) for _ in range(len(table))]
        self.starts = list(itertools.accumulate(map(len, tables), initial=0))

    def groups(self, rows: Sequence[int]) -> list[Group]:
        """Groups of some rows, as indices into `rows`."""
        members: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(rows):
            members.setdefault(self.keys[row], []).append(i)
        return [
            Group(tuple(inside), self.prefix_lens[rows[inside[0]]], tuple(self.suffix_lens[rows[i]] for i in inside))
            for inside in members.values()
        ]


def _group_keys(data: TensorDict, prompt_lens: Sequence[int], pixels: Sequence[Any]) -> list[bytes]:
    """16 bytes per row, the same for rows that `groups.group_rows` puts into one group, and for no others."""
    from verl_prefix.engine.shared_pixels import CARRIED_BY, CARRIES  # see `exchange._receive_pixels`

    uids = tu.get(data, "uid", [""] * len(data))
    # A row whose pixels another one carries goes by that one's name, as it does itself.
    carriers = [(row or {}).get(CARRIES) or (row or {}).get(CARRIED_BY) for row in pixels]
    shown = [c.encode() if c else d for c, d in zip(carriers, share_pixels(pixels), strict=True)]
    keys = []
    tokens = zip(prompt_lens, data["input_ids"].unbind(), data["position_ids"].unbind(), strict=True)
    for uid, pixels_name, (prompt_len, *prompt) in zip(uids, shown, tokens, strict=True):
        key = hashlib.blake2b(digest_size=16)
        parts = (x[..., :prompt_len].cpu().contiguous().numpy().tobytes() for x in prompt)
        for part in (str(uid).encode(), pixels_name, *parts):
            key.update(len(part).to_bytes(8, "little") + part)
        keys.append(key.digest())
    return keys
