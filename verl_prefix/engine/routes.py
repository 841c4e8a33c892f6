"""Routes of rows, the same plan on every rank: from the rank that has a row to the one that computes it."""

from collections.abc import Sequence

from verl_prefix.engine.row_table import AllRows


class Routes:
    """One rank's part of the plan. A row of rank r has a number among the rows of r, and one in the table.

    Args:
        table: the rows of all ranks. homes: the rank that computes each of them. rank: this one. num_ranks: of all.

    Attributes:
        moves: whether any row of any rank travels.
        kept: this rank's rows that stay, by their numbers here.
        sent: to each rank, this rank's rows, by their numbers here.
        got: from each rank, its rows, by their numbers there.
        computed: the rows that this rank computes, by their numbers in the table: first those that stay, then those
            that arrive, by rank.
    """

    def __init__(self, table: AllRows, homes: Sequence[int], rank: int, num_ranks: int) -> None:
        self.moves = homes != table.ranks
        self.sent: list[list[int]] = [[] for _ in range(num_ranks)]
        self.got: list[list[int]] = [[] for _ in range(num_ranks)]
        for row, (source, home) in enumerate(zip(table.ranks, homes, strict=True)):
            number = row - table.starts[source]
            if source == rank:
                self.sent[home].append(number)
            if home == rank:
                self.got[source].append(number)
        self.kept, self.sent[rank], self.got[rank] = self.sent[rank], [], []
        self.computed = [table.starts[rank] + i for i in self.kept]
        self.computed += [start + i for start, got in zip(table.starts, self.got, strict=False) for i in got]
