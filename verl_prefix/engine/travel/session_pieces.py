"""What the sessions of an agent cost together, which ranks have to agree on before any row travels.

No rank has the tokens of another rank's rows. So each rank tells the others which pieces its rows are made of, by
hashes, and what each piece costs. Here two sessions of one uid have three turns, and a token costs 1:

    row 0   session x, turn 1   [ system 9 | question 5 | call 3 ]
    row 1   session x, turn 2   [ system 9 | question 5 | call 3 | result 4 | answer 6 ]
    row 2   session y, turn 1   [ system 9 | question 5 | guess 7 ]

    pieces of row 0   S 8   SQ 5   SQC 3                      and logits of the call
    pieces of row 1   S 8   SQ 5   SQC 3   SQCR 4   SQCRA 6   and logits of the answer
    pieces of row 2   S 8   SQ 5   SQG 7                      and logits of the guess

A piece ends at a cut, which is one token before the end of a message, or before the row's last token, which is not
computed. Its name is a hash of the row's tokens up to there and of the next one: rows share the n tokens before a cut
only if token n is equal, too (`core.trees`). So equal names mean equal histories.

S and SQ are pieces of both sessions: they are the trunk of the uid, which costs 13 on each rank that has one of its
sessions. Besides, session x costs 3 + 4 + 6 and the logits of rows 0 and 1, and session y costs 7 and the logits of
row 2.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch

from verl_prefix.auto.placement import row_cost
from verl_prefix.auto.shape import ModelShape
from verl_prefix.core.groups import rows_by_key
from verl_prefix.core.trees import Hashes, mix
from verl_prefix.engine.grouping import TreeRule, row_cuts
from verl_prefix.engine.rows import BatchRows

LAST_CUTS = 8  # cuts at a row's end that other ranks hear of: more than the messages that a turn adds


class _Piece(NamedTuple):
    """A piece of a row, or the logits of its response.

    Attributes:
        number: of the row.
        end: where the piece ends in the row's tokens.
        cost: of the piece, by `row_cost`.
        is_logits: whether these are the logits of the row's response.
    """

    number: int
    end: int
    cost: float
    is_logits: bool = False


def describe_pieces(rows: BatchRows, shape: ModelShape, tree_rule: TreeRule) -> torch.Tensor:
    """Describes the pieces of this rank's rows, int64 [pieces, 3]: the row's number, 64 bits that name the piece, and
    its cost as the bits of a double. A dead row, or one without a response, has no piece.

    The logits of the response are a piece, too, whose name is the complement of the last piece's name.

    Of a row's cuts at most `LAST_CUTS` + 1 are told: the first one, which ends the system prompt, and the last ones.
    The tokens between are one piece, which costs as much as all pieces that it stands for. An earlier turn of the
    session is shorter and tells cuts there. It may have a piece of the same name that costs less: `_cheapest_pieces`
    takes the lower cost.
    """
    cost = functools.cache(functools.partial(row_cost, shape))
    pieces: list[_Piece] = []
    lens_and_cuts = zip(rows.prompt_lens, rows.response_lens, row_cuts(rows, tree_rule), strict=True)
    for number, (prompt_len, response_len, cuts) in enumerate(lens_and_cuts):
        if not response_len or number in rows.dead:
            continue
        inner_cuts = sorted({cut for cut in cuts if 0 < cut < prompt_len})
        ends = [*inner_cuts[:1], *inner_cuts[1:][-LAST_CUTS:], prompt_len + response_len - 1]
        costs_to_end = [cost(end, 0)[0] for end in ends]
        layer_costs = [after - before for before, after in itertools.pairwise([0.0, *costs_to_end])]
        # The whole row, less all its layers: what is left is lm_head.
        logits_cost = sum(cost(prompt_len - 1, response_len)) - costs_to_end[-1]
        pieces += [_Piece(number, end, layer_cost) for end, layer_cost in zip(ends, layer_costs, strict=True)]
        pieces.append(_Piece(number, ends[-1], logits_cost, is_logits=True))
    numbers = [piece.number for piece in pieces]
    names = Hashes(mix(rows.data["input_ids"].values().cpu()), rows.offsets).of(
        numbers, [piece.end for piece in pieces]
    )
    is_logits = torch.tensor([piece.is_logits for piece in pieces], dtype=torch.bool)
    cost_bits = torch.tensor([piece.cost for piece in pieces], dtype=torch.float64).view(torch.int64)
    return torch.stack([torch.tensor(numbers, dtype=torch.int64), torch.where(is_logits, ~names, names), cost_bits], 1)


def costs_of_sessions(
    sessions: Sequence[Sequence[int]], uids: Sequence[int], pieces: torch.Tensor, pixel_costs: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Returns two costs for each session: that of its uid's trunk and pixels, and that of its other pieces. The pixels
    cost as much as those of the uid's row that shows most. A session without pieces, which no pass computes, does not
    make the trunk shorter.

    Args:
        sessions: the table rows of each session.
        uids: of each session.
        pieces: of all rows, as `describe_pieces` makes them, by table rows in place of numbers.
        pixel_costs: of each table row.
    """
    session_pieces = _cheapest_pieces(sessions, pieces)
    trunk_costs = [0.0] * len(sessions)
    branch_costs = [0.0] * len(sessions)
    for sessions_of_uid in rows_by_key(uids).values():
        num_computed = sum(bool(session_pieces[session]) for session in sessions_of_uid)
        num_sessions = Counter(name for session in sessions_of_uid for name in session_pieces[session])
        trunk = {name for name, num in num_sessions.items() if num == num_computed}
        trunk_cost, most_pixels = 0.0, 0.0
        for session in sessions_of_uid:
            cost_in_trunk = sum(cost for name, cost in session_pieces[session].items() if name in trunk)
            trunk_cost += cost_in_trunk / max(num_computed, 1)  # a mean: sessions may differ, see `describe_pieces`
            most_pixels = max(most_pixels, *(pixel_costs[table_row] for table_row in sessions[session]))
        for session in sessions_of_uid:
            trunk_costs[session] = trunk_cost + most_pixels
            branch_costs[session] = sum(cost for name, cost in session_pieces[session].items() if name not in trunk)
    return trunk_costs, branch_costs


def _cheapest_pieces(sessions: Sequence[Sequence[int]], pieces: torch.Tensor) -> list[dict[int, float]]:
    """Returns the pieces of each session, their costs by their names. A piece of several rows has the lowest cost that
    any of the rows tells.

    Args:
        sessions: as in `costs_of_sessions`.
        pieces: as in `costs_of_sessions`.
    """
    session_of_row = {table_row: session for session, table_rows in enumerate(sessions) for table_row in table_rows}
    session_pieces: list[dict[int, float]] = [{} for _ in sessions]
    table_rows, names, cost_bits = pieces.unbind(1)
    costs = cost_bits.contiguous().view(torch.float64)
    for table_row, name, cost in zip(table_rows.tolist(), names.tolist(), costs.tolist(), strict=True):
        costs_by_name = session_pieces[session_of_row[table_row]]
        costs_by_name[name] = min(cost, costs_by_name.get(name, inf))
    return session_pieces
