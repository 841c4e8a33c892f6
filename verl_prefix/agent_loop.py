"""Pixels on their way from rollout to actor: one row of a prompt's rollouts carries them, the others name that row.

verl's agent loop puts a copy of the pixels of every rollout into TransferQueue, whose storage, every actor worker and
all that lies between then hold G copies (verl/trainer/ppo/v1/agent_loop_tq.py). `prefix_sync` sets
`actor_rollout_ref.rollout.agent.agent_loop_manager_class` to `SharedPixelsManager` where our engine is the only reader.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import ray
import transfer_queue as tq
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_prefix.vision import Row, share_pixels

MANAGER = f"{__name__}.SharedPixelsManager"
# In `multi_modal_inputs`: this row's own key in TransferQueue, beside its pixels; the key of the row that has them.
CARRIES, CARRIED_BY = "verl_prefix.carries", "verl_prefix.carried_by"
PARTITION = "train"

# Of the asyncio task that runs a prompt: digests of pixels, and the keys of the rows that carry them. Of a session's
# task within it: the keys of the rows that it still puts.
_carriers: ContextVar[dict[bytes, str]] = ContextVar("carriers")
_keys: ContextVar[Iterator[str]] = ContextVar("keys")


class SharedPixelsWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's agent loop worker; rows of one prompt with the same pixels, bit by bit, put them once."""

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        _carriers.set({})
        await super()._run_prompt(prompt, *args, **kwargs)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        _keys.set(f"{kwargs['uid']}_{kwargs['session_id']}_{index}" for index in itertools.count())
        await super()._agent_loop_postprocess(output, validate, **kwargs)

    async def _compute_score(self, *args: Any, **kwargs: Any) -> None:
        """verl's, which makes pixels and positions of its own, for the reward."""
        keys = _keys.get()
        _keys.set(iter(()))
        await super()._compute_score(*args, **kwargs)
        _keys.set(keys)

    def _compute_position_ids(self, input_ids: Any, attention_mask: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        """verl's; it reads a row's pixels last, and the row is put with what is left in `inputs`."""
        positions = super()._compute_position_ids(input_ids, attention_mask, inputs, *rest)
        key = next(_keys.get(), None)
        digest = share_pixels([inputs])[0]
        if key is not None and digest:
            carrier = _carriers.get().setdefault(digest, key)
            if carrier != key:
                inputs.clear()
            inputs[CARRIES if carrier == key else CARRIED_BY] = carrier
        return positions


class SharedPixelsManager(AgentLoopManagerTQ):
    """verl's agent loop manager with `SharedPixelsWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SharedPixelsWorker)


def receive_pixels(rows: Sequence[Row]) -> None:
    """Gives every row its pixels, shared with the row that carried them; changes the rows' dicts.

    A carrier on another rank or in another mini-batch is asked for in TransferQueue.

    Args:
        rows: verl's `multi_modal_inputs`: one dict per row, empty or None for text alone.

    Raises:
        RuntimeError: TransferQueue has no such row any more.
    """
    carried = {row.pop(CARRIES): row for row in rows if row and CARRIES in row}
    wanted = {row[CARRIED_BY] for row in rows if row and CARRIED_BY in row}
    if missing := sorted(wanted - set(carried)):
        carried |= zip(missing, _fetch(missing), strict=True)
    for row in rows:
        if row and CARRIED_BY in row:
            row.update(carried[row.pop(CARRIED_BY)])


def _fetch(keys: list[str]) -> list[dict[str, Any]]:
    try:
        found = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["multi_modal_inputs"])
    except ValueError as error:
        raise RuntimeError(
            f"the rows {', '.join(keys)} carry the pixels of others and are gone from TransferQueue ({error}); set "
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl.trainer.ppo.v1.AgentLoopManagerTQ, with "
            "which every row carries its own"
        ) from error
    rows = [dict(row) for row in found["multi_modal_inputs"]]
    for row in rows:
        del row[CARRIES]
    return rows
