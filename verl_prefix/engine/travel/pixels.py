"""Pixels of rows on their way. They are large, so that rows leave them out where another row brings the same.

    way                          who leaves pixels out                                      who puts them back
    from the rollout to a rank   all rows of a prompt but one (`trainer.shared_pixels`)     `receive_pixels`
    from rank to rank            a row, where a row that stays at its home has the pixels   `put_back_pixels`
                                 (`leave_out_pixels`)

On a rank the rows with equal pixels hold one tensor of them (`models.vision.share_pixels`).
"""

from collections.abc import Hashable, Sequence
from typing import Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_prefix.engine.fields import PIXEL_INPUTS
from verl_prefix.engine.travel.row_bytes import TravellingRow
from verl_prefix.models.vision import CARRIED_BY, CARRIES, PIXEL_NAMES, RowPixels

PARTITION = "train"


def receive_pixels(data: TensorDict) -> TensorDict:
    """Returns the batch, in which every row has its pixels. No dict of `data` changes: an update of several epochs asks
    for its rows again.

    Raises:
        RuntimeError: as `with_carried_pixels`.
    """
    rows: list[RowPixels] = tu.get(data, PIXEL_INPUTS, [])
    if not any(row and (CARRIES in row or CARRIED_BY in row) for row in rows):
        return data
    data = data.copy()
    tu.assign_non_tensor_stack(data, PIXEL_INPUTS, with_carried_pixels(rows))
    return data


def with_carried_pixels(rows: Sequence[RowPixels]) -> list[RowPixels]:
    """Returns rows with their pixels, which are the tensors of the rows that carry them. A carrier on another rank, or
    in another mini-batch, is fetched from TransferQueue.

    Args:
        rows: verl's `multi_modal_inputs`: one dict per row, empty or None for text alone.

    Raises:
        RuntimeError: TransferQueue has no such row any more.
    """
    carried = {row[CARRIES]: row for row in rows if row and CARRIES in row}
    wanted = {row[CARRIED_BY] for row in rows if row and CARRIED_BY in row}
    if missing := sorted(wanted - set(carried)):
        carried |= {row[CARRIES]: row for row in _fetch(missing)}
    whole_rows: list[RowPixels] = []
    for row in rows:
        if row:
            carrier = carried[row[CARRIED_BY]] if CARRIED_BY in row else {}
            row = {name: x for name, x in row.items() if name not in (CARRIES, CARRIED_BY)}
            row |= {name: carrier[name] for name in PIXEL_NAMES if name in carrier}
        whole_rows.append(row)
    return whole_rows


def _fetch(keys: list[str]) -> list[dict[str, Any]]:
    import transfer_queue as tq  # here: text does without

    rows, reason = [], None
    try:
        answer = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=[PIXEL_INPUTS])
        rows = list(answer[PIXEL_INPUTS])
    except ValueError as error:  # as where none of the keys is there; where only some are missing, the others come back
        reason = error
    if len(rows) != len(keys):
        raise RuntimeError(
            f"of the rows {', '.join(keys)}, which carry the pixels of others, TransferQueue has {len(rows)}; set "
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl.trainer.ppo.v1.AgentLoopManagerTQ, with "
            "which every row carries its own"
        ) from reason
    return rows


def leave_out_pixels(row: TravellingRow) -> TravellingRow:
    """Returns a row without its pixels."""
    inputs = row.others.get(PIXEL_INPUTS) or {}
    inputs = {name: x for name, x in inputs.items() if name not in PIXEL_NAMES}
    return row._replace(others=row.others | {PIXEL_INPUTS: inputs})


def put_back_pixels(rows: Sequence[TravellingRow], keys: Sequence[Hashable]) -> list[TravellingRow]:
    """Returns the rows, each with the pixels that a row of its group has here. No dict of the batch changes: an update
    of several epochs asks for its rows again.

    Args:
        keys: of each row: equal in a group.
    """
    inputs_of_rows = [dict(row.others[PIXEL_INPUTS] or {}) for row in rows]
    pixels_of_key = {}
    for key, inputs in zip(keys, inputs_of_rows, strict=True):
        if pixels := {name: x for name, x in inputs.items() if name in PIXEL_NAMES}:
            pixels_of_key[key] = pixels
    whole_rows = []
    for key, row, inputs in zip(keys, rows, inputs_of_rows, strict=True):
        if key in pixels_of_key:  # also where pixels were all that a row had, before they stayed behind
            inputs = {name: x for name, x in inputs.items() if name != CARRIED_BY} | pixels_of_key[key]
        whole_rows.append(row._replace(others=row.others | {PIXEL_INPUTS: inputs}))
    return whole_rows
