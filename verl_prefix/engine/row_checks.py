"""Checks of rows that the stock path would compute otherwise than the shared path, without an error."""

from typing import Any

import torch
from verl.utils import tensordict_utils as tu

from verl_prefix.engine.rows import BatchRows
from verl_prefix.models import vision


def check_positions(rows: BatchRows, row_begins: str) -> None:
    """Checks that the stock path would take the rows apart as we do. Where it packs rows, it finds each row's begin by
    position ids, or numbers tokens by itself. Of the four axes of these ids (text, time, height, width) the first
    decides; the others jump at images.

    Args:
        rows: those that verl handed over, which the stock path would pack together.
        row_begins: of `backend.StockFacts`.

    Raises:
        ValueError: naming row and uid.
    """
    if row_begins == "jumps" and not rows.flag("use_remove_padding", True):
        return  # the stock path pads rows, and no varlen kernel looks for bounds in their positions
    lens = rows.data["input_ids"].offsets().diff().cpu()
    positions = rows.data["position_ids"].values().cpu()
    positions = positions[0] if positions.dim() == 2 else positions
    row_of_token = torch.arange(len(lens)).repeat_interleave(lens)
    place = torch.arange(len(row_of_token)) - (lens.cumsum(0) - lens)[row_of_token]
    if row_begins == "zeros":
        is_wrong = (positions == 0) != (place == 0)
    elif row_begins == "jumps":
        is_wrong = (positions.diff(prepend=positions[:1]) != 1) & (place != 0)
        # Rows 0 1 2 and 3 4 would be one row of five, if one stood before the other in a pack, as any two may.
        last_positions = positions[lens.cumsum(0) - 1]
        is_wrong |= torch.isin(positions - 1, last_positions) & (place == 0)
    else:
        is_wrong = positions != place
    if not is_wrong.any():
        return
    first = int(is_wrong.nonzero()[0])
    number, at = int(row_of_token[first]), int(place[first])
    near = ", ".join(map(str, positions[row_of_token == number][max(at - 2, 0) : at + 3].tolist()))
    name = _name_of(rows, number, "that verl handed over")
    raise ValueError(
        f"{name}: position_ids are {near} around its token {at}, which verl's own path takes for those of other rows, "
        "or does not read; number the tokens of each row 0, 1, 2, ..."
    )


def check_pixels(rows: BatchRows, config: Any) -> None:
    """Checks that a row's pixels belong to its prompt.

    Args:
        config: the model's.

    Raises:
        ValueError: naming row and uid.
    """
    if vision.is_vision_config(config):
        for number, (prompt, pixels) in enumerate(zip(rows.prompts, rows.pixels, strict=True)):
            name = _name_of(rows, number, "that this rank computes")
            vision.check_pixels(pixels, prompt[:-1].cpu(), config, name)


def _name_of(rows: BatchRows, number: int, which: str) -> str:
    uids = tu.get(rows.data, "uid", [None] * len(rows))
    return f"row {number} of those {which} (uid {uids[number]})"
