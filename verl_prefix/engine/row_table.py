"""Table of all rows of a mini-batch, which every rank has before any travels: which key, how long, at what cost."""

import functools
import hashlib
import itertools
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.auto.placement import Placement, fill_empty_ranks, place_rows, row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import rows_by_key
from verl_prefix.engine.rows import PIXELS, row_keys, row_lens, uids_of
from verl_prefix.models.vision import num_patches

COLUMNS = 8


def describe(data: TensorDict, shape: ModelShape) -> torch.Tensor:
    """int64 [rows, columns] of what all ranks must know: 128 bits of the key, costs of prefix and suffix as the bits of
    a double, whether the row has its group's pixels, its length, 64 bits of its uid and of its session."""
    prompt_lens, response_lens = row_lens(data)
    lens = data["input_ids"].offsets().diff().tolist()
    patches = map(num_patches, tu.get(data, PIXELS, [None] * len(data)))
    cost = functools.cache(functools.partial(row_cost, shape))
    keys, table = row_keys(data), []
    for key, prompt_len, response_len, num, length in zip(keys, prompt_lens, response_lens, patches, lens, strict=True):
        costs = struct.pack("=2d", *cost(max(prompt_len - 1, 0), response_len, num))
        table.append([*struct.unpack("=4q", key + costs), num > 0, length])
    uids = uids_of(data, keys)
    sessions = zip(uids, tu.get(data, "session_id", [None] * len(data)), strict=True)
    for row, uid, session in zip(table, uids, sessions, strict=True):
        row += [_digest(uid), _digest(f"{uid} {session}")]
    return torch.tensor(table, dtype=torch.int64).view(-1, COLUMNS)


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


class AllRows:
    """Columns of all ranks' tables, rank after rank, in lists of one item per row; `starts`: first row of each rank,
    and the end.

    Args:
        tables: of each rank as `describe` makes them.
    """

    def __init__(self, tables: Sequence[torch.Tensor]) -> None:
        key, check, *costs, has_pixels, lens, uids, sessions = torch.cat(list(tables)).T.contiguous()
        self.keys = list(zip(key.tolist(), check.tolist(), strict=True))
        self.prefix_costs, self.suffix_costs = (x.view(torch.float64).tolist() for x in costs)
        self.has_pixels, self.lens = has_pixels.tolist(), lens.tolist()
        self.uids, self.sessions = uids.tolist(), sessions.tolist()
        self.ranks = [rank for rank, table in enumerate(tables) for _ in range(len(table))]
        self.starts = list(itertools.accumulate(map(len, tables), initial=0))

    def place(self, num_ranks: int) -> Placement:
        """Each group on one rank, as `place_rows`."""
        args = self.keys, self.prefix_costs, self.suffix_costs, self.ranks, num_ranks
        return place_rows(*args, self.has_pixels)

    def place_turns(self, num_ranks: int) -> Placement:
        """Each uid on one rank, or where balance needs it its sessions on several, all rows of a session on one; but
        where sessions are fewer than ranks, a rank without any has one row of others.

        To `place_rows` a session is one row: its prefix is the uid's shortest prompt, which all sessions begin with,
        and its suffix what the session's longest prompt has beyond that, and all its responses. Where rows have pixels
        a uid's sessions stay together, since one row holds those of others, on any rank: rows bring them.
        """
        units = self.uids if any(self.has_pixels) else self.sessions
        sessions = list(rows_by_key(units).values())
        trunks = {uid: min(self.prefix_costs[row] for row in rows) for uid, rows in rows_by_key(self.uids).items()}
        longest = [max(rows, key=lambda row: self.prefix_costs[row]) for rows in sessions]
        uids = [self.uids[row] for row in longest]
        suffixes = [
            self.prefix_costs[row] - trunks[uid] + sum(self.suffix_costs[i] for i in rows)
            for row, uid, rows in zip(longest, uids, sessions, strict=True)
        ]
        ranks = [self.ranks[row] for row in longest]
        placement = place_rows(uids, [trunks[uid] for uid in uids], suffixes, ranks, num_ranks)
        of_row = {row: home for home, rows in zip(placement.ranks, sessions, strict=True) for row in rows}
        homes = [of_row[row] for row in range(len(self.keys))]
        visual = {row for row, has in enumerate(self.has_pixels) if has}
        fill_empty_ranks(homes, self.ranks, self.suffix_costs, num_ranks, visual, self.has_pixels)
        ranks_of = Counter(uid for uid, _ in {*zip(self.uids, homes, strict=True)})
        return replace(placement, ranks=homes, split_groups=sum(n > 1 for n in ranks_of.values()))
