"""Rows -> groups: rollouts whose prompts are the same, token for token, position for position and pixel for pixel.

A row is one rollout. Its prompt gives the prefix (all prompt tokens but the last); its suffix is the last prompt token
and the response but its last token, so that the first response token's log-prob already comes from the suffix and the
prefix never reaches lm_head. Every row is treated so, also a row that is alone: what a row computes does not depend on
how many others share its prefix. Does not decide what runs together: see `waves`.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

RowKey = TypeVar("RowKey", bound=Hashable)


@dataclass(frozen=True)
class Group:
    """Rows of one batch that share a prefix.

    `rows` are row indices of the batch, `prefix_len` is P (0 for a 1-token prompt: nothing to share), `suffix_lens` are
    S per row (0 for an empty response: nothing to compute).
    """

    rows: tuple[int, ...]
    prefix_len: int
    suffix_lens: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        """True where the prefix is computed once for several rows."""
        return len(self.rows) > 1 and self.prefix_len > 0

    @property
    def num_suffix_tokens(self) -> int:
        return sum(self.suffix_lens)

    @property
    def num_physical_tokens(self) -> int:
        """Tokens that are computed: the prefix once."""
        return self.prefix_len + self.num_suffix_tokens

    @property
    def num_logical_tokens(self) -> int:
        """Tokens that the stock actor computes: the prefix once per row."""
        return self.prefix_len * len(self.rows) + self.num_suffix_tokens

    def piece(self, start: int, end: int) -> "Group":
        """The group with its rows [start, end) only."""
        return Group(self.rows[start:end], self.prefix_len, self.suffix_lens[start:end])


def group_rows(
    prompts: Sequence[torch.Tensor],
    response_lens: Sequence[int],
    uids: Sequence[object] | None = None,
    positions: Sequence[torch.Tensor] | None = None,
    pixels: Sequence[bytes] | None = None,
) -> tuple[list[Group], int]:
    """Groups the rows of a batch.

    Args:
        prompts: int tensor [prompt_len] per row, at least one token each.
        response_lens: number of response tokens per row.
        uids: verl's prompt ids; rows of different uids never share. None: tokens alone decide.
        positions: position ids [..., prompt_len] per row; None where they follow from the tokens.
        pixels: digest of what each row's visual tokens show; rows that show different things never share.

    Returns:
        groups in order of their first row, and how many uids had rows whose prompts differ (such a uid is split).

    Raises:
        ValueError: a prompt is empty.
    """
    members: dict[tuple[object, bytes, bytes, bytes], list[int]] = {}
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"row {row} has an empty prompt; verl needs at least one prompt token per row")
        key = (
            None if uids is None else uids[row],
            prompt.cpu().numpy().tobytes(),
            b"" if positions is None else positions[row].cpu().contiguous().numpy().tobytes(),
            b"" if pixels is None else pixels[row],
        )
        members.setdefault(key, []).append(row)
    groups = [
        Group(tuple(rows), len(prompts[rows[0]]) - 1, tuple(int(response_lens[row]) for row in rows))
        for rows in members.values()
    ]
    keys_per_uid = Counter(uid for uid, *_ in members if uids is not None)
    return groups, sum(count > 1 for count in keys_per_uid.values())


def rows_by_key(keys: Iterable[RowKey]) -> dict[RowKey, list[int]]:
    """Indices of the rows that have each key, keys in the order of their first rows."""
    rows: dict[RowKey, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows
