"""Table of all rows of a mini-batch, which every rank has before any travels: which key, how long, at what cost."""

import functools
import itertools
import struct
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.auto.placement import row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.engine.rows import PIXELS, row_keys, row_lens
from verl_prefix.models.vision import num_patches

COLUMNS = 6


def describe(data: TensorDict, shape: ModelShape) -> torch.Tensor:
    """int64 [rows, columns] of what all ranks must know: 128 bits of the key, costs of prefix and suffix as the bits of
    a double, whether the row has its group's pixels, its length."""
    prompt_lens, response_lens = row_lens(data)
    lens = data["input_ids"].offsets().diff().tolist()
    patches = map(num_patches, tu.get(data, PIXELS, [None] * len(data)))
    cost = functools.cache(functools.partial(row_cost, shape))
    table = []
    for key, prompt_len, response_len, num, length in zip(
        row_keys(data), prompt_lens, response_lens, patches, lens, strict=True
    ):
        costs = struct.pack("=2d", *cost(max(prompt_len - 1, 0), response_len, num))
        table.append([*struct.unpack("=4q", key + costs), num > 0, length])
    return torch.tensor(table, dtype=torch.int64).view(-1, COLUMNS)


class AllRows:
    """Columns of all ranks' tables, rank after rank, in lists of one item per row; `starts`: first row of each rank,
    and the end.

    Args:
        tables: of each rank as `describe` makes them.
    """

    def __init__(self, tables: Sequence[torch.Tensor]) -> None:
        key, check, *costs, has_pixels, lens = torch.cat(list(tables)).T.contiguous()
        self.keys = list(zip(key.tolist(), check.tolist(), strict=True))
        self.prefix_costs, self.suffix_costs = (x.view(torch.float64).tolist() for x in costs)
        self.has_pixels, self.lens = has_pixels.tolist(), lens.tolist()
        self.ranks = [rank for rank, table in enumerate(tables) for _ in range(len(table))]
        self.starts = list(itertools.accumulate(map(len, tables), initial=0))
