"""Which rows make a mini-batch, decided in the driver. Which rank computes them is decided in `engine.travel.moves`.

verl hands rank r the r-th contiguous slice of the batch (`BatchData.chunk` in verl/protocol.py). On the rank
`TrainingWorker.train_mini_batch` walks through that slice in chunks of equal size, and the k-th chunks of all ranks are
one mini-batch, that is one optimizer step. A prompt is computed once for those of its rows that are in one mini-batch.
"""

import itertools
from collections.abc import Hashable, Sequence

from verl_prefix.core.groups import rows_by_key


def fill_mini_batches(keys: Sequence[Hashable | None], num_mini_batches: int) -> list[list[int]]:
    """Row indices of each mini-batch, in increasing order. All mini-batches have equally many rows.

    A group goes whole into the first mini-batch that has room for all of its rows. Large groups go first, and equally
    large ones in the order of their first rows. A group that fits nowhere is cut, and fills the room that is left.

    Args:
        keys: group of each row; None for a row that belongs to none (padding). Their number is a multiple of
            `num_mini_batches`.
    """
    assert len(keys) % num_mini_batches == 0, "verl pads a batch first"
    members = rows_by_key(("filler", row) if key is None else ("group", key) for row, key in enumerate(keys))
    size = len(keys) // num_mini_batches
    mini_batches: list[list[int]] = [[] for _ in range(num_mini_batches)]
    left: list[list[int]] = []
    for rows in sorted(members.values(), key=len, reverse=True):
        chosen = next((one for one in mini_batches if len(one) + len(rows) <= size), None)
        if chosen is None:
            left.append(rows)
        else:
            chosen += rows
    for rows in left:
        while rows:
            emptiest = min(mini_batches, key=len)
            room = size - len(emptiest)
            emptiest += rows[:room]
            rows = rows[room:]
    # In the order of their first rows: mini-batches of similarly long groups would train on short and long by turns.
    return sorted((sorted(rows) for rows in mini_batches), key=lambda rows: rows[:1])


def whole_prompts(prompts: Sequence[Hashable], sessions: Sequence[Hashable], num_mini_batches: int) -> list[list[int]]:
    """Row indices of each mini-batch. All mini-batches have about equally many rows.

    A prompt's rows stay together, in the mini-batch that has the fewest rows; the prompt with the most rows goes first.
    A prompt with more than twice an even share of the rows is cut, between sessions where that is enough. There are
    fewer mini-batches than asked for where one would have no rows.

    Args:
        prompts, sessions: the prompt and the session of each row; a session's rows are in the order of its turns.
    """
    most = 2 * -(-len(prompts) // num_mini_batches)
    pieces: list[list[int]] = []
    for rows in rows_by_key(prompts).values():
        pieces.append([])
        for places in rows_by_key(sessions[row] for row in rows).values():
            for start in range(0, len(places), most):
                run = [rows[place] for place in places[start : start + most]]
                if len(pieces[-1]) + len(run) > most:
                    pieces.append([])
                pieces[-1] += run
    mini_batches: list[list[int]] = [[] for _ in range(min(num_mini_batches, len(pieces)))]
    for piece in sorted(pieces, key=len, reverse=True):
        min(mini_batches, key=len).extend(piece)
    return mini_batches


def padded(mini_batches: Sequence[list[int]], num_rows: int) -> list[list[int]]:
    """The mini-batches of `whole_prompts` with rows of padding, so that all are equally large: `num_rows` in sum.

    Padding stands behind all other rows of the batch."""
    size, padding = num_rows // len(mini_batches), itertools.count(sum(map(len, mini_batches)))
    return [rows + [*itertools.islice(padding, size - len(rows))] for rows in mini_batches]
