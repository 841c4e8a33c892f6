"""Table of all rows of a mini-batch, which every rank has before any travels: which key, how long, at what cost."""

import functools
import hashlib
import itertools
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from verl.utils import tensordict_utils as tu

from verl_prefix.auto.placement import Placement, fill_empty_ranks, place_rows, placed_on, row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import rows_by_key
from verl_prefix.core.trees import Hashes, mix
from verl_prefix.engine.grouping import TreeRule, row_cuts
from verl_prefix.engine.rows import BatchRows
from verl_prefix.models.vision import num_patches

PADDING = 0  # stands for the uid of verl's padding rows, which is one for all of them
LAST_CUTS = 8  # cuts at a row's end that other ranks hear of: more than the messages that a turn adds


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
    for i, (key, (prompt_len, response_len, (start, end)), patches, (uid, session)) in enumerate(
        zip(rows.digests, lens, map(num_patches, rows.pixels), sessions, strict=True)
    ):
        counted = (0, 0, 0) if i in rows.dead else (max(prompt_len - 1, 0), response_len, patches)
        costs = *cost(*counted[:2]), cost(0, 0, counted[2])[0]
        low, high, prefix, suffix, pixels = struct.unpack("=5q", key + struct.pack("=3d", *costs))
        name = PADDING if i in rows.padding else _digest(uid)
        session = _digest(f"{uid} {session}")
        table.append(Columns(low, high, prefix, suffix, pixels, patches > 0, end - start, name, session))
    return torch.tensor(table, dtype=torch.int64).view(-1, len(Columns._fields))


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def describe_pieces(rows: BatchRows, shape: ModelShape, tree_rule: TreeRule) -> torch.Tensor:
    """Describes the pieces that rows of turns are made of, int64 [pieces, 3]: the row, 64 bits that name the piece, and
    its cost as the bits of a double. A row without a response, or that is dead, has none.

    A piece lies between two cuts. Its name is made of all tokens up to its end, so that equal names mean equal
    histories. A long row lists its first cut (the system prompt's) and its last `LAST_CUTS`, and what lies between
    these is one piece. An earlier turn may have it in several pieces; the last of these then has the same name and a
    lower cost, which `_cheapest_pieces` takes. The logits of a response are a piece, too.

        turn 1   [ system | question | call ]                      pieces S, SQ, and SQC with its logits
        turn 2   [ system | question | call, result | answer ]     pieces S, SQ, SQCR, and SQCRA with its logits

    Another session of the uid that calls another tool shares S and SQ with these: they are the uid's trunk.
    """
    cost = functools.cache(functools.partial(row_cost, shape))
    piece_row, piece_end, piece_cost = list[int](), list[int](), list[float]()
    lens_and_cuts = zip(rows.prompt_lens, rows.response_lens, row_cuts(rows, tree_rule), strict=True)
    for row, (prompt_len, response_len, cuts) in enumerate(lens_and_cuts):
        if response_len and row not in rows.dead:
            end = prompt_len + response_len - 1
            places = sorted({n for n in cuts if 0 < n < prompt_len})
            places = [*places[:1], *places[1:][-LAST_CUTS:], end]
            upto = [cost(n, 0)[0] for n in places]
            logits = sum(cost(prompt_len - 1, response_len)) - upto[-1]
            piece_end += [*places, end]
            piece_row += [row] * (len(places) + 1)
            piece_cost += [*(after - before for before, after in itertools.pairwise([0.0, *upto])), logits]
    names = Hashes(mix(rows.data["input_ids"].values().cpu()), rows.offsets).of(piece_row, piece_end)
    of_row = torch.tensor(piece_row, dtype=torch.int64)
    is_logits = torch.cat([of_row.diff(), torch.ones(min(len(of_row), 1), dtype=torch.int64)]) > 0  # a row's last piece
    bits = torch.tensor(piece_cost, dtype=torch.float64).view(torch.int64)
    return torch.stack([of_row, torch.where(is_logits, ~names, names), bits], 1)


def _owner_of(members: Sequence[Sequence[int]], num: int) -> np.ndarray:
    """The number of the owner of each of `num` members, given each owner's members."""
    owner_of = np.empty(num, np.int64)
    for owner, of_owner in enumerate(members):
        owner_of[of_owner] = owner
    return owner_of


class _Pieces(NamedTuple):
    """Of each piece of each session, [n]: the session's number, the piece's name, and its cost."""

    session: np.ndarray
    name: np.ndarray
    cost: np.ndarray


def _cheapest_pieces(session_of_row: np.ndarray, pieces: torch.Tensor) -> _Pieces:
    """The pieces of sessions, each once for a session: at the lowest cost that its rows have it for.

    Args:
        pieces: of all rows, as `describe_pieces` makes them.
    """
    row, name, bits = pieces.T.contiguous().numpy()
    session = session_of_row[row]
    unique, first, number = np.unique(_name_of(session, name), return_index=True, return_inverse=True)
    cost = np.full(len(unique), np.inf)
    np.minimum.at(cost, number, bits.view(np.float64))
    return _Pieces(session[first], name[first], cost)


def _times_owned(owner: np.ndarray, name: np.ndarray) -> np.ndarray:
    """How often each item's owner has an item of its name, [n]."""
    _, number, times = np.unique(_name_of(owner, name), return_inverse=True, return_counts=True)
    return times[number]


def _name_of(owner: np.ndarray, name: np.ndarray) -> np.ndarray:
    """One name for each pair of an owner and a name, [n]."""
    return name ^ mix(torch.from_numpy(owner)).numpy()


class RowTable:
    """Columns of all ranks' tables, rank after rank, in lists of one item per row; `starts`: first row of each rank,
    and the end.

    Args:
        tables: of each rank as `describe` makes them.
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
        """Leaves every row on the rank that has it."""
        return placed_on(self.keys, self.prefix_costs, self.suffix_costs, self.ranks, num_ranks)

    def by_group(self, num_ranks: int) -> Placement:
        """Places each group on one rank, as `place_rows`."""
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
        trunk_costs, own_costs = self._costs_of_sessions(sessions, uid_of_session, pieces)
        rank_of_session = [self.ranks[rows[0]] for rows in sessions]
        placement = place_rows(uid_of_session, trunk_costs, own_costs, rank_of_session, num_ranks)
        home_of = {row: home for home, rows in zip(placement.ranks, sessions, strict=True) for row in rows}
        homes = [home_of[row] for row in range(len(self.keys))]
        visual = {row for row, has in enumerate(self.has_pixels) if has}
        fill_empty_ranks(homes, self.ranks, self.suffix_costs, num_ranks, visual, self.has_pixels)
        ranks_of = Counter(uid for uid, _ in {*zip(self.uids, homes, strict=True)})
        return replace(placement, ranks=homes, split_groups=sum(n > 1 for n in ranks_of.values()))

    def _costs_of_sessions(
        self, sessions: Sequence[Sequence[int]], uids: Sequence[int], pieces: Sequence[torch.Tensor]
    ) -> tuple[list[float], list[float]]:
        """Prefix and suffix cost of each session: of the trunks, which are pieces that all sessions of its uid have,
        with the uid's pixels; and of its other pieces.

        Args:
            sessions: rows of each. uids: of each.
        """
        sessions_of_uid = list(rows_by_key(uids).values())
        session_of_row = _owner_of(sessions, len(self.keys))
        uid_of_session = _owner_of(sessions_of_uid, len(sessions))
        shifted = [table + torch.tensor([start, 0, 0]) for start, table in zip(self.starts, pieces, strict=False)]
        piece = _cheapest_pieces(session_of_row, torch.cat(shifted))
        uid_of_piece = uid_of_session[piece.session]
        num_sessions = np.array([len(of_uid) for of_uid in sessions_of_uid])[uid_of_piece]
        is_trunk = _times_owned(uid_of_piece, piece.name) == num_sessions
        trunks = np.bincount(uid_of_piece, np.where(is_trunk, piece.cost / num_sessions, 0.0), len(sessions_of_uid))
        pixels = np.zeros(len(sessions_of_uid))
        np.maximum.at(pixels, uid_of_session[session_of_row], self.pixel_costs)  # of the row that shows most
        own = np.bincount(piece.session, np.where(is_trunk, 0.0, piece.cost), len(sessions))
        return (trunks + pixels)[uid_of_session].tolist(), own.tolist()
