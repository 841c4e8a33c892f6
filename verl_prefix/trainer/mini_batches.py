"""Mini-batches in the driver: which rows make one. Which rank computes them is the engine's (`engine.exchange`).

verl hands rank r the r-th contiguous slice of the batch (`BatchData.chunk` in verl/protocol.py), and
`TrainingWorker.train_mini_batch` walks that slice in order, in chunks of equal size; the k-th chunks of all ranks are
one optimizer step. Rows of one prompt can be computed together only inside one.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence


def _members(keys: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    members: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    return members


def fill_mini_batches(keys: Sequence[Hashable | None], num_mini_batches: int) -> list[list[int]]:
    """Row indices of each mini-batch, equally many, in order.

    Groups go whole, the longest first and of those in the order of their first rows, into the first mini-batch that has
    room; those for which none has fill up the rooms that are left.

    Args:
        keys: group of each row, a multiple of `num_mini_batches`; None for a row that belongs to none (padding).
    """
    assert len(keys) % num_mini_batches == 0, "verl pads a batch first"
    members = _members(("filler", row) if key is None else ("group", key) for row, key in enumerate(keys))
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
    """Row indices of each mini-batch, about equally many.

    A prompt's rows stay together, the most numerous first, in the mini-batch with the fewest. Those of a prompt that
    has over twice an even share are cut, between sessions where that is enough. Mini-batches are fewer where one would
    have no rows.

    Args:
        prompts, sessions: of each row; a session's rows are in the order of its turns.
    """
    most = 2 * -(-len(prompts) // num_mini_batches)
    pieces: list[list[int]] = []
    for rows in _members(prompts).values():
        pieces.append([])
        for places in _members(sessions[row] for row in rows).values():
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
    """The mini-batches of `whole_prompts`, made equally large by the rows behind all of theirs, up to `num_rows`."""
    size, padding = num_rows // len(mini_batches), itertools.count(sum(map(len, mini_batches)))
    return [rows + [*itertools.islice(padding, size - len(rows))] for rows in mini_batches]
