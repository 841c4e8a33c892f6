"""Rows of a mini-batch as the engine reads them: lengths, keys, padding and the budget of a pass, from verl's batch."""

import copy
import functools
import hashlib
import itertools
import re
from collections.abc import Sequence, Set
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.core.groups import Group
from verl_prefix.engine.fields import PIXEL_INPUTS, ROUTES, flag
from verl_prefix.models.vision import CARRIED_BY, CARRIES, pixel_digests

KEY_BYTES = 16


def select_rows(data: TensorDict, numbers: Sequence[int]) -> TensorDict:
    """Returns rows by their numbers, as verl.utils.tensordict_utils.index_select_tensor_dict does. verl's makes a
    tensor of every row of every field, so that a pass of few rows would take as long as the whole batch."""
    fields: dict[str, Any] = dict(data.items())
    ragged = {name for name, x in fields.items() if getattr(x, "is_nested", False) and x.lengths() is None}
    others = dict(tu.index_select_tensor_dict(data.exclude(*ragged), list(numbers)).items())
    selected = {name: _ragged_rows(x, numbers) if name in ragged else others[name] for name, x in fields.items()}
    return TensorDict(selected, batch_size=len(numbers))


def _ragged_rows(nested: Any, numbers: Sequence[int]) -> torch.Tensor:
    """Makes the jagged tensor that verl's nested_tensor_from_tensor_list would make of these rows, in two cases. With
    one number per token verl calls as_nested_tensor, by which torch knows the shortest and the longest length. With
    several it calls nested_tensor_from_jagged, and then says which dimension is ragged: of [4, tokens] position ids the
    last one, else the first."""
    values, offsets, dim = nested.values(), nested.offsets().tolist(), nested._ragged_idx - 1
    lens = [offsets[number + 1] - offsets[number] for number in numbers]
    rows = [values.narrow(dim, offsets[number], length) for number, length in zip(numbers, lens, strict=True)]
    values = torch.cat(rows, dim)
    selected_offsets = torch.tensor([0, *itertools.accumulate(lens)], device=values.device)
    if values.dim() == 1:
        bounds = {"min_seqlen": min(lens), "max_seqlen": max(lens)}
        return torch.nested.nested_tensor_from_jagged(values, selected_offsets, **bounds)
    selected: Any = torch.nested.nested_tensor_from_jagged(values, selected_offsets)
    selected._ragged_idx = nested._ragged_idx
    return selected


class BatchRows:
    """The rows of one of verl's batches.

    Args:
        data: the batch.
        keys: of rows that came from other ranks, where they may have left their pixels. None: `keys` makes them.

    Attributes:
        dead: numbers of rows without gradient, which no pass of an update computes under `prefix.skip_zero_advantage`
            (`dead_rows.find_dead`).
    """

    def __init__(self, data: TensorDict, keys: Sequence[bytes] | None = None) -> None:
        self.data, self._given_keys = data, keys
        self.dead: Set[int] = frozenset()

    def __len__(self) -> int:
        return len(self.data)

    def with_data(self, data: TensorDict) -> "BatchRows":
        """Returns the same rows in a batch with other fields. Lengths, keys, padding, routes and `dead` are not
        computed again: `data` must have the same."""
        if data is self.data:
            return self
        rows = copy.copy(self)
        rows.data = data
        return rows

    def with_dead(self, dead: Set[int]) -> "BatchRows":
        """Returns the same rows, of which those with the numbers `dead` are dead."""
        rows = copy.copy(self)
        rows.dead = dead
        return rows

    def select(self, numbers: Sequence[int]) -> "BatchRows":
        """Returns rows by their numbers, which may repeat."""
        return BatchRows(select_rows(self.data, numbers))

    def flag(self, name: str, default: Any = False) -> Any:
        """A value that the batch has once."""
        return flag(self.data, name, default)

    @functools.cached_property
    def _lens(self) -> tuple[list[int], list[int]]:
        """Lengths of prompts and responses, counted as verl does (verl/workers/utils/padding.py). Both are jagged (v1
        trainer), or prompts are padded left and responses right (left_right_2_no_padding of the legacy one)."""
        prompts, responses = self.data["prompts"], self.data["responses"]
        if prompts.is_nested:
            return prompts.offsets().diff().tolist(), responses.offsets().diff().tolist()
        mask = self.data["attention_mask"].bool().split([prompts.shape[1], responses.shape[1]], dim=1)
        return mask[0].sum(1).tolist(), mask[1].sum(1).tolist()

    def at_suffixes(self, name: str) -> torch.Tensor:
        """Returns a field of the responses (jagged, or padded right) as [N] in host memory. A token's value stands at
        the token before it."""
        values = [row[:n].cpu() for row, n in zip(self.data[name].unbind(), self.response_lens, strict=True)]
        flat = torch.zeros(self.offsets[-1], dtype=values[0].dtype)
        for start, prompt_len, row in zip(self.offsets[:-1], self.prompt_lens, values, strict=True):
            flat[start + prompt_len - 1 :][: len(row)] = row
        return flat

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens of each row's prompt."""
        return self._lens[0]

    @property
    def response_lens(self) -> list[int]:
        """Tokens of each row's response."""
        return self._lens[1]

    @functools.cached_property
    def offsets(self) -> list[int]:
        """First token of each row in the batch's flat values, and the end."""
        offsets: list[int] = self.data["input_ids"].offsets().tolist()
        return offsets

    @functools.cached_property
    def prompts(self) -> list[torch.Tensor]:
        """Tokens of each row's prompt, int64."""
        return [row[:n] for row, n in zip(self.data["input_ids"].unbind(), self.prompt_lens, strict=True)]

    @functools.cached_property
    def expert_routes(self) -> torch.Tensor | None:
        """[N, layers, k] int16 in host memory: the experts that the batch's tokens are to go to; None: it says none.

        Raises:
            ValueError: they are not those of the rows' tokens.
        """
        if ROUTES not in self.data.keys():
            return None
        routes: Any = self.data[ROUTES]
        if routes.offsets().tolist() != self.offsets:
            raise ValueError(f"{ROUTES} has other lengths than the rows: it has to say where each of their tokens goes")
        values: torch.Tensor = routes.values().to("cpu", torch.int16)
        return values

    @property
    def pixels(self) -> Sequence[Any]:
        """What each row shows, a dict; None or an empty one for text."""
        return tu.get(self.data, PIXEL_INPUTS, [None] * len(self))

    @functools.cached_property
    def keys(self) -> Sequence[bytes]:
        """Key of each row, equal for the rows of one prompt: a digest of the uid, the pixels, the prompt's tokens and
        their positions. The uid alone does not say which rows share a prompt: the turns of a session have one, too."""
        if self._given_keys is not None:
            return self._given_keys
        # A row whose pixels another row carries is named by that row, as that row itself is.
        carriers = [(row or {}).get(CARRIES) or (row or {}).get(CARRIED_BY) for row in self.pixels]
        shown = [c.encode() if c else digest for c, digest in zip(carriers, pixel_digests(self.pixels), strict=True)]
        uids, positions = tu.get(self.data, "uid", [""] * len(self)), self.data["position_ids"].unbind()
        keys = []
        for uid, pixels, prompt, position in zip(uids, shown, self.prompts, positions, strict=True):
            digest = hashlib.blake2b(digest_size=KEY_BYTES)
            parts = (x.cpu().contiguous().numpy().tobytes() for x in (prompt, position[..., : len(prompt)]))
            for part in (str(uid).encode(), pixels, *parts):
                digest.update(len(part).to_bytes(8, "little") + part)
            keys.append(digest.digest())
        return keys

    @functools.cached_property
    def uids(self) -> list[str]:
        """verl's prompt ids; in a batch without them, the rows' keys stand for them."""
        return [str(uid) for uid in (tu.get(self.data, "uid") if "uid" in self.data.keys() else self.keys)]

    @functools.cached_property
    def padding(self) -> set[int]:
        """Numbers of the rows that verl's v1 trainer adds as padding, which no loss reads."""
        return {number for number, uid in enumerate(tu.get(self.data, "uid", ())) if is_padding(str(uid))}

    def without_padding(self, groups: Sequence[Group]) -> list[Group]:
        """Groups of these rows that have no row of padding."""
        return [group for group in groups if self.padding.isdisjoint(group.rows)]

    @property
    def num_real(self) -> int:
        """Rows that are not padding."""
        return len(self) - len(self.padding)

    @functools.cached_property
    def single_rows(self) -> list[Group]:
        """Each row as a group of its own."""
        lens = zip(self.prompt_lens, self.response_lens, strict=True)
        return [Group.of_prompt((number,), prompt_len - 1, (n,)) for number, (prompt_len, n) in enumerate(lens)]

    def budget(self, groups: Sequence[Group]) -> int:
        """Returns how many tokens one pass over `groups` has at most, on all ranks that share it. It is verl's token
        budget, or what verl's micro-batch of the longest rows would hold."""
        if self.flag("use_dynamic_bsz", True):
            return int(self.data["max_token_len_per_gpu"]) * int(self.flag("sp_size", 1))
        longest = max((end + 1 for group in groups for end in group.row_ends), default=1)
        return int(self.data["micro_batch_size_per_gpu"]) * longest


def is_padding(uid: str) -> bool:
    """Whether verl's v1 trainer made this uid for a row of padding. It is the only mark of padding that reaches workers
    (upsample_batch_to_divisible_size, verl/trainer/ppo/padding_utils.py)."""
    return re.fullmatch("pad[0-9a-f]{32}", uid) is not None
