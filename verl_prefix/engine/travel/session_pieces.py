"""What the sessions of an agent cost together, which ranks have to agree on before any row travels.

No rank has the tokens of another rank's rows. So each rank tells the others which pieces its rows are made of, by
hashes, and what each piece costs. Here two sessions of one uid have three turns, and a token costs 1:

    row 0   session x, turn 1   [ system 9 | question 5 | call 3 ]
    row 1   session x, turn 2   [ system 9 | question 5 | call 3 | result 4 | answer 6 ]
    row 2   session y, turn 1   [ system 9 | question 5 | reply 7 ]

    pieces of row 0   S 9   SQ 5   SQC 3                   and logits of the call
    pieces of row 1   S 9   SQ 5   SQC 3   SQCR 4   SQCRA 6   and logits of the answer
    pieces of row 2   S 9   SQ 5   SQA 7                   and logits of the reply

A piece is named by all tokens from the row's beginning to the piece's end, so that equal names mean equal histories.
S and SQ are pieces of both sessions: they are the trunk of the uid, which costs 14 on each rank that has one of its
sessions. Besides, session x costs 3 + 4 + 6 and the logits of rows 0 and 1, and session y costs 7 and the logits of
row 2.
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
    """Describes the pieces of this rank's rows, int64 [pieces, 3]: the row's number, 64 bits that name the piece, and
    its cost as the bits of a double. A dead row, or one without a response, has no piece.

    A piece lies between two cuts; the last one ends with the row. The logits of the response are a piece, too, whose
    name is the complement of the last piece's name.

    A row has at most `LAST_CUTS` + 1 cuts here: its first one, after the system prompt, and its last ones. What lies
    between the first cut and these is then one piece with the cost of several. An earlier turn, which is shorter, may
    have the same name at a lower cost; `_cheapest_pieces` takes that.
    """
    cost = functools.cache(functools.partial(row_cost, shape))
    piece_rows, piece_ends, piece_costs = list[int](), list[int](), list[float]()
    lens_and_cuts = zip(rows.prompt_lens, rows.response_lens, row_cuts(rows, tree_rule), strict=True)
    for number, (prompt_len, response_len, cuts) in enumerate(lens_and_cuts):
        if not response_len or number in rows.dead:
            continue
        row_end = prompt_len + response_len - 1
        inner_cuts = sorted({cut for cut in cuts if 0 < cut < prompt_len})
        ends = [*inner_cuts[:1], *inner_cuts[1:][-LAST_CUTS:], row_end]
        costs_to_end = [cost(end, 0)[0] for end in ends]
        logits_cost = sum(cost(prompt_len - 1, response_len)) - costs_to_end[-1]
        piece_rows += [number] * (len(ends) + 1)
        piece_ends += [*ends, row_end]  # of the logits, too
        piece_costs += [*(after - before for before, after in itertools.pairwise([0.0, *costs_to_end])), logits_cost]
    row_of_piece = torch.tensor(piece_rows, dtype=torch.int64)
    names = Hashes(mix(rows.data["input_ids"].values().cpu()), rows.offsets).of(piece_rows, piece_ends)
    is_logits = torch.ones(len(names), dtype=torch.bool)  # of the last piece of each row
    is_logits[:-1] = row_of_piece.diff() > 0
    cost_bits = torch.tensor(piece_costs, dtype=torch.float64).view(torch.int64)
    return torch.stack([row_of_piece, torch.where(is_logits, ~names, names), cost_bits], 1)


def costs_of_sessions(
    sessions: Sequence[Sequence[int]], uids: Sequence[int], pieces: torch.Tensor, pixel_costs: np.ndarray
) -> tuple[list[float], list[float]]:
    """Returns two costs for each session: that of its uid's trunk and pixels, and that of its other pieces. The pixels
    cost as much as those of the uid's row that shows most.

    Args:
        sessions: the table rows of each session.
        uids: of each session.
        pieces: of all rows, as `describe_pieces` makes them, by table rows in place of numbers.
        pixel_costs: of each table row, [rows] float64.
    """
    sessions_of_uid = list(rows_by_key(uids).values())
    uid_of_session = _owner_of(sessions_of_uid, len(sessions))
    session_of_row = _owner_of(sessions, len(pixel_costs))
    session_pieces = _cheapest_pieces(session_of_row, pieces)
    uid_of_piece = uid_of_session[session_pieces.session]
    # A piece is of the trunk if it is there once for each session of its uid. Each of these has the same share of it.
    num_sessions = np.array([len(members) for members in sessions_of_uid])[uid_of_piece]
    is_trunk = _num_equal(uid_of_piece, session_pieces.name) == num_sessions
    trunk_shares = np.where(is_trunk, session_pieces.cost / num_sessions, 0.0)
    trunk_costs = np.bincount(uid_of_piece, trunk_shares, len(sessions_of_uid))
    most_pixels = np.zeros(len(sessions_of_uid))
    np.maximum.at(most_pixels, uid_of_session[session_of_row], pixel_costs)
    branch_costs = np.bincount(session_pieces.session, np.where(is_trunk, 0.0, session_pieces.cost), len(sessions))
    return (trunk_costs + most_pixels)[uid_of_session].tolist(), branch_costs.tolist()


class _Pieces(NamedTuple):
    """Pieces of sessions, each field [n]: the index of its session, its name, and its cost."""

    session: np.ndarray
    name: np.ndarray
    cost: np.ndarray


def _cheapest_pieces(session_of_row: np.ndarray, pieces: torch.Tensor) -> _Pieces:
    """Returns each session's pieces, without repetitions, each at the lowest cost that a row of the session gives it.

    Args:
        pieces: of all rows, as in `costs_of_sessions`.
    """
    row, name, cost_bits = pieces.T.contiguous().numpy()
    session = session_of_row[row]
    _, first, index = np.unique(_pair_names(session, name), return_index=True, return_inverse=True)
    cost = np.full(len(first), np.inf)
    np.minimum.at(cost, index, cost_bits.view(np.float64))
    return _Pieces(session[first], name[first], cost)


def _num_equal(owner: np.ndarray, name: np.ndarray) -> np.ndarray:
    """Counts, for each item, the items with the same owner and the same name, [n]."""
    _, index, counts = np.unique(_pair_names(owner, name), return_inverse=True, return_counts=True)
    return counts[index]


def _pair_names(owner: np.ndarray, name: np.ndarray) -> np.ndarray:
    """Names each pair of an owner and a name by 64 bits, [n]."""
    return name ^ mix(torch.from_numpy(owner)).numpy()


def _owner_of(members: Sequence[Sequence[int]], num_members: int) -> np.ndarray:
    """Turns lists of each owner's members into the owner of each member, [num_members] int64."""
    owner_of = np.empty(num_members, np.int64)
    for owner, numbers in enumerate(members):
        owner_of[numbers] = owner
    return owner_of
