"""What every rank knows of all rows of a mini-batch, before any travels: which prompt, how long, at what cost."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
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
_COLUMNS = 8


def describe(data: TensorDict, shape: ModelShape) -> torch.Tensor:
    """int64 [rows, columns] of what all ranks must know: 128 bits of the group, lengths of prefix and suffix, costs as
    the bits of a double, whether the row has its group's pixels, its length."""
    prompt_lens, response_lens = row_lens(data)
    lens = data["input_ids"].offsets().diff().tolist()
    pixels = tu.get(data, PIXELS) if PIXELS in data.keys() else [None] * len(data)
    table = torch.zeros(len(data), _COLUMNS, dtype=torch.int64)
    keys = _group_keys(data, prompt_lens, pixels)
    costs: dict[tuple[int, int, int], tuple[float, float]] = {}
    for i, (key, prompt_len, response_len, row) in enumerate(
        zip(keys, prompt_lens, response_lens, pixels, strict=True)
    ):
        what = (max(prompt_len - 1, 0), response_len, num_patches(row))
        if what not in costs:
            costs[what] = row_cost(shape, *what)
        table[i, :2] = torch.frombuffer(bytearray(key), dtype=torch.int64)
        table[i, 4:6] = torch.tensor(costs[what], dtype=torch.float64).view(torch.int64)
        table[i, 2:4] = torch.tensor(what[:2])
        table[i, 6], table[i, 7] = what[2] > 0, lens[i]
    return table


def framed(table: torch.Tensor, most: int) -> torch.Tensor:
    """A rank's table behind a row that has its count, and as long as that of the rank with `most` rows."""
    padded = torch.zeros(most + 1, _COLUMNS, dtype=torch.int64)
    padded[0, 0], padded[1 : len(table) + 1] = len(table), table
    return padded


@dataclass(frozen=True)
class AllRows:
    """What every rank knows of all rows, rank after rank; `starts`: first row of each rank, and the end."""

    keys: list[tuple[int, int]]
    prefix_lens: list[int]
    suffix_lens: list[int]
    prefix_costs: list[float]
    suffix_costs: list[float]
    has_pixels: list[int]
    lens: list[int]
    ranks: list[int]
    starts: list[int]

    @classmethod
    def read(cls, every: torch.Tensor) -> "AllRows":
        """Args: every: int64 [ranks, 1 + rows, columns] as `framed` makes them."""
        counts = every[:, 0, 0].tolist()
        table = torch.cat([one[1 : count + 1] for one, count in zip(every, counts, strict=True)])
        key, check, prefix_lens, suffix_lens, *costs, has_pixels, lens = table.T.contiguous()
        prefix_costs, suffix_costs = (x.view(torch.float64).tolist() for x in costs)
        return cls(
            keys=list(zip(key.tolist(), check.tolist(), strict=True)),
            prefix_lens=prefix_lens.tolist(),
            suffix_lens=suffix_lens.tolist(),
            prefix_costs=prefix_costs,
            suffix_costs=suffix_costs,
            has_pixels=has_pixels.tolist(),
            lens=lens.tolist(),
            ranks=[rank for rank, count in enumerate(counts) for _ in range(count)],
            starts=[0, *torch.tensor(counts).cumsum(0).tolist()],
        )

    def groups(self, rows: Sequence[int]) -> list[Group]:
        """Groups of some rows, as indices into `rows`."""
        members: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(rows):
            members.setdefault(self.keys[row], []).append(i)
        return [
            Group(tuple(found), self.prefix_lens[rows[found[0]]], tuple(self.suffix_lens[rows[i]] for i in found))
            for found in members.values()
        ]


def _group_keys(data: TensorDict, prompt_lens: Sequence[int], pixels: Sequence[Any]) -> list[bytes]:
    """16 bytes per row, the same for rows that `groups.group_rows` puts into one group, and for no others."""
    from verl_prefix.engine.shared_pixels import CARRIED_BY, CARRIES  # see `exchange.receive_pixels`

    uids = [str(uid) for uid in tu.get(data, "uid")] if "uid" in data.keys() else [""] * len(data)
    # A row whose pixels another one carries goes by that one's name, as it does itself.
    carriers = [(row or {}).get(CARRIES) or (row or {}).get(CARRIED_BY) for row in pixels]
    shown = [c.encode() if c else d for c, d in zip(carriers, share_pixels(pixels), strict=True)]
    keys = []
    for i, (ids, positions) in enumerate(zip(data["input_ids"].unbind(), data["position_ids"].unbind(), strict=True)):
        found = hashlib.blake2b(digest_size=16)
        for part in (
            uids[i].encode(), shown[i],
            *(x[..., : prompt_lens[i]].cpu().contiguous().numpy().tobytes() for x in (ids, positions)),
        ):  # fmt: skip
            found.update(len(part).to_bytes(8, "little") + part)
        keys.append(found.digest())
    return keys
