"""What the sessions of an agent cost together, which ranks have to agree on before any row travels.

No rank has the tokens of another's rows. So each tells the others hashes of the histories that its rows are made of,
with what each piece of them costs.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from verl_prefix.auto.placement import row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import rows_by_key
from verl_prefix.core.trees import Hashes, mix
from verl_prefix.engine.grouping import TreeRule, row_cuts
from verl_prefix.engine.rows import BatchRows

LAST_CUTS = 8  # cuts at a row's end that other ranks hear of: more than the messages that a turn adds


def describe_pieces(rows: BatchRows, shape: ModelShape, tree_rule: TreeRule) -> torch.Tensor:
    """Describes the pieces that rows of turns are made of, int64 [pieces, 3]: the row's number, 64 bits that name the
    piece, and its cost as the bits of a double. A dead row, or one without a response, has no piece.

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
    """Returns the number of each member's owner, [num] int64. members: of each owner, which together are `num`."""
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
    """Returns the pieces of sessions, each once in a session, at the lowest cost that its rows have for it.

    Args:
        pieces: of all rows, as `describe_pieces` makes them.
    """
    row, name, bits = pieces.T.contiguous().numpy()
    session = session_of_row[row]
    unique, first, piece = np.unique(_name_of(session, name), return_index=True, return_inverse=True)
    cost = np.full(len(unique), np.inf)
    np.minimum.at(cost, piece, bits.view(np.float64))
    return _Pieces(session[first], name[first], cost)


def _times_owned(owner: np.ndarray, name: np.ndarray) -> np.ndarray:
    """Counts, for each item, how many items of its name its owner has, [n]."""
    _, which, times = np.unique(_name_of(owner, name), return_inverse=True, return_counts=True)
    return times[which]


def _name_of(owner: np.ndarray, name: np.ndarray) -> np.ndarray:
    """Makes one name of each pair of an owner and a name, [n]."""
    return name ^ mix(torch.from_numpy(owner)).numpy()


def costs_of_sessions(
    sessions: Sequence[Sequence[int]], uids: Sequence[int], pieces: torch.Tensor, pixel_costs: np.ndarray
) -> tuple[list[float], list[float]]:
    """Returns two costs for each session. The prefix cost is that of its uid's trunk and pixels: the trunk has the
    pieces that all sessions of the uid share. The suffix cost is that of its other pieces.

    Args:
        sessions: the rows of each, by their numbers in the table.
        uids: of each session.
        pieces: of all rows, as `describe_pieces` makes them.
        pixel_costs: [rows] float64.
    """
    sessions_of_uid = list(rows_by_key(uids).values())
    session_of_row = _owner_of(sessions, len(pixel_costs))
    uid_of_session = _owner_of(sessions_of_uid, len(sessions))
    piece = _cheapest_pieces(session_of_row, pieces)
    uid_of_piece = uid_of_session[piece.session]
    num_sessions = np.array([len(of_uid) for of_uid in sessions_of_uid])[uid_of_piece]
    is_trunk = _times_owned(uid_of_piece, piece.name) == num_sessions
    trunks = np.bincount(uid_of_piece, np.where(is_trunk, piece.cost / num_sessions, 0.0), len(sessions_of_uid))
    pixels = np.zeros(len(sessions_of_uid))
    np.maximum.at(pixels, uid_of_session[session_of_row], pixel_costs)  # of the row that shows most
    own = np.bincount(piece.session, np.where(is_trunk, 0.0, piece.cost), len(sessions))
    return (trunks + pixels)[uid_of_session].tolist(), own.tolist()
