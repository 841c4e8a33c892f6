"""Rows of verl's batch: how long they are, which belong together, and the groups that they make."""

import hashlib
import re
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.config import is_varlen
from verl_prefix.core.groups import Group, group_by_key
from verl_prefix.core.trees import cuts_at, group_trees, mix, mix_rows
from verl_prefix.engine.carried_pixels import CARRIED_BY, CARRIES
from verl_prefix.models.messages import message_ends
from verl_prefix.models.vision import check_pixels, is_vision_config, share_pixels, shown_lens, tree_tokens

PIXELS = "multi_modal_inputs"


class Trees(NamedTuple):
    """What rows share besides whole prompts.

    Args:
        over: `PrefixConfig.trees`. ends: tokens that end a message (`messages.end_tokens`). config: the model's, which
            names visual tokens. seen: a batch before had turns. Then later ones are cut, too, so that log-probs and
            updates, which hold different rows, are cut alike.
    """

    over: str = "off"
    ends: frozenset[int] = frozenset()
    config: Any = None
    seen: bool = False

    def are_cut(self, uids: Sequence[Hashable], keys: Sequence[Hashable]) -> bool:
        """Whether rows are cut at the ends of messages: under `batch`, and under `uid` where they are turns, that is,
        where a uid has several prompts."""
        are_turns = self.seen or len({*zip(uids, keys, strict=True)}) > len({*uids})
        return self.over == "batch" or (self.over == "uid" and are_turns)


NO_TREES = Trees()


def check_rows(data: TensorDict, config: Any) -> None:
    """Checks that verl's own path computes these rows whole, and that their pixels are those of their prompts.

    That path reads the bounds of packed rows from position ids. By flash attention a row begins wherever they are 0,
    else wherever they do not go up by 1. Of four axes the first decides, that of text; the others jump at images.

    Args:
        config: the model's.

    Raises:
        ValueError: naming row and uid.
    """
    names = [f"row {row} (uid {uid})" for row, uid in enumerate(tu.get(data, "uid", [None] * len(data)))]
    lens, positions = data["input_ids"].offsets().diff().cpu(), data["position_ids"].values().cpu()
    positions = positions[0] if positions.dim() == 2 else positions
    of_row = torch.arange(len(lens)).repeat_interleave(lens)
    place = torch.arange(len(of_row)) - (lens.cumsum(0) - lens)[of_row]
    by_zeros = is_varlen(config.get_text_config()._attn_implementation)
    begins = positions == 0 if by_zeros else (place == 0) | (positions.diff(prepend=positions[:1]) != 1)
    wrong = (begins != (place == 0)).nonzero()[:, 0]
    if len(wrong) and (by_zeros or tu.get_non_tensor_data(data, "use_remove_padding", True)):
        row, at = int(of_row[wrong[0]]), int(place[wrong[0]])
        near = ", ".join(map(str, positions[of_row == row][max(at - 2, 0) : at + 3].tolist()))
        raise ValueError(
            f"{names[row]}: position_ids are {near} around its token {at}, where verl's own path would "
            f"{'begin another row' if at else 'see no row begin'}; number the tokens of each row 0, 1, 2, ..."
        )
    if is_vision_config(config):
        prompts = (row[: n - 1].cpu() for row, n in zip(data["input_ids"].unbind(), row_lens(data)[0], strict=True))
        pixels = tu.get(data, PIXELS, [None] * len(data))
        for name, prompt, shown in zip(names, prompts, pixels, strict=True):
            check_pixels(shown, prompt, config, name)


def row_lens(data: TensorDict) -> tuple[list[int], list[int]]:
    """Numbers of tokens of every row's prompt and response, counted as verl does (verl/workers/utils/padding.py): both
    are jagged (v1 trainer), or prompts padded left and responses right (left_right_2_no_padding of the legacy one)."""
    prompts, responses = data["prompts"], data["responses"]
    if prompts.is_nested:
        return prompts.offsets().diff().tolist(), responses.offsets().diff().tolist()
    mask = data["attention_mask"].bool().split([prompts.shape[1], responses.shape[1]], dim=1)
    return mask[0].sum(1).tolist(), mask[1].sum(1).tolist()


def row_keys(data: TensorDict) -> list[bytes]:
    """Digest of every row's uid, pixels, prompt tokens and their positions: rows with the same one belong together.
    Those that hold equal pixels then hold one tensor of them (`vision.share_pixels`)."""
    uids, pixels = tu.get(data, "uid", [""] * len(data)), tu.get(data, PIXELS, [None] * len(data))
    # A row whose pixels another row carries is named by that row, as that row itself is.
    carriers = [(row or {}).get(CARRIES) or (row or {}).get(CARRIED_BY) for row in pixels]
    shown = [c.encode() if c else digest for c, digest in zip(carriers, share_pixels(pixels), strict=True)]
    tokens = zip(row_lens(data)[0], data["input_ids"].unbind(), data["position_ids"].unbind(), strict=True)
    keys = []
    for uid, pixels_name, (prompt_len, *prompt) in zip(uids, shown, tokens, strict=True):
        key = hashlib.blake2b(digest_size=16)
        parts = (x[..., :prompt_len].cpu().contiguous().numpy().tobytes() for x in prompt)
        for part in (str(uid).encode(), pixels_name, *parts):
            key.update(len(part).to_bytes(8, "little") + part)
        keys.append(key.digest())
    return keys


def is_padding(uid: str) -> bool:
    """Whether a uid is one that verl's v1 trainer makes for rows of padding, its only mark that reaches workers
    (upsample_batch_to_divisible_size, verl/trainer/ppo/padding_utils.py)."""
    return re.fullmatch("pad[0-9a-f]{32}", uid) is not None


def padding_rows(data: TensorDict) -> set[int]:
    """Rows that verl's v1 trainer adds as padding, which no loss reads."""
    return {row for row, uid in enumerate(tu.get(data, "uid", ())) if is_padding(str(uid))}


def uids_of(data: TensorDict, keys: Sequence[Hashable]) -> list[str]:
    """verl's prompt ids; in a batch without them, the rows' keys stand for them."""
    return [str(uid) for uid in tu.get(data, "uid", keys)]


def group_rows(data: TensorDict, keys: Sequence[Hashable], trees: Trees, are_cut: bool) -> list[Group]:
    """Groups all rows that this rank computes: rows with the same key, or trees where rows `are_cut` at the ends of
    messages. The engine groups rows nowhere else.

    Args:
        data: the rows, wherever they came from. keys: theirs, by `row_keys` on the rank that they came from.

    Raises:
        ValueError: a row's prompt is empty, or not that of its group: it did not arrive as it left.
    """
    prompt_lens, response_lens = row_lens(data)
    prompts = [row[:n] for row, n in zip(data["input_ids"].unbind(), prompt_lens, strict=True)]
    groups = group_by_key(keys, prompt_lens, response_lens)
    for group in groups:
        if not all(torch.equal(prompts[row], prompts[group.rows[0]]) for row in group.rows):
            raise ValueError(f"rows {[*group.rows]} arrived as one group, and their prompts differ")
    if not are_cut:
        return groups
    tokens, offsets = _tree_tokens(data, keys, trees), data["input_ids"].offsets().tolist()
    return group_trees(tokens, offsets, prompt_lens, row_cuts(data, trees))


def row_cuts(data: TensorDict, trees: Trees) -> list[list[int]]:
    """Where each row is cut, by the ends of its messages: see `core.trees.cuts_at`."""
    prompt_lens, _ = row_lens(data)
    prompts = [row[:n] for row, n in zip(data["input_ids"].unbind(), prompt_lens, strict=True)]
    found = zip(message_ends(prompts, trees.ends), prompt_lens, shown_lens(prompts, trees.config), strict=True)
    return [cuts_at(ends, n, shown) for ends, n, shown in found]


def tokens_by_trees(
    data: TensorDict, keys: Sequence[Hashable], trees: Trees, groups: Sequence[Group]
) -> dict[str, float]:
    """Tokens that "stock" and each value of `prefix.trees` compute of these rows, without padding and as if every group
    were one pass. For single prompts with pixels `batch` is not counted; it gets the number of `uid`.

    Args:
        groups: of these rows, by `trees`.
    """
    uids, found, padding = uids_of(data, keys), {trees.over: groups}, padding_rows(data)
    are_turns = trees._replace(over="uid").are_cut(uids, keys)
    for over in ("off", "uid", "batch"):
        if over == "batch" and any(tu.get(data, PIXELS, ())) and not are_turns:
            found[over] = found["uid"]
        elif over not in found:
            other = trees._replace(over=over)
            found[over] = group_rows(data, keys, other, other.are_cut(uids, keys))
    real = {over: [group for group in some if padding.isdisjoint(group.rows)] for over, some in found.items()}
    computed = {over: float(sum(group.num_physical_tokens for group in some)) for over, some in real.items()}
    return computed | {"stock": float(sum(group.num_logical_tokens for group in real["off"]))}


def _tree_tokens(data: TensorDict, keys: Sequence[Hashable], trees: Trees) -> torch.Tensor:
    """[N] int64: the tokens, mixed with all else that must be equal where rows share: positions, pixels, temperature,
    and where `trees.over` is uid the uid."""
    offsets = data["input_ids"].offsets().tolist()
    ids, positions = (data[name].values().cpu() for name in ("input_ids", "position_ids"))
    if is_vision_config(trees.config):
        tokens = tree_tokens(ids, positions, offsets, tu.get(data, PIXELS, [None] * len(data)), trees.config)
    else:
        tokens = mix(ids) ^ positions
    temperature = torch.as_tensor(data["temperature"], dtype=torch.float32).cpu().expand(len(data)).contiguous()
    tokens = mix_rows(tokens, offsets, temperature.view(torch.int32).tolist())
    if trees.over == "uid":
        uids = uids_of(data, keys)
        numbers = {uid: number for number, uid in enumerate(dict.fromkeys(uids))}
        tokens = mix_rows(tokens, offsets, [numbers[uid] for uid in uids])
    return tokens
