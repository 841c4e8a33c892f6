"""Mini-batches in the driver: which rows make one. Which rank computes them is the engine's (`engine.exchange`).

verl hands rank r the r-th contiguous slice of the batch (`BatchData.chunk` in verl/protocol.py), and
`TrainingWorker.train_mini_batch` walks that slice in order, in chunks of equal size; the k-th chunks of all ranks are
one optimizer step. Rows of one prompt can be computed together only inside one.
"""

from collections.abc import Hashable, Sequence


def fill_mini_batches(keys: Sequence[Hashable | None], num_mini_batches: int) -> tuple[list[list[int]], int]:
    """Row indices of each mini-batch, equally many, in order; and the number of groups in more than one.

    Groups go whole, the longest first and of those in the order of their first rows, into the first mini-batch that has
    room; those for which none has fill up the rooms that are left.

    Args:
        keys: group of each row, a multiple of `num_mini_batches`; None for a row that belongs to none (padding).
    """
    assert len(keys) % num_mini_batches == 0, "verl pads a batch first"
    members: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(("filler", row) if key is None else ("group", key), []).append(row)
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
    return sorted((sorted(rows) for rows in mini_batches), key=lambda rows: rows[:1]), len(left)
