"""Groups whose rows lie in several mini-batches, which no exchange brings together."""

_TORN = 0.02  # of a step's tokens: what they may cost unsaid


class TornGroups:
    """Finds out at the first step what groups cost whose rows the trainer put into several mini-batches: the log-probs
    before the updates see them whole."""

    def __init__(self) -> None:
        self._whole: tuple[int, int] | None = None  # tokens, rows
        self._updates = [0, 0]
        self._done = False

    def see(self, tokens: int, rows: int, forward_only: bool) -> str | None:
        """Counts a batch that was computed, of all ranks; what to say after the last update of the first step."""
        if self._done:
            return None
        if forward_only:
            self._whole = (tokens, rows)
            return None
        self._updates = [self._updates[0] + tokens, self._updates[1] + rows]
        whole_tokens, whole_rows = self._whole or (0, 0)
        if self._updates[1] < whole_rows:
            return None
        self._done = True
        torn = self._updates[0] - whole_tokens
        if self._updates[1] != whole_rows or torn <= _TORN * whole_tokens:
            return None
        return (
            f"prefix: prompts whose rows lie in several mini-batches are computed in each: {torn} tokens more than "
            f"{whole_tokens} at this step (+{torn / whole_tokens:.0%}). Set trainer.v1.trainer_mode=prefix_sync "
            "(prefix_colocate_async, prefix_separate_async), which keeps a prompt's rows in one mini-batch"
        )
