"""Table of all rows of a mini-batch, which every rank has before any travels: which key, how long, at what cost."""

import functools
import hashlib
import itertools
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from verl.utils import tensordict_utils as tu

from verl_prefix.auto.placement import Placement, fill_empty_ranks, place_rows, placed_on, row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import rows_by_key
from verl_prefix.engine.rows import BatchRows
from verl_prefix.engine.session_pieces import costs_of_sessions
from verl_prefix.models.vision import num_patches

PADDING = 0  # stands for the uid of verl's padding rows, which is one for all of them


class Columns(NamedTuple):
    """What all ranks know of a row. Each field is an int64 (of a cost, the bits of a double), or a tensor of those
    of all rows."""

    key_low: Any  # 128 bits of the row's key
    key_high: Any
    prefix_cost: Any
    suffix_cost: Any
    pixel_cost: Any
    has_pixels: Any  # whether the row has its group's pixels
    length: Any
    uid: Any  # 64 bits, or `PADDING`
    session: Any  # 64 bits


def describe(rows: BatchRows, shape: ModelShape) -> torch.Tensor:
    """Describes this rank's rows to all ranks: int64 [rows, columns], `Columns` of each row."""
    cost = functools.cache(functools.partial(row_cost, shape))
    lens = zip(rows.prompt_lens, rows.response_lens, itertools.pairwise(rows.offsets), strict=True)
    sessions = zip(rows.uids, tu.get(rows.data, "session_id", [None] * len(rows)), strict=True)
    table = []
    for row, (key, (prompt_len, response_len, (start, end)), patches, (uid, session)) in enumerate(
        zip(rows.digests, lens, map(num_patches, rows.pixels), sessions, strict=True)
    ):
        counted = (0, 0, 0) if row in rows.dead else (max(prompt_len - 1, 0), response_len, patches)
        costs = *cost(*counted[:2]), cost(0, 0, counted[2])[0]
        low, high, prefix, suffix, pixels = struct.unpack("=5q", key + struct.pack("=3d", *costs))
        name = PADDING if row in rows.padding else _digest(uid)
        session = _digest(f"{uid} {session}")
        table.append(Columns(low, high, prefix, suffix, pixels, patches > 0, end - start, name, session))
    return torch.tensor(table, dtype=torch.int64).view(-1, len(Columns._fields))


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


class RowTable:
    """Columns of all ranks' tables, rank after rank, in lists of one item per row.

    Args:
        tables: of each rank as `describe` makes them.

    Attributes:
        ranks: the rank that has each row.
        starts: the first row of each rank, and the end.
    """

    def __init__(self, tables: Sequence[torch.Tensor]) -> None:
        rows = Columns(*torch.cat(list(tables)).T.contiguous())
        self.keys = list(zip(rows.key_low.tolist(), rows.key_high.tolist(), strict=True))
        costs = (rows.prefix_cost, rows.suffix_cost, rows.pixel_cost)
        prefixes, suffixes, self.pixel_costs = (bits.view(torch.float64).numpy() for bits in costs)
        self.prefix_costs, self.suffix_costs = (prefixes + self.pixel_costs).tolist(), suffixes.tolist()
        self.has_pixels, self.lens = rows.has_pixels.tolist(), rows.length.tolist()
        self.uids, self.sessions = rows.uid.tolist(), rows.session.tolist()
        self.ranks = [rank for rank, table in enumerate(tables) for _ in range(len(table))]
        self.starts = list(itertools.accumulate(map(len, tables), initial=0))

    def as_it_is(self, num_ranks: int) -> Placement:
        """Places every row on the rank that has it."""
        return placed_on(self.keys, self.prefix_costs, self.suffix_costs, self.ranks, num_ranks)

    def by_group(self, num_ranks: int) -> Placement:
        """Places each group on one rank, as `place_rows` does."""
        args = self.keys, self.prefix_costs, self.suffix_costs, self.ranks, num_ranks
        return place_rows(*args, self.has_pixels)

    def by_session(self, num_ranks: int, pieces: Sequence[torch.Tensor]) -> Placement:
        """Places each uid on one rank, or its sessions on several where balance needs it. All rows of a session are on
        one rank; only where sessions are fewer than ranks, a rank without any gets one row of another's.

        For `place_rows` a session is one row. Where rows have pixels a uid's sessions stay together, since one row
        holds those of others. They may go to any rank, since rows bring their pixels.

        Args:
            pieces: of each rank's rows, as `describe_pieces` makes them.
        """
        sessions = list(rows_by_key(self.uids if any(self.has_pixels) else self.sessions).values())
        uid_of_session = [self.uids[rows[0]] for rows in sessions]
        shifted = [table + torch.tensor([start, 0, 0]) for start, table in zip(self.starts, pieces, strict=False)]
        trunk_costs, own_costs = costs_of_sessions(sessions, uid_of_session, torch.cat(shifted), self.pixel_costs)
        rank_of_session = [self.ranks[rows[0]] for rows in sessions]
        placement = place_rows(uid_of_session, trunk_costs, own_costs, rank_of_session, num_ranks)
        home_of = {row: home for home, rows in zip(placement.ranks, sessions, strict=True) for row in rows}
        homes = [home_of[row] for row in range(len(self.keys))]
        visual = {row for row, has in enumerate(self.has_pixels) if has}
        fill_empty_ranks(homes, self.ranks, self.suffix_costs, num_ranks, visual, self.has_pixels)
        ranks_of = Counter(uid for uid, _ in {*zip(self.uids, homes, strict=True)})
        return replace(placement, ranks=homes, split_groups=sum(n > 1 for n in ranks_of.values()))
