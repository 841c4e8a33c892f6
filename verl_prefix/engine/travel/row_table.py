"""Table of all rows of a mini-batch, which every rank has before any row travels: their keys, lengths and costs."""

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from verl.utils import tensordict_utils as tu

from verl_prefix.auto.placement import Placement, fill_empty_ranks, place_rows, placed_on, row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import rows_by_key
from verl_prefix.engine.rows import KEY_BYTES, BatchRows
from verl_prefix.engine.travel.session_pieces import costs_of_sessions
from verl_prefix.models.vision import num_patches

PADDING = 0  # stands for the uid of verl's padding rows, which is one for all of them

# What all ranks know of a row. Ranks send these fields as int64: a cost as the bits of its double.
ROW = np.dtype(
    [
        ("key", "i8", KEY_BYTES // 8),
        ("prefix_cost", "f8"),
        ("suffix_cost", "f8"),
        ("pixel_cost", "f8"),
        ("has_pixels", "i8"),  # whether the row has its group's pixels
        ("length", "i8"),  # in tokens
        ("is_dead", "i8"),  # `dead_rows`
        ("uid", "i8"),  # 64 bits of a hash, or `PADDING`
        ("session", "i8"),  # 64 bits of a hash
    ]
)


def describe(rows: BatchRows, shape: ModelShape) -> torch.Tensor:
    """Describes this rank's rows to all ranks: int64 [rows, columns], a `ROW` of each row. Dead rows cost nothing."""
    cost = functools.cache(functools.partial(row_cost, shape))
    patches = [num_patches(row_pixels) for row_pixels in rows.pixels]
    sessions = tu.get(rows.data, "session_id", [None] * len(rows))
    table = np.zeros(len(rows), ROW)
    table["key"] = np.frombuffer(b"".join(rows.keys), np.int64).reshape(-1, KEY_BYTES // 8)
    table["has_pixels"] = [num > 0 for num in patches]
    table["length"] = np.diff(rows.offsets)
    table["uid"] = uid_hashes(rows)
    table["session"] = [_hash(f"{uid} {session}") for uid, session in zip(rows.uids, sessions, strict=True)]
    for number, (prompt_len, response_len) in enumerate(zip(rows.prompt_lens, rows.response_lens, strict=True)):
        if number in rows.dead:
            table["is_dead"][number] = True
            continue
        table["prefix_cost"][number], table["suffix_cost"][number] = cost(max(prompt_len - 1, 0), response_len)
        table["pixel_cost"][number] = cost(0, 0, patches[number])[0]
    return torch.from_numpy(table.view(np.int64).reshape(-1, ROW.itemsize // 8))


def uid_hashes(rows: BatchRows) -> list[int]:
    """64 bits that name each row's uid on all ranks; `PADDING` for rows of padding."""
    return [PADDING if number in rows.padding else _hash(uid) for number, uid in enumerate(rows.uids)]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


class RowTable:
    """What all ranks know of all rows, rank after rank. A row's index in its lists is its table row.

    Args:
        tables: of each rank as `describe` makes them.

    Attributes:
        sources: the rank that has each row.
        starts: the first table row of each rank, and the end.
        prefix_costs: of each row, with its pixels.
    """

    def __init__(self, tables: Sequence[torch.Tensor]) -> None:
        rows = torch.cat(list(tables)).contiguous().numpy().view(ROW)[:, 0]
        self.keys = [key.tobytes() for key in rows["key"]]
        self.pixel_costs: list[float] = rows["pixel_cost"].tolist()
        self.prefix_costs: list[float] = (rows["prefix_cost"] + rows["pixel_cost"]).tolist()
        self.suffix_costs: list[float] = rows["suffix_cost"].tolist()
        self.has_pixels: list[int] = rows["has_pixels"].tolist()
        self.is_dead: list[int] = rows["is_dead"].tolist()
        self.lens: list[int] = rows["length"].tolist()
        self.uids: list[int] = rows["uid"].tolist()
        self.sessions: list[int] = rows["session"].tolist()
        self.sources = [rank for rank, table in enumerate(tables) for _ in range(len(table))]
        self.starts = list(itertools.accumulate(map(len, tables), initial=0))

    def as_it_is(self, num_ranks: int) -> Placement:
        """Places every row on the rank that has it."""
        return placed_on(self.keys, self.prefix_costs, self.suffix_costs, self.sources, num_ranks)

    def by_group(self, num_ranks: int) -> Placement:
        """Places each group on one rank, as `place_rows` does."""
        return place_rows(self.keys, self.prefix_costs, self.suffix_costs, self.sources, num_ranks, self.has_pixels)

    def by_session(self, num_ranks: int, pieces: Sequence[torch.Tensor]) -> Placement:
        """Places each uid on one rank, or its sessions on several where balance needs it. All rows of a session are on
        one rank. Only where sessions are fewer than ranks, a rank without any gets one row of another rank's session.

        `place_rows` sees a session as one row, with its uid as the key. If any row has pixels, all sessions of a uid
        are placed as one, since one of its rows may have the pixels of all. They may go to any rank: rows bring their
        pixels.

        Args:
            pieces: of each rank's rows, as `describe_pieces` makes them.
        """
        sessions = list(rows_by_key(self.uids if any(self.has_pixels) else self.sessions).values())
        uid_of_session = [self.uids[table_rows[0]] for table_rows in sessions]
        rank_of_session = [self.sources[table_rows[0]] for table_rows in sessions]
        # Numbers of a rank's rows become table rows.
        pieces = [table + torch.tensor([start, 0, 0]) for start, table in zip(self.starts[:-1], pieces, strict=True)]
        trunk_costs, branch_costs = costs_of_sessions(sessions, uid_of_session, torch.cat(pieces), self.pixel_costs)
        placement = place_rows(uid_of_session, trunk_costs, branch_costs, rank_of_session, num_ranks)
        home_of = {table_row: home for home, rows in zip(placement.ranks, sessions, strict=True) for table_row in rows}
        homes = [home_of[table_row] for table_row in range(len(self.keys))]
        visual = {table_row for table_row, has in enumerate(self.has_pixels) if has}
        fill_empty_ranks(homes, self.sources, self.suffix_costs, num_ranks, visual, self.has_pixels)
        num_homes = Counter(uid for uid, _ in {*zip(self.uids, homes, strict=True)})
        return replace(placement, ranks=homes, split_groups=sum(n > 1 for n in num_homes.values()))
