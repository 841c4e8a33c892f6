"""Pixels on their way from rollout to actor: one row of a prompt's rollouts carries them, the others name that row.

verl's agent loop puts a copy of the pixels with every rollout into TransferQueue. Its storage, every actor worker and
all that lies between then hold G copies (verl/trainer/ppo/v1/agent_loop_tq.py). `prefix_sync` sets
`actor_rollout_ref.rollout.agent.agent_loop_manager_class` to `SharedPixelsManager` where our engine is the only reader;
`receive_pixels` gives the rows their pixels back, in the engine.

    rollout   row a_0_0: {"pixel_values": ..., CARRIES: "a_0_0"}    row a_1_0: {CARRIED_BY: "a_0_0"}
    actor     both rows: {"pixel_values": ...}, one tensor
"""

import itertools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import ray
import transfer_queue as tq
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_prefix.models.vision import PIXEL_NAMES, Row, share_pixels

# In `multi_modal_inputs`: this row's own key in TransferQueue, beside its pixels; the key of the row that has them.
CARRIES, CARRIED_BY = "verl_prefix.carries", "verl_prefix.carried_by"
PARTITION = "train"

# The order of verl's calls that this relies on (verl/experimental/agent_loop/agent_loop.py, ppo/v1/agent_loop_tq.py):
#
#     _run_prompt(prompt)                      a task for every prompt
#         _agent_loop_postprocess(output)      a task for every session
#             _compute_score()                 computes positions of its own, of no row that is put
#             _compute_position_ids(inputs)    for its rows 0, 1, ... in turn; the last to read a row's pixels
#             kv_batch_put(rows)
#
# In the asyncio task that runs a prompt: digests of pixels -> keys of the rows that carry them. In the task of a
# session within it: keys of the rows that it has yet to put.
_carriers: ContextVar[dict[bytes, str]] = ContextVar("carriers")
_keys: ContextVar[Iterator[str]] = ContextVar("keys")


class SharedPixelsWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's agent loop worker; rows of one prompt with the same pixels, bit by bit, put them once."""

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        _carriers.set({})
        await super()._run_prompt(prompt, *args, **kwargs)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        session = f"{kwargs['uid']}_{kwargs['session_id']}_"
        _keys.set(f"{session}{index}" for index in itertools.count())
        try:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
        except BaseException:
            # Its rows are not put, and verl trains on the other sessions'. None of them has named these rows: verl
            # awaits nothing between their pixels and the put.
            carriers = _carriers.get({})
            for digest in [digest for digest, key in carriers.items() if key.startswith(session)]:
                del carriers[digest]
            raise

    async def _compute_score(self, *args: Any, **kwargs: Any) -> None:
        """As verl's. It makes pixels and positions of its own, for the reward; none of them take a key."""
        keys = _keys.get(iter(()))
        _keys.set(iter(()))
        await super()._compute_score(*args, **kwargs)
        _keys.set(keys)

    def _compute_position_ids(self, input_ids: Any, attention_mask: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        """As verl's, which is the last to read a row's pixels. The row is put with what is then left in `inputs`."""
        positions = super()._compute_position_ids(input_ids, attention_mask, inputs, *rest)
        key = next(_keys.get(iter(())), None)
        if key is not None and (digest := share_pixels([inputs])[0]):
            carrier = _carriers.get({}).setdefault(digest, key)
            inputs[CARRIES if carrier == key else CARRIED_BY] = carrier
            if carrier != key:
                for name in PIXEL_NAMES:
                    inputs.pop(name, None)
        return positions


class SharedPixelsManager(AgentLoopManagerTQ):
    """verl's agent loop manager with `SharedPixelsWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SharedPixelsWorker)


def receive_pixels(rows: Sequence[Row]) -> None:
    """Gives every row its pixels, shared with the row that carried them; changes the rows' dicts.

    A carrier on another rank or in another mini-batch is fetched from TransferQueue.

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
            carrier = carried[row.pop(CARRIED_BY)]
            row.update((name, carrier[name]) for name in PIXEL_NAMES if name in carrier)


def _fetch(keys: list[str]) -> list[dict[str, Any]]:
    try:
        answer = tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=["multi_modal_inputs"])
        rows = list(answer["multi_modal_inputs"])
    except ValueError:  # none of the keys is there; where only some are missing, the others come back
        rows = []
    if len(rows) != len(keys):
        raise RuntimeError(
            f"of the rows {', '.join(keys)}, which carry the pixels of others, TransferQueue has {len(rows)}; set "
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl.trainer.ppo.v1.AgentLoopManagerTQ, with "
            "which every row carries its own"
        )
    return rows
